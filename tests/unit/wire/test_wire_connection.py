"""Who may connect, and what a peer can do to a connection: lengths that bomb, hang-ups, silence, another key."""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from hybridkv.errors import ConfigError, WireError, WorkerError
from hybridkv.request import SamplingParams
from hybridkv.step import Csr, Step, StepResult
from hybridkv.wire import (
    MOST_BYTES,
    Link,
    Listener,
    RemoteWorker,
    StepFailure,
    Unreadable,
    connect,
    decode_reply,
    encode_reply,
    encode_step,
    serve,
)
from wire_support import example_step

KEY, OTHER = b"k" * 32, b"o" * 32
ANYWHERE = ("127.0.0.1", 0)
RESULT = encode_reply(StepResult(7, Csr.from_lists([[5], []])))

LENGTHS = {
    "2**62 bytes": struct.pack("!iQ", -1, 1 << 62),
    "2**64 - 1 bytes": struct.pack("!iQ", -1, (1 << 64) - 1),
    "2 GB": struct.pack("!i", (1 << 31) - 1),
    "one more than may be": struct.pack("!i", MOST_BYTES + 1),
    "less than nothing": struct.pack("!i", -5),
    "the least": struct.pack("!i", -(1 << 31)),
    "nothing": struct.pack("!i", 0),
}


class Echo:
    """A worker that samples nothing."""

    def execute(self, step: Step) -> StepResult:
        return StepResult(step.id, Csr.empty(len(step)))


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    here, there = Pipe()
    yield here, there
    here.close()
    there.close()


# -- lengths


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_connection_with_invalid_length_raises_wire_error_on_both_sides(
    length: bytes, ends: tuple[Connection, Connection]
) -> None:
    here, there = ends
    os.write(here.fileno(), length)
    with pytest.raises(WireError):
        serve(there, Echo())
    answer = decode_reply(here.recv_bytes())
    assert isinstance(answer, Unreadable)
    assert answer.error == "WireError"
    worker = RemoteWorker(here)
    worker.send(example_step())
    os.write(there.fileno(), length)
    with pytest.raises(WireError):
        worker.receive()
    assert worker.give_up(WireError("bad length")) == StepFailure(7, "WireError", "bad length")


