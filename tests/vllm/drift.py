"""What hybridkv.vllm relies on in vLLM is there, and asks for nothing new: ``make test-vllm-engine`` runs it first.

    python drift.py                 prints what has drifted; nothing: exit code 0
    python drift.py --faults        makes drifts on purpose, and fails unless each is named

Signatures, fields and attributes are compared by name. From the source of vLLM it is read what its scheduler writes and
calls in ``schedule`` (effects.py): ``decoding`` has the same effect, or a guard says why it needs none. The same for
``take_tokens`` and the loop over requests in ``update_from_output``, for the ends of requests in ``check_stop``, for
attributes that its constructor hands the cache manager, and for all that vLLM reads of a manager.
"""

import ast
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from effects import captures, effects, methods_of, path_of, reads, tree_of
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    KVTransferConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue, RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import select_common_block_size
from vllm.v1.worker.worker_base import CompilationTimes

import hybridkv.vllm.scheduler as ours
import vllm
from hybridkv.errors import ConfigError
from hybridkv.vllm import decoding
from hybridkv.vllm.connector import TierConnector, TierStats
from hybridkv.vllm.manager import Block, Blocks, CacheManager, Coordinator, Pool
from hybridkv.vllm.nixl import NaturalNixlWorker
from hybridkv.vllm.queue import WaitingByPrefix
from hybridkv.vllm.requests import EngineRequest, SlotsAhead, ends_of

