"""Engine: the loop that glues scheduler and runner, with text on both sides.

add -> scheduler.schedule -> Step -> runner.execute -> StepResult -> scheduler.update
    -> text, stop strings -> Completion
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hybridkv.cache import KVCacheManager
from hybridkv.cache.placement import placement_of
from hybridkv.errors import CacheError, CapacityError, ConfigError
from hybridkv.plan import Plan, make_plan
from hybridkv.plan.capacity import unit_bytes, units_for
from hybridkv.plan.planner import DEFAULT_LAYOUT
from hybridkv.request import Request, SamplingParams, output_ids
from hybridkv.runner.completion import Completion, Progress
from hybridkv.runner.detokenize import Detokenizer
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.probe import planner_model
from hybridkv.runner.runner import ModelRunner, Observer, require_fit
from hybridkv.schedule import FinishReason, Outcome, Scheduler, SchedulerLimits, SchedulerStatistics
from hybridkv.specs import Keeps
from hybridkv.step import Step
from hybridkv.units import ceil_div, parse_bytes

_IDLE_STEPS: Final = 8
"""Empty steps in a row, with nothing in flight, after which a scheduler that is not drained is called stuck."""

_STATES_OF_A_REQUEST: Final = 4
"""That run or are kept: the running one, end of prompt, end of output, a branch point."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine runs. max_running: requests at once. token_budget: tokens of a step.

    in_flight: steps scheduled ahead of their results, 1 or 2. prefix_caching: share blocks of equal prefixes.
    """

    max_running: int = 64
    token_budget: int = 2048
    in_flight: int = 1
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.in_flight not in (1, 2):
            raise ConfigError(f"in_flight must be 1 or 2, got {self.in_flight}")


class Engine:
    """Generates with ``loaded`` in the memory of ``plan``. Not thread safe.

    plan: of this very model; its max_model_len bounds prompt and output together.
    observer: sees the logits of every Step (hybridkv.runner.runner.Observer).
    Raises ConfigError for a plan of another model and as ModelRunner does.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        options: EngineOptions | None = None,
        *,
        observer: Observer | None = None,
    ) -> None:
        self.loaded, self.plan = loaded, plan
        self.options = options if options is not None else EngineOptions()
        planned = planner_model(loaded.model, block_size=plan.model.block_size, name=loaded.name)
        require_fit(planned, plan.config)
        limits = SchedulerLimits(
            max_running=self.options.max_running,
            max_batched_tokens=self.options.token_budget,
            max_in_flight=self.options.in_flight,
        )
        self.cache = KVCacheManager(
            plan.config,
            plan.max_model_len,
            enable_caching=self.options.prefix_caching,
            placement=placement_of(plan),
        )
        self.scheduler = Scheduler(self.cache, limits)
        self.runner = ModelRunner(
            loaded.model,
            plan.config,
            planned,
            max_running=limits.max_running,
            max_model_len=plan.max_model_len,
            max_batched_tokens=limits.max_batched_tokens,
            observer=observer,
        )
        self._in_flight: deque[Step] = deque()
        self._live: dict[str, Progress] = {}
        self._next_id = 0
        self._idle = 0

    def close(self) -> None:
        """Give the model its own attention back; the engine is done."""
        self.runner.detach()

    # -- requests

    def add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        marks: Sequence[int] = (),
    ) -> str:
        """Queue a prompt, text or token ids; its request id. Branches have the ids of ``output_ids``.

        marks: token counts where its prefix should be resumable (hybridkv.request).
        Raises ConfigError for text without tokenizer, an empty prompt, ids outside the vocabulary, stop
        strings without tokenizer, marks that are no token counts and an id in use; CapacityError when it could never
        fit.
        """
        params = sampling if sampling is not None else SamplingParams()
        ids = encode(self.loaded, prompt)
        if params.stop and self.loaded.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer: load the model with one, or use stop_token_ids")
        if request_id is None:
            request_id, self._next_id = str(self._next_id), self._next_id + 1
        request = Request(
            request_id,
            ids,
            params,
            hasher=self.cache.hasher,
            cache_salt=cache_salt,
            eos_token_ids=self.loaded.eos_token_ids,
            marks=marks,
        )
        tokenizer = self.loaded.tokenizer
        for one in (request, *self.scheduler.add(request)):
            text = None if tokenizer is None else Detokenizer(tokenizer, params.stop)
            self._live[one.request_id] = Progress(one, text)
        return request_id

    def abort(self, request_id: str) -> bool:
        """End a request; it comes out of a later ``step`` with reason "abort". False for an unknown id."""
        return self.scheduler.abort(request_id)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run ``prompts`` to their ends, in their order, all ``n`` outputs of one in a row.

        sampling: one for all, or one each.
        """
        params = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(params) != len(prompts):
            raise ConfigError(f"{len(params)} sampling parameters for {len(prompts)} prompts: give one for each")
        ids = [self.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        done: dict[str, Completion] = {}
        while not self.idle:
            done.update((one.request_id, one) for one in self.step())
        outputs = [1 if one is None else one.n for one in params]
        return [done[one] for first, n in zip(ids, outputs, strict=True) for one in output_ids(first, n)]

    # -- the loop

    @property
    def idle(self) -> bool:
        """Nothing is in flight and every request has been handed out."""
        return not self._in_flight and not self._live

    def statistics(self) -> SchedulerStatistics:
        """The scheduler's counts so far."""
        return self.scheduler.statistics()

    def step(self) -> list[Completion]:
        """Schedule as far ahead as allowed, run the oldest Step, and hand out who finished.

        An error of the forward passes through; the steps in flight have then failed, their requests wait again, and
        the next call goes on with them.
        """
        self._schedule_ahead()
        if not self._in_flight:
            return []
        step = self._in_flight.popleft()
        self._watch(step)
        try:
            result = self.runner.execute(step)
        except BaseException as error:
            self._in_flight.clear()
            self.scheduler.fail(step.id, error)
            raise
        return self._take_in(step, self.scheduler.update(result))

    def _schedule_ahead(self) -> None:
        while len(self._in_flight) < self.options.in_flight:
            # drained with requests not handed out: aborted ones, which the update of an empty Step brings
            if self.scheduler.drained and (self._in_flight or not self._live):
                return
            step = self.scheduler.schedule()
            self._in_flight.append(step)
            if not len(step):
                return

    def _watch(self, step: Step) -> None:
        """Raise CacheError when nothing runs though somebody waits: an endless loop otherwise."""
        self._idle = self._idle + 1 if not len(step) and not self._in_flight else 0
        if self._idle > _IDLE_STEPS:
            raise CacheError(
                f"{self.scheduler.num_waiting} requests wait and {self.scheduler.num_running} run, but "
                f"{self._idle} steps in a row were empty"
            )

    def _take_in(self, step: Step, outcome: Outcome) -> list[Completion]:
        """Text of the new tokens; requests that a stop string ended; completions."""
        finished = {one.request.request_id: one.reason for one in outcome.finished}
        counts = np.diff(outcome.appended.indptr)
        for row, (request, scheduled) in enumerate(zip(outcome.requests, step.num_scheduled.tolist(), strict=True)):
            live = self._live.get(request.request_id)
            if live is None or live.request is not request:
                continue  # it ended in an earlier step
            live.computed_tokens += scheduled
            if counts[row] and self._add_text(live, outcome.appended[row].tolist()):
                if request.request_id not in finished:
                    self.scheduler.finish(request.request_id, FinishReason.STOP)
                finished[request.request_id] = FinishReason.STOP
        return [self._live.pop(one).completed(reason) for one, reason in finished.items() if one in self._live]

    @staticmethod
    def _add_text(live: Progress, tokens: list[int]) -> bool:
        """Whether a stop string is complete."""
        return live.detokenizer is not None and live.detokenizer.add(tokens)


