"""The results of requests: completions, increments of their text and tokens, and the progress of running requests.

A tokenizer decodes sequences, not single tokens: a character may need several tokens, and the text of one token may
depend on its neighbours. A Detokenizer therefore decodes a window of the last tokens and shows the new part of its
text:

    output  [ ... | context           | context of the next window | pending    ]
                  ^ window begins     ^ _next_window               ^ _read      ^ newest token

Window, next window and ``_read`` all begin where the decoded text ended in a whole character. Pending tokens belong to
an unfinished character: tokenizers decode them to U+FFFD, which is held back.

Tokenizers with byte fallback (<0xF0> <0x9F> ...) decode neighbouring byte tokens as one run. Unless the whole run is
UTF-8, each of its bytes becomes a U+FFFD. So an unfinished character also spoils the whole characters before it, until
it is complete. Text that was shown stays. If a run turns out not to be UTF-8, the text keeps its longest valid
beginning and has one U+FFFD for each later byte. All other text equals ``decode`` of the whole output.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Final, Self

import numpy as np

from hybridkv.errors import CacheError
from hybridkv.request import Request, SamplingParams
from hybridkv.runner.sampling.draws import TokenLogprob, tokens_of
from hybridkv.runner.sampling.structured import Grammar
from hybridkv.schedule import FinishReason, Outcome
from hybridkv.step import Step, StepResult

_CONTEXT_TOKENS: Final = 8  # chosen by hand: more than the neighbours that a tokenizer's decoder looks at
_LONG_TOKENS: Final = 24  # chosen by hand: from here on a window is not decoded for each byte of a character
_CHARACTER_TOKENS: Final = 4
"""The most tokens of one character: UTF-8 has up to 4 bytes."""
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request.

    Attributes:
        request_id: its id; output i > 0 of a request with ``n`` outputs has an id of its own.
        prompt_token_ids: the prompt.
        token_ids: the output, including the stop token or the tokens of the stop string.
        text: the decoded output without special tokens, unless they are asked for, cut before the stop string; None
            without a tokenizer.
        finish_reason: why the output ended.
        hit_tokens: prompt tokens found in the cache at the first admission.
        computed_tokens: all tokens that ran for it, including recomputed ones and drafts.
        preemptions: how often it lost its blocks and started again.
        logprobs: for each output token, if requested.
        prompt_logprobs: for each prompt token but the first, if requested; fewer if it was aborted before.
        drafted_tokens: drafts that the model verified.
        accepted_tokens: drafts equal to the token that the model drew, including those that a stop then cut off.
        queue_seconds: from its arrival until it first ran, or to its end; ignored by comparisons.
        pooled: the pooled hidden states of its prompt, if a server embeds it.
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
    pooled: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Increment:
    """The new part of one output. All increments of an output together are its Completion's tokens and text.

    Attributes:
        request_id: of the output's request.
        token_ids: new tokens; the last increment may have no token.
        text: new whole characters, maybe "". Text that may become a stop string is held back. None without a tokenizer.
        completion: the finished request, in the last increment alone.
        output: number of the output among the ``n`` of the request, from 0.
        logprobs: of ``token_ids``, if requested.
        prompt_logprobs: as in Completion, if requested; in the first increment alone.
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
        """Why the output ended; None while it continues."""
        return None if self.completion is None else self.completion.finish_reason


