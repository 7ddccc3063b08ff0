"""How long a step takes: a roofline over compute and memory, and a fixed overhead.

    seconds = time_scale * (max(compute, memory) + reduced + rows * seconds of a row + overhead)
    compute = (2 * active parameters / tp * tokens + attention and states) / (FLOP/s * efficiency)
    memory  = (weights read / tp * bytes of a weight + cache bytes moved) / (bytes/s * efficiency)
    reduced = 2 * decoder layers * (tokens * hidden size * 2 bytes * 2 (tp - 1) / tp / (link's bytes/s * efficiency)
              + latency)

Tensor parallel ranks add up their parts twice a decoder layer, behind its mixer and behind its MLP (Shoeybi et al.,
Megatron-LM, arXiv 1909.08053, section 3), here in bf16 and without overlap; a ring sends 2 (tp - 1) / tp of the bytes
from each rank (Patarasuk, Yuan, J. Parallel Distrib. Comput. 69, 2009).

tokens: those the step runs. A weight takes 4 bytes (fp32), 2 (bf16), 1 (fp8) or a half (int4, scales left out); fp8
computes at the rate of fp8 where the hardware has one, int4 at that of bf16, to which it is unpacked (Lin et al., AWQ,
arXiv 2306.00978, section 4). Weights read: all, once a step; of a mixture of experts no more than its tokens can
choose, ``min(parameters, active parameters * tokens)``. Cache bytes moved are those of one rank, by layer kind.

Two operations per weight and token is the usual count of a forward (Kaplan et al., arXiv 2001.08361, section
2.1); those of attention and of recurrent states are below (Operations); the roofline is Williams,
Waterman, Patterson, CACM 52(4), 2009. An encoder-decoder's encoder runs in the step that begins a request with another
input: its weights, which are those that no decoder's token is multiplied with, are read once a step, and multiplied
with the tokens of each input. Left out: attention inside encoders, those of pictures and sound that a decoder reads as
tokens, sampling; context parallel ranks share the cache and attention, not the weights' operations. Durations decide
only who runs beside whom: hits, blocks and preemptions come from the real scheduler and manager.

CacheTraffic: bytes of the cache that a step moves through one rank's memory, layer kind by layer kind.

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

Operations: those of a step besides the weights': attention over its context, and recurrent states.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Transfer
from hybridkv.errors import ConfigError
from hybridkv.models import Model
from hybridkv.planner import Plan
from hybridkv.simulator.hardware import BF16, FP8, H100, WEIGHT_BYTES, Hardware, weights_named
from hybridkv.specs import (
    AttentionSpec,
    Keeps,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)
from hybridkv.step import Copy, Step

Spans = tuple[tuple[int, float], ...]
"""(tokens of the window or chunk, bytes of a token in all layers that have it), by tokens."""


@dataclass(frozen=True, slots=True)
class CacheTraffic:
    """Bytes that one rank moves in a step; build it with ``of``.

    Attributes:
        token_bytes: bytes of a token in the layers that read every token.
        windows: bytes of a token, by the window in which it is read.
        chunks: bytes of a token, by the chunk in which it is read.
        row_bytes: bytes of a row, independent of its length: states and encoder outputs.
        copy_bytes: bytes of one copied block, by group.
    """

    token_bytes: float = 0.0
    windows: Spans = ()
    chunks: Spans = ()
    row_bytes: float = 0.0
    copy_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the traffic of a plan's model in its cache; every request has an encoder input of the largest size.

        Args:
            plan: the plan of model and cache.
        """
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
        """Return the bytes that a step moves. O(rows + copies).

        Args:
            step: the step; its rows, their computed and scheduled tokens, and its copies count.
        """
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
        """Return the bytes of each of several decode steps, float64[steps], equal to ``bytes_of`` to the bit.

        O(rows + steps); O(rows * steps) for chunks, and for rows that are shorter than a window.

        Args:
            computed: computed tokens of each row before the first step, int64[rows]; each step runs one token of each.
            steps: number of steps.
            copies: block copies of every step.
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
    """Return the tokens that rows of ``computed`` tokens read in a window, in step ``more`` of each, from 1."""
    short = computed[computed < window]
    read: NDArray[np.int64] = np.minimum(short[:, None] + more, window).sum(axis=0)
    return read + (len(computed) - len(short)) * window


def chunk_reads(computed: NDArray[np.int64], more: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """Return the same number for chunks of ``chunk`` tokens."""
    read: NDArray[np.int64] = ((computed[:, None] + (more - 1)) % chunk + 1).sum(axis=0)
    return read


def _spans(token_bytes: Mapping[int, float]) -> Spans:
    return tuple(sorted(token_bytes.items()))


_OF_ELEMENT: Final = 6


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of one rank for attention and states; build it with ``of``.

    Attributes:
        pair: for a token and one token that it sees, in all layers that keep every token.
        windows: the same, by the window's length.
        chunks: the same, by the chunk's length.
        token: for one token, independent of its context.
    """

    pair: float = 0.0
    windows: Spans = ()
    chunks: Spans = ()
    token: float = 0.0

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the operations of ``plan``'s model."""
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
        """Return the operations of rows that run ``scheduled`` tokens after ``computed`` ones. O(rows)."""
        done = computed + scheduled
        made = self.token * int(scheduled.sum()) + self.pair * int((_triangle(done) - _triangle(computed)).sum())
        for window, of_pair in self.windows:
            made += of_pair * int((_windowed(done, window) - _windowed(computed, window)).sum())
        for chunk, of_pair in self.chunks:
            made += of_pair * int((_chunked(done, chunk) - _chunked(computed, chunk)).sum())
        return made

    def of_decodes(self, computed: NDArray[np.int64], steps: int) -> NDArray[np.float64]:
        """Return the operations of each of several decode steps, float64[steps], equal to ``of_rows`` to the bit.

        Each step runs one token of each row. O(rows + steps); O(rows * steps) where CacheTraffic.decode_bytes is.
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
    """Return the operations of one query head for one pair."""
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return 4 * spec.head_size
    return 2 * spec.elements_per_token


def _triangle(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pairs of the first ``tokens`` tokens: each sees itself and the tokens before it."""
    return tokens * (tokens + 1) // 2


