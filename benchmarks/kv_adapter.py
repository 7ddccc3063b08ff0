"""hybridkv under the interface of the control-plane micro-benchmark (kv_microbench.py, its class Adapter).

Every method is a thin translation to the public calls of hybridkv. The benchmark only calls methods, so nothing is
imported from it. Features that hybridkv does not have raise NotImplementedError, which the benchmark reports.

    manager, request, append, allocate, free   KVCacheManager, Request
    table                                      BlockTable (needs torch)
    sched                                      Scheduler, Step, StepResult
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import (
    BatchSlots,
    BlockHasher,
    BlockRemoved,
    BlockStored,
    KVCacheBlocks,
    KVCacheEvent,
    KVCacheManager,
    PrefixCacheStats,
)
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.request import Request, SamplingParams
from hybridkv.request_rows import append_tokens
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from hybridkv.step import Csr, Step, StepResult

if TYPE_CHECKING:
    from hybridkv.worker import BlockTable

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Ids = tuple[Int32, ...]  # new block ids, one array a group
Stats = tuple[float, PrefixCacheStats | None]

SCHEDULER_MAX_MODEL_LEN = 16384  # what the benchmark gives its other scheduler
ENDLESS = SamplingParams(max_tokens=1 << 20, ignore_eos=True)


class GroupLike(Protocol):
    """A group as the benchmark describes it: kind "full", "swa" or "mamba_align"."""

    @property
    def kind(self) -> str:
        """Kind of layer."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def window(self) -> int:
        """Tokens of a sliding window."""
        ...


