"""`hybridkv top` and `doctor` show the values of /metrics with any prefix, and report failures in one line."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from serve_support import PATH, Quiet, Served, answering, engine_of, serving

from hybridkv.cli import top
from hybridkv.cli.top import Exposition, metrics_url, read_metrics
from hybridkv.doctor import Diagnosis, examine_server
from hybridkv.errors import ConfigError
from hybridkv.serve import ApiKeys, ServeOptions

RECORDED = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m\x1b[31m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m\x1b[31m"} 7.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{model_name="m",reason="no_space"} 5.0
vllm:num_requests_waiting_by_reason{model_name="m",reason="seats"} 2.0
vllm:num_requests_waiting_by_reason{model_name="m",reason="turn"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{model_name="m"} 1000.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{model_name="m"} 250.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{model_name="m"} 100.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 50.0
vllm:time_to_first_token_seconds_bucket{le="0.2",model_name="m"} 100.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 100.0
vllm:time_to_first_token_seconds_count{model_name="m"} 100.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 10.0
"""
LATER = (
    RECORDED.replace("} 1000.0", "} 1100.0")
    .replace('hits_total{model_name="m"} 250.0', 'hits_total{model_name="m"} 340.0')
    .replace('generation_tokens_total{model_name="m"} 100.0', 'generation_tokens_total{model_name="m"} 120.0')
)


look = partial(top.top_command, every=1.0, once=True, api_key=None)


