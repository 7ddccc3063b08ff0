"""The tiers behind a server's cache, for metrics and the page: one TierSnapshot for each, the fastest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import Metric

from hybridkv.cache import KVCacheManager, Medium, TimeCounts
from hybridkv.runner.engine import Engine
from hybridkv.serve.families import Families
from hybridkv.specs import Keeps
from hybridkv.tiers import TRANSFER_EDGES_S, Direction, HostTierStatistics, TransferTimes, Way

PARTIAL: Final = "partial"
_DEVICE: Final = "device"
_STORAGE: Final = "STORAGE"
_SOURCES: Final[Mapping[str, str]] = {Medium.CPU: "host", _STORAGE: "storage"}
"""Labels of hit tokens, by medium."""


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """A tier at one moment.

    Attributes:
        name: the medium of its blocks, in vLLM's words: CPU, or STORAGE for a disk or a shared store.
        counts: its counts.
        times: how long transfers took, by direction and by whether they arrived.
        rates: bytes per second of its transfers, by direction; 0 if too few were measured.
        capacity_bytes: bytes of its memory; 0 if the tier does not say.
        cached_bytes: bytes of cached blocks by kind: tokens, window, state, or partial for blocks of tokens or of a
            window that end inside a block.
    """

    name: str
    counts: HostTierStatistics
    times: Mapping[tuple[Direction, bool], TimeCounts]
    rates: Mapping[Direction, float]
    capacity_bytes: int
    cached_bytes: Mapping[str, int]

    @property
    def usage(self) -> float:
        """The share of its memory that cached blocks fill, 0 to 1."""
        return sum(self.cached_bytes.values()) / self.capacity_bytes if self.capacity_bytes else 0.0

    def in_sample(self) -> list[object]:
        """Return the fields that the page shows: name, bytes, bytes by kind, hit tokens, bytes up and down, counts.

        The counts are loads and stores under way, loads and stores without room, and lost transfers.
        """
        now = self.counts
        under_way = (now.loading, now.in_flight - now.loading + now.stores_waiting)
        moved = (now.hit_tokens, now.loaded_bytes, now.stored_bytes)
        troubles = (now.loads_refused, now.stores_refused, now.lost)
        return [self.name, self.capacity_bytes, dict(self.cached_bytes), *moved, *under_way, *troubles]


def tiers_of(engine: Engine) -> tuple[TierSnapshot, ...]:
    """Read the tiers of ``engine``, in its own thread. O(blocks of the tiers).

    Args:
        engine: the engine.
    """
    tier = engine.tier
    if tier is None:
        return ()
    counts, memory = tier.statistics(), tier.host.config.arena_bytes
    rates = {way: pace.rate or 0.0 for way, pace in tier.prices.of.items()}
    near = {Direction.UP: rates[Way.LOAD], Direction.DOWN: rates[Way.STORE]}
    host = TierSnapshot(Medium.CPU, counts.of_host, _times(tier.times), near, memory, _cached_bytes(tier.host))
    if not tier.has_store:
        return (host,)
    far = {Direction.UP: rates[Way.FETCH], Direction.DOWN: rates[Way.SPILL]}
    return host, TierSnapshot(_STORAGE, counts.of_store, _times(tier.times_of_store), far, 0, {})


def _times(of: TransferTimes) -> dict[tuple[Direction, bool], TimeCounts]:
    """Return the histograms of a tier."""
    return {(to, done): of.of(to, arrived=done) for to in Direction for done in (True, False)}


def _cached_bytes(cache: KVCacheManager) -> dict[str, int]:
    """Return the bytes of cached blocks by kind."""
    config, found = cache.config, dict[str, int]()
    for number, (group, counts) in enumerate(zip(config.groups, cache.statistics().groups, strict=True)):
        size, kind = config.block_bytes_of(number), group.spec.keeps
        partial = counts.partial_blocks if kind in {Keeps.TOKENS, Keeps.WINDOW} else 0
        for name, blocks in ((str(kind), counts.cached_blocks - partial), (PARTIAL, partial)):
            found[name] = found.get(name, 0) + size * blocks
    return found


def cached_by_source(made: Families, hit_tokens: int, tiers: Sequence[TierSnapshot]) -> Metric:
    """Return the prompt tokens found in the cache, by the memory that they came from.

    Args:
        made: makes the family.
        hit_tokens: prompt tokens of admitted requests that hit the cache.
        tiers: the tiers.
    """
    below = {_SOURCES[one.name]: one.counts.hit_tokens for one in tiers}
    samples = [((_DEVICE,), hit_tokens - sum(below.values())), *(((name,), count) for name, count in below.items())]
    said = "Prompt tokens of admitted requests that hit the cache, by the memory that had them."
    return made.counter("prompt_tokens_cached_by_source", said, samples, "source")


_COUNTERS: Final[Sequence[tuple[str, str, Callable[[HostTierStatistics], int]]]] = (
    ("read_bytes", "Bytes that came up from the tier.", lambda of: of.loaded_bytes),
    ("write_bytes", "Bytes that went down to the tier.", lambda of: of.stored_bytes),
    ("hit_tokens", "Prompt tokens that came up and were hit.", lambda of: of.hit_tokens),
    ("loaded_tokens", "Tokens that came up from the tier.", lambda of: of.loaded_tokens),
    ("promotion_jobs", "Prefixes that came up from the tier.", lambda of: of.loads),
    ("cascade_jobs", "Resume points that went down to the tier.", lambda of: of.stores),
    ("promotion_job_failures", "Loads that failed.", lambda of: of.loads_lost),
    ("cascade_job_failures", "Stores that failed.", lambda of: of.lost - of.loads_lost),
    (
        "promotion_allocation_failures",
        "Attempts to load for which the device had no room.",
        lambda of: of.loads_refused,
    ),
    ("backpressure_stores_dropped", "Stores for which the tier had no room.", lambda of: of.stores_refused),
)
_GAUGES: Final[Sequence[tuple[str, str, Callable[[TierSnapshot], float]]]] = (
    ("active_promotion_jobs", "Loads that are on their way.", lambda one: one.counts.loading),
    ("active_cascade_jobs", "Stores that are on their way.", lambda one: one.counts.in_flight - one.counts.loading),
    ("waiting_cascade_jobs", "Stores that wait for a transfer of their prefix.", lambda one: one.counts.stores_waiting),
    ("capacity_bytes", "Bytes of the tier.", lambda one: one.capacity_bytes),
    ("usage_perc", "Share of the tier that cached blocks fill, 0 to 1.", lambda one: one.usage),
)
"""Name, description and value of a tier's families."""


