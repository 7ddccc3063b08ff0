"""KVCacheManager: which blocks hold the tokens of each request, and which tokens are there already."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import batch
from hybridkv.cache.audit import check_cache
from hybridkv.cache.batch import BatchSlots
from hybridkv.cache.blocks import KVCacheBlocks
from hybridkv.cache.coordinator import longest_common_hit
from hybridkv.cache.events import KVCacheEvent
from hybridkv.cache.group import CacheGroup
from hybridkv.cache.hashing import BlockHasher
from hybridkv.cache.policies import Hit, policy_of
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.publisher import Publisher
from hybridkv.cache.residents import Residents
from hybridkv.cache.slots import (
    Admission,
    Reason,
    Refusal,
    SlotPlan,
    admission_shortfall,
    largest_group,
    needed_blocks,
)
from hybridkv.cache.statistics import CacheStatistics, PrefixCacheStats
from hybridkv.errors import CacheError, ConfigError, StalePlanError
from hybridkv.plan.config import KVCacheConfig
from hybridkv.request import Request

logger = logging.getLogger(__name__)

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_NONE = np.empty(0, np.int32)


class KVCacheManager:
    """Blocks for requests, prefix caching included. Not thread safe; Scheduler adds the guard.

    kv_cache_config: groups and number of blocks. max_model_len: most tokens of a request.
    enable_caching: look up and publish prefixes. hasher: what hashes requests, by default SHA-256 over
    canonical CBOR with the smallest block of the groups. log_stats: keep PrefixCacheStats.
    enable_kv_cache_events: collect events for take_events.
    Raises ConfigError for limits that cannot work, UnsupportedModelError for a group without policy.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        enable_caching: bool = True,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        *,
        hasher: BlockHasher | None = None,
    ) -> None:
        if max_model_len < 1:
            raise ConfigError(f"max_model_len must be at least 1, got {max_model_len}")
        policies = [policy_of(group.spec) for group in kv_cache_config.groups]
        smallest = min(policy.block_size for policy in policies)
        self.config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.hasher = (hasher or BlockHasher(smallest)) if enable_caching else None
        hash_block_size = self.hasher.block_size if self.hasher else smallest
        self.block_pool = BlockPool(kv_cache_config.num_blocks, len(policies), enable_events=enable_kv_cache_events)
        self.groups = tuple(
            CacheGroup(number, policy, index, hash_block_size)
            for number, (policy, index) in enumerate(zip(policies, self.block_pool.indexes, strict=True))
        )
        self._residents = Residents(self.groups, hash_block_size, publishes=enable_caching)
        self.rows = self._residents.columns
        self.publisher = Publisher(self.block_pool)
        self._commits = 0
        self._empty = KVCacheBlocks((_NONE,) * len(self.groups), self.block_pool)
        self._stats = PrefixCacheStats() if log_stats else None

    # -- look-up

    @property
    def usage(self) -> float:
        """Referenced blocks / usable blocks, 0 .. 1."""
        return self.block_pool.get_usage()

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix of ``request`` and its tokens, at most all but the last token.

        Nothing is adopted: hand the blocks to allocate_slots. O(blocks of the hit).
        """
        if not self.enable_caching:
            return self._empty, 0
        hits = self.find_hit(request)
        if self._stats is not None:
            self._stats.requests += 1
            self._stats.queries += request.num_tokens
            self._stats.hits += hits[0].tokens
        return KVCacheBlocks(tuple(hit.blocks for hit in hits), self.block_pool), hits[0].tokens

    def find_hit(self, request: Request) -> tuple[Hit, ...]:
        """get_computed_blocks without statistics, one Hit a group."""
        self._refuse_stranger(request)
        return longest_common_hit(self.groups, request, request.num_tokens - 1)

    def is_longest_hit(self, request: Request, blocks: KVCacheBlocks, evictions: int) -> bool:
        """Whether a hit found when ``block_pool.evictions`` was ``evictions`` is still the longest.

        It is while none of its blocks was evicted and some group cannot go on behind it: that block would
        hold the last token, or its key is unknown. O(groups) look-ups, and one array comparison over the blocks.
        """
        if not all(self.block_pool.kept_keys_since(ids, evictions) for ids in blocks.ids):
            return False
        return not all(group.knows(request, len(ids)) for group, ids in zip(self.groups, blocks.ids, strict=True))

    # -- slots, one request

    def allocate_slots(  # noqa: PLR0917 - the signature that users of vLLM know
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """plan_slots and commit: the new blocks (those of the hit not among them), None when they do not fit."""
        mine = request._rows is self.rows
        if mine and new_computed_blocks is None and not num_new_computed_tokens and num_new_tokens > 0:
            total = self.rows.num_computed.item(request.row) + num_new_tokens + num_lookahead_tokens
            if total < self._residents.next_event(request.row):
                return self._empty
        plan = self.plan_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            delay_cache_blocks,
            num_encoder_tokens,
        )
        return self.commit(plan) if isinstance(plan, SlotPlan) else None

    def plan_slots(  # noqa: PLR0917 - as allocate_slots
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        *,
        admission: Admission | None = None,
    ) -> SlotPlan | Refusal:
        """What ``request`` needs to compute ``num_new_tokens`` behind its computed tokens. Changes nothing.

        num_new_computed_tokens, new_computed_blocks: a hit to adopt, for a request that holds no blocks.
        num_lookahead_tokens: room for draft tokens, never published. delay_cache_blocks: publish nothing.
        Raises ConfigError when there is nothing to allocate or the hit cannot be adopted, and for a request
        of another hasher; CacheError for one that holds blocks of another manager.
        """
        self._refuse_stranger(request)
        hit = self._checked_hit(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks)
        if num_encoder_tokens:
            raise ConfigError("num_encoder_tokens needs a group of cross-attention layers; this model has none")
        computed = request.num_computed_tokens + num_new_computed_tokens
        total = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        known = 0
        if self.enable_caching and not delay_cache_blocks:
            known = min(computed + num_new_tokens, request.num_tokens, self.max_model_len)
        row = request.row
        plans = tuple(
            group.policy.plan(
                group.rows.count.item(row) if row >= 0 else 0,
                hit.ids[group.number],
                total,
                group.published.item(row) if row >= 0 else 0,
                known,
            )
            for group in self.groups
        )
        free = self.block_pool.get_num_free_blocks()
        needed = needed_blocks(plans, self.block_pool)
        if needed > free:
            return Refusal(Reason.NO_SPACE, largest_group(plans), needed, free)
        if admission is not None:
            short = admission_shortfall(self.groups, plans, admission, needed, free)
            if short is not None:
                return short
        return SlotPlan(self._epoch, request, total, plans)

    def _checked_hit(
        self, request: Request, num_new_tokens: int, num_hit_tokens: int, blocks: KVCacheBlocks | None
    ) -> KVCacheBlocks:
        if num_new_tokens <= 0:
            raise ConfigError(f"nothing to allocate for {request.request_id!r}: num_new_tokens is {num_new_tokens}")
        if blocks is None or not any(len(ids) for ids in blocks.ids):
            if num_hit_tokens:
                raise ConfigError(f"{num_hit_tokens} hit tokens without their blocks: hand over new_computed_blocks")
            return self._empty
        if not self.enable_caching:
            raise ConfigError("hits handed over while caching is off: construct the manager with enable_caching=True")
        if request.row >= 0:
            raise ConfigError(f"{request.request_id!r} holds blocks already: a hit is adopted by a new row only")
        for group, ids in zip(self.groups, blocks.ids, strict=True):
            if len(ids) * group.policy.block_size != num_hit_tokens:
                raise ConfigError(
                    f"a hit of {num_hit_tokens} tokens needs {num_hit_tokens / group.policy.block_size:g} blocks in "
                    f"group {group.number}, got {len(ids)}: hand over what get_computed_blocks returned"
                )
        return blocks

    def commit(self, plan: SlotPlan) -> KVCacheBlocks:
        """Do what ``plan`` says and return the new blocks. StalePlanError if anything changed since it was made."""
        if plan.epoch != self._epoch:
            raise StalePlanError(
                f"the pool changed since slots for {plan.request.request_id!r} were planned: plan again"
            )
        request = plan.request
        row = request.row if request.row >= 0 else self._residents.bind(request)
        for group, part in zip(self.groups, plan.groups, strict=True):
            if part.reuse.size:
                self.block_pool.touch(part.reuse)
                group.rows.extend(row, part.reuse)
                group.published[row] = len(part.reuse)
        new = tuple(self._take(group, row, part.take) for group, part in zip(self.groups, plan.groups, strict=True))
        for group, part in zip(self.groups, plan.groups, strict=True):
            if part.publish_last > part.publish_first:
                self.publisher.publish_row(group, request, part.publish_first, part.publish_last)
        self._commits += 1
        self._residents.refresh(row)
        return KVCacheBlocks(new, self.block_pool)

    def _take(self, group: CacheGroup, row: int, n: int) -> Int32:
        if not n:
            return _NONE
        ids = self.block_pool.get_new_blocks(n)
        group.rows.extend(row, ids)
        return ids

    # -- slots, all rows of a step

    def allocate_batch(self, rows: Int64, num_new_tokens: Int64 | int) -> BatchSlots:
        """allocate_slots for resident requests by their rows, in this order. int64[R], distinct.

        num_new_tokens: at least 1, for all rows or one by one. From the first row that does not fit on, all
        are refused. Computed tokens are not advanced: that is the caller's fact. O(R) in array operations,
        O(1) Python operations a new or published block.
        """
        computed = self.rows.num_computed[rows] + num_new_tokens
        total = np.minimum(computed, self.max_model_len)
        due = self._residents.due(rows, total)
        if not due.size:
            return batch.nothing_new(len(rows))
        accepted, busy = len(rows), rows[due]
        missing = batch.missing_columns(self.groups, busy, total[due])
        free = self.block_pool.get_num_free_blocks()
        if int(missing.sum()) > free:
            fit = batch.rows_that_fit(missing, free)
            accepted = int(due[fit])
            due, busy, missing = due[:fit], busy[:fit], missing[:fit]
        slots = batch.take(self.groups, self.block_pool, busy, missing, due)
        if self.enable_caching:
            self.publisher.publish_rows(
                self.groups, self.rows, busy, np.minimum(total[due], self.rows.num_tokens[busy])
            )
        self._commits += 1
        self._residents.refresh_many(busy)
        return slots._replace(accepted=accepted)

    # -- publishing and freeing

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the full blocks of the first ``num_computed_tokens`` tokens, for transfers that were delayed.

        CacheError, and nothing published, for a request that holds no blocks for them.
        """
        row = self._residents.row_of(request)
        known = min(num_computed_tokens, request.num_tokens)
        if not self.enable_caching:
            return
        if any(known // group.policy.block_size > group.rows.count.item(row) for group in self.groups):
            raise CacheError(f"{request.request_id!r} holds no blocks for {known} tokens: allocate slots first")
        for group in self.groups:
            first, last = group.published.item(row), known // group.policy.block_size
            if last > first:
                self.publisher.publish_row(group, request, first, last)
        self._commits += 1
        self._residents.refresh(row)

    def free(self, request: Request | str) -> None:
        """Give back what a request holds, last block first; what is published stays findable.

        A request that holds nothing, or an unknown id, is a no-op.
        """
        request_id = request if isinstance(request, str) else request.request_id
        resident = self._residents.get(request_id)
        if resident is None:
            return
        for group in self.groups:
            self.block_pool.free_blocks(group.rows.ids(resident.row)[::-1])
        self._residents.release(resident)

    def free_many(self, requests: Sequence[Request]) -> None:
        """Free each of ``requests``, in this order, in one go where they share no block."""
        found = dict.fromkeys(self._residents.get(request.request_id) for request in requests)
        residents = [resident for resident in found if resident is not None]
        self.block_pool.free_many(
            [group.rows.ids(resident.row)[::-1] for resident in residents for group in self.groups]
        )
        for resident in residents:
            self._residents.release(resident)

    def reset_prefix_cache(self) -> bool:
        """Forget all keys, if no block is in use. Returns whether it was done."""
        done = self.block_pool.reset_prefix_cache()
        if done and self._stats is not None:
            self._stats.reset = True
        return done

    # -- answers

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks that a request holds; none for an unknown id."""
        request = self._residents.get(request_id)
        if request is None:
            return self._empty
        return KVCacheBlocks(tuple(group.rows.ids(request.row) for group in self.groups), self.block_pool)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """get_blocks as lists of ids."""
        return self.get_blocks(request_id).blocks

    def create_empty_block_list(self) -> KVCacheBlocks:
        """No block in every group."""
        return self._empty

    def get_num_common_prefix_blocks(self, request: Request | str, num_running_requests: int) -> list[int]:
        """Per group, how many leading blocks of ``request`` are held by all running requests.

        CacheError for a request that holds no blocks.
        """
        request_id = request if isinstance(request, str) else request.request_id
        if self._residents.get(request_id) is None:
            raise CacheError(f"request {request_id!r} holds no blocks: ask for a running one")
        common = []
        for ids in self.get_blocks(request_id).ids:
            shared = self.block_pool.ref_counts(ids) == num_running_requests
            common.append(len(ids) if shared.all() else int(shared.argmin()))
        return common

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call; empty when they are off."""
        return self.block_pool.take_events()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Statistics since the last call; None when they are off."""
        if self._stats is None:
            return None
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def statistics(self) -> CacheStatistics:
        """What the cache holds now. O(num_blocks)."""
        return self.block_pool.statistics(len(self._residents))

    def resident_requests(self) -> tuple[Request, ...]:
        """Requests that hold blocks."""
        return tuple(self._residents)

    def next_event(self, row: int) -> int:
        """Tokens that ``row`` may hold before anything must be done for it."""
        return self._residents.next_event(row)

    def check(self) -> None:
        """Rebuild ownership, counts, free order and keys from rows and index alone; CacheError if they differ.

        O(blocks + keys).
        """
        check_cache(self)

    # -- rows

    @property
    def _epoch(self) -> int:
        """Grows with every change of the pool and every commit."""
        return self.block_pool.epoch + self._commits

    def _refuse_stranger(self, request: Request) -> None:
        """An error for a request that was made for another manager."""
        if request.hasher is not self.hasher:
            raise ConfigError(
                f"request {request.request_id!r} was hashed by another hasher: construct it with hasher=cache.hasher"
            )
        if request.row >= 0 and request._rows is not self.rows:
            raise CacheError(f"request {request.request_id!r} holds blocks of another manager: free it there first")
