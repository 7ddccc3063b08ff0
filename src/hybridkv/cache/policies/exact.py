"""Hits that end at any token: the natural layout's, where a block that is used in part is copied.

A column can give as many of its tokens as some cached block begins with, its *reach*: all where the request's key of
the column is known, else the longest partial key (hybridkv.cache.blocks.partial) that the request's tokens match.

    t served by full attention      every column before t reaches as far as t asks
    by a window of W                the columns of tokens t - W + 1 .. t - 1, at least that of token t - 1
    by a chunk                      those of its chunk before t; where t begins one, that t was seen must be proved
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.cache.policies.spans import Span
from hybridkv.cache.policies.values import NONE, Hit, Index, Int32, Search


@dataclass(frozen=True, slots=True)
class TokenHits:
    """Finds hits of any length for layers that read ``span``."""

    span: Span
    ends_inside: bool = True

    def longest_hit(self, index: Index, keys: Sequence[bytes], search: Search, block_size: int) -> Hit:
        """The largest end that is served.

        No end between a column's reach and the column's own can be, so the candidate falls from column to column.
        O(columns read).
        """
        end, missing, seen = search.end_tokens, list[int](), list[Int32]()
        first, run = -1, NONE
        while end > 0:
            start = self.span.first_needed(end, block_size)
            if start == end:  # a chunk and a block begin: nothing is read, but the prefix must have been seen
                if end <= search.proven_tokens:
                    return Hit(end, np.zeros(end // block_size, np.int32), tuple(missing), _joined(seen))
                start = end - 1
                proof = True
            else:
                proof = False
            column, last = start // block_size, end // block_size
            if column != first or len(run) < last - column:
                first, run = column, index.leading_run(keys[column:last])
                seen.append(run)
            at = min(column + len(run), last)  # the first column that is not known whole, or that of the end
            wanted = end - at * block_size
            reached, begun = index.reach(at) if wanted > 0 else (0, 0)
            if begun:
                seen.append(np.array([begun], np.int32))
            if at == last and reached >= wanted:
                read = np.zeros(last - column, np.int32) if proof else run[: last - column]
                blocks = np.concatenate((np.zeros(column, np.int32), read))
                return Hit(end, blocks, tuple(missing), _joined(seen))
            end = at * block_size + reached
            missing.append(end)
        return Hit(0, NONE, tuple(missing), _joined(seen))


def _joined(parts: list[Int32]) -> Int32:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NONE
