"""Tiny random models of real architectures, built on the spot, whose logits depend on the cache.

With ordinary random weights attention is nearly uniform and equality tests prove nothing. Here queries and
keys are scaled until attention is sharp, values and outputs until a block more or less moves the logits;
tests/runner holds mutation controls that prove it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hybridkv.errors import ConfigError

END: Final = "<eos>"
VOCAB_SIZE: Final = 257
"""256 bytes and the end token."""

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "attn_implementation": "eager",
}
_QUERY_KEY_GAIN: Final = 2.5
_OTHER_GAIN: Final = 1.5
_UNREADABLE: Final = 0.2
_SHARP: Final = ("q_proj", "k_proj", "q_b_proj")


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_COMMON, num_key_value_heads=2, head_dim=16))


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_COMMON, num_key_value_heads=2))


def _deepseek_v3() -> PreTrainedModel:
    config = DeepseekV3Config(
        **_COMMON,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return DeepseekV3ForCausalLM(config)


_BUILDERS: Final[dict[str, Callable[[], PreTrainedModel]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "deepseek_v3": _deepseek_v3,
}
TINY_MODELS: Final = tuple(_BUILDERS)


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The tiny model ``name`` in float32 on the CPU, its weights a function of ``seed`` alone.

    Raises ConfigError for a name that is not in TINY_MODELS.
    """
    if name not in _BUILDERS:
        raise ConfigError(f"unknown tiny model {name!r}: use tiny:{', tiny:'.join(TINY_MODELS)}")
    state = torch.random.get_rng_state()
    try:
        model = _BUILDERS[name]().float().eval()
    finally:
        torch.random.set_rng_state(state)  # building drew from the global generator: nobody should notice
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            _fill(parameter_name, weight, generator)
    return model


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Seeded weights of one parameter: norms stay 1, a matrix is normal with std ``gain / sqrt(inputs)``."""
    if weight.dim() == 1:
        if name.endswith("bias"):
            weight.normal_(0, 0.5, generator=generator)
        return
    if "embed_tokens" in name:
        weight.normal_(0, 0.5, generator=generator)
        return
    if "lm_head" in name:
        weight.normal_(0, _OTHER_GAIN / math.sqrt(weight.shape[-1]), generator=generator)
        readable = torch.zeros(VOCAB_SIZE, 1, dtype=torch.bool)
        readable[32:127] = True
        weight.mul_(torch.where(readable, 1.0, _UNREADABLE))  # the output is printable ASCII: fit for a terminal
        return
    gain = _QUERY_KEY_GAIN if name.split(".")[-2] in _SHARP else _OTHER_GAIN
    weight.normal_(0, gain / math.sqrt(weight.shape[-1]), generator=generator)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte and one for the end: every text encodes, and no token joins two bytes."""
    alphabet = _byte_alphabet()
    vocabulary = {alphabet[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False, model_max_length=1 << 30
    )
    if len(made) != VOCAB_SIZE:
        raise ConfigError(f"the byte tokenizer has {len(made)} tokens, expected {VOCAB_SIZE}")
    return made


def _byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that byte-level tokenizers write for it (GPT-2's table).

    Printable Latin-1 stands for itself; the other 68 bytes, in order, take the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
