"""What hybridkv.vllm relies on in vLLM is there, and asks for nothing new: ``make test-vllm-engine`` runs it first.

python drift.py        prints what has drifted; none: exit code 0
"""

import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.config import CacheConfig, CompilationConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import select_common_block_size
from vllm.v1.worker.worker_base import CompilationTimes

from hybridkv.vllm.manager import Blocks, CacheManager
from hybridkv.vllm.requests import EngineRequest

NOT_ASKED = {"create_kv_cache_blocks"}
"""Of their manager for itself alone."""
OF_SCHEDULERS = {
    "schedule": ("throttle_prefills",),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "_connector_finished": ("request",),
    "_mamba_block_aligned_split": (
        "request",
        "num_new_tokens",
        "num_new_local_computed_tokens",
        "num_external_computed_tokens",
    ),
    "_get_new_block_ids_to_zero": (),
    "_update_after_schedule": ("scheduler_output",),
}
OF_FACTORIES = {"create_connector": ("config", "role", "kv_cache_config")}
OF_WORKERS = {
    "initialize_from_config": ("kv_cache_config",),
    "execute_model": ("scheduler_output",),
    "compile_or_warm_up_model": (),
    "get_supported_kv_cache_layouts": (),
}
OF_BLOCK_SIZES = ("kv_manager_block_size", "backends", "kv_cache_specs")
IN_SCHEDULERS = (
    "_pause_state",
    "aux_output_connector",
    "block_size",
    "connector",
    "current_step",
    "dcp_world_size",
    "ec_connector",
    "encoder_cache_manager",
    "finished_req_ids",
    "hash_block_size",
    "kv_cache_config",
    "kv_cache_manager",
    "defer_block_free",
    "kv_holding_waiting",
    "kv_metrics_collector",
    "mamba_has_prefill_checkpoint_blocks",
    "max_model_len",
    "max_num_scheduled_tokens",
    "need_mamba_block_aligned_split",
    "needs_kv_cache_zeroing",
    "num_lookahead_tokens",
    "num_prefill_lookahead",
    "num_sampled_tokens_per_step",
    "num_spec_tokens",
    "observability_config",
    "prefill_capacity_bound",
    "prev_step_scheduled_req_ids",
    "reset_preempted_req_ids",
    "running",
    "scheduler_config",
    "use_pp",
    "use_v2_model_runner",
    "vllm_config",
    "waiting",
)
"""Set by their constructor, read or replaced by ours."""
FIELDS = {
    SchedulerOutput: (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "scheduled_encoder_inputs",
        "finished_req_ids",
        "free_encoder_mm_hashes",
        "scheduled_encoder_input_stats",
        "preempted_req_ids",
        "has_structured_output_requests",
        "pending_structured_output_tokens",
        "num_invalid_spec_tokens",
        "kv_connector_metadata",
        "has_sync_kv_loads",
        "aux_output_connector_metadata",
        "ec_connector_metadata",
        "ec_manager_metadata",
        "new_block_ids_to_zero",
        "kv_cache_block_copies",
        "kv_connector_block_state",
        "num_spec_tokens_to_schedule",
        "num_common_prefix_blocks",
    ),
    NewRequestData: ("req_id", "block_ids", "num_computed_tokens"),
    CachedRequestData: (
        "req_ids",
        "resumed_req_ids",
        "new_token_ids",
        "all_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    ),
    CachedRequestState: ("block_ids",),
    KVCacheConfig: ("num_blocks", "kv_cache_tensors", "kv_cache_groups", "kv_cache_layout"),
    KVCacheGroupSpec: ("layer_names", "kv_cache_spec", "is_eagle_group", "host_resident", "role"),
    KVCacheTensor: ("size", "layers", "layer_stride", "block_stride", "offset"),
    AttentionSpec: ("block_size", "page_size_padded", "dcp_sharded"),
    MambaSpec: ("shapes", "page_size_padded", "num_prefill_checkpoint_blocks"),
    VllmConfig: ("additional_config", "kv_transfer_config", "ec_transfer_config", "speculative_config"),
    ParallelConfig: ("worker_cls", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"),
    CacheConfig: ("enable_prefix_caching",),
    CompilationTimes: ("language_model", "encoder"),
    CompilationConfig: ("compilation_time", "encoder_compilation_time", "static_forward_context"),
}
"""Of their dataclasses, read, made or put right."""
WHOLE = (SchedulerOutput, CachedRequestData)
IN_BATCHES = ("req_id_to_index", "block_table")
IN_RUNNERS = ("requests", "input_batch", "kv_caches", "device", "prepare_inputs_event")
NAMED = (
    KVCacheConfig.num_blocks_of,
    KVCacheConfig.needs_kv_cache_zeroing,
    AttentionSpec.real_page_size_bytes,
    AttentionLayerBase.get_attn_backend,
    KVCacheGroupRole.DEFAULT,
    KVConnectorRole.SCHEDULER,
    KVCacheLayout.is_block_compact,
    KVCacheLayout.is_block_outermost,
    current_platform.is_cpu,
    current_platform.is_cuda_alike,
    set_current_vllm_config,
)
"""That these are there, importing says."""


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
    for kind, methods in (
        (Scheduler, OF_SCHEDULERS),
        (CPUWorker, OF_WORKERS),
        (Worker, OF_WORKERS),
        (KVConnectorFactory, OF_FACTORIES),
    ):
        for name, wanted in methods.items():
            if parameters(getattr(kind, name)) != wanted:
                yield f"{kind.__name__}.{name}{parameters(getattr(kind, name))}, not {wanted}"
    for kind, names in FIELDS.items():
        there = set(kind._fields) if hasattr(kind, "_fields") else {one.name for one in fields(kind)}
        yield from (f"{kind.__name__} has no {name}" for name in names if name not in there)
    yield from not_set()


def not_set() -> Iterator[str]:
    """What constructors and classes are to set, or to have, and one function to take."""
    for kind in WHOLE:  # of what we make, another field is another thing to say
        more = {one.name for one in fields(kind)} - set(FIELDS[kind])
        yield from (f"{kind.__name__} has a field {name}, of which decode_step says nothing" for name in sorted(more))
    if parameters(select_common_block_size) != OF_BLOCK_SIZES:
        yield f"select_common_block_size{parameters(select_common_block_size)}, not {OF_BLOCK_SIZES}"
    if not hasattr(SamplingParams(), "extra_args"):
        yield "SamplingParams has no extra_args"
    for made, names in (
        (Scheduler.__init__, IN_SCHEDULERS),
        (GPUModelRunner, IN_RUNNERS),
        (InputBatch, IN_BATCHES),
        (Request, (*EngineRequest.__annotations__, *public(EngineRequest))),
    ):
        source = inspect.getsource(made)
        yield from (
            f"{made.__qualname__} sets no {name}"
            for name in names
            if f"self.{name}" not in source and f"def {name}" not in source
        )


if __name__ == "__main__":
    found = list(drifted())
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
