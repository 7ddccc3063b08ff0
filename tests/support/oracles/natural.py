"""The scheduler over the natural layout in plain Python: what differs from the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hybridkv.schedule import SchedulerLimits
from hybridkv.testing.model import DigestModel
from oracles.cache import OracleHit, OracleRequest
from oracles.groups import ScratchStateGroup
from oracles.natural_cache import NaturalCache, as_asked
from oracles.scheduler import Oracle
from oracles.steps import Entry, OracleStep, tell


class NaturalOracle(Oracle):
    """See Oracle. forks: branches that wait until they can have the blocks of their parent.

    ``counts`` also has: blocks moved ("moved"), states kept on the way ("kept") and not ("declined"), admissions that
    gave their hit up ("hit given up"), branches that came in with their parent's blocks ("branched") and that could
    not ("branches that wait"), and what NaturalCache counts.
    """

    def __init__(
        self, cache: NaturalCache, limits: SchedulerLimits, model: DigestModel, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        super().__init__(cache, limits, model, clock)
        self.natural = cache
        self.slabs = cache.blocks.slabs
        self.forks: dict[OracleRequest, list[OracleRequest]] = {}
        self._branches: Counter[str] = Counter()

    def _short_share(self) -> float:
        if self.limits.short_share is None:
            return 0.5 if self.limits.policy == "fcfs" else 0.0
        return self.limits.short_share

    # -- branches

    @property
    def num_waiting(self) -> int:
        """See Oracle; branches that wait for their parent among them."""
        return len(self.waiting) + len(self._waiting_branches())

    @property
    def live_ids(self) -> list[str]:
        """See Oracle."""
        return super().live_ids + [child.request_id for child in self._waiting_branches()]

    def known(self, request_id: str) -> OracleRequest | None:
        """See Oracle."""
        branches = (one for one in self._waiting_branches() if one.request_id == request_id)
        return super().known(request_id) or next(branches, None)

    def _waiting_branches(self) -> list[OracleRequest]:
        return [child for children in self.forks.values() for child in children]

    def fork(self, parent: OracleRequest, n: int) -> list[OracleRequest]:
        """``n`` requests that go on from the tokens of one that waits or runs, once they can have its blocks."""
        children = []
        for _ in range(n):
            self._branches[parent.request_id] += 1
            name = f"{parent.request_id}#{self._branches[parent.request_id]}"
            children.append(branch_of(parent, name))
        self.forks.setdefault(parent, []).extend(children)
        return children

    def end(self, request: OracleRequest, reason: str) -> None:
        """See Oracle; branches of one that is gone wait like all others."""
        self._orphan(request)
        for parent, children in list(self.forks.items()):
            if request in children:
                children.remove(request)
                if not children:
                    del self.forks[parent]
                self.finished.append((request.request_id, reason))
                self.counts["finished"] += 1
                return
        super().end(request, reason)

    def _orphan(self, parent: OracleRequest) -> None:
        self._wait(self.forks.pop(parent, []))

    def _wait(self, children: list[OracleRequest]) -> None:
        for child in children:
            self._arrive(child)
        self.waiting = children + self.waiting
        self.counts["branches that wait"] += len(children)
        self._sort()

    def _wanted(self, request: OracleRequest) -> int:
        if request in self.forks and self._held(request):
            return 0
        return super()._wanted(request)

    def _branch(self, step: OracleStep, budget: int, *, room: bool) -> int:
        """Branches of running requests that are ready come in together with their blocks."""
        for parent in list(self.forks):
            if parent not in self.running or self._held(parent) or parent.computed < len(parent.tokens) - 1:
                continue
            late: list[OracleRequest] = []
            for child in self.forks.pop(parent):
                fits = room and not late and parent.computed == len(child.tokens) - 1
                entry = self._branch_one(parent, child, budget) if fits else None
                if entry is None:
                    late.append(child)
                    continue
                step.entries.append(entry)
                budget = self._spend(entry, budget)
                self.counts["branched"] += 1
            self._wait(late)
        return budget

    def _branch_one(self, parent: OracleRequest, child: OracleRequest, budget: int) -> Entry | None:
        """The first token of a branch, its blocks being its parent's; None where it does not fit."""
        if not budget or len(self.running) + len(self.dead) >= self.limits.max_running:
            return None
        hit = self.natural.shared(parent)
        cells = self._allocate(child, 1, hit) if self._fits(child, 1, hit) else None
        if cells is None:
            return None
        self._arrive(child)
        return self._come_in(child, 1, hit.tokens, cells)

    def _send_back(self, requests: list[OracleRequest]) -> None:
        for request in requests:
            self._orphan(request)
        super()._send_back(requests)

    # -- room

    def _needed(self, peaks: list[int]) -> int:
        sinks = [len(sinks) for sinks in self.natural.blocks.sinks]
        before = self.natural.blocks.by_class(sinks)
        counts = self.natural.blocks.by_class([peak + one for peak, one in zip(peaks, sinks, strict=True)])
        sizes = self.slabs.ks
        return sum(-(-count // k) for count, k in zip(counts, sizes, strict=True)) - sum(
            -(-count // k) for count, k in zip(before, sizes, strict=True)
        )

    def _fits(self, request: OracleRequest, count: int, hit: OracleHit) -> bool:
        lookahead = self.limits.num_lookahead_tokens
        if not self.slabs.fits(self.natural.needs(request, count, hit, lookahead, 0)):
            return False
        more = self.natural.needs(request, count, replace(hit, sources=()), lookahead, 0)
        missing = self.natural.missing(request, count, hit, lookahead)
        peaks = self._peaks(request, len(request.tokens), hit.tokens)
        later = self.natural.blocks.by_class(
            [
                max(peak - sum(block != 0 for block in table) - new, 0)
                for peak, table, new in zip(peaks, self.natural.first_tables(request, hit), missing, strict=True)
            ]
        )
        reserve = 0 if self._alone() else int(self.limits.watermark * self.pool.usable)
        needed = self.slabs.needed_slabs([one + two for one, two in zip(more, later, strict=True)])
        return needed + reserve < self.slabs.num_slabs

    def _alone(self) -> bool:
        return not (self.running or self.dead)

    # -- admission

    def _admit_with(self, request: OracleRequest, hit: OracleHit, budget: int) -> Entry | None:
        """See Oracle; alone, a request whose hit takes too much room goes without it."""
        entry = super()._admit_with(request, hit, budget)
        if entry is None and any(hit.sources) and self._alone():
            self.counts["hit given up"] += 1
            return super()._admit_with(request, OracleHit(0, [[] for _ in self.cache.groups]), budget)
        return entry

    def _being_written(self, hit: OracleHit) -> bool:
        if any(self.pool.step.get(source) == self.counts["steps"] for source in hit.sources):
            self.counts["unreadable"] += 1
            return True
        return False

    def _split(self, request: OracleRequest, computed: int, count: int) -> int:
        """Chunks end where a state is kept, unless the worker writes it inside a chunk, and where branches begin."""
        known, most = len(request.tokens), count
        if request in self.forks and computed < known - 1:
            most = min(most, known - 1 - computed)
        if not self.limits.segments and self.natural.states and self.cache.caching and request.writes:
            asked = as_asked(request)

            def is_whole(size: int) -> bool:
                """No state is kept inside of so many tokens."""
                stops = self.natural.placement.checkpoints(asked, computed, computed + size)
                return not any(computed < stop < computed + size and stop <= known for stop in stops)

            most = next((size for size in range(most, 0, -1) if is_whole(size)), most)
        self.counts["split"] += most < count
        return most

    # -- the end of schedule()

    def _complete(self, step: OracleStep) -> None:
        """States that are kept, then what became of all blocks meanwhile."""
        kept, late = list[tuple[int, int, int, int]](), list[tuple[OracleRequest, int, int, int]]()
        for i, entry in enumerate(step.entries):
            late += [(entry.request, *one) for one in self._keep_late(entry.request)]
            kept += [(i, *one) for one in self._keep(entry)]
        blocks = self.natural.blocks
        for i, group, end, place in kept:
            step.kept.append((i, group, end, blocks.local(group, self.natural.held[place])))
        for request, group, column, place in late:
            source = request.rows[group].table[column]
            step.late.append(
                (group, blocks.local(group, source), blocks.local(group, self.natural.held[place]), "state")
            )
        tell(self.cache.groups, step)
        for of, source, target in blocks.moves:
            group = blocks.layout.classes[of].groups[0]
            step.moves.append((group, blocks.local(group, source), blocks.local(group, target)))
            step.targets.add(target)
        self.counts["moved"] += len(step.moves)
        for entry in step.entries:
            self._follow(entry)
        self.peak_usage = max(self.peak_usage, self.pool.usage)
        self.natural.let_go()

    def _keep(self, entry: Entry) -> list[tuple[int, int, int]]:
        """States kept within a row: group, token count, place among what is held."""
        kept = []
        for end in self.natural.stops(entry.request, entry.computed, entry.certain):
            found = self.natural.keep(entry.request, end, self.counts["steps"])
            if found is None:
                self.counts["declined"] += 1
                continue
            kept += [(group, end, place) for group, place in found]
        self.counts["kept"] += len(kept)
        return kept

    def _keep_late(self, request: OracleRequest) -> list[tuple[int, int, int]]:
        """States kept behind drafts that were accepted: group, column, place among what is held."""
        kept = []
        for end, column in request.late:
            found = self.natural.keep(request, end, self.counts["steps"])
            if found is None:
                self.counts["declined"] += 1
                continue
            kept += [(group, column, place) for group, place in found]
        request.late = []
        self.counts["kept late"] += len(kept)
        return kept

    def _keep_drafts(self, entry: Entry, kept: int) -> None:
        """See Oracle; a state is to be kept at stops among the drafts that stay."""
        super()._keep_drafts(entry, kept)
        request, end = entry.request, entry.certain + kept
        if entry.drafts:
            stops = self.natural.stops(request, entry.certain, end)
            request.late = [(stop, 0 if stop == end else stop - entry.certain) for stop in stops]

    def _follow(self, entry: Entry) -> None:
        """What the worker copies, zeroes, reads and writes for a row."""
        blocks = self.natural.blocks
        places = self.natural.owned.get(entry.request, [None] * len(self.cache.groups))
        for group, table, place in zip(self.cache.groups, entry.request.tables, places, strict=True):
            recurrent = group.recurrent
            if isinstance(group, ScratchStateGroup):
                block = blocks.local(group.number, table[0])
                entry.places[group.number] = group.places(entry.certain, len(entry.drafts))
                for i, column in enumerate(entry.places[group.number]):
                    entry.writes.append((group.number, entry.certain + i, blocks.local(group.number, table[column])))
                if not entry.computed:
                    entry.zero.append((group.number, block))
            else:
                block = 0
            entry.reads.append(block if recurrent else -1)
            if place is not None:
                source = blocks.local(group.number, self.natural.held[place])
                new = block if recurrent else blocks.local(group.number, table[entry.computed // group.size])
                entry.copies.append((group.number, source, new, "state" if recurrent else "block"))

    # -- who leaves

    def _preempt(self, request: OracleRequest) -> None:
        if not self._held(request):
            self.cache.settle(request)
        super()._preempt(request)

    def _forget(self, failed: list[OracleStep]) -> None:
        self.natural.blocks.unpublish(failed[0].step_id)
        self.natural.blocks.distrust(self._targets(failed))
        for request in self.dead:
            request.lost |= self._lost(request, failed)

    def _lost(self, request: OracleRequest, failed: list[OracleStep]) -> bool:
        targets = self._targets(failed)
        held = {block for table in request.tables for block in table}
        return super()._lost(request, failed) or bool(held & targets)

    @staticmethod
    def _targets(failed: list[OracleStep]) -> set[int]:
        return {target for step in failed for target in step.targets}


def branch_of(parent: OracleRequest, request_id: str) -> OracleRequest:
    """A request of its own with the tokens of another."""
    return replace(
        parent,
        request_id=request_id,
        tokens=list(parent.tokens),
        rows=[],
        computed=0,
        preemptions=0,
        first_hit=None,
        branch=0,
        overtaken=0,
        refused_at=None,
        consumed=0,
        lost=False,
        late=[],
        encodes=False,
    )
