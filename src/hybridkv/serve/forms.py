"""The formats of /v1/completions, /v1/chat/completions and /v1/responses: bodies to requests, outputs to answers.

Responses have text input and output: one turn of a conversation, which is not stored. Their streams are

    response.created, .in_progress, output_item.added, content_part.added
    output_text.delta ...
    output_text.done, content_part.done, output_item.done, response.completed or .incomplete
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NotRequired

from starlette.requests import Request
from typing_extensions import TypedDict

from hybridkv.errors import ConfigError
from hybridkv.runner.completion import Completion, Increment
from hybridkv.runner.sampling.draws import TokenLogprob
from hybridkv.schedule import FinishReason
from hybridkv.serve.answers import AnswerParser, Call, Part
from hybridkv.serve.bodies import ChatBody, ChoicesBody, CompletionBody, ResponseBody, StreamOptions, TemplateBody
from hybridkv.serve.formats import OBJECTS, Formats, ReasoningFormat
from hybridkv.serve.front import Front, TokenTexts
from hybridkv.serve.generation import Asked, event

DEFAULT_MAX_TOKENS: Final = 16
_MOST_MARK_TOKENS: Final = 64
"""Tokens at the end of a prompt that hold any mark, and white space after it."""
LEAST: Final = -9999.0
"""The log probability of an impossible token: JSON has no infinity."""
DONE: Final = event("[DONE]")


async def ask_completion(front: Front, body: CompletionBody, request: Request) -> Asked:
    """Return the requests for ``body``.

    Raises ApiError and ConfigError if it cannot be served, and ClientGoneError if the client of ``request``
    disconnects.
    """
    salt = front.salt(request, body)
    if not body.return_token_ids:
        front.require_text()
    front.places.require(len(body.prompts) * (body.n or 1))
    prompts = await front.tokens.ids(request, body.prompts)
    asked = body.max_tokens
    if asked == 0:
        if not body.echo:
            raise ConfigError("max_tokens 0 asks for nothing: set echo, or max_tokens of at least 1")
        asked = 1  # the engine needs at least one; it is not sent to the client
    sampling = body.sampling(
        front.most_tokens(prompts, asked, DEFAULT_MAX_TOKENS),
        n=body.n,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    await front.compile(request, sampling.structured)
    return Asked(f"cmpl-{uuid.uuid4().hex}", prompts, sampling, salt, body.said_hints)


async def ask_chat(front: Front, body: ChatBody, request: Request) -> Asked:
    """Return the request for ``body``. Raises as ``ask_completion``."""
    salt = front.salt(request, body)
    if body.may_call and front.formats.calls is None:
        raise ConfigError(
            f"how {front.name} writes calls is not known: start the server with --tool-call-parser, or set tool_choice "
            "to a function, required or none"
        )
    prompts = [await front.tokens.conversation(request, body.messages, body)]
    sampling = body.sampling(
        front.most_tokens(prompts, body.most_tokens),
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **_marks_shown(_formats(front, body)),
    )
    await front.compile(request, sampling.structured)
    return Asked(f"chatcmpl-{uuid.uuid4().hex}", prompts, sampling, salt, body.said_hints)


async def ask_response(front: Front, body: ResponseBody, request: Request) -> Asked:
    """Return the request for ``body``. Raises as ``ask_completion``."""
    salt = front.salt(request, body)
    prompts = [await front.tokens.conversation(request, body.messages, TemplateBody())]
    sampling = body.sampling(front.most_tokens(prompts, body.max_output_tokens))
    await front.compile(request, sampling.structured)
    return Asked(f"resp_{uuid.uuid4().hex}", prompts, sampling, salt, body.said_hints)


def _formats(front: Front, body: ChatBody) -> Formats:
    """Return the formats in which the answer to ``body`` is read."""
    if body.structured is not None:  # no mark can be in the output
        return Formats(OBJECTS if body.tool_choice == "required" else None, None)
    return Formats(front.formats.calls if body.may_call else None, front.formats.reasoning)


def _marks_shown(formats: Formats) -> dict[str, bool]:
    """Return the sampling for text with the marks of ``formats``, which may be special tokens."""
    return {} if formats.calls in (None, OBJECTS) and formats.reasoning is None else {"skip_special_tokens": False}


# log probabilities: columns for completions, a record a token for chats


class Columns(TypedDict):
    """Log probabilities of a completion: for each token its text, its own, the most probable tokens', its text offset.

    The first token of a prompt has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Named(TypedDict):
    """A token: its text, its log probability, and the bytes of its text if they are whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class Record(Named):
    """An output token of a chat, and the most probable tokens in its place."""

    top_logprobs: list[Named]


class ChatLogprobs(TypedDict):
    """The log probabilities of an output of a chat."""

    content: list[Record]
    refusal: None


class ColumnWriter:
    """Writes the log probabilities of one output of a completion as it grows; ``before``: the prompt's last token."""

    def __init__(self, texts: TokenTexts, before: int | None) -> None:
        self._texts, self._before, self._offset = texts, before, 0

    def prompt(self, ids: Sequence[int], values: Sequence[TokenLogprob], output: Sequence[TokenLogprob]) -> Columns:
        """Return the columns of an echoed prompt and its output; ``values`` are of all prompt tokens but the first."""
        first = self._texts.text(ids[0], None)
        self._before, self._offset = ids[0], len(first)
        made: Columns = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        return self._extended(made, [*values, *output])

    def output(self, values: Sequence[TokenLogprob]) -> Columns:
        """Return the columns of the next tokens."""
        return self._extended({"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}, values)

    def _extended(self, made: Columns, values: Sequence[TokenLogprob]) -> Columns:
        for one in values:
            shown, value = self._texts.text(one.token_id, self._before), max(one.logprob, LEAST)
            best: dict[str, float] = {}
            for token, its in one.best:  # of tokens of one text the most probable is shown
                best.setdefault(self._texts.text(token, self._before), max(its, LEAST))
            best.setdefault(shown, value)
            made["tokens"].append(shown)
            made["token_logprobs"].append(value)
            made["top_logprobs"].append(best)
            made["text_offset"].append(self._offset)
            self._before, self._offset = one.token_id, self._offset + len(shown)
        return made


class RecordWriter:
    """Writes the log probabilities of one output of a chat as it grows; ``before`` is the last token of the prompt."""

    def __init__(self, texts: TokenTexts, before: int | None) -> None:
        self._texts, self._before = texts, before

    def output(self, values: Sequence[TokenLogprob]) -> ChatLogprobs:
        """Return the records of the next tokens."""
        content: list[Record] = []
        for one in values:
            top = [self._named(*best) for best in one.best]
            content.append({**self._named(one.token_id, one.logprob), "top_logprobs": top})
            self._before = one.token_id
        return {"content": content, "refusal": None}

    def _named(self, token: int, value: float) -> Named:
        shown = self._texts.text(token, self._before)
        return {"token": shown, "logprob": max(value, LEAST), "bytes": self._texts.utf8(shown)}


# the choices of completions and chats


class CachedTokens(TypedDict):
    """The prompt tokens that were read from the cache."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts of all prompts and outputs of an answer. The details are there once every prompt is computed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None


class Choice(TypedDict):
    """An output, or its new part; ``token_ids`` if return_token_ids is set."""

    index: int
    finish_reason: str | None
    token_ids: NotRequired[list[int]]


class Choices(TypedDict):
    """All outputs, or a chunk of a stream."""

    id: str
    created: int
    model: str
    usage: NotRequired[Usage | None]


class CompletionChoice(Choice):
    """An output of a completion."""

    text: str
    logprobs: Columns | None
    prompt_token_ids: NotRequired[list[int]]


class CompletionAnswer(Choices):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CalledFunction(TypedDict, total=False):
    """The function of a call; ``arguments`` are JSON. The new part of a call has no name after the first."""

    name: str
    arguments: str


class CalledTool(TypedDict, total=False):
    """A call; in a stream with its ``index``, and with id and type in its first part only."""

    index: int
    id: str
    type: Literal["function"]
    function: CalledFunction


class Delta(TypedDict, total=False):
    """The new part of a message. ``reasoning`` and ``reasoning_content`` are two names of the same."""

    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[CalledTool]


class Message(TypedDict):
    """The assistant's message; ``content`` is null if there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CalledTool]]


class ChatChoice(Choice):
    """An output of a chat."""

    message: NotRequired[Message]
    delta: NotRequired[Delta]
    logprobs: ChatLogprobs | None


class ChatAnswer(Choices):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion", "chat.completion.chunk"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]


class ChoicesForm:
    """The common format of completions and chats, for one answer."""

    kinds: tuple[str, str]
    """The object names of an answer and of a chunk of a stream."""

    def __init__(self, front: Front, body: ChoicesBody, asked: Asked) -> None:
        self._front, self._asked = front, asked
        self._stream = body.stream_options or StreamOptions()
        self._returns_ids = bool(body.return_token_ids)
        self._texts = TokenTexts(front.loaded.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._created = int(time.time())
        self._prompt_tokens, self._output_tokens = sum(map(len, asked.prompts)), 0
        self._cached: int | None = None

    def begin(self) -> Iterable[bytes]:
        """Return nothing: there is no first event."""
        return ()

    def part(self, choice: int, new: Increment) -> Iterable[bytes]:
        """Yield the new part of an output, unless it is empty, such as a part of a character."""
        choice_fields = self._choice(choice, new)
        says = any(choice_fields.get(name) for name in ("text", "delta", "finish_reason", "logprobs"))
        if says or "token_ids" in choice_fields:
            yield event(self._chunk(choice_fields))

    def end(self) -> Iterable[bytes]:
        """Yield the token counts if they are asked for, then the end of the stream."""
        if self._stream.include_usage:
            yield event(self._answer(self.kinds[1], []) | {"usage": self._usage()})
        yield DONE

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer with all outputs."""
        choices = [self._choice(number, one) for number, one in enumerate(done)]
        return self._answer(self.kinds[0], choices) | {"usage": self._usage()}

    def _choice(self, number: int, new: Increment | Completion) -> dict[str, Any]:
        """Return the fields of an output."""
        raise NotImplementedError

    def _ended(self, number: int, new: Increment | Completion) -> str | None:
        """Return why an output has ended, or ``None``. The first output of each prompt adds its cached tokens."""
        done = new if isinstance(new, Completion) else new.completion
        if done is None:
            return None
        if number % self._asked.sampling.n == 0:
            self._cached = (self._cached or 0) + done.hit_tokens
        return str(done.finish_reason)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._answer(self.kinds[1], [choice])
        if self._stream.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif self._stream.include_usage:
            chunk["usage"] = None
        return chunk

    def _answer(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._asked.id,
            "object": kind,
            "created": self._created,
            "model": self._front.name,
            "choices": choices,
        }

    def _usage(self) -> Usage:
        """Return the counts so far. Each prompt counts once, however many outputs it has."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._output_tokens,
            "total_tokens": self._prompt_tokens + self._output_tokens,
            "prompt_tokens_details": None if self._cached is None else {"cached_tokens": self._cached},
        }


class CompletionForm(ChoicesForm):
    """The format of one answer of /v1/completions."""

    kinds = ("text_completion", "text_completion")

    def __init__(self, front: Front, body: CompletionBody, asked: Asked) -> None:
        super().__init__(front, body, asked)
        self._body = body
        self._writers: dict[int, ColumnWriter] = {}
        self._prompt_alone = body.max_tokens == 0

    def _choice(self, number: int, new: Increment | Completion) -> dict[str, Any]:
        """Return the fields of an output; the first time with its prompt, if that is asked for."""
        place = number // self._asked.sampling.n
        prompt, first = self._asked.prompts[place], number not in self._writers
        tokens = () if self._prompt_alone else new.token_ids
        self._output_tokens += len(tokens)
        echoed = self._prompt_text(place) if first and self._body.echo else ""
        made = {
            "index": number,
            "text": echoed + ("" if self._prompt_alone else new.text or ""),
            "logprobs": self._columns(number, prompt, new),
            "finish_reason": self._ended(number, new),
        }
        if self._returns_ids:
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
        return writer.prompt(prompt, new.prompt_logprobs, values)

    def _prompt_text(self, place: int) -> str:
        """Return a prompt as it was given, or the text of its ids."""
        given = self._body.prompts[place]
        if isinstance(given, str):
            return given
        tokenizer = self._front.loaded.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(given, skip_special_tokens=False))


class ChatForm(ChoicesForm):
    """The format of one answer of /v1/chat/completions."""

    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, front: Front, body: ChatBody, asked: Asked) -> None:
        super().__init__(front, body, asked)
        prompt, formats = asked.prompts[0], _formats(front, body)
        inside = _begins_reasoning(front, formats.reasoning, prompt)
        self._writers = [RecordWriter(self._texts, prompt[-1]) for _ in range(asked.sampling.n)]
        self._shows_reasoning = body.include_reasoning is not False
        self._parsers = [
            AnswerParser(
                formats.calls,
                formats.reasoning,
                body.parameters,
                named=body.called,
                inside=inside,
                parallel=body.parallel_tool_calls is not False,
            )
            for _ in range(asked.sampling.n)
        ]

    def begin(self) -> Iterable[bytes]:
        """Yield the role of every output."""
        for number in range(self._asked.sampling.n):
            delta: Delta = {"role": "assistant", "content": ""}
            chunk = self._chunk({"index": number, "delta": delta, "logprobs": None, "finish_reason": None})
            yield event(self._with_prompt(chunk))

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer with all outputs."""
        return self._with_prompt(super().whole(done))

    def _with_prompt(self, answer: dict[str, Any]) -> dict[str, Any]:
        if self._returns_ids:
            answer["prompt_token_ids"] = list(self._asked.prompts[0])
        return answer

    def _choice(self, number: int, new: Increment | Completion) -> dict[str, Any]:
        self._output_tokens += len(new.token_ids)
        made: dict[str, Any] = {"index": number}
        parser, whole = self._parsers[number], isinstance(new, Completion)
        part = parser.feed(new.text or "", ended=new.finish_reason is not None)
        said = _said(part if self._shows_reasoning else replace(part, reasoning=""), whole=whole)
        if whole:
            content = part.content or (None if part.calls else "")
            made["message"] = {"role": "assistant", "content": content, "refusal": None} | said
        else:
            made["delta"] = said
        made["logprobs"] = None if new.logprobs is None else self._writers[number].output(new.logprobs)
        ended = self._ended(number, new)
        made["finish_reason"] = "tool_calls" if ended == FinishReason.STOP and parser.called else ended
        if self._returns_ids:
            made["token_ids"] = list(new.token_ids)
        return made


def _begins_reasoning(front: Front, reasoning: ReasoningFormat | None, prompt: Sequence[int]) -> bool:
    """Return whether ``prompt`` ends with the beginning of reasoning."""
    if reasoning is None:
        return False
    last = list(prompt[-_MOST_MARK_TOKENS:])
    return str(front.loaded.tokenizer.decode(last, skip_special_tokens=False)).rstrip().endswith(reasoning.start)


def _said(part: Part, *, whole: bool) -> Delta:
    """Return the fields of a new part; a call of a ``whole`` message has no index."""
    said: Delta = {}
    if part.reasoning:
        said["reasoning"] = said["reasoning_content"] = part.reasoning
    if part.content:
        said["content"] = part.content
    if part.calls:
        said["tool_calls"] = [_called(one, whole=whole) for one in part.calls]
    return said


def _called(call: Call, *, whole: bool) -> CalledTool:
    made: CalledTool = {} if whole else {"index": call.index}
    if call.id is None or call.name is None:
        return made | {"function": {"arguments": call.arguments}}
    function: CalledFunction = {"name": call.name, "arguments": call.arguments}
    return made | {"id": call.id, "type": "function", "function": function}


# responses

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class OutputMessage(TypedDict):
    """The assistant's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ResponseAnswer(TypedDict):
    """A response. ``usage`` is there once it has ended; ``incomplete_details`` says why it ended early."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Status
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    prompt_cache_retention: Literal["in_memory", "24h"] | None
    store: bool
    temperature: float
    top_p: float
    text: dict[str, dict[str, Any]]
    tool_choice: Literal["auto"]
    tools: list[Any]
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    usage: dict[str, Any] | None


class ResponseForm:
    """The format of one answer of /v1/responses."""

    def __init__(self, front: Front, body: ResponseBody, asked: Asked) -> None:
        self._front, self._body, self._asked = front, body, asked
        self._created = int(time.time())
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._sent = 0
        self._done: Completion | None = None

    def begin(self) -> Iterable[bytes]:
        """Yield a response, a message in it, and a text in the message, all empty."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", None))
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", None))
        yield self._at_text("response.content_part.added", part=_text(""))

    def part(self, choice: int, new: Increment) -> Iterable[bytes]:  # noqa: ARG002  # there is one output
        """Yield the new part of the text."""
        self._done = new.completion
        if new.text:
            yield self._at_text("response.output_text.delta", delta=new.text, logprobs=[])

    def end(self) -> Iterable[bytes]:
        """Yield the whole text, message and response."""
        done = self._done
        text, status = ("" if done is None else done.text or ""), _status(done)
        yield self._at_text("response.output_text.done", text=text, logprobs=[])
        yield self._at_text("response.content_part.done", part=_text(text))
        yield self._event("response.output_item.done", output_index=0, item=self._message(status, text))
        yield self._event(f"response.{status}", response=self._response(status, done))

    def whole(self, done: Sequence[Completion]) -> ResponseAnswer:
        """Return the whole response."""
        return self._response(_status(done[0]), done[0])

    def _event(self, kind: str, **fields: object) -> bytes:
        made = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event(made, kind)

    def _at_text(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _message(self, status: Status, text: str | None) -> OutputMessage:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if text is None else [_text(text)],
        }

    def _response(self, status: Status, done: Completion | None) -> ResponseAnswer:
        body = self._body
        return {
            "id": self._asked.id,
            "object": "response",
            "created_at": self._created,
            "model": self._front.name,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "output": [] if done is None else [self._message(status, done.text or "")],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.prompt_cache_retention,
            "store": False,
            "temperature": self._asked.sampling.temperature,
            "top_p": self._asked.sampling.top_p,
            "text": {"format": _format(body)},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "metadata": {},
            "usage": None if done is None else _response_usage(done),
        }


def _status(done: Completion | None) -> Status:
    return "incomplete" if done is None or done.finish_reason == FinishReason.LENGTH else "completed"


def _format(body: ResponseBody) -> dict[str, Any]:
    """Return the form of the text as it was given."""
    given = None if body.text is None else body.text.format
    return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_unset=True)


def _text(text: str) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": []}


def _response_usage(done: Completion) -> dict[str, Any]:
    """Return the token counts with the names of responses."""
    read, written = len(done.prompt_token_ids), len(done.token_ids)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": done.hit_tokens},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }
