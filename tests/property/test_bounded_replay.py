"""Bounded replay, and caches of several ranks: each step reads the states that its tokens before it wrote.

The worker here is a small model of its own. It knows specs and tables, and nothing of policies or look-ups. Tokens of a
window before the end of a hit run again: they write to that window alone, and find the states of all other groups.

    tokens       [ 0 .. | 4 5 6 7 | 8 9 ... ]      a hit of 8 tokens, a window of 5
    window       [ null | 4 5 6 7 | 8 9 ... ]      4 to 7 run again, into new blocks
    others       [ hit  |   hit   | new     ]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, lcm
from random import Random

import pytest

from how_much import how_many
from hybridkv.cache import KVCacheManager
from hybridkv.cache.policies import ReplayedHits
from hybridkv.errors import UnsupportedModelError
from hybridkv.request import Request
from hybridkv.specs import AttentionSpec, CircularBufferSpec, KVCacheSpec, SlidingWindowMLASpec, SlidingWindowSpec
from hybridkv.testing.configs import (
    full_spec,
    model_config,
    natural_model_config,
    rate_spec,
    ring_spec,
    state_spec,
    window_spec,
)
from random_rows import Span, finish, grow

Tokens = tuple[int, ...]


def replay_spec(block_size: int, window: int, rate: int = 1) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block_size,
        head_size=4,
        dtype="float32",
        sliding_window=window,
        tokens_per_state=rate,
        bounded_replay=True,
    )


def whole(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, dcp_sharded=False)


MODELS: dict[str, tuple[AttentionSpec, ...]] = {
    "replay": (rate_spec(8, 4), replay_spec(4, 6), full_spec(4)),
    "replay, compressed": (full_spec(8), replay_spec(8, 9, 4), window_spec(4, 3)),
    "replay, retained": (rate_spec(8, 2), replace(replay_spec(4, 5), extra_retained_tokens=6)),
    "replay, ring": (replay_spec(8, 8), ring_spec(8), rate_spec(8, 4), replay_spec(4, 8)),
    "ranks, replay": (rate_spec(4, 4), whole(replay_spec(4, 6))),
    "ranks, rate": (rate_spec(8, 4), full_spec(4)),
    "ranks, whole on each": (rate_spec(4, 2), ring_spec(8), whole(window_spec(4, 6)), whole(rate_spec(16, 8))),
}


def cache_of(layout: str, specs: Sequence[KVCacheSpec], blocks: int, ranks: int = 1) -> KVCacheManager:
    if layout == "reference":
        return KVCacheManager(model_config(blocks, specs), 96, dcp_world_size=ranks)
    config = natural_model_config(max(blocks // 2, 3), specs, [2] * len(specs))
    return KVCacheManager(config, 96, dcp_world_size=ranks)


def on_all_ranks(spec: AttentionSpec, ranks: int) -> AttentionSpec:
    """The blocks of all ranks as one."""
    return replace(spec, block_size=spec.block_size * ranks) if spec.dcp_sharded else spec


def whole_of(specs: Sequence[AttentionSpec]) -> int:
    """Tokens that end a state in every group, counted one by one."""
    return next(n for n in range(1, 1000) if all(n % Fraction(spec.tokens_per_state) == 0 for spec in specs))


def first_read(spec: AttentionSpec, tokens: int) -> int:
    """The first token that token ``tokens`` reads."""
    return max(0, tokens - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0


def is_replayed(spec: AttentionSpec) -> bool:
    return isinstance(spec, SlidingWindowMLASpec) and spec.bounded_replay


def ended(spec: AttentionSpec, tokens: int) -> int:
    """States that end in the first ``tokens`` tokens."""
    return int(tokens / Fraction(spec.tokens_per_state))


@dataclass
class Worker:
    """blocks: by group and block, the tokens that each state stands for. raw: of a request, raw keys by token.

    replayed: of a request, the tokens from .. to that run again after its hit.
    """

    cache: KVCacheManager
    specs: Sequence[AttentionSpec]
    blocks: dict[tuple[int, int], dict[int, Tokens]] = field(default_factory=lambda: defaultdict(dict))
    raw: dict[str, dict[int, Tokens]] = field(default_factory=lambda: defaultdict(dict))
    replayed: dict[str, tuple[int, int]] = field(default_factory=dict)
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
        again, hit = self.replayed.get(request.request_id, (0, 0))
        rings = [group for group, spec in enumerate(self.specs) if isinstance(spec, CircularBufferSpec)]
        raw = self.raw[request.request_id]
        if rings:
            size, ring = self.specs[rings[0]].block_size, self.blocks[rings[0], tables[rings[0]][0]]
            raw = {place: ring[place % size] for place in range(max(0, start - size), start) if place % size in ring}
        raw.update((place, tokens[: place + 1]) for place in range(start, end))
        for group in rings:
            assert len(tables[group]) == 1
            written = range(max(start, hit), end)
            self.blocks[group, tables[group][0]].update((place % size, raw[place]) for place in written)
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            if group in rings:
                continue
            rate, per_block, replays = Fraction(spec.tokens_per_state), spec.num_states, is_replayed(spec)
            # tokens that run again find windows cut off, as in vLLM: replayed ones before them, others before the hit
            runs_again = replays and start < hit
            read = max(first_read(spec, start), again) if runs_again else first_read(spec, max(start, hit))
            for state in range(ended(spec, end)):
                first, last = int(state * rate), ceil((state + 1) * rate)
                column, place = divmod(state, per_block)
                if state >= ended(spec, start) and (replays or last > hit):
                    assert all(raw.get(one) == tokens[: one + 1] for one in range(first, last)), "a divided state"
                    assert table[column]
                    if last <= hit:
                        assert self.cache.block_pool.ref_count(table[column]) == 1, "a shared block is written again"
                    self.blocks[group, table[column]][place] = tokens[:last]
                elif last > read:
                    assert table[column]
                    assert self.blocks[group, table[column]].get(place) == tokens[:last]


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
            if isinstance(spec, CircularBufferSpec) or is_replayed(spec):  # empty at every multiple; computed again
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
    ranks: int
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = cache_of(self.layout, self.specs, self.blocks, self.ranks)
        self.specs = [on_all_ranks(spec, self.ranks) for spec in self.specs]
        self.worker, self.known = Worker(self.cache, self.specs), Known(self.layout, self.specs)
        heads = [tuple(self.random.choices(range(3), k=40)) for _ in range(2)]
        for number in range(12):
            head = self.random.choice(heads)[: self.random.randint(0, 40)]
            tail = tuple(self.random.choices(range(3), k=self.random.randint(1, 12)))
            self.waiting.append(Request(str(number), (*head, *tail), hasher=self.cache.hasher))

    def play(self, steps: int) -> None:
        for step in range(steps):
            asked: list[Span] = []
            with self.cache.step(step):
                grow(self, asked)
                self._admit(asked)
                self.worker.copy()
            for request, start, end in asked:
                self.worker.run(request, start, end)
                finish(self, request, end)
            self.cache.mark_written(step)
            self.cache.check()
        self.counts["copies"] += self.worker.copies
        self.counts["evictions"] += self.cache.block_pool.keys.evictions

    def _admit(self, asked: list[Span]) -> None:
        while self.waiting and len(self.running) < 3:
            request = self.waiting[0]
            hit = self.cache.find_hit(request)
            if not self.cache.block_pool.keys.evictions:
                assert hit.tokens == self.known.longest(request.token_tuple(0, request.num_tokens))
                self.counts["longest"] += hit.tokens > 0
            start = self.cache.bounds.first_replayed(hit.tokens)
            end = min(start + self.random.randint(1, 16), request.num_tokens)
            if self.cache.allocate_slots(request, max(end - hit.tokens, 0), hit.tokens, hit) is None:
                return
            self.worker.replayed[request.request_id] = start, hit.tokens
            self.counts["replayed"] += start < hit.tokens
            self.known.add(request.token_tuple(0, end), request.num_prompt_tokens, over=False)
            self.counts["inside"] += any(hit.tokens % spec.block_size for spec in self.specs)
            self.counts["hits"] += hit.tokens > 0
            self.running.append(self.waiting.pop(0))
            request.num_computed_tokens = start
            asked.append((request, start, end))

    def end(self, request: Request) -> None:
        if self.layout == "natural":
            self.cache.keep_resume_point(request)
            done = request.token_tuple(0, request.num_computed_tokens)
            self.known.add(done, request.num_prompt_tokens, over=True)
        self.worker.raw.pop(request.request_id, None)
        self.cache.free(request)
        self.running.remove(request)


def play_all(layout: str, model: str, seeds: int) -> Counter[str]:
    counts, specs, ranks = Counter[str](), MODELS[model], 2 if model.startswith("ranks") else 1
    for seed in range(seeds):
        random = Random(seed)
        Run(random, layout, specs, random.choice((30, 60, 1000)) * len(specs), counts, ranks).play(60)
    return counts


@pytest.mark.parametrize("layout", ["reference", "natural"])
@pytest.mark.parametrize("model", MODELS)
def test_hits_are_the_longest_and_find_what_is_read(model: str, layout: str) -> None:
    counts = play_all(layout, model, how_many(8))
    assert min(counts["hits"], counts["longest"], counts["preempted"]) > 0
    assert (counts["replayed"] > 0) == ("replay" in model)
    assert (min(counts["inside"], counts["copies"]) > 0) == (layout == "natural")


@pytest.mark.parametrize("layout", ["reference", "natural"])
@pytest.mark.parametrize("model", ["replay", "replay, compressed"])
def test_window_that_is_not_computed_again_is_detected(
    monkeypatch: pytest.MonkeyPatch, model: str, layout: str
) -> None:
    monkeypatch.setattr(ReplayedHits, "first_replayed", lambda _, tokens: tokens)
    with pytest.raises(AssertionError):
        play_all(layout, model, 8)


def test_ranks_that_share_tokens_have_wider_columns() -> None:
    cache = KVCacheManager(model_config(12, MODELS["ranks, whole on each"]), 64, dcp_world_size=2)
    assert [group.policy.block_size for group in cache.groups] == [8, 8, 4, 16]


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ((full_spec(4), replay_spec(4, 6), state_spec(4)), "recurrent state follows all tokens of a hit"),
        ((full_spec(4), replay_spec(4, 6), replay_spec(4, 5)), "windows with bounded_replay differ in tokens"),
        ((full_spec(4), replay_spec(4, 6), replay_spec(4, 6, 4)), "windows with bounded_replay differ in tokens"),
    ],
)
def test_windows_that_cannot_be_computed_again_are_rejected(specs: tuple[KVCacheSpec, ...], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        KVCacheManager(model_config(20, specs), 64)


def test_branch_shares_a_window_that_hits_leave_out() -> None:
    cache = cache_of("natural", MODELS["replay"], 100)
    parent = Request("parent", range(10), hasher=cache.hasher)
    cache.allocate_slots(parent, 10)
    parent.num_computed_tokens = 10
    child = Request("child", range(13), hasher=cache.hasher)
    blocks, tokens = cache.engine.blocks_to_share(parent)
    cache.allocate_slots(child, 3, tokens, blocks)
    child.num_computed_tokens = tokens
    theirs, ours = (cache.get_block_ids(name)[1] for name in ("parent", "child"))
    assert (tokens, ours[1]) == (10, theirs[1])
    copies = [(one.source, one.destination) for one in cache.fields.take_transfers().copies if one.group == 1]
    assert copies == [(theirs[2], ours[2])]
    cache.check()
