"""Of pytest, for vLLM's own tests: its schedulers are ours where JUDGE_OURS is set; outcomes go to JUDGE_OUT, as JSON.

Loaded by ``judge.py``. vLLM is imported before the tests are: its sources may lie beside them. What those tests look
into is told from our manager: tables and blocks under the names of vLLM's own, worked out when they are asked for.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from hybridkv import KVCacheManager
from hybridkv.request import Request
from hybridkv.vllm import AsyncScheduler, Scheduler
from hybridkv.vllm import manager as ours
from hybridkv.vllm.manager import CacheManager, Coordinator, GroupManager, Pool

OURS, OUT = "JUDGE_OURS", "JUDGE_OUT"

found = dict[str, str]()
"""By test: "" for one that passed, or the last line of what it says."""


@dataclass(frozen=True)
class Block:
    """One of the pool's, as KVCacheBlock shows itself."""

    cache: KVCacheManager
    block_id: int

    @property
    def ref_cnt(self) -> int:
        """Requests that hold it; 1 where none does and a transfer has it locked: ours counts a lock besides."""
        if self.is_null or not self.cache.block_pool.ref_count(self.block_id):
            return 0
        tables = (table for one in holders(self.cache) for table in self.cache.get_block_ids(one))
        return max(1, sum(self.block_id in table for table in tables))

    @property
    def block_hash(self) -> bytes | None:
        return self.cache.block_pool.keys.key_of(self.block_id)

    _block_hash = block_hash

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


def holders(cache: KVCacheManager) -> dict[str, Request]:
    return {one.request_id: one for one in cache.rows.requests if one is not None}


@dataclass(frozen=True)
class Blocks:
    """Those of a pool; the null block is one object, which tests compare by identity."""

    cache: KVCacheManager
    null: Block

    def __getitem__(self, block_id: int) -> Block:
        return Block(self.cache, block_id) if block_id else self.null

    def __len__(self) -> int:
        return self.cache.config.num_blocks

    def __iter__(self) -> Iterator[Block]:
        return map(self.__getitem__, range(len(self)))


@dataclass(frozen=True)
class CachedKeys:
    """Blocks by what they are cached under, of one group."""

    cache: KVCacheManager

    @property
    def _cache(self) -> dict[bytes | None, Block]:
        held = (Block(self.cache, block) for block in self.cache.block_pool.cached().nonzero()[0].tolist())
        return {block.block_hash: block for block in held}

    def __len__(self) -> int:
        return len(self._cache)


class ViewedPool(Pool):
    def __init__(self, cache: KVCacheManager) -> None:
        super().__init__(cache)
        self.cache, self.null_block = cache, Block(cache, 0)
        self.blocks, self.free_block_queue = Blocks(cache, self.null_block), self
        self.cached_block_hash_to_block = CachedKeys(cache)

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.cache.evict_blocks(0, sorted(block_ids))

    @property
    def num_free_blocks(self) -> int:
        """Of the free queue, which the pool is itself."""
        return self.get_num_free_blocks()


class HeldBlocks(ours.Blocks):
    """Blocks of a request, which show who else holds them."""

    def __init__(self, pool: ViewedPool, given: ours.Blocks) -> None:
        super().__init__(given.held, given.hit)
        self.pool = pool

    @property
    def blocks(self) -> Any:  # noqa: ANN401 - blocks of the pool by group
        return tuple([self.pool.blocks[block] for block in group] for group in self.held.blocks)


class OfRequests(Mapping[str, Any]):
    """By request that holds blocks."""

    def __init__(self, pool: ViewedPool, group: int) -> None:
        self.pool, self.cache, self.group = pool, pool.cache, group

    def __iter__(self) -> Iterator[str]:
        return iter(holders(self.cache))

    def __len__(self) -> int:
        return len(holders(self.cache))

    def __getitem__(self, request_id: str) -> Any:  # noqa: ANN401 - blocks, or a count
        return self.of(holders(self.cache)[request_id])

    def of(self, request: Request) -> Any:  # noqa: ANN401 - same
        raise NotImplementedError


class Tables(OfRequests):
    def of(self, request: Request) -> list[Block]:
        return [self.pool.blocks[block] for block in self.cache.get_block_ids(request.request_id)[self.group]]


class Published(OfRequests):
    def of(self, request: Request) -> int:
        return self.cache.groups[self.group].published.item(request.row)


@dataclass(frozen=True)
class ViewedGroup:
    """``group``, and what its requests hold."""

    group: GroupManager
    req_to_blocks: Tables
    num_cached_block: Published

    @property
    def block_size(self) -> int:
        return self.group.block_size

    @property
    def kv_cache_spec(self) -> Any:  # noqa: ANN401 - vLLM's
        return self.group.kv_cache_spec

    @property
    def _null_block(self) -> Block:
        return self.req_to_blocks.pool.null_block


class ViewedCrossAttention(ViewedGroup, CrossAttentionManager):  # type: ignore[misc] # vLLM is not typed here
    """Of the class by which tests seek it."""


@dataclass(frozen=True)
class ViewedHybrid(Coordinator, HybridKVCacheCoordinator):  # type: ignore[misc] # same
    """That of several groups, of the class that tests expect there; it answers for each group how far its keys go."""

    cache: KVCacheManager = field(kw_only=True)

    def find_longest_cache_hit_per_group(self, hashes: Sequence[bytes], most: int) -> tuple[None, tuple[int, ...]]:
        """Tokens by group, of those before ``most``: of states the last that is cached; of attention, up to a gap."""
        found = list[int]()
        for number, group in enumerate(self.cache.groups):
            size = group.policy.block_size
            known = [self.cache.block_pool.get_cached_block(key, number) is not None for key in hashes[: most // size]]
            last = max((place for place, there in enumerate(known, 1) if there), default=0)
            found.append(size * (last if group.states is not None else [*known, False].index(False)))
        return None, tuple(found)


def viewed(manager: CacheManager) -> None:
    """``manager`` shows its tables and blocks."""
    cache, given = manager.cache, manager.coordinator
    manager.block_pool = pool = ViewedPool(cache)
    held = manager.get_blocks
    manager.get_blocks = lambda request_id: HeldBlocks(pool, held(request_id))  # type: ignore[method-assign]  # as below
    groups: Any = tuple(
        (ViewedCrossAttention if isinstance(group.kv_cache_spec, CrossAttentionSpec) else ViewedGroup)(
            group, Tables(pool, number), Published(pool, number)
        )
        for number, group in enumerate(given.single_type_managers)
    )
    made = Coordinator(groups, given.blocks_to_come)
    manager.coordinator = made if len(groups) == 1 else ViewedHybrid(groups, given.blocks_to_come, cache=cache)


if os.environ.get(OURS):
    _made = CacheManager.__init__

    def _made_and_viewed(self: CacheManager, *arguments: object, **options: object) -> None:
        _made(self, *arguments, **options)  # type: ignore[arg-type]  # as they came
        viewed(self)

    CacheManager.__init__ = _made_and_viewed  # type: ignore[method-assign]  # what tests look into
    scheduler.Scheduler, async_scheduler.AsyncScheduler = Scheduler, AsyncScheduler


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that fails in its setup or teardown has failed; one that was skipped is left out."""
    name = report.nodeid.partition("tests/")[2]
    if report.failed:
        said = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)
        found[name] = (said.partition("\n")[0] or "failed")[-300:]
    elif report.when == "call" and report.passed:
        found.setdefault(name, "")


def pytest_sessionfinish() -> None:
    Path(os.environ[OUT]).write_text(json.dumps(found), "utf-8")
