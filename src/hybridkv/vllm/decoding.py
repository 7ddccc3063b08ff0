"""Steps in which requests decode, without vLLM's loops, which check each request for features that few use.

schedule             decode_step   if every running request decodes a token and none waits; else vLLM's loop
update_from_output   take_tokens   for each request that gets one token and goes on; vLLM's loop for the others
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from hybridkv.vllm.requests import ends_of


def decode_step(scheduler: Any) -> SchedulerOutput | None:  # noqa: ANN401 - vLLM's
    """Return the output of a step in which all running requests decode one token, or ``None`` for other steps.

    Most steps of a busy server are like this. vLLM's loop checks each request for features that no request of this step
    uses: drafts, encoder inputs, chunks and preemption. vLLM's ``_update_after_schedule`` then handles the output as
    usual.
    O(running requests).
    """
    most = min(scheduler.max_num_scheduled_tokens, scheduler.vllm_config.scheduler_config.max_num_batched_tokens)
    if not 0 < len(scheduler.running) <= most or not _nothing_else(scheduler):
        return None
    manager = scheduler.kv_cache_manager
    decoded = manager.decode(scheduler.running)
    if decoded is None:
        return None
    running = decoded.requests
    scheduler.current_step += 1
    if running and hasattr(scheduler, "num_executed_steps"):  # vLLM 0.33 counts steps with tokens
        scheduler.num_executed_steps += 1
    scheduler.prefill_capacity_bound = False  # no request waits
    names = [request.request_id for request in running]
    cached = CachedRequestData(
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
        scheduled_cached_reqs=cached,
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
    """Return tokens of requests that the last step left out, for vLLM's first model runner; update its record."""
    if scheduler.use_v2_model_runner:
        return {}
    last = scheduler.prev_step_scheduled_req_ids
    tokens = {one.request_id: one.all_token_ids.copy() for one in running if one.request_id not in last}
    last.clear()
    last.update(request.request_id for request in running)
    return tokens


def _nothing_else(scheduler: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether no request waits and only the cache influences the step."""
    started, (_, waiting) = scheduler.vllm_config, scheduler.get_request_counts()
    return not (
        waiting
        or scheduler.pause_state is not PauseState.UNPAUSED
        or scheduler.connector is not None
        or scheduler.defer_block_free  # steps are counted in the loop
        or scheduler.ec_connector is not None
        or scheduler.aux_output_connector is not None
        or started.speculative_config is not None
        or scheduler.num_sampled_tokens_per_step != 1
        or started.parallel_config.pipeline_parallel_size > 1
        or started.observability_config.enable_logging_iteration_details
    )


def take_tokens(
    scheduler: Any,  # noqa: ANN401 - vLLM's
    step: SchedulerOutput,
    answer: Any,  # noqa: ANN401 - vLLM's ModelRunnerOutput
) -> tuple[dict[int, list[EngineCoreOutput]], dict[str, int]]:
    """Append the token of each request that got one and goes on.

    Returns the outputs of these requests by client, and the tokens scheduled for the other requests by name: those with
    a first or last token, and all that ``ends_of`` excludes. O(requests of the step).

    Args:
        scheduler: The scheduler.
        step: The step that ran.
        answer: What the workers returned.
    """
    taken = defaultdict[int, list[EngineCoreOutput]](list)
    if not _tokens_alone(scheduler, step, answer):
        return taken, step.num_scheduled_tokens
    others = dict[str, int]()
    requests = scheduler.requests
    ends = scheduler.kv_cache_manager.ahead.ends
    sampled, places = answer.sampled_token_ids, answer.req_id_to_index
    for name, count in step.num_scheduled_tokens.items():
        request = requests.get(name)
        if request is None or request.status is not RequestStatus.RUNNING or request.prefill_stats is not None:
            others[name] = count
            continue
        if name in ends:
            limit = ends[name]
        else:
            limit = ends[name] = ends_of(request, scheduler.max_model_len)
        tokens = sampled[places[name]]
        if (
            limit is None
            or len(tokens) != 1
            or tokens[0] in limit.stops
            or request.num_tokens + 1 >= limit.tokens
            or request.num_stale_output_tokens
            or request.events
        ):
            others[name] = count
            continue
        request.num_in_flight_tokens -= count
        request.append_output_token_ids(tokens[0])
        if request.num_output_placeholders:  # vLLM schedules ahead
            request.num_output_placeholders -= 1
            scheduler.kv_cache_manager.cache_blocks(
                request, request.num_computed_tokens - request.num_output_placeholders
            )
        taken[request.client_index].append(
            EngineCoreOutput(
                request_id=name,
                new_token_ids=tokens,
                trace_headers=request.trace_headers,
                num_nans_in_logits=request.num_nans_in_logits,
            )
        )
    return taken, others


def _tokens_alone(scheduler: Any, step: SchedulerOutput, answer: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether the workers returned nothing but sampled tokens, one for each request that decodes."""
    loads, costs = answer.kv_connector_output, scheduler.perf_metrics
    return not (
        not answer.sampled_token_ids
        or step.scheduled_spec_decode_tokens
        or answer.prompt_logprobs_dict
        or answer.prompt_token_id_logprobs_dict
        or answer.pooler_output
        or answer.num_nans_in_logits is not None
        or scheduler.return_sampling_mask
        or scheduler.aux_output_connector is not None
        or (loads is not None and (loads.failed_recving or loads.invalid_block_ids))
        or (costs is not None and costs.is_enabled())  # it reads all rows of the step
    )


def add_tokens(
    outputs: MutableMapping[int, EngineCoreOutputs], taken: dict[int, list[EngineCoreOutput]], order: Iterable[str]
) -> None:
    """Add the outputs ``taken`` of a step to vLLM's ``outputs`` of its other requests.

    Args:
        outputs: By client; updated.
        taken: The result of ``take_tokens``.
        order: Names of the requests of the step.
    """
    for client, mine in taken.items():
        theirs = outputs.get(client)
        if theirs is None:
            outputs[client] = EngineCoreOutputs(outputs=mine)
        elif theirs.outputs:
            place = {name: at for at, name in enumerate(order)}
            theirs.outputs = sorted(mine + theirs.outputs, key=lambda one: place.get(one.request_id, len(place)))
        else:
            theirs.outputs = mine
