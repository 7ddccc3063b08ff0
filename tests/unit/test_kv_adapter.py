"""benchmarks/kv_adapter.py through its own methods, without the benchmark that calls them elsewhere."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BLOCK = 16


@dataclass(frozen=True)
class Group:
    """As the benchmark's own Group."""

    kind: str
    block_size: int = BLOCK
    window: int = 0


FULL = Group("full")


@pytest.fixture
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "kv_adapter.py"
    spec = importlib.util.spec_from_file_location("kv_adapter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(ids: Any) -> Any:  # noqa: ANN401 - the benchmark's own view of an answer
    """As the benchmark compares answers: tuples of ints; None when no group got any."""
    if ids is None or ids is False:
        return ids
    out = tuple(tuple(int(v) for v in group) for group in ids)
    return out if any(out) else None


def prompts(count: int, tokens: int) -> list[list[int]]:
    rows: list[list[int]] = np.random.default_rng(7).integers(0, 50_000, (count, tokens)).tolist()
    return rows


@pytest.mark.parametrize("as_array", [False, True])
def test_hashes_are_those_of_the_contract(bench: ModuleType, as_array: bool) -> None:
    adapter = bench.HybridKVAdapter()
    assert adapter.hash_algos() == ["sha256_cbor"]
    tokens: Any = np.arange(1, 40, dtype=np.int32) if as_array else list(range(1, 40))
    assert [bytes(key).hex() for key in adapter.hash_prompt(adapter.hasher("sha256_cbor", BLOCK), tokens)] == [
        "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682",
        "2533ea50426b36e9e4d68296cac6bce8cf602e46957d0fe40b368b33d87bf3bf",
    ]
    largest = [0, 23, 24, 255, 256, 65535, 65536, 151643, 4294967295, *range(7, 14)]
    assert [key.hex() for key in adapter.hash_prompt(adapter.hasher("sha256_cbor", BLOCK), largest)] == [
        "102c4c555e5e27a21728d676a077e7ef720b4b38dc36402eb97c0dd1d9819049"
    ]


def test_a_prompt_is_allocated_found_and_freed(bench: ModuleType) -> None:
    adapter = bench.HybridKVAdapter()
    hasher = adapter.hasher("sha256_cbor", BLOCK)
    manager = adapter.manager([FULL], 9, 1024, observe=True)
    (prompt,) = prompts(1, 3 * BLOCK)
    first = adapter.request("a", prompt, hasher)
    adapter.step(manager)
    assert adapter.lookup(manager, first)[1] == 0
    assert plain(adapter.allocate(manager, first, len(prompt))) == ((1, 2, 3),)
    again = adapter.request("b", prompt, hasher, first)
    hit, hit_tokens = adapter.lookup(manager, again)
    assert hit_tokens == 2 * BLOCK
    assert plain(adapter.allocate(manager, again, BLOCK, hit_tokens, hit)) == ((4,),)
    assert adapter.num_free(manager) == 4
    assert adapter.allocate(manager, adapter.request("c", prompts(1, 5 * BLOCK)[0], hasher), 5 * BLOCK) is False
    adapter.preempt(manager, again)
    assert (again.num_computed_tokens, again.num_preemptions) == (0, 1)
    adapter.free(manager, first)
    assert adapter.num_free(manager) == 8
    events, stats = adapter.observe(manager)
    rows = adapter.event_rows(events)
    assert [row[0] for row in rows] == ["stored"] * 4  # the last one twice: two blocks carry its key
    assert [row[2] for row in rows] == [None, rows[0][1], rows[1][1], rows[1][1]]
    assert [list(row[3]) for row in rows[:3]] == [prompt[i : i + BLOCK] for i in range(0, 48, BLOCK)]
    assert adapter.stats_row(stats) == (0.0, 96, 32)
    assert adapter.observe(manager)[0] == []
    assert adapter.stats_row(adapter.observe(manager)[1]) == (0.0, 0, 0)


def test_windows_and_states(bench: ModuleType) -> None:
    adapter = bench.HybridKVAdapter()
    groups = [Group("full", 4), Group("swa", 4, 6), Group("mamba_align", 8)]
    request = adapter.request("a", list(range(20)), adapter.hasher("sha256_cbor", 4))
    cache = adapter.manager(groups, 64, 1024)
    assert [ids.tolist() for ids in adapter.allocate(cache, request, 16)] == [[1, 2, 3, 4], [5, 6, 7, 8], [0, 9]]
    assert [ids.tolist() for ids in adapter.allocate(cache, request, 4)] == [[10], [11], [12]]
    assert adapter.batch_result(adapter.decode_many(cache, [request]), 1) == [[[13], [14], []]]
    with pytest.raises(NotImplementedError, match="cross"):
        adapter.manager([Group("cross")], 16, 1024)


def test_a_scheduler_of_several_kinds_shows_null_columns(bench: ModuleType) -> None:
    adapter = bench.HybridKVAdapter()
    sched = adapter.scheduler([Group("full", 4), Group("mamba_align", 8)], 4, 64, 8192)
    adapter.sched_add(sched, "a", list(range(20)), sched.cache.hasher)
    step, ids = adapter.sched_schedule(sched)
    assert ids == ["a"]
    assert adapter.sched_view(sched, step) == [("a", 16, ([1, 2, 3, 4], [0, 5]))]


def test_a_table_holds_what_was_written(bench: ModuleType) -> None:
    adapter = bench.HybridKVAdapter()
    table = adapter.table(4, 3, 8, 16)
    adapter.table_add_row(table, [7], 0)
    adapter.table_append_row(table, [3], 0)
    adapter.table_append_many(table, [1], [5])
    adapter.table_commit(table, 2)
    assert adapter.table_committed(table, 0, 2).tolist() == [7, 3]
    prepared = adapter.table_prepare(np.array([0, 4, 6]), np.array([2, 3, 4, 5, 0, 1]))
    adapter.table_compute_slots(table, 2, prepared)
    assert adapter.table_slots(table, 7).tolist() == [30, 31, 12, 13, 20, 21, -1]


def test_a_scheduler_runs_prompts_and_then_decodes(bench: ModuleType) -> None:
    adapter = bench.HybridKVAdapter()
    scheduler = adapter.scheduler([FULL], 2, 40, 2100)
    hasher = adapter.hasher("sha256_cbor", BLOCK)
    for i, prompt in enumerate(prompts(2, 30)):
        adapter.sched_add(scheduler, f"s{i}", prompt, hasher)
    seen = []
    for k in range(4):
        step, request_ids = adapter.sched_schedule(scheduler)
        assert request_ids == ["s0", "s1"]
        seen.append([(rid, count, plain(ids)) for rid, count, ids in adapter.sched_view(scheduler, step)])
        adapter.sched_update(scheduler, step, adapter.sched_prepare(scheduler, step, request_ids, 9 + k))
    assert seen == [
        [("s0", 30, ((1, 2),)), ("s1", 10, ((3,),))],
        [("s0", 1, None), ("s1", 20, ((4,),))],
        [("s0", 1, None), ("s1", 1, None)],
        [("s0", 1, ((5,),)), ("s1", 1, None)],
    ]
