"""The gather backend: contexts are copied out of their pages, and each layer attends to them part by part.

A GatherBatch lists the blocks that one step copies in one group of attention layers, and the keys that each token sees:

    a step's tokens     [ d0 | d1 | d2 | p p p p p ]                 d: rows that decode, p: a prefill chunk
    gathered contexts   [ shared ][ d0 .. | d1 .. | d2 .. ][ p ....... ] whole blocks, padded within a bucket

    pasts               shared   a prefix that several rows share (d0 d1 d2 p), read once for all of them
                        past     the context before a chunk; each of its tokens sees all of it
    segments            buckets  the contexts of rows that decode, one call for all rows of a bucket
                        own      the tokens of a chunk, causal

Only visible blocks are gathered; for a window or chunk, from the first token that a query reaches:

    columns   [ dropped | first token seen .. end of context | padding ]

Rows that decode share calls: a bucket holds rows with equally many drafts whose block counts round up to one power of
two, so less than half of it is padding, and there are O(drafts * log(longest)) buckets. Tokens around a row's visible
ones are set to zero in the copy and masked: a block's former owner cannot reach any row, not even with NaN.

A layer whose form is known (hybridkv.runner.attention.formulas) runs in dense_attention: no copy of keys for heads that
share them, no mask for chunks, and parts are joined. Any other runs in the eager function of its modelling file, which
needs each row's context in one piece (``whole``) and a mask.

Relative position biases (T5): a decoder adds to the scores a bias by the distance of key and query. Its first layer
computes it for one sequence of keys and passes it to the others. A SegmentBias takes the place of that layer's
``compute_bias`` and gives a bias for each segment of the step; the values are the module's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybridkv.errors import WorkerError
from hybridkv.runner.attention.formulas import Attended, AttentionForm, PagedStep, dense_attention, eager_function
from hybridkv.runner.step_context import CONTEXT, StandIn, StepContext, on_device, places_of
from hybridkv.step import Step, ranges
from hybridkv.worker import CAUSAL, AttentionMask, BlockTable, with_sink

NAME: Final = "hybridkv_gather"
"""The attention function's name in transformers' AttentionInterface."""
_LEAST_SHARED: Final = 4
"""Blocks of a shared prefix. A shorter one is cheaper to gather for each row than to combine; chosen by hand."""

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One attention call: ``rows`` requests of ``queries`` tokens each.

    Attributes:
        tokens: indices of the queries in the flattened step, a slice or int64[rows * queries].
        rows: number of rows.
        queries: tokens of each row.
        start: index of the first context in the gathered tokens.
        padded: tokens gathered for each row.
        length: how many of them take part.
        mask: added to the scores, [rows, 1, queries, length]; None if every query sees all keys, and if ``causal``.
        causal: whether the keys are the queries' own tokens, of which each sees the tokens up to itself.
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
    """Gathered keys that all ``tokens`` see.

    Attributes:
        tokens: as in Segment.
        start: index of the first key in the gathered tokens.
        length: number of keys.
    """

    tokens: slice | torch.Tensor
    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class GatherBatch:
    """The reads and writes of one step in one group, for all of its layers with the same mask.

    Attributes:
        write_block, write_offset: the place of each token's keys and values, int64[tokens]; empty for cross attention.
        read_blocks: the blocks to gather, int64[n].
        stale: gathered tokens that no query of their row sees, int64[m].
        segments: the attention calls.
        pasts: further keys; their results are combined with the results of the segments.
    """

    write_block: torch.Tensor
    write_offset: torch.Tensor
    read_blocks: torch.Tensor
    stale: torch.Tensor
    segments: tuple[Segment, ...]
    pasts: tuple[Past, ...] = ()


def gathered(pages: torch.Tensor, batch: GatherBatch) -> torch.Tensor:
    """Return a copy of the contexts of ``batch`` in ``pages``, [1, heads, tokens, width].

    Tokens that no query sees are zeros.
    """
    return in_order(pages.index_select(0, batch.read_blocks), batch)


def in_order(blocks: torch.Tensor, batch: GatherBatch) -> torch.Tensor:
    """Return copies of the read blocks of ``batch``, [n, block_size, heads, width], as ``gathered`` does."""
    copied = blocks.flatten(0, 1)
    copied.index_fill_(0, batch.stale, 0)
    return copied.transpose(0, 1).unsqueeze(0)


class _Reach(NamedTuple):
    """The tokens that a step's tokens see.

    Attributes:
        sees: the mask of the layers' attention.
        context: tokens of each row's context, int64[R]; None for all tokens of its request.
        last_seen: the last token that each token sees, int64[tokens]; None for the token itself.
    """

    sees: AttentionMask
    context: Int64 | None = None
    last_seen: Int64 | None = None


class _Builder:
    """Collects segments and pasts, and the blocks and stale tokens that they gather.

    ``dtype`` is that of the scores. With ``whole``, each row's context is one piece.
    """

    def __init__(self, step: Step, table: BlockTable, reach: _Reach, dtype: torch.dtype, *, whole: bool) -> None:
        sees, context, last_seen = reach
        self.table, self.sees, self.dtype, self.device = table, sees, dtype, table.device
        self.size = table.block_size
        self.rows, self.decodes = step.rows.astype(np.int64), step.decodes
        self.scheduled = step.num_scheduled.astype(np.int64)
        self.computed = step.num_computed.astype(np.int64)
        self.context = self.computed + self.scheduled if context is None else context
        # the first query of a row sees the earliest token
        self.first_block = sees.first_seen(self.computed) // self.size
        self.first = np.cumsum(self.scheduled) - self.scheduled
        self.last_seen, self.start = last_seen, 0
        self.read: list[torch.Tensor] = []
        self.stale: list[Int64] = []
        self.segments: list[Segment] = []
        self.pasts: list[Past] = []
        self.splits = not whole and sees == CAUSAL
        if self.splits:
            self._share()
        self.blocks = -(-self.context // self.size) - self.first_block

    def build(self, slots: torch.Tensor) -> GatherBatch:
        """Make the segments of rows that decode, then of chunks. slots: int64[tokens], where tokens are written.

        Rows that decode with equally many tokens, and with block counts that round up to one power of two, share one
        segment.
        """
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
            stale=on_device(np.concatenate(self.stale), self.device),
            segments=tuple(self.segments),
            pasts=tuple(self.pasts),
        )

    def _share(self) -> None:
        """Gather prefixes that rows share once, and take them out of the rows' own contexts.

        Rows with the same first block are compared with the longest of them. The shared length is the one that saves
        the most reads over all rows with these blocks. Only blocks before a row's queries count, because all its
        queries see all of their tokens.
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
            sharing = members[common >= shared]
            if shared < _LEAST_SHARED or len(sharing) < 2:
                continue
            self.pasts.append(Past(self._places(sharing), self.start, shared * self.size))
            self.read.append(on_device(ids[:shared].astype(np.int64), self.device))
            self.start += shared * self.size
            self.first_block[sharing] = shared

    def _bucket(self, members: Int64) -> None:
        """Add one call for rows that run equally many tokens; ``members`` are indices into the step's rows."""
        queries, width = int(self.scheduled[members[0]]), int(self.blocks[members].max())
        padded = width * self.size
        begin = self.first_block[members] * self.size
        hidden = self._hidden(members, begin[:, None] + np.arange(padded), queries)
        length = int((self.context[members] - begin).max())
        mask = None
        if hidden[:, :, :length].any():
            shown = torch.zeros((len(members), 1, queries, length), dtype=self.dtype, device=self.device)
            unseen = torch.from_numpy(hidden[:, None, :, :length]).to(self.device)
            mask = shown.masked_fill_(unseen, torch.finfo(self.dtype).min)
        tokens = self._places(members)
        self.segments.append(Segment(tokens, len(members), queries, self.start, padded, length, mask))
        self._gather(members, width, np.logical_and.reduce(hidden, axis=1))

    def _chunk(self, member: int) -> None:
        """Add a chunk: the context that all its tokens see, and its own tokens."""
        members = np.array([member])
        queries, begin = int(self.scheduled[member]), int(self.first_block[member]) * self.size
        tokens, past, width = self._places(members), int(self.computed[member]) - begin, int(self.blocks[member])
        if past:
            self.pasts.append(Past(tokens, self.start, past))
        self.segments.append(Segment(tokens, 1, queries, self.start + past, queries, queries, None, causal=True))
        self._gather(members, width, begin + np.arange(width * self.size) >= self.context[member])

    def _is_causal(self, member: int) -> bool:
        """Return whether no token of a chunk sees a later one."""
        if self.last_seen is None:
            return True
        first, count = int(self.first[member]), int(self.scheduled[member])
        return bool((self.last_seen[first : first + count] == self.computed[member] + np.arange(count)).all())

    def _places(self, members: Int64) -> slice | torch.Tensor:
        """Return the indices of the tokens of ``members`` in the step."""
        return places_of(ranges(self.first[members], self.scheduled[members]), self.device)

    def _hidden(self, members: Int64, key: Int64, queries: int) -> NDArray[np.bool_]:
        """Return which keys at int64[rows, keys] each query does not see: bool[rows, queries, keys]."""
        key = key[:, None]
        query = (self.computed[members][:, None] + np.arange(queries))[:, :, None]
        last = query
        if self.last_seen is not None:
            last = self.last_seen[self.first[members][:, None] + np.arange(queries)][:, :, None]
        hidden: NDArray[np.bool_] = (key > last) | (key < self.sees.first_seen(query))
        return hidden

    def _gather(self, members: Int64, width: int, unseen: NDArray[np.bool_]) -> None:
        table = self.table.get_device_tensor()
        columns = np.minimum(self.first_block[members][:, None] + np.arange(width), table.shape[1] - 1)
        rows = on_device(self.rows[members], self.device)[:, None]
        self.read.append(table[rows, on_device(columns, self.device)].reshape(-1))
        self.stale.append(np.flatnonzero(unseen.reshape(-1)) + self.start)
        self.start += len(members) * width * self.size


