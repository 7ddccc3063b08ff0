"""All routes of a server as one ASGI application.

Generation and rendering routes are for clients. Operations are for the operator of the server: health, models, metrics,
the cache. The page at ``/`` is one document with its style and script, and uPlot, which draws its charts. These files
hold no data of requests. The figures come from ``/live``, which needs a key if the server has keys.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NotRequired

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from opentelemetry.trace import Tracer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from hybridkv.arguments import instance
from hybridkv.runner.async_engine import EventSink
from hybridkv.runner.engine import Engine
from hybridkv.runner.inputs import encode
from hybridkv.serve import embeddings, forms, responses
from hybridkv.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from hybridkv.serve.errors import ApiError, ErrorBody, answer_errors
from hybridkv.serve.front import Front, Piece, ServeOptions, TokenTexts
from hybridkv.serve.gates import BYTES_PER_SECOND, MOST_VALUES, BodyGate, HeadGate, Pace, check_key, check_origin
from hybridkv.serve.generation import Answer, Asked
from hybridkv.serve.response_bodies import ResponseBody
from hybridkv.serve.service import Service

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody, "description": said}
    for status, said in (
        (400, "The body is invalid."),
        (401, "The API key is missing or unknown."),
        (403, "Not allowed for this API key, this Host or this Origin."),
        (404, "No such model."),
        (413, "The body is too long, or has too many values."),
        (429, "The queue is full: try again after Retry-After seconds."),
        (503, "The engine has ended, or the server is shutting down."),
    )
}
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}
_PIECE: Final = 1 << 10  # tokens that are converted to text at once: some 20 ms
_PAGE: Final = {
    "page.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "uplot.css": "text/css",
    "uplot.js": "text/javascript",
    "uplot.LICENSE": "text/plain",
}
"""The files of the page, in the folder ``page``, with their types."""
_PAGE_ROUTES: Final = {name: "/" if name == "page.html" else f"/page/{name}" for name in _PAGE}
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_OPEN_ROUTES: Final = frozenset({"/health", "/ready", *_PAGE_ROUTES.values()})
"""Routes that need no key: health checks, and the files of the page, which have no figures."""


def create_app(
    engine: Engine,
    options: ServeOptions | None = None,
    *,
    events: EventSink | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Make an application that serves ``engine``; its lifespan closes the engine.

    Args:
        engine: has not run yet; nothing else may use it from here on.
        options: how the engine is served.
        events: receives the cache's events, as in AsyncEngine.
        tracer: an OpenTelemetry tracer, which begins a span for each answered body.

    Returns:
        The application; its ``state.front`` is the state that its routes share.
    """
    options = options or ServeOptions()
    return app_of(Front(Service(instance("engine", engine, Engine), options, events), options, tracer))


def app_of(front: Front) -> FastAPI:
    """Make an application with the routes of ``front``; its lifespan enters and closes ``front``."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with front:
            yield

    app = FastAPI(
        title="hybridkv",
        version=version("hybridkv"),
        lifespan=lifespan,
        docs_url=None,  # this page would fetch scripts from another site
        redoc_url=None,
        responses=_ERRORS,
        middleware=_gates(front),
        telemetry={"tracing": False},
    )
    app.state.front = front
    answer_errors(app)
    _add_health(app, front)
    _add_operations(app, front)
    _add_page(app, front)
    _add_generation(app, front)
    _add_rendering(app, front)
    return app


def _gates(front: Front) -> list[Middleware]:
    """Return the checks that a request passes before the routes: origins, keys, bodies."""
    options, gates = front.options, list[Middleware]()
    if options.keys is None:
        hosts = {*options.allow_hosts, socket.gethostname().lower()}
        gates.append(Middleware(HeadGate, check=partial(check_origin, hosts, options.allow_origins)))
    if options.allow_origins:
        gates.append(
            Middleware(CORSMiddleware, allow_origins=options.allow_origins, allow_methods=["*"], allow_headers=["*"])
        )
    gates.append(Middleware(HeadGate, check=partial(check_key, options.keys, _OPEN_ROUTES)))
    gates.append(
        Middleware(BodyGate, most_values=max(MOST_VALUES, 2 * front.max_model_len), pace=Pace(BYTES_PER_SECOND))
    )
    return gates


# generation


def _add_generation(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", response_model=forms.CompletionAnswer, responses=_STREAM)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        asked = await forms.ask_completion(front, body, request)
        return Answer(front, request, asked, forms.CompletionForm(front, body, asked), stream=bool(body.stream))

    @app.post("/v1/embeddings", response_model=embeddings.EmbeddingsAnswer)
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        """Embed prompts."""
        asked, form = await embeddings.ask_embeddings(front, body, request)
        return Answer(front, request, asked, form, stream=False)

    @app.post("/v1/chat/completions", response_model=forms.ChatAnswer, responses=_STREAM)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        asked = await forms.ask_chat(front, body, request)
        return Answer(front, request, asked, forms.ChatForm(front, body, asked), stream=bool(body.stream))

    @app.post("/v1/responses", response_model=responses.ResponseAnswer, responses=_STREAM)
    async def respond(body: ResponseBody, request: Request) -> Response:
        """Answer a conversation, which is not stored."""
        asked = await responses.ask_response(front, body, request)
        return Answer(front, request, asked, responses.ResponseForm(front, body, asked), stream=bool(body.stream))


# rendering: prompts as token ids, without running them


class Tokenized(TypedDict):
    """The tokens of a prompt.

    Attributes:
        count: tokens.
        max_model_len: tokens of prompt and output together.
        tokens: token ids.
        token_strs: the text of each token, if return_token_strs is set.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    """The text of tokens, special tokens included."""

    prompt: str


