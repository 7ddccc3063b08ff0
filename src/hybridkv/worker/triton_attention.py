"""Paged attention by this library's Triton kernel: decode rows, drafts and prefill chunks of a step in one launch.

    rows of request r    for one KV head, its queries times the query heads of that head; a *tile* is a run of rows
    work                 (request, tile, split of its keys, splits, part): the work of one program for each KV head
    combined             (request, tile, first part, parts) of tiles with split keys (flash decoding)

Keys are split if there are fewer tiles than programs that keep a GPU busy, so that one long request uses all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.step import ranges
from hybridkv.worker.attention import CAUSAL, AttentionMask, PagedBatch, check_batch, check_layer
from hybridkv.worker.pages import KVPages, load_kernels

# keys below which another program costs more than it saves; chosen by hand
_FEWEST_KEYS: Final = 256
# programs for each multiprocessor: the two that it holds at a time, and two that wait
_PROGRAMS: Final = 4
# bytes of keys and values in a tile; with the tiles being loaded, two programs fit a multiprocessor
_TILE_BYTES: Final = 40 << 10
_FP8: Final = torch.float8_e4m3fn
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The properties that layers must share to use one prepared batch.

    Attributes:
        num_heads: query heads.
        num_kv_heads: heads of keys and values.
        key_width: elements of a key in one head.
        value_width: elements of a value in one head.
        latent: whether values are the first columns of the keys.
        query: dtype of queries.
        cache: dtype of pages.
    """

    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    latent: bool
    query: torch.dtype
    cache: torch.dtype

    def require_supported(self) -> None:
        """Raise WorkerError for a dtype or number of heads that the kernel does not support.

        It takes queries of float32, bfloat16 or float16, over pages of the same or float8_e4m3fn.
        """
        if self.query not in _FLOATS or self.cache not in (*_FLOATS, _FP8):
            raise WorkerError(
                f"queries of {self.query} over pages of {self.cache}: the Triton kernel takes float32, bfloat16 and "
                "float16, pages of float8_e4m3fn too; use paged_attention"
            )
        if self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise WorkerError(f"{self.num_heads} query heads must be a multiple of {self.num_kv_heads} KV heads")

    @classmethod
    def of(cls, num_heads: int, pages: KVPages, query: torch.dtype) -> Self:
        """Return the shape of a layer with ``num_heads`` query heads of dtype ``query`` over ``pages``."""
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
        """The dtype of factors in products, which are summed in float32."""
        return self.query if self.fp8 else torch.promote_types(self.query, self.cache)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows, keys and columns that a program holds at a time.

    Attributes:
        rows: rows of a request.
        keys: keys.
        key: (first, rest) columns of a key, powers of two: 192 is 128 and 64.
        value: (first, rest) columns of a value.
        values_in_keys: whether the values of a tile are the first columns of its keys, and are loaded once.
        native_fp8: whether the device converts float8.
        warps: warps of a program.
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
        """Choose the sizes for a layer; ``most_rows`` is the number of rows of the request that has most of them."""
        key, value, size = _columns(shape.key_width), _columns(shape.value_width), shape.compute.itemsize
        values_in_keys = shape.latent and value == (key[0], 0) and shape.value_width == key[0]
        key_bytes = size * (sum(key) + (0 if values_in_keys else sum(value)))
        # fewer rows for float32: each product takes three on tensor cores, with its factors in registers
        most = 64 if size == 2 else 32 if sum(key) <= 256 else 16
        rows, keys = 16, 64
        while rows < min(most_rows, most):
            rows *= 2
        while keys > 16 and keys * key_bytes > _TILE_BYTES:
            keys //= 2
        # Ada, Hopper and later have an instruction that converts float8
        native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        return cls(rows, keys, key, value, values_in_keys, native, 8 if rows * sum(value) > 64 * 128 else 4)


