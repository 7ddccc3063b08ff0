"""`hybridkv serve --front-workers`: front processes that are killed, an engine that is killed, clients, drains."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from serve_support import LONG, PATH, WAIT, until
from test_command import command, ended

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine
from warm import children

STREAM = {**LONG, "stream": True}
TWO = ("--front-workers", "2")


def lives(process: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


@contextmanager
def streaming(url: str, **more: object) -> Iterator[Iterator[str]]:
    """A stream of its own connection, after its first line."""
    with httpx2.stream("POST", f"{url}{PATH}", json={**STREAM, **more}, timeout=WAIT) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def running(url: str) -> float:
    """The requests that run."""
    text = httpx2.get(f"{url}/metrics", timeout=WAIT).text
    (line,) = (one for one in text.splitlines() if one.startswith("hybridkv:num_requests_running{"))
    return float(line.rpartition(" ")[2])


def test_fronts_answer_outlive_a_killed_one_and_drain(alone: Engine) -> None:
    expected = alone.generate(["first", "second"], SamplingParams(max_tokens=9, ignore_eos=True))
    with command(*TWO) as (process, line, url):
        assert line.startswith("serving tiny:llama at ")
        for _ in range(4):  # connections of their own
            for prompt, right in zip(("first", "second"), expected, strict=True):
                body = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
                answer = httpx2.post(f"{url}{PATH}", json=body, timeout=WAIT)
                assert answer.json()["choices"][0]["text"] == right.text
        with streaming(url):
            assert running(url) == 1
        until(lambda: running(url) == 0)  # its client has left
        fronts = children(process.pid)
        assert len(fronts) == 2
        many = [streaming(url, max_tokens=900) for _ in range(16)]  # each front has some, but for 1 case in 32,768
        lines = [one.__enter__() for one in many]
        os.kill(fronts[0], signal.SIGKILL)
        cut = 0
        for one in lines:
            try:
                cut += [said for said in one if said][-1] != "data: [DONE]"
            except httpx2.TransportError:
                cut += 1
        assert 0 < cut < 16
        until(lambda: len(children(process.pid)) == 2 and fronts[0] not in children(process.pid))
        for _ in range(8):  # those that the new one gets wait until it is ready
            assert running(url) == 0
        with streaming(url, max_tokens=400) as said:
            process.send_signal(signal.SIGTERM)
            assert [one for one in said if one][-1] == "data: [DONE]"
        status, out, err = ended(process)
    assert (status, out) == (0, "drained: all requests were answered\n")
    assert err == "front process 0 ended with status -9: another one takes its place\n"


def test_killed_engine_ends_its_fronts() -> None:
    with command("--front-workers", "1", alone=True) as (process, _, url):
        (front,) = children(process.pid)
        with streaming(url) as lines:
            os.kill(process.pid, signal.SIGKILL)
            with suppress(httpx2.TransportError):  # the front may end before its client has read the error
                last = [one for one in lines if one][-1]
                assert "the engine's process has ended" in json.loads(last.removeprefix("data: "))["error"]["message"]
        until(lambda: not lives(front))


def test_fronts_cut_off_answers_after_the_grace() -> None:
    with command(*TWO, "--grace", "0.3") as (process, _, url):
        with streaming(url, max_tokens=1000, n=8) as lines:
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx2.TransportError):
                list(lines)
        assert ended(process) == (1, "stopped: 1 answers took longer than the 0.3 s of --grace and were cut off\n", "")


@pytest.mark.thorough
def test_second_signal_ends_fronts_at_once() -> None:
    with command("--front-workers", "1") as (process, _, url):
        (front,) = children(process.pid)
        with streaming(url, max_tokens=1000) as lines:
            process.send_signal(signal.SIGTERM)
            next(lines)
            again = threading.Timer(0.2, process.send_signal, [signal.SIGTERM])
            again.start()
            with suppress(httpx2.TransportError):
                assert [one for one in lines if one][-1] != "data: [DONE]"
        assert process.wait(WAIT) == 128 + signal.SIGTERM
        until(lambda: not lives(front))
