"""vLLM's schedulers over a cache in the natural layout: ``--scheduler-cls hybridkv.vllm.NaturalScheduler``."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as TheirAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as TheirScheduler
from vllm.v1.metrics.stats import PrefixCacheStats

import vllm
from hybridkv.vllm.decode_step import decode_step
from hybridkv.vllm.events import Teller
from hybridkv.vllm.manager import CacheManager
from hybridkv.vllm.natural import Options, default_block_size, natural_cache, natural_plan
from hybridkv.vllm.natural_config import natural_config
from hybridkv.vllm.natural_refusals import refuse
from hybridkv.vllm.natural_step import ATTRIBUTE, StepWriter
from hybridkv.vllm.scheduler import require_version
from hybridkv.vllm.settings import Settings


class NaturalScheduler(TheirScheduler):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's scheduler; blocks of every layer in pages of their own size, states kept where the placement says.

    vLLM's own prefix caching is off: then a row has one running state, which is what this layout has.
    """

    connector: Any  # vLLM's; None without one

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(*args, **kwargs)
        require_version(vllm.__version__)
        refuse(self.vllm_config, self.kv_cache_config, self.connector)
        self.kv_cache_manager = _manager(self)
        self.need_mamba_block_aligned_split = self.kv_cache_manager.cache.bounds.keeps_checkpoints
        self.needs_kv_cache_zeroing = False  # StepWriter names the blocks, class by class
        self._writer = StepWriter(self.kv_cache_manager)
        if self.connector is not None:
            self.connector = _connector(self)
            self.block_size = 1  # hits end at any token, and none is cut for a connector that has more

    def schedule(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        """As vLLM's; what the worker has to do besides rides on its output."""
        with self.kv_cache_manager.step():
            output = decode_step(self)
            if output is None:
                output = super().schedule(*args, **kwargs)
            setattr(output, ATTRIBUTE, self._writer.write(output))
        self.kv_cache_manager.scheduled(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        """As vLLM's."""
        self.kv_cache_manager.executed(scheduler_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _connector_finished(self, request: Any) -> Any:  # noqa: ANN401 - vLLM's
        """As vLLM's; blocks that a transfer reads from now on stay where they are."""
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
        """Where chunks end so that a state can be kept: by the placement."""
        before = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        return self.kv_cache_manager.share(request, before, num_new_tokens)


class AsyncNaturalScheduler(NaturalScheduler, TheirAsyncScheduler):  # type: ignore[misc] # as above
    """The same beside forwards that are still running (vLLM's default on GPUs)."""


def _connector(scheduler: Any) -> Any:  # noqa: ANN401 - vLLM's
    """The scheduler's end of its connector, made anew: that of vLLM's constructor was told of vLLM's own layout."""
    scheduler.connector.shutdown()
    made = KVConnectorFactory.create_connector(
        config=scheduler.vllm_config,
        role=KVConnectorRole.SCHEDULER,
        kv_cache_config=scheduler.kv_cache_manager.kv_cache_config,
    )
    made.bind_kv_cache_manager(scheduler.kv_cache_manager)
    return made


def _manager(scheduler: Any) -> CacheManager:  # noqa: ANN401 - vLLM's
    config, theirs = scheduler.kv_cache_config, scheduler.kv_cache_manager
    options = Options.of(scheduler.vllm_config.additional_config, default_block_size(config))
    settings = Settings(
        max_model_len=scheduler.max_model_len,
        max_in_flight_tokens=scheduler.vllm_config.max_in_flight_tokens or scheduler.max_model_len,
        hash_block_size=options.block_size,
        enable_caching=True,
        use_eagle=False,
        enable_events=theirs.enable_kv_cache_events,
        watermark=scheduler.scheduler_config.watermark,
        new_stats=PrefixCacheStats if theirs.log_stats else None,
    )
    made = natural_plan(
        config,
        options,
        name=scheduler.vllm_config.model_config.model,
        max_model_len=scheduler.max_model_len,
        max_in_flight_tokens=settings.max_in_flight_tokens,
    )
    laid_out = natural_config(config, made.config)
    return CacheManager(natural_cache(made, options, settings), laid_out, settings, Teller(laid_out))
