"""The attention kernel against ``paged_attention``: on a GPU, or in Triton's interpreter where there is none."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_support import CASE, FP8, MATRIX, ONE, Call, KernelCase, kernel_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker import (
    CAUSAL,
    AttentionMask,
    KVPages,
    PagedBatch,
    TritonBatch,
    kernels,
    paged_attention,
    paged_batch,
    triton_attention,
    triton_batch,
    triton_paged_attention,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", MATRIX)
def test_attention_kernel_cases_match_the_reference(name: str) -> None:
    Call(MATRIX[name].on(DEVICE)).check()


@settings(max_examples=settings().max_examples // 5)
@given(case=kernel_cases())
def test_attention_kernel_random_calls_match_the_reference(case: KernelCase) -> None:
    Call(case.on(DEVICE)).check()


# -- what is made once a step


def empty_pages(dtype: torch.dtype = torch.float32) -> KVPages:
    keys, values = (torch.zeros(1, 16, 2, 16, device=DEVICE).to(dtype) for _ in range(2))
    return KVPages(keys, values)


def prepared(
    counts: list[int],
    lengths: list[int],
    mask: AttentionMask = CAUSAL,
    *,
    num_heads: int = 6,
    pages: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    splits: int | None = None,
) -> TritonBatch:
    starts = np.concatenate(([0], np.cumsum(counts)))
    table = torch.zeros(len(counts), max(1, -(-max(lengths, default=1) // 16)), dtype=torch.int32, device=DEVICE)
    batch = paged_batch(starts.tolist(), lengths, table, block_size=16, num_blocks=1)
    return triton_batch(batch, mask, num_heads=num_heads, pages=empty_pages(pages), dtype=dtype, splits=splits)


@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 200)), min_size=1, max_size=6),
    st.sampled_from((None, 1, 3)),
    st.sampled_from((1, 40)),
)
def test_attention_programs_cover_every_tile(
    requests: list[tuple[int, int]], splits: int | None, programs: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "_programs", lambda device: programs)  # noqa: ARG005
        batch = prepared([new for new, _ in requests], [new + before for new, before in requests], splits=splits)
    rows = batch.tiles.rows
    expected = {(r, tile) for r, (new, _) in enumerate(requests) for tile in range(-(-new * 3 // rows))}
    work = [tuple(item) for item in batch.work.tolist()]
    assert {item[:2] for item in work} == expected
    assert len(work) == len(set(work)) == sum({item[:2]: item[3] for item in work}.values())
    split = [item for item in work if item[3] > 1]
    assert sorted(item[4] for item in split) == list(range(batch.parts))
    tiles = {(request, tile): (first, parts) for request, tile, first, parts in batch.combined.tolist()}
    assert all(item[2] + tiles[item[:2]][0] == item[4] and tiles[item[:2]][1] == item[3] for item in split)
    assert len(tiles) == len({item[:2] for item in split})


@pytest.mark.parametrize(
    ("keys", "programs", "expected"),
    [
        ([100_000], 33, [33]),
        ([100_000], 1, [1]),
        ([300], 33, [2]),
        ([4096] * 64, 66, [2] * 64),
        ([4096] * 256, 66, [1] * 256),
        ([100_000, 900, 900], 33, [33, 1, 1]),
        ([0, 10], 66, [1, 1]),
        ([], 66, []),
    ],
)
def test_attention_requests_are_split_for_few_programs(keys: list[int], programs: float, expected: list[int]) -> None:
    assert triton_attention.splits_of(np.array(keys, dtype=np.int64), programs).tolist() == expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (CAUSAL, [200, 201, 30]),
        (AttentionMask(window=50), [56, 56, 30]),
        (AttentionMask(chunk=40), [46, 46, 30]),
        (AttentionMask(causal=False), [201, 201, 30]),
    ],
)
def test_attention_tile_keys_are_counted_under_the_mask(mask: AttentionMask, expected: list[int]) -> None:
    """Tiles of 16 rows, 3 heads: a request's queries 0 .. 5 and 5 .. 6."""
    table = torch.zeros(2, 13, dtype=torch.int32)
    batch = paged_batch([0, 7, 8], [201, 30], table, block_size=16, num_blocks=1)
    seen = triton_attention._keys_read(batch, mask, np.array([0, 0, 1]), np.array([6, 7, 1]), 6)
    assert seen.tolist() == expected


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (4, (16, 0)),
        (16, (16, 0)),
        (24, (16, 16)),
        (80, (64, 16)),
        (96, (64, 32)),
        (128, (128, 0)),
        (192, (128, 64)),
        (200, (128, 128)),
        (576, (512, 64)),
    ],
)
def test_attention_head_width_is_split_into_powers_of_two(width: int, parts: tuple[int, int]) -> None:
    assert triton_attention._columns(width) == parts


