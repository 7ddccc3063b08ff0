"""Everything that names blocks, told when some of them moved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.write_log import WriteLog
from hybridkv.cache.slots.pins import Pins
from hybridkv.cache.slots.transfers import TransferLog

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class Relocator:
    """Rewrites rows, pins, the write log and the transfers of the step that is being made."""

    def __init__(
        self, groups: Sequence[CacheGroup], pool: BlockPool, log: WriteLog, pins: Pins, transfers: TransferLog
    ) -> None:
        self._groups = tuple(groups)
        self._pool = pool
        self._log = log
        self._pins = pins
        self._transfers = transfers

    def follow(self, moves: Int64) -> None:
        """Blocks of one class moved, int64[m, 2]. One pass over the rows of its groups (docs/design/0010)."""
        sources, targets = moves[:, 0], moves[:, 1]
        of = self._pool.class_of(int(sources[0]))
        for group in self._groups:
            if self._pool.classes[group.number] == of:
                group.rows.rewrite(sources, targets)
        self._log.follow(sources, targets)
        self._pins.follow(sources, targets)
        self._transfers.follow(moves)

    def cells_of(self, blocks: Int64) -> tuple[Int32, Int32, Int32]:
        """(group, row, column) of every cell that holds one of ``blocks``, int32 each."""
        parts = []
        for group in self._groups if blocks.size else ():
            rows, columns = group.rows.find(blocks)
            parts.append(np.stack([np.full(len(rows), group.number), rows, columns]))
        found = np.concatenate(parts, axis=1) if parts else np.empty((3, 0))
        group_of, row, column = found.astype(np.int32)
        return group_of, row, column
