"""Tables and slots on a GPU: the same comparisons, sends from pinned memory, and the bandwidth of the slot kernels."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from slot_support import SlotCase, slot_cases

from hybridkv.worker import BlockTable, SlotKernel, torch_slots, triton_slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

# of the rate of a plain copy: torch reads and writes the batch anew in each of its operations, Triton once
LEAST = {torch_slots: 0.02, triton_slots: 0.25}
KERNELS = pytest.mark.parametrize("kernel", [torch_slots, triton_slots])
TOKENS = 1 << 24
BYTES_A_TOKEN = 8 + 8 + 4 + 8  # row, position, cell, slot


@KERNELS
@settings(max_examples=settings().max_examples)
@given(case=slot_cases())
def test_slots_on_a_gpu_are_those_of_a_loop(kernel: SlotKernel, case: SlotCase) -> None:
    table, expected = case.table("cuda"), case.slots()
    tokens = torch.tensor(case.tokens, dtype=torch.int64, device="cuda").reshape(-1, 2)
    table.compute_slot_mapping_on_device(tokens[:, 0], tokens[:, 1], kernel)
    assert table.slot_mapping.tolist() == expected + [-1] * (len(table.slot_mapping) - len(expected))
    table.compute_slot_mapping([row for row, _ in case.tokens], [position for _, position in case.tokens])
    table.slot_mapping.fill_(-7)
    table.commit_slot_mapping(len(table.slot_mapping))
    assert table.slot_mapping.tolist() == table.slot_mapping_np.tolist()


@pytest.mark.parametrize("pin_memory", [False, True])
def test_what_is_sent_is_what_stood_there_when_it_was_sent(pin_memory: bool) -> None:
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


@KERNELS
def test_bandwidth_against_a_copy(kernel: SlotKernel, capsys: pytest.CaptureFixture[str]) -> None:
    table = BlockTable(16, 1024, 8192, TOKENS, device="cuda")
    rng = np.random.default_rng(0)
    for row in range(1024):
        table.add_row(rng.integers(1, 1 << 20, 1024), row)
    table.commit_block_table(1024)
    rows = torch.arange(1024, device="cuda").repeat_interleave(TOKENS // 1024)
    positions = torch.arange(TOKENS // 1024, device="cuda").repeat(1024)

    def milliseconds(call: Callable[[], object]) -> float:
        call()
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 20

    mine = milliseconds(lambda: table.compute_slot_mapping_on_device(rows, positions, kernel, check_ranges=False))
    source = torch.randn(TOKENS * BYTES_A_TOKEN // 8, device="cuda")
    target = torch.empty_like(source)
    plain = milliseconds(lambda: target.copy_(source))
    name = getattr(kernel, "__name__", str(kernel))
    with capsys.disabled():
        rate = TOKENS * BYTES_A_TOKEN / 1e6
        print(f"\n{name}: {rate / mine:.0f} GB/s; a plain copy of as many bytes {rate / plain:.0f} GB/s")  # noqa: T201 - what this test is run for
    assert plain / mine > LEAST[kernel]
