"""What one step reads and writes in one group of layers that attend: which blocks are copied out, and who sees what.

    a step's tokens     [ d0 | d1 | d2 | p p p p p ]                 d: rows that decode, p: a prefill chunk
    gathered contexts   [ shared ][ d0 .. | d1 .. | d2 .. ][ p ....... ] whole blocks, padded within a bucket

    parts               shared   by d0 d1 d2 p, once for all of them: a beginning that several rows have in common
                        past     by a chunk: what it goes on from, all of which each of its tokens sees
                        buckets  by rows that decode, each its own, one call for all of them
                        own      by a chunk, its own tokens, causal

Only blocks that somebody sees are gathered, those of a window or chunk from the first token that a query reaches:

    columns   [ dropped | first token seen .. end of context | padding ]

Rows that decode share calls: a bucket holds those with as many drafts whose block counts round up to one power of
two, so that less than half of it is padding, and there are O(drafts * log(longest)) buckets. What lies around what a
row sees is set to zero in the copy and masked: a block's former owner cannot reach anybody, not even with NaN.

Shared and past parts are for attention that can be put together from parts. An attention function of the model's own
needs each row's context in one piece (``whole``), behind a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.step import Step
from hybridkv.worker import CAUSAL, AttentionMask, BlockTable

Int64 = NDArray[np.int64]

_LEAST_SHARED: Final = 4
"""Blocks: a beginning that is shorter is cheaper gathered once a row than combined."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One attention call: ``rows`` requests of ``queries`` tokens each.

    tokens: their places in the step's flattened row, a slice or int64[rows * queries].
    start: where their contexts begin in the gathered ones; padded: tokens gathered for each row, of which
    ``length`` take part. mask: added to the scores, [rows, 1, queries, length], None where nothing is hidden.
    causal: the keys are the queries' own tokens, each of which sees those up to itself; there is no mask then.
    """

    tokens: slice | torch.Tensor
    rows: int
    queries: int
    start: int
    padded: int
    length: int
    mask: torch.Tensor | None
    causal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """``length`` gathered keys from ``start`` on, all of which every one of ``tokens`` sees; tokens as in Segment."""

    tokens: slice | torch.Tensor
    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class GatherBatch:
    """What one step reads and writes in one group; built once, used by every layer of it that reaches as far back.

    write_block, write_offset: int64[tokens], where each token's keys and values go; none for cross attention.
    read_blocks: int64[n], the blocks to gather. stale: int64[m], gathered tokens that no query of their row sees.
    """

    write_block: torch.Tensor
    write_offset: torch.Tensor
    read_blocks: torch.Tensor
    stale: torch.Tensor
    segments: tuple[Segment, ...]
    pasts: tuple[Past, ...] = ()


def gathered(pages: torch.Tensor, batch: GatherBatch) -> torch.Tensor:
    """The contexts of ``batch`` copied out of ``pages``, zeros where nobody sees them: [1, heads, tokens, width]."""
    copied = pages.index_select(0, batch.read_blocks).flatten(0, 1)
    copied.index_fill_(0, batch.stale, 0)
    return copied.transpose(0, 1).unsqueeze(0)


class _Builder:
    """Collects parts, and the blocks and stale tokens they gather.

    sees: of the layers' attention. whole: each row's context is one piece. context: int64[R], tokens that
    every token of a row sees, if those are not its own.
    """

    def __init__(
        self,
        step: Step,
        table: BlockTable,
        sees: AttentionMask,
        dtype: torch.dtype,
        *,
        whole: bool,
        context: Int64 | None = None,
    ) -> None:
        self.table, self.sees, self.dtype, self.device = table, sees, dtype, table.device
        self.size = table.block_size
        self.rows, self.decodes = step.rows.astype(np.int64), step.decodes
        self.scheduled = step.num_scheduled.astype(np.int64)
        self.computed = step.num_computed.astype(np.int64)
        self.given = context is not None
        self.context = self.computed + self.scheduled if context is None else context
        # the first query of a row sees the earliest token
        self.first_block = sees.first_seen(self.computed) // self.size
        self.first = np.cumsum(self.scheduled) - self.scheduled
        self.last_seen: Int64 | None = None
        self.start = 0
        self.read: list[torch.Tensor] = []
        self.stale: list[Int64] = []
        self.segments: list[Segment] = []
        self.pasts: list[Past] = []
        self.splits = not whole and context is None and sees == CAUSAL
        if self.splits:
            self._share()
        self.blocks = -(-self.context // self.size) - self.first_block

    def build(self, slots: torch.Tensor, last_seen: Int64 | None = None) -> GatherBatch:
        """All parts: rows that decode, by tokens and the power of two that their block counts round up to; then chunks.

        slots: int64[tokens], of tokens that are written. last_seen: int64[tokens], the last token that each sees; None:
        itself.
        """
        self.last_seen = last_seen
        rows = np.flatnonzero(self.decodes)
        # exponent of the power of two: 1 -> 0, 2 -> 1, 3, 4 -> 2
        classes = np.stack((self.scheduled[rows], np.ceil(np.log2(self.blocks[rows])).astype(np.int64)), axis=1)
        for one in np.unique(classes, axis=0):
            self._bucket(rows[(classes == one).all(axis=1)])
        for member in np.flatnonzero(~self.decodes).tolist():
            if self.splits and self._is_causal(member):
                self._chunk(member)
            else:
                self._bucket(np.array([member]))
        return GatherBatch(
            write_block=torch.div(slots, self.size, rounding_mode="floor"),
            write_offset=slots % self.size,
            read_blocks=torch.cat([one.long() for one in self.read]),
            stale=self._tensor(np.concatenate(self.stale)),
            segments=tuple(self.segments),
            pasts=tuple(self.pasts),
        )

    def _share(self) -> None:
        """Beginnings that rows have in common: gathered once, and no part of the rows' own contexts.

        Rows with the same first block are compared with the longest of them; as many of its blocks are shared, with
        all that have them, as saves most. Only blocks before a row's queries: all of these see all of them.
        """
        table, whole = self.table.get_numpy_array(), self.computed // self.size
        long = np.flatnonzero(whole >= _LEAST_SHARED)
        _, group_of, counts = np.unique(table[self.rows[long], 0], return_inverse=True, return_counts=True)
        for group in np.flatnonzero(counts > 1).tolist():
            members = long[group_of == group]
            longest = members[whole[members].argmax()]
            most = int(whole[longest])
            ids = table[self.rows[longest], :most]
            same = table[self.rows[members], :most] == ids
            common = np.minimum(np.where(same.all(axis=1), most, same.argmin(axis=1)), whole[members])
            falling = np.sort(common)[::-1]
            shared = int(falling[(falling * np.arange(len(falling))).argmax()])
            if shared < _LEAST_SHARED:
                continue
            sharing = members[common >= shared]
            if len(sharing) < 2:
                continue
            self.pasts.append(Past(self._places(sharing), self.start, shared * self.size))
            self.read.append(self._tensor(ids[:shared].astype(np.int64)))
            self.start += shared * self.size
            self.first_block[sharing] = shared

    def _bucket(self, members: Int64) -> None:
        """One call for rows that run equally many tokens; ``members`` are indices into the step's rows."""
        queries, width = int(self.scheduled[members[0]]), int(self.blocks[members].max())
        padded = width * self.size
        begin = self.first_block[members] * self.size
        hidden = self._hidden(members, begin[:, None] + np.arange(padded), queries)
        length = int((self.context[members] - begin).max())
        mask = self._mask(hidden[:, None, :, :length]) if hidden[:, :, :length].any() else None
        tokens = self._places(members)
        self.segments.append(Segment(tokens, len(members), queries, self.start, padded, length, mask))
        self._gather(members, width, np.logical_and.reduce(hidden, axis=1))

    def _chunk(self, member: int) -> None:
        """What a chunk goes on from, which all of it sees, and its own tokens."""
        members = np.array([member])
        queries, begin = int(self.scheduled[member]), int(self.first_block[member]) * self.size
        tokens, past, width = self._places(members), int(self.computed[member]) - begin, int(self.blocks[member])
        if past:
            self.pasts.append(Past(tokens, self.start, past))
        self.segments.append(Segment(tokens, 1, queries, self.start + past, queries, queries, None, causal=True))
        self._gather(members, width, begin + np.arange(width * self.size) >= self.context[member])

    def _is_causal(self, member: int) -> bool:
        """Whether no token of a chunk sees one behind it."""
        if self.last_seen is None:
            return True
        first, count = int(self.first[member]), int(self.scheduled[member])
        return bool((self.last_seen[first : first + count] == self.computed[member] + np.arange(count)).all())

    def _places(self, members: Int64) -> slice | torch.Tensor:
        """Of the tokens of ``members`` in the step."""
        counts = self.scheduled[members]
        ends = np.cumsum(counts)
        places = np.repeat(self.first[members] - (ends - counts), counts) + np.arange(ends[-1])
        contiguous = len(places) == places[-1] - places[0] + 1
        return slice(int(places[0]), int(places[-1]) + 1) if contiguous else self._tensor(places)

    def _hidden(self, members: Int64, key: Int64, queries: int) -> NDArray[np.bool_]:
        """bool[rows, queries, keys] for keys at int64[rows, keys]: which of them no query sees."""
        key = key[:, None]
        if self.given:
            unread: NDArray[np.bool_] = key >= self.context[members][:, None, None]
            return unread.repeat(queries, axis=1)
        query = (self.computed[members][:, None] + np.arange(queries))[:, :, None]
        last = query
        if self.last_seen is not None:
            last = self.last_seen[self.first[members][:, None] + np.arange(queries)][:, :, None]
        hidden: NDArray[np.bool_] = (key > last) | (key < self.sees.first_seen(query))
        return hidden

    def _gather(self, members: Int64, width: int, unseen: NDArray[np.bool_]) -> None:
        table = self.table.get_device_tensor()
        columns = np.minimum(self.first_block[members][:, None] + np.arange(width), table.shape[1] - 1)
        self.read.append(table[self._tensor(self.rows[members])[:, None], self._tensor(columns)].reshape(-1))
        self.stale.append(np.flatnonzero(unseen.reshape(-1)) + self.start)
        self.start += len(members) * width * self.size

    def _mask(self, hidden: NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(self.device), torch.finfo(self.dtype).min)

    def _tensor(self, values: Int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def gather_batch(
    step: Step,
    table: BlockTable,
    sees: AttentionMask,
    dtype: torch.dtype,
    *,
    whole: bool,
    last_seen: Int64 | None = None,
) -> GatherBatch:
    """What ``step`` reads and writes through ``table``, whose cells and slots have been committed.

    step: at least one row. sees: of the layers' attention. dtype: of its scores. whole: no shared and past parts.
    last_seen: int64[tokens] of the step, the position of the last token that each sees, inside its row's chunk; None:
    its own, as causal attention has it. O(tokens + gathered tokens).
    """
    builder = _Builder(step, table, sees, dtype, whole=whole)
    return builder.build(table.slot_mapping[: step.num_tokens], last_seen)


def cross_batch(step: Step, table: BlockTable, tokens: Int64, dtype: torch.dtype) -> GatherBatch:
    """What cross attention reads in ``step`` through ``table``: all ``tokens``, int64[R], of each row's encoder output.

    step, dtype: as in gather_batch; each row has at least one token to read. O(tokens + gathered tokens).
    """
    builder = _Builder(step, table, CAUSAL, dtype, whole=True, context=tokens)
    return builder.build(torch.empty(0, dtype=torch.int64, device=table.device))
