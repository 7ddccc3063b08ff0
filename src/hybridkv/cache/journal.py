"""The journal: facts about blocks that the core makes, in order, for others to read later.

    core --events--> take_events   KV events, in a bounded queue
         --record--> observers     losses, block times, prompts seen; at the step's end, and when asked
         --blocks--> eviction      before it decides anything, and when room is asked for

Nothing is recorded that nobody reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.extra_keys import Extra
from hybridkv.request import Request

Int64 = NDArray[np.int64]
Ids = NDArray[np.int32] | NDArray[np.int64]

MAX_EVENT_BLOCKS: Final = 100_000
"""Of a queue, unless told: about 100 MB of events with 16 tokens a block."""

_MOST_FACTS: Final = 4096
"""Facts that wait at most, for callers that take no steps."""


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

    A reader forgets all blocks that it was told of, and ignores removals of blocks that it does not know. It then lists
    no block that is gone. It lists all blocks again after the next AllBlocksCleared.
    """

    count: int


@dataclass(frozen=True, slots=True)
class ResumePointStored:
    """Something that is no whole block of tokens can be hit: a state, or tokens that end inside a block.

    Told where a manager has ``resume_point_events``, for who works out where hits can end; never on the wire.
    behind: hash of the last whole block before it, of a state that ends with a block that one's own; None before the
    first. parent, partial_tokens: under what it is found, and the tokens inside the block (bytes of int32), none of
    a state that ends with a block. extra_keys: of the block that it ends in.
    """

    group_idx: int
    behind: bytes | None
    parent: bytes
    partial_tokens: bytes = b""
    extra_keys: tuple[object, ...] | None = None


@dataclass(frozen=True, slots=True)
class ResumePointRemoved:
    """What an ResumePointStored may have told of can be hit no longer; see there."""

    group_idx: int
    parent: bytes
    partial_tokens: bytes = b""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared | EventsDropped | ResumePointStored | ResumePointRemoved


def untagged(extra: Extra | None) -> tuple[object, ...] | None:
    """Extra keys as they are published: adapter name, (id, offset), salt, digest, without the tag."""
    if extra is None:
        return None
    values = []
    for tag, *rest in extra:
        values.append(tuple(rest) if tag == "mm" else rest[0])
    return tuple(values)


def published_extras(extras: Sequence[Extra | None], hashes_per_block: int, hash_block_size: int) -> list[Extra | None]:
    """Extra keys of blocks of ``hashes_per_block`` hash blocks, from those of their hash blocks.

    A block has the keys of all its hash blocks, in their order, so that its hash can be computed from them:

        the adapter      once, in front: it is in every hash block
        an item          once for each hash block that it overlaps, its offset counted from the block's start.
                         n entries of offset o are hash blocks max(o, 0) // hash_block_size and the n - 1 behind
                         it; in the j-th the offset that enters the hash is o - j * hash_block_size
        salt, encoder    of the prompt's first hash block
        embeddings       the i-th digest is that of the i-th hash block: they begin at the prompt's first token
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
    """Blocks ``ids`` got a key at ``now``, seconds."""

    ids: Ids
    now: float


class Used(NamedTuple):
    """A request holds ``ids`` from ``now`` on, seconds."""

    ids: Ids
    now: float


class Released(NamedTuple):
    """Blocks ``ids``, cached, lost their last holders, in this order."""

    ids: Ids


class KeysLost(NamedTuple):
    """Blocks of ``group`` lose ``keys`` and ``partial_keys``, (parent, bytes of tokens) each.

    blocks: those of the keys, then those of the partial keys. num_blocks: distinct ones. now: seconds.
    """

    group: int
    keys: Sequence[bytes]
    partial_keys: Sequence[tuple[bytes, bytes]]
    blocks: Sequence[int]
    num_blocks: int
    now: float


class Lost(NamedTuple):
    """Blocks ``ids`` lost their last key at ``now``, seconds."""

    ids: Ids
    now: float


class Moved(NamedTuple):
    """Blocks moved, int64[m, 2] of (source, target)."""

    moves: Int64


class Cleared(NamedTuple):
    """All blocks lost their keys at ``now``, seconds."""

    now: float


class Begun(NamedTuple):
    """A request got a row, with ``num_hashes`` hash blocks."""

    request: Request
    num_hashes: int


BlockFact = Released | Lost | Moved | Cleared
"""What eviction reads."""

Fact = BlockFact | Named | Used | KeysLost | Begun


class Observer(Protocol):
    """Reads facts; see hybridkv.observe."""

    def read(self, fact: Fact) -> None:
        """Note ``fact``, the next one in order; others than it knows are ignored."""
        ...


class EventQueue:
    """Hold KV events until they are taken, oldest first, of ``max_blocks`` blocks at most (a clearing counts as one).

    A token span and its hash list always match: ``len(token_ids) == len(block_hashes) * block_size``. Where there are
    more events, the oldest go. Putting is O(1) an event, amortised.

    ends: whether events tell of states, and of tokens that end inside a block, too.
    """

    def __init__(self, max_blocks: int = MAX_EVENT_BLOCKS, *, resume_points: bool = False) -> None:
        self.resume_points = resume_points
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
        """Return all of them, after an EventsDropped if any were dropped since the last call."""
        told: list[KVCacheEvent] = [EventsDropped(self._dropped)] if self._dropped else []
        told += self._events
        self._events.clear()
        self._num_blocks = self._dropped = 0
        return told


def _num_blocks(event: KVCacheEvent) -> int:
    return len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 1


class Journal:
    """Record facts until they are read.

    observers: read every fact that is recorded, in this order.
    clock: seconds.
    events: the queue of KV events; None: none are told.
    losses: whether an observer remembers the keys that blocks lost.
    times: whether an observer measures how long blocks keep their keys.
    ranked: whether an eviction reads what happens to blocks.

    Attributes
        reports_events: whether KV events are told. events: their queue.
        observed: whether there are observers.
        pending: facts that the observers have not read. The core records them where an attribute says so.
        blocks: facts that the eviction has not read; None without one that reads.
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
        """Let the observers read all that was recorded since the last call. O(facts)."""
        facts, self.pending = self.pending, []
        for fact in facts:
            for observer in self._observers:
                observer.read(fact)
