"""Connections that send too much, too slowly, or nothing; and one that has sent all, and reads."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import httpx2
import pytest
import serve_support
from serve_support import LONG, LONGEST, PATH, WAIT, Served, engine_of, serving, until

from hybridkv.errors import ConfigError
from hybridkv.serve import ConnectionLimits, Server, server
from hybridkv.serve.gates import MOST_BODY_BYTES
from hybridkv.serve.server import MOST_HEAD_BYTES, MOST_URL_BYTES, UNWIND_S, Bodies

GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
LIMITS = ConnectionLimits(header_timeout=0.3, body_timeout=0.6, body_memory=1 << 20, grace=0.5)
HELD = Bodies(LIMITS.body_memory)


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    """A server with little patience and memory; HELD is what it holds of bodies."""
    with patch.object(server, "Bodies", return_value=HELD), serving(engine_of("llama"), limits=LIMITS) as served:
        yield served


def read(connection: socket.socket) -> bytes:
    """All until the server closes."""
    found = b""
    with suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def answered(connection: socket.socket) -> int:
    """The status of an answer on a connection that goes on."""
    found = b""
    while not (at := found.find(b"\r\n\r\n")) + 1:
        found += more(connection)
    size = int(found.partition(b"content-length: ")[2].partition(b"\r")[0])
    while len(found) < at + 4 + size:
        found += more(connection)
    return status(found)


def more(connection: socket.socket) -> bytes:
    """What comes next, where something must."""
    piece = connection.recv(1 << 16)
    assert piece, "closed without an answer"
    return piece


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    fields: dict[str, Any] = json.loads(body)["error"]
    return fields


def head_of_body(size: int, path: str = PATH) -> bytes:
    said = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    return said.encode()


def waits(served: Served) -> float:
    """Of another client, in seconds."""
    begun = time.perf_counter()
    assert served.client.get("/health").status_code == 200
    return time.perf_counter() - begun


# -- heads


@pytest.mark.parametrize(
    ("begin", "piece", "expected"),
    [
        (GET + b"X-Long: ", b"a" * 4096, 431),
        (GET, b"".join(b"X-%04d: b\r\n" % one for one in range(400)), 431),
        (GET + b"X-Ni", b"ck" * 2048, 431),
        (b"GET /", b"a" * 4096, 414),
        (b"GET /health?", b"a&" * 2048, 414),
    ],
)
def test_endless_head_is_rejected_at_once(strict: Served, begin: bytes, piece: bytes, expected: int) -> None:
    sent = 0
    with strict.connected() as one:
        one.sendall(begin)
        with suppress(ConnectionError):  # it no longer listens
            while sent < 64 << 20 and not readable(one):
                one.sendall(piece)
                sent += len(piece)
        answer = read(one)
    assert status(answer) == expected
    assert error(answer)["type"] == "invalid_request_error"
    assert sent < 16 << 20  # what kernels hold between two processes


def readable(one: socket.socket) -> bool:
    one.settimeout(0)
    try:
        return bool(one.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        one.settimeout(WAIT)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (GET + b"X-Long: " + b"a" * MOST_HEAD_BYTES + b"\r\n\r\n", 431),
        (GET + b"X-Long: " + b"a" * (MOST_HEAD_BYTES - 1024) + b"\r\n\r\n", 200),
        (b"GET /health?" + b"a" * MOST_URL_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (b"GET /health?" + b"a" * (MOST_URL_BYTES - 64) + b" HTTP/1.1\r\nHost: a\r\n\r\n", 200),
        (b"no such thing\r\n\r\n", 400),
        (b"GET http://host HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ],
)
def test_head_in_one_piece_has_the_same_limits(strict: Served, head: bytes, expected: int) -> None:
    with strict.connected() as one:
        one.sendall(head)
        assert answered(one) == expected


def test_chunk_extensions_and_trailers_are_bounded(strict: Served) -> None:
    """Trailers, and extensions of chunks, are headers by another name."""
    chunked = (
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for begin in (chunked + b"5;x=", chunked + b"2\r\n{}\r\n0\r\nX-Trailer: "):
        with strict.connected() as one:
            one.sendall(begin)
            with suppress(ConnectionError):
                for _ in range(40):
                    time.sleep(0.001)  # so that it comes in pieces
                    one.sendall(b"a" * 4096)
            assert status(read(one)) == 431


def test_body_in_many_small_chunks_is_read(strict: Served) -> None:
    body = json.dumps({"prompt": "a" * 300, "max_tokens": 1}).encode()
    with strict.connected() as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.sendall(head_of_body(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
        for byte in body:
            one.sendall(b"1\r\n%c\r\n" % byte)
        one.sendall(b"0\r\n\r\n")
        assert answered(one) == 200


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_upgrade_with_body_is_rejected(strict: Served, *, chunked: bool, apart: bool) -> None:
    body = GET.replace(b"/health", b"/metrics") + b"\r\n"
    head = head_of_body(len(body)).replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    if chunked:
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    with strict.connected() as one:
        one.sendall(head if apart else head + body)
        if apart:
            one.recv(1, socket.MSG_PEEK)  # the refusal is there
            one.sendall(body)
        answer = read(one)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert status(answer) == 400
    assert "leave out Upgrade" in error(answer)["message"]


def test_upgrade_without_body_is_answered(strict: Served) -> None:
    upgrade = GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 0\r\n\r\n"
    with strict.connected() as one:
        for _ in range(2):
            one.sendall(upgrade)
            assert answered(one) == 200
        one.sendall(upgrade + b"behind it")
        assert read(one).count(b"HTTP/1.1 200 OK") == 1


# -- requests behind one in hand


def asks(path: str = PATH, size: int = 0, **body: object) -> bytes:
    raw = json.dumps(body).encode().ljust(size)
    return head_of_body(len(raw), path) + raw


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_pipelined_request_is_not_run(strict: Served, *, stream: bool, apart: bool, ends: bool) -> None:
    """The one in hand is answered in full, with nothing written into it; then the connection closes."""
    before = strict.statistics
    first = asks(prompt="go on", max_tokens=200, ignore_eos=True, stream=stream)
    behind = asks(prompt="go on", max_tokens=1) + GET + b"\r\n" + b"\0no HTTP"
    with strict.connected() as one:
        if apart:
            one.sendall(first)
            until(lambda: strict.statistics.steps > before.steps)
            one.sendall(behind)
        else:
            one.sendall(first + behind)
        if ends:
            one.shutdown(socket.SHUT_WR)
        answer = read(one)
    begun = final(answer)
    assert begun.count(b"HTTP/1.1 ") == 1
    assert begun.startswith(b"HTTP/1.1 200 OK")
    head, _, body = begun.partition(b"\r\n\r\n")
    if stream:
        assert b"100 Continue" not in answer.partition(b"data: ")[2]
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert b"connection: close" in head
        assert json.loads(body)["usage"]["completion_tokens"] == 200
    assert strict.statistics.requests_finished == before.requests_finished + 1


def test_pipelined_request_costs_no_memory_or_time() -> None:
    """A body that never ends, behind a request that is whole, is not counted in its place, and is not waited for."""
    limits, held, size = ConnectionLimits(body_timeout=0.2), Bodies(1 << 20), 300_000
    with (
        patch.object(server, "Bodies", return_value=held),
        serving(engine_of("llama"), limits=limits) as served,
        served.connected() as one,
    ):
        begun = time.monotonic()
        one.sendall(asks(size=size, **LONG, n=8) + head_of_body(200_000, "/tokenize") + b" " * 100_000)
        until(lambda: served.statistics.steps > 0)
        assert held.total == size
        answer = read(one)
        assert time.monotonic() - begun > limits.body_timeout
        until(lambda: held.total == 0)
    assert status(answer) == 200
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_departed_client_with_pipelined_request_is_noticed(strict: Served, *, stream: bool) -> None:
    before = strict.statistics
    with strict.connected() as one:
        one.sendall(asks(**LONG, n=8, stream=stream) + GET + b"\r\n")
        until(lambda: strict.statistics.steps > before.steps)
    until(lambda: strict.service.places.taken == 0)
    assert strict.statistics.steps - before.steps < LONGEST // 2  # of the steps that the answer takes


def test_flood_after_a_request_closes_the_connection(strict: Served) -> None:
    with patch.object(server, "_MOST_DROPPED", 1 << 20), strict.connected() as one:
        one.sendall(asks(**LONG, n=8))
        flood = GET * 50_000
        with pytest.raises(ConnectionError):
            one.sendall(flood * 20)  # more than kernels hold between two processes
    until(lambda: strict.service.places.taken == 0)


# -- time


@pytest.mark.parametrize("sent", [b"", GET, b"\r\n\r\n"])
def test_unfinished_head_closes_the_connection(strict: Served, sent: bytes) -> None:
    with ExitStack() as ending:
        slow = [ending.enter_context(strict.connected()) for _ in range(50)]
        for one in slow:
            one.sendall(sent)
        assert waits(strict) < 1
        begun = time.monotonic()
        answers = [read(one) for one in slow]
        assert time.monotonic() - begun < 20 * LIMITS.header_timeout
    assert {status(answer) if answer else None for answer in answers} == {408 if sent == GET else None}


@pytest.mark.parametrize("drop", [b"a", b"\r\n"])
def test_slow_head_gets_no_extra_time(strict: Served, drop: bytes) -> None:
    with strict.connected() as one:
        begun = time.monotonic()
        with suppress(ConnectionError):
            one.sendall(GET + b"X-Slow: " if drop == b"a" else drop)
            while not readable(one):
                assert time.monotonic() - begun < 20 * LIMITS.header_timeout
                one.sendall(drop)
                time.sleep(0.02)


def test_unfinished_body_is_rejected(strict: Served) -> None:
    with strict.connected() as one:
        one.sendall(head_of_body(1000) + b'{"prompt"')
        answer = read(one)
    assert status(answer) == 408
    assert error(answer)["message"].startswith("the body of the request did not arrive in")


def test_kept_connection_has_a_new_time_limit(strict: Served) -> None:
    with strict.connected() as one:
        for _ in range(3):
            one.sendall(GET[:10])
            time.sleep(LIMITS.header_timeout * 0.4)
            one.sendall(GET[10:] + b"\r\n")
            assert answered(one) == 200
            time.sleep(LIMITS.header_timeout)
        one.sendall(GET[:10])
        assert status(read(one)) == 408


# -- memory


def test_buffered_bodies_are_bounded(strict: Served) -> None:
    """The largest that still arrives is given up first; small ones are always read."""
    with ExitStack() as ending:
        large = [ending.enter_context(strict.connected()) for _ in range(4)]
        for number, one in enumerate(large):
            one.sendall(head_of_body(MOST_BODY_BYTES) + b" " * (150_000 + number * 50_000))
        until(lambda: HELD.total == 900_000)
        assert strict.post(PATH, prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1
        with strict.connected() as one:
            one.sendall(head_of_body(190_000, "/tokenize") + b'{"prompt": "a"}'.ljust(190_000))
            assert answered(one) == 200
        answer = read(large[3])
        assert status(answer) == 503
        assert b"retry-after: 1" in answer
        assert status(read(large[0])) == 408


def test_buffered_bodies_free_their_memory(strict: Served) -> None:
    body = b'{"prompt": "a"}'.ljust(LIMITS.body_memory - 1000)
    headers = {"content-type": "application/json"}
    for _ in range(4):  # the server hears a moment later that somebody left
        until(lambda: strict.client.post("/tokenize", content=body, headers=headers).status_code == 200)
        with strict.connected() as one:
            one.sendall(head_of_body(len(body)) + body[: len(body) // 2])
    alone = strict.client.post("/tokenize", content=body + b" " * 2000, headers=headers)
    assert alone.status_code == 503


# -- the end


def test_half_sent_request_does_not_delay_shutdown() -> None:
    limits = ConnectionLimits(header_timeout=WAIT, body_timeout=WAIT, grace=WAIT)
    with serving(engine_of("llama"), limits=limits) as served, ExitStack() as ending:
        asked = (head_of_body(1000) + b"{", GET, b"", GET + b"\r\n")
        half = [ending.enter_context(served.connected()) for _ in asked]
        for one, sent in zip(half, asked, strict=True):
            one.sendall(sent)
        assert answered(half[3]) == 200
        begun = time.monotonic()
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        answers = [read(one) for one in half]
        for one in half:
            one.close()
        stopping.join(WAIT)
        assert time.monotonic() - begun < 5
    assert [status(one) if one else None for one in answers] == [503, 503, None, None]
    assert error(answers[0])["message"].startswith("the server is shutting down")


def test_request_longer_than_the_grace_is_cut_off() -> None:
    with serving(engine_of("llama"), limits=LIMITS) as served:
        with served.streaming(**LONG, n=8) as lines:
            begun = time.monotonic()
            stopping = threading.Thread(target=served.stop)
            stopping.start()
            with pytest.raises(httpx2.TransportError):
                list(lines)
            stopping.join(WAIT)
        assert time.monotonic() - begun < LIMITS.grace + UNWIND_S  # when uvicorn would cancel it
        assert served.service.engine.ended


def test_rejected_request_in_shutdown_reads_its_error() -> None:
    """It lingers past the grace, so that its client reads the error."""
    made: list[Server] = []

    def make(*arguments: Any) -> Server:  # noqa: ANN401  # as serving calls it
        made.append(Server(*arguments))
        return made[-1]

    with (
        patch.object(serve_support, "Server", make),
        serving(engine_of("llama"), limits=LIMITS) as served,
        served.connected() as one,
    ):
        one.sendall(head_of_body(100) + b"{")
        assert waits(served) < WAIT  # by then the half is there
        served.stop()
        assert status(read(one)) == 503
    assert [server.cut_off for server in made] == [0]


@pytest.mark.parametrize("named", [{"grace": 0}, {"body_timeout": -1.0}, {"body_memory": 0}, {"header_timeout": "9"}])
def test_connection_limit_that_is_not_positive_is_rejected(named: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(named))):
        ConnectionLimits(**named)


# -- a client that has sent all


def half_closed(served: Served, **body: Any) -> bytes:  # noqa: ANN401  # fields of a body
    with served.connected() as one:
        one.sendall(asks(**body))
        one.shutdown(socket.SHUT_WR)
        return read(one)


def final(answer: bytes) -> bytes:
    """Without what any client skips."""
    return answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


def test_half_closed_client_gets_its_answer(strict: Served) -> None:
    asked = {"prompt": "go on", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    answer = final(half_closed(strict, **asked))
    assert status(answer) == 200
    choices = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]
    assert choices[0]["text"] == strict.post(PATH, **asked)["choices"][0]["text"]
    answer = final(half_closed(strict, **asked, stream=True))
    assert status(answer) == 200
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_half_closed_http_1_0_client_gets_a_plain_answer(strict: Served) -> None:
    with strict.connected() as one:
        one.sendall(asks(prompt="go on", max_tokens=100, ignore_eos=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
        one.shutdown(socket.SHUT_WR)
        assert read(one).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_client_that_leaves_ends_its_request(strict: Served, *, stream: bool) -> None:
    before = strict.statistics
    with strict.connected() as one:
        one.sendall(asks(**LONG, stream=stream))
        one.shutdown(socket.SHUT_WR)
        until(lambda: strict.statistics.steps > before.steps)
    until(lambda: strict.statistics.running == 0 and strict.service.places.taken == 0)
    now = strict.statistics
    assert now.requests_finished == before.requests_finished + 1
