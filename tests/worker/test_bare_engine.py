"""examples/bare_engine.py: what it says is what a dense forward of the same weights says, whatever the cache does."""

import ast
from collections import deque
from pathlib import Path
from random import Random

import bare_engine
import pytest
import torch
from bare_engine import Worker, wrong
from bare_support import LAYOUTS, REGIMES, control, given, model, run

from hybridkv import Request
from hybridkv.step import Step

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
def test_tokens_are_those_of_a_dense_forward(layout: str, regime: str) -> None:
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
def test_what_a_failed_forward_wrote_is_taken_back(layout: str) -> None:
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


def test_it_says_so_itself(capsys: pytest.CaptureFixture[str]) -> None:
    bare_engine.main()
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["natural, Named", "reference, Named", "reference, InPlace"]
    assert all(": 8 outputs as dense in " in line for line in told)


def test_it_is_short_and_stands_alone() -> None:
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
