"""T5 and Whisper: whole outputs in six regimes and both layouts, for the table of docs/models.md."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from listening import LAYOUTS, NAMES, Listening
from models_table import ModelResult, layers_of, note_model
from runner_support import EngineFactory

from hybridkv.runner import Completion

OUTPUT = 70
PREEMPTIONS = (5, 25)


def cold(listening: Listening) -> None:
    assert sum(one.hit_tokens for one in listening.run()) == 0


def warm(listening: Listening) -> None:
    listening.run()
    listening.tokens = 0
    hits = sum(one.hit_tokens for one in listening.run())
    # nothing of an encoder-decoder is hit in the reference layout
    assert (hits > 0) == (listening.engine.plan.config.slabs is not None)


def chunked(listening: Listening) -> None:
    listening.run()
    assert max(step.num_tokens for step in listening.seen.steps) <= 13


def preempted(listening: Listening) -> None:
    engine = listening.engine
    for prompt, given in zip(listening.prompts, listening.sounds, strict=True):
        engine.add(prompt, listening.sampling, encoder=given)
    done: list[Completion] = []
    for number in range(100 * OUTPUT):
        if engine.idle:
            break
        if number in PREEMPTIONS:
            engine.scheduler._running.preempt_last(engine.scheduler._in_flight)
        done += engine.step()
    assert sum(one.preemptions for one in done) == len(PREEMPTIONS)
    listening.check(sorted(done, key=lambda one: int(one.request_id)), listening.sounds)


def forked(listening: Listening) -> None:
    sampling = replace(listening.sampling, n=2)
    done = listening.engine.generate(listening.prompts, sampling, encoders=listening.sounds)
    listening.check(done, [given for given in listening.sounds for _ in range(2)])


REGIMES: dict[str, tuple[Callable[[Listening], None], dict[str, int | bool]]] = {
    "cold": (cold, {"prefix_caching": False}),
    "warm": (warm, {}),
    "chunked": (chunked, {"token_budget": 13}),
    "preempted": (preempted, {}),
    "preempted, no cache": (preempted, {"prefix_caching": False}),
    "forked": (forked, {"room_for": 14}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@NAMES
def test_encoder_decoder_in_six_regimes_equals_plain_transformers(
    name: str, seed: int, make_engine: EngineFactory
) -> None:
    """All tokens must be equal. A near-tie fails the test."""
    ran: list[Listening] = []
    for layout in LAYOUTS:
        for regime, options in REGIMES.values():
            ran.append(Listening(make_engine, name, seed=seed, output=OUTPUT, layout=layout, **options))
            regime(ran[-1])
    tokens, largest = sum(one.tokens for one in ran), max(one.largest for one in ran)
    regimes = tuple(f"{regime}, {layout}" for layout in LAYOUTS for regime in REGIMES)
    note_model(ModelResult(name, seed, layers_of(ran[0].loaded), regimes, tokens, 0, largest, ()))
