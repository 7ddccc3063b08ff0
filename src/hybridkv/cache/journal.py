"""The journal: facts about blocks that the cache records in order, for others to read later.

    cache --events--> take_events   KV events, in a bounded queue
          --record--> observers     lost keys, block times, seen prompts; read at the end of a step, or on request
          --blocks--> eviction      read before it decides anything

A fact without a reader is not recorded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.extra_keys import Extra
from hybridkv.request import Request

Int64 = NDArray[np.int64]
Ids = NDArray[np.int32] | NDArray[np.int64]

MAX_EVENT_BLOCKS: Final = 100_000
"""Default size of a queue: about 100 MB of events with 16 tokens a block."""

_MOST_FACTS: Final = 4096
"""Most facts that wait, for callers that take no steps. Chosen by hand."""


class Medium(StrEnum):
    """Where blocks are, in vLLM's words.

    Attributes:
        GPU: The memory of the device, whatever it is.
        CPU: Host memory.
    """

    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full blocks that were written and can be hit.

    Attributes:
        block_hashes: Hashes of the blocks, in order.
        parent_block_hash: Hash of the block before them; ``None`` if they begin the prompt.
        token_ids: All their tokens.
        block_size: Tokens of a block.
        lora_id: Id of the request's adapter.
        lora_name: Name of the request's adapter.
        medium: Where the blocks are.
        extra_keys: One entry a block, ``None`` for a block without extra keys; ``None`` if no block has any. See
            ``published_extras`` for blocks of several hash blocks.
        group_idx: The group.
        cache_salt: Salt of the request, also if its blocks are not the first.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = Medium.GPU
    extra_keys: tuple[tuple[object, ...] | None, ...] | None = None
    group_idx: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Full blocks that can no longer be hit.

    Attributes:
        block_hashes: Hashes of the blocks.
        medium: Where the blocks were.
        group_idx: The group.
    """

    block_hashes: tuple[bytes, ...]
    medium: str | None = Medium.GPU
    group_idx: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block can be hit any longer."""


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """Events before this one were dropped, because they were not taken in time.

    The reader must forget all blocks that were reported to it, and ignore removals of blocks that it does not know.
    Then it never lists a block that is gone. It lists all blocks again after the next AllBlocksCleared.

    Attributes:
        count: Number of dropped events.
    """

    count: int


@dataclass(frozen=True, slots=True)
class ResumePointStored:
    """A resume point that is no full block of tokens: a state, or tokens that end inside a block.

    The natural layout reports it, so that a reader can compute where hits can end. It is never sent
    over the wire.

    Attributes:
        group_idx: The group.
        block_hash: Hash of the last full block before the resume point (of a state that ends with a block: of that
            block); ``None`` before the first.
        parent: Key under which it is found.
        partial_tokens: Tokens inside the block, bytes of int32; empty for a state that ends with a block.
        extra_keys: Extra keys of the block in which it ends.
        medium: Where its blocks are.
    """

    group_idx: int
    block_hash: bytes | None
    parent: bytes
    partial_tokens: bytes = b""
    extra_keys: tuple[object, ...] | None = None
    medium: str | None = Medium.GPU


@dataclass(frozen=True, slots=True)
class ResumePointRemoved:
    """A stored resume point that can no longer be hit.

    Attributes:
        group_idx: The group.
        parent: As in ResumePointStored.
        partial_tokens: As in ResumePointStored.
        medium: As in ResumePointStored.
    """

    group_idx: int
    parent: bytes
    partial_tokens: bytes = b""
    medium: str | None = Medium.GPU


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared | EventsDropped | ResumePointStored | ResumePointRemoved


def untagged(extra: Extra | None) -> tuple[object, ...] | None:
    """Return extra keys in their published form, without tags: adapter name, (id, offset), salt, digest."""
    if extra is None:
        return None
    values = []
    for tag, *rest in extra:
        values.append(tuple(rest) if tag == "mm" else rest[0])
    return tuple(values)


def published_extras(extras: Sequence[Extra | None], hashes_per_block: int, hash_block_size: int) -> list[Extra | None]:
    """Return the extra keys of blocks of ``hashes_per_block`` hash blocks each, from those of their hash blocks.

    A block has the keys of all its hash blocks, in their order, so that its hash can be computed from them:

        the adapter      once, first: it is in every hash block
        an item          once for each hash block that it overlaps, its offset counted from the start of the block.
                         n entries of offset o are hash blocks max(o, 0) // hash_block_size and the n - 1 after
                         it; in the j-th the offset that enters the hash is o - j * hash_block_size
        salt, encoder    of the prompt's first hash block
        embeddings       the i-th digest is that of the i-th hash block: they begin at the prompt's first token

    Args:
        extras: Extra keys of the hash blocks, in order.
        hashes_per_block: Hash blocks of a block.
        hash_block_size: Tokens of a hash block.
    """
    if hashes_per_block == 1:
        return list(extras)
    joined = []
    for start in range(0, len(extras), hashes_per_block):
        keys: list[tuple[object, ...]] = []
        for j, extra in enumerate(extras[start : start + hashes_per_block]):
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


class Named(NamedTuple):
    """Blocks ``ids`` got a key at ``now`` (seconds)."""

    ids: Ids
    now: float


class Used(NamedTuple):
    """A request holds ``ids`` from ``now`` on (seconds)."""

    ids: Ids
    now: float


class Released(NamedTuple):
    """The cached blocks ``ids`` lost their last holders, in this order."""

    ids: Ids


class KeysLost(NamedTuple):
    """Blocks of ``group`` lost keys.

    Attributes:
        group: The group.
        keys: Keys of full blocks.
        partial_keys: Partial keys, (parent, bytes of tokens) each.
        blocks: Blocks of the keys, then those of the partial keys.
        num_blocks: Number of distinct blocks.
        now: Seconds.
    """

    group: int
    keys: Sequence[bytes]
    partial_keys: Sequence[tuple[bytes, bytes]]
    blocks: Sequence[int]
    num_blocks: int
    now: float


class Lost(NamedTuple):
    """Blocks ``ids`` lost their last key at ``now`` (seconds)."""

    ids: Ids
    now: float


class Moved(NamedTuple):
    """Blocks moved: int64[m, 2] of (source, target)."""

    moves: Int64


class Cleared(NamedTuple):
    """All blocks lost their keys at ``now`` (seconds)."""

    now: float


class Begun(NamedTuple):
    """A request with ``num_hashes`` hash blocks got a row."""

    request: Request
    num_hashes: int


BlockFact = Released | Lost | Moved | Cleared
"""Facts that an eviction policy reads."""

Fact = BlockFact | Named | Used | KeysLost | Begun


class Observer(Protocol):
    """Reads facts; see ``hybridkv.observe``."""

    def read(self, fact: Fact) -> None:
        """Note the next fact. Unknown facts are ignored."""
        ...


class EventQueue:
    """A queue of KV events that holds a bounded number of blocks. The oldest events are dropped first.

    Tokens and hashes always match: ``len(token_ids) == len(block_hashes) * block_size``. Putting is O(1) an event,
    amortised.

    Args:
        max_blocks: Most blocks in the queue; a clearing counts as one.
        resume_points: Whether events also report states and partial blocks.
        medium: Where the blocks of its events are.
    """

    def __init__(
        self, max_blocks: int = MAX_EVENT_BLOCKS, *, resume_points: bool = False, medium: Medium = Medium.GPU
    ) -> None:
        self.resume_points, self.medium = resume_points, medium
        self._max_blocks = max_blocks
        self._events: deque[KVCacheEvent] = deque()
        self._num_blocks = 0
        self._dropped = 0

    def put(self, event: KVCacheEvent) -> None:
        """Add ``event`` as the youngest."""
        self._events.append(event)
        self._num_blocks += len(event.block_hashes) if type(event) is BlockStored else _num_blocks(event)
        while self._num_blocks > self._max_blocks:
            self._num_blocks -= _num_blocks(self._events.popleft())
            self._dropped += 1

    def take(self) -> list[KVCacheEvent]:
        """Return all events, after an EventsDropped if any were dropped since the last call."""
        events: list[KVCacheEvent] = [EventsDropped(self._dropped)] if self._dropped else []
        events += self._events
        self._events.clear()
        self._num_blocks = self._dropped = 0
        return events


def _num_blocks(event: KVCacheEvent) -> int:
    return len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 1


class Journal:
    """Records facts until they are read.

    Args:
        observers: Read every recorded fact, in this order.
        clock: Returns seconds.
        events: The queue of KV events; ``None`` turns events off.
        losses: Whether an observer remembers lost keys.
        times: Whether an observer measures how long blocks keep their keys.
        ranked: Whether an eviction policy reads the facts of blocks.

    Attributes:
        reports_events: Whether KV events are on.
        events: The queue of KV events.
        reports_resume_points: Whether events also report states and partial blocks.
        observed: Whether there are observers.
        pending: Facts that the observers have not read. The cache records a fact only if an attribute says so.
        blocks: Facts that the eviction policy has not read; ``None`` without one.
    """

    def __init__(
        self,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        events: EventQueue | None = None,
        losses: bool = False,
        times: bool = False,
        ranked: bool = False,
    ) -> None:
        self.reports_events = events is not None
        self.events = EventQueue() if events is None else events
        self.reports_resume_points, self.losses, self.times = self.events.resume_points, losses, times
        self.observed = bool(observers)
        self.clock = clock
        self.pending: list[Fact] = []
        self.blocks: list[BlockFact] | None = [] if ranked else None
        self._observers = tuple(observers)

    def record(self, fact: Fact) -> None:
        """Record ``fact`` for the observers."""
        self.pending.append(fact)
        if len(self.pending) >= _MOST_FACTS:
            self.settle()

    def settle(self) -> None:
        """Let the observers read all facts since the last call. O(facts)."""
        facts, self.pending = self.pending, []
        for fact in facts:
            for observer in self._observers:
                observer.read(fact)
