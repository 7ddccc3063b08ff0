"""Two steps in flight: the next step is scheduled while a forward runs, and drafts leave no step without rows."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from runner_support import EngineFactory, generated, greedy, loaded_model, shared_prompts
from scripted import ScriptedDrafter

from hybridkv.request import Request
from hybridkv.runner import Engine, EngineOptions
from hybridkv.step import Step

PATIENCE = 10.0
"""Seconds until a test that hangs fails."""


def test_next_step_is_scheduled_while_a_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second on, a forward waits for a new step, and the scheduler waits for the forward to begin."""
    loaded, prompts = loaded_model("llama"), shared_prompts(2, 5)
    begun, scheduled, beside = threading.Event(), threading.Event(), list[bool]()
    threads = set[int]()

    def forward(*_: object) -> None:
        threads.add(threading.get_ident())
        begun.set()
        if len(threads) > 1:  # the first one finds two steps scheduled
            beside.append(scheduled.wait(PATIENCE))
        begun.clear()
        scheduled.clear()

    with Engine(loaded, memory="2MiB", max_model_len=256, options=EngineOptions(in_flight=2)) as engine:
        own, calls = engine.scheduler.schedule, list[int]()

        def schedule() -> Step:
            calls.append(1)
            if len(calls) > 2 and begun.wait(PATIENCE):
                scheduled.set()
            return own()

        monkeypatch.setattr(engine.scheduler, "schedule", schedule)
        hook = loaded.model.model.register_forward_pre_hook(forward)
        try:
            done = engine.generate(prompts, greedy(6))
        finally:
            hook.remove()
    assert [one.token_ids for one in done] == [generated(loaded, prompt, 6) for prompt in prompts]
    assert len(beside) >= 4
    assert all(beside[:4])


@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
def test_engine_in_inference_mode_gives_tokens_of_plain_model(name: str) -> None:
    """Only inference mode may write the pages of this engine, in every thread."""
    loaded, prompts = loaded_model(name), shared_prompts(3, 6)
    options = EngineOptions(in_flight=2, max_running=2)
    with torch.inference_mode(), Engine(loaded, memory="2MiB", max_model_len=256, options=options) as engine:
        done = [*engine.generate(prompts, greedy(6)), *engine.generate(prompts, greedy(6))]
        assert engine.statistics().hit_tokens
    assert [one.token_ids for one in done] == [generated(loaded, prompt, 6) for prompt in prompts] * 2


# -- with a drafter


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_two_steps_in_flight_with_drafts_add_at_most_one_step(name: str, make_engine: EngineFactory) -> None:
    prompts, steps = shared_prompts(3, 4), list[int]()
    plain = make_engine(loaded_model(name), prompts, 21).generate(prompts, greedy(21))
    for in_flight in (1, 2):
        drafter = ScriptedDrafter(lambda *_: (4, 4))
        drafter.learn(zip(plain, [greedy(21)] * 3, strict=True))
        engine = make_engine(loaded_model(name), prompts, 21, in_flight=in_flight, speculate=drafter)
        assert [one.token_ids for one in engine.generate(prompts, greedy(21))] == [one.token_ids for one in plain]
        steps.append(engine.statistics().steps)
    assert steps[1] <= steps[0] + 1  # one more behind the end


class Counting:
    """Never has drafts but for the requests and output lengths in ``known``; notes for how many it was asked."""

    num_speculative_tokens = 2

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}
        self.asked: list[list[int]] = []

    def require(self, target: object) -> None:
        """Any model will do."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        self.asked.append([one.num_output_tokens for one in requests])
        return [self.known.get(one.num_output_tokens, []) for one in requests]

    def close(self) -> None:
        """Nothing is held."""


def test_rows_without_drafts_run_one_step_ahead(make_engine: EngineFactory) -> None:
    """The drafter is called again after that step, so later drafts are verified as without steps ahead."""
    loaded, (prompt,) = loaded_model("llama"), shared_prompts(1, 9)
    wanted = generated(loaded, prompt, 20)
    drafter, ahead = Counting(), list[int]()
    drafter.known[11] = np.array(wanted[11:13], np.int32)  # as drafters may have them
    engine = make_engine(loaded, [prompt], 20, in_flight=2, speculate=drafter)
    execute = engine.runner.execute

    def noted(step: Step) -> object:
        if len(step):
            ahead.append(engine.scheduler.num_in_flight)
        return execute(step)

    engine.runner.execute = noted  # type: ignore[assignment,method-assign]
    (done,) = engine.generate([prompt], greedy(20))
    assert done.token_ids == wanted
    assert done.accepted_tokens == 2
    asked = [one for (one,) in drafter.asked]
    assert asked == sorted(set(asked))
    assert set(np.diff(asked).tolist()) == {2, 3}  # every other token, and three behind two drafts
    assert ahead.count(2) >= 8