def drawn(view: top.View) -> list[str]:
    out = StringIO()
    Console(file=out, width=80).print(view.shown())
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())
    return [" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip()]


def test_top_draws_rates_of_recorded_metrics() -> None:
    view = top.View("http://there/metrics")
    view.add(Exposition.parse(RECORDED, 10.0))
    lines = drawn(view)
    assert lines[0] == r"m\x1b[31m at http://there/metrics"
    assert "running 3" in lines
    assert "waiting 7 5 no space, 2 seats" in lines
    assert any(line.startswith("memory in use 25.0% █") for line in lines)
    assert "hit rate - 25.0%" in lines
    assert "time to first token 0.1 0.18 0.198" in lines
    view.add(Exposition.parse(LATER, 12.0))
    lines = drawn(view)
    assert "hit rate 90.0% 30.9% █" in lines
    assert "output tokens/s 10.0 120" in lines


def test_top_counts_from_zero_after_a_server_restart() -> None:
    later, again = Exposition.parse(LATER, 1.0), Exposition.parse(RECORDED, 2.0)
    assert again.rate(later, "generation_tokens_total") == 100
    assert again.hit_rate(later) == 0.25


@given(st.lists(st.floats(0, 0.35), min_size=1, max_size=40), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_top_quantile_lies_in_its_bucket(times: list[float], share: float) -> None:
    edges = [0.1, 0.2, 0.3]
    counts = [sum(one <= edge for one in times) for edge in edges] + [len(times)]
    text = "x:num_requests_running 0\n" + "".join(
        f'x:t_bucket{{le="{edge}"}} {count}\n' for edge, count in zip([*edges, "+Inf"], counts, strict=True)
    )
    found = Exposition.parse(text, 0.0).quantile("t", share)
    assert found is not None
    wanted = share * len(times)
    here = next(at for at, count in enumerate(counts) if count >= wanted and (count or not wanted))
    if wanted:
        assert ([0.0, *edges][here]) <= found <= [*edges, edges[-1]][here]


def test_top_shows_the_counts_of_a_running_server(llama: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        llama.post(PATH, prompt="a prompt that comes twice, of two blocks", max_tokens=6, ignore_eos=True)
    assert look(url=llama.url) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    now = llama.statistics
    groups = llama.service.engine._engine.cache.statistics().groups
    assert f"tiny:llama at {llama.url}/metrics" in lines
    assert f"hit rate - {now.hit_tokens / now.prompt_tokens:.1%}" in lines
    assert f"prompt tokens/s - {now.prompt_tokens}" in lines
    assert any(line.startswith(f"0 tokens {groups[0].held_blocks} {groups[0].cached_blocks} ") for line in lines)
    assert f"finished {now.requests_finished} 0 since top started" in lines


def test_top_refreshes_in_a_terminal(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    class EnoughError(Exception):
        pass

    out, slept = StringIO(), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        llama.post(PATH, prompt="more", max_tokens=5, ignore_eos=True)
        if len(slept) == 3:
            raise EnoughError

    monkeypatch.setattr(top, "console", lambda: Console(file=out, force_terminal=True, width=80))
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(EnoughError):
        look(url=llama.url, every=0.1, once=False)
    assert out.getvalue().count("hit rate") >= 3


def test_top_with_an_invalid_key_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ApiKeys({"sk-all": None, "sk-one": "salt"})
    with serving(engine_of("llama"), ServeOptions(keys=keys, metrics_prefix="vllm")) as served:
        for key, status in ((None, "401 Unauthorized"), ("sk-one", "403 Forbidden")):
            with pytest.raises(ConfigError, match=f"answers {status}: set HYBRIDKV_API_KEY to a key without a salt"):
                look(url=served.url, api_key=key)
        assert look(url=f"{served.url}/metrics", api_key="sk-all") == 0
    assert "running" in capsys.readouterr().out


class Other(Quiet, BaseHTTPRequestHandler):
    """Of something else: what the first part of a path asks for."""

    def do_GET(self) -> None:
        said = {"/page": b"<html>", "/other": b"up 1\n", "/bytes": b"\xff\xfe"}[self.path.removesuffix("/metrics")]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(said)


@pytest.mark.parametrize(
    ("path", "said"), [("/page", "not metrics"), ("/other", "no metric is named"), ("/bytes", "cannot read")]
)
def test_top_of_a_page_without_metrics_is_rejected(path: str, said: str) -> None:
    with answering(Other) as there, pytest.raises(ConfigError, match=said):
        look(url=there + path)


@contextmanager
def asked(to: str | None = None) -> Iterator[tuple[str, list[str | None]]]:
    """A server's address and the keys that it was sent: metrics at /there/metrics, anything else is ``to`` or there."""
    keys: list[str | None] = []

    class Sends(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            there = self.path == "/there/metrics"
            self.send_response(200 if there else 307)
            if not there:
                self.send_header("Location", f"{to or ''}/there/metrics")
            self.end_headers()
            self.wfile.write(RECORDED.encode() if there else b"")

    with answering(Sends) as url:
        yield url, keys


def test_top_does_not_send_its_key_to_a_redirect(capsys: pytest.CaptureFixture[str]) -> None:
    with asked() as (other, keys), asked(other) as (url, _):
        with pytest.raises(ConfigError, match=f"redirects to '{other}', which must not get the key"):
            look(url=url, api_key="sk-all")
        assert keys == []
        assert look(url=url) == 0
        assert keys == [None]
        assert look(url=other, api_key="sk-all") == 0
        assert keys[1:] == ["Bearer sk-all"] * 2
    assert "running" in capsys.readouterr().out


class Refuses(Quiet, BaseHTTPRequestHandler):
    """Answers 500 at /broken, and redirects any other path to a foreign server or to an invalid address."""

    def do_GET(self) -> None:
        self.send_response(500 if self.path.startswith("/broken") else 307)
        self.send_header("Location", "http://127.0.0.1:x/" if self.path.startswith("/invalid") else "http://127.0.0.2/")
        self.end_headers()
        self.wfile.write(b"a body that nothing reads")


@pytest.mark.parametrize(
    ("path", "message"), [("/broken", "answers 500"), ("/foreign", "must not get the key"), ("/invalid", "cannot read")]
)
def test_top_with_a_failed_answer_closes_its_socket(path: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    create_connection = socket.create_connection

    def recorded(address: tuple[str, int], timeout: float, source: None) -> socket.socket:
        opened.append(create_connection(address, timeout, source))
        return opened[-1]

    monkeypatch.setattr(socket, "create_connection", recorded)
    with answering(Refuses) as there, pytest.raises(ConfigError, match=message) as error:
        look(url=there + path, api_key="sk-all")
    assert error.value.__traceback__ is not None  # the error is alive, with the frames that held the answer
    assert [one.fileno() for one in opened] == [-1]


@pytest.mark.parametrize(
    "url", ["", "file:///etc/passwd", "http://", "ftp://a", "http://a b", "http://[", "a:0", "a:x"]
)
def test_top_with_an_invalid_address_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a server"):
        look(url=url)


def test_top_without_a_server_is_rejected() -> None:
    with answering(Other) as there:
        pass
    with pytest.raises(
        ConfigError, match=r"cannot read http://127.0.0.1:\d+/metrics: .* check that a server listens there"
    ):
        look(url=there)


# -- `hybridkv doctor`

PROMPT = "A beginning that all of them share, word by word, again and again. "


def looked_at(*salts: str | None) -> Diagnosis:
    """After requests that begin alike, each with its salt."""
    with serving(engine_of("qwen3_next", remembered_losses=1000)) as served:
        for number, salt in enumerate(salts):
            more = {} if salt is None else {"cache_salt": salt}
            served.post("/v1/completions", prompt=f"{PROMPT}{number}", max_tokens=2, **more)
        return examine_server(served.url, Exposition.parse(read_metrics(metrics_url(served.url), None), 0.0))


def test_doctor_with_shared_prompts_has_no_findings() -> None:
    diagnosis = looked_at(*[None] * 6)
    assert diagnosis.findings == ()
    assert diagnosis.figures.keys() == {
        "found",
        "blocks_and_prefixes",
        "salts",
        "states_read_again",
        "states_and_requests",
        "tiers",
    }


def test_doctor_reports_a_salt_per_request() -> None:
    diagnosis = looked_at(*(f"salt-{number}" for number in range(6)))
    assert [one.name for one in diagnosis.findings] == ["salts"]
