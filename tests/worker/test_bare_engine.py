"""examples/bare_engine.py says what a dense forward of the same weights says, whatever the cache does.

docs/build-an-engine.md says what breaks if a worker leaves something out, or does it in another order: so it does.
Every omission is a worker of the example with one thing wrong. Either its tokens are not those of a dense forward, or
an error names what is missing.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from unittest.mock import patch

import bare_engine
import numpy as np
import pytest
import torch
from bare_engine import DRAFTS, VOCABULARY, Attention, Hybrid, InPlace, Named, Worker, draw, serve, wrong
from numpy.typing import NDArray

from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, plan
from hybridkv.errors import HybridKVError
from hybridkv.planner import Plan
from hybridkv.schedule import SchedulerStatistics
from hybridkv.step import Cells, Csr, Step, StepResult
from hybridkv.worker import AttentionMask, StepBatch, step_batch

LAYOUTS: dict[str, tuple[str, type[Named | InPlace]]] = {
    "natural": ("natural", Named),
    "reference": ("reference", Named),
    "in place": ("reference", InPlace),
}
MAX_MODEL_LEN, BUDGET = 120, 40


@dataclass(frozen=True)
class Regime:
    """What a run is like.

    hits: half of the prompts have one beginning. mixed: lengths of any size come and go; else all go on once more.
    """

    memory: str = "1MiB"
    hits: bool = False
    drafts: bool = False
    in_flight: int = 1
    temperature: float = 0.0
    max_tokens: int = 16
    mixed: bool = False
    seed: int = 1


REGIMES = {
    "plain": Regime(),
    "hits": Regime(hits=True),
    "preemption": Regime(memory="88KiB", max_tokens=48),
    "drafts": Regime(drafts=True),
    "ahead": Regime(in_flight=2, hits=True, temperature=0.8),
    "crowded": Regime(memory="80KiB", hits=True, max_tokens=40, mixed=True, seed=2),
    "all": Regime(memory="88KiB", hits=True, drafts=True, temperature=0.8, max_tokens=40),
}


@dataclass(frozen=True)
class Run:
    """What came of one. wrong: output tokens that are not those of a dense forward, of all requests."""

    wrong: int
    counts: SchedulerStatistics
    worker: Worker


@cache
def model() -> Hybrid:
    return Hybrid()


@cache
def dense_output(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    """What a dense forward says, token by token."""
    tokens = list(prompt)
    for _ in range(sampling.max_tokens):
        tokens.append(draw(model().dense(tokens)[-1], sampling, len(tokens)))
    return tuple(tokens[len(prompt) :])


def guesses(request: Request) -> list[int]:
    """Drafts of which some are what comes, by request and place: none, some or all of them are accepted."""
    random = Random(f"{request.request_id} {request.num_tokens}")
    right = dense_output(tuple(request.token_ids().tolist()[: request.num_prompt_tokens]), request.sampling)
    done = request.num_tokens - request.num_prompt_tokens
    count = random.randint(0, DRAFTS)
    return [one if random.random() < 0.7 else random.randrange(VOCABULARY) for one in right[done : done + count]]


def given(regime: Regime, random: Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, and how each goes on."""
    common = [random.randrange(VOCABULARY) for _ in range(36)]
    return [
        (
            (common if regime.hits and n % 2 else [])
            + [random.randrange(VOCABULARY) for _ in range(random.randint(2 if regime.mixed else 20, 50))],
            SamplingParams(
                max_tokens=random.randint(1, regime.max_tokens) if regime.mixed else regime.max_tokens,
                temperature=regime.temperature,
                seed=n,
            ),
        )
        for n in range(12 if regime.mixed else 4 if regime.hits else 6)
    ]


def control(layout: str, regime: Regime) -> tuple[Plan, Scheduler]:
    """All but the worker."""
    planned = plan(
        model().described(),
        regime.memory,
        max_model_len=MAX_MODEL_LEN,
        max_batched_tokens=BUDGET,
        max_in_flight=regime.in_flight,
        layout=LAYOUTS[layout][0],
    )
    limits = SchedulerLimits(
        max_running=4,
        max_batched_tokens=BUDGET,
        max_in_flight=regime.in_flight,
        num_speculative_tokens=DRAFTS if regime.drafts else 0,
    )
    manager = KVCacheManager(planned, enable_caching=regime.hits)
    return planned, Scheduler(manager, limits, clock=lambda: 0.0)


