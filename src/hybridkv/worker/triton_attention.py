"""Paged attention by a Triton kernel of ours: decode rows, drafts and prefill chunks of a step in one launch.

    rows of request r    its queries times the query heads of one KV head, in that order; a *tile* is some of them
    work                 (request, tile, split of its keys, splits, part): what each program of a KV head does
    combined             (request, tile, first part, parts) of tiles whose keys were split: flash decoding

Keys are split where there are fewer tiles than a GPU wants programs, so that one long request keeps all of it busy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker.attention import CAUSAL, AttentionMask, PagedBatch, check_batch, check_layer
from hybridkv.worker.pages import KVPages, load_kernels

# keys below which a program costs more than it saves
_FEWEST_KEYS: Final = 256
# programs of every multiprocessor: as many as it holds at a time, and as many that wait
_PROGRAMS: Final = 4
# keys and values that a program loads at a time; with those on their way two programs fit a multiprocessor
_TILE_BYTES: Final = 40 << 10
_FP8: Final = torch.float8_e4m3fn
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What layers must have in common to be read with one prepared batch.

    latent: values are the first columns of the keys. query, cache: dtypes.
    """

    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    latent: bool
    query: torch.dtype
    cache: torch.dtype

    def require_supported(self) -> None:
        """Raise WorkerError for what the kernel does not compute with.

        It takes queries of float32, bfloat16 or float16, over pages of the same or float8_e4m3fn.
        """
        if self.query not in _FLOATS or self.cache not in (*_FLOATS, _FP8):
            raise WorkerError(
                f"queries of {self.query} over pages of {self.cache}: the Triton kernel takes float32, bfloat16 and "
                "float16, pages of float8_e4m3fn too; use paged_attention"
            )
        if self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise WorkerError(f"{self.num_heads} query heads are no multiple of {self.num_kv_heads} KV heads")

    @classmethod
    def of(cls, num_heads: int, pages: KVPages, query: torch.dtype) -> Self:
        """Of a layer with ``num_heads`` query heads over ``pages``."""
        keys, values = pages.keys, pages.values
        latent = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
        return cls(num_heads, pages.num_kv_heads, keys.shape[3], values.shape[3], latent, query, keys.dtype)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def fp8(self) -> bool:
        """Whether pages hold float8."""
        return self.cache == _FP8

    @property
    def compute(self) -> torch.dtype:
        """Of the factors of products, which are summed in float32."""
        return self.query if self.fp8 else torch.promote_types(self.query, self.cache)


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a program holds at a time: ``rows`` of a request over ``keys`` keys.

    key, value: (first, rest) columns, powers of two that hold a width: 192 is 128 and 64. values_in_keys: the first
    columns of a tile of keys are its values, so they are loaded once. native_fp8: the device converts float8.
    """

    rows: int
    keys: int
    key: tuple[int, int]
    value: tuple[int, int]
    values_in_keys: bool
    native_fp8: bool
    warps: int

    @classmethod
    def of(cls, shape: LayerShape, most_rows: int, device: torch.device) -> Self:
        """most_rows: of the request with most of them."""
        key, value, size = _columns(shape.key_width), _columns(shape.value_width), shape.compute.itemsize
        values_in_keys = shape.latent and value == (key[0], 0) and shape.value_width == key[0]
        key_bytes = size * (sum(key) + (0 if values_in_keys else sum(value)))
        # fewer where products are of float32: three of tensor cores each, and their factors in registers
        most = 64 if size == 2 else 32 if sum(key) <= 256 else 16
        rows, keys = 16, 64
        while rows < min(most_rows, most):
            rows *= 2
        while keys > 16 and keys * key_bytes > _TILE_BYTES:
            keys //= 2
        # Ada, Hopper and later have an instruction for it
        native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        return cls(rows, keys, key, value, values_in_keys, native, 8 if rows * sum(value) > 64 * 128 else 4)


@dataclass(frozen=True, slots=True, eq=False)
class TritonBatch:
    """A PagedBatch under one mask, as the kernel reads it: made once a step, used by every layer of one LayerShape.

    On the device, int32: table[requests, columns], starts[requests + 1], lengths[requests], work[n, 5] and
    combined[m, 4] (this module's first lines). parts: results of splits that the kernel writes before they are put
    together. All of these are this batch's own.
    """

    batch: PagedBatch
    mask: AttentionMask
    shape: LayerShape
    tiles: Tiles
    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    work: torch.Tensor
    combined: torch.Tensor
    parts: int

    def refill(self, batch: PagedBatch) -> Self:
        """``batch`` in the memory of this one, which a captured CUDA graph reads; returns it, and this one is stale.

        As many queries of each request as before, tables at most as wide; lengths may be any: a tile's keys are
        divided among its splits on the device. A graph of more requests than there are is filled up with requests of
        one token in the null block. Never waits for the device. Raises WorkerError for what does not fit, with nothing
        written. O(cells of the table).
        """
        check_batch(batch, self.mask)
        was, table = self.batch, batch.block_table
        same = (was.query_start_loc, was.block_size, was.num_blocks, was.share)
        if same != (batch.query_start_loc, batch.block_size, batch.num_blocks, batch.share) or (
            table.shape[1] > self.table.shape[1]
        ):
            raise WorkerError(
                f"queries {list(batch.query_start_loc)}, blocks {batch.num_blocks} of {batch.block_size} and a table "
                f"{tuple(table.shape)} do not fit a batch made for {list(was.query_start_loc)}, {was.num_blocks} of "
                f"{was.block_size} and {tuple(self.table.shape)}: make a TritonBatch of them"
            )
        self.lengths.copy_(_sent(np.array(batch.seq_lens, np.int32), self.lengths.device), non_blocking=True)
        self.table[:, : table.shape[1]].copy_(table, non_blocking=True)
        return replace(self, batch=batch)


def triton_batch(
    batch: PagedBatch,
    mask: AttentionMask = CAUSAL,
    *,
    num_heads: int,
    pages: KVPages,
    dtype: torch.dtype,
    splits: int | None = None,
) -> TritonBatch:
    """``batch`` under ``mask``, for layers with ``num_heads`` query heads of ``dtype`` over pages like ``pages``.

    splits: programs that share the keys of every tile; None: as many as keep the device busy, by the lengths of
    ``batch``. More of them change results by rounding only. For a CUDA graph make it of the longest requests that it
    is captured for, or say how many; later ones may be of any length (``refill``).
    Raises ConfigError without Triton, or on a CPU without its interpreter; WorkerError for what the kernel cannot
    compute with. O(requests + tiles + cells of the table); one transfer, never waits for the device.
    """
    device = batch.block_table.device
    if device.type == "cpu" and not load_kernels("paged_attention").INTERPRETED:
        raise ConfigError("Triton has no compiler for CPUs: set TRITON_INTERPRET=1 before it is imported, or use torch")
    if splits is not None and splits < 1:
        raise WorkerError(f"splits must be at least 1, got {splits}; None to have them counted")
    check_batch(batch, mask)
    shape = LayerShape.of(num_heads, pages, dtype)
    shape.require_supported()
    starts = np.array(batch.query_start_loc)
    counts = np.diff(starts)
    tiles = Tiles.of(shape, int(counts.max(initial=0)) * shape.group, device)
    request, tile = _tiles_of(counts * shape.group, tiles.rows)
    ends = np.minimum(-(-(tile + 1) * tiles.rows // shape.group), counts[request])
    keys = _keys_read(batch, mask, request, ends, -(-tiles.rows // shape.group))
    parts = np.full_like(keys, splits or 1)
    if splits is None:
        parts = splits_of(keys, _programs(device) / shape.num_kv_heads)
    work, combined = _work_list(request, tile, keys, parts)
    numbers = (starts, np.array(batch.seq_lens), work.ravel(), combined.ravel())
    sent = torch.split_with_sizes(
        _sent(np.concatenate(numbers).astype(np.int32), device), [array.size for array in numbers]
    )
    return TritonBatch(
        batch,
        mask,
        shape,
        tiles,
        batch.block_table.to(torch.int32, copy=True).contiguous(),
        sent[0],
        sent[1],
        sent[2].view(-1, 5),
        sent[3].view(-1, 4),
        int(parts[parts > 1].sum()),
    )


def triton_paged_attention(
    query: torch.Tensor,
    pages: KVPages,
    batch: TritonBatch,
    scale: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``paged_attention`` gives, in float32; products are of the query's dtype, so are weights of values.

    query, pages, scale, softcap, sink_logits: as there. out: [tokens, heads, width of a value], where to write the
    output, in any of the dtypes of queries; None: new, float32.
    One launch, and a second where ``batch`` splits keys. It waits for nothing on the device and allocates by the
    batch's shape alone, so that a CUDA graph may capture it; ``batch`` is made outside, and refilled for a replay.
    Raises WorkerError for shapes that do not match, and for layers that ``batch`` was not made for.
    """
    check_layer(query, pages, batch.batch, softcap=softcap, sink_logits=sink_logits)
    shape = LayerShape.of(query.shape[1], pages, query.dtype)
    shape.require_supported()
    if shape != batch.shape:
        raise WorkerError(f"the batch was made for {batch.shape}, this layer is {shape}: make a TritonBatch of its own")
    if sink_logits is not None and sink_logits.shape != query.shape[1:2]:
        raise WorkerError(f"sinks of shape {tuple(sink_logits.shape)}: give one sink logit a head")
    wanted = (*query.shape[:2], shape.value_width)
    if out is None:
        out = torch.empty(wanted, dtype=torch.float32, device=query.device)
    elif out.shape != wanted or out.dtype not in _FLOATS or out.stride(2) != 1:
        raise WorkerError(
            f"out of shape {tuple(out.shape)}, {out.dtype}, strides {out.stride()}: give {wanted} in float32, bfloat16 "
            "or float16, columns side by side"
        )
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if len(batch.work):
        load_kernels("paged_attention").launch_attention(
            query, pages, batch, scale=scale, softcap=softcap, sink_logits=sink_logits, out=out, lse=lse
        )
    return out, lse


def splits_of(keys: Int64, programs: float) -> Int64:
    """Splits of tiles that read ``keys``, int64[tiles], where ``programs`` are wanted in all: of even length."""
    longest = max(_FEWEST_KEYS, int(np.ceil(keys.sum() / max(programs, 1))))
    return np.maximum(1, -(-keys // longest))


def _tiles_of(rows: Int64, of_a_tile: int) -> tuple[Int64, Int64]:
    """(request, its tile) of every tile. rows: int64[requests]."""
    counts = -(-rows // of_a_tile)
    request = np.repeat(np.arange(len(counts)), counts)
    return request, np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)


def _keys_read(batch: PagedBatch, mask: AttentionMask, request: Int64, ends: Int64, queries: int) -> Int64:
    """About how many keys each tile reads on this rank. ends: queries of its request up to its end; queries: it has."""
    lengths, counts = np.array(batch.seq_lens), np.diff(batch.query_start_loc)
    if not mask.causal:
        return -(-lengths[request] // batch.share.size)
    keys = (lengths - counts)[request] + ends
    bounds = [size for size in (mask.window, mask.chunk) if size is not None]
    if bounds:
        keys = np.minimum(keys, min(bounds) + queries)
    return -(-keys // batch.share.size)


def _work_list(request: Int64, tile: Int64, keys: Int64, parts: Int64) -> tuple[Int64, Int64]:
    """int64[n, 5] and int64[m, 4], what takes longest first: programs start in this order."""
    order = np.argsort(-(keys // parts), kind="stable")
    request, tile, parts = request[order], tile[order], parts[order]
    split = np.where(parts > 1, parts, 0)
    first = np.cumsum(split) - split
    of_tile = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(of_tile)) - (np.cumsum(parts) - parts)[of_tile]
    work = (request[of_tile], tile[of_tile], number, parts[of_tile], first[of_tile] + number)
    return np.stack(work, 1), np.stack((request, tile, first, parts), 1)[parts > 1]


def _columns(width: int) -> tuple[int, int]:
    """Two powers of two, at least 16 or none, that hold ``width`` columns with few to spare."""
    first = 1 << (width.bit_length() - 1)
    if first < 16 or first == width:
        return max(16, first), 0
    return first, max(16, 1 << (width - first - 1).bit_length())


def _programs(device: torch.device) -> int:
    """That keep ``device`` busy: on a CPU one, since the interpreter runs one after the other."""
    if device.type != "cuda":
        return 1
    return _PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _sent(numbers: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """int32[n] on ``device``, without waiting for it."""
    here = torch.from_numpy(numbers)
    if device.type == "cuda":
        here = here.pin_memory()
    return here.to(device, non_blocking=True)
