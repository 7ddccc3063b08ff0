"""What one request came to, what of it is new, and what is known of it while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridkv.request import Request
from hybridkv.runner.detokenize import Detokenizer
from hybridkv.runner.sampling.logprobs import TokenLogprob, tokens_of
from hybridkv.schedule import FinishReason, Outcome
from hybridkv.step import Step, StepResult


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request.

    token_ids: the output, the stop token or the tokens of the stop string included. text: the output decoded,
    special tokens left out, cut in front of the stop string; None without a tokenizer.
    hit_tokens: prompt tokens found in the cache at its first admission. computed_tokens: all that ran for it,
    recomputation and drafts included. drafted_tokens: drafts that the model verified; accepted_tokens: those that were
    what it draws, what a stop then cut off included.
    logprobs: of each output token; prompt_logprobs: of each prompt token but the first, fewer if it was aborted before
    they were computed; None where they were not asked for. queue_seconds: from its arrival until it first ran, or to
    its end; no part of what is compared.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    hit_tokens: int
    computed_tokens: int
    preemptions: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queue_seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Increment:
    """What is new of one output. All increments of it, one behind the other, are its Completion's tokens and text.

    token_ids: maybe none in the last one. text: whole characters, maybe none, and nothing that may turn out to be a
    stop string; None without a tokenizer. completion: in the last one. output: which of the ``n`` outputs, from 0.
    logprobs: of its tokens; prompt_logprobs: in the first one, as a Completion has them; None where they were not
    asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str | None
    completion: Completion | None = None
    output: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ended; None while it goes on."""
        return None if self.completion is None else self.completion.finish_reason


@dataclass(slots=True, eq=False)
class Progress:
    """A request that runs, or what came of it. detokenizer: None without a tokenizer.

    computed_tokens: run for it so far; drafted_tokens, accepted_tokens: see Completion. streamed: whether somebody
    reads it through a Cursor. completion: once it has ended; error: what ended it instead. logprobs: of its output so
    far. prompt_logprobs: of its prompt, one list with all branches of a request: who computes the prompt
    is not known before.
    """

    request: Request
    detokenizer: Detokenizer | None
    streamed: bool = False
    computed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    completion: Completion | None = None
    error: Exception | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _added: float = field(default_factory=time.monotonic)
    _begun: float | None = None

    def begins(self) -> None:
        """A step with its row is on its way: the first time, or behind a preemption."""
        if self._begun is None:
            self._begun = time.monotonic()

    @property
    def decodes(self) -> bool:
        """Whether it runs, all of its output is known, and only the last token of it is left to compute."""
        request, computed = self.request, self.request.num_computed_tokens
        return request.row >= 0 and computed == request.num_tokens - 1 >= request.num_prompt_tokens

    def ran(self, computed: int, drafted: int, sampled: int) -> None:
        """A step computed so many tokens of it, drafts included, and sampled so many: accepted drafts and one more."""
        self.computed_tokens += computed
        self.drafted_tokens += drafted
        self.accepted_tokens += max(sampled - 1, 0)

    def add_prompt_logprobs(self, found: Sequence[tuple[int, TokenLogprob]]) -> None:
        """Values at (position, value), ascending: what a prompt that runs again says once more is left out."""
        for position, value in found:
            if position == len(self.prompt_logprobs) + 1 < self.request.num_prompt_tokens:
                self.prompt_logprobs.append(value)

    def add_logprobs(self, found: Sequence[tuple[int, TokenLogprob]], appended: int) -> None:
        """Of values at (position, value), ascending, those of the ``appended`` tokens, if they were asked for."""
        if self.request.sampling.logprobs is not None:
            outputs = [value for position, value in found if position >= self.request.num_prompt_tokens]
            self.logprobs += outputs[:appended]

    def add_text(self, undrawn: Exception | None = None) -> FinishReason | None:
        """Decode the tokens that are new; why the output ends here: a stop string, or an error of the tokenizer.

        undrawn: why the last of them could not be drawn, which ends it, too.
        """
        if undrawn is not None and self.error is None:
            undrawn.add_note(f"request {self.request.request_id!r} ended: no token of it could be drawn")
            self.error = undrawn
            return FinishReason.ABORT
        if self.detokenizer is None or self.error is not None:
            return None
        done = self.request.num_prompt_tokens + self.detokenizer.num_tokens
        try:
            stopped = self.detokenizer.add(self.request.token_ids(done).tolist())
        except Exception as error:  # noqa: BLE001  # whatever it is, it ends this request alone
            self._fail(error)
            return FinishReason.ABORT
        return FinishReason.STOP if stopped else None

    def end(self, reason: FinishReason, because: Exception | None = None) -> None:
        """The request has ended: by a completion, or an error, that of its scheduler or of its tokenizer."""
        if because is not None:
            self.error = because
            return
        self.add_text()  # nothing, unless an interrupt came before
        try:
            self.completion = None if self.error is not None else self._completed(reason)
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        error.add_note(f"request {self.request.request_id!r} ended: its output could not be decoded")
        self.error = error

    def _completed(self, reason: FinishReason) -> Completion:
        """What it came to. What was accepted behind a stop string is none of its output.

        A stop string that only what was held back completes is one, too: then that is the reason.
        """
        request = self.request
        text = None if self.detokenizer is None else self.detokenizer.finish()
        tokens = request.token_ids().tolist()
        outputs = tokens[request.num_prompt_tokens :]
        if self.detokenizer is not None and self.detokenizer.stopped:
            outputs = outputs[: self.detokenizer.num_tokens]
            reason = FinishReason.STOP
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=tuple(tokens[: request.num_prompt_tokens]),
            token_ids=tuple(outputs),
            text=text,
            finish_reason=reason,
            hit_tokens=request.first_hit_tokens or 0,
            computed_tokens=self.computed_tokens,
            preemptions=request.num_preemptions,
            logprobs=None if request.sampling.logprobs is None else tuple(self.logprobs[: len(outputs)]),
            prompt_logprobs=None if request.sampling.prompt_logprobs is None else tuple(self.prompt_logprobs),
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            queue_seconds=(time.monotonic() if self._begun is None else self._begun) - self._added,
        )


def count_step(live: Mapping[str, Progress], step: Step, result: StepResult, outcome: Outcome) -> list[Progress]:
    """What ``step`` ran and sampled for those of ``live`` in it, and log probabilities; those that have more tokens."""
    logprobs = tokens_of(result.logprobs, len(step))
    counts, sampled = np.diff(outcome.appended.indptr).tolist(), np.diff(result.sampled.indptr).tolist()
    grown = []
    for row, request in enumerate(outcome.requests):
        one = live.get(request.request_id)
        if one is None or one.request is not request:
            continue  # it ended in an earlier step
        one.ran(int(step.num_scheduled[row]), len(step.drafts[row]), sampled[row])
        one.add_prompt_logprobs(logprobs[row])
        if counts[row]:
            one.add_logprobs(logprobs[row], counts[row])
            grown.append(one)
    return grown


def raise_first(outputs: Iterable[Progress]) -> None:
    """Raise the error of the first of ``outputs`` that has one."""
    for one in outputs:
        if one.error is not None:
            raise one.error


class Cursor:
    """How far an output has been read. It keeps two counts and nothing of the output itself.

    output  [ read | new: the next increment | still to come ]
    """

    def __init__(self, progress: Progress, output: int = 0) -> None:
        self._progress, self._output = progress, output
        self._tokens = self._characters = 0
        self._begun = self._ended = False

    @property
    def ended(self) -> bool:
        """The last increment was taken."""
        return self._ended

    @property
    def error(self) -> Exception | None:
        """What ended the output instead of a completion."""
        return self._progress.error

    @property
    def request_id(self) -> str:
        """Whose output is read."""
        return self._progress.request.request_id

    def take(self) -> Increment | None:
        """Everything that is new; None when nothing is. O(new tokens), and once more the output at its end."""
        done = self._progress.completion
        request = self._progress.request
        if self._ended or (done is None and request.num_output_tokens == self._tokens):
            return None
        if done is None:
            tokens = tuple(request.token_ids(request.num_prompt_tokens + self._tokens).tolist())
        else:
            tokens = done.token_ids[self._tokens :]
        text = self._new_text(done)
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = tuple(self._progress.logprobs[self._tokens : self._tokens + len(tokens)])
        of_prompt = None
        if request.sampling.prompt_logprobs is not None and not self._begun:
            of_prompt = tuple(self._progress.prompt_logprobs)
        self._tokens += len(tokens)
        self._characters += len(text or "")
        self._begun, self._ended = True, done is not None
        return Increment(self.request_id, tokens, text, done, self._output, logprobs, of_prompt)

    def _new_text(self, done: Completion | None) -> str | None:
        if done is not None:
            return None if done.text is None else done.text[self._characters :]
        decoded = self._progress.detokenizer
        return None if decoded is None else decoded.text[self._characters : decoded.settled_characters]
