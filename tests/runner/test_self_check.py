"""The self-check at load rejects a model whose logits on pages differ from those of the model alone."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hybridkv.errors import UnsupportedModelError
from hybridkv.runner import Engine, EngineOptions, LoadedModel, self_check
from hybridkv.runner.attention.caches import RowCache
from hybridkv.runner.probe import Forwards
from hybridkv.runner.states.continuation import difference
from hybridkv.runner.tiny import tiny_model

MEMORY = "4MiB"


@pytest.fixture(autouse=True)
def nothing_compared_yet() -> Iterator[None]:
    self_check._COMPARED.clear()
    yield
    self_check._COMPARED.clear()


def engine(model: PreTrainedModel, *, self_check: bool = True) -> Engine:
    return Engine(model, options=EngineOptions(self_check=self_check), memory=MEMORY, max_model_len=64)


def shifted(model: LlamaForCausalLM) -> None:
    """Every token sees a share of the one before it in the batch, cached or not."""

    def mix(_: object, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0] + 0.5 * args[0].roll(1, dims=1), *args[1:])

    model.model.layers[1].register_forward_pre_hook(mix)


def own_positions(model: LlamaForCausalLM) -> None:
    """Positions from the width of the input, not those that are handed over."""

    def count(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = args[0]
        return args, kwargs | {"position_ids": torch.arange(hidden.shape[1])[None]}

    model.model.rotary_emb.register_forward_pre_hook(count, with_kwargs=True)


def averaged(model: LlamaForCausalLM) -> None:
    """A layer that takes the mean of all tokens of its input off each."""
    model.model.layers[0].mlp.register_forward_hook(lambda _layer, _args, out: out - out.mean(dim=1, keepdim=True))


@pytest.mark.parametrize("break_it", [shifted, own_positions, averaged], ids=lambda one: one.__name__)
def test_self_check_rejects_layer_that_does_more_than_attend(break_it: Callable[[LlamaForCausalLM], None]) -> None:
    model = tiny_model("llama", 0)
    break_it(model)
    with pytest.raises(UnsupportedModelError, match=r"other logits on paged caches .* after token \d+ .*bound"):
        engine(model)
    assert model.config._attn_implementation != "hybridkv_gather"
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    engine(model, self_check=False).close()


def test_self_check_prompts_are_longer_than_the_choice_of_an_indexer(monkeypatch: pytest.MonkeyPatch) -> None:
    own = RowCache.update_indexer

    def of_other_tokens(cache: RowCache, keys: torch.Tensor, layer: int) -> torch.Tensor:
        return own(cache, keys, layer).roll(1, 1)

    model = tiny_model("deepseek_v32", 0, {"index_topk": 44})
    engine(model).close()
    self_check._COMPARED.clear()
    monkeypatch.setattr(RowCache, "update_indexer", of_other_tokens)
    with pytest.raises(UnsupportedModelError, match="other logits on paged caches"):
        engine(model)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2"])
def test_self_check_of_equal_logits_passes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hybridkv"), engine(tiny_model(name, 0)) as made:
        assert len(made.generate([[1, 2, 3]])[0].token_ids) > 0
    assert "would not show" not in caplog.text
    assert len(self_check._COMPARED) == 1


def test_self_check_runs_once_per_config_and_again_for_changed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = self_check.compare

    def counted(loaded: LoadedModel, plain: self_check.PlainResults, trial: self_check.Trial) -> self_check.Report:
        compared.append(loaded)
        return compare(loaded, plain, trial)

    monkeypatch.setattr(self_check, "compare", counted)
    for seed in (0, 1):
        engine(tiny_model("llama", seed)).close()
    assert len(compared) == 1
    engine(tiny_model("mistral", 0)).close()
    assert len(compared) == 2
    broken = tiny_model("llama", 0)
    shifted(broken)
    with pytest.raises(UnsupportedModelError):
        engine(broken)


def counts_behind_its_cache(model: LlamaForCausalLM) -> None:
    """Positions from one length of the cache, which a step of several requests does not have."""

    def count(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        past, tokens = kwargs.get("past_key_values"), kwargs["input_ids"].shape[1]
        before = 0 if past is None else int(past.get_seq_length())
        return args, kwargs | {"position_ids": (torch.arange(tokens) + before)[None]}

    model.model.register_forward_pre_hook(count, with_kwargs=True)


def test_self_check_that_falls_back_to_single_rows_logs_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, alone, plain = tiny_model("llama", 0), list[Sequence[int]](), self_check._plain
    counts_behind_its_cache(model)

    def counted(loaded: LoadedModel, prompt: Sequence[int]) -> torch.Tensor:
        alone.append(prompt)
        return plain(loaded, prompt)

    monkeypatch.setattr(self_check, "_plain", counted)
    with caplog.at_level(logging.INFO, "hybridkv"), engine(model) as made:
        assert made.runner.forwards is Forwards.BY_ROW
    assert "in a forward of its own (together: " in caplog.text
    assert len(alone) == 4


def test_self_check_of_nan_logits_fails() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert difference(nan, torch.ones(2)) == difference(torch.ones(2), nan) == float("inf")
    assert difference(torch.ones(2), torch.full((2,), 2.0)) == 0.5


def test_self_check_with_insensitive_weights_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=0,
        )
    ).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    with caplog.at_level(logging.INFO, "hybridkv"):
        engine(model).close()
    assert "a wrong context would not show in its logits" in caplog.text
    assert not self_check._COMPARED


def test_self_check_names_a_model_that_computes_nan_without_pages() -> None:
    model = tiny_model("llama", 0)
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"computes NaN in plain transformers.*its weights in .* float32"):
        engine(model)
