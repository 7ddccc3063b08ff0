"""vLLM's schedulers with this library's cache manager: ``--scheduler-cls hybridkv.vllm.Scheduler``."""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as TheirAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as TheirScheduler
from vllm.v1.metrics.stats import PrefixCacheStats

import vllm
from hybridkv.errors import ConfigError
from hybridkv.vllm.decode_step import decode_step
from hybridkv.vllm.events import Teller
from hybridkv.vllm.manager import CacheManager, reference_cache
from hybridkv.vllm.refusals import refuse
from hybridkv.vllm.settings import Settings

SUPPORTED: Final = "0.32."
"""Versions that begin so."""


class Scheduler(TheirScheduler):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's scheduler; what it asks its cache is answered by this library."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(*args, **kwargs)
        replace_manager(self)

    def schedule(self, throttle_prefills: bool = False) -> Any:  # noqa: ANN401 - vLLM's
        """As vLLM's."""
        with self.kv_cache_manager.step():
            output = decode_step(self)
            if output is None:
                self.kv_cache_manager.prepare(self.running, 1 + self.num_spec_tokens, self.num_lookahead_tokens)
                output = super().schedule(throttle_prefills)
        self.kv_cache_manager.scheduled(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        """As vLLM's."""
        self.kv_cache_manager.executed(scheduler_output)
        return super().update_from_output(scheduler_output, model_runner_output)


class AsyncScheduler(Scheduler, TheirAsyncScheduler):  # type: ignore[misc] # as above
    """The same beside forwards that are still running (vLLM's default)."""


def replace_manager(scheduler: Any) -> None:  # noqa: ANN401 - vLLM's
    """This library's manager in place of vLLM's. ConfigError for a version, a group or an option not supported."""
    require_version(vllm.__version__)
    refuse(scheduler)
    theirs, config = scheduler.kv_cache_manager, scheduler.kv_cache_config
    settings = Settings(
        max_model_len=scheduler.max_model_len,
        max_in_flight_tokens=scheduler.vllm_config.max_in_flight_tokens or scheduler.max_model_len,
        hash_block_size=scheduler.hash_block_size,
        enable_caching=theirs.enable_caching,
        use_eagle=theirs.use_eagle,
        enable_events=theirs.enable_kv_cache_events,
        dcp_world_size=scheduler.dcp_world_size,
        retention=config.prefix_cache_retention_interval,
        watermark=scheduler.scheduler_config.watermark,
        new_stats=PrefixCacheStats if theirs.log_stats else None,
    )
    # chunks end where states are kept: no block is there for one inside a chunk
    scheduler.mamba_has_prefill_checkpoint_blocks = False
    scheduler.kv_cache_manager = CacheManager(reference_cache(config, settings), config, settings, Teller(config))
    if scheduler.connector is not None:
        scheduler.connector.bind_kv_cache_manager(scheduler.kv_cache_manager)


def require_version(version: str) -> None:
    """ConfigError for one that was not tried."""
    if not version.startswith(SUPPORTED):
        raise ConfigError(
            f"hybridkv.vllm supports vLLM {SUPPORTED}x, this is {version}: leave --scheduler-cls out, or install "
            f"'vllm=={SUPPORTED}*'"
        )
