"""Engine: the loop that glues scheduler and runner, with text on both sides.

add -> drafts, maybe -> scheduler.schedule -> Step -> runner.execute -> StepResult -> scheduler.update
    -> text, stop strings -> Completion

With a step in flight the forward runs in a thread, and the engine schedules the next Step meanwhile:

    engine    [ schedule n + 1 ] [ update n, text ] [ schedule n + 2 ] ..
    thread    [   forward n    ]                    [ forward n + 1  ]

Nothing runs between two calls of an engine: models, requests and observers are then the caller's. What a forward waits
for, kernels of a CPU or the copy of tokens from another device, leaves Python to the scheduler.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypedDict, Unpack

import numpy as np
import torch
from transformers import PreTrainedModel

from hybridkv.arguments import Count, Positive, check_types, instance, integer, one_of, or_none, text
from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.errors import CacheError, ConfigError
from hybridkv.eviction import EVERYBODY, TenantShares, eviction_named, eviction_of
from hybridkv.planner import Plan
from hybridkv.request import Hints, Request, SamplingParams
from hybridkv.runner.attention.formulas import AttentionBackend, attention_backend
from hybridkv.runner.completion import Completion, Progress, Stream, count_step, raise_first
from hybridkv.runner.decode_graphs import compile_option
from hybridkv.runner.images import Images, PromptImages, attends_both_ways
from hybridkv.runner.inputs import (
    EncoderFeed,
    Given,
    Prompt,
    as_list,
    checked_sampling,
    drafts_by_request,
    encode,
    encoder_feed,
    is_empty,
    loaded_of,
    number_in,
    one_each,
    require_callable,
    require_drafter,
    require_vocabulary,
    with_word_ids,
)
from hybridkv.runner.load import LoadedModel, own_mode
from hybridkv.runner.planning import plan_within
from hybridkv.runner.probe import planner_model
from hybridkv.runner.runner import ModelRunner, Observer, require_fit
from hybridkv.runner.sampling.draws import TokenLogprob
from hybridkv.runner.self_check import require_same
from hybridkv.schedule import Finished, Outcome, Scheduler, SchedulerLimits, SchedulerStatistics
from hybridkv.schedule.limits import short_share
from hybridkv.step import Step, StepResult

if TYPE_CHECKING:  # a draft model is an engine, too
    from hybridkv.runner.drafters import Drafter

logger = logging.getLogger(__name__)

_IDLE_STEPS: Final = 8
"""Empty steps in a row, with nothing in flight, after which a scheduler that is not drained is called stuck."""


def _known_eviction(name: str, value: object) -> str:
    known = text(name, value)
    eviction_named(known)
    return known


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine runs. max_running: requests at once. token_budget: tokens of a step.

    in_flight: steps scheduled ahead of their results, 1 or 2: then forwards run in a thread of their own, observers and
    logits_processors with them, while the next step is scheduled. prefix_caching: share blocks of equal prefixes.
    attention: what attends over the pages (AttentionBackend).
    compile: "decode" for steps that only decode as CUDA graphs, where the model allows it and attention is "triton";
    elsewhere they run as they are, and the log says why.
    self_check: first compare the model on pages with plain forwards, some 15 short ones (hybridkv.runner.self_check).
    kv_events: the cache tells what it stores and forgets, for AsyncEngine's ``events``; end_events: and where hits can
    end, for an exact KVEventPublisher.
    image_bytes: of the features of images kept on the device; beyond it those read longest ago are made anew.
    eviction, shares: what the cache gives up next, by name, None for what suits the plan, and shares of tenants of what
    it keeps (KVCacheManager). remembered_losses, block_times: what statistics tell besides (KVCacheManager).
    short_share: as SchedulerLimits.
    Raises ConfigError for counts that are none, and for the name of no eviction.
    """

    max_running: Positive = 64
    token_budget: Positive = 2048
    in_flight: Annotated[int, partial(integer, least=1, most=2)] = 1
    prefix_caching: bool = True
    self_check: bool = True
    image_bytes: Count = 256 << 20
    attention: Annotated[AttentionBackend | str, attention_backend] = AttentionBackend.GATHER
    compile: Annotated[str | None, compile_option] = None
    kv_events: bool = False
    end_events: bool = False
    eviction: Annotated[str | None, or_none(_known_eviction)] = None
    shares: TenantShares = EVERYBODY
    remembered_losses: Count = 0
    block_times: bool = False
    short_share: Annotated[float | None, or_none(short_share)] = None

    def __post_init__(self) -> None:
        check_types(self)


