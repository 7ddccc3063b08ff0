"""This library's cache manager under the names that vLLM's scheduler, connectors and metrics use.

    schedule()            look-ups and slots of one step, which is written once its output exists
    update_from_output    outputs are published, requests freed

Ids, hits and refusals equal those of vLLM's own manager (docs/differential.md). A call for a feature that this library
lacks raises ConfigError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np

from hybridkv.cache import BlockLock, CacheOptions, EngineHashes, Hit, KVCacheBlocks, KVCacheEvent, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.specs import Keeps
from hybridkv.tiers import HostTier
from hybridkv.vllm.requests import Admissions, Decoded, EngineRequest, Mirrors, SlotsAhead
from hybridkv.vllm.specs import Config, Settings, cache_config, copied_tokens

_NONE: Final = np.empty(0, np.int32)
_NEVER: Final[tuple[int, Hit | None]] = (-1, None)
EXPECTED: Final = 4
"""Waiting requests whose prefixes are evicted last. With 8 or 16, the natural layout hit less (0036)."""


def reference_cache(config: Config, settings: Settings) -> KVCacheManager:
    """Return a cache with the groups and blocks of vLLM's ``config``, keyed by the hashes that vLLM computes.

    Raises ConfigError for a group that is not supported.
    """
    return KVCacheManager(
        cache_config(config),
        settings.max_model_len,
        enable_caching=settings.enable_caching,
        use_eagle=settings.use_eagle,
        enable_kv_cache_events=settings.enable_events,
        dcp_world_size=settings.dcp_world_size,
        hasher=EngineHashes(settings.hash_block_size) if settings.enable_caching else None,
        options=CacheOptions(
            retention=settings.retention,
            eviction=settings.eviction,
            hit_unit=settings.hit_unit,
            copied_tokens=None if settings.hit_unit is None else copied_tokens(config),
        ),
    )


class CacheManager:
    """The replacement for vLLM's ``kv_cache_manager``: ``cache`` under vLLM's names.

    Methods of vLLM's interface do the same as vLLM's method of that name. Their docstrings state the differences.

    Args:
        cache: the cache of this library.
        config: vLLM's KVCacheConfig with the same groups.
        settings: the options that vLLM was started with.
        to_engine_events: converts our events to vLLM's event classes.

    Attributes:
        tier: host memory behind the cache; ``None`` without it. It is set once.
        looked_up: with a tier, our request and its hit for each request that was looked up and has not begun.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        config: Config,
        settings: Settings,
        to_engine_events: Callable[[Sequence[KVCacheEvent]], list[Any]] = list,
    ) -> None:
        self.cache, self._settings, self._to_engine_events = cache, settings, to_engine_events
        self.enable_caching = self.cache.enable_caching
        self.enable_kv_cache_events = settings.enable_events
        self.use_eagle = settings.use_eagle
        self.max_model_len = settings.max_model_len
        self.kv_cache_config = config
        self.num_kv_cache_groups = len(cache.groups)
        self.empty_kv_cache_blocks = Blocks(self.cache.create_empty_block_list())
        self.block_pool = Pool(self.cache)
        self._mirrors = Mirrors(self.cache)
        self._admissions = Admissions(self.cache, self._mirrors, settings)
        self.resumed = self._admissions.resumed
        self._sizes = [group.policy.block_size for group in cache.groups]  # tokens of a column, over all ranks
        self._smallest = min(self._sizes)
        groups = zip(self._sizes, config.kv_cache_groups, strict=True)
        self.coordinator = Coordinator(
            tuple(GroupManager(size, group.kv_cache_spec) for size, group in groups), self._admissions.blocks_to_come
        )
        self.prefix_cache_stats = None if settings.new_stats is None else settings.new_stats()
        self.log_stats = settings.new_stats is not None
        kept = [group.spec.keeps for group in cache.config.groups]
        self._attention = [number for number, keeps in enumerate(kept) if keeps not in {Keeps.STATE, Keeps.RING}]
        self._states = [number for number, one in enumerate(cache.groups) if one.states and not one.states.rotates]
        self.ahead = SlotsAhead(self.cache, self._mirrors, settings.max_model_len)
        self._due = dict[str, int]()  # by request: the token count at which its next block is full
        self._held = dict[str, BlockLock]()
        self._expected = dict[str, Request]()  # waiting requests whose prefixes are evicted last
        self._hits = dict[str, tuple[int, Hit]]()  # by waiting request: the last step that looked, and what it found
        self._new_ids: list[int] = []
        self._step = -1
        self._decodes = False  # whether ``decode`` scheduled requests of the open step, which vLLM's loop does not see
        self._in_flight = deque[tuple[int, object]]()
        self.tier: HostTier | None = None
        self.looked_up = dict[str, tuple[Request, Hit]]()

    # -- steps

    def step(self) -> Self:
        """Return the context of a step. All allocations inside belong to it; hand its output to ``scheduled``."""
        return self

    def __enter__(self) -> None:
        """Open a step."""
        self._step += 1
        self._decodes = False
        self.resumed.clear()
        self.cache.engine.begin_step(self._step)
        if self.tier is not None:
            try:
                self.tier.store(self._step)
            except BaseException:
                self.cache.engine.end_step()  # Python does not call __exit__ then
                raise

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Close the open step."""
        self.cache.engine.end_step()
        if failed is None:
            self.ahead.end_step()

    def decode(self, running: Sequence[EngineRequest], at_least: int) -> Decoded | None:
        """Allocate slots for the leading ``running`` that decode a token; ``None`` if fewer than ``at_least`` do."""
        decoded = self.ahead.decode(running, at_least)
        self._decodes = decoded is not None
        if decoded is not None:
            for ids in filter(None, decoded.new_blocks):
                for group in self._attention:
                    self._new_ids += filter(None, ids[group])
        return decoded

    def store_checkpoints(self, output: Any) -> Mapping[int, tuple[Request, int]]:  # noqa: ANN401 - vLLM's
        """Tell the eviction policy, and the placement, which token counts the step of ``output`` passes.

        Returns, by row, the requests that may pass a position, and their tokens after the step without drafts.
        """
        if not self.cache.checkpoints.awaits_checkpoints:
            return {}
        cached, counts = output.scheduled_cached_reqs, output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        ends = dict[int, tuple[Request, int]]()
        for name, mine in self.ahead.served.items():
            if name in counts:
                end = computed[name] + counts[name] - len(drafts.get(name, ()))
                ends[mine.row] = mine, end
                self.cache.engine.store_checkpoints_of(mine, computed[name], end)
        return ends

    def scheduled(self, output: object) -> None:
        """Note ``output`` as the scheduler's result of the step that ended last."""
        self._in_flight.append((self._step, output))

    def executed(self, output: object) -> None:
        """Settle the step of ``output`` and all steps before it, because they have run."""
        if all(one is not output for _, one in self._in_flight):
            return
        one: object = None
        while one is not output:
            step, one = self._in_flight.popleft()
            if self.tier is not None:
                self.tier.executed(step)  # its transfers end by themselves
        self.cache.engine.settle(step)

    def new_step_starts(self) -> None:
        """Do nothing: ``step`` begins a step. vLLM's method resets the lists of the last step."""

    def share(self, request: EngineRequest, computed: int, asked: int) -> int:
        """Return how many of ``asked`` tokens after ``computed`` run in this step: up to the next checkpoint."""
        if asked <= 1 or not self.cache.bounds.keeps_checkpoints:
            return asked
        mine, end = self._mirrors.of(request), computed + asked
        while True:
            position = next(iter(self.cache.checkpoints.positions(mine, computed, min(end, mine.num_tokens))), end)
            if position >= end:
                return end - computed
            end = position  # ask again: placements may save the last block boundary of the shorter chunk

    def to_resume_point(self, request: EngineRequest, computed: int, asked: int, given: int) -> int:
        """Return the tokens of a chunk of a prompt that ends at its next resume point, or where vLLM's chunk ends.

        vLLM ends a chunk at the last multiple of ``hit_unit`` before the prompt's last token, even if no hit may end
        there because its worker does not copy that far into a block (``copied_tokens``). These chunks end at the last
        multiple that is copied, and where earlier requests branched off:

            block of 544, unit 32, 488 copied      [ .. 128 ..... 480 ... 512 . p     p: the last token of the prompt
            vLLM's chunks                          [--------------------->[-->
            these, with a branch at 128            [---->[------->[---------->

        Args:
            request: the request.
            computed: tokens before the chunk.
            asked: tokens that the step has for it.
            given: tokens of vLLM's chunk.
        """
        unit = self._settings.hit_unit
        if unit is None or computed >= request.num_prompt_tokens - 1:
            return given
        mine = self._mirrors.of(request)
        ends, last = self.cache.bounds.resume_points(mine), mine.num_prompt_tokens - 1
        stop = next((one for one in ends if computed < one < computed + given), None)
        if stop is not None:
            return stop - computed
        theirs = last // unit * unit  # among ``ends`` if it is a block boundary, where vLLM must stop
        goes_on = computed + given == theirs not in ends and computed + asked == last + 1 == request.num_tokens
        return asked if goes_on else given

    def expect(self, waiting: Collection[EngineRequest]) -> None:
        """Evict the prefixes of the next requests last, until these begin or end. ``lru`` does not rank prefixes.

        Args:
            waiting: waiting requests, the next one first. Those that a connector loads are passed over.
        """
        if not self.cache.eviction_policy.ranks:
            return
        first, left = next(iter(waiting), None), EXPECTED
        if first is None or (first.request_id in self._expected and len(self._expected) >= min(left, len(waiting))):
            return  # nobody came to the front, as in most steps
        for request in waiting:
            mine = self._mirrors.known(request.request_id)
            if mine is not None and mine.row >= 0:
                continue
            if request.request_id not in self._expected:
                mine = self._expected[request.request_id] = self._mirrors.of(request)
                self.cache.eviction_policy.expect(mine)
            left -= 1
            if not left:
                break

    def cached_tokens(self, request: EngineRequest) -> int:
        """Return the tokens of the longest cached prefix of a waiting request, as of the first call of the step."""
        step, hit = self._hits.get(request.request_id, _NEVER)
        if hit is not None and step == self._step:
            return hit.tokens
        if not self.prefix_cache_lookup_enabled(request):
            return 0
        return self._longest_hit(request, self._mirrors.of(request)).tokens

    def evicts(self, request: EngineRequest) -> bool:
        """Return whether a waiting request fits only if a resume point is evicted. False with ``lru``."""
        return self._admissions.evicts(request.num_tokens - self.cached_tokens(request))

    def _longest_hit(self, request: EngineRequest, mine: Request) -> Hit:
        """Return the longest cached prefix of a waiting request. It is remembered until it may have changed."""
        _, hit = self._hits.get(request.request_id, _NEVER)
        if hit is None or not self.cache.is_longest_hit(mine, hit):
            hit = self.cache.find_hit(mine)
        self._hits[request.request_id] = self._step, hit
        return hit

    def _expect_no_longer(self, request_id: str) -> None:
        self.cache.eviction_policy.expect_no_longer(self._expected.pop(request_id))

    # -- look-up

    def prefix_cache_lookup_enabled(self, request: EngineRequest) -> bool:
        """Return whether a prefix of ``request`` is looked up."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(
        self, request: EngineRequest, max_cache_hit_length: int | None = None
    ) -> tuple[Blocks, int, int]:
        """Return a hit's blocks, its tokens, and the tokens of a longer shared prefix that has no state, or 0.

        Raises ConfigError for a hit longer than ``max_cache_hit_length``, which no supported option of vLLM bounds.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        mine = self._mirrors.of(request)
        hit = self._longest_hit(request, mine) if request.request_id in self._hits else self.cache.find_hit(mine)
        if self.tier is not None:
            self.looked_up[request.request_id] = mine, hit
        return self._found(mine, hit, max_cache_hit_length)

    def get_computed_blocks_for_connector(
        self, request: EngineRequest, max_cache_hit_length: int | None = None
    ) -> tuple[Blocks, int, int, bool]:
        """Return the hit of attention, and whether states are missing at its end, for a connector that brings them."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0, False
        mine = self._mirrors.of(request)
        common = self.cache.find_hit(mine)
        hit = self.cache.engine.find_hit_without_states(mine, common)
        return *self._found(mine, hit, max_cache_hit_length), hit.tokens > common.tokens

    def _found(self, mine: Request, hit: Hit, most: int | None) -> tuple[Blocks, int, int]:
        """Return ``hit`` of ``mine`` as vLLM's scheduler reads it. ConfigError if it has more than ``most`` tokens."""
        mine.branch_tokens = hit.branch_tokens
        if most is not None and hit.tokens > most:
            raise ConfigError(f"a hit of {hit.tokens} tokens cannot be bounded to {most}: leave --scheduler-cls out")
        blocks = Blocks(self.cache.engine.blocks_of(hit), hit) if hit.tokens else self.empty_kv_cache_blocks
        return blocks, hit.tokens, hit.branch_tokens

    def truncate_computed_blocks(self, blocks: Blocks, num_computed_tokens: int) -> Blocks:
        """Raise ConfigError: hits end at block boundaries here, so no partial block has to be cut off."""
        del blocks
        raise ConfigError(f"a hit cannot be cut to {num_computed_tokens} tokens: hits of hybridkv.vllm end at blocks")

    def record_prefix_cache_stats(self, request: EngineRequest, num_hits: int) -> None:
        """Count an admission with ``num_hits`` hit tokens."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
            )

    def make_prefix_cache_stats(self) -> Any:  # noqa: ANN401 - vLLM's PrefixCacheStats
        """Return the statistics since the last call, or ``None`` if they are off."""
        if self._settings.new_stats is None:
            return None
        found, self.prefix_cache_stats = self.prefix_cache_stats, self._settings.new_stats()
        return found

    # -- slots

    def allocate_slots(  # noqa: PLR0917 - vLLM's positions
        self,
        request: EngineRequest,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Blocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Blocks | None:
        """Return the new blocks, or ``None`` when they do not fit.

        Blocks that ``ahead`` allocated for the request come first. The arguments mean the same as in vLLM.
        """
        name = request.request_id
        if self.ahead.take(request, num_new_tokens, num_lookahead_tokens):
            empty = self.empty_kv_cache_blocks
            return self._with_owed(name, empty) if name in self.ahead.owed else empty  # most need no block
        mine = self._mirrors.of(request)
        if mine.row >= 0 and name not in self._admissions.loaded:
            new = self.ahead.serve(request, mine, num_new_tokens, num_lookahead_tokens)
        else:
            hit = None if new_computed_blocks is None else new_computed_blocks.hit or new_computed_blocks.held
            new = self._admissions.admit(
                request,
                mine,
                hit if num_new_computed_tokens else None,
                num_new_computed_tokens,
                new_tokens=num_new_tokens,
                external=num_external_computed_tokens,
                lookahead=num_lookahead_tokens,
                encoder_tokens=num_encoder_tokens,
                delayed=delay_cache_blocks,
                whole=full_sequence_must_fit,
                reserved=reserved_blocks,
                has_running=has_scheduled_reqs or self._decodes,
                others_wait=len(self._expected) > (name in self._expected),
            )
            if new is not None:
                if not delay_cache_blocks:
                    self.ahead.served[name] = mine
                if name in self._expected:
                    self._expect_no_longer(name)
                if name in self._hits:
                    del self._hits[name]
        return None if new is None else self._with_owed(name, Blocks(new), skip_zeroing_group_ids)

    def _with_owed(self, request_id: str, new: Blocks, uncleared: tuple[int, ...] = ()) -> Blocks:
        """Return the blocks that ``ahead`` allocated and did not report, followed by ``new``.

        ``uncleared`` lists groups with blocks that a transfer writes: workers need not clear them.
        """
        owed = self.ahead.owed.pop(request_id, None)
        if owed is not None:
            given = KVCacheBlocks(tuple(np.array(ids, np.int32) for ids in owed), self.empty_kv_cache_blocks.held.pool)
            new = Blocks(given + new.held)
        for group in self._attention:
            if group in uncleared:
                continue
            self._new_ids += filter(None, new.held.ids[group].tolist())
        return new

    def cache_blocks(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """Publish the full blocks among the first ``num_computed_tokens`` tokens.

        For a request that a connector loads, this ends the transfer with this many tokens. The request starts again
        from 0 if it cannot resume after them.
        """
        if num_computed_tokens < self._due.get(request.request_id, 0):  # a loading request has no entry
            return
        if request.request_id in self._admissions.loading:
            self._admissions.finish_load(request, num_computed_tokens)
            return
        if not self.enable_caching:
            return
        mine = self._mirrors.of(request)
        if mine.row >= 0:
            tokens = min(num_computed_tokens, mine.num_tokens)
            self.cache.cache_blocks(mine, tokens)
            self._due[request.request_id] = (tokens // self._smallest + 1) * self._smallest

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free blocks that no layer reads after ``processed_computed_tokens`` settled tokens."""
        del num_prompt_tokens
        mine = self._mirrors.known(request_id)
        if mine is None or mine.row < 0:
            return
        self.cache.engine.synchronise_one(mine, processed_computed_tokens)
        self.cache.engine.drop_skipped(mine)

    # -- end of a request

    def mirror(self, request: EngineRequest) -> Request:
        """Return this library's request for ``request``, up to date with it."""
        return self._mirrors.of(request)

    def free(self, request: EngineRequest) -> None:
        """Free the blocks of a request, the last first.

        Where resume points are kept, all computed tokens can be hit, those of steps in flight included. Workers run
        steps in order, so a later copy from the blocks reads them after these steps.
        """
        name = request.request_id
        self.ahead.forget(name)
        self._due.pop(name, None)
        if name in self._expected:
            self._expect_no_longer(name)
        if name in self._hits:
            del self._hits[name]
        self._admissions.forget(name)
        mine = self._mirrors.known(name)
        keeps = self.cache.bounds.keeps_resume_points or not self.cache.checkpoints.idle
        if keeps and mine is not None and mine.row >= 0:
            self.cache.engine.withdraw(mine)  # a request preempted by priority may hold slots of this step
            self.cache.keep_resume_point(self._mirrors.of(request))
        self.cache.free(name)
        held = self._held.pop(name, None)
        if held is not None:
            self.cache.engine.unlock(held)
        self._mirrors.forget(name)

    def hold(self, request: EngineRequest) -> None:
        """Lock the blocks of a request in place until ``free``, because a transfer reads them."""
        mine = self._mirrors.known(request.request_id)
        if mine is not None and mine.row >= 0:
            self._held[request.request_id] = self.cache.engine.lock(mine)

    def pop_blocks_for_free(self, request: EngineRequest) -> list[BlockLock]:
        """Free the request, and return locks on its blocks for ``block_pool.free_blocks`` to release."""
        mine = self._mirrors.known(request.request_id)
        held = [] if mine is None or mine.row < 0 else [self.cache.engine.lock(mine)]
        self.free(request)
        return held

    def reset_prefix_cache(self) -> bool:
        """Forget all keys, unless a block is in use."""
        done = self.cache.reset_prefix_cache()
        if done and self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return done

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove the keys of the blocks, so that they cannot be hit."""
        self.cache.evict_blocks(0, sorted(block_ids))

    # -- answers

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use."""
        return self.cache.usage

    def get_blocks(self, request_id: str) -> Blocks:
        """Return the blocks of a request."""
        return Blocks(self.cache.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the block ids of a request by group."""
        return self.cache.get_block_ids(request_id)

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Return the ids of blocks that hold the first ``num_computed_tokens`` tokens; for windows and states, all."""
        found = list(self.get_block_ids(request_id))
        for number, size in enumerate(self._sizes):
            if self.cache.config.groups[number].spec.keeps is Keeps.TOKENS:
                found[number] = found[number][: -(-num_computed_tokens // size)]
        return tuple(found)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return 0 for each group: blocks common to all running requests are not counted here."""
        del running_request_id
        return [0] * self.num_kv_cache_groups

    def estimate_cached_tokens(self, request: EngineRequest) -> int:
        """Return how many tokens of ``request`` can be hit, by the group with the fewest."""
        if not self.enable_caching:
            return 0
        key_of, held = self.cache.block_pool.keys.key_of, self.cache.get_blocks(request.request_id).ids
        counts = [
            next((place for place in range(len(ids), 0, -1) if key_of(ids.item(place - 1)) is not None), 0) * size
            for group, size, ids in zip(self.cache.groups, self._sizes, held, strict=True)
            if group.kind.publishes
        ]
        return min(counts, default=0)

    def take_events(self) -> list[Any]:
        """Return the events since the last call in vLLM's classes."""
        events = (self.cache if self.tier is None else self.tier).take_events()
        return self._to_engine_events(events) if events else []  # asked in each step, mostly without any

    # -- work for the workers

    def take_new_block_ids(self) -> list[int]:
        """Return attention blocks allocated since the last call, which workers may have to clear."""
        found, self._new_ids = self._new_ids, []
        return found

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Add the blocks from ``start_token`` on to the blocks to clear."""
        for number, ids in enumerate(self.get_block_ids(request_id)):
            if number in self._attention:
                self._new_ids += ids[start_token // self._sizes[number] :]

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return no copies: the scheduler adds them to its complete output (``take_copies``)."""
        return [], []

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies of the step being made, as pairs of block ids: those of hits that end inside blocks."""
        if self._settings.hit_unit is None:
            return []
        return [(one.source, one.destination) for one in self.cache.fields.take_transfers().copies]

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return the states that can be hit after this step and not before, by request: (group, block, tokens).

        They are those whose keys wait for this step. O(columns of states of the requests that ``ahead`` served).
        """
        found = dict[str, list[tuple[int, int, int]]]()
        step_of, sizes = self.cache.block_pool.keys.step_of, self._sizes
        for name in self.ahead.served if self._states else ():
            every = self.cache.get_blocks(name).ids
            for group in self._states:
                ids = every[group]
                for column in np.flatnonzero(ids).tolist():
                    if step_of(block := ids.item(column)) == self._step:
                        found.setdefault(name, []).append((group, block, (column + 1) * sizes[group]))
        return found

    def finalize_partial_tail_offloads(self, request: EngineRequest) -> list[tuple[int, int, int]]:
        """Return no offloads: no state inside a block is kept with a connector."""
        del request
        return []


class Pool:
    """The part of ``block_pool`` that connectors and schedulers use."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self.num_gpu_blocks = cache.config.num_blocks

    def free_blocks(self, held: Iterable[BlockLock]) -> None:
        """Release the locks that ``pop_blocks_for_free`` returned."""
        for one in held:
            self._cache.engine.unlock(one)

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that no request holds."""
        return self._cache.block_pool.get_num_free_blocks()

    def get_usage(self) -> float:
        """Return the share of the blocks that are in use."""
        return self._cache.usage


@dataclass(frozen=True, slots=True)
class GroupManager:
    """The attributes that are read from one of ``coordinator.single_type_managers``."""

    block_size: int
    kv_cache_spec: Any


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The part of ``coordinator`` that schedulers, engines and routers use.

    Attributes:
        single_type_managers: one per group.
        blocks_to_come: returns the further blocks of a request, given its id, tokens and encoder tokens.
    """

    single_type_managers: tuple[GroupManager, ...]
    blocks_to_come: Callable[[str, int, int], int]

    def get_num_blocks_to_allocate(
        self, *, request_id: str, num_tokens: int, num_encoder_tokens: int, **others: object
    ) -> int:
        """Return the blocks that a running or loading request still needs for ``num_tokens`` tokens."""
        del others  # counts from which vLLM's own coordinator derives what the cache knows
        return self.blocks_to_come(request_id, num_tokens, num_encoder_tokens)


class Block(NamedTuple):
    """A block for connectors. ``block_hash`` is its key, or ``None`` if it cannot be hit."""

    block_id: int
    block_hash: bytes | None
    is_null: bool


class Blocks:
    """Our blocks under the names of vLLM's KVCacheBlocks.

    ``held`` are the blocks in this library's class. ``hit`` is the look-up that found them, if one did: an admission
    checks its tokens no second time.
    """

    __slots__ = ("held", "hit")

    def __init__(self, held: KVCacheBlocks, hit: Hit | None = None) -> None:
        self.held, self.hit = held, hit

    @property
    def blocks(self) -> tuple[list[Block], ...]:
        """The blocks of each group."""
        pool = self.held.pool
        return tuple(
            [
                Block(one, None if pool is None else pool.keys.key_of(known), known == 0)
                for one, known in zip(own, ids.tolist(), strict=True)
            ]
            for own, ids in zip(self.held.blocks, self.held.ids, strict=True)
        )

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return the ids by group, optionally of ``group_ids`` only. ``allow_none``: ``None`` for no blocks."""
        if allow_none and group_ids is None and not any(map(len, self.held.ids)):
            return None
        every = self.held.blocks
        ids = every if group_ids is None else tuple(every[group] for group in group_ids)
        return None if allow_none and not any(ids) else ids

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Return the ids by group of the blocks that cannot be hit yet."""
        return [[one.block_id for one in group if one.block_hash is None and not one.is_null] for group in self.blocks]

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the ids of blocks that cannot be hit yet, in the only group."""
        (ids,) = self.get_unhashed_block_ids_all_groups()
        return ids

    def new_empty(self) -> Blocks:
        """Return no blocks in every group."""
        return Blocks(KVCacheBlocks(tuple(ids[:0] for ids in self.held.ids), self.held.pool))
