"""Connections that send too much, too slowly, or nothing; and one that has sent all, and reads."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import httpx2
import pytest
from serve_support import LONGEST, WAIT, Served, engine_of, serving, until

from hybridkv.errors import ConfigError
from hybridkv.serve import ConnectionLimits, connections
from hybridkv.serve.connections import MOST_HEAD_BYTES, MOST_URL_BYTES, Bodies
from hybridkv.serve.lengths import MOST_BODY_BYTES
from hybridkv.serve.server import UNWIND_S

PATH = "/v1/completions"
GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
LIMITS = ConnectionLimits(header_timeout=0.3, body_timeout=0.6, body_memory=1 << 20, grace=0.5)
HELD = Bodies(LIMITS.body_memory)
LONG: dict[str, Any] = {"prompt": "go on", "max_tokens": LONGEST - 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    """A server with little patience and memory; HELD is what it holds of bodies."""
    with patch.object(connections, "Bodies", return_value=HELD), serving(engine_of("llama"), limits=LIMITS) as served:
        yield served


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    host, _, port = served.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT) as one:
        yield one


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
        found += connection.recv(1 << 16)
    size = int(found.partition(b"content-length: ")[2].partition(b"\r")[0])
    while len(found) < at + 4 + size:
        found += connection.recv(1 << 16)
    return status(found)


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
def test_a_head_without_end_is_refused_at_once(strict: Served, begin: bytes, piece: bytes, expected: int) -> None:
    sent = 0
    with connected(strict) as one:
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
    ],
)
def test_a_head_in_one_piece_has_the_same_bounds(strict: Served, head: bytes, expected: int) -> None:
    with connected(strict) as one:
        one.sendall(head)
        assert answered(one) == expected


def test_what_comes_between_pieces_of_a_body_is_bounded(strict: Served) -> None:
    """Trailers, and extensions of chunks, are headers by another name."""
    chunked = (
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for begin in (chunked + b"5;x=", chunked + b"2\r\n{}\r\n0\r\nX-Trailer: "):
        with connected(strict) as one:
            one.sendall(begin)
            with suppress(ConnectionError):
                for _ in range(40):
                    time.sleep(0.001)  # so that it comes in pieces
                    one.sendall(b"a" * 4096)
            assert status(read(one)) == 431


def test_a_body_of_many_small_pieces_is_read(strict: Served) -> None:
    body = json.dumps({"prompt": "a" * 300, "max_tokens": 1}).encode()
    with connected(strict) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.sendall(head_of_body(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
        for byte in body:
            one.sendall(b"1\r\n%c\r\n" % byte)
        one.sendall(b"0\r\n\r\n")
        assert answered(one) == 200


def test_requests_in_one_piece_are_all_answered(strict: Served) -> None:
    """A head behind a long body, in the same piece, is not as long as the piece."""
    body = json.dumps({"prompt": "a", "max_tokens": 1, "stop": "x" * 200}).encode() + b" " * (2 * MOST_HEAD_BYTES)
    with connected(strict) as one:
        one.sendall(head_of_body(len(body), "/tokenize") + body + GET + b"\r\n" + GET)
        one.sendall(b"Connection: close\r\n\r\n")
        answers = read(one)
    assert [int(one.split(b" ")[0]) for one in answers.split(b"HTTP/1.1 ")[1:]] == [400, 200, 200]


# -- time


@pytest.mark.parametrize("sent", [b"", GET, b"\r\n\r\n"])
def test_a_head_that_never_ends_loses_its_connection(strict: Served, sent: bytes) -> None:
    with ExitStack() as ending:
        slow = [ending.enter_context(connected(strict)) for _ in range(50)]
        for one in slow:
            one.sendall(sent)
        assert waits(strict) < 1
        begun = time.monotonic()
        answers = [read(one) for one in slow]
        assert time.monotonic() - begun < 20 * LIMITS.header_timeout
    assert {status(answer) if answer else None for answer in answers} == {408 if sent == GET else None}


@pytest.mark.parametrize("drop", [b"a", b"\r\n"])
def test_a_head_that_drips_gets_no_more_time(strict: Served, drop: bytes) -> None:
    with connected(strict) as one:
        begun = time.monotonic()
        with suppress(ConnectionError):
            one.sendall(GET + b"X-Slow: " if drop == b"a" else drop)
            while not readable(one):
                assert time.monotonic() - begun < 20 * LIMITS.header_timeout
                one.sendall(drop)
                time.sleep(0.02)


def test_a_body_that_never_ends_is_refused(strict: Served) -> None:
    with connected(strict) as one:
        one.sendall(head_of_body(1000) + b'{"prompt"')
        answer = read(one)
    assert status(answer) == 408
    assert error(answer)["message"] == "the body took too long to arrive"


def test_a_connection_that_is_kept_has_its_time_again(strict: Served) -> None:
    with connected(strict) as one:
        for _ in range(3):
            one.sendall(GET[:10])
            time.sleep(LIMITS.header_timeout * 0.4)
            one.sendall(GET[10:] + b"\r\n")
            assert answered(one) == 200
            time.sleep(LIMITS.header_timeout)
        one.sendall(GET[:10])
        assert status(read(one)) == 408


# -- memory


def test_bodies_that_are_held_have_a_bound(strict: Served) -> None:
    """The largest that still arrives is given up first; small ones are always read."""
    with ExitStack() as ending:
        large = [ending.enter_context(connected(strict)) for _ in range(4)]
        for number, one in enumerate(large):
            one.sendall(head_of_body(MOST_BODY_BYTES) + b" " * (150_000 + number * 50_000))
        until(lambda: HELD.total == 900_000)
        assert strict.post(PATH, prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1
        with connected(strict) as one:
            one.sendall(head_of_body(190_000, "/tokenize") + b'{"prompt": "a"}'.ljust(190_000))
            assert answered(one) == 200
        answer = read(large[3])
        assert status(answer) == 503
        assert b"retry-after: 1" in answer
        assert status(read(large[0])) == 408


def test_what_bodies_held_is_free_again(strict: Served) -> None:
    body = b'{"prompt": "a"}'.ljust(LIMITS.body_memory - 1000)
    headers = {"content-type": "application/json"}
    for _ in range(4):  # the server hears a moment later that somebody left
        until(lambda: strict.client.post("/tokenize", content=body, headers=headers).status_code == 200)
        with connected(strict) as one:
            one.sendall(head_of_body(len(body)) + body[: len(body) // 2])
    alone = strict.client.post("/tokenize", content=body + b" " * 2000, headers=headers)
    assert alone.status_code == 503


# -- the end


def test_half_sent_requests_keep_no_server_from_its_end() -> None:
    limits = ConnectionLimits(header_timeout=WAIT, body_timeout=WAIT, grace=WAIT)
    with serving(engine_of("llama"), limits=limits) as served, ExitStack() as ending:
        asked = (head_of_body(1000) + b"{", GET, b"", GET + b"\r\n")
        half = [ending.enter_context(connected(served)) for _ in asked]
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
    assert error(answers[0])["message"].startswith("the server drains")


def test_what_outlasts_the_grace_is_cut_off() -> None:
    with serving(engine_of("llama"), limits=LIMITS) as served:
        with served.client.stream("POST", PATH, json={**LONG, "stream": True, "n": 8}) as answer:
            lines = answer.iter_lines()
            next(lines)
            begun = time.monotonic()
            stopping = threading.Thread(target=served.stop)
            stopping.start()
            with pytest.raises(httpx2.TransportError):
                list(lines)
            stopping.join(WAIT)
        assert time.monotonic() - begun < LIMITS.grace + UNWIND_S  # when uvicorn would cancel it
        assert served.front.engine.ended


@pytest.mark.parametrize("named", [{"grace": 0}, {"body_timeout": -1.0}, {"body_memory": 0}, {"header_timeout": "9"}])
def test_limits_are_positive(named: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(named))):
        ConnectionLimits(**named)


# -- a client that has sent all


def half_closed(served: Served, **body: object) -> bytes:
    raw = json.dumps(body).encode()
    with connected(served) as one:
        one.sendall(head_of_body(len(raw)) + raw)
        one.shutdown(socket.SHUT_WR)
        return read(one)


def final(answer: bytes) -> bytes:
    """Without what any client skips."""
    return answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


def test_who_has_sent_all_is_answered(strict: Served) -> None:
    asked = {"prompt": "go on", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    answer = final(half_closed(strict, **asked))
    assert status(answer) == 200
    choices = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]
    assert choices[0]["text"] == strict.post(PATH, **asked)["choices"][0]["text"]
    answer = final(half_closed(strict, **asked, stream=True))
    assert status(answer) == 200
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_who_has_sent_all_by_old_http_is_answered_with_nothing_in_front(strict: Served) -> None:
    raw = json.dumps({"prompt": "go on", "max_tokens": 100, "ignore_eos": True}).encode()
    with connected(strict) as one:
        one.sendall(head_of_body(len(raw)).replace(b"HTTP/1.1", b"HTTP/1.0") + raw)
        one.shutdown(socket.SHUT_WR)
        assert read(one).startswith(b"HTTP/1.1 200 OK")


def test_several_requests_in_front_of_an_end_are_answered(strict: Served) -> None:
    with connected(strict) as one:
        one.sendall((GET + b"\r\n") * 3)
        one.shutdown(socket.SHUT_WR)
        assert final(read(one)).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("stream", [False, True])
def test_who_had_sent_all_and_then_leaves_ends_what_it_asked(strict: Served, *, stream: bool) -> None:
    before = strict.front.engine.statistics()
    raw = json.dumps({**LONG, "stream": stream}).encode()
    with connected(strict) as one:
        one.sendall(head_of_body(len(raw)) + raw)
        one.shutdown(socket.SHUT_WR)
        until(lambda: strict.front.engine.statistics().steps > before.steps)
    until(lambda: strict.front.engine.statistics().running == 0 and strict.front.places.taken == 0)
    now = strict.front.engine.statistics()
    assert now.requests_finished == before.requests_finished + 1


def test_nothing_is_written_into_an_answer_in_front_of_another(strict: Served) -> None:
    """Three requests at once, and an end: what asks whether the client is there must not go into the second answer."""
    streamed = json.dumps({"prompt": "go on", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    with connected(strict) as one:
        one.sendall(GET + b"\r\n" + head_of_body(len(streamed)) + streamed + GET + b"\r\n")
        one.shutdown(socket.SHUT_WR)
        answer = read(one)
    _, begins, behind = answer.partition(b"data: ")
    events, ends, last = behind.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert begins
    assert ends
    assert b"100 Continue" not in events
    assert final(last).startswith(b"HTTP/1.1 200 OK")
