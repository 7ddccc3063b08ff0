"""A span of OpenTelemetry for each body that is answered, by its conventions for generative models.

    traceparent of the client -> span: from the question to the last token, or to what went wrong

Spans tell of counts, times and how it was sampled, never of prompts, outputs or salts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

from opentelemetry import propagate
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from starlette.requests import Request

from hybridkv.errors import ConfigError
from hybridkv.serve.errors import ClientGoneError, api_error

if TYPE_CHECKING:  # which makes these
    from hybridkv.serve.generation import Asked, Part

_COMPLETIONS: Final = "/v1/completions"
_SERVICE: Final = "hybridkv"
CLIENT_LEFT: Final = "client_left"
"""The kind of error of a span whose client went away."""


class RequestSpan:
    """A span of one body: ``asked``, by ``request``, of ``model``. Leaving its context ends it, and tells the error."""

    def __init__(self, tracer: Tracer, model: str, request: Request, asked: Asked) -> None:
        self._asked, self._begun = asked, time.monotonic()
        self._outputs = self._cached = 0
        self._finished: dict[int, str] = {}
        operation = "text_completion" if request.url.path == _COMPLETIONS else "chat"
        sampling = asked.sampling
        told: dict[str, str | int | float | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _SERVICE,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": asked.id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.choice.count": asked.outputs,
            "gen_ai.usage.input_tokens": sum(map(len, asked.prompts)),
        }
        self._span = tracer.start_span(
            f"{operation} {model}",
            context=propagate.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in told.items() if value is not None},
        )

    def came(self, part: Part) -> None:
        """Tell something new of an output."""
        tokens, done = len(part.increment.token_ids), part.increment.completion
        if tokens and not self._outputs:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._begun)
        self._outputs += tokens
        if done is None:
            return
        self._finished[part.choice] = str(done.finish_reason)
        if part.choice % self._asked.sampling.n == 0:  # its others found the same prompt
            self._cached += done.hit_tokens
            self._span.set_attribute("hybridkv.queue_seconds", done.queue_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, ClientGoneError):
            self._span.set_attribute("error.type", str(api_error(error).status))
            self._span.set_status(StatusCode.ERROR)
        elif error is not None:  # a task that is cancelled has lost its client, too
            self._span.set_attribute("error.type", CLIENT_LEFT)
        self._span.set_attribute("gen_ai.usage.output_tokens", self._outputs)
        if len(self._finished) == self._asked.outputs:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", self._cached)
            reasons = [one for _, one in sorted(self._finished.items())]
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        self._span.end()


@contextmanager
def exporting() -> Iterator[Tracer]:
    """Give a tracer that sends spans to OTEL_EXPORTER_OTLP_ENDPOINT; the last ones when its context ends.

    ConfigError if OpenTelemetry's SDK is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # an extra
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  # same
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415  # same
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  # same
    except ImportError as error:
        raise ConfigError("spans need OpenTelemetry's SDK: pip install 'hybridkv[cli,serve,otel]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": _SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield provider.get_tracer(_SERVICE)
    finally:
        provider.shutdown()
