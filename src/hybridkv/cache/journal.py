"""Facts that the core makes, as values, and the observers that hear of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.extra_keys import Extra
from hybridkv.request import Request

Int64 = NDArray[np.int64]
Ids = NDArray[np.int32] | NDArray[np.int64]


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


class Needs(Protocol):
    """What a pool and its keys tell of blocks."""

    def all_needed(self, ids: Ids) -> bool:
        """Whether none of ``ids`` goes first when nobody holds it."""
        ...

    def release(self, ids: Ids) -> None:
        """``ids``, cached, have lost their last holders, in this order."""
        ...

    def release_one(self, block: int) -> None:
        """``release`` of one block, without an array."""
        ...

    def lose(self, ids: Ids) -> None:
        """``ids`` have lost their keys."""
        ...

    def lose_one(self, block: int) -> None:
        """``lose`` of one block, without an array."""
        ...

    def follow(self, moves: Int64) -> None:
        """Blocks moved, int64[m, 2] of (source, target)."""
        ...

    def clear(self) -> None:
        """No block has a key."""
        ...


class NoNeeds:
    """Nobody counts: blocks go in the order of their last use."""

    def all_needed(self, ids: Ids) -> bool:  # noqa: ARG002 - the answer of needs
        """Always."""
        return True

    def release(self, ids: Ids) -> None:
        """Nothing."""

    def release_one(self, block: int) -> None:
        """Nothing."""

    def lose(self, ids: Ids) -> None:
        """Nothing."""

    def lose_one(self, block: int) -> None:
        """Nothing."""

    def follow(self, moves: Int64) -> None:
        """Nothing."""

    def clear(self) -> None:
        """Nothing."""


class Events(Protocol):
    """Takes what others are told, oldest first."""

    def put(self, event: KVCacheEvent) -> None:
        """Add one event."""
        ...

    def put_removed(self, events: Sequence[BlockRemoved]) -> None:
        """Add ``events``, of one block each, in this order."""
        ...

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call, oldest first."""
        ...


class Losses(Protocol):
    """Remembers the keys that were evicted."""

    def note(
        self,
        group: int,
        keys: Sequence[bytes],
        tails: Sequence[tuple[bytes, bytes]],
        blocks: int,
        idle_s: NDArray[np.float64] | None = None,
    ) -> None:
        """``blocks`` of ``group`` lose ``keys`` and ``tails``; idle_s: seconds since each was used, where known."""
        ...


class Times(Protocol):
    """Measures how long blocks keep their keys."""

    def begin(self, ids: Ids) -> None:
        """``ids`` have a key."""
        ...

    def hit(self, ids: Ids) -> None:
        """A request uses ``ids``."""
        ...

    def end(self, ids: Ids) -> None:
        """``ids`` lost their last key."""
        ...

    def clear(self) -> None:
        """All blocks did."""
        ...

    def follow(self, sources: Ids, targets: Ids) -> None:
        """The content of ``sources`` lies in ``targets``."""
        ...

    def idle_s(self, ids: Ids) -> NDArray[np.float64]:
        """Return how long ``ids`` were not used, seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Observers:
    """Who hears of the facts that the core makes, as it makes them; None: nobody.

    needs: which cached blocks go first since no kept resume point needs them. tells_ends: events tell of states and of
    tokens that end inside a block, too. begins: called with each request that gets a row.
    """

    needs: Needs = field(default_factory=NoNeeds)
    events: Events | None = None
    tells_ends: bool = False
    losses: Losses | None = None
    times: Times | None = None
    begins: Callable[[Request], None] | None = None


NOBODY: Final = Observers()