class Detokenizer:
    """The text of one request's output, built token by token, and the search for stop strings in it.

    A token costs one decode of at most _LONG_TOKENS tokens, however long the output is. Inside bytes that are not
    UTF-8, each whole character costs one decode of the whole run.

    Attributes:
        text: the text that is certain so far; ``finish`` adds the text that was held back.
        num_tokens: tokens added, up to the one that completes a stop string.
        stopped: whether a stop string is complete.

    Args:
        tokenizer: has ``decode(ids, skip_special_tokens=)``.
        stop: strings that end the output, if they end after the text of its first ``min_tokens`` tokens.
        min_tokens: output tokens before a stop string counts.
        hidden: tokens that are not part of the text; None for all special tokens.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401  # transformers' tokenizers share no typed base
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        hidden: Sequence[int] | None = None,
    ) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._stop = tuple(one for one in stop if one)
        self._longest = max((len(one) for one in self._stop), default=0)
        self._min_tokens, self._unstopped = min_tokens, 0  # _unstopped: characters of the first min_tokens tokens
        self._window: list[int] = []
        self._next_window = self._read = 0  # indices into the window
        self._seen = ""  # the part of the window's text that is shown
        self.text = ""
        self.num_tokens = 0
        self.stopped = False

    @classmethod
    def of(cls, tokenizer: Any, params: SamplingParams, eos_token_ids: Sequence[int]) -> Self:  # noqa: ANN401  # same
        """Return that of an output with ``params``, of a model whose end tokens are never text."""
        hidden = None if params.skip_special_tokens else eos_token_ids
        return cls(tokenizer, params.stop, params.min_tokens, hidden)

    def add(self, tokens: Sequence[int]) -> bool:
        """Take in ``tokens``. Return whether a stop string is complete: ``text`` then ends before it."""
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            if self._hidden is None or token not in self._hidden:
                self._window.append(token)
            if not self._ends_inside_a_character():
                self._show()
            if self.num_tokens <= self._min_tokens:
                self._unstopped = len(self.text)
        return self.stopped

    @property
    def settled_characters(self) -> int:
        """Characters of ``text`` that no later token changes: all but a possible beginning of a stop string."""
        known = len(self.text)
        if self.stopped:
            return known
        for start in range(max(0, known - self._longest + 1), known):
            if any(one.startswith(self.text[start:]) for one in self._stop):
                return start
        return known

    def finish(self) -> str:
        """Return the whole text, with an unfinished character as U+FFFD. That may complete a stop string."""
        if not self.stopped:
            self._extend(self._decode(self._window))
        return self.text

    def _ends_inside_a_character(self) -> bool:
        """Return whether a long window certainly ends inside a character. Only its last tokens are decoded."""
        if len(self._window) <= _LONG_TOKENS:
            return False
        return self._decode(self._window[-_CHARACTER_TOKENS:]).endswith(_REPLACEMENT)

    def _show(self) -> None:
        """Show the certain part of the window's text."""
        text = self._decode(self._window)
        if text and text == self._seen:
            del self._window[self._read :]  # tokens without text, such as special ones, must not make the window grow
            return
        certain = text.rstrip(_REPLACEMENT)
        if certain == text:
            self._extend(text)
            self._move_on()
        elif certain.startswith(self._seen):
            self._extend(certain)

    def _extend(self, text: str) -> None:
        """Show the new part of ``text``, the window's text so far, and look for stop strings in it."""
        # if the pending bytes make their run invalid UTF-8, all of the run decodes to replacement characters
        new = text[len(self._seen) :] if text.startswith(self._seen) else self._decode(self._window[self._read :])
        self._seen = text
        if new:
            searched_from = max(0, len(self.text) - self._longest + 1)
            self.text += new
            self._cut(searched_from)

    def _move_on(self) -> None:
        """Begin new pending tokens: the text of the window is shown and ends in a whole character."""
        self._read = len(self._window)
        if self._read - self._next_window < _CONTEXT_TOKENS:
            return
        if self._next_window:
            del self._window[: self._next_window]
            self._seen = self._decode(self._window)
        self._next_window = self._read = len(self._window)

    def _cut(self, start: int) -> None:
        if self.num_tokens <= self._min_tokens:
            return
        first_end = self._unstopped + 1  # the first index where a stop string may end
        found = [at for one in self._stop if (at := self.text.find(one, max(start, first_end - len(one)))) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._hidden is None)
        return text


