r"""hybridkv inside vLLM: vLLM's schedulers with this library's cache manager in them.

    vllm serve MODEL --scheduler-cls hybridkv.vllm.AsyncScheduler

    vLLM's scheduler --manager's names--> manager --requests-> KVCacheManager (reference layout)
                     <--blocks, events---

    vllm serve MODEL --no-enable-prefix-caching \
        --scheduler-cls hybridkv.vllm.NaturalScheduler --worker-cls hybridkv.vllm.NaturalWorker

    natural          vLLM's config -> plan -> KVCacheManager (natural layout);
                     moves, copies, states to keep: on vLLM's SchedulerOutput --> natural_worker
    natural_worker   vLLM's worker of this platform, CPU or GPU, with a step's block operations around it

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "TierConnector",
        "kv_connector_module_path": "hybridkv.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_memory": "8GiB"}}'

    connector        vLLM's connector: blocks in host memory and on a disk
    tier_requests    in the scheduler: prefixes to look for and load, blocks to store --> tier_worker copies pages
    natural_tier     both in the natural layout: the library's own host tier and its copies

The package patches nothing in vLLM: the scheduler is a subclass that replaces its ``kv_cache_manager`` after
construction. ``scheduler``, ``decoding``, ``connector``, ``nixl``, ``natural_config`` and ``natural_worker`` import
vLLM. All other modules use the names of vLLM's fields. vLLM 0.33 and 0.32 are supported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hybridkv.errors import ConfigError

if TYPE_CHECKING:
    from hybridkv.vllm.connector import TierConnector
    from hybridkv.vllm.natural_worker import NaturalWorker
    from hybridkv.vllm.scheduler import AsyncNaturalScheduler, AsyncScheduler, NaturalScheduler, Scheduler

__all__ = ["AsyncNaturalScheduler", "AsyncScheduler", "NaturalScheduler", "NaturalWorker", "Scheduler", "TierConnector"]

_MODULES = {"NaturalWorker": "natural_worker", "TierConnector": "connector"}


def __getattr__(name: str) -> object:
    """Return a scheduler, worker or connector, which imports vLLM. Raises ConfigError with the package to install."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"hybridkv.vllm.{_MODULES.get(name, 'scheduler')}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        raise ConfigError(
            f"hybridkv.vllm.{name} runs inside vLLM, which is not installed: pip install 'vllm>=0.32,<0.34'"
        ) from error
    found: object = getattr(module, name)
    return found
