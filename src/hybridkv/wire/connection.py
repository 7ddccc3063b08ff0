"""Connections: the peers that may connect, the size of messages, and both ends.

    pipe            parent and child: no other process has it, no key
    Unix socket     every process that may write to its file: no key, unless one is given
    TCP             every process that reaches the port: both ends show one key before anything else is sent

The handshake is that of multiprocessing: each end answers a random challenge with its HMAC (MD5 before Python 3.12,
SHA-256 since), in messages of at most 256 bytes. Nothing is unpickled. The key does not encrypt, and it does not
protect later messages against changes on their way: over an untrusted network, use a tunnel.

``serve`` runs at the worker. ``RemoteWorker`` represents the worker at the scheduler.

    Steps, in order            0   1   2   3                4
    sent                      [0] [1] [2] [3]              [4]     after: 1, 2 and 3 have failed by then
    the worker                 ok  ok  raises  refused: builds on 2   ok
    replies, one a message     R0  R1  F2      F3 is skipped          R4

Replies come in the order of the Steps. A worker continues after an error: Scheduler.fail undoes its Step, and ``after``
of the next Step says which Steps count. A connection carries whole byte strings.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol, Self

from hybridkv.errors import ConfigError, HybridKVError, SchemaError, WireError, WorkerError
from hybridkv.step import Step, StepResult
from hybridkv.wire.messages import Reply, StepFailure, Unreadable, decode_reply, decode_step, encode_reply, encode_step

logger = logging.getLogger(__name__)

MOST_BYTES: Final = 1 << 28
"""Default for the most bytes of a message: 67 million token ids, or 512 new rows of 128k tokens each."""
HANDSHAKE_S: Final = 10.0
"""Default seconds for both ends to show their key; an end that has it needs milliseconds."""
_MOST_HANDSHAKES: Final = 32
"""Unfinished handshakes of one Listener."""
_LEAST_KEY: Final = 16
_TCP: Final = (socket.AF_INET, socket.AF_INET6)

Address = tuple[str, int] | str
"""Host and port of TCP, or the path of a Unix socket."""


class Channel(Protocol):
    """Byte strings in order. A multiprocessing.connection.Connection is one, over a pipe, a socket or TCP.

    A TimeoutError of either method passes through to the caller.
    """

    def send_bytes(self, buf: bytes, /) -> None:
        """Send a byte string.

        Args:
            buf: the bytes.

        Raises:
            OSError: the other end is closed.
        """
        ...

    def recv_bytes(self, maxlength: int, /) -> bytes:
        """Wait for the next byte string.

        Args:
            maxlength: the most bytes to accept.

        Raises:
            EOFError: the other end is closed; also ConnectionError.
            OSError: the byte string is longer.
        """
        ...


class Link(Connection):
    """A connection to a peer that has shown the key, or needs none; made by ``connect`` and ``Listener.accept``."""


class Listener:
    """Waits for peers.

    Args:
        address: (host, port) for TCP, where port 0 takes any free one; or the path of a Unix socket.
        authkey: the same 16 bytes or more at both ends, such as secrets.token_bytes(32). Pass it where other users
            cannot read it, for example in the environment of a child process.
        trusted: on TCP, accept any peer without a key.
        handshake_s: seconds that a peer has to show the key.

    Raises:
        ConfigError: TCP has neither a key nor ``trusted``, or the key is too short.
        OSError: the address is taken.
    """

    def __init__(
        self, address: Address, *, authkey: bytes | None = None, trusted: bool = False, handshake_s: float = HANDSHAKE_S
    ) -> None:
        _check_key(address, authkey, trusted=trusted)
        self._authkey, self._handshake_s = authkey, handshake_s
        self._path = Path(address) if isinstance(address, str) else None
        if isinstance(address, str):
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                self._socket.bind(address)
                self._socket.listen()
            except OSError:
                self._socket.close()
                raise
        else:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._socket = socket.create_server(address, family=family)
        self._socket.settimeout(0)
        self._lock = threading.Lock()  # between a handshake that ends and one that is ended
        self._handshakes: dict[socket.socket, threading.Thread] = {}  # oldest first
        self._links = SimpleQueue[Link]()
        self._has_link, self._tell_link = socket.socketpair()  # one byte for each link in the queue
        self._has_link.settimeout(0)

    @property
    def address(self) -> Address:
        """The address where it listens; for port 0, with the port that was free."""
        name = self._socket.getsockname()
        return name if isinstance(name, str) else (name[0], name[1])

    def accept(self, timeout_s: float | None = None) -> Link:
        """Return the next peer that has shown the key.

        Each handshake has its own thread, so silent peers delay no other peer. A peer that fails is logged and
        disconnected, and so is the oldest of more than 32 unfinished handshakes. If a handshake ends after this call
        has returned, the next call returns its peer.

        Args:
            timeout_s: seconds to wait; None waits for ever.

        Raises:
            TimeoutError: no peer has shown the key in time.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ready = wait([self._has_link, self._socket], None if end == math.inf else max(0.0, end - time.monotonic()))
            if self._has_link in ready:
                with contextlib.suppress(BlockingIOError):  # another thread took it
                    self._has_link.recv(1)
                    return self._links.get()
            elif ready:
                link = self._begin()
                if link is not None:
                    return link
            if time.monotonic() >= end:
                raise TimeoutError(f"no peer has shown the key in {timeout_s:g} s")

    def _begin(self) -> Link | None:
        """Accept a connection and begin its handshake. Return the link if it needs no key."""
        try:
            accepted, peer = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer hung up before
            return None
        if self._authkey is None:
            return _linked(accepted, None, self._handshake_s, listening=True)
        if len(self._handshakes) >= _MOST_HANDSHAKES:
            self._send_away(next(iter(self._handshakes)), f"{_MOST_HANDSHAKES} newer ones are in their handshake")
        own = accepted.dup()
        thread = threading.Thread(target=self._shake_hands, args=(accepted, own, peer or self._path), daemon=True)
        self._handshakes[own] = thread
        thread.start()
        return None

    def _shake_hands(self, accepted: socket.socket, own: socket.socket, peer: object) -> None:
        """Make ``accepted`` a link, in its thread. Other threads end the handshake through ``own``, the same socket."""
        with own:
            try:
                link = _linked(accepted, self._authkey, self._handshake_s, listening=True)
            except WireError as error:
                if self._handshakes.pop(own, None) is not None:  # else another thread has ended it, and logged why
                    logger.warning("a peer was sent away (%s): %s", peer, error)
                return
            with self._lock:
                if self._handshakes.pop(own, None) is None:
                    link.close()
                    return
                self._links.put(link)
                self._tell_link.send(b"\0")

    def _send_away(self, own: socket.socket, why: str) -> None:
        """End the handshake of ``own`` if it is unfinished, and wait for its thread."""
        with self._lock:
            thread = self._handshakes.pop(own, None)
        if thread is not None:
            with contextlib.suppress(OSError):  # it ends just now
                own.shutdown(socket.SHUT_RDWR)
            logger.warning("a peer was sent away: %s", why)
            thread.join()

    def close(self) -> None:
        """Accept no more peers, and end unfinished handshakes. Links that ``accept`` returned stay open."""
        self._socket.close()
        for own in list(self._handshakes):
            self._send_away(own, "the listener was closed")
        while not self._links.empty():
            self._links.get().close()
        self._has_link.close()
        self._tell_link.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    address: Address, *, authkey: bytes | None = None, trusted: bool = False, timeout_s: float = HANDSHAKE_S
) -> Link:
    """Connect to a Listener.

    Args:
        address: of the Listener.
        authkey: as in Listener.
        trusted: as in Listener.
        timeout_s: seconds for the TCP connection, and for the handshake.

    Raises:
        ConfigError: as in Listener.
        OSError: no process listens there; for example, TimeoutError.
        WireError: the other end has another key or none, or does not answer in time.
    """
    _check_key(address, authkey, trusted=trusted)
    if isinstance(address, str):
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(address)
        except OSError:
            made.close()
            raise
    else:
        made = socket.create_connection(address, timeout_s)
    return _linked(made, authkey, timeout_s, listening=False)


