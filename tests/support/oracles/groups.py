"""One small class a kind of layer: its columns, what it drops, what it publishes and where a hit may end.

table   [ 0 dropped | 3 | 4 | 5 | 6 ]      one request in one group: a block a column, 0 where none is kept
          ^ before the first live token
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True, slots=True)
class Extent:
    """How far a request is laid out. end: tokens computed after the step. total: with room for lookahead tokens.

    encoder: tokens of the encoder's input. begun: whether the request was laid out before.
    """

    end: int
    total: int
    encoder: int = 0
    begun: bool = False


class OracleGroup:
    """Full attention, and what the other kinds do alike. size: tokens of a column."""

    kind = "full"
    publishes = True
    recurrent = False
    peeks = True
    """Whether EAGLE asks for one block past the end of a hit."""
    sink_blocks = 0

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size

    def first_live(self, computed: int) -> int:  # noqa: ARG002 - the answer of a kind
        """The first token that a later one reads when ``computed`` tokens are."""
        return 0

    def held(self, end: int) -> list[int]:
        """The columns that a hit of ``end`` tokens brings."""
        return list(range(self.first_live(end) // self.size, end // self.size))

    def lay_out(self, table: Sequence[int], extent: Extent) -> list[int | None]:
        """The table after an allocation; None where a new block goes."""
        missing = math.ceil(extent.total / self.size) - len(table)
        return [*table, *[None] * missing]

    def keeps(self, column: int, alignment: int, eagle: int) -> bool:  # noqa: ARG002 - the answer of a kind
        """Whether a full ``column`` is published where hits end at multiples of ``alignment``."""
        return True

    def peak(self, tokens: int, in_flight_tokens: int, in_flight_steps: int) -> int:  # noqa: ARG002 - same
        """Most blocks that a request of up to ``tokens`` tokens holds at a time."""
        return math.ceil(tokens / self.size)


class SinkGroup(OracleGroup):
    """Full attention behind a sink, whose blocks belong to nobody."""

    kind = "sink"

    def __init__(self, number: int, size: int, sink_blocks: int) -> None:
        super().__init__(number, size)
        self.sink_blocks = sink_blocks


class WindowGroup(OracleGroup):
    """A token reads itself and ``window`` - 1 tokens before it."""

    kind = "window"

    def __init__(self, number: int, size: int, window: int) -> None:
        super().__init__(number, size)
        self.window = window
        self.need = max(1, math.ceil((window - 1) / size))

    def first_live(self, computed: int) -> int:
        """Where the reach of the next token begins."""
        return max(0, computed - self.window + 1)

    def held(self, end: int) -> list[int]:
        """What the next token reads."""
        return list(range(max(0, end // self.size - self.need), end // self.size))

    def keeps(self, column: int, alignment: int, eagle: int) -> bool:
        """Only what a hit at some multiple of ``alignment`` asks for, where it does not ask for nearly everything."""
        columns = alignment // self.size
        if self.need + eagle >= columns:
            return True
        edge = columns
        while edge - self.need <= column:
            if column < edge + eagle:
                return True
            edge += columns
        return False

    def peak(self, tokens: int, in_flight_tokens: int, in_flight_steps: int) -> int:  # noqa: ARG002 - same
        """See OracleGroup.peak."""
        most = math.ceil(min(self.window - 1 + in_flight_tokens, tokens) / self.size) + 1
        return min(most, math.ceil(tokens / self.size))


class ChunkGroup(OracleGroup):
    """A token reads the tokens of its own chunk up to itself."""

    kind = "chunk"

    def __init__(self, number: int, size: int, chunk: int) -> None:
        super().__init__(number, size)
        self.chunk = chunk

    def first_live(self, computed: int) -> int:
        """Where the reach of the next token begins."""
        return computed // self.chunk * self.chunk

    def peak(self, tokens: int, in_flight_tokens: int, in_flight_steps: int) -> int:  # noqa: ARG002 - same
        """See OracleGroup.peak."""
        before = self.size - math.gcd(self.chunk, self.size)  # a chunk may begin inside a block
        return math.ceil(min(before + self.chunk + in_flight_tokens, tokens) / self.size)


class StateGroup(OracleGroup):
    """A recurrent state, kept where chunks end ("align"): the column of the chunk's last token, then drafts."""

    kind = "state"
    recurrent = True
    peeks = False

    def __init__(self, number: int, size: int, drafts: int) -> None:
        super().__init__(number, size)
        self.drafts = drafts

    def column(self, tokens: int) -> int:
        """Where the state after ``tokens`` tokens lies."""
        return math.ceil(tokens / self.size) - 1

    def places(self, certain: int, drafts: int) -> list[int]:
        """Columns for the states behind ``certain`` tokens and behind each draft: at an edge its own, else in order."""
        last = self.column(certain + drafts)
        ends = [end for end in range(certain, certain + drafts + 1) if end % self.size == 0]
        columns = [last + i for i in range(drafts + 1)]
        for end in ends:
            own = end // self.size - 1
            if own == last:
                columns[0] = columns[-1]
            columns[end - certain] = own
        return columns

    def first_live(self, computed: int) -> int:
        """Where the reach of the next token begins."""
        return max(0, computed - 1)

    def held(self, end: int) -> list[int]:
        """What the next token reads."""
        return [end // self.size - 1]

    def lay_out(self, table: Sequence[int], extent: Extent) -> list[int | None]:
        """Null up to the state's column; the blocks of drafts that lie before it move behind it."""
        after: list[int | None] = list(table)
        state = self.column(extent.end)
        width = state + 1 + self.drafts
        if width <= len(table):
            return after
        after += [0] * (state - len(after))
        if extent.begun:
            for column in range(len(table) - self.drafts, min(len(table), state)):
                after.append(table[column])
                after[column] = 0
        return after + [None] * (width - len(after))

    def peak(self, tokens: int, in_flight_tokens: int, in_flight_steps: int) -> int:  # noqa: ARG002 - same
        """The state that was settled, one a step in flight, and the drafts."""
        return min(math.ceil(tokens / self.size), 1 + in_flight_steps) + self.drafts


class ScratchStateGroup(OracleGroup):
    """A recurrent state rewritten in place ("none"): never kept for others."""

    kind = "scratch"
    publishes = False
    recurrent = True
    peeks = False

    def __init__(self, number: int, size: int, drafts: int) -> None:
        super().__init__(number, size)
        self.drafts = drafts

    def column(self, tokens: int) -> int:  # noqa: ARG002 - the answer of a kind
        """Always the first."""
        return 0

    def places(self, certain: int, drafts: int) -> list[int]:  # noqa: ARG002 - same
        """One after the other."""
        return list(range(drafts + 1))

    def lay_out(self, table: Sequence[int], extent: Extent) -> list[int | None]:  # noqa: ARG002 - same
        """See OracleGroup.lay_out."""
        return list(table) or [None] * (1 + self.drafts)

    def peak(self, tokens: int, in_flight_tokens: int, in_flight_steps: int) -> int:  # noqa: ARG002 - same
        """See OracleGroup.peak."""
        return 1 + self.drafts


class KeptStateGroup(ScratchStateGroup):
    """A recurrent state rewritten in place, of which copies are kept for others (natural layout)."""

    kind = "state"
    publishes = True

    def held(self, end: int) -> list[int]:  # noqa: ARG002 - the answer of a kind
        """No column: a state is copied."""
        return []


class CrossGroup(OracleGroup):
    """The encoder's output, once."""

    kind = "cross"
    publishes = False

    def lay_out(self, table: Sequence[int], extent: Extent) -> list[int | None]:
        """See OracleGroup.lay_out."""
        return list(table) or [None] * math.ceil(extent.encoder / self.size)

    def peak(self, tokens: int, in_flight_tokens: int, in_flight_steps: int) -> int:  # noqa: ARG002 - same
        """See OracleGroup.peak."""
        return 0


class NothingGroup(OracleGroup):
    """Encoder-only attention keeps nothing."""

    kind = "nothing"
    publishes = False

    def lay_out(self, table: Sequence[int], extent: Extent) -> list[int | None]:  # noqa: ARG002 - same
        """See OracleGroup.lay_out."""
        return []

    def peak(self, tokens: int, in_flight_tokens: int, in_flight_steps: int) -> int:  # noqa: ARG002 - same
        """See OracleGroup.peak."""
        return 0


def natural_group(number: int, spec: KVCacheSpec, ranks: int, *, keeps_states: bool) -> OracleGroup:
    """The group of ``spec`` in the natural layout, where a placement says whether states are kept for others."""
    if isinstance(spec, MambaSpec):
        kind = KeptStateGroup if keeps_states else ScratchStateGroup
        return kind(number, spec.block_size, spec.num_speculative_blocks)
    return oracle_group(number, spec, ranks)


def oracle_group(number: int, spec: KVCacheSpec, ranks: int = 1) -> OracleGroup:
    """The group of ``spec`` over ``ranks`` context parallel ranks."""
    own, sharded = spec.block_size, spec.block_size * ranks
    group: OracleGroup
    match spec:
        case SinkFullAttentionSpec():
            group = SinkGroup(number, sharded, math.ceil(spec.sink_len / sharded))
        case FullAttentionSpec():
            group = OracleGroup(number, sharded)
        case SlidingWindowSpec():
            group = WindowGroup(number, sharded, spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            group = ChunkGroup(number, sharded, spec.attention_chunk_size)
        case MambaSpec():
            kind = StateGroup if spec.cache_mode == "align" else ScratchStateGroup
            group = kind(number, own, spec.num_speculative_blocks)
        case CrossAttentionSpec():
            group = CrossGroup(number, own)
        case EncoderOnlyAttentionSpec():
            group = NothingGroup(number, own)
        case _:
            raise TypeError(f"the oracle knows no layers of {type(spec).__name__}")
    return group