class HybridKVAdapter:
    """hybridkv as the benchmark sees it. Timed and untimed: see the benchmark's own class."""

    name = "hybridkv"

    def __init__(self) -> None:
        self._groups = 1
        self._columns: dict[int, list[int]] = {}
        self.version: str | None = version("hybridkv")
        self._hasher: BlockHasher | None = None

    # -- hashing

    def hash_algos(self) -> list[str]:
        """sha256_cbor only: xxhash_cbor wants a random root here, the benchmark a fixed one; the others are pickles."""
        return ["sha256_cbor"]

    def hasher(self, algo: str, block_size: int) -> BlockHasher:
        """Return the hasher that later managers get, because a manager and its requests must share one."""
        self._hasher = BlockHasher(block_size, algo)
        return self._hasher

    def hash_prompt(self, hasher: BlockHasher, tokens: list[int] | Int32) -> list[bytes]:
        """Hashes of all full blocks. A list goes through array("I"), the fast way from ints to 32 bits."""
        ids = tokens if isinstance(tokens, np.ndarray) else np.frombuffer(array("I", tokens), np.uint32)
        return hasher.hash_chain(None, ids)

    # -- requests

    def request(self, rid: str, tokens: list[int], hasher: BlockHasher, continues: Request | None = None) -> Request:
        """Return a new request with a hashed prompt; blocks shared with ``continues`` are not hashed again."""
        return Request(rid, tokens, ENDLESS, hasher=hasher, continues=continues)

    def append(self, req: Request, token: int) -> None:
        """One sampled token."""
        req.append(token)

    def append_many(self, reqs: list[Request], tokens: list[int]) -> None:
        """One sampled token for each request."""
        append_tokens(reqs, tokens)

    # -- manager

    def manager(
        self, groups: Sequence[GroupLike], num_blocks: int, max_model_len: int, observe: bool = False
    ) -> KVCacheManager:
        """Return a manager whose requests are hashed by the hasher made last."""
        self._groups = len(groups)
        return KVCacheManager(
            _config(groups, num_blocks),
            max_model_len,
            log_stats=observe,
            enable_kv_cache_events=observe,
            hasher=self._hasher,
        )

    def step(self, mgr: KVCacheManager) -> None:
        """Nothing: a manager driven without a scheduler has no notion of a step."""

    def lookup(self, mgr: KVCacheManager, req: Request) -> tuple[KVCacheBlocks, int]:
        """Return the blocks of the longest cached prefix and its tokens."""
        return mgr.get_computed_blocks(req)

    def allocate(
        self, mgr: KVCacheManager, req: Request, n_new: int, n_hit: int = 0, hit: KVCacheBlocks | None = None
    ) -> Ids | bool:
        """Return new block ids of each group, or False if they do not fit; mark the tokens computed."""
        blocks = mgr.allocate_slots(req, n_new, n_hit, hit)
        if blocks is None:
            return False
        req.num_computed_tokens += n_hit + n_new
        return blocks.ids

    def decode_many(self, mgr: KVCacheManager, reqs: list[Request]) -> BatchSlots:
        """One token for each request."""
        rows = mgr.rows.rows_of(reqs)
        slots = mgr.allocate_batch(rows, 1)
        mgr.rows.num_computed[rows[: slots.accepted]] += 1
        return slots

    def batch_result(self, out: BatchSlots, n: int) -> list[list[list[int]] | bool | None]:
        """Per request the new ids of each group, None when there are none, False when it was refused."""
        got: list[list[list[int]] | bool | None] = [None if i < out.accepted else False for i in range(n)]
        for owner, group, block in zip(out.owner.tolist(), out.group.tolist(), out.block.tolist(), strict=True):
            ids = got[owner]
            if not isinstance(ids, list):
                got[owner] = ids = [[] for _ in range(self._groups)]
            ids[group].append(block)
        return got

    def free(self, mgr: KVCacheManager, req: Request) -> None:
        """All blocks of a request go back."""
        mgr.free(req)

    def free_many(self, mgr: KVCacheManager, reqs: list[Request]) -> None:
        """All blocks of all requests go back."""
        mgr.engine.free_many(reqs)

    def preempt(self, mgr: KVCacheManager, req: Request) -> None:
        """All blocks go back and the request starts over."""
        mgr.free(req)
        req.num_computed_tokens = 0
        req.num_preemptions += 1

    def observe(self, mgr: KVCacheManager) -> tuple[list[KVCacheEvent], Stats]:
        """Events and statistics since the last call. hybridkv does not sample how long blocks stay."""
        return mgr.take_events(), (mgr.usage, mgr.make_prefix_cache_stats())

    def event_rows(self, events: list[KVCacheEvent]) -> list[tuple[object, ...]]:
        """One tuple a block."""
        rows: list[tuple[object, ...]] = []
        for event in events:
            if isinstance(event, BlockRemoved):
                rows += [("removed", _low64(key), event.group_idx) for key in event.block_hashes]
            elif isinstance(event, BlockStored):
                size, parents = event.block_size, (event.parent_block_hash, *event.block_hashes)
                rows += [
                    (
                        "stored",
                        _low64(key),
                        None if parent is None else _low64(parent),
                        event.token_ids[i * size : (i + 1) * size],
                        event.group_idx,
                    )
                    for i, (parent, key) in enumerate(zip(parents, event.block_hashes, strict=False))
                ]
        return rows

    def stats_row(self, stats: Stats) -> tuple[float, int, int]:
        """Usage, tokens queried, tokens hit."""
        usage, prefix = stats
        return (round(usage, 6), prefix.queries, prefix.hits) if prefix else (round(usage, 6), 0, 0)

    def num_free(self, mgr: KVCacheManager) -> int:
        """Free blocks, cached ones among them."""
        return mgr.block_pool.get_num_free_blocks()

    # -- block table of a worker

    def table(self, block_size: int, max_reqs: int, max_blocks: int, max_tokens: int) -> BlockTable:
        """Return a table with its mirror, both on the CPU."""
        try:
            from hybridkv.worker import BlockTable  # noqa: PLC0415 - all but the tables works without torch
        except ModuleNotFoundError as error:
            raise NotImplementedError("tables need torch") from error
        return BlockTable(block_size, max_reqs, max_blocks, max_tokens)

    def table_add_row(self, t: BlockTable, ids: list[int], row: int) -> None:
        """Replace a row."""
        t.add_row(ids, row)

    def table_append_row(self, t: BlockTable, ids: list[int], row: int) -> None:
        """Extend a row."""
        t.append_row(ids, row)

    def table_append_many(self, t: BlockTable, rows: list[int], ids: list[int]) -> None:
        """Each row grows by one id."""
        t.write_cells(rows, t.num_blocks_per_row[rows] // t.blocks_per_kv_block, ids)

    def table_commit(self, t: BlockTable, num_reqs: int) -> None:
        """Update the mirror."""
        t.commit_block_table(num_reqs)

    def table_committed(self, t: BlockTable, row: int, n: int) -> Int32:
        """Return the first ids of a row of the mirror."""
        ids: Int32 = t.get_device_tensor(row + 1)[row, :n].numpy()
        return ids

    def table_prepare(self, query_start_loc: Int64, positions: Int64) -> tuple[Int64, Int64]:
        """int64 arrays, as they come."""
        return query_start_loc, positions

    def table_compute_slots(self, t: BlockTable, num_reqs: int, prepared: tuple[Int64, Int64]) -> None:
        """Compute the row of each token, its slot, and the slots on the device."""
        starts, positions = prepared
        t.compute_slot_mapping(np.repeat(np.arange(num_reqs), np.diff(starts)), positions)
        t.commit_slot_mapping(len(positions))

    def table_slots(self, t: BlockTable, n: int) -> Int64:
        """Return the first slots on the device."""
        slots: Int64 = t.slot_mapping[:n].numpy()
        return slots

    # -- scheduler

    def scheduler(self, groups: Sequence[GroupLike], max_seqs: int, max_tokens: int, num_blocks: int) -> Scheduler:
        """Return a scheduler with its own manager."""
        cache = KVCacheManager(_config(groups, num_blocks), SCHEDULER_MAX_MODEL_LEN)
        return Scheduler(cache, SchedulerLimits(max_running=max_seqs, max_batched_tokens=max_tokens))

    def sched_add(self, s: Scheduler, rid: str, tokens: list[int], hasher: BlockHasher) -> None:  # noqa: ARG002
        """Queue a request, hashed by the scheduler's own hasher, which equals ``hasher``."""
        s.add(Request(rid, tokens, ENDLESS, hasher=s.cache.hasher))

    def sched_schedule(self, s: Scheduler) -> tuple[Step, list[str]]:
        """Return the step and its requests."""
        step = s.schedule()
        return step, [request.request_id for request in s.cache.rows.owners(step.rows)]

    def sched_view(self, s: Scheduler, step: Step) -> list[tuple[str, int, tuple[list[int], ...] | None]]:
        """Request id, scheduled tokens and new block ids, in the order of the step; null columns are 0."""
        groups = len(s.cache.config.groups)
        for begun in step.new_rows:
            self._columns[begun.row] = [0] * groups
        cells = step.cells
        new: dict[int, tuple[list[int], ...]] = {}
        for cell in zip(
            cells.group.tolist(), cells.row.tolist(), cells.column.tolist(), cells.block.tolist(), strict=True
        ):
            group, row, column, block = cell
            ids, known = new.setdefault(row, tuple([] for _ in range(groups)))[group], self._columns[row]
            ids += [0] * (column - known[group])
            ids.append(block)
            known[group] = column + 1
        owners = s.cache.rows.owners(step.rows)
        return [
            (request.request_id, count, new.get(row))
            for request, row, count in zip(owners, step.rows.tolist(), step.num_scheduled.tolist(), strict=True)
        ]

    def sched_prepare(self, s: Scheduler, step: Step, rids: Iterable[str], token: int) -> StepResult:  # noqa: ARG002
        """``token`` for every row that samples."""
        return StepResult(step.id, Csr.from_lists([[token] if samples else [] for samples in step.samples.tolist()]))

    def sched_update(self, s: Scheduler, step: Step, model_out: StepResult) -> None:  # noqa: ARG002
        """Pass the result to the scheduler."""
        s.update(model_out)


def _config(groups: Sequence[GroupLike], num_blocks: int) -> KVCacheConfig:
    """One layer a group, with the smallest page: sizes in bytes play no part here."""
    specs = [KVCacheGroupSpec((f"layer.{i}",), _spec(group)) for i, group in enumerate(groups)]
    return KVCacheConfig(num_blocks, (), tuple(specs))


def _spec(group: GroupLike) -> KVCacheSpec:
    size = group.block_size
    match group.kind:
        case "full":
            return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype="float32")
        case "swa":
            window = group.window
            return SlidingWindowSpec(
                block_size=size, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=window
            )
        case "mamba_align":
            return MambaSpec(block_size=size, shapes=((1, 1),), dtypes=("float32",), cache_mode="align")
        case kind:
            raise NotImplementedError(f"groups of kind {kind}")


def _low64(key: bytes) -> int:
    return int.from_bytes(key, "big") & ((1 << 64) - 1)
