"""Attention layers: a column holds the keys and values of its tokens, which are written once and shared freely.

A span says which earlier tokens a layer reads: all, a window, or a chunk. This decides where hits may end:

    BlockHits     at the boundaries of blocks                       [ block | block ]
    TokenHits     at any token: a partly used block is copied       [ block | blo:ck ]

A publishing rule says which full blocks get a key: only those that a later look-up can reach. A hit ends at a multiple
of the common alignment A. In a window, a look-up reads only the ``need`` columns before such a boundary. With EAGLE it
reads one column more, because it looks one block past the boundary:

    A = 4 columns, need 2    . . x x | . . x x | . . x x |        EAGLE, need 3    . . x x | x . x x | x ...

With retention only some boundaries are kept: every ``interval`` tokens, and those at which the request itself is likely
to be resumed. vLLM 0.32 publishes the same columns; tests/unit/cache/test_publishing.py has its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridkv.cache.index import PrefixIndex
from hybridkv.cache.policies.policy import (
    NEVER,
    NEW,
    NO_COLUMNS,
    NONE,
    Bool,
    Demand,
    GroupHit,
    GroupPlan,
    Int32,
    Int64,
    RowFacts,
    Search,
    T,
)
from hybridkv.request import Request


@dataclass(frozen=True, slots=True)
class PublishRule:
    """Publishing rule of one group.

    Attributes:
        block_size: Tokens of a column.
        alignment: Common alignment of all groups, in tokens.
        need: Columns before a boundary that a hit reads; ``None`` for all.
        past: Columns after a boundary that are looked at too.
        interval: Tokens between kept boundaries; ``None`` keeps every boundary, 0 only those of the request.
        keeps_all: Whether every full column is published.
    """

    block_size: int
    alignment: int
    need: int | None = None
    past: int = 0
    interval: int | None = None
    keeps_all: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        all_is_read = self.need is None or (self.interval is None and self.need * self.block_size >= self.alignment)
        object.__setattr__(self, "keeps_all", all_is_read)

    def decided(self, known_tokens: T) -> T:
        """Return how many leading columns ``known_tokens`` decide: up to the last boundary, and ``past``.

        Takes a number or an int64 array.
        """
        boundary = known_tokens // self.alignment * self.alignment
        if self.past:
            after, most = known_tokens - boundary, self.past * self.block_size
            boundary += (after - (after - most) * (after > most)) * (boundary > 0)
        return boundary // self.block_size

    def next_tokens(self, decided: T) -> T:
        """Return the token count at which more than ``decided`` columns are decided.

        Takes a number or an int64 array.
        """
        end = (decided + 1) * self.block_size
        at_boundary = -(-end // self.alignment) * self.alignment
        if not self.past:
            return at_boundary
        before = end - self.past * self.block_size
        is_past = (before > 0) & (before % self.alignment == 0)
        soonest: T = at_boundary - (at_boundary - end) * is_past
        return soonest

    @property
    def keeps_every_boundary(self) -> bool:
        """Whether every column that ends at a multiple of the alignment is published."""
        return self.interval is None and self.block_size % self.alignment == 0

    def columns(self, first: int, last: int, boundaries: tuple[int, ...] = ()) -> Int64:
        """Return the columns of first ..

        last-1 to publish. The request is likely to be resumed at ``boundaries`` (tokens).
        """
        every: Int64 = np.arange(first, last)
        if self.keeps_all:
            return every
        kept: Int64 = every[self.mask(every, boundaries)]
        return kept

    def keeps(self, column: int, boundaries: tuple[int, ...] = ()) -> bool:
        """Return the mask of one column, without arrays of one element."""
        if self.need is None:
            return True
        segment = self.alignment if self.interval is None else self.interval
        per = segment // self.block_size if segment else NEVER
        at = column - self.past
        if self.need >= per or (at >= 0 and at % per >= per - self.need):
            return True
        if self.interval is None:
            return False
        ends = (boundary // self.alignment * self.alignment // self.block_size + self.past for boundary in boundaries)
        return any(end - self.need <= column < end for end in ends)

    def mask(self, columns: Int64, boundaries: tuple[int, ...] = ()) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return which of ``columns`` are published, bool[len(columns)]."""
        if self.need is None:
            return np.ones(len(columns), np.bool_)
        segment = self.alignment if self.interval is None else self.interval
        per = segment // self.block_size if segment else NEVER
        at = columns - self.past
        keep = np.full(len(columns), self.need >= per) | ((at >= 0) & (at % per >= per - self.need))
        if self.interval is not None:
            for boundary in boundaries:
                end = boundary // self.alignment * self.alignment // self.block_size + self.past
                keep |= (columns >= end - self.need) & (columns < end)
        return keep


