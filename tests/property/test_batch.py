"""allocate_batch is allocate_slots, and free_many is free, one call after the other."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from how_much import too_rare
from hybridkv.cache import BatchSlots, KVCacheManager
from hybridkv.cache.allocator import FEW, Batch, Needs, Slots
from hybridkv.cache.plan import Refusal
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.request import Request
from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec
from oracles.strategies import prompts

MODELS: tuple[tuple[KVCacheSpec, ...], ...] = (
    *((full_spec(size),) for size in (4, 3, 1)),
    (full_spec(2), full_spec(4)),
    (full_spec(4), full_spec(4)),
    (full_spec(2), full_spec(4), full_spec(8)),
    (full_spec(3), full_spec(6), full_spec(3)),
    (window_spec(4, 8),),
    (window_spec(2, 5), full_spec(4)),
    (full_spec(4), window_spec(2, 3), window_spec(4, 9)),
    (chunk_spec(2, 4), full_spec(2)),
    (state_spec(4),),
    (full_spec(4), state_spec(4)),
    (full_spec(2), state_spec(4), state_spec(4), window_spec(4, 6)),
    (full_spec(4), state_spec(8, drafts=2)),
    (full_spec(4), state_spec(64, mode="none")),
    (full_spec(4), window_spec(4, 8), state_spec(4)),
)
MAX_MODEL_LEN = 40
Int64 = NDArray[np.int64]
MET: Counter[str] = Counter()


@dataclass
class Twin:
    """One of two managers to which the same things are done."""

    num_blocks: int
    specs: tuple[KVCacheSpec, ...]
    caching: bool
    requests: dict[str, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = tuple(KVCacheGroupSpec((f"layer{i}",), spec) for i, spec in enumerate(self.specs))
        config = KVCacheConfig(self.num_blocks, (), groups)
        self.cache = KVCacheManager(config, MAX_MODEL_LEN, self.caching, enable_kv_cache_events=True)

    def admit(self, name: str, prompt: list[int], tokens: int) -> bool:
        """A request computes the first ``tokens`` tokens behind its hit, all of them if there are fewer."""
        request = Request(name, prompt, hasher=self.cache.hasher)
        blocks, hit = self.cache.get_computed_blocks(request)
        count = min(tokens, len(prompt) - hit)
        if self.cache.allocate_slots(request, count, hit, blocks) is None:
            return False
        request.num_computed_tokens = hit + count
        self.requests[name] = request
        return True

    def batch(self, names: list[str], counts: list[int]) -> BatchSlots:
        rows = self.cache.rows.rows_of([self.requests[name] for name in names])
        return self.cache.allocate_batch(rows, np.array(counts, np.int64))

    def one_by_one(self, names: list[str], counts: list[int]) -> tuple[int, list[list[int]]]:
        """How many were served, and (owner, group, column, block) of what is new."""
        cells: list[list[int]] = []
        for owner, (name, count) in enumerate(zip(names, counts, strict=True)):
            request = self.requests[name]
            held = [len(ids) for ids in self.cache.get_block_ids(name)]
            event = self.cache.engine.next_event(request.row)
            new = self.cache.allocate_slots(request, count)
            if new is None:
                MET["refused"] += 1
                return owner, cells
            total = min(request.num_computed_tokens + count, MAX_MODEL_LEN)
            MET["due" if total >= event else "not due"] += 1
            for group, ids in enumerate(new.blocks):
                cells += [[owner, group, held[group] + i, block] for i, block in enumerate(ids) if block]
        return len(names), cells

    def seen(self) -> dict[str, object]:
        """Everything that must be equal."""
        cache = self.cache
        rows = [request.row for request in self.requests.values()]
        return {
            "free": cache.block_pool.free_order(),
            "tables": {name: cache.get_block_ids(name) for name in self.requests},
            "keys": [sorted(index.entries()) for index in cache.block_pool.indexes],
            "first": [{key: index.get(key) for key, _ in index.entries()} for index in cache.block_pool.indexes],
            "published": [group.published[rows].tolist() for group in cache.groups],
            "labels": [group.label[rows].tolist() for group in cache.groups],
            "dropped": [group.rows.dropped[rows].tolist() for group in cache.groups],
            "next": [cache.engine.next_event(row) for row in rows],
            "evictions": cache.block_pool.keys.evictions,
        }


def ordered(twin: Twin) -> list[str]:
    """Events as text, removed and stored apart: a batch takes all blocks before it publishes any."""
    return sorted(repr(event) for event in twin.cache.take_events())


@st.composite
def twins(draw: st.DrawFn) -> tuple[Twin, Twin]:
    specs = draw(st.sampled_from(MODELS))
    num_blocks, caching = draw(st.integers(4, 30 * len(specs))), draw(st.sampled_from((True, True, False)))
    return Twin(num_blocks, specs, caching), Twin(num_blocks, specs, caching)


@settings(max_examples=4 * settings().max_examples)
@given(twins(), st.data())
def check_batches(both: tuple[Twin, Twin], data: st.DataObject) -> None:
    batched, single = both
    with pytest.MonkeyPatch.context() as patch:  # few rows are served together, too
        patch.setattr("hybridkv.cache.allocator.FEW", data.draw(st.sampled_from((0, FEW))))
        check_turns(batched, single, data)


def check_turns(batched: Twin, single: Twin, data: st.DataObject) -> None:
    for turn in range(data.draw(st.integers(2, 15))):
        for i in range(data.draw(st.integers(0, 3))):
            prompt, tokens = data.draw(prompts()), data.draw(st.integers(1, 30))
            assert batched.admit(f"{turn}.{i}", prompt, tokens) == single.admit(f"{turn}.{i}", prompt, tokens)
        names = data.draw(st.permutations(sorted(batched.requests)))
        names = [name for name in names if batched.requests[name].num_computed_tokens < MAX_MODEL_LEN]
        names = names[: data.draw(st.integers(0, len(names)))]
        left = [MAX_MODEL_LEN - batched.requests[name].num_computed_tokens for name in names]
        counts = [min(data.draw(st.sampled_from((1, 1, 1, 2, 7))), most) for most in left]
        for name in names:
            for token in data.draw(st.lists(st.integers(0, 3), max_size=2)):
                batched.requests[name].append(token)
                single.requests[name].append(token)
        slots = batched.batch(names, counts)
        accepted, cells = single.one_by_one(names, counts)
        assert slots.accepted == accepted
        assert np.stack([slots.owner, slots.group, slots.column, slots.block], axis=1).tolist() == cells
        for name, count in list(zip(names, counts, strict=True))[:accepted]:
            batched.requests[name].num_computed_tokens += count
            single.requests[name].num_computed_tokens += count
        assert batched.seen() == single.seen()
        assert ordered(batched) == ordered(single)
        ended = data.draw(st.lists(st.sampled_from(names), unique=True) if names else st.just([]))
        batched.cache.engine.free_many([batched.requests.pop(name) for name in ended])
        for name in ended:
            single.cache.free(single.requests.pop(name))
        batched.cache.check()
        single.cache.check()


def test_a_batch_is_its_rows_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are met: rows served together, rows that drop among them, and rows served one by one."""
    MET.clear()
    serve, each = Slots._serve, Slots._each

    def count_served(self: Slots, rows: Batch, needs: Needs) -> BatchSlots | None:
        before = np.stack([group.rows.dropped[rows.rows] for group in self._groups], axis=1)
        dropped = int((needs.drop > before).any(axis=1).sum())
        slots = serve(self, rows, needs)
        if slots is not None:
            MET["together"] += len(rows.rows)
            MET["dropped together"] += dropped
        return slots

    def count_each(
        self: Slots, places: Int64, rows: Int64, end: Int64, lookahead: int
    ) -> tuple[Refusal | None, BatchSlots]:
        MET["alone"] += len(rows)
        return each(self, places, rows, end, lookahead)

    monkeypatch.setattr(Slots, "_serve", count_served)
    monkeypatch.setattr(Slots, "_each", count_each)
    check_batches()
    least = {"together": 400, "dropped together": 65, "alone": 500, "not due": 200, "due": 400, "refused": 100}
    assert too_rare(MET, least) == {}


def test_nothing_for_nobody() -> None:
    twin = Twin(8, (full_spec(4),), caching=True)
    slots = twin.batch([], [])
    assert (slots.accepted, slots.block.tolist()) == (0, [])


def test_one_count_for_all() -> None:
    twin = Twin(12, (full_spec(4),), caching=True)
    for name in "abc":
        assert twin.admit(name, [*range(4)] if name == "b" else [*range(3)], 4)
    rows = twin.cache.rows.rows_of([twin.requests[name] for name in "abc"])
    slots = twin.cache.allocate_batch(rows, 1)
    assert (slots.accepted, slots.owner.tolist(), slots.column.tolist()) == (3, [1], [1])
