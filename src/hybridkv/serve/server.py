"""A server process: one event loop and one engine, until a signal ends it; and its connections, with their limits.

first SIGTERM or SIGINT: accept no connections, answer current requests within the grace, then end the process second:
call the handlers that were installed before, which end at once

The limits of connections apply before a route, or a key, is looked at:

    head (URL and headers): bytes, seconds -> 414, 431, 408       body: seconds -> 408; bytes of all bodies -> 503

uvicorn parses HTTP, by httptools. It has none of these limits, and it treats a client that has closed its sending side
as disconnected; this server answers it. A connection handles one request at a time. Input that arrives during a request
is dropped, and the connection closes after the answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any, Final, cast

import httptools
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from hybridkv.arguments import check_fields, integer, real
from hybridkv.errors import ConfigError
from hybridkv.serve.errors import ApiError
from hybridkv.serve.front import Front

MOST_URL_BYTES: Final = 8 << 10
MOST_HEAD_BYTES: Final = 32 << 10
"""Bytes of the URL and all headers; a head that arrives in pieces may have one piece more."""
_SMALL_BODY: Final = 64 << 10
_LINGER_S: Final = 2.0  # a socket that is closed with unread bytes also loses the answer
_MOST_DROPPED: Final = 64 << 20  # more than a request with the longest body
_FIRST_PROBE_S: Final = 0.05
_PROBE_S: Final = 1.0
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a server."""
_BACKLOG: Final = 2048
UNWIND_S: Final = 5
"""Seconds after the grace in which requests that were cut off must end; then their tasks are cancelled."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How long clients may take, and how much memory bodies may take.

    Attributes:
        header_timeout: seconds in which the URL and headers of a request must arrive.
        body_timeout: seconds in which its body must arrive.
        body_memory: bytes of all bodies together, from their arrival until they are answered; bodies of at most 64 KiB
            are not counted.
        grace: seconds for current answers after SIGTERM; then they are cut off.

    Raises:
        ConfigError: a value is not positive.
    """

    header_timeout: float = 10.0
    body_timeout: float = 60.0
    body_memory: int = 128 << 20
    grace: float = 30.0

    def __post_init__(self) -> None:
        check_fields(self, _positive, "header_timeout", "body_timeout", "grace")
        check_fields(self, partial(integer, least=1), "body_memory")


def _positive(name: str, value: object) -> float:
    found = real(name, value)
    if found <= 0:
        raise ConfigError(f"{name} must be positive, got {found}")
    return found


