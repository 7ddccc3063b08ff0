"""Look-ups: what a request can begin with, which is there already; what all groups agree on.

Block ids as the manager hands them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.eviction_policy import EvictionPolicy
from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.policies import GroupHit, PositionHits, Search
from hybridkv.cache.pool import NULL_BLOCK, BlockPool
from hybridkv.cache.residents import Residents
from hybridkv.errors import CacheError, ConfigError, StalePlanError
from hybridkv.request import Hasher, Request

_NONE = np.empty(0, np.int32)


class Hit(NamedTuple):
    """The longest prefix that every group has, or what a caller hands over as one.

    The look-up makes it; it is handed on to the plan as it is, and proved again only if it was made for another
    request.

    tokens: of the prefix.
    groups: one GroupHit a group, in the order of the groups.
    uncached_tokens: how much further the first group asked would go (full attention, where there is any): a state or
        window kept there would have helped.
    missing, seen, additions: as in GroupHit, of the whole search, by group but for the blocks on which it rests.
    sources: by group, the block to copy the end of the hit from: the last column, used in part, or a state; 0: none.
    evictions: of the pool when the hit was found, so that it is known to be stale; None: it cannot be.
    branch_tokens: where other requests continued with the same tokens, 0 for nowhere.
    request, truncations: the request for which it was found, and its ``truncations`` then.
    parent: the running request whose blocks these are, for a branch of it.
    """

    tokens: int
    groups: tuple[GroupHit, ...]
    uncached_tokens: int = 0
    missing: tuple[tuple[int, ...], ...] = ()
    seen: tuple[NDArray[np.int32], ...] = ()
    additions: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    evictions: int | None = 0
    branch_tokens: int = 0
    request: Request | None = None
    truncations: int = 0
    parent: Request | None = None


def no_hit(num_groups: int) -> Hit:
    """Return the hit of no tokens in ``num_groups`` groups."""
    return Hit(
        0,
        (GroupHit(0, _NONE),) * num_groups,
        0,
        missing=((),) * num_groups,
        additions=(-1,) * num_groups,
        sources=(0,) * num_groups,
    )


class PrefixLookup:
    """Finds, never adopts. alignment: tokens of which every hit is a multiple.

    hasher: of the requests, None without prefix caching. eviction_policy: remembers tokens that are cached no longer.
    empty: no block in every group.

    Groups without keys are asked first (they agree to all or to nothing), then those of which every prefix of a hit is
    one, then the others.
    """

    def __init__(
        self,
        residents: Residents,
        pool: BlockPool,
        *,
        alignment: int,
        hasher: Hasher | None,
        eviction_policy: EvictionPolicy,
    ) -> None:
        groups = residents.groups
        self.empty = KVCacheBlocks((_NONE,) * len(groups), pool)
        self._groups = groups
        self._pool = pool
        self._residents = residents
        self._hasher = hasher
        self.alignment = alignment
        self._eviction_policy = eviction_policy
        self._asked = sorted(groups, key=_search_order)
        self._no_hit = no_hit(len(groups))
        # whom a hit must begin with, and what is answered where it knows nothing: the others are not asked
        self._first = _without_first_no_hit(self._asked)
        alone = len(groups) == 1 and groups[0].policy.hits.downward_closed
        self._alone = groups[0] if alone else None
        missing = tuple((0,) if group is self._first else () for group in groups)
        self._miss = self._no_hit._replace(missing=missing, seen=(_NONE,) * len(groups))

    # -- cached prefixes

    def find(self, request: Request) -> Hit:
        """The longest cached prefix of all but the last token of ``request``. O(blocks of the hit).

        ConfigError, CacheError for a request that was made for another manager.
        """
        self._residents.refuse_stranger(request)
        if self._hasher is None or not request.reads_prefix_cache:
            return self._longest(request, 0)
        hit = self._longest(request, request.num_tokens - 1)
        uncached = self._eviction_policy.known_tokens(request) - hit.tokens
        if uncached <= hit.uncached_tokens:
            return hit
        return hit._replace(uncached_tokens=uncached, branch_tokens=hit.tokens + uncached)

    def find_written(self, request: Request) -> Hit:
        """The longest prefix of all tokens of ``request`` that is cached and written. O(blocks of the prefix)."""
        hit = self._longest(request, 0 if self._hasher is None else request.num_tokens)
        while not all(self._pool.keys.all_written(part.blocks) for part in hit.groups):
            hit = self._longest(request, hit.tokens - 1)
        return hit

    def is_longest(self, request: Request, hit: Hit) -> bool:
        """Whether ``hit`` is still the longest.

        It is while none of the blocks it rests on lost its key, none of the keys that bounded it is known, and its
        last tokens would be copied from the same blocks. O(those keys) look-ups, one a group for full attention, and
        one array comparison over the blocks.
        """
        if any(-1 < then != group.index.additions for group, then in zip(self._groups, hit.additions, strict=True)):
            return False
        if any(group.knows_any(request, columns) for group, columns in zip(self._groups, hit.missing, strict=True)):
            return False
        since = hit.evictions
        if since is not None and not all(self._pool.keys.kept_since(ids, since) for ids in hit.seen):
            return False
        copied = ((group, source) for group, source in zip(self._groups, hit.sources, strict=True) if source)
        return all(group.policy.hits.source(group.index, request, hit.tokens) == source for group, source in copied)

    def _longest(self, request: Request, limit_tokens: int) -> Hit:
        """The longest prefix of at most ``limit_tokens`` tokens that every group has. O(blocks of the longest hit)."""
        candidate = limit_tokens // self.alignment * self.alignment
        if not candidate:
            return self._no_hit
        if self._first is not None and self._first.lacks_first(request):
            return self._miss
        if self._alone is not None:
            return self._longest_of(self._alone, request, Search(candidate, limit_tokens, self.alignment))
        return self._agreed(request, limit_tokens, candidate)

    def _agreed(self, request: Request, limit_tokens: int, candidate: int) -> Hit:
        """_longest, at most ``candidate``.

        Each group may lower the candidate; all are asked in turn until they agree (a fixed point: the
        candidate only falls). A group that drops for EAGLE looks one column past the candidate, once; it
        does so anew after a group that did not drop has lowered the candidate.
        """
        hits: dict[int, GroupHit] = {}
        missing: dict[int, list[int]] = {group.number: [] for group in self._groups}
        additions = [-1] * len(self._groups)
        dropped: set[int] = set()
        seen: list[NDArray[np.int32]] = []
        longest, agreed = 0, False
        ahead = limit_tokens if len(self._groups) == 1 else request.num_tokens
        while candidate and not agreed:
            agreed = True
            for group in self._asked:
                before, past = hits.get(group.number), int(group.kind.drops and group.number not in dropped)
                if before is not None and group.policy.hits.downward_closed:
                    hit = _trimmed(before, min(before.tokens, candidate), group.policy.block_size)
                else:
                    search = Search(candidate, ahead if past else limit_tokens, self.alignment, past, longest)
                    hit = group.policy.hits.longest(group.index, request, group.keys(request), search)
                    missing[group.number] += hit.missing
                    additions[group.number] = max(additions[group.number], hit.additions)
                    seen.append(hit.seen)
                    dropped.update((group.number,) if past else ())
                hits[group.number] = hit
                if hit.tokens < candidate:
                    candidate, agreed = hit.tokens, False
                    if not past:
                        dropped.clear()
                if group.kind.publishes and not longest:
                    longest = candidate
        asked, sources = self._no_hit.groups, self._no_hit.sources
        if candidate:
            asked = tuple([hits[group.number] for group in self._groups])
            sources = tuple([group.policy.hits.source(group.index, request, candidate) for group in self._groups])
            seen.append(np.array([source for source in sources if source], np.int32))
        return Hit(
            candidate,
            asked,
            longest - candidate,
            tuple([tuple(missing[group.number]) for group in self._groups]),
            tuple(seen),
            tuple(additions),
            sources,
            self._pool.keys.evictions,
            longest if longest > candidate else 0,
            request,
            request.truncations,
        )

    def _longest_of(self, group: CacheGroup, request: Request, search: Search) -> Hit:
        """_longest of one group alone, of which every prefix of a hit is one: it agrees with itself at once."""
        hits = group.policy.hits
        if group.kind.drops:
            search = search._replace(past=1)
        hit = hits.longest(group.index, request, group.keys(request), search)
        evictions, missing, additions = self._pool.keys.evictions, (hit.missing,), (hit.additions,)
        if not hit.tokens:
            none = self._no_hit
            return Hit(0, none.groups, 0, missing, (hit.seen,), additions, none.sources, evictions)
        source = hits.source(group.index, request, hit.tokens)
        seen = (hit.seen, np.array([source], np.int32)) if source else (hit.seen,)
        return Hit(
            hit.tokens, (hit,), 0, missing, seen, additions, (source,), evictions, 0, request, request.truncations
        )

    # -- what callers hand over

    def handed_over(self, request: Request, given: KVCacheBlocks | Hit | None, tokens: int) -> Hit:
        """Return the hit that a caller hands over for ``request``; one that was found for it is not proved again.

        given: a Hit, the blocks of one, or None.
        tokens: that the hit is said to have.

        Raises BlockError for blocks that are not the pool's, ConfigError unless they are as many as ``tokens`` need and
        hold the tokens of the request, StalePlanError for blocks that were evicted since the look-up.
        """
        if isinstance(given, Hit):
            own = given.request is request and given.truncations == request.truncations
            if given.tokens == tokens and (own or not tokens):
                if self._is_stale(given):
                    raise _stale(request)
                return given
            hit = given if given.tokens else self._no_hit
        elif given is None:
            hit = self._no_hit
        else:
            groups = tuple(GroupHit(tokens, ids) for ids in given.ids)
            hit = Hit(tokens, groups, sources=given.sources, evictions=given.evictions, parent=given.parent)
        if not (any(len(part.blocks) for part in hit.groups) or any(hit.sources)):
            if tokens:
                raise ConfigError(f"{tokens} hit tokens without their blocks: hand over new_computed_blocks")
            return self._no_hit
        self._check_size(request, hit, tokens)
        if self._is_stale(hit):
            raise _stale(request)
        for part in hit.groups:
            self._pool.refuse_foreign(part.blocks[part.blocks != 0])
        if not self._holds_tokens_of(request, hit, tokens):
            raise ConfigError(
                f"the hit handed over for {request.request_id!r} holds other tokens: hand over what "
                "get_computed_blocks returned for this request"
            )
        return hit._replace(tokens=tokens)

    def _is_stale(self, hit: Hit) -> bool:
        """Return whether a block of ``hit`` lost its key since the look-up: it may hold other tokens by now."""
        keys = self._pool.keys
        if hit.evictions is None or hit.evictions == keys.evictions:
            return False
        read = (*(part.blocks for part in hit.groups), np.array(hit.sources, np.int32))
        return not all(keys.kept_since(ids[ids != 0], hit.evictions) for ids in read)

    def _check_size(self, request: Request, hit: Hit, tokens: int) -> None:
        """ConfigError unless the blocks of ``hit`` are as many as ``tokens`` say, in as many groups."""
        if tokens >= request.num_tokens:
            raise ConfigError(f"a hit of {tokens} tokens leaves nothing to compute of {request.num_tokens}")
        if len(hit.groups) != len(self._groups):
            raise ConfigError(f"a hit needs blocks of {len(self._groups)} groups, got {len(hit.groups)}")
        for group, part in zip(self._groups, hit.groups, strict=True):
            policy, is_fork = group.policy, hit.parent is not None
            if group.kind.by_digest and is_fork:
                continue
            whole = is_fork or policy.hits.copies or not group.kind.publishes or not tokens % policy.block_size
            if len(part.blocks) != policy.hits.columns(tokens) or not whole:
                raise ConfigError(
                    f"a hit of {tokens} tokens needs {tokens / policy.block_size:g} blocks in group {group.number}, "
                    f"got {len(part.blocks)}: hand over what get_computed_blocks returned"
                )

    def _holds_tokens_of(self, request: Request, hit: Hit, tokens: int) -> bool:
        """Return whether ``hit`` holds the first ``tokens`` tokens of ``request``.

        Of each group the last whole block is looked at, whose key is of all tokens before, and what is copied. Of a
        fork, the tokens and extra keys of the parent.
        """
        if hit.parent is not None:
            return request.begins_as(hit.parent, tokens)
        sources = hit.sources or (0,) * len(self._groups)
        return all(
            self._holds(group, request, part.blocks, source, tokens)
            for group, part, source in zip(self._groups, hit.groups, sources, strict=True)
        )

    def _holds(self, group: CacheGroup, request: Request, ids: Int32, source: int, tokens: int) -> bool:
        """Return whether a hit of ``tokens`` tokens may begin with ``ids`` and be copied from ``source``."""
        if len(ids) and ids[-1] and self._pool.keys.key_of(int(ids[-1])) != group.keys(request)[len(ids) - 1]:
            return False
        index, policy = group.index, group.policy
        try:
            found = policy.hits.source(index, request, tokens)
        except CacheError:  # nothing is known that its last column could be copied from
            return False
        if source == found or not (source and found):
            return source == found
        if group.states is not None:
            return index.is_state(request, source, tokens)
        return index.begins(request, source, *divmod(tokens, policy.block_size))

    # -- blocks to begin with

    def blocks_of(self, hit: Hit) -> KVCacheBlocks:
        """The blocks of a hit, 0 for null columns."""
        if not hit.tokens:
            return self.empty
        blocks = tuple(group.blocks for group in hit.groups)
        return KVCacheBlocks(blocks, self._pool, hit.evictions, hit.sources)

    def blocks_to_share(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """What a branch of ``request``, which no step in flight holds, begins with, and its tokens: those computed.

        Natural layout. CacheError for a request that holds no blocks.
        """
        row, tokens = self._residents.row_of(request), request.num_computed_tokens
        ids, sources = [], []
        for group in self._groups:
            held = group.rows.ids(row)
            full = len(held) if group.kind.by_digest else group.policy.hits.columns(tokens)
            ids.append(held[:full])
            partial = len(held) > full and (group.states is not None or tokens % group.policy.block_size)
            sources.append(int(held[full]) if partial and tokens else 0)
        return KVCacheBlocks(tuple(ids), self._pool, sources=tuple(sources), parent=request), tokens


def _stale(request: Request) -> StalePlanError:
    return StalePlanError(f"blocks of the hit handed over for {request.request_id!r} were evicted since: look up again")


def _without_first_no_hit(asked: Sequence[CacheGroup]) -> CacheGroup | None:
    """The first one asked, where its answer of no hit is the answer of all."""
    told = all(group.kind.publishes and not isinstance(group.policy.hits, PositionHits) for group in asked)
    return asked[0] if asked and told and asked[0].policy.hits.downward_closed else None


def _search_order(group: CacheGroup) -> tuple[bool, bool, int]:
    return group.kind.publishes, not group.policy.hits.downward_closed, group.number


def _trimmed(hit: GroupHit, tokens: int, block_size: int) -> GroupHit:
    """The first ``tokens`` of a hit of which every prefix is one."""
    return hit._replace(tokens=tokens, blocks=hit.blocks[: tokens // block_size])


Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class KVCacheBlocks:
    """Block ids of one request, per group.

    ids: one int32 array a group. pool: where the blocks are, None for ids that were put together by hand.
    evictions: of the pool when these blocks were found in a look-up; None for others.
    sources: of a hit that ends inside a block or at a state: the block of each group to copy its end from, 0: none.
    parent: whose blocks these are, for a branch of that request: they need no keys. None for all others.
    With slabs ``ids`` are the pool's numbers; what is read out (``blocks``, views) are ids within each group's class.
    """

    ids: tuple[Int32, ...]
    pool: BlockPool | None = field(default=None, repr=False)
    evictions: int | None = field(default=None, repr=False)
    sources: tuple[int, ...] = ()
    parent: Request | None = field(default=None, repr=False)

    @property
    def blocks(self) -> tuple[list[int], ...]:
        """``blocks[group][i]`` is a block id."""
        if self.pool is None:
            return tuple(ids.tolist() for ids in self.ids)
        return tuple(self.pool.local(group, ids).tolist() for group, ids in enumerate(self.ids))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Group by group. ConfigError when the numbers of groups differ."""
        if len(self.ids) != len(other.ids):
            raise ConfigError(f"blocks of {len(self.ids)} and of {len(other.ids)} groups cannot be joined")
        return KVCacheBlocks(tuple(np.concatenate(pair) for pair in zip(self.ids, other.ids, strict=True)), self.pool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and self.blocks == other.blocks

    __hash__ = None  # type: ignore[assignment]  # equal by content, and content is arrays

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Ids per group; None only when asked for and all groups are empty."""
        if allow_none and not any(len(ids) for ids in self.ids):
            return None
        return self.blocks

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids without key, null blocks left out. ConfigError with more than one group, or without a pool."""
        if len(self.ids) != 1:
            raise ConfigError(f"get_unhashed_block_ids needs exactly one group, these blocks have {len(self.ids)}")
        pool = self._known_pool()
        return [block for block in self.ids[0].tolist() if block != NULL_BLOCK and pool.keys.key_of(block) is None]

    def new_empty(self) -> KVCacheBlocks:
        """No block, in as many groups."""
        return KVCacheBlocks((_NONE,) * len(self.ids), self.pool)

    def views(self) -> tuple[Sequence[BlockView], ...]:
        """The same blocks as views that answer for their state. ConfigError without a pool."""
        pool = self._known_pool()
        return tuple(
            [BlockView(block, pool, number) for block, number in zip(local, ids.tolist(), strict=True)]
            for local, ids in zip(self.blocks, self.ids, strict=True)
        )

    def _known_pool(self) -> BlockPool:
        if self.pool is None:
            raise ConfigError("these blocks name no pool: use those that a manager handed out, or give pool=")
        return self.pool


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block with the attributes that users of vLLM know; always the state of now. number: the pool's."""

    block_id: int
    pool: BlockPool
    number: int

    @property
    def ref_cnt(self) -> int:
        """How many rows hold it."""
        return self.pool.ref_count(self.number)

    @property
    def block_hash(self) -> bytes | None:
        """The key under which it can be hit."""
        return self.pool.keys.key_of(self.number)

    @property
    def is_null(self) -> bool:
        """Whether it is the null block."""
        return self.block_id == NULL_BLOCK
