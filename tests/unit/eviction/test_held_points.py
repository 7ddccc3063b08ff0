"""Resume points whose blocks requests hold: their eviction frees nothing, so they are looked at when that changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, plan, read_model
from hybridkv.eviction.blocks import PointBlocks
from hybridkv.step import Csr, StepResult

STEPS = 60


def served(running: int) -> Iterator[KVCacheManager]:
    """Yield the cache after each step of ``running`` requests, of which one ends and another one begins."""
    cache = KVCacheManager(plan(read_model("llama-3-8b"), memory="512MiB", max_model_len=1024))
    scheduler = Scheduler(cache, SchedulerLimits(max_running=running, max_batched_tokens=4096))
    number = 0
    for step in range(STEPS + running):
        while scheduler.num_running + scheduler.num_waiting < running:
            output = 2 + number if number < running else running
            prompt = range(100 * number, 100 * number + 90)
            asked = SamplingParams(max_tokens=output, ignore_eos=True)
            scheduler.add(Request(f"{number}", list(prompt), asked, hasher=cache.hasher))
            number += 1
        made = scheduler.schedule()
        tokens = [[step] if samples else [] for samples in made.samples.tolist()]
        scheduler.update(StepResult(made.id, Csr.from_lists(tokens)))
        if step >= running:
            yield cache


def looks_in(monkeypatch: pytest.MonkeyPatch, running: int) -> int:
    """Return how often a resume point is looked at in all steps."""
    looks, look = 0, PointBlocks.look

    def counted(blocks: PointBlocks, point: object) -> tuple[float, bool]:
        nonlocal looks
        looks += 1
        return look(blocks, point)  # type: ignore[arg-type]  # a resume point

    with monkeypatch.context() as patched:
        patched.setattr(PointBlocks, "look", counted)
        for cache in served(running):
            last = cache
    last.check()
    return looks


def test_a_step_looks_at_few_points_however_many_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (looks_in(monkeypatch, running) for running in (8, 32))
    assert STEPS <= few <= 3 * STEPS
    assert many <= 5 * STEPS
