"""What a server's /metrics say, ours or vLLM's, whatever prefix the names have.

text -> Exposition     values by name and labels, of one moment
two of them -> rates, shares and quantiles of what came in between
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from hybridkv.errors import ConfigError

_EVERYBODY_HAS: Final = ":num_requests_running"
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exposition:
    """Samples of one server at ``at_s``, seconds of any clock. samples: by name, without its prefix."""

    samples: Mapping[str, tuple[tuple[Labels, float], ...]]
    at_s: float

    @classmethod
    def parse(cls, text: str, at_s: float) -> Exposition:
        """ConfigError for what is no exposition, and for one of something else than a server of models."""
        found: list[tuple[str, Labels, float]] = []
        try:
            for family in text_string_to_metric_families(text):
                found += [(one.name, one.labels, one.value) for one in family.samples]
        except (ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"no metrics as Prometheus has them: {error}") from error
        prefix = next((name.removesuffix(_EVERYBODY_HAS) for name, *_ in found if name.endswith(_EVERYBODY_HAS)), None)
        if prefix is None:
            raise ConfigError(f"metrics, but none is called *{_EVERYBODY_HAS}: not those of hybridkv or vLLM")
        samples: dict[str, tuple[tuple[Labels, float], ...]] = {}
        for name, labels, value in found:
            if name.startswith(f"{prefix}:"):
                short = name.removeprefix(f"{prefix}:")
                samples[short] = (*samples.get(short, ()), (labels, value))
        return cls(samples, at_s)

    @property
    def models(self) -> str:
        """Names of the models."""
        names = {labels.get("model_name", "") for labels, _ in self.samples["num_requests_running"]}
        return ", ".join(sorted(names))

    def of(self, name: str, **labels: str) -> float | None:
        """The sum of all samples of that name with ``labels``; None where there is none."""
        found = [value for has, value in self._matching(name, labels)]
        return sum(found) if found else None

    def _matching(self, name: str, labels: Labels) -> Iterator[tuple[Labels, float]]:
        for has, value in self.samples.get(name, ()):
            if labels.items() <= has.items():
                yield has, value

    def by(self, name: str, label: str) -> dict[str, float]:
        """Such sums for each value of ``label``."""
        sums: dict[str, float] = {}
        for has, value in self.samples.get(name, ()):
            sums[has.get(label, "")] = sums.get(has.get(label, ""), 0.0) + value
        return sums

    def since(self, before: Exposition | None, name: str) -> float | None:
        """By how much a counter grew; from nothing where it was set back, or there was nothing before."""
        now = self.of(name)
        return None if now is None else _grown(now, None if before is None else before.of(name))

    def rate(self, before: Exposition, name: str) -> float | None:
        """That, a second."""
        grown, seconds = self.since(before, name), self.at_s - before.at_s
        return None if grown is None or seconds <= 0 else grown / seconds

    def hit_rate(self, before: Exposition | None = None) -> float | None:
        """Share of prompt tokens found in the cache, 0 to 1, since ``before``; None where none came."""
        asked, found = self.since(before, "prefix_cache_queries_total"), self.since(before, "prefix_cache_hits_total")
        return None if not asked or found is None else found / asked

    def quantile(self, name: str, share: float, before: Exposition | None = None) -> float | None:
        """The ``share``-th quantile of a histogram since ``before``, interpolated within its bucket; None of nothing.

        Behind its last edge: that edge, as Prometheus has it.
        """
        now, then = self.by(f"{name}_bucket", "le"), {} if before is None else before.by(f"{name}_bucket", "le")
        counts = sorted((float(edge), _grown(value, then.get(edge))) for edge, value in now.items())
        if not counts or not counts[-1][1]:
            return None
        wanted, last_edge, last = share * counts[-1][1], 0.0, 0.0
        for edge, count in counts:
            if count >= wanted and count > last:
                return (
                    last_edge if math.isinf(edge) else last_edge + (edge - last_edge) * (wanted - last) / (count - last)
                )
            last_edge, last = edge, count
        return last_edge


def _grown(now: float, before: float | None) -> float:
    """From ``before``; all of it where it was set back since."""
    return now if before is None or now < before else now - before
