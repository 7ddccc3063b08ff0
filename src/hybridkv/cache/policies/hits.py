"""Where hits may end, and what they rest on: one value for each way of finding them.

BlockHits     attention, at the edges of blocks                       [ block | block ]
TokenHits     attention, at any token: a block used in part is copied [ block | blo:ck ]
StateHits     states of the reference layout, at the ends of their blocks
LabelHits     states of the natural layout, where a checkpoint is labelled; it is copied
NoHits        what cannot be resumed
AnyHits       what a hit needs nothing of
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridkv.cache.policies.spans import Span
from hybridkv.cache.policies.values import NONE, Hit, Index, Int32, Search


class Hits(Protocol):
    """copies: whether a hit may end inside a block, or at a state, which is copied then.

    downward_closed: whether a prefix of a hit is a hit.
    """

    @property
    def copies(self) -> bool:
        """See the class."""
        ...

    @property
    def downward_closed(self) -> bool:
        """See the class."""
        ...

    def columns(self, num_tokens: int) -> int:
        """Columns of a hit of ``num_tokens`` tokens, null ones included."""
        ...

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:
        """The longest cached prefix; keys: one a full column."""
        ...

    def source(self, index: Index, num_tokens: int) -> int:
        """The block to copy the end of a hit of ``num_tokens`` from; 0 where nothing is copied.

        CacheError where there is none to copy.
        """
        ...


@dataclass(frozen=True, slots=True)
class BlockHits:
    """Finds what layers that read ``span`` need, up to the edge of a block."""

    span: Span
    block_size: int
    copies: bool = False

    @property
    def downward_closed(self) -> bool:
        """Where every earlier token is read."""
        return self.span.downward_closed

    def columns(self, num_tokens: int) -> int:
        """Full ones."""
        return num_tokens // self.block_size

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:
        """What the span finds."""
        return self.span.longest_hit(index, keys, search, self.block_size)

    def source(self, index: Index, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """None: blocks are shared whole."""
        return 0


@dataclass(frozen=True, slots=True)
class TokenHits:
    """Hits that end at any token: the natural layout's, where a block that is used in part is copied.

    A column can give as many of its tokens as some cached block begins with, its *reach*: all where the request's key
    of the column is known, else the longest partial key (hybridkv.cache.blocks.index) that the request's tokens match.

        t served by full attention      every column before t reaches as far as t asks
        by a window of W                the columns of tokens t - W + 1 .. t - 1, at least that of token t - 1
        by a chunk                      those of its chunk before t; where t begins one, that t was seen must be proved
    """

    span: Span
    block_size: int
    copies: bool = True

    @property
    def downward_closed(self) -> bool:
        """Where every earlier token is read."""
        return self.span.downward_closed

    def columns(self, num_tokens: int) -> int:
        """Full ones."""
        return num_tokens // self.block_size

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:
        """The largest end that is served.

        No end between a column's reach and the column's own can be, so the candidate falls from column to column.
        O(columns read).
        """
        block_size = self.block_size
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

    def source(self, index: Index, num_tokens: int) -> int:
        """The block to copy the last column from, where it is used in part and read."""
        column, rest = divmod(num_tokens, self.block_size)
        read = rest and self.span.first_needed(num_tokens, self.block_size) < num_tokens
        return index.source(column, rest) if read else 0


@dataclass(frozen=True, slots=True)
class StateHits:
    """The states of the reference layout, each in the column that it ends."""

    block_size: int
    copies: bool = False
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:
        """All null but the last."""
        return num_tokens // self.block_size

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:
        """The right-most state at or before the end. O(boundaries behind it)."""
        size, step = self.block_size, search.alignment // self.block_size
        edge = min(search.end_tokens // size, len(keys)) // step * step
        missing: list[int] = []
        while edge > 0:
            block = index.get(keys[edge - 1])
            if block is not None:
                blocks = np.zeros(edge, np.int32)
                blocks[-1] = block
                return Hit(edge * size, blocks, tuple(missing), blocks[-1:])
            missing.append((edge - 1) * size)
            edge -= step
        return Hit(0, NONE, tuple(missing))

    def source(self, index: Index, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """None: what is hit is held by the row itself."""
        return 0


@dataclass(frozen=True, slots=True)
class LabelHits:
    """Checkpoints: states in blocks of nobody's row, labelled with their token counts (docs/contracts.md, 8)."""

    copies: bool = True
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """None: what is hit is copied."""
        return 0

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:  # noqa: ARG002 - as above
        """The last label at or before the end. O(blocks behind it)."""
        additions = index.additions
        return Hit(index.label(search.end_tokens, search.alignment), NONE, additions=additions)

    def source(self, index: Index, num_tokens: int) -> int:
        """The checkpoint."""
        return index.labelled(num_tokens) or 0


@dataclass(frozen=True, slots=True)
class NoHits:
    """States that are not kept, and encoder outputs that are not shared: the others' prefixes are worth nothing."""

    copies: bool = False
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """None."""
        return 0

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:  # noqa: ARG002 - as above
        """None."""
        return Hit(0, NONE)

    def source(self, index: Index, num_tokens: int) -> int:  # noqa: ARG002 - as above
        """None."""
        return 0


@dataclass(frozen=True, slots=True)
class AnyHits:
    """Layers that keep nothing, or whose blocks are looked up apart: every hit of the others is agreed to."""

    copies: bool = False
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """None."""
        return 0

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:  # noqa: ARG002 - as above
        """Whatever the others say."""
        return Hit(search.end_tokens, NONE)

    def source(self, index: Index, num_tokens: int) -> int:  # noqa: ARG002 - as above
        """None."""
        return 0


def _joined(parts: list[Int32]) -> Int32:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NONE