def run(layout: str, regime: Regime, worker_of: type[Worker] = Worker, *, to_the_end: bool = True) -> Run:
    """The requests of a regime, in two turns where prefixes are hit and lengths are not mixed.

    to_the_end: though tokens of the first turn are wrong.
    """
    planned, scheduler = control(layout, regime)
    worker = worker_of(model(), planned, scheduler.limits, LAYOUTS[layout][1])
    asked, wrong_tokens = given(regime, Random(regime.seed)), 0
    for turn in range(2 if regime.hits and not regime.mixed else 1):
        requests = [
            Request(f"{turn}.{n}", prompt, sampling, hasher=scheduler.cache.hasher)
            for n, (prompt, sampling) in enumerate(asked)
        ]
        serve(scheduler, worker, requests, guesses if regime.drafts else None)
        wrong_tokens += sum(len(wrong(model(), request)) for request in requests)
        if wrong_tokens and not to_the_end:
            break
        asked = [
            ([*request.token_ids().tolist()[: MAX_MODEL_LEN - 50], turn], request.sampling) for request in requests
        ]
    scheduler.check()
    return Run(wrong_tokens, scheduler.statistics(), worker)


SOURCE = Path(bare_engine.__file__).read_text("utf-8")


IN_CI = {"natural": tuple(REGIMES), "reference": ("hits", "all"), "in place": ("hits", "preemption", "drafts", "all")}
"""What a worker does with a Step is met in one layout; others where blocks or states lie elsewhere."""


@pytest.mark.parametrize(
    ("layout", "regime"),
    [
        pytest.param(layout, regime, marks=() if regime in IN_CI[layout] else pytest.mark.thorough)
        for layout in LAYOUTS
        for regime in REGIMES
    ],
)
def test_bare_engine_tokens_match_a_dense_forward(layout: str, regime: str) -> None:
    conditions = REGIMES[regime]
    came = run(layout, conditions)
    assert came.wrong == 0
    counts = came.counts
    if regime in {"hits", "ahead"}:
        assert counts.hit_tokens > 100
    if regime in {"preemption", "crowded", "all"}:
        assert counts.preemptions > 0
    if conditions.drafts:
        assert 0.2 < counts.accepted_tokens / counts.drafted_tokens < 0.9


class Fails(Worker):
    """Two forwards run and bring nothing."""

    def forward(self, step: Step) -> list[torch.Tensor]:
        logits = super().forward(step)
        if step.id in {2, 9}:
            raise RuntimeError("the device is gone")
        return logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bare_engine_with_failed_forward_discards_its_writes(layout: str) -> None:
    planned, scheduler = control(layout, REGIMES["ahead"])
    worker = Fails(model(), planned, scheduler.limits, LAYOUTS[layout][1])
    requests = [
        Request(str(n), prompt, sampling, hasher=scheduler.cache.hasher)
        for n, (prompt, sampling) in enumerate(given(REGIMES["ahead"], Random(1)))
    ]
    for request in requests:
        scheduler.add(request)
    in_flight = deque[Step]()
    while in_flight or not scheduler.drained:
        while len(in_flight) < 2 and not scheduler.drained:
            in_flight.append(scheduler.schedule())
        step = in_flight.popleft()
        try:
            result = worker.execute(step)
        except RuntimeError as error:
            scheduler.fail(step.id, error)
            in_flight.clear()  # it fails all that build on it, too
        else:
            scheduler.update(result)
    assert scheduler.statistics().failed_steps == 4
    assert not any(wrong(model(), request) for request in requests)


def test_bare_engine_example_reports_dense_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    bare_engine.main()
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["natural, Named", "reference, Named", "reference, InPlace"]
    assert all(": 8 outputs as dense in " in line for line in told)


