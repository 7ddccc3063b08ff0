"""Floating point operations of a step besides those of the weights: attention over its context, and recurrent states.

    attention   2 (width of a key + width of a value) * query heads for each pair of a token and one that it sees: a
                product and a sum each, twice (Kaplan et al., arXiv 2001.08361, section 2.1, count the keys' half);
                latents as they are absorbed, 4 * their width (DeepSeek-V2, arXiv 2405.04434, section 2.1.2)
    states      6 for each element and token: it decays, is written and is read (Mamba-2, arXiv 2405.21060, section 2.1)

Pairs are those of the mask, so a causal prompt has half of its square. Ranks of decode context parallelism are tensor
parallel ones, each with the query heads of all of them and its part of the tokens, which comes to the same; those of
prefill share a prompt's queries. Of an encoder only what decoders read of it is counted. Where nobody knows the query
heads attention counts nothing, and so do layers that read what others keep (they have no cache of their own).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from hybridkv.planner import Plan
from hybridkv.simulator.traffic import Spans, chunk_reads, window_reads
from hybridkv.specs import AttentionSpec, Keeps, MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

_OF_ELEMENT: Final = 6


@dataclass(frozen=True, slots=True)
class Operations:
    """Of one rank; build it with ``of``.

    pair: of a token and one that it sees in all layers that keep every token. windows, chunks: the same by their
    length. token: of one token, whatever its context.
    """

    pair: float = 0.0
    windows: Spans = ()
    chunks: Spans = ()
    token: float = 0.0

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Those of ``plan``'s model."""
        limits, heads = plan.limits, plan.model.query_heads / plan.model.tp
        windows, chunks = defaultdict[int, float](float), defaultdict[int, float](float)
        pair = token = 0.0
        for spec in (layer.spec for layer in plan.model.layers):
            if isinstance(spec, MambaSpec):
                token += _OF_ELEMENT * sum(float(np.prod(shape)) for shape in spec.shapes)
                continue
            if not isinstance(spec, AttentionSpec):
                continue
            of_pair = _of_pair(spec) * heads / (1 if spec.keeps is Keeps.ENCODER else limits.pcp)
            window, chunk = spec.mask
            if window is not None:
                windows[window] += of_pair
            elif chunk is not None:
                chunks[chunk] += of_pair
            elif spec.keeps is Keeps.ENCODER:
                token += of_pair * limits.max_encoder_tokens
            elif spec.keeps is Keeps.TOKENS:
                pair += of_pair
        return cls(pair, tuple(sorted(windows.items())), tuple(sorted(chunks.items())), token)

    def of_rows(self, computed: NDArray[np.int64], scheduled: NDArray[np.int64]) -> float:
        """Of rows that run ``scheduled`` tokens behind ``computed``. O(rows)."""
        done = computed + scheduled
        made = self.token * int(scheduled.sum()) + self.pair * int((_triangle(done) - _triangle(computed)).sum())
        for window, of_pair in self.windows:
            made += of_pair * int((_windowed(done, window) - _windowed(computed, window)).sum())
        for chunk, of_pair in self.chunks:
            made += of_pair * int((_chunked(done, chunk) - _chunked(computed, chunk)).sum())
        return made

    def of_decodes(self, computed: NDArray[np.int64], steps: int) -> NDArray[np.float64]:
        """Of each of ``steps`` steps in which rows of ``computed`` tokens run one token each, to the bit ``of_rows``.

        float64[steps]. O(rows + steps); O(rows * steps) where CacheTraffic.decode_bytes is.
        """
        more = np.arange(1, steps + 1)
        context = (int(computed.sum()) + len(computed) * more).astype(np.float64)
        made: NDArray[np.float64] = self.token * len(computed) + self.pair * context
        for window, of_pair in self.windows:
            made += of_pair * window_reads(computed, more, window)
        for chunk, of_pair in self.chunks:
            made += of_pair * chunk_reads(computed, more, chunk)
        return made


NONE_BESIDES: Final = Operations()


def _of_pair(spec: AttentionSpec) -> float:
    """Operations of one query head."""
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return 4 * spec.head_size
    return 2 * spec.elements_per_token


def _triangle(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs of the first ``tokens`` tokens: each sees itself and those before it."""
    return tokens * (tokens + 1) // 2


def _windowed(tokens: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """Pairs of the first ``tokens`` tokens, each with those in its window."""
    behind: NDArray[np.int64] = np.maximum(tokens - window, 0) * window
    return _triangle(np.minimum(tokens, window)) + behind


def _chunked(tokens: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """Pairs of the first ``tokens`` tokens, each with those of its chunk."""
    return tokens // chunk * (chunk * (chunk + 1) // 2) + _triangle(tokens % chunk)