class Rendered(TypedDict):
    """A prompt as the engine would receive it; ``max_tokens`` bounds its output."""

    request_id: str
    model: str
    token_ids: list[int]
    max_tokens: int
    cache_salt: str | None


def _add_rendering(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions/render")
    async def render(body: CompletionBody, request: Request) -> list[Rendered]:
        """Return the requests that a completion would send to the engine, without running them."""
        return _rendered(front, await forms.ask_completion(front, body, request))

    @app.post("/v1/chat/completions/render")
    async def render_chat(body: ChatBody, request: Request) -> Rendered:
        """Return the request that a chat would send to the engine, without running it."""
        return _rendered(front, await forms.ask_chat(front, body, request))[0]

    @app.post("/tokenize", response_model_exclude_unset=True)
    async def tokenize(body: TokenizeBody, request: Request) -> Tokenized:
        """Tokenize a prompt or a conversation."""
        front.require_model(body.model)
        front.require_text()
        if body.messages is not None:
            ids = await front.tokens.conversation(request, body.messages, body)
        else:
            (ids,) = await front.tokens.ids(request, [body.prompt or ""])
        made: Tokenized = {"count": len(ids), "max_model_len": front.max_model_len, "tokens": ids}
        if body.return_token_strs:
            pieces = [Piece(len(ids), partial(_texts, front, ids, begin)) for begin in range(0, len(ids), _PIECE)]
            made["token_strs"] = [one for texts in await front.tokens.run(request, pieces) for one in texts]
        return made

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Detokenized:
        """Return the text of tokens."""
        front.require_model(body.model)
        front.require_text()
        front.tokens.require_room(body.tokens)
        (text,) = await front.tokens.run(request, [Piece(len(body.tokens), partial(_decoded, front, body.tokens))])
        return {"prompt": text}


def _texts(front: Front, ids: list[int], begin: int) -> list[str]:
    """Return the texts of _PIECE of ``ids``, from place ``begin`` on."""
    texts, befores = TokenTexts(front.loaded.tokenizer), [None, *ids]
    return [texts.text(ids[at], befores[at]) for at in range(begin, min(begin + _PIECE, len(ids)))]


def _decoded(front: Front, ids: list[int]) -> str:
    checked = encode(front.loaded, ids) if ids else []
    return str(front.loaded.tokenizer.decode(checked, skip_special_tokens=False))


def _rendered(front: Front, asked: Asked) -> list[Rendered]:
    """Return each prompt of ``asked``."""
    return [
        {
            "request_id": asked.request_id(number),
            "model": asked.lora or front.name,
            "token_ids": list(ids),
            "max_tokens": asked.sampling.max_tokens,
            "cache_salt": asked.salt,
        }
        for number, ids in enumerate(asked.prompts)
    ]


# operations


class Status(TypedDict):
    """The status of a server."""

    status: str


class Version(TypedDict):
    """The version of hybridkv."""

    version: str


class Model(TypedDict):
    """A served model, or an adapter of it.

    Attributes:
        id: its name.
        object: "model".
        created: seconds since 1970.
        owned_by: "hybridkv".
        max_model_len: tokens of prompt and output together.
        parent: of an adapter, the name of its model.
    """

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    parent: str | None


class Models(TypedDict):
    """All served models."""

    object: str
    data: list[Model]


def _add_health(app: FastAPI, front: Front) -> None:
    @app.get("/health")
    async def health() -> Status:
        """Answer 200 while the engine lives, 503 once it has ended."""
        if not await front.service.alive():
            raise ApiError(503, "the engine has ended: restart the server; its log says why")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Status:
        """Answer 200 if this server takes requests, 503 while it drains."""
        if front.draining:
            raise ApiError(503, "the server is shutting down and takes no more requests: send them to another server")
        return await health()


def _add_operations(app: FastAPI, front: Front) -> None:
    def model(name: str) -> Model:
        return {
            "id": name,
            "object": "model",
            "created": front.created,
            "owned_by": "hybridkv",
            "max_model_len": front.max_model_len,
            "parent": None if front.lora(name) is None else front.name,
        }

    @app.get("/v1/models")
    async def models() -> Models:
        """List the served model and its adapters."""
        return {"object": "list", "data": [*map(model, (front.name, *front.adapters))]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Model:
        """Return the model of that name; 404 for other names."""
        front.require_model(name)
        return model(name)

    @app.get("/version")
    async def hybridkv_version() -> Version:
        """Return the version of hybridkv."""
        return {"version": version("hybridkv")}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(await front.service.metrics_text(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> JSONResponse:
        """Empty the prefix cache; 409 while requests hold blocks."""
        if not await front.service.reset_prefix_cache():
            raise ApiError(409, "running requests hold blocks: try again when no request runs")
        return JSONResponse({"reset": True})


# the page


def _add_page(app: FastAPI, front: Front) -> None:
    def add_file(name: str, kind: str) -> None:
        content = (Path(__file__).parent / "page" / name).read_bytes()

        @app.get(_PAGE_ROUTES[name], include_in_schema=False)
        async def file() -> Response:
            return Response(content, media_type=f"{kind}; charset=utf-8", headers=_PAGE_HEADERS)

    for name, kind in _PAGE.items():
        add_file(name, kind)

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        """Stream a sample of the engine every second, as server-sent events."""
        return _LiveStream(front)


class _LiveStream(StreamingResponse):
    """Samples until the client disconnects or the server drains."""

    def __init__(self, front: Front) -> None:
        self._events = front.service.samples(lambda: front.draining)
        super().__init__(self._events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)
