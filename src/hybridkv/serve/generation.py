"""Running the requests of one body in the engine, and sending the outputs as one answer or as a stream of events.

    Asked -> Service: places, AsyncEngine -> Parts of a step -> Form -> JSON, or events, in one message of the step

If a client disconnects, its requests end: their rows are free within a step. All tokens of a server pass here, in the
interpreter that the engine's thread also needs. One step of a stream costs one turn of a task and one ``send``.

If tracing is on, each Answer has a span of OpenTelemetry, by its conventions for generative models. The span lasts from
the making of the Answer to the last token or the error, and is a child of the client's traceparent. Spans hold counts,
times and sampling settings, never prompts, outputs or salts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, Self

from fastapi.responses import JSONResponse, Response
from opentelemetry import propagate
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from pydantic_core import to_json
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from hybridkv.errors import ConfigError
from hybridkv.request import Hints, SamplingParams
from hybridkv.runner.completion import Completion, Increment, Stream
from hybridkv.runner.engine import Engine
from hybridkv.serve.errors import ClientGoneError, api_error, leaves
from hybridkv.serve.front import Front, Piece

if TYPE_CHECKING:  # a service reads bodies of this module
    from hybridkv.serve.remote import RemoteOutputs
    from hybridkv.serve.service import CountedOutputs

CLIENT_LEFT: Final = "client_left"
"""The error type of a span with a disconnected client."""
_SERVICE: Final = "hybridkv"
_OPERATIONS: Final = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
_SAMPLED: Final = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
"""The sampling settings that a span records."""
_STREAM_HEADERS: Final = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"))


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests that a body asks an engine for.

    Attributes:
        id: of the answer; the ids of its requests begin with it.
        prompts: the token ids of each prompt.
        sampling: for every prompt.
        salt: the cache salt of every prompt.
        hints: for every prompt.
        lora: the adapter of every prompt; None for the model itself.
        embeds: whether the completions are to have the pooled hidden states of their prompts.
    """

    id: str
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    salt: str | None
    hints: Hints
    lora: str | None = None
    embeds: bool = False

    @property
    def outputs(self) -> int:
        """Outputs of all prompts."""
        return len(self.prompts) * self.sampling.n

    def request_id(self, prompt: int) -> str:
        """Return the id of the engine's request for the prompt with this number."""
        return self.id if len(self.prompts) == 1 else f"{self.id}-{prompt}"

    def requests(self, *, text: bool = True) -> list[Callable[[Engine], Stream]]:
        """Return a function for each prompt that queues its request. Without ``text``, increments have ids only."""

        def queued(number: int, engine: Engine) -> Stream:
            name, salt = self.request_id(number), self.salt
            made = engine.stream(
                self.prompts[number], self.sampling, request_id=name, cache_salt=salt, hints=self.hints, lora=self.lora
            )
            return made if text else made.as_ids()

        return [partial(queued, number) for number in range(len(self.prompts))]


Part = tuple[int, Increment]
"""The number of an output among all outputs of the body, and its new part."""


def event(data: object, name: str | None = None) -> bytes:
    """Return one server-sent event as bytes, with an event name unless ``name`` is ``None``."""
    said = data.encode() if isinstance(data, str) else to_json(data)
    named = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (named, said)


class Form(Protocol):
    """The format of one answer."""

    def begin(self) -> Iterable[bytes]:
        """Return the events before all others."""
        ...

    def part(self, choice: int, new: Increment) -> Iterable[bytes]:
        """Return the events for the new part of an output."""
        ...

    def end(self) -> Iterable[bytes]:
        """Return the events after all others."""
        ...

    def whole(self, done: Sequence[Completion]) -> object:
        """Return the answer with all outputs, in their order."""
        ...


class RequestSpan:
    """The span of one body. Leaving its context ends the span, and records an error."""

    def __init__(self, tracer: Tracer, model: str, request: Request, asked: Asked) -> None:
        self._asked, self._begun = asked, time.monotonic()
        self._outputs = self._cached = 0
        self._finished: dict[int, str] = {}
        operation = _OPERATIONS.get(request.url.path, "chat")
        attributes: dict[str, str | int | float | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _SERVICE,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": asked.id,
            "gen_ai.request.choice.count": asked.outputs,
            "gen_ai.usage.input_tokens": sum(map(len, asked.prompts)),
            **{f"gen_ai.request.{name}": getattr(asked.sampling, name) for name in _SAMPLED},
        }
        self._span = tracer.start_span(
            f"{operation} {model}",
            context=propagate.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
        )

    def came(self, choice: int, new: Increment) -> None:
        """Record the new part of an output."""
        tokens, done = len(new.token_ids), new.completion
        if tokens and not self._outputs:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._begun)
        self._outputs += tokens
        if done is None:
            return
        self._finished[choice] = str(done.finish_reason)
        if choice % self._asked.sampling.n == 0:  # the outputs of a prompt share one hit: count it once
            self._cached += done.hit_tokens
            self._span.set_attribute("hybridkv.queue_seconds", done.queue_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, ClientGoneError):
            self._span.set_attribute("error.type", str(api_error(error).status))
            self._span.set_status(StatusCode.ERROR)
        elif error is not None:  # a task that is cancelled has lost its client, too
            self._span.set_attribute("error.type", CLIENT_LEFT)
        self._span.set_attribute("gen_ai.usage.output_tokens", self._outputs)
        if len(self._finished) == self._asked.outputs:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", self._cached)
            reasons = [one for _, one in sorted(self._finished.items())]
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        self._span.end()


