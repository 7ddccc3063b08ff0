from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.request import SamplingParams
from hybridkv.step import SCHEMA_VERSION, Cells, Csr, NewRow, Step
from hybridkv.worker import MultiGroupBlockTable


def tables(groups: int = 2) -> MultiGroupBlockTable:
    return MultiGroupBlockTable(4, 64, 32, False, "cpu", [4, 8][:groups], num_blocks=100)  # noqa: FBT003  # vLLM's positions


def cells(*items: tuple[int, int, int, int]) -> Cells:
    columns = np.asarray(items, np.int32).reshape(-1, 4).T
    return Cells(*(np.ascontiguousarray(one) for one in columns))


def new_row(row: int) -> NewRow:
    return NewRow(row, f"r{row}", np.arange(3, dtype=np.int32), 3, SamplingParams())


def step(number: int, written: Cells, *, new: tuple[int, ...] = (), finished: tuple[int, ...] = ()) -> Step:
    none = np.empty(0, np.int32)
    return Step(
        id=number,
        after=number - 1,
        rows=none,
        num_computed=none,
        num_scheduled=none,
        samples=np.empty(0, np.bool_),
        token_ids=Csr.empty(0),
        drafts=Csr.empty(0),
        cells=written,
        finished_rows=np.asarray(finished, np.int32),
        new_rows=tuple(new_row(row) for row in new),
    )


def blocks(t: MultiGroupBlockTable, group: int, row: int) -> list[int]:
    ids: list[int] = t[group].get_numpy_array()[row, : t[group].num_blocks_per_row[row]].tolist()
    return ids


def test_calls_go_to_every_group_and_widths_follow_the_block_size() -> None:
    t = tables()
    assert [t[g].max_num_blocks_per_req for g in range(len(t))] == [16, 8]
    t.add_row([[7, 3], [5]], 0)
    t.append_row([[4], []], 0)
    t.append_rows([1, 0], [[9, 8], [2, 1]])
    assert (blocks(t, 0, 0), blocks(t, 1, 0)) == ([7, 3, 4, 8], [5, 1])
    t.swap_row(0, 1)
    t.move_row(1, 3)
    assert (blocks(t, 0, 0), blocks(t, 1, 3), blocks(t, 0, 1)) == ([9], [5, 1], [])
    t.compute_slot_mapping([3, 3], [4, 9])
    t.commit_slot_mapping(3)
    assert [one.slot_mapping[:3].tolist() for one in t] == [[12, 17, -1], [44, 9, -1]]
    assert t.commit_block_table(4) > 0
    t.clear()
    assert not any(one.get_numpy_array().any() for one in t)


def test_explicit_widths() -> None:
    t = MultiGroupBlockTable(2, 64, 32, False, "cpu", [4, 8], max_num_blocks=[3, 5])  # noqa: FBT003  # vLLM's positions
    assert [one.max_num_blocks_per_req for one in t] == [3, 5]
    with pytest.raises(ConfigError, match="1 entries in max_num_blocks for 2 groups"):
        MultiGroupBlockTable(2, 64, 32, False, "cpu", [4, 8], max_num_blocks=[3])  # noqa: FBT003  # same
    with pytest.raises(ConfigError, match="at least one group"):
        MultiGroupBlockTable(2, 64, 32, False, "cpu", [])  # noqa: FBT003  # same


def test_a_step_clears_finished_rows_begins_new_ones_then_writes_in_order() -> None:
    t = tables()
    t.apply(step(0, cells((0, 0, 0, 11), (0, 0, 1, 12), (1, 0, 0, 13), (0, 1, 0, 14)), new=(0, 1)))
    assert (blocks(t, 0, 0), blocks(t, 1, 0), blocks(t, 0, 1)) == ([11, 12], [13], [14])
    # row 0 ends and begins in one Step; a cell written twice keeps the later id
    t.apply(step(1, cells((0, 0, 0, 21), (0, 0, 0, 22)), new=(0,), finished=(0, 1)))
    assert (blocks(t, 0, 0), blocks(t, 1, 0), blocks(t, 0, 1)) == ([22], [], [])
    # it may also begin without having been finished
    t.apply(step(2, cells((0, 0, 0, 31)), new=(0,)))
    t.apply(step(3, cells((0, 0, 1, 32)), new=(0,)))
    assert t[0].num_blocks_per_row.tolist() == [2, 0, 0, 0]
    t.apply(step(4, cells((0, 0, 0, 33)), new=(0,)))
    assert blocks(t, 0, 0) == [33]
    assert t.last_step_id == 4


def test_a_missed_or_repeated_step_is_refused() -> None:
    t = tables()
    t.apply(step(0, cells((0, 0, 0, 11)), new=(0,)))
    for wrong in (step(2, cells((0, 0, 1, 12))), step(0, cells((0, 0, 1, 12)))):
        with pytest.raises(WorkerError, match=f"Step {wrong.id} follows Step {wrong.after}, the last one here was 0"):
            t.apply(wrong)
    assert (blocks(t, 0, 0), t.last_step_id) == ([11], 0)


def test_after_a_failure_ids_jump_and_are_taken() -> None:
    t = tables()
    t.apply(step(0, cells((0, 0, 0, 11)), new=(0,)))
    t.apply(step(1, cells((0, 0, 1, 12))))  # its forward raised; step 2 was in flight and never came here
    t.apply(replace(step(3, cells((0, 0, 0, 13)), new=(0,), finished=(0,)), after=0))
    assert (blocks(t, 0, 0), t.last_step_id) == ([13], 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(step(1, cells()), schema_version=SCHEMA_VERSION + 1), "schema version"),
        (step(1, cells((0, 0, 1, 5), (2, 0, 0, 5))), "cells.group"),
        (step(1, cells((0, 0, 1, 5), (0, 4, 0, 5))), "cells.row"),
        (step(1, cells((0, 0, 1, 5), (1, 0, 8, 5))), "column 8 of row 0"),
        (step(1, cells((0, 0, 1, 5), (0, 0, -1, 5))), "column -1"),
        (step(1, cells((0, 0, 1, 5), (0, 0, 2, 100))), "cells.block"),
        (step(1, cells((0, 0, 1, 5), (0, 0, 2, -1))), "cells.block"),
        (step(1, cells((0, 0, 1, 5)), new=(4,)), "new_rows"),
        (step(1, cells((0, 0, 1, 5)), finished=(9,)), "finished_rows"),
        (replace(step(1, cells((0, 0, 1, 5))), rows=np.asarray([7], np.int32)), "rows must lie"),
    ],
)
def test_a_step_that_does_not_fit_changes_nothing(wrong: Step, message: str) -> None:
    t = tables()
    t.apply(step(0, cells((0, 0, 0, 11), (1, 0, 0, 12)), new=(0,)))
    t.commit_block_table(4)
    with pytest.raises(WorkerError, match=message):
        t.apply(wrong)
    assert (blocks(t, 0, 0), blocks(t, 1, 0), t.last_step_id) == ([11], [12], 0)
    assert t.commit_block_table(4) == 0
    t.apply(step(1, cells((0, 0, 1, 5))))


def test_no_group_is_written_when_one_does_not_fit() -> None:
    t = tables()
    calls: list[Callable[[], None]] = [
        lambda: t.append_row([[1], [1] * 9], 0),
        lambda: t.add_row([[1], [100]], 0),
        lambda: t.append_rows([0], [[1], [-1]]),
        lambda: t.append_row([[1]], 0),
    ]
    for call in calls:
        with pytest.raises(WorkerError):
            call()
        assert [one.num_blocks_per_row.tolist() for one in t] == [[0] * 4] * 2