def require_trust(channel: Channel, *, trusted: bool) -> None:
    """Raise ConfigError for a TCP connection that did not ask its peer for a key. Callers vouch for other channels."""
    if trusted or isinstance(channel, Link) or not isinstance(channel, Connection):
        return
    try:
        seen = socket.socket(fileno=channel.fileno())
    except OSError:  # a pipe, or closed
        return
    family = seen.family
    seen.detach()
    if family in _TCP:
        raise ConfigError(
            "the peer of this TCP connection was not asked for a key: make the connection with hybridkv.wire.Listener "
            "and connect, with an authkey, or give trusted=True if the peer was checked elsewhere"
        )


def next_message(channel: Channel, most_bytes: int) -> bytes:
    """Return the next message. Raises EOFError or ConnectionError once the other end is closed.

    Raises WireError for a message that is cut or longer than ``most_bytes``, before memory is allocated for it.
    """
    try:
        return channel.recv_bytes(most_bytes)
    except (EOFError, ConnectionError, TimeoutError):
        raise
    except (OSError, MemoryError) as error:
        raise WireError(
            f"no whole message of at most {most_bytes:,} bytes came ({type(error).__name__}: {error}), and nothing "
            "after it can be read: raise most_bytes at both ends if messages are larger"
        ) from error


