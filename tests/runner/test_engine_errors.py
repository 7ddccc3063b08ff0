"""Errors of engines: closed engines, inputs of wrong types, and failed forwards, tokenizers and drafters."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from runner_support import EngineFactory, drained, failing, generated, greedy, loaded_model, run, shared_prompts

from hybridkv.errors import CacheError, ConfigError, WorkerError
from hybridkv.runner import (
    AsyncEngine,
    Completion,
    Engine,
    EngineOptions,
    Increment,
    byte_tokenizer,
    plan_for,
    tiny_model,
)
from hybridkv.runner.inputs import encode, one_each
from hybridkv.schedule import FinishReason

LLAMA = loaded_model("llama")
TOKENIZER = byte_tokenizer()
PROMPTS = shared_prompts(3, 12)
OUTPUT = 8
ENGINE_SETTINGS = [{"in_flight": 1}, {"in_flight": 2}]


def expected(*which: int) -> list[tuple[int, ...]]:
    return [generated(LLAMA, PROMPTS[at], OUTPUT) for at in which]


# -- closed


def test_engine_that_is_closed_rejects_calls() -> None:
    with Engine(LLAMA, memory="2MiB", max_model_len=128) as engine:
        engine.add(PROMPTS[0], greedy(OUTPUT))
        stream = engine.stream(PROMPTS[1], greedy(OUTPUT), request_id="read")
        next(stream)
    steps = engine.statistics().steps
    calls: list[Callable[[], object]] = [
        lambda: engine.add(PROMPTS[0]),
        lambda: engine.stream(PROMPTS[0]),
        lambda: engine.generate(PROMPTS),
        lambda: engine.generate([]),
        engine.step,
        lambda: engine.abort("read"),
        lambda: next(stream),
    ]
    for call in calls:
        with pytest.raises(CacheError, match="the engine was closed: make another one"):
            call()
    stream.close()
    engine.close()
    assert engine.statistics().steps == steps


def test_closed_engine_restores_the_training_mode_of_the_model() -> None:
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    with Engine(model, memory="2MiB", max_model_len=128) as engine:
        assert not any(module.training for module in model.modules())
        engine.generate(PROMPTS, greedy(1))
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ConfigError):
        Engine(model, memory="2MiB", max_model_len=-1)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "deepseek_v4"])
def test_pages_of_a_closed_engine_are_freed_without_the_garbage_collector(name: str) -> None:
    """On a GPU, the next engine needs the memory before Python looks for cycles."""
    loaded = loaded_model(name)

    def pages_of_a_run() -> list[weakref.ref[torch.Tensor]]:
        with Engine(loaded, memory="2MiB", max_model_len=128) as engine:
            engine.generate(PROMPTS, greedy(2))
            return [weakref.ref(view) for views in engine.runner.storage.views.values() for view in views]

    gc.collect()
    gc.disable()
    try:
        pages = pages_of_a_run()
        assert pages
        assert not any(one() is not None for one in pages)
    finally:
        gc.enable()


# -- inputs


class Untyped:
    """Neither text nor tokens."""


WRONG_PROMPTS: list[tuple[Any, str]] = [
    (None, "got None"),
    (7, "got 7"),
    (b"text", "got bytes"),
    ([[1, 2]], "got list in it"),
    ([1, None], "got None in it"),
    ([True, False], "got True in it"),
    ([1.0, 2.0], r"got 1\.0 in it"),
    (["a", "b"], "got 'a' in it"),
    ({1, 2}, "got set"),
    (torch.tensor([[1, 2]]), r"got Tensor \(1, 2\) of torch\.int64: give one row of integers"),
    (torch.tensor(3), r"got Tensor \(\) of torch\.int64"),
    (torch.tensor([1.0]), r"got Tensor \(1,\) of torch\.float32"),
    (torch.tensor([True]), r"got Tensor \(1,\) of torch\.bool"),
    (np.array([[1, 2]]), r"got ndarray \(1, 2\) of int64"),
    (np.array([1.5]), r"got ndarray \(1,\) of float64"),
    (TOKENIZER("hello"), "got BatchEncoding: give its input_ids"),
    (Untyped(), "got Untyped"),
]


@pytest.mark.parametrize(("prompt", "message"), WRONG_PROMPTS)
def test_engine_prompt_that_is_invalid_is_rejected(prompt: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"a prompt must be text or a list of token ids, {message}"):
        encode(LLAMA, prompt)  # type: ignore[arg-type]  # what is refused


def test_prompt_ids_of_any_integer_type_are_encoded_as_ints() -> None:
    forms: list[Any] = [(65, 66), range(65, 67), np.array([65, 66]), np.array([65, 66], np.uint8)]
    forms += [torch.tensor([65, 66]), torch.tensor([65, 66], dtype=torch.int32), [np.int64(65), 66], "AB"]
    for form in forms:
        ids = encode(LLAMA, form)
        assert ids == [65, 66]
        assert all(type(one) is int for one in ids)


def test_engine_batch_or_sampling_that_is_invalid_is_rejected(make_engine: EngineFactory) -> None:
    engine = make_engine(LLAMA, PROMPTS, OUTPUT)
    batches: list[tuple[Any, str]] = [
        ("Hello", "got 'Hello'"),
        (None, "got None"),
        (torch.tensor([[1, 2]]), "got Tensor"),
        (np.array([1, 2]), "got ndarray"),
        (TOKENIZER(["a", "b"]), "got BatchEncoding"),
        (iter(PROMPTS), "got list_iterator"),
    ]
    for prompts, message in batches:
        with pytest.raises(ConfigError, match=f"prompts must be a list of texts .*, {message}"):
            engine.generate(prompts)
        with pytest.raises(ConfigError, match="prompts must be a list"):
            one_each(prompts, None)
    with pytest.raises(ConfigError, match="a prompt must be text or a list of token ids, got 1"):
        engine.generate([1, 2, 3])  # type: ignore[list-item]  # what is refused
    samplings: list[Any] = [{"temperature": 1.0}, "greedy", 3, [greedy(1), None, 7]]
    for sampling in samplings:
        with pytest.raises(ConfigError, match="sampling must be SamplingParams or None, got"):
            engine.generate(PROMPTS, sampling)
    with pytest.raises(ConfigError, match="sampling must be SamplingParams or None, got dict"):
        engine.add(PROMPTS[0], {"temperature": 1.0})  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ConfigError, match="request_id must be text, and not empty, got 3"):
        engine.add(PROMPTS[0], request_id=3)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ConfigError, match="cache_salt must be text, and not empty, got 3"):
        engine.stream(PROMPTS[0], cache_salt=3)  # type: ignore[arg-type]  # what is refused
    assert engine.idle
    assert engine.generate([], []) == []


def test_generated_request_ids_differ_from_given_ids(make_engine: EngineFactory) -> None:
    engine = make_engine(LLAMA, PROMPTS * 4, OUTPUT)
    given = ["0", "2#1", "x", "9" * 5000, "\u0663"]
    for name in given:
        engine.add(PROMPTS[0], greedy(1), request_id=name)
    own = [engine.add(PROMPTS[0], replace(greedy(1), n=2)) for _ in range(3)]
    assert own == ["4", "5", "6"]
    ended: list[str] = []
    while not engine.idle:
        ended += [one.request_id for one in engine.step()]
    assert sorted(ended) == sorted([*given, *own, *(f"{one}#1" for one in own)])


def test_unknown_placement_is_rejected_by_the_plan() -> None:
    for name in ("llama", "qwen3_next"):
        with pytest.raises(ConfigError, match="unknown placement 'adaptive': use none, ends"):
            plan_for(loaded_model(name), [32], placement="adaptive")


@pytest.mark.parametrize("name", ["max_running", "token_budget", "max_model_len"])
@pytest.mark.parametrize("value", [0, -5, 1.5, "5", True])
def test_engine_count_that_is_invalid_is_rejected(name: str, value: object) -> None:
    counts: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"{name} must be (at least 1|an integer), got"):
        Engine(LLAMA, **counts) if name == "max_model_len" else EngineOptions(**counts)


# -- batches that fail


@pytest.mark.parametrize("options", ENGINE_SETTINGS)
def test_failed_batch_leaves_no_requests_and_others_finish(options: dict[str, int], make_engine: EngineFactory) -> None:
    engine = make_engine(LLAMA, PROMPTS, OUTPUT, **options)  # type: ignore[arg-type]  # ints by name
    other = engine.add(PROMPTS[2], greedy(OUTPUT))
    with pytest.raises(ConfigError, match="got None"):
        engine.generate([*PROMPTS[:2], None], greedy(OUTPUT))  # type: ignore[list-item]  # what is refused
    engine.step()
    assert (engine.statistics().running, engine.statistics().waiting) == (1, 0)
    with failing(LLAMA.model.model.layers[1], (3).__eq__), pytest.raises(RuntimeError, match="the device is gone"):
        engine.generate(PROMPTS[:2], greedy(OUTPUT))
    assert engine.statistics().failed_steps == options["in_flight"]
    assert [one.token_ids for one in engine.generate(PROMPTS[:2], greedy(OUTPUT))] == expected(0, 1)
    done = drained(engine)
    assert [(one.request_id, one.token_ids) for one in done] == [(other, expected(2)[0])]
    assert engine.cache.usage == 0
    engine.scheduler.check()


# -- tokenizers that fail


class Failing:
    """A tokenizer whose decode raises at the calls numbered, from 1, or for tokens for which ``fails`` says so."""

    def __init__(self, fails: Callable[[int, Sequence[int]], bool]) -> None:
        self._fails, self.calls = fails, 0

    def encode(self, text: str) -> list[int]:
        return list(TOKENIZER.encode(text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.calls += 1
        if self._fails(self.calls, ids):
            raise ValueError("cannot decode this")
        return str(TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens))


def engine_with(tokenizer: Failing, **options: int) -> Engine:
    loaded = replace(LLAMA, tokenizer=tokenizer)
    return Engine(loaded, memory="2MiB", max_model_len=128, options=EngineOptions(**options))  # type: ignore[arg-type]  # ints by name


def of_second(_: int, ids: Sequence[int]) -> bool:
    """The second request's text, which differs from the others'."""
    return len(ids) == 3 and tuple(ids) == expected(1)[0][:3]


@pytest.mark.parametrize("options", ENGINE_SETTINGS)
def test_decoding_error_ends_its_request_only(options: dict[str, int]) -> None:
    with engine_with(Failing(of_second), **options) as engine:
        asked = replace(greedy(OUTPUT), logprobs=1)
        for prompt in PROMPTS:
            engine.add(prompt, asked)
        done: list[Completion] = []
        errors = []
        while not engine.idle:
            try:
                done += engine.step()
            except ValueError as error:
                errors.append((str(error), error.__notes__))
        assert errors == [("cannot decode this", ["request '1' ended: its output could not be decoded"])]
        assert [one.request_id for one in done] == ["0", "2"]
        assert [one.token_ids for one in done] == expected(0, 2)
        assert [one.text for one in done] == [TOKENIZER.decode(list(one)) for one in expected(0, 2)]
        assert [len(one.logprobs or ()) for one in done] == [OUTPUT] * 2
        assert engine.cache.usage == 0
        engine.scheduler.check()
        # a batch of which one cannot be decoded
        other = engine.add(PROMPTS[2], greedy(OUTPUT))
        with pytest.raises(ValueError, match="cannot decode this"):
            engine.generate(PROMPTS[:2], greedy(OUTPUT))
        done += drained(engine)
        assert (done[-1].request_id, done[-1].token_ids) == (other, expected(2)[0])


@pytest.mark.parametrize("at_call", [1, OUTPUT, OUTPUT + 1])
def test_decoding_error_at_first_or_last_token_frees_the_request(at_call: int) -> None:
    with engine_with(Failing(lambda call, _: call == at_call)) as engine:
        engine.add(PROMPTS[0], greedy(OUTPUT))
        with pytest.raises(ValueError, match="cannot decode this"):
            drained(engine)
        assert engine.idle
        assert engine.cache.usage == 0


def test_decoding_error_reaches_its_own_stream_only() -> None:
    with engine_with(Failing(of_second)) as engine:
        streams = [engine.stream(prompt, greedy(OUTPUT)) for prompt in PROMPTS]
        with pytest.raises(ValueError, match="cannot decode this"):
            list(streams[1])
        assert list(streams[1]) == []
        for stream, whole in zip(streams[::2], expected(0, 2), strict=True):
            assert tuple(token for part in stream for token in part.token_ids) == whole
        assert engine.step() == []
        assert engine.idle


@pytest.mark.parametrize("step", [1, OUTPUT - 1])
def test_interrupt_during_decoding_loses_no_output(step: int) -> None:
    def interrupted(call: int, _: Sequence[int]) -> bool:
        if call == step * len(PROMPTS) + 2:  # the second request's
            raise KeyboardInterrupt
        return False

    with engine_with(Failing(interrupted)) as engine:
        for prompt in PROMPTS:
            engine.add(prompt, greedy(OUTPUT))
        with pytest.raises(KeyboardInterrupt):
            drained(engine)
        done = drained(engine)
        assert [one.token_ids for one in done] == expected(0, 1, 2)
        assert [one.text for one in done] == [TOKENIZER.decode(list(one)) for one in expected(0, 1, 2)]


# -- behind asyncio


async def read(front: AsyncEngine, prompt: list[int], tokens: int = OUTPUT) -> list[Increment]:
    return [part async for part in front.stream(prompt, greedy(tokens))]


def test_async_decoding_error_reaches_its_own_task_only() -> None:
    async def work() -> list[list[Increment] | BaseException]:
        async with AsyncEngine(engine_with(Failing(of_second))) as front:
            return await asyncio.gather(*(read(front, prompt) for prompt in PROMPTS), return_exceptions=True)

    found = run(work)
    assert str(found[1]) == "cannot decode this"
    read_to_the_end = [one for one in found if isinstance(one, list)]
    assert [tuple(token for part in one for token in part.token_ids) for one in read_to_the_end] == expected(0, 2)


class Gone(BaseException):
    """No error of a forward."""


def test_error_that_ended_the_engine_thread_is_raised_by_close() -> None:
    engine = Engine(LLAMA, memory="2MiB", max_model_len=128)
    front = AsyncEngine(engine)

    def broken() -> object:
        raise Gone("the thread is gone")

    async def work() -> None:
        engine.step = broken  # type: ignore[assignment, method-assign]  # an error that reaches no reader
        with pytest.raises(CacheError, match="ended with Gone: close the engine") as found:
            await read(front, PROMPTS[0])
        assert isinstance(found.value.__cause__, Gone)
        with pytest.raises(CacheError, match="ended with Gone"):
            await read(front, PROMPTS[1])
        with pytest.raises(Gone):
            await front.close()

    run(work)
    assert front._thread._shutdown
    assert LLAMA.model.config._attn_implementation == "eager"


def test_close_with_an_unendable_stream_still_closes_the_engine() -> None:
    engine = Engine(LLAMA, memory="2MiB", max_model_len=128)
    front = AsyncEngine(engine)

    def stuck() -> None:
        raise RuntimeError("cannot end")

    async def work() -> None:
        front._end_streams = stuck  # type: ignore[method-assign]  # to fail
        await read(front, PROMPTS[0], 1)
        with pytest.raises(RuntimeError, match="cannot end"):
            await front.close()
        with pytest.raises(CacheError, match="the engine was closed"):
            front.abort("0")

    run(work)
    assert front._thread._shutdown
    assert LLAMA.model.config._attn_implementation == "eager"


# -- logits, and schedulers that are stuck


def test_engine_with_nan_logits_ends_the_request(make_engine: EngineFactory) -> None:
    engine = make_engine(LLAMA, PROMPTS, OUTPUT)
    for prompt in PROMPTS:
        engine.add(prompt, greedy(OUTPUT))
    engine.step()

    def spoilt(_module: object, _args: object, out: torch.Tensor) -> torch.Tensor:
        out[0, 1] = torch.nan
        return out

    hook = LLAMA.model.get_output_embeddings().register_forward_hook(spoilt)
    try:
        with pytest.raises(WorkerError, match=rf"the logits of row 1 are NaN after token {len(PROMPTS[1])}"):
            engine.step()
    finally:
        hook.remove()
    done = drained(engine)
    assert [one.token_ids for one in sorted(done, key=lambda one: one.request_id)] == expected(0, 1, 2)


def test_engine_after_a_stuck_scheduler_error_finishes_requests(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(LLAMA, PROMPTS, OUTPUT)
    name = engine.add(PROMPTS[0], greedy(OUTPUT))
    monkeypatch.setattr(engine.scheduler._admission, "admit", lambda *_, **__: None)
    with pytest.raises(CacheError, match="1 requests wait and 0 run, but 9 steps in a row were empty"):
        drained(engine)
    monkeypatch.undo()
    done = drained(engine)
    assert [(one.request_id, one.token_ids, one.finish_reason) for one in done] == [
        (name, expected(0)[0], FinishReason.LENGTH)
    ]
