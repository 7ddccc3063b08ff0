"""The Triton kernel gives the slots of the loop: on a GPU, or in the interpreter where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_support import SlotCase, slot_cases

from hybridkv.errors import ConfigError
from hybridkv.worker import BlockTable, triton_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

COMPILE = """
import sys
import hybridkv.worker
assert "triton" not in sys.modules
import hybridkv.worker.kernels.slots as slots
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

names = slots.slot_kernel.arg_names
pointers = {"table": "*i32", "rows": "*i64", "positions": "*i64", "out": "*i64"}
sizes = {"block_size": 48, "ranks": 4, "rank": 3, "interleave": 16, "tile": 256}
signature = {name: pointers.get(name, "constexpr" if name in sizes else "i32") for name in names}
source = ASTSource(slots.slot_kernel, signature, {(names.index(name),): value for name, value in sizes.items()})
for capability in (80, 90):
    assert "st.global" in compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
"""


def mapped(table: BlockTable, rows: list[int], positions: list[int], dtype: torch.dtype = torch.int64) -> list[int]:
    tokens = torch.tensor([rows, positions], dtype=dtype, device=DEVICE).T.contiguous()  # the columns are strided
    table.compute_slot_mapping_on_device(tokens[:, 0], tokens[:, 1], triton_slots, check_ranges=False)
    slots: list[int] = table.slot_mapping.tolist()
    return slots


@settings(max_examples=2 * settings().max_examples)
@given(case=slot_cases(), wide=st.booleans())
def test_triton_slots_are_those_of_a_loop(case: SlotCase, wide: bool) -> None:
    table = case.table(DEVICE)
    rows, positions = [row for row, _ in case.tokens], [position for _, position in case.tokens]
    expected = case.slots()
    slots = mapped(table, rows, positions, torch.int64 if wide else torch.int32)
    assert slots == expected + [-1] * (len(slots) - len(expected))


def test_more_tokens_than_one_program_takes() -> None:
    case = SlotCase(4, 1, ((7, 3), (2, 9)), (2, 0), (1, 0), 2, tuple((i % 2, i % 16) for i in range(600)))
    slots = mapped(case.table(DEVICE, tokens=700), [r for r, _ in case.tokens], [p for _, p in case.tokens])
    assert slots == case.slots() + [-1] * 100


def test_slots_do_not_overflow_int32() -> None:
    last = (1 << 31) - 1
    table = BlockTable(256, 1, 1, 8, device=DEVICE)
    table.add_row([last], 0)
    table.commit_block_table(1)
    assert mapped(table, [0], [255], torch.int32)[0] == last * 256 + 255


def test_tokens_out_of_range_have_no_slot_and_are_not_read() -> None:
    table = BlockTable(4, 2, 2, 8, device=DEVICE)
    table.add_row([5, 6], 1)
    table.commit_block_table(2)
    assert mapped(table, [1, 2, -1, 1, 1, 1], [7, 0, 0, 8, -1, 1 << 62])[:6] == [27, -1, -1, -1, -1, -1]


def test_the_worker_needs_no_triton_and_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    """For Ampere and Hopper, down to machine code: the interpreter takes more than the compiler does."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=120)  # noqa: S603 - our own


def test_without_triton_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hybridkv.worker.kernels.slots", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    table = BlockTable(4, 1, 1, 4)
    zeros = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"pip install 'hybridkv\[gpu\]'"):
        table.compute_slot_mapping_on_device(zeros, zeros, triton_slots)
    table.compute_slot_mapping_on_device(zeros, zeros)
