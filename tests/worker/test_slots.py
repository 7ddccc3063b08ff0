import pytest
import torch
from hypothesis import given, settings
from slot_support import SlotCase, slot_cases

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker import BlockTable

CASES = settings(max_examples=3 * settings().max_examples)


def split(case: SlotCase) -> tuple[list[int], list[int]]:
    return [row for row, _ in case.tokens], [position for _, position in case.tokens]


def on_rank(rank: int, ranks: int, interleave: int, ids: tuple[int, ...] = (7, 3), block_size: int = 4) -> BlockTable:
    table = BlockTable(
        block_size, 1, len(ids), 64, cp_kv_cache_interleave_size=interleave, dcp_world_size=ranks, dcp_rank=rank
    )
    table.add_row(ids, 0)
    table.commit_block_table(1)
    return table


def slots_of(table: BlockTable, positions: int) -> str:
    table.compute_slot_mapping([0] * positions, range(positions))
    slots = table.slot_mapping_np[:positions].tolist()
    table.commit_slot_mapping(positions)
    assert table.slot_mapping[:positions].tolist() == slots
    return " ".join("." if slot < 0 else str(slot) for slot in slots)


# -- the measured lines


@pytest.mark.parametrize(
    ("ranks", "interleave", "rank", "expected"),
    [
        (2, 1, 0, "28 . 29 . 30 . 31 . 12 ."),
        (2, 1, 1, ". 28 . 29 . 30 . 31 . 12"),
        (2, 2, 0, "28 29 . . 30 31 . . 12 13"),
        (2, 4, 0, "28 29 30 31 . . . . 12 13"),
        (4, 2, 0, "28 29 . . . . . . 30 31 . . . . . . 12 13"),
        (4, 2, 3, ". . . . . . 28 29 . . . . . . 30 31 . ."),
    ],
)
def test_slots_under_context_parallel_match_the_contract(ranks: int, interleave: int, rank: int, expected: str) -> None:
    assert slots_of(on_rank(rank, ranks, interleave), len(expected.split())) == expected


# -- all parameters, token by token


@CASES
@given(case=slot_cases())
def test_slots_by_numpy_match_a_loop(case: SlotCase) -> None:
    table = case.table()
    table.compute_slot_mapping([0] * 40, [0] * 40)  # more than follow: their slots must be gone
    table.commit_slot_mapping(40)
    table.compute_slot_mapping(*split(case))
    expected = case.slots()
    behind = [-1] * (len(table.slot_mapping) - len(expected))
    assert table.slot_mapping_np.tolist() == expected + behind
    table.commit_slot_mapping(len(expected))
    assert table.slot_mapping.tolist() == expected + behind
    assert table.slot_mapping.dtype == torch.int64


# -- known defects


def test_slots_do_not_overflow_int32() -> None:
    last = (1 << 31) - 1
    table = BlockTable(256, 1, 1, 8)
    table.add_row([last], 0)
    table.commit_block_table(1)
    table.compute_slot_mapping([0], [255])
    table.commit_slot_mapping(1)
    assert table.slot_mapping_np[0] == table.slot_mapping[0].item() == last * 256 + 255


# -- what a window left behind


def test_slots_of_null_blocks_point_to_the_null_block() -> None:
    table = BlockTable(4, 1, 3, 16, kernel_block_size=2)
    table.write_cells([0, 0], [1, 2], [9, 4])
    table.compute_slot_mapping([0] * 5, [0, 3, 4, 7, 8])
    assert table.slot_mapping_np[:5].tolist() == [0, 3, 36, 39, 16]


# -- the buffer


def test_slots_buffer_with_prefill_context_parallel_is_padded() -> None:
    plain = BlockTable(4, 3, 2, 32, dcp_world_size=2)
    padded = BlockTable(4, 3, 2, 32, pcp_world_size=2)
    assert (len(plain.slot_mapping), len(padded.slot_mapping)) == (32, 32 + 2 * 2 * 3)
    padded.compute_slot_mapping([0] * 44, [0] * 44)
    padded.commit_slot_mapping(44)
    with pytest.raises(WorkerError, match="45 tokens exceed the 44 slots"):
        padded.compute_slot_mapping([0] * 45, [0] * 45)


@pytest.mark.parametrize("through_torch", [False, True])
def test_slots_after_the_last_token_are_minus_one(through_torch: bool) -> None:
    table = BlockTable(4, 1, 4, 16)
    table.add_row([5, 6, 7, 8], 0)
    if through_torch:
        table._slots._mirror = None  # as on a device whose memory numpy cannot write
    table.compute_slot_mapping([0] * 10, range(10))
    table.commit_slot_mapping(10)
    table.compute_slot_mapping([0] * 3, range(3))
    table.commit_slot_mapping(3)
    assert table.slot_mapping.tolist() == [20, 21, 22] + [-1] * 13
    table.commit_slot_mapping(0)
    assert table.slot_mapping.tolist() == [-1] * 16
    table.commit_slot_mapping(16)
    assert table.slot_mapping.tolist() == [20, 21, 22] + [-1] * 13


# -- what cannot be


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dcp_world_size": 2, "cp_kv_cache_interleave_size": 3}, "cp_kv_cache_interleave_size 3 does not divide"),
        (
            {"dcp_world_size": 2, "cp_kv_cache_interleave_size": 8, "kernel_block_size": 4},
            "does not divide the block size 4 of the kernel",
        ),
        ({"cp_kv_cache_interleave_size": 0}, "interleave must be at least 1"),
        ({"dcp_world_size": 2, "dcp_rank": 2}, "dcp rank 2 of 2"),
        ({"pcp_world_size": 2, "pcp_rank": -1}, "pcp rank -1 of 2"),
        ({"pcp_rank": 1}, "pcp rank 1 of 1"),
        ({"dcp_world_size": 0}, "dcp rank 0 of 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must not be negative"),
    ],
)
def test_slots_with_invalid_rank_or_interleave_are_rejected(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockTable(8, 2, 2, 8, **arguments)  # type: ignore[arg-type]  # integers all
