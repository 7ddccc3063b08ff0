"""Throughput, latencies and hits of a load: their arithmetic, and the report in the lines of ``vllm bench serve``.

Figures count the requests that were answered. TPOT is one number for each request with at least two output tokens; ITL
is one for each piece of output after the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hybridkv.bench.driving import Answer

METRICS: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""The latencies by name: their short name and their heading in the report."""
_WIDTH: Final = 50


def figures(
    answers: Sequence[Answer],
    seconds: float,
    *,
    percentiles: Sequence[float] = (99,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the figures under the names of vLLM's saved results; latencies are in milliseconds.

    Args:
        answers: one for each request.
        seconds: duration of the load.
        percentiles: percentiles of each latency, 0 to 100.
        goodput: limits in milliseconds for ttft, tpot and e2el; requests within all of them count as good.
    """
    done = [one for one in answers if not one.error]
    asked, made = (sum(getattr(one, f"{name}_tokens") for one in done) for name in ("prompt", "output"))
    hits = [one.cached_tokens for one in done if one.cached_tokens is not None]
    good = [all(1000 * getattr(one, name) <= most for name, most in (goodput or {}).items()) for one in done]
    peak, at_once = _peaks(done)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": asked,
        "total_output_tokens": made,
        "total_cached_tokens": sum(hits) if hits else None,
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(good) / seconds if goodput else None,
        "output_throughput": made / seconds,
        "total_token_throughput": (asked + made) / seconds,
        "max_output_tokens_per_s": peak,
        "max_concurrent_requests": at_once,
    }
    seen = {
        "ttft": [one.ttft for one in done],
        "tpot": [one.tpot for one in done if one.output_tokens > 1],
        "itl": [gap for one in done for gap in one.itl.tolist()],
        "e2el": [one.e2el for one in done],
    }
    for name, values in seen.items():
        each = 1000 * np.array(values or [0.0])
        found |= {f"mean_{name}_ms": each.mean(), f"median_{name}_ms": np.median(each), f"std_{name}_ms": each.std()}
        found |= {f"p{one:g}_{name}_ms": np.percentile(each, one) for one in percentiles}
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in found.items()}


def _peaks(done: Sequence[Answer]) -> tuple[float, int]:
    """Return the most pieces in one second, and the most requests that ran in one second."""
    if not done:
        return 0.0, 0
    begun = min(one.begun for one in done)
    pieces = np.concatenate([one.times for one in done]) - begun
    ran = np.zeros(int(pieces.max()) + 2, np.int64)
    for one in done:
        ran[int(one.begun - begun)] += 1
        ran[int(one.times[-1] - begun) + 1] -= 1
    return float(np.bincount(pieces.astype(np.int64)).max()), int(ran.cumsum().max())


def report(
    found: Mapping[str, Any], *, rate: float, at_once: int | None, metrics: Sequence[str], percentiles: Sequence[float]
) -> Iterator[str]:
    """Yield the lines of the report: vLLM's, and two about hits.

    Args:
        found: the result of ``figures`` for the same percentiles.
        rate: requests per second that were asked for.
        at_once: limit of requests at once; None: none.
        metrics: names of METRICS, in order.
        percentiles: percentiles to print.
    """
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Successful requests", found["completed"])
    yield _line("Failed requests", found["failed"])
    if at_once is not None:
        yield _line("Maximum request concurrency", at_once)
    if not np.isinf(rate):
        yield _line("Request rate configured (RPS)", rate)
    yield _line("Benchmark duration (s)", found["duration"])
    yield _line("Total input tokens", found["total_input_tokens"])
    yield _line("Total generated tokens", found["total_output_tokens"])
    if (hits := found["total_cached_tokens"]) is not None:
        yield _line("Total cached tokens", hits)
        yield _line("Prefix hit rate (%)", 100 * hits / max(1, found["total_input_tokens"]))
    yield _line("Request throughput (req/s)", found["request_throughput"])
    if found["request_goodput"] is not None:
        yield _line("Request goodput (req/s)", found["request_goodput"])
    yield _line("Output token throughput (tok/s)", found["output_throughput"])
    yield _line("Peak output token throughput (tok/s)", found["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests", float(found["max_concurrent_requests"]))
    yield _line("Total token throughput (tok/s)", found["total_token_throughput"])
    for name in metrics:
        short, heading = METRICS[name]
        yield f"{heading:-^{_WIDTH}}"
        yield _line(f"Mean {short} (ms)", found[f"mean_{name}_ms"])
        yield _line(f"Median {short} (ms)", found[f"median_{name}_ms"])
        yield from (_line(f"P{one:g} {short} (ms)", found[f"p{one:g}_{name}_ms"]) for one in percentiles)
    yield "=" * _WIDTH


def _line(name: str, value: float) -> str:
    shown = value if isinstance(value, int) else f"{value:.2f}"
    return f"{name + ':':<40} {shown:<10}"
