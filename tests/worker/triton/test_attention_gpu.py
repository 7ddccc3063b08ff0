"""The attention and write kernels on a GPU: compiled, larger, in a CUDA graph, without a wait, and their bandwidth."""

from dataclasses import replace

import attention_bandwidth
import pytest
import torch
from attention_bandwidth import Decode
from hypothesis import given, settings
from kernel_attention_support import CASE, MATRIX, Call, KernelCase, kernel_cases

from hybridkv.worker import AttentionMask, KVPages, triton_paged_attention, triton_write_kv

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

LONG = replace(
    CASE, requests=((3000, 1), (500, 4), (0, 200), (77, 1)), block_size=32, kv_heads=2, group=4, widths=(128, 128)
)


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("keys_of_a_tile", [16, 64])
def test_the_matrix(name: str, keys_of_a_tile: int) -> None:
    """Also in tiles as large as are used, where they fit."""
    case = MATRIX[name]
    wide = case.case.widths[0] > 128
    Call(replace(case, keys_of_a_tile=16 if wide else keys_of_a_tile).on("cuda")).check()


@settings(max_examples=settings().max_examples // 4)
@given(case=kernel_cases())
def test_any_call(case: KernelCase) -> None:
    Call(case.on("cuda")).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=400), AttentionMask(chunk=256)])
def test_long_mixed_steps(dtype: torch.dtype, fp8: bool, mask: AttentionMask) -> None:
    case = KernelCase(replace(LONG, dtype=dtype, mask=mask, sinks=True), query=dtype, fp8=fp8).on("cuda")
    call = Call(replace(case, keys_of_a_tile=32))
    call.check()


def test_a_captured_graph_reads_what_is_refilled_and_waits_for_nothing() -> None:
    lengths = ((900, 1), (40, 1), (300, 1))
    first = Call(KernelCase(replace(LONG, requests=lengths), splits=4, keys_of_a_tile=32).on("cuda"))
    made, query, pages, scale = first.prepared(), first.query.clone(), first.pages, first.case.case.scale
    keys, values = pages.keys.clone(), pages.values.clone()
    held = KVPages(keys, values)
    slots = torch.full((3,), -1, dtype=torch.int64, device="cuda")
    states = torch.randn(3, 2, 128, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        triton_write_kv(slots, held, states, states)
        return triton_paged_attention(query, held, made, scale)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for requests in (lengths, ((2, 1), (899, 1), (0, 1)), ((64, 1), (63, 1), (65, 1))):
        call = Call(KernelCase(replace(LONG, requests=requests, seed=3), splits=4).on("cuda"))
        call.batch = replace(call.batch, num_blocks=made.batch.num_blocks)
        fewer = call.pages.num_blocks
        keys[:fewer], values[:fewer] = call.pages.keys, call.pages.values
        query.copy_(call.query)
        call.pages = held
        made.refill(call.batch)
        graph.replay()
        for got, expected in zip((out, lse), call.expected(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", attention_bandwidth.CASES, ids=str)
def test_bandwidth_of_reads(case: Decode, capsys: pytest.CaptureFixture[str]) -> None:
    found = attention_bandwidth.read_bandwidth(case)
    with capsys.disabled():
        print(f"\n{case}: {found.reached:.0f} GB/s, plain copy {found.plain_copy:.0f} GB/s")  # noqa: T201 - what it is for
    assert found.reached > 0.1 * found.plain_copy


@pytest.mark.parametrize("fp8", [False, True])
def test_bandwidth_of_writes(fp8: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = attention_bandwidth.write_bandwidth(Decode(64, 2048, fp8=fp8), 8192)
    with capsys.disabled():
        print(f"\nwrites: {found.reached:.0f} GB/s, plain copy {found.plain_copy:.0f} GB/s")  # noqa: T201 - as above
    assert found.reached > 0.1 * found.plain_copy
