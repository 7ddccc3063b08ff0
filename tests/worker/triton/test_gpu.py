"""Tables, slots, copies, attention and writes on a GPU: the loops of the CPU tests, larger, and in a CUDA graph.

What is sent comes from pinned memory, a graph waits for nothing, and bandwidth is compared with a plain device copy
(shown with -s).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import attention_bandwidth
import numpy as np
import pytest
import torch
from attention_bandwidth import Decode
from attention_support import CASE, MATRIX, Call, KernelCase, kernel_cases
from copy_support import StateCase, StepCase, check_states, check_step, state_cases, step_cases
from hypothesis import given, settings
from slot_support import SlotCase, slot_cases

from hybridkv.worker import (
    TORCH,
    AttentionMask,
    BlockTable,
    CopyKernels,
    KVPages,
    StateCopier,
    StateCopies,
    StatePart,
    triton_kernels,
    triton_paged_attention,
    triton_write_kv,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@settings(max_examples=settings().max_examples)
@given(case=slot_cases())
def test_gpu_slot_mapping_matches_a_loop(case: SlotCase) -> None:
    table, expected = case.table("cuda"), case.slots()
    table.compute_slot_mapping([row for row, _ in case.tokens], [position for _, position in case.tokens])
    table.slot_mapping.fill_(-7)
    table.commit_slot_mapping(len(table.slot_mapping))
    assert table.slot_mapping.tolist() == expected + [-1] * (len(table.slot_mapping) - len(expected))


@pytest.mark.parametrize("pin_memory", [False, True])
def test_gpu_tables_have_the_values_at_the_time_of_commit(pin_memory: bool) -> None:
    """The host writes on at once, while a busy device has not fetched what was sent."""
    table = BlockTable(16, 256, 512, 8192, pin_memory, "cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    rng = np.random.default_rng(0)
    rows, columns = np.repeat(np.arange(256), 32), np.tile(np.arange(32), 256)
    sent = []
    for _ in range(20):
        busy = busy @ busy / 64
        table.write_cells(rows, columns, rng.integers(1, 1 << 20, 8192))
        table.commit_block_table(256)
        table.compute_slot_mapping(rows, columns * 16)
        table.commit_slot_mapping(8192)
        sent.append((table.slot_mapping_np.copy(), table.slot_mapping.clone(), table.get_device_tensor().clone()))
    for slots, arrived, cells in sent:
        assert (arrived.cpu().numpy() == slots).all()
        assert (cells[:, :32].cpu().numpy().reshape(-1) == slots // 16).all()


KERNELS: dict[str, Callable[[], CopyKernels]] = {"torch": lambda: TORCH, "triton": triton_kernels}


@pytest.mark.parametrize("kernels", KERNELS)
@given(case=state_cases())
def test_gpu_state_copies_match_a_loop(kernels: str, case: StateCase) -> None:
    check_states(case, KERNELS[kernels](), device="cuda")


@pytest.mark.parametrize("kernels", KERNELS)
@given(case=step_cases())
def test_gpu_block_copies_match_a_loop(kernels: str, case: StepCase) -> None:
    check_step(case, KERNELS[kernels](), device="cuda")


def seconds(work: Callable[[], object], times: int = 20) -> float:
    """Of one call, launches included."""
    work()
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (perf_counter() - start) / times


@pytest.mark.parametrize("bias", [0, 2])
@pytest.mark.parametrize("kernels", KERNELS)
def test_gpu_state_copies_have_a_minimum_bandwidth(kernels: str, bias: int) -> None:
    """64 rows of 12 layers, a conv state of 6 x 8192 in bfloat16 and a temporal one of 2 MiB in float32 each."""
    rows, layers = 64, 12
    conv = StatePart((6, 8192), torch.bfloat16, "conv", 0)
    temporal = StatePart((32, 128, 128), torch.float32, "temporal")

    def view(part: StatePart) -> torch.Tensor:
        return torch.zeros((2 * rows + 1, *part.shape), dtype=part.dtype, device="cuda")

    made = [[(part, view(part)) for part in (conv, temporal)] for _ in range(layers)]
    ids = np.random.default_rng(1).permutation(2 * rows) + 1
    copies = StateCopies(ids[:rows], ids[:rows], ids[rows:], np.full(rows, bias))
    copier = StateCopier(made, kernels=KERNELS[kernels]())
    moved = 2 * rows * layers * ((6 - bias) * 8192 * 2 + 32 * 128 * 128 * 4)
    taken = seconds(lambda: copier.copy(copies))
    source = torch.zeros(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    plain = seconds(lambda: target.copy_(source))
    reached, copied = moved / taken / 1e9, moved / plain / 1e9
    print(f"\n{kernels}, bias {bias}: {reached:.0f} GB/s, plain copy {copied:.0f} GB/s")  # noqa: T201 - what it is for
    assert taken < 20 * plain


LONG = replace(
    CASE, requests=((3000, 1), (500, 4), (0, 200), (77, 1)), block_size=32, kv_heads=2, group=4, widths=(128, 128)
)


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("keys_of_a_tile", [16, 64])
def test_gpu_attention_cases_match_the_reference(name: str, keys_of_a_tile: int) -> None:
    """Also in tiles as large as are used, where they fit."""
    case = MATRIX[name]
    wide = case.case.widths[0] > 128
    Call(replace(case, keys_of_a_tile=16 if wide else keys_of_a_tile).on("cuda")).check()


@settings(max_examples=settings().max_examples // 4)
@given(case=kernel_cases())
def test_gpu_attention_random_calls_match_the_reference(case: KernelCase) -> None:
    Call(case.on("cuda")).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=400), AttentionMask(chunk=256)])
def test_gpu_attention_of_long_mixed_steps_matches_the_reference(
    dtype: torch.dtype, fp8: bool, mask: AttentionMask
) -> None:
    case = KernelCase(replace(LONG, dtype=dtype, mask=mask, sinks=True), query=dtype, fp8=fp8).on("cuda")
    call = Call(replace(case, keys_of_a_tile=32))
    call.check()


# torch warns at the first set_sync_debug_mode of a process, after it has set the mode
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_gpu_captured_graph_reads_refilled_batches() -> None:
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
def test_gpu_attention_reads_have_a_minimum_bandwidth(case: Decode, capsys: pytest.CaptureFixture[str]) -> None:
    found = attention_bandwidth.read_bandwidth(case)
    with capsys.disabled():
        print(f"\n{case}: {found.reached:.0f} GB/s, plain copy {found.plain_copy:.0f} GB/s")  # noqa: T201 - what it is for
    assert found.reached > 0.1 * found.plain_copy


@pytest.mark.parametrize("fp8", [False, True])
def test_gpu_writes_have_a_minimum_bandwidth(fp8: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = attention_bandwidth.write_bandwidth(Decode(64, 2048, fp8=fp8), 8192)
    with capsys.disabled():
        print(f"\nwrites: {found.reached:.0f} GB/s, plain copy {found.plain_copy:.0f} GB/s")  # noqa: T201 - as above
    assert found.reached > 0.1 * found.plain_copy
