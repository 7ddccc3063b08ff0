"""States of the reference layout for kernels that go on in place: the worker follows the columns of its own tables.

    before(step)             every row's state comes to the column of the last token that the step runs
    blocks(step, group)      where the forward reads, and writes
    after(step, accepted)    states at edges that accepted drafts crossed come to where they can be published

It stands for what a Step says of states: ``copies`` of kind "state", ``state_read`` and ``state_writes``. A forward
that reads one block and writes another needs none of this: it does what the Step says.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.specs import MambaSpec
from hybridkv.step import Step
from hybridkv.worker.copies.copy_kernels import TORCH, CopyKernels
from hybridkv.worker.copies.state_copy import StateCopier
from hybridkv.worker.copies.state_plan import Ids, RowColumns, StatePlan, state_copies
from hybridkv.worker.pages.storage import PagedStorage
from hybridkv.worker.tables.multi_group import MultiGroupBlockTable

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class InPlaceStates:
    """All groups of states of ``storage``; ``tables`` have applied every Step that comes here.

    num_speculative_tokens: most drafts of a row in a step; conv states have so many columns more than their kernel
    needs. columns_axis: of conv states, as ``state_parts`` has it.
    Raises ConfigError where states have no columns: in the natural layout, where they are not kept, without any.
    """

    def __init__(
        self,
        storage: PagedStorage,
        tables: MultiGroupBlockTable,
        num_speculative_tokens: int = 0,
        *,
        columns_axis: int = 0,
        kernels: CopyKernels = TORCH,
    ) -> None:
        config = storage.config
        planned = {number: group.layer_specs[0] for number, group in enumerate(config.groups)}
        specs = {number: spec for number, spec in planned.items() if isinstance(spec, MambaSpec)}
        if config.slabs is not None or {spec.cache_mode for spec in specs.values()} != {"align"}:
            raise ConfigError(
                "no states in columns here: plan with layout='reference' and placement='align', or read and write "
                "states where the Step says"
            )
        self._tables = tables
        self._copiers = {
            group: StateCopier.of_group(storage, group, columns_axis=columns_axis, kernels=kernels) for group in specs
        }
        self._block_size = next(iter(specs.values())).block_size  # the layout gives all states the same
        self._columns = RowColumns(self._block_size, tables.max_num_reqs, num_speculative_tokens)
        self._accepted: Int64 = np.ones(tables.max_num_reqs, np.int64)

    def before(self, step: Step) -> Step:
        """Copies states to where the forward goes on. The Step that is left to do: one without copies of states.

        Raises WorkerError as RowColumns, state_copies and StateCopier do. O(rows * groups + bytes copied).
        """
        gone = np.concatenate((step.finished_rows, [new.row for new in step.new_rows])).astype(np.int64)
        self._columns.drop(gone)
        self._accepted[gone] = 1
        rows = step.rows
        self._follow(step, self._columns.before(rows, step.num_computed, step.num_scheduled, self._accepted[rows]))
        return replace(step, copies=tuple(copy for copy in step.copies if copy.kind != "state"))

    def blocks(self, step: Step, group: int) -> tuple[Int32, Int64]:
        """int32[R, 1 + drafts], and int64[R], from which of them the row goes on: its ``bias``.

        A row reads its temporal state from block [i, bias[i]], its conv state from the columns bias[i] .. of block
        [i, 0]. It writes one temporal state to each block, behind the last token that is no draft and behind each
        draft, and to block [i, 0] the inputs that all of them go on from. Null (0) behind the row's own columns.
        """
        ends = step.num_computed.astype(np.int64) + step.num_scheduled
        columns = (ends - 1) // self._block_size
        behind = columns[:, None] + np.arange(1 + self._columns.num_speculative_tokens)
        table = self._tables[group].get_numpy_array()
        inside = behind < self._tables[group].num_blocks_per_row[step.rows][:, None]
        blocks = table[step.rows[:, None], np.where(inside, behind, 0)]
        return np.where(inside, blocks, 0).astype(np.int32), self._accepted[step.rows] - 1

    def after(self, step: Step, accepted: Ids) -> None:
        """Behind the forward, once it is known how many of each row's last 1 + drafts tokens count: ``accepted``.

        1 for a row without drafts. Raises WorkerError as ``before`` does. O(rows * groups + bytes copied).
        """
        drafts = np.diff(step.drafts.indptr)
        self._follow(step, self._columns.after(step.rows, step.num_computed, step.num_scheduled, drafts, accepted))

    def _follow(self, step: Step, plan: StatePlan) -> None:
        for group, copier in self._copiers.items():
            table = self._tables[group]
            copier.copy(state_copies(plan, table.get_numpy_array(), table.num_blocks_per_row))
        self._accepted[step.rows] = plan.accepted
