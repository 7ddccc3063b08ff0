"""Requests that decode skip vLLM's loops, which check each request for features that few use.

    running   [ decodes | decodes | chunk | decodes ]    waiting   [ new ]
schedule        decode             vLLM's loop                       vLLM's loop

    step      [ goes on | goes on | first token | goes on | ends ]
update_from_output
                take_tokens         vLLM's loop   take_tokens  vLLM's loop
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from hybridkv.vllm.requests import Decoded, ends_of

_FEW: Final = 3
"""Fewer decoding requests are left to vLLM's loop, if others run in the same step: it takes less time for them."""


def decode(scheduler: Any, *, throttled: bool) -> Decoded | None:  # noqa: ANN401 - vLLM's
    """Allocate slots for the leading running requests that decode one token; ``None`` if vLLM's loop must schedule all.

    Requests after them, and new ones, run in the same step where vLLM's loop does not see the difference: it looks at
    the number of tokens and requests that are left, and preempts the last running request first. O(running).

    Args:
        scheduler: The scheduler.
        throttled: vLLM holds back prompts in this step.
    """
    config, running = scheduler.scheduler_config, len(scheduler.running)
    most = min(scheduler.max_num_scheduled_tokens, config.max_num_batched_tokens)
    if not 0 < running <= most or not _only_tokens(scheduler):
        return None
    is_split = (
        not throttled
        and scheduler.policy is SchedulingPolicy.FCFS  # a priority may preempt any running request
        and not config.long_prefill_token_threshold  # divided by all requests
        and not scheduler.lora_config  # adapters of all running requests count
        and getattr(scheduler, "local_prefill_interval", 1) <= 1  # vLLM 0.33: prompts wait while some request decodes
    )
    if not is_split and scheduler.get_request_counts()[1]:
        return None
    at_least = min(_FEW, running) if is_split else running
    decoded: Decoded | None = scheduler.kv_cache_manager.decode(scheduler.running, at_least)
    return decoded


def told_of(scheduler: Any, decoded: Decoded) -> CachedRequestData:  # noqa: ANN401 - vLLM's
    """Return what the workers are told of the requests of ``decoded``. Call before vLLM schedules others."""
    running, computed = decoded.requests, decoded.num_computed_tokens
    last = scheduler.prev_step_scheduled_req_ids  # vLLM's first model runner needs the tokens of those left out
    without = () if scheduler.use_v2_model_runner else [one for one in running if one.request_id not in last]
    return CachedRequestData(
        req_ids=[request.request_id for request in running],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={one.request_id: list(one.all_token_ids) for one in without},
        new_block_ids=decoded.new_blocks,
        num_computed_tokens=computed,
        num_output_tokens=[
            tokens + 1 - request.num_prompt_tokens for request, tokens in zip(running, computed, strict=True)
        ],
    )


@contextmanager
def set_aside(scheduler: Any, decoded: Decoded) -> Iterator[None]:  # noqa: ANN401 - vLLM's
    """Hide the running requests that ``decoded`` covers from vLLM's loops, and take their tokens off its budgets."""
    config = scheduler.scheduler_config
    before = config.max_num_batched_tokens, scheduler.max_num_active_reqs
    covered, scheduler.running = scheduler.running[: decoded.covered], scheduler.running[decoded.covered :]
    # vLLM schedules the smaller of two numbers of tokens, and reads the other one elsewhere
    config.max_num_batched_tokens = min(before[0], scheduler.max_num_scheduled_tokens) - len(decoded.requests)
    scheduler.max_num_active_reqs -= decoded.covered
    try:
        yield
    finally:
        config.max_num_batched_tokens, scheduler.max_num_active_reqs = before
        scheduler.running = covered + scheduler.running


def empty_step(scheduler: Any) -> SchedulerOutput:  # noqa: ANN401 - vLLM's
    """Return the output of a step in which only requests that decode run: ``_update_after_schedule`` adds them."""
    scheduler.current_step += 1
    scheduler.prefill_capacity_bound = False  # no request waits
    if not scheduler.use_v2_model_runner:
        scheduler.prev_step_scheduled_req_ids.clear()
    output = SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
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


def add_decoding(scheduler: Any, decoding: CachedRequestData, output: SchedulerOutput) -> None:  # noqa: ANN401 - vLLM's
    """Add the requests ``decoding``, the leading ones, to the ``output`` of a step.

    Args:
        scheduler: The scheduler.
        decoding: What the workers are told of them.
        output: Updated. vLLM's ``_update_after_schedule`` has not seen it.
    """
    others, names = output.scheduled_cached_reqs, decoding.req_ids
    if not output.num_scheduled_tokens and names and hasattr(scheduler, "num_executed_steps"):
        scheduler.num_executed_steps += 1  # vLLM 0.33 counts steps with tokens
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=names + others.req_ids,
        resumed_req_ids=others.resumed_req_ids,
        new_token_ids=others.new_token_ids,  # of pipelines alone
        all_token_ids=decoding.all_token_ids | others.all_token_ids,
        new_block_ids=decoding.new_block_ids + others.new_block_ids,
        num_computed_tokens=decoding.num_computed_tokens + others.num_computed_tokens,
        num_output_tokens=decoding.num_output_tokens + others.num_output_tokens,
    )
    output.num_scheduled_tokens = dict.fromkeys(names, 1) | output.num_scheduled_tokens
    output.total_num_scheduled_tokens += len(names)
    if not scheduler.use_v2_model_runner:
        scheduler.prev_step_scheduled_req_ids.update(names)


def _only_tokens(scheduler: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether only the cache and the budgets influence a step of requests that decode."""
    started = scheduler.vllm_config
    return not (
        scheduler.pause_state is not PauseState.UNPAUSED
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
