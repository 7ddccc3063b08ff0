"""Hits over compressed caches: no hit divides a state, and each step reads the states that its tokens before it wrote.

The worker here is a small model of its own. It knows specs and tables, and nothing of policies or look-ups:

    tokens       | 0 1 2 3 | 4 5 6 7 | 8 9            rate 4: states a and b; the raw keys of 8 and 9 wait
    blocks       [ a b ]   written with the last token of each state, from the raw keys of all its tokens

A request that begins has no raw keys, or an old ring. So a state that a hit divides cannot be written, and the test
fails.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, lcm
from random import Random

import numpy as np
import pytest

from how_much import how_many
from hybridkv.cache import CacheOptions, KVCacheManager, assembly
from hybridkv.cache.assembly import NaturalLayout
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.request import Request
from hybridkv.specs import AttentionSpec, CircularBufferSpec, KVCacheSpec, SlidingWindowSpec
from hybridkv.testing.configs import (
    full_spec,
    model_config,
    natural_model_config,
    rate_spec,
    ring_spec,
    state_spec,
    window_spec,
)

Tokens = tuple[int, ...]
COMPARED = True
"""Whether hits are compared with the longest ones; off to see that the worker's own check finds a fault."""


MODELS: dict[str, tuple[AttentionSpec, ...]] = {
    "one rate": (rate_spec(8, 4),),
    "rate and tokens": (rate_spec(8, 4), full_spec(8)),
    "two rates": (rate_spec(32, 4), rate_spec(16, 8), full_spec(4)),
    "rate, window": (rate_spec(8, 2), window_spec(4, 6), full_spec(4)),
    "retained": (rate_spec(12, 6), replace(window_spec(4, 6), extra_retained_tokens=5)),
    "compressed window": (full_spec(4), replace(window_spec(8, 7), head_size=4, tokens_per_state=4)),
    "several states a token": (rate_spec(4, Fraction(1, 2)), rate_spec(8, 2)),
    "three halves": (rate_spec(6, Fraction(3, 2)), full_spec(6)),
    "ring": (rate_spec(8, 4), ring_spec(6), full_spec(8)),
    "ring first": (ring_spec(4), rate_spec(8, 4)),
    "ring, rates, window": (rate_spec(8, 4), ring_spec(8), rate_spec(16, 8), window_spec(4, 6)),
}


