"""Prefixes that were seen, by their keys, long after their blocks are gone: where requests branch off stays known.

Ends that are remembered though they are not kept: of each tenant so many, the oldest go first.

What became of ends so far, by kind and class; what tenants found, and what more memory would have found.

Ends that are kept by what they are worth: their blocks counted, the least valuable given up, others remembered.

    kept      in the tree (end_tree), its blocks needed (end_blocks), ranked unless nothing would come of giving it up
    ghost     given up or declined, and still credited with what it would have hit

A block that no kept end needs and nobody holds is given up at once: it can never be hit with profit. So a step that
needs room takes nothing but blocks given up, and ends are given up until there are enough (docs/design/0019).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.index import KnownTokens
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.statistics import CacheStatistics, EndClassStatistics, EndStatistics, TenantStatistics
from hybridkv.eviction.audit import check_ends
from hybridkv.eviction.blocks import BlockNeeds, EndShares
from hybridkv.eviction.hazard import class_of, least_gap_s
from hybridkv.eviction.ranking import (
    NEVER,
    End,
    Kind,
    TenantRankings,
    TenantShares,
    in_words,
    is_of_session,
    kind_of,
    of_session,
    parts_of,
    promise_of,
)
from hybridkv.eviction.resume_points import EndTree, KnownQueue, Node
from hybridkv.request import NO_HINTS, Request

_MOST: Final = 4000


class Ghosts:
    """most: of each tenant."""

    def __init__(self) -> None:
        self.most = _MOST
        self._of = defaultdict[int, dict[int, Node]](dict)

    def __len__(self) -> int:
        """Of all tenants."""
        return sum(map(len, self._of.values()))

    def __contains__(self, node: Node) -> bool:
        """Whether it is remembered."""
        return node.end.serial in self._of[node.end.tenant]

    def add(self, node: Node) -> Node | None:
        """``node`` is the youngest of its tenant's; the one that is too many."""
        ghosts = self._of[node.end.tenant]
        ghosts.pop(node.end.serial, None)
        ghosts[node.end.serial] = node
        return next(iter(ghosts.values())) if len(ghosts) > self.most else None

    def discard(self, node: Node) -> None:
        """``node`` is none, whether or not it was."""
        self._of[node.end.tenant].pop(node.end.serial, None)

    def clear(self) -> None:
        """There are none."""
        self._of.clear()


_MORE_BYTES: Final = 1 << 30


class EndCounts:
    """For reading: missed_tokens, which the deepest ghosts would have been hit for, and missed_a_gib_more.

    The latter are those of ghosts since whom no more than a GiB was given up.
    """

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares.of
        self._asked = defaultdict[int, list[int]](lambda: [0] * 3)
        self.missed_tokens = self.missed_a_gib_more = 0
        self._of = {kind: [0] * 6 for kind in Kind}
        self._of_class: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0] * 3)
        self._given_up_bytes = 0
        self._gone_at: dict[int, int] = {}

    def note_request(self, tenant: int, prompt_tokens: int, hit_tokens: int) -> None:
        """A request of ``tenant`` begins for the first time."""
        counts = self._asked[tenant]
        counts[0] += 1
        counts[1] += prompt_tokens
        counts[2] += hit_tokens

    def note_kept(self, end: End) -> None:
        """``end`` is kept from now on."""
        self._of[end.kind][0] += 1
        self._gone_at.pop(end.serial, None)

    def note_hit(self, end: End) -> None:
        """``end``, kept, is hit."""
        self._of[end.kind][1] += 1
        self._of_class[class_of(end)][0] += 1

    def note_missed(self, end: End, tokens: int) -> None:
        """``end``, a ghost, would be hit for ``tokens`` more tokens."""
        self._of[end.kind][2] += 1
        self._of_class[class_of(end)][1] += 1
        self.missed_tokens += tokens
        if self._given_up_bytes - self._gone_at.get(end.serial, 0) <= _MORE_BYTES:
            self.missed_a_gib_more += tokens

    def note_gone(self, end: End, size: int, *, declined: bool) -> None:
        """``end``, which needed ``size`` bytes alone, is a ghost from now on."""
        counts = self._of[end.kind]
        counts[3 if declined else 4] += 1
        counts[5] += not (declined or end.hits)
        if not declined:
            self._of_class[class_of(end)][2] += 1
        self._given_up_bytes += size
        self._gone_at[end.serial] = self._given_up_bytes

    def forget(self, end: End) -> None:
        """``end`` is no ghost any longer, and not kept."""
        self._gone_at.pop(end.serial, None)

    def statistics(self, kept: Iterable[End]) -> tuple[EndStatistics, ...]:
        """One a kind. kept: those that are, now. O(kept)."""
        of_class = Counter(map(class_of, kept))
        classes: dict[Kind, list[EndClassStatistics]] = {kind: [] for kind in Kind}
        kept_of: Counter[Kind] = Counter()
        for key in sorted({*of_class, *self._of_class}):
            (kind, promise), hits, gap = parts_of(key[0]), key[1], key[2]
            kept_of[kind] += of_class[key]
            counts = self._of_class.get(key, [0] * 3)
            found = EndClassStatistics(in_words(promise), hits, least_gap_s(hits, gap), of_class[key], *counts)
            classes[kind].append(found)
        return tuple(
            EndStatistics(kind.name.lower(), tuple(classes[kind]), kept_of[kind], *counts)
            for kind, counts in self._of.items()
        )

    def tenants(self, weights: Sequence[int]) -> tuple[TenantStatistics, ...]:
        """One a tenant, none where there is a single one. weights: bytes that are kept of each."""
        if len(self._shares) == 1:
            return ()
        asked = [self._asked.get(number, [0] * 3) for number in range(len(self._shares))]
        parts = zip(self._shares, weights, asked, strict=True)
        return tuple(TenantStatistics(share.name, weight, *counts) for share, weight, counts in parts)


