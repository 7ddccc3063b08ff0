"""A running server by its metrics: what they say of hits, states and memory. Nothing is asked of it but those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from hybridkv.cache import MissReason
from hybridkv.doctor.findings import BLOCKS, FOUND, SALTS, STATES_FIT, STATES_READ, Diagnosis, Finding
from hybridkv.units import format_count

_MUCH: Final = 0.1
"""Of the prompt tokens."""
_MANY: Final = 100
_UNREAD: Final = 0.9
_LITTLE: Final = 0.05
_ENOUGH_TOKENS: Final = 10_000
Look = tuple[str, str, Finding | None]


class Figures(Protocol):
    """Metrics of one moment, by their names without a prefix."""

    def of(self, name: str, **labels: str) -> float | None:
        """The sum of those with ``labels``; None where there is none."""
        ...

    def by(self, name: str, label: str) -> Mapping[str, float]:
        """Such sums for each value of ``label``."""
        ...


def examine_server(subject: str, now: Figures) -> Diagnosis:
    """subject: where they come from."""
    return Diagnosis.of(subject, _looks(now))


def _looks(now: Figures) -> Iterator[Look]:
    yield from _found(now)
    yield from _reasons(now)
    yield from _ends(now)
    yield from _room(now)


def _found(now: Figures) -> Iterator[Look]:
    asked, found = now.of("prefix_cache_queries_total"), now.of("prefix_cache_hits_total")
    if not asked or found is None:
        return
    figure = f"{found / asked:.2%} of {format_count(int(asked))} prompt tokens found"
    finding = None
    if not found and asked >= _ENOUGH_TOKENS:
        why = (
            "start it with --explain, which says why; hybridkv doctor TRACE says what its traffic could find"
            if now.of("prompt_tokens_missed_total") is None
            else "see the reasons below"
        )
        finding = Finding(FOUND, "Nothing was ever found in the cache.", figure, why)
    yield FOUND, figure, finding


def _reasons(now: Figures) -> Iterator[Look]:
    """Where the server explains misses."""
    missed, prompts = now.by("prompt_tokens_missed_total", "reason"), now.of("prefix_cache_queries_total")
    if not missed or not prompts:
        return
    for name, reason, said, remedy in (
        (
            BLOCKS,
            MissReason.BLOCK_EDGE,
            "Hits end where blocks do, and much of what prompts share lies behind the last such end.",
            "plan with --layout natural, or a smaller --block-size",
        ),
        (
            SALTS,
            MissReason.OTHER_SALT,
            "Prompts that begin alike have different salts, and share nothing.",
            "one salt for all who may share, such as a tenant, instead of one a request",
        ),
    ):
        tokens = missed.get(reason, 0.0)
        figure = f"{tokens / prompts:.2%} of the prompt tokens missed for {reason.value.replace('_', ' ')}"
        yield name, figure, Finding(name, said, figure, remedy) if tokens >= _MUCH * prompts else None


def _ends(now: Figures) -> Iterator[Look]:
    """States, and other ends, that are kept for whom comes back."""
    made, hits = now.of("kv_ends_stored_total"), now.of("kv_end_hits_total")
    gone, unused = now.of("kv_ends_evicted_total"), now.of("kv_ends_evicted_unused_total")
    if made is None or hits is None or gone is None or unused is None:
        return
    figure = f"{format_count(int(made))} ends kept, {format_count(int(hits))} hits of them"
    if gone:
        figure += f"; {unused / gone:.2%} of those given up were never hit"
    wrong = gone >= _MANY and unused >= _UNREAD * gone and hits < _LITTLE * made
    said = "States and blocks are kept for prompts that never come back."
    remedy = "--placement ends where an interval is set; else prompts have little in common, or memory is too small"
    yield STATES_READ, figure, Finding(STATES_READ, said, figure, remedy) if wrong else None


def _room(now: Figures) -> Iterator[Look]:
    held = now.of("kv_group_blocks", kind="state", state="held")
    free = now.of("kv_group_blocks", kind="state", state="evictable")
    if held is None or free is None:
        return
    waits = now.of("num_requests_waiting_by_reason", reason="no_space") or 0.0
    figure = (
        f"{format_count(int(held))} blocks of states held by requests, {format_count(int(free))} kept, "
        f"{format_count(int(waits))} requests wait for memory"
    )
    said = "Memory holds fewer states than requests want to run: no state is kept for a hit."
    remedy = "more memory, or fewer requests at once (--max-running)"
    yield STATES_FIT, figure, Finding(STATES_FIT, said, figure, remedy) if waits and held and not free else None
