"""What one request came to, what of it is new, and what is known of it while it runs.

A tokenizer decodes sequences, not tokens: a character may take several, and what one token becomes may depend on those
around it. So a window of the last tokens is decoded, and what is new of its text is shown:

    output  [ ... | context           | tail of the context | pending    ]
                  ^ window begins     ^ it may begin here   ^ read        ^ now

Window, tail and read begin where the decoded text ended in a whole character, never inside one. Pending are the tokens
of a character that is not whole yet: tokenizers write U+FFFD for it, which is held back.

Tokenizers with byte fallback (<0xF0> <0x9F> ...) judge neighbouring bytes as one run: unless all of it is UTF-8, each
byte becomes a U+FFFD, those of whole characters too, so a character that was right becomes wrong while the next one is
not whole. What has been shown stays: of a run that turns out to be no UTF-8, the text keeps the longest beginning that
is, and has one U+FFFD for each byte behind it. Everything else is what ``decode`` makes of the whole output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Final, Self

import numpy as np

from hybridkv.request import Request
from hybridkv.runner.sampling.draws import TokenLogprob, tokens_of
from hybridkv.schedule import FinishReason, Outcome
from hybridkv.step import Step, StepResult

_CONTEXT_TOKENS: Final = 8
_LONG_TOKENS: Final = 24
_CHARACTER_TOKENS: Final = 4
"""The most tokens of one character: UTF-8 has up to 4 bytes."""
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


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


class Detokenizer:
    """The text of one request's output: tokens into text as they come, and the stop strings found on the way.

    tokenizer: has ``decode(ids, skip_special_tokens=)``. stop: strings that end the output, where they end behind the
    text of its first ``min_tokens`` tokens.
    ``text``: what is certain so far; ``finish`` adds what was held back. ``num_tokens``: taken in, up to the one that
    completes a stop string. A token costs one decode of at most _LONG_TOKENS tokens, however long the output; inside
    bytes that are no UTF-8, one of all of them for each whole character.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), min_tokens: int = 0) -> None:  # noqa: ANN401  # transformers' tokenizers share no typed base
        self._tokenizer = tokenizer
        self._stop = tuple(one for one in stop if one)
        self._longest = max((len(one) for one in self._stop), default=0)
        self._min_tokens, self._unstopped = min_tokens, 0  # the latter: characters of the first min_tokens tokens
        self._window: list[int] = []
        self._tail = self._read = 0  # tokens of the window in front of its tail, and of its pending tokens
        self._seen = ""  # what of the window's text is shown
        self.text = ""
        self.num_tokens = 0
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> bool:
        """Take in ``tokens``; True once a stop string is complete: ``text`` then ends in front of it."""
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            self._window.append(token)
            if not self._ends_inside_a_character():
                self._show()
            if self.num_tokens <= self._min_tokens:
                self._unstopped = len(self.text)
        return self.stopped

    @property
    def settled_characters(self) -> int:
        """How many characters of ``text`` no later token takes back: all but what may begin a stop string."""
        known = len(self.text)
        if self.stopped:
            return known
        for start in range(max(0, known - self._longest + 1), known):
            if any(one.startswith(self.text[start:]) for one in self._stop):
                return start
        return known

    def finish(self) -> str:
        """The whole text: what was held back as an unfinished character is shown as it is.

        That may complete a stop string, too: ``stopped`` then says so.
        """
        if not self.stopped:
            self._extend(self._decode(self._window))
        return self.text

    def _ends_inside_a_character(self) -> bool:
        """Whether that is certain without decoding all of a window that is long already."""
        if len(self._window) <= _LONG_TOKENS:
            return False
        return self._decode(self._window[-_CHARACTER_TOKENS:]).endswith(_REPLACEMENT)

    def _show(self) -> None:
        """Show what is certain of the window's text."""
        text = self._decode(self._window)
        if text and text == self._seen:
            del self._window[self._read :]  # such as special tokens: however many come, the window stays short
            return
        certain = text.rstrip(_REPLACEMENT)
        if certain == text:
            self._extend(text)
            self._move_on()
        elif certain.startswith(self._seen):
            self._extend(certain)

    def _extend(self, text: str) -> None:
        """Show ``text``, the window's, behind what is shown of it; look for stop strings there."""
        # else the pending bytes made no UTF-8 of their run, and all of it reads as replacement characters
        new = text[len(self._seen) :] if text.startswith(self._seen) else self._decode(self._window[self._read :])
        self._seen = text
        if new:
            searched_from = max(0, len(self.text) - self._longest + 1)
            self.text += new
            self._cut(searched_from)

    def _move_on(self) -> None:
        """The window's text ends in a whole character, and all of it is shown."""
        self._read = len(self._window)
        if self._read - self._tail < _CONTEXT_TOKENS:
            return
        if self._tail:
            del self._window[: self._tail]
            self._seen = self._decode(self._window)
        self._tail = self._read = len(self._window)

    def _cut(self, start: int) -> None:
        if self.num_tokens <= self._min_tokens:
            return
        behind = self._unstopped + 1  # where the first stop string may end
        found = [at for one in self._stop if (at := self.text.find(one, max(start, behind - len(one)))) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


@dataclass(slots=True, eq=False)
class Progress:
    """A request that runs, or what came of it. tokenizer: None without one.

    computed_tokens: run for it so far; drafted_tokens, accepted_tokens: see Completion. streamed_as: which output of a
    Stream it is; None where nobody reads it so. completion: once it has ended; error: what ended it instead. logprobs:
    of its output so far. prompt_logprobs: of its prompt, one list with all branches of a request: who computes the
    prompt is not known before. read: the last Increment was taken.
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
    _added: float = field(default_factory=time.monotonic)
    _begun: float | None = None

    def __post_init__(self, tokenizer: Any) -> None:  # noqa: ANN401  # transformers' tokenizers share no typed base
        params = self.request.sampling
        if tokenizer is not None:
            self.detokenizer = Detokenizer(tokenizer, params.stop, params.min_tokens)

    def begins(self) -> None:
        """A step with its row is on its way: the first time, or behind a preemption."""
        if self._begun is None:
            self._begun = time.monotonic()

    @property
    def decodes(self) -> bool:
        """Whether it runs, all of its output is known, and only the last token of it is left to compute."""
        request, computed = self.request, self.request.num_computed_tokens
        return request.row >= 0 and computed == request.num_tokens - 1 >= request.num_prompt_tokens

    def count(
        self, computed: int, drafted: int, sampled: int, appended: int, found: Sequence[tuple[int, TokenLogprob]]
    ) -> None:
        """A step computed so many tokens of it, drafts included, and sampled so many: accepted drafts and one more.

        appended: of these. found: log probabilities at (position, value), ascending: what a prompt that runs again says
        once more is left out.
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

    def take(self) -> Increment | None:
        """Everything that is new; None when nothing is. O(new tokens), and once more the output at its end.

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
    """What ``step`` ran and sampled for those of ``live`` in it, and log probabilities; those that have more tokens."""
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


def raise_first(outputs: Iterable[Progress]) -> None:
    """Raise the error of the first of ``outputs`` that has one."""
    for one in outputs:
        if one.error is not None:
            raise one.error


class Stream(Iterator[Increment]):
    """Increments of a request's output; with ``n`` outputs, of all of them, told apart by ``output``.

    A stream keeps no increments: an output knows how far it was read, and an increment is everything behind that. So a
    slow reader costs no memory beyond the output itself (at most ``max_tokens``), and finds all that is new in one
    piece. The engine runs only while somebody asks for what is not there yet: ``next`` drives it, for all requests at
    once, until its own has something new. Nothing runs ahead of every reader.

    outputs: of one request. run: runs one step of the engine. abort: ends a request by its id.
    A reader that is done early calls ``close`` (or leaves a ``with``): else the request goes on with the others.
    """

    def __init__(self, outputs: Sequence[Progress], run: Callable[[], None], abort: Callable[[str], bool]) -> None:
        self._outputs = list(outputs)
        self._run, self._abort = run, abort
        self.request_id = outputs[0].request.request_id

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return not self._outputs

    def __next__(self) -> Increment:
        """The next increment, run for if need be. An error of the forward passes through as from ``Engine.step``.

        Raises as ``take``, and CacheError once the engine is closed.
        """
        while not self.ended:
            if (new := self.take()) is not None:
                return new
            self._run()
        raise StopIteration

    def take(self) -> Increment | None:
        """An increment if one is there; nothing is run. O(outputs).

        Raises what ended an output, such as an error of the tokenizer; other outputs can be read on.
        """
        for place, output in enumerate(self._outputs):
            if output.error is not None:
                del self._outputs[place]
                raise output.error
            if (new := output.take()) is not None:
                # outputs take turns
                turned = self._outputs[place + 1 :] + self._outputs[: place + 1]
                self._outputs = [one for one in turned if not one.read]
                return new
        return None

    def close(self) -> None:
        """Read no further; outputs that are not finished are aborted."""
        for output in self._outputs:
            self._abort(output.request.request_id)
        self._outputs = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
