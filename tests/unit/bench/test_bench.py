"""A load is drawn, sent and measured as its options say: by hand, and against a server with known delays."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from cli_support import error, run
from hybridkv.bench import (
    METRICS,
    Answer,
    LoadRequest,
    arrivals,
    custom,
    drive,
    figures,
    ordinary_tokens,
    random_load,
    repeated_prefixes,
    report,
    sharegpt,
)
from hybridkv.errors import ConfigError

FIRST_S, NEXT_S, LAST_S = 0.2, 0.05, 0.3
"""Seconds before the first token, before each other, and before the counts at the end."""

ANSWERS = [
    Answer(10.0, (11.0, 11.5, 12.5), prompt_tokens=10, output_tokens=4, cached_tokens=5),
    Answer(11.0, (11.25,), prompt_tokens=6, output_tokens=1, cached_tokens=0),
    Answer(11.0, error="refused"),
]
"""The first has two tokens in one piece."""


def encode(text: str) -> list[int]:
    """A token of each byte, between two special ones."""
    return [256, *text.encode(), 257]


# -- arithmetic


def test_figures_of_a_load_equal_those_by_hand() -> None:
    found = figures(ANSWERS, 5.0, percentiles=(50, 99, 99.9), goodput={"ttft": 500, "tpot": 500})
    assert (found["completed"], found["failed"], found["total_input_tokens"], found["total_output_tokens"]) == (
        2,
        1,
        16,
        5,
    )
    assert (found["total_cached_tokens"], found["request_throughput"], found["output_throughput"]) == (5, 0.4, 1.0)
    assert (found["total_token_throughput"], found["request_goodput"]) == (4.2, 0.2)
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (3.0, 2)
    means = {name: found[f"mean_{name}_ms"] for name in METRICS}
    assert means == pytest.approx({"ttft": 625, "tpot": 500, "itl": 750, "e2el": 1375})
    assert found["std_ttft_ms"] == pytest.approx(375)
    # between 250 and 1000 ms, linearly
    assert [found[f"p{one}_ttft_ms"] for one in ("50", "99", "99.9")] == pytest.approx([625, 992.5, 999.25])
    assert json.loads(json.dumps(found)) == found


def test_report_has_the_lines_of_vllm_and_the_hits() -> None:
    found = figures(ANSWERS, 5.0, percentiles=(99.0,))
    lines = [*report(found, rate=2.0, at_once=4, metrics=["tpot", "e2el"], percentiles=[99.0])]
    assert "\n".join(one.rstrip() for one in lines) == (
        """\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Maximum request concurrency:             4
