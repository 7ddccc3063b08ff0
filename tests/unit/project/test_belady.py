"""The bounds of docs/hit-rates.md: an eviction that knows the rest of the stream, and an endless cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import eviction_table
import numpy as np
import pytest
from belady import Foreseen
from eviction_table import serve_all
from foreseen import Future

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import EndsPlacement
from hybridkv.eviction import EVICTIONS, Eviction, eviction_named
from hybridkv.simulator import Pieces, SimulatedClock, TraceRequest
from hybridkv.simulator.tokens import HASHED_BLOCK, NEW_OUTPUT, PROMPT_SEGMENT
from hybridkv.simulator.trace import TraceSummary
from hybridkv.simulator.workloads import Workload
from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec, window_spec

FULL = (full_spec(4),)
HYBRID = (full_spec(4), state_spec(4))
WINDOWS = (full_spec(4), window_spec(8, 4))
KINDS = {"full": FULL, "states": HYBRID, "windows": WINDOWS}


class Stream:
    """Requests in a row."""

    name = "stream"

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)

    def summary(self) -> TraceSummary:
        raise NotImplementedError


def asked(at: float, *parts: tuple[int, int], output: int = 1) -> TraceRequest:
    """A prompt of so many tokens of each segment; its output is nobody's."""
    prompt = Pieces(PROMPT_SEGMENT, tuple((segment, 0, tokens) for segment, tokens in parts))
    return TraceRequest(at, prompt, Pieces(NEW_OUTPUT, ((round(at), 0, output),)))


def stream(*prompts: Sequence[tuple[int, int]]) -> list[TraceRequest]:
    return [asked(float(at), *parts) for at, parts in enumerate(prompts)]


def found(requests: Sequence[TraceRequest], specs: tuple[KVCacheSpec, ...], slabs: int, eviction: str) -> float:
    """Its hit rate."""
    source: Sequence[TraceRequest] | Foreseen = requests
    rule: Eviction
    if eviction == eviction_table.BELADY:
        source = foreseen = Foreseen(Stream(requests))
        rule = foreseen.eviction()
    else:
        rule = eviction_named(eviction)
    clock = SimulatedClock()
    per_slab = tuple(1 if "Mamba" in type(spec).__name__ else 4 for spec in specs)
    config = natural_model_config(slabs, specs, per_slab)
    cache = KVCacheManager(config, 4096, options=CacheOptions(placement=EndsPlacement(), eviction=rule, clock=clock))
    rate: float = serve_all(cache, clock, source)["hit_rate"]
    cache.check()
    return rate


def tokens(rate: float, requests: Sequence[TraceRequest]) -> int:
    return round(rate * sum(one.num_prompt_tokens for one in requests))


# -- what is best is known


A, B, C, D = (1, 16), (2, 16), (3, 16), (4, 16)


@pytest.mark.parametrize(
    ("names", "last_used", "best"),
    [
        ("ABCA", 0, 15),  # A, not the younger ones that never come back
        ("ABCDBA", 0, 15),  # one of both that come back
        ("ABACBA", 15, 30),  # A, and A again, not B between
        ("ABCABC", 0, 15),  # one of three, not none
        ("ABCD", 0, 0),
    ],
)
def test_belady_makes_the_best_choice(names: str, last_used: int, best: int) -> None:
    """Room for one prompt of 16 tokens beside the one that runs."""
    requests = stream(*([dict(zip("ABCD", (A, B, C, D), strict=True))[name]] for name in names))
    assert [tokens(found(requests, FULL, 3, name), requests) for name in ("lru", "belady")] == [last_used, best]
    again = sum(names.index(name) < at for at, name in enumerate(names))
    assert tokens(found(requests, FULL, 100, "belady"), requests) == 15 * again


def test_belady_keeps_a_state_at_a_later_branch() -> None:
    """The first time: without knowing the future, nobody keeps one there."""
    shared = (1, 21)
    requests = stream([shared, (2, 9)], [(5, 12)], [shared, (3, 9)])
    assert Future(requests).marks == [(21,), (), ()]
    assert [tokens(found(requests, HYBRID, 30, name), requests) for name in ("lru", "belady")] == [0, 21]


