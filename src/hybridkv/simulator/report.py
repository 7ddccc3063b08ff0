"""What came of a replay: counts of the scheduler and latencies of simulated time.

Everything here follows from the inputs alone: equal inputs give byte-equal documents. Wall time is no part of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from hybridkv.cache import EndStatistics, TenantStatistics

SCHEMA: Final = "hybridkv.replay"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and nearest-rank percentiles; zeros where nothing was measured. Seconds, to a microsecond."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """Of ``values``, in any order. O(n log n)."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)

        def percentile(share: int) -> float:
            return round(ordered[max(math.ceil(len(ordered) * share / 100) - 1, 0)], 6)

        return cls(round(math.fsum(ordered) / len(ordered), 6), percentile(50), percentile(90), percentile(99))


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What became of one group's blocks. kind: class of its spec. block_size: tokens.

    published: blocks that got a key. evictions: keys lost again. cached_blocks: with a key at the end.
    copies: blocks copied before a forward, so that a state that can be hit is not written to.
    """

    kind: str
    layers: int
    block_size: int
    published: int
    evictions: int
    cached_blocks: int
    copies: int


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay.

    source: name of the trace or workload. bad_lines: lines of it that were left out. machine: in words, the one
    that times are of. prompt_tokens, output_tokens: of the requests. hit_tokens: prompt tokens found in the cache when
    a request was admitted for the first time; None where the trace tells lengths alone, and nobody knows.
    computed_tokens: all that ran, recomputation after a preemption included.
    peak_usage: largest share of the blocks in use, 0 .. 1. mean_running: rows per step.
    longest_tokens: prompt and output of the longest request. simulated_s: end of the last step, in trace time.
    time_to_first_token_s: from arrival to the end of the step that gave the first token.
    time_per_output_token_s: of each request with two or more, the mean over those after the first. timed: False where
    steps take no time; then both are zeros, and null in the document.
    caching_off: why no request could hit anything, None when they could. groups: in the order of the plan.
    refusals: how often a waiting request was looked at and not admitted, by reason; once a step and request.
    moves, moved_bytes: blocks that passed from slab to slab. checkpoints, declined_checkpoints: stops at which a
    state was kept, and at which there was no room for it (natural layout). ends, missed_tokens, missed_a_gib_more: of
    what an eviction kept that ranks ends, as CacheStatistics has them; tenants: as there, where they have shares.
    misses: prompt tokens that were not hit, by reason (MissReason), where misses are explained.
    drafted_tokens, accepted_tokens: drafts that were verified, and those that came true, where there is speculation.
    """

    source: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    longest_tokens: int
    bad_lines: int
    hit_tokens: int | None
    computed_tokens: int
    preemptions: int
    peak_usage: float
    steps: int
    mean_running: float
    simulated_s: float
    time_to_first_token_s: Distribution
    time_per_output_token_s: Distribution
    machine: str = ""
    timed: bool = True
    caching_off: str | None = None
    groups: tuple[GroupReport, ...] = ()
    refusals: dict[str, int] = field(default_factory=dict)
    moves: int = 0
    moved_bytes: int = 0
    checkpoints: int = 0
    declined_checkpoints: int = 0
    ends: tuple[EndStatistics, ...] = ()
    missed_tokens: int | None = 0
    missed_a_gib_more: int | None = 0
    tenants: tuple[TenantStatistics, ...] = ()
    misses: dict[str, int] = field(default_factory=dict)
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def hit_rate(self) -> float | None:
        """hit_tokens / prompt_tokens, None where hits are unknown."""
        if self.hit_tokens is None:
            return None
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def without_hits(self) -> ReplayReport:
        """Return the same, with everything unknown that follows from which tokens are equal."""
        unknown = replace(self, hit_tokens=None, missed_tokens=None, missed_a_gib_more=None)
        return replace(unknown, ends=(), tenants=(), misses={})

    def to_dict(self, settings: Mapping[str, object]) -> dict[str, object]:
        """The document: schema, the settings it was made under, then every field and the hit rate."""
        counts = asdict(self)
        if not counts.pop("timed"):
            counts |= {"time_to_first_token_s": None, "time_per_output_token_s": None}
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "source": counts.pop("source"),
            "settings": dict(settings),
            **counts,
            "hit_rate": self.hit_rate,
        }

    def to_json(self, settings: Mapping[str, object]) -> str:
        """The document as text, one line per value."""
        return json.dumps(self.to_dict(settings), indent=2) + "\n"
