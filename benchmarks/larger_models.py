"""Models of about 100M parameters with random weights: a step of a tiny one is mostly dispatch.

python larger_models.py FOLDER    saves the llama with a tokenizer of bytes, for `hybridkv serve` and `hybridkv bench`
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridkv.runner import LoadedModel, wrap
from hybridkv.runner.tiny import byte_tokenizer


def llama_100m() -> LoadedModel:
    """Full attention."""
    return _made("llama")


def qwen3_next_100m() -> LoadedModel:
    """Three layers of the gated delta rule to one of full attention, no experts."""
    return _made(
        "qwen3_next",
        head_dim=64,
        linear_num_key_heads=6,
        linear_num_value_heads=12,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=0,
        mlp_only_layers=list(range(8)),
    )


def _made(kind: str, **fields: Any) -> LoadedModel:  # noqa: ANN401  # fields of a config are of any type
    config = AutoConfig.for_model(
        kind,
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        eos_token_id=None,
        **fields,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    return wrap(model, name=f"{kind} of 100M")


if __name__ == "__main__":
    llama_100m().model.save_pretrained(sys.argv[1])
    byte_tokenizer().save_pretrained(sys.argv[1])
