"""Who follows the events of a manager knows which written blocks can be hit."""

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
    """The library did something else than it should have."""


def same(what: str, real: object, expected: object) -> None:
    """DifferenceError unless ``real`` is ``expected``."""
    if real != expected:
        raise DifferenceError(f"{what}: {real}, not {expected}")


DIGESTS = {encoder.digest for encoder in ENCODERS}


class EventFollower:
    """Keeps what the events of ``cache`` tell: in the natural layout nothing of partial keys, states and encoders.

    Once events were dropped it knows of some of the written blocks, and of all again when the cache has been cleared.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._told: Counter[tuple[int, bytes]] = Counter()
        self._knows_all = True
        natural = cache.config.slabs is not None
        self._silent = {
            number
            for number, group in enumerate(cache.config.groups)
            if natural and group.spec.keeps in {Keeps.STATE, Keeps.ENCODER}
        }

    def follow(self) -> None:
        """Take the events since the last call. DifferenceError unless they tell what the index and the writes say."""
        self.hear(self._cache.take_events())

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        """``events``, all since the last call, were taken. DifferenceError as ``follow``."""
        for event in events:
            match event:
                case BlockStored():
                    self._compare_stored(event)
                    self._told.update((event.group_idx, key) for key in event.block_hashes)
                case BlockRemoved():
                    self._told.subtract((event.group_idx, key) for key in event.block_hashes)
                    if not self._knows_all:
                        self._told = +self._told  # removals of what was stored in a dropped event
                case AllBlocksCleared():
                    self._told.clear()
                    self._knows_all = True
                case EventsDropped():
                    self._told.clear()
                    self._knows_all = False
        pool = self._cache.block_pool
        written = Counter(
            (group, key)
            for group, index in enumerate(pool.indexes)
            if group not in self._silent
            for key, block in index.entries()
            if pool.keys.step_of(block) == WRITTEN
        )
        told = Counter({key: n for key, n in self._told.items() if n})
        same("events", told if self._knows_all else told | written, written)

    def _compare_stored(self, event: BlockStored) -> None:
        """The hashes of an event follow from its parent, tokens and extra keys."""
        hasher = self._cache.hasher
        if hasher is None:
            raise DifferenceError("a block was stored without caching")
        stride = event.block_size // hasher.block_size
        extras: list[Extra | None] = [None] * (len(event.token_ids) // hasher.block_size)
        for i, extra in enumerate(event.extra_keys or ()):
            named = [("encoder" if value in DIGESTS else "cache_salt", value) for value in extra or ()]
            extras[i * stride] = tuple(named) or None
        keys = hasher.hash_chain(event.parent_block_hash, np.array(event.token_ids, np.int32), extras)
        same("hashes of an event", event.block_hashes, tuple(keys[stride - 1 :: stride]))
        same("tokens of an event", len(event.token_ids), len(event.block_hashes) * event.block_size)