def test_attention_batch_is_refilled_in_place() -> None:
    """What a captured graph reads: other lengths and other pages, at the same addresses and with the same splits."""
    first = Call(KernelCase(replace(CASE, requests=((60, 2), (31, 1))), splits=3).on(DEVICE))
    made = first.prepared()
    first.check(made)
    for requests in (((3, 2), (40, 1)), ((0, 2), (0, 1)), ((61, 2), (2, 1))):
        call = Call(KernelCase(replace(CASE, requests=requests, seed=5), splits=3).on(DEVICE))
        batch, given_table = replace(call.batch, num_blocks=made.batch.num_blocks), call.batch.block_table.clone()
        more = (0, 0, 0, 0, 0, 0, 0, made.batch.num_blocks - call.batch.num_blocks)
        keys, values = (torch.nn.functional.pad(view, more) for view in (call.pages.keys, call.pages.values))
        call.pages, call.batch = KVPages(keys, values), batch
        again = made.refill(batch)
        call.check(again)
        assert again.work is made.work
        assert (again.lengths.data_ptr(), again.table.data_ptr()) == (made.lengths.data_ptr(), made.table.data_ptr())
        assert again.batch is batch
        assert batch.block_table.equal(given_table)


def test_attention_refill_that_does_not_fit_changes_nothing() -> None:
    made = prepared([2, 1], [30, 40])
    before = (made.lengths.tolist(), made.table.tolist())

    def batch(starts: list[int], lengths: list[int], columns: int = 3, size: int = 16) -> PagedBatch:
        table = torch.zeros(len(lengths), columns, dtype=torch.int32, device=DEVICE)
        return paged_batch(starts, lengths, table, block_size=size, num_blocks=1)

    for wrong in (batch([0, 1, 3], [9, 9]), batch([0, 2, 3], [9, 9], 4), batch([0, 2, 3], [9, 9], 3, 8)):
        with pytest.raises(WorkerError, match="do not fit a batch made for"):
            made.refill(wrong)
    with pytest.raises(WorkerError, match="2 queries but 1 tokens"):
        made.refill(batch([0, 2, 3], [1, 9]))
    assert (made.lengths.tolist(), made.table.tolist()) == before


# -- calls


def test_cross_attention_with_more_queries_than_tokens_matches_the_reference() -> None:
    call = Call(KernelCase(replace(ONE, requests=((0, 5),), mask=AttentionMask(causal=False))).on(DEVICE))
    table = call.batch.block_table.expand(3, -1)
    call.batch = paged_batch([0, 9, 9, 11], [5, 3, 0], table, block_size=16, num_blocks=call.batch.num_blocks)
    call.query = torch.randn(11, *call.query.shape[1:], device=DEVICE)
    call.sinks = torch.randn(call.query.shape[1], device=DEVICE)
    call.check()
    call.sinks = None
    out, lse = call.attended()
    assert not out[9:].any()
    assert (lse[9:] == -torch.inf).all()


def test_attention_step_without_queries_gives_empty_output() -> None:
    batch = prepared([0, 0], [5, 0])
    out, lse = triton_paged_attention(torch.zeros(0, 6, 16, device=DEVICE), empty_pages(), batch, 1.0)
    assert (out.shape, lse.shape) == ((0, 6, 16), (0, 6))


