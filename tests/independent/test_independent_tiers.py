"""The independent worker with host memory below the device's: no difference, and what is broken is caught.

Moves within host memory and the order of loads rarely matter here: tests/property/test_tier_content.py breaks them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from content import DifferenceError
from history import Tamper, play
from host_memory import HostMemory, Journey

from how_much import how_many, too_rare
from hybridkv.eviction.choice import HAZARD
from hybridkv.step import Step, StepResult, TierCopies

pytestmark = pytest.mark.usefixtures("quiet")

RUNS = 40
LEAST = {
    "row-steps": 5_000,
    "hits": 250,
    "states hit": 40,
    "tokens loaded": 250,
    "transfers arrived": 200,
    "transfers late": 80,
    "transfers lost": 20,
    "blocks moved in host memory": 50,
    "failures": 60,
    "aborts": 40,
    "preemptions": 20,
    "context parallel worlds": 5,
}
"""What must happen at least so often, or the histories show nothing about it."""
STORED_LEAST = {
    "processes that ended": 100,
    "spills arrived": 100,
    "spills lost": 10,
    "fetches arrived": 20,
    "tokens fetched": 200,
    "blocks forgotten": 50,
    "failures": 60,
}
"""The same with a store behind host memory."""
REFERENCE_LEAST = {
    "row-steps": 4_000,
    "hits": 150,
    "states hit": 20,
    "tokens loaded": 100,
    "transfers arrived": 100,
    "transfers late": 60,
    "transfers lost": 20,
    "processes that ended": 40,
    "spills arrived": 25,
    "tokens fetched": 50,
    "failures": 60,
}
"""The same in the reference layout, every second time with a store."""


def tiered(seed: int, tamper: Tamper | None = None, steps: int = 120) -> Counter[str]:
    return play(seed, tamper, steps, HAZARD.name, layout="natural", tiered=True)


def test_independent_worker_agrees_through_host_memory() -> None:
    total: Counter[str] = Counter()
    for seed in range(how_many(RUNS)):
        total += tiered(seed)
    assert too_rare(total, LEAST) == {}


def test_independent_worker_agrees_through_a_store() -> None:
    total: Counter[str] = Counter()
    for seed in range(how_many(RUNS)):
        total += play(seed, eviction=HAZARD.name, layout="natural", stored=True)
    assert too_rare(total, STORED_LEAST) == {}


def test_independent_worker_agrees_through_tiers_of_the_reference_layout() -> None:
    total: Counter[str] = Counter()
    for seed in range(how_many(RUNS)):
        total += play(seed, eviction=HAZARD.name, layout="reference", tiered=True, stored=seed % 2 > 0)
    assert too_rare(total, REFERENCE_LEAST) == {}


# -- what is broken on purpose


def part(copies: TierCopies, kept: np.ndarray) -> TierCopies:
    return TierCopies(*(getattr(copies, name)[kept] for name in TierCopies.__slots__))


def without_a_copy(copies: TierCopies) -> TierCopies:
    """Without the last copy of a transfer that has several."""
    counts = Counter(copies.transfer.tolist())
    several = [i for i, number in enumerate(copies.transfer.tolist()) if counts[number] > 1]
    return part(copies, np.delete(np.arange(len(copies)), several[-1:]))


def swapped(copies: TierCopies) -> TierCopies:
    """Two blocks of a group in each other's place."""
    for group in np.unique(copies.group):
        mine = np.flatnonzero(copies.group == group)
        if len(mine) > 1:
            source = copies.source.copy()
            source[mine[:2]] = source[mine[:2]][::-1]
            return replace(copies, source=source)
    return copies