RELEASE = ".".join(vllm.__version__.split(".")[:2])

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
IN_REQUESTS = (
    "append_output_token_ids",
    "client_index",
    "events",
    "num_nans_in_logits",
    "num_stale_output_tokens",
    "pooling_params",
    "prefill_stats",
    "resumable",
    "structured_output_request",
    "trace_headers",
)
"""What ``take_tokens`` and ``ends_of`` read, next to EngineRequest."""
IN_SCHEDULERS = (
    "aux_output_connector",
    "block_size",
    "connector",
    "current_step",
    "ec_connector",
    "encoder_cache_manager",
    "finished_req_ids",
    "hash_block_size",
    "kv_cache_config",
    "kv_cache_manager",
    "defer_block_free",
    "lora_config",
    "mamba_has_prefill_checkpoint_blocks",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "need_mamba_block_aligned_split",
    "needs_kv_cache_zeroing",
    "num_sampled_tokens_per_step",
    "policy",
    "prefill_capacity_bound",
    "prev_step_scheduled_req_ids",
    "reset_preempted_req_ids",
    "running",
    "scheduler_config",
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
    ParallelConfig: (
        *("worker_cls", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"),
        *("tensor_parallel_size", "data_parallel_index", "rank"),
    ),
    CacheConfig: ("enable_prefix_caching", "prefix_caching_hash_algo", "prefix_match_unit", "cache_dtype"),
    ModelConfig: ("model", "revision", "quantization", "dtype"),
    KVTransferConfig: ("kv_role", "kv_connector_extra_config", "kv_load_failure_policy"),
    KVConnectorBlockState: ("boundary_state_offloads",),
    KVConnectorOutput: ("finished_recving", "failed_recving", "kv_connector_worker_meta", "kv_connector_stats"),
    KVConnectorTransferResults: ("finished_recving", "failed_recving"),
    KVConnectorStats: ("data",),
    SchedulerConfig: ("async_scheduling", "max_num_batched_tokens", "watermark"),
    ObservabilityConfig: ("kv_cache_metrics", "enable_logging_iteration_details"),
    CompilationTimes: ("language_model", "encoder"),
    TransferTopology: (
        "tp_rank",
        "tp_size",
        "block_size",
        "engine_id",
        "is_mla",
        "is_mamba",
        "total_num_kv_heads",
        "attn_backends",
    ),
    NixlAgentMetadata: ("region_num_blocks", "region_group_ids", "region_names", "block_lens", "block_strides"),
    CompilationConfig: ("compilation_time", "encoder_compilation_time", "static_forward_context"),
}
"""Of their dataclasses, read, made or put right."""
FIELDS_OF_RELEASE: Mapping[str, Mapping[Any, tuple[str, ...]]] = {
    "0.32": {},
    "0.33": {
        SchedulerOutput: (
            "encoder_input_updates",  # requests with encoder inputs go through vLLM's loop: empty, as it starts
            "skip_drafts",  # without drafts: False, as it starts
        )
    },
}
"""More of them, in one release."""
WHOLE = (SchedulerOutput, CachedRequestData)
STORED = {
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    *("locality", "ownership", "session_id"),  # ours leave them out
}
EVENTS: Mapping[str, Mapping[Any, set[str]]] = {
    "0.32": {BlockStored: STORED},
    # with hashes that cover later tokens alone, which are refused
    "0.33": {BlockStored: STORED | {"lookahead_token_ids"}},
}
"""Fields of vLLM's events."""
IN_BATCHES = ("req_id_to_index", "block_table")
IN_RUNNERS = ("requests", "input_batch", "kv_caches", "device", "prepare_inputs_event")
NOT_REGISTERED = {
    "_head_sharded_draft_regions",
    "_mixed_mem_types",
    "_packed_member_layouts",
    "_ple_block_len",
    "_ple_region_index",
    "_remote_region_offset",
    "_scratch_region_indices",
    "_skip_dram_xfer",
    "_ssm_region_indices",
}
"""Set by their registration for NIXL, and by ours left as their constructor has it: no region is of such a kind."""
NAMED = (
    Scheduler.get_request_counts,
    Scheduler.pause_state,
    VllmConfig.num_lookahead_tokens,
    VllmConfig.num_prefill_lookahead_tokens,
    VllmConfig.num_speculative_tokens,
    KVCacheConfig.num_blocks_of,
    KVCacheConfig.needs_kv_cache_zeroing,
    AttentionSpec.real_page_size_bytes,
    AttentionLayerBase.get_attn_backend,
    KVCacheGroupRole.DEFAULT,
    KVConnectorRole.SCHEDULER,
    ParallelConfig.world_size,
    KVCacheBlock.block_hash,
    CacheHitSource.HOST,
    CacheHitSource.DISK,
    KVCacheLayout.is_block_compact,
    KVCacheLayout.is_block_outermost,
    current_platform.is_cpu,
    current_platform.is_cuda_alike,
    set_current_vllm_config,
)
"""That these are there, importing says."""

LEFT_AS_THEY_ARE: Mapping[str, str] = {
    "supports_divergent_local_hybrid_hits": "a load brings the blocks of all groups",
    "role": "set by the base",
    "get_mem_pool_context": "any memory can be read",
    "clear_connector_metadata": "of the base",
    "has_connector_metadata": "of the base",
    "set_host_xfer_buffer_ops": "pages are copied as bytes",
    "finish_forward": "stores wait for wait_for_save",
    "reset_capture_state": "no graph contains a copy",
    "handle_preemptions": "blocks are copied within the step that fills them",
    "get_finished": "get_transfer_results is answered",
    "get_block_ids_with_load_errors": "requests are named, not blocks",
    "get_kv_connector_kv_cache_events": "no events",
    "get_handshake_metadata": "no peers",
    "bind_kv_cache_manager": "of the base",
    "bind_gpu_block_pool": "blocks are not pinned",
    "get_loaded_kv_cache_group_ids": "all groups that have hashes",
    "get_external_cache_hit_sources": "the slowest tier",
    "on_new_request": "requests are known when they are looked up",
    "register_finished_partial_tail": "prefixes end at blocks",
    "take_events": "no events",
    "has_pending_block_frees": "no block waits for a transfer",
    "get_required_kvcache_layout": "any whose pages are whole",
    "requires_piecewise_for_cudagraph": "nothing goes layer by layer",
    "get_finished_count": "every rank answers",
    "set_xfer_handshake_metadata": "no peers",
    "set_xfer_handshake_metadata_pp_aware": "no peers",
}
"""What vLLM's connectors may answer and TierConnector does not, and why."""
OF_NATURAL = {"start_natural", "supports_natural_layout"}
"""Asked by the scheduler of the natural layout."""
LEFT_OF_RELEASE: Mapping[str, Mapping[str, str]] = {
    "0.32": {},
    "0.33": {
        "supports_sleep_mode": "True, of the base",
        "unregister_kv_caches": "views of the cache's memory stay",
        "restore_kv_caches": "views of the cache's memory stay",
    },
}
"""More of them, in one release."""


SKIPPED: Mapping[str, tuple[str, ...]] = {
    "scheduler.get_request_counts": (
        "_inflight_prefills.add()",
        "deferred_waiting.add()",
        "deferred_waiting.discard()",
        "failed_recving_kv_req_ids.remove()",
        "finished_recving_kv_req_ids.remove()",
        "kv_cache_manager.cache_blocks()",
        "kv_cache_manager.coordinator.get_num_blocks_to_allocate()",
        "kv_cache_manager.get_blocks()",
        "kv_cache_manager.get_computed_blocks()",
        "kv_cache_manager.get_computed_blocks_for_connector()",
        "kv_cache_manager.record_blocks_for_zeroing()",
        "kv_cache_manager.record_prefix_cache_stats()",
        "kv_cache_manager.take_kv_cache_block_copies()",
        "kv_cache_manager.truncate_computed_blocks()",
        "kv_holding_waiting.prepend_requests()",
        "request.replay_start",
        "request.shared_prefix_boundary",
        "request.status",
        "requests.get()",
        "running.append()",
        "waiting.peek_request()",
        "waiting.pop_request()",
        "waiting.prepend_request()",
        "waiting.prepend_requests()",
    ),
    "scheduler.connector": (
        "_kv_fetch_counts",
        "_kv_fetch_stages.pop()",
        "connector.get_external_cache_hit_sources()",
        "connector.get_loaded_kv_cache_group_ids()",
        "connector.get_num_new_matched_tokens()",
        "connector.has_pending_block_frees()",
        "connector.update_state_after_alloc()",
        "connector_prefix_cache_stats.record()",
        "kv_cache_manager.take_boundary_state_offloads()",
        "scheduler_output.kv_connector_block_state",
        "scheduler_output.kv_connector_metadata",
    ),
    "scheduler.ec_connector": (
        "ec_connector.build_connector_meta()",
        "ec_connector.ensure_cache_available()",
        "ec_connector.has_cache_item()",
        "ec_connector.update_state_after_alloc()",
        "scheduler_output.ec_connector_metadata",
    ),
    "scheduler.aux_output_connector": (
        "aux_output_connector.build_connector_meta()",
        "aux_output_connector.request_finished()",
        "scheduler_output.aux_output_connector_metadata",
    ),
    "scheduler.defer_block_free": (
        "deferred_frees.append()",
        "kv_cache_manager.block_pool.free_blocks()",
        "kv_cache_manager.pop_blocks_for_free()",
        "sched_step_seq",
    ),
    "speculative_config": ("request.spec_token_ids",),
    "enable_logging_iteration_details": ("stats.num_inputs", "stats.output_tokens"),
    "request.mm_features": (
        "encoder_cache_manager.allocate()",
        "encoder_cache_manager.can_allocate()",
        "encoder_cache_manager.check_and_update_cache()",
        "encoder_cache_manager.free()",
        "encoder_cache_manager.get_cached_num_encoder_embeds()",
        "encoder_cache_mismatch_reqs.add()",
    ),
    # the loop preempts: all of these only where a request gets no slot, which ends those that decode
    "covered, place = due[served]": (
        "kv_cache_manager.free()",
        "request.drop_stale_output",
        "request.num_output_placeholders",
        "request.num_preemptions",
        "request.num_stale_output_tokens",
        "reset_preempted_req_ids.add()",
        "running",
        "running.index()",
        "running.pop()",
    ),
    # our step is opened around all of it
    "kv_cache_manager.decode": ("kv_cache_manager.allocate_slots()", "kv_cache_manager.new_step_starts()"),
}
"""Effects of vLLM's loop that ``decoding`` goes without, by the guard in our source for which it does."""
SKIPPED_OF_RELEASE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "0.32": {"scheduler.get_request_counts": ("grammar_compile_error_reqs.add()",)},
    "0.33": {
        "scheduler.get_request_counts": ("grammar_compile_error_reqs", "last_prefill_step"),
        "scheduler.connector": ("deferred_loads",),
        "scheduler.aux_output_connector": (
            "aux_output_connector.cap_external_hit()",
            "aux_output_connector.max_cache_hit()",
            "aux_output_connector.request_loading()",
        ),
        "request.mm_features": (
            "_pending_encoder_input_ids",
            "_pending_encoder_input_ids.get()",
            "_pending_encoder_input_ids.pop()",
        ),
    },
}
"""More of them, in one release."""
CHANGED = {"self.running", "self.max_num_active_reqs", "self.scheduler_config.max_num_batched_tokens"}
READS_RUNNING: Mapping[str, set[str]] = {
    "schedule": {
        "bool(self.running)",  # has_scheduled_reqs: CacheManager.decode knows
        "for r in self.running",  # throttled, or a local_prefill_interval
        "for req in self.running if req.lora_request and req.lora_request.lora_int_id > 0",  # lora_config
        "input_budget = self.scheduler_config.max_num_batched_tokens",
        "len(self.running)",
        "len(self.running) <= self.max_num_running_reqs",
        "max(self.running, key=lambda r: (r.priority, r.arrival_time))",  # SchedulingPolicy.FCFS
        "num_running >= self.max_num_active_reqs",
        "self.running.append",
        "self.running.index",
        "self.running.pop",
        "self.running[-1]",
        "self.running[req_index]",
        "self.running[victim_index]",
    },
    "get_request_counts": {"len(self.running)"},  # long_prefill_token_threshold
}
"""Where ``schedule`` reads what ``set_aside`` changes: all as for the requests left, or guarded."""
OUTSIDE = ("__init__", "_handle_invalid_blocks", "finish_requests", "reset_prefix_cache", "update_from_output")
"""Methods of vLLM's scheduler that ``schedule`` does not call."""
NOT_TAKEN: Mapping[str, set[str]] = {
    "limit.stops": {"_free_request()", "_handle_stopped_request()", "request.resumable", "request.status"},
    "request.num_stale_output_tokens": {"request.num_stale_output_tokens"},
    "request.prefill_stats": {"kv_cache_manager.estimate_cached_tokens()", "prefill_stats"},
    "request.events": {"events"},
    "request.mm_features": {"_free_encoder_inputs()"},
    "request.pooling_params": {"pooling_output"},
    "request.structured_output_request": {"structured_output_manager.accept_tokens()"},
    "sampling.num_logprobs": {"new_logprobs"},
    "step.scheduled_spec_decode_tokens": {"request.num_computed_tokens", "make_spec_decoding_stats()"},
    "answer.num_nans_in_logits": {"request.num_nans_in_logits"},
    "answer.prompt_logprobs_dict": {"new_prompt_logprobs_tensors"},
    "answer.prompt_token_id_logprobs_dict": {"prompt_token_id_logprobs"},
    "scheduler.aux_output_connector": {"aux_output_connector.take_output()", "routed_experts"},
    "scheduler.return_sampling_mask": {"new_sampling_mask"},
}
"""Effects of vLLM's loop over outputs, and fields of its EngineCoreOutput, that ``take_tokens`` lacks, by guard.

An output of a request that ends has more: ``OF_LAST_OUTPUTS``.
"""
OF_LAST_OUTPUTS = {"ec_transfer_params", "finish_reason", "kv_transfer_params", "spec_decode_metrics", "stop_reason"}
OF_CHECK_STOP = {
    "FINISHED_LENGTH_CAPPED",
    "FINISHED_REPETITION",
    "FINISHED_STOPPED",
    "eos_token_id",
    "max_tokens",
    "min_tokens",
    "num_output_tokens",
    "num_tokens",
    "output_token_ids",
    "pooling_params",
    "repetition_detection",
    "sampling_params",
    "status",
    "stop_reason",
    "stop_token_ids",
}
"""What ``check_stop`` reads and writes. ``ends_of`` follows it; ``min_tokens`` delays repetition alone."""
CAPTURED: Mapping[str, set[str]] = {
    "0.32": {"connector.bind_kv_cache_manager()"},
    "0.33": {"connector.bind_kv_cache_manager()", "aux_output_connector"},
}
"""What vLLM's constructor hands its manager. Connectors are bound again; ``refuse_captured`` refuses all others."""
READERS = ("v1/core", "v1/engine", "v1/metrics", "distributed", "entrypoints")
"""Folders of vLLM whose modules read a cache manager."""
QUEUES: Mapping[str, type] = {"fcfs": FCFSRequestQueue, "priority": PriorityRequestQueue}
PARTS: Mapping[str, type] = {
    "": CacheManager,
    "block_pool": Pool,
    "coordinator": Coordinator,
    "empty_kv_cache_blocks": Blocks,
    "empty_kv_cache_blocks.blocks": Block,
    "kv_cache_config": KVCacheConfig,
}
"""Our class for what vLLM reads of a manager."""


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
    of_ours = ((KVCacheManager, CacheManager), (KVCacheBlocks, Blocks), (RequestQueue, WaitingByPrefix))
    for theirs, kind in of_ours:
        for name, method in public(theirs).items():
            if name in NOT_ASKED:
                continue
            mine = getattr(kind, name, None)
            if mine is None:
                yield f"{theirs.__name__}.{name} is not answered"
            elif callable(method) and not takes(mine, parameters(method)):
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
    for kind, names in chain(FIELDS.items(), FIELDS_OF_RELEASE[RELEASE].items()):
        there = set(kind._fields) if hasattr(kind, "_fields") else {one.name for one in fields(kind)}
        yield from (f"{kind.__name__} has no {name}" for name in names if name not in there)
    yield from not_set()
    yield from unanswered()
    yield from bypassed()
    yield from not_taken()
    yield from captured()
    yield from unread()