Request rate configured (RPS):           2.00
Benchmark duration (s):                  5.00
Total input tokens:                      16
Total generated tokens:                  5
Total cached tokens:                     5
Prefix hit rate (%):                     31.25
Request throughput (req/s):              0.40
Output token throughput (tok/s):         1.00
Peak output token throughput (tok/s):    3.00
Peak concurrent requests:                2.00
Total token throughput (tok/s):          4.20
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          500.00
Median TPOT (ms):                        500.00
P99 TPOT (ms):                           500.00
----------------End-to-end Latency----------------
Mean E2EL (ms):                          1375.00
Median E2EL (ms):                        1375.00
P99 E2EL (ms):                           2477.50
=================================================="""
    )


def test_figures_without_answers_are_zero() -> None:
    found = figures([ANSWERS[2]], 1.0)
    assert (found["completed"], found["total_cached_tokens"], found["mean_ttft_ms"]) == (0, None, 0.0)


# -- arrivals


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    assert arrivals(3, float("inf"), 1.0, 0).tolist() == [0, 0, 0]
    assert arrivals(4, 2.0, float("inf"), 0).tolist() == [0.5, 1.0, 1.5, 2.0]
    spread = {}
    for burstiness in (0.25, 1.0, 4.0):
        at = arrivals(4000, 8.0, burstiness, 1)
        assert at[-1] == pytest.approx(500)
        gaps = np.diff(at)
        spread[burstiness] = gaps.std() / gaps.mean()
    # of a gamma distribution: 1 / sqrt(shape)
    assert spread == pytest.approx({0.25: 2.0, 1.0: 1.0, 4.0: 0.5}, rel=0.1)


def test_drive_keeps_order_delays_and_the_limit_of_requests_at_once() -> None:
    running, most, sent = 0, 0, dict[int, float]()

    async def ask(number: int) -> Answer:
        nonlocal running, most
        sent[number] = time.perf_counter()
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return Answer(0.0, (1.0,), prompt_tokens=number)

    advanced = list[None]()
    delays = np.array([0, 0, 0, 0, 0.3])
    begun = time.perf_counter()
    answers, seconds = asyncio.run(drive(range(5), ask, delays, at_once=2, advance=lambda: advanced.append(None)))
    assert [one.prompt_tokens for one in answers] == [0, 1, 2, 3, 4]
    assert (most, len(advanced)) == (2, 5)
    assert sent[4] - begun >= 0.3
    assert seconds >= 0.32


# -- loads


def test_random_load_has_lengths_prefix_and_seed() -> None:
    tokens = ordinary_tokens(encode)
    assert tokens == sorted({*b" abcdefghijklmnopqrstuvwxyz"})
    made = random_load(tokens, 200, input_len=20, output_len=10, prefix_len=7, range_ratio=0.5, seed=3)
    assert len({one.token_ids[:7] for one in made}) == 1
    assert len({one.token_ids for one in made}) == 200
    assert {len(one.token_ids) - 7 for one in made} == {*range(10, 31)}
    assert {one.output_tokens for one in made} == {*range(5, 16)}
    assert {token for one in made for token in one.token_ids} == {*tokens}
    assert made == random_load(tokens, 200, input_len=20, output_len=10, prefix_len=7, range_ratio=0.5, seed=3)
    assert made != random_load(tokens, 200, input_len=20, output_len=10, prefix_len=7, range_ratio=0.5, seed=4)


def test_repeated_prefixes_are_shared_evenly() -> None:
    made = repeated_prefixes(range(500), 21, prefixes=4, prefix_len=8, suffix_len=3, output_len=2)
    beginnings = [one.token_ids[:8] for one in made]
    assert sorted(map(beginnings.count, {*beginnings})) == [5, 5, 5, 5]
    assert beginnings != sorted(beginnings, key=beginnings.index)
    assert {len(one.token_ids) for one in made} == {11}
    with pytest.raises(ConfigError, match="3 requests cannot have 4 prefixes"):
        repeated_prefixes(range(500), 3, prefixes=4, prefix_len=8, suffix_len=3, output_len=2)


def test_custom_load_is_read_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n{"prompt": "two", "x": 1}\n', "utf-8")
    made = custom(path, encode, 5, output_len=9)
    assert {*made} == {LoadRequest(tuple(encode(one)), 9, one) for one in ("one", "two")}
    assert made[:2] == made[2:4]
    with pytest.raises(ConfigError, match="prompts without output_tokens: give --custom-output-len"):
        custom(path, encode, 2, output_len=-1)
    path.write_text('{"text": "one"}\n', "utf-8")
    with pytest.raises(ConfigError, match=r"is not such a data set: .*prompt"):
        custom(path, encode, 2, output_len=9)


def test_sharegpt_load_leaves_short_and_long_conversations_out(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    talks = [("why not", "because"), ("w", "because"), ("w" * 1200, "because"), ("long enough", "")]
    said = [{"id": 1, "conversations": [{"from": "human", "value": one} for one in talk]} for talk in talks]
    path.write_text(json.dumps([*said, {"conversations": [{"value": "alone"}]}, {}]), "utf-8")
    made = sharegpt(path, encode, 2)
    assert made == [LoadRequest(tuple(encode("why not")), 9, "why not")] * 2
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        sharegpt(tmp_path / "none", encode, 2)


# -- over HTTP


class Delayed(BaseHTTPRequestHandler):
    """Streams three pieces, the last of two tokens, with known delays, and the counts after one more."""

    protocol_version = "HTTP/1.1"
    bodies: list[dict[str, Any]] = []  # noqa: RUF012  # of the one server

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """List one model."""
        self._answer({"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        """Tokenize, or answer a completion or a chat."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._answer({"tokens": encode(body["prompt"])})
        elif self.path == "/detokenize":
            self._answer({"prompt": bytes(body["tokens"]).decode()})
        elif body.get("temperature") == 2:
            self._answer({"error": {"message": "too hot"}}, 400)
        else:
            self.bodies.append(body)
            self._stream(chat="messages" in body)

    def _answer(self, said: object, status: int = 200) -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, *, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._send(b": ping\n\n")
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for delay, text in zip((FIRST_S, NEXT_S, NEXT_S), ("a", "", "bc"), strict=True):
            time.sleep(delay)
            self._event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
        time.sleep(LAST_S)
        counts = {"prompt_tokens": 8, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}
        self._event({"choices": [], "usage": counts})
        self._send(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, said: object) -> None:
        data = f"data: {json.dumps(said)}\r\n\r\n".encode()
        self._send(data[:9])  # an event may arrive in two parts
        self._send(data[9:])

    def _send(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


@pytest.fixture
def port() -> Iterator[str]:
    Delayed.bodies.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Delayed) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield str(server.server_port)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_bench_serve_measures_the_delays_of_a_server(endpoint: str, port: str, tmp_path: Path) -> None:
    load = ("--num-prompts", "3", "--random-input-len", "5", "--random-output-len", "4", "--num-warmups", "1")
    shown = (
        "--percentile-metrics",
        "ttft,tpot,itl,e2el",
        "--metric-percentiles",
        "50,99",
        "--goodput",
        "ttft:1 tpot:9999",
    )
    saved = ("--save-result", "--result-dir", tmp_path, "--result-filename", "a.json", "--temperature", "0")
    text = run("bench", "serve", "--port", port, "--endpoint", endpoint, *load, *shown, *saved, "--ignore-eos").stdout
    found = json.loads((tmp_path / "a.json").read_text("utf-8"))
    for line in ("Successful requests: +3", "Total input tokens: +24", "Total generated tokens: +12"):
        assert re.search(line, text)
    assert re.search(r"Prefix hit rate \(%\): +75\.00", text)
    assert re.search(r"Request goodput \(req/s\): +0\.00", text)
    assert (found["model_id"], found["request_rate"], found["num_prompts"]) == ("small", "inf", 3)
    # a sleep may take longer, never shorter; what comes after the last token does not count
    least = {"ttft": FIRST_S, "e2el": FIRST_S + 2 * NEXT_S}
    for name, seconds in least.items():
        assert 1000 * seconds <= found[f"p50_{name}_ms"] < 1000 * (seconds + LAST_S), name
    # two pieces after the first, of three tokens
    assert found["mean_tpot_ms"] == pytest.approx((found["mean_e2el_ms"] - found["mean_ttft_ms"]) / 3)
    assert found["mean_itl_ms"] == pytest.approx((found["mean_e2el_ms"] - found["mean_ttft_ms"]) / 2)
    assert found["duration"] >= least["e2el"] + LAST_S
    assert len(Delayed.bodies) == 4
    for body in Delayed.bodies:
        assert (body["model"], body["temperature"], body["ignore_eos"]) == ("small", 0, True)
        length = len(body["prompt"]) if "prompt" in body else len(body["messages"][0]["content"])
        assert (length, body.get("max_tokens", body.get("max_completion_tokens"))) == (5, 4)


