"""Everything that can be seen of a scheduler and its manager, compared with what the oracle says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hybridkv.cache.index import parent_key
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.extra_keys import EncoderInput
from hybridkv.request import Request
from hybridkv.schedule import Scheduler
from hybridkv.step import EncoderRead, Step
from hybridkv.testing.event_follower import DifferenceError, same
from hybridkv.testing.model import Origin, Prefix
from oracles.cache import OracleHit, OracleRequest
from oracles.natural import NaturalOracle
from oracles.scheduler import Oracle
from oracles.slabs import HOLE, holes_of
from oracles.steps import OracleStep


def cells_of(step: Step) -> list[list[int]]:
    """Group, row, column and block of every cell of ``step``."""
    cells = step.cells
    found: list[list[int]] = np.stack([cells.group, cells.row, cells.column, cells.block], axis=1).tolist()
    return found


class Comparison:
    """requests: all that were ever added, by id, as the library and as the oracle know them."""

    def __init__(
        self, scheduler: Scheduler, oracle: Oracle, requests: Mapping[str, tuple[Request, OracleRequest]]
    ) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._oracle = oracle
        self._requests = requests
        self._owners: dict[int, str] = {}
        self._hashes: dict[Prefix, bytes] = {}
        self._has_states = any(group.recurrent for group in oracle.cache.groups)

    # -- steps

    def compare_step(self, step: Step, foretold: OracleStep) -> None:
        """Rows, tokens, cells and states of a step, in order."""
        self._follow_rows(step)
        entries = foretold.entries
        rows = step.rows.tolist()
        same("batch", [self._owners.get(row) for row in rows], [e.request.request_id for e in entries])
        same("num_computed", step.num_computed.tolist(), [e.computed for e in entries])
        same("num_scheduled", step.num_scheduled.tolist(), [e.count for e in entries])
        same("samples", step.samples.tolist(), [e.samples for e in entries])
        same("drafts", [step.drafts[i].tolist() for i in range(len(rows))], [e.drafts for e in entries])
        same("token_ids", [step.token_ids[i].tolist() for i in range(len(rows))], [e.tokens for e in entries])
        self._compare_cells(step, foretold)
        new = [(n.request_id, n.token_ids.tolist(), n.num_prompt_tokens) for n in step.new_rows]
        begun = [e.request for e in entries if e.admitted]
        read = [EncoderRead(r.digest, r.encoder, encodes=r.encodes) if r.encoder else None for r in begun]
        same("encoders", [n.encoder for n in step.new_rows], read)
        same("new_rows", new, [(r.request_id, r.tokens, r.num_prompt_tokens) for r in begun])
        self._compare_states(step, foretold)
        # states are those behind the tokens of the step that are known, drafts left out
        ends = [min(e.computed + e.count, len(e.request.tokens)) for e in entries]
        for group in self._cache.groups:
            if group.states is not None:
                same("labels", group.state_position[step.rows].tolist(), ends)

    def _compare_cells(self, step: Step, foretold: OracleStep) -> None:
        rows = step.rows.tolist()
        expected = [[g, rows[i], c, b] for g, i, c, b in foretold.rotated]
        expected += [[g, row, c, b] for row, e in zip(rows, foretold.entries, strict=True) for g, c, b in e.cells]
        same("cells", [cell for cell in cells_of(step) if cell[3]], expected)

    def _compare_states(self, step: Step, foretold: OracleStep) -> None:
        entries = foretold.entries
        same("zero", step.zero.tolist(), [list(zero) for e in entries for zero in e.zero])
        copies = [(copy.stage, copy.group, copy.source, copy.destination, copy.kind) for copy in step.copies]
        moves = [("before", *move, "move") for move in foretold.moves]
        owed = [copy for e in entries for copy in e.copies] + foretold.late
        same("copies", copies, moves + [("before", *copy) for copy in owed])
        same("state_read", step.state_read.tolist(), [e.reads for e in entries] if self._has_states else [])
        writes = [[i, *write] for i, e in enumerate(entries) for write in e.writes]
        same("state_writes", step.state_writes.tolist(), writes + [list(kept) for kept in foretold.kept])

    def _follow_rows(self, step: Step) -> None:
        """Who has which row, from the Step alone; exactly those that run or are dead have one."""
        for row in step.finished_rows.tolist():
            self._owners.pop(row, None)
        for new in step.new_rows:
            same(f"owner of row {new.row}", self._owners.get(new.row), None)
            self._owners[new.row] = new.request_id
        holders = [request.request_id for request in self._oracle.running + self._oracle.dead]
        same("rows", sorted(self._owners.values()), sorted(holders))

    # -- hits

    def compare_hit(self, request: Request, expected: OracleHit) -> int:
        """A look-up that nothing follows; tokens hit."""
        blocks, tokens = self._cache.get_computed_blocks(request)
        same("hit", (tokens, [list(ids) for ids in blocks.blocks]), (expected.tokens, expected.tables))
        return tokens

    # -- state

    def readable(self, *, moved: bool) -> Iterator[tuple[int, int, Prefix]]:  # noqa: ARG002 - none is moved
        """Group, block and what it holds of all that can be hit and was written. moved: whether all moves were made."""
        pool = self._oracle.pool
        for block, (group, prefix) in pool.prefix.items():
            if block not in pool.step:
                yield group, block, prefix

    def check(self) -> None:
        """Pool, queues, requests, statistics and index."""
        oracle, pool, scheduler = self._oracle, self._cache.block_pool, self._scheduler
        self._compare_free()
        same("usage", round(self._cache.usage, 9), round(oracle.pool.usage, 9))
        running = [request.request_id for request in scheduler._running.requests]
        same("running", running, [request.request_id for request in oracle.running])
        arriving = [request.request_id for request in scheduler._waiting.arriving()]
        queued = [one.request_id for one in oracle.waiting if one.request_id not in arriving]
        same("waiting", [entry.request.request_id for entry in scheduler._waiting.entries()], queued)
        same("number waiting", scheduler.num_waiting, oracle.num_waiting)
        self._compare_requests()
        self._compare_statistics()
        self._compare_index()
        unwritten = {b: pool.keys.step_of(b) for b in pool.keys.every_unwritten()}
        same("unwritten", unwritten, oracle.pool.step)

    def _compare_free(self) -> None:
        same("free order", self._cache.block_pool.free_order(), self._oracle.pool.free)

    def _compare_requests(self) -> None:
        for name, (request, expected) in self._requests.items():
            same(f"tokens of {name}", request.token_ids().tolist(), expected.tokens)
            same(f"preemptions of {name}", request.num_preemptions, expected.preemptions)
            same(f"first hit of {name}", request.first_hit_tokens, expected.first_hit)
            tables = self._tables_of(expected) or [[] for _ in self._oracle.cache.groups]
            same(f"blocks of {name}", self._blocks_of(name), tables)
            if expected in self._oracle.running:
                same(f"computed of {name}", request.num_computed_tokens, expected.computed)

    def _tables_of(self, request: OracleRequest) -> list[list[int]]:
        return request.tables

    def _blocks_of(self, name: str) -> list[list[int]]:
        return [list(ids) for ids in self._cache.get_block_ids(name)]

    def _compare_statistics(self) -> None:
        now, counts = self._scheduler.statistics(), self._oracle.counts
        self._compare_drafts(now.drafted_by_position, now.accepted_by_position)
        names = ("steps", "finished", "preempted", "failed", "prompt", "hit", "computed")
        real = (
            now.steps,
            now.requests_finished,
            now.preemptions,
            now.failed_steps,
            now.prompt_tokens,
            now.hit_tokens,
            now.computed_tokens,
        )
        same("statistics", dict(zip(names, real, strict=True)), {name: counts[name] for name in names})
        same("peak usage", round(now.peak_usage, 9), round(self._oracle.peak_usage, 9))

    def _compare_drafts(self, drafted: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        counts, places = self._oracle.counts, range(len(drafted))
        same("drafted", drafted, tuple(counts[f"drafted {place}"] for place in places))
        same("accepted", accepted, tuple(counts[f"accepted {place}"] for place in places))
        same("drafted behind", counts[f"drafted {len(drafted)}"], 0)

    def _compare_index(self) -> None:
        """Which blocks of each group can be hit under which keys, in the order in which they are found."""
        for group, index in enumerate(self._cache.block_pool.indexes):
            real: dict[bytes, list[int]] = {}
            for key, block in index.entries():
                real.setdefault(key, []).append(block)
            expected = {
                self._key(group, prefix): (prefix, blocks)
                for (of_group, prefix), blocks in self._oracle.pool.published.items()
                if of_group == group and blocks
            }
            names = {key: prefix for key, (prefix, _) in expected.items()}
            foretold = dict(expected.values())
            found = {names.get(key, (key.hex(), ())): blocks for key, blocks in real.items()}
            extra = {key: blocks for key, blocks in found.items() if blocks != foretold.get(key)}
            same(f"index of group {group}", extra, {k: v for k, v in foretold.items() if v != found.get(k)})

    def _hash(self, prefix: Prefix) -> bytes:
        """The key of a block whose last token ends ``prefix``."""
        if prefix not in self._hashes:
            self._hashes[prefix] = self._request(*prefix).hashes[-1]
        return self._hashes[prefix]

    def _key(self, group: int, prefix: Prefix) -> bytes:
        """The key of a block of ``group``."""
        if self._oracle.cache.groups[group].kind != "cross":
            return self._hash(prefix)
        origin, (num_tokens, column) = prefix
        return self._request(origin, (0,), num_tokens).encoder_keys(self._oracle.cache.groups[group].size)[column]

    def _request(self, origin: Origin, tokens: tuple[int, ...], num_tokens: int = 1) -> Request:
        """A request of ``origin``, whose encoder's output has ``num_tokens``: decoder's keys say nothing of them."""
        salt, digest = origin if isinstance(origin, tuple) else (origin, "")
        encoder = EncoderInput(digest, num_tokens) if digest else None
        return Request("key", tokens, hasher=self._cache.hasher, cache_salt=salt, encoder=encoder)


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
                table = [self._natural.blocks.local(group, block) for block in held.worker_table]
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
        holes = [block for slab in range(1, space.num_slabs + 1) for block in holes_of(space, slab)]
        same("holes", sorted(holes), sorted(block for block, state in slabs.state.items() if state == HOLE))
        same("states that only ends keep", self._cache.block_pool.keys._supersedable, self._natural.blocks.ends)

    def _compare_index(self) -> None:
        """Full keys as in the reference, and partial ones: of each parent, tokens and blocks, the oldest first."""
        super()._compare_index()
        for group, index in enumerate(self._cache.block_pool.indexes):
            real: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
            for parent, tail in index.partial_entries():
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
            else parent_key(self._request(origin, (0,)), 0, self._cache.groups[group].hashes_per_block)
        )
