"""Carriers: requests that stand for prefixes on their way into a manager, until all their blocks have arrived.

tokens   [ hit in the target: blocks shared | loaded: blocks copied ]        |
                                                               resume point -'
begun --arrived--> finish_load, keep_resume_point, free: the target has the resume point
   '----lost-----> finish_load(0), free: the target has nothing of it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Hit, KVCacheManager
from hybridkv.errors import CacheError
from hybridkv.request import Request
from hybridkv.specs import Keeps

Int32 = NDArray[np.int32]
NO_COLUMNS: Final = np.empty(0, np.int32)


class Way(Enum):
    """The way of a prefix: device to host, host to device, a store to the host, the host to a store."""

    STORE = "store"
    LOAD = "load"
    FETCH = "fetch"
    SPILL = "spill"


class Place(NamedTuple):
    """A resume point: its tokens, the key of its last whole hash block, and the bytes of the tokens after that."""

    tokens: int
    key: bytes
    tail: bytes


class Wanted(NamedTuple):
    """A prefix that a manager should get.

    Attributes:
        target: The manager.
        carrier: A request of its tokens and one more.
        tokens: Its tokens.
        had: What the target has of it.
    """

    target: KVCacheManager
    carrier: Request
    tokens: int
    had: Hit


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """A prefix that has not arrived.

    Attributes:
        way: Its way.
        wanted: The prefix.
        place: Its resume point.
        num_bytes: Bytes of its copies.
        step: The Step that began it.
        since: When it began, in seconds of the clock.
        waits_for_it: Id of the request that waits for it; ``None`` if none does.
    """

    way: Way
    wanted: Wanted
    place: Place
    num_bytes: int
    step: int
    since: float
    waits_for_it: str | None

    @property
    def new_tokens(self) -> int:
        """Tokens that the target did not have."""
        return self.wanted.tokens - self.wanted.had.tokens


class Carriers:
    """All prefixes on their way.

    Args:
        block_bytes: Bytes of a block, by group.
        hash_block: Tokens of a hash block.
        patience_s: Seconds after which nobody waits for a transfer any longer.
        clock: Returns seconds.

    Attributes:
        step: The number of the step that is being made.
        by_number: The prefixes by the numbers of their transfers.
    """

    def __init__(
        self, block_bytes: Sequence[int], hash_block: int, patience_s: float, clock: Callable[[], float]
    ) -> None:
        self.step = 0
        self._clock = clock
        self.by_number: dict[int, Carried] = {}
        self._block_bytes = block_bytes
        self._hash_block = hash_block
        self._patience_s = patience_s
        self._next = 0

    @property
    def now(self) -> float:
        """Seconds on the clock."""
        return self._clock()

    def number(self) -> int:
        """Return a number that no transfer has."""
        self._next += 1
        return self._next - 1

    def count(self, way: Way) -> int:
        """Return how many prefixes are on a way. O(transfers).

        Args:
            way: The way.
        """
        return sum(one.way is way for one in self.by_number.values())

    def bytes_of(self, columns: Sequence[Int32]) -> int:
        """Return the bytes of columns.

        Args:
            columns: int32[n] for each group.
        """
        return sum(size * len(of) for size, of in zip(self._block_bytes, columns, strict=True))

    def place(self, request: Request, tokens: int) -> Place:
        """Return a resume point of a request.

        Args:
            request: The request.
            tokens: Tokens up to there, at least one hash block.
        """
        whole = tokens // self._hash_block
        return Place(tokens, request.hashes[whole - 1], request.token_bytes(whole * self._hash_block, tokens))

    def begin(
        self, way: Way, wanted: Wanted, columns: Sequence[Int32], waits_for_it: str | None = None
    ) -> tuple[int, Sequence[Int32]] | None:
        """Give the carrier of a prefix blocks.

        Args:
            way: The way of the prefix.
            wanted: The prefix.
            columns: int32[n] for each group, the columns that the transfer writes.
            waits_for_it: Id of the request that waits for it.

        Returns:
            The number of the transfer and the blocks of the carrier, int32[columns] for each group. ``None`` if the
            target has no room, or if a block would stay without content: a window may keep more tokens than a hit
            brings (``retained``). Blocks of drafts, and an empty ring, need none.

        Raises:
            CacheError: The target has fewer columns than are written.
        """
        target, carrier, tokens, had = wanted
        keeps = [group.spec.keeps for group in target.config.groups]
        brings = any(len(at) for at, kept in zip(columns, keeps, strict=True) if kept is Keeps.ENCODER)
        encoded = carrier.num_encoder_tokens if brings or target.engine.encoder_blocks(carrier) else 0
        if target.engine.begin_load(carrier, had, tokens, encoded) is None:
            return None
        held, shared = target.get_blocks(carrier.request_id).ids, target.engine.blocks_of(had).ids
        for group, (to, at, ids) in enumerate(zip(held, columns, shared, strict=True)):
            if len(at) and at[-1] >= len(to):
                raise CacheError(
                    f"group {group} of a transfer has no blocks for columns {at.tolist()} of {to.tolist()}"
                )
            if keeps[group] in {Keeps.STATE, Keeps.RING, Keeps.ENCODER}:
                continue  # blocks of drafts and an empty ring need no content, and a whole output may be shared
            filled = np.zeros(len(to), np.bool_)
            filled[at] = filled[: len(ids)] = True
            if to[~filled].any():
                if target.engine.finish_load(carrier, 0):
                    target.free(carrier)
                return None
        number, place = self.number(), self.place(carrier, tokens)
        self.by_number[number] = Carried(way, wanted, place, self.bytes_of(columns), self.step, self.now, waits_for_it)
        return number, held

    def keep(self, number: int, before: Callable[[Carried], None]) -> Carried:
        """Make a prefix that arrived a resume point of its target, and return it.

        Args:
            number: Its number.
            before: Called while its carrier holds the blocks.
        """
        one = self.by_number.pop(number)
        target, carrier = one.wanted.target, one.wanted.carrier
        target.engine.finish_load(carrier)
        before(one)
        target.keep_resume_point(carrier, ended=one.wanted.tokens >= carrier.num_prompt_tokens)
        target.free(carrier)
        return one

    def cancel(self, number: int) -> Carried:
        """Free the blocks of a prefix that is lost, and return it.

        Args:
            number: Its number.
        """
        one = self.by_number.pop(number)
        if one.wanted.target.engine.finish_load(one.wanted.carrier, 0):  # else it holds nothing any longer
            one.wanted.target.free(one.wanted.carrier)
        return one

    def on_its_way(self, request: Request, way: Way, least: int, most: int) -> Carried | None:
        """Return a prefix of a request that is on its way, or ``None``. O(transfers).

        Args:
            request: The request.
            way: The way.
            least: Its tokens are more than this.
            most: Its most tokens.
        """
        for one in self.by_number.values():
            tokens, key, _ = one.place
            depth = tokens // self._hash_block
            known = one.way is way and least < tokens <= most and depth <= len(request.hashes)
            if known and request.hashes[depth - 1] == key:
                return one
        return None

    def is_late(self, one: Carried) -> bool:
        """Return whether a prefix takes so long that nobody waits for it any longer.

        Args:
            one: The prefix.
        """
        return self.now - one.since >= self._patience_s
