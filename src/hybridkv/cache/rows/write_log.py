"""Published, then written: what steps in flight have promised to write.

    publish (tokens scheduled) --mark_written--> written: stored-events are emitted
                               --revoke(step)--> unpublished: it was never there

Without an open step, published counts as written at once.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.block_keys import WRITTEN
from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.events import BlockStored, EndKept, published_extras, untagged
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.errors import CacheError
from hybridkv.request import Request


@dataclass(frozen=True, slots=True)
class Run:
    """Columns first .. first + len(ids) - 1 of a request in a group, published together. ids int32[n]."""

    group: CacheGroup
    request: Request
    first: int
    ids: NDArray[np.int32]


class WriteLog:
    """Runs published by each step in flight.

    wants_runs: whether they must be recorded one by one, for events; else ids are enough.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.wants_runs = pool.keys.events_enabled
        self._runs: dict[int, list[Run]] = {}
        self._ids: dict[int, list[NDArray[np.int32]]] = {}
        self._ones: dict[int, array[int]] = {}
        self._ends: dict[int, list[EndKept]] = {}
        self.open_step = WRITTEN

    def begin(self, step: int) -> None:
        """What is published from now on is written by ``step``. CacheError if another is open, or as late."""
        if self.open_step != WRITTEN:
            raise CacheError(f"step {step} begins while step {self.open_step} is open: end that one first")
        latest = max(self._ids, default=-1)
        if step <= latest:
            raise CacheError(f"step {step} begins behind step {latest}, which is in flight: number steps in order")
        self.open_step = step
        self._runs[step], self._ids[step], self._ones[step] = [], [], array("i")

    def end(self) -> None:
        """The open step is complete: nothing more is published by it."""
        self.open_step = WRITTEN

    def record(self, ids: NDArray[np.int32], runs: list[Run], step: int) -> None:
        """``ids`` were published and ``step``, the open one or WRITTEN, writes them.

        runs: whose they are; may be empty when events are off.
        """
        if step == WRITTEN:
            for run in runs:
                self._pool.keys.emit(_stored(run, run.first, run.first + len(run.ids)))
            return
        self._ids[step].append(ids)
        self._runs[step] += runs

    def record_one(self, block: int, step: int) -> None:
        """``record`` of one block, which nobody wants a run of. step: the open one."""
        self._ones[step].append(block)

    @property
    def wants_ends(self) -> bool:
        """Whether what is no whole block of tokens must be recorded, for events."""
        return self._pool.keys.tells_ends

    def record_end(self, group: CacheGroup, request: Request, tokens: int, step: int) -> None:
        """Beside ``record``: ``step``, or WRITTEN, writes in ``group`` what ends with ``tokens`` of ``request``."""
        size, stride = group.policy.block_size, group.key_stride
        column, inside = divmod(tokens, size)
        behind = request.hashes[column * stride - 1] if column else None
        if inside:
            extras = request.extra_keys(column * stride, stride)
            told = None if extras is None else untagged(published_extras(extras, stride, size // stride)[0])
            end = EndKept(group.number, behind, *group.view(request).tail(tokens), extra_keys=told)
        elif behind is None:
            return
        else:
            end = EndKept(group.number, behind, behind)
        if step == WRITTEN:
            self._pool.keys.emit(end)
        else:
            self._ends.setdefault(step, []).append(end)

    def promised(self, step: int) -> set[int]:
        """Blocks that ``step`` published; none for a step that is not in flight."""
        return {block for part in self._published(step) for block in part.tolist()} if step in self._ids else set()

    def _published(self, step: int) -> list[NDArray[np.int32]]:
        """What ``step``, which is in flight, published; the arrays themselves."""
        ones = self._ones[step]
        return [*self._ids[step], np.frombuffer(ones, np.int32)] if ones else self._ids[step]

    def follow(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Blocks moved from ``sources`` to ``targets``. O(blocks of the steps in flight)."""
        order = np.argsort(sources)
        sources, targets = sources[order], targets[order]
        for step in self._ids:
            for ids in (*self._published(step), *(run.ids for run in self._runs[step])):
                place = np.minimum(np.searchsorted(sources, ids), len(sources) - 1)
                moved = sources[place] == ids
                ids[moved] = targets[place[moved]]

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps that are neither written nor revoked, oldest first."""
        return tuple(self._ids)

    def mark_written(self, step: int) -> None:
        """``step`` was executed: what it published is written. CacheError for a step that never began."""
        if step not in self._ids:
            raise CacheError(f"step {step} is not in flight")
        ids = self._published(step)
        runs = self._runs.pop(step)
        del self._ids[step], self._ones[step]
        for run in runs:
            self._mark_run_written(run, step)
        if ids:
            self._pool.keys.mark_written(np.concatenate(ids), step)
        for end in self._ends.pop(step, ()) if self._ends else ():
            self._tell_end(end)

    def revoke(self, first_step: int) -> None:
        """Steps from ``first_step`` on failed: what they published can be hit no longer."""
        failed = [step for step in self._ids if step >= first_step]
        ids = [part for step in failed for part in self._published(step)]
        if ids:
            self._pool.unpublish_unwritten(np.concatenate(ids), first_step)
        for step in failed:
            del self._ids[step], self._runs[step], self._ones[step]
            self._ends.pop(step, None)

    def _tell_end(self, end: EndKept) -> None:
        """The step that kept ``end`` has run; a later one may have gone on in its block, which has its turn then."""
        step = self._pool.keys.is_kept(end)
        if step == WRITTEN:
            self._pool.keys.emit(end)
        elif step is not None:
            self._ends.setdefault(step, []).append(end)

    def _mark_run_written(self, run: Run, step: int) -> None:
        """One stored-event for each stretch of ``run`` that is written."""
        if not self._pool.keys.events_enabled:
            return
        keys = run.group.key_run(run.request, run.first, run.first + len(run.ids))
        # one that was evicted may have made room for another of the same step, which has its turn
        written = np.array([self._pool.key_of(block) == key for block, key in zip(run.ids.tolist(), keys, strict=True)])
        written[written] = self._pool.keys.mark_written(run.ids[written], step)
        if written.all():
            self._pool.keys.emit(_stored(run, run.first, run.first + len(run.ids)))
            return
        edges = np.flatnonzero(np.diff(np.concatenate(([False], written, [False])).astype(np.int8)))
        for start, stop in edges.reshape(-1, 2).tolist():
            self._pool.keys.emit(_stored(run, run.first + start, run.first + stop))


def _stored(run: Run, first: int, last: int) -> BlockStored:
    """The event of columns first .. last-1."""
    group, request = run.group, run.request
    size, stride = group.policy.block_size, group.key_stride
    keys = group.key_run(request, max(first - 1, 0), last)
    parent = keys.pop(0) if first else None
    extras = request.extra_keys(first * stride, (last - first) * stride)
    return BlockStored(
        block_hashes=tuple(keys),
        parent_block_hash=parent,
        token_ids=request.token_tuple(first * size, last * size),
        block_size=size,
        lora_id=None if request.lora is None else request.lora.id,
        lora_name=None if request.lora is None else request.lora.name,
        extra_keys=None if extras is None else tuple(map(untagged, published_extras(extras, stride, size // stride))),
        group_idx=group.number,
        cache_salt=request.cache_salt,
    )
