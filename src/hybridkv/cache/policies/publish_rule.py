"""Which full blocks are worth a key: only what a later look-up can reach.

A hit ends at a multiple of the common alignment A. Of a window only the ``need`` columns before such an
edge are ever looked at (EAGLE: one column further, since it looks one block past the edge):

    A = 4 columns, need 2    . . x x | . . x x | . . x x |        EAGLE, need 3    . . x x | x . x x | x ...

With retention only some edges are served: every ``interval`` tokens, and those where the request itself is
likely to be resumed. This is what vLLM 0.32 publishes; see tests/unit/test_publishing.py for its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hybridkv.cache.policies.values import NEVER, Int64, T


@dataclass(frozen=True, slots=True)
class PublishRule:
    """Publishing rule of one group.

    block_size: tokens of a column. alignment: common alignment of all groups, tokens. need: columns before
    an edge that a hit reads; None: all. past: columns behind an edge that are looked at as well.
    interval: tokens between the edges kept: None for every one, 0 for those of the request only.
    """

    block_size: int
    alignment: int
    need: int | None = None
    past: int = 0
    interval: int | None = None
    keeps_all: bool = field(init=False, repr=False, compare=False)
    """Whether every full column is published, whoever asks."""

    def __post_init__(self) -> None:
        all_is_read = self.need is None or (self.interval is None and self.need * self.block_size >= self.alignment)
        object.__setattr__(self, "keeps_all", all_is_read)

    def decided(self, known_tokens: T) -> T:
        """Leading columns about which ``known_tokens`` tokens decide: up to the last edge, and ``past``.

        A number or an int64 array.
        """
        edge = known_tokens // self.alignment * self.alignment
        if self.past:
            behind, most = known_tokens - edge, self.past * self.block_size
            edge += (behind - (behind - most) * (behind > most)) * (edge > 0)
        return edge // self.block_size

    def next_tokens(self, decided: T) -> T:
        """The token count at which more than ``decided`` columns are decided. A number or an int64 array."""
        end = (decided + 1) * self.block_size
        at_edge = -(-end // self.alignment) * self.alignment
        if not self.past:
            return at_edge
        before = end - self.past * self.block_size
        is_past = (before > 0) & (before % self.alignment == 0)
        soonest: T = at_edge - (at_edge - end) * is_past
        return soonest

    @property
    def keeps_every_edge(self) -> bool:
        """Whether a column that ends at a multiple of the alignment is published, whoever asks."""
        return self.interval is None and self.block_size % self.alignment == 0

    def columns(self, first: int, last: int, edges: tuple[int, ...] = ()) -> Int64:
        """Columns of first .. last-1 to publish. edges: tokens where the request is likely to be resumed."""
        every: Int64 = np.arange(first, last)
        if self.keeps_all:
            return every
        kept: Int64 = every[self.mask(every, edges)]
        return kept

    def keeps(self, column: int, edges: tuple[int, ...] = ()) -> bool:
        """Mask of one column, without arrays of one element."""
        if self.need is None:
            return True
        segment = self.alignment if self.interval is None else self.interval
        per = segment // self.block_size if segment else NEVER
        at = column - self.past
        if self.need >= per or (at >= 0 and at % per >= per - self.need):
            return True
        if self.interval is None:
            return False
        ends = (edge // self.alignment * self.alignment // self.block_size + self.past for edge in edges)
        return any(end - self.need <= column < end for end in ends)

    def mask(self, columns: Int64, edges: tuple[int, ...] = ()) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Which of ``columns`` are published, bool[len(columns)]."""
        if self.need is None:
            return np.ones(len(columns), np.bool_)
        segment = self.alignment if self.interval is None else self.interval
        per = segment // self.block_size if segment else NEVER
        at = columns - self.past
        keep = np.full(len(columns), self.need >= per) | ((at >= 0) & (at % per >= per - self.need))
        if self.interval is not None:
            for edge in edges:
                end = edge // self.alignment * self.alignment // self.block_size + self.past
                keep |= (columns >= end - self.need) & (columns < end)
        return keep