class RequestOptions(TypedDict, total=False):
    """What may be said of a request besides its prompt and its sampling.

    marks, tenant, hints: as of hybridkv.request.Request.
    encoder: of an encoder-decoder, what its encoder reads: text, token ids, or features [bins, frames]. The prompt
    is then the decoder's, its start token included; an empty one is that token alone. encoder_digest: the caller's
    own name of that content, under this salt and for as long as the engine lives: what was computed for it is found
    under that name when the request is long gone. Without one the content is hashed.
    images: of a multimodal model, in the order of their placeholders: pictures, with a prompt of text, for the
    processor that it was loaded with; or what a processor made of them, by name (``pixel_values``,
    ``image_grid_thw``), with its token ids. Blocks with images are shared by their content.
    """

    request_id: str | None
    cache_salt: str | None
    tenant: str | None
    marks: Sequence[int]
    hints: Hints | None
    encoder: Given | None
    encoder_digest: bytes | str | None
    images: Images | None


class Engine:
    """Generates with ``model``, an unmodified transformers model or a LoadedModel. Not thread safe; see AsyncEngine.

    plan: of this very model; its max_model_len bounds prompt and output together. None: one that fills ``memory``
    with requests up to ``max_model_len`` tokens, as ``plan_within`` has them.
    tokenizer: of a transformers model; without one prompts and outputs are token ids.
    observer: sees the logits of every Step (hybridkv.runner.runner.Observer).
    speculate: proposes tokens, which the model verifies several at a time; None for none. Outputs are the same. A plan
    needs room for its drafts in recurrent layers (num_speculative_tokens). A request that decodes then waits for its
    result before its next step is scheduled, whatever ``in_flight`` is, but for one step where nobody had drafts. When
    it raises, or proposes what are no tokens of the model, the log says so and the engine goes on without it:
    ``drafter`` is None then. The engine closes it.
    From here to ``close`` (or the end of a ``with``) the model attends through the engine's pages, and belongs to it
    alone; a model in hand does not train meanwhile.
    Raises ConfigError for a plan of another model, for arguments that contradict each other, and as ``wrap``,
    ``plan_within`` and ModelRunner do.
    """

    def __init__(
        self,
        model: PreTrainedModel | LoadedModel,
        plan: Plan | None = None,
        options: EngineOptions | None = None,
        *,
        tokenizer: Any = None,  # noqa: ANN401  # transformers' tokenizers share no typed base
        memory: int | str | None = None,
        max_model_len: int | None = None,
        observer: Observer | None = None,
        speculate: Drafter | None = None,
    ) -> None:
        self.options = EngineOptions() if options is None else instance("options", options, EngineOptions)
        or_none(one_of(Plan))("plan", plan)
        require_callable(observer=observer)
        if speculate is not None:
            require_drafter("speculate", speculate)
        self.drafter: Drafter | None = speculate
        self._took: Callable[[int, float], object] | None = getattr(speculate, "took", None)
        self._decoded: tuple[int, float] | None = None
        drafts = 0 if speculate is None else speculate.num_speculative_tokens
        with ExitStack() as undo:
            undo.enter_context(own_mode(model))
            self.loaded = loaded_of(model, tokenizer)
            if speculate is not None:
                speculate.require(self.loaded)
            self.plan = self._planned(plan, memory, max_model_len, drafts)
            self._undrawn: dict[str, Exception] = {}
            self._assemble(drafts, observer)
            undo.callback(self.runner.detach)
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridkv-forward")
            undo.callback(self._thread.shutdown)
            if speculate is not None:
                undo.callback(speculate.close)
            self._closing = undo.pop_all()
        self._closed = False
        self._in_flight: deque[Step] = deque()
        self._running: Future[StepResult] | None = None
        self._seconds = 0.0  # of the forward that ran last
        self._live: dict[str, Progress] = {}
        self._ended: list[Progress] = []
        self._next_id = 0
        self._idle = 0
        self._found_none = False

    def _planned(self, plan: Plan | None, memory: int | str | None, max_model_len: int | None, drafts: int) -> Plan:
        """``plan``, or one within ``memory``. drafts: most of a row in a step. Raises ConfigError for both at once."""
        if plan is None:
            return plan_within(
                self.loaded,
                memory,
                max_model_len=max_model_len,
                max_batched_tokens=self.options.token_budget,
                max_in_flight=self.options.in_flight,
                num_speculative_tokens=drafts,
            )
        if memory is not None or max_model_len is not None:
            raise ConfigError("the plan has a memory and a max_model_len: leave these out, or leave the plan out")
        return plan

    def _assemble(self, drafts: int, observer: Observer | None) -> None:
        """Make cache, scheduler and runner of the plan; from here on the model runs on pages."""
        loaded, plan, options = self.loaded, self.plan, self.options
        planned = planner_model(loaded.model, block_size=plan.model.block_size, name=loaded.name)
        require_fit(planned, plan.config)
        forwards = require_same(loaded, plan, AttentionBackend(options.attention)) if options.self_check else None
        limits = SchedulerLimits(
            max_running=options.max_running,
            max_batched_tokens=options.token_budget,
            max_in_flight=options.in_flight,
            num_speculative_tokens=drafts,
            whole_items=attends_both_ways(loaded.model),
            short_share=options.short_share,
        )
        self.cache = KVCacheManager(
            plan,
            enable_caching=options.prefix_caching,
            enable_kv_cache_events=options.kv_events,
            options=CacheOptions(
                resume_point_events=options.end_events,
                eviction=eviction_of(plan, options.eviction),
                shares=options.shares,
                remembered_losses=options.remembered_losses,
                block_times=options.block_times,
            ),
        )
        self.scheduler = Scheduler(self.cache, limits)
        self.runner = ModelRunner(
            loaded.model,
            plan.config,
            planned,
            max_running=limits.max_running,
            max_model_len=plan.max_model_len,
            max_batched_tokens=limits.max_batched_tokens,
            max_encoder_tokens=plan.limits.max_encoder_tokens,
            observer=observer,
            undrawn=self._undrawn.setdefault,
            forwards=forwards,
            attention=options.attention,
            compiled=options.compile,
        )

    def close(self) -> None:
        """Give the model back as it was, and close the drafter: nothing runs here any more. Again: nothing."""
        self._closed = True
        self._closing.close()

    def _require_open(self) -> None:
        if self._closed:
            raise engine_closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests

    def add(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> str:
        """Queue a prompt, text or token ids; its request id. Branches have the ids of ``output_ids``.

        options: see RequestOptions.
        Raises ConfigError for what is no prompt or no sampling, text without tokenizer, an empty prompt, images that do
        not fit it or the model, ids outside the vocabulary, stop strings without tokenizer, more log probabilities than
        there are tokens, marks that are no token counts and an id in use; CapacityError when it could never fit;
        CacheError once the engine is closed.
        """
        return self._add(prompt, sampling, **options)[0].request.request_id

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Stream:
        """Queue a prompt as ``add`` does, to be read as it grows; see Stream."""
        added = self._add(prompt, sampling, **options)
        for number, one in enumerate(added):
            one.streamed_as = number
        return Stream(added, self._run, self._leave)

    def abort(self, request_id: str) -> bool:
        """End a request; it comes out of a later ``step`` with reason "abort". False for an unknown id.

        CacheError once the engine is closed.
        """
        self._require_open()
        return self.scheduler.abort(instance("request_id", request_id, str))

    def _leave(self, request_id: str) -> bool:
        """Nobody reads the stream of a request any longer: it ends, where closing has not ended all."""
        return not self._closed and self.scheduler.abort(request_id)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        encoders: Sequence[Given] | None = None,
        images: Sequence[Images | None] | None = None,
    ) -> list[Completion]:
        """Run ``prompts`` to their ends, in their order, all ``n`` outputs of one in a row.

        sampling: one for all, or one each. encoders: of an encoder-decoder, what its encoder reads, one each.
        images: as ``add`` has them, for each prompt; None for one without.
        Requests added before run beside them; ``step`` hands those out.
        When a prompt is refused, as by ``add``, none of them runs. Whatever else is raised, by a forward or by the
        tokenizer, ends all of them, and nothing of them is handed out later.
        """
        self._require_open()
        added: list[Progress] = []
        try:
            for prompt, params, given, pictures in one_each(prompts, sampling, encoders, images):
                added += self._add(prompt, params, encoder=given, images=pictures)
            # behind the last request, steps that were scheduled ahead still hold its blocks
            while any(one.completion is None for one in added) or (self._in_flight and not self._live):
                self._run()
                raise_first(added)
        finally:
            self._drop(added)
        return [one.completion for one in added if one.completion is not None]

    def _drop(self, added: Sequence[Progress]) -> None:
        """Nothing of ``added`` is handed out by ``step``; what of them still runs ends."""
        mine = set(added)
        for one in added:
            request_id = one.request.request_id
            if self._live.get(request_id) is one:
                self.scheduler.abort(request_id)
                self._forget(one)
        self._ended = [one for one in self._ended if one not in mine]

    def _add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
        marks: Sequence[int] = (),
        hints: Hints | None = None,
        encoder: Given | None = None,
        encoder_digest: bytes | str | None = None,
        images: Images | None = None,
    ) -> list[Progress]:
        """A request and its branches, queued."""
        self._require_open()
        feed = self._feed(encoder, encoder_digest, cache_salt)
        params = checked_sampling(sampling) or SamplingParams()
        for name, value in (("request_id", request_id), ("cache_salt", cache_salt), ("tenant", tenant)):
            or_none(text)(name, value)
        params = with_word_ids(params, self.loaded)
        require_vocabulary(params, self.loaded)
        ids, pictures = self._ids(prompt, images, starts=feed is not None)
        request = Request(
            str(self._next_id) if request_id is None else request_id,
            ids,
            params,
            hasher=self.cache.hasher,
            cache_salt=cache_salt,
            tenant=tenant,
            eos_token_ids=self.loaded.eos_token_ids,
            marks=as_list(marks),
            hints=hints,
            encoder=None if feed is None else feed.read,
            multimodal=() if pictures is None else pictures.items,
        )
        of_prompt: list[TokenLogprob] = []
        added = [
            Progress(one, self.loaded.tokenizer, prompt_logprobs=of_prompt)
            for one in (request, *self.scheduler.add(request))
        ]
        for one in added:
            self._live[one.request.request_id] = one
            if feed is not None and self.runner.cross is not None:
                self.runner.cross.inputs.hold(feed)
            if pictures is not None and self.runner.images is not None:
                self.runner.images.begin(one.request.request_id, pictures)
        self._next_id = max(self._next_id, number_in(request.request_id) + 1)
        return added

    def _ids(self, prompt: Prompt, images: Images | None, *, starts: bool) -> tuple[list[int], PromptImages | None]:
        """A prompt's tokens, and its images. starts: whether an empty one is the decoder's start."""
        if images is None or (isinstance(images, Sequence) and not images):
            return encode(self.loaded, self.loaded.decoder_start if starts and is_empty(prompt) else prompt), None
        return self.runner.take_images(self.options.image_bytes).of_prompt(self.loaded, prompt, images)

    def _feed(self, given: Given | None, digest: bytes | str | None, cache_salt: str | None) -> EncoderFeed | None:
        """What an encoder reads. ConfigError where it is missing, and where there is no encoder."""
        if given is None and self.runner.cross is None:
            return None
        if given is None:
            raise ConfigError(f"{self.loaded.name} is an encoder-decoder: hand over what its encoder reads")
        most = self.plan.limits.max_encoder_tokens
        return encoder_feed(self.loaded, given, most, digest=digest, cache_salt=cache_salt)

    def _forget(self, live: Progress) -> None:
        """``live`` runs no longer, and what its encoder reads may go."""
        del self._live[live.request.request_id]
        if live.request.encoder is not None and self.runner.cross is not None:
            self.runner.cross.inputs.release(live.request.encoder.digest)
        if self.runner.images is not None:
            self.runner.images.end(live.request.request_id)

    # -- the loop

    @property
    def idle(self) -> bool:
        """Nothing is in flight and every request has been handed out."""
        return not self._in_flight and not self._live and not self._ended

    def statistics(self) -> SchedulerStatistics:
        """The scheduler's counts so far."""
        return self.scheduler.statistics()

    def step(self) -> list[Completion]:
        """Schedule as far ahead as allowed, run the oldest Step, and hand out who finished, but for streams.

        An error of the forward passes through; the steps in flight have then failed, their requests wait again, and
        the next call goes on with them. An error of one request, of its tokenizer or its hashes, ends that one alone;
        it passes through, too, and the next call hands out what this one did not. CacheError once the engine is closed.
        """
        self._run()
        failed = next((one for one in self._ended if one.error is not None), None)
        if failed is not None:
            self._ended.remove(failed)
            raise_first([failed])
        ended, self._ended = self._ended, []
        return [one.completion for one in ended if one.completion is not None]

    def _run(self) -> None:
        """As ``step``, with nothing handed out."""
        self._require_open()
        # a forward runs beside the scheduler, but not where what it reads is held for the next Step, too
        if self._in_flight and self._running is None and self.runner.cross is None and self.runner.images is None:
            inference = torch.is_inference_mode_enabled()
            self._running = self._thread.submit(self._execute_aside, self._in_flight[0], inference)
        try:
            self._schedule_ahead()
        finally:
            if self._running is not None:
                wait([self._running])
        if not self._in_flight:
            return
        self._watch()
        step = self._in_flight[0]
        try:
            running, self._running = self._running, None
            result = self._execute(step) if running is None else running.result()
        except BaseException as error:
            while self._in_flight:
                self._land()
            self.scheduler.fail(step.id, error)
            raise
        self._land()
        if len(step) and step.decodes.all():
            self._decoded = (step.num_tokens, self._seconds)
        self._take_in(step, result, self.scheduler.update(result))

    def _execute_aside(self, step: Step, inference: bool) -> StepResult:  # handed on by submit
        """In the thread, which has a device and an inference mode of its own."""
        device = self.loaded.model.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode(inference):
            return self._execute(step)

    def _execute(self, step: Step) -> StepResult:
        began = time.perf_counter()
        result = self.runner.execute(step)
        self._seconds = time.perf_counter() - began
        return result

    def _launch(self, step: Step) -> None:
        """``step`` is in flight, and holds what its encoders read: its requests may end before it runs."""
        self._in_flight.append(step)
        for new in step.new_rows:
            if (live := self._live.get(new.request_id)) is not None:
                live.note_start()
        if self.runner.cross is not None:
            self.runner.cross.hold_inputs(step)
        if self.runner.images is not None:
            self.runner.images.launched(step)

    def _land(self) -> None:
        """The oldest Step has run or failed."""
        step = self._in_flight.popleft()
        if self.runner.cross is not None:
            self.runner.cross.release_inputs(step)
        if self.runner.images is not None:
            self.runner.images.landed(step)

    def _schedule_ahead(self) -> None:
        while len(self._in_flight) < self.options.in_flight:
            # drained with requests not handed out: aborted ones, which the update of an empty Step brings
            if self.scheduler.drained and (self._in_flight or not self._live):
                return
            if self._in_flight and not self._may_run_ahead():
                return
            self._propose()
            step = self.scheduler.schedule()
            self._launch(step)
            if not len(step):
                return

    def _may_run_ahead(self) -> bool:
        """Whether a step is to be scheduled behind those in flight.

        With a drafter not behind one that samples without drafts, for there could be none for the next token either;
        but once where it had none for anybody: it is asked again behind the token after that.
        """
        if self.drafter is None:
            return True
        if self.scheduler.waits_for_drafts:
            return False
        found_none, self._found_none = self._found_none, False
        return found_none or not any(map(_would_run_ahead, self._in_flight))

    def _propose(self) -> None:
        """Drafts for the requests of which one token is left to run: what the others will have is not known yet."""
        if self.drafter is None:
            return
        ready = [one.request for one in self._live.values() if one.decodes]
        if not ready:
            return
        decoded, self._decoded = self._decoded, None
        try:
            if self._took is not None and decoded is not None:
                self._took(*decoded)
            drafts = drafts_by_request(self.drafter.propose(ready), ready, self.loaded)
        except Exception as error:
            logger.warning("%s failed, no more drafts: %r", type(self.drafter).__name__, error, exc_info=True)
            self.drafter = None
            return
        self._found_none = not any(map(len, drafts.values()))  # of whatever sequences
        self.scheduler.propose(drafts)

    def _watch(self) -> None:
        """Raise CacheError when nothing runs though somebody waits: an endless loop otherwise."""
        empty = len(self._in_flight) == 1 and not len(self._in_flight[0])
        self._idle = self._idle + 1 if empty else 0
        if self._idle > _IDLE_STEPS:
            self._idle = 0  # whoever changes something may go on
            raise CacheError(
                f"{self.scheduler.num_waiting} requests wait and {self.scheduler.num_running} run, but "
                f"{_IDLE_STEPS + 1} steps in a row were empty"
            )

    def _take_in(self, step: Step, result: StepResult, outcome: Outcome) -> None:
        """Counts and log probabilities of all rows; then their text, which may end them; then completions."""
        ended = {one.request: one for one in outcome.finished}
        grown = count_step(self._live, step, result, outcome)
        undrawn = {request_id: self._undrawn.pop(request_id) for request_id in [*self._undrawn]}
        try:
            for live in grown:
                reason = live.add_text(undrawn.get(live.request.request_id))
                if reason is None:
                    continue
                if live.request not in ended:
                    self.scheduler.finish(live.request.request_id, reason)
                ended[live.request] = Finished(live.request, reason)
        finally:
            for one in ended.values():
                self._end(one)

    def _end(self, finished: Finished) -> None:
        """It is to be handed out, if it was not dropped meanwhile."""
        request = finished.request
        live = self._live.get(request.request_id)
        if live is None or live.request is not request:
            return
        self._forget(live)
        live.end(finished.reason, finished.error)
        if live.streamed_as is None:
            self._ended.append(live)


def _would_run_ahead(step: Step) -> bool:
    """Whether the step behind ``step`` could have a token whose input is not known: drafts behind it could not be."""
    return bool((step.samples & (np.diff(step.drafts.indptr) == 0)).any())


def engine_closed() -> CacheError:
    """What is raised by an engine that was closed."""
    return CacheError("the engine was closed: make another one")