def unanswered() -> Iterator[str]:
    """What vLLM asks of connectors, and TierConnector neither answers nor leaves for a reason."""
    left = {**LEFT_AS_THEY_ARE, **LEFT_OF_RELEASE[RELEASE]}
    asked = {
        name: one for kind in (KVConnectorBase_V1, SupportsHMA) for name, one in vars(kind).items() if name[0] != "_"
    }
    mine = {name for name in vars(TierConnector) if name[0] != "_"} - OF_NATURAL
    for name in sorted(asked.keys() - mine - left.keys()):
        yield f"KVConnectorBase_V1.{name} is not answered by TierConnector"
    for name in sorted((left.keys() | mine) - asked.keys()):
        yield f"KVConnectorBase_V1 has no {name}, of which TierConnector knows"
    for kind, ours_ in ((KVConnectorBase_V1, TierConnector), (KVConnectorStats, TierStats)):
        for name in sorted(vars(kind).keys() & vars(ours_).keys()):
            theirs, answer = getattr(kind, name), getattr(ours_, name)
            if name[0] != "_" and callable(theirs) and parameters(theirs) != parameters(answer):
                yield f"{kind.__name__}.{name}{parameters(theirs)}, ours {parameters(answer)}"
    if parameters(resolve_kv_cache_block_sizes) != ("kv_cache_config", "vllm_config"):
        yield f"resolve_kv_cache_block_sizes{parameters(resolve_kv_cache_block_sizes)}"
    for name in ("block_hash", "is_null", "block_id"):
        if not hasattr(KVCacheBlock, name) and name not in {one.name for one in fields(KVCacheBlock)}:
            yield f"KVCacheBlock has no {name}"


