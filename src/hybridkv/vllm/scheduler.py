"""vLLM's schedulers with this library's cache manager, in both layouts: ``--scheduler-cls hybridkv.vllm.Scheduler``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from vllm.distributed import kv_events as theirs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy, maybe_convert_block_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as TheirAsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler as TheirScheduler
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.metrics.stats import PrefixCacheStats

import vllm
from hybridkv.cache import BlockRemoved, BlockStored, KVCacheEvent, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.kv_events import RequestPublisher
from hybridkv.observe.prefixes import PREFIXES, ExactEvents, without_resume_points
from hybridkv.vllm.decoding import add_decoding, add_tokens, decode, empty_step, set_aside, take_tokens, told_of
from hybridkv.vllm.manager import CacheManager, reference_cache
from hybridkv.vllm.natural import (
    ATTRIBUTE,
    Options,
    ReferenceOptions,
    StepWriter,
    default_block_size,
    natural_cache,
    natural_plan,
)
from hybridkv.vllm.natural_config import natural_config
from hybridkv.vllm.queue import WaitingByPrefix
from hybridkv.vllm.specs import (
    Settings,
    choose_runner,
    connectors_in,
    hit_unit_of,
    layer_specs,
    refuse,
    refuse_captured,
    refuse_natural,
)
from hybridkv.vllm.tier_events import STORAGE

logger = logging.getLogger(__name__)

SUPPORTED: Final = ("0.33", "0.32")
"""The supported releases of vLLM: the two newest, the newest first (docs/vllm.md)."""


class Scheduler(TheirScheduler):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's scheduler with this library's cache manager, in the reference layout.

    Args:
        *args: as in vLLM's scheduler.
        **kwargs: as in vLLM's scheduler.

    Raises:
        ConfigError: the version, a group or an option is not supported, or vLLM schedules ahead and the class does not.
    """

    connector: Any  # vLLM's; None without one
    kv_cache_manager: Any  # vLLM's, until it is replaced

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        require_version(vllm.__version__)
        self._decoding: CachedRequestData | None = None  # requests that skip vLLM's loop, while it schedules others
        super().__init__(*args, **kwargs)
        require_class(self)
        theirs = self.kv_cache_manager
        self.replace_manager()
        refuse_captured(self, theirs)

    def replace_manager(self) -> None:
        """Replace vLLM's cache manager with this library's."""
        refuse(self)
        manager, config = self.kv_cache_manager, self.kv_cache_config
        options = ReferenceOptions.of(self.vllm_config.additional_config)
        settings = _settings(
            self,
            hash_block_size=self.hash_block_size,
            enable_caching=manager.enable_caching,
            use_eagle=manager.use_eagle,
            dcp_world_size=self.vllm_config.parallel_config.decode_context_parallel_size,
            hit_unit=hit_unit_of(self),
            retention=config.prefix_cache_retention_interval,
            eviction=options.chosen(config, use_eagle=manager.use_eagle),
        )
        # chunks end where states are saved, so no block is allocated for a state inside a chunk
        self.mamba_has_prefill_checkpoint_blocks = False
        self._published = None if options.requests is None else RequestPublisher(options.requests, time.time)
        cache = reference_cache(config, settings)
        self.kv_cache_manager = CacheManager(cache, config, settings, EventConverter(config, cache, options.kv_events))
        _order_waiting(self, options.max_overtaken)
        if self.connector is not None:
            self.connector.bind_kv_cache_manager(self.kv_cache_manager)

    def complete(self, output: Any) -> None:  # noqa: ANN401 - vLLM's
        """Complete a step with its ``output``, inside the step: add the copies of hits that end inside blocks.

        The worker copies whole blocks before the forward pass, reading all of them before it writes any.

        Args:
            output: vLLM's SchedulerOutput.
        """
        self.kv_cache_manager.store_checkpoints(output)
        copies = self.kv_cache_manager.take_copies()
        if copies:
            output.kv_cache_block_copies = [KVCacheBlockCopy(*one) for one in copies]

    def schedule(self, throttle_prefills: bool = False) -> Any:  # noqa: ANN401 - vLLM's
        """Schedule as vLLM does, inside a step of the cache. Requests that decode skip vLLM's loop.

        Args:
            throttle_prefills: as in vLLM's scheduler.
        """
        manager, ahead = self.kv_cache_manager, self.vllm_config.num_lookahead_tokens
        with manager.step():
            decoded = decode(self, throttled=throttle_prefills)
            self._decoding = None if decoded is None else told_of(self, decoded)
            if decoded is None:
                manager.ahead.give(self.running, 1 + self.vllm_config.num_speculative_tokens, ahead)
                output = super().schedule(throttle_prefills)
            elif decoded.covered == len(self.running) and not self.get_request_counts()[1]:
                output = empty_step(self)
            else:
                with set_aside(self, decoded):
                    manager.ahead.give(self.running, 1, ahead)
                    output = super().schedule(throttle_prefills)
            self.complete(output)
            if self.waiting:
                manager.expect(self.waiting)
        manager.scheduled(output)
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:  # noqa: ANN401 - vLLM's
        """Add the requests that decode to the step, then update as vLLM does."""
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            add_decoding(self, decoding, scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Settle the step in the cache, then update as vLLM does. Requests that only go on skip vLLM's loop.

        Args:
            scheduler_output: as in vLLM's scheduler.
            model_runner_output: as in vLLM's scheduler.
        """
        self.kv_cache_manager.executed(scheduler_output)
        counts = scheduler_output.num_scheduled_tokens
        taken, others = take_tokens(self, scheduler_output, model_runner_output)
        scheduler_output.num_scheduled_tokens = others
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            scheduler_output.num_scheduled_tokens = counts
        add_tokens(outputs, taken, counts)
        return outputs

    def _mamba_block_aligned_split(
        self,
        request: Any,  # noqa: ANN401 - vLLM's
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Return the tokens of a chunk that ends where vLLM ends it, or at a resume point inside a block."""
        hit, loaded = num_new_local_computed_tokens, num_external_computed_tokens
        given = super()._mamba_block_aligned_split(request, num_new_tokens, hit, loaded)
        computed = request.num_computed_tokens + hit + loaded
        return int(self.kv_cache_manager.to_resume_point(request, computed, num_new_tokens, given))

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Free a request that ended as vLLM does, and publish it if that is wanted."""
        if self._published is not None:
            oldest = min((one.arrival_time for one in self.requests.values() if one is not request), default=math.inf)
            self._published.ended(self.kv_cache_manager.mirror(request), request.arrival_time, oldest)
        return super()._free_request(request, *args, **kwargs)


class AsyncScheduler(Scheduler, TheirAsyncScheduler):  # type: ignore[misc] # as above
    """The Scheduler that schedules a step while earlier forward passes still run (vLLM's default)."""


class NaturalScheduler(Scheduler):
    """vLLM's scheduler with pages in each layer's own size, and states saved where the placement says.

    vLLM's own prefix caching must be off. Then each request has one running state, as this layout requires.

    Args:
        vllm_config: as in vLLM's scheduler.
        *args: as in vLLM's scheduler.
        **kwargs: as in vLLM's scheduler.

    Raises:
        ConfigError: as in Scheduler; or vLLM's model runner V2 was chosen.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        choose_runner(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def replace_manager(self) -> None:
        """Replace vLLM's cache manager with this library's, and the connector with one for this layout."""
        refuse_natural(self.vllm_config, self.kv_cache_config, self.connector)
        config = self.kv_cache_config
        options = Options.of(self.vllm_config.additional_config, default_block_size(config))
        self._published = None if options.requests is None else RequestPublisher(options.requests, time.time)
        settings = _settings(self, hash_block_size=options.block_size, enable_caching=True, use_eagle=False)
        made = natural_plan(
            config,
            options,
            name=self.vllm_config.model_config.model,
            max_model_len=settings.max_model_len,
            max_in_flight_tokens=settings.max_in_flight_tokens,
        )
        laid_out = natural_config(dict(layer_specs(config)), made.config)
        laid_out.kv_cache_layout = config.kv_cache_layout
        tiered = any(hasattr(one, "start_natural") for one in connectors_in(self.connector))
        cache = natural_cache(made, options, settings, tiered=tiered)
        events = EventConverter(laid_out, cache, options.kv_events)
        manager = self.kv_cache_manager = CacheManager(cache, laid_out, settings, events)
        _order_waiting(self, options.max_overtaken)
        self.need_mamba_block_aligned_split = manager.cache.bounds.keeps_checkpoints
        self.needs_kv_cache_zeroing = False  # StepWriter names the blocks, class by class
        self._writer = StepWriter(manager)
        if self.connector is not None:
            # created again: vLLM's constructor created it for vLLM's own layout
            self.connector.shutdown()
            self.connector = KVConnectorFactory.create_connector(
                config=self.vllm_config, role=KVConnectorRole.SCHEDULER, kv_cache_config=laid_out
            )
            self.connector.bind_kv_cache_manager(manager)
            for one in connectors_in(self.connector):
                if hasattr(one, "start_natural"):
                    one.start_natural(manager, made)
            self.block_size = 1  # hits end at any token, so none is cut to a block for a connector that has more

    def complete(self, output: Any) -> None:  # noqa: ANN401 - vLLM's
        """Add the worker's block operations.

        Args:
            output: vLLM's SchedulerOutput.
        """
        setattr(output, ATTRIBUTE, self._writer.write(output))

    def _connector_finished(self, request: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Finish as vLLM does, and lock blocks in place that a transfer still reads."""
        delayed, params = super()._connector_finished(request)
        if delayed:
            self.kv_cache_manager.hold(request)
        return delayed, params

    def _mamba_block_aligned_split(
        self,
        request: Any,  # noqa: ANN401 - vLLM's
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Return the tokens of a chunk that ends where the placement saves a state. vLLM ends chunks at blocks."""
        before = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        return int(self.kv_cache_manager.share(request, before, num_new_tokens))


class AsyncNaturalScheduler(NaturalScheduler, TheirAsyncScheduler):  # type: ignore[misc] # as above
    """The NaturalScheduler that schedules while earlier forward passes still run (vLLM's default on GPUs)."""


def _settings(scheduler: Any, **more: Any) -> Settings:  # noqa: ANN401 - vLLM's
    """Return the settings of both layouts, and ``more``. Call before vLLM's manager in ``scheduler`` is replaced."""
    manager, started = scheduler.kv_cache_manager, scheduler.vllm_config
    return Settings(
        max_model_len=manager.max_model_len,
        max_in_flight_tokens=started.max_in_flight_tokens or manager.max_model_len,
        enable_events=manager.enable_kv_cache_events,
        watermark=started.scheduler_config.watermark,
        new_stats=PrefixCacheStats if manager.log_stats else None,
        **more,
    )


def _order_waiting(scheduler: Any, max_overtaken: int) -> None:  # noqa: ANN401 - vLLM's
    """Let waiting requests overtake others while memory is full. Priorities and ``lru`` keep vLLM's order."""
    manager, waiting = scheduler.kv_cache_manager, scheduler.waiting
    if max_overtaken and manager.cache.eviction_policy.ranks and isinstance(waiting, FCFSRequestQueue):
        scheduler.waiting = WaitingByPrefix(waiting, max_overtaken, manager.evicts, manager.cached_tokens)


def require_version(version: str, option: str = "--scheduler-cls") -> None:
    """Raise ConfigError for a version that was not tested. ``option`` brought hybridkv into vLLM."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise ConfigError(
            f"hybridkv.vllm supports vLLM {' and '.join(SUPPORTED)}, this is {version}: leave {option} out, or "
            f"install 'vllm=={SUPPORTED[0]}.*'"
        )


def require_class(scheduler: Any) -> None:  # noqa: ANN401 - vLLM's
    """Raise ConfigError if vLLM schedules ahead of outputs and the class of ``scheduler`` does not."""
    if scheduler.vllm_config.scheduler_config.async_scheduling and not isinstance(scheduler, TheirAsyncScheduler):
        name = type(scheduler).__name__
        raise ConfigError(
            f"hybridkv.vllm.{name} schedules a step after the last one's output, and vLLM was started with async "
            f"scheduling: use --scheduler-cls hybridkv.vllm.Async{name}, or --no-async-scheduling"
        )


class EventConverter:
    """Converts our events to vLLM's, for the groups of one engine.

    Args:
        config: vLLM's KVCacheConfig.
        cache: the cache that reports the events.
        form: ``exact`` or ``raw`` (docs/events.md); ``None``: exact, or raw where exact is not supported.

    Raises:
        ConfigError: ``form`` is ``exact``, which the groups do not support.
    """

    def __init__(self, config: Any, cache: KVCacheManager, form: str | None) -> None:  # noqa: ANN401 - vLLM's
        self._filter: Callable[[Sequence[KVCacheEvent]], list[KVCacheEvent]] = without_resume_points
        self._groups: list[tuple[str, int | None]] = [PREFIXES]
        if form != "raw":
            try:
                self._filter = ExactEvents(cache.config, drops=any(group.kind.drops for group in cache.groups)).filter
            except ConfigError as error:
                if form == "exact":
                    raise
                logger.warning("KV events report every cached block of each group: %s", error)
                form = "raw"
        if form == "raw":
            self._groups = kinds_of(config)

    def __call__(self, events: Sequence[KVCacheEvent]) -> list[Any]:
        """Return vLLM's events in the same order. Lost events become a clearing of all blocks, which clients handle."""
        return [engine_event(event, self._groups) for event in self._filter(events)]


def kinds_of(config: Any) -> list[tuple[str, int | None]]:  # noqa: ANN401 - vLLM's
    """Return the kind and the window of each group in vLLM's events.

    Args:
        config: vLLM's KVCacheConfig.
    """
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]


def engine_event(event: KVCacheEvent, kinds: Sequence[tuple[str, int | None]]) -> Any:  # noqa: ANN401 - vLLM's
    """Return one of our events in vLLM's class.

    Args:
        event: The event. One that says that events were lost becomes a clearing of all blocks.
        kinds: The kind and the window of each group.
    """
    if not isinstance(event, BlockStored | BlockRemoved):
        return theirs.AllBlocksCleared()
    hashes = [maybe_convert_block_hash(one) for one in event.block_hashes]
    locality = "LOCAL" if event.medium == STORAGE else None  # of this engine alone: Dynamo counts no other storage
    if isinstance(event, BlockRemoved):
        return theirs.BlockRemoved(
            block_hashes=hashes, medium=event.medium, group_idx=event.group_idx, locality=locality
        )
    parent = event.parent_block_hash
    kind, window = kinds[event.group_idx]
    return theirs.BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        token_ids=list(event.token_ids),
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=event.medium,
        lora_name=event.lora_name,
        # vLLM's events always have a list
        extra_keys=[None] * len(event.block_hashes) if event.extra_keys is None else list(event.extra_keys),
        group_idx=event.group_idx,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
        locality=locality,
    )