def gather_batch(
    step: Step,
    table: BlockTable,
    sees: AttentionMask,
    dtype: torch.dtype,
    *,
    whole: bool,
    last_seen: Int64 | None = None,
) -> GatherBatch:
    """Plan the reads and writes of ``step`` through ``table``, which has committed its cells and slots.

    O(tokens + gathered tokens).

    Args:
        step: a Step with at least one row.
        table: the block table of the layers' group.
        sees: the mask of the layers' attention.
        dtype: dtype of the scores.
        whole: whether each row's context must be one piece, without shared and past parts.
        last_seen: position of the last token that each token sees, inside its row's chunk, int64[tokens]; None for
            the token itself, as in causal attention.
    """
    builder = _Builder(step, table, _Reach(sees, last_seen=last_seen), dtype, whole=whole)
    return builder.build(table.slot_mapping[: step.num_tokens])


def cross_batch(step: Step, table: BlockTable, tokens: Int64, dtype: torch.dtype) -> GatherBatch:
    """Plan the cross attention of ``step`` through ``table``, as ``gather_batch`` does.

    tokens: tokens of each row's encoder output, at least one, int64[R]. O(tokens + gathered tokens).
    """
    last_seen = np.repeat(tokens - 1, step.num_scheduled)
    builder = _Builder(step, table, _Reach(CAUSAL, tokens, last_seen), dtype, whole=True)
    return builder.build(torch.empty(0, dtype=torch.int64, device=table.device))


