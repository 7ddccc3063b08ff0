"""Section 8 of the contract by column: its measured lines, a loop over single rows, and what is refused."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker import RowColumns, StatePlan, state_copies

Triple = tuple[int, int, int]


def triples(plan: StatePlan) -> list[Triple]:
    return list(zip(plan.source.tolist(), plan.destination.tolist(), plan.bias.tolist(), strict=True))


def filled(rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """A table whose cell (row, column) is block 100 * row + column + 1, and full rows."""
    table = 100 * np.arange(rows)[:, None] + np.arange(width) + 1
    return table.astype(np.int32), np.full(rows, width, np.int32)


# -- measured lines


def test_measured_before_the_forward() -> None:
    columns = RowColumns(16, 1, 2)
    assert triples(columns.before([0], [0], [32], [1])) == []
    asked = [(32, 28, 1), (60, 3, 1), (63, 3, 2), (64, 3, 1), (66, 3, 3)]
    plans = [columns.before([0], [computed], [count], [a]) for computed, count, a in asked]
    assert [triples(plan) for plan in plans] == [[(1, 3, 0)], [], [(3, 4, 1)], [], []]
    assert [plan.accepted.tolist() for plan in plans] == [[1], [1], [1], [1], [3]]
    assert {plan.stage for plan in plans} == {"before"}


@pytest.mark.parametrize(
    ("computed", "scheduled", "expected"), [(16, 40, (0, 3, 0)), (48, 1, (2, 3, 0)), (32, 20, (1, 3, 0))]
)
def test_measured_first_steps_of_hits_and_resumed_requests(computed: int, scheduled: int, expected: Triple) -> None:
    columns = RowColumns(16, 2, 2)
    columns.before([1], [0], [300], [1])  # another request had the row
    columns.drop([1])
    assert triples(columns.before([1], [computed], [scheduled], [1])) == [expected]


@pytest.mark.parametrize(
    ("computed", "a", "copy", "blocks", "goes_on"),
    [
        (3, 1, (1, 0, 0), (2, 2, 1), 1),
        (3, 2, (1, 0, 0), (2, 2, 1), 2),
        (3, 3, (1, 0, 0), (2, 2, 1), 3),
        (2, 2, (1, 0, 1), (3, 2, 1), 2),
        (5, 3, (1, 1, 2), (4, 2, 2), 1),
        (5, 2, None, None, 2),
    ],
)
def test_measured_after_the_forward(
    computed: int, a: int, copy: Triple | None, blocks: Triple | None, goes_on: int
) -> None:
    """Blocks of 4 tokens, columns 0 .. 4 are blocks 1 .. 5, two drafts a step, S = 1. blocks: temporal, conv, to."""
    columns = RowColumns(4, 1, 2)
    columns.before([0], [computed], [3], [1])
    plan = columns.after([0], [computed], [3], [2], [a])
    assert triples(plan) == ([copy] if copy else [])
    assert plan.accepted.tolist() == [goes_on]
    copies = state_copies(plan, *filled(1, 5))
    found = zip(copies.temporal.tolist(), copies.conv.tolist(), copies.destination.tolist(), strict=True)
    assert list(found) == ([blocks] if blocks else [])


def test_measured_tables_of_section_4_name_the_blocks() -> None:
    """Two speculative blocks, chunks of 32 and 28: the worker's row only grows, its stale columns are not read."""
    columns, row = RowColumns(16, 1, 2), [0, 4, 5, 6]
    assert len(columns.before([0], [0], [32], [1])) == 0
    found = []
    for new, computed, count, a in (([5, 8], 32, 28, 1), ([], 60, 3, 1), ([10], 63, 3, 3), ([], 66, 3, 1)):
        row += new
        plan = columns.before([0], [computed], [count], [a])
        copies = state_copies(plan, np.array([row], np.int32), np.array([len(row)], np.int32))
        found.append(
            (copies.conv.tolist(), copies.temporal.tolist(), copies.destination.tolist(), copies.bias.tolist())
        )
    assert found == [([4], [4], [6], [0]), ([],) * 4, ([6], [8], [5], [2]), ([],) * 4]


# -- against single rows


def last_column(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) - 1


