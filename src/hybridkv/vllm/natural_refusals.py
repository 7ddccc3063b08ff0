"""What vLLM may be started with and the natural layout does not support, by the names of vLLM's options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from hybridkv.errors import ConfigError
from hybridkv.vllm.natural import layer_specs
from hybridkv.vllm.specs import Config

WORKER: Final = "hybridkv.vllm.NaturalWorker"
TAKES: Final = "supports_natural_layout"
"""What a connector's class says that goes by this layout (docs/vllm.md)."""


def refuse(started: Any, config: Config, connector: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
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
        # tests/vllm/stock_drafts.py: where stock answers otherwise with drafts, nothing can be shown
        "speculative_config for models with recurrent states": drafts is not None and states,
        "speculative_config of another method than ngram": drafts is not None and drafts.method != "ngram",
    }
    yield from (f"does not support {name}: leave it out" for name, is_given in given.items() if is_given)
