"""What one rank of a tensor parallel group holds of an attention layer."""

from __future__ import annotations

from typing import Final

from hybridkv.errors import ConfigError

MOST_NAMED: Final = 1024
"""Of the sizes that a message names."""


def kv_heads_per_rank(heads: int, kv_heads: int, tp: int, name: str) -> int:
    """KV heads on one rank: ``kv_heads / tp``, and at least one (ranks then hold copies).

    As in vLLM, tp must divide the attention heads, and either tp or the KV heads must divide the other.
    Raises ConfigError naming the sizes that work, up to MOST_NAMED.
    """
    if heads % kv_heads:
        raise ConfigError(
            f"config of {name}: {heads} attention heads cannot share {kv_heads} KV heads evenly: "
            "num_key_value_heads must divide num_attention_heads"
        )
    if tp < 1:
        raise ConfigError(f"tp must be at least 1, got {tp}")
    if not _fits(heads, kv_heads, tp):
        valid = ", ".join(str(one) for one in range(1, min(heads, MOST_NAMED) + 1) if _fits(heads, kv_heads, one))
        raise ConfigError(
            f"tp={tp} does not divide the {heads} attention heads and {kv_heads} KV heads of {name}: use one of {valid}"
        )
    return max(1, kv_heads // tp)


def _fits(heads: int, kv_heads: int, tp: int) -> bool:
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
