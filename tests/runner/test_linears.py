"""Linear layers that are padded with rows of zeros: the layers, the row counts, and unchanged outputs."""

from __future__ import annotations

import pytest
import torch

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, runner, wrap
from hybridkv.runner.runner import PaddedLinear, first_slower, padded_linears
from hybridkv.runner.tiny import tiny_model


@pytest.mark.parametrize(
    ("took", "first"),
    [
        ([1.0] * 16, 16),  # nothing to gain
        ([1.0] * 9 + [2.0] * 6 + [1.0], 10),
        ([2.0] * 15 + [1.0], 1),
        ([3.0, 1.0, 3.0, 1.0], 3),  # two rows are as fast as four: one row alone is no reason
        ([1.0, 1.05, 1.0], 3),  # a twentieth is noise
    ],
)
def test_padding_starts_where_all_larger_sizes_are_slower(took: list[float], first: int) -> None:
    """Slow sizes below the start do not matter."""
    assert first_slower(took) == first


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every large product, with padding from 10 rows on."""
    rows = list[int]()
    linear = torch.nn.functional.linear

    def noted(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.numel() >= 1 << 19:
            rows.append(hidden.numel() // hidden.shape[-1])
        return linear(hidden, weight, bias)

    monkeypatch.setattr(runner, "first_padded", lambda _threads: 10)
    monkeypatch.setattr("torch.nn.functional.linear", noted)
    return rows


@pytest.mark.parametrize("shape", [(1, 12, 1024), (12, 1024), (3, 4, 1024)])
def test_padded_linear_layer_has_the_plain_output(shape: tuple[int, ...], counted: list[int]) -> None:
    """The output has the rows and the shape of the input."""
    module = torch.nn.Linear(1024, 512)
    hidden = torch.randn(shape)
    own = module(hidden)
    (padded,) = padded_linears(module)
    padded.install()
    torch.testing.assert_close(module(hidden), own)
    assert counted[-1] == 16
    fewer = hidden.flatten(0, -2)[:9]
    assert torch.equal(module(fewer), torch.nn.functional.linear(fewer, module.weight, module.bias))
    assert counted[-2:] == [9, 9]
    padded.remove()
    assert "forward" not in vars(module)


@pytest.mark.usefixtures("counted")
def test_only_large_plain_float32_layers_are_padded() -> None:
    """Small ones, other types, other dtypes and replaced forwards stay as they are."""
    changed = torch.nn.Linear(1024, 512)
    changed.forward = changed.forward  # type: ignore[method-assign]

    class Other(torch.nn.Linear):
        """Somebody's own."""

    model = torch.nn.ModuleList(
        [torch.nn.Linear(64, 64), torch.nn.Linear(1024, 512).bfloat16(), Other(1024, 512), changed]
    )
    assert padded_linears(model) == []
    assert len(padded_linears(torch.nn.Linear(1024, 512))) == 1


def test_engine_step_of_twelve_requests_multiplies_sixteen_rows(counted: list[int]) -> None:
    """Its tokens are those of plain generation; a closed engine's model multiplies what it is given."""
    loaded = wrap(tiny_model("llama", fields={"intermediate_size": 8192}))
    prompts = [[1 + at, 5, 9 + at] for at in range(12)]
    with Engine(loaded) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    assert 16 in counted
    assert 12 not in counted
    counted.clear()
    for prompt, one in zip(prompts, done, strict=True):
        plain = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert plain[0, 3:].tolist() == list(one.token_ids)
    assert not any(isinstance(vars(one).get("forward"), PaddedLinear) for one in loaded.model.modules())
