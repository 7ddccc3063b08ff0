"""A server of a tiny model on loopback, beside an engine of the same model that runs alone."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import torch
from fastapi import FastAPI
from opentelemetry.trace import Tracer

from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.runner.async_engine import EventSink
from hybridkv.schedule import SchedulerStatistics
from hybridkv.serve import ConnectionLimits, ServeOptions, Server, create_app, listen
from hybridkv.serve.front import Front
from hybridkv.serve.service import Service

torch.set_num_threads(1)

LONGEST = 512
"""max_model_len of the models that are served here."""
WAIT = 60.0
PATH = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "go on", "max_tokens": LONGEST - 8, "ignore_eos": True}
"""Fields of a completion that takes some 500 steps."""


def engine_of(name: str, **options: int) -> Engine:
    """Of a tiny model of its own: served or alone, its weights are the same."""
    return Engine(load(f"tiny:{name}"), memory="4MiB", max_model_len=LONGEST, options=EngineOptions(**options))  # type: ignore[arg-type]  # ints by name


@dataclass
class Served:
    """A server that answers. stop: drains it, and waits until it has ended."""

    app: FastAPI
    url: str
    client: httpx2.Client
    stop: Callable[[], None]

    @property
    def front(self) -> Front:
        front: Front = self.app.state.front
        return front

    @property
    def service(self) -> Service:
        service = self.front.service
        assert isinstance(service, Service)
        return service

    @property
    def statistics(self) -> SchedulerStatistics:
        """The engine's, of now."""
        return self.service.engine.statistics()

    @contextmanager
    def streaming(self, **body: object) -> Iterator[Iterator[str]]:
        """Give the lines of a stream behind its first; its client leaves at the end."""
        with self.client.stream("POST", PATH, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            yield lines

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """Give a plain connection."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT) as one:
            yield one

    def post(self, path: str, **body: object) -> dict[str, Any]:
        """The answer to ``body``, which is there."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    def refused(self, path: str, status: int, **body: object) -> dict[str, Any]:
        """The error that ``body`` is answered with."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


@contextmanager
def serving(
    engine: Engine,
    options: ServeOptions | None = None,
    *,
    events: EventSink | None = None,
    tracer: Tracer | None = None,
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008  # a frozen value
) -> Iterator[Served]:
    """``engine`` behind a real server in a thread."""
    with serving_app(create_app(engine, options, events=events, tracer=tracer), limits) as served:
        yield served


@contextmanager
def serving_app(app: FastAPI, limits: ConnectionLimits = ConnectionLimits()) -> Iterator[Served]:  # noqa: B008  # same
    """``app`` behind a real server in a thread."""
    listening = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    answers = threading.Event()
    server = Server(app, answers.set, limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()

    assert answers.wait(WAIT)
    with httpx2.Client(base_url=url, timeout=WAIT) as client:
        try:
            yield Served(app, url, client, stop)
        finally:
            client.close()
            stop()


def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; not for ever."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Give the address of another server."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Quiet:
    """Of a handler that logs nothing."""

    def log_message(self, *_: object) -> None:
        pass