@dataclass(frozen=True, slots=True, eq=False)
class TritonBatch:
    """A PagedBatch under one mask, as the kernel reads it, for all layers of one LayerShape.

    Tensors are on the device, in int32, and belong to this batch.

    Attributes:
        batch: the tokens that each request reads.
        mask: the tokens that a query sees.
        shape: of the layers.
        tiles: of the programs.
        table: int32[requests, columns], block ids.
        starts: int32[requests + 1], the first query of each request.
        lengths: int32[requests], tokens of each request.
        work: int32[n, 5], the work of each program, described at the top of this module.
        combined: int32[m, 4], the tiles with split keys.
        parts: results of splits that the kernel writes before it combines them.
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
        """Put another batch into the memory of this one, which a captured CUDA graph reads. O(cells of the table).

        Each request has as many queries as before and a table that is at most as wide. Lengths may differ: the keys of
        a tile are divided among its splits on the device. If a graph has more requests than the batch, fill up with
        requests of one token in the null block. Never waits for the device.

        Args:
            batch: the new batch.

        Returns:
            The refilled batch; do not use this one any more.

        Raises:
            WorkerError: the batch does not fit. Nothing has been written then.
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
                f"{was.block_size} and {tuple(self.table.shape)}: make a new TritonBatch"
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
    """Prepare a batch for the kernel. O(requests + tiles + cells of the table); never waits for the device.

    For a CUDA graph, make the batch from the longest requests that the graph is captured for, or give ``splits``. Later
    requests may have any length (``refill``).

    Args:
        batch: the tokens that each request reads.
        mask: the tokens that a query sees.
        num_heads: query heads of the layers.
        pages: the pages of one of the layers.
        dtype: of the queries.
        splits: programs that share the keys of every tile; by default, as many as keep the device busy for these
            lengths. The number changes results by rounding only.

    Raises:
        ConfigError: Triton is not installed, or it runs on a CPU without its interpreter.
        WorkerError: the kernel does not support the layers, or ``splits`` is below 1.
    """
    device = batch.block_table.device
    if device.type == "cpu" and not load_kernels("paged_attention").INTERPRETED:
        raise ConfigError("Triton cannot compile for a CPU: set TRITON_INTERPRET=1 before importing it, or use torch")
    if splits is not None and splits < 1:
        raise WorkerError(f"splits must be at least 1, got {splits}; give None to choose by the lengths")
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
    """Compute the same as ``paged_attention`` in one launch, or in two if ``batch`` splits keys.

    Products and the weights of values have the dtype of the query; sums are float32. It never waits for the device and
    allocates by the shape of the batch alone, so a CUDA graph may capture it. Make and refill ``batch`` outside the
    graph.

    Args:
        query: [tokens, heads, width], in float32, bfloat16 or float16.
        pages: the layer's keys and values.
        batch: made by ``triton_batch`` for layers like this one.
        scale: factor of the scores.
        softcap: as in ``paged_attention``.
        sink_logits: float[heads], as in ``paged_attention``.
        out: memory for the outputs, [tokens, heads, value width] in float32, bfloat16 or float16; by default, new
            memory in float32.

    Returns:
        The outputs, and float32[tokens, heads], the natural logarithms of the sums of exponentials.

    Raises:
        WorkerError: shapes do not match, or ``batch`` was made for other layers.
    """
    check_layer(query, pages, batch.batch, softcap=softcap, sink_logits=sink_logits)
    shape = LayerShape.of(query.shape[1], pages, query.dtype)
    shape.require_supported()
    if shape != batch.shape:
        raise WorkerError(f"the batch was made for {batch.shape}, this layer is {shape}: make a TritonBatch for it")
    if sink_logits is not None and sink_logits.shape != query.shape[1:2]:
        raise WorkerError(
            f"sink_logits of shape {tuple(sink_logits.shape)}: give one for each of {shape.num_heads} heads"
        )
    wanted = (*query.shape[:2], shape.value_width)
    if out is None:
        out = torch.empty(wanted, dtype=torch.float32, device=query.device)
    elif out.shape != wanted or out.dtype not in _FLOATS or out.stride(2) != 1:
        raise WorkerError(
            f"out of shape {tuple(out.shape)}, {out.dtype}, strides {out.stride()}: give {wanted} in float32, bfloat16 "
            "or float16, with contiguous columns"
        )
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if len(batch.work):
        load_kernels("paged_attention").launch_attention(
            query, pages, batch, scale=scale, softcap=softcap, sink_logits=sink_logits, out=out, lse=lse
        )
    return out, lse


def splits_of(keys: Int64, programs: float) -> Int64:
    """Return int64[tiles], splits of equal length for tiles that read ``keys``, int64[tiles]; about ``programs``."""
    longest = max(_FEWEST_KEYS, int(np.ceil(keys.sum() / max(programs, 1))))
    return np.maximum(1, -(-keys // longest))


def _tiles_of(rows: Int64, of_a_tile: int) -> tuple[Int64, Int64]:
    """Return (request, its tile) for every tile; ``rows``: int64[requests], ``of_a_tile``: rows of a full tile."""
    counts = -(-rows // of_a_tile)
    return np.repeat(np.arange(len(counts)), counts), ranges(np.zeros_like(counts), counts)


def _keys_read(batch: PagedBatch, mask: AttentionMask, request: Int64, ends: Int64, queries: int) -> Int64:
    """Return about how many keys each tile reads on this rank.

    Args:
        batch: the tokens that each request reads.
        mask: the tokens that a query sees.
        request: int64[tiles], the request of each tile.
        ends: int64[tiles], queries of the request up to the end of the tile.
        queries: queries of a full tile.
    """
    lengths, counts = np.array(batch.seq_lens), np.diff(batch.query_start_loc)
    if not mask.causal:
        return -(-lengths[request] // batch.share.size)
    keys = (lengths - counts)[request] + ends
    bounds = [size for size in (mask.window, mask.chunk) if size is not None]
    if bounds:
        keys = np.minimum(keys, min(bounds) + queries)
    return -(-keys // batch.share.size)


def _work_list(request: Int64, tile: Int64, keys: Int64, parts: Int64) -> tuple[Int64, Int64]:
    """Return ``work``, int64[n, 5], and ``combined``, int64[m, 4], longest work first: programs start in order."""
    order = np.argsort(-(keys // parts), kind="stable")
    request, tile, parts = request[order], tile[order], parts[order]
    split = np.where(parts > 1, parts, 0)
    first = np.cumsum(split) - split
    of_tile, number = np.repeat(np.arange(len(parts)), parts), ranges(np.zeros_like(parts), parts)
    work = (request[of_tile], tile[of_tile], number, parts[of_tile], first[of_tile] + number)
    return np.stack(work, 1), np.stack((request, tile, first, parts), 1)[parts > 1]


def _columns(width: int) -> tuple[int, int]:
    """Return two powers of two, the first at least 16, the second 0 or at least 16, that hold ``width`` columns."""
    first = 1 << (width.bit_length() - 1)
    if first < 16 or first == width:
        return max(16, first), 0
    return first, max(16, 1 << (width - first - 1).bit_length())


def _programs(device: torch.device) -> int:
    """Return how many programs keep ``device`` busy: one on a CPU, where the interpreter runs one at a time."""
    if device.type != "cuda":
        return 1
    return _PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _sent(numbers: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Return int32[n] on ``device``, without waiting for it."""
    here = torch.from_numpy(numbers)
    if device.type == "cuda":
        here = here.pin_memory()
    return here.to(device, non_blocking=True)
