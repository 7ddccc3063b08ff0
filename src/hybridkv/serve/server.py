"""One process, one event loop, one engine, until a signal ends it.

first SIGTERM or SIGINT: no new connections, requests in hand are answered within the grace, then the process ends
second: what the handlers before it did, which is to end at once
"""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, cast

import uvicorn
from fastapi import FastAPI

from hybridkv.errors import ConfigError
from hybridkv.serve.connections import Connection, ConnectionLimits, protocol
from hybridkv.serve.front import Front

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_BACKLOG: Final = 2048
UNWIND_S: Final = 5
"""Seconds after the grace in which requests that were cut off must end; then their tasks are cancelled."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any free one. ConfigError where that cannot be."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen at {host}, port {port}: {error}") from error
    # asyncio does it for sockets of its own only; without, bodies wait 40 ms for the headers' acknowledgement
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return listening


class Server(uvicorn.Server):
    """``app`` of create_app, served until a signal.

    ``run(sockets=[listening])`` closes the socket, and the engine, before it returns.

    Args:
        app: of create_app.
        ready: is called once it answers.
        limits: of connections.

    Attributes:
        cut_off: connections closed because the grace had passed, with answers in hand.
    """

    def __init__(
        self,
        app: FastAPI,
        ready: Callable[[], None] = lambda: None,
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008  # a frozen value
    ) -> None:
        config = uvicorn.Config(
            app,
            http=cast("Any", protocol(limits)),  # which makes one, as a class would
            ws="none",
            log_config=None,  # its log would say again what the answers say
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(limits.grace) + UNWIND_S,
        )
        super().__init__(config)
        self._grace = limits.grace
        self.cut_off = 0
        self._front: Front = app.state.front
        self._ready = ready
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; it answers behind."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; streams without an end are let go, and what is not answered within the grace is cut off."""
        self._front.draining = True
        cutting = asyncio.get_running_loop().call_later(self._grace, self._cut_off)
        await super().shutdown(sockets)
        cutting.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # which ends its request, as if the client had gone
            if not cast("Connection", connection).refused:  # else it was answered, and lingers
                self.cut_off += 1

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """While it serves, the first signal drains."""
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self.handle_exit) for one in _SIGNALS}
        try:
            yield
        finally:
            self._restore()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's
        """Drain. The next signal is not caught here."""
        self._front.draining = True
        self.should_exit = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
