"""What hybridkv.vllm relies on in vLLM is there, and asks for nothing new: ``make test-vllm-engine`` runs it first.

python drift.py        prints what has drifted; none: exit code 0
"""

import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from hybridkv.vllm.blocks import Blocks
from hybridkv.vllm.manager import CacheManager
from hybridkv.vllm.mirrors import EngineRequest

NOT_ASKED = {"create_kv_cache_blocks"}
"""Of their manager for itself alone."""
OF_SCHEDULERS = {
    "schedule": ("throttle_prefills",),
    "update_from_output": ("scheduler_output", "model_runner_output"),
}
IN_SCHEDULERS = (
    "connector",
    "dcp_world_size",
    "hash_block_size",
    "kv_cache_config",
    "kv_cache_manager",
    "max_model_len",
    "num_lookahead_tokens",
    "num_spec_tokens",
    "running",
    "scheduler_config",
    "vllm_config",
)
"""Set by their constructor, read or replaced by ours."""


def parameters(function: Any) -> tuple[str, ...]:  # noqa: ANN401 - of vLLM
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def public(kind: type) -> dict[str, Any]:
    """Methods and properties by name."""
    return {
        name: one
        for name, one in vars(kind).items()
        if not name.startswith("_") and (callable(one) or isinstance(one, property))
    }


def drifted() -> Iterator[str]:
    for theirs, ours in ((KVCacheManager, CacheManager), (KVCacheBlocks, Blocks)):
        for name, method in public(theirs).items():
            if name in NOT_ASKED:
                continue
            mine = getattr(ours, name, None)
            if mine is None:
                yield f"{theirs.__name__}.{name} is not answered"
            elif callable(method) and parameters(mine) != parameters(method):
                yield f"{theirs.__name__}.{name}{parameters(method)}, ours {parameters(mine)}"
    for name, wanted in OF_SCHEDULERS.items():
        if parameters(getattr(Scheduler, name)) != wanted:
            yield f"Scheduler.{name}{parameters(getattr(Scheduler, name))}, not {wanted}"
    made = inspect.getsource(Scheduler.__init__)
    yield from (f"Scheduler sets no {name}" for name in IN_SCHEDULERS if f"self.{name}" not in made)
    if not hasattr(SamplingParams(), "extra_args"):
        yield "SamplingParams has no extra_args"
    source = inspect.getsource(Request)
    asked = (*EngineRequest.__annotations__, *public(EngineRequest))
    yield from (
        f"Request has no {name}" for name in asked if f"self.{name}" not in source and f"def {name}" not in source
    )


if __name__ == "__main__":
    found = list(drifted())
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
