"""Cache events in the schema that routers and stores of the ecosystem read.

A token span and its hash list always match: ``len(token_ids) == len(block_hashes) * block_size``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.extra_keys import Extra


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that were written and can be hit. parent_block_hash: None when they begin the prompt.

    extra_keys: per block the untagged extra keys, None where there are none; of a block of several hash
    blocks those of all of them, in order, each once. lora_id, lora_name: of the request's adapter.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = "GPU"
    extra_keys: tuple[tuple[object, ...] | None, ...] | None = None
    group_idx: int = 0


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that can be hit no longer."""

    block_hashes: tuple[bytes, ...]
    medium: str | None = "GPU"
    group_idx: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be hit any longer."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def untagged(extra: Extra | None) -> tuple[object, ...] | None:
    """Extra keys as they are published: adapter name, (id, offset), salt, digest, without the tag."""
    if extra is None:
        return None
    values = []
    for tag, *rest in extra:
        values.append(tuple(rest) if tag == "mm" else rest[0])
    return tuple(values)
