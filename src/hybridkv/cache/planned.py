"""What a manager is to manage: a plan, which has decided it all, or a config and what goes with it, one by one."""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.arguments import instance, integer
from hybridkv.cache.placement import LRU, Eviction, Placement, eviction_of, placement_of
from hybridkv.errors import ConfigError
from hybridkv.planner import KVCacheConfig, Plan
from hybridkv.specs import RequestLimits
from hybridkv.units import MOST_COUNT, shown


class Managed(NamedTuple):
    """A config, the limits of its requests, where states are kept (None: the config's own way), and what goes next."""

    config: KVCacheConfig
    limits: RequestLimits
    placement: Placement | None
    eviction: Eviction


def managed(
    given: Plan | KVCacheConfig,
    *,
    max_model_len: int | None,
    dcp_world_size: int | None,
    pcp_world_size: int | None,
    placement: Placement | None,
    eviction: Eviction | None,
) -> Managed:
    """What ``given`` says and the arguments beside it, None where they are silent.

    ConfigError where the two contradict each other, and where they say too little.
    """
    counts = {"max_model_len": max_model_len, "dcp_world_size": dcp_world_size, "pcp_world_size": pcp_world_size}
    asked = {name: integer(name, value, 1, MOST_COUNT) for name, value in counts.items() if value is not None}
    if not isinstance(placement, Placement | None):
        raise ConfigError(f"placement must be one of hybridkv.cache.placement, got {shown(placement)}")
    evicts = None if eviction is None else instance("eviction", eviction, Eviction)
    if isinstance(given, KVCacheConfig):
        if "max_model_len" not in asked:
            raise ConfigError("max_model_len is missing: a config does not say it, so give it, or the whole plan")
        ranks = {"dcp": asked.get("dcp_world_size", 1), "pcp": asked.get("pcp_world_size", 1)}
        return Managed(given, RequestLimits(asked["max_model_len"], **ranks), placement, evicts or LRU)
    if not isinstance(given, Plan):
        raise ConfigError(f"kv_cache_config must be a Plan or a KVCacheConfig, got {shown(given)}")
    limits, kept = given.limits, placement_of(given)
    planned = {"max_model_len": limits.max_model_len, "dcp_world_size": limits.dcp, "pcp_world_size": limits.pcp}
    for name, value in asked.items():
        if value != planned[name]:
            raise ConfigError(
                f"{name} {value} contradicts the plan, which was made for {planned[name]}: leave it out, or plan anew"
            )
    if placement is not None and placement != kept:
        raise ConfigError(
            f"placement {placement.name} contradicts the plan, which was made with "
            f"{given.placement if kept is None else kept.name}: leave it out, or plan anew"
        )
    return Managed(given.config, limits, kept, evicts or eviction_of(given))
