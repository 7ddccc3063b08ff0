"""All routes of a server as one ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from opentelemetry.trace import Tracer
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from hybridkv.arguments import instance
from hybridkv.runner.async_engine import EventSink
from hybridkv.runner.engine import Engine
from hybridkv.serve import chats, completions, rendering, responses
from hybridkv.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, ResponseBody, TokenizeBody
from hybridkv.serve.errors import ErrorBody, answer_errors
from hybridkv.serve.front import Front, ServeOptions
from hybridkv.serve.generation import Answer
from hybridkv.serve.keys import KeyGate
from hybridkv.serve.lengths import BYTES_PER_SECOND, MOST_VALUES, BodyGate, Pace
from hybridkv.serve.operations import add_operations
from hybridkv.serve.origins import OriginGate
from hybridkv.serve.page import add_page

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody, "description": said}
    for status, said in (
        (400, "What the body says cannot be."),
        (401, "No known API key."),
        (403, "Not for this API key, this Host or this Origin."),
        (404, "No such model."),
        (413, "The body is too long, or has too many values."),
        (429, "The queue is full: ask again after Retry-After seconds."),
        (503, "The engine has ended, or the server drains."),
    )
}
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


def create_app(
    engine: Engine,
    options: ServeOptions | None = None,
    *,
    events: EventSink | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """``engine`` served; its lifespan closes it. engine: has not run yet, and is used by nobody else from here on.

    events: as AsyncEngine has them. tracer: of OpenTelemetry, begins a span for each body that is answered.
    ``app.state.front`` is what its routes share.
    """
    front = Front(instance("engine", engine, Engine), options or ServeOptions(), events, tracer)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with front:
            yield

    app = FastAPI(
        title="hybridkv",
        version=version("hybridkv"),
        lifespan=lifespan,
        docs_url=None,  # pages that fetch scripts from elsewhere
        redoc_url=None,
        responses=_ERRORS,
        middleware=[
            *_gates_of_pages(front.options),
            Middleware(KeyGate, keys=front.options.keys),
            Middleware(BodyGate, most_values=max(MOST_VALUES, 2 * front.max_model_len), pace=Pace(BYTES_PER_SECOND)),
        ],
        telemetry={"tracing": False},
    )
    app.state.front = front
    answer_errors(app)
    add_operations(app, front)
    add_page(app, front)
    _add_generation(app, front)
    _add_rendering(app, front)
    return app


def _gates_of_pages(options: ServeOptions) -> list[Middleware]:
    """Those in front of all others, for what browsers send."""
    gates: list[Middleware] = []
    if options.keys is None:
        gates.append(Middleware(OriginGate, hosts=options.allow_hosts, origins=options.allow_origins))
    if options.allow_origins:
        gates.append(
            Middleware(CORSMiddleware, allow_origins=options.allow_origins, allow_methods=["*"], allow_headers=["*"])
        )
    return gates


def _add_generation(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", response_model=completions.CompletionAnswer, responses=_STREAM)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Text behind prompts."""
        asked = await completions.ask(front, body, request)
        form = completions.CompletionForm(front, body, asked)
        return Answer(front, request, asked, form, stream=bool(body.stream))

    @app.post("/v1/chat/completions", response_model=chats.ChatAnswer, responses=_STREAM)
    async def chat(body: ChatBody, request: Request) -> Response:
        """The next turn of a conversation."""
        asked = await chats.ask(front, body, request)
        form = chats.ChatForm(front, body, asked)
        return Answer(front, request, asked, form, stream=bool(body.stream))

    @app.post("/v1/responses", response_model=responses.ResponseAnswer, responses=_STREAM)
    async def respond(body: ResponseBody, request: Request) -> Response:
        """The next turn of a conversation, which is not kept."""
        asked = await responses.ask(front, body, request)
        form = responses.ResponseForm(front, body, asked)
        return Answer(front, request, asked, form, stream=bool(body.stream))


def _add_rendering(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions/render")
    async def render(body: CompletionBody, request: Request) -> list[rendering.Rendered]:
        """What such a completion would ask of the engine; nothing runs."""
        asked = await completions.ask(front, body, request)
        return rendering.rendered(front, asked)

    @app.post("/v1/chat/completions/render")
    async def render_chat(body: ChatBody, request: Request) -> rendering.Rendered:
        """What such a chat would ask of the engine; nothing runs."""
        asked = await chats.ask(front, body, request)
        return rendering.rendered(front, asked)[0]

    @app.post("/tokenize", response_model_exclude_unset=True)
    async def tokenize(body: TokenizeBody, request: Request) -> rendering.Tokenized:
        """The tokens of a prompt or a conversation."""
        return await rendering.tokenized(front, body, request)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> rendering.Detokenized:
        """The text of tokens."""
        return await rendering.detokenized(front, body, request)