def test_connection_byte_limit_applies_in_both_directions(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    step = example_step()
    size = len(encode_step(step))
    with pytest.raises(WireError, match=rf"Step 7 has {size:,} bytes, and a message may have {size - 1:,}"):
        RemoteWorker(here, most_bytes=size - 1).send(step)
    RemoteWorker(here, most_bytes=size).send(step)
    with pytest.raises(WireError, match=rf"no whole message of at most {size - 1:,} bytes .*bad message length"):
        serve(there, Echo(), most_bytes=size - 1)


def test_connection_result_above_the_limit_is_a_failure(ends: tuple[Connection, Connection]) -> None:
    class Verbose:
        def execute(self, step: Step) -> StepResult:
            if step.id == 8:
                raise RuntimeError("x" * 1_000_000)
            return StepResult(step.id, Csr(np.array([0, 0, 9999]), np.zeros(9999, np.int32)))

    here, there = ends
    here.send_bytes(encode_step(example_step()))
    here.send_bytes(encode_step(example_step(id=8)))
    thread = threading.Thread(target=serve, args=(there, Verbose()), kwargs={"most_bytes": 20_000})
    thread.start()
    worker = decode_reply(here.recv_bytes()), decode_reply(here.recv_bytes())
    here.close()
    thread.join(20)
    assert all(isinstance(reply, StepFailure) for reply in worker)
    assert "the result has 40," in str(worker[0])
    assert len(str(worker[1])) == 10_000 + len("RuntimeError: ")


@pytest.mark.parametrize("end", [1, 4, 5, 30])
def test_connection_closed_mid_message_by_worker_is_reported(end: int, ends: tuple[Connection, Connection]) -> None:
    """Inside of a length, behind it, or inside of a message: what came is no message, or nothing came."""
    here, there = ends
    data = struct.pack("!i", len(RESULT)) + RESULT
    worker = RemoteWorker(here)
    worker.send(example_step())
    os.write(there.fileno(), data[:end])
    there.close()
    with pytest.raises((WireError, WorkerError), match=r"no whole message|closed the connection"):
        worker.receive()


@pytest.mark.parametrize("end", [1, 5, 30])
def test_connection_closed_mid_message_by_scheduler_is_reported(end: int, ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    data = encode_step(example_step())
    os.write(here.fileno(), (struct.pack("!i", len(data)) + data)[:end])
    here.close()
    with pytest.raises(WireError, match="no whole message"):
        serve(there, Echo())


def test_connection_closed_locally_is_reported(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    worker = RemoteWorker(here)
    worker.send(example_step())
    here.close()
    with pytest.raises(WireError, match="handle is closed"):
        worker.receive()
    with pytest.raises(WorkerError, match="closed the connection"):
        worker.send(example_step())
    there.close()
    with pytest.raises(WireError, match="handle is closed"):
        serve(there, Echo())


def test_connection_without_memory_for_a_message_is_reported() -> None:
    class Small:
        def send_bytes(self, buf: bytes, /) -> None: ...

        def recv_bytes(self, _: int, /) -> bytes:
            raise MemoryError

    with pytest.raises(WireError, match=r"no whole message .*MemoryError"):
        serve(Small(), Echo())


# -- who may connect


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """``call``, begun; what it gave or raised."""
    came: list[object] = []

    def run() -> None:
        try:
            came.append(call())
        except Exception as error:  # noqa: BLE001  # the tests look at it
            came.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, came


@pytest.mark.parametrize("trusted", [False, True])
def test_unauthenticated_tcp_connection_is_rejected(trusted: bool) -> None:
    with connection.Listener(ANYWHERE) as listener:
        here = connection.Client(listener.address)
        there = listener.accept()
    with here, there:
        if trusted:
            here.send_bytes(encode_step(example_step()))
            thread, came = in_thread(lambda: serve(there, Echo(), trusted=True))
            assert isinstance(decode_reply(here.recv_bytes()), StepResult)
            RemoteWorker(here, trusted=True)
            here.close()
            thread.join(20)
            assert came == [1]
        else:
            with pytest.raises(ConfigError, match="the peer of this TCP connection was not asked"):
                serve(there, Echo())
            with pytest.raises(ConfigError, match=r"Listener and connect, with an authkey"):
                RemoteWorker(here)


def test_tcp_listener_without_key_needs_trusted() -> None:
    with pytest.raises(ConfigError, match=r"every process that reaches port 0 can connect: .*authkey.*trusted=True"):
        Listener(ANYWHERE)
    with pytest.raises(ConfigError, match="every process that reaches port 9 can connect"):
        connect(("127.0.0.1", 9))
    for weak in (b"", b"password", "k" * 32):
        with pytest.raises(ConfigError, match="authkey must be 16 bytes or more"):
            Listener(ANYWHERE, authkey=weak)  # type: ignore[arg-type]  # one is no bytes
        with pytest.raises(ConfigError, match="authkey must be 16 bytes or more"):
            connect(ANYWHERE, authkey=weak, trusted=True)  # type: ignore[arg-type]  # same


def exchange(listener: Listener, key: bytes | None, *, trusted: bool = False) -> None:
    """A Step there and its result back."""
    thread, came = in_thread(lambda: serve(listener.accept(20), Echo()))
    with connect(listener.address, authkey=key, trusted=trusted) as link:
        assert isinstance(link, Link)
        worker = RemoteWorker(link)
        worker.send(example_step())
        assert isinstance(worker.receive(), StepResult)
    thread.join(20)
    assert came == [1]


def test_trusted_tcp_listener_needs_no_key() -> None:
    with Listener(ANYWHERE, trusted=True) as listener:
        exchange(listener, None, trusted=True)


@pytest.mark.parametrize("key", [None, KEY])
def test_unix_socket_works_with_and_without_key(key: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "worker"
    with Listener(str(path), authkey=key) as listener:
        exchange(listener, key)
        with pytest.raises(OSError, match="in use"):
            Listener(str(path), authkey=key)
    assert not path.exists()
    with pytest.raises(OSError, match="No such file"):
        connect(str(path), authkey=key)


def raw(listener: Listener, sent: bytes = b"") -> socket.socket:
    """A stranger, who has sent something."""
    assert not isinstance(listener.address, str)
    made = socket.create_connection(listener.address, 20)
    made.sendall(sent)
    return made


def test_listener_rejects_strangers_and_accepts_the_next_peer(caplog: pytest.LogCaptureFixture) -> None:
    """Another key, none, garbage, lengths that bomb, a Step at once, gone at once: none of them ends the listener."""
    step = encode_step(example_step())
    with Listener(ANYWHERE, authkey=KEY, handshake_s=0.3) as listener:
        thread, came = in_thread(lambda: serve(listener.accept(60), Echo()))
        with pytest.raises(WireError, match="the other end has another key, or none"):
            connect(listener.address, authkey=OTHER)
        strangers = [raw(listener)]
        strangers += [raw(listener, data) for data in (b"GET / HTTP/1.1\r\n\r\n", *LENGTHS.values())]
        strangers += [
            raw(listener, struct.pack("!i", len(step)) + step),
            raw(listener, struct.pack("!i", 20) + bytes(20)),
        ]
        strangers[1].close()
        strangers += [raw(listener, b"\0")]  # one byte of a length, then silence
        with connect(listener.address, authkey=KEY, timeout_s=30) as link:
            RemoteWorker(link).send(example_step())
            assert isinstance(decode_reply(link.recv_bytes(1000)), StepResult)
        thread.join(20)
        assert came == [1]
        for one in strangers:
            one.close()
    assert sum("a peer was sent away" in line for line in caplog.messages) == 1 + len(strangers)


def test_listener_with_silent_peers_accepts_at_once() -> None:
    with Listener(ANYWHERE, authkey=KEY, handshake_s=20) as listener:
        silent = [raw(listener) for _ in range(3)]
        begun = time.monotonic()
        exchange(listener, KEY)
        assert time.monotonic() - begun < 10
        for one in silent:
            one.close()


def test_listener_with_many_silent_peers_bounds_its_threads(caplog: pytest.LogCaptureFixture) -> None:
    threads = threading.active_count()
    with Listener(ANYWHERE, authkey=KEY, handshake_s=20) as listener:
        silent = [raw(listener) for _ in range(40)]
        with pytest.raises(TimeoutError, match=r"no peer has shown the key in 0.5 s"):
            listener.accept(0.5)
        assert threading.active_count() - threads <= 2 * 32
        exchange(listener, KEY)
        assert sum("32 newer ones are in their handshake" in line for line in caplog.messages) == 9
        for one in silent:
            one.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads  # one of an earlier test may have ended meanwhile


def test_listener_keeps_a_late_peer_for_the_next_accept() -> None:
    with Listener(ANYWHERE, authkey=KEY) as listener:
        late = raw(listener)
        thread, came = in_thread(lambda: listener.accept(0.2))
        thread.join(20)
        assert isinstance(came[0], TimeoutError)
        late.settimeout(None)
        link = Link(late.detach())
        connection.answer_challenge(link, KEY)
        connection.deliver_challenge(link, KEY)
        link.send_bytes(b"here")
        with listener.accept(20) as accepted, link:
            assert accepted.recv_bytes(10) == b"here"


@pytest.mark.parametrize("says", [b"", b"\0", struct.pack("!i", 20) + b"no challenge at all!", *LENGTHS.values()])
def test_listener_with_wrong_protocol_times_out(says: bytes) -> None:
    with Listener(ANYWHERE, trusted=True) as listener:
        thread, came = in_thread(lambda: listener.accept(20))
        begun = time.monotonic()
        with socket.create_server(ANYWHERE) as server:

            def answer() -> socket.socket:
                accepted, _ = server.accept()
                accepted.sendall(says)
                return accepted

            other, sockets = in_thread(answer)
            with pytest.raises(WireError, match=r"has not shown its key in 0.3 s|has another key, or none"):
                connect(server.getsockname(), authkey=KEY, timeout_s=0.3)
            other.join(20)
            assert isinstance(sockets[0], socket.socket)
            sockets[0].close()
        assert time.monotonic() - begun < 10
        connect(listener.address, trusted=True).close()
        thread.join(20)
        assert isinstance(came[0], Link)
        came[0].close()


def open_sockets() -> set[str]:
    """Of this process by their numbers, none where that cannot be seen."""
    place, found = Path("/proc/self/fd"), set[str]()
    for file in list(place.iterdir()) if place.exists() else ():
        with suppress(OSError):  # the listing itself was open, too
            found.add(str(file.readlink()))
    return {name for name in found if name.startswith("socket:")}


def test_handshake_leaves_no_thread_or_socket() -> None:
    threads, sockets = set(threading.enumerate()), open_sockets()  # those of earlier tests may end meanwhile
    with Listener(ANYWHERE, authkey=KEY) as listener:
        exchange(listener, KEY)
        thread, came = in_thread(lambda: listener.accept(0.5))
        with pytest.raises(WireError):
            connect(listener.address, authkey=OTHER)
        thread.join(20)
        assert isinstance(came[0], TimeoutError)
    assert (set(threading.enumerate()) - threads, open_sockets() - sockets) == (set(), set())


def test_large_step_over_tcp_arrives_whole() -> None:
    """Some megabytes, in as many pieces as the socket makes of them."""
    new = replace(example_step().new_rows[0], token_ids=np.arange(2_000_000, dtype=np.int32), sampling=SamplingParams())
    step = example_step(new_rows=(new,))
    with Listener(ANYWHERE, authkey=KEY) as listener:
        thread, came = in_thread(lambda: serve(listener.accept(20), Echo()))
        with connect(listener.address, authkey=KEY) as link:
            worker = RemoteWorker(link)
            worker.send(step)
            assert isinstance(worker.receive(), StepResult)
        thread.join(20)
    assert came == [1]