def check_size(what: str, data: bytes, most_bytes: int) -> None:
    """Raise WireError for a message that the other end would refuse as too long."""
    if len(data) > most_bytes:
        raise WireError(
            f"{what} has {len(data):,} bytes, and a message may have {most_bytes:,}: start fewer rows at once, or "
            "raise most_bytes at both ends"
        )


def _check_key(address: Address, authkey: bytes | None, *, trusted: bool) -> None:
    if authkey is None:
        if not isinstance(address, str) and not trusted:
            raise ConfigError(
                f"every process that reaches port {address[1]} can connect: give both ends one authkey, such as "
                "secrets.token_bytes(32), or give trusted=True if other processes cannot reach it"
            )
    elif not isinstance(authkey, bytes) or len(authkey) < _LEAST_KEY:
        given = f"{len(authkey)} bytes" if isinstance(authkey, bytes) else type(authkey).__name__
        raise ConfigError(f"authkey must be {_LEAST_KEY} bytes or more, got {given}: use secrets.token_bytes(32)")


def _linked(made: socket.socket, authkey: bytes | None, seconds: float, *, listening: bool) -> Link:
    """Return ``made`` as a connection, after both ends have shown ``authkey`` if there is one."""
    made.settimeout(None)
    if made.family in _TCP:
        # the length of a message and the rest are two writes: do not hold the rest back for the first one's receipt
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with made.dup() as second:
        link = Link(made.detach())
        if authkey is not None:
            try:
                _handshake(link, second, authkey, seconds, listening=listening)
            except WireError:
                link.close()
                raise
    return link