def before_one(held: int | None, computed: int, scheduled: int, a: int, size: int) -> tuple[Triple | None, int]:
    """Section 8, before the forward, for one row: the copy and the a that is left."""
    previous = held if held is not None else (computed - 1) // size if computed else None
    current = last_column(computed + scheduled, size)
    if previous is None or previous == current:
        return None, a
    return (previous, current, a - 1), 1


def after_one(
    state: int, computed: int, scheduled: int, drafts: int, a: int, *, size: int
) -> tuple[Triple | None, int]:
    """Section 8, after the forward, for one row."""
    first = computed + scheduled - drafts
    edge = (first + a - 1) // size * size
    if edge < first:
        return None, a
    bias, target = edge - first, edge // size - 1
    return (None if target == state and not bias else (state, target, bias)), 1 if target == state else a


@settings(max_examples=2 * settings().max_examples)
@given(data=st.data(), size=st.integers(1, 64), drafts=st.integers(0, 8), rows=st.integers(1, 12))
def test_batches_are_those_of_single_rows(data: st.DataObject, size: int, drafts: int, rows: int) -> None:
    """Steps of random rows; a remembered column is where the row's last step ended."""
    columns = RowColumns(size, rows, drafts)
    held: dict[int, int] = {}
    count = st.integers(1, max(2 * size, drafts + 2))
    for _ in range(data.draw(st.integers(1, 4))):
        gone = data.draw(st.lists(st.integers(0, rows - 1), max_size=3, unique=True))
        columns.drop(gone)
        held = {row: column for row, column in held.items() if row not in gone}
        at = data.draw(st.lists(st.integers(0, rows - 1), max_size=rows, unique=True))
        computed = [data.draw(st.integers(row in held, 4 * size)) for row in at]
        scheduled = [data.draw(count) for _ in at]
        a = [data.draw(st.integers(1, 1 + drafts if row in held else 1)) for row in at]
        plan = columns.before(at, computed, scheduled, a)
        single = [
            before_one(held.get(row), c, s, b, size) for row, c, s, b in zip(at, computed, scheduled, a, strict=True)
        ]
        assert plan.row.tolist() == [row for row, (copy, _) in zip(at, single, strict=True) if copy]
        assert triples(plan) == [copy for copy, _ in single if copy]
        assert plan.accepted.tolist() == [left for _, left in single]
        held |= {row: last_column(c + s, size) for row, c, s in zip(at, computed, scheduled, strict=True)}
        drafted = [data.draw(st.integers(0, min(drafts, s - 1))) for s in scheduled]
        a = [data.draw(st.integers(1, 1 + d)) for d in drafted]
        plan = columns.after(at, computed, scheduled, drafted, a)
        after = [
            after_one(held[row], c, s, d, b, size=size)
            for row, c, s, d, b in zip(at, computed, scheduled, drafted, a, strict=True)
        ]
        assert triples(plan) == [copy for copy, _ in after if copy]
        assert plan.row.tolist() == [row for row, (copy, _) in zip(at, after, strict=True) if copy]
        assert plan.accepted.tolist() == [left for _, left in after]


# -- blocks of a plan


def plan(stage: str, source: int, destination: int, bias: int, row: int = 0) -> StatePlan:
    one = [np.array([value], np.int64) for value in (row, source, destination, bias, 1)]
    return StatePlan(stage, *one)  # type: ignore[arg-type]  # one of the two stages


def test_an_edge_that_nobody_keeps_is_not_copied() -> None:
    """A prompt's last chunk with drafts passes an edge whose column is null: there is no block to publish."""
    columns = RowColumns(4, 1, 2)
    columns.before([0], [0], [9], [1])
    after = columns.after([0], [0], [9], [2], [2])
    assert triples(after) == [(2, 1, 1)]
    table = np.array([[0, 0, 5, 6, 7]], np.int32)
    assert len(state_copies(after, table, np.array([5], np.int32))) == 0
    table[0, 1] = 9
    copies = state_copies(after, table, np.array([5], np.int32))
    assert (copies.conv.tolist(), copies.temporal.tolist(), copies.destination.tolist()) == ([5], [6], [9])


