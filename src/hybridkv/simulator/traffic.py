"""Bytes of the cache that a step moves through one rank's memory, layer kind by layer kind.

A row has ``c`` computed tokens and runs ``s`` more; ``b`` is what a token takes in a layer. A step reads

    full attention, MLA     (c + s) * b                          every token of the request
    window of W             min(c + s, s + W - 1) * b            s queries, each of itself and the W - 1 before it
    chunk of C              (c % C + s) * b                      from the start of the chunk that token c is in
    attention sinks         sink_len * b                         besides
    cross attention         encoder tokens * b                   whatever s is
    recurrent layer         2 * its state                        read and written, once a step and row
    encoder-only            0                                    nothing is kept between steps

and copies of blocks, as the Step lists them, move 2 * content of the group's block each.

Sources: what each kind reads is the definition of its mask (hybridkv.specs). Idealised: keys and
values are read once for all queries of a row (FlashAttention, arXiv 2205.14135, reads them once a tile of
queries), and a scan carries its state through a chunk of the prompt without visiting memory (the chunked scan of
Mamba-2, arXiv 2405.21060, section 6, writes one state a tile). New tokens count once, as read; a row that begins
at zero counts alike, its state is cleared instead of read.

Attention that a kernel masks but the cache keeps whole (windows managed as full attention) reads its window.
Context parallel ranks hold, and read, 1 / (dcp * pcp) of the tokens of a request; states and the encoder's
tokens are whole on each. Padding of pages is not read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Transfer
from hybridkv.planner import Plan
from hybridkv.specs import Keeps, SinkFullAttentionSpec
from hybridkv.step import Copy, Step

Spans = tuple[tuple[int, float], ...]
"""(tokens of the window or chunk, bytes of a token in all layers that have it), by tokens."""


@dataclass(frozen=True, slots=True)
class CacheTraffic:
    """What one rank moves; build it with ``of``.

    token_bytes: of a token that stays. windows, chunks: of tokens that are read for a while. row_bytes: of a
    row, whatever its length. copy_bytes: of one copied block, by group.
    """

    token_bytes: float = 0.0
    windows: Spans = ()
    chunks: Spans = ()
    row_bytes: float = 0.0
    copy_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """That of ``plan``'s model in its cache; every request has an encoder input of the largest size."""
        limits = plan.limits
        windows, chunks = defaultdict[int, float](float), defaultdict[int, float](float)
        tokens = rows = 0.0
        for spec in (layer.spec for layer in plan.model.layers):
            token_bytes = spec.content_bytes / spec.block_size
            window, chunk = spec.mask
            if window is not None:
                windows[window] += token_bytes / limits.cp
            elif chunk is not None:
                chunks[chunk] += token_bytes / limits.cp
            elif spec.keeps is Keeps.TOKENS:
                tokens += token_bytes / limits.cp
            elif spec.keeps is Keeps.ENCODER:
                rows += limits.max_encoder_tokens * token_bytes
            elif spec.keeps is Keeps.STATE:
                rows += 2 * spec.content_bytes
            if isinstance(spec, SinkFullAttentionSpec):
                rows += spec.sink_len * token_bytes / limits.cp
        copies = tuple(2 * group.content_bytes for group in plan.config.groups)
        return cls(tokens, _spans(windows), _spans(chunks), rows, copies)

    def bytes_of(self, step: Step) -> float:
        """Bytes that ``step`` moves. O(rows + copies)."""
        computed, scheduled = step.num_computed.astype(np.int64), step.num_scheduled.astype(np.int64)
        context = computed + scheduled
        moved = self.token_bytes * int(context.sum()) + self.row_bytes * len(step)
        for window, token_bytes in self.windows:
            moved += token_bytes * int(np.minimum(context, scheduled + window - 1).sum())
        for chunk, token_bytes in self.chunks:
            moved += token_bytes * int((computed % chunk + scheduled).sum())
        return moved + sum(self.copy_bytes[copy.group] for copy in step.copies)

    def decode_bytes(
        self, computed: NDArray[np.int64], steps: int, copies: Sequence[Transfer | Copy] = ()
    ) -> NDArray[np.float64]:
        """Bytes of each of ``steps`` steps in which rows of ``computed`` tokens, int64[rows], run one token each.

        float64[steps], to the bit those of ``bytes_of``. copies: in each of the steps. O(rows + steps) and, for rows
        that are not as long as a window yet and for chunks, O(rows * steps).
        """
        more = np.arange(1, steps + 1)
        rows = len(computed)
        context = (int(computed.sum()) + rows * more).astype(np.float64)
        moved: NDArray[np.float64] = self.token_bytes * context + self.row_bytes * rows
        for window, token_bytes in self.windows:
            moved += token_bytes * window_reads(computed, more, window)
        for chunk, token_bytes in self.chunks:
            moved += token_bytes * chunk_reads(computed, more, chunk)
        moved += sum(self.copy_bytes[copy.group] for copy in copies)
        return moved


def window_reads(computed: NDArray[np.int64], more: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """Tokens that all rows of ``computed`` tokens read in a window, each in its step ``more``, counted from 1."""
    short = computed[computed < window]
    read: NDArray[np.int64] = np.minimum(short[:, None] + more, window).sum(axis=0)
    return read + (len(computed) - len(short)) * window


def chunk_reads(computed: NDArray[np.int64], more: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """The same in the chunks that their tokens are in."""
    read: NDArray[np.int64] = ((computed[:, None] + (more - 1)) % chunk + 1).sum(axis=0)
    return read


def _spans(token_bytes: Mapping[int, float]) -> Spans:
    return tuple(sorted(token_bytes.items()))
