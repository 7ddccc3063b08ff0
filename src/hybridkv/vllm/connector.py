"""vLLM's connector to host memory and disks: ``"kv_connector_module_path": "hybridkv.vllm"``.

    scheduler   TierRequests: which prefixes are looked for, loaded, stored -> TierWork on vLLM's SchedulerOutput
    workers     TierWorker: look-ups and copies on threads -> answers with the step's output

In the natural layout NaturalTierRequests and NaturalTierWorker take their places.

Design: docs/design/0042-vllm-tier-connector.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import vllm
from hybridkv.planner import Plan
from hybridkv.stores import DiskStore
from hybridkv.stores.disk_view import DiskView
from hybridkv.stores.prefetch import PrefixRules
from hybridkv.vllm.manager import CacheManager
from hybridkv.vllm.natural import ReferenceOptions
from hybridkv.vllm.natural_tier import NaturalTierRequests, NaturalTierWorker, NaturalWork, Open, host_tier
from hybridkv.vllm.scheduler import Scheduler, engine_event, kinds_of, require_version
from hybridkv.vllm.specs import WORKER
from hybridkv.vllm.tier_events import TierChange, TierEvents
from hybridkv.vllm.tier_options import TierOptions, folder_of, identity_of, needs_of, refuse_tiers
from hybridkv.vllm.tier_requests import TierRequests, TierWork
from hybridkv.vllm.tier_worker import TierWorker

TIERS: Final = ("host", "disk", "store")
METRICS: Final = (
    ("read_bytes", "Bytes that came from the tier.", ("found_bytes", "loaded_bytes")),
    ("read_time", "Seconds of these reads.", ("found_seconds",)),
    ("write_bytes", "Bytes that went to the tier.", ("stored_bytes",)),
    ("write_time", "Seconds of these writes.", ("stored_seconds",)),
    ("loaded_tokens", "Tokens that came up from the tier.", ("loaded_tokens",)),
    ("promotion_job_failures", "Loads that failed.", ("loads_lost",)),
    ("promotion_allocation_failures", "Attempts to load for which there was no room.", ("loads_refused",)),
    ("backpressure_stores_dropped", "Stores for which the tier had no room.", ("stores_refused", "dropped_blocks")),
)
"""Name, description, and the counts of each layout that it sums."""
_VERSIONS: Final = (vllm.__version__, version("hybridkv"))


@dataclass
class Answers(KVConnectorWorkerMetadata):  # type: ignore[misc] # vLLM is not typed here
    """The tokens that each rank found, by look-up; in the natural layout whether it arrived, by transfer."""

    tokens: dict[int, list[int]]
    changes: dict[int, list[TierChange]] = field(default_factory=dict)
    """What the stores of each rank got and lost, if events are published."""

    def aggregate(self, other: Answers) -> Answers:
        """Return the answers of both."""
        numbers = {*self.tokens, *other.tokens}
        tokens = {one: self.tokens.get(one, []) + other.tokens.get(one, []) for one in numbers}
        return Answers(tokens, self.changes | other.changes)


class TierStats(KVConnectorStats):  # type: ignore[misc] # as above
    """Counts of an interval, summed over ranks."""

    data: dict[str, float]

    def reset(self) -> None:
        """Forget the counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TierStats:
        """Add the counts of ``other``."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for the log."""
        return {name: round(count, 6) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class TierMetrics(KVConnectorPromMetrics):  # type: ignore[misc] # as above
    """Counts of TierStats by tier, under the names of vLLM's tiers.

    Args:
        vllm_config: vLLM's config.
        metric_types: vLLM's classes of metrics.
        labelnames: names of an engine's labels.
        per_engine_labelvalues: their values, by engine.
    """

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(f"vllm:kv_offload_tiering_{name}", said, [*labelnames, "tier"])
            for name, said, _ in METRICS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval.

        Args:
            transfer_stats_data: counts by name, as ``host_found_bytes``.
            engine_idx: the engine.
        """
        labels = self.per_engine_labelvalues[engine_idx]
        for name, _, parts in METRICS:
            for tier in TIERS:
                count = sum(transfer_stats_data.get(f"{tier}_{part}", 0) for part in parts)
                if count:
                    self._counters[name].labels(*labels, tier).inc(count)


class TierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # as above
    """Keeps blocks of all kinds of groups in host memory and on a disk, and loads prefixes from there.

    Args:
        vllm_config: vLLM's config, with ``kv_connector_extra_config``: ``host_memory``, ``disk`` with
            ``disk_memory``, each for one rank, and ``store``.
        role: scheduler or worker; vLLM makes one of each.
        kv_cache_config: vLLM's cache.

    Raises:
        ConfigError: the version, a group or an option is not supported.

    Attributes:
        natural: the worker's side in the natural layout, else ``None``.
    """

    supports_natural_layout = True

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        require_version(vllm.__version__, "--kv-transfer-config")
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = TierOptions.of(self._kv_transfer_config.kv_connector_extra_config)
        refuse_tiers(vllm_config, kv_cache_config, self._options)
        self._ranks = vllm_config.parallel_config.world_size
        self._cache_hit_source = CacheHitSource.HOST if self._options.disk is None else CacheHitSource.DISK
        if self._options.store is not None:
            self._cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED
        self._worker: TierWorker | None = None
        self._requests: Any = None  # of the natural layout: from start_natural on
        self.natural: NaturalTierWorker | None = None
        self._events: TierEvents | None = None
        if vllm_config.parallel_config.worker_cls == WORKER:
            rank = vllm_config.parallel_config.rank
            self.natural = NaturalTierWorker(self._behind(DiskStore, rank), rank)
            return
        self._rules = PrefixRules(
            needs_of(kv_cache_config), *resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        )
        self._kinds = kinds_of(kv_cache_config)
        if _publishes(vllm_config):
            self._events = TierEvents(self._rules, self._ranks, _extra_keys)
        self._requests = TierRequests(self._rules, self._ranks, remembers=self._options.outlives, events=self._events)

    def start_natural(self, manager: CacheManager, made: Plan) -> None:
        """Put host memory behind the manager of the natural layout.

        Args:
            manager: the manager.
            made: its plan.

        Raises:
            ConfigError: the eviction knows no resume points, or the store cannot be opened.
            CapacityError: the host memory is too small.
        """
        options, cache = self._options, manager.cache
        said = [cache.config.block_bytes_of(group) for group in range(len(cache.groups))]
        identity = identity_of(self._vllm_config, self._kv_cache_config, said, _VERSIONS)
        manager.tier = host_tier(cache, made, options.host_bytes, self._behind(DiskView, 0), identity)
        behind = "store" if options.disk is None else "disk"
        self._requests = NaturalTierRequests(manager, manager.tier, self._ranks, identity, behind)

    def _behind(self, disk: type[DiskStore | DiskView], rank: int) -> Open | None:
        """Return how to open the store behind the host in the natural layout; ``None`` without one.

        ``disk``: what opens the folder of ``rank``.
        """
        options = self._options
        if options.disk is not None:
            folder = folder_of(self._vllm_config.parallel_config, rank)
            return partial(disk, options.disk / folder, options.disk_bytes)
        return None if options.store is None else options.store.open

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not stored is a miss later."""
        return False

    # -- the scheduler's

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401 - vLLM's
        """Return the tokens that the tiers have beyond the device's, ``None`` while that is looked up.

        Args:
            request: vLLM's Request.
            num_computed_tokens: tokens that the device has.
        """
        found: tuple[int | None, bool] = self._requests.matched(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401 - vLLM's
        """Load the tokens into the request's blocks.

        Args:
            request: vLLM's Request.
            blocks: vLLM's blocks of it.
            num_external_tokens: tokens to load.
        """
        self._requests.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> TierWork | NaturalWork:  # noqa: ANN401 - vLLM's
        """Return the workers' part of a step.

        Args:
            scheduler_output: vLLM's SchedulerOutput.
        """
        work: TierWork | NaturalWork = self._requests.work(scheduler_output, self._kv_cache_manager)
        return work

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401 - vLLM's
        """Note answers of workers, and loads that failed.

        Args:
            connector_output: vLLM's KVConnectorOutput, of all ranks.
        """
        if connector_output.kv_connector_worker_meta is not None:
            self._requests.heard(connector_output.kv_connector_worker_meta.tokens)
            self._requests.changed(connector_output.kv_connector_worker_meta.changes)
        self._requests.failed(connector_output.failed_recving or ())

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ANN401 - vLLM's
        """Forget a request. Its blocks may be freed at once: they are copied within steps.

        Args:
            request: vLLM's Request.
            block_ids: not used.
        """
        del block_ids
        self._requests.finished(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ANN401 - vLLM's
        """Forget a request, as ``request_finished``.

        Args:
            request: vLLM's Request.
            block_ids: not used.
        """
        return self.request_finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        """Return the events of host memory and disk since the last call, in vLLM's classes.

        In the natural layout hybridkv's manager returns them.
        """
        return [] if self._events is None else [engine_event(event, self._kinds) for event in self._events.take()]

    def reset_cache(self) -> bool:
        """Find no stored block again, for example after new weights; return whether it was done."""
        return bool(self._requests.reset())

    def has_pending_push_work(self) -> bool:
        """Return whether the engine should go on with steps although no request is left."""
        return self._requests is not None and bool(self._requests.is_busy)

    # -- the worker's

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the stores for the worker's cache.

        Args:
            kv_caches: vLLM's tensors by layer; states are lists of tensors.
        """
        if self.natural is not None:
            return
        started, config = self._vllm_config, self._kv_cache_config
        identity = identity_of(started, config, self._rules, _VERSIONS)
        folder = folder_of(started.parallel_config, started.parallel_config.rank)
        self._worker = TierWorker(
            config,
            kv_caches,
            self._rules,
            identity=identity,
            limits=self._options.limits,
            open_stores=partial(self._options.open_stores, folder, identity, tell=self._events is not None),
        )

    def bind_connector_metadata(self, connector_metadata: TierWork) -> None:
        """Begin the look-ups of a step.

        Args:
            connector_metadata: the step.
        """
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Begin the loads of a step.

        Args:
            forward_context: not used.
            **kwargs: not used.
        """
        del forward_context, kwargs
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no step waits for loads.

        Args:
            layer_name: not used.
        """

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Do nothing: blocks are copied after the forward.

        Args:
            layer_name: not used.
            kv_layer: not used.
            attn_metadata: not used.
            **kwargs: not used.
        """

    def wait_for_save(self) -> None:
        """Copy the blocks to store."""
        if self._worker is not None:
            self._worker.store(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended or failed.

        Args:
            finished_req_ids: not used.
        """
        del finished_req_ids
        if self._worker is None:
            return KVConnectorTransferResults()
        done, failed = self._worker.loaded()
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def build_connector_worker_meta(self) -> Answers | None:
        """Return the answers to look-ups."""
        worker = self._worker or self.natural
        answers = {} if worker is None else worker.answers()
        changes = [] if self._worker is None else self._worker.changes()
        if not answers and not changes:
            return None
        rank = self._vllm_config.parallel_config.rank
        return Answers({number: [tokens] for number, tokens in answers.items()}, {rank: changes} if changes else {})

    def get_kv_connector_stats(self) -> TierStats | None:
        """Return the counts since the last call: the worker's, or in the natural layout the scheduler's."""
        counter = self._worker if self.natural is None else self._requests
        counts = {} if counter is None else counter.take_counts()
        return TierStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierStats:
        """Return counts in vLLM's class.

        Args:
            data: counts by name.
        """
        return TierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,  # noqa: ANN401 - vLLM's
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierMetrics:
        """Return the metrics of the tiers.

        Args:
            vllm_config: vLLM's config.
            metric_types: vLLM's classes of metrics.
            labelnames: names of an engine's labels.
            per_engine_labelvalues: their values, by engine.
        """
        return TierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Wait for stores that have begun, and close the tiers."""
        worker, self._worker, self.natural = self._worker or self.natural, None, None
        if worker is not None:
            worker.close()


def _publishes(started: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    """Return whether the tiers publish events of blocks: not beside exact events of our scheduler, of prefixes."""
    asked = started.kv_events_config
    if asked is None or not asked.enable_kv_cache_events:
        return False
    ours = issubclass(started.scheduler_config.get_scheduler_cls(), Scheduler)
    return not ours or ReferenceOptions.of(started.additional_config).kv_events == "raw"


def _extra_keys(request: Any, start: int, end: int) -> tuple[object, ...] | None:  # noqa: ANN401 - vLLM's
    """Return what vLLM hashes beside some tokens, as its events tell it."""
    told = to_event_extra_keys([generate_block_hash_extra_keys(request, start, end, 0)[0]])
    return None if told is None else told[0]
