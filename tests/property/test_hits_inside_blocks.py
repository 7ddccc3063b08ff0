"""Hits inside blocks of the reference layout: whatever a step reads is what the tokens before it wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest

from how_much import how_many
from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.hashing import BlockHasher
from hybridkv.cache.policies import AlignedStatePolicy, UnitStateHits
from hybridkv.cache.publisher import HitEnds
from hybridkv.errors import ConfigError
from hybridkv.eviction import HAZARD, LRU, Eviction
from hybridkv.eviction.resume_points import Kind, kind_of
from hybridkv.request import Request
from hybridkv.schedule import SchedulerLimits
from hybridkv.schedule.builder import split_of
from hybridkv.testing.configs import full_spec, model_config, state_spec, window_spec

BLOCK, UNIT = 8, 2
LIMITS = SchedulerLimits(max_batched_tokens=16)
SPECS = full_spec(BLOCK), state_spec(BLOCK, mode="align"), state_spec(BLOCK, mode="align")

Tokens = tuple[int, ...]


def cache_of(
    num_blocks: int, eviction: Eviction, retention: int | None = None, copied: int | None = None
) -> KVCacheManager:
    options = CacheOptions(eviction=eviction, retention=retention, hit_unit=UNIT, copied_tokens=copied)
    return KVCacheManager(model_config(num_blocks, SPECS), 96, hasher=BlockHasher(UNIT), options=options)


def chunk_end(cache: KVCacheManager, request: Request, start: int, most: int) -> int:
    """Where a chunk ends, as the scheduler ends it: at block boundaries and resume points."""
    end = min(start + most, request.num_tokens)
    split = split_of(cache, LIMITS, None)
    assert split is not None
    chosen = start + split(request, start, end - start)
    last = max(request.num_prompt_tokens, request.num_tokens - 1)
    if start >= last:
        assert chosen == start + 1
        return chosen
    if end < last and end // BLOCK * BLOCK > start:
        end = end // BLOCK * BLOCK
    stops = {(start // BLOCK + 1) * BLOCK if start % BLOCK else 0, (request.num_tokens - 1) // BLOCK * BLOCK}
    stops.update((*cache.bounds.resume_points(request), request.branch_tokens // BLOCK * BLOCK))
    assert chosen == min((one for one in stops if start < one < end), default=end)
    return chosen


@dataclass
class Worker:
    """Blocks as a worker has them: of attention the tokens up to each place, of states all tokens before them.

    copied: tokens of a block of attention that a copy carries.
    """

    cache: KVCacheManager
    copied: int = BLOCK
    blocks: dict[int, list[Tokens]] = field(default_factory=dict)
    copies: int = 0

    def copy(self) -> None:
        """All copies of the step being made; all are read before any is written."""
        transfers = self.cache.fields.take_transfers()
        assert not transfers.checkpoints
        found = [(one.destination, self.blocks[one.source][: self.copied]) for one in transfers.copies]
        assert len({block for block, _ in found}) == len(found)
        self.blocks.update(found)
        self.copies += len(found)

    def run(self, request: Request, start: int, end: int) -> None:
        """The forward of tokens start .. end - 1: reads what is before them, and writes them."""
        tokens = request.token_tuple(0, end)
        tables = self.cache.get_block_ids(request.request_id)
        for group, table in zip(self.cache.groups, tables, strict=True):
            if isinstance(group.policy, AlignedStatePolicy):
                if start:
                    assert self.blocks[table[group.policy.state_column(start)]] == [tokens[:start]]
                self.blocks[table[group.policy.state_column(end)]] = [tokens]
                continue
            for place in range(end):
                block, at = table[place // BLOCK], place % BLOCK
                if place < start:
                    assert self.blocks[block][at] == tokens[: place + 1]
                else:
                    self.blocks[block] = [*self.blocks.get(block, [])[:at], tokens[: place + 1]]


Asked = list[tuple[Request, int, int]]
"""Requests of a step, with their tokens before it and after it."""


@dataclass
class Run:
    """Random requests that share prefixes, several at once, in few blocks; some are preempted or end early."""

    random: Random
    cache: KVCacheManager
    counts: Counter[str]
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    def add_requests(self) -> None:
        random = self.random
        heads = [tuple(random.choices(range(3), k=random.randint(1, 40))) for _ in range(3)]
        for number in range(12):
            tail = tuple(random.choices(range(3), k=random.randint(1, 12)))
            head = random.choice(heads)[: random.randint(0, 40)]
            self.waiting.append(Request(str(number), (*head, *tail), hasher=self.cache.hasher))

    def grow(self, asked: Asked) -> None:
        """Slots for running requests; one without is preempted."""
        for request in list(self.running):
            start = request.num_computed_tokens
            end = chunk_end(self.cache, request, start, 16)
            if self.cache.allocate_slots(request, end - start) is not None and self.random.random() > 0.02:
                asked.append((request, start, end))
                continue
            self.cache.engine.withdraw(request)
            self.cache.free(request)
            self.running.remove(request)
            self.waiting.insert(0, request)
            request.num_computed_tokens = 0
            self.counts["preempted"] += 1

    def admit(self, asked: Asked) -> None:
        while self.waiting and len(self.running) < 4:
            request = self.waiting[0]
            hit = self.cache.find_hit(request)
            request.branch_tokens = hit.branch_tokens
            end = chunk_end(self.cache, request, hit.tokens, 16)
            if self.cache.allocate_slots(request, end - hit.tokens, hit.tokens, hit) is None:
                return
            self.counts["inside"] += hit.tokens % BLOCK > 0
            self.counts["at a boundary"] += hit.tokens > 0 and not hit.tokens % BLOCK
            self.running.append(self.waiting.pop(0))
            request.num_computed_tokens = hit.tokens
            asked.append((request, hit.tokens, end))

    def finish(self, request: Request, end: int) -> None:
        """Note that ``end`` tokens are computed; the next token, or the end of the request."""
        request.num_computed_tokens = end
        if end == request.num_tokens:
            request.append(self.random.randrange(3))
        if request.num_output_tokens > 12 or self.random.random() < 0.01:
            self.cache.keep_resume_point(request)
            self.cache.free(request)
            self.running.remove(request)


def serve_alone(worker: Worker, name: str, prompt: Tokens, steps: Iterator[int], outputs: int = 0) -> int:
    """Run a request with no other to its end; return its hit tokens."""
    cache, request = worker.cache, Request(name, prompt, hasher=worker.cache.hasher)
    hit = cache.find_hit(request)
    request.branch_tokens = hit.branch_tokens
    start = hit.tokens
    while start < request.num_tokens:
        step, end, begins = next(steps), chunk_end(cache, request, start, 16), request.row < 0
        with cache.step(step):
            given = (hit.tokens, hit) if begins and hit.tokens else ()
            assert cache.allocate_slots(request, end - start, *given)
            cache.engine.store_checkpoints_of(request, start, end)
            worker.copy()
        worker.run(request, start, end)
        cache.mark_written(step)
        start = request.num_computed_tokens = end
        if end == request.num_tokens and request.num_output_tokens < outputs:
            request.append(7)
    cache.free(request)
    return hit.tokens


def play(seed: int, eviction: Eviction, counts: Counter[str], bound: int | None, copied: int) -> None:
    random = Random(seed)
    run = Run(random, cache_of(random.randint(24, 60), eviction, random.choice((None, 0)), bound), counts)
    worker = Worker(run.cache, copied)
    run.add_requests()
    for step in range(200):
        asked: Asked = []
        with run.cache.step(step):
            run.grow(asked)
            run.admit(asked)
            for request, start, end in asked:
                run.cache.engine.store_checkpoints_of(request, start, end)
            worker.copy()
        for request, start, end in asked:
            worker.run(request, start, end)
            run.finish(request, end)
        run.cache.mark_written(step)
        run.cache.check()
    counts["copies"] += worker.copies


def play_all(eviction: Eviction, count: int, bound: int | None = None, copied: int = BLOCK) -> Counter[str]:
    counts = Counter[str]()
    for seed in range(count):
        play(seed, eviction, counts, bound, copied)
    return counts


@pytest.mark.parametrize("eviction", [LRU, HAZARD], ids=lambda one: one.name)
def test_hits_inside_blocks_read_what_was_written(eviction: Eviction) -> None:
    counts = play_all(eviction, how_many(30))
    assert min(counts["inside"], counts["at a boundary"], counts["copies"], counts["preempted"]) > 0


@pytest.mark.parametrize("copied", [1, 4, 5])
def test_hits_inside_blocks_end_before_tokens_that_the_worker_does_not_copy(copied: int) -> None:
    counts = play_all(LRU, how_many(20), copied, copied)
    assert min(counts["at a boundary"], counts["preempted"]) > 0
    assert (counts["inside"] > 0) == (copied >= UNIT)


def test_hit_on_tokens_that_the_worker_does_not_copy_is_detected() -> None:
    with pytest.raises((AssertionError, IndexError)):
        play_all(LRU, 10, copied=4)


def test_copied_tokens_without_hit_unit_are_rejected() -> None:
    with pytest.raises(ConfigError, match="copied_tokens means nothing without hit_unit"):
        CacheOptions(copied_tokens=4)


def test_hit_whose_state_is_not_copied_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnitStateHits, "source", lambda *_: 0)
    with pytest.raises((AssertionError, KeyError)):
        play_all(LRU, 10)


@pytest.mark.parametrize("eviction", [LRU, HAZARD], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("copied", "hit_end", "copies"), [(None, 22, len(SPECS) + 2), (4, 20, len(SPECS) + 2), (1, 16, 0)]
)
def test_same_prompt_again_hits_the_last_unit_before_its_last_token_that_is_copied(
    eviction: Eviction, copied: int | None, hit_end: int, copies: int
) -> None:
    cache = cache_of(40, eviction, copied=copied)
    worker, steps = Worker(cache, BLOCK if copied is None else copied), count()
    prompt = tuple(range(23))
    assert [serve_alone(worker, name, prompt, steps, outputs=3) for name in "ab"] == [0, hit_end]
    assert worker.copies == copies  # the states of the tail, and the hit: one block of each group


@pytest.mark.parametrize(
    ("specs", "unit", "message"),
    [
        (SPECS, 3, "must divide the block of 8 tokens"),
        ((full_spec(BLOCK), window_spec(BLOCK, 9), SPECS[1]), UNIT, "needs full attention and recurrent states"),
        ((full_spec(4), SPECS[1]), UNIT, "with blocks of one size"),
        ((full_spec(BLOCK),), UNIT, "needs full attention and recurrent states"),
        ((full_spec(BLOCK), state_spec(BLOCK, mode="align", drafts=1)), UNIT, "must have no blocks for drafts"),
    ],
)
def test_hit_unit_is_rejected_where_no_hit_can_end_there(specs: tuple[object, ...], unit: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheManager(model_config(12, specs), 64, options=CacheOptions(hit_unit=unit))  # type: ignore[arg-type]


def test_hit_unit_is_rejected_with_eagle() -> None:
    with pytest.raises(ConfigError, match="without EAGLE"):
        KVCacheManager(model_config(12, SPECS), 64, use_eagle=True, options=CacheOptions(hit_unit=UNIT))


@pytest.mark.parametrize(("eviction", "found"), [(LRU, 16), (HAZARD, 18)], ids=("lru", "hazard"))
def test_third_question_on_a_document_hits_where_the_second_branched_off(eviction: Eviction, found: int) -> None:
    """Only evictions that rank remember the keys inside a block that other tokens follow."""
    cache = cache_of(40, eviction)
    worker, steps, document = Worker(cache), count(), tuple(range(19))
    prompts = [(*document, *[question] * 4) for question in (30, 31, 32, 31)]
    hits = [serve_alone(worker, str(number), prompt, steps) for number, prompt in enumerate(prompts)]
    assert hits == [0, 16, found, 22]
    cache.check()


@pytest.mark.parametrize(("copied", "ends"), [(None, [14, 38]), (4, [12, 36])])
def test_resume_points_have_the_kind_of_the_end_that_they_stand_for(copied: int | None, ends: list[int]) -> None:
    cache = cache_of(40, HAZARD, copied=copied)
    request = Request("a", range(40), hasher=cache.hasher)
    request.branch_tokens = 14
    assert cache.bounds.resume_points(request) == ends
    places = HitEnds(UNIT, BLOCK, BLOCK if copied is None else copied)
    kinds = [kind_of(request, tokens, places, ended=False) for tokens in (*ends, 32, 24)]
    assert kinds == [Kind.BRANCH, Kind.PROMPT, Kind.BOUNDARY, Kind.GRID]


def test_marks_end_hits_in_the_prompt_only() -> None:
    cache = cache_of(40, LRU)
    request = Request("a", range(23), hasher=cache.hasher, marks=[5, 16, 30])
    assert cache.bounds.resume_points(request) == [4, 16, 22]
