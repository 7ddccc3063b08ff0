"""The format of /v1/responses: a body to a request, outputs to answers.

Responses have text input and output: one turn of a conversation, which is not stored. Their streams are

    response.created, .in_progress
    output_item.added, content_part.added, output_text.delta ...,      the message; before it, the same for reasoning,
        output_text.done, content_part.done, output_item.done          with reasoning_text
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
from hybridkv.serve.answers import AnswerParser
from hybridkv.serve.bodies import ResponseBody, TemplateBody
from hybridkv.serve.forms import begins_reasoning, formats_of, marks_shown
from hybridkv.serve.front import Front
from hybridkv.serve.generation import Asked, event


async def ask_response(front: Front, body: ResponseBody, request: Request) -> Asked:
    """Return the request for ``body``. Raises as ``ask_completion``."""
    salt = front.salt(request, body)
    prompts = [await front.tokens.conversation(request, body.messages, TemplateBody())]
    shown = marks_shown(formats_of(front, body))
    sampling = body.sampling(front.most_tokens(prompts, body.max_output_tokens), **shown)
    await front.compile(request, sampling.structured)
    return Asked(f"resp_{uuid.uuid4().hex}", prompts, sampling, salt, body.said_hints)


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """The text of a message, or of reasoning, which has no annotations."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]


class OutputItem(TypedDict):
    """The assistant's message, or the reasoning before it, which has a summary instead of a role."""

    id: str
    type: Literal["message", "reasoning"]
    role: NotRequired[Literal["assistant"]]
    summary: NotRequired[list[Any]]
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
    output: list[OutputItem]
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
        self._sent = 0
        self._done: Completion | None = None
        self._items: list[OutputItem] = []  # the last one grows
        reasoning, prompt = formats_of(front, body).reasoning, asked.prompts[0]
        self._parser = AnswerParser(None, reasoning, {}, inside=begins_reasoning(front, reasoning, prompt))

    def begin(self) -> Iterable[bytes]:
        """Yield a response that is empty."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def part(self, choice: int, new: Increment) -> Iterable[bytes]:  # noqa: ARG002  # there is one output
        """Yield the new parts of reasoning and message."""
        self._done = new.completion
        part = self._parser.feed(new.text or "", ended=new.completion is not None)
        if part.reasoning:
            yield from self._grow("reasoning", part.reasoning)
        if part.content:
            yield from self._grow("message", part.content)

    def end(self) -> Iterable[bytes]:
        """Yield the whole text, message and response."""
        status = _status(self._done)
        yield from self._turn_to("message", status)
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._response(status))

    def whole(self, done: Sequence[Completion]) -> ResponseAnswer:
        """Return the whole response."""
        self._done = done[0]
        status, part = _status(done[0]), self._parser.feed(done[0].text or "", ended=True)
        thought = "completed" if part.content else status
        self._items = [_item("reasoning", thought, part.reasoning)] if part.reasoning else []
        self._items.append(_item("message", status, part.content))
        return self._response(status)

    def _grow(self, kind: Literal["message", "reasoning"], text: str) -> Iterable[bytes]:
        yield from self._turn_to(kind, "completed")
        said = self._items[-1]["content"][0]
        said["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._at_text(f"response.{said['type']}.delta", delta=text, **more)

    def _turn_to(self, kind: Literal["message", "reasoning"], status: Status) -> Iterable[bytes]:
        """Yield the end of the item that grows, with ``status``, and the beginning of one of another ``kind``."""
        if self._items and self._items[-1]["type"] == kind:
            return
        if self._items:
            yield from self._close(status)
        self._items.append(item := _item(kind, "in_progress", ""))
        empty = {**item, "content": []}
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=empty)
        yield self._at_text("response.content_part.added", part=item["content"][0])

    def _close(self, status: Status) -> Iterable[bytes]:
        item = self._items[-1]
        item["status"], said = status, item["content"][0]
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield self._at_text(f"response.{said['type']}.done", text=said["text"], **more)
        yield self._at_text("response.content_part.done", part=said)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event(self, kind: str, **fields: object) -> bytes:
        made = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event(made, kind)

    def _at_text(self, kind: str, **fields: object) -> bytes:
        place = len(self._items) - 1
        return self._event(kind, item_id=self._items[place]["id"], output_index=place, content_index=0, **fields)

    def _response(self, status: Status) -> ResponseAnswer:
        body, done = self._body, self._done
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
            "output": [] if status == "in_progress" else self._items,
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


def _item(kind: Literal["message", "reasoning"], status: Status, text: str) -> OutputItem:
    if kind == "reasoning":
        said: OutputText = {"type": "reasoning_text", "text": text}
        return {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "summary": [], "status": status, "content": [said]}
    said = {"type": "output_text", "text": text, "annotations": []}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "role": "assistant", "status": status, "content": [said]}


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
