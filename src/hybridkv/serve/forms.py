"""The formats of /v1/completions and /v1/chat/completions: bodies to requests, outputs to answers."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NotRequired

from starlette.requests import Request
from typing_extensions import TypedDict

from hybridkv.errors import ConfigError
from hybridkv.request import SamplingParams
from hybridkv.runner.completion import Completion, Increment
from hybridkv.runner.sampling.draws import TokenLogprob
from hybridkv.schedule import FinishReason
from hybridkv.serve.answers import AnswerParser, Call, Part
from hybridkv.serve.bodies import ChatBody, ChoicesBody, CompletionBody, StreamOptions
from hybridkv.serve.call_forms import framed
from hybridkv.serve.formats import OBJECTS, Formats
from hybridkv.serve.front import UNFINISHED, Front, TokenTexts
from hybridkv.serve.generation import Asked, event
from hybridkv.serve.response_bodies import ResponseBody

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
    counted = {"n": body.n, "logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
    asked = body.max_tokens
    if asked == 0:
        if not body.echo:
            raise ConfigError("max_tokens 0 asks for nothing: set echo, or max_tokens of at least 1")
        asked = 1  # the engine needs at least one; it is not sent to the client, so it must not end the output
        counted |= {"ignore_eos": True, "stop": None, "stop_token_ids": None, "structured": None}
    sampling = body.sampling(front.most_tokens(prompts, asked, DEFAULT_MAX_TOKENS), **counted)
    await front.compile(request, sampling.structured)
    return Asked(f"cmpl-{uuid.uuid4().hex}", prompts, sampling, salt, body.said_hints, front.lora(body.model))


async def ask_chat(front: Front, body: ChatBody, request: Request) -> Asked:
    """Return the request for ``body``. Raises as ``ask_completion``."""
    salt = front.salt(request, body)
    formats = formats_of(front, body)
    prompts = [await front.tokens.conversation(request, body.messages, body)]
    counted = {"n": body.n, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    sampling = asked_sampling(front, body, formats, prompts, body.most_tokens, **counted)
    await front.compile(request, sampling.structured)
    return Asked(f"chatcmpl-{uuid.uuid4().hex}", prompts, sampling, salt, body.said_hints, front.lora(body.model))


def asked_sampling(
    front: Front,
    body: ChatBody | ResponseBody,
    formats: Formats,
    prompts: Sequence[Sequence[int]],
    most: int | None,
    **more: int | None,
) -> SamplingParams:
    """Return the sampling for the answer to one prompt; ``more`` fields are set. Raises as ``ask_completion``."""
    inside, parallel = begins_reasoning(front, formats, prompts[0]), body.parallel_tool_calls is not False
    form = framed(body.structured, formats, body.template, inside=inside, parallel=parallel)
    if formats.calls not in (None, OBJECTS) or formats.reasoning is not None:
        more["skip_special_tokens"] = False  # marks may be special
    return body.sampling(front.most_tokens(prompts, most), structured=form, **more)


def formats_of(front: Front, body: ChatBody | ResponseBody) -> Formats:
    """Return the formats in which the answer to ``body`` is read. ConfigError if that of calls is not known."""
    tools, calls = body.template, front.formats.calls
    if tools.may_call and calls is None:
        raise ConfigError(
            f"how {front.name} writes calls is not known: start the server with --tool-call-parser, or set tool_choice "
            "to a function, required or none"
        )
    if tools.tool_choice == "required":
        calls = OBJECTS
    elif not tools.may_call or (
        body.structured is not None and calls is not None and (calls.bare or not calls.written)
    ):
        calls = None  # beside a form, a frame cannot write calls without marks or in Python
    return Formats(calls, front.formats.reasoning)


def begins_reasoning(front: Front, formats: Formats, prompt: Sequence[int]) -> bool:
    """Return whether ``prompt`` ends with the beginning of reasoning."""
    if formats.reasoning is None:
        return False
    last = list(prompt[-_MOST_MARK_TOKENS:])
    text = str(front.loaded.tokenizer.decode(last, skip_special_tokens=False))
    return text.rstrip().endswith(formats.reasoning.start)


def parser_of(front: Front, body: ChatBody | ResponseBody, prompt: Sequence[int]) -> AnswerParser:
    """Return a parser of an answer to ``body``."""
    formats, tools = formats_of(front, body), body.template
    return AnswerParser(
        formats.calls,
        formats.reasoning,
        tools.parameters,
        named=tools.called,
        inside=begins_reasoning(front, formats, prompt),
        parallel=body.parallel_tool_calls is not False,
    )


def reasoning_tokens(front: Front, done: Completion, parser: AnswerParser) -> int:
    """Return how many tokens of an output have text of its reasoning. O(tokens * log(tokens)) if there is any."""
    ends = set(front.loaded.eos_token_ids)
    ids = [one for one in done.token_ids if one not in ends] if parser.thoughts else []

    def characters(count: int) -> int:
        text = str(front.loaded.tokenizer.decode(ids[:count], skip_special_tokens=False))
        return len(text.rstrip(UNFINISHED))

    total = 0
    for begin, end in parser.thoughts:
        before, upto = (bisect_left(range(len(ids)), place, key=characters) for place in (begin, end))
        total += upto - before + (characters(before) > begin)  # one token has the mark and text
    return total


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


class ReasoningTokens(TypedDict):
    """The output tokens with text of reasoning, without its marks."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts of all prompts and outputs of an answer. The details are there once every prompt is computed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None
    completion_tokens_details: NotRequired[ReasoningTokens | None]


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
            "model": self._asked.lora or self._front.name,
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
        prompt = asked.prompts[0]
        self._writers = [RecordWriter(self._texts, prompt[-1]) for _ in range(asked.sampling.n)]
        self._shows_reasoning = body.include_reasoning is not False
        self._parsers = [parser_of(front, body, prompt) for _ in range(asked.sampling.n)]
        self._reasoned: int | None = None

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

    def _usage(self) -> Usage:
        """Return the counts so far, with those of reasoning once an output has ended."""
        details: ReasoningTokens | None = None if self._reasoned is None else {"reasoning_tokens": self._reasoned}
        return {**super()._usage(), "completion_tokens_details": details}

    def _choice(self, number: int, new: Increment | Completion) -> dict[str, Any]:
        self._output_tokens += len(new.token_ids)
        made: dict[str, Any] = {"index": number}
        parser, whole = self._parsers[number], isinstance(new, Completion)
        part = parser.feed(new.text or "", ended=new.finish_reason is not None)
        said = _said(part, whole=whole, reasoning=self._shows_reasoning)
        if whole:
            content = part.content or (None if part.calls else "")
            made["message"] = {"role": "assistant", "content": content, "refusal": None} | said
        else:
            made["delta"] = said
        made["logprobs"] = None if new.logprobs is None else self._writers[number].output(new.logprobs)
        done = new if isinstance(new, Completion) else new.completion
        if done is not None:
            self._reasoned = (self._reasoned or 0) + reasoning_tokens(self._front, done, parser)
        ended = self._ended(number, new)
        made["finish_reason"] = "tool_calls" if ended == FinishReason.STOP and parser.called else ended
        if self._returns_ids:
            made["token_ids"] = list(new.token_ids)
        return made


def _said(part: Part, *, whole: bool, reasoning: bool) -> Delta:
    """Return the fields of a new part; a call of a ``whole`` message has no index."""
    said: Delta = {}
    if reasoning and (thought := part.reasoning):
        said["reasoning"] = said["reasoning_content"] = thought
    if content := part.content:
        said["content"] = content
    if calls := part.calls:
        said["tool_calls"] = [_called(one, whole=whole) for one in calls]
    return said


def _called(call: Call, *, whole: bool) -> CalledTool:
    made: CalledTool = {} if whole else {"index": call.index}
    if call.id is None or call.name is None:
        return made | {"function": {"arguments": call.arguments}}
    function: CalledFunction = {"name": call.name, "arguments": call.arguments}
    return made | {"id": call.id, "type": "function", "function": function}
