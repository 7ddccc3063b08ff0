"""Tiny models: weights by seed, sizes, and the query scale of Llama 4."""

import pytest
import torch

from hybridkv.errors import ConfigError
from hybridkv.runner import TINY_COMPRESSED, TINY_ENCODER_DECODERS, TINY_MODELS, tiny_model

torch.set_num_threads(1)

TOLERANCE = 2e-4
PROMPT = 60


@pytest.mark.parametrize("name", [*TINY_MODELS, *TINY_COMPRESSED, *TINY_ENCODER_DECODERS])
def test_tiny_weights_depend_on_the_seed_only(name: str) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    one = tiny_model(name, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    same, other = tiny_model(name, 1), tiny_model(name, 2)
    assert [*one.state_dict()] == [*same.state_dict()]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), same.buffers(), strict=True))
    assert all(parameter.dtype == torch.float32 for parameter in one.parameters())
    changed = [not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2


def test_tiny_models_have_26_architectures() -> None:
    names = (*TINY_MODELS, *TINY_COMPRESSED)
    assert len({type(tiny_model(name)).__name__ for name in names}) == len(names) == 26
    with pytest.raises(ConfigError, match="unknown tiny model 'rwkv': use tiny:llama, tiny:qwen2, tiny:mistral"):
        tiny_model("rwkv")


def test_tiny_model_of_another_size_has_weights_of_equal_scale() -> None:
    wide = tiny_model("llama", 1, {"head_dim": 32})
    queries, usual = (one.model.layers[0].self_attn.q_proj.weight.detach() for one in (wide, tiny_model("llama", 1)))
    assert (queries.shape, usual.shape) == ((4 * 32, 64), (4 * 16, 64))
    assert float(queries.std()) == pytest.approx(float(usual.std()), rel=0.05)
    assert torch.equal(wide.lm_head.weight, tiny_model("llama", 1, {"head_dim": 32}).lm_head.weight)
    with pytest.raises(ConfigError, match="the config of tiny:llama has no field 'head_size': leave it out"):
        tiny_model("llama", fields={"head_size": 32})


def test_tiny_llama4_scales_the_queries_of_short_requests() -> None:
    scaled, plain = tiny_model("llama4"), tiny_model("llama4", fields={"attn_temperature_tuning": False})
    tokens = torch.randint(32, 127, (1, PROMPT), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        moves = (scaled(tokens).logits - plain(tokens).logits).abs().amax(dim=2)[0]
    assert moves[:15].max() == 0
    assert moves[15:].min() > 10 * TOLERANCE