def encode(loaded: LoadedModel, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of ``prompt``. Raises ConfigError for an empty one, and for ids outside the vocabulary."""
    if isinstance(prompt, str):
        if loaded.tokenizer is None:
            raise ConfigError("a prompt of text needs a tokenizer: load the model with one, or give token ids")
        ids = [int(one) for one in loaded.tokenizer.encode(prompt)]
    else:
        ids = list(prompt)
    if not ids:
        raise ConfigError("the prompt is empty: give it at least one token")
    wrong = [one for one in ids if not 0 <= one < loaded.vocab_size]
    if wrong:
        raise ConfigError(
            f"token id {wrong[0]} lies outside the vocabulary of {loaded.name}: ids are 0 .. {loaded.vocab_size - 1}"
        )
    return ids


def plan_for(
    loaded: LoadedModel,
    lengths: Sequence[int],
    *,
    block_size: int = 16,
    memory: int | str | None = None,
    max_model_len: int | None = None,
    layout: str = DEFAULT_LAYOUT,
    placement: str | None = None,
) -> Plan:
    """A plan for requests of ``lengths`` tokens, prompt and output together.

    memory: bytes or a size; None for what all of them need side by side, and everything that they leave cached.
    max_model_len: tokens; None for the longest request. layout, placement: as make_plan has them.
    Raises ConfigError when a request is longer than the model allows, CapacityError, saying how
    much is needed, when the longest does not fit.
    """
    if not lengths:
        raise ConfigError("no prompts: give at least one")
    model = planner_model(loaded.model, block_size=block_size, name=loaded.name)
    longest = max(lengths)
    if model.max_model_len is not None and longest > model.max_model_len:
        raise ConfigError(
            f"a request of {longest} tokens, prompt and output together, exceeds the {model.max_model_len} of "
            f"{loaded.name}: shorten the prompt or lower --max-new-tokens"
        )
    limit = longest if max_model_len is None else max_model_len

    def planned(memory_bytes: int) -> Plan:
        return make_plan(model, memory_bytes, max_model_len=limit, layout=layout, placement=placement)

    if memory is not None:
        return planned(parse_bytes(memory))
    memory_bytes = sum(layer.spec.page_size_bytes for layer in model.layers) * 2
    while True:  # the plan's blocks depend on the memory: twice or three times
        try:
            made = planned(memory_bytes)
        except CapacityError:
            memory_bytes *= 2
            continue
        lacking = units_for(made.config, _kept_blocks(made, lengths)) + 1 - made.config.num_blocks
        if lacking <= 0:
            return made
        memory_bytes += lacking * unit_bytes(made.config)


def _kept_blocks(plan: Plan, lengths: Sequence[int]) -> list[int]:
    """Blocks of each group that requests of ``lengths`` tokens fill and leave behind, sharing nothing."""
    kept = []
    for group in plan.config.groups:
        size = group.spec.block_size
        if group.spec.keeps is Keeps.STATE and plan.config.slabs is not None:
            kept.append(len(lengths) * _STATES_OF_A_REQUEST)
        else:
            kept.append(sum(ceil_div(length, size) + 1 for length in lengths))
    return kept
