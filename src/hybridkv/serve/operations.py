"""What whoever runs a server asks: whether it lives and is ready, its version and counts; and to forget its cache."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from typing_extensions import TypedDict

from hybridkv.serve.errors import ApiError
from hybridkv.serve.front import Front
from hybridkv.serve.metrics import Snapshot, SnapshotCollector


class Status(TypedDict):
    """Of a server that answers."""

    status: str


class Version(TypedDict):
    """Of hybridkv."""

    version: str


class Model(TypedDict):
    """One that is served. max_model_len: tokens of prompt and output together."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class Models(TypedDict):
    """All that are served."""

    object: str
    data: list[Model]


def add_operations(app: FastAPI, front: Front) -> None:
    """Their routes."""
    _add_health(app, front)
    _add_models(app, front)

    @app.get("/version")
    async def hybridkv_version() -> Version:
        """Of hybridkv."""
        return {"version": version("hybridkv")}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counts, as Prometheus reads them."""
        snapshot = await front.engine.between_steps(Snapshot.of)
        told = SnapshotCollector(snapshot, front.metrics, front.options.metrics_prefix, front.name)
        return Response(generate_latest(told), media_type=CONTENT_TYPE_LATEST)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> JSONResponse:
        """Forget all that is cached; 409 while requests hold blocks."""
        if not await front.engine.between_steps(lambda engine: engine.cache.reset_prefix_cache()):
            raise ApiError(409, "requests hold blocks: ask again when none runs")
        return JSONResponse({"reset": True})


def _add_health(app: FastAPI, front: Front) -> None:
    @app.get("/health")
    async def health() -> Status:
        """Whether the engine lives; 503 where it has ended."""
        if front.engine.ended:
            raise ApiError(503, "the engine has ended")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Status:
        """Whether requests should be sent here; 503 while the server drains."""
        if front.draining:
            raise ApiError(503, "the server drains: it takes no more requests")
        return await health()


def _add_models(app: FastAPI, front: Front) -> None:
    def model() -> Model:
        return {
            "id": front.name,
            "object": "model",
            "created": front.created,
            "owned_by": "hybridkv",
            "max_model_len": front.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Models:
        """What is served."""
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Model:
        """The model of that name; 404 for others."""
        front.require_model(name)
        return model()
