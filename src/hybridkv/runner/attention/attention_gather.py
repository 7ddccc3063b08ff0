"""The gather backend: contexts are copied out of their pages and the model's own eager attention runs on them.

    a step's tokens     [ d0 | d1 | d2 | p p p p p ]                 d: rows that decode, p: a prefill chunk
    gathered contexts   [ d0 .... | d1 .... | d2 .... ][ p ....... ] whole blocks, padded within a bucket
    attention calls     one over the bucket [3, heads, 1, ..], one over the chunk [1, heads, 5, ..]

Only blocks that somebody sees are gathered, those of a window or chunk from the first token that a query reaches:

    columns   [ dropped | first token seen .. end of context | padding ]

Rows that decode share calls: a bucket holds those with as many drafts whose block counts round up to one power of
two, so that less than half of it is padding, and there are O(drafts * log(longest)) buckets. What lies around what a
row sees is set to zero in the copy and masked: a block's former owner cannot reach anybody, not even with NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybridkv.errors import UnsupportedModelError, WorkerError
from hybridkv.runner.attention.attention_window import AttentionWindow
from hybridkv.runner.step_context import CONTEXT, StepContext
from hybridkv.step import Step
from hybridkv.worker import BlockTable

NAME: Final = "hybridkv_gather"
"""The attention function's name in transformers' AttentionInterface."""

_EAGER: Final = "eager_attention_forward"

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One attention call: ``rows`` requests of ``queries`` tokens each.

    tokens: their places in the step's flattened row, a slice or int64[rows * queries].
    start: where their contexts begin in the gathered ones; padded: tokens gathered for each row, of which
    ``length`` take part. mask: added to the scores, [rows, 1, queries, length], None where nothing is hidden.
    """

    tokens: slice | torch.Tensor
    rows: int
    queries: int
    start: int
    padded: int
    length: int
    mask: torch.Tensor | None


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


@dataclass(frozen=True, slots=True, eq=False)
class CrossRead:
    """What the cross attention of one layer reads in a step.

    pages: its keys and values, [blocks, block_size, heads, width] each.
    """

    batch: GatherBatch
    pages: tuple[torch.Tensor, ...]

    def contexts(self) -> tuple[torch.Tensor, ...]:
        """[1, heads, gathered tokens, width] of each."""
        return tuple(gathered(pages, self.batch) for pages in self.pages)


def gathered(pages: torch.Tensor, batch: GatherBatch) -> torch.Tensor:
    """The contexts of ``batch`` copied out of ``pages``, zeros where nobody sees them: [1, heads, tokens, width]."""
    copied = pages.index_select(0, batch.read_blocks).flatten(0, 1)
    copied.index_fill_(0, batch.stale, 0)
    return copied.transpose(0, 1).unsqueeze(0)


