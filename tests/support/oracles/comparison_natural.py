"""Comparison for the natural layout: blocks by class, and worker's tables instead of single cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hybridkv.cache.groups import parent_key
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.request import Request
from hybridkv.schedule import Scheduler
from hybridkv.step import Step
from hybridkv.testing.event_follower import DifferenceError, same
from hybridkv.testing.model import Prefix
from oracles.cache import OracleHit, OracleRequest
from oracles.comparison import Comparison, cells_of
from oracles.natural import NaturalOracle
from oracles.slabs import HOLE
from oracles.steps import OracleStep


class NaturalComparison(Comparison):
    """See Comparison. Blocks are numbered as the pool does, and as a Step does where workers see them."""

    def __init__(
        self, scheduler: Scheduler, oracle: NaturalOracle, requests: Mapping[str, tuple[Request, OracleRequest]]
    ) -> None:
        super().__init__(scheduler, oracle, requests)
        self._natural = oracle.natural
        self._shadow: dict[int, dict[tuple[int, int], int]] = {}

    # -- steps

    def _follow_rows(self, step: Step) -> None:
        super()._follow_rows(step)
        for row in step.finished_rows.tolist():
            self._shadow.pop(row, None)
        for new in step.new_rows:
            self._shadow[new.row] = {}

    def _compare_cells(self, step: Step, foretold: OracleStep) -> None:  # noqa: ARG002 - whoever runs is compared
        """What a worker's tables hold after the cells of ``step``, for all that run; where null is due, anything."""
        for group, row, column, block in cells_of(step):
            self._shadow[row][group, column] = block
        rows = {name: row for row, name in self._owners.items()}
        for request in self._oracle.running:
            name = request.request_id
            for group, held in enumerate(request.rows):
                table = [self._natural.blocks.local(group, block) for block in held.told]
                shadow = self._shadow[rows[name]]
                found = [shadow.get((group, column), 0) if block else 0 for column, block in enumerate(table)]
                same(f"step {step.id}: the worker's blocks of {name} in group {group}", found, table)

    def _tables_of(self, request: OracleRequest) -> list[list[int]]:
        pool = self._natural.blocks
        return [[pool.local(group, block) for block in table] for group, table in enumerate(request.tables)]

    # -- hits

    def compare_hit(self, request: Request, expected: OracleHit) -> int:
        """A look-up that nothing follows; tokens hit."""
        blocks, tokens = self._cache.get_computed_blocks(request)
        tables, sources = [ids.tolist() for ids in blocks.ids], [int(source) for source in blocks.sources]
        none = [0] * len(tables)
        same("hit", (tokens, tables, sources or none), (expected.tokens, expected.tables, [*expected.sources] or none))
        return tokens

    # -- state

    def readable(self, *, moved: bool) -> Iterator[tuple[int, int, Prefix]]:
        """See Comparison."""
        pool = self._natural.blocks
        for block, keys in pool.keys.items() if moved else ():
            for (group, (origin, tokens)), tail in keys if block not in pool.step else ():
                yield group, pool.local(group, block), (origin, tokens + tail)

    def _compare_free(self) -> None:
        """Free slabs, and of every class the order of eviction and the holes."""
        space, slabs = self._cache.block_pool.space, self._natural.blocks.slabs
        if not isinstance(space, SlabSpace):
            raise DifferenceError(f"the natural layout lies in slabs, not in {type(space).__name__}")
        same("free slabs", space.free_slabs(), slabs.free_slabs())
        for of in range(len(space.ks)):
            same(f"blocks of class {of} to evict", space.lru(of).tolist(), slabs.lru(of))
        holes = [block for slab in range(1, space.num_slabs + 1) for block in space._holes.holes_of(slab).tolist()]
        same("holes", sorted(holes), sorted(block for block, state in slabs.state.items() if state == HOLE))
        same("states that only ends keep", self._cache.block_pool.keys._supersedable, self._natural.blocks.ends)

    def _compare_index(self) -> None:
        """Full keys as in the reference, and partial ones: of each parent, tokens and blocks, the oldest first."""
        super()._compare_index()
        for group, index in enumerate(self._cache.block_pool.indexes):
            real: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
            for parent, tail in index.tails():
                tokens = tuple(np.frombuffer(tail.tokens, np.int32).tolist())
                real.setdefault(parent, []).append((tokens, tail.block))
            expected = {
                self._parent(group, prefix): tails
                for (of_group, prefix), tails in self._natural.blocks.tails.items()
                if of_group == group and tails
            }
            same(f"partial keys of group {group}", real, expected)

    def _parent(self, group: int, prefix: Prefix) -> bytes:
        """What the library calls the parent that ends with ``prefix``, in ``group``."""
        origin, tokens = prefix
        return (
            self._hash(prefix)
            if tokens
            else parent_key(self._request(origin, (0,)), 0, self._cache.groups[group].key_stride)
        )