def test_belady_resume_at_a_later_point_drops_earlier_needs() -> None:
    future = Future(stream([A, B], [C], [A, B, C], [A, D]))
    assert [future.next_use(0, tokens, 0) for tokens in (16, 31)] == [2, 2]
    future.keep(0, 31, 7)
    assert [future.next_use(0, tokens, 0) for tokens in (16, 31)] == [3, 2]
    assert [future.next_use(0, tokens, 2) for tokens in (16, 31)] == [3, np.inf]
    assert (future.before(0, 31), future.before(2, 40), future.before(3, 31)) == (None, 7, None)
    future.give_up(2, 31, 7)
    assert future.next_use(0, 16, 0) == 2


def test_belady_limit_counts_earlier_tokens() -> None:
    requests = stream([A], [A, B], [A], [B], [(1, 7), C])
    assert Future(requests).limit * sum(one.num_prompt_tokens for one in requests) == pytest.approx(16 + 15 + 0 + 7)


def test_belady_outputs_continued_by_prompts_are_hit() -> None:
    """Token-exact traces name their segments; ids of hashed blocks are no segments of outputs."""
    first = TraceRequest(0.0, Pieces(PROMPT_SEGMENT, ((1, 0, 8),)), Pieces(PROMPT_SEGMENT, ((1, 8, 4),)))
    then = TraceRequest(1.0, Pieces(PROMPT_SEGMENT, ((1, 0, 12), (2, 0, 4))), Pieces(PROMPT_SEGMENT, ((3, 0, 1),)))
    assert Future([first, then]).limit == 12 / 24
    hashed = [
        TraceRequest(0.0, Pieces(HASHED_BLOCK, ((7, 0, 8),)), Pieces(NEW_OUTPUT, ((5, 0, 8),))),
        TraceRequest(1.0, Pieces(HASHED_BLOCK, ((7, 0, 8), (5, 0, 8))), Pieces(NEW_OUTPUT, ((6, 0, 1),))),
    ]
    assert Future(hashed).limit == 8 / 24


# -- random streams


