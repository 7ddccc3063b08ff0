"""The Triton kernels: attention over pages, writes into slots, copies of blocks.

``triton_attention``, ``pages`` and ``copies`` import this module when they need it, and raise a ConfigError without
Triton.

Attention is one launch for all requests of a step, and a second one if keys were split:

    rows of a request       query 0 head 0, query 0 head 1, ... query 1 head 0 ...     the heads that share one KV head
    tile                    block_m rows that read together: a key is loaded once for all of them
    program                 (tile, split of its keys, KV head); the work list has its numbers
    split                   writes its result into ``part_out`` and ``part_lse``; combine_kernel combines them

Widths that are not powers of two are divided: 576 is 512 and 64, 80 is 64 and 16, 192 is 128 and 64. Exponentials are
to base 2, with scores multiplied by log2(e). Online softmax: Milakov and Gimelshein, arXiv 1805.02867.

A write launches one program for each (token, tile of its keys, then of its values). A copy, shift or zeroing launches
one for each (copy, layer, tile of a block). Neighbouring programs have neighbouring tiles.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl

from hybridkv.units import ceil_div
from hybridkv.worker.copies import CopyKernels, Shifts
from hybridkv.worker.pages import KVPages
from hybridkv.worker.triton_attention import TritonBatch

_DTYPES: Final = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# parts that the combining kernel loads at a time; chosen by hand
_PARTS: Final = 16
_LOG2E: Final = math.log2(math.e)
# larger than every position: no window, no chunk
_NOWHERE: Final = 1 << 30
# arguments that differ between steps or layers of one shape: specialised on their alignment, kernels would recompile
_OF_A_STEP: Final = ("table", "starts", "lengths", "work", "combined", "table_stride", "window", "chunk")


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _token_in(slot: tl.tensor, ranks: tl.constexpr, rank: tl.constexpr, interleave: tl.constexpr) -> tl.tensor:
    """Return the token of a request in each of its slots on this rank (attention.py)."""
    return slot if ranks == 1 else (slot // interleave * ranks + rank) * interleave + slot % interleave


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _slots_before(token: tl.tensor, ranks: tl.constexpr, rank: tl.constexpr, interleave: tl.constexpr) -> tl.tensor:
    """Return how many slots on this rank hold tokens before ``token``."""
    if ranks == 1:
        slots = token
    else:
        turn = interleave * ranks
        slots = token // turn * interleave + tl.minimum(tl.maximum(token % turn - rank * interleave, 0), interleave)
    return slots


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _loaded(
    at: tl.tensor, mask: tl.tensor, fp8: tl.constexpr, native: tl.constexpr, compute: tl.constexpr
) -> tl.tensor:
    """Load elements in the dtype of the computation. With ``fp8``, they are bytes of e4m3, which all dtypes hold."""
    held = tl.load(at, mask=mask, other=0)
    if fp8:
        if native:
            held = held.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            # the exponent's bias is 7, and 15 in float16: its bits there mean 2 ** -8 of the value, subnormal or not
            bits = ((held & 0x80).to(tl.uint16) << 8) | ((held & 0x7F).to(tl.uint16) << 7)
            value = bits.to(tl.float16, bitcast=True) * 256.0
            held = tl.where((held & 0x7F) == 0x7F, float("nan"), value)
    return held.to(compute)


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _with_sink(largest: tl.tensor, total: tl.tensor, logit: tl.tensor) -> tl.tensor:
    """Return the largest score and the sum of exponentials with one more key, and the factor for sums of other keys."""
    larger = tl.maximum(largest, logit)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    shrunk = tl.exp2(largest - base)
    return larger, total * shrunk + tl.exp2(logit - base), shrunk


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _natural(largest: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return the natural logarithm of a sum of powers of two."""
    return tl.where(total > 0, (largest + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453, float("-inf"))


@triton.jit(do_not_specialize=_OF_A_STEP)  # type: ignore[untyped-decorator]  # Triton is not typed
def attention_kernel(  # noqa: C901, PLR0912, PLR0915, PLR0917 - a kernel is one function without keywords
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    work: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    part_out: tl.tensor,
    part_lse: tl.tensor,
    factor: tl.tensor,
    cap: tl.tensor,
    value_scale: tl.tensor,
    window: tl.tensor,
    chunk: tl.tensor,
    table_stride: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    query_column: tl.tensor,
    key_block: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    key_column: tl.tensor,
    value_block: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    value_column: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    block_size: tl.constexpr,
    key_width: tl.constexpr,
    key_a: tl.constexpr,
    key_b: tl.constexpr,
    value_width: tl.constexpr,
    value_a: tl.constexpr,
    value_b: tl.constexpr,
    values_in_keys: tl.constexpr,
    ranks: tl.constexpr,
    rank: tl.constexpr,
    interleave: tl.constexpr,
    causal: tl.constexpr,
    bounded: tl.constexpr,
    capped: tl.constexpr,
    sunk: tl.constexpr,
    fp8: tl.constexpr,
    native: tl.constexpr,
    compute: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    """Compute attention of the rows of a tile over one split of the keys that any of them sees."""
    program = tl.program_id(0)
    head = program % kv_heads
    item = work + program // kv_heads * 5
    request, tile = tl.load(item), tl.load(item + 1)
    split, splits, part = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4).to(tl.int64)
    start = tl.load(starts + request)
    queries = tl.load(starts + request + 1) - start
    length = tl.load(lengths + request)

    row = tl.arange(0, block_m)
    of_query = (tile * block_m + row) // group
    of_head = head * group + (tile * block_m + row) % group
    live = of_query < queries
    position = length - queries + of_query
    token = (start + of_query).to(tl.int64)

    # tokens low .. high - 1 are each seen by a query of the tile
    low, high = tl.full([], 0, tl.int32), length
    row_low = tl.zeros([block_m], tl.int32)
    if causal:
        high = length - queries + tl.minimum((tile * block_m + block_m - 1) // group, queries - 1) + 1
        if bounded:
            lowest = length - queries + tile * block_m // group
            low = tl.maximum(tl.maximum(lowest - window + 1, lowest // chunk * chunk), 0)
            row_low = tl.maximum(position - window + 1, position // chunk * chunk)
    begin = _slots_before(low, ranks, rank, interleave) // block_n
    end = tl.cdiv(_slots_before(high, ranks, rank, interleave), block_n)
    turns = end - begin
    each = tl.cdiv(turns, splits)

    column_a = tl.arange(0, key_a)
    at_query = query + token[:, None] * query_token + of_head[:, None] * query_head
    asked = live[:, None] & (column_a < key_width)[None, :]
    query_a = tl.load(at_query + column_a[None, :] * query_column, mask=asked, other=0).to(compute)
    if key_b:
        column_b = key_a + tl.arange(0, key_b)
        asked = live[:, None] & (column_b < key_width)[None, :]
        query_b = tl.load(at_query + column_b[None, :] * query_column, mask=asked, other=0).to(compute)
    out_a = tl.arange(0, value_a)
    sum_a = tl.zeros([block_m, value_a], tl.float32)
    if value_b:
        out_b = value_a + tl.arange(0, value_b)
        sum_b = tl.zeros([block_m, value_b], tl.float32)
    largest = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)

    for turn in range(split * each, tl.minimum(split * each + each, turns)):
        slot = (turn + begin) * block_n + tl.arange(0, block_n)
        at = _token_in(slot, ranks, rank, interleave)
        held = (at >= low) & (at < high)
        block = tl.load(table + request.to(tl.int64) * table_stride + slot // block_size, mask=held, other=0)
        block = block.to(tl.int64)
        inner = slot % block_size
        at_key = keys + (block * key_block + inner * key_token + head * key_head)[:, None]
        inside = held[:, None] & (column_a < key_width)[None, :]
        tile_a = _loaded(at_key + column_a[None, :] * key_column, inside, fp8, native, compute)
        scores = tl.dot(query_a, tl.trans(tile_a), input_precision="tf32x3")
        if key_b:
            inside = held[:, None] & (column_b < key_width)[None, :]
            tile_b = _loaded(at_key + column_b[None, :] * key_column, inside, fp8, native, compute)
            scores = tl.dot(query_b, tl.trans(tile_b), scores, input_precision="tf32x3")
        scores *= factor
        if capped:
            # cap * tanh, which is 1 long before exp2 would overflow
            scores = cap * (1 - 2 / (tl.exp2(tl.minimum(scores, 64.0)) + 1))
        seen = held[None, :]
        if causal:
            seen = seen & (at[None, :] <= position[:, None])
            if bounded:
                seen = seen & (at[None, :] >= row_low[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        # a row that has seen nothing yet has scores of -inf alone: subtract 0, so that its weights are 0 and not NaN
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(largest - base)
        total = total * shrunk + tl.sum(weights, 1)
        largest = larger
        # tokens that no row sees are zeros, not loaded: stale data of a block's former owner must not leak
        if values_in_keys:
            tile_v = tile_a
        else:
            at_value = values + (block * value_block + inner * value_token + head * value_head)[:, None]
            inside = held[:, None] & (out_a < value_width)[None, :]
            tile_v = _loaded(at_value + out_a[None, :] * value_column, inside, fp8, native, compute)
        weighed = weights.to(compute)
        sum_a = tl.dot(weighed, tile_v, sum_a * shrunk[:, None], input_precision="tf32x3")
        if value_b:
            inside = held[:, None] & (out_b < value_width)[None, :]
            tile_w = _loaded(at_value + out_b[None, :] * value_column, inside, fp8, native, compute)
            sum_b = tl.dot(weighed, tile_w, sum_b * shrunk[:, None], input_precision="tf32x3")

    if splits > 1:
        whole = 1 / tl.where(total > 0, total, 1.0)
        at_part = (part * kv_heads + head) * block_m + row
        tl.store(part_lse + at_part, largest + tl.log2(tl.where(total > 0, total, 1.0)))
        # a name of its own: Triton wants one type for a name that both branches assign
        to_part = part_out + at_part[:, None] * value_width
        tl.store(to_part + out_a[None, :], sum_a * whole[:, None], mask=(out_a < value_width)[None, :])
        if value_b:
            tl.store(to_part + out_b[None, :], sum_b * whole[:, None], mask=(out_b < value_width)[None, :])
    else:
        shrunk = tl.full([block_m], 1.0, tl.float32)
        if sunk:
            logit = tl.load(sinks + of_head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            largest, total, shrunk = _with_sink(largest, total, logit)
        whole = value_scale * shrunk / tl.where(total > 0, total, 1.0)
        tl.store(lse + token * (kv_heads * group) + of_head, _natural(largest, total), mask=live)
        to = out + (token * out_token + of_head * out_head)[:, None]
        tl.store(to + out_a[None, :], sum_a * whole[:, None], mask=live[:, None] & (out_a < value_width)[None, :])
        if value_b:
            tl.store(to + out_b[None, :], sum_b * whole[:, None], mask=live[:, None] & (out_b < value_width)[None, :])


@triton.jit(do_not_specialize=_OF_A_STEP)  # type: ignore[untyped-decorator]  # Triton is not typed
def combine_kernel(  # noqa: PLR0917 - a kernel has no keywords
    part_out: tl.tensor,
    part_lse: tl.tensor,
    starts: tl.tensor,
    combined: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    value_scale: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    value_width: tl.constexpr,
    all_columns: tl.constexpr,
    sunk: tl.constexpr,
    block_m: tl.constexpr,
    parts_held: tl.constexpr,
) -> None:
    """Combine the parts of one row, each with its sum of exponentials as weight."""
    program = tl.program_id(0)
    head = program % kv_heads
    row = program // kv_heads % block_m
    item = combined + program // (kv_heads * block_m) * 4
    request, tile = tl.load(item), tl.load(item + 1)
    part, parts = tl.load(item + 2).to(tl.int64), tl.load(item + 3)
    start = tl.load(starts + request)
    of_query = (tile * block_m + row) // group
    of_head = head * group + (tile * block_m + row) % group
    if of_query < tl.load(starts + request + 1) - start:
        token = (start + of_query).to(tl.int64)
        column = tl.arange(0, all_columns)
        largest = tl.full([], float("-inf"), tl.float32)
        total = tl.full([], 0.0, tl.float32)
        summed = tl.zeros([all_columns], tl.float32)
        for first in range(0, parts, parts_held):
            one = first + tl.arange(0, parts_held)
            at_part = ((part + one) * kv_heads + head) * block_m + row
            found = tl.load(part_lse + at_part, mask=one < parts, other=float("-inf"))
            larger = tl.maximum(largest, tl.max(found, 0))
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp2(found - base)
            shrunk = tl.exp2(largest - base)
            inside = (one < parts)[:, None] & (column < value_width)[None, :]
            held = tl.load(part_out + at_part[:, None] * value_width + column[None, :], mask=inside, other=0.0)
            summed = summed * shrunk + tl.sum(held * weights[:, None], 0)
            total = total * shrunk + tl.sum(weights, 0)
            largest = larger
        shrunk = tl.full([], 1.0, tl.float32)
        if sunk:
            logit = tl.load(sinks + of_head).to(tl.float32) * 1.4426950408889634
            largest, total, shrunk = _with_sink(largest, total, logit)
        whole = value_scale * shrunk / tl.where(total > 0, total, 1.0)
        tl.store(lse + token * (kv_heads * group) + of_head, _natural(largest, total))
        tl.store(out + token * out_token + of_head * out_head + column, summed * whole, mask=column < value_width)


INTERPRETED: Final = not isinstance(attention_kernel, triton.runtime.JITFunction)
"""Whether these kernels run in Triton's interpreter, on the CPU."""


def launch_attention(
    query: torch.Tensor,
    pages: KVPages,
    batch: TritonBatch,
    *,
    scale: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Fill ``out`` and ``lse``, with the checked arguments of ``triton_paged_attention``."""
    tiles, mask, shape, share = batch.tiles, batch.mask, batch.shape, batch.batch.share
    scale *= pages.key_scale
    factor, cap = (scale * _LOG2E, 0.0) if softcap is None else (2 * scale * _LOG2E / softcap, softcap * _LOG2E)
    parts = (batch.parts, shape.num_kv_heads, tiles.rows)
    part_out = torch.empty((*parts, shape.value_width), device=out.device) if batch.parts else lse
    part_lse = torch.empty(parts, device=out.device) if batch.parts else lse
    sinks = lse if sink_logits is None else sink_logits.contiguous()
    keys, values = pages.keys, pages.values
    if shape.fp8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    alike = {
        "kv_heads": shape.num_kv_heads,
        "group": shape.group,
        "value_width": shape.value_width,
        "sunk": sink_logits is not None,
        "block_m": tiles.rows,
    }
    attention_kernel[len(batch.work) * shape.num_kv_heads,](
        query,
        keys,
        values,
        batch.table,
        batch.starts,
        batch.lengths,
        batch.work,
        sinks,
        out,
        lse,
        part_out,
        part_lse,
        factor,
        cap,
        pages.value_scale,
        mask.window or _NOWHERE,
        mask.chunk or _NOWHERE,
        batch.table.stride(0),
        *query.stride(),
        *keys.stride(),
        *values.stride(),
        *out.stride()[:2],
        block_size=batch.batch.block_size,
        key_width=shape.key_width,
        key_a=tiles.key[0],
        key_b=tiles.key[1],
        value_a=tiles.value[0],
        value_b=tiles.value[1],
        values_in_keys=tiles.values_in_keys,
        ranks=share.size,
        rank=share.rank,
        interleave=share.interleave,
        causal=mask.causal,
        bounded=mask.window is not None or mask.chunk is not None,
        capped=softcap is not None,
        fp8=shape.fp8,
        native=tiles.native_fp8,
        # the interpreter multiplies matrices of bfloat16 as if they were integers
        compute=_DTYPES[torch.float32 if INTERPRETED and shape.compute == torch.bfloat16 else shape.compute],
        block_n=tiles.keys,
        num_warps=tiles.warps,
        # pipeline: compute with one tile, load the next, and load the block ids of the one after that
        num_stages=3,
        **alike,
    )
    if batch.parts:
        combine_kernel[len(batch.combined) * tiles.rows * shape.num_kv_heads,](
            part_out,
            part_lse,
            batch.starts,
            batch.combined,
            sinks,
            out,
            lse,
            pages.value_scale,
            *out.stride()[:2],
            all_columns=triton.next_power_of_2(shape.value_width),
            parts_held=_PARTS,
            **alike,
        )


# elements of a program: a token of 8 heads of 128 has one tile of keys and one of values; of 8-byte words a tile is
# 8 KiB, which gives each of 128 threads 16 loads of 4 bytes or 4 of 16 in flight
_TILE: Final = 1024


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _e4m3(value: tl.tensor) -> tl.tensor:
    """Return the byte of the float8_e4m3fn nearest to a float32, ties to even; values too large become 448."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    largest = 0x43E00000  # 448
    held = tl.minimum(size, largest)
    # 3 of 23 bits of the mantissa stay, the exponent's bias falls from 127 to 7; a carry goes up into the exponent
    normal = ((held + 0x7FFFF + ((held >> 20) & 1)) >> 20) - (120 << 3)
    # below 2 ** -6 bytes count multiples of 2 ** -9, which is the last bit of a float32 near 2 ** 14
    steps = (held.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(held < 0x3C800000, steps, normal)
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _put(  # noqa: PLR0917 - a kernel has no keywords
    page: tl.tensor,
    states: tl.tensor,
    inverse: tl.tensor,
    first: tl.tensor,
    page_head: tl.tensor,
    page_column: tl.tensor,
    state_head: tl.tensor,
    state_column: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    fp8: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Copy elements ``first`` .. of one token from ``states`` to ``page``; both pointers are at the token's start."""
    at = first + tl.arange(0, tile)
    head, column = at // width, at % width
    inside = at < heads * width
    held = tl.load(states + head * state_head + column * state_column, mask=inside)
    if fp8:
        held = _e4m3(held.to(tl.float32) * inverse)
    tl.store(page + head * page_head + column * page_column, held, mask=inside)


@triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator]  # Triton is not typed
def write_kernel(  # noqa: PLR0917 - a kernel has no keywords
    slots: tl.tensor,
    limit: tl.tensor,
    keys: tl.tensor,
    key_states: tl.tensor,
    key_inverse: tl.tensor,
    key_block: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    key_column: tl.tensor,
    key_state_token: tl.tensor,
    key_state_head: tl.tensor,
    key_state_column: tl.tensor,
    values: tl.tensor,
    value_states: tl.tensor,
    value_inverse: tl.tensor,
    value_block: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    value_column: tl.tensor,
    value_state_token: tl.tensor,
    value_state_head: tl.tensor,
    value_state_column: tl.tensor,
    heads: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    block_size: tl.constexpr,
    fp8: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write a tile of one token's keys or values, and nothing for a token without a slot."""
    key_tiles = tl.cdiv(heads * key_width, tile)
    tiles = key_tiles + tl.cdiv(heads * value_width, tile)
    program = tl.program_id(0)
    token = (program // tiles).to(tl.int64)
    number = program % tiles
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < limit):
        block, inner = slot // block_size, slot % block_size
        if number < key_tiles:
            _put(
                keys + block * key_block + inner * key_token,
                key_states + token * key_state_token,
                key_inverse,
                number * tile,
                key_head,
                key_column,
                key_state_head,
                key_state_column,
                heads,
                key_width,
                fp8,
                tile,
            )
        else:
            _put(
                values + block * value_block + inner * value_token,
                value_states + token * value_state_token,
                value_inverse,
                (number - key_tiles) * tile,
                value_head,
                value_column,
                value_state_head,
                value_state_column,
                heads,
                value_width,
                fp8,
                tile,
            )


def launch_write(
    slots: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, float],
    values: tuple[torch.Tensor, torch.Tensor, float],
    *,
    fp8: bool,
) -> None:
    """Write ``keys`` and ``values``: (pages, values of the tokens, factor before rounding); integers unless ``fp8``."""
    _, block_size, heads, key_width = keys[0].shape
    tile = min(_TILE, triton.next_power_of_2(heads * max(key_width, values[0].shape[3])))
    tiles = sum(ceil_div(heads * one[0].shape[3], tile) for one in (keys, values))
    parts = [
        argument
        for view, states, factor in (keys, values)
        for argument in (view, states, factor, *view.stride(), *states.stride())
    ]
    write_kernel[len(slots) * tiles,](
        slots,
        keys[0].shape[0] * block_size,
        *parts,
        heads=heads,
        key_width=key_width,
        value_width=values[0].shape[3],
        block_size=block_size,
        fp8=fp8,
        tile=tile,
    )


# columns x channels a program holds between reading and writing
_SHIFT_TILE: Final = 2048


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _write_kernel(  # noqa: PLR0917 - a kernel has no keywords for its strides
    stack: tl.tensor,
    source: tl.tensor,
    destination: tl.tensor,
    layer_stride: tl.tensor,
    block_stride: tl.tensor,
    layers: tl.tensor,
    tiles: tl.tensor,
    elements: tl.tensor,
    zero: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Copy or zero a tile of a block."""
    program = tl.program_id(0).to(tl.int64)
    copy = program // (layers * tiles)
    base = stack + program // tiles % layers * layer_stride
    at = program % tiles * tile + tl.arange(0, tile)
    inside = at < elements
    to = base + tl.load(destination + copy) * block_stride + at
    if zero:
        tl.store(to, 0, mask=inside)
    else:
        tl.store(to, tl.load(base + tl.load(source + copy) * block_stride + at, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _shift_kernel(  # noqa: PLR0917 - a kernel has no keywords for its strides
    stack: tl.tensor,
    source: tl.tensor,
    destination: tl.tensor,
    bias: tl.tensor,
    layer_stride: tl.tensor,
    block_stride: tl.tensor,
    column_stride: tl.tensor,
    channel_stride: tl.tensor,
    layers: tl.tensor,
    tiles: tl.tensor,
    columns: tl.tensor,
    channels: tl.tensor,
    all_columns: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Copy the columns bias .. of a tile of channels to columns 0 .. ."""
    program = tl.program_id(0).to(tl.int64)
    copy = program // (layers * tiles)
    base = stack + program // tiles % layers * layer_stride
    column = tl.arange(0, all_columns)[:, None]
    channel = program % tiles * tile + tl.arange(0, tile)[None, :]
    skipped = tl.load(bias + copy)
    kept = (column < columns - skipped) & (channel < channels)
    cell = column * column_stride + channel * channel_stride
    first = tl.load(source + copy) * block_stride + skipped * column_stride
    values = tl.load(base + first + cell, mask=kept)
    # a block may shift into itself: all threads read before one writes; other programs have other channels
    tl.debug_barrier()
    tl.store(base + tl.load(destination + copy) * block_stride + cell, values, mask=kept)


def _write_blocks(stack: torch.Tensor, source: torch.Tensor, destination: torch.Tensor, *, zero: bool = False) -> None:
    """Copy blocks, or zero them, in one launch. ``stack``: [layers, blocks, elements] with contiguous elements."""
    layers, _, elements = stack.shape
    if not len(source):
        return
    tiles = ceil_div(elements, _TILE)
    strides = stack.stride(0), stack.stride(1)
    _write_kernel[(len(source) * layers * tiles,)](
        stack, source, destination, *strides, layers, tiles, elements, zero=zero, tile=_TILE
    )


def _shift_columns(stack: torch.Tensor, shifts: Shifts) -> None:
    """Copy conv states in one launch for all biases. ``stack``: [layers, blocks, columns, channels], any strides."""
    layers, _, columns, channels = stack.shape
    if not shifts.runs:
        return
    all_columns = triton.next_power_of_2(columns)
    tile = max(1, _SHIFT_TILE // all_columns)
    tiles = ceil_div(channels, tile)
    _shift_kernel[(len(shifts.source) * layers * tiles,)](
        stack,
        shifts.source,
        shifts.destination,
        shifts.bias,
        *stack.stride(),
        layers,
        tiles,
        columns,
        channels,
        all_columns=all_columns,
        tile=tile,
    )


TRITON: Final = CopyKernels(
    _write_blocks, _shift_columns, lambda stack, blocks: _write_blocks(stack, blocks, blocks, zero=True)
)
"""The operations on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1 before it is imported)."""
