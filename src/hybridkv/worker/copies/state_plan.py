"""Which column of a row's states goes where, before and after a forward (docs/contracts.md, 8). Pure numpy.

A row that computes tokens and verifies two drafts behind them; S is its state column, R the tokens before the drafts:

    column      S            S+1   S+2
    temporal  [ R          | R+1 | R+2 ]     the tokens that each state has seen
    conv      [ .. R R+1 R+2 ]               one window over the last inputs, kernel_width - 1 + drafts columns

With ``a`` of these tokens accepted the request goes on at R + a - 1: temporal from column S + a - 1, conv from its
columns a - 1 on. ``bias`` is how far both begin behind column S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.worker.tables.slot_mapping import Ids, check_least

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

_NONE: Final = -1
_NULL_BLOCK: Final = 0


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """Copies of states, by column, for all groups of one block size.

    stage: "before" or "after" the forward. row, source, destination, bias: int64[n], a row at most once. A temporal
    state goes from column source + bias to destination; of a conv state the columns bias .. of source go to the
    columns 0 .. of destination, and the last bias columns there keep what they hold.
    accepted: int64[R], for every row asked about, in order: the a with which its forward reads ("before"), or
    with which its next step begins ("after").
    """

    stage: Literal["before", "after"]
    row: Int64
    source: Int64
    destination: Int64
    bias: Int64
    accepted: Int64

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, eq=False)
class StateCopies:
    """A plan's copies in one group, by block: int64[n] each, in the order of the plan.

    conv, temporal: source blocks of the two kinds of state. destination: of both. bias: as in StatePlan.
    """

    conv: Int64
    temporal: Int64
    destination: Int64
    bias: Int64

    def __len__(self) -> int:
        return len(self.destination)


class RowColumns:
    """Remembers S, the column that holds each row's state after its last step.

    block_size: tokens of a block of states. max_num_reqs: rows. num_speculative_tokens: most drafts of a step.
    ``before`` and ``after`` take a row at most once a call, and check everything before they remember anything. What
    they remember follows the Step: rows of a Step that fails later must be dropped, as they resume from a checkpoint.
    Raises ConfigError for sizes that cannot work, WorkerError for rows and counts that cannot be.
    """

    def __init__(self, block_size: int, max_num_reqs: int, num_speculative_tokens: int = 0) -> None:
        check_least(1, block_size=block_size, max_num_reqs=max_num_reqs)
        check_least(0, num_speculative_tokens=num_speculative_tokens)
        self.block_size = block_size
        self.max_num_reqs = max_num_reqs
        self.num_speculative_tokens = num_speculative_tokens
        self._column: Int64 = np.full(max_num_reqs, _NONE, np.int64)

    def drop(self, rows: Ids) -> None:
        """Forget the columns of rows whose request finishes, is preempted or resumes. O(rows)."""
        at = np.asarray(rows, np.int64)
        self._check_rows(at)
        self._column[at] = _NONE

    def before(self, rows: Ids, computed: Ids, scheduled: Ids, accepted: Ids) -> StatePlan:
        """What ``rows`` copy before the forward that runs ``scheduled`` tokens behind ``computed`` ones. O(rows).

        accepted: a of each row's last step, 1 for a row that is new or was dropped. Remembers the rows' new columns.
        """
        at, begin, count, a = self._vectors(rows=rows, computed=computed, scheduled=scheduled, accepted=accepted)
        held = self._column[at]
        most = np.where(held == _NONE, 1, 1 + self.num_speculative_tokens)
        _refuse(
            at,
            (a < 1) | (a > most),
            "accepted must lie in 1 .. 1 + drafts, and be 1 for a new row",
            accepted=a,
            most=most,
        )
        _refuse(at, (held != _NONE) & (begin == 0), "a row that starts anew must be dropped first", column=held)
        previous = np.where(held == _NONE, (begin - 1) // self.block_size, held)  # of no token: column -1, none
        current = (begin + count - 1) // self.block_size
        copied = (previous != _NONE) & (previous != current)
        self._column[at] = current
        return StatePlan(
            "before", at[copied], previous[copied], current[copied], a[copied] - 1, np.where(copied, np.int64(1), a)
        )

    def after(self, rows: Ids, computed: Ids, scheduled: Ids, drafts: Ids, accepted: Ids) -> StatePlan:
        """What ``rows`` copy once ``accepted`` tokens of the step's ``drafts`` + 1 last ones are accepted. O(rows).

        The state at the last block edge that was reached goes to the edge's own column, where it can be published.
        computed, scheduled: as in ``before``; the last ``drafts`` of the scheduled tokens are drafts.
        """
        at, begin, count, drafted, a = self._vectors(
            rows=rows, computed=computed, scheduled=scheduled, drafts=drafts, accepted=accepted
        )
        most = np.minimum(count - 1, self.num_speculative_tokens)
        _refuse(
            at,
            (drafted < 0) | (drafted > most),
            "drafts must be behind a token that is none, and as many as planned",
            drafts=drafted,
            most=most,
        )
        _refuse(at, (a < 1) | (a > drafted + 1), "accepted must lie in 1 .. 1 + drafts", accepted=a, drafts=drafted)
        state = self._column[at]
        last = (begin + count - 1) // self.block_size
        _refuse(
            at,
            state != last,
            "the state is not where this step leaves it: call before first",
            column=state,
            wanted=last,
        )
        certain = begin + count - drafted
        edge = (certain + a - 1) // self.block_size * self.block_size
        bias, target = edge - certain, edge // self.block_size - 1
        copied = (bias >= 0) & ((target != state) | (bias > 0))
        # an edge in column S itself is the step's very last token, so nothing accepted lies behind it
        in_place = (bias >= 0) & (target == state)
        return StatePlan(
            "after", at[copied], state[copied], target[copied], bias[copied], np.where(in_place, np.int64(1), a)
        )

    def _vectors(self, **named: Ids) -> list[Int64]:
        """int64 vectors of one length: distinct rows in range, their computed and scheduled tokens, and more."""
        vectors = [np.array(one, np.int64) for one in named.values()]
        if any(one.shape != (len(vectors[0]),) for one in vectors):
            sizes = ", ".join(f"{name} {one.shape}" for name, one in zip(named, vectors, strict=True))
            raise WorkerError(f"one number of each is needed for every row, got {sizes}")
        self._check_rows(vectors[0])
        if len(np.unique(vectors[0])) < len(vectors[0]):
            raise WorkerError("a row comes twice in one step: give every row once")
        at, computed, scheduled = vectors[:3]
        wrong = (computed < 0) | (scheduled < 1)
        _refuse(at, wrong, "a step needs tokens and no negative count", computed=computed, scheduled=scheduled)
        return vectors

    def _check_rows(self, at: Int64) -> None:
        if at.size and (at.min() < 0 or at.max() >= self.max_num_reqs):
            raise WorkerError(f"rows must lie in 0 .. {self.max_num_reqs - 1}, got {at.min()} .. {at.max()}")


def state_copies(plan: StatePlan, table: Int32, num_blocks: Int32) -> StateCopies:
    """The blocks of ``plan`` in one group. O(copies, and the columns behind their destinations).

    table: int32[rows, width], the group's block table; num_blocks: int32[rows], how many columns of each row mean
    anything (``BlockTable.get_numpy_array()``, ``num_blocks_per_row``). A column is gone when it is null, or when its
    block is that of a later column, too: drafts' blocks go on to later columns, and a row is only appended to.
    After the forward nothing is copied to a column that is gone: nobody keeps the state of that edge. Else it raises
    WorkerError, as for a row that is not in the table, a column beyond its row, and a null source.
    """
    row, column = plan.row, np.stack((plan.source, plan.source + plan.bias, plan.destination))
    if row.size and row.max() >= len(table):
        raise WorkerError(f"row {row.max()} is not in a block table of {len(table)} rows: size both alike")
    last = column.max(axis=0)
    held = num_blocks[row].astype(np.int64)
    _refuse(row, last >= held, "the row has no such column of states: send its blocks first", column=last, columns=held)
    blocks: Int64 = table[row, column].astype(np.int64)
    conv, temporal, destination = blocks
    empty = (conv == _NULL_BLOCK) | (temporal == _NULL_BLOCK)
    _refuse(row, empty, "a state would be copied from the null block", column=plan.source, bias=plan.bias)
    gone = (destination == _NULL_BLOCK) | _comes_again(table, row, plan.destination, held)
    lost = gone & ((plan.destination == plan.source) | (plan.stage == "before"))
    _refuse(row, lost, "the state's new column is null or went on to a later one", column=plan.destination)
    return StateCopies(conv[~gone], temporal[~gone], destination[~gone], plan.bias[~gone])


def _comes_again(table: Int32, row: Int64, column: Int64, held: Int64) -> Bool:
    """Whether the block of (row, column) is in a later one of the row's ``held`` columns."""
    behind = np.arange(1, (held - column).max(initial=1))
    later = column[:, None] + behind
    inside = later < held[:, None]
    blocks = table[row[:, None], np.where(inside, later, 0)]
    again: Bool = (inside & (blocks == table[row, column][:, None])).any(axis=1)
    return again


def _refuse(row: Int64, wrong: Bool, why: str, **values: Int64) -> None:
    """Raise WorkerError naming the first row that is ``wrong`` and its ``values``."""
    if wrong.any():
        i = int(wrong.argmax())
        found = ", ".join(f"{name} {one[i]}" for name, one in values.items())
        raise WorkerError(f"row {row[i]}: {why} ({found})")