def _half_a_store(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    return replace(step, stores=without_a_copy(step.stores))


def _half_a_load(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    return replace(step, loads=without_a_copy(step.loads))


def _swapped_stores(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    return replace(step, stores=swapped(step.stores))


def _swapped_loads(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    return replace(step, loads=swapped(step.loads))


TAMPERS: dict[str, Tamper] = {
    "a store lacks a block": _half_a_store,
    "a load lacks a block": _half_a_load,
    "two stored blocks are swapped": _swapped_stores,
    "two loaded blocks are swapped": _swapped_loads,
}


def _swapped_spills(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    return replace(step, spills=tuple(replace(one, keys=(*one.keys[1:], *one.keys[:1])) for one in step.spills))


def _swapped_fetches(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    return replace(step, fetches=tuple(replace(one, keys=(*one.keys[1:], *one.keys[:1])) for one in step.fetches))


STORED_TAMPERS: dict[str, Tamper] = {
    "spilled blocks have each other's keys": _swapped_spills,
    "fetched blocks are in each other's places": _swapped_fetches,
}


def caught(tamper: Tamper | None = None, *, stored: bool = False) -> str | None:
    """What the first of 100 histories says that shows a difference, and not just an error of the library."""
    for seed in range(100):
        try:
            play(seed, tamper, 60, HAZARD.name, layout="natural", tiered=True, stored=stored)
        except DifferenceError as error:
            if isinstance(error.__cause__, DifferenceError):
                return str(error)
    return None


@pytest.mark.parametrize("name", STORED_TAMPERS)
def test_independent_worker_detects_a_wrong_errand(name: str) -> None:
    assert caught(STORED_TAMPERS[name], stored=True)


@pytest.mark.parametrize("name", TAMPERS)
def test_independent_worker_detects_a_wrong_transfer(name: str) -> None:
    assert caught(TAMPERS[name])


Patch = Callable[[pytest.MonkeyPatch], None]


def _everything_arrives(patch: pytest.MonkeyPatch) -> None:
    report = HostMemory.report

    def of(self: HostMemory, step: Step, result: StepResult) -> StepResult:
        told = report(self, step, result)
        return replace(told, arrived=np.append(told.arrived, told.lost), lost=told.lost[:0])

    patch.setattr(HostMemory, "report", of)


def _early_reports(patch: pytest.MonkeyPatch) -> None:
    """What is late is reported when it leaves."""
    report = HostMemory.report

    def of(self: HostMemory, step: Step, result: StepResult) -> StepResult:
        told = report(self, step, result)
        left = {*step.stores.transfer.tolist(), *step.loads.transfer.tolist()}
        early = [one.number for one in self._away if one.number in left]
        again = [number for number in told.arrived.tolist() if number in self.early]  # type: ignore[attr-defined]
        self.early |= {*early}  # type: ignore[attr-defined]
        kept = [number for number in told.arrived.tolist() if number not in again]
        lost = [number for number in told.lost.tolist() if number not in self.early]  # type: ignore[attr-defined]
        return replace(told, arrived=np.array(kept + early, np.int32), lost=np.array(lost, np.int32))

    patch.setattr(HostMemory, "early", set[int](), raising=False)
    patch.setattr(HostMemory, "report", of)


def _stale_bytes(patch: pytest.MonkeyPatch) -> None:
    """Loads leave the device's blocks as they were."""
    arrive = HostMemory._arrive

    def of(self: HostMemory, one: Journey) -> None:
        if one.target is self.arena:
            arrive(self, one)
        one.there = True

    patch.setattr(HostMemory, "_arrive", of)


def _no_fetches(patch: pytest.MonkeyPatch) -> None:
    """Fetches leave rubbish, and count as arrived."""
    patch.setattr(HostMemory, "_fetch", lambda self, errand: True)  # noqa: ARG005


WRONG_STORES: dict[str, Patch] = {"fetches write nothing": _no_fetches}


@pytest.mark.parametrize("name", WRONG_STORES)
def test_independent_worker_detects_a_wrong_store(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG_STORES[name](monkeypatch)
    assert caught(stored=True)


WRONG_WORKERS: dict[str, Patch] = {
    "lost transfers are reported as arrived": _everything_arrives,
    "transfers are reported before they arrive": _early_reports,
    "loads write nothing": _stale_bytes,
}


@pytest.mark.parametrize("name", WRONG_WORKERS)
def test_independent_worker_detects_a_wrong_host_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG_WORKERS[name](monkeypatch)
    assert caught()