def sessions(seed: int, count: int = 60) -> list[TraceRequest]:
    """Chats over a few templates, some of which go on with their outputs, and prompts that come once."""
    draw = np.random.default_rng(seed)
    found: list[TraceRequest] = []
    chats: list[list[tuple[int, int, int]]] = []
    for number in range(count):
        fresh = 1000 + 10 * number
        kind = draw.integers(0, 10)
        if kind < 5 and chats:
            prompt = [*chats[draw.integers(max(0, len(chats) - 6), len(chats))], (fresh, 0, int(draw.integers(4, 24)))]
        elif kind < 8:
            prompt = [(int(draw.integers(1, 4)), 0, 24), (fresh, 0, int(draw.integers(4, 40)))]
        else:
            prompt = [(fresh, 0, int(draw.integers(8, 60)))]
        output = (fresh + 1, 0, int(draw.integers(1, 12)))
        if kind < 8:
            chats.append([*prompt, output] if draw.random() < 0.7 else prompt)
        found.append(
            TraceRequest(float(number), Pieces(PROMPT_SEGMENT, tuple(prompt)), Pieces(PROMPT_SEGMENT, (output,)))
        )
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 3))])
@pytest.mark.parametrize("kind", KINDS)
def test_belady_hits_bound_other_evictions(kind: str, seed: int) -> None:
    requests = sessions(seed)
    limit = Future(requests).limit
    longest = max(one.num_tokens for one in requests)
    ahead = []
    for slabs in (longest // 8, longest // 4, longest // 2):
        best = found(requests, KINDS[kind], slabs, "belady")
        others = [found(requests, KINDS[kind], slabs, name) for name in EVICTIONS]
        assert best <= limit + 1e-6
        ahead.append(best - max(others))
    assert min(ahead) >= 0 < np.mean(ahead)


@pytest.mark.parametrize("kind", KINDS)
def test_belady_with_full_memory_reaches_the_limit(kind: str) -> None:
    """Of what ran: the last token of an output does not."""
    for seed in range(4):
        requests = sessions(seed)
        ran = [replace(one, output=_all_but_the_last(one.output)) for one in requests]
        assert found(requests, KINDS[kind], 4000, "belady") == pytest.approx(Future(ran).limit, abs=1e-6)


def _all_but_the_last(output: Pieces) -> Pieces:
    ((segment, offset, length),) = output.pieces
    return replace(output, pieces=((segment, offset, length - 1),) if length > 1 else ())


# -- the table


def line(eviction: str, rate: float, *, replayed: bool = False, limit: int = 0, **more: object) -> dict[str, object]:
    cell = {"stream": "mix.jsonl.gz", "model": "m", "memory_gib": 10, "eviction": eviction, "limit": limit}
    return {**cell, "replayed": replayed, "hit_rate": rate, "requests": limit or 99, **more}


LINES = [
    line("hazard", 0.4, limit=5),
    line("hazard", 0.6, replayed=True, moved_bytes=3 << 29),
    line("lru", 0.5, replayed=True),
    line("hazard", 0.7, replayed=True, hinted=True, model="n"),
    line("belady", 0.8),
    line("limit", 0.9, model="", memory_gib=0),
]


def test_bounds_are_computed_where_hazard_is_known() -> None:
    wanted = [(one.eviction, one.model, one.memory_gib, one.limit) for one in eviction_table.bounds(LINES)]
    assert wanted == [("limit", "", 0, 0), ("belady", "m", 10, 0), ("limit", "", 0, 5), ("belady", "m", 10, 5)]


def test_bounds_table_includes_whole_streams() -> None:
    whole = {"workload": "mix", "model": "m", "memory_gib": 10, "time_scale": 1.0, "ideal": False, "limit": 0}
    other = [
        {"limit_of": "mix", "hit_rate": 0.9},
        {**whole, "layout": "reference", "placement": "align", "hit_rate": 0.3, "requests": 99},
        {**whole, "layout": "natural", "placement": "ends", "hit_rate": 0.2, "requests": 99},
        {**whole, "layout": "natural", "placement": "align", "hit_rate": 0.1, "requests": 99},
        {**whole, "layout": "reference", "placement": "align", "hit_rate": 0.1, "requests": 5, "limit": 5},
        {**whole, "layout": "reference", "placement": "align", "hit_rate": 0.1, "requests": 99, "ideal": True},
    ]
    shown = list(eviction_table.show([*LINES, *eviction_table.of_natural(other)]))
    assert ("mix", 99, "m", 10, "replayed", "0.3000", "0.5000", "0.6000", "0.8000", "0.9000", "1.5 GiB") in shown
    assert len(shown) == 4


def test_bounds_seed_draws_the_library_streams() -> None:
    seeded = eviction_table.Cell("workload:chat:3", "m", 10, "lru", 20, replayed=True)
    drawn = list(eviction_table.source_of(seeded, "nowhere"))
    assert [(one.timestamp_s, one.prompt) for one in drawn] == [
        (one.timestamp_s, one.prompt) for one in Workload("chat", seed=3, limit=20)
    ]
    assert drawn[0].timestamp_s != next(iter(Workload("chat", seed=4))).timestamp_s


def test_bounds_table_repeats_bounds_in_each_row() -> None:
    header, *shown = eviction_table.show(LINES)
    assert header[5:] == ("align", "lru", "hazard", "belady", "limit", "moved")
    assert shown == [
        ("mix", 5, "m", 10, "alone", "", "", "0.4000", "", "", ""),
        ("mix", 99, "m", 10, "replayed", "", "0.5000", "0.6000", "0.8000", "0.9000", "1.5 GiB"),
        ("mix", 99, "n", 10, "replayed, hinted", "", "", "0.7000", "", "0.9000", ""),
    ]