@dataclass(slots=True, eq=False)
class Progress:
    """A running request, or its result.

    Attributes:
        request: the request.
        tokenizer: decodes its output; None without one.
        streamed_as: number of the output in its Stream; None for an output that no Stream reads.
        computed_tokens: tokens that ran for it so far.
        drafted_tokens, accepted_tokens: as in Completion.
        completion: the result, once it has ended.
        error: the error that ended it instead.
        logprobs: of the output so far.
        prompt_logprobs: of the prompt. All branches of a request share the list: any of them may compute the prompt.
        read: whether the last Increment was taken.
        added_s: when it was added, on the clock of ``time.monotonic``.
        grammar: of its structured output, which stays compiled while it is referred to; None without one.
    """

    request: Request
    tokenizer: InitVar[Any]
    streamed_as: int | None = None
    computed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    completion: Completion | None = None
    error: Exception | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    detokenizer: Detokenizer | None = field(default=None, init=False)
    read: bool = False
    _read_tokens: int = 0
    _read_characters: int = 0
    _begun_to_read: bool = False
    added_s: float = field(default_factory=time.monotonic)
    grammar: Grammar | None = None
    _begun: float | None = None

    def __post_init__(self, tokenizer: Any) -> None:  # noqa: ANN401  # transformers' tokenizers share no typed base
        if tokenizer is not None:
            self.detokenizer = Detokenizer.of(tokenizer, self.request.sampling, self.request.eos_token_ids)

    def note_start(self) -> None:
        """Note that a step with this request was scheduled, for the first time or after a preemption."""
        if self._begun is None:
            self._begun = time.monotonic()

    @property
    def decodes(self) -> bool:
        """Whether it runs, its whole output is known, and only the last token of it is left to compute."""
        request, computed = self.request, self.request.num_computed_tokens
        return request.row >= 0 and computed == request.num_tokens - 1 >= request.num_prompt_tokens

    def count(
        self, computed: int, drafted: int, sampled: int, appended: int, found: Sequence[tuple[int, TokenLogprob]]
    ) -> None:
        """Count one step of this request.

        Args:
            computed: tokens that ran, including drafts.
            drafted: drafts among them.
            sampled: tokens that were drawn: the accepted drafts and one more.
            appended: sampled tokens that were appended to the output.
            found: (position, log probability), ascending. Values of a prompt that runs again are dropped.
        """
        self.computed_tokens += computed
        self.drafted_tokens += drafted
        self.accepted_tokens += max(sampled - 1, 0)
        prompt = self.request.num_prompt_tokens
        for position, value in found:
            if position == len(self.prompt_logprobs) + 1 < prompt:
                self.prompt_logprobs.append(value)
        if self.request.sampling.logprobs is not None:
            self.logprobs += [value for position, value in found if position >= prompt][:appended]

    def add_text(self, undrawn: Exception | None = None, *, over: bool = False) -> FinishReason | None:
        """Decode the new tokens. Return the finish reason if a stop string or an error ends the output here.

        ``undrawn`` is the error that kept the newest token from being drawn; it ends the output, too. So does the end
        of a structured output, ``over``.
        """
        if undrawn is not None and self.error is None:
            undrawn.add_note(f"request {self.request.request_id!r} ended: its next token could not be drawn")
            self.error = undrawn
            return FinishReason.ABORT
        if self.error is not None:
            return None
        if self.detokenizer is None:
            return FinishReason.STOP if over else None
        done = self.request.num_prompt_tokens + self.detokenizer.num_tokens
        try:
            stopped = self.detokenizer.add(self.request.token_ids(done).tolist())
        except Exception as error:  # noqa: BLE001  # any error of a tokenizer ends this request alone
            self._fail(error)
            return FinishReason.ABORT
        return FinishReason.STOP if stopped or over else None

    def end(self, reason: FinishReason, because: Exception | None = None) -> None:
        """Record the end of the request: its completion, or ``because``, the error of the scheduler that ended it."""
        if because is not None:
            self.error = because
            return
        self.add_text()  # decodes tokens only if an interrupt prevented it before
        try:
            self.completion = None if self.error is not None else self._completed(reason)
        except Exception as error:  # noqa: BLE001  # any error of a tokenizer
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        error.add_note(f"request {self.request.request_id!r} ended: its output could not be decoded")
        self.error = error

    def _completed(self, reason: FinishReason) -> Completion:
        """Return the completion. Tokens accepted after a stop string are dropped.

        Text that was held back may complete a stop string: the finish reason is then STOP.
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
            hit_tokens=min(request.first_hit_tokens or 0, request.num_prompt_tokens),  # a hit may reach into the output
            computed_tokens=self.computed_tokens,
            preemptions=request.num_preemptions,
            logprobs=None if request.sampling.logprobs is None else tuple(self.logprobs[: len(outputs)]),
            prompt_logprobs=None if request.sampling.prompt_logprobs is None else tuple(self.prompt_logprobs),
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            queue_seconds=(time.monotonic() if self._begun is None else self._begun) - self.added_s,
        )

    def take(self) -> Increment | None:
        """Return the next increment, or None without new output. O(new tokens), and O(output) at its end.

        output  [ read | new: the next increment | still to come ]
        """
        done, request = self.completion, self.request
        if self.read or (done is None and request.num_output_tokens == self._read_tokens):
            return None
        if done is None:
            tokens = tuple(request.token_ids(request.num_prompt_tokens + self._read_tokens).tolist())
            known = self.detokenizer
            new = None if known is None else known.text[self._read_characters : known.settled_characters]
        else:
            tokens = done.token_ids[self._read_tokens :]
            new = None if done.text is None else done.text[self._read_characters :]
        logprobs = of_prompt = None
        if request.sampling.logprobs is not None:
            logprobs = tuple(self.logprobs[self._read_tokens : self._read_tokens + len(tokens)])
        if request.sampling.prompt_logprobs is not None and not self._begun_to_read:
            of_prompt = tuple(self.prompt_logprobs)
        self._read_tokens += len(tokens)
        self._read_characters += len(new or "")
        self._begun_to_read, self.read = True, done is not None
        return Increment(request.request_id, tokens, new, done, self.streamed_as or 0, logprobs, of_prompt)


def count_step(live: Mapping[str, Progress], step: Step, result: StepResult, outcome: Outcome) -> list[Progress]:
    """Count the tokens that ``step`` ran and drew for its ``live`` requests; return the requests with new tokens."""
    logprobs = tokens_of(result.logprobs, len(step))
    counts, sampled = np.diff(outcome.appended.indptr).tolist(), np.diff(result.sampled.indptr).tolist()
    grown = []
    for row, request in enumerate(outcome.requests):
        one = live.get(request.request_id)
        if one is None or one.request is not request:
            continue  # it ended in an earlier step
        one.count(int(step.num_scheduled[row]), len(step.drafts[row]), sampled[row], counts[row], logprobs[row])
        if counts[row]:
            grown.append(one)
    return grown


def oldest_s(live: Iterable[Progress]) -> float:
    """Return when the oldest of ``live`` was added; infinite without any. O(live)."""
    return min((one.added_s for one in live), default=math.inf)


def engine_closed() -> CacheError:
    """Return the error that a closed engine raises."""
    return CacheError("the engine was closed: make another one")


def raise_first(outputs: Iterable[Progress]) -> None:
    """Raise the first error among ``outputs``."""
    for one in outputs:
        if one.error is not None:
            raise one.error


class Stream(Iterator[Increment]):
    """Iterates over the increments of a request's output. With ``n`` outputs, ``Increment.output`` tells them apart.

    A stream stores no increments. Each output knows its last read position, and an increment holds everything after it.
    A slow reader therefore costs no memory beyond the output itself (at most ``max_tokens``), and gets all new output
    at once. The engine runs only while a reader asks for output that does not exist yet: ``next`` runs steps for all
    requests until its own has new output.

    A reader that leaves early must call ``close`` (or leave the ``with`` block); else the request runs to its end.

    Args:
        outputs: the outputs of one request.
        run: runs one step of the engine.
        abort: ends a request by its id.
    """

    def __init__(self, outputs: Sequence[Progress], run: Callable[[], None], abort: Callable[[str], bool]) -> None:
        self._outputs = list(outputs)
        self._run, self._abort = run, abort
        self.request_id = outputs[0].request.request_id

    def as_ids(self) -> Self:
        """Leave the text to the reader, before the first step: only outputs with stop strings are decoded."""
        for one in self._outputs:
            if not one.request.sampling.stop:
                one.detokenizer = None
        return self

    @property
    def ended(self) -> bool:
        """Whether everything was read and nothing more will come."""
        return not self._outputs

    def __next__(self) -> Increment:
        """Return the next increment; run steps until there is one. Raises as ``take`` and ``Engine.step``."""
        while not self.ended:
            if (new := self.take()) is not None:
                return new
            self._run()
        raise StopIteration

    def take(self) -> Increment | None:
        """Return an increment if there is one; no step runs. O(outputs).

        Raises:
            Exception: the error that ended an output, such as one of the tokenizer. The other outputs can still be
                read.
        """
        for place, output in enumerate(self._outputs):
            if output.error is not None:
                del self._outputs[place]
                raise output.error
            if (new := output.take()) is not None:
                # take turns: the next call looks at the other outputs first
                turned = self._outputs[place + 1 :] + self._outputs[: place + 1]
                self._outputs = [one for one in turned if not one.read]
                return new
        return None

    def close(self) -> None:
        """Stop reading, and abort the outputs that are not finished."""
        for output in self._outputs:
            self._abort(output.request.request_id)
        self._outputs = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
