"""Publishing: gives keys to the blocks of rows, so that later requests can hit them.

    tokens  [ block | block | blo:ck | ... ]      full blocks are published when their tokens are scheduled
                                 ^ resume point   prompt end P-1 or a marked position (natural layout): the block can
                                                  be hit up to here; a hit copies it

    transfer complete     --publish_computed--> full blocks can be hit
    drafts accepted       --publish_accepted--> full blocks and resume points can be hit
    ended or preempted    --publish_last------> the last, partial block can be hit too (natural layout)
    removed from the step --withdraw----------> blocks that it would have filled lose their keys

A request goes on filling a block that holds a resume point. The tokens under its partial key are not written again.

Blocks are published before they are written. Until then the step that writes them may fail:

    publish (tokens scheduled) --mark_written--> written: BlockStored events are emitted
                               --revoke(step)--> unpublished

Without an open step, published blocks count as written at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.journal import BlockStored, Medium, ResumePointStored, published_extras, untagged
from hybridkv.cache.keys import WRITTEN
from hybridkv.cache.policies import NEVER, UNPUBLISHED, GroupPlan
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.spaces.one_size import FEW
from hybridkv.errors import CacheError
from hybridkv.request import Request
from hybridkv.request_rows import RequestRows, grown

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive columns of a request in one group that were published together.

    Attributes:
        group: The group.
        request: The request.
        first: The first column.
        ids: int32[n], blocks of the columns.
    """

    group: CacheGroup
    request: Request
    first: int
    ids: NDArray[np.int32]


class Retention(NamedTuple):
    """Which windows and states are kept.

    Attributes:
        interval: Tokens between kept ones; 0 keeps those at each request's own boundaries; ``None`` keeps all.
        alignment: Every hit is a multiple of so many tokens.
        drops: Some group drops the last block of a hit.
    """

    interval: int | None
    alignment: int
    drops: bool


@dataclass(frozen=True, slots=True)
class HitEnds:
    """Where hits may end.

        block of 544, unit 32     [ 0 . 32 . 64 .  ...  . 480 | . 512 . ]      copied 488: no hit ends at 512

    Attributes:
        unit: Every hit is a multiple of so many tokens.
        block_size: With ``hit_unit``: tokens of a block; else 0, and ``copied`` means nothing.
        copied: Tokens of a block that a worker's copy carries.
    """

    unit: int
    block_size: int = 0
    copied: int = 0

    def last(self, tokens: int) -> int:
        """Return the last token count of at most ``tokens`` at which a hit may end."""
        end = tokens - tokens % self.unit
        if not self.block_size:
            return end
        inside = end % self.block_size
        return end - inside + min(inside, self.copied - self.copied % self.unit)