@pytest.mark.parametrize("splits", [1, 2])
def test_attention_output_is_written_to_the_given_tensor(splits: int) -> None:
    call = Call(KernelCase(ONE, splits=splits).on(DEVICE))
    expected, _ = call.attended()
    room = torch.full((*expected.shape[:2], 40), 7.0, dtype=torch.float16, device=DEVICE)
    wanted = room[..., 8:24]
    out, _ = triton_paged_attention(call.query, call.pages, call.prepared(), call.case.case.scale, out=wanted)
    assert out is wanted
    assert wanted.equal(expected.half())
    assert (room[..., :8] == 7).all()
    assert (room[..., 24:] == 7).all()


def test_attention_with_native_float8_gives_equal_output() -> None:
    """The instruction of newer GPUs; elsewhere bits are moved."""
    call = Call(MATRIX["fp8"].on(DEVICE))
    moved = call.prepared()
    results = [
        call.attended(replace(moved, tiles=replace(moved.tiles, native_fp8=native)))
        for native in (False, DEVICE == "cpu" or moved.tiles.native_fp8)
    ]
    assert results[0][0].equal(results[1][0])
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8).view(1, 16, 1, 16)
    held = KVPages(torch.zeros(1, 16, 1, 16, device=DEVICE).to(FP8), every)
    batch = paged_batch([0, 1], [15], torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), block_size=16, num_blocks=1)
    query = torch.zeros(1, 1, 16, device=DEVICE)
    got, _ = triton_paged_attention(query, held, triton_batch(batch, num_heads=1, pages=held, dtype=torch.float32), 1.0)
    expected, _ = paged_attention(query, held, batch, 1.0)
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert got.isnan().sum() == 1


def test_attention_kernel_rejects_unsupported_inputs() -> None:
    call = Call(MATRIX["mixed step"].on(DEVICE))
    batch, query, pages = call.prepared(), call.query, call.pages
    wide = KVPages(pages.keys[..., :8], pages.values)
    calls: tuple[tuple[torch.Tensor, KVPages, dict[str, Any], str], ...] = (
        (query[1:], pages, {}, "10 tokens"),
        (query.bfloat16(), pages, {}, "the batch was made for"),
        (query[..., :8], wide, {}, "the batch was made for"),
        (query[:, :2], pages, {}, "the batch was made for"),
        (query.double(), pages, {}, "use paged_attention"),
        (query, pages, {"softcap": -1.0}, "softcap must be positive"),
        (query, pages, {"sink_logits": torch.zeros(3)}, "give one for each of"),
        (query, pages, {"out": torch.zeros(10, 4, 15)}, "out of shape"),
        (query, pages, {"out": torch.zeros(10, 4, 16, dtype=torch.int32)}, "out of shape"),
        (query, pages, {"out": torch.zeros(10, 4, 32)[..., ::2]}, "out of shape"),
    )
    for one, held, options, message in calls:
        with pytest.raises(WorkerError, match=message):
            triton_paged_attention(one, held, batch, 1.0, **options)
    batches: tuple[tuple[dict[str, Any], str], ...] = (
        ({"dtype": torch.float64}, "use paged_attention"),
        ({"num_heads": 5}, "5 query heads must be a multiple of 2 KV heads"),
        ({"splits": 0}, "splits must be at least 1"),
        ({"pages": torch.float8_e5m2}, "use paged_attention"),
    )
    for options, message in batches:
        with pytest.raises(WorkerError, match=message):
            prepared([1], [1], **options)
    with pytest.raises(WorkerError, match="2 queries but 1 tokens"):
        prepared([2], [1])


def test_attention_kernel_without_triton_or_gpu_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    if DEVICE == "cpu":
        with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
            prepared([1], [1])
    monkeypatch.delitem(sys.modules, "hybridkv.worker.kernels")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"pip install 'hybridkv\[gpu\]'"):
        prepared([1], [1])