def takes(function: Any, names: tuple[str, ...]) -> bool:  # noqa: ANN401 - ours
    """Whether it has these parameters, and others only with defaults: of a newer release."""
    mine = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    more = mine[len(names) :]
    return tuple(one.name for one in mine[: len(names)]) == names and all(one.default is not one.empty for one in more)


def bypassed() -> Iterator[str]:
    """Effects of methods of vLLM's that run no longer, or not in every step."""
    methods = methods_of(Scheduler)
    mine = set[str]()
    for function in (decoding.empty_step, decoding.add_decoding):
        mine |= effects(tree_of(function), methods, "scheduler")
    guarding = (decoding.decode, decoding._only_tokens, SlotsAhead.decode, ours.Scheduler.schedule)
    source = "".join(inspect.getsource(function) for function in guarding)
    skipped = set[str]()
    for guard, names in chain(SKIPPED.items(), SKIPPED_OF_RELEASE[RELEASE].items()):
        skipped |= set(names)
        if guard not in source:
            yield f"decoding has no guard {guard}, for which it goes without {', '.join(names)}"
    theirs = effects(methods["schedule"], methods)
    for name in sorted(theirs - mine - skipped):
        yield f"Scheduler.schedule has an effect {name}, which decoding has not"
    for name in sorted(skipped - theirs):
        yield f"Scheduler.schedule has no effect {name}"
    for name in sorted(effects(methods["_mamba_block_aligned_split"], methods)):
        yield f"Scheduler._mamba_block_aligned_split has an effect {name}, which NaturalScheduler's has not"
    for name, method in ((name, one) for name, one in methods.items() if name not in OUTSIDE):
        for line in sorted(set(of_running(method)) - READS_RUNNING.get(name, set())):
            yield f"Scheduler.{name} has {line!r}, which sees not all running requests where set_aside hides some"