def test_an_edge_whose_block_went_on_is_not_copied() -> None:
    """Column 1 was a draft's; its block is that of column 4 now, where the accepted state may lie."""
    columns = RowColumns(2, 1, 5)
    columns.before([0], [0], [2], [1])
    columns.before([0], [2], [6], [1])
    after = columns.after([0], [2], [6], [5], [2])
    assert triples(after) == [(3, 1, 1)]
    table = np.array([[1, 2, 3, 4, 2, 3, 7, 8, 2]], np.int32)
    assert len(state_copies(after, table, np.array([8], np.int32))) == 0
    table[0, 4] = 9  # what lies behind the row's columns does not count
    assert state_copies(after, table, np.array([8], np.int32)).destination.tolist() == [2]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (plan("before", 1, 3, 0), "copied from the null block"),  # conv and temporal
        (plan("before", 0, 3, 1), "copied from the null block"),  # temporal alone: column 1
        (plan("after", 0, 3, 1), "copied from the null block"),
        (plan("before", 0, 1, 0), "is null or went on to a later one"),
        (plan("before", 0, 2, 0, row=1), "is null or went on to a later one"),
        (plan("after", 2, 2, 1, row=1), "is null or went on to a later one"),
        (plan("before", 0, 4, 0), "no such column"),
        (plan("before", 3, 0, 1), "no such column"),  # column 4 is what a former row left behind
        (plan("after", 2, 0, 2), "no such column"),
        (plan("before", 0, 2, 0, row=2), "not in a block table of 2 rows"),
    ],
)
def test_columns_without_a_block_are_refused(wanted: StatePlan, message: str) -> None:
    table, held = filled(2, 6)
    table[0, 1] = 0
    table[1, 5] = table[1, 2]  # went on to column 5
    held[0] = 4
    with pytest.raises(WorkerError, match=message):
        state_copies(wanted, table, held)


# -- what is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.before([4], [0], [1], [1]), "rows must lie in 0 .. 3, got 4"),
        (lambda c: c.before([-1], [0], [1], [1]), "got -1"),
        (lambda c: c.before([1, 2, 1], [0] * 3, [1] * 3, [1] * 3), "comes twice"),
        (lambda c: c.before([1, 2], [0], [1, 1], [1, 1]), r"computed \(1,\)"),
        (lambda c: c.before([0], [5], [0], [1]), "row 0: .* needs tokens .*scheduled 0"),
        (lambda c: c.before([1], [-1], [1], [1]), "no negative count .computed -1"),
        (lambda c: c.before([0], [9], [1], [0]), "accepted must lie in"),
        (lambda c: c.before([0], [9], [1], [4]), "accepted must lie in"),
        (lambda c: c.before([1], [9], [1], [2]), "1 for a new row"),
        (lambda c: c.before([1, 0], [9, 0], [1, 1], [1, 1]), "row 0: .* dropped first"),
        (lambda c: c.after([0], [6], [3], [2], [0]), "accepted must lie in"),
        (lambda c: c.after([0], [6], [3], [1], [3]), "accepted must lie in"),
        (lambda c: c.after([0], [6], [3], [-1], [1]), "drafts must be behind"),
        (lambda c: c.after([0], [6], [3], [3], [1]), "drafts must be behind"),
        (lambda c: c.after([0], [2], [7], [3], [1]), "drafts must be behind"),
        (lambda c: c.after([0], [10], [3], [2], [1]), "call before first"),
        (lambda c: c.after([1], [6], [3], [2], [1]), "call before first"),
        (lambda c: c.after([0], [6], [0], [0], [1]), "needs tokens"),
        (lambda c: c.drop([1, 4]), "rows must lie in"),
    ],
)
def test_bad_input_is_refused_and_remembers_nothing(call: Callable[[RowColumns], object], message: str) -> None:
    def columns() -> RowColumns:
        one = RowColumns(4, 4, 2)
        one.before([0], [6], [3], [1])  # S = 2
        return one

    refused = columns()
    with pytest.raises(WorkerError, match=message):
        call(refused)
    later = [3, 1, 0], [5, 5, 9], [4, 1, 9], [1, 1, 3]
    found, expected = refused.before(*later), columns().before(*later)
    assert (found.row.tolist(), triples(found)) == (expected.row.tolist(), triples(expected))


@pytest.mark.parametrize("sizes", [(0, 1, 0), (4, 0, 0), (4, 1, -1)])
def test_sizes_that_cannot_work(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"must be at least 1|must not be negative"):
        RowColumns(*sizes)