def tier_families(made: Families, tiers: Sequence[TierSnapshot]) -> Iterator[Metric]:
    """Yield the families of ``tiers``, under vLLM's names for tiers of offloaded blocks.

    Args:
        made: makes families.
        tiers: the tiers.
    """
    for name, said, counted in _COUNTERS:
        samples = [((one.name,), counted(one.counts)) for one in tiers]
        yield made.counter(f"kv_offload_tiering_{name}", said, samples, "tier")
    for name, said, measured in _GAUGES:
        gauges = [((one.name,), float(measured(one))) for one in tiers]
        yield made.gauge(f"kv_offload_tiering_{name}", said, gauges, "tier")
    filled = [((one.name, kind), size) for one in tiers for kind, size in one.cached_bytes.items()]
    yield made.gauge("kv_offload_tiering_cached_bytes", "Bytes of cached blocks, by kind.", filled, "tier", "kind")
    for direction, said in (
        (Direction.UP, "Time of a load, from the step that begins it to the result that reports it."),
        (Direction.DOWN, "Time of a store, from the step that begins it to the result that reports it."),
    ):
        rates = [((one.name,), one.rates[direction]) for one in tiers]
        rate = f"kv_offload_tiering_{direction}_bytes_per_second"
        yield made.gauge(rate, "Measured rate of transfers, latency included.", rates, "tier")
        times = [
            ((one.name, "success" if arrived else "failure"), one.times[direction, arrived])
            for one in tiers
            for arrived in (True, False)
        ]
        found = [(labels, of.counts, of.sum_s) for labels, of in times]
        name = f"kv_offload_tiering_{direction}_latency_seconds"
        yield made.histogram(name, said, TRANSFER_EDGES_S, found, "tier", "result")
