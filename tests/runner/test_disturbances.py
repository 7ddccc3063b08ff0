"""Outputs stay right with little memory, steps in flight, aborted requests and failed forwards."""

import numpy as np
import pytest
import torch
from checked_engine import CheckedEngine, models, models_with
from runner_support import EngineFactory, drawn, failing, greedy, shared_prompts
from transformers import PreTrainedModel

from hybridkv.runner import Completion
from hybridkv.runner.states.state_batch import PagedMixer
from hybridkv.schedule import FinishReason

OUTPUT = 20
STATES_AND_ATTENTION = ("qwen3_next", "falcon_h1")
EVICTIONS, LAYOUTS = ["lru", "hazard"], ["natural", "reference"]
FAILING = [(where, in_flight) for where in ("last layer", "head") for in_flight in (1, 2)]
"""What raises, and how many steps are in flight then."""


def unlike_prompts(count: int, seed: int) -> list[list[int]]:
    """Of 20 .. 119 tokens, with nothing in common."""
    rng = np.random.default_rng(seed)
    return [rng.integers(32, 127, int(length)).tolist() for length in rng.integers(20, 120, count)]


@pytest.mark.parametrize(
    ("name", "eviction"), models_with(EVICTIONS, {"mamba": ["lru"], "qwen3_next": EVICTIONS, "falcon_h1": ["hazard"]})
)
def test_engine_with_memory_for_three_requests_evicts_and_moves_blocks(
    name: str, eviction: str, make_engine: EngineFactory
) -> None:
    prompts = unlike_prompts(12, 3)
    checked = CheckedEngine(make_engine, name, prompts, OUTPUT, room_for=3, max_running=4, eviction=eviction)
    first = checked.run(prompts, greedy(OUTPUT))
    again = checked.run(prompts[::-1], greedy(OUTPUT))[::-1]
    assert [one.token_ids for one in again] == [one.token_ids for one in first]
    assert sum(one.hit_tokens for one in first) == 0
    if eviction == "lru":  # what ran last is there, what ran first is not
        assert again[-1].hit_tokens == len(prompts[-1]) - 1
    assert 0 < sum(one.hit_tokens > 0 for one in again) < (6 if eviction == "lru" else len(again))
    slabs = checked.engine.plan.config.slabs
    assert slabs is not None
    assert (checked.copies()["move"] > 0) == (len(slabs.classes) > 1)