def _windowed(tokens: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """Return the pairs of the first ``tokens`` tokens, each with the tokens in its window."""
    behind: NDArray[np.int64] = np.maximum(tokens - window, 0) * window
    return _triangle(np.minimum(tokens, window)) + behind


def _chunked(tokens: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """Return the pairs of the first ``tokens`` tokens, each with the earlier tokens of its chunk."""
    return tokens // chunk * (chunk * (chunk + 1) // 2) + _triangle(tokens % chunk)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a Step for one model on one kind of hardware; build it with ``of``. Parameters are one rank's.

    weights: what they are kept in, a name of WEIGHT_BYTES. reduced_bytes: that a rank sends to others for a token, in
    ``sums`` sums over ranks a step. encoder_parameters: of ``parameters``, those that only encoders' tokens meet.
    """

    parameters: float
    active_parameters: float
    traffic: CacheTraffic
    hardware: Hardware = H100
    time_scale: float = 1.0
    weights: str = BF16
    reduced_bytes: float = 0.0
    sums: int = 0
    operations: Operations = NONE_BESIDES
    encoder_parameters: float = 0.0

    @classmethod
    def of(cls, plan: Plan, *, hardware: Hardware = H100, time_scale: float = 1.0, weights: str = BF16) -> Self:
        """Return the cost of the plan's model on one kind of machine, its tensor parallel ranks working in parallel.

        Args:
            plan: the plan of model and cache.
            hardware: the machine of one rank.
            time_scale: factor of all durations; 0: steps take no time.
            weights: format of the weights, a name of WEIGHT_BYTES.

        Raises:
            ConfigError: for a negative time_scale, an unknown format, or a model whose weights were not counted.
        """
        if not 0 <= time_scale < float("inf"):
            raise ConfigError(f"the time scale must be 0 or more and finite, got {time_scale}")
        model = plan.model
        if not model.parameters and time_scale:
            raise ConfigError(
                f"nobody counted the weights of {model.name}, which take the time of a step: say --set parameters=N "
                "and --set active_parameters=N, or --time-scale 0"
            )
        parameters, active = model.parameters / model.tp, model.active_parameters / model.tp
        return cls(
            parameters,
            active,
            CacheTraffic.of(plan),
            hardware,
            time_scale,
            weights_named(weights),
            _reduced_bytes(model),
            _sums(model),
            Operations.of(plan),
            parameters - active if any(layer.spec.keeps is Keeps.ENCODER for layer in model.layers) else 0.0,
        )

    def seconds(self, step: Step) -> float:
        """Return the seconds of a step. O(rows + copies).

        Args:
            step: the step; its rows, tokens and copies count.
        """
        weights_s, weight_bytes = self._bounds(step.num_tokens, encoded_tokens(step))
        made = self.operations.of_rows(step.num_computed.astype(np.int64), step.num_scheduled.astype(np.int64))
        compute_s = weights_s + made / self._attention_per_s
        memory_s = (weight_bytes + self.traffic.bytes_of(step)) / self._bytes_per_s
        return self.time_scale * (max(compute_s, memory_s) + self._besides_s(step.num_tokens, len(step)))

    def decode_seconds(
        self, computed: NDArray[np.int64], steps: int, copies: Sequence[Transfer | Copy] = ()
    ) -> NDArray[np.float64]:
        """Return the seconds of each of several decode steps, float64[steps], equal to ``seconds`` to the bit.

        O(rows + steps); O(rows * steps) for chunks, and for rows that are shorter than a window.

        Args:
            computed: computed tokens of each row before the first step, int64[rows]; each step runs one token of each.
            steps: number of steps.
            copies: block copies of every step.
        """
        rows = len(computed)
        weights_s, weight_bytes = self._bounds(rows)
        compute_s = weights_s + self.operations.of_decodes(computed, steps) / self._attention_per_s
        memory_s = (weight_bytes + self.traffic.decode_bytes(computed, steps, copies)) / self._bytes_per_s
        busy_s: NDArray[np.float64] = np.maximum(compute_s, memory_s) + self._besides_s(rows, rows)
        return self.time_scale * busy_s

    def work(self, tokens: int, encoded: int = 0) -> tuple[float, float]:
        """Return the operations of the weights, and the bytes of weights that are read.

        Args:
            tokens: decoder tokens of the step.
            encoded: encoder tokens of the step.
        """
        read = min(self.parameters - self.encoder_parameters, self.active_parameters * tokens)
        read += self.encoder_parameters if encoded else 0
        made = 2 * (self.active_parameters * tokens + self.encoder_parameters * encoded)
        return made, read * WEIGHT_BYTES[self.weights]

    def _bounds(self, tokens: int, encoded: int = 0) -> tuple[float, float]:
        """Return the seconds that these tokens compute, and the bytes of weights that they read."""
        machine = self.hardware
        peak = machine.fp8_flops_per_s if self.weights == FP8 and machine.fp8_flops_per_s else machine.flops_per_s
        flops, read = self.work(tokens, encoded)
        return flops / (peak * machine.compute_efficiency), read

    def _besides_s(self, tokens: int, rows: int) -> float:
        """Return the seconds that overlap with nothing: sums over ranks, rows, and the step itself."""
        machine = self.hardware
        reduced_s = self.sums * machine.link_latency_s
        if machine.link_bytes_per_s:
            reduced_s += self.reduced_bytes * tokens / (machine.link_bytes_per_s * machine.link_efficiency)
        return reduced_s + rows * machine.row_s + machine.overhead_s

    @property
    def _attention_per_s(self) -> float:
        """Operations per second of attention, which computes in bf16 for every format of weights."""
        machine = self.hardware
        return machine.flops_per_s * (machine.attention_efficiency or machine.compute_efficiency)

    @property
    def _bytes_per_s(self) -> float:
        return self.hardware.bytes_per_s * self.hardware.memory_efficiency


def encoded_tokens(step: Step) -> int:
    """Return the tokens of all inputs whose encoder runs in ``step``."""
    reads = [new.encoder for new in step.new_rows if new.encoder is not None]
    return sum(read.num_tokens for read in reads if read.encodes)


def _sums(model: Model) -> int:
    """Return the number of sums over the ranks of ``model`` in a step."""
    return 2 * len({layer.index for layer in model.layers}) if model.tp > 1 else 0


def _reduced_bytes(model: Model) -> float:
    """Return the bytes that one rank of ``model`` sends for a token."""
    return _sums(model) * model.hidden_size * WEIGHT_BYTES[BF16] * 2 * (model.tp - 1) / model.tp