def cache_of(layout: str, specs: Sequence[KVCacheSpec], blocks: int) -> KVCacheManager:
    if layout == "reference":
        return KVCacheManager(model_config(blocks, specs), 96)
    return KVCacheManager(natural_model_config(max(blocks // 2, 3), specs, [2] * len(specs)), 96)


def whole_of(specs: Sequence[AttentionSpec]) -> int:
    """Tokens that end a state in every group, counted one by one."""
    return next(n for n in range(1, 1000) if all(n % Fraction(spec.tokens_per_state) == 0 for spec in specs))


def first_read(spec: AttentionSpec, tokens: int) -> int:
    """The first token that token ``tokens`` reads."""
    return max(0, tokens - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0


def ended(spec: AttentionSpec, tokens: int) -> int:
    """States that end in the first ``tokens`` tokens."""
    return int(tokens / Fraction(spec.tokens_per_state))


@dataclass
class Worker:
    """blocks: by group and block, the tokens that each state stands for. raw: of a request, raw keys by token."""

    cache: KVCacheManager
    specs: Sequence[AttentionSpec]
    blocks: dict[tuple[int, int], dict[int, Tokens]] = field(default_factory=lambda: defaultdict(dict))
    raw: dict[str, dict[int, Tokens]] = field(default_factory=lambda: defaultdict(dict))
    copies: int = 0

    def copy(self) -> None:
        """Moves and copies of the step being made, in order. A move is of the groups that share its ids."""
        transfers = self.cache.fields.take_transfers()
        assert not transfers.checkpoints
        for one in transfers.copies:
            for group in range(len(self.specs)) if one.kind == "move" else (one.group,):
                self.blocks[group, one.destination] = dict(self.blocks[group, one.source])
            self.copies += one.kind == "block"

    def run(self, request: Request, start: int, end: int) -> None:
        """The forward of tokens start .. end - 1."""
        tokens, tables = request.token_tuple(0, end), self.cache.get_block_ids(request.request_id)
        rings = [group for group, spec in enumerate(self.specs) if isinstance(spec, CircularBufferSpec)]
        raw = self.raw[request.request_id]
        if rings:
            size, ring = self.specs[rings[0]].block_size, self.blocks[rings[0], tables[rings[0]][0]]
            raw = {place: ring[place % size] for place in range(max(0, start - size), start) if place % size in ring}
        raw.update((place, tokens[: place + 1]) for place in range(start, end))
        for group in rings:
            assert len(tables[group]) == 1
            self.blocks[group, tables[group][0]].update((place % size, raw[place]) for place in range(start, end))
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            if group in rings:
                continue
            rate, per_block = Fraction(spec.tokens_per_state), spec.num_states
            for state in range(ended(spec, end)):
                first, last = int(state * rate), ceil((state + 1) * rate)
                column, place = divmod(state, per_block)
                if state >= ended(spec, start):
                    assert all(raw.get(one) == tokens[: one + 1] for one in range(first, last)), "a divided state"
                    assert table[column]
                    self.blocks[group, table[column]][place] = tokens[:last]
                elif last > first_read(spec, start):
                    assert table[column]
                    assert self.blocks[group, table[column]][place] == tokens[:last]


@dataclass
class Known:
    """The prefixes that were published, by group, if none is evicted. ends: those that end inside blocks."""

    layout: str
    specs: Sequence[AttentionSpec]
    blocks: list[set[Tokens]] = field(init=False)
    ends: set[Tokens] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.blocks = [set() for _ in self.specs]

    def add(self, tokens: Tokens, prompt: int, *, over: bool) -> None:
        """``tokens`` of a request are computed. prompt: of its tokens. over: it ends."""
        for spec, blocks in zip(self.specs, self.blocks, strict=True):
            blocks.update(tokens[:end] for end in range(spec.block_size, len(tokens) + 1, spec.block_size))
        if self.layout == "natural":
            whole = whole_of(self.specs)
            points = [one // whole * whole for one in (prompt - 1, *[len(tokens)] * over)]
            self.ends.update(tokens[:point] for point in points if point <= len(tokens))

    def longest(self, tokens: Tokens) -> int:
        """The longest hit of a request: the largest multiple that every group can resume."""
        step = whole_of(self.specs) if self.layout == "natural" else lcm(*(spec.block_size for spec in self.specs))
        most = (len(tokens) - 1) // step * step
        return next((end for end in range(most, 0, -step) if self._serves(tokens, end)), 0)

    def _serves(self, tokens: Tokens, end: int) -> bool:
        for spec, blocks in zip(self.specs, self.blocks, strict=True):
            if isinstance(spec, CircularBufferSpec):  # empty at every multiple
                continue
            size = spec.block_size
            for column in range(first_read(spec, end) // size, ceil(end / size)):
                begins = [one for one in self.ends if one == tokens[: len(one)] and len(one) <= (column + 1) * size]
                if tokens[: (column + 1) * size] not in blocks and max(map(len, begins), default=0) < min(
                    end, (column + 1) * size
                ):
                    return False
        return True


@dataclass
class Run:
    """Random requests that share prefixes, several at once; some are preempted or end early."""

    random: Random
    layout: str
    specs: Sequence[AttentionSpec]
    blocks: int
    counts: Counter[str]
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = cache_of(self.layout, self.specs, self.blocks)
        self.worker, self.known = Worker(self.cache, self.specs), Known(self.layout, self.specs)
        heads = [tuple(self.random.choices(range(3), k=40)) for _ in range(2)]
        for number in range(12):
            head = self.random.choice(heads)[: self.random.randint(0, 40)]
            tail = tuple(self.random.choices(range(3), k=self.random.randint(1, 12)))
            self.waiting.append(Request(str(number), (*head, *tail), hasher=self.cache.hasher))

    def play(self, steps: int) -> None:
        for step in range(steps):
            asked: list[tuple[Request, int, int]] = []
            with self.cache.step(step):
                self._grow(asked)
                self._admit(asked)
                self.worker.copy()
            for request, start, end in asked:
                self.worker.run(request, start, end)
                self._finish(request, end)
            self.cache.mark_written(step)
            self.cache.check()
        self.counts["copies"] += self.worker.copies
        self.counts["evictions"] += self.cache.block_pool.keys.evictions

    def _grow(self, asked: list[tuple[Request, int, int]]) -> None:
        for request in list(self.running):
            start = request.num_computed_tokens
            end = min(start + self.random.randint(1, 9), request.num_tokens)
            if self.cache.allocate_slots(request, end - start) is not None and self.random.random() > 0.02:
                asked.append((request, start, end))
                self.known.add(request.token_tuple(0, end), request.num_prompt_tokens, over=False)
                continue
            self.cache.engine.withdraw(request)
            self._end(request)
            self.waiting.insert(0, request)
            request.num_computed_tokens = 0
            self.counts["preempted"] += 1

    def _admit(self, asked: list[tuple[Request, int, int]]) -> None:
        while self.waiting and len(self.running) < 3:
            request = self.waiting[0]
            hit = self.cache.find_hit(request)
            if COMPARED and not self.cache.block_pool.keys.evictions:
                assert hit.tokens == self.known.longest(request.token_tuple(0, request.num_tokens))
                self.counts["longest"] += hit.tokens > 0
            end = min(hit.tokens + self.random.randint(1, 16), request.num_tokens)
            if self.cache.allocate_slots(request, end - hit.tokens, hit.tokens, hit) is None:
                return
            self.known.add(request.token_tuple(0, end), request.num_prompt_tokens, over=False)
            self.counts["inside"] += any(hit.tokens % spec.block_size for spec in self.specs)
            self.counts["hits"] += hit.tokens > 0
            self.running.append(self.waiting.pop(0))
            request.num_computed_tokens = hit.tokens
            asked.append((request, hit.tokens, end))

    def _finish(self, request: Request, end: int) -> None:
        request.num_computed_tokens = end
        self.known.add(request.token_tuple(0, end), request.num_prompt_tokens, over=False)
        if end == request.num_tokens:
            request.append(self.random.randrange(3))
        if request.num_output_tokens > 12 or self.random.random() < 0.01:
            self._end(request)

    def _end(self, request: Request) -> None:
        if self.layout == "natural":
            self.cache.keep_resume_point(request)
            done = request.token_tuple(0, request.num_computed_tokens)
            self.known.add(done, request.num_prompt_tokens, over=True)
        self.worker.raw.pop(request.request_id, None)
        self.cache.free(request)
        self.running.remove(request)


def play_all(layout: str, specs: Sequence[AttentionSpec], seeds: int) -> Counter[str]:
    counts = Counter[str]()
    for seed in range(seeds):
        random = Random(seed)
        Run(random, layout, specs, random.choice((30, 60, 1000)) * len(specs), counts).play(60)
    return counts


@pytest.mark.parametrize("layout", ["reference", "natural"])
@pytest.mark.parametrize("model", MODELS)
def test_hits_divide_no_state_and_are_the_longest(model: str, layout: str) -> None:
    counts = play_all(layout, MODELS[model], how_many(8))
    assert min(counts["hits"], counts["longest"], counts["preempted"]) > 0
    assert (min(counts["inside"], counts["copies"]) > 0) == (layout == "natural")


@pytest.mark.parametrize("model", ["one rate", "two rates", "compressed window", "three halves", "ring"])
def test_hit_that_divides_a_state_is_detected(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    if "ring" in model:  # a ring without any rate is rejected
        monkeypatch.setattr(NaturalLayout, "alignment", lambda *_: 1)
    else:
        monkeypatch.setattr(assembly, "whole_states", lambda _: 1)
    monkeypatch.setitem(globals(), "COMPARED", 0)
    with pytest.raises(AssertionError, match="a divided state"):
        play_all("natural", MODELS[model], 8)


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_hit_that_is_too_short_is_detected(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(f"hybridkv.cache.assembly.{layout.title()}Layout.alignment", lambda *_: 32)
    with pytest.raises(AssertionError):
        play_all(layout, MODELS["rate and tokens"], 8)


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_hits_and_loads_that_end_inside_a_state_are_rejected(layout: str) -> None:
    cache = cache_of(layout, MODELS["rate and tokens"], 100)
    first = Request("a", range(30), hasher=cache.hasher)
    cache.allocate_slots(first, 30)
    first.num_computed_tokens = 30
    second = Request("b", range(30), hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(second)
    with pytest.raises(ConfigError, match=rf"a hit of {tokens - 1} tokens ends inside a state of 4 tokens.*cut it to"):
        cache.allocate_slots(second, 1, tokens - 1, blocks)
    with pytest.raises(ConfigError, match=r"up to 18 end inside a state of 4 tokens .*load up to 16"):
        cache.allocate_slots(Request("c", range(50, 80), hasher=cache.hasher), 1, num_external_computed_tokens=18)


@pytest.mark.parametrize(("arrived", "tokens"), [(None, 16), (15, 12), (12, 12), (3, 0)])
def test_load_that_came_in_part_resumes_at_a_whole_state(arrived: int | None, tokens: int) -> None:
    cache = cache_of("natural", MODELS["rate and tokens"], 100)
    request = Request("a", range(30), hasher=cache.hasher)
    cache.allocate_slots(request, 0, delay_cache_blocks=True, num_external_computed_tokens=16)
    assert cache.engine.finish_load(request, arrived) == tokens


def test_hit_unit_divides_no_state() -> None:
    specs = (rate_spec(8, 4), state_spec(8))
    with pytest.raises(ConfigError, match=r"hit_unit 2 ends inside a state of 4 tokens \(tokens_per_state\)"):
        KVCacheManager(model_config(12, specs), 64, options=CacheOptions(hit_unit=2))
    KVCacheManager(model_config(12, specs), 64, options=CacheOptions(hit_unit=4))


def test_rates_are_rejected_where_ranks_share_the_tokens() -> None:
    with pytest.raises(UnsupportedModelError, match="the cache manager does not support several tokens in one state"):
        KVCacheManager(model_config(12, MODELS["one rate"]), 64, dcp_world_size=2)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("end", [10, 6])  # 6 tokens fill the ring, but not the second state
def test_branch_copies_the_ring_of_its_parent(end: int, *, copied: bool) -> None:
    cache = cache_of("natural", MODELS["ring"], 100)
    worker = Worker(cache, MODELS["ring"])
    parent = Request("parent", range(end), hasher=cache.hasher)
    cache.allocate_slots(parent, end)
    worker.copy()
    worker.run(parent, 0, end)
    parent.num_computed_tokens = end
    child = Request("child", range(13), hasher=cache.hasher)
    blocks, tokens = cache.engine.blocks_to_share(parent)
    assert tokens == end
    cache.allocate_slots(child, 13 - end, end, blocks)
    ring = cache.get_block_ids("child")[1][0]
    worker.copy()
    cache.check()
    if copied:
        worker.run(child, end, 13)
        return
    worker.blocks[1, ring].clear()
    with pytest.raises(AssertionError, match="a divided state"):
        worker.run(child, end, 13)


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_ring_is_one_block_of_each_request_and_never_published(layout: str) -> None:
    cache = cache_of(layout, MODELS["ring"], 100)
    request = Request("a", range(90), hasher=cache.hasher)
    rings = set()
    for end in range(1, 91):
        cache.allocate_slots(request, 1)
        request.num_computed_tokens = end
        rings.add(tuple(cache.get_block_ids("a")[1]))
    assert len(rings) == 1
    assert len(rings.pop()) == 1
    assert not list(cache.groups[1].index.entries())
    assert (
        cache.find_hit(Request("b", range(90), hasher=cache.hasher)).tokens == {"reference": 72, "natural": 88}[layout]
    )
    cache.free(request)
    cache.check()


def test_hit_that_an_evicted_block_bounds_ends_at_a_whole_state() -> None:
    """Blocks of 4 tokens end inside states of 8: the hit falls to the state before."""
    specs = rate_spec(16, 8), full_spec(4)
    cache = cache_of("natural", specs, 100)
    request = Request("a", range(40), hasher=cache.hasher)
    cache.allocate_slots(request, 40)
    found = cache.groups[1]
    for column, tokens in ((7, 24), (5, 16), (4, 16), (3, 8), (0, 0)):
        block = found.index.get(found.keys(request)[column])
        assert block is not None
        cache.block_pool.evict_blocks(np.array([block], np.int32))
        assert cache.find_hit(Request("b", range(40), hasher=cache.hasher)).tokens == tokens


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_ring_without_a_rate_is_rejected(layout: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"no group of the model compresses tokens .*where the ring is empty"
    ):
        cache_of(layout, (full_spec(8), ring_spec(8)), 100)