class Bodies:
    """Counts the bytes of all bodies in memory. O(connections with large bodies) when there are too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Connection, int] = {}
        self.total = 0

    def hold(self, owner: Connection, size: int) -> None:
        """Count ``size`` bytes for ``owner``. While the total is too large, refuse the largest arriving body."""
        self.total += size - self._held.get(owner, 0)
        self._held[owner] = size
        while self.total > self._most:
            arriving = [one for one in self._held if one.body_arrives]
            if not arriving:
                return
            largest = max(arriving, key=self._held.__getitem__)
            self.release(largest)
            largest.refuse(
                503, f"the bodies of all requests exceed {self._most} bytes: try again after 1 s", retry=True
            )

    def release(self, owner: Connection) -> None:
        """Count nothing for ``owner`` any more."""
        self.total -= self._held.pop(owner, 0)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits.

    Args:
        limits: of all connections.
        bodies: the bodies of all connections.
        config: uvicorn's.
        server_state: uvicorn's.
        app_state: uvicorn's.
        _loop: uvicorn's.

    Attributes:
        body_arrives: whether the body of a request is incomplete.
        refused: whether an incomplete request was answered with an error.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        bodies: Bodies,
        *,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits, self._bodies = limits, bodies
        self._in_head = self.body_arrives = False
        self._unparsed = 0  # bytes of this head, or since the last of this body
        self._gets_on = False
        self._held = self._dropped = 0
        self._timed: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: tuple[int, str] | None = None
        self.refused = self._drops = self._half_closed = False

    # called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._time("head")

    def connection_lost(self, exc: Exception | None) -> None:
        """Hold nothing more."""
        super().connection_lost(exc)
        self._time(None)
        self._bodies.release(self)

    def data_received(self, data: bytes) -> None:
        """Parse ``data``, and refuse input that is too long or not HTTP."""
        if self.refused or self._drops:
            self._dropped += len(data)
            if self._dropped > _MOST_DROPPED:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        waited, self._gets_on = self._in_head or self.body_arrives, False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # to nothing that is offered: the request is answered as it is
            if upgrade.args[0] < len(data):  # the parser skips the rest of the piece
                self._drop_rest()
        except httptools.HttpParserError:
            if not self._drops:
                self.refuse(*(self._refusal or (400, "this is not a valid HTTP/1.1 request: check the client's URL")))
            return
        if waited and not self._gets_on:
            self._unparsed += len(data)
            if self._unparsed > MOST_HEAD_BYTES:
                self.refuse(*self._too_long())
                return
        if self.body_arrives:
            self._time("body")
        else:
            self._time("head" if self._in_head or self._idle else None)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's may say that it goes on
        """Keep the transport open if a request is complete: its client may still read. Return whether it stays open."""
        if self.refused or self._idle or self._in_head or self.body_arrives:
            return False
        if self.cycle.response_started and self.cycle.scope["method"] == "GET":
            return False  # such a stream may write too rarely to notice otherwise that its client has gone
        self._half_closed = True
        self._probe()
        return True

    # called by the parser

    def on_message_begin(self) -> None:
        """Begin a head. During a request, drop the input instead: HTTP lets clients send it again."""
        if not self._idle:
            self._drop_rest()
            raise ValueError("a request is in hand")  # to the parser, which stops
        super().on_message_begin()
        self._in_head = self._gets_on = True
        self._unparsed = 0

    def on_headers_complete(self) -> None:
        """Begin a body, which may be empty."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if len(self.url) > MOST_URL_BYTES or size > MOST_HEAD_BYTES:
            self._refusal = self._too_long()
        elif self.parser.should_upgrade() and any(_announces_body(*header) for header in self.headers):
            # the parser would take this body for the next request
            self._refusal = (400, "this server offers no upgrade: leave out Upgrade from a request with a body")
        if self._refusal is not None:
            raise ValueError(self._refusal)  # to the parser, which stops
        super().on_headers_complete()  # raises for a target without a path
        self._in_head, self.body_arrives = False, True
        self._gets_on = True
        self._unparsed = self._held = 0

    def on_body(self, body: bytes) -> None:
        """Add a piece of a body."""
        super().on_body(body)
        self._gets_on = True
        self._unparsed = 0
        self._held += len(body)
        if self._held > _SMALL_BODY and not self.cycle.response_complete:
            self._bodies.hold(self, self._held)
            if self.refused:
                raise ValueError("refused")  # to the parser, which stops

    def on_message_complete(self) -> None:
        """End a body."""
        super().on_message_complete()
        self.body_arrives = False

    def on_response_complete(self) -> None:
        """Release the body; close if the client sends nothing more."""
        self._bodies.release(self)
        super().on_response_complete()
        if self._half_closed:
            self.transport.close()

    # called by the server

    def shutdown(self) -> None:
        """Close after the current answer; refuse an incomplete request."""
        if (self._in_head or self.body_arrives) and self._answerable:
            self.refuse(503, "the server is shutting down and takes no more requests: send them to another server")
        else:
            super().shutdown()

    def refuse(self, status: int, message: str, *, retry: bool = False) -> None:
        """Answer an incomplete request with an error, and close. If its answer has begun, close only."""
        if self.refused or self.transport.is_closing():
            return
        self.refused = True
        self._time(None)
        self._bodies.release(self)
        answers, cycle = self._answerable, self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if not answers:
            self.transport.close()
            return
        self.transport.write(_error(status, message, retry=retry))
        with suppress(OSError):  # the peer has gone
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER_S, self.transport.close)

    # private

    @property
    def _idle(self) -> bool:
        """Whether there is no current request."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _answerable(self) -> bool:
        """Whether an error would be the answer to the incomplete request, and to no other."""
        if self.body_arrives:
            return not self.cycle.response_started
        return self._idle

    def _drop_rest(self) -> None:
        """Parse no more input, and close after the current answer."""
        self._drops = True
        self.cycle.keep_alive = False
        self._time(None)

    def _too_long(self) -> tuple[int, str]:
        if len(self.url) > MOST_URL_BYTES:
            return 414, f"the URL has more than {MOST_URL_BYTES} bytes: shorten it"
        return 431, f"the URL and headers have more than {MOST_HEAD_BYTES} bytes: send fewer headers"

    def _time(self, waited_for: str | None) -> None:
        """Start the timer of a head or a body when the connection begins to wait for it."""
        if waited_for == self._timed:
            return
        self._timed = waited_for
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waited_for is not None:
            seconds = self._limits.header_timeout if waited_for == "head" else self._limits.body_timeout
            self._timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self._in_head or (self.body_arrives and not self.cycle.response_complete):
            seconds = self._limits.header_timeout if self._timed == "head" else self._limits.body_timeout
            self.refuse(408, f"the {self._timed} of the request did not arrive in {seconds:g} s: send it faster")
        else:
            self.transport.close()

    def _probe(self, again: float = _FIRST_PROBE_S) -> None:
        """Detect that a client that has sent everything has disconnected: only a write shows it.

        A line that every client skips makes a closed socket answer with a reset, and then the next line fails.
        """
        if self.transport.is_closing() or self._idle:
            return
        if not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(_CONTINUE)
        self.loop.call_later(again, self._probe, _PROBE_S)


def _announces_body(name: bytes, value: bytes) -> bool:
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" \t0") != b"")


def _error(status: int, message: str, *, retry: bool) -> bytes:
    """Return an error answer like that of a route."""
    body = json.dumps(ApiError(status, message).body).encode()
    phrase, again = HTTPStatus(status).phrase, "retry-after: 1\r\n" if retry else ""
    head = (
        f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{again}connection: close\r\n\r\n"
    )
    return head.encode() + body


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Open a listening socket.

    Args:
        host: a name or address of this machine.
        port: a TCP port; 0 takes any free one.
        shared: let other such sockets of this user listen at the port, too: the system shares connections out.

    Raises:
        ConfigError: the address is unknown, taken or not allowed, or the system has no shared ports.
    """
    if shared and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("several processes cannot listen at one port on this system: use --front-workers 1")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=shared)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error}: use an address of this machine and a free port, or port 0"
        ) from error
    # asyncio does it for sockets of its own only; without, bodies wait 40 ms for the headers' acknowledgement
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return listening


