"""One scheduler for several ranks: a transfer counts when all have it, and a rank that fails fails the Step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from threading import Thread

import numpy as np
import pytest
from runner_support import greedy, loaded_model

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, ModelShare, lead, plan_for, wrap
from hybridkv.runner.lockstep import Lockstep
from hybridkv.step import Csr, Step, StepResult
from hybridkv.wire import RemoteWorker, serve
from small_steps import small_step

Ended = tuple[dict[int, float], list[int]]
"""Seconds of the transfers that arrived, and the lost ones."""


class Scripted:
    """A worker that says of each Step which transfers ended, or raises."""

    def __init__(self, *ends: Ended | Exception) -> None:
        self.ends, self.steps = iter(ends), list[int]()

    def execute(self, step: Step) -> StepResult:
        self.steps.append(step.id)
        said = next(self.ends)
        if isinstance(said, Exception):
            raise said
        arrived, lost = said
        seconds = np.array([*arrived.values()], np.float32)
        ids = np.array([*arrived], np.int32), np.array(lost, np.int32)
        return StepResult(step.id, Csr.empty(0), arrived=ids[0], lost=ids[1], arrived_s=seconds)


@contextmanager
def lockstep(own: Scripted, *others: Scripted) -> Iterator[Lockstep]:
    pipes = [Pipe() for _ in others]
    threads = [Thread(target=serve, args=(far, one)) for (_, far), one in zip(pipes, others, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield Lockstep(own, [RemoteWorker(near) for near, _ in pipes])
    finally:
        for near, _ in pipes:
            near.close()
        for thread in threads:
            thread.join()


def ran(worker: Lockstep, number: int, after: int | None = None) -> Ended:
    result = worker.execute(small_step(number, after=number - 1 if after is None else after))
    assert len(result.arrived) == len(result.arrived_s)
    return dict(zip(result.arrived.tolist(), result.arrived_s.tolist(), strict=True)), sorted(result.lost.tolist())


def test_a_transfer_has_ended_when_it_has_on_all_ranks() -> None:
    own = Scripted(({1: 0.5, 2: 1.0}, []), ({}, []), ({4: 1.0}, [3]))
    one = Scripted(({1: 0.25}, []), ({}, [2]), ({3: 2.0, 4: 3.0}, []))
    two = Scripted(({2: 0.5}, []), ({1: 4.0}, []), ({3: 1.0}, [4]))
    with lockstep(own, one, two) as worker:
        assert [ran(worker, number) for number in range(3)] == [({}, []), ({1: 4.0}, [2]), ({}, [3, 4])]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_fails_the_step_and_the_next_one_runs(failing: int) -> None:
    scripts: list[Sequence[Ended | Exception]] = [[({}, []), ({1: 1.0}, [])] for _ in range(3)]
    scripts[failing] = [ValueError("no"), ({1: 1.0}, [])]
    workers = [Scripted(*script) for script in scripts]
    with lockstep(*workers) as worker:
        with pytest.raises((WorkerError, ValueError), match="no"):
            ran(worker, 0)
        assert ran(worker, 1, after=-1) == ({1: 1.0}, [])
    assert [one.steps for one in workers] == [[0, 1]] * 3


def test_what_other_ranks_cannot_do_is_named(tmp_path: object) -> None:
    whole = loaded_model("llama").model
    plan, options = plan_for(loaded_model("llama"), [60]), EngineOptions(self_check=False)
    near, far = Pipe()
    said = pytest.raises(ConfigError, match="no ModelShare, and there are 1 connections")
    with near, far, Engine(loaded_model("llama"), plan, options) as engine, said:
        lead(engine, [near])
    for rank in (0, 1):
        loaded = wrap(whole, share=ModelShare.of(whole, rank, 2))
        near, far = Pipe()
        with near, far, Engine(loaded, plan, options) as engine:
            for channels in [[near]] if rank else [[], [near, near]]:
                with pytest.raises(ConfigError, match=f"rank {rank} of 2, and there are {len(channels)} connections"):
                    lead(engine, channels)
            if not rank:
                lead(engine, [near])
                with pytest.raises(ConfigError, match="leads others: give both engines the same store"):
                    engine.export([1, 2], f"{tmp_path}/session")
                with pytest.raises(ConfigError, match="not sent to other ranks"):
                    engine.add([1, 2], SamplingParams(logits_processors=(lambda _, logits: logits,)))
                with pytest.raises(ConfigError, match="not sent to other ranks"):
                    engine.add([1, 2], greedy(1), images=[object()])  # never read