Int64 = NDArray[np.int64]

_REMEMBERED: Final = 5
"""Keys that are known, of as many as there can be blocks: those cached, and four times as many."""


@dataclass(slots=True)
class _Session:
    """What a row goes on from: the kept end that it consumed, and how long what it begins with was not used."""

    consumed: Node | None = None
    gap: float | None = None


class JudgedEnds:
    """groups: all that publish. needs: counts of blocks of the pool's space. rankings: whose end goes next.

    clock: seconds. hash_block: tokens.
    """

    judges = True

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        *,
        needs: BlockNeeds,
        rankings: TenantRankings,
        clock: Callable[[], float],
        hash_block: int,
    ) -> None:
        self._pool = pool
        self._needs = needs
        self._space = needs.space
        self._shares = EndShares(groups, pool, needs)
        self._blocks = self._shares.blocks
        self._rankings = rankings
        self._counts = EndCounts(rankings.shares)
        self._clock = clock
        self._hash_block = hash_block
        self._none = [0] * len(needs.block_bytes)
        self._ghosts = Ghosts()
        self._queue = KnownQueue()
        self._known = defaultdict[int, KnownTokens](lambda: KnownTokens(_REMEMBERED * pool.num_blocks))
        self._begin()

    def _begin(self) -> None:
        """Nothing is kept or remembered."""
        self._tree = EndTree(self._hash_block)
        self._ghosts.clear()
        self._queue.forget_ends()
        self._shares.clear()
        self._sessions: dict[int, _Session] = {}
        self._parked: dict[int, Node] = {}
        self._stale: dict[int, Node] = {}
        self._cleared = self._needs.cleared
        self._known.clear()

    # -- what happens to requests

    def begin(self, request: Request, hit_tokens: int) -> None:
        """The deepest end of its prompt that is kept, and the deepest that is known, are hit. O(its hash blocks).

        One that was given up, and is hit before its blocks are taken, is kept again.
        """
        self._settle()
        now = self._clock()
        self._unpark(now)
        session = self._sessions[request.row] = _Session()
        if request.first_hit_tokens is not None or not request.reads_prefix_cache:
            return
        tenant = self._rankings.tenant_of(request)
        self._rankings.note_request(tenant, now)
        self._counts.note_request(tenant, request.num_prompt_tokens, hit_tokens)
        found = self._tree.find(request, hit_tokens)
        if found is not None and not found.kept:
            self._insert(request, found, now, is_hit=True)
        path = self._tree.back(request, request.num_prompt_tokens - 1)
        deepest = next(path, None)
        session.consumed = deepest if deepest is None or deepest.kept else next((one for one in path if one.kept), None)
        if deepest is not None:
            session.gap = now - deepest.end.used
            self._note_hits(session.consumed, deepest)
        for node in {id(node): node for node in (session.consumed, deepest) if node is not None}.values():
            with_rank = self._unrank(node)
            self._rankings.of(node.end).hit(node.end, now)
            if with_rank:
                self._rank(node, now)
            if is_of_session(node.end.promise):  # it was kept: what does the session promise now?
                self._promise(node, of_session(request.hints), now)
        self._note_branch(request, session.consumed, hit_tokens, now)
        self._known[tenant].add(request.hashes)

    def _note_branch(self, request: Request, consumed: Node | None, hit_tokens: int, now: float) -> None:
        """Where ``request`` leaves what others had is an end, though all that it needs was there without one."""
        tokens = hit_tokens // self._hash_block * self._hash_block
        before = 0 if consumed is None else consumed.tokens
        if tokens >= before + self._hash_block and self._tree.has_room(request, tokens):
            tenant = self._rankings.tenant_of(request)
            node = self._tree.find(request, tokens) or self._tree.make(request, Kind.BRANCH, tokens, now, None, tenant)
            if not node.kept:
                self._insert(request, node, now)

    def _note_hits(self, consumed: Node | None, deepest: Node) -> None:
        if consumed is not None:
            self._counts.note_hit(consumed.end)
        if deepest is not consumed:
            self._counts.note_missed(deepest.end, deepest.tokens - (0 if consumed is None else consumed.tokens))

    def expect(self, request: Request) -> None:
        """What it begins with goes last until ``expect_no_longer``. O(its hash blocks)."""
        self._settle()
        self._await(self._queue.add(request, self._tree))

    def expect_no_longer(self, request: Request) -> None:
        """O(waiting)."""
        self._settle()
        self._await(self._queue.remove(request))

    def _await(self, changed: Iterable[tuple[Node, bool]]) -> None:
        now = self._clock()
        for node, awaited in changed:
            with_rank = self._unrank(node)
            node.end.awaited = awaited
            if with_rank:
                self._rank(node, now)

    def known_tokens(self, request: Request) -> int:
        """Whole hash blocks before the last token of a new prompt. O(log blocks)."""
        if request.first_hit_tokens is not None:
            return 0  # what it computed itself
        most = (request.num_prompt_tokens - 1) // self._hash_block
        return self._known[self._rankings.tenant_of(request)].leading(request.hashes[:most]) * self._hash_block

    # -- ends

    def admits(self, request: Request, tokens: int, needs: Sequence[int]) -> bool:
        """Whether all that must be given up for it is worth less. One that is declined is remembered."""
        self._settle()
        wanted, now = self._pool.by_class(needs), self._clock()
        if self._space.spares(wanted, self._none):
            return True
        if not self._tree.has_room(request, tokens):
            return False
        known = self._tree.find(request, tokens)
        node = self._make(request, tokens, now, ended=False) if known is None else known
        parent = self._tree.parent_of(request, tokens)
        if not node.kept:
            self._adopt(request, node, now)
            blocks = self._blocks.would_need(request, parent, node.depth, wanted)
            node.end.saved = self._blocks.saving(tokens - parent.tokens, blocks)
        admitted = self._give_way(wanted, now, node.end)
        if not node.kept and not admitted:
            self._bury(node, parent, now, declined=True)
        elif known is None:
            self._forget(node, now)  # it is made when its blocks are there
        return admitted

    def keep(self, request: Request, tokens: int, states: Sequence[int], *, ended: bool) -> None:
        """Count what it needs. O(blocks between its parent and itself + ends that begin as it does).

        An end whose tokens are not all published, or shorter than a hash block, is not kept: its blocks go first.
        """
        self._settle()
        now = self._clock()
        if ended:
            self._unpark(now)
            self._known[self._rankings.tenant_of(request)].add(request.hashes)
        if not self._tree.has_room(request, tokens):
            return
        node = self._tree.find(request, tokens) or self._make(request, tokens, now, ended=ended)
        if request.hints is not NO_HINTS:
            self._promise(node, promise_of(request, tokens), now)
        if node.kept and states:
            self._release(node, now)  # some of its states were lost, and are there again
        if node.kept or self._insert(request, node, now):
            self._pass(request, tokens, now)

    def _pass(self, request: Request, tokens: int, now: float) -> None:
        """The session of ``request`` has gone on to ``tokens``: so much for what it went on from."""
        session = self._sessions.get(request.row)
        passed = None if session is None else session.consumed
        if session is None or passed is None or passed.tokens >= tokens:
            return
        session.consumed = None
        if passed.end.tenant != self._rankings.tenant_of(request):
            return  # whose it is may still go on from there
        if is_of_session(passed.end.promise):
            self._promise(passed, NEVER, now)

    def _make(self, request: Request, tokens: int, now: float, *, ended: bool) -> Node:
        session = self._sessions.get(request.row)
        gap = None if session is None else session.gap
        kind, tenant = kind_of(request, tokens, ended=ended), self._rankings.tenant_of(request)
        node = self._tree.make(request, kind, tokens, now, gap, tenant)
        self._promise(node, promise_of(request, tokens), now)
        return node

    def _promise(self, node: Node, promise: int, now: float) -> None:
        """``promise`` is what hints say of ``node``."""
        if promise != node.end.promise:
            with_rank = self._unrank(node)
            self._rankings.of(node.end).promised(node.end, promise, now)
            if with_rank:
                self._rank(node, now)

    def _adopt(self, request: Request, node: Node, now: float) -> None:
        """``node``, not kept, is of the tenant of ``request``; another's ranking knows it no longer."""
        tenant = self._rankings.tenant_of(request)
        if node.end.tenant != tenant:
            self._rankings.of(node.end).forget(node.end, now)
            self._ghosts.discard(node)
            node.end.tenant = tenant

    def _insert(self, request: Request, node: Node, now: float, *, is_hit: bool = False) -> bool:
        """Keep ``node``, a ghost or new; forget it, and return False, if its tokens are not there.

        is_hit: its age ends with the hit that follows, not now.
        """
        self._adopt(request, node, now)
        changed = self._shares.put(request, node, self._tree.parent_of(request, node.tokens))
        if changed is None:
            self._forget(node, now)
            return False
        self._counts.note_kept(node.end)
        self._ghosts.discard(node)
        if not is_hit:
            self._rankings.of(node.end).kept(node.end, now)
        if len(self._queue):
            self._await(self._queue.note_kept(node, self._tree))
        self._note_stale(changed)
        return True

    def _release(self, node: Node, now: float) -> None:
        """``node`` is kept no longer, and remembered. O(its segment times its children)."""
        self._unlist(node)
        parent, changed = self._shares.take_out(node)
        self._await(self._queue.note_gone(node, self._tree))
        self._bury(node, parent, now, declined=False)
        self._note_stale(changed)

    def _unlist(self, node: Node) -> None:
        """``node`` cannot be given up, nor will what it saves be looked at."""
        self._unrank(node)
        self._parked.pop(node.end.serial, None)
        self._stale.pop(node.end.serial, None)

    # -- ghosts

    def _bury(self, node: Node, parent: Node | None, now: float, *, declined: bool) -> None:
        """``node``, not kept, is a ghost; the oldest of too many is forgotten. parent: who serves its requests now."""
        heir = None if parent is None or parent is self._tree.root else parent.end
        self._rankings.given_up(node.end, heir, now, declined=declined)
        before = 0 if parent is None else parent.tokens
        size = round((node.tokens - before) / node.end.saved) if node.end.saved else 0
        self._counts.note_gone(node.end, size, declined=declined)
        oldest = self._ghosts.add(node)
        if oldest is not None:
            self._forget(oldest, now)

    def _forget(self, node: Node, now: float) -> None:
        """``node``, not kept, is known no longer."""
        self._ghosts.discard(node)
        self._tree.forget(node)
        self._counts.forget(node.end)
        self._rankings.of(node.end).forget(node.end, now)

    # -- room

    def make_way(self, n: int, group: int) -> None:
        """Give up ends until ``n`` blocks of ``group`` are there or given up. O(rings) an end."""
        of = self._pool.classes[group]
        if self._space.has_spare(n, of):
            return
        self._settle()
        needs, now = self._none.copy(), self._clock()
        needs[of] = n
        while not self._space.spares(needs, self._none):
            node = self._lowest(now)
            if node is None:
                break
            self._release(node, now)

    def _give_way(self, needs: Sequence[int], now: float, wants: End) -> bool:
        """Whether there is room for ``needs`` now, ends given up for it, but none worth more than ``wants``."""
        more, victims, gone = list(self._none), list[Node](), Counter[int]()
        enough, taken = True, dict[int, int]()
        while not self._space.spares(needs, more):
            node = self._lowest(now)
            if node is None or not self._rankings.prefers(wants, node.end, now):
                enough = False
                break
            self._unrank(node)
            victims.append(node)
            more = [a + b for a, b in zip(more, self._blocks.frees(node, gone, taken), strict=True)]
        self._needs.put_back(taken)
        for node in victims:
            if not enough or self._space.spares(needs, self._none):
                self._rank(node, now)
            else:
                self._release(node, now)
        return enough

    def _lowest(self, now: float) -> Node | None:
        """The end to give up next, ranked still. Those of which somebody holds all are set aside."""
        self._renew(now)
        again = bool(self._parked)
        while True:
            end = self._rankings.lowest(now)
            if end is None:
                if not again:
                    return None
                again = False
                self._unpark(now)
                continue
            node = self._tree.nodes[end.serial]
            if self._worth(node, self._blocks.saved(node), now):
                continue  # an end that is not beside it came or went
            if not self._blocks.are_held(node):
                return node
            self._unrank(node)
            self._parked[end.serial] = node

    # -- ranked

    def _rank(self, node: Node, now: float) -> None:
        """``node`` may be given up, if that frees anything as far as that is known."""
        if node.end.saved > 0.0 and node.kept and not node.ranked and node.end.serial not in self._parked:
            node.ranked = True
            self._rankings.add(node.end, now)

    def _unrank(self, node: Node) -> bool:
        """Whether it was ranked."""
        was, node.ranked = node.ranked, False
        if was:
            self._rankings.remove(node.end)
        return was

    def _unpark(self, now: float) -> None:
        """What was held by somebody may be free by now."""
        parked, self._parked = self._parked, {}
        for node in parked.values():
            self._rank(node, now)

    def _note_stale(self, nodes: Iterable[Node]) -> None:
        """What ``nodes`` save a byte may have changed: it is worked out before anybody is ranked by it, if at all."""
        self._stale.update((node.end.serial, node) for node in nodes if node is not self._tree.root)

    def _renew(self, now: float) -> None:
        """What ends save a byte, since ends around them changed."""
        stale, self._stale = self._stale, {}
        for node in stale.values():
            self._worth(node, self._blocks.saved(node), now)

    def _worth(self, node: Node, saved: float, now: float) -> bool:
        """``node`` saves so much a byte; whether that is new."""
        if saved == node.end.saved and node.ranked:
            return False
        is_new = saved != node.end.saved
        self._unrank(node)
        node.end.saved = saved
        self._rank(node, now)
        return is_new

    # -- what happens to blocks

    def follow(self, moves: Int64) -> None:
        """Blocks moved, int64[m, 2] of (source, target). O(moves)."""
        self._shares.follow(moves)

    def _settle(self) -> None:
        """Follow what was lost since: what failed steps should have written, what callers evicted, or all."""
        if self._needs.cleared != self._cleared:
            now = self._clock()
            for node in self._tree.nodes.values():
                self._unrank(node)
                self._rankings.of(node.end).forget(node.end, now)
            self._begin()
            return
        if not self._needs.lost:
            return
        broken, owned_alone = self._shares.lose(self._needs.take_lost())
        if not owned_alone:
            self._recount(broken)
            return
        now = self._clock()
        for node in sorted(broken, key=lambda one: (one.tokens, one.end.serial), reverse=True):
            self._release(node, now)

    def _recount(self, broken: set[Node]) -> None:
        """Count anew, without ``broken`` ends and those whose tokens are gone. O(kept ends and their segments)."""
        now, cut = self._clock(), set[Node]()
        kept = self._tree.kept()
        for node in kept:
            if node.parent in cut or self._blocks.segment(node) is None:
                cut.add(node)
        gone = [one for one in kept if one in cut or one in broken or self._blocks.window(one) is None]
        for node in reversed(gone):  # those behind first
            self._unlist(node)
            self._shares.cut(node)
            self._await(self._queue.note_gone(node, self._tree))
            self._bury(node, None, now, declined=False)
        left = self._tree.kept()
        self._blocks.recount(left)
        self._note_stale(left)

    # -- what came of it

    def add_statistics(self, counts: CacheStatistics) -> CacheStatistics:
        """Those of ends. O(ends)."""
        return replace(
            counts,
            ends=self._counts.statistics(node.end for node in self._tree.nodes.values() if node.kept),
            tenants=self._counts.tenants(self._needs.weights.of),
            missed_tokens=self._counts.missed_tokens,
            missed_a_gib_more=self._counts.missed_a_gib_more,
        )

    # -- what must hold

    def check(self) -> Iterator[str]:
        """A line for each thing that is not what it would be when made anew from the ends. O(ends and segments)."""
        self._settle()
        self._renew(self._clock())
        yield from check_ends(self)
