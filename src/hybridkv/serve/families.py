"""Families of metrics in Prometheus' format, with a server's prefix and its model's name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

_MODEL: Final = "model_name"
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of label values and a number."""


class Families:
    """Makes metric families with the server's prefix, whose samples have its model's name.

    ``samples`` is a number, or pairs of label values and a number.
    """

    def __init__(self, prefix: str, model_name: str) -> None:
        self.prefix, self.model_name = prefix, model_name

    def gauge(self, name: str, said: str, samples: float | Samples, *labels: str) -> Metric:
        """Return a gauge."""
        return self._filled(GaugeMetricFamily, name, said, samples, labels)

    def counter(self, name: str, said: str, samples: float | Samples, *labels: str) -> Metric:
        """Return a counter."""
        return self._filled(CounterMetricFamily, name, said, samples, labels)

    def histogram(
        self,
        name: str,
        said: str,
        edges: Sequence[float],
        samples: Iterable[tuple[tuple[str, ...], Sequence[int], float]],
        *labels: str,
    ) -> Metric:
        """Return a histogram.

        A sample has label values, counts and a sum of all values. There is one count for each bucket. Bucket i ends at
        ``edges[i]``, the last one is unbounded.
        """
        made = HistogramMetricFamily(f"{self.prefix}:{name}", said, labels=[_MODEL, *labels])
        ends = [*map(floatToGoString, edges), "+Inf"]
        for values, counts, total in samples:
            buckets = list(zip(ends, map(float, accumulate(counts)), strict=True))
            made.add_metric([self.model_name, *values], buckets, total)
        return made

    def _filled(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        said: str,
        samples: float | Samples,
        labels: Sequence[str],
    ) -> Metric:
        family = kind(f"{self.prefix}:{name}", said, labels=[_MODEL, *labels])
        for values, number in [((), samples)] if isinstance(samples, int | float) else samples:
            family.add_metric([self.model_name, *values], number)
        return family
