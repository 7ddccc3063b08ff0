"""A step in which all that runs decodes one token each: what vLLM's scheduler makes of it, without its loop.

Most steps of a busy server are such. Its loop asks of each request what none of them has then: drafts, encoder inputs,
chunks, stages, whom to preempt. What follows a step is vLLM's own (``_update_after_schedule``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput


def decode_step(scheduler: Any) -> SchedulerOutput | None:  # noqa: ANN401 - vLLM's
    """The output of a step of one token each; None where vLLM's loop has to see to it. O(requests that run)."""
    most = min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)
    if not 0 < len(scheduler.running) <= most or not _nothing_else(scheduler):
        return None
    manager = scheduler.kv_cache_manager
    decoded = manager.decode(scheduler.running)
    if decoded is None:
        return None
    running = decoded.requests
    scheduler.current_step += 1
    scheduler.prefill_capacity_bound = False  # nobody waits
    names = [request.request_id for request in running]
    told = CachedRequestData(
        req_ids=names,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids=_not_in_the_last_step(scheduler, running),
        new_block_ids=decoded.new_blocks,
        num_computed_tokens=decoded.num_computed_tokens,
        num_output_tokens=[
            computed + 1 - request.num_prompt_tokens
            for request, computed in zip(running, decoded.num_computed_tokens, strict=True)
        ],
    )
    output = SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=told,
        num_scheduled_tokens=dict.fromkeys(names, 1),
        total_num_scheduled_tokens=len(names),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        preempted_req_ids=scheduler.reset_preempted_req_ids,
        finished_req_ids=scheduler.finished_req_ids,
        free_encoder_mm_hashes=scheduler.encoder_cache_manager.get_freed_mm_hashes(),
        new_block_ids_to_zero=scheduler._get_new_block_ids_to_zero(),
        ec_manager_metadata=scheduler.encoder_cache_manager.get_manager_metadata(),
        num_spec_tokens_to_schedule=0,
    )
    scheduler._update_after_schedule(output)
    return output


def _not_in_the_last_step(scheduler: Any, running: Sequence[Any]) -> dict[str, list[int]]:  # noqa: ANN401 - vLLM's
    """Their tokens, which vLLM's first model runner hears again; the last step is this one from now on."""
    if scheduler.use_v2_model_runner:
        return {}
    last = scheduler.prev_step_scheduled_req_ids
    tokens = {one.request_id: one.all_token_ids.copy() for one in running if one.request_id not in last}
    last.clear()
    last.update(request.request_id for request in running)
    return tokens


def _nothing_else(scheduler: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Whether nobody waits, and nobody besides the cache has a say in a step."""
    return not (
        scheduler.waiting
        or scheduler.kv_holding_waiting
        or scheduler._pause_state is not PauseState.UNPAUSED
        or scheduler.connector is not None
        or scheduler.defer_block_free  # steps are counted in the loop
        or scheduler.ec_connector is not None
        or scheduler.aux_output_connector is not None
        or scheduler.vllm_config.speculative_config is not None
        or scheduler.num_sampled_tokens_per_step != 1
        or scheduler.num_lookahead_tokens
        or scheduler.use_pp
        or scheduler.observability_config.enable_logging_iteration_details
    )
