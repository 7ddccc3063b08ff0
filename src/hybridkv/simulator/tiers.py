"""The tiers of a replay: host memory, and a disk behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from hybridkv.arguments import integer, real
from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.planner import Plan, tier_plan
from hybridkv.simulator.cost import StepCost
from hybridkv.simulator.transfers import DiskModel, StoreRates, TierTransfers
from hybridkv.tiers import HostTier, Prefixes, StoreLookups, TierLimits, parts_of
from hybridkv.units import format_count, parse_bytes

DISK_BYTES_PER_S: Final = 3e9
"""Bytes per second of a disk if none are given: those of a common NVMe drive, chosen by hand."""
MOST_BLOCKS: Final = 1 << 25
"""Most block ids of a group: the pool takes about 60 bytes for each, independent of the modelled memory."""
_IDENTITY: Final = b"one model only.."


@dataclass(frozen=True, slots=True)
class TierMemory:
    """The tiers to model: ``host_memory``, ``disk_memory`` and ``disk_bytes_per_s`` of ReplaySettings."""

    host: str | int
    disk: str | int | None
    disk_bytes_per_s: float


def require_tier_memory(host: object, disk: object, disk_bytes_per_s: object) -> None:
    """Check the memory of tiers.

    Args:
        host: host memory; ``None`` for none.
        disk: the disk; ``None`` for none.
        disk_bytes_per_s: rate of the disk.

    Raises:
        ConfigError: a value is no size, or there is a disk without host memory.
    """
    if host is not None:
        _bytes_of("host_memory (--host-memory)", host)
    if disk is not None:
        _bytes_of("disk_memory (--disk-memory)", disk)
        if host is None:
            raise ConfigError("disk_memory (--disk-memory) needs host memory in front of it: give --host-memory, too")
    if real("disk_bytes_per_s (--disk-bandwidth)", disk_bytes_per_s) <= 0:
        raise ConfigError(f"disk_bytes_per_s (--disk-bandwidth) must be above 0, got {disk_bytes_per_s}")


def _bytes_of(name: str, memory: object) -> int:
    try:
        return parse_bytes(memory if isinstance(memory, str) else integer("its value", memory))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def require_few_blocks(plan: Plan, memory: str) -> None:
    """Check that a replay can keep the blocks of a plan.

    Args:
        plan: the plan.
        memory: what sets their number, for the message.

    Raises:
        ConfigError: there are more.
    """
    ids = max(plan.config.blocks_of(at) for at in range(len(plan.config.groups)))
    if ids > MOST_BLOCKS:
        raise ConfigError(
            f"the plan has {format_count(ids)} blocks, more than a replay keeps ({format_count(MOST_BLOCKS)}): lower "
            f"{memory}, or raise block_size (--block-size)"
        )


def transfers_of(
    memory: TierMemory, plan: Plan, cache: KVCacheManager, options: CacheOptions, *, cost: StepCost, token_budget: int
) -> TierTransfers:
    """Return the tiers behind a cache, and the times of their transfers.

    Args:
        memory: the tiers.
        plan: the plan of the device.
        cache: its cache.
        options: the options of the cache.
        cost: the cost of steps.
        token_budget: most tokens of a step.

    Raises:
        CapacityError: the host memory is too small.
        ConfigError: the host has more blocks than a replay keeps.
    """
    try:
        held = tier_plan(plan, _bytes_of("host_memory (--host-memory)", memory.host))
    except CapacityError as error:
        raise CapacityError(f"host_memory (--host-memory): {error}") from None
    require_few_blocks(held, "host_memory (--host-memory)")
    host = KVCacheManager(
        held.config,
        held.max_model_len,
        dcp_world_size=plan.limits.dcp,
        pcp_world_size=plan.limits.pcp,
        hasher=cache.hasher,
        options=replace(options, remembered_losses=0, block_times=False, log_resume_points=False),
    )
    limits = _limits(memory, cost, token_budget)
    if memory.disk is None or cache.hasher is None:
        return TierTransfers(HostTier(cache, host, limits), cost.host_bytes_per_s)
    hash_block = cache.hasher.block_size
    disk = DiskModel(_bytes_of("disk_memory (--disk-memory)", memory.disk))
    lookups = StoreLookups(disk, Prefixes(parts_of(host), _IDENTITY, hash_block))
    rate = memory.disk_bytes_per_s if cost.time_scale else float("inf")
    behind = StoreRates(disk, hash_block, rate)
    return TierTransfers(HostTier(cache, host, limits, lookups), cost.host_bytes_per_s, behind)


def _limits(memory: TierMemory, cost: StepCost, tokens: int) -> TierLimits:
    """Return limits that load only what is faster to load than to compute in steps of ``tokens`` tokens of a prompt."""
    if not cost.time_scale:
        return TierLimits()
    return TierLimits(
        load_bytes_per_s=cost.host_bytes_per_s,
        fetch_bytes_per_s=None if memory.disk is None else memory.disk_bytes_per_s,
        tokens_per_s=cost.prompt_tokens_per_s(tokens),
    )