def test_bench_serve_reports_failed_requests(port: str) -> None:
    done = run("bench", "serve", "--port", port, "--num-prompts", "2", "--temperature", "2", code=1)
    assert re.search("Failed requests: +2", done.stdout)
    assert 'failed: status 400: {"error": {"message": "too hot"}}' in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--request-rate", "0"), "--request-rate and --burstiness must be above 0"),
        (("--random-range-ratio", "1"), "--random-range-ratio must be at least 0 and below 1, got 1"),
        (("--dataset-name", "custom"), "--dataset-name custom needs --dataset-path"),
        (("--dataset-path", "a"), "--dataset-name random has no --dataset-path"),
        (("--percentile-metrics", "ttft,x"), "--percentile-metrics 'x' is unknown: use ttft, tpot, itl, e2el"),
        (("--metric-percentiles", "101"), "--metric-percentiles '101' must be a number of 0 to 100"),
        (("--goodput", "itl:5"), "--goodput 'itl:5' must be METRIC:MS"),
        (("--goodput", "ttft:-1"), "--goodput '-1' must be a number"),
        (("--port", "1"), "http://127.0.0.1:1/v1/models gives no answer"),
    ],
)
def test_bench_serve_with_invalid_option_prints_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in error("bench", "serve", *arguments)
