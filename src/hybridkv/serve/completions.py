"""/v1/completions: text behind prompts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NotRequired

from starlette.requests import Request
from typing_extensions import TypedDict

from hybridkv.errors import ConfigError
from hybridkv.runner.completion import Completion, Increment
from hybridkv.serve.bodies import CompletionBody, StreamOptions
from hybridkv.serve.counts import Counter, Usage
from hybridkv.serve.front import Front
from hybridkv.serve.generation import Asked, Event, Part
from hybridkv.serve.logprobs import Columns, ColumnWriter, joined
from hybridkv.serve.tokens import TokenTexts

DEFAULT_MAX_TOKENS: Final = 16
DONE: Final = Event("[DONE]")


class CompletionChoice(TypedDict):
    """An output, or what is new of it. token_ids: where return_token_ids asks."""

    index: int
    text: str
    logprobs: Columns | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionAnswer(TypedDict):
    """All outputs, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


async def ask(front: Front, body: CompletionBody, request: Request) -> Asked:
    """Return what ``body`` asks an engine for.

    Raises ApiError and ConfigError if it cannot be served, and ClientGoneError if the client of ``request`` leaves.
    """
    front.require_model(body.model)
    salt = front.salt(request, body.cache_salt)
    if not body.return_token_ids:
        front.require_text()
    front.places.require(len(body.prompts) * (body.n or 1))
    prompts = await front.tokens.ids(request, body.prompts)
    asked = body.max_tokens
    if asked == 0:
        if not body.echo:
            raise ConfigError("max_tokens 0 asks for nothing: give echo, or max_tokens of at least 1")
        asked = 1  # is what the engine wants; nobody hears of it
    sampling = body.sampling(
        front.most_tokens(prompts, asked, DEFAULT_MAX_TOKENS),
        n=body.n,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return Asked(f"cmpl-{uuid.uuid4().hex}", prompts, sampling, salt, body.said_hints)


def says_nothing(new: Increment, choice: Mapping[str, object]) -> bool:
    """Whether ``choice`` of a chunk would hold nothing that is ``new``."""
    told = choice["finish_reason"] or choice["logprobs"] or "token_ids" in choice
    return not (new.text or told)


class CompletionForm:
    """Outputs as /v1/completions tells them: of one answer."""

    def __init__(self, front: Front, body: CompletionBody, asked: Asked) -> None:
        self._front, self._body, self._asked = front, body, asked
        self._counter = Counter(sum(map(len, asked.prompts)))
        self._stream = body.stream_options or StreamOptions()
        self._texts = TokenTexts(front.loaded.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._writers: dict[int, ColumnWriter] = {}
        self._prompt_alone = body.max_tokens == 0
        self._created = int(time.time())

    def begin(self) -> Iterable[Event]:
        """Nothing comes first."""
        return ()

    def part(self, part: Part) -> Iterable[Event]:
        """A chunk of whatever is new of an output; none of a part of a character alone."""
        choice = self._choice(part.choice, part.increment, part.increment.completion)
        if not choice["text"] and says_nothing(part.increment, choice):
            return
        chunk = self._answer([choice])
        if self._stream.continuous_usage_stats:
            chunk["usage"] = self._counter.usage()
        elif self._stream.include_usage:
            chunk["usage"] = None
        yield Event(chunk)

    def end(self) -> Iterable[Event]:
        """The counts, where they are asked for; then that it is over."""
        if self._stream.include_usage:
            yield Event(self._answer([]) | {"usage": self._counter.usage()})
        yield DONE

    def whole(self, done: Sequence[Completion]) -> CompletionAnswer:
        """All outputs at once."""
        answer = self._answer([self._choice(number, one, one) for number, one in enumerate(done)])
        answer["usage"] = self._counter.usage()
        return answer

    def _answer(self, choices: list[CompletionChoice]) -> CompletionAnswer:
        return {
            "id": self._asked.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._front.name,
            "choices": choices,
        }

    def _choice(self, number: int, new: Increment | Completion, done: Completion | None) -> CompletionChoice:
        """What ``new`` says of an output; the first time with its prompt, where that is wanted."""
        place, output = divmod(number, self._asked.sampling.n)
        prompt, first = self._asked.prompts[place], number not in self._writers
        tokens = () if self._prompt_alone else new.token_ids
        self._counter.add(len(tokens))
        if done is not None:
            self._counter.ended(done, output)
        text = "" if self._prompt_alone else new.text or ""
        echoed = self._prompt_text(place) if first and self._body.echo else ""
        made: CompletionChoice = {
            "index": number,
            "text": echoed + text,
            "logprobs": self._columns(number, prompt, new),
            "finish_reason": None if done is None else str(done.finish_reason),
        }
        if self._body.return_token_ids:
            made["token_ids"] = list(tokens)
            if first:
                made["prompt_token_ids"] = list(prompt)
        return made

    def _columns(self, number: int, prompt: Sequence[int], new: Increment | Completion) -> Columns | None:
        first = number not in self._writers
        if first:
            self._writers[number] = ColumnWriter(self._texts, prompt[-1])
        if new.logprobs is None:
            return None
        writer = self._writers[number]
        values = () if self._prompt_alone else new.logprobs
        if not first or new.prompt_logprobs is None:
            return writer.output(values)
        return joined(writer.prompt(prompt, new.prompt_logprobs), writer.output(values))

    def _prompt_text(self, place: int) -> str:
        """As it was given, or what its ids say."""
        given = self._body.prompts[place]
        if isinstance(given, str):
            return given
        tokenizer = self._front.loaded.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(given, skip_special_tokens=False))
