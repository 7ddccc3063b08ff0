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
    path = Path(__file__).parents[3] / "benchmarks" / "kv_adapter.py"
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


def test_adapter_allocates_hits_and_frees_a_prompt(bench: ModuleType) -> None:
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


def test_adapter_allocates_windows_and_states(bench: ModuleType) -> None:
    adapter = bench.HybridKVAdapter()
    groups = [Group("full", 4), Group("swa", 4, 6), Group("mamba_align", 8)]
    request = adapter.request("a", list(range(20)), adapter.hasher("sha256_cbor", 4))
    cache = adapter.manager(groups, 64, 1024)
    assert [ids.tolist() for ids in adapter.allocate(cache, request, 16)] == [[1, 2, 3, 4], [5, 6, 7, 8], [0, 9]]
    assert [ids.tolist() for ids in adapter.allocate(cache, request, 4)] == [[10], [11], [12]]
    assert adapter.batch_result(adapter.decode_many(cache, [request]), 1) == [[[13], [14], []]]
    with pytest.raises(NotImplementedError, match="cross"):
        adapter.manager([Group("cross")], 16, 1024)


def test_adapter_scheduler_of_several_kinds_shows_null_columns(bench: ModuleType) -> None:
    adapter = bench.HybridKVAdapter()
    sched = adapter.scheduler([Group("full", 4), Group("mamba_align", 8)], 4, 64, 8192)
    adapter.sched_add(sched, "a", list(range(20)), sched.cache.hasher)
    step, ids = adapter.sched_schedule(sched)
    assert ids == ["a"]
    assert adapter.sched_view(sched, step) == [("a", 16, ([1, 2, 3, 4], [0, 5]))]


def test_adapter_scheduler_runs_prompts_then_decodes(bench: ModuleType) -> None:
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
