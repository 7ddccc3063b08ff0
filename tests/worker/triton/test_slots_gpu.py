"""Tables and slots on a GPU: the same comparisons, and sends from pinned memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from slot_support import SlotCase, slot_cases

from hybridkv.worker import BlockTable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@settings(max_examples=settings().max_examples)
@given(case=slot_cases())
def test_slots_on_a_gpu_are_those_of_a_loop(case: SlotCase) -> None:
    table, expected = case.table("cuda"), case.slots()
    table.compute_slot_mapping([row for row, _ in case.tokens], [position for _, position in case.tokens])
    table.slot_mapping.fill_(-7)
    table.commit_slot_mapping(len(table.slot_mapping))
    assert table.slot_mapping.tolist() == expected + [-1] * (len(table.slot_mapping) - len(expected))


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
