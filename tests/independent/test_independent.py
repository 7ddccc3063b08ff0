"""The independent worker finds no difference, sees everything happen, and catches what is broken on purpose."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from content import DifferenceError
from executor import Arena, Layer, Places, Table
from history import Tamper, play

from how_much import how_many, too_rare
from hybridkv.cache import CacheGroup
from hybridkv.cache.policies.attention import WindowSpan
from hybridkv.cache.publisher import Publisher
from hybridkv.cache.transfers import TransferLog
from hybridkv.extra_keys import ExtraKeys
from hybridkv.spec_fields import Feature
from hybridkv.specs import Keeps
from hybridkv.step import Cells, Step

pytestmark = pytest.mark.usefixtures("quiet")

RUNS = 70
LEAST = {
    "row-steps": 10_000,
    "hits": 250,
    "hits inside a block": 120,
    "states hit": 60,
    "states written inside a chunk": 100,
    "copies of kind block": 200,
    "copies of kind state": 100,
    "copies of kind move": 20,
    "preemptions": 30,
    "drafts accepted": 500,
    "drafts rejected": 150,
    "failures": 100,
    "aborts": 60,
    "ended by the caller": 30,
    "forks": 100,
    "branches": 300,
    "caches reset": 5,
    "encoder inputs run": 40,
    "encoder outputs shared": 10,
    "prompts of several tenants": 40,
    "rows that ended and began in one step": 300,
    "context parallel worlds": 10,
    "layout natural": 25,
    "layout reference": 10,
}
"""What must happen at least so often, or the histories show nothing about it."""
COMPRESSED_RUNS = 50
COMPRESSED_LEAST = {
    "hits inside a block": 80,
    "layout natural": 25,
    "layout packed": 8,
    "compressed states written": 20_000,
    "states begun in an earlier step": 3_000,
    "raw keys read from a ring": 10_000,
    "rings kept": 50,
    "rings hit": 15,
    "preemptions": 12,
    "drafts rejected": 100,
    "forks": 35,
}
"""The same in models with compressed caches."""


def test_independent_worker_agrees_and_covers_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    total: Counter[str] = Counter()
    for seed in range(how_many(RUNS)):
        total += play(seed)
    with capsys.disabled():
        print(f"\nindependent worker: {total['row-steps']} row-steps in {how_many(RUNS)} models and histories")  # noqa: T201
    assert too_rare(total, LEAST) == {}


def test_independent_worker_agrees_over_compressed_caches() -> None:
    total: Counter[str] = Counter()
    for seed in range(how_many(COMPRESSED_RUNS)):
        total += play(seed, steps=60, family="compressed")
    assert too_rare(total, COMPRESSED_LEAST) == {}


# -- what is broken on purpose


def _without(kind: str) -> Tamper:
    def tamper(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
        left = list(step.copies)
        for copy in left:
            if copy.kind == kind:
                left.remove(copy)
                break
        return replace(step, copies=tuple(left))

    return tamper


def _no_zero(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    return replace(step, zero=np.empty((0, 2), np.int32))


def _next_block(step: Step, rng: random.Random) -> Step:
    cells = step.cells
    used = np.flatnonzero(cells.block)
    if not used.size or rng.random() > 0.2:
        return step
    block = cells.block.copy()
    block[rng.choice(used.tolist())] += 1
    return replace(step, cells=Cells(cells.group, cells.row, cells.column, block))


def _other_state(step: Step, rng: random.Random) -> Step:
    return replace(step, state_read=step.state_read + (step.state_read >= 0)) if rng.random() < 0.2 else step


def _early_checkpoint(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    """A state inside a chunk is written one token before the count it is published under."""
    writes = step.state_writes.copy()
    for write in writes:
        place, tokens = write[0], write[2]
        inside = tokens < step.num_computed[place] + step.num_scheduled[place] - len(step.drafts[place])
        write[2] -= inside and tokens > step.num_computed[place] + 1
    return replace(step, state_writes=writes)


def _nobody_encodes(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    rows = [replace(new, encoder=new.encoder and replace(new.encoder, encodes=False)) for new in step.new_rows]
    return replace(step, new_rows=tuple(rows))


def _all_sample(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    return replace(step, samples=np.ones_like(step.samples))


def _moved_cells_lost(step: Step, rng: random.Random) -> Step:  # noqa: ARG001
    if not any(copy.kind == "move" for copy in step.copies):
        return step
    kept = np.isin(step.cells.row, [new.row for new in step.new_rows])
    return replace(step, cells=Cells(*(getattr(step.cells, name)[kept] for name in Cells.__slots__)))


TAMPERS: dict[str, Tamper] = {
    "a block is not copied": _without("block"),
    "a state is not copied": _without("state"),
    "a block is not moved": _without("move"),
    "states are not zeroed": _no_zero,
    "a cell names the next block": _next_block,
    "a state is read from the next block": _other_state,
    "a checkpoint is one token too early": _early_checkpoint,
    "no encoder runs": _nobody_encodes,
    "every row samples": _all_sample,
    "cells of moved blocks are lost": _moved_cells_lost,
}


def _caught(tamper: Tamper | None = None, family: str | None = None) -> str | None:
    """What the first of 25 histories says that shows a difference, and not just an error of the library."""
    for seed in range(25):
        try:
            play(seed, tamper, steps=60, family=family)
        except DifferenceError as error:
            if isinstance(error.__cause__, DifferenceError):
                return str(error)
    return None


@pytest.mark.parametrize("name", TAMPERS)
def test_independent_worker_detects_a_wrong_step(name: str) -> None:
    assert _caught(TAMPERS[name])


Patch = Callable[[pytest.MonkeyPatch], None]


def _without_salts(patch: pytest.MonkeyPatch) -> None:
    make = ExtraKeys.__init__
    patch.setattr(
        ExtraKeys, "__init__", lambda self, *args, **options: make(self, *args, **(options | {"cache_salt": None}))
    )


def _without_extra_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExtraKeys, "of_blocks", lambda self, first, count: None)  # noqa: ARG005


def _failures_stay_published(patch: pytest.MonkeyPatch) -> None:
    def mark_all(self: Publisher, first_step: int) -> None:
        for step in [step for step in self.in_flight if step >= first_step]:
            self.mark_written(step)

    patch.setattr(Publisher, "revoke", mark_all)
    patch.setattr(TransferLog, "forget_moved", lambda self, moved: set())  # noqa: ARG005


def _drafts_leave_no_state(patch: pytest.MonkeyPatch) -> None:
    """A row goes on from the state before its drafts, whatever was accepted."""
    accept = CacheGroup.accept
    patch.setattr(CacheGroup, "accept", lambda self, rows, columns: accept(self, rows, 0 * columns))


def _short_windows(patch: pytest.MonkeyPatch) -> None:
    live = WindowSpan.first_live_token
    patch.setattr(WindowSpan, "first_live_token", lambda self, processed: live(self, processed + 2))


PATCHES: dict[str, Patch] = {
    "tenants share blocks": _without_salts,
    "no extra key is hashed": _without_extra_keys,
    "what failed stays published": _failures_stay_published,
    "the state of accepted drafts is lost": _drafts_leave_no_state,
    "windows are too short": _short_windows,
}


@pytest.mark.parametrize("name", PATCHES)
def test_independent_worker_detects_a_wrong_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PATCHES[name](monkeypatch)
    assert _caught()


Written = Callable[[Arena, Layer, Places], tuple[Layer, Places]]
"""Another layer and other items, to which a wrong worker writes."""


def _writing(wrong: Written, what_it_does: str = "writes") -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        places = Arena.places

        def of(self: Arena, layer: Layer, row: Table, items: Places, what: str) -> Places:
            there = wrong(self, layer, items) if what.endswith(what_it_does) else (layer, items)
            return places(self, there[0], row, there[1], what)

        patch.setattr(Arena, "places", of)

    return apply


def _next_group(arena: Arena, layer: Layer, items: Places) -> tuple[Layer, Places]:
    rate = max(one.rate.numerator for one in arena.layers if one.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW})
    return layer, items + rate * (layer.spec.keeps is Keeps.RING)


def _next_item(arena: Arena, layer: Layer, items: Places) -> tuple[Layer, Places]:  # noqa: ARG001
    return layer, items + 1


def _neighbour(arena: Arena, layer: Layer, items: Places) -> tuple[Layer, Places]:  # noqa: ARG001
    return layer, items ^ (Feature.RATE in layer.spec.features)


def _other_page(arena: Arena, layer: Layer, items: Places) -> tuple[Layer, Places]:
    for other in arena.layers:  # of this group, or of another one with blocks as large
        if Feature.INDEXER in layer.spec.features and other.stride == layer.stride and other.offset != layer.offset:
            return replace(layer, offset=other.offset), items
    return layer, items


def _other_tokens(patch: pytest.MonkeyPatch) -> None:
    write = Arena.write
    patch.setattr(
        Arena,
        "write",
        lambda self, layer, places, content: write(
            self, layer, places, np.roll(content, 1) if Feature.RATE in layer.spec.features else content
        ),
    )


def _stale_rings(patch: pytest.MonkeyPatch) -> None:
    copy = Arena.copy

    def of(self: Arena, group: int, source: int, target: int) -> None:
        if self.config.groups[group].spec.keeps is not Keeps.RING:
            copy(self, group, source, target)

    patch.setattr(Arena, "copy", of)


WRONG_WORKERS: dict[str, Patch] = {
    "a ring is off by one group": _writing(_next_group),
    "a kept ring is off by one token": _writing(_next_item, "keeps a ring"),
    "a state is in the slot of its neighbour": _writing(_neighbour),
    "an indexer's keys are in the page of another layer": _writing(_other_page),
    "a state is that of other tokens": _other_tokens,
    "the ring of a hit or branch is stale": _stale_rings,
}


@pytest.mark.parametrize("name", WRONG_WORKERS)
def test_independent_worker_detects_wrong_compressed_caches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG_WORKERS[name](monkeypatch)
    assert _caught(family="compressed")


def test_independent_worker_agrees_with_other_evictions() -> None:
    """Whatever is given up next, every read is of what was written."""
    assert sum(play(seed, steps=60, eviction="hazard")["tokens hit"] for seed in (43, 46, 49, 53)) > 100


@pytest.mark.thorough
def test_independent_worker_agrees_in_long_hazard_runs() -> None:
    for seed in range(1000, 1060):
        play(seed, eviction="hazard")
