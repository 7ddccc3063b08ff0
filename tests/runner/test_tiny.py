"""Tiny models in transformers itself: decoding with a cache is a forward without one, and what is cached matters."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hybridkv.errors import ConfigError
from hybridkv.runner import TINY_ENCODER_DECODERS, TINY_MODELS, tiny_model
from hybridkv.runner.model_call import ModelCall

torch.set_num_threads(1)

TOLERANCE = 2e-4
PROMPT, FORCED, BLOCK = 60, 20, 16

KINDS: dict[str, set[str]] = {
    "llama": {"full"},
    "qwen2": {"full"},
    "mistral": {"window"},
    "gemma2": {"full", "window"},
    "gemma3": {"full", "window"},
    "gpt_oss": {"full", "window"},
    "llama4": {"full", "window"},
    "deepseek_v2": {"full"},
    "deepseek_v3": {"full"},
    "mamba": {"conv", "recurrent"},
    "falcon_mamba": {"conv", "recurrent"},
    "mamba2": {"conv", "recurrent"},
    "lfm2": {"full", "conv"},
}
"""What is cached; of every other model all but windows. transformers keeps a chunk as a window."""
HYBRID = {"full", "conv", "recurrent"}
STATES = ("conv", "recurrent")


def kinds(name: str) -> set[str]:
    return KINDS.get(name, HYBRID)


@cache
def model_and_tokens(name: str) -> tuple[PreTrainedModel, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return tiny_model(name), torch.randint(32, 127, (1, PROMPT + FORCED), generator=generator)


def extend(model: PreTrainedModel, tokens: torch.Tensor, cached: DynamicCache, start: int) -> torch.Tensor:
    """Logits [rows, tokens, vocabulary] of ``tokens`` behind what is cached."""
    positions = torch.arange(start, start + tokens.shape[1])[None].expand(tokens.shape)
    arguments = ModelCall(model).arguments(cached, positions)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=True, **arguments).logits
    return logits


def prefilled(name: str, length: int, rows: int) -> DynamicCache:
    """The cache of as many equal rows."""
    model, tokens = model_and_tokens(name)
    cached = DynamicCache(config=model.config)
    extend(model, tokens[:, :length].expand(rows, -1), cached, 0)
    return cached


def moved(name: str, cached: DynamicCache, rows: int) -> torch.Tensor:
    """[rows, FORCED]: how far logits differ from those of one forward without a cache, as a share of their range."""
    model, tokens = model_and_tokens(name)
    reference = model(input_ids=tokens, use_cache=False).logits[:, PROMPT:]
    forced = [
        extend(model, tokens[:, at : at + 1].expand(rows, -1), cached, at) for at in range(PROMPT, PROMPT + FORCED)
    ]
    moves: torch.Tensor = (torch.cat(forced, dim=1) - reference).abs().amax(dim=2) / (reference.max() - reference.min())
    return moves


def held(cached: DynamicCache) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Kind and tensors [rows, ...] of everything that is cached, layer by layer."""
    for layer in cached.layers:
        if getattr(layer, "keys", None) is not None:
            yield ("window" if layer.is_sliding else "full"), [layer.keys, layer.values]
        for kind in ("conv", "recurrent"):
            states = [one for one in getattr(layer, f"{kind}_states", {}).values() if one is not None]
            if states:
                yield kind, states


@pytest.mark.parametrize("name", TINY_MODELS)
def test_decoding_with_a_cache_is_one_forward_without_and_damage_moves_it(name: str) -> None:
    # one row is left alone; the others lose the oldest block of keys and values, or states, of one kind: in all layers
    # that have it, in the first or in the last of them
    with torch.inference_mode():
        layers = [kind for kind, _ in held(prefilled(name, PROMPT, 1))]
        assert set(layers) == kinds(name)
        damages: list[list[int]] = [[]]
        for kind in sorted(kinds(name)):
            mine = [at for at, one in enumerate(layers) if one == kind]
            assert len(mine) >= (2 if kind in STATES else 1)
            damages += [mine, mine[:1], mine[-1:]]
        cached = prefilled(name, PROMPT, len(damages))
        for at, (kind, tensors) in enumerate(held(cached)):
            for row in (row for row, damaged in enumerate(damages) if at in damaged):
                for tensor in tensors:
                    (tensor[row] if kind in STATES else tensor[row, :, :BLOCK]).zero_()
        moves = moved(name, cached, len(damages))
    largest = moves.amax(dim=1).tolist()
    assert largest[0] <= TOLERANCE
    assert min(largest[1:]) > 10 * TOLERANCE, list(zip(damages, largest, strict=True))
    if "recurrent" in kinds(name):  # what was lost is still missed by the last token
        everywhere = [at for at, one in enumerate(layers) if one == "recurrent"]
        assert moves[damages.index(everywhere), -1] > 10 * TOLERANCE


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if "conv" in kinds(name)])
def test_the_state_of_a_block_earlier_moves_the_logits(name: str) -> None:
    with torch.inference_mode():
        cached, earlier = prefilled(name, PROMPT, 1), prefilled(name, PROMPT - BLOCK, 1)
        for (kind, tensors), (_, others) in zip(held(cached), held(earlier), strict=True):
            for tensor, other in zip(tensors, others, strict=True) if kind in STATES else []:
                tensor.copy_(other)
        assert moved(name, cached, 1).max() > 10 * TOLERANCE


@pytest.mark.parametrize("name", [*TINY_MODELS, *TINY_ENCODER_DECODERS])
def test_weights_are_a_function_of_the_seed(name: str) -> None:
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


def test_there_are_24_models_of_24_architectures() -> None:
    built = {type(model_and_tokens(name)[0]).__name__ for name in TINY_MODELS}
    assert len(built) == len(TINY_MODELS) == 24
    with pytest.raises(ConfigError, match="unknown tiny model 'rwkv': use tiny:llama, tiny:qwen2, tiny:mistral"):
        tiny_model("rwkv")


def test_other_sizes_are_built_with_the_same_care() -> None:
    wide = tiny_model("llama", 1, {"head_dim": 32})
    queries, usual = (one.model.layers[0].self_attn.q_proj.weight.detach() for one in (wide, tiny_model("llama", 1)))
    assert (queries.shape, usual.shape) == ((4 * 32, 64), (4 * 16, 64))
    assert float(queries.std()) == pytest.approx(float(usual.std()), rel=0.05)
    assert torch.equal(wide.lm_head.weight, tiny_model("llama", 1, {"head_dim": 32}).lm_head.weight)
    with pytest.raises(ConfigError, match="the config of tiny:llama has no field 'head_size': leave it out"):
        tiny_model("llama", fields={"head_size": 32})


def test_llama4_scales_the_queries_of_short_requests() -> None:
    scaled, plain = tiny_model("llama4"), tiny_model("llama4", fields={"attn_temperature_tuning": False})
    tokens = torch.randint(32, 127, (1, PROMPT), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        moves = (scaled(tokens).logits - plain(tokens).logits).abs().amax(dim=2)[0]
    assert moves[:15].max() == 0
    assert moves[15:].min() > 10 * TOLERANCE