# -- attention over gathered contexts


PagesRead = tuple[GatherBatch, tuple[torch.Tensor, ...]]
"""The reads of one entry of a layer in a step, and its pages, [blocks, block_size, heads, width] each.

The entry keeps the keys and values of cross attention, or the keys of an indexer.
"""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,  # noqa: ANN401  # further arguments of the model go on to its eager function
) -> tuple[torch.Tensor, None]:
    """Attend with one layer over a flattened step, by the signature of transformers' attention functions.

    The GatherBatch is that of the layer that was updated last, or that asked for its encoder's keys: shared modules do
    not know their layer.

    Args:
        module: the attention module.
        query: [1, heads, tokens, width].
        key: [1, kv heads, gathered tokens, width], as StepCache.update returned it or as the model expanded it. It is
            empty for cross attention, whose pages are gathered here.
        value: like ``key``.
        attention_mask: ignored.
        kwargs: arguments of the module's eager function. ``position_bias`` of T5 has one bias for each segment
            (SegmentBias), and zeros for cross attention.

    Returns:
        [1, tokens, heads, value width], and None.

    Raises:
        WorkerError: the module runs outside of a runner.
    """
    del attention_mask  # transformers makes no mask for an attention function of an unknown name
    context: StepContext | None = getattr(module, CONTEXT, None)
    if context is None:
        raise WorkerError(
            f"{type(module).__name__} runs outside of a ModelRunner: restore its own attention with "
            "set_attn_implementation"
        )
    states = Attended(query, key, value)
    if context.noting is not None:
        return context.noting(module, states, kwargs), None
    read = context.take_cross()
    if read is not None:
        kwargs.pop("position_bias", None)
        crossed, pages = read
        return _eager(module, Attended(query, *(gathered(one, crossed) for one in pages)), crossed, kwargs), None
    batch, form = context.attention_batch(), context.forms.get(module)
    if isinstance(batch, PagedStep):
        return batch.read(context.updated_layer, query, context.forms[module]), None
    return _eager(module, states, batch, kwargs) if form is None else _by_parts(states, batch, form), None


def _eager(module: torch.nn.Module, states: Attended, batch: GatherBatch, kwargs: dict[str, Any]) -> torch.Tensor:
    """Attend with the module's own function, segment by segment: [1, tokens, heads, width]."""
    eager = eager_function(module)
    biases = kwargs.pop("position_bias", None)
    parts: list[torch.Tensor] = []
    for place, segment in enumerate(batch.segments):
        if biases is not None:
            kwargs["position_bias"] = biases[place]
        output, _ = eager(module, *_of_segment(states, segment), segment.mask, **kwargs)
        parts.append(output.reshape(segment.rows * segment.queries, *output.shape[2:]))
    return _in_order(parts, batch.segments)[None]


