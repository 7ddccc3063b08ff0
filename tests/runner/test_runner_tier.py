"""A runner with a host tier: rows that go to the tier and come back to other blocks say what they would have said."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hand_steps import HandRows, plan_by_hand
from runner_support import drawn, failing, loaded_model, shared_prompts

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.step import NO_TIER_COPIES, Cells, Copy, Step, StepResult, TierCopies
from small_steps import small_step

TOKENS = 160
ROWS = 3

Places = dict[tuple[int, int, int], int]
"""(group, row, column) -> block of tokens; states have the columns -1, -2 and so on."""


@contextmanager
def rows_of(name: str, *, tier: bool = True) -> Iterator[HandRows]:
    loaded, prompts = loaded_model(name), shared_prompts(ROWS, 3)
    layout = plan_by_hand(loaded, TOKENS, ROWS + 2, 1).config if tier else None
    rows = HandRows(loaded, prompts, drawn(ROWS), max_tokens=TOKENS, most_drafts=1, tier=layout)
    try:
        yield rows
    finally:
        rows.runner.detach()


class Travelling:
    """Rows whose blocks go to the tier and come back."""

    def __init__(self, rows: HandRows) -> None:
        self.rows, self.places = rows, Places()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.rows.step()
            self._note(self.rows.steps[-1].cells)

    def _note(self, cells: Cells) -> None:
        columns = (cells.group.tolist(), cells.row.tolist(), cells.column.tolist(), cells.block.tolist())
        for group, row, column, block in zip(*columns, strict=True):
            self.places[group, row, column] = block

    def execute(self, **fields: Any) -> StepResult:  # noqa: ANN401  # of a Step
        """An empty Step."""
        result = self.rows.runner.execute(small_step(len(self.rows.results), **fields))
        self.rows.results.append(result)
        return result

    def travel(self, *, loads: bool = True) -> tuple[StepResult, StepResult]:
        """To the tier, where each block moves once more, and back into other blocks; what was left is cleared."""
        held = dict(self.places)
        for number, groups in enumerate(self.rows._states):
            held |= {(of, number, -1 - i): one for of, all_of in groups.items() for i, one in enumerate(all_of)}
        places = sorted(held, key=lambda place: place[1])
        group, row, _ = np.array(places, np.int32).T
        block = np.array([held[place] for place in places], np.int32)
        there = np.arange(1, len(block) + 1, dtype=np.int32)
        last = len(block) + 1
        first = self.execute(stores=TierCopies(row, group, block, there), zero=np.stack((group, block), axis=1))
        moved = (Copy("before", int(group[0]), 1, last, "move"),)
        new = np.array([next(self.rows._free) for _ in block], np.int32)
        source = np.where(there == 1, last, there).astype(np.int32)
        back = TierCopies(row + ROWS, group, source, new)
        second = self.execute(
            tier_copies=moved, loads=back if loads else NO_TIER_COPIES, zero=np.stack((group, new), axis=1)
        )
        now = dict(zip(places, new.tolist(), strict=True))
        tokens = {place: to for place, to in now.items() if place[2] >= 0}
        self.places |= tokens
        cells = np.array([(*place, to) for place, to in tokens.items()], np.int32).reshape(-1, 4)
        self.execute(cells=Cells(*cells.T))
        for row_states, groups in enumerate(self.rows._states):
            for of, all_of in groups.items():
                all_of[:] = [now[of, row_states, -1 - i] for i in range(len(all_of))]
        return first, second


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1"])
def test_runner_rows_return_from_the_tier_to_other_blocks(name: str) -> None:
    with rows_of(name, tier=False) as plain:
        for _ in range(8):
            plain.step()
    for loads in (True, False):
        with rows_of(name) as rows:
            travelling = Travelling(rows)
            travelling.run(4)
            stored, loaded = travelling.travel(loads=loads)
            assert (stored.arrived.tolist(), stored.lost.tolist()) == ([0, 1, 2], [])
            assert loaded.arrived.tolist() == ([3, 4, 5] if loads else [])
            travelling.run(4)
            assert (rows.tokens == plain.tokens) is loads  # the control: without the loads, zeros are read


def transfers(step: Step) -> Step:
    """``step`` with a store and a load of blocks that no row has."""
    one = [np.array([value], np.int32) for value in (0, 3)]
    return replace(
        step,
        stores=TierCopies(np.array([7], np.int32), one[0], np.array([40], np.int32), one[1]),
        loads=TierCopies(np.array([9], np.int32), one[0], one[1], np.array([41], np.int32)),
    )


def test_runner_reports_transfers_of_a_failed_step_in_the_next_result() -> None:
    with rows_of("llama") as rows:
        plain = rows.make()
        step = transfers(plain)
        with failing(rows.runner.model), pytest.raises(RuntimeError, match="the device is gone"):
            rows.runner.execute(step)
        again = replace(plain, id=1, after=-1)
        with pytest.raises(WorkerError, match="transfer 7 has begun in an earlier Step"):
            rows.runner.execute(transfers(again))
        result = rows.runner.execute(again)
        assert (result.arrived.tolist(), result.lost.tolist()) == ([7, 9], [])


def test_runner_without_a_tier_rejects_transfers() -> None:
    with rows_of("llama", tier=False) as rows:
        step = transfers(rows.make())
        for one in (step, replace(step, loads=NO_TIER_COPIES), replace(step, stores=NO_TIER_COPIES)):
            with pytest.raises(WorkerError, match="Step 0 has transfers, and this runner has no host tier"):
                rows.runner.execute(one)
        assert rows.runner.tables.last_step_id == -1


def test_runner_rejects_a_wrong_transfer_and_changes_nothing() -> None:
    with rows_of("llama") as rows:
        before = rows.runner.storage.arena.clone()
        step = transfers(rows.make())
        wrong = replace(step, loads=replace(step.loads, group=np.array([9], np.int32)))
        with pytest.raises(WorkerError, match="Step 0, loads, source: group 9 does not exist"):
            rows.runner.execute(wrong)
        assert rows.runner.tables.last_step_id == -1
        assert (rows.runner.storage.arena == before).all()
        rows.runner.execute(step)


def test_runner_with_a_tier_of_another_model_is_rejected() -> None:
    loaded = loaded_model("llama")
    other = plan_by_hand(loaded_model("gemma3"), TOKENS, ROWS).config
    with pytest.raises(ConfigError, match="the host tier has other groups or blocks"):
        HandRows(loaded, shared_prompts(1, 1), drawn(1), max_tokens=TOKENS, tier=other)
