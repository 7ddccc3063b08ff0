"""Engines with every kind of continuation from a state: cold, warm and forked; also with the newest transformers."""

from dataclasses import replace

import pytest
from checked_engine import CheckedEngine
from runner_support import EngineFactory, generated, greedy, loaded_model, shared_prompts

from hybridkv.runner.states.recurrent import Continuation

OUTPUT = 12
PROMPTS = shared_prompts(3, 9)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama4", None),
        ("qwen3_next", Continuation.NATIVE),
        ("jamba", Continuation.SUPERPOSITION),
        ("qwen3_next", Continuation.TOKEN),
        ("jamba", Continuation.TOKEN),
    ],
)
def test_cold_warm_and_forked_runs_give_tokens_of_plain_model(
    name: str, how: Continuation | None, make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how is Continuation.TOKEN:  # which no tiny model needs
        monkeypatch.setattr("hybridkv.runner.runner.continuation", lambda _mixer: how)
    expected = [generated(loaded_model(name), prompt, OUTPUT) for prompt in PROMPTS]
    checked = CheckedEngine(make_engine, name, PROMPTS * 2, OUTPUT, token_budget=50)
    assert set(checked.engine.runner.continues.values()) == ({how} if how else set())
    cold = checked.run(PROMPTS, greedy(OUTPUT))
    warm = checked.run(PROMPTS, greedy(OUTPUT))
    assert [one.hit_tokens for one in warm] == [len(prompt) - 1 for prompt in PROMPTS]
    checked.forget()
    forked = checked.run(PROMPTS, replace(greedy(OUTPUT), n=2))
    assert checked.copies()["block"] + checked.copies()["state"] > 0
    for done in (cold, warm, forked[::2], forked[1::2]):
        assert [one.token_ids for one in done] == expected