def _by_parts(states: Attended, batch: GatherBatch, form: AttentionForm) -> torch.Tensor:
    """Attend with dense_attention: [1, tokens, heads, width]."""
    outs, sums = list[torch.Tensor](), list[torch.Tensor]()
    for segment in batch.segments:
        mine = _of_segment(states, segment)
        out, lse = dense_attention(mine, form.scale, mask=segment.mask, causal=segment.causal, softcap=form.softcap)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        sums.append(lse.transpose(1, 2).flatten(0, 1))
    out, lse = _in_order(outs, batch.segments), _in_order(sums, batch.segments)
    for past in batch.pasts:
        mine = _of_past(states, past)
        seen, more = (one[0].transpose(0, 1) for one in dense_attention(mine, form.scale, softcap=form.softcap))
        before = lse[past.tokens]
        total = torch.logaddexp(before, more)
        weighted = out[past.tokens] * torch.exp(before - total)[..., None] + seen * torch.exp(more - total)[..., None]
        out[past.tokens], lse[past.tokens] = weighted.to(out.dtype), total
    if form.sinks is not None:
        out = with_sink(out, lse, form.sinks)[0]
    return out.to(states.query.dtype)[None]


def _of_segment(states: Attended, segment: Segment) -> Attended:
    """Return the segment's queries, and its rows' own contexts."""
    mine = states.query[0, :, segment.tokens]
    query = mine.reshape(mine.shape[0], segment.rows, segment.queries, mine.shape[2]).transpose(0, 1)
    return Attended(query, _contexts(states.key, segment), _contexts(states.value, segment))


def _of_past(states: Attended, past: Past) -> Attended:
    """Return all queries of a past in one row, and the keys that they see."""
    keys = slice(past.start, past.start + past.length)
    return Attended(states.query[:, :, past.tokens], states.key[:, :, keys], states.value[:, :, keys])


def _contexts(states: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Return [1, heads, gathered tokens, width] as [rows, heads, length, width], a view."""
    mine = states[0, :, segment.start : segment.start + segment.rows * segment.padded]
    heads, width = mine.shape[0], mine.shape[2]
    return mine.view(heads, segment.rows, segment.padded, width).transpose(0, 1)[:, :, : segment.length]


def _in_order(parts: Sequence[torch.Tensor], segments: Sequence[Segment]) -> torch.Tensor:
    """Return the outputs of all segments in the order of the step's tokens, [tokens, heads, width]."""
    if len(parts) == 1:
        return parts[0]
    out = parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))
    for part, segment in zip(parts, segments, strict=True):
        out[segment.tokens] = part
    return out


class SegmentBias(StandIn):
    """Replaces ``compute_bias`` of ``module``. ``context`` has the segments and positions of the running Step."""

    def __init__(self, module: torch.nn.Module, context: StepContext) -> None:
        super().__init__(module, "compute_bias")
        self._context = context

    def __call__(self, query_length: int, key_length: int, **known: Any) -> torch.Tensor | list[torch.Tensor]:  # noqa: ANN401  # as the module's own method takes them
        """Return a bias [rows, heads, queries, length] for each segment, or the module's own while no Step runs.

        O(heads * queries * length) per segment.
        """
        positions = self._context.positions
        if positions is None:
            return self._own(query_length, key_length, **known)
        batch = self._context.attention_batch()
        if not isinstance(batch, GatherBatch):
            raise WorkerError("kernels that read pages have no position biases: run this layer with attention=gather")
        return [self._of(segment, positions) for segment in batch.segments]

    def _of(self, segment: Segment, positions: torch.Tensor) -> torch.Tensor:
        queries, length = positions[segment.tokens].view(segment.rows, segment.queries), segment.length
        if segment.rows == 1:
            return self._own(segment.queries, length, past_seen_tokens=int(queries[0, 0]))
        # the biases of the last of ``length`` tokens, shifted to the place of each query
        last = self._own(1, length, past_seen_tokens=length - 1)[0, :, 0]
        keys = torch.arange(length, device=last.device) + (length - 1 - queries)[..., None]
        return last[:, keys.clamp(max=length - 1)].transpose(0, 1)  # keys after a query are masked

    def _own(self, query_length: int, key_length: int, **known: Any) -> torch.Tensor:  # noqa: ANN401  # as above
        own: Any = type(self._module)
        bias: torch.Tensor = own.compute_bias(self._module, query_length, key_length, **known)
        return bias


def segment_biases(decoder: torch.nn.Module, context: StepContext) -> list[SegmentBias]:
    """Make a SegmentBias for every module of ``decoder`` with position biases; most models have no biases."""
    biased = (one for one in decoder.modules() if getattr(one, "has_relative_attention_bias", False))
    return [SegmentBias(module, context) for module in biased]


def register() -> None:
    """Register the backend with transformers under NAME."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, attend)