class Server(uvicorn.Server):
    """Serves an application until a signal arrives.

    ``run(sockets=[listening])`` closes the socket, and the engine, before it returns.

    Args:
        app: made by ``create_app``.
        ready: called once the server answers.
        limits: of connections.

    Attributes:
        cut_off: connections that were closed with unfinished answers when the grace had passed.
    """

    def __init__(
        self,
        app: FastAPI,
        ready: Callable[[], None] = lambda: None,
        limits: ConnectionLimits = ConnectionLimits(),  # a frozen value
    ) -> None:
        config = uvicorn.Config(
            app,
            http=cast("Any", partial(Connection, limits, Bodies(limits.body_memory))),  # called as a class would be
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
        """Start as uvicorn does, then call ``ready``.

        Args:
            sockets: listening sockets.
        """
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as uvicorn does: end the live streams, and cut off answers that take longer than the grace.

        Args:
            sockets: listening sockets.
        """
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
        """Shut down gracefully at the first signal, within the context."""
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self.handle_exit) for one in SIGNALS}
        try:
            yield
        finally:
            self._restore()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's
        """Shut down gracefully. The next signal goes to the handlers that were installed before.

        Args:
            sig: the signal's number.
            frame: unused.
        """
        self._front.draining = True
        self.should_exit = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
