"""Of pytest, for vLLM's own tests: its schedulers are ours where JUDGE_OURS is set; outcomes go to JUDGE_OUT, as JSON.

Loaded by ``judge.py``. vLLM is imported before the tests are: its sources may lie beside them. What those tests look
into is told from our manager: tables and blocks under the names of vLLM's own, worked out when they are asked for.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched import async_scheduler, scheduler

from hybridkv import KVCacheManager
from hybridkv.request import Request
from hybridkv.vllm import AsyncScheduler, Scheduler
from hybridkv.vllm.manager import CacheManager, GroupManager, Pool

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
        return 0 if self.is_null else self.cache.block_pool.ref_count(self.block_id)

    @property
    def block_hash(self) -> bytes | None:
        return self.cache.block_pool.keys.key_of(self.block_id)

    _block_hash = block_hash

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


@dataclass(frozen=True)
class Blocks:
    cache: KVCacheManager

    def __getitem__(self, block_id: int) -> Block:
        return Block(self.cache, block_id)

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
        self.blocks, self.free_block_queue = Blocks(cache), self
        self.cached_block_hash_to_block = CachedKeys(cache)

    @property
    def num_free_blocks(self) -> int:
        """Of the free queue, which the pool is itself."""
        return self.get_num_free_blocks()


class OfRequests(Mapping[str, Any]):
    """By request that holds blocks."""

    def __init__(self, cache: KVCacheManager, group: int) -> None:
        self.cache, self.group = cache, group

    def _holders(self) -> dict[str, Request]:
        return {one.request_id: one for one in self.cache.rows.requests if one is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders())

    def __len__(self) -> int:
        return len(self._holders())

    def __getitem__(self, request_id: str) -> Any:  # noqa: ANN401 - blocks, or a count
        return self.of(self._holders()[request_id])

    def of(self, request: Request) -> Any:  # noqa: ANN401 - same
        raise NotImplementedError


class Tables(OfRequests):
    def of(self, request: Request) -> list[Block]:
        return [Block(self.cache, block) for block in self.cache.get_block_ids(request.request_id)[self.group]]


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


def viewed(manager: CacheManager) -> None:
    """``manager`` shows its tables and blocks."""
    cache = manager.cache
    manager.block_pool = ViewedPool(cache)
    groups: Any = tuple(
        ViewedGroup(group, Tables(cache, number), Published(cache, number))
        for number, group in enumerate(manager.coordinator.single_type_managers)
    )
    manager.coordinator = replace(manager.coordinator, single_type_managers=groups)


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
