"""/v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Literal, NotRequired

from starlette.requests import Request
from typing_extensions import TypedDict

from hybridkv.runner.completion import Completion, Increment
from hybridkv.serve.bodies import ChatBody, StreamOptions
from hybridkv.serve.completions import DONE, says_nothing
from hybridkv.serve.counts import Counter, Usage
from hybridkv.serve.front import Front
from hybridkv.serve.generation import Asked, Event, Part
from hybridkv.serve.logprobs import ChatLogprobs, RecordWriter
from hybridkv.serve.tokens import TokenTexts


class Message(TypedDict):
    """The assistant's turn; calls of tools are text of it."""

    role: Literal["assistant"]
    content: str
    refusal: None


class Delta(TypedDict, total=False):
    """What is new of a turn."""

    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    """An output. token_ids: where return_token_ids asks."""

    index: int
    message: NotRequired[Message]
    delta: NotRequired[Delta]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]


class ChatAnswer(TypedDict):
    """All outputs, or a chunk of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


async def ask(front: Front, body: ChatBody, request: Request) -> Asked:
    """Return what ``body`` asks an engine for.

    Raises ApiError and ConfigError if it cannot be served, and ClientGoneError if the client of ``request`` leaves.
    """
    front.require_model(body.model)
    salt = front.salt(request, body.cache_salt)
    prompts = [await front.tokens.conversation(request, body.messages, body)]
    sampling = body.sampling(
        front.most_tokens(prompts, body.most_tokens),
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return Asked(f"chatcmpl-{uuid.uuid4().hex}", prompts, sampling, salt, body.said_hints)


class ChatForm:
    """Outputs as /v1/chat/completions tells them: of one answer."""

    def __init__(self, front: Front, body: ChatBody, asked: Asked) -> None:
        self._front, self._body, self._asked = front, body, asked
        self._counter = Counter(sum(map(len, asked.prompts)))
        self._stream = body.stream_options or StreamOptions()
        texts = TokenTexts(front.loaded.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        last = asked.prompts[0][-1]
        self._writers = [RecordWriter(texts, last) for _ in range(asked.sampling.n)]
        self._created = int(time.time())

    def begin(self) -> Iterable[Event]:
        """Whose turn it is, of every output."""
        for number in range(self._asked.sampling.n):
            delta: Delta = {"role": "assistant", "content": ""}
            chunk = self._chunk({"index": number, "delta": delta, "logprobs": None, "finish_reason": None})
            if self._body.return_token_ids:
                chunk["prompt_token_ids"] = list(self._asked.prompts[0])
            yield Event(chunk)

    def part(self, part: Part) -> Iterable[Event]:
        """A chunk of whatever is new of an output; none of a part of a character alone."""
        choice = self._choice(part.choice, part.increment, part.increment.completion)
        if says_nothing(part.increment, choice):
            return
        choice["delta"] = {"content": part.increment.text} if part.increment.text else {}
        yield Event(self._chunk(choice))

    def end(self) -> Iterable[Event]:
        """The counts, where they are asked for; then that it is over."""
        if self._stream.include_usage:
            yield Event(self._answer("chat.completion.chunk", []) | {"usage": self._counter.usage()})
        yield DONE

    def whole(self, done: Sequence[Completion]) -> ChatAnswer:
        """All outputs at once."""
        choices = []
        for number, one in enumerate(done):
            choice = self._choice(number, one, one)
            choice["message"] = {"role": "assistant", "content": one.text or "", "refusal": None}
            choices.append(choice)
        answer = self._answer("chat.completion", choices)
        answer["usage"] = self._counter.usage()
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(self._asked.prompts[0])
        return answer

    def _chunk(self, choice: ChatChoice) -> ChatAnswer:
        chunk = self._answer("chat.completion.chunk", [choice])
        if self._stream.continuous_usage_stats:
            chunk["usage"] = self._counter.usage()
        elif self._stream.include_usage:
            chunk["usage"] = None
        return chunk

    def _answer(
        self, kind: Literal["chat.completion", "chat.completion.chunk"], choices: list[ChatChoice]
    ) -> ChatAnswer:
        return {
            "id": self._asked.id,
            "object": kind,
            "created": self._created,
            "model": self._front.name,
            "choices": choices,
        }

    def _choice(self, number: int, new: Increment | Completion, done: Completion | None) -> ChatChoice:
        """What ``new`` says of an output, but for its text."""
        self._counter.add(len(new.token_ids))
        if done is not None:
            self._counter.ended(done, number)
        made: ChatChoice = {
            "index": number,
            "logprobs": None if new.logprobs is None else self._writers[number].output(new.logprobs),
            "finish_reason": None if done is None else str(done.finish_reason),
        }
        if self._body.return_token_ids:
            made["token_ids"] = list(new.token_ids)
        return made