@dataclass(frozen=True, slots=True)
class AttentionPolicy:
    """Column i holds tokens i * block_size .. (i + 1) * block_size - 1. Columns before the span are null.

    Attributes:
        block_size: Tokens of a column.
        span: Which tokens are read.
        publishing: Which columns are published.
        hits: Where hits may end.
    """

    block_size: int
    span: Span
    publishing: PublishRule
    hits: BlockHits | TokenHits | ReplayedHits

    @classmethod
    def replayed(cls, block_size: int, span: WindowSpan, whole: int) -> AttentionPolicy:
        """Return the policy of a window that is never published, because it is computed again after a hit."""
        return cls(block_size, span, PublishRule(block_size, NEVER, 0, 0, 0), ReplayedHits(block_size, span, whole))

    def columns(self, num_tokens: T) -> T:
        """Return the columns of a row of ``num_tokens`` tokens, null ones included."""
        return -(-num_tokens // self.block_size)

    def next_need(self, held: T, dropped: T) -> T:
        """Return the token count at which a row needs another block, or may drop one."""
        need = held * self.block_size + 1
        if self.span.downward_closed:  # all is read
            return need
        drop = self.span.drop_tokens(dropped + 1, self.block_size) + 1
        return need + (drop - need) * (drop < need)

    def droppable(self, processed_tokens: T) -> T:
        """Return how many leading columns are no longer read."""
        if self.span.downward_closed:
            return processed_tokens * 0
        return self.span.first_live_token(processed_tokens) // self.block_size

    def is_plain(self, columns: T, published: T, tokens: tuple[T, T, T]) -> Bool | bool:  # noqa: ARG002 - same
        """Return whether a row needs only ``columns`` new blocks at its end and a key for every decided column."""
        return published >= 0 if self.publishing.keeps_all else self.publishing.decided(tokens[2]) <= published

    @property
    def only_grows(self) -> bool:
        """Whether no full column is skipped."""
        return self.publishing.keeps_all

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:
        """Plan the blocks that ``demand`` misses; see GroupPlan."""
        columns = self.columns(demand.total)
        if row.held:
            drop = min(max(row.dropped, self.droppable(demand.processed)), row.held)
            reuse, append, take = NONE, None, max(columns - row.held, 0)
        else:
            drop = 0
            reuse, append, take = self._begin(NONE if hit is None else hit, columns, demand)
        first = max(row.published, len(reuse))
        decided = max(first, self.publishing.decided(demand.known))
        publish = (
            self.publishing.columns(max(first, drop), decided, demand.boundaries) if decided > first else NO_COLUMNS
        )
        return GroupPlan(drop, reuse, take, append, (), publish, decided)

    def _begin(self, hit: Int32, columns: int, demand: Demand) -> tuple[Int32, Int32 | None, int]:
        """Return the columns of a new row: hits, null columns (no longer read, of an external load), new ones."""
        live, take = self.droppable(demand.computed), max(columns - len(hit), 0)
        if live and hit[:live].any():
            hit = hit.copy()
            hit[:live] = 0
        skip = min(live - len(hit), take)
        if skip <= 0:
            return hit, None, take
        append = np.full(take, NEW, np.int32)
        append[:skip] = 0
        return hit, append, take - skip

    def stored_columns(self, row: RowFacts, computed_tokens: int, boundaries: tuple[int, ...]) -> tuple[Int64, int]:
        """Return the columns to publish once ``computed_tokens`` are computed, and how many are then decided."""
        decided = max(row.published, self.publishing.decided(computed_tokens))
        return self.publishing.columns(row.published, decided, boundaries), decided

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """Return the blocks of ``num_tokens`` tokens, all taken in one step."""
        return self.columns(num_tokens)


@dataclass(frozen=True, slots=True)
class FullSpan:
    """Every earlier token."""

    downward_closed: bool = True

    def first_needed(self, tokens: int, block_size: int) -> int:  # noqa: ARG002 - the answer of a span
        """Return the first token that must be cached for a hit of ``tokens``."""
        return tokens * 0

    def first_live_token(self, processed_tokens: T) -> T:
        """Return the first token that the next one reads: always 0."""
        return processed_tokens * 0

    def drop_tokens(self, columns: T, block_size: int) -> T:  # noqa: ARG002 - the answer of a span
        """Return the processed tokens at which the first ``columns`` columns are no longer read: NEVER."""
        return columns * 0 + NEVER

    def longest_hit(self, index: PrefixIndex, keys: Sequence[bytes], search: Search, block_size: int) -> GroupHit:
        """Search from left to right until the first miss. O(columns of the hit)."""
        stop = min(search.end_tokens // block_size + search.past, search.limit_tokens // block_size, len(keys))
        blocks = index.leading_run(keys, stop)
        missing = (len(blocks) * block_size,) if len(blocks) < stop else ()
        tokens = min(max(len(blocks) - search.past, 0) * block_size, search.end_tokens)
        tokens = tokens // search.alignment * search.alignment
        return GroupHit(tokens, blocks[: tokens // block_size], missing, blocks)


@dataclass(frozen=True, slots=True)
class WindowSpan:
    """The ``window - 1`` tokens before a token. A row keeps ``retained`` tokens before them; no hit needs those.

        tokens   [ dropped | retained | read | next ]
                             kept = retained + window - 1

    Attributes:
        window: Tokens that a token reads, itself included.
        retained: Tokens before the window that a row keeps (``extra_retained_tokens`` of the spec).
        kept: Tokens before the next one that a row keeps.
        downward_closed: Whether every prefix of a hit is a hit.
    """

    window: int
    retained: int = 0
    downward_closed: bool = False
    kept: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", self.window - 1 + self.retained)

    def first_needed(self, tokens: int, block_size: int) -> int:  # noqa: ARG002 - the answer of a span
        """Return the first token that must be cached for a hit of ``tokens``: at least the last one, as a proof."""
        return max(0, tokens - max(self.window - 1, 1))

    def first_read(self, tokens: int) -> int:
        """Return the first token that token ``tokens`` reads."""
        return max(0, tokens - self.window + 1)

    def first_live_token(self, processed_tokens: T) -> T:
        """Return the first token that a row keeps: ``max(0, n - kept)``."""
        live = processed_tokens - self.kept
        return live * (live > 0)

    def drop_tokens(self, columns: T, block_size: int) -> T:
        """Return the processed tokens at which the first ``columns`` columns are no longer kept."""
        return columns * block_size + self.kept

    def columns_read(self, block_size: int) -> int:
        """Return the columns before a block boundary that the next token reads: ``ceil((W - 1) / block_size)``.

        At least 1: a window of 1 reads no earlier token, but one column must prove that the prefix was seen.
        """
        return max(-(-(self.window - 1) // block_size), 1)

    def longest_hit(self, index: PrefixIndex, keys: Sequence[bytes], search: Search, block_size: int) -> GroupHit:
        """Search for the last aligned boundary whose window is cached, or for the leading columns if they are fewer.

        A miss rules out every boundary that would read it. So an unknown prompt costs one look-up for each window, and
        no column is looked up more than twice.
        """
        need, past, step = self.columns_read(block_size), search.past, search.alignment // block_size
        last = min(search.limit_tokens // block_size, len(keys)) - past
        boundary = min(search.end_tokens // block_size, last) // step * step
        missing: list[int] = []
        while boundary > 0:
            first = max(boundary - need, 0)
            run = index.leading_run(keys[first : boundary + past])
            if len(run) == boundary + past - first:
                blocks = np.concatenate((np.zeros(first, np.int32), run[: boundary - first]))
                return GroupHit(boundary * block_size, blocks, tuple(missing), run)
            missing.append((first + len(run)) * block_size)
            boundary = (first + len(run) - past) // step * step
        return GroupHit(0, NONE, tuple(missing))


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """The tokens of a token's own chunk of ``chunk`` tokens, up to itself."""

    chunk: int
    downward_closed: bool = False

    def first_needed(self, tokens: int, block_size: int) -> int:
        """Return the first token that must be cached for a hit of ``tokens``.

        Where chunk and block begin, this is ``tokens`` itself.

        If a chunk begins inside a block, the token before it is needed. The block must be copied, not begun, because it
        will be published with all its tokens.
        """
        start = tokens // self.chunk * self.chunk
        return start if start < tokens or tokens % block_size == 0 else tokens - 1

    def first_live_token(self, processed_tokens: T) -> T:
        """Return the first token of the chunk of the next token: ``floor(n / C) * C``."""
        return processed_tokens // self.chunk * self.chunk

    def drop_tokens(self, columns: T, block_size: int) -> T:
        """Return the processed tokens at which the first ``columns`` columns are no longer read."""
        return -(-columns * block_size // self.chunk) * self.chunk

    def longest_hit(self, index: PrefixIndex, keys: Sequence[bytes], search: Search, block_size: int) -> GroupHit:
        """Search in the last chunk from left to right, then at its start, then in the chunk before, and so on.

        At the start of a chunk no token is read. Such a hit counts only if another group, or the column before it,
        proves that the prefix was seen. O(columns) at worst.
        """
        last = min(search.limit_tokens // block_size, len(keys))
        end, missing = search.end_tokens, list[int]()
        while end > 0:
            start = end // self.chunk * self.chunk
            first, stop = start // block_size, min(end // block_size + search.past, last)
            run = index.leading_run(keys[first:stop]) if stop > first else NONE
            if len(run) < stop - first:
                missing.append((first + len(run)) * block_size)
            tokens = max(first + len(run) - search.past, 0) * block_size // search.alignment * search.alignment
            proof = run if len(run) else _proof(index, keys, start, search, block_size)
            if tokens >= start and proof is not None:
                blocks = np.concatenate((np.zeros(first, np.int32), run[: tokens // block_size - first]))
                return GroupHit(tokens, blocks, tuple(missing), np.concatenate((proof, run)))
            if start and start % block_size == 0:
                missing.append(start - block_size)
            end = start - 1
        return GroupHit(0, NONE, tuple(missing))


def _proof(index: PrefixIndex, keys: Sequence[bytes], start: int, search: Search, block_size: int) -> Int32 | None:
    """Return the block that proves that a prompt was seen up to ``start``, where a chunk begins, int32[1].

    int32[0] if another group has proved it; ``None`` without a proof.
    """
    if start and start <= search.proven_tokens:
        return NONE
    column = start // block_size - 1
    block = index.get(keys[column]) if start % block_size == 0 and 0 <= column < len(keys) else None
    return None if block is None else np.array([block], np.int32)


Span = FullSpan | WindowSpan | ChunkSpan


@dataclass(frozen=True, slots=True)
class ReplayedHits:
    """Accepts the hits of other groups for a window that is not kept: the row takes new blocks for the window.

        tokens   [ null | computed again, into new blocks | new ... ]
                        ^ first_replayed                  ^ hit

    A branch shares the blocks of its parent as in the other groups.

    Attributes:
        block_size: Tokens of a column.
        span: The window.
        whole: Tokens of which the end of a state is a multiple.
    """

    block_size: int
    span: WindowSpan
    whole: int = 1
    copies: bool = False
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:
        """Return the full columns, which a branch adopts. A hit adopts none."""
        return num_tokens // self.block_size

    def first_needed(self, num_tokens: int) -> int:
        """Return ``num_tokens``: no earlier token is needed."""
        return num_tokens

    def first_replayed(self, num_tokens: int) -> int:
        """Return the first token of the states that the token after ``num_tokens`` reads."""
        return self.span.first_read(num_tokens) // self.whole * self.whole

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:  # noqa: ARG002 - the answer of hits
        """Return a hit of the whole candidate, without blocks."""
        return GroupHit(search.end_tokens, NONE)

    def source(self, index: PrefixIndex, request: Request, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """Return 0: nothing is copied."""
        return 0


@dataclass(frozen=True, slots=True)
class BlockHits:
    """Finds the blocks that layers with this span need, up to a block boundary."""

    span: Span
    block_size: int
    copies: bool = False
    downward_closed: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "downward_closed", self.span.downward_closed)

    def columns(self, num_tokens: int) -> int:
        """Return the full columns."""
        return num_tokens // self.block_size

    def first_needed(self, num_tokens: int) -> int:
        """Return the answer of the span."""
        return self.span.first_needed(num_tokens, self.block_size)

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:  # noqa: ARG002 - as above
        """Return the longest hit of the span."""
        return self.span.longest_hit(index, keys, search, self.block_size)

    def source(self, index: PrefixIndex, request: Request, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """Return 0: blocks are shared whole."""
        return 0


@dataclass(frozen=True, slots=True)
class TokenHits:
    """Hits that end at any token, in the natural layout: a partly used block is copied.

    A column can give as many of its tokens as some cached block begins with: its *reach*. This is the whole column if
    the request's key of it is known. Else it is the longest partial key (``hybridkv.cache.index``) that the request's
    tokens match. A hit of t tokens needs:

        full attention       every column before t reaches as far as t asks
        a window of W        the columns of tokens t - W + 1 .. t - 1 do, at least that of token t - 1
        a chunk              the columns of its chunk before t do; if t begins a chunk, a proof that t was seen
    """

    span: Span
    block_size: int
    copies: bool = True
    downward_closed: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "downward_closed", self.span.downward_closed)

    def columns(self, num_tokens: int) -> int:
        """Return the full columns."""
        return num_tokens // self.block_size

    def first_needed(self, num_tokens: int) -> int:
        """Return the answer of the span; 0 if every earlier token is read."""
        return 0 if self.downward_closed else self.span.first_needed(num_tokens, self.block_size)

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:
        """Search for the largest end that is cached. O(columns read).

        No hit ends between the reach of a column and the end of that column, so the candidate falls from column to
        column.
        """
        block_size = self.block_size
        end, missing, seen = search.end_tokens, list[int](), list[Int32]()
        first, run = -1, NONE
        while end > 0:
            start = self.first_needed(end)
            if start == end:  # a chunk and a block begin: no token is read, but the prefix must have been seen
                if end <= search.proven_tokens:
                    return GroupHit(end, np.zeros(end // block_size, np.int32), tuple(missing), _joined(seen))
                start = end - 1
                proof = True
            else:
                proof = False
            column, last = start // block_size, end // block_size
            if column != first or len(run) < last - column:
                first, run = column, index.leading_run(keys[column:] if column else keys, last - column)
                seen.append(run)
            at = min(column + len(run), last)  # first column that is not known whole, or that of the end
            wanted = end - at * block_size
            reached, begun = index.reach(request, at) if wanted > 0 else (0, 0)
            if begun:
                seen.append(np.array([begun], np.int32))
            if at == last and reached >= wanted:
                read = np.zeros(last - column, np.int32) if proof else run[: last - column]
                blocks = np.concatenate((np.zeros(column, np.int32), read))
                return GroupHit(end, blocks, tuple(missing), _joined(seen))
            end = at * block_size + reached
            missing.append(end)
            end -= end % search.alignment
        return GroupHit(0, NONE, tuple(missing), _joined(seen))

    def source(self, index: PrefixIndex, request: Request, num_tokens: int) -> int:
        """Return the block from which the last column is copied, if it is partly used and read; else 0."""
        column, rest = divmod(num_tokens, self.block_size)
        read = rest and self.first_needed(num_tokens) < num_tokens
        return index.source(request, column, rest) if read else 0


def _joined(parts: list[Int32]) -> Int32:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NONE
