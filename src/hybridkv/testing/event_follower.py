"""Who follows the events of a manager knows which written blocks can be hit."""

from __future__ import annotations

from collections import Counter

import numpy as np

from hybridkv.cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheManager
from hybridkv.extra_keys import Extra
from hybridkv.specs import CrossAttentionSpec, MambaSpec
from hybridkv.testing.comparison import OracleError, same
from hybridkv.testing.configs import ENCODERS

DIGESTS = {encoder.digest for encoder in ENCODERS}


class EventFollower:
    """Keeps what the events of ``cache`` tell: in the natural layout nothing of partial keys, states and encoders."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._told: Counter[tuple[int, bytes]] = Counter()
        natural = cache.config.slabs is not None
        self._silent = {
            number
            for number, group in enumerate(cache.config.groups)
            if natural and isinstance(group.spec, MambaSpec | CrossAttentionSpec)
        }

    def follow(self) -> None:
        """Take the events since the last call. OracleError unless they tell what the index and the writes say."""
        for event in self._cache.take_events():
            match event:
                case BlockStored():
                    self._compare_stored(event)
                    self._told.update((event.group_idx, key) for key in event.block_hashes)
                case BlockRemoved():
                    self._told.subtract((event.group_idx, key) for key in event.block_hashes)
                case AllBlocksCleared():
                    self._told.clear()
        pool = self._cache.block_pool
        written = Counter(
            (group, key)
            for group, index in enumerate(pool.indexes)
            if group not in self._silent
            for key, block in index.entries()
            if pool.keys.is_written(block)
        )
        same("events", {key: n for key, n in self._told.items() if n}, dict(written))

    def _compare_stored(self, event: BlockStored) -> None:
        """The hashes of an event follow from its parent, tokens and extra keys."""
        hasher = self._cache.hasher
        if hasher is None:
            raise OracleError("a block was stored without caching")
        stride = event.block_size // hasher.block_size
        extras: list[Extra | None] = [None] * (len(event.token_ids) // hasher.block_size)
        for i, extra in enumerate(event.extra_keys or ()):
            named = [("encoder" if value in DIGESTS else "cache_salt", value) for value in extra or ()]
            extras[i * stride] = tuple(named) or None
        keys = hasher.hash_chain(event.parent_block_hash, np.array(event.token_ids, np.int32), extras)
        same("hashes of an event", event.block_hashes, tuple(keys[stride - 1 :: stride]))
        same("tokens of an event", len(event.token_ids), len(event.block_hashes) * event.block_size)
