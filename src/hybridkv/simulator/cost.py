"""The modelled time of a step: a roofline over compute and memory, and fixed overheads.

    seconds = time_scale * (max(compute, memory) + reductions + rows * seconds of a row
                            + rows of several tokens * their seconds + overhead)
    compute = 2 * active parameters / tp * tokens / (FLOP/s * compute efficiency)
              + operations of attention and states / (FLOP/s * attention efficiency)
    memory  = (weights read / tp * bytes of a weight + cache bytes moved) / (bytes/s * memory efficiency)
    reductions = 2 * decoder layers * (tokens * hidden size * 2 bytes * 2 (tp - 1) / tp
                 / (bytes/s of the link * link efficiency) + latency)

``tokens`` counts the tokens that the step runs. Modelled durations decide only which requests run at the same time.
Hits, blocks and preemptions come from the real scheduler and cache manager.

Compute. A forward takes two operations per weight and token (Kaplan et al., arXiv 2001.08361, section 2.1). The
roofline is that of Williams, Waterman, Patterson, CACM 52(4), 2009. Fp8 weights compute at the fp8 rate if the hardware
has one. Int4 weights are unpacked and compute at the bf16 rate (Lin et al., AWQ, arXiv 2306.00978, section 4).

Weights read. A weight takes 4 bytes (fp32), 2 (bf16), 1 (fp8) or 0.5 (int4, without its scales). A step reads every
weight once. A mixture of experts reads at most the weights that its tokens can choose:
``min(parameters, active parameters * tokens)``.

Reductions. Tensor parallel ranks add up their partial results twice in each decoder layer, after its mixer and after
its MLP (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3). The model assumes bf16 and no overlap with compute.
A ring sends 2 (tp - 1) / tp of the bytes from each rank (Patarasuk, Yuan, J. Parallel Distrib. Comput. 69, 2009).

Encoders. In an encoder-decoder model, the encoder runs in the step that begins a request with a new input. The model
treats the parameters that are not active for a decoder token as the encoder's. A step that encodes reads them once
and multiplies them with the tokens of every input.

Left out: attention inside encoders; encoders of images and sound whose outputs the decoder reads as tokens; sampling.
Context parallel ranks share the cache and the attention, but each computes all operations of the weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Transfer
from hybridkv.errors import ConfigError
from hybridkv.models import Layer, Model
from hybridkv.planner import Plan
from hybridkv.simulator.hardware import BF16, FP8, H100, WEIGHT_BYTES, Hardware, weights_named
from hybridkv.spec_fields import Feature, require_supported
from hybridkv.specs import (
    AttentionSpec,
    Keeps,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RequestLimits,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)
from hybridkv.step import Cells, Copy, Csr, Step
from hybridkv.units import ceil_div

Spans = tuple[tuple[int, float], ...]
"""Pairs (tokens of a window or chunk, amount in all layers of that length), sorted. Amounts: bytes or operations."""
States = tuple[tuple[tuple[int, int], float], ...]
"""Pairs ((tokens of a group, most groups that a query reads or 0 for all), amount of a group in all layers), sorted."""
_Key = TypeVar("_Key", int, tuple[int, int])


@dataclass(frozen=True, slots=True)
class CacheTraffic:
    """Cache bytes that a step moves through the memory of one rank; build it with ``of``.

    A row has ``c`` computed tokens and runs ``s`` more; a token takes ``b`` bytes in a layer. A step reads, for each
    row and layer:

        full attention, MLA     (c + s) * b                          every token of the request
        a state for t tokens    (c + s) // t * b                     states of whole groups, b bytes each
        at most k states        min((c + s) // t, s * k) * b         each query reads those that an indexer chooses
        rows of a compressor    s * (1 + W / t) * b                  written once, read by W / t groups of t tokens
        ring                    its block                            independent of c and s
        window of W             min(c + s, s + W - 1) * b            s queries, each with the W - 1 tokens before it
        chunk of C              (c % C + s) * b                      from the start of the chunk that contains token c
        attention sinks         sink_len * b                         in addition to the layer's other tokens
        cross attention         encoder tokens * b                   independent of s
        recurrent layer         2 * its state                        one read and one write
        encoder-only            0                                    keeps no data between steps

    Each block copy that the Step lists moves 2 * content of a block of its group. The masks in hybridkv.specs define
    these reads. ``t`` is the spec's ``tokens_per_state`` and ``k`` the layer's ``top_states``: ``index_topk`` in
    DeepSeek-V3.2 (arXiv 2512.02556, section 2.1) and DeepSeek-V4. The indexer itself reads all its keys. A compressor
    keeps rows in a window of ``W`` tokens and pools ``t`` (``pools``; CompressorStateCache of vLLM). Each layer of
    ``read_by`` reads the entry again. Four simplifications:

    * All queries of a row read keys and values once. FlashAttention (arXiv 2205.14135) reads them once per tile of
      queries.
    * A scan carries its state through a chunk of the prompt without memory traffic. The chunked scan of Mamba-2 (arXiv
      2405.21060, section 6) writes one state per tile.
    * Queries of one row choose different states while there are any.
    * New tokens count once, as reads. A row that begins at token 0 counts like any other, although its state is
      cleared instead of read.

    If a kernel masks a window but the cache keeps all tokens (windows managed as full attention), a step reads the
    window. Each context parallel rank holds and reads 1 / (dcp * pcp) of a request's tokens, and the whole of states,
    rings, encoder outputs and attention with ``dcp_sharded=False``. Padding of pages is not read.

    Attributes:
        token_bytes: bytes of a token in the layers that read every token.
        windows: bytes of a token, by the window in which it is read.
        chunks: bytes of a token, by the chunk in which it is read.
        row_bytes: bytes of a row, independent of its length: states, rings and encoder outputs.
        copy_bytes: bytes of one copied block, by group.
        states: bytes of the states of a group of tokens, by the tokens and the most groups that a query reads.
        new_token_bytes: bytes of a token that the step runs, independent of its context.
    """

    token_bytes: float = 0.0
    windows: Spans = ()
    chunks: Spans = ()
    row_bytes: float = 0.0
    copy_bytes: tuple[int, ...] = ()
    states: States = ()
    new_token_bytes: float = 0.0

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the traffic of the plan's model. Every request counts with an encoder input of the largest size.

        Args:
            plan: the plan of model and cache.
        """
        _require_known(plan)
        limits = plan.limits
        windows, chunks = defaultdict[int, float](float), defaultdict[int, float](float)
        states = defaultdict[tuple[int, int], float](float)
        tokens = rows = new_tokens = 0.0
        for layer in plan.model.layers:
            spec = layer.spec
            of_rank = (1 + len(layer.read_by)) * spec.content_bytes / spec.block_size / spec.ranks(limits)
            window, chunk = spec.mask
            if layer.pools:
                new_tokens += (1 + (window or layer.pools) / layer.pools) * of_rank
            elif window is not None:
                windows[window] += of_rank
            elif chunk is not None:
                chunks[chunk] += of_rank
            elif (groups := _groups_read(layer)) is not None:
                states[groups] += of_rank * groups[0]
            elif spec.keeps is Keeps.TOKENS:
                tokens += of_rank
            else:
                rows += _row_bytes(spec, limits)
            if isinstance(spec, SinkFullAttentionSpec):
                rows += spec.sink_len * of_rank
        copies = tuple(2 * group.content_bytes for group in plan.config.groups)
        return cls(tokens, _spans(windows), _spans(chunks), rows, copies, _spans(states), new_tokens)

    def bytes_of(self, step: Step) -> float:
        """Return the bytes that a step moves. O(rows + copies).

        Args:
            step: the step; only its rows, their computed and scheduled tokens, and its copies matter.
        """
        computed, scheduled = step.num_computed.astype(np.int64), step.num_scheduled.astype(np.int64)
        context = computed + scheduled
        moved = self.token_bytes * int(context.sum()) + self.row_bytes * len(step)
        moved += self.new_token_bytes * int(scheduled.sum())
        for (tokens, most), group_bytes in self.states:
            found = context // tokens
            moved += group_bytes * int((np.minimum(found, scheduled * most) if most else found).sum())
        for window, token_bytes in self.windows:
            moved += token_bytes * int(np.minimum(context, scheduled + window - 1).sum())
        for chunk, token_bytes in self.chunks:
            moved += token_bytes * int((computed % chunk + scheduled).sum())
        return moved + sum(self.copy_bytes[copy.group] for copy in step.copies)

    def decode_bytes(
        self, computed: NDArray[np.int64], steps: int, copies: Sequence[Transfer | Copy] = ()
    ) -> NDArray[np.float64]:
        """Return the bytes of each of several decode steps, float64[steps]; bit-equal to ``bytes_of``.

        Each step runs one token of each row. O(rows + steps); O(rows * steps) for chunks, and for rows shorter than a
        window.

        Args:
            computed: computed tokens of each row before the first step, int64[rows].
            steps: number of steps.
            copies: block copies that every step repeats.
        """
        more = np.arange(1, steps + 1)
        rows = len(computed)
        context = (int(computed.sum()) + rows * more).astype(np.float64)
        moved: NDArray[np.float64] = self.token_bytes * context + self.row_bytes * rows
        moved += self.new_token_bytes * rows
        for (tokens, most), group_bytes in self.states:
            moved += group_bytes * state_reads(computed, more, tokens, most)
        for window, token_bytes in self.windows:
            moved += token_bytes * window_reads(computed, more, window)
        for chunk, token_bytes in self.chunks:
            moved += token_bytes * chunk_reads(computed, more, chunk)
        moved += sum(self.copy_bytes[copy.group] for copy in copies)
        return moved


def window_reads(computed: NDArray[np.int64], more: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """Return the tokens that all rows read in decode steps of a window layer, int64[steps]. O(short rows * steps).

    Args:
        computed: computed tokens of each row before the first step, int64[rows].
        more: numbers of the steps, counted from 1, int64[steps].
        window: tokens of the window.
    """
    short = computed[computed < window]
    read: NDArray[np.int64] = np.minimum(short[:, None] + more, window).sum(axis=0)
    return read + (len(computed) - len(short)) * window


def chunk_reads(computed: NDArray[np.int64], more: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """Return the tokens that all rows read in decode steps of a chunk layer, int64[steps]. O(rows * steps).

    Args:
        computed: computed tokens of each row before the first step, int64[rows].
        more: numbers of the steps, counted from 1, int64[steps].
        chunk: tokens of a chunk.
    """
    read: NDArray[np.int64] = ((computed[:, None] + (more - 1)) % chunk + 1).sum(axis=0)
    return read


def state_reads(computed: NDArray[np.int64], more: NDArray[np.int64], tokens: int, most: int) -> NDArray[np.int64]:
    """Return the groups whose states all rows read in decode steps, int64[steps]. O(rows below the limit * steps).

    Args:
        computed: computed tokens of each row before the first step, int64[rows].
        more: numbers of the steps, counted from 1, int64[steps].
        tokens: tokens of a group.
        most: most groups that a query reads; 0 for all.
    """
    short = computed[computed < most * tokens] if most else computed
    found = (short[:, None] + more) // tokens
    read: NDArray[np.int64] = (np.minimum(found, most) if most else found).sum(axis=0)
    return read + (len(computed) - len(short)) * most


def _row_bytes(spec: KVCacheSpec, limits: RequestLimits) -> float:
    """Return the bytes that a row reads and writes in a layer without tokens of its request."""
    if spec.keeps is Keeps.ENCODER:
        return limits.max_encoder_tokens * (spec.content_bytes / spec.block_size)
    return spec.content_bytes * {Keeps.STATE: 2, Keeps.RING: 1}.get(spec.keeps, 0)


def _groups_read(layer: Layer) -> tuple[int, int] | None:
    """Return the tokens of a group and the most groups that a query reads, 0 for all; ``None`` for plain layers.

    With ``tokens_per_state`` of m / n, a group of m tokens has n states.
    """
    if not isinstance(layer.spec, AttentionSpec) or layer.spec.keeps is not Keeps.TOKENS:
        return None
    rate = Fraction(layer.spec.tokens_per_state)
    if rate == 1 and not layer.top_states:
        return None
    return rate.numerator, ceil_div(layer.top_states, rate.denominator)


def _spans(amounts: Mapping[_Key, float]) -> tuple[tuple[_Key, float], ...]:
    return tuple(sorted(amounts.items()))


_STATE_OPERATIONS: Final = 6
"""Operations for each element of a state and each token."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of attention and of recurrent states on one rank; build it with ``of``.

        attention   2 (width of a key + width of a value) * query heads for each pair of a token and a token that it
                    sees: a product and a sum for each element (Kaplan et al., arXiv 2001.08361, section 2.1, count the
                    half of the keys); 4 * width for absorbed latents (DeepSeek-V2, arXiv 2405.04434, section 2.1.2)
        compressed  the same for each state of a whole group of tokens, at most ``top_states`` for each token
        indexer     2 * width of a key * heads of the indexer for each key: the scores of DeepSeek-V3.2 (arXiv
                    2512.02556, section 2.1). The width includes the bytes of scales, 4 for each 128
        states      6 for each element and token: decay, write and read (Mamba-2, arXiv 2405.21060, section 2.1)

    The mask defines the pairs, so a causal prompt has half of its square. Decode context parallel ranks are tensor
    parallel ranks: each has the query heads of all of them and its part of the tokens, which gives the same count.
    Prefill context parallel ranks share the queries of a prompt. Only the decoder's reads of an encoder output count.
    Attention counts no operations if the number of query heads is unknown, and in layers that share the cache of
    another layer, unless its ``read_by`` names them. Compressors and rings count none: they pool a few rows.

    Attributes:
        pair: operations for a token and one token that it sees, in all layers that keep every token.
        windows: operations for such a pair, by the tokens of the window.
        chunks: operations for such a pair, by the tokens of the chunk.
        token: operations for one token that do not depend on its context.
        states: operations for a token and the states of a group, by the tokens of a group and the most groups.
    """

    pair: float = 0.0
    windows: Spans = ()
    chunks: Spans = ()
    token: float = 0.0
    states: States = ()

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the operations of the plan's model.

        Args:
            plan: the plan of model and cache.
        """
        _require_known(plan)
        limits, heads = plan.limits, plan.model.query_heads / plan.model.tp
        windows, chunks = defaultdict[int, float](float), defaultdict[int, float](float)
        states = defaultdict[tuple[int, int], float](float)
        pair = token = 0.0
        for layer in plan.model.layers:
            spec = layer.spec
            if isinstance(spec, MambaSpec):
                token += _STATE_OPERATIONS * sum(float(np.prod(shape)) for shape in spec.shapes)
                continue
            if not isinstance(spec, AttentionSpec) or layer.pools:
                continue
            of_state = _of_pair(spec) * heads
            if (
                layer.index_heads or Feature.INDEXER in spec.features
            ):  # decode context parallel ranks have the same heads, and a part of the keys
                ranks = limits.dcp if spec.is_sharded else 1
                of_state = 2 * spec.elements_per_token * layer.index_heads / ranks
            of_state *= (1 + len(layer.read_by)) / (1 if spec.keeps is Keeps.ENCODER else limits.pcp)
            of_pair = of_state / float(spec.tokens_per_state)
            window, chunk = spec.mask
            if window is not None:
                windows[window] += of_pair
            elif chunk is not None:
                chunks[chunk] += of_pair
            elif spec.keeps is Keeps.ENCODER:
                token += of_pair * limits.max_encoder_tokens
            elif (groups := _groups_read(layer)) is not None:
                states[groups] += of_pair * groups[0]
            elif spec.keeps is Keeps.TOKENS:
                pair += of_pair
        return cls(pair, _spans(windows), _spans(chunks), token, _spans(states))

    def of_rows(self, computed: NDArray[np.int64], scheduled: NDArray[np.int64]) -> float:
        """Return the operations of one step. O(rows).

        Args:
            computed: computed tokens of each row before the step, int64[rows].
            scheduled: tokens of each row that the step runs, int64[rows].
        """
        done = computed + scheduled
        made = self.token * int(scheduled.sum()) + self.pair * int((_triangle(done) - _triangle(computed)).sum())
        for window, of_pair in self.windows:
            made += of_pair * int((_windowed(done, window) - _windowed(computed, window)).sum())
        for (tokens, most), of_group in self.states:
            made += of_group * int((_grouped(done, tokens, most) - _grouped(computed, tokens, most)).sum())
        for chunk, of_pair in self.chunks:
            made += of_pair * int((_chunked(done, chunk) - _chunked(computed, chunk)).sum())
        return made

    def of_decodes(self, computed: NDArray[np.int64], steps: int) -> NDArray[np.float64]:
        """Return the operations of each of several decode steps, float64[steps]; bit-equal to ``of_rows``.

        Each step runs one token of each row. O(rows + steps); O(rows * steps) for chunks, and for rows shorter than a
        window.

        Args:
            computed: computed tokens of each row before the first step, int64[rows].
            steps: number of steps.
        """
        more = np.arange(1, steps + 1)
        context = (int(computed.sum()) + len(computed) * more).astype(np.float64)
        made: NDArray[np.float64] = self.token * len(computed) + self.pair * context
        for window, of_pair in self.windows:
            made += of_pair * window_reads(computed, more, window)
        for (tokens, most), of_group in self.states:
            made += of_group * state_reads(computed, more, tokens, most)
        for chunk, of_pair in self.chunks:
            made += of_pair * chunk_reads(computed, more, chunk)
        return made


NO_OPERATIONS: Final = Operations()


_SUPPORTED: Final = frozenset(
    {
        *(Feature.RATE, Feature.RING, Feature.INDEXER, Feature.RETAINED, Feature.PACKED, Feature.REPLICATED),
        Feature.QUANTIZED,
    }
)
"""Features of specs that the formulas of bytes and operations know. A new feature may need a formula of its own."""


def _require_known(plan: Plan) -> None:
    """Raise UnsupportedModelError for features of specs that the formulas of bytes and operations do not know."""
    require_supported([layer.spec for layer in plan.model.layers], "the replay's cost model", _SUPPORTED)


def _of_pair(spec: AttentionSpec) -> float:
    """Return the operations of one query head for one pair of tokens."""
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return 4 * spec.head_size
    return 2 * spec.elements_per_token


def _triangle(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pairs of the first ``tokens`` tokens: each sees itself and the tokens before it."""
    return tokens * (tokens + 1) // 2


def _windowed(tokens: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """Return the pairs of the first ``tokens`` tokens, each with the tokens in its window."""
    after_window: NDArray[np.int64] = np.maximum(tokens - window, 0) * window
    return _triangle(np.minimum(tokens, window)) + after_window


def _grouped(tokens: NDArray[np.int64], size: int, most: int) -> NDArray[np.int64]:
    """Return the pairs of the first ``tokens`` tokens, each with the whole groups of ``size`` tokens up to it.

    A token sees at most ``most`` groups; 0 for all. Group q is whole at token q * size, and size tokens see q groups.
    """
    below = np.minimum(tokens, most * size) if most else tokens
    groups = below // size
    pairs: NDArray[np.int64] = size * _triangle(groups - 1) + groups * (below % size + 1)
    return pairs + most * (tokens - below)


def _chunked(tokens: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """Return the pairs of the first ``tokens`` tokens, each with the earlier tokens of its chunk."""
    return tokens // chunk * (chunk * (chunk + 1) // 2) + _triangle(tokens % chunk)


@dataclass(frozen=True, slots=True)
class StepCost:
    """The modelled seconds of a Step for one model on one kind of machine; build it with ``of``.

    Attributes:
        parameters: weights of one rank, including an encoder's.
        active_parameters: weights of one rank that are multiplied with each decoder token.
        traffic: cache bytes that one rank moves.
        hardware: the machine of one rank.
        time_scale: factor of all durations; 0: steps take no time.
        weights: format of the weights, a name of WEIGHT_BYTES.
        reduced_bytes: bytes that a rank sends to other ranks for each token.
        sums: sums over all ranks in a step; each pays the link's latency.
        operations: operations of attention and states on one rank.
        encoder_parameters: weights of one rank that are multiplied with encoder tokens only.
    """

    parameters: float
    active_parameters: float
    traffic: CacheTraffic
    hardware: Hardware = H100
    time_scale: float = 1.0
    weights: str = BF16
    reduced_bytes: float = 0.0
    sums: int = 0
    operations: Operations = NO_OPERATIONS
    encoder_parameters: float = 0.0

    @classmethod
    def of(cls, plan: Plan, *, hardware: Hardware = H100, time_scale: float = 1.0, weights: str = BF16) -> Self:
        """Return the cost of the plan's model on one kind of machine; tensor parallel ranks work at the same time.

        Args:
            plan: the plan of model and cache.
            hardware: the machine of one rank.
            time_scale: factor of all durations; 0: steps take no time.
            weights: format of the weights, a name of WEIGHT_BYTES.

        Raises:
            ConfigError: for a negative time_scale, an unknown format, or a model whose weights were not counted.
        """
        if not 0 <= time_scale < float("inf"):
            raise ConfigError(f"time_scale must be 0 or more and finite, got {time_scale}")
        model = plan.model
        if not model.parameters and time_scale:
            raise ConfigError(
                f"the number of weights of {model.name} is unknown, and the time of a step depends on it: set it with "
                "--set parameters=N --set active_parameters=N, or replay without times (--time-scale 0)"
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
            step: the step; only its rows, their tokens and its copies matter.
        """
        weights_s, weight_bytes = self._bounds(step.num_tokens, encoded_tokens(step))
        made = self.operations.of_rows(step.num_computed.astype(np.int64), step.num_scheduled.astype(np.int64))
        compute_s = weights_s + made / self._attention_per_s
        memory_s = (weight_bytes + self.traffic.bytes_of(step)) / self._bytes_per_s
        fixed_s = self._not_overlapped_s(step.num_tokens, len(step), int((step.num_scheduled > 1).sum()))
        return self.time_scale * (max(compute_s, memory_s) + fixed_s)

    def decode_seconds(
        self, computed: NDArray[np.int64], steps: int, copies: Sequence[Transfer | Copy] = ()
    ) -> NDArray[np.float64]:
        """Return the seconds of each of several decode steps, float64[steps]; bit-equal to ``seconds``.

        Each step runs one token of each row. O(rows + steps); O(rows * steps) for chunks, and for rows shorter than a
        window.

        Args:
            computed: computed tokens of each row before the first step, int64[rows].
            steps: number of steps.
            copies: block copies that every step repeats.
        """
        rows = len(computed)
        weights_s, weight_bytes = self._bounds(rows)
        compute_s = weights_s + self.operations.of_decodes(computed, steps) / self._attention_per_s
        memory_s = (weight_bytes + self.traffic.decode_bytes(computed, steps, copies)) / self._bytes_per_s
        busy_s: NDArray[np.float64] = np.maximum(compute_s, memory_s) + self._not_overlapped_s(rows, rows)
        return self.time_scale * busy_s

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes that move to or from host memory in a second of simulated time; infinite if it takes no time."""
        machine = self.hardware
        reached = machine.host_bytes_per_s * machine.host_efficiency
        return reached / self.time_scale if self.time_scale else math.inf

    def prompt_tokens_per_s(self, tokens: int) -> float:
        """Return the tokens per second of simulated time of a step that computes the first tokens of one prompt.

        Args:
            tokens: tokens of the step.
        """
        rows = np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, tokens, np.int32)
        ids = Csr(np.array([0, tokens]), np.zeros(tokens, np.int32))
        step = Step(0, -1, *rows, np.zeros(1, np.bool_), ids, Csr.empty(1), Cells.empty(), rows[0][:0])
        seconds = self.seconds(step)
        return tokens / seconds if seconds else math.inf

    def work(self, tokens: int, encoded: int = 0) -> tuple[float, float]:
        """Return the work of the weights on one rank in a step.

        Args:
            tokens: decoder tokens of the step.
            encoded: encoder tokens of the step.

        Returns:
            The operations of the weights, and the bytes of weights that the step reads.
        """
        read = min(self.parameters - self.encoder_parameters, self.active_parameters * tokens)
        read += self.encoder_parameters if encoded else 0
        made = 2 * (self.active_parameters * tokens + self.encoder_parameters * encoded)
        return made, read * WEIGHT_BYTES[self.weights]

    def _bounds(self, tokens: int, encoded: int = 0) -> tuple[float, float]:
        """Return the seconds of the weights' operations, and the bytes of weights that the step reads."""
        machine = self.hardware
        peak = machine.fp8_flops_per_s if self.weights == FP8 and machine.fp8_flops_per_s else machine.flops_per_s
        flops, read = self.work(tokens, encoded)
        return flops / (peak * machine.compute_efficiency), read

    def _not_overlapped_s(self, tokens: int, rows: int, prompt_rows: int = 0) -> float:
        """Return the seconds that do not overlap with compute or memory: sums over ranks, rows, and the step itself."""
        machine = self.hardware
        reduced_s = self.sums * machine.link_latency_s
        if machine.link_bytes_per_s:
            reduced_s += self.reduced_bytes * tokens / (machine.link_bytes_per_s * machine.link_efficiency)
        return reduced_s + rows * machine.row_s + prompt_rows * machine.prompt_row_s + machine.overhead_s

    @property
    def _attention_per_s(self) -> float:
        """Operations per second of attention and states, which compute in bf16 for every format of weights."""
        machine = self.hardware
        return machine.flops_per_s * (machine.attention_efficiency or machine.compute_efficiency)

    @property
    def _bytes_per_s(self) -> float:
        return self.hardware.bytes_per_s * self.hardware.memory_efficiency


def encoded_tokens(step: Step) -> int:
    """Return the encoder tokens that ``step`` computes. O(rows that begin).

    Args:
        step: the step.
    """
    reads = [new.encoder for new in step.new_rows if new.encoder is not None]
    return sum(read.num_tokens for read in reads if read.encodes)


def _sums(model: Model) -> int:
    """Return the number of sums over the tensor parallel ranks of ``model`` in a step."""
    return 2 * len({layer.index for layer in model.layers}) if model.tp > 1 else 0


def _reduced_bytes(model: Model) -> float:
    """Return the bytes that one rank of ``model`` sends for each token."""
    return _sums(model) * model.hidden_size * WEIGHT_BYTES[BF16] * 2 * (model.tp - 1) / model.tp
