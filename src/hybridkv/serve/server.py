"""One process, one event loop, one engine, until a signal ends it.

first SIGTERM or SIGINT: no new connections, those in hand are answered, then the process ends
second: what the handlers before it did, which is to end at once
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI

from hybridkv.errors import ConfigError
from hybridkv.serve.front import Front

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_BACKLOG: Final = 2048


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
    """``app`` of create_app, served until a signal; ``ready`` is called once it answers.

    ``run(sockets=[listening])`` closes the socket, and the engine, before it returns.
    """

    def __init__(self, app: FastAPI, ready: Callable[[], None] = lambda: None) -> None:
        # its log would say again what the answers say
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, server_header=False))
        self._front: Front = app.state.front
        self._ready = ready
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; it answers behind."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; who listens for ever is let go."""
        self._front.draining = True
        await super().shutdown(sockets)

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
