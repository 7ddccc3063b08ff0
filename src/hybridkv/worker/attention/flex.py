"""Paged attention by torch's FlexAttention: one kernel for all requests of a step, where torch.compile has one.

    distinct blocks read   [ 7 | 3 | 5 ]             gathered once, whoever shares them
    column_of              request 0: 0 1 -1         which column of its row each of them is, -1 for none
                           request 1: 0 -1 1
    mask of (query, slot)  the query's request and the slot's block give a column, the column a position

Needs torch 2.9 for the log-sum-exp. Source of the mask over pages: PyTorch's FlexAttention documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from hybridkv.units import ceil_div
from hybridkv.worker.attention.attention_mask import CAUSAL, AttentionMask
from hybridkv.worker.attention.paged_attention import PagedBatch, check_batch, check_layer
from hybridkv.worker.attention.partial_attention import with_sink
from hybridkv.worker.pages.kv_pages import KVPages

QUERY_BLOCK: Final = 128
"""Queries that the kernel takes together: it skips blocks that none of their requests reads."""

Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class FlexBatch:
    """A PagedBatch under one mask, as FlexAttention reads it: made once a step, used by every layer with that mask.

    blocks: int64[n], the distinct blocks that are read. stale: bool[n, block_size], slots that hold no token of
    anybody. block_mask: over [queries, n * block_size].
    """

    batch: PagedBatch
    mask: AttentionMask
    blocks: torch.Tensor
    stale: torch.Tensor
    block_mask: BlockMask | None


def flex_batch(batch: PagedBatch, mask: AttentionMask = CAUSAL) -> FlexBatch:
    """``batch`` under ``mask``. O(requests * distinct blocks), and a wait for the device of the table."""
    table, requests = batch.block_table, range(len(batch.seq_lens))
    columns = [batch.columns_read(request, mask) for request in requests]
    held = [table[request, columns[request]] for request in requests]
    blocks = torch.unique(torch.cat([*held, table.new_empty(0)]))
    column_of = table.new_full((len(requests), len(blocks)), -1)
    stale = torch.ones(len(blocks), batch.block_size, dtype=torch.bool, device=table.device)
    for request in requests:
        at = torch.searchsorted(blocks, held[request])
        column_of[request, at] = columns[request]
        stale[at] &= batch.positions_in(columns[request]) >= batch.seq_lens[request]
    made = _block_mask(batch, mask, column_of) if batch.num_tokens and len(blocks) else None
    return FlexBatch(batch, mask, blocks, stale, made)


def flex_paged_attention(
    query: torch.Tensor,
    pages: KVPages,
    batch: FlexBatch,
    scale: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    kernel: Kernel = flex_attention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``paged_attention`` gives, but for the output's rounding to the dtype of the query.

    query, pages, scale, softcap, sink_logits: as there. kernel: ``torch.compile(flex_attention)`` where that gives
    log-sum-exps (on GPUs); by itself, torch runs it operation by operation, with all scores in memory.
    Raises WorkerError for shapes that do not match.
    """
    check_layer(query, pages, batch.batch, softcap=softcap, sink_logits=sink_logits)
    check_batch(batch.batch, batch.mask)
    dtype = torch.promote_types(query.dtype, torch.float32)
    if batch.block_mask is None:
        out = torch.zeros((*query.shape[:2], pages.values.shape[3]), dtype=dtype, device=query.device)
        lse = torch.full(query.shape[:2], -torch.inf, dtype=dtype, device=query.device)
    else:
        keys, values = (_gathered(view, batch, query.dtype) for view in (pages.keys, pages.values))
        made, aux = kernel(
            query.transpose(0, 1)[None].contiguous(),
            keys,
            values,
            score_mod=None if softcap is None else _capped(softcap),
            block_mask=batch.block_mask,
            scale=scale * pages.key_scale,
            enable_gqa=query.shape[1] != pages.num_kv_heads,
            return_aux=AuxRequest(lse=True),
        )
        out, lse = made[0].transpose(0, 1).to(dtype) * pages.value_scale, aux.lse[0].transpose(0, 1).to(dtype)
    return (out, lse) if sink_logits is None else with_sink(out, lse, sink_logits)


def _block_mask(batch: PagedBatch, mask: AttentionMask, column_of: torch.Tensor) -> BlockMask:
    """Which slots each query sees, and for each QUERY_BLOCK of queries the blocks that hold them."""
    size, covered, device = batch.block_size, batch.covered_tokens, column_of.device
    starts = torch.tensor(batch.query_start_loc, device=device)
    lengths = torch.tensor(batch.seq_lens, device=device)
    request_of = torch.repeat_interleave(torch.arange(len(lengths), device=device), starts.diff())
    position_of = torch.arange(batch.num_tokens, device=device) + (lengths - starts[1:])[request_of]
    token_of = batch.share.tokens_of_block(size, device)

    def sees(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        request = request_of[query]
        column = column_of[request, slot // size]
        position = column * covered + token_of[slot % size]
        return (column >= 0) & (position < lengths[request]) & mask.sees(position_of[query], position)

    rows = ceil_div(batch.num_tokens, QUERY_BLOCK)
    read = column_of.new_zeros((rows, column_of.shape[1]), dtype=torch.bool)
    for request, (start, end) in enumerate(pairwise(batch.query_start_loc)):
        read[start // QUERY_BLOCK : ceil_div(end, QUERY_BLOCK)] |= column_of[request] >= 0
    counts = read.sum(1, dtype=torch.int32)
    listed = torch.argsort(read.to(torch.uint8), dim=1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(
        counts[None, None],
        listed[None, None],
        BLOCK_SIZE=(QUERY_BLOCK, size),
        mask_mod=sees,
        seq_lengths=(batch.num_tokens, column_of.shape[1] * size),
    )


def _gathered(view: torch.Tensor, batch: FlexBatch, dtype: torch.dtype) -> torch.Tensor:
    """[1, kv heads, slots, width] of the blocks read; 0 where nobody's token lies: NaN times a weight of 0 is NaN."""
    copied = view[batch.blocks].to(dtype).masked_fill(batch.stale[..., None, None], 0)
    return copied.flatten(0, 1).transpose(0, 1)[None].contiguous()


def _capped(softcap: float) -> Kernel:
    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
