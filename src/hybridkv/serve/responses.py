"""The format of /v1/responses: a body to a request, outputs to answers.

Responses have text input and output: one turn of a conversation, which is not stored. Their streams are

    response.created, .in_progress
    output_item.added, content_part.added, output_text.delta ...,      a message; reasoning is the same with
        output_text.done, content_part.done, output_item.done          reasoning_text
    output_item.added, function_call_arguments.delta ...,              a call
        function_call_arguments.done, output_item.done
    response.completed or .incomplete
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NotRequired

from starlette.requests import Request
from typing_extensions import TypedDict

from hybridkv.runner.completion import Completion, Increment
from hybridkv.schedule import FinishReason
from hybridkv.serve.answers import Call, Said
from hybridkv.serve.forms import asked_sampling, formats_of, parser_of, reasoning_tokens
from hybridkv.serve.front import Front
from hybridkv.serve.generation import Asked, event
from hybridkv.serve.response_bodies import ResponseBody


async def ask_response(front: Front, body: ResponseBody, request: Request) -> Asked:
    """Return the request for ``body``. Raises as ``ask_completion``."""
    salt = front.salt(request, body)
    formats = formats_of(front, body)
    prompts = [await front.tokens.conversation(request, body.messages, body.template)]
    sampling = asked_sampling(front, body, formats, prompts, body.max_output_tokens)
    await front.compile(request, sampling.structured)
    return Asked(f"resp_{uuid.uuid4().hex}", prompts, sampling, salt, body.said_hints, front.lora(body.model))


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """The text of a message, or of reasoning, which has no annotations."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]


class OutputItem(TypedDict):
    """A message of the assistant, reasoning, which has a summary instead of a role, or a call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Status
    role: NotRequired[Literal["assistant"]]
    summary: NotRequired[list[Any]]
    content: NotRequired[list[OutputText]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


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
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    prompt_cache_retention: Literal["in_memory", "24h"] | None
    store: bool
    temperature: float
    top_p: float
    text: dict[str, dict[str, Any]]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    usage: dict[str, Any] | None


class ResponseForm:
    """The format of one answer of /v1/responses."""

    def __init__(self, front: Front, body: ResponseBody, asked: Asked) -> None:
        self._front, self._body, self._asked = front, body, asked
        self._created = int(time.time())
        self._sent = self._reasoned = 0
        self._done: Completion | None = None
        self._items: list[OutputItem] = []  # the last one grows
        self._parser = parser_of(front, body, asked.prompts[0])

    def begin(self) -> Iterable[bytes]:
        """Yield a response that is empty."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def part(self, choice: int, new: Increment | Completion) -> Iterable[bytes]:  # noqa: ARG002  # there is one output
        """Yield the new parts of items."""
        self._done = new if isinstance(new, Completion) else new.completion
        for piece in self._parser.feed(new.text or "", ended=self._done is not None).pieces:
            yield from self._grow(piece)
        if self._done is not None:
            self._reasoned = reasoning_tokens(self._front, self._done, self._parser)

    def end(self) -> Iterable[bytes]:
        """Yield the end of the last item, and the response. An output without any item has an empty message."""
        status = _status(self._done)
        if all(one["type"] == "reasoning" for one in self._items):
            yield from self._open(_item("message"), status)
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._response(status))

    def whole(self, done: Sequence[Completion]) -> ResponseAnswer:
        """Return the whole response: that of the last event."""
        for _ in (*self.part(0, done[0]), *self.end()):
            pass
        return self._response(_status(self._done))

    def _grow(self, piece: Said | Call) -> Iterable[bytes]:
        if isinstance(piece, Call):
            if piece.name is not None:
                yield from self._open(_item("function_call", call_id=piece.id, name=piece.name, arguments=""))
            self._items[-1]["arguments"] += piece.arguments
            if piece.arguments:
                yield self._at_item("response.function_call_arguments.delta", delta=piece.arguments)
            return
        kind: Literal["message", "reasoning"] = "message" if piece.kind == "content" else "reasoning"
        text = piece.text
        if not self._items or self._items[-1]["type"] != kind:
            text = text.lstrip() if self._items else text
            yield from self._open(_item(kind))
        said = self._items[-1]["content"][0]
        said["text"] += text
        yield self._at_text(f"{said['type']}.delta", delta=text)

    def _open(self, item: OutputItem, status: Status = "completed") -> Iterable[bytes]:
        """Yield the end of the item that grows, with ``status``, and the beginning of ``item``."""
        if self._items:
            yield from self._close(status)
        self._items.append(item)
        empty = {**item, "content": []} if "content" in item else item
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=empty)
        if "content" in item:
            yield self._at_item("response.content_part.added", content_index=0, part=item["content"][0])

    def _close(self, status: Status) -> Iterable[bytes]:
        item = self._items[-1]
        item["status"] = status
        if "content" in item:
            said = item["content"][0]
            yield self._at_text(f"{said['type']}.done", text=said["text"])
            yield self._at_item("response.content_part.done", content_index=0, part=said)
        else:
            yield self._at_item("response.function_call_arguments.done", arguments=item["arguments"])
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event(self, kind: str, **fields: object) -> bytes:
        made = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event(made, kind)

    def _at_item(self, kind: str, **fields: object) -> bytes:
        place = len(self._items) - 1
        return self._event(kind, item_id=self._items[place]["id"], output_index=place, **fields)

    def _at_text(self, kind: str, **fields: object) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if kind.startswith("output_text") else {}
        return self._at_item(f"response.{kind}", content_index=0, **fields, **more)

    def _response(self, status: Status) -> ResponseAnswer:
        body, done = self._body, self._done
        choice = body.tool_choice or "auto"
        return {
            "id": self._asked.id,
            "object": "response",
            "created_at": self._created,
            "model": self._asked.lora or self._front.name,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "output": [] if status == "in_progress" else self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.prompt_cache_retention,
            "store": False,
            "temperature": self._asked.sampling.temperature,
            "top_p": self._asked.sampling.top_p,
            "text": {"format": _format(body)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{**one.model_dump(), "strict": one.strict} for one in body.tools or ()],
            "truncation": "disabled",
            "metadata": {},
            "usage": None if done is None else _response_usage(done, self._reasoned),
        }


def _status(done: Completion | None) -> Status:
    return "incomplete" if done is None or done.finish_reason == FinishReason.LENGTH else "completed"


def _format(body: ResponseBody) -> dict[str, Any]:
    """Return the form of the text as it was given."""
    given = None if body.text is None else body.text.format
    return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_unset=True)


def _item(kind: Literal["message", "reasoning", "function_call"], **more: str | None) -> OutputItem:
    """Return an empty item."""
    fields: dict[str, dict[str, Any]] = {
        "message": {"role": "assistant", "content": [{"type": "output_text", "text": "", "annotations": []}]},
        "reasoning": {"summary": [], "content": [{"type": "reasoning_text", "text": ""}]},
        "function_call": {**more},
    }
    name = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
    return {"id": f"{name}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields[kind]}  # type: ignore[typeddict-item]  # of its kind


def _response_usage(done: Completion, reasoned: int) -> dict[str, Any]:
    """Return the token counts with the names of responses."""
    read, written = len(done.prompt_token_ids), len(done.token_ids)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": done.hit_tokens},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": read + written,
    }
