"""What vLLM may be started with and a layout does not support, by the names of vLLM's options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from hybridkv.errors import ConfigError
from hybridkv.vllm.specs import Config, layer_specs

_GATHERS_STATES: Final = {"OffloadingConnector"}
"""Classes of connectors that hear of each state kept at a block's edge; Mooncake's store works in the pool."""


WORKER: Final = "hybridkv.vllm.NaturalWorker"
TAKES: Final = "supports_natural_layout"
"""What a connector's class says that goes by the natural layout (docs/vllm.md)."""


def refuse(scheduler: Any) -> None:  # noqa: ANN401 - vLLM's Scheduler, its own manager still in it
    """ConfigError for the first of them."""
    for why in _unsupported(scheduler):
        raise ConfigError(f"hybridkv.vllm does not support {why}, or leave --scheduler-cls out")


def _unsupported(scheduler: Any) -> Iterator[str]:  # noqa: ANN401 - as above
    """What it is, and what to do about it."""
    transfer, theirs = scheduler.vllm_config.kv_transfer_config, scheduler.kv_cache_manager
    if transfer is not None and _works_in_pool(scheduler.connector):
        yield f"the connector {transfer.kv_connector}, which works in vLLM's own pool: take one that is handed ids"
    states = any(hasattr(one.kv_cache_spec, "shapes") for one in scheduler.kv_cache_config.kv_cache_groups)
    kinds = {kind.__name__ for kind in type(scheduler.connector).__mro__}
    if transfer is not None and states and kinds & _GATHERS_STATES:
        yield (
            f"the connector {transfer.kv_connector} beside recurrent states, which it gathers while a prompt is "
            "computed: take one that hands over what a request ends with"
        )
    if theirs.enable_caching and theirs.coordinator.enable_partial_hash_hits:
        yield (
            f"hits inside a block of {scheduler.block_size} tokens, at multiples of {scheduler.hash_block_size}: leave "
            "prefix caching out (--no-enable-prefix-caching)"
        )
    if scheduler.num_prefill_lookahead > 1:
        yield (
            f"drafts of {scheduler.num_prefill_lookahead} modules that predict tokens, whose last tokens of a prompt "
            "are computed again: use one module"
        )
    if scheduler.kv_metrics_collector is not None:
        yield "--kv-cache-metrics, how long blocks live: leave it out"
    for group in scheduler.kv_cache_config.kv_cache_groups:
        if group.host_resident or group.role != "default":
            yield f"groups in two places ({group.layer_names[0]}): leave HiSparse out"
        tokens = not hasattr(group.kv_cache_spec, "shapes")
        if scheduler.dcp_world_size > 1 and tokens and not group.kv_cache_spec.dcp_sharded:
            yield f"layers that are whole on every rank of context parallelism ({group.layer_names[0]}): leave it out"


def _works_in_pool(connector: Any) -> bool:  # noqa: ANN401 - as above
    """Whether its class says what it does with vLLM's manager or pool, which the base of all connectors passes on."""
    return any(
        name in vars(kind)
        for kind in type(connector).__mro__
        if not kind.__module__.endswith("kv_connector.v1.base")
        for name in ("bind_kv_cache_manager", "bind_gpu_block_pool")
    )


def refuse_natural(started: Any, config: Config, connector: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """ConfigError for the first of them. config: vLLM's KVCacheConfig. connector: None without one."""
    for why in (*_switches(started), *_features(started, config, connector)):
        raise ConfigError(f"NaturalScheduler {why}")


def _switches(started: Any) -> Iterator[str]:  # noqa: ANN401 - as above
    """What has to be set otherwise."""
    if started.parallel_config.worker_cls != WORKER:
        yield f"needs --worker-cls {WORKER}, this is {started.parallel_config.worker_cls}"
    if started.cache_config.enable_prefix_caching:
        yield "caches prefixes itself: switch vLLM's own off (--no-enable-prefix-caching)"
    if started.use_v2_model_runner:
        yield "supports vLLM's first model runner: start with VLLM_USE_V2_MODEL_RUNNER=0"


def _features(started: Any, config: Config, connector: Any) -> Iterator[str]:  # noqa: ANN401 - as above
    """What has to be left out."""
    for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"):
        size = getattr(started.parallel_config, name)
        if size > 1:
            yield f"does not support {name} {size}: leave it out"
    drafts = started.speculative_config
    states = any(hasattr(spec, "shapes") for _, spec in layer_specs(config))
    given = {
        f"connectors whose class does not say {TAKES} = True": (
            connector is not None and not getattr(connector, TAKES, False)
        ),
        "ec_transfer_config, connectors of encoders": started.ec_transfer_config,
        "models with an encoder and a decoder": started.model_config.is_encoder_decoder,
        # stock answers otherwise with drafts than without (docs/vllm.md): nothing can be compared
        "speculative_config for models with recurrent states": drafts is not None and states,
        "speculative_config of another method than ngram": drafts is not None and drafts.method != "ngram",
    }
    yield from (f"does not support {name}: leave it out" for name, is_given in given.items() if is_given)