def _handshake(link: Link, second: socket.socket, authkey: bytes, seconds: float, *, listening: bool) -> None:
    """Raise WireError unless the other end shows ``authkey`` in time. ``second`` is the same socket."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        with contextlib.suppress(OSError):  # gone already
            second.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    failed: Exception | None = None
    try:
        # the listening end answers nothing before it has seen the key
        for part in (deliver_challenge, answer_challenge) if listening else (answer_challenge, deliver_challenge):
            part(link, authkey)
    except (AuthenticationError, AssertionError, EOFError, OSError, ValueError) as error:
        failed = error  # AssertionError: Python before 3.12, for bytes that are no challenge
    finally:
        timer.cancel()
        timer.join()
    if late.is_set():
        raise WireError(f"the other end has not shown its key in {seconds:g} s: does it use one?") from failed
    if failed is not None:
        raise WireError(
            f"the other end has another key, or none ({type(failed).__name__}: {failed}): both need the same authkey"
        ) from failed


class Executor(Protocol):
    """Runs Steps, such as hybridkv.runner.ModelRunner."""

    def execute(self, step: Step) -> StepResult:
        """Run the forward of a Step, and return its result.

        Args:
            step: the Step.
        """
        ...


# -- the worker's end


def serve(channel: Channel, worker: Executor, *, trusted: bool = False, most_bytes: int = MOST_BYTES) -> int:
    """Run the Steps that arrive and send one reply each, until the other end is closed.

    If ``worker`` refuses a Step, or its forward raises, the reply is a StepFailure. Later Steps that build on it get a
    StepFailure too, and ``worker`` never receives them. An unreadable message is answered with Unreadable. Then this
    function raises, because nothing after such a message can be trusted. A TimeoutError of ``channel`` passes through.

    Args:
        channel: a pipe, or a Link of ``connect`` or ``Listener.accept``.
        worker: runs the Steps.
        trusted: accept another TCP connection; its peer was asked for a key elsewhere.
        most_bytes: the most bytes of a message, in both directions.

    Returns:
        How many Steps had a result.

    Raises:
        ConfigError: ``channel`` is another TCP connection, and ``trusted`` is not set.
        WireError: a message is not a Step, is longer than ``most_bytes``, or is cut.
        SchemaError: a message has another schema version.
    """
    require_trust(channel, trusted=trusted)
    served = 0
    failed: int | None = None
    while True:
        try:
            step = decode_step(next_message(channel, most_bytes))
        except (EOFError, ConnectionError):
            return served
        except (SchemaError, WireError) as error:
            _answer(channel, encode_reply(Unreadable.of(error)))
            raise
        if failed is not None and step.after >= failed:
            refusal = WorkerError(
                f"Step {step.id} was not run: it builds on Step {step.after}, and Step {failed} failed here"
            )
            _answer(channel, encode_reply(StepFailure.of(step.id, refusal)))
            continue
        reply, ran = _run(worker, step, most_bytes)
        served, failed = served + ran, None if ran else step.id
        _answer(channel, reply)


def _run(worker: Executor, step: Step, most_bytes: int) -> tuple[bytes, bool]:
    """Run ``step``. Return the reply, and whether it is a result."""
    try:
        reply = encode_reply(worker.execute(step))
        check_size("the result", reply, most_bytes)
    except Exception as error:  # whatever a forward raises costs its Step, not the worker
        # the message of a named error is enough, without a traceback
        trace = None if isinstance(error, HybridKVError) else error
        logger.warning("step %d failed: %s", step.id, error, exc_info=trace)
        return encode_reply(StepFailure.of(step.id, error)), False
    return reply, True


def _answer(channel: Channel, reply: bytes) -> None:
    try:
        channel.send_bytes(reply)
    except TimeoutError:
        raise
    except OSError as error:
        logger.warning("a reply was lost: the other end is closed (%s)", error)


# -- the scheduler's end


@dataclass(frozen=True, slots=True)
class RemoteStatistics:
    """Counts so far.

    Attributes:
        steps: Steps that were sent.
        failures: how often the Steps in flight failed.
        sent_bytes: bytes of all Steps.
        received_bytes: bytes of all replies.
    """

    steps: int
    failures: int
    sent_bytes: int
    received_bytes: int


class RemoteWorker:
    """A worker at the other end of a channel: Steps go out, and one reply to each comes back, in order.

        reply = worker.receive()
        if isinstance(reply, StepFailure):
            scheduler.fail(reply.id, str(reply))
        else:
            scheduler.update(reply)

    Use it in one thread. ``send`` waits while the channel is full: unread replies to all Steps in flight must fit in
    it, with 12 bytes a row each.

    Args:
        channel: as in ``serve``.
        trusted: as in ``serve``.
        most_bytes: as in ``serve``.

    Raises:
        ConfigError: as in ``serve``.
    """

    def __init__(self, channel: Channel, *, trusted: bool = False, most_bytes: int = MOST_BYTES) -> None:
        require_trust(channel, trusted=trusted)
        self._channel, self._most_bytes = channel, most_bytes
        self._in_flight: deque[int] = deque()
        self._given_up = -1
        self._counts = dict.fromkeys(("steps", "failures", "sent_bytes", "received_bytes"), 0)

    @property
    def num_in_flight(self) -> int:
        """Steps without a reply."""
        return len(self._in_flight)

    def send(self, step: Step) -> None:
        """Send a Step.

        Args:
            step: the Step.

        Raises:
            WireError: the Step cannot be encoded, or has more than ``most_bytes``.
            SchemaError: the Step has another schema version.
            WorkerError: the worker has closed the connection.
        """
        data = encode_step(step)
        check_size(f"Step {step.id}", data, self._most_bytes)
        try:
            self._channel.send_bytes(data)
        except TimeoutError:
            raise
        except OSError as error:
            raise self._gone() from error
        self._in_flight.append(step.id)
        self._counts["steps"] += 1
        self._counts["sent_bytes"] += len(data)

    def receive(self) -> StepResult | StepFailure:
        """Wait for the reply to the oldest Step in flight.

        A failure has the id of that Step, even if a later Step failed first at the worker. Give it to
        ``Scheduler.fail``, which fails all Steps in flight, as this object does.

        Raises:
            WorkerError: no Step is in flight, or the worker has closed the connection.
            WireError: the reply is invalid, longer than ``most_bytes`` or cut.
            SchemaError: the reply has another schema version.
        """
        self._require_one()
        reply = self._next_reply()
        if not isinstance(reply, StepResult):
            return self._failed(reply.error, reply.message)
        self._in_flight.popleft()
        return reply

    def give_up(self, error: BaseException) -> StepFailure:
        """Fail all Steps in flight, for example after a time-out. Later replies to them are skipped.

        Args:
            error: the reason.

        Returns:
            The failure of the oldest Step, as ``receive`` does.

        Raises:
            WorkerError: no Step is in flight.
        """
        self._require_one()
        return self._failed(type(error).__name__, str(error))

    def statistics(self) -> RemoteStatistics:
        """Return the counts so far."""
        return RemoteStatistics(**self._counts)

    def _require_one(self) -> None:
        if not self._in_flight:
            raise WorkerError("no Step is in flight, so no reply will come: send a Step first")

    def _failed(self, error: str, message: str) -> StepFailure:
        """Fail all Steps in flight. Return the failure of the oldest."""
        self._counts["failures"] += 1
        oldest, self._given_up = self._in_flight[0], self._in_flight[-1]
        self._in_flight.clear()
        return StepFailure(oldest, error, message)

    def _next_reply(self) -> Reply:
        """Return the next reply to a Step that was not failed here."""
        while True:
            try:
                data = next_message(self._channel, self._most_bytes)
            except (EOFError, ConnectionError) as error:
                raise self._gone() from error
            self._counts["received_bytes"] += len(data)
            reply = decode_reply(data)
            if isinstance(reply, Unreadable) or reply.id > self._given_up:
                return reply

    def _gone(self) -> WorkerError:
        return WorkerError(
            f"the worker closed the connection, {len(self._in_flight)} Steps unanswered: its log says why; a new "
            "worker knows none of the rows, so start it with a new scheduler"
        )