class Publisher:
    """Gives keys to the blocks of rows, and knows which blocks the steps in flight will write.

    Args:
        groups: All groups.
        pool: The blocks.
        shared_in_part: Groups whose blocks can be hit in part; an empty list in the reference layout without
            ``hit_unit``.
        retention: Which windows and states are kept; ``None`` without prefix caching.
        ends: Where hits of some group may end; all groups may agree on fewer ends.

    Attributes:
        ends: As in the arguments.
        publishes: Whether anything is published.
        open_step: The step that is being made; WRITTEN without one.
        wants_runs: Whether runs are recorded for events; else block ids are enough.
        wants_resume_points: Whether events report states and partial blocks.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        *,
        shared_in_part: Sequence[CacheGroup],
        retention: Retention | None,
        ends: HitEnds,
    ) -> None:
        self.ends = ends
        self._ends_anywhere = ends == HitEnds(1)
        self.publishes = retention is not None
        self.open_step = WRITTEN
        self.wants_runs = pool.journal.reports_events
        self._events = pool.journal.events
        self.wants_resume_points = pool.journal.reports_resume_points
        self._groups = tuple(groups)
        self._pool = pool
        self._shared_in_part = tuple(shared_in_part)
        self._retention = retention
        self._runs: dict[int, list[Run]] = {}
        self._ids: dict[int, list[Int32]] = {}
        self._ones: dict[int, array[int]] = {}
        self._stored_resume_points: dict[int, list[ResumePointStored]] = {}
        self._passed_tokens = np.zeros(64, np.int64)
        self._next_resume_point = np.full(64, NEVER)
        self._each_next_resume_point = self._next_resume_point.data  # quick to read singly

    def boundaries(self, request: Request) -> tuple[int, ...] | None:
        """Return the token counts that retention keeps: where the same prompt resumes, and where others branched off.

        The last token is always computed, so the same prompt resumes at the last boundary before it. With EAGLE it
        resumes one boundary earlier if the prompt does not continue. Returns () if everything is kept, ``None`` if
        nothing is published.
        """
        kept = self._retention
        if kept is None or not request.writes_prefix_cache:
            return None
        if kept.interval is None:
            return ()
        prompt, step = request.num_prompt_tokens, kept.alignment
        asked = (prompt - 1, prompt) if kept.drops else ()
        boundaries = [max((tokens // step - 1) * step, 0) for tokens in asked] or [prompt - 1]
        return (*boundaries, request.branch_tokens) if request.branch_tokens else tuple(boundaries)

    # -- full blocks

    def publish_plans(self, request: Request, plans: Sequence[GroupPlan], known_tokens: int) -> None:
        """Publish the blocks that a step of ``request`` fills, group by group.

        Also publish its resume points up to ``known_tokens``.
        """
        writes = request.writes_prefix_cache
        passes = known_tokens >= self.next_resume_point(request.row)
        for group, plan in zip(self._groups, plans, strict=True):
            self._publish_columns(group, request, plan.publish, plan.decided)
            if passes and group in self._shared_in_part:
                self._publish_resume_points(group, request, known_tokens)
            if not writes:
                group.published[request.row] = UNPUBLISHED
        if passes:
            self._pass_resume_points(request, known_tokens)

    def publish_computed(self, request: Request, num_computed_tokens: int, *, written: bool = False) -> None:
        """Publish the full blocks of the first ``num_computed_tokens`` tokens, for which the request holds blocks.

        Args:
            request: A resident request. If it does not write the cache, nothing is done.
            num_computed_tokens: Tokens whose KV is computed.
            written: The blocks are written, whichever step is open.
        """
        boundaries = self.boundaries(request)
        if boundaries is None:
            return
        known = min(num_computed_tokens, request.num_tokens)
        for group in self._groups:
            columns, decided = group.policy.stored_columns(group.facts(request.row), known, boundaries)
            self._publish_columns(group, request, columns, decided, written=written)
        self._pool.advance_epoch()

    def publish_encoded(self, request: Request) -> None:
        """Publish the output of the encoder, which was loaded into the blocks of ``request``."""
        writes = self.publishes and request.writes_prefix_cache and request.encoder is not None
        for group in self._groups if writes else ():
            held = group.rows.each_count[request.row] if group.kind.by_digest else 0
            if held > group.each_published[request.row]:
                self._publish_columns(group, request, np.arange(held), held, written=True)

    def publish_accepted(self, request: Request) -> None:
        """Publish the blocks that accepted drafts of ``request`` fill.

        This must not wait for the next step, because windows may give the blocks back before it.
        """
        known = request.num_computed_tokens
        self.publish_computed(request, known)
        if known < self.next_resume_point(request.row):
            return
        for group in self._shared_in_part:
            self._publish_resume_points(group, request, known)
        self._pass_resume_points(request, known)

    def _publish_columns(
        self, group: CacheGroup, request: Request, columns: Int64, decided: int, *, written: bool = False
    ) -> None:
        """Publish the blocks in ``columns`` of ``request``. The first ``decided`` columns are not asked for again.

        Columns ascend; null ones are skipped. ``written``: the blocks are written, whichever step is open.
        """
        row = request.row
        group.each_published[row] = decided
        if not columns.size:
            return
        ids = group.rows.row_at(row, columns)
        if np.count_nonzero(ids) < len(ids):
            held = ids != 0
            ids, columns = ids[held], columns[held]
            if not ids.size:
                return
        step = WRITTEN if written else self.open_step
        self._pool.publish(group.number, ids, group.keys_at(request, columns), step)
        reported = self.wants_runs and not group.kind.by_digest  # events report the decoder's tokens only
        self.record(ids, _runs(group, request, columns, ids) if reported else [], step)

    def publish_grown(self, request: Request, known: int) -> None:
        """Publish as ``publish_rows`` for one request whose groups only grow, without arrays of one element."""
        if not self.publishes:
            return
        row, step = request.row, self.open_step
        for group in self._groups:
            rule, first = group.policy.publishing, group.each_published[row]
            if rule is None or (decided := rule.decided(known)) <= first:
                continue
            if decided > first + 1 or self.wants_runs:
                begin, boundaries = (
                    max(first, group.rows.each_dropped[row]),
                    () if rule.keeps_all else self.boundaries(request),
                )
                self._publish_columns(group, request, rule.columns(begin, decided, boundaries or ()), decided)
                continue
            group.each_published[row] = decided
            if rule.keeps_all or rule.keeps(first, self.boundaries(request) or ()):
                block = group.rows.cell(row, first)
                if block:
                    key = request.hashes[decided * group.hashes_per_block - 1]
                    self._pool.keys.publish_one(group.number, block, key, step)
                    if step != WRITTEN:
                        self._ones[step].append(block)

    def publish_state(self, group: CacheGroup, request: Request, tokens: int, block: int, *, written: bool) -> None:
        """Publish ``block`` as the state after ``tokens`` tokens.

        ``written``: it is written, whichever step is open.
        """
        step = WRITTEN if written else self.open_step
        column, inside = divmod(tokens, group.policy.block_size)
        if inside:
            parent, tokens_inside = group.index.partial_key(request, tokens)
            self._pool.publish_partial(group.number, block, parent, tokens_inside, step)
        else:
            self._pool.publish(group.number, (block,), (request.hashes[column * group.hashes_per_block - 1],), step)
        if step != WRITTEN:
            self._ones[step].append(block)
        if self.wants_resume_points:
            self.record_resume_point(group, request, tokens, step)

    def publish_rows(self, requests: RequestRows, rows: Int64, known: Int64, since: Int64 | None = None) -> None:
        """Publish the full blocks of ``rows`` at ``known`` tokens, in order within a group. Resume points are left out.

        ``since`` holds the tokens of each row when steps of one token each began: earlier filled blocks then come
        first.
        """
        for group in self._groups if self.publishes else ():
            rule = group.policy.publishing
            if rule is None:
                continue
            first = group.published[rows]
            counts = np.maximum(rule.decided(known) - first, 0)
            ready = counts.nonzero()[0]
            if ready.size:
                begun = None if since is None else since[ready]
                self._publish_ready(group, requests, rows[ready], first[ready], counts[ready], begun)

    def _publish_ready(  # noqa: PLR0917 - columns of one table
        self,
        group: CacheGroup,
        requests: RequestRows,
        rows: Int64,
        first: Int64,
        counts: Int64,
        since: Int64 | None = None,
    ) -> None:
        """Publish ``counts`` columns from ``first`` on of each of ``rows``."""
        group.published[rows] = first + counts
        if counts.max() == 1:  # decoding rows
            columns, of = first, rows
        else:
            of = rows.repeat(counts)
            columns = np.arange(len(of)) + np.repeat(first - (counts.cumsum() - counts), counts)
        if since is not None and len(of) > 1 and group.policy.publishing is not None:
            order = np.argsort(group.policy.publishing.next_tokens(columns) - np.repeat(since, counts), kind="stable")
            of, columns = of[order], columns[order]
        ids = group.rows.at(of, columns)
        if not ids.all():
            held = ids != 0
            of, columns, ids = of[held], columns[held], ids[held]
        if not ids.size:
            return
        owners, hashes_per_block = requests.owners(of), group.hashes_per_block
        places = ((columns + 1) * hashes_per_block - 1).tolist()
        keys = [request.hashes[place] for request, place in zip(owners, places, strict=True)]
        self._pool.publish(group.number, ids, keys, self.open_step)
        runs = _rows_runs(group, owners, columns, ids) if self.wants_runs else []
        self.record(ids, runs, self.open_step)

    def next_boundaries(self, rows: Int64) -> Int64:
        """Return the token count at which each of ``rows`` next publishes a full block, int64[rows]. NEVER: none."""
        soonest = np.full(len(rows), NEVER)
        for group in self._groups if self.publishes else ():
            if group.policy.publishing is not None:
                np.minimum(soonest, group.policy.publishing.next_tokens(group.published[rows]), out=soonest)
        return soonest

    # -- resume points inside blocks

    def begin(self, request: Request, tokens: int) -> None:
        """Note that ``request`` begins with ``tokens`` computed: others published the resume points up to there."""
        if request.row >= len(self._passed_tokens):
            self._passed_tokens = grown(self._passed_tokens, request.row + 1)
            self._next_resume_point = grown(self._next_resume_point, request.row + 1, NEVER)
            self._each_next_resume_point = self._next_resume_point.data
        self._passed_tokens[request.row] = 0
        self._pass_resume_points(request, tokens)

    def next_resume_point(self, row: int) -> int:
        """Return the next resume point that ``row`` must publish; NEVER without one."""
        return self._each_next_resume_point[row] if row < len(self._each_next_resume_point) else NEVER

    def next_resume_points(self, rows: Int64) -> Int64:
        """Return the next resume points of resident rows, int64[rows]."""
        ahead: Int64 = self._next_resume_point[rows]
        return ahead

    def publish_last(self, request: Request, tokens: int) -> None:
        """Publish the partial last block of ``request``, which ends with ``tokens`` computed and written."""
        if not self._ends_anywhere:
            tokens = self.ends.last(tokens)
        for group in self._shared_in_part:
            self._publish_resume_point(group, request, tokens, WRITTEN)

    def withdraw(self, row: int) -> None:
        """Unpublish the blocks that the open step would have written for ``row``, because the row does not run."""
        step = self.open_step
        if step == WRITTEN:
            return
        published = self.published_by(step)
        mine = [block for group in self._groups for block in group.rows.held(row).tolist() if block in published]
        if mine:
            self._pool.unpublish_unwritten(np.array(mine, np.int32), step)

    def _pass_resume_points(self, request: Request, known_tokens: int) -> None:
        """Note that the resume points up to ``known_tokens`` are handled."""
        known_tokens = max(known_tokens, self._passed_tokens.item(request.row))
        self._passed_tokens[request.row] = known_tokens
        ahead = [end for end in self.resume_points_of(request) if end > known_tokens] if self._shared_in_part else []
        self._next_resume_point[request.row] = ahead[0] if ahead and request.writes_prefix_cache else NEVER

    def resume_points_of(self, request: Request) -> list[int]:
        """Return where hits may end for the sake of ``request``, ascending; block boundaries are among them.

        They are the last ends before its prompt's last token and its marks. With ``hit_unit``, they lie in the prompt,
        and one is the last end before the tokens at which it branches off from earlier requests.
        """
        last, end = request.num_prompt_tokens - 1, self.ends.last
        if self.ends.block_size:
            asked = (last, request.branch_tokens, *request.marks)
            return sorted({end(min(one, last)) for one in asked} - {0})
        if self._ends_anywhere and not request.marks:
            return [last] if last else []
        return sorted({end(one) for one in (last, *request.marks)} - {0})

    def _publish_resume_points(self, group: CacheGroup, request: Request, known_tokens: int) -> None:
        """Publish the resume points of ``group`` up to ``known_tokens`` that are not handled yet."""
        ended = self._passed_tokens.item(request.row)
        for end in self.resume_points_of(request):
            if ended < end <= known_tokens:
                self._publish_resume_point(group, request, end, self.open_step)

    def _publish_resume_point(self, group: CacheGroup, request: Request, end: int, step: int) -> None:
        """Publish the partial block before ``end``, if the row holds it."""
        column, inside = divmod(end, group.policy.block_size)
        rows = group.rows
        if not inside or not rows.base.item(request.row) <= column < rows.count.item(request.row):
            return
        block = rows.cells.item(rows.origin.item(request.row) + column)
        if not block:
            return
        parent, tokens_inside = group.index.partial_key(request, end)
        if not self._pool.publish_partial(group.number, block, parent, tokens_inside, step):
            return
        if step != WRITTEN:
            self._ones[step].append(block)
        if self.wants_resume_points:
            self.record_resume_point(group, request, end, step)

    # -- steps in flight

    def begin_step(self, step: int) -> None:
        """Open ``step``: it writes the blocks that are published from here on.

        Raises:
            CacheError: Another step is open, or the number is not above those in flight.
        """
        if self.open_step != WRITTEN:
            raise CacheError(f"step {step} begins while step {self.open_step} is open: end that one first")
        latest = max(self._ids, default=-1)
        if step <= latest:
            raise CacheError(f"step {step} begins after step {latest}, which is in flight: number steps in order")
        self.open_step = step
        self._runs[step], self._ids[step], self._ones[step] = [], [], array("i")

    def end_step(self) -> None:
        """Close the open step."""
        self.open_step = WRITTEN

    def record(self, ids: NDArray[np.int32], runs: list[Run], step: int) -> None:
        """Note that ``ids`` were published, and that ``step`` writes them: the open one, or WRITTEN.

        ``runs`` says to which requests they belong; it may be empty if events are off.
        """
        if step == WRITTEN:
            for run in runs:
                self._events.put(_stored(run, run.first, run.first + len(run.ids), self._events.medium))
            return
        if len(ids) <= FEW:
            self._ones[step].extend(ids.tolist())
        else:
            self._ids[step].append(ids)
        self._runs[step] += runs

    def record_resume_point(self, group: CacheGroup, request: Request, tokens: int, step: int) -> None:
        """Record for events that ``step`` (or WRITTEN) writes the resume point at ``tokens`` in ``group``."""
        size, per_block = group.policy.block_size, group.hashes_per_block
        column, inside = divmod(tokens, size)
        block_hash = request.hashes[column * per_block - 1] if column else None
        if inside:
            extras = request.extra_keys(column * per_block, per_block)
            keys = None if extras is None else untagged(published_extras(extras, per_block, size // per_block)[0])
            where = group.index.partial_key(request, tokens)
            point = ResumePointStored(group.number, block_hash, *where, keys, self._events.medium)
        elif block_hash is None:
            return
        else:
            point = ResumePointStored(group.number, block_hash, block_hash, medium=self._events.medium)
        if step == WRITTEN:
            self._events.put(point)
        else:
            self._stored_resume_points.setdefault(step, []).append(point)

    def published_by(self, step: int) -> set[int]:
        """Return the blocks that ``step`` published; an empty set for a step that is not in flight."""
        return {block for part in self._published(step) for block in part.tolist()} if step in self._ids else set()

    def _published(self, step: int) -> list[NDArray[np.int32]]:
        """Return the arrays of the blocks that ``step``, which is in flight, published. They are not copies."""
        ones = self._ones[step]
        return [*self._ids[step], np.frombuffer(ones, np.int32)] if ones else self._ids[step]

    def follow(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Rename blocks that moved from ``sources`` to ``targets``. O(blocks of the steps in flight)."""
        order = sources.argsort()
        sources, targets = sources[order], targets[order]
        for step in self._ids:
            for ids in (*self._published(step), *(run.ids for run in self._runs[step])):
                place = np.minimum(sources.searchsorted(ids), len(sources) - 1)
                moved = sources[place] == ids
                ids[moved] = targets[place[moved]]

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps that are neither written nor revoked, oldest first."""
        return tuple(self._ids)

    def mark_written(self, step: int) -> None:
        """Note that ``step`` was executed: the blocks it published are written.

        Raises CacheError for an unknown step.
        """
        if step not in self._ids:
            raise CacheError(f"step {step} is not in flight")
        ids, ones = self._ids.pop(step), self._ones.pop(step)
        for run in self._runs.pop(step):
            self._mark_run_written(run, step)
        if ids:
            self._pool.keys.mark_written(np.concatenate(ids), step)
        if ones:
            self._pool.keys.mark_few_written(ones, step)
        for end in self._stored_resume_points.pop(step, ()) if self._stored_resume_points else ():
            self._report_resume_point(end)

    def revoke(self, first_step: int) -> None:
        """Unpublish the blocks of all steps from ``first_step`` on, which failed."""
        failed = [step for step in self._ids if step >= first_step]
        ids = [part for step in failed for part in self._published(step)]
        if ids:
            self._pool.unpublish_unwritten(np.concatenate(ids), first_step)
        for step in failed:
            del self._ids[step], self._runs[step], self._ones[step]
            self._stored_resume_points.pop(step, None)

    def _report_resume_point(self, end: ResumePointStored) -> None:
        """Report a resume point whose step has run. If a later step wrote more into its block, that step reports it."""
        step = self._pool.keys.is_kept(end)
        if step == WRITTEN:
            self._events.put(end)
        elif step is not None:
            self._stored_resume_points.setdefault(step, []).append(end)

    def _mark_run_written(self, run: Run, step: int) -> None:
        """Emit one BlockStored for each written stretch of ``run``."""
        if not self.wants_runs:
            return
        keys = run.group.key_run(run.request, run.first, run.first + len(run.ids))
        # A block that was evicted may carry the key of another run of the same step, which reports it.
        written = np.array(
            [self._pool.keys.key_of(block) == key for block, key in zip(run.ids.tolist(), keys, strict=True)]
        )
        written[written] = self._pool.keys.mark_written(run.ids[written], step)
        if written.all():
            self._events.put(_stored(run, run.first, run.first + len(run.ids), self._events.medium))
            return
        boundaries = np.flatnonzero(np.diff(np.concatenate(([False], written, [False])).astype(np.int8)))
        for start, stop in boundaries.reshape(-1, 2).tolist():
            self._events.put(_stored(run, run.first + start, run.first + stop, self._events.medium))


def _rows_runs(group: CacheGroup, owners: Sequence[Request], columns: Int64, ids: Int32) -> list[Run]:
    """Return the runs of neighbouring columns of one request each."""
    rows = np.array([request.row for request in owners])
    cuts = (np.flatnonzero((np.diff(columns) != 1) | (np.diff(rows) != 0)) + 1).tolist()
    starts, stops = [0, *cuts], [*cuts, len(columns)]
    return [Run(group, owners[a], int(columns[a]), ids[a:b]) for a, b in zip(starts, stops, strict=True)]


def _runs(group: CacheGroup, request: Request, columns: Int64, ids: Int32) -> list[Run]:
    """Return the runs of neighbouring columns."""
    cuts = (np.flatnonzero(np.diff(columns) != 1) + 1).tolist()
    starts, stops = [0, *cuts], [*cuts, len(columns)]
    return [Run(group, request, int(columns[a]), ids[a:b]) for a, b in zip(starts, stops, strict=True)]


def _stored(run: Run, first: int, last: int, medium: Medium) -> BlockStored:
    """Return the event of columns first .. last-1."""
    group, request = run.group, run.request
    size, hashes_per_block = group.policy.block_size, group.hashes_per_block
    keys = group.key_run(request, max(first - 1, 0), last)
    parent = keys.pop(0) if first else None
    extras = request.extra_keys(first * hashes_per_block, (last - first) * hashes_per_block)
    return BlockStored(
        block_hashes=tuple(keys),
        parent_block_hash=parent,
        token_ids=request.token_tuple(first * size, last * size),
        block_size=size,
        lora_id=None if request.lora is None else request.lora.id,
        lora_name=None if request.lora is None else request.lora.name,
        medium=medium,
        extra_keys=None
        if extras is None
        else tuple(map(untagged, published_extras(extras, hashes_per_block, size // hashes_per_block))),
        group_idx=group.number,
        cache_salt=request.cache_salt,
    )