class Generation:
    """The outputs of a body as they arrive, until its client leaves; ``span`` records them."""

    def __init__(self, outputs: CountedOutputs | RemoteOutputs, span: RequestSpan | None) -> None:
        self._outputs, self._span = outputs, span
        self._gone = False

    async def next(self) -> list[Part]:
        """Wait for new tokens, and return the new parts of all outputs. Empty after the last.

        Raises the error of a request, and ClientGoneError.
        """
        found = await self._outputs.next()
        if self._gone:
            raise ClientGoneError
        if self._span is not None:
            for choice, new in found:
                self._span.came(choice, new)
        return found

    @property
    def ended(self) -> bool:
        """Whether nothing more will come, and the client is connected."""
        return self._outputs.ended and not self._gone

    def leave(self, _: object = None) -> None:
        """End the generation, because its client has disconnected."""
        self._gone = True
        self._outputs.leave()


class Answer(Response):
    """The outputs of ``asked`` in ``form``: whole, or as a stream of events. An error in a stream is its last event.

    A stream begins with the first tokens, a whole answer after the last. Errors before that are raised as ApiError, or
    ClientGoneError for a lost client.
    """

    def __init__(self, front: Front, request: Request, asked: Asked, form: Form, *, stream: bool) -> None:
        super().__init__()
        self._front, self._request, self._asked, self._form, self._stream = front, request, asked, form, stream
        self._span = (
            None if front.tracer is None else RequestSpan(front.tracer, asked.lora or front.name, request, asked)
        )
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        try:
            with self._generated(receive) as generation:
                if self._stream:
                    await self._send_events(generation, send)
                    return
                done = await _completions(generation)
            await (await self._whole(done))(scope, receive, send)
        except ClientGoneError:
            if not self._begun:
                raise
        except Exception as error:
            refused = api_error(error)
            if not self._begun:
                raise refused from error
            # the status is already sent, so the error goes to the client as the last event
            await _send(send, [event(refused.body)], more=False)

    @contextmanager
    def _generated(self, receive: Receive) -> Iterator[Generation]:
        span = self._span
        with span or nullcontext(), self._front.service.read(self._asked) as outputs:
            generation = Generation(outputs, span)
            leaving = asyncio.ensure_future(leaves(receive))  # ends it even while something is sent
            leaving.add_done_callback(generation.leave)
            try:
                yield generation
            finally:
                leaving.remove_done_callback(generation.leave)
                leaving.cancel()

    async def _send_events(self, generation: Generation, send: Send) -> None:
        parts = await generation.next()
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        events = [*self._form.begin()]
        while parts:
            events += [one for choice, new in parts for one in self._form.part(choice, new)]
            if generation.ended:
                break  # the end goes with the last part
            await _send(send, events, more=True)
            events = []
            parts = await generation.next()
        await _send(send, [*events, *self._form.end()], more=False)

    async def _whole(self, done: Sequence[Completion]) -> Response:
        if self._asked.sampling.prompt_logprobs is None:
            return JSONResponse(self._form.whole(done))
        # naming thousands of tokens takes a while
        piece = Piece(sum(map(len, self._asked.prompts)), partial(self._form.whole, done))
        (whole,) = await self._front.tokens.run(self._request, [piece])
        return JSONResponse(whole)


async def _send(send: Send, events: Iterable[bytes], *, more: bool) -> None:
    """Send ``events`` in one message, if there are any; ``more`` says whether others may follow."""
    body = b"".join(events)
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def _completions(generation: Generation) -> list[Completion]:
    """Return all outputs, whole, in their order."""
    done: dict[int, Completion] = {}
    while parts := await generation.next():
        done.update((choice, new.completion) for choice, new in parts if new.completion is not None)
    return [done[choice] for choice in sorted(done)]


@contextmanager
def exporting() -> Iterator[Tracer]:
    """Yield a tracer that sends spans to OTEL_EXPORTER_OTLP_ENDPOINT; the last ones when its context ends.

    Raises ConfigError if OpenTelemetry's SDK is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # an extra
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  # same
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415  # same
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  # same
    except ImportError as error:
        raise ConfigError("spans need OpenTelemetry's SDK: pip install 'hybridkv[cli,serve,otel]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": _SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield provider.get_tracer(_SERVICE)
    finally:
        provider.shutdown()
