"""Counts of an engine as Prometheus reads them: asked for when somebody looks, nothing of it is on a step's path."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hybridkv.runner.async_engine import AsyncEngine
from hybridkv.schedule import SchedulerStatistics

PREFIX = "hybridkv:"


class EngineCollector(Collector):
    """``statistics()`` of ``engine``, labelled with its model's name."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """All of now."""
        now = self._engine.statistics()
        for name, said, value in _gauges(now):
            gauge = GaugeMetricFamily(PREFIX + name, said, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, said, value in _counters(now):
            counter = CounterMetricFamily(PREFIX + name, said, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter


def _gauges(now: SchedulerStatistics) -> Iterator[tuple[str, str, float]]:
    yield "num_requests_running", "Requests that run.", now.running
    yield "num_requests_waiting", "Requests that wait.", now.waiting


def _counters(now: SchedulerStatistics) -> Iterator[tuple[str, str, float]]:
    yield "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prompt_tokens
    yield "prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.hit_tokens
    yield "num_preemptions", "Requests that gave their blocks back and wait again.", now.preemptions
    yield "request_success", "Requests that ended.", now.requests_finished
    yield "computed_tokens", "Tokens that ran, those computed again included.", now.computed_tokens
    yield "spec_decode_num_draft_tokens", "Drafts that the model verified.", now.drafted_tokens
    yield "spec_decode_num_accepted_tokens", "Drafts that it accepted.", now.accepted_tokens
    yield "engine_steps", "Steps scheduled.", now.steps
    yield "engine_failed_steps", "Steps that brought no result.", now.failed_steps
