"""Prefix look-up: the longest cached prefix that all groups of layers can resume, and the blocks that hold it.

tokens      [ hit: every group has it | uncached_tokens: the first group asked has these too | unknown ... ]
attention     b0   b1   b2   b3         b4   b5
recurrent                    ^ state    (no state here: one would have made the hit longer)
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
    """The longest prefix that every group has, or a prefix that a caller passes in as one.

    A look-up makes it, and the caller passes it to the plan as it is. ``PrefixLookup.handed_over`` says what is checked
    then.

    Attributes:
        tokens: Tokens of the prefix.
        groups: One GroupHit a group, in the order of the groups.
        uncached_tokens: Tokens after the hit that are known: cached in the first group with keys that was asked, or
            remembered by the eviction policy, whichever is more. A state or window kept there would have helped.
        missing: By group, the token counts at which unknown tokens bounded the search; see GroupHit.
        seen: int32 arrays of the blocks on which the answer rests.
        additions: By group, ``additions`` of its index at the time of the search; see GroupHit.
        sources: By group, the block from which the end of the hit is copied (a partly used last block, or a state); 0
            for no copy.
        evictions: ``evictions`` of the pool at the time of the search, to detect a stale hit; ``None`` if the hit
            cannot become stale.
        branch_tokens: Token count up to which other requests had the same tokens; 0 if unknown.
        request: The request for which it was found.
        truncations: ``request.truncations`` at that time.
        parent: The running request that holds these blocks, for a branch of it.
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
    """Finds cached prefixes. Never changes the cache.

    Groups are asked in this order: groups without keys (they accept any prefix or reject all), groups for which every
    prefix of a hit is a hit (full attention), then the others.

    Args:
        residents: The resident requests and the groups.
        pool: The blocks.
        alignment: Every hit is a multiple of so many tokens.
        whole: A hit that a caller hands over is a multiple of so many tokens, so that it divides no state.
        hasher: The hasher of all requests; ``None`` without prefix caching.
        eviction_policy: Remembers how far earlier requests had the same tokens.

    Attributes:
        empty: No block in every group.
    """

    def __init__(
        self,
        residents: Residents,
        pool: BlockPool,
        *,
        alignment: int,
        whole: int,
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
        self._whole = whole
        self._eviction_policy = eviction_policy
        self._asked = sorted(groups, key=_search_order)
        self._no_hit = no_hit(len(groups))
        # If the first group has no block for a request, the answer is _miss, and no other group is asked.
        self._first = _without_first_no_hit(self._asked)
        alone = len(groups) == 1 and groups[0].policy.hits.downward_closed
        self._alone = groups[0] if alone else None
        missing = tuple((0,) if group is self._first else () for group in groups)
        self._miss = self._no_hit._replace(missing=missing, seen=(_NONE,) * len(groups))

    # -- cached prefixes

    def find(self, request: Request) -> Hit:
        """Find the longest cached prefix of ``request`` without its last token. O(blocks of the hit).

        Raises:
            ConfigError, CacheError: The request was made for another manager.
        """
        self._residents.refuse_stranger(request)
        if self._hasher is None or not request.reads_prefix_cache:
            return self._longest(request, 0)
        hit = self._longest(request, request.num_tokens - 1)
        known = self._eviction_policy.known_tokens(request, hit.tokens + hit.uncached_tokens)
        return hit._replace(uncached_tokens=known - hit.tokens, branch_tokens=known) if known else hit

    def find_without_states(self, request: Request, common: Hit) -> Hit:
        """Find the longest cached prefix in the groups that keep tokens, for a caller that brings the states.

            tokens      [ hit of all groups | more attention blocks: the caller brings the state after them | ... ]

        Columns of states are null in a hit that is longer than ``common``, the result of ``find``. As in vLLM, the
        result is ``common`` if a group has a state after the attention blocks. O(blocks of the hit).
        """
        limit = request.num_tokens - 1
        states = [group for group in self._groups if group.states is not None]
        tokens = [group for group in self._asked if group.states is None]
        if not states or self._hasher is None or not request.reads_prefix_cache:
            return common
        hit = self._agreed(request, limit, limit // self.alignment * self.alignment, tokens)
        search = Search(limit, limit, self.alignment)
        found = (one.policy.hits.longest(one.index, request, one.keys(request), search).tokens for one in states)
        if hit.tokens <= max(common.tokens, *found):
            return common
        groups = list(hit.groups)
        for group in states:
            groups[group.number] = GroupHit(hit.tokens, np.zeros(group.policy.hits.columns(hit.tokens), np.int32))
        sources = tuple([0 if group.states is not None else hit.sources[group.number] for group in self._groups])
        return hit._replace(groups=tuple(groups), sources=sources)

    def find_written(self, request: Request) -> Hit:
        """Find the longest prefix of all tokens of ``request`` that is cached and written. O(blocks of the prefix)."""
        hit = self._longest(request, 0 if self._hasher is None else request.num_tokens)
        while not all(self._pool.keys.all_written(part.blocks) for part in hit.groups):
            hit = self._longest(request, hit.tokens - 1)
        return hit

    def is_longest(self, request: Request, hit: Hit) -> bool:
        """Return whether ``hit`` is still the longest.

        It is if no block under it lost its key, no key that bounded it became known, and its last tokens would be
        copied from the same blocks. O(those keys) look-ups, one a group for full attention, and one array comparison
        over the blocks.
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
        """Return the longest prefix of ``limit_tokens`` tokens that every group has. O(blocks of the longest hit)."""
        candidate = limit_tokens // self.alignment * self.alignment
        if not candidate:
            return self._no_hit
        if self._first is not None and self._first.lacks_first(request):
            return self._miss
        if self._alone is not None:
            return self._longest_of(self._alone, request, Search(candidate, limit_tokens, self.alignment))
        return self._agreed(request, limit_tokens, candidate, self._asked)

    def _agreed(self, request: Request, limit_tokens: int, candidate: int, groups: Sequence[CacheGroup]) -> Hit:
        """Return the longest hit of at most ``candidate`` tokens on which ``groups`` agree, asked in this order.

        Each group may lower the candidate. All groups are asked in turn until no group lowers it (a fixed point,
        because the candidate only falls). A group that drops blocks for EAGLE looks one column after the candidate,
        once. It looks again after a group that does not drop has lowered the candidate.
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
            for group in groups:
                before, past = hits.get(group.number), int(group.kind.drops and group.number not in dropped)
                if before is not None and before.tokens == candidate and not past:
                    continue  # it answered this before
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
            none = self._no_hit.groups
            asked = tuple([hits[at] if at in hits else none[at] for at in range(len(none))])  # faster than get()
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
        """Return the longest hit of the only group. Every prefix of its hits is a hit, so one search is enough."""
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
        """Return the hit that a caller passes in for ``request``.

        A hit that was found for it is only checked for evicted blocks; another one also for size, pool and tokens.

        Args:
            request: The request that would adopt the hit.
            given: A Hit, the blocks of one, or ``None``.
            tokens: Tokens of the hit, as the caller says.

        Raises:
            BlockError: A block is not one of the pool.
            ConfigError: The number of blocks does not match ``tokens``, or they hold other tokens.
            StalePlanError: A block was evicted since the look-up.
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
                raise ConfigError(f"{tokens} hit tokens without their blocks: pass new_computed_blocks")
            return self._no_hit
        self._check_size(request, hit, tokens)
        if self._is_stale(hit):
            raise _stale(request)
        for part in hit.groups:
            self._pool.refuse_foreign(part.blocks[part.blocks != 0])
        if not self._holds_tokens_of(request, hit, tokens):
            raise ConfigError(
                f"the hit passed in for {request.request_id!r} holds other tokens: pass the blocks that "
                "get_computed_blocks returned for this request"
            )
        return hit._replace(tokens=tokens)

    def _is_stale(self, hit: Hit) -> bool:
        """Return whether a block of ``hit`` lost its key since the look-up, so that it may hold other tokens."""
        keys = self._pool.keys
        if hit.evictions is None or hit.evictions == keys.evictions:
            return False
        read = (*(part.blocks for part in hit.groups), np.array(hit.sources, np.int32))
        return not all(keys.kept_since(ids[ids != 0], hit.evictions) for ids in read)

    def _check_size(self, request: Request, hit: Hit, tokens: int) -> None:
        """Raise ConfigError unless ``hit`` has as many blocks and groups as ``tokens`` need."""
        if tokens >= request.num_tokens:
            raise ConfigError(f"a hit of {tokens} tokens leaves nothing to compute of {request.num_tokens}")
        is_fork = hit.parent is not None
        if tokens % self._whole and not is_fork:
            raise ConfigError(
                f"a hit of {tokens} tokens ends inside a state of {self._whole} tokens (tokens_per_state): cut it to "
                f"{tokens // self._whole * self._whole}"
            )
        if len(hit.groups) != len(self._groups):
            raise ConfigError(f"a hit needs blocks of {len(self._groups)} groups, got {len(hit.groups)}")
        for group, part in zip(self._groups, hit.groups, strict=True):
            policy = group.policy
            if group.kind.by_digest and is_fork:
                continue
            whole = is_fork or policy.hits.copies or not group.kind.publishes or not tokens % policy.block_size
            columns = policy.hits.columns(tokens) if is_fork or group.kind.publishes else 0
            if len(part.blocks) != columns or not whole:
                raise ConfigError(
                    f"a hit of {tokens} tokens needs {tokens / policy.block_size:g} blocks in group {group.number}, "
                    f"got {len(part.blocks)}: pass the blocks that get_computed_blocks returned"
                )

    def _holds_tokens_of(self, request: Request, hit: Hit, tokens: int) -> bool:
        """Return whether ``hit`` holds the first ``tokens`` tokens of ``request``.

        Two blocks of each group are compared: the last whole one, because its key covers all tokens before it, and the
        one to copy from. The hit of a fork is compared by the tokens and extra keys of the parent.
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
        if group.kind.keeps_ring and group.kind.publishes and group.index.state_at(request, tokens) is None:
            return False
        try:
            found = policy.hits.source(index, request, tokens)
        except CacheError:  # no cached block begins with the tokens of its last column
            return False
        if source == found or not (source and found):
            return source == found
        if group.kind.in_place:
            return index.is_state(request, source, tokens)
        return index.begins(request, source, *divmod(tokens, policy.block_size))

    # -- blocks to begin with

    def blocks_of(self, hit: Hit) -> KVCacheBlocks:
        """Return the blocks of ``hit``, 0 for null columns."""
        if not hit.tokens:
            return self.empty
        blocks = tuple(group.blocks for group in hit.groups)
        return KVCacheBlocks(blocks, self._pool, hit.evictions, hit.sources)

    def blocks_to_share(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Return the blocks with which a branch of ``request`` begins, and its computed tokens. Natural layout.

        Raises:
            CacheError: The request holds no blocks.
        """
        row, tokens = self._residents.row_of(request), request.num_computed_tokens
        ids, sources = [], []
        for group in self._groups:
            held = group.rows.ids(row)
            full = len(held) if group.kind.by_digest else group.policy.hits.columns(tokens)
            ids.append(held[:full])
            partial = len(held) > full and (group.kind.in_place or tokens % group.policy.block_size)
            sources.append(int(held[full]) if partial and tokens else 0)
        return KVCacheBlocks(tuple(ids), self._pool, sources=tuple(sources), parent=request), tokens


def _stale(request: Request) -> StalePlanError:
    return StalePlanError(f"blocks of the hit passed in for {request.request_id!r} were evicted since: look up again")


def _without_first_no_hit(asked: Sequence[CacheGroup]) -> CacheGroup | None:
    """Return the first group asked if no request has a hit without its first block, else ``None``."""
    keyed = all(group.kind.publishes and not isinstance(group.policy.hits, PositionHits) for group in asked)
    return asked[0] if asked and keyed and asked[0].policy.hits.downward_closed else None


def _search_order(group: CacheGroup) -> tuple[bool, bool, int]:
    return group.kind.publishes, not group.policy.hits.downward_closed, group.number


def _trimmed(hit: GroupHit, tokens: int, block_size: int) -> GroupHit:
    """Return the first ``tokens`` tokens of a hit whose prefixes are all hits."""
    return hit._replace(tokens=tokens, blocks=hit.blocks[: tokens // block_size])


Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class KVCacheBlocks:
    """Block ids of one request, by group.

    With slabs, ``ids`` are the pool's numbers. ``blocks`` and ``views`` give the ids within the class of each group.

    Args:
        ids: One int32 array a group.
        pool: The pool of the blocks; ``None`` for ids that were put together by hand.
        evictions: ``evictions`` of the pool when a look-up found these blocks; ``None`` for other blocks.
        sources: By group, the block from which the end of a hit is copied; 0 for no copy.
        parent: The request that holds the blocks, for a branch of it: they need no keys.
    """

    ids: tuple[Int32, ...]
    pool: BlockPool | None = field(default=None, repr=False)
    evictions: int | None = field(default=None, repr=False)
    sources: tuple[int, ...] = ()
    parent: Request | None = field(default=None, repr=False)

    @property
    def blocks(self) -> tuple[list[int], ...]:
        """Block ids: ``blocks[group][column]``."""
        if self.pool is None:
            return tuple(ids.tolist() for ids in self.ids)
        return tuple(self.pool.local(group, ids).tolist() for group, ids in enumerate(self.ids))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Join two lists of blocks group by group. Raises ConfigError if their numbers of groups differ."""
        if len(self.ids) != len(other.ids):
            raise ConfigError(f"blocks of {len(self.ids)} and of {len(other.ids)} groups cannot be joined")
        return KVCacheBlocks(tuple(np.concatenate(pair) for pair in zip(self.ids, other.ids, strict=True)), self.pool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and self.blocks == other.blocks

    __hash__ = None  # type: ignore[assignment]  # equal by content, and content is arrays

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Return the ids of each group.

        Args:
            allow_none: Return ``None`` if no group has a block.
        """
        if allow_none and not any(len(ids) for ids in self.ids):
            return None
        return self.blocks

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the ids of blocks without a key, null blocks left out.

        Raises:
            ConfigError: There is more than one group, or no pool.
        """
        if len(self.ids) != 1:
            raise ConfigError(f"get_unhashed_block_ids needs exactly one group, these blocks have {len(self.ids)}")
        pool = self._known_pool()
        return [block for block in self.ids[0].tolist() if block != NULL_BLOCK and pool.keys.key_of(block) is None]

    def new_empty(self) -> KVCacheBlocks:
        """Return a list without blocks, for as many groups."""
        return KVCacheBlocks((_NONE,) * len(self.ids), self.pool)

    def views(self) -> tuple[Sequence[BlockView], ...]:
        """Return the blocks as views with the attributes that users of vLLM know.

        Raises:
            ConfigError: There is no pool.
        """
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
    """A block with the attributes that users of vLLM know. It always shows the present state.

    Attributes:
        block_id: Id within the class of its group.
        pool: The pool of the block.
        number: The pool's number of the block.
    """

    block_id: int
    pool: BlockPool
    number: int

    @property
    def ref_cnt(self) -> int:
        """Number of rows that hold it."""
        return self.pool.ref_count(self.number)

    @property
    def block_hash(self) -> bytes | None:
        """The key under which it can be hit."""
        return self.pool.keys.key_of(self.number)

    @property
    def is_null(self) -> bool:
        """Whether it is the null block."""
        return self.block_id == NULL_BLOCK
