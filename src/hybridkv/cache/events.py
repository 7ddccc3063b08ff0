"""Cache events in the schema that routers and stores of the ecosystem read.

A token span and its hash list always match: ``len(token_ids) == len(block_hashes) * block_size``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hybridkv.extra_keys import Extra


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that were written and can be hit. parent_block_hash: None when they begin the prompt.

    lora_id, lora_name: of the request's adapter. extra_keys: one entry a block, None where there are none;
    the whole is None when no block has any. See ``published_extras`` for blocks of several hash blocks.
    cache_salt: of the request, also where its blocks are not the first.
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
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that can be hit no longer."""

    block_hashes: tuple[bytes, ...]
    medium: str | None = "GPU"
    group_idx: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be hit any longer."""


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """``count`` events before this one were dropped, since nobody took them.

    Nothing is known of blocks stored before. What is told from here on is true: who forgets all that was told before,
    and passes over removals of what it has not heard of, believes in no block that is not there; in all that are
    there only behind the next AllBlocksCleared.
    """

    count: int


@dataclass(frozen=True, slots=True)
class EndKept:
    """Something that is no whole block of tokens can be hit: a state, or tokens that end inside a block.

    Told where a manager has ``end_events``, for who works out where hits can end; never on the wire.
    behind: hash of the last whole block before it, of a state that ends with a block that one's own; None before the
    first. parent, tail: under what it is found, and the tokens inside the block (bytes of int32), none of a state
    that ends with a block. extra_keys: of the block that it ends in.
    """

    group_idx: int
    behind: bytes | None
    parent: bytes
    tail: bytes = b""
    extra_keys: tuple[object, ...] | None = None


@dataclass(frozen=True, slots=True)
class EndLost:
    """What an EndKept may have told of can be hit no longer; see there."""

    group_idx: int
    parent: bytes
    tail: bytes = b""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared | EventsDropped | EndKept | EndLost

MAX_EVENT_BLOCKS: Final = 100_000
"""Unless told: about 100 MB of events with 16 tokens a block."""


class EventQueue:
    """Events until somebody takes them, oldest first, of ``max_blocks`` blocks altogether (a clearing counts as one).

    Where there are more, the oldest go. Putting is O(1) an event, amortised.
    """

    def __init__(self, max_blocks: int = MAX_EVENT_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._events: deque[KVCacheEvent] = deque()
        self._num_blocks = 0
        self._dropped = 0

    def put(self, event: KVCacheEvent) -> None:
        """``event`` is the youngest."""
        self._events.append(event)
        self._num_blocks += len(event.block_hashes) if type(event) is BlockStored else _num_blocks(event)
        if self._num_blocks > self._max_blocks:
            self._drop()

    def put_removed(self, events: Sequence[BlockRemoved]) -> None:
        """``events``, of one block each, are the youngest, in this order."""
        self._events.extend(events)
        self._num_blocks += len(events)
        if self._num_blocks > self._max_blocks:
            self._drop()

    def _drop(self) -> None:
        while self._num_blocks > self._max_blocks:
            self._num_blocks -= _num_blocks(self._events.popleft())
            self._dropped += 1

    def take(self) -> list[KVCacheEvent]:
        """All of them; an EventsDropped in front, if any were dropped since the last call."""
        told: list[KVCacheEvent] = [EventsDropped(self._dropped)] if self._dropped else []
        told += self._events
        self._events.clear()
        self._num_blocks = self._dropped = 0
        return told


def _num_blocks(event: KVCacheEvent) -> int:
    return len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 1


def untagged(extra: Extra | None) -> tuple[object, ...] | None:
    """Extra keys as they are published: adapter name, (id, offset), salt, digest, without the tag."""
    if extra is None:
        return None
    values = []
    for tag, *rest in extra:
        values.append(tuple(rest) if tag == "mm" else rest[0])
    return tuple(values)


def published_extras(extras: Sequence[Extra | None], stride: int, hash_block_size: int) -> list[Extra | None]:
    """Extra keys of blocks of ``stride`` hash blocks, from those of their hash blocks.

    A block has the keys of all its hash blocks, in their order, so that its hash can be computed from them:

        the adapter      once, in front: it is in every hash block
        an item          once for each hash block that it overlaps, its offset counted from the block's start.
                         n entries of offset o are hash blocks max(o, 0) // hash_block_size and the n - 1 behind
                         it; in the j-th the offset that enters the hash is o - j * hash_block_size
        salt, encoder    of the prompt's first hash block
        embeddings       the i-th digest is that of the i-th hash block: they begin at the prompt's first token
    """
    if stride == 1:
        return list(extras)
    joined = []
    for start in range(0, len(extras), stride):
        keys: list[tuple[object, ...]] = []
        for j, extra in enumerate(extras[start : start + stride]):
            for key in extra or ():
                match key:
                    case ("mm", name, int(offset)):
                        keys.append(("mm", name, offset + j * hash_block_size))
                    case ("lora", *_) if j:
                        pass
                    case _:
                        keys.append(key)
        joined.append(tuple(keys) or None)
    return joined
