"""Engines with prompt lookup and with draft models, in every regime, and drafters that fail."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from checked_engine import CheckedEngine
from runner_support import EngineFactory, drawn, greedy, loaded_model, shared_prompts
from scripted import ScriptedDrafter

from hybridkv.errors import OwnershipError
from hybridkv.request import Request
from hybridkv.runner import AsyncEngine, Completion, Engine, load
from hybridkv.runner.drafters import DraftModel, NgramDrafter

OUTPUT = 24


@pytest.mark.parametrize(
    ("name", "drafter"),
    [("llama", "llama"), ("lfm2", "mamba"), pytest.param("mamba", "qwen3_next", marks=pytest.mark.thorough)],
)
def test_draft_models_of_other_architectures_keep_the_outputs(
    name: str, drafter: str, make_engine: EngineFactory
) -> None:
    prompts, sampling = shared_prompts(3, 2), drawn(3, OUTPUT)
    plain = make_engine(loaded_model(name), prompts, OUTPUT).generate(prompts, sampling)
    apart = load(f"tiny:{drafter}")
    draft_model = DraftModel(Engine(apart, memory="64MiB", max_model_len=160), 3)
    checked = CheckedEngine(make_engine, name, prompts, OUTPUT, speculate=draft_model)
    done = checked.run(prompts, sampling)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    stats = checked.engine.statistics()
    assert stats.drafted_tokens >= 3 * (OUTPUT - 1) * 3 // 4 - 3
    if name == drafter:  # by the same noise, so sampled tokens agree, too
        assert stats.accepted_tokens == stats.drafted_tokens
        assert stats.steps < OUTPUT // 4 + 4
    checked.engine.close()
    assert "forward" not in vars(next(iter(apart.model.modules())))
    assert apart.model.config._attn_implementation == "eager"


def test_ngram_drafts_of_repeated_text_are_accepted(make_engine: EngineFactory) -> None:
    prompts = [[65, 66, 67, 68] * 8] * 2
    sampling = [replace(greedy(40), repetition_penalty=0.2), greedy(40)]
    plain = make_engine(loaded_model("llama"), prompts, 40).generate(prompts, sampling)
    checked = CheckedEngine(make_engine, "llama", prompts, 40, speculate=NgramDrafter(4))
    done = checked.run(prompts, sampling)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert done[0].accepted_tokens > 20
    assert done[0].drafted_tokens >= done[0].accepted_tokens


def test_async_engine_with_draft_model_accepts_drafts(make_engine: EngineFactory) -> None:
    """The thread of the engine also runs the engine of the draft model."""
    prompts, sampling = shared_prompts(3, 2), drawn(3, OUTPUT)
    plain = make_engine(loaded_model("llama"), prompts, OUTPUT).generate(prompts, sampling)
    draft_model = DraftModel(Engine(load("tiny:llama"), memory="2MiB", max_model_len=120), 5)
    checked = CheckedEngine(make_engine, "llama", prompts, OUTPUT, speculate=draft_model)

    async def work() -> list[Completion]:
        async with AsyncEngine(checked.engine) as front:
            return await front.generate(prompts, sampling)

    done = asyncio.run(work())
    checked.check(done)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.accepted_tokens for one in done) > OUTPUT


# -- drafters that fail


class Faulty(ScriptedDrafter):
    """From the third step on it answers with ``wrong``, or raises it."""

    def __init__(self, wrong: object) -> None:
        super().__init__(lambda *_: (3, 3), 3)
        self._wrong, self.calls = wrong, 0

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        self.calls += 1
        if self.calls < 3:
            return super().propose(requests)
        if isinstance(self._wrong, BaseException):
            raise self._wrong
        return self._wrong  # type: ignore[return-value]  # on purpose


FAULTS: list[tuple[object, str]] = [
    (RuntimeError("out of memory"), "RuntimeError('out of memory')"),
    ([[1]], "1 lists of drafts for 2 requests: give one for each"),
    ([[1], [257]], "is outside the vocabulary of tiny:mamba: ids are 0 .. 256"),
    ([[-1], []], "token ids must not be negative, got -1"),
    ([[1.5], []], "token ids must be integers"),
    ([["a"], []], "'str' object cannot be interpreted"),
    (None, "TypeError"),
]


@pytest.mark.parametrize(("wrong", "said"), FAULTS)
def test_failed_drafter_is_dropped_and_outputs_stay(
    wrong: object, said: str, make_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, sampling = shared_prompts(2, 4), drawn(2, OUTPUT)
    plain = make_engine(loaded_model("mamba"), prompts, OUTPUT).generate(prompts, sampling)
    drafter = Faulty(wrong)
    drafter.learn(zip(plain, sampling, strict=True))
    checked = CheckedEngine(make_engine, "mamba", prompts, OUTPUT, speculate=drafter, in_flight=2)
    with caplog.at_level(logging.WARNING, "hybridkv"):
        done = checked.run(prompts, sampling)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    (line,) = (one.getMessage() for one in caplog.records if one.name.startswith("hybridkv"))
    assert line.startswith("Faulty failed, no more drafts: ")
    assert said in line
    assert (drafter.calls, checked.engine.drafter) == (3, None)
    assert checked.engine.statistics().accepted_tokens == 2 * 2 * 3  # what came before was taken
    checked.engine.close()
    assert drafter.closed


def test_step_from_another_thread_keeps_the_drafter(make_engine: EngineFactory) -> None:
    prompts, sampling = shared_prompts(2, 4), drawn(2, OUTPUT)
    checked = CheckedEngine(make_engine, "mamba", prompts, OUTPUT, speculate=NgramDrafter(3))
    engine, refused = checked.engine, list[BaseException]()
    for one in zip(prompts, sampling, strict=True):
        engine.add(*one)
    for _ in range(3):
        engine.step()

    def step() -> None:
        with pytest.raises(OwnershipError) as found:
            engine.step()
        refused.append(found.value)

    other = threading.Thread(target=step)
    other.start()
    other.join()
    assert len(refused) == 1
    assert engine.drafter is not None
    assert len(checked.drain()) == 2


def test_interrupt_in_a_drafter_keeps_the_drafter(make_engine: EngineFactory) -> None:
    checked = CheckedEngine(make_engine, "mamba", [[1] * 20], OUTPUT, speculate=Faulty(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        checked.engine.generate([[1] * 20], greedy(OUTPUT))
    assert checked.engine.drafter is not None
