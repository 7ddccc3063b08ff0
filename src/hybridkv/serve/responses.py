"""/v1/responses in its plain text form: one turn behind a conversation, which is not kept.

response.created, .in_progress, output_item.added, content_part.added
output_text.delta ...
output_text.done, content_part.done, output_item.done, response.completed or .incomplete
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from starlette.requests import Request
from typing_extensions import TypedDict

from hybridkv.runner.completion import Completion
from hybridkv.schedule import FinishReason
from hybridkv.serve.bodies import ResponseBody, TemplateBody
from hybridkv.serve.front import Front
from hybridkv.serve.generation import Asked, Event, Part

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """The text of a turn."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class OutputMessage(TypedDict):
    """The assistant's turn."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ResponseAnswer(TypedDict):
    """A response. usage: once it has ended; incomplete_details: why it ended too soon."""

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
    store: bool
    temperature: float
    top_p: float
    text: dict[str, dict[str, str]]
    tool_choice: Literal["auto"]
    tools: list[Any]
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    usage: dict[str, Any] | None


async def ask(front: Front, body: ResponseBody, request: Request) -> Asked:
    """Return what ``body`` asks an engine for.

    Raises ApiError and ConfigError if it cannot be served, and ClientGoneError if the client of ``request`` leaves.
    """
    front.require_model(body.model)
    salt = front.salt(request, body.cache_salt)
    prompts = [await front.tokens.conversation(request, body.messages, TemplateBody())]
    sampling = body.sampling(front.most_tokens(prompts, body.max_output_tokens))
    return Asked(f"resp_{uuid.uuid4().hex}", prompts, sampling, salt, body.said_hints)


class ResponseForm:
    """An output as /v1/responses tells it: of one answer."""

    def __init__(self, front: Front, body: ResponseBody, asked: Asked) -> None:
        self._front, self._body, self._asked = front, body, asked
        self._created = int(time.time())
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._sent = 0
        self._done: Completion | None = None

    def begin(self) -> Iterable[Event]:
        """A response, a message in it, a text in that: all empty."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", None))
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", None))
        yield self._at_text("response.content_part.added", part=_text(""))

    def part(self, part: Part) -> Iterable[Event]:
        """What is new of the text."""
        self._done = part.increment.completion
        if part.increment.text:
            yield self._at_text("response.output_text.delta", delta=part.increment.text, logprobs=[])

    def end(self) -> Iterable[Event]:
        """All of it once more."""
        done = self._done
        text, status = ("" if done is None else done.text or ""), _status(done)
        yield self._at_text("response.output_text.done", text=text, logprobs=[])
        yield self._at_text("response.content_part.done", part=_text(text))
        yield self._event("response.output_item.done", output_index=0, item=self._message(status, text))
        yield self._event(f"response.{status}", response=self._response(status, done))

    def whole(self, done: Sequence[Completion]) -> ResponseAnswer:
        """The output at once."""
        return self._response(_status(done[0]), done[0])

    def _event(self, kind: str, **fields: object) -> Event:
        made = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return Event(made, kind)

    def _at_text(self, kind: str, **fields: object) -> Event:
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
            "store": False,
            "temperature": self._asked.sampling.temperature,
            "top_p": self._asked.sampling.top_p,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "metadata": {},
            "usage": None if done is None else _usage(done),
        }


def _status(done: Completion | None) -> Status:
    return "incomplete" if done is None or done.finish_reason == FinishReason.LENGTH else "completed"


def _text(text: str) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": []}


def _usage(done: Completion) -> dict[str, Any]:
    """In the names that responses have."""
    read, written = len(done.prompt_token_ids), len(done.token_ids)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": done.hit_tokens},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }
