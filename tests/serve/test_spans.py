"""Spans of OpenTelemetry: one a body, with its counts, behind the client's own, and nothing that was said in it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, Tracer
from serve_support import WAIT, Served, engine_of, serving, until
from test_command import command

from hybridkv.errors import ConfigError
from hybridkv.serve import spans as request_spans

PATH = "/v1/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorded(NonRecordingSpan):
    """A span that remembers what it is told."""

    def __init__(self, name: str, kind: SpanKind, parent: SpanContext, attributes: Mapping[str, Any]) -> None:
        super().__init__(parent)
        self.name, self.kind, self.parent = name, kind, parent
        self.attributes, self.status, self.ended = dict(attributes), StatusCode.UNSET, 0

    def set_attribute(self, key: str, value: Any) -> None:  # noqa: ANN401 - as the interface has it
        assert not self.ended
        self.attributes[key] = value

    def set_status(self, status: Any, description: str | None = None) -> None:  # noqa: ANN401, ARG002 - same
        self.status = status

    def end(self, end_time: int | None = None) -> None:  # noqa: ARG002 - same
        self.ended += 1


class Recorder(trace.NoOpTracer):
    """Remembers spans."""

    def __init__(self) -> None:
        self.spans: list[Recorded] = []

    def start_span(self, name: str, context: Context | None = None, **more: Any) -> Recorded:  # type: ignore[override]  # noqa: ANN401
        parent = trace.get_current_span(context).get_span_context()
        self.spans.append(Recorded(name, more["kind"], parent, more["attributes"]))
        return self.spans[-1]


@pytest.fixture
def recorded() -> Any:  # noqa: ANN401 - a server and its spans
    tracer = Recorder()
    with serving(engine_of("llama"), tracer=tracer) as served:
        yield served, tracer.spans


def test_a_completion_is_a_span(recorded: tuple[Served, list[Recorded]]) -> None:
    served, spans = recorded
    prompt = "tell nobody what was asked here, please"
    body = {"prompt": [prompt, prompt], "n": 2, "max_tokens": 5, "temperature": 0.5, "seed": 3, "ignore_eos": True}
    for stream in (False, True):
        answer = served.client.post(
            PATH, json={**body, "cache_salt": "nobody-knows", "stream": stream}, headers={"traceparent": PARENT}
        )
        assert answer.status_code == 200
    assert len(spans) == 2
    for span in spans:
        until(lambda span=span: span.ended == 1)  # type: ignore[misc]  # its own
        found = span.attributes
        assert (span.name, span.kind, span.status) == ("text_completion tiny:llama", SpanKind.SERVER, StatusCode.UNSET)
        assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
        assert found["gen_ai.usage.input_tokens"] == 2 * len(prompt)
        assert found["gen_ai.usage.output_tokens"] == 4 * 5
        assert found["gen_ai.response.finish_reasons"] == ["length"] * 4
        assert (found["gen_ai.request.temperature"], found["gen_ai.request.seed"]) == (0.5, 3)
        assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.choice.count"]) == (5, 4)
        assert found["gen_ai.response.id"].startswith("cmpl-")
        assert "error.type" not in found
        told = json.dumps(found)
        assert "nobody" not in told
    assert spans[1].attributes["gen_ai.usage.cache_read.input_tokens"] > 2 * (len(prompt) - 16)


def test_what_is_refused_and_who_leaves(recorded: tuple[Served, list[Recorded]]) -> None:
    served, spans = recorded
    served.refused("/v1/chat/completions", 400, messages=[{"role": "user", "content": "a"}], n=5000)
    (span,) = spans
    assert (span.name, span.status, span.ended) == ("chat tiny:llama", StatusCode.ERROR, 1)
    assert span.attributes["error.type"] == "400"
    body = {"prompt": "go on", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with served.client.stream("POST", PATH, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
    until(lambda: spans[1].ended == 1)
    assert spans[1].attributes["error.type"] == request_spans.CLIENT_LEFT
    assert "gen_ai.response.finish_reasons" not in spans[1].attributes
    served.refused(PATH, 400, prompt="a", nonsense=1)  # no body that could be asked: no span
    assert len(spans) == 2


class Collector(BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    got: list[bytes] = []  # noqa: RUF012 - of the one collector

    def do_POST(self) -> None:
        self.got.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_command_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    Collector.got.clear()
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_address[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        with command("--spans") as (process, url):
            answer = httpx2.post(f"{url}{PATH}", json={"prompt": "a", "max_tokens": 2}, timeout=WAIT)
            assert answer.status_code == 200
            process.terminate()
            assert process.wait(WAIT) == 0
        collector.shutdown()
    sent = b"".join(Collector.got)
    assert b"text_completion tiny:llama" in sent
    assert answer.json()["id"].encode() in sent


def test_without_the_sdk() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None; sys.modules['opentelemetry.exporter'] = None\n"
        "from hybridkv.serve import spans\nwith spans.exporting(): pass"
    )
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert ConfigError.__name__ in done.stderr
    assert "hybridkv[cli,serve,otel]" in done.stderr


def test_a_tracer_is_opentelemetrys() -> None:
    assert issubclass(Recorder, Tracer)
