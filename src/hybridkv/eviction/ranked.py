"""Resume points kept by value: their blocks counted, the least valuable given up, others remembered.

    kept      in the tree (resume_points), its blocks needed (blocks); ranked unless giving it up would free nothing
    ghost     given up or declined, and still credited with the hits that it would have had

A block that no kept resume point needs and no request holds is given up at once: it can never be hit with profit. So a
step that needs room takes nothing but blocks given up, and resume points are given up until there are enough
(docs/design/0019). Prefixes are known by their keys long after their blocks are gone: so it stays known where
requests branch off.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.index import KnownTokens, add_known, leading_known
from hybridkv.cache.journal import BlockFact, Cleared, Ids
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.statistics import (
    CacheStatistics,
    ResumePointClassStatistics,
    ResumePointStatistics,
    TenantStatistics,
)
from hybridkv.eviction.audit import check_points
from hybridkv.eviction.blocks import PointBlocks
from hybridkv.eviction.hazard import Ranking, Ring, class_of, least_gap_s
from hybridkv.eviction.resume_points import (
    NEVER,
    Kind,
    Place,
    ResumePoint,
    ResumePointTree,
    hint_of,
    in_words,
    is_of_session,
    kind_of,
    of_session,
    parts_of,
)
from hybridkv.eviction.tenants import Standing, TenantShares, Weights
from hybridkv.request import NO_HINTS, Request

Int64 = NDArray[np.int64]

_MOST_GHOST_ENTRIES: Final = 4000
"""Of each tenant; the oldest go first."""

_MORE_BYTES: Final = 1 << 30

_REMEMBERED: Final = 5
"""Keys that are known, of as many as there can be blocks: those cached, and four times as many."""


def _three() -> list[int]:
    return [0] * 3


@dataclass(slots=True)
class PointCounts:
    """What became of resume points so far, by kind and class, and what tenants found.

    by_kind: kept, hits, missed, declined, given up, and given up or declined without a hit.
    by_class: hits, missed, given up.
    asked: by tenant, its requests, their prompt tokens and hit tokens.
    missed_tokens: that the deepest ghosts would have been hit for.
    missed_a_gib_more: of these, those of ghosts that a GiB more of memory would have kept.
    evicted_bytes: so far. evicted_at: what they were when each ghost, by its serial, was given up.
    """

    by_kind: dict[Kind, list[int]] = field(default_factory=lambda: {kind: [0] * 6 for kind in Kind})
    by_class: dict[tuple[int, int, int], list[int]] = field(default_factory=lambda: defaultdict(_three))
    asked: dict[int, list[int]] = field(default_factory=dict)
    missed_tokens: int = 0
    missed_a_gib_more: int = 0
    evicted_bytes: int = 0
    evicted_at: dict[int, int] = field(default_factory=dict)

    def note_missed(self, point: ResumePoint, tokens: int) -> None:
        """Count that ``point``, a ghost, would have been hit for ``tokens`` more tokens."""
        self.by_kind[point.kind][2] += 1
        self.by_class[class_of(point)][1] += 1
        self.missed_tokens += tokens
        if self.evicted_bytes - self.evicted_at.get(point.serial, 0) <= _MORE_BYTES:
            self.missed_a_gib_more += tokens

    def note_evicted(self, point: ResumePoint, size: int, *, declined: bool) -> None:
        """Count that ``point``, which needed ``size`` bytes alone, becomes a ghost."""
        counts = self.by_kind[point.kind]
        counts[3 if declined else 4] += 1
        counts[5] += not (declined or point.hits)
        if not declined:
            self.by_class[class_of(point)][2] += 1
        self.evicted_bytes += size
        self.evicted_at[point.serial] = self.evicted_bytes

    def kinds(self, kept: Iterable[ResumePoint]) -> tuple[ResumePointStatistics, ...]:
        """Return the counts of each kind. kept: the resume points kept now. O(kept)."""
        of_class = Counter(map(class_of, kept))
        classes: dict[Kind, list[ResumePointClassStatistics]] = {kind: [] for kind in Kind}
        kept_of: Counter[Kind] = Counter()
        for key in sorted({*of_class, *self.by_class}):
            (kind, hint), hits, gap = parts_of(key[0]), key[1], key[2]
            kept_of[kind] += of_class[key]
            counts = self.by_class.get(key, [0] * 3)
            found = ResumePointClassStatistics(in_words(hint), hits, least_gap_s(hits, gap), of_class[key], *counts)
            classes[kind].append(found)
        return tuple(
            ResumePointStatistics(kind.name.lower(), tuple(classes[kind]), kept_of[kind], *counts)
            for kind, counts in self.by_kind.items()
        )


@dataclass(slots=True)
class _Session:
    """What a row resumed from: the kept resume point that it consumed, and how long its prefix was not used."""

    consumed: ResumePoint | None = None
    gap: float | None = None


@dataclass(slots=True)
class _Tenant:
    """What is kept of a tenant that has had a request. points: how many may be given up. standing: its place in order.

    awaited: those that a request waits for, which go after all that ``ranking`` ranks.
    """

    ranking: Ranking
    awaited: Ring = field(default_factory=Ring)
    points: int = 0
    standing: Standing | None = None


class TenantRankings:
    """Rank the ends of each tenant, and say whose end goes next. What a tenant needs is made for its first request.

    ranking: makes one. memory_bytes: of which ``shares`` are. weights: bytes kept of each tenant, followed from now on.
    For reading: shares; tenants, by number, that have had a request.
    """

    def __init__(
        self, ranking: Callable[[], Ranking], shares: TenantShares, memory_bytes: int, weights: Weights
    ) -> None:
        self.shares = shares
        self._ranking = ranking
        self._memory_bytes = memory_bytes
        self._weights = weights
        self.tenants = {0: _Tenant(ranking())}
        self._numbers = shares.numbers()
        self._order: list[Standing] = []
        self._moved = set[int]()

    def tenant_of(self, request: Request) -> int:
        """Return the number of the tenant of ``request``."""
        return 0 if request.tenant is None else self._numbers.get(request.tenant, 0)

    def of(self, tenant: int) -> Ranking:
        """Return the ranking of ``tenant``."""
        return self._of(tenant).ranking

    def _of(self, tenant: int) -> _Tenant:
        found = self.tenants.get(tenant)
        if found is None:
            found = self.tenants[tenant] = _Tenant(self._ranking())
        return found

    def add(self, point: ResumePoint, now: float) -> None:
        """Rank ``point``; one that a request waits for goes after all others of its tenant."""
        tenant = self._of(point.tenant)
        if point.awaited:
            tenant.awaited.add(point)
        else:
            tenant.ranking.add(point, now)
        tenant.points += 1
        if tenant.points == 1:
            self._moved.add(point.tenant)

    def remove(self, point: ResumePoint) -> None:
        """Rank ``point`` no longer."""
        tenant = self.tenants[point.tenant]
        if point.awaited:
            tenant.awaited.remove(point)
        else:
            tenant.ranking.remove(point)
        tenant.points -= 1
        if not tenant.points:
            self._moved.add(point.tenant)

    def lowest(self, now: float) -> ResumePoint | None:
        """Return the resume point to give up next: of the tenants that have one, the first that gives way.

        O(log tenants) and a shift of a list, for each tenant whose bytes have changed since the last call.
        """
        if len(self.shares.of) == 1:
            tenant = self.tenants[0]
        else:
            self._place()
            if not self._order:
                return None
            tenant = self.tenants[self._order[0][-1]]
        found = tenant.ranking.lowest(now)
        return tenant.awaited.outer()[0] if found is None and tenant.awaited.points else found

    def _place(self) -> None:
        """Bring tenants whose bytes changed, or whose first or last resume point came or went, to their places."""
        for number in self._moved | self._weights.changed:
            tenant = self.tenants.get(number)
            if tenant is None:
                continue
            if tenant.standing is not None:
                del self._order[bisect_left(self._order, tenant.standing)]
            tenant.standing = self._standing(number) if tenant.points else None
            if tenant.standing is not None:
                insort(self._order, tenant.standing)
        self._moved.clear()
        self._weights.changed.clear()

    def _standing(self, tenant: int) -> Standing:
        return self.shares.standing(tenant, self._weights.of[tenant], self._memory_bytes)

    def prefers(self, point: ResumePoint, other: ResumePoint, now: float) -> bool:
        """Return whether ``other``, which is kept, goes for ``point``: of another tenant, if that gives way first."""
        if point.tenant == other.tenant:
            return not other.awaited and self.of(point.tenant).prefers(point, other, now)
        return self._standing(other.tenant) < self._standing(point.tenant)

    def check(self, ranked: Mapping[int, int]) -> Iterator[str]:
        """Yield a line for each violated invariant. ranked: resume points of each tenant that may be given up."""
        for number, tenant in self.tenants.items():
            yield from tenant.ranking.check()
            yield from (
                f"no request waits for the awaited resume point of {point.tokens} tokens"
                for _, _, point in tenant.awaited.points
                if not point.awaited
            )
            if tenant.points != ranked.get(number, 0):
                yield f"tenant {number} counts {tenant.points} ranked resume points, not {ranked.get(number, 0)}"
        self._place()
        if len(self.shares.of) > 1 and self._order != sorted(map(self._standing, ranked)):
            yield f"tenants give way as {self._order}, not by what they have too much"


class RankedResumePoints:
    """Keep resume points by what they are worth.

    blocks: what resume points need of the pool.
    rankings: which resume point goes next.
    facts: what happened to blocks since it was read last, see Journal.blocks.
    hash_block: tokens.
    """

    ranks = True

    def __init__(
        self, pool: BlockPool, *, blocks: PointBlocks, rankings: TenantRankings, facts: list[BlockFact], hash_block: int
    ) -> None:
        self._pool = pool
        self._facts = facts
        self._space = blocks.space
        self._blocks = blocks
        self._rankings = rankings
        self._counts = PointCounts()
        self._clock = pool.journal.clock
        self._hash_block = hash_block
        self._none = [0] * len(pool.bases)
        self._tree = ResumePointTree(hash_block)
        self._ghost_entries = defaultdict[int, dict[int, ResumePoint]](dict)  # by tenant and serial, the oldest first
        self._known = defaultdict[int, KnownTokens](lambda: KnownTokens(_REMEMBERED * pool.num_blocks))
        self._sessions: dict[int, _Session] = {}
        self._parked: dict[int, ResumePoint] = {}  # those whose blocks are all held, by serial
        self._stale: dict[int, ResumePoint] = {}  # those whose worth may have changed, by serial

    def _tenant_of(self, request: Request) -> int:
        return 0 if request.tenant is None else self._rankings.tenant_of(request)

    def _ranking_of(self, tenant: int) -> Ranking:
        found = self._rankings.tenants.get(tenant)
        return self._rankings.of(tenant) if found is None else found.ranking

    # -- what happens to requests

    def begin(self, request: Request, hit_tokens: int) -> None:
        """Count hits of the deepest resume point of its prompt that is kept, and of the deepest that is known.

        One that was given up, and is hit before its blocks are taken, is kept again. O(its hash blocks).
        """
        self.settle()
        now = self._clock()
        self._unpark(now)
        session = self._sessions[request.row] = _Session()
        if request.first_hit_tokens is not None or not request.reads_prefix_cache:
            return
        tenant = self._tenant_of(request)
        self._ranking_of(tenant).note_request(now)
        asked = self._counts.asked.setdefault(tenant, [0] * 3)
        asked[0] += 1
        asked[1] += request.num_prompt_tokens
        asked[2] += hit_tokens
        found = self._tree.find(request, hit_tokens)
        if found is not None and not found.kept:
            self._insert(request, found, now, is_hit=True)
        path = self._tree.back(request, request.num_prompt_tokens - 1)
        deepest = next(path, None)
        consumed = deepest if deepest is None or deepest.kept else next((one for one in path if one.kept), None)
        session.consumed = consumed
        if deepest is not None:
            session.gap = now - deepest.used
            if consumed is not None:
                self._counts.by_kind[consumed.kind][1] += 1
                self._counts.by_class[class_of(consumed)][0] += 1
                self._hit(consumed, request, now)
            if deepest is not consumed:
                self._counts.note_missed(deepest, deepest.tokens - (0 if consumed is None else consumed.tokens))
                self._hit(deepest, request, now)
        self._note_branch(request, consumed, hit_tokens, now)
        add_known(self._known[tenant], request.hashes)

    def _hit(self, point: ResumePoint, request: Request, now: float) -> None:
        """Let the ranking learn that ``request`` hits ``point``, or would have."""
        was_ranked = self._unrank(point)
        self._ranking_of(point.tenant).hit(point, now)
        if was_ranked:
            self._rank(point, now)
        if is_of_session(point.hint):  # it was kept: what does the session hint now?
            self._note_hint(point, of_session(request.hints), now)

    def _note_branch(self, request: Request, consumed: ResumePoint | None, hit_tokens: int, now: float) -> None:
        """Keep a resume point where ``request`` leaves what others had, though its blocks were there without one."""
        tokens = hit_tokens // self._hash_block * self._hash_block
        before = 0 if consumed is None else consumed.tokens
        if tokens >= before + self._hash_block:
            place = self._tree.place_of(request, tokens)
            point = None if place is None else self._tree.at(place)
            if place is not None and point is None:
                point = self._tree.make(place, Kind.BRANCH, tokens, now, None, self._tenant_of(request))
            if point is not None and not point.kept:
                self._insert(request, point, now)

    def expect(self, request: Request) -> None:
        """Let what ``request`` begins with go last until ``expect_no_longer``. O(its hash blocks)."""
        self.settle()
        self._await(self._tree.expect(request))

    def expect_no_longer(self, request: Request) -> None:
        """Note that ``request`` begins, or never will. O(waiting)."""
        self.settle()
        self._await(self._tree.expect_no_longer(request))

    def _await(self, changed: Iterable[tuple[ResumePoint, bool]]) -> None:
        now = self._clock()
        for point, awaited in changed:
            was_ranked = self._unrank(point)
            point.awaited = awaited
            if was_ranked:
                self._rank(point, now)

    def known_tokens(self, request: Request) -> int:
        """Return the known whole hash blocks before the last token of a new prompt, in tokens. O(log blocks)."""
        if request.first_hit_tokens is not None:
            return 0  # what it computed itself
        most = (request.num_prompt_tokens - 1) // self._hash_block
        known = self._known[self._tenant_of(request)]
        return leading_known(known, request.hashes[:most]) * self._hash_block

    # -- resume points come and go

    def admits(self, request: Request, tokens: int, needs: Sequence[int]) -> bool:
        """Return whether all that must be given up for a resume point is worth less. One declined is remembered."""
        self.settle()
        wanted, now = self._pool.by_class(needs), self._clock()
        if self._space.spares(wanted, self._none):
            return True
        place = self._tree.place_of(request, tokens)
        if place is None:
            return False
        known = self._tree.at(place)
        point = self._make(request, place, tokens, now, ended=False) if known is None else known
        parent = self._tree.parent_of(request, tokens)
        if not point.kept:
            self._adopt(request, point, now)
            point.saved = self._blocks.saving(request, point, parent, wanted)
        admitted = self._give_way(wanted, now, point)
        if not point.kept and not admitted:
            self._record_evicted(point, parent, now, declined=True)
        elif known is None:
            self._forget(point, now)  # it is made when its blocks are there
        return admitted

    def keep(self, request: Request, tokens: int, states: Sequence[int], *, ended: bool) -> None:
        """Keep the resume point at ``tokens``. O(blocks after its parent + resume points that begin as it does).

        One whose tokens are not all published, or shorter than a hash block, is not kept: its blocks go first.
        """
        self.settle()
        now = self._clock()
        if ended:
            self._unpark(now)
            add_known(self._known[self._tenant_of(request)], request.hashes)
        place = self._tree.place_of(request, tokens)
        if place is None:
            return
        point = self._tree.at(place) or self._make(request, place, tokens, now, ended=ended)
        if request.hints is not NO_HINTS:
            self._note_hint(point, hint_of(request, tokens), now)
        if point.kept and states:
            self._release(point, now)  # some of its states were lost, and are there again
        if point.kept or self._insert(request, point, now):
            self._pass(request, tokens, now)

    def _pass(self, request: Request, tokens: int, now: float) -> None:
        """Promise no more hits of what ``request`` resumed from, now that its session has reached ``tokens``."""
        session = self._sessions.get(request.row)
        passed = None if session is None else session.consumed
        if session is None or passed is None or passed.tokens >= tokens:
            return
        session.consumed = None
        if passed.tenant == self._tenant_of(request) and is_of_session(passed.hint):
            self._note_hint(passed, NEVER, now)  # other tenants may still resume there

    def _make(self, request: Request, place: Place, tokens: int, now: float, *, ended: bool) -> ResumePoint:
        session = self._sessions.get(request.row)
        gap = None if session is None else session.gap
        kind, tenant = kind_of(request, tokens, ended=ended), self._tenant_of(request)
        point = self._tree.make(place, kind, tokens, now, gap, tenant)
        self._note_hint(point, hint_of(request, tokens), now)
        return point

    def _note_hint(self, point: ResumePoint, hint: int, now: float) -> None:
        """Note what hints hint of ``point``."""
        if hint != point.hint:
            was_ranked = self._unrank(point)
            self._ranking_of(point.tenant).note_hint(point, hint, now)
            if was_ranked:
                self._rank(point, now)

    def _adopt(self, request: Request, point: ResumePoint, now: float) -> None:
        """Give ``point``, not kept, to the tenant of ``request``; another's ranking knows it no longer."""
        tenant = self._tenant_of(request)
        if point.tenant != tenant:
            self._ranking_of(point.tenant).forget(point, now)
            self._ghost_entries[point.tenant].pop(point.serial, None)
            point.tenant = tenant

    def _insert(self, request: Request, point: ResumePoint, now: float, *, is_hit: bool = False) -> bool:
        """Keep ``point``, a ghost or new; forget it, and return False, if its tokens are not there.

        is_hit: its age ends with the hit that follows, not now.
        """
        self._adopt(request, point, now)
        changed = self._blocks.put(request, point, self._tree.parent_of(request, point.tokens))
        if changed is None:
            self._forget(point, now)
            return False
        self._counts.by_kind[point.kind][0] += 1
        self._counts.evicted_at.pop(point.serial, None)
        self._ghost_entries[point.tenant].pop(point.serial, None)
        if not is_hit:
            self._ranking_of(point.tenant).kept(point, now)
        if self._tree.waiting:
            self._await(self._tree.note_kept(point))
        self._note_stale(changed)
        return True

    def _release(self, point: ResumePoint, now: float) -> None:
        """Keep ``point`` no longer, and remember it. O(its segment times its children)."""
        self._unlist(point)
        parent, changed = self._blocks.take_out(point)
        if point.awaited:
            self._await(self._tree.note_evicted(point))
        self._record_evicted(point, parent, now, declined=False)
        self._note_stale(changed)

    def _unlist(self, point: ResumePoint) -> None:
        """Neither give ``point`` up nor look at what it saves."""
        self._unrank(point)
        self._parked.pop(point.serial, None)
        self._stale.pop(point.serial, None)

    # -- ghosts

    def _record_evicted(self, point: ResumePoint, parent: ResumePoint | None, now: float, *, declined: bool) -> None:
        """Make ``point``, not kept, a ghost; forget the oldest of too many. parent: serves its requests now.

        A parent of another tenant inherits nothing.
        """
        is_heir = parent is not None and parent is not self._tree.root and parent.tenant == point.tenant
        self._ranking_of(point.tenant).evicted(point, parent if is_heir else None, now, declined=declined)
        before = 0 if parent is None else parent.tokens
        size = round((point.tokens - before) / point.saved) if point.saved else 0
        self._counts.note_evicted(point, size, declined=declined)
        ghosts = self._ghost_entries[point.tenant]
        ghosts.pop(point.serial, None)
        ghosts[point.serial] = point
        if len(ghosts) > _MOST_GHOST_ENTRIES:
            self._forget(next(iter(ghosts.values())), now)

    def _forget(self, point: ResumePoint, now: float) -> None:
        """Know ``point``, not kept, no longer."""
        self._ghost_entries[point.tenant].pop(point.serial, None)
        self._tree.forget(point)
        self._counts.evicted_at.pop(point.serial, None)
        self._ranking_of(point.tenant).forget(point, now)

    # -- room

    def make_way(self, n: int, group: int) -> None:
        """Give up resume points until ``n`` blocks of ``group`` are free or given up. O(rings) each."""
        self.settle()
        of = self._pool.classes[group]
        if self._space.has_spare(n, of):
            return
        needs, now = self._none.copy(), self._clock()
        needs[of] = n
        while not self._space.spares(needs, self._none):
            point = self._lowest(now)
            if point is None:
                break
            self._release(point, now)

    def _give_way(self, needs: Sequence[int], now: float, wants: ResumePoint) -> bool:
        """Give up resume points worth less than ``wants`` until ``needs`` fit. Return whether they do."""
        more, victims, gone = list(self._none), list[ResumePoint](), Counter[int]()
        enough, taken = True, dict[int, int]()
        while not self._space.spares(needs, more):
            point = self._lowest(now)
            if point is None or not self._rankings.prefers(wants, point, now):
                enough = False
                break
            self._unrank(point)
            victims.append(point)
            more = [a + b for a, b in zip(more, self._blocks.frees(point, gone, taken), strict=True)]
        self._blocks.put_back(taken)
        for point in victims:
            if not enough or self._space.spares(needs, self._none):
                self._rank(point, now)
            else:
                self._release(point, now)
        return enough

    def _lowest(self, now: float) -> ResumePoint | None:
        """Return the resume point to give up next, still ranked. Those whose blocks are all held are set aside."""
        self._renew_stale(now)
        again = bool(self._parked)
        while True:
            lowest = self._rankings.lowest(now)
            if lowest is None:
                if not again:
                    return None
                again = False
                self._unpark(now)
                continue
            saved, held = self._blocks.look(lowest)
            if saved != lowest.saved:  # a resume point that is not its relative came or went
                self._change_saved(lowest, saved, now)
            elif not held:
                return lowest
            else:
                self._unrank(lowest)
                self._parked[lowest.serial] = lowest

    # -- ranked

    def _rank(self, point: ResumePoint, now: float) -> None:
        """Let ``point`` be given up, if that frees anything as far as that is known."""
        if point.saved > 0.0 and point.kept and not point.ranked and point.serial not in self._parked:
            point.ranked = True
            self._rankings.add(point, now)

    def _unrank(self, point: ResumePoint) -> bool:
        """Let ``point`` not be given up. Return whether it was ranked."""
        was, point.ranked = point.ranked, False
        if was:
            self._rankings.remove(point)
        return was

    def _unpark(self, now: float) -> None:
        """Rank those whose blocks were all held: they may be free by now."""
        if self._parked:
            parked, self._parked = self._parked, {}
            for point in parked.values():
                self._rank(point, now)

    def _note_stale(self, points: Iterable[ResumePoint]) -> None:
        """Note that what ``points`` save may have changed: it is worked out before anything is ranked by it."""
        self._stale.update([(point.serial, point) for point in points if point is not self._tree.root])

    def _renew_stale(self, now: float) -> None:
        stale, self._stale = self._stale, {}
        for point in stale.values():
            saved = self._blocks.saved(point)
            if saved != point.saved or not point.ranked:
                self._change_saved(point, saved, now)

    def _change_saved(self, point: ResumePoint, saved: float, now: float) -> None:
        """Rank ``point`` by what it saves a byte from now on."""
        self._unrank(point)
        point.saved = saved
        self._rank(point, now)

    # -- what happens to blocks

    def all_needed(self, ids: Ids) -> bool:
        """Return whether some resume point needs each of ``ids``, so that none is given up when it is released."""
        self.settle()
        return self._blocks.all_needed(ids)

    def settle(self) -> None:
        """Read what happened to blocks since the last call."""
        if not self._facts:
            return
        facts = self._facts.copy()
        self._facts.clear()
        if Cleared in map(type, facts):
            self._forget_all()
            facts = facts[1 + max(place for place, fact in enumerate(facts) if isinstance(fact, Cleared)) :]
        lost = self._blocks.read(facts)
        if not lost:
            return
        broken, owned_alone = self._blocks.lose(lost)
        if not owned_alone:
            self._recount(broken)
            return
        now = self._clock()
        for point in sorted(broken, key=lambda one: (one.tokens, one.serial), reverse=True):
            self._release(point, now)

    def _forget_all(self) -> None:
        """Keep and remember nothing, since all keys were lost at once."""
        now = self._clock()
        for point in self._tree.points.values():
            self._unrank(point)
            self._ranking_of(point.tenant).forget(point, now)
        self._tree.clear()
        for remembered in (self._ghost_entries, self._blocks, self._sessions, self._parked, self._stale, self._known):
            remembered.clear()

    def _recount(self, broken: set[ResumePoint]) -> None:
        """Count anew, without ``broken`` ones and those whose tokens are gone. O(kept ones and segments)."""
        now, cut = self._clock(), set[ResumePoint]()
        kept = self._tree.kept()
        for point in kept:
            if point.parent in cut or self._blocks.segment(point) is None:
                cut.add(point)
        gone = [one for one in kept if one in cut or one in broken or self._blocks.window(one) is None]
        for point in reversed(gone):  # children first
            self._unlist(point)
            self._blocks.cut(point)
            self._await(self._tree.note_evicted(point))
            self._record_evicted(point, None, now, declined=False)
        left = self._tree.kept()
        self._blocks.recount(left)
        self._note_stale(left)

    # -- statistics, and what must hold

    def add_statistics(self, counts: CacheStatistics) -> CacheStatistics:
        """Return ``counts`` with those of resume points and tenants. O(resume points)."""
        self.settle()
        shares, found = self._rankings.shares.of, self._counts
        asked = [found.asked.get(number, [0] * 3) for number in range(len(shares))]
        tenants = zip(shares, self._blocks.weights.of, asked, strict=True)
        return replace(
            counts,
            ends=found.kinds(point for point in self._tree.points.values() if point.kept),
            tenants=tuple(TenantStatistics(share.name, weight, *counted) for share, weight, counted in tenants)
            if len(shares) > 1
            else (),
            missed_tokens=found.missed_tokens,
            missed_a_gib_more=found.missed_a_gib_more,
        )

    def check(self) -> Iterator[str]:
        """Yield a line for each violated invariant. O(resume points and segments)."""
        self.settle()
        self._renew_stale(self._clock())
        yield from check_points(self)
