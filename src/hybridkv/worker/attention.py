"""Attention over pages in plain torch: the reference for faster kernels; and combining the results of ranks and parts.

    flattened queries   [ a a a | b | c c ]        query_start_loc 0 3 4 6
    request a           positions seq_len - 3 .. seq_len - 1 over the tokens 0 .. seq_len - 1 of its row of blocks

Scores, sums and outputs are float32 (float64 for float64 queries), for every dtype of the pages.

With context parallelism, each rank holds a share of the tokens and attends to its own slots:

    block_size 4, 2 ranks, interleave 2: a block covers 8 tokens, of which each rank holds 4
    tokens of a block   0 1 2 3 4 5 6 7
    held by rank        0 0 1 1 0 0 1 1        rank 0 keeps 0 1 4 5 in its slots 0 .. 3 of the block

The outputs and log-sum-exps of all ranks give the output over all tokens. For one query, with j over the keys of a
part:

    out = sum_j exp(s_j) v_j / sum_j exp(s_j)        lse = log sum_j exp(s_j)

The denominator of a part is ``exp(lse)``, so parts combine with these weights. FlashAttention (arXiv 2205.14135,
section 3.1) and Ring Attention (arXiv 2310.01889) use the same identity. A part without keys has out 0, lse -inf and
weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from hybridkv.arguments import at_least, check_fields, or_none
from hybridkv.errors import ConfigError, WorkerError
from hybridkv.specs import KVCacheSpec
from hybridkv.units import ceil_div
from hybridkv.worker.quantized import LayerPages

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContextShare:
    """The tokens that one rank holds: ``interleave`` tokens from ``rank * interleave``, of every ``size * interleave``.

    Attributes:
        size: context parallel ranks.
        rank: this rank, 0 .. size - 1.
        interleave: neighbouring tokens that one rank holds.

    Raises:
        ConfigError: a number is out of range.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        check_fields(self, at_least(1), "size", "interleave")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} does not exist: ranks are 0 .. {self.size - 1}")

    @classmethod
    def of_ranks(
        cls, *, dcp_size: int = 1, dcp_rank: int = 0, pcp_size: int = 1, pcp_rank: int = 0, interleave: int = 1
    ) -> ContextShare:
        """Return the share of a rank ``pcp_rank * dcp_size + dcp_rank`` of ``dcp_size * pcp_size``.

        Args:
            dcp_size: ranks of decode context parallelism.
            dcp_rank: this rank among them.
            pcp_size: ranks of prefill context parallelism.
            pcp_rank: this rank among them.
            interleave: neighbouring tokens that one rank holds.

        Raises:
            ConfigError: a rank does not exist.
        """
        for name, rank, size in (("dcp", dcp_rank, dcp_size), ("pcp", pcp_rank, pcp_size)):
            if not 0 <= rank < size:
                raise ConfigError(f"{name} rank {rank} of {size} does not exist: ranks are 0 .. {size - 1}")
        return cls(dcp_size * pcp_size, pcp_rank * dcp_size + dcp_rank, interleave)

    def tokens_of_block(self, block_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return int64[block_size], the token in each local slot of a block that covers ``block_size * size`` tokens.

        This is the inverse of ``off = o // (cp*I) * I + o % I`` (docs/contracts.md, 7).

        Args:
            block_size: slots of a block on this rank.
            device: device of the result.

        Raises:
            WorkerError: the interleave does not divide the block, so slots of different tokens would be the same.
        """
        if block_size < 1 or block_size % self.interleave:
            raise WorkerError(
                f"an interleave of {self.interleave} tokens does not divide blocks of {block_size}: choose a divisor"
            )
        at = torch.arange(block_size, device=device)
        turn = torch.div(at, self.interleave, rounding_mode="floor")
        return (turn * self.size + self.rank) * self.interleave + at % self.interleave


WHOLE: Final = ContextShare()
"""The share of a single rank: all tokens."""


def combine_over_ranks(
    out: torch.Tensor, lse: torch.Tensor, group: torch.distributed.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the partial results of all ranks. Every rank gets the same bits.

    This takes one all-gather of ``tokens * heads * (width + 1)`` elements from each rank, combined in the order of
    ranks. A reduction would send less, but ranks that sample tokens from the result must agree to the bit.

    Args:
        out: float[tokens, heads, width], over the slots of this rank.
        lse: float[tokens, heads], natural logarithms, in the dtype of ``out``.
        group: the process group of the context parallel ranks.

    Returns:
        ``out`` and ``lse`` over all tokens, in the given shapes.

    Raises:
        WorkerError: shapes or dtypes do not match.
    """
    if out.dim() != 3 or lse.shape != out.shape[:2] or lse.dtype != out.dtype:
        raise WorkerError(
            f"partial results of shapes {tuple(out.shape)} and {tuple(lse.shape)}, {out.dtype} and {lse.dtype}: "
            "give [tokens, heads, width] and [tokens, heads] of one dtype"
        )
    mine = torch.cat((out, lse[..., None]), dim=-1)
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(parts, mine, group=group)
    together = torch.stack(parts)
    return combine_partial(together[..., :-1], together[..., -1])


def combine_partial(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over parts of the keys. O(elements of out).

    Weights are relative to the largest, so that no exponential overflows.

    Args:
        out: float[parts, tokens, heads, width]; where ``lse`` is -inf it may hold anything.
        lse: float[parts, tokens, heads], natural logarithms.

    Returns:
        float[tokens, heads, width] and float[tokens, heads], over all parts.

    Raises:
        WorkerError: shapes do not match.
    """
    if out.dim() != 4 or lse.shape != out.shape[:3]:
        raise WorkerError(
            f"partial results of shapes {tuple(out.shape)} and {tuple(lse.shape)}: "
            "give [parts, tokens, heads, width] and [parts, tokens, heads]"
        )
    largest = lse.amax(0)
    largest = largest.masked_fill(largest == -torch.inf, 0)  # no part has keys: -inf - 0 is -inf, not NaN
    weights = torch.exp(lse - largest)
    total = weights.sum(0)
    weighted = (out * weights[..., None]).masked_fill((weights == 0)[..., None], 0)
    # a query that sees no key in any part gets 0 / 1, not 0 / 0
    combined = weighted.sum(0) / total.masked_fill(total == 0, 1)[..., None]
    return combined, largest + torch.log(total)


def with_sink(out: torch.Tensor, lse: torch.Tensor, sink_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a key to each head, with score ``sink_logits[head]`` and value 0. O(elements of out).

    A sink counts once: add it after parts have been combined, never to each of them.

    Args:
        out: float[tokens, heads, width].
        lse: float[tokens, heads], natural logarithms.
        sink_logits: float[heads], learned (gpt-oss model card, arXiv 2508.10925, section 2.2).

    Returns:
        ``out`` and ``lse`` with the sink, in the given shapes.

    Raises:
        WorkerError: shapes do not match.
    """
    if out.dim() != 3 or lse.shape != out.shape[:2] or sink_logits.shape != out.shape[1:2]:
        raise WorkerError(
            f"out, lse and sink_logits have shapes {tuple(out.shape)}, {tuple(lse.shape)} and "
            f"{tuple(sink_logits.shape)}: give [tokens, heads, width], [tokens, heads] and one logit for each head"
        )
    logits = sink_logits.to(lse.dtype)
    # exp(lse) / (exp(lse) + exp(logit)), exact also where both are large
    kept = torch.sigmoid(lse - logits).masked_fill(lse == -torch.inf, 0)
    return out * kept[..., None], torch.logaddexp(lse, logits)


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The tokens of a request that the query at position p sees.

    Attributes:
        causal: tokens up to p alone; False for all tokens (cross attention), without a window or chunk.
        window: the last ``window`` tokens alone, p included.
        chunk: tokens from ``p // chunk * chunk`` on alone.

    Raises:
        ConfigError: a size is below 1, or a window or chunk is not causal.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, or_none(at_least(1)), "window", "chunk")
        if not self.causal and (self.window is not None or self.chunk is not None):
            raise ConfigError(
                f"window {self.window} and chunk {self.chunk} end at the query's own token: give causal=True"
            )

    @classmethod
    def of(cls, spec: KVCacheSpec) -> AttentionMask:
        """Return the mask of a layer.

        Args:
            spec: the spec of the layer.
        """
        window, chunk = spec.mask
        return cls(window=window, chunk=chunk)

    def first_seen(self, positions: Int64) -> Int64:
        """Return the first token that each query sees; later queries see no earlier token.

        Args:
            positions: int64[n], positions of queries.
        """
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return bool, whether each query sees each token; the shapes broadcast.

        Args:
            queries: int64, positions of queries.
            keys: int64, positions of tokens.
        """
        if not self.causal:
            return keys >= 0
        near = keys <= queries
        if self.window is not None:
            near = near & (keys > queries - self.window)
        if self.chunk is not None:
            near = near & (keys >= torch.div(queries, self.chunk, rounding_mode="floor") * self.chunk)
        return near


CAUSAL: Final = AttentionMask()
"""Every token up to the query's own."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """The tokens that each request reads in one group. ``paged_batch`` makes one for each step; every layer uses it.

    Attributes:
        query_start_loc: request r has the queries query_start_loc[r] .. query_start_loc[r + 1] - 1 of the step.
        seq_lens: tokens of each request that may be read; its queries are the last of them.
        block_table: int64[requests, columns], block ids.
        block_size: slots of a block on this rank.
        num_blocks: block ids are below it.
        share: the tokens that the slots of this rank hold.
    """

    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: torch.Tensor
    block_size: int
    num_blocks: int
    share: ContextShare

    @property
    def num_tokens(self) -> int:
        """Queries of all requests."""
        return self.query_start_loc[-1]

    @property
    def covered_tokens(self) -> int:
        """Tokens of a block on all ranks together."""
        return self.block_size * self.share.size

    def columns_read(self, request: int, mask: AttentionMask) -> torch.Tensor:
        """Return int64[n], the columns of a request's row that its queries see; other columns may hold freed blocks.

        Args:
            request: its place in the batch.
            mask: the mask of the layer.
        """
        length, covered, device = self.seq_lens[request], self.covered_tokens, self.block_table.device
        first = length - (self.query_start_loc[request + 1] - self.query_start_loc[request])
        end = ceil_div(length, covered)
        live = min(int(mask.first_seen(np.array(max(first, 0)))) // covered, end)
        return torch.arange(live, end, device=device)

    def positions_in(self, columns: torch.Tensor) -> torch.Tensor:
        """Return int64[n, block_size], the token of a request in each slot of its columns.

        Args:
            columns: int64[n].
        """
        inside = self.share.tokens_of_block(self.block_size, columns.device)
        return columns[:, None] * self.covered_tokens + inside


def paged_batch(
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    *,
    block_size: int,
    num_blocks: int,
    share: ContextShare = WHOLE,
) -> PagedBatch:
    """Make a PagedBatch, checked. O(cells of the table); waits for the table's device.

    Args:
        query_start_loc: requests + 1 numbers that begin with 0 and never fall.
        seq_lens: tokens of each request that may be read.
        block_table: int[requests, columns], block ids.
        block_size: slots of a block on this rank.
        num_blocks: block ids must be below it.
        share: the tokens that the slots of this rank hold.

    Raises:
        WorkerError: counts do not match, a row has too few columns for its tokens, an id is out of range, or the
            interleave does not divide the block.
    """
    starts, lengths = tuple(int(start) for start in query_start_loc), tuple(int(length) for length in seq_lens)
    if block_table.dim() != 2 or not len(starts) - 1 == len(lengths) == len(block_table):
        raise WorkerError(
            f"{len(starts)} query starts, {len(lengths)} lengths and a table of shape {tuple(block_table.shape)}: give "
            "a length and a row for each request, and one start more than requests"
        )
    if starts[0] != 0 or any(start > end for start, end in pairwise(starts)):
        raise WorkerError(f"query_start_loc must begin with 0 and never fall, got {list(starts)}")
    share.tokens_of_block(block_size)  # raises if the interleave does not divide the block
    if lengths:
        held = block_table.shape[1] * block_size * share.size
        if min(lengths) < 0 or max(lengths) > held:
            raise WorkerError(
                f"seq_lens must lie in 0 .. {held}, the tokens of a row of the table: got {list(lengths)}"
            )
    table = block_table.to(torch.int64)
    if table.numel() and (int(table.min()) < 0 or int(table.max()) >= num_blocks):
        raise WorkerError(f"block ids must lie in 0 .. {num_blocks - 1}, got {int(table.min())} .. {int(table.max())}")
    return PagedBatch(starts, lengths, table, block_size, num_blocks, share)


def paged_attention(
    query: torch.Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    scale: float,
    *,
    mask: AttentionMask = CAUSAL,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over the tokens of this rank.

    Takes time O(tokens * tokens that the mask lets any query of the request see), and that memory for the largest
    request.

    Args:
        query: float[tokens, heads, width]; heads is a multiple of the KV heads, and neighbouring heads share a KV head.
        pages: the layer's keys and values, or codes with scales, which are read in the dtype of scores.
        batch: the tokens that each request reads.
        scale: factor of the scores.
        mask: the tokens that a query sees.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv 2408.00118, section 2); None for no
            cap.
        sink_logits: float[heads], as in ``with_sink``; on a single rank only.

    Returns:
        float[tokens, heads, value width], the outputs, and float[tokens, heads], the natural logarithms of the sums of
        exponentials; float32, or float64 for float64 queries. A query that sees no token gets 0 and -inf.

    Raises:
        WorkerError: shapes do not match, or one of several ranks has sinks.
    """
    check_layer(query, pages, batch, softcap=softcap, sink_logits=sink_logits)
    check_batch(batch, mask)
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros((*query.shape[:2], pages.widths[1]), dtype=dtype, device=query.device)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=dtype, device=query.device)
    for request, length in enumerate(batch.seq_lens):
        tokens = slice(batch.query_start_loc[request], batch.query_start_loc[request + 1])
        count = tokens.stop - tokens.start
        if not count:
            continue
        columns = batch.columns_read(request, mask)
        positions = batch.positions_in(columns).flatten()
        blocks = batch.block_table[request, columns]
        seen = mask.sees(torch.arange(length - count, length, device=positions.device)[:, None], positions[None])
        seen &= positions < length
        keys, values = (held.flatten(0, 1) for held in pages.take(blocks, dtype))
        out[tokens], lse[tokens] = _attend(query[tokens].to(dtype) * scale, keys, values, seen, softcap)
    return (out, lse) if sink_logits is None else with_sink(out, lse, sink_logits)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of one request.

    Tokens that no query sees may hold anything, NaN included: stale data of a block's former owner must not leak.

    Args:
        query: float[n, heads, width], scaled.
        keys: float[m, kv heads, width].
        values: float[m, kv heads, value width].
        seen: bool[n, m].
        softcap: as in ``paged_attention``.
    """
    n, heads, width = query.shape
    shared = query.reshape(n, keys.shape[1], heads // keys.shape[1], width)
    scores = torch.einsum("nkgw,mkw->nkgm", shared, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # a query that sees nothing has scores of -inf alone: subtract 0, so that its weights are 0 and not NaN
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    values = values.masked_fill(~seen.any(0)[:, None, None], 0)
    out = torch.einsum("nkgm,mkw->nkgw", weights, values)
    return out.reshape(n, heads, -1), lse.reshape(n, heads)


def check_layer(
    query: torch.Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    *,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> None:
    """Raise WorkerError unless the queries and pages of a layer fit a batch. O(1)."""
    if sink_logits is not None and batch.share.size > 1:
        raise WorkerError(
            f"sink_logits on one of {batch.share.size} ranks: each would count the sinks; combine the results of the "
            "ranks, then call with_sink"
        )
    if (pages.num_blocks, pages.block_size) != (batch.num_blocks, batch.block_size):
        raise WorkerError(
            f"the batch was made for {batch.num_blocks} blocks of {batch.block_size} tokens, the pages have "
            f"{pages.num_blocks} of {pages.block_size}: use the batch of this layer's group"
        )
    width, kv_heads = pages.widths[0], pages.num_kv_heads
    if query.dim() != 3 or len(query) != batch.num_tokens or query.shape[2] != width or query.shape[1] % kv_heads:
        raise WorkerError(
            f"queries of shape {tuple(query.shape)}: give {batch.num_tokens} tokens, a multiple of {kv_heads} heads, "
            f"and a width of {width}"
        )
    if softcap is not None and softcap <= 0:
        raise WorkerError(f"softcap must be positive, got {softcap}; None for no cap")


def check_batch(batch: PagedBatch, mask: AttentionMask) -> None:
    """Raise WorkerError if a request has more queries than tokens under a causal mask. O(requests)."""
    counts = [end - start for start, end in pairwise(batch.query_start_loc)]
    short = [r for r, (count, length) in enumerate(zip(counts, batch.seq_lens, strict=True)) if count > length]
    if mask.causal and short:
        raise WorkerError(
            f"request {short[0]} has {counts[short[0]]} queries but {batch.seq_lens[short[0]]} tokens: count the "
            "queries' own tokens in seq_lens"
        )