def test_bare_engine_example_uses_no_runner() -> None:
    assert len(SOURCE.splitlines()) <= 400
    imported = {
        name
        for node in ast.walk(ast.parse(SOURCE))
        for name in (
            [one.name for one in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {"hybridkv", "hybridkv.worker"} <= imported
    assert not [name for name in imported if name.startswith(("hybridkv.runner", "transformers"))]
    taken = {name for name in ("ModelRunner", "Engine", "AsyncEngine", "load") if hasattr(bare_engine, name)}
    assert taken == set()


DOCUMENT = Path(__file__).parents[2] / "docs" / "build-an-engine.md"

Change = Callable[[Step], Step]
NO_ZERO = np.empty((0, 2), np.int32)


def reading(change: Change) -> type[Worker]:
    """A worker that reads ``change`` of every Step."""

    class Reading(Worker):
        def execute(self, step: Step) -> StepResult:
            return super().execute(change(step))

    return Reading


def without_copies(kind: str) -> type[Worker]:
    return reading(lambda step: replace(step, copies=tuple(one for one in step.copies if one.kind != kind)))


# -- Steps and rows


class AppliesEachTwice(Worker):
    def execute(self, step: Step) -> StepResult:
        self.tables.apply(step)
        return super().execute(step)


class LosesOne(Worker):
    def execute(self, step: Step) -> StepResult:
        if step.id != 3:
            return super().execute(step)
        return StepResult(step.id, Csr.from_lists([[0] if one else [] for one in step.samples.tolist()]))


class KeepsOldRows(Worker):
    """What it once knew of a row stays."""

    def execute(self, step: Step) -> StepResult:
        known = dict(self.sampling)
        new = tuple(replace(one, sampling=known.get(one.row, one.sampling)) for one in step.new_rows)
        return super().execute(replace(step, new_rows=new, finished_rows=step.finished_rows[:0]))


class AppliesLate(Worker):
    def forward(self, step: Step) -> list[torch.Tensor]:
        self.tables.last_step_id = step.after
        logits = super().forward(step)
        self.tables.last_step_id = step.id
        return logits

    def execute(self, step: Step) -> StepResult:
        with patch.object(self.tables, "apply", lambda _: None):
            result = super().execute(step)
        self.tables.apply(step)
        return result


def of_new_rows_only(step: Step) -> Step:
    kept = np.isin(step.cells.row, [new.row for new in step.new_rows])
    columns = (one[kept] for one in (step.cells.group, step.cells.row, step.cells.column, step.cells.block))
    return replace(step, cells=Cells(*columns))


class WritesCellsOnce(Worker):
    """A cell of a row is never written again."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # as they come
        self.written: set[tuple[int, int, int]] = set()

    def execute(self, step: Step) -> StepResult:
        begin = {new.row for new in step.new_rows}
        self.written = {cell for cell in self.written if cell[1] not in begin}
        cells = step.cells
        keys = list(zip(cells.group.tolist(), cells.row.tolist(), cells.column.tolist(), strict=True))
        kept = np.array([key not in self.written for key in keys], np.bool_)
        self.written |= set(keys)
        fewer = Cells(*(one[kept] for one in (cells.group, cells.row, cells.column, cells.block)))
        return super().execute(replace(step, cells=fewer))


# -- before the forward


class CopiesBehindTheForward(Worker):
    def before(self, step: Step) -> None:
        super().before(replace(step, copies=()))

    def forward(self, step: Step) -> list[torch.Tensor]:
        logits = super().forward(step)
        self.copier.execute_before(replace(step, zero=NO_ZERO))
        return logits


class ZeroesFirst(Worker):
    def before(self, step: Step) -> None:
        super().before(replace(step, copies=()))
        super().before(replace(step, zero=NO_ZERO))


class MovesLast(Worker):
    def before(self, step: Step) -> None:
        moves = tuple(one for one in step.copies if one.kind == "move")
        super().before(replace(step, copies=tuple(one for one in step.copies if one.kind != "move")))
        super().before(replace(step, zero=NO_ZERO, copies=moves))


# -- the forward


class ForgetsWhatItSampled(Worker):
    def tokens(self, step: Step) -> torch.Tensor:
        self.last_token[:] = 0
        return super().tokens(step)


class CountsFromTheChunk(Worker):
    """Positions within the step, not within the request."""

    def forward(self, step: Step) -> list[torch.Tensor]:
        computed = torch.from_numpy(np.repeat(step.num_computed, step.num_scheduled))

        def batch(*given: object) -> StepBatch:
            made = step_batch(*given)  # type: ignore[arg-type]  # as it comes
            return replace(made, positions=made.positions - computed)

        with patch.object(bare_engine, "step_batch", batch):
            return super().forward(step)


class AttendsBeforeItWrites(Worker):
    def attend(
        self, batch: StepBatch, layer: Attention, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        with patch.object(bare_engine, "write_kv", lambda *_: None):
            out = super().attend(batch, layer, query, keys, values)
        super().attend(batch, layer, query, keys, values)
        return out


class SeesNoWindow(Worker):
    def attend(
        self, batch: StepBatch, layer: Attention, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        with patch.object(bare_engine, "AttentionMask", lambda **_: AttentionMask()):
            return super().attend(batch, layer, query, keys, values)


class ReadsWhereTheRowBegan(Worker):
    """A row's states stay where they were in its first Step."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # as they come
        self.began: dict[int, np.ndarray] = {}

    def execute(self, step: Step) -> StepResult:
        for new in step.new_rows:
            self.began.pop(new.row, None)
        for row, read in zip(step.rows.tolist(), step.state_read, strict=True):
            self.began.setdefault(row, read)
        read = np.array([self.began[row] for row in step.rows.tolist()], np.int32).reshape(step.state_read.shape)
        return super().execute(replace(step, state_read=read))


def some_writes(kept: Callable[[int, int], bool]) -> type[Worker]:
    """Of the states written those of which ``kept`` says so, asked with their tokens and where certain ones end."""

    def change(step: Step) -> Step:
        ends = step.num_computed + step.num_scheduled - np.diff(step.drafts.indptr)
        mask = [kept(tokens, int(ends[i])) for i, _, tokens, _ in step.state_writes.tolist()]
        return replace(step, state_writes=step.state_writes[np.array(mask, np.bool_)])

    return reading(change)


def all_at_the_end(step: Step) -> Step:
    writes = step.state_writes.copy()
    writes[:, 2] = (step.num_computed + step.num_scheduled)[writes[:, 0]]
    return replace(step, state_writes=writes)


# -- sampling and the result


class AcceptsAll(Worker):
    def sample(self, step: Step, i: int, logits: torch.Tensor) -> list[int]:
        drafts = step.drafts[i].tolist()
        sampling = self.sampling[int(step.rows[i])]
        end = int(step.num_computed[i] + step.num_scheduled[i])
        return [*drafts, draw(logits[-1], sampling, end)] if drafts else super().sample(step, i, logits)


class DrawsBehindTheLastOne(Worker):
    def sample(self, step: Step, i: int, logits: torch.Tensor) -> list[int]:
        return super().sample(step, i, logits[-1:])


class DrawsForEverybody(Worker):
    def execute(self, step: Step) -> StepResult:
        return super().execute(replace(step, samples=np.ones_like(step.samples)))


class DoesNotCount(Worker):
    def execute(self, step: Step) -> StepResult:
        return replace(super().execute(step), num_accepted=None)


# -- states in place


class NotBefore(InPlace):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # as they come
        follow = self.states.before

        def before(step: Step) -> Step:
            with patch.object(self.states, "_copiers", {}):
                return follow(step)

        self.before = before


class NotAfter(InPlace):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # as they come
        follow = self.states.after

        def after(step: Step, accepted: Sequence[int] | NDArray[np.integer]) -> None:
            with patch.object(self.states, "_copiers", {}):
                follow(step, accepted)

        self.after = after


class NothingAccepted(InPlace):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # as they come
        follow = self.states.after
        self.after = lambda step, accepted: follow(step, np.ones_like(accepted))


class KeepsColumns(InPlace):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # as they come
        follow = self.states.before
        self.before = lambda step: follow(replace(step, finished_rows=step.finished_rows[:0], new_rows=()))


def in_place(states: type[InPlace]) -> type[Worker]:
    class Broken(Worker):
        def __init__(self, model: object, planned: object, limits: object, _: object) -> None:
            super().__init__(model, planned, limits, states)  # type: ignore[arg-type]  # as they come

    return Broken


@dataclass(frozen=True)
class Omission:
    """worker: with something wrong. layout, regime: where it shows. error: what it says; None for wrong tokens."""

    worker: type[Worker]
    layout: str
    regime: str
    error: str | None = None


OMISSIONS = {
    "step-twice": Omission(AppliesEachTwice, "natural", "hits", "send each Step once and in order"),
    "step-lost": Omission(LosesOne, "natural", "hits", "send each Step once and in order"),
    "new-rows": Omission(KeepsOldRows, "natural", "all"),
    "cells": Omission(reading(of_new_rows_only), "natural", "hits", "has blocks for .* tokens in group"),
    "cells-late": Omission(AppliesLate, "natural", "hits", "has blocks for 0 tokens in group"),
    "cells-again": Omission(WritesCellsOnce, "natural", "crowded"),
    "moves": Omission(without_copies("move"), "natural", "crowded"),
    "moves-last": Omission(MovesLast, "natural", "crowded"),
    "moves-order": Omission(reading(lambda step: replace(step, copies=step.copies[::-1])), "natural", "crowded"),
    "zero": Omission(reading(lambda step: replace(step, zero=NO_ZERO)), "natural", "preemption"),
    "zero-in-place": Omission(reading(lambda step: replace(step, zero=NO_ZERO)), "in place", "preemption"),
    "zero-first": Omission(ZeroesFirst, "natural", "crowded"),
    "copies-of-blocks": Omission(without_copies("block"), "natural", "hits"),
    "copies-of-states": Omission(without_copies("state"), "natural", "hits"),
    "copies-of-states-reference": Omission(without_copies("state"), "reference", "preemption"),
    "copies-late": Omission(CopiesBehindTheForward, "natural", "hits"),
    "last-token": Omission(ForgetsWhatItSampled, "natural", "ahead"),
    "num-computed": Omission(CountsFromTheChunk, "natural", "plain"),
    "write-late": Omission(AttendsBeforeItWrites, "natural", "plain"),
    "window": Omission(SeesNoWindow, "natural", "plain"),
    "state-read": Omission(ReadsWhereTheRowBegan, "natural", "drafts"),
    "state-read-reference": Omission(ReadsWhereTheRowBegan, "reference", "hits"),
    "checkpoints": Omission(some_writes(lambda tokens, end: tokens >= end), "natural", "hits"),
    "states-of-drafts": Omission(some_writes(lambda tokens, end: tokens <= end), "natural", "drafts"),
    "labels": Omission(reading(all_at_the_end), "natural", "hits"),
    "drafts": Omission(AcceptsAll, "natural", "drafts"),
    "draws": Omission(DrawsBehindTheLastOne, "natural", "drafts"),
    "samples": Omission(DrawsForEverybody, "natural", "hits", "one token for each row that samples"),
    "num-accepted": Omission(DoesNotCount, "natural", "drafts", "its result must set num_accepted"),
    "in-place-before": Omission(in_place(NotBefore), "in place", "hits"),
    "in-place-after": Omission(in_place(NotAfter), "in place", "all"),
    "in-place-accepted": Omission(in_place(NothingAccepted), "in place", "drafts"),
    "in-place-drop": Omission(in_place(KeepsColumns), "in place", "preemption", "must be dropped first"),
}


@pytest.mark.parametrize("name", OMISSIONS)
def test_bare_engine_with_an_omission_is_wrong(name: str) -> None:
    one = OMISSIONS[name]
    if one.error is None:
        assert run(one.layout, REGIMES[one.regime], one.worker, to_the_end=False).wrong > 0
        return
    with pytest.raises(HybridKVError, match=one.error):
        run(one.layout, REGIMES[one.regime], one.worker)


def test_bare_engine_page_names_every_omission() -> None:
    named = set(re.findall(r"`\[([a-z-]+)\]`", DOCUMENT.read_text("utf-8")))
    assert named == set(OMISSIONS)


def test_bare_engine_finished_rows_may_be_skipped() -> None:
    """What the page says may be left out."""
    came = run("natural", REGIMES["all"], reading(lambda step: replace(step, finished_rows=step.finished_rows[:0])))
    assert came.wrong == 0
