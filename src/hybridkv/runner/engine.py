"""Engine: the loop of scheduler and runner, with text at both ends.

add -> drafts, if any -> scheduler.schedule -> Step -> runner.execute -> StepResult -> scheduler.update
    -> text, stop strings -> Completion

With a step in flight, the forward runs in a thread, and the engine schedules the next Step meanwhile:

    engine    [ schedule n + 1 ] [ update n, text ] [ schedule n + 2 ] ..
    thread    [   forward n    ]                    [ forward n + 1  ]

Nothing runs between two calls of an engine, so that callers may change their models, requests and observers. While a
forward waits for kernels or for a copy from another device, Python is free for the scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

import torch
from transformers import PreTrainedModel

from hybridkv.arguments import instance, one_of, or_none, text
from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.errors import CacheError, ConfigError
from hybridkv.eviction import eviction_of
from hybridkv.planner import Plan
from hybridkv.request import Hints, Request, SamplingParams
from hybridkv.runner.attention.formulas import AttentionBackend
from hybridkv.runner.completion import Completion, Progress, Stream, count_step, engine_closed, oldest_s, raise_first
from hybridkv.runner.drafting import Drafting
from hybridkv.runner.handover import HandedOver, live_of
from hybridkv.runner.images import Images, PromptImages, attends_both_ways
from hybridkv.runner.inputs import (
    EncoderFeed,
    Given,
    Prompt,
    as_list,
    encode,
    feed_if_read,
    is_empty,
    loaded_of,
    number_in,
    one_each,
    ready_sampling,
    require_callable,
    require_drafter,
)
from hybridkv.runner.load import LoadedModel, own_mode
from hybridkv.runner.lockstep import Lockstep, require_alone, require_sendable
from hybridkv.runner.lora import Adapters
from hybridkv.runner.options import EngineOptions, RequestOptions, RequestSink
from hybridkv.runner.planning import plan_of
from hybridkv.runner.probe import AS_COMPUTED, Stored, planner_model
from hybridkv.runner.runner import ModelRunner, Observer, require_fit
from hybridkv.runner.sampling.draws import TokenLogprob
from hybridkv.runner.sampling.structured import Grammars
from hybridkv.runner.self_check import require_same
from hybridkv.runner.session_file import checked_key, checked_path
from hybridkv.runner.sessions import Session, SessionFiles
from hybridkv.runner.tiers import Behind, open_tiers
from hybridkv.schedule import Finished, Outcome, Scheduler, SchedulerLimits, SchedulerStatistics
from hybridkv.step import Step, StepResult
from hybridkv.stores import StoreChoice

if TYPE_CHECKING:  # a draft model is an engine, too
    from hybridkv.runner.drafters import Drafter

_IDLE_STEPS: Final = 8
"""Empty steps in a row, with nothing in flight, after which a scheduler with open requests counts as stuck."""


class Engine:
    """Generates text with an unmodified transformers model. It is not thread safe; AsyncEngine is.

    From construction to ``close`` (or the end of a ``with``), the model attends through the engine's pages and belongs
    to the engine alone. It is in evaluation mode meanwhile.

    Args:
        model: a transformers model, or a LoadedModel.
        plan: a plan of this model, whose ``max_model_len`` limits prompt and output; None for one of ``plan_within``.
        options: how the engine runs.
        tokenizer: the tokenizer of a transformers model. Without one, prompts and outputs are token ids.
        memory: bytes, or a size such as "8GiB", for a plan made here.
        max_model_len: tokens of the longest request, for a plan made here.
        host_memory: bytes, or a size, of host memory for prefixes that the device evicts; evictions by value only.
        store: a store behind the host memory, which outlives the engine, such as DiskFolder; None for none.
        stored: the form of keys and values in pages, for a plan made here.
        observer: called with the logits of every Step (hybridkv.runner.runner.Observer).
        speculate: a Drafter; the model verifies its tokens, and the outputs stay the same. The engine closes it. A plan
            needs room for drafts in recurrent layers (num_speculative_tokens). A request that decodes waits for its
            result before its next step is scheduled, even with ``in_flight=2``; except for one step after no drafts
            at all. If it raises or proposes invalid tokens, the log says so, and ``drafter`` becomes None.
        requests: receives each request as it ends, such as RequestPublisher; None for none.

    Raises:
        ConfigError: the plan is of another model, or arguments contradict each other.
        UnsupportedModelError: the model cannot run on pages.
        CapacityError: no request fits into ``memory``.
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
        host_memory: int | str | None = None,
        store: StoreChoice | None = None,
        stored: Stored = AS_COMPUTED,
        observer: Observer | None = None,
        speculate: Drafter | None = None,
        requests: RequestSink | None = None,
    ) -> None:
        self.options = EngineOptions() if options is None else instance("options", options, EngineOptions)
        or_none(one_of(Plan))("plan", plan)
        require_callable(observer=observer)
        if speculate is not None:
            require_drafter("speculate", speculate)
        drafts = 0 if speculate is None else speculate.num_speculative_tokens
        with ExitStack() as undo:
            undo.enter_context(own_mode(model))
            self.loaded = loaded_of(model, tokenizer)
            if speculate is not None:
                speculate.require(self.loaded)
            self._drafting = Drafting(speculate, self.loaded)
            self.plan = plan_of(
                self.loaded,
                self.options,
                plan,
                memory,
                max_model_len=max_model_len,
                num_speculative_tokens=drafts,
                stored=stored,
            )
            self._undrawn: dict[str, Exception] = {}
            self._assemble(drafts, observer, Behind(host_memory, store), undo)
            undo.callback(self.runner.detach)
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridkv-forward")
            undo.callback(self._thread.shutdown)
            if speculate is not None:
                undo.callback(speculate.close)
            self._closing = undo.pop_all()
        self._requests, self._closed, self._next_id, self._idle = requests, False, 0, 0
        self._in_flight: deque[Step] = deque()
        self._running: Future[StepResult] | None = None
        self._seconds = 0.0  # of the forward that ran last
        self._live: dict[str, Progress] = {}
        self._ended: list[Progress] = []

    def _assemble(self, drafts: int, observer: Observer | None, behind: Behind, undo: ExitStack) -> None:
        """Make cache, scheduler and runner for the plan; from here on the model runs on pages."""
        loaded, plan, options = self.loaded, self.plan, self.options
        planned = planner_model(
            loaded.model, block_size=plan.model.block_size, name=loaded.name, stored=Stored.of_plan(plan)
        )
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
                eviction=eviction_of(plan, options.eviction),
                shares=options.shares,
                remembered_losses=options.remembered_losses,
                block_times=options.block_times,
                log_resume_points=behind.host_memory is not None,
            ),
        )
        tiers = open_tiers(behind, loaded, plan, self.cache, options=options, undo=undo)
        self.tier = None if tiers is None else tiers.host
        self.scheduler = Scheduler(self.cache, limits, tier=self.tier)
        self.adapters, self.grammars = Adapters.load(loaded, options), Grammars(loaded)
        undo.callback(self.grammars.close)
        self.runner = ModelRunner(
            loaded.model,
            plan.config,
            planned,
            max_running=self.scheduler.max_rows,
            max_model_len=plan.max_model_len,
            max_batched_tokens=limits.max_batched_tokens,
            max_encoder_tokens=plan.limits.max_encoder_tokens,
            observer=observer,
            undrawn=self._undrawn.setdefault,
            forwards=forwards,
            attention=options.attention,
            compiled=options.compile,
            grammars=self.grammars,
            adapters=self.adapters,
            **({} if tiers is None else tiers.of_runner),
        )
        self.worker: ModelRunner | Lockstep = self.runner

    @property
    def drafter(self) -> Drafter | None:
        """The drafter; None without one, and after it failed."""
        return self._drafting.drafter

    def close(self) -> None:
        """Give the model back as it was, and close the drafter and the store. A second call does nothing."""
        if not self._closed and not self.has_settled:
            with suppress(Exception):  # what fails to be stored is computed again
                self.settle_tiers()
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
        """Queue a prompt. Branches of a request with ``n`` outputs have the ids of ``output_ids``.

        Args:
            prompt: text or token ids.
            sampling: how tokens are drawn; None for SamplingParams().
            options: see RequestOptions.

        Returns:
            The request id.

        Raises:
            ConfigError: an argument is invalid; text or stop strings lack a tokenizer; token ids are outside the
                vocabulary; images do not fit the prompt or the model; or the id is in use.
            CapacityError: the request can never fit.
            CacheError: the engine is closed.
        """
        return self._add(prompt, sampling, **options)[0].request.request_id

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Stream:
        """Queue a prompt as ``add`` does; return a Stream that reads its output while it grows.

        Args:
            prompt: text or token ids.
            sampling: how tokens are drawn; None for SamplingParams().
            options: see RequestOptions.
        """
        added = self._add(prompt, sampling, **options)
        for number, one in enumerate(added):
            one.streamed_as = number
        return Stream(added, self._run, self._leave)

    def stream_of(self, request_id: str) -> Stream:
        """Return a Stream of a request that runs or waits, such as a resumed one; ``step`` does not return it then.

        Args:
            request_id: its id. The first increment has all output so far.

        Raises:
            ConfigError: no such request runs or waits.
        """
        live = live_of(self._live, request_id)
        live.streamed_as = 0
        return Stream([live], self._run, self._leave)

    def abort(self, request_id: str) -> bool:
        """End a request, and return whether it ran or waited; a later ``step`` returns it with the reason "abort".

        Args:
            request_id: its id.

        Raises:
            CacheError: the engine is closed.
        """
        self._require_open()
        return self.scheduler.abort(instance("request_id", request_id, str))

    def _leave(self, request_id: str) -> bool:
        """Abort a request that no Stream reads any more, unless the engine is closed."""
        return not self._closed and self.scheduler.abort(request_id)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        encoders: Sequence[Given] | None = None,
        images: Sequence[Images | None] | None = None,
    ) -> list[Completion]:
        """Run ``prompts`` to their ends. Requests that were added before run as well; ``step`` returns these.

        If one prompt is rejected, no prompt runs. Any later error ends all prompts, and ``step`` returns none of them.

        Args:
            prompts: text or token ids each.
            sampling: one for all prompts, or one for each.
            encoders: for encoder-decoders, the encoder input of each prompt.
            images: the images of each prompt, as in RequestOptions; None for a prompt without.

        Returns:
            The completions in the order of the prompts; the ``n`` outputs of one prompt follow each other.

        Raises:
            ConfigError: a prompt is invalid, as in ``add``.
            CapacityError: a prompt can never fit.
            CacheError: the engine is closed.
        """
        self._require_open()
        added: list[Progress] = []
        try:
            for prompt, params, given, pictures in one_each(prompts, sampling, encoders, images):
                added += self._add(prompt, params, encoder=given, images=pictures)
            # after the last request, steps in flight still hold its blocks
            while any(one.completion is None for one in added) or (self._in_flight and not self._live):
                self._run()
                raise_first(added)
        finally:
            self._drop(added)
        return [one.completion for one in added if one.completion is not None]

    def _drop(self, added: Sequence[Progress]) -> None:
        """End the requests ``added`` that still run, and keep ``step`` from returning any of them."""
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
        lora: str | None = None,
    ) -> list[Progress]:
        """Queue a request and its branches."""
        self._require_open()
        most = self.plan.limits.max_encoder_tokens
        feed = feed_if_read(self.loaded, encoder, most, encoder_digest, cache_salt)
        params = ready_sampling(sampling, self.loaded)
        for name, value in (("request_id", request_id), ("cache_salt", cache_salt), ("tenant", tenant)):
            or_none(text)(name, value)
        require_sendable(self.worker, params, images)
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
            lora=self.adapters.key(lora),
        )
        return self._queue(request, feed, pictures)

    def _queue(
        self, request: Request, feed: EncoderFeed | None = None, pictures: PromptImages | None = None
    ) -> list[Progress]:
        """Give a request and its branches to the scheduler, and hold its encoder input and images."""
        of_prompt, grammar = list[TokenLogprob](), self.grammars.of(request.sampling.structured)
        added = [
            Progress(one, self.loaded.tokenizer, prompt_logprobs=of_prompt, grammar=grammar)
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
        """Return a prompt's tokens and its images. ``starts``: an empty prompt means the decoder's start token."""
        if images is None or (isinstance(images, Sequence) and not images):
            return encode(self.loaded, self.loaded.decoder_start if starts and is_empty(prompt) else prompt), None
        return self.runner.take_images(self.options.image_bytes).of_prompt(self.loaded, prompt, images)

    def _forget(self, live: Progress) -> None:
        """Remove ``live`` from the running requests, and release its encoder input and its images."""
        del self._live[live.request.request_id]
        if live.request.encoder is not None and self.runner.cross is not None:
            self.runner.cross.inputs.release(live.request.encoder.digest)
        if self.runner.images is not None:
            self.runner.images.end(live.request.request_id)

    # -- sessions as files

    def export(
        self,
        conversation: Completion | str | Sequence[int],
        path: str | Path,
        *,
        cache_salt: str | None = None,
        note: str = "",
        key: bytes | None = None,
    ) -> Session:
        """Write the cache of a conversation to a file that ``import_`` resumes, in any engine of the same model.

        Steps in flight run to their ends first. A request that runs may go on there (``resume``), and also here. The
        tiers are asked for a conversation that has left the device; requests run while a store is.

        Args:
            conversation: a completion, the tokens of a prompt and its output, or the id of a running request.
            path: the file. It is replaced as a whole, or not at all.
            cache_salt: the salt of the conversation; that of a running request is known.
            note: text of the caller's own, such as the messages.
            key: signs the file with HMAC-SHA256; None for no signature.

        Returns:
            What the file holds.

        Raises:
            ConfigError: no such request runs, or an argument is invalid.
            CacheError: neither cache nor tiers hold the conversation any longer, or the engine is closed.
            UnsupportedModelError: a layer keeps something that files cannot hold.
            OSError: the file cannot be written.
        """
        self._settle()
        files, wanted, secret = self._sessions(), checked_path("path", path), checked_key(key)
        if isinstance(conversation, str):
            live = self._live.get(conversation)
            if live is None or live.request.row < 0:
                raise ConfigError(f"no request {conversation!r} runs: give its Completion, or its tokens")
            goes_on = HandedOver.of(live.request, live.logprobs)
            return files.save(live.request, wanted, note=note, key=secret, goes_on=goes_on)
        if isinstance(conversation, Completion):
            conversation = conversation.prompt_token_ids + conversation.token_ids
        ids, salt = encode(self.loaded, conversation, what="conversation"), or_none(text)("cache_salt", cache_salt)
        request = Request("export", ids, hasher=self.cache.hasher, cache_salt=salt)
        if self.tier is not None and self.tier.has_store and not files.has(request):
            with self.stream(ids, SamplingParams(max_tokens=1), cache_salt=salt, hints=Hints(prefetch=True)) as fetched:
                deque(fetched, 0)  # until the host has it, or will not
            self._settle()
        return files.save(request, wanted, note=note, key=secret)

    def import_(self, path: str | Path, *, key: bytes | None = None) -> Session:
        """Put the cache of a conversation from a file into this engine. Its next turn resumes there.

        Steps in flight run to their ends first. After an error the engine is unchanged.

        Args:
            path: a file of ``export``.
            key: the key with which it was signed; None if it is not signed.

        Returns:
            What the file holds. A request that begins with its ``token_ids`` hits ``resume_tokens`` of them.

        Raises:
            SessionError: the file is damaged, signed otherwise, or made with another model.
            SchemaError: the file has another format.
            CapacityError: the cache has no room for it.
            CacheError: the engine is closed.
            UnsupportedModelError: a layer keeps something that files cannot hold.
            OSError: the file cannot be read.
        """
        self._settle()
        return self._sessions().load(checked_path("path", path), key=checked_key(key))

    def resume(self, path: str | Path, *, request_id: str | None = None, key: bytes | None = None) -> str:
        """Go on with a request that another engine exported while it ran; ``step`` returns it with its whole output.

        Its tokens are those that the other engine would have drawn. If the file is missing or damaged, ``add`` its
        prompt instead: the tokens are the same, too.

        Args:
            path: a file of ``export``.
            request_id: the request's id here; None for a number.
            key: the key with which it was signed; None if it is not signed.

        Returns:
            The request id.

        Raises:
            SessionError: as ``import_``; or the file holds no request that can go on.
            ConfigError: the id is in use.
            HybridKVError: as ``import_`` and ``add``.
            OSError: the file cannot be read.
        """
        session = self.import_(path, key=key)
        name = str(self._next_id) if request_id is None else request_id
        (live,) = self._queue(self._sessions().request_of(session, name))
        live.logprobs += () if session.request is None else session.request.logprobs
        return name

    def _sessions(self) -> SessionFiles:
        require_alone(self.worker)
        self.adapters.require_none("session files")
        return SessionFiles(self.loaded, self.plan, self.cache, self.runner, self.tier)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, in host memory too; return whether no request held blocks, so that it was done.

        Steps in flight and transfers run to their ends first. Raises CacheError if the engine is closed.
        """
        self._settle()
        self.settle_tiers()
        return self.cache.reset_prefix_cache() if self.tier is None else self.tier.reset()

    @property
    def has_settled(self) -> bool:
        """Whether the store behind the host memory has what it keeps; True without a store."""
        return self.tier is None or not self.tier.has_store or self.tier.is_idle

    def settle_tiers(self, seconds: float = 10.0) -> None:
        """Run Steps without requests until the tiers have what they keep.

        Args:
            seconds: at most so long.
        """
        self._settle()
        until = time.monotonic() + seconds
        while self.tier is not None and not self.tier.is_idle and self.scheduler.drained and time.monotonic() < until:
            self._launch(self.scheduler.schedule())
            self._settle()

    def _settle(self) -> None:
        """Run the steps in flight, and schedule none."""
        self._require_open()
        while self._in_flight:
            self._run(ahead=False)

    # -- the loop

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and every request has been returned."""
        return not self._in_flight and not self._live and not self._ended

    def statistics(self) -> SchedulerStatistics:
        """Return the scheduler's counts so far."""
        return self.scheduler.statistics()

    def step(self) -> list[Completion]:
        """Schedule as far ahead as allowed, run the oldest Step, and return the finished requests that no Stream reads.

        After an error of the forward, the steps in flight have failed and their requests wait; the next call runs them
        again. An error of one request, in its tokenizer or its hashes, ends that one alone. It is raised, and the next
        call returns the other requests.

        Raises:
            CacheError: the engine is closed, or its scheduler is stuck.
            Exception: an error of the forward or of one request.
        """
        self._run()
        failed = next((one for one in self._ended if one.error is not None), None)
        if failed is not None:
            self._ended.remove(failed)
            raise_first([failed])
        ended, self._ended = self._ended, []
        return [one.completion for one in ended if one.completion is not None]

    def _run(self, *, ahead: bool = True) -> None:
        """Do the work of ``step`` without returning requests. ahead: schedule more steps meanwhile."""
        self._require_open()
        # encoder inputs and images are shared with the next Step, so these models do not run while it is scheduled
        if self._in_flight and self._running is None and self.runner.cross is None and self.runner.images is None:
            inference = torch.is_inference_mode_enabled()
            self._running = self._thread.submit(self._execute_aside, self._in_flight[0], inference)
        try:
            if ahead:
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
        self._drafting.ran(step, self._seconds)
        self._take_in(step, result, self.scheduler.update(result))

    def _execute_aside(self, step: Step, inference: bool) -> StepResult:  # called by submit
        """Run ``step`` in the thread, which has a current device and an inference mode of its own."""
        device = self.loaded.model.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode(inference):
            return self._execute(step)

    def _execute(self, step: Step) -> StepResult:
        began = time.perf_counter()
        result = self.worker.execute(step)
        self._seconds = time.perf_counter() - began
        return result

    def _launch(self, step: Step) -> None:
        """Put ``step`` in flight. It holds its encoder inputs and images: its requests may end before it runs."""
        self._in_flight.append(step)
        for new in step.new_rows:
            if (live := self._live.get(new.request_id)) is not None:
                live.note_start()
        if self.runner.cross is not None:
            self.runner.cross.hold_inputs(step)
        if self.runner.images is not None:
            self.runner.images.launched(step)

    def _land(self) -> None:
        """Remove the oldest Step in flight, which has run or failed."""
        step = self._in_flight.popleft()
        if self.runner.cross is not None:
            self.runner.cross.release_inputs(step)
        if self.runner.images is not None:
            self.runner.images.landed(step)

    def _schedule_ahead(self) -> None:
        while len(self._in_flight) < self.options.in_flight:
            # live requests of a drained scheduler were aborted: the update of an empty Step returns them
            if self.scheduler.drained and (self._in_flight or not self._live):
                return
            if self._in_flight and not self._drafting.may_run_ahead(self.scheduler, self._in_flight):
                return
            self._drafting.propose(self.scheduler, self._live.values())
            step = self.scheduler.schedule()
            self._launch(step)
            if not len(step):
                return

    def _watch(self) -> None:
        """Raise CacheError if nothing runs although requests wait: the loop would never end."""
        comes = self.tier is not None and self.tier.is_awaited
        empty = len(self._in_flight) == 1 and not len(self._in_flight[0]) and not comes
        self._idle = self._idle + 1 if empty else 0
        if self._idle > _IDLE_STEPS:
            self._idle = 0  # the caller may abort requests and continue
            raise CacheError(
                f"{self.scheduler.num_waiting} requests wait and {self.scheduler.num_running} run, but "
                f"{_IDLE_STEPS + 1} steps in a row were empty: abort a request, or plan more memory"
            )

    def _take_in(self, step: Step, result: StepResult, outcome: Outcome) -> None:
        """Record counts and log probabilities of all rows, then their text, which may end them, then completions."""
        ended = {one.request: one for one in outcome.finished}
        grown = count_step(self._live, step, result, outcome)
        undrawn = {request_id: self._undrawn.pop(request_id) for request_id in [*self._undrawn]}
        over, self.runner.over = self.runner.over, set()
        try:
            for live in grown:
                reason = live.add_text(undrawn.get(name := live.request.request_id), over=name in over)
                if reason is None:
                    continue
                if live.request not in ended:
                    self.scheduler.finish(live.request.request_id, reason)
                ended[live.request] = Finished(live.request, reason)
        finally:
            for one in ended.values():
                self._end(one)

    def _end(self, finished: Finished) -> None:
        """Record that a request ended, unless it was dropped meanwhile."""
        request = finished.request
        live = self._live.get(request.request_id)
        if live is None or live.request is not request:
            return
        self._forget(live)
        if self._requests is not None:
            self._requests.ended(request, live.added_s, oldest_s(self._live.values()))
        live.end(finished.reason, finished.error)
        if live.streamed_as is None:
            self._ended.append(live)
