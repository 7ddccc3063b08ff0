"""Why tokens are missed, by trying every end of a hit, from what was ever published, lost or begun, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hybridkv.cache import MissReason
from hybridkv.testing.model import Origin, Prefix
from oracles.cache import OracleCache, OracleHit, OracleRequest, prefix
from oracles.groups import OracleGroup
from oracles.natural_cache import NaturalCache
from oracles.natural_pool import NaturalPool
from oracles.rig import Rig

Why = tuple[MissReason, int | None]
"""A reason, and the group that lost what it is about."""


class WhyMissed:
    """Watches ``rig``, which is fresh, from now on."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._cache: OracleCache = rig.oracle.cache
        self._lost: set[tuple[int, Prefix]] = set()
        self._begun: list[tuple[Origin, tuple[int, ...], int]] = []
        hasher = rig.cache.hasher
        self._hash_block = 1 if hasher is None else hasher.block_size
        asked = [group for group in self._cache.publishers if group.kind in {"full", "sink"}]
        self._full = list(asked)
        self._asked = asked + [group for group in self._cache.publishers if group not in asked]
        self._watch()

    def _watch(self) -> None:
        pool, cache = self._cache.pool, self._cache
        forget, reset = pool.forget, pool.reset

        def forgets(block: int) -> None:
            self._lost |= self._keys_of(block)
            forget(block)

        def resets() -> bool:
            done = reset()
            if done:
                self._lost.clear()
                self._begun.clear()
            return done

        pool.forget, pool.reset = forgets, resets  # type: ignore[method-assign]
        name = "begin" if isinstance(cache, NaturalCache) else "_begin"
        begin: Callable[[OracleRequest, OracleHit | None], None] = getattr(cache, name)

        def begins(request: OracleRequest, hit: OracleHit | None) -> None:
            self._begun.append((request.salt, tuple(request.tokens), request.num_prompt_tokens))
            begin(request, hit)

        setattr(cache, name, begins)

    def _keys_of(self, block: int) -> set[tuple[int, Prefix]]:
        pool = self._cache.pool
        if isinstance(pool, NaturalPool):
            return {(group, (salt, tokens + tail)) for (group, (salt, tokens)), tail in pool.keys.get(block, [])}
        return {pool.prefix[block]} if block in pool.prefix else set()

    # -- reasons

    def explain(self, request: OracleRequest) -> list[Why]:
        """Of each token of its prompt behind the hit."""
        cache, last = self._cache, len(request.tokens) - 1
        hit = cache.hit(request.tokens, request.salt, reads=request.reads).tokens
        whole = range(request.num_prompt_tokens)
        if not (cache.caching and request.reads):
            return [(MissReason.LAST_TOKEN if at == last else MissReason.CACHING_OFF, None) for at in whole]
        edge = last // cache.alignment * cache.alignment
        seen = self._seen(request)
        states = [group for group in self._asked if group.kind == "state"]
        there = self._common(request, self._full, edge) if self._full else edge
        stated = self._common(request, self._full + states, there)
        windowed = self._common(request, self._asked, stated)
        if not self._full:
            there = max(min(seen * self._hash_block, there), windowed)
            stated = min(stated, there)
        lost = self._lost_state(request, states, stated, there)
        found: list[Why] = []
        for at in whole[hit:]:
            if at < windowed or edge <= at < last:
                found.append((MissReason.BLOCK_EDGE, None))
            elif at < stated:
                found.append((MissReason.NO_WINDOW, None))
            elif at < lost[0]:
                found.append((MissReason.EVICTED, lost[1]))
            elif at < there:
                found.append((MissReason.NO_STATE, None))
            elif at < edge:
                found.append(self._of_block(request, at, there, seen))
            else:
                found.append((MissReason.LAST_TOKEN, None))
        return found

    def _common(self, request: OracleRequest, groups: Sequence[OracleGroup], limit: int) -> int:
        """The longest end that all serve."""
        cache, tokens, salt = self._cache, request.tokens, request.salt
        if isinstance(cache, NaturalCache) and not cache.drops:
            finder = cache.finder(request)
            ends = range(limit, 0, -1)
            first = next((end for end in ends if not groups or finder.serves(groups[0], end, proven=False)), 0)
            return next((e for e in ends if e <= first and all(finder.serves(g, e, proven=True) for g in groups)), 0)
        end, before, asked = limit, -1, False
        while end != before:
            before = end
            for group in groups:
                end = cache._longest(group, tokens, salt, end, peek=False, prove=not asked)
                asked = True
        return end

    def _published(self, group: OracleGroup, request: OracleRequest, end: int) -> bool:
        return self._cache.pool.find(group.number, prefix(request.tokens, request.salt, end)) is not None

    def _was_lost(self, group: OracleGroup, request: OracleRequest, end: int) -> bool:
        return (group.number, prefix(request.tokens, request.salt, end)) in self._lost

    def _seen(self, request: OracleRequest) -> int:
        blocks = range(len(request.tokens) // self._hash_block, 0, -1)
        return next(
            (
                count
                for count in blocks
                for group in self._cache.publishers
                if self._published(group, request, count * self._hash_block)
                or self._was_lost(group, request, count * self._hash_block)
            ),
            0,
        )

    def _of_block(self, request: OracleRequest, at: int, first: int, seen: int) -> Why:
        """Of a token that is not there; one in a block that is no whole one as the one before it."""
        size, known = self._hash_block, request.tokens
        block = min(at // size, len(known) // size - 1)
        if block * size + size <= first:
            return MissReason.NEVER_SEEN, None
        for number in range(block, first // size - 1, -1):
            end = (number + 1) * size
            if self._is_running(request, end):
                return MissReason.UNPUBLISHED, None
            for group in self._full:
                column = math.ceil(end / group.size) * group.size
                if column <= len(known) and not self._published(group, request, column):
                    if number < seen or self._was_lost(group, request, column):
                        return MissReason.EVICTED, group.number
                    break
            if number >= seen:
                if any(salt == request.salt and list(one[:end]) == known[:end] for salt, one, _ in self._begun):
                    return MissReason.UNPUBLISHED, None
                others = any(end <= n and list(one[:end]) == known[:end] for _, one, n in self._begun)
                mine = end <= request.num_prompt_tokens
                return MissReason.OTHER_SALT if others and mine else MissReason.NEVER_SEEN, None
        return MissReason.NEVER_SEEN, None

    def _is_running(self, request: OracleRequest, end: int) -> bool:
        """Whether somebody who holds blocks begins so."""
        return any(
            other is not request
            and other.rows
            and other.salt == request.salt
            and len(other.tokens) >= end
            and other.tokens[:end] == request.tokens[:end]
            for _, other in self._rig.requests.values()
        )

    def _lost_state(
        self, request: OracleRequest, states: Sequence[OracleGroup], first: int, last: int
    ) -> tuple[int, int | None]:
        """The last end at which every group has or had a state, and the first that has it no longer."""
        cache = self._cache
        for end in range(last, first, -1):
            if end % cache.alignment:
                continue
            there = [self._has_state(group, request, end) for group in states]
            had = [has or self._was_lost(group, request, end) for has, group in zip(there, states, strict=True)]
            if states and all(had) and not all(there):
                return end, states[there.index(False)].number
        return first, None

    def _has_state(self, group: OracleGroup, request: OracleRequest, end: int) -> bool:
        cache = self._cache
        if isinstance(cache, NaturalCache):
            return cache.finder(request).state(group, end) is not None
        return end % group.size == 0 and self._published(group, request, end)
