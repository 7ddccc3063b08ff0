"""Tiny random models of real architectures, made in memory, whose logits depend on the cache.

tiny.toml has the config of each. With ordinary random weights, attention is nearly uniform and recurrent states fade
within a few tokens: a wrong cache would not change the output. So queries and keys are scaled until attention is sharp,
values and outputs until one block more or less changes the logits, and decays are slow. tests/runner/test_mutations.py
shows that errors in the cache are found.

    A_log      log of U(0.01, 0.3)    a state loses 1 % to 20 % a token
    dt bias    U(-3, -1)
    Q, K norms 0.6 more than initialized
    norms, D   as initialized (1, or 0 if the model adds 1)
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from hybridkv.arguments import instance, integer
from hybridkv.errors import ConfigError
from hybridkv.runner.model_call import auto_class
from hybridkv.units import shown

__all__ = [
    "END",
    "TINY_COMPRESSED",
    "TINY_ENCODER_DECODERS",
    "TINY_MODELS",
    "VOCAB_SIZE",
    "byte_tokenizer",
    "fill",
    "tiny_model",
]

_FAMILIES: Final = tomllib.loads(files("hybridkv.runner").joinpath("tiny.toml").read_text(encoding="utf-8"))
TINY_MODELS: Final = tuple(_FAMILIES["causal"])
"""Names of the causal language models."""
TINY_COMPRESSED: Final = tuple(_FAMILIES["compressed"])
"""Names of the causal language models with compressed caches."""
TINY_ENCODER_DECODERS: Final = tuple(_FAMILIES["encoder_decoder"])
END: Final = "<eos>"
VOCAB_SIZE: Final = 257
"""256 bytes and the end token."""
_CHAT: Final = (
    "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_EMBEDDING_STD: Final = 0.5
_GAINS: Final = (
    ("adapter_list", 0.7),  # Zamba2: added to projections that are large enough without it
    ("shared_transformer.self_attn", 1.1),  # Zamba2: with sharper attention, rounding errors grow from layer to layer
    (".q_proj.", 2.5),
    (".k_proj.", 2.5),
    (".q_b_proj.", 2.5),
    (".linear.", 4.0),  # Zamba: attention's output is added to an input that is normalised afterwards
)
"""(part of a parameter's name, gain). The first match counts; without a match, _OTHER_GAIN."""
_OTHER_GAIN: Final = 1.5
_NORM_GAIN: Final = 0.6
_EMBEDDINGS: Final = ("embed", "shared.weight", "relative_attention_bias")
"""Names of embeddings of tokens and positions, and of T5's embedding of distances. T5 ties its token embedding."""
_BIAS_STD: Final = 1.5
_UNREADABLE: Final = 0.2
_DECAY: Final = (0.01, 0.3)
_STEP_BIAS: Final = (-3.0, -1.0)
_SHARP_NORMS: Final = ("q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")
_STEP_NAMES: Final = ("dt_bias", "dt_proj.bias", "dt_proj_bias")


def tiny_model(name: str, seed: int = 0, fields: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Build the tiny model ``name``, in float32 on the CPU. Equal arguments give equal weights.

    Args:
        name: one of TINY_MODELS, TINY_COMPRESSED or TINY_ENCODER_DECODERS.
        seed: seed of the weights.
        fields: fields of the config to change, for example sizes.

    Raises:
        ConfigError: the name is unknown; the config has no such field; or no model can be built with these fields.
    """
    families = {**_FAMILIES["causal"], **_FAMILIES["compressed"], **_FAMILIES["encoder_decoder"]}
    if instance("the name of a tiny model", name, str) not in families:
        raise ConfigError(f"unknown tiny model {name!r}: use tiny:{', tiny:'.join(families)}")
    own = dict(families[name])
    kind, like, none = own.pop("model_type"), own.pop("like", ()), own.pop("none", ())
    settings = {**_FAMILIES["common"], **dict.fromkeys(("bos_token_id", "pad_token_id", *none))}
    for more in (*(_FAMILIES["shared"][one] for one in like), own):
        settings |= more
    seed = integer("seed", seed, -(1 << 63), (1 << 64) - 1)
    given = {} if fields is None else instance("fields", fields, Mapping)  # type: ignore[type-abstract]
    if unknown := sorted(map(str, set(given) - set(AutoConfig.for_model(kind).to_dict()))):
        raise ConfigError(f"the config of tiny:{name} has no field {unknown[0]!r}: leave it out")
    state = torch.random.get_rng_state()
    try:
        config = AutoConfig.for_model(kind, **{**settings, **given})
        model: PreTrainedModel = auto_class(config).from_config(config, attn_implementation="eager").float().eval()
    except Exception as error:
        if not given:
            raise
        raise ConfigError(f"tiny:{name} cannot be built with {shown(given)}: {error}") from error
    finally:
        torch.random.set_rng_state(state)  # building a model draws from the global generator, which is the caller's
    fill(model, torch.Generator().manual_seed(seed))
    return model


def fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Give every parameter of ``model`` its weights from ``generator``, in the order of ``named_parameters``."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, generator)


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill one parameter. A matrix is normal with the standard deviation ``gain / sqrt(inputs)``."""
    if name.endswith("A_log"):
        weight.uniform_(*_DECAY, generator=generator).log_()
    elif name.endswith(_STEP_NAMES):
        weight.uniform_(*_STEP_BIAS, generator=generator)
    elif name.endswith(".D"):
        return
    elif name.endswith(_SHARP_NORMS):
        weight.add_(_NORM_GAIN)
    elif weight.dim() == 1:
        if name.endswith(("bias", "sinks")):
            weight.normal_(0, 0.5, generator=generator)
    elif any(part in name for part in _EMBEDDINGS):
        weight.normal_(0, _BIAS_STD if "relative" in name else _EMBEDDING_STD, generator=generator)
    elif "lm_head" in name or "proj_out" in name:
        weight.normal_(0, _OTHER_GAIN / math.sqrt(weight.shape[-1]), generator=generator)
        readable = torch.zeros(weight.shape[0], 1, dtype=torch.bool)
        readable[32:127] = True
        weight.mul_(torch.where(readable, 1.0, _UNREADABLE))  # the output is printable ASCII: fit for a terminal
    else:
        gain = next((gain for part, gain in _GAINS if part in name), _OTHER_GAIN)
        weight.normal_(0, gain / math.sqrt(weight.shape[-1]), generator=generator)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each byte and one for the end. It encodes any text.

    Its chat template writes one line for each message: ``user: text of the message``.
    """
    # byte -> the character that byte-level tokenizers write for it (GPT-2's table): printable Latin-1 stands for
    # itself; the other 68 bytes, in order, take the characters from 256 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 30,
        chat_template=_CHAT,
    )
    if len(made) != VOCAB_SIZE:
        raise ConfigError(
            f"the byte tokenizer has {len(made)} tokens instead of {VOCAB_SIZE}: install the version of tokenizers "
            "that hybridkv requires"
        )
    return made
