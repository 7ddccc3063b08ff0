"""Follow the events of a manager, and check that they name exactly the written blocks that can be hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from hybridkv.cache import (
    WRITTEN,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventsDropped,
    KVCacheEvent,
    KVCacheManager,
)
from hybridkv.extra_keys import Extra
from hybridkv.specs import Keeps
from hybridkv.testing.configs import ENCODERS


class DifferenceError(Exception):
    """The library gave another result than expected; the message has both values."""


def same(name: str, real: object, expected: object) -> None:
    """Compare a result with the expected one.

    Args:
        name: name of the result, for the message.
        real: the result.
        expected: the expected result.

    Raises:
        DifferenceError: the two differ.
    """
    if real != expected:
        raise DifferenceError(f"{name}: {real}, not {expected}")


DIGESTS = {encoder.digest for encoder in ENCODERS}


class EventFollower:
    """Counts the blocks that a cache reports as stored, as a consumer of its events would.

    In the natural layout, events do not report partial blocks, states and encoder outputs. After dropped events the
    follower knows only some of the written blocks, until the cache is cleared.

    Args:
        cache: a manager with ``enable_kv_cache_events``, before its first event is taken.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._reported: Counter[tuple[int, bytes]] = Counter()
        self._knows_all = True
        natural = cache.config.slabs is not None
        self._silent = {
            number
            for number, group in enumerate(cache.config.groups)
            if natural and group.spec.keeps in {Keeps.STATE, Keeps.RING, Keeps.ENCODER}
        }

    def follow(self) -> None:
        """Take the events since the last call, and compare them with the cache. O(events + cached blocks).

        Raises:
            DifferenceError: the reported blocks are not the written blocks of the index.
        """
        self.hear(self._cache.take_events())

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        """Follow events that the caller has taken, and compare them with the cache. O(events + cached blocks).

        Args:
            events: all events since the last call, oldest first.

        Raises:
            DifferenceError: the reported blocks are not the written blocks of the index.
        """
        for event in events:
            match event:
                case BlockStored():
                    self._compare_stored(event)
                    self._reported.update((event.group_idx, key) for key in event.block_hashes)
                case BlockRemoved():
                    self._reported.subtract((event.group_idx, key) for key in event.block_hashes)
                    if not self._knows_all:
                        self._reported = +self._reported  # forget removals of blocks that a dropped event stored
                case AllBlocksCleared():
                    self._reported.clear()
                    self._knows_all = True
                case EventsDropped():
                    self._reported.clear()
                    self._knows_all = False
        pool = self._cache.block_pool
        written = Counter(
            (group, key)
            for group, index in enumerate(pool.indexes)
            if group not in self._silent
            for key, block in index.entries()
            if pool.keys.step_of(block) == WRITTEN
        )
        reported = Counter({key: n for key, n in self._reported.items() if n})
        same("events", reported if self._knows_all else reported | written, written)

    def _compare_stored(self, event: BlockStored) -> None:
        """Check that the hashes of an event follow from its parent, tokens and extra keys."""
        hasher = self._cache.hasher
        if hasher is None:
            raise DifferenceError("an event stores a block, but caching is off")
        stride = event.block_size // hasher.block_size
        extras: list[Extra | None] = [None] * (len(event.token_ids) // hasher.block_size)
        for i, extra in enumerate(event.extra_keys or ()):
            named = [("encoder" if value in DIGESTS else "cache_salt", value) for value in extra or ()]
            extras[i * stride] = tuple(named) or None
        keys = hasher.hash_chain(event.parent_block_hash, np.array(event.token_ids, np.int32), extras)
        same("hashes of an event", event.block_hashes, tuple(keys[stride - 1 :: stride]))
        same("tokens of an event", len(event.token_ids), len(event.block_hashes) * event.block_size)