def of_running(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the expressions of ``function`` that read what ``set_aside`` changes."""
    for node in ast.walk(function):
        if any(path_of(one) in CHANGED for one in ast.iter_child_nodes(node) if isinstance(one, ast.Attribute)):
            yield ast.unparse(node).strip()


def outputs_loop(methods: Mapping[str, ast.FunctionDef]) -> ast.FunctionDef:
    """Return ``update_from_output`` with its loop over requests alone, and the local names before it."""
    function = methods["update_from_output"]
    loop = next(one for one in function.body if isinstance(one, ast.For) and "num_scheduled" in ast.unparse(one.iter))
    before = [one for one in function.body[: function.body.index(loop)] if isinstance(one, ast.Assign)]
    return ast.FunctionDef(function.name, function.args, [*before, *loop.body], [])


def said_of_each(function: ast.AST) -> set[str]:
    """Return the fields that it gives EngineCoreOutput."""
    made = [one for one in ast.walk(function) if isinstance(one, ast.Call) and path_of(one.func) == "EngineCoreOutput"]
    return {str(one.arg) for call in made for one in call.keywords}


def not_taken() -> Iterator[str]:
    """Effects and fields of vLLM's loop over outputs that ``take_tokens`` neither has nor guards against."""
    methods = methods_of(Scheduler)
    loop, mine = outputs_loop(methods_of(AsyncScheduler)), tree_of(decoding.take_tokens)
    source = "".join(inspect.getsource(one) for one in (decoding.take_tokens, decoding._tokens_alone, ends_of))
    for guard in NOT_TAKEN:
        if guard not in source:
            yield f"take_tokens has no guard {guard}"
    skipped = set[str]().union(*NOT_TAKEN.values()) | OF_LAST_OUTPUTS
    theirs = effects(loop, {"_update_request_with_output": methods_of(AsyncScheduler)["_update_request_with_output"]})
    theirs |= said_of_each(loop)
    has = effects(mine, methods, "scheduler") | said_of_each(mine)
    for name in sorted(theirs - has - skipped):
        yield f"Scheduler.update_from_output has an effect {name}, which take_tokens has not"
    for name in sorted(skipped - theirs):
        yield f"Scheduler.update_from_output has no effect {name}"
    read = {one.attr for one in ast.walk(tree_of(check_stop)) if isinstance(one, ast.Attribute)}
    for name in sorted(read ^ OF_CHECK_STOP):
        yield f"check_stop reads {name}, or reads it no longer: see ends_of"


def captured() -> Iterator[str]:
    found = captures(methods_of(Scheduler)["__init__"])
    for name in sorted(found - CAPTURED[RELEASE]):
        yield f"Scheduler.__init__ hands its cache manager to {name}, before it is replaced"
    for name in sorted(CAPTURED[RELEASE] - found):
        yield f"Scheduler.__init__ hands its cache manager no longer to {name}"


def unread() -> Iterator[str]:
    """Paths that vLLM reads of a manager, and ours does not have."""
    for path, file in sorted(reads(vllm, READERS).items()):
        of, _, name = path.rpartition(".")
        part = PARTS.get(of)
        if part is None or not has(part, name):
            yield f"{file} reads kv_cache_manager.{path}, which ours does not have"


def has(kind: type, name: str) -> bool:
    named = is_dataclass(kind) and name in {one.name for one in fields(kind)}
    return named or hasattr(kind, name) or f"self.{name}" in inspect.getsource(kind)


def of_self(node: ast.expr) -> list[str]:
    """The attribute of ``self`` that the expression is of, or none."""
    path = path_of(node).split(".")
    return path[1:2] if path[0] == "self" else []


def registered(kind: type) -> set[str]:
    """Attributes that the registration of a connector's worker assigns, fills or appends to."""
    found = set[str]()
    for node in ast.walk(tree_of(kind.register_kv_caches)):  # type: ignore[attr-defined] # vLLM's
        match node:
            case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Subscript(ctx=ast.Store()) as filled:
                found.update(of_self(filled))
            case ast.Call(func=ast.Attribute(attr="append", value=appended)):
                found.update(of_self(appended))
    return found


def not_set() -> Iterator[str]:
    """What constructors and classes are to set, or to have, and one function to take."""
    for name in sorted(registered(NixlBaseConnectorWorker) - registered(NaturalNixlWorker) - NOT_REGISTERED):
        yield f"NixlBaseConnectorWorker.register_kv_caches sets {name}, and NaturalNixlWorker does not"
    for kind in WHOLE:  # of what we make, another field is another thing to say
        more = {one.name for one in fields(kind)} - {*FIELDS[kind], *FIELDS_OF_RELEASE[RELEASE].get(kind, ())}
        yield from (f"{kind.__name__} has a field {name}, of which decoding says nothing" for name in sorted(more))
    for kind, known in EVENTS[RELEASE].items():
        for name in sorted(known ^ set(kind.__struct_fields__)):
            yield f"{kind.__name__} has a field {name}, or has it no longer, of which EventConverter does not know"
    if parameters(select_common_block_size) != OF_BLOCK_SIZES:
        yield f"select_common_block_size{parameters(select_common_block_size)}, not {OF_BLOCK_SIZES}"
    if not hasattr(SamplingParams(), "extra_args"):
        yield "SamplingParams has no extra_args"
    for made, names in (
        (Scheduler.__init__, IN_SCHEDULERS),
        (GPUModelRunner, IN_RUNNERS),
        (InputBatch, IN_BATCHES),
        (Request, (*EngineRequest.__annotations__, *public(EngineRequest), *IN_REQUESTS)),
    ):
        source = inspect.getsource(made)
        yield from (
            f"{made.__qualname__} sets no {name}"
            for name in names
            if f"self.{name}" not in source and f"def {name}" not in source
        )


def faults() -> Iterator[str]:
    """Faults made on purpose that are not named."""
    constructor = methods_of(Scheduler)["__init__"]
    for statement, name in (
        ("self.helper = Helper(self.kv_cache_manager)", "helper"),
        ("pool = self.kv_cache_manager.block_pool", "pool"),
        ("self.helpers['a'] = self.kv_cache_manager.coordinator", "helpers"),
        ("self.helper.bind(self.kv_cache_manager, 3)", "helper.bind()"),
    ):
        changed = ast.FunctionDef("__init__", constructor.args, [*constructor.body, *ast.parse(statement).body], [])
        if captures(changed) - captures(constructor) != {name}:
            yield f"{statement} is not named"
    for name in ("reset_cache", "build_connector_meta"):
        answer = getattr(TierConnector, name)
        delattr(TierConnector, name)
        if not any(f"{name} is not answered" in line for line in unanswered()):
            yield f"TierConnector without {name} is not named"
        setattr(TierConnector, name, lambda self, other: None)  # noqa: ARG005
        if not any(line.startswith(f"KVConnectorBase_V1.{name}(") for line in unanswered()) and name == "reset_cache":
            yield f"TierConnector.{name} with another parameter is not named"
        setattr(TierConnector, name, answer)
    methods = methods_of(Scheduler)
    for statement, name in (
        ("self.num_steps += 1", "num_steps"),
        ("self.counts[request.request_id] = 1", "counts"),
        ("self.counts.update(a=1)", "counts.update()"),
        ("counts = self.counts\ncounts.clear()", "counts.clear()"),
        ("request.steps += 1", "request.steps"),
    ):
        function = methods["schedule"]
        changed = ast.FunctionDef(
            "schedule", function.args, [*function.body, *ast.parse("a = self.running[0]").body], []
        )
        if set(of_running(changed)) - READS_RUNNING["schedule"] != {"self.running[0]"}:
            yield "self.running[0] is not named"
        for where in ("schedule", "_preempt_request"):
            function = methods[where]
            changed = ast.FunctionDef(where, function.args, [*function.body, *ast.parse(statement).body], [])
            more = {**methods, where: changed}
            if effects(more["schedule"], more) - effects(methods["schedule"], methods) != {name}:
                yield f"{statement!r} in {where} is not named"


def loop_faults() -> Iterator[str]:
    """The same for the loop over outputs, and for what reads the running requests."""
    methods = methods_of(Scheduler)
    loop, function = outputs_loop(methods), methods["schedule"]
    loop.body += ast.parse("request.steps += 1").body
    if effects(loop, {}) - effects(outputs_loop(methods), {}) != {"request.steps"}:
        yield "request.steps in update_from_output is not named"
    changed = ast.FunctionDef("schedule", function.args, [*function.body, *ast.parse("a = self.running[0]").body], [])
    if set(of_running(changed)) - READS_RUNNING["schedule"] != {"self.running[0]"}:
        yield "self.running[0] is not named"


def refusals() -> Iterator[str]:
    """Starts that are not refused, or refused without need; and queues that are replaced without need, or not."""
    for version, is_supported in (("0.31.2", False), ("0.32.1", True), ("0.33.0+cpu", True), ("0.34.0", False)):
        if refused(ours.require_version, version) != ("" if is_supported else f"this is {version}"):
            yield f"version {version} is {'refused' if is_supported else 'accepted'}"
    for name in ("Scheduler", "NaturalScheduler"):
        for kind, ahead in product((name, f"Async{name}"), (False, True)):
            made = object.__new__(getattr(ours, kind))
            made.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead))
            wanted = f"hybridkv.vllm.Async{name}" if ahead and kind == name else ""
            if refused(ours.require_class, made) != wanted:
                yield f"{kind} with async_scheduling={ahead}: {refused(ours.require_class, made) or 'accepted'}"
    for (policy, theirs), ranks, most in product(QUEUES.items(), (False, True), (0, 1)):
        cache = SimpleNamespace(eviction_policy=SimpleNamespace(ranks=ranks))
        manager = SimpleNamespace(cache=cache, evicts=None, cached_tokens=None)
        made = SimpleNamespace(kv_cache_manager=manager, waiting=theirs())
        ours._order_waiting(made, most)
        if isinstance(made.waiting, WaitingByPrefix) != (policy == "fcfs" and ranks and most > 0):
            yield f"{policy}, ranked {ranks}, max_overtaken {most}: the queue is a {type(made.waiting).__name__}"


def refused(require: Any, given: object) -> str:  # noqa: ANN401 - a function of ours
    """The part of its error that says what is wrong with what was given, or nothing."""
    try:
        require(given)
    except ConfigError as error:
        found = re.search(r"this is [\w.+]+|hybridkv\.vllm\.Async\w+", str(error))
        return found[0] if found else str(error)
    return ""


if __name__ == "__main__":
    if not set(ours.SUPPORTED) == set(FIELDS_OF_RELEASE) == set(SKIPPED_OF_RELEASE) == set(CAPTURED) == set(EVENTS):
        sys.exit(f"the lists here are not of the releases {', '.join(ours.SUPPORTED)}")
    ours.require_version(vllm.__version__)
    found = [*faults(), *loop_faults(), *refusals()] if "--faults" in sys.argv else list(drifted())
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
