"""tiny_model: a family's config into transformers' own class with seeded weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import AutoConfig, PreTrainedModel

from hybridkv.arguments import instance, integer
from hybridkv.errors import ConfigError
from hybridkv.runner.encoder_decoder import auto_class
from hybridkv.runner.tiny.attention import ATTENTION
from hybridkv.runner.tiny.delta import DELTA
from hybridkv.runner.tiny.encoder_decoder import ENCODER_DECODER
from hybridkv.runner.tiny.mamba import MAMBA
from hybridkv.runner.tiny.tokenizer import VOCAB_SIZE
from hybridkv.runner.tiny.weights import fill
from hybridkv.units import shown

_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
}
_FAMILIES: Final = {**ATTENTION, **MAMBA, **DELTA, **ENCODER_DECODER}
TINY_MODELS: Final = tuple(name for name in _FAMILIES if name not in ENCODER_DECODER)
"""Causal language models."""
TINY_ENCODER_DECODERS: Final = tuple(ENCODER_DECODER)


def tiny_model(name: str, seed: int = 0, fields: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """The tiny model ``name`` in float32 on the CPU, its weights a function of ``seed`` and ``fields`` alone.

    fields: of its config, in place of the family's own: other sizes, where something else asks for them.
    Raises ConfigError for a name that is in neither TINY_MODELS nor TINY_ENCODER_DECODERS, and for fields that its
    config does not know or that make no model.
    """
    if instance("the name of a tiny model", name, str) not in _FAMILIES:
        raise ConfigError(f"unknown tiny model {name!r}: use tiny:{', tiny:'.join(_FAMILIES)}")
    family = _FAMILIES[name]
    seed = integer("seed", seed, -(1 << 63), (1 << 64) - 1)
    given = {} if fields is None else instance("fields", fields, Mapping)  # type: ignore[type-abstract]
    if unknown := sorted(map(str, set(given) - set(AutoConfig.for_model(family.model_type).to_dict()))):
        raise ConfigError(f"the config of tiny:{name} has no field {unknown[0]!r}: leave it out")
    state = torch.random.get_rng_state()
    try:
        config = AutoConfig.for_model(family.model_type, **{**_COMMON, **family.fields, **given})
        model = auto_class(config).from_config(config, attn_implementation="eager").float().eval()
    except Exception as error:
        if not given:
            raise
        raise ConfigError(f"tiny:{name} cannot be built with {shown(given)}: {error}") from error
    finally:
        torch.random.set_rng_state(state)  # building drew from the global generator: nobody should notice
    fill(model, torch.Generator().manual_seed(seed))
    built: PreTrainedModel = model
    return built
