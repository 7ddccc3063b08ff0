"""What one request came to, what of it is new, and what is known of it while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridkv.request import Request
from hybridkv.runner.detokenize import Detokenizer
from hybridkv.runner.logprobs import TokenLogprob
from hybridkv.schedule import FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request.

    token_ids: the output, the stop token or the tokens of the stop string included. text: the output decoded,
    special tokens left out, cut in front of the stop string; None without a tokenizer.
    hit_tokens: prompt tokens found in the cache at its first admission. computed_tokens: all that ran for it,
    recomputation included.
    logprobs: of each output token; prompt_logprobs: of each prompt token but the first, fewer if it was aborted before
    they were computed; None where they were not asked for.
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


@dataclass(frozen=True, slots=True)
class Increment:
    """What is new of one output. All increments of it, one behind the other, are its Completion's tokens and text.

    token_ids: maybe none in the last one. text: whole characters, maybe none, and nothing that may turn out to be a
    stop string; None without a tokenizer. completion: in the last one. output: which of the ``n`` outputs, from 0.
    logprobs: of its tokens; None where they were not asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str | None
    completion: Completion | None = None
    output: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ended; None while it goes on."""
        return None if self.completion is None else self.completion.finish_reason


@dataclass(slots=True, eq=False)
class Progress:
    """A request that runs, or what came of it. detokenizer: None without a tokenizer.

    computed_tokens: run for it so far. streamed: whether somebody reads it through a Cursor.
    completion: once it has ended. logprobs: of its output so far. prompt_logprobs: of its prompt, one list with all
    branches of a request: who computes the prompt is not known before.
    """

    request: Request
    detokenizer: Detokenizer | None
    streamed: bool = False
    computed_tokens: int = 0
    completion: Completion | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def add_prompt_logprobs(self, found: Sequence[tuple[int, TokenLogprob]]) -> None:
        """Values at (position, value), ascending: what a prompt that runs again says once more is left out."""
        for position, value in found:
            if position == len(self.prompt_logprobs) + 1 < self.request.num_prompt_tokens:
                self.prompt_logprobs.append(value)

    def add_logprob(self, found: Sequence[tuple[int, TokenLogprob]]) -> None:
        """That of the token just appended, if it was asked for: the last one, behind those of the prompt."""
        if self.request.sampling.logprobs is not None:
            self.logprobs.append(found[-1][1])

    def complete(self, reason: FinishReason) -> Completion:
        """The request has ended."""
        request = self.request
        tokens = request.token_ids().tolist()
        self.completion = Completion(
            request_id=request.request_id,
            prompt_token_ids=tuple(tokens[: request.num_prompt_tokens]),
            token_ids=tuple(tokens[request.num_prompt_tokens :]),
            text=self.detokenizer.finish() if self.detokenizer is not None else None,
            finish_reason=reason,
            hit_tokens=request.first_hit_tokens or 0,
            computed_tokens=self.computed_tokens,
            preemptions=request.num_preemptions,
            logprobs=None if request.sampling.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if request.sampling.prompt_logprobs is None else tuple(self.prompt_logprobs),
        )
        return self.completion


class Cursor:
    """How far an output has been read. It keeps two counts and nothing of the output itself.

    output  [ read | new: the next increment | still to come ]
    """

    def __init__(self, progress: Progress, output: int = 0) -> None:
        self._progress, self._output = progress, output
        self._tokens = self._characters = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        """The last increment was taken."""
        return self._ended

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
        tokens = request.token_ids(request.num_prompt_tokens + self._tokens).tolist()
        text = self._new_text(done)
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = tuple(self._progress.logprobs[self._tokens : self._tokens + len(tokens)])
        self._tokens += len(tokens)
        self._characters += len(text or "")
        self._ended = done is not None
        return Increment(self.request_id, tuple(tokens), text, done, self._output, logprobs)

    def _new_text(self, done: Completion | None) -> str | None:
        if done is not None:
            return None if done.text is None else done.text[self._characters :]
        decoded = self._progress.detokenizer
        return None if decoded is None else decoded.text[self._characters : decoded.settled_characters]
