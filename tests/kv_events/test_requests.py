"""Requests that an engine publishes as they end, recorded as a trace."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from threading import Thread, Timer
from typing import Any

import pytest
import zmq

from hybridkv.cli import outcome
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import LoraAdapter
from hybridkv.kv_events import EndedRequest, RequestPublisher, ended_requests
from hybridkv.kv_events.requests import tokens_of
from hybridkv.request import Hints, Request, SamplingParams
from hybridkv.simulator import TraceFile, convert
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.live import LiveRequests

ANYWHERE = "tcp://127.0.0.1:*"


def request(name: str, tokens: Sequence[int], output: Sequence[int] = (), **options: Any) -> Request:  # noqa: ANN401
    made = Request(name, tokens, SamplingParams(max_tokens=9), **options)
    for token in output:
        made.append(token)
    return made


class Recorder:
    """Reads what a publisher sends, in a thread."""

    def __init__(self, publisher: RequestPublisher, seconds: float = 1.5) -> None:
        self.found, self.lost = list[EndedRequest](), list[int]()
        self._thread = Thread(target=self._read, args=(publisher.endpoint, seconds))
        self._thread.start()
        time.sleep(0.4)  # the subscription reaches the publisher

    def _read(self, endpoint: str, seconds: float) -> None:
        self.found += ended_requests(endpoint, seconds, self.lost.append)

    def all(self) -> list[EndedRequest]:
        self._thread.join()
        return self.found


def traced(found: Sequence[EndedRequest]) -> list[TraceRequest]:
    return list(LiveRequests(found))


def test_recorded_requests_are_equal_where_their_tokens_are() -> None:
    with RequestPublisher(ANYWHERE) as publisher:
        recorder, now = Recorder(publisher), time.monotonic()
        publisher.ended(request("a", [1, 2, 3, 4], [5, 6]), now, math.inf)
        publisher.ended(request("b", [1, 2, 3, 4, 5, 6, 7], [8]), now + 1.5, math.inf)
        publisher.ended(request("c", [1, 2, 9], [5]), now + 2.0, math.inf)
    first, second, third = traced(recorder.all())
    assert [one.timestamp_s for one in (first, second, third)] == pytest.approx([0.0, 1.5, 2.0])
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in (first, second, third)] == [
        (4, 2),
        (7, 1),
        (3, 1),
    ]
    ids = [[*one.prompt.token_ids().tolist(), *one.output.token_ids().tolist()] for one in (first, second, third)]
    assert ids[1][:6] == ids[0]
    assert ids[2][:2] == ids[0][:2]
    assert ids[2][2] != ids[0][2]
    assert recorder.lost == []


def test_recorded_requests_of_other_salts_and_adapters_share_nothing() -> None:
    with RequestPublisher(ANYWHERE) as publisher:
        recorder = Recorder(publisher)
        for options in (
            {},
            {"cache_salt": "s"},
            {"cache_salt": "t"},
            {"lora": LoraAdapter("x", "p")},
            {"cache_salt": "s"},
        ):
            publisher.ended(request("a", [1, 2, 3], [4], **options), 0.0, math.inf)
    found = recorder.all()
    assert [len(one.space) for one in found] == [0, 16, 16, 16, 16]
    pieces = [one.prompt.pieces for one in traced(found)]
    assert pieces[1] == pieces[4]
    assert len(set(pieces)) == 4


def test_recorded_requests_keep_tenant_marks_and_hints() -> None:
    hints = Hints(within_s=3.0, ttl_s=9.0)
    with RequestPublisher(ANYWHERE) as publisher:
        recorder = Recorder(publisher)
        publisher.ended(request("a", [1, 2, 3], [4], tenant="us", marks=[2], hints=hints), 0.0, math.inf)
    (one,) = traced(recorder.all())
    assert (one.tenant, one.marks, one.hints) == ("us", (2,), hints)


def ended(arrival_s: float, oldest_s: float = math.inf) -> EndedRequest:
    return EndedRequest(arrival_s, arrival_s + 0.25, oldest_s, 1, tokens_of([int(arrival_s), 0]))


def test_requests_are_written_in_the_order_of_their_arrivals(tmp_path: Path) -> None:
    random = Random(4)
    running, endings = list[float](), list[EndedRequest]()
    for arrival in range(100):
        running.append(float(arrival))
        while running and random.random() < 0.5:
            one = running.pop(random.randrange(len(running)))
            endings.append(ended(one, min(running, default=math.inf)))
    while running:
        one = running.pop()
        endings.append(ended(one, min(running, default=math.inf)))
    assert [one.arrival_s for one in endings] != sorted(one.arrival_s for one in endings)
    assert convert(LiveRequests(endings), tmp_path / "out.jsonl") == 100
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [one["timestamp"] for one in lines] == [1000 * arrival for arrival in range(100)]
    assert [one.took_s for one in TraceFile(tmp_path / "out.jsonl")] == [0.25] * 100


def test_request_is_written_before_the_recording_ends() -> None:
    def endings() -> Iterator[EndedRequest]:
        yield ended(1.0, 0.0)
        yield ended(2.0, 2.5)
        raise AssertionError("the first two can be written")

    requests = iter(LiveRequests(endings()))
    assert [next(requests).timestamp_s, next(requests).timestamp_s] == [0.0, 1.0]


def test_interrupt_keeps_all_requests_that_ended() -> None:
    def endings() -> Iterator[EndedRequest]:
        yield ended(1.0, 0.0)
        raise KeyboardInterrupt

    assert len(traced(endings())) == 1  # type: ignore[arg-type]


def test_requests_without_output_are_left_out() -> None:
    aborted = EndedRequest(0.5, 0.5, 0.5, 2, tokens_of([1, 2]))
    assert [one.timestamp_s for one in traced([aborted, ended(1.0), ended(3.0)])] == [0.0, 2.0]


def test_lost_requests_are_counted() -> None:
    with RequestPublisher(ANYWHERE) as publisher:
        recorder = Recorder(publisher)
        publisher.ended(request("a", [1]), 0.0, math.inf)
        publisher._number += 3
        publisher.ended(request("b", [1]), 0.0, math.inf)
    assert (len(recorder.all()), recorder.lost) == (2, [3])


def test_wrong_endpoints_are_rejected(
    context: zmq.Context[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ("nowhere", "tcp://nowhere", 7):
        with pytest.raises(ConfigError, match="cannot publish requests at"):
            RequestPublisher(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="cannot listen to"):
            list(ended_requests(wrong, 0.1))  # type: ignore[arg-type]
    with context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        thread = Timer(0.4, other.send_multipart, [(b"", bytes(8), b"\x90")])
        thread.start()
        with pytest.raises(ConfigError, match="publishes no requests"):
            list(ended_requests(f"tcp://127.0.0.1:{port}", 5))
        thread.join()
    (tmp_path / "there").write_text("mine", "utf-8")
    asked = [
        "hybridkv",
        "trace",
        "record",
        "tcp://127.0.0.1:1",
        str(tmp_path / "there"),
        "--requests",
        "--seconds",
        "1",
    ]
    for more in ([], ["--topic", "t"], ["--replay", "tcp://127.0.0.1:2"]):
        monkeypatch.setattr("sys.argv", [*asked, *more])
        assert outcome.run() != 0
    assert (tmp_path / "there").read_text("utf-8") == "mine"