@pytest.mark.parametrize(
    ("name", "layout"),
    models_with(
        LAYOUTS, {"llama4": ["reference"], "mamba": ["natural"], "qwen3_next": LAYOUTS, "falcon_h1": ["natural"]}
    ),
)
def test_preempted_request_resumes_at_its_kept_prefix(name: str, layout: str, make_engine: EngineFactory) -> None:
    prompts = unlike_prompts(3, 5)
    checked = CheckedEngine(make_engine, name, prompts, OUTPUT, layout=layout, room_for=8, token_budget=70)
    engine = checked.engine
    for prompt, params in zip(prompts, drawn(3), strict=True):
        engine.add(prompt, params)
    done: list[Completion] = []
    given_up: list[int] = []
    for number in range(200):
        if number in {3, 12} and engine.scheduler.num_running:
            last = engine.scheduler._running.requests[-1]  # whom a lack of memory would hit
            given_up.append(last.num_computed_tokens)
            engine.scheduler._running.preempt_last(engine.scheduler._in_flight)
        done += engine.step()
        if engine.idle:
            break
    checked.check(done)
    assert sum(one.preemptions for one in done) == len(given_up) == 2
    began = [admitted.hit for admitted in checked.admitted()]
    size = 1 if layout == "natural" else max(group.spec.block_size for group in engine.plan.config.groups)
    assert [hit for hit in began if hit] == [hit for tokens in given_up if (hit := tokens // size * size)]
    assert len(began) == 5
    lost = sum(tokens % size for tokens in given_up)
    assert sum(one.computed_tokens for one in done) == sum(len(prompt) + OUTPUT - 1 for prompt in prompts) + lost


@pytest.mark.parametrize("name", models("gpt_oss", *STATES_AND_ATTENTION))
def test_steps_in_flight_with_little_memory_keep_outputs(name: str, make_engine: EngineFactory) -> None:
    prompts = [*shared_prompts(4, 6), *unlike_prompts(4, 6)]
    checked = CheckedEngine(make_engine, name, prompts, OUTPUT, room_for=2, in_flight=2, token_budget=90)
    engine, done, preempted = checked.engine, list[Completion](), 0
    for prompt, params in zip(prompts, drawn(8), strict=True):
        engine.add(prompt, params)
    while not engine.idle:
        done += engine.step()
        # who lacks memory is preempted anyway; not every model grows
        if len(checked.steps) in {6, 14} and engine.scheduler.num_in_flight == 1:
            engine.scheduler._running.preempt_last(engine.scheduler._in_flight)
            preempted += 1
    checked.check(done)
    assert all(len(one.token_ids) == OUTPUT for one in done)
    assert sum(int((step.token_ids.values == -1).sum()) for step in checked.steps) > 4 * OUTPUT
    assert sum(one.preemptions for one in done) >= preempted == 2


@pytest.mark.parametrize(("name", "in_flight"), models_with([1, 2], {"gemma3": [1], "falcon_h1": [2]}))
def test_random_aborts_keep_other_outputs(name: str, in_flight: int, make_engine: EngineFactory) -> None:
    prompts = [*shared_prompts(6, 7), *unlike_prompts(4, 7)]
    checked = CheckedEngine(make_engine, name, prompts, OUTPUT, room_for=10, in_flight=in_flight, token_budget=100)
    rng = np.random.default_rng(7)
    live = {checked.engine.add(prompt, params) for prompt, params in zip(prompts, drawn(10), strict=True)}
    done: list[Completion] = []
    while not checked.engine.idle:
        if live and rng.random() < 0.15:
            checked.engine.abort(str(rng.choice(sorted(live))))
        ended = checked.engine.step()
        live -= {one.request_id for one in ended}
        done += ended
    checked.check(done)
    lengths = [len(one.token_ids) for one in done if one.finish_reason is FinishReason.ABORT]
    assert any(0 < length < OUTPUT for length in lengths)
    assert sorted(one.request_id for one in done) == sorted(map(str, range(10)))
    again = checked.run(prompts, drawn(10))
    assert sum(one.hit_tokens for one in again) > 0


def module_at(model: PreTrainedModel, where: str) -> torch.nn.Module:
    """The head, or the last mixer or attention."""
    mixers = [module for module in model.modules() if isinstance(module.__dict__.get("forward"), PagedMixer)]
    attention = [module for module in model.modules() if hasattr(module, "is_causal") and hasattr(module, "layer_idx")]
    found: torch.nn.Module = model.get_output_embeddings() if where == "head" else (mixers or attention)[-1]
    return found


@pytest.mark.parametrize(
    ("name", "where", "in_flight"),
    models_with(FAILING, {"mamba": [("last layer", 1), ("head", 2)], "qwen3_next": [("last layer", 2), ("head", 1)]}),
)
def test_failed_forward_leaves_no_wrong_state(
    name: str, where: str, in_flight: int, make_engine: EngineFactory
) -> None:
    prompts = [*shared_prompts(4, 8), *unlike_prompts(2, 8)]
    checked = CheckedEngine(make_engine, name, prompts, OUTPUT, in_flight=in_flight, token_budget=80)
    engine, done, failures = checked.engine, list[Completion](), 0
    ids = [engine.add(prompt, params) for prompt, params in zip(prompts, drawn(6), strict=True)]
    # in the first prompts, then twice while all decode: the states of rows have been overwritten
    with failing(module_at(checked.loaded.model, where), {2, 9, 17}.__contains__):
        while not engine.idle:
            try:
                done += engine.step()
            except RuntimeError as error:
                assert str(error) == "the device is gone"  # noqa: PT017  # the loop must go on behind it
                failures += 1
                engine.scheduler.check()
                engine.cache.check()
    assert failures == 3
    checked.check(done)
    assert sorted(one.request_id for one in done) == ids
    assert all(len(one.token_ids) == OUTPUT for one in done)
    again = checked.run(prompts, drawn(6))  # what was left in the cache is right, too
    assert [one.token_ids for one in again] == [one.token_ids for one in sorted(done, key=lambda one: one.request_id)]
    assert all(one.hit_tokens == len(one.prompt_token_ids) - 1 for one in again)


@pytest.mark.parametrize("name", models("mamba", "qwen3_next"))
def test_request_aborted_in_a_failed_step_leaves_no_state(name: str, make_engine: EngineFactory) -> None:
    prompt, more = unlike_prompts(2, 9)
    checked = CheckedEngine(make_engine, name, [[*prompt, *more] * 2], OUTPUT, in_flight=2, room_for=4)
    engine, done = checked.engine, list[Completion]()
    doomed = engine.add(prompt, greedy(OUTPUT))
    with failing(module_at(checked.loaded.model, "head"), {6}.__contains__):
        for _ in range(5):
            done += engine.step()
        assert engine.abort(doomed)  # a step that holds it is in flight
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.step()
    while not engine.idle:
        done += engine.step()
    checked.check(done)
    (ended,) = done
    assert len(ended.token_ids) == 5
    # its running state was overwritten by tokens that do not count: nobody may go on from it
    text = [*prompt, *ended.token_ids]
    for following in ([*text[:-1], *more], [*text, *more], [*text, *more, *more]):
        checked.run([following], greedy(4))
