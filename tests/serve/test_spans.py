"""Spans of OpenTelemetry: one a body, with its counts, behind the client's own, and nothing that was said in it."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode
from serve_support import LONG, PATH, Served, engine_of, serving, until

from hybridkv.errors import ConfigError
from hybridkv.serve import generation

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


def test_completion_makes_a_span_with_its_counts(recorded: tuple[Served, list[Recorded]]) -> None:
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


def test_rejected_or_left_request_makes_a_span(recorded: tuple[Served, list[Recorded]]) -> None:
    served, spans = recorded
    served.refused("/v1/chat/completions", 400, messages=[{"role": "user", "content": "a"}], n=5000)
    (span,) = spans
    assert (span.name, span.status, span.ended) == ("chat tiny:llama", StatusCode.ERROR, 1)
    assert span.attributes["error.type"] == "400"
    with served.streaming(**LONG):
        pass
    until(lambda: spans[1].ended == 1)
    assert spans[1].attributes["error.type"] == generation.CLIENT_LEFT
    assert "gen_ai.response.finish_reasons" not in spans[1].attributes
    served.refused(PATH, 400, prompt="a", nonsense=1)  # no body that could be asked: no span
    assert len(spans) == 2


def test_spans_without_the_sdk_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"hybridkv\[cli,serve,otel\]"), generation.exporting():
        pass
