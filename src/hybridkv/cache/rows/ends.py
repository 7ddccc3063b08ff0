"""Published ends: token counts inside a block at which a request is likely to be resumed (natural layout).

    tokens  [ block | block | blo:ck | ... ]      P - 1 of the prompt, marked positions; where it ended or was preempted
                                 ^ end: the block can be hit up to here, and copied when it is

The block goes on being filled by its request: what a partial key speaks of is not written again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.block_keys import WRITTEN
from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.policies import NEVER
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.write_log import WriteLog
from hybridkv.columns import grown
from hybridkv.request import Request

Int64 = NDArray[np.int64]


def ends_of(request: Request) -> list[int]:
    """Where ``request`` says that it may be resumed, ascending: before its prompt's last token, and its marks."""
    return sorted({request.num_prompt_tokens - 1, *request.marks} - {0})


class PublishedEnds:
    """Partial keys of the blocks in which ends of resident requests lie.

    groups: those whose blocks can be used in part; none in the reference layout.
    """

    def __init__(self, groups: Sequence[CacheGroup], pool: BlockPool, log: WriteLog) -> None:
        self._numbers = {group.number for group in groups}
        self._groups = tuple(groups)
        self._pool = pool
        self._log = log
        self._done = np.zeros(64, np.int64)
        self._next = np.full(64, NEVER)

    def begin(self, request: Request, tokens: int) -> None:
        """``request`` begins with ``tokens`` computed: ends up to there are others' affair."""
        self._done = grown(self._done, request.row + 1)
        self._next = grown(self._next, request.row + 1, NEVER)
        self._done[request.row] = 0
        self.advance(request, tokens)

    def advance(self, request: Request, known_tokens: int) -> None:
        """Ends up to ``known_tokens`` are dealt with."""
        known_tokens = max(known_tokens, self._done.item(request.row))
        self._done[request.row] = known_tokens
        ahead = [end for end in ends_of(request) if end > known_tokens] if self._groups else []
        self._next[request.row] = ahead[0] if ahead and request.writes_prefix_cache else NEVER

    def next_end(self, row: int) -> int:
        """The token count at which ``row`` has an end to publish."""
        return self._next.item(row) if row < len(self._next) else NEVER

    def next_ends(self, rows: Int64) -> Int64:
        """next_end of many resident rows, int64[rows]."""
        ahead: Int64 = self._next[rows]
        return ahead

    def publish(self, group: CacheGroup, request: Request, known_tokens: int) -> None:
        """The ends up to ``known_tokens`` of ``group`` that were not dealt with."""
        if group.number not in self._numbers or known_tokens < self.next_end(request.row):
            return
        done = self._done.item(request.row)
        for end in ends_of(request):
            if done < end <= known_tokens:
                self._publish_one(group, request, end, self._log.open_step)

    def publish_last(self, request: Request, tokens: int) -> None:
        """``request`` ends, or is preempted, with ``tokens`` computed, all of them written."""
        for group in self._groups:
            self._publish_one(group, request, tokens, WRITTEN)

    def _publish_one(self, group: CacheGroup, request: Request, end: int, step: int) -> None:
        column, inside = divmod(end, group.policy.block_size)
        rows = group.rows
        if not inside or not rows.base.item(request.row) <= column < rows.count.item(request.row):
            return
        block = rows.cells.item(rows.origin.item(request.row) + column)
        if not block:
            return
        parent, tail = group.view(request).tail(end)
        if self._pool.publish_tail(group.number, block, parent, tail, step) and step != WRITTEN:
            self._log.record(np.array([block], np.int32), [], step)
