"""Requests of one body through the engine, and back as one answer or as events while they run.

    Asked -> places -> AsyncEngine.stream, one for each prompt -> Part, Part, ... -> Form -> JSON, or events

A client that goes away ends what it asked for: within a step its rows are free.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from hybridkv.request import Hints, SamplingParams
from hybridkv.runner.completion import Completion, Increment
from hybridkv.serve.errors import api_error
from hybridkv.serve.front import Front
from hybridkv.serve.metrics import Watch
from hybridkv.serve.spans import RequestSpan

T = TypeVar("T")

CLIENT_GONE: Final = 499
"""The status of an answer that nobody reads."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks an engine for. id: of the answer, and the beginning of its requests' ids.

    salt, hints: as Request's, of every prompt.
    """

    id: str
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    salt: str | None
    hints: Hints

    @property
    def outputs(self) -> int:
        """Of all prompts."""
        return len(self.prompts) * self.sampling.n

    def request_id(self, prompt: int) -> str:
        """Of the engine's request of a prompt, by its number."""
        return self.id if len(self.prompts) == 1 else f"{self.id}-{prompt}"


@dataclass(frozen=True, slots=True)
class Part:
    """What is new of an output. choice: its number among all outputs of the body; prompt: that of its prompt."""

    choice: int
    prompt: int
    increment: Increment


@dataclass(frozen=True, slots=True)
class Event:
    """One of a stream. name: as server-sent events have it, None for none."""

    data: object
    name: str | None = None

    def encoded(self) -> bytes:
        """On the wire."""
        named = "" if self.name is None else f"event: {self.name}\n"
        data = self.data
        if not isinstance(data, str):
            data = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return f"{named}data: {data}\n\n".encode()


class Form(Protocol):
    """How outputs are told: of one answer, which it may keep count of."""

    def begin(self) -> Iterable[Event]:
        """In front of everything."""
        ...

    def part(self, part: Part) -> Iterable[Event]:
        """Of something new."""
        ...

    def end(self) -> Iterable[Event]:
        """Behind everything."""
        ...

    def whole(self, done: Sequence[Completion]) -> object:
        """All outputs at once, in their order."""
        ...


async def answer(front: Front, request: Request, asked: Asked, form: Form, *, stream: bool) -> Response:
    """What ``asked`` comes to, in ``form``. ApiError for what the engine refuses or fails at, and for a full queue."""
    try:
        span = None if front.tracer is None else RequestSpan(front.tracer, front.name, request, asked)
        if stream:
            parts = generate(front, asked, span)
            # what is refused, or fails at once, has a status of its own: the answer begins with the first token
            first = await _unless_gone(request, anext(parts))
            return _gone() if first is None else EventStream(parts, _events(parts, first, form))
        done = await _unless_gone(request, _completions(front, asked, span))
    except Exception as error:
        raise api_error(error) from error
    if done is None:
        return _gone()
    if asked.sampling.prompt_logprobs is not None:  # naming thousands of tokens takes a while
        return JSONResponse(await front.tokens.run(form.whole, done))
    return JSONResponse(form.whole(done))


async def generate(front: Front, asked: Asked, span: RequestSpan | None = None) -> AsyncGenerator[Part, None]:
    """Parts of all outputs as they come. Whoever leaves early (``aclosing``) ends them. Raises as ``answer``.

    span: is told of them, and ends with them.
    """
    begun = time.monotonic()
    watches = [Watch(front.metrics, begun) for _ in range(asked.outputs)]
    prompts = [_parts(front, asked, number) for number in range(len(asked.prompts))]
    source = prompts[0] if len(prompts) == 1 else _merged(prompts)
    with _told(span), front.places.take(asked.outputs):
        async with aclosing(source):
            async for part in source:
                watches[part.choice].came(len(part.increment.token_ids), part.increment.completion)
                if span is not None:
                    span.came(part)
                yield part


@contextmanager
def _told(span: RequestSpan | None) -> Iterator[None]:
    """``span`` ends behind, and hears of what went wrong."""
    if span is None:
        yield
        return
    try:
        yield
    except Exception as error:
        span.failed(error)
        raise
    except BaseException:  # the generator is closed, or its task cancelled
        span.left()
        raise
    finally:
        span.end()


async def _parts(front: Front, asked: Asked, prompt: int) -> AsyncGenerator[Part, None]:
    """Those of one prompt."""
    increments = front.engine.stream(
        asked.prompts[prompt],
        asked.sampling,
        request_id=asked.request_id(prompt),
        cache_salt=asked.salt,
        hints=asked.hints,
    )
    async with aclosing(increments):
        async for one in increments:
            yield Part(prompt * asked.sampling.n + one.output, prompt, one)


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What any of ``sources`` has, as it comes; the first error ends all."""
    asking = {asyncio.ensure_future(anext(one)): one for one in sources}
    try:
        while asking:
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = asking.pop(task)
                try:
                    found = task.result()
                except StopAsyncIteration:
                    continue
                asking[asyncio.ensure_future(anext(source))] = source
                yield found
    finally:
        for task, source in asking.items():
            if task.done():
                await source.aclose()
            else:
                task.cancel()  # which closes its source
        await asyncio.gather(*asking, return_exceptions=True)


async def _completions(front: Front, asked: Asked, span: RequestSpan | None) -> list[Completion]:
    """All outputs, whole, in their order."""
    done: dict[int, Completion] = {}
    async with aclosing(generate(front, asked, span)) as parts:
        async for part in parts:
            if part.increment.completion is not None:
                done[part.choice] = part.increment.completion
    return [done[choice] for choice in sorted(done)]


async def _events(parts: AsyncGenerator[Part, None], first: Part, form: Form) -> AsyncGenerator[bytes, None]:
    """The stream of ``form``; an error on the way is its last event."""
    async with aclosing(parts):
        try:
            for event in [*form.begin(), *form.part(first)]:
                yield event.encoded()
            async for part in parts:
                for event in form.part(part):
                    yield event.encoded()
            for event in form.end():
                yield event.encoded()
        except Exception as error:  # noqa: BLE001  # whatever it is, the client must hear of it: the status is sent
            yield Event(api_error(error).body).encoded()


class EventStream(StreamingResponse):
    """Server-sent events; the parts that they come from are closed when the client goes, wherever it stands."""

    def __init__(self, parts: AsyncGenerator[Part, None], events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._parts, self._events = parts, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        async with aclosing(self._parts), aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """What ``work`` comes to; None, with the work cancelled, when the client goes before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_leaves(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _leaves(request: Request) -> None:
    """Until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _gone() -> Response:
    return Response(status_code=CLIENT_GONE)
