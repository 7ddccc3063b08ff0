"""Keep resume points by value: count their blocks, evict the least valuable, and remember the evicted ones.

    kept           in the tree (resume_points); its blocks are needed (blocks). ranked if its eviction frees blocks
    ghost entry    evicted or declined; it is still credited with the hits that it would have had

A block that no kept resume point needs and no request holds is marked as unneeded at once, because no useful hit can
read it. A step takes only unneeded blocks, and resume points are evicted until there are enough (docs/design/0019). The
keys of prefixes are remembered longer than their blocks, to find the tokens at which requests diverge.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.eviction_policy import Below, Copy
from hybridkv.cache.index import KnownTokens, add_known, leading_known
from hybridkv.cache.journal import BlockFact, Cleared, Ids
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.publisher import HitEnds
from hybridkv.cache.statistics import (
    CacheStatistics,
    ResumePointClassStatistics,
    ResumePointStatistics,
    TenantStatistics,
)
from hybridkv.eviction.audit import check_points
from hybridkv.eviction.blocks import PointBlocks
from hybridkv.eviction.hazard import class_of, least_gap_s
from hybridkv.eviction.resume_points import (
    BY_ALL,
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
    worth_of,
)
from hybridkv.eviction.tenants import TenantRankings
from hybridkv.request import NO_HINTS, Request

Int64 = NDArray[np.int64]

_MOST_GHOST_ENTRIES: Final = 4000
"""Ghost entries of each tenant. Hit rates did not depend on it between 2,000 and 40,000."""

_MORE_BYTES: Final = 1 << 30
"""The memory of ``PointCounts.missed_a_gib_more``, in bytes."""

_REMEMBERED: Final = 5
"""Known keys as a multiple of the blocks: the cached ones, and four times as many more (docs/design/0019).

With one time as many more, the hit rate fell by 2.3 points.
"""


_FEW_LIVES: Final = 64
"""Ends of times to live that are kept for no point, at most, beside twice the known points; chosen by hand."""


def _three() -> list[int]:
    return [0] * 3


@dataclass(slots=True)
class PointCounts:
    """Count the events of resume points by kind and class, and the hits of each tenant.

    Attributes:
        by_kind: For each kind: kept, hits, missed, declined, evicted, and evicted without a hit.
        by_class: For each class: hits, missed, evicted.
        asked: For each tenant: its requests, their prompt tokens and hit tokens.
        missed_tokens: Tokens that hits of the deepest ghost entries would have added.
        missed_a_gib_more: The part of ``missed_tokens`` that one more GiB of memory would have kept.
        evicted_bytes: Bytes evicted so far.
        evicted_at: ``evicted_bytes`` at the eviction of each ghost entry, by its serial.
    """

    by_kind: dict[Kind, list[int]] = field(default_factory=lambda: {kind: [0] * 6 for kind in Kind})
    by_class: dict[tuple[int, int, int], list[int]] = field(default_factory=lambda: defaultdict(_three))
    asked: dict[int, list[int]] = field(default_factory=dict)
    missed_tokens: int = 0
    missed_a_gib_more: int = 0
    evicted_bytes: int = 0
    evicted_at: dict[int, int] = field(default_factory=dict)

    def note_missed(self, point: ResumePoint, tokens: int) -> None:
        """Count that ``point``, a ghost entry, would have been hit for ``tokens`` more tokens."""
        self.by_kind[point.kind][2] += 1
        self.by_class[class_of(point)][1] += 1
        self.missed_tokens += tokens
        if self.evicted_bytes - self.evicted_at.get(point.serial, 0) <= _MORE_BYTES:
            self.missed_a_gib_more += tokens

    def note_evicted(self, point: ResumePoint, size: int, *, declined: bool) -> None:
        """Count that ``point``, which needed ``size`` bytes alone, becomes a ghost entry."""
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
    """Hold what a row resumed at, and the last end of its output.

    Attributes:
        consumed: The kept resume point at which the row resumed.
        gap: Seconds since the last use of its prefix.
        kind: The kind of its resume points; None: see ``kind_of``.
        output: The resume point that its output made last.
    """

    consumed: ResumePoint | None = None
    gap: float | None = None
    kind: Kind | None = None
    output: ResumePoint | None = None


class RankedResumePoints:
    """Keep resume points by their value per byte.

    Args:
        pool: The pool of the blocks.
        blocks: Counts the blocks that resume points need.
        rankings: Chooses the next resume point to evict.
        facts: Changes of blocks since the last read (``Journal.blocks``). This object empties the list.
        hash_block: Tokens of a hash block.
        ends: Where hits may end.
    """

    ranks = True

    def __init__(
        self,
        pool: BlockPool,
        *,
        blocks: PointBlocks,
        rankings: TenantRankings,
        facts: list[BlockFact],
        hash_block: int,
        ends: HitEnds,
    ) -> None:
        self._pool = pool
        self._facts = facts
        self._space = blocks.space
        self._blocks = blocks
        self._rankings, self._tenants = rankings, rankings.tenants
        self._counts = PointCounts()
        self._clock = pool.journal.clock
        self._hash_block = hash_block
        self._ends = ends
        self._none = [0] * len(pool.bases)
        self._tree = ResumePointTree(hash_block)
        self._ghost_entries = defaultdict[int, dict[int, ResumePoint]](dict)  # by tenant and serial, the oldest first
        self._known = defaultdict[int, KnownTokens](lambda: KnownTokens(_REMEMBERED * pool.num_blocks))
        self._last_known: tuple[Request | None, int] = None, 0
        self._sessions: dict[int, _Session] = {}
        self._parked: dict[int, ResumePoint] = {}  # by serial; requests hold all their blocks, so they free nothing
        self._released = set[int]()  # serials of parked ones of which a block was released since the last choice
        self._stale: dict[int, ResumePoint] = {}  # by serial; their saved tokens per byte may have changed
        self._lives: list[tuple[float, int, ResumePoint]] = []  # a heap: end of a time to live, and serial

    def _tenant_of(self, request: Request) -> int:
        return 0 if request.tenant is None else self._rankings.tenant_of(request)

    # -- requests

    def begin(self, request: Request, hit_tokens: int) -> None:
        """Count hits of the deepest kept resume point of the prompt, and of the deepest known one. O(its hash blocks).

        An evicted resume point that is hit before its blocks are taken is kept again.
        """
        self.settle()
        now = self._clock()
        session = self._sessions[request.row] = _Session()
        if request.first_hit_tokens is not None:  # it was counted before
            session.consumed = self._tree.deepest(request, request.first_hit_tokens)
            return
        if not request.reads_prefix_cache:
            return
        tenant = self._tenant_of(request)
        self._tenants[tenant].ranking.note_request(now)
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
        self._add_known(request, tenant)

    def _hit(self, point: ResumePoint, request: Request, now: float) -> None:
        """Let the ranking learn that ``request`` hits ``point``, or would have."""
        was_ranked = self._unrank(point)
        self._tenants[point.tenant].ranking.hit(point, now)
        if was_ranked:
            self._rank(point, now)
        if is_of_session(point.hint):  # the hint was followed: read the next one of the session
            self._note_hint(point, of_session(request.hints), now)

    def _note_branch(self, request: Request, consumed: ResumePoint | None, hit_tokens: int, now: float) -> None:
        """Keep a resume point at the end of a hit after ``consumed``: ``request`` diverges from others there."""
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
        """Evict the resume point of waiting ``request`` last, until ``expect_no_longer``. O(its hash blocks)."""
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
            point.awaited, point.protected = awaited, awaited or point.safe_until > now
            if was_ranked:
                self._rank(point, now)

    def known_tokens(self, request: Request, hit_tokens: int) -> int:
        """Return the known whole hash blocks before the last token of a new prompt, in tokens. O(log blocks)."""
        if request.first_hit_tokens is not None:
            return 0  # a preempted request: it would find its own tokens
        if self._last_known[0] is not request:  # the first of the waiting requests is looked up in each step
            most = (request.num_prompt_tokens - 1) // self._hash_block
            known = self._known[self._tenant_of(request)]
            self._last_known = request, leading_known(known, request.hashes[:most]) * self._hash_block
        return self._last_known[1] if self._last_known[1] > hit_tokens else 0

    def _add_known(self, request: Request, tenant: int) -> None:
        add_known(self._known[tenant], request.hashes)
        self._last_known = None, 0

    # -- keep and evict resume points

    def admits(self, request: Request, tokens: int, needs: Sequence[int]) -> bool:
        """Return whether all victims of a new resume point have less value. A declined one becomes a ghost entry."""
        self.settle()
        wanted, now = self._pool.by_class(needs), self._clock()
        if self._space.spares(wanted, self._none):
            return True
        place = self._tree.place_of(request, tokens)
        if place is None:
            return False
        known = self._tree.at(place)
        point = self._make(request, place, tokens, now, ended=False) if known is None else known
        if known is not None and request.hints is not NO_HINTS:
            self._note_hints(request, point, now)
        parent = self._tree.parent_of(request, tokens)
        if not point.kept:
            self._adopt(request, point, now)
            point.saved = self._blocks.saving(request, point, parent, wanted)
            point.worth = point.saved if point.below is None else worth_of(point)
        admitted = self._give_way(wanted, now, point)
        if not point.kept and not admitted:
            self._record_evicted(point, parent, now, declined=True)
        elif known is None:
            self._forget(point, now)  # ``keep`` makes it again when its blocks are there
        return admitted

    def keep(self, request: Request, tokens: int, states: Sequence[int], *, ended: bool) -> None:
        """Keep the resume point at ``tokens``. O(blocks after its parent + resume points that begin as it does).

        A resume point shorter than a hash block, or with unpublished tokens, is not kept: its blocks are evicted first.
        """
        self.settle()
        now = self._clock()
        if ended:
            self._add_known(request, self._tenant_of(request))
        place = self._tree.place_of(request, tokens)
        if place is None:
            return
        known = self._tree.at(place)
        point = known or self._make(request, place, tokens, now, ended=ended)
        if request.hints is not NO_HINTS:
            self._note_hints(request, point, now)
        if point.kept and states:
            self._release(point, now)  # some of its states were lost and have been saved again
        if point.kept or self._insert(request, point, now):
            self._pass(request, tokens, now)
            if ended:
                self._replace_output(request, None if known is point else point, now)

    def _replace_output(self, request: Request, point: ResumePoint | None, now: float) -> None:
        """Forget the resume point that the output of ``request`` made before it reached ``point``, unless it was hit.

        ``point`` is ``None`` if other requests made it: they may need the one before.
        """
        session = self._sessions.get(request.row)
        if session is None:
            return
        passed, session.output = session.output, point
        if passed is None or point is None or not passed.kept or passed.hits or passed.tokens >= point.tokens:
            return
        self._take_out(passed)
        self._forget(passed, now)

    def _pass(self, request: Request, tokens: int, now: float) -> None:
        """Set the hint NEVER where ``request`` resumed, because its session has reached ``tokens``."""
        session = self._sessions.get(request.row)
        passed = None if session is None else session.consumed
        if session is None or passed is None or passed.tokens >= tokens:
            return
        session.consumed = None
        if passed.tenant == self._tenant_of(request) and is_of_session(passed.hint):
            self._note_hint(passed, NEVER, now)  # other tenants may still resume there

    def _make(self, request: Request, place: Place, tokens: int, now: float, *, ended: bool) -> ResumePoint:
        session = self._sessions.get(request.row)
        gap, kind = (None, None) if session is None else (session.gap, session.kind)
        if kind is None:
            kind = kind_of(request, tokens, self._ends, ended=ended)
        point = self._tree.make(place, kind, tokens, now, gap, self._tenant_of(request))
        if request.hints is not NO_HINTS:
            self._note_hints(request, point, now)
        return point

    def _note_hints(self, request: Request, point: ResumePoint, now: float) -> None:
        """Give ``point``, which ``request`` keeps, the hint of that request, and its time to live."""
        self._note_hint(point, hint_of(request, point.tokens), now)
        until = now + (request.hints.ttl_s or 0.0)
        if until <= max(now, point.safe_until):
            return
        was_ranked = self._unrank(point)
        point.safe_until, point.protected = until, True
        if was_ranked:
            self._rank(point, now)
        if len(self._lives) > 2 * len(self._tree.points) + _FEW_LIVES:  # most are of points that were forgotten
            self._lives = [one for one in self._lives if one[2].safe_until == one[0] and self._is_known(one[2])]
            heapify(self._lives)
        heappush(self._lives, (until, point.serial, point))

    def _is_known(self, point: ResumePoint) -> bool:
        return self._tree.points.get(point.serial) is point

    def _end_lives(self, now: float) -> None:
        """Protect the resume points no longer whose time to live has ended. O(log) each."""
        while self._lives and self._lives[0][0] <= now:
            point = heappop(self._lives)[2]
            if point.safe_until <= now:
                was_ranked = self._unrank(point)
                point.protected = point.awaited
                if was_ranked:
                    self._rank(point, now)

    def give_up(self, request: Request, tokens: int) -> None:
        """Evict the resume point at ``tokens`` of ``request``, unless many begin with it or a request waits for it."""
        self.settle()
        point = self._tree.find(request, tokens)
        if point is None or not point.kept or point.awaited or point.hint == BY_ALL:
            return
        if point.tenant == self._tenant_of(request):
            self._release(point, self._clock())

    def copy_at(self, request: Request, tokens: int) -> ResumePoint | None:
        """Return the kept resume point at ``tokens`` of ``request``; None if there is none. O(1)."""
        point = self._tree.find(request, tokens)
        return point if point is not None and point.kept else None

    def resemble(self, request: Request, copy: Copy) -> None:
        """Keep the next resume point of ``request``, which has a row, as the kind that ``copy`` is, after its gap."""
        if isinstance(copy, ResumePoint):
            session = self._sessions[request.row]
            session.gap, session.kind = copy.session_gap, copy.kind

    def note_below(self, request: Request, tokens: int, below: Below) -> None:
        """Note the copy of the resume point at ``tokens`` of ``request``: evicted, it costs no more than its return."""
        self.settle()
        point = self._tree.find(request, tokens)
        if point is not None:
            point.below = below
            if point.kept:
                self._change_saved(point, point.saved, self._clock())

    def _note_hint(self, point: ResumePoint, hint: int, now: float) -> None:
        """Set the hint of ``point``."""
        if hint != point.hint:
            was_ranked = self._unrank(point)
            self._tenants[point.tenant].ranking.note_hint(point, hint, now)
            if was_ranked:
                self._rank(point, now)

    def _adopt(self, request: Request, point: ResumePoint, now: float) -> None:
        """Give ``point``, not kept, to the tenant of ``request``; another's ranking knows it no longer."""
        tenant = self._tenant_of(request)
        if point.tenant != tenant:
            self._tenants[point.tenant].ranking.forget(point, now)
            self._ghost_entries[point.tenant].pop(point.serial, None)
            point.tenant = tenant

    def _insert(self, request: Request, point: ResumePoint, now: float, *, is_hit: bool = False) -> bool:
        """Keep ``point``, new or a ghost entry. Forget it and return False if its blocks are missing.

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
            self._tenants[point.tenant].ranking.kept(point, now)
        if self._tree.waiting:
            self._await(self._tree.note_kept(point))
        self._note_stale(changed)
        return True

    def _release(self, point: ResumePoint, now: float) -> None:
        """Keep ``point`` no longer, and remember it. O(its segment times its children)."""
        self._record_evicted(point, self._take_out(point), now, declined=False)

    def _take_out(self, point: ResumePoint) -> ResumePoint:
        """Keep ``point`` no longer, and return its parent. O(its segment times its children)."""
        self._unlist(point)
        parent, changed = self._blocks.take_out(point)
        if point.awaited:
            self._await(self._tree.note_evicted(point))
        self._note_stale(changed)
        return parent

    def _unlist(self, point: ResumePoint) -> None:
        """Neither evict ``point`` nor recompute its saved tokens per byte."""
        self._unrank(point)
        self._parked.pop(point.serial, None)
        self._stale.pop(point.serial, None)

    # -- ghost entries

    def _record_evicted(self, point: ResumePoint, parent: ResumePoint | None, now: float, *, declined: bool) -> None:
        """Make ``point``, not kept, a ghost entry; forget the oldest above the limit. parent: serves its requests.

        A parent of another tenant inherits nothing.
        """
        is_heir = parent is not None and parent is not self._tree.root and parent.tenant == point.tenant
        self._tenants[point.tenant].ranking.evicted(point, parent if is_heir else None, now, declined=declined)
        before = 0 if parent is None else parent.tokens
        size = round((point.tokens - before) / point.saved) if point.saved else 0
        self._counts.note_evicted(point, size, declined=declined)
        ghosts = self._ghost_entries[point.tenant]
        ghosts.pop(point.serial, None)
        ghosts[point.serial] = point
        if len(ghosts) > _MOST_GHOST_ENTRIES:
            self._forget(next(iter(ghosts.values())), now)

    def _forget(self, point: ResumePoint, now: float) -> None:
        """Forget ``point``, which is not kept."""
        self._ghost_entries[point.tenant].pop(point.serial, None)
        self._tree.forget(point)
        self._counts.evicted_at.pop(point.serial, None)
        self._tenants[point.tenant].ranking.forget(point, now)

    # -- room

    def spares(self, needs: Sequence[int]) -> bool:
        """Return whether ``needs`` blocks, by group, are free or unneeded. O(classes)."""
        self.settle()
        return self._space.spares(self._pool.by_class(needs), self._none)

    def make_way(self, n: int, group: int) -> None:
        """Evict resume points until ``n`` blocks of ``group`` are free or unneeded. O(rings) each."""
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
        """Evict resume points of less value than ``wants`` until ``needs`` fit. Return whether they fit."""
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
        """Return the resume point to evict next, still ranked. Points with no block to free are set aside."""
        self._renew_stale(now)
        if self._lives:
            self._end_lives(now)
        if self._released:
            self._unpark(self._released, now)
            self._released.clear()
        again = bool(self._parked)
        while True:
            lowest = self._rankings.lowest(now)
            if lowest is None:
                if not again:
                    return None
                again = False
                self._unpark(list(self._parked), now)
                continue
            saved, held = self._blocks.look(lowest)
            copied = lowest.below is not None
            if saved != lowest.saved or (copied and lowest.worth != worth_of(lowest)):  # others came or went
                self._change_saved(lowest, saved, now)
            elif not held:
                return lowest
            else:
                self._unrank(lowest)
                self._parked[lowest.serial] = lowest
                self._blocks.watch(lowest)

    # -- rank

    def _rank(self, point: ResumePoint, now: float) -> None:
        """Rank ``point`` if its eviction may free blocks."""
        if point.saved > 0.0 and point.kept and not point.ranked and point.serial not in self._parked:
            point.ranked = True
            self._rankings.add(point, now)

    def _unrank(self, point: ResumePoint) -> bool:
        """Take ``point`` from its ranking. Return whether it was ranked."""
        was, point.ranked = point.ranked, False
        if was:
            self._rankings.remove(point)
        return was

    def _unpark(self, serials: Iterable[int], now: float) -> None:
        """Rank those of ``serials`` that are parked."""
        for serial in sorted(serials):
            point = self._parked.pop(serial, None)
            if point is not None:
                self._rank(point, now)

    def _note_stale(self, points: Iterable[ResumePoint]) -> None:
        """Note that the saved tokens of ``points`` may have changed; ``_renew_stale`` computes them before a choice."""
        self._stale.update([(point.serial, point) for point in points if point is not self._tree.root])

    def _renew_stale(self, now: float) -> None:
        stale, self._stale = self._stale, {}
        for point in stale.values():
            self._parked.pop(point.serial, None)
            saved = self._blocks.saved(point)
            if saved != point.saved or not point.ranked:
                self._change_saved(point, saved, now)

    def _change_saved(self, point: ResumePoint, saved: float, now: float) -> None:
        """Rank ``point`` by ``saved`` tokens per byte."""
        self._unrank(point)
        point.saved = saved
        point.worth = saved if point.below is None else worth_of(point)
        self._rank(point, now)

    # -- changes of blocks

    def all_needed(self, ids: Ids) -> bool:
        """Return whether some resume point needs each of ``ids``, so that their release makes no block unneeded."""
        self.settle()
        return self._blocks.all_needed(ids)

    def settle(self) -> None:
        """Read the changes of blocks since the last call."""
        if not self._facts:
            return
        facts = self._facts.copy()
        self._facts.clear()
        if Cleared in map(type, facts):
            self._forget_all()
            facts = facts[1 + max(place for place, fact in enumerate(facts) if isinstance(fact, Cleared)) :]
        lost, released = self._blocks.read(facts)
        self._released |= released
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
        """Forget all resume points, since all blocks lost their keys at once."""
        now = self._clock()
        for point in self._tree.points.values():
            self._unrank(point)
            self._tenants[point.tenant].ranking.forget(point, now)
        self._tree.clear()
        for remembered in (self._ghost_entries, self._blocks, self._sessions, self._parked, self._stale, self._known):
            remembered.clear()
        self._released.clear()
        self._lives.clear()
        self._last_known = None, 0

    def _recount(self, broken: set[ResumePoint]) -> None:
        """Evict ``broken`` resume points and all that miss a block, and count anew. O(kept points and segments)."""
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

    # -- statistics and invariants

    def add_statistics(self, counts: CacheStatistics) -> CacheStatistics:
        """Return ``counts`` with the counts of resume points and tenants. O(resume points)."""
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
        now = self._clock()
        self._renew_stale(now)
        self._end_lives(now)
        for point in self._tree.points.values():
            if point.protected != (point.awaited or point.safe_until > now):
                yield f"the resume point of {point.tokens} tokens is protected: {point.protected}"
        yield from check_points(self)