class _Builder:
    """Collects segments, and the blocks and stale tokens they gather.

    context: int64[R], tokens that all of a row's see, if those are not its own.
    """

    def __init__(
        self, step: Step, table: BlockTable, reach: AttentionWindow, dtype: torch.dtype, context: Int64 | None = None
    ) -> None:
        self.table, self.reach, self.dtype, self.device = table, reach, dtype, table.device
        self.size = table.block_size
        self.rows = step.rows.astype(np.int64)
        self.scheduled = step.num_scheduled.astype(np.int64)
        self.computed = step.num_computed.astype(np.int64)
        self.whole = context is not None
        self.context = self.computed + self.scheduled if context is None else context
        # the first query of a row reaches furthest back
        self.first_block = reach.first_seen(self.computed) // self.size
        self.blocks = -(-self.context // self.size) - self.first_block
        self.first = np.cumsum(self.scheduled) - self.scheduled
        self.start = 0
        self.read: list[torch.Tensor] = []
        self.stale: list[Int64] = []
        self.segments: list[Segment] = []

    def add(self, members: Int64) -> None:
        """One call for rows that run equally many tokens; ``members`` are indices into the step's rows."""
        queries, width = int(self.scheduled[members[0]]), int(self.blocks[members].max())
        places = (self.first[members][:, None] + np.arange(queries)).reshape(-1)
        contiguous = len(places) == places[-1] - places[0] + 1
        tokens = slice(int(places[0]), int(places[-1]) + 1) if contiguous else self._tensor(places)
        padded = width * self.size
        begin = self.first_block[members] * self.size
        hidden = self._hidden(members, begin[:, None] + np.arange(padded), queries)
        length = int((self.context[members] - begin).max())
        mask = self._mask(hidden[:, None, :, :length]) if hidden[:, :, :length].any() else None
        self.segments.append(Segment(tokens, len(members), queries, self.start, padded, length, mask))
        unseen = np.logical_and.reduce(hidden, axis=1)
        self._gather(members, width, unseen)

    def _hidden(self, members: Int64, key: Int64, queries: int) -> NDArray[np.bool_]:
        """bool[rows, queries, keys] for keys at int64[rows, keys]: which of them no query sees."""
        key = key[:, None]
        if self.whole:
            unread: NDArray[np.bool_] = key >= self.context[members][:, None, None]
            return unread.repeat(queries, axis=1)
        query = (self.computed[members][:, None] + np.arange(queries))[:, :, None]
        hidden: NDArray[np.bool_] = (key > query) | (key < self.reach.first_seen(query))
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

    def build(self) -> GatherBatch:
        """All segments, for tokens of the rows' own: slots are those that the table has committed."""
        return self._batch(self.table.slot_mapping[: int(self.scheduled.sum())])

    def build_read(self) -> GatherBatch:
        """All segments, for what is only read."""
        return self._batch(torch.empty(0, dtype=torch.int64, device=self.device))

    def _batch(self, slots: torch.Tensor) -> GatherBatch:
        return GatherBatch(
            write_block=torch.div(slots, self.size, rounding_mode="floor"),
            write_offset=slots % self.size,
            read_blocks=torch.cat(self.read).long(),
            stale=self._tensor(np.concatenate(self.stale)),
            segments=tuple(self.segments),
        )


def gather_batch(step: Step, table: BlockTable, reach: AttentionWindow, dtype: torch.dtype) -> GatherBatch:
    """What ``step`` reads and writes through ``table``, whose cells and slots have been committed.

    step: at least one row. reach: of the layers' attention. dtype: of its scores. O(tokens + gathered tokens).
    """
    builder = _Builder(step, table, reach, dtype)
    _add_rows(builder, step)
    return builder.build()


def cross_batch(step: Step, table: BlockTable, tokens: Int64, dtype: torch.dtype) -> GatherBatch:
    """What cross attention reads in ``step`` through ``table``: all ``tokens``, int64[R], of each row's encoder output.

    step, dtype: as in gather_batch; each row has at least one token to read. O(tokens + gathered tokens).
    """
    builder = _Builder(step, table, AttentionWindow(), dtype, tokens)
    _add_rows(builder, step)
    return builder.build_read()


def _add_rows(builder: _Builder, step: Step) -> None:
    """Rows that decode, by their tokens and the power of two that their block counts round up to; chunks one by one."""
    decoding = builder.scheduled == np.diff(step.drafts.indptr) + 1
    rows = np.flatnonzero(decoding)
    # exponent of the power of two: 1 -> 0, 2 -> 1, 3, 4 -> 2
    classes = np.stack((builder.scheduled[rows], np.ceil(np.log2(builder.blocks[rows])).astype(np.int64)), axis=1)
    for one in np.unique(classes, axis=0):
        builder.add(rows[(classes == one).all(axis=1)])
    for member in np.flatnonzero(~decoding).tolist():
        builder.add(np.array([member]))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,  # noqa: ANN401  # whatever the model hands to its attention goes on to its eager function
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over a flattened step: the signature of transformers' attention functions.

    query: [1, heads, tokens, width]. key, value: [1, kv heads, gathered tokens, width], as StepCache.update
    gave them or as the model expanded them; of cross attention nothing, its pages are gathered here.
    Returns [1, tokens, heads, value width]. The GatherBatch is that of the layer that was updated last (shared modules
    do not know which layer they stand in), or that asked for its encoder's keys.
    position_bias: of T5, one for each segment (hybridkv.runner.attention.relative_bias); of its cross attention zeros.
    Raises WorkerError outside of a runner.
    """
    del attention_mask  # transformers makes none for a name it does not know; masks are those of the segments
    context: StepContext | None = getattr(module, CONTEXT, None)
    if context is None:
        raise WorkerError(f"{type(module).__name__} runs outside of a ModelRunner: give it its own attention back")
    eager = eager_function(module)
    biases, read = kwargs.pop("position_bias", None), context.take_cross()
    if read is not None:
        (key, value), batch, biases = read.contexts(), read.batch, None
    else:
        batch = context.attention_batch()
    parts: list[torch.Tensor] = []
    for place, segment in enumerate(batch.segments):
        if biases is not None:
            kwargs["position_bias"] = biases[place]
        output, _ = eager(
            module,
            _queries(query, segment),
            _contexts(key, segment),
            _contexts(value, segment),
            segment.mask,
            **kwargs,
        )
        parts.append(output.reshape(segment.rows * segment.queries, *output.shape[2:]))
    return _in_order(parts, batch.segments)[None], None


def _queries(query: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[1, heads, tokens, width] -> [rows, heads, queries, width]."""
    mine = query[0, :, segment.tokens]
    return mine.reshape(mine.shape[0], segment.rows, segment.queries, mine.shape[2]).transpose(0, 1)


def _contexts(states: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[1, heads, gathered tokens, width] -> [rows, heads, length, width], a view."""
    mine = states[0, :, segment.start : segment.start + segment.rows * segment.padded]
    heads, width = mine.shape[0], mine.shape[2]
    return mine.view(heads, segment.rows, segment.padded, width).transpose(0, 1)[:, :, : segment.length]


def _in_order(parts: Sequence[torch.Tensor], segments: Sequence[Segment]) -> torch.Tensor:
    """The outputs of all segments in the order of the step's tokens, [tokens, heads, width]."""
    if len(parts) == 1:
        return parts[0]
    out = parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))
    for part, segment in zip(parts, segments, strict=True):
        out[segment.tokens] = part
    return out


def eager_function(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The eager attention of the modelling module that ``module`` comes from; UnsupportedModelError without one."""
    found = getattr(sys.modules[type(module).__module__], _EAGER, None)
    if found is None:
        raise UnsupportedModelError(
            f"{type(module).__module__} has no {_EAGER}: its attention cannot run on gathered contexts"
        )
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = found
    return function


def attention_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Those of ``model`` that attend, layer by layer, as transformers marks them."""
    return (module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal"))


def register() -> None:
    """Make the backend known to transformers under NAME."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, attend)
