"""What the runner refuses, by name, where a value is of the wrong kind; afterwards engines generate what they did."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from wrong_values import arguments_of, trials, unnamed_errors, untyped_fields

from hybridkv import runner
from hybridkv.errors import ConfigError, HybridKVError
from hybridkv.request import Request, SamplingParams
from hybridkv.runner import (
    AsyncEngine,
    Embedder,
    Engine,
    EngineOptions,
    LoadedModel,
    ModelRunner,
    ModelShare,
    Pooling,
    Ranks,
    Stored,
    byte_tokenizer,
    drafters,
    encode,
    follow,
    join_sessions,
    lead,
    load,
    plan_for,
    plan_within,
    tiny_model,
    wrap,
)
from hybridkv.runner.drafters import AdaptiveDrafter, DraftModel, NgramDrafter
from hybridkv.runner.probe import planner_model

torch.set_num_threads(1)  # such models are done before threads have met


@cache
def loaded_model(name: str, seed: int = 0) -> LoadedModel:
    return load(f"tiny:{name}", seed=seed)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


LLAMA = loaded_model("llama")
PLAN = plan_within(LLAMA, "1MiB", max_model_len=64)
PROMPT = [72, 101, 108]
SAMPLING = SamplingParams(max_tokens=2, stop=("zz",), logprobs=1)
OTHERS = ("mamba", "whisper")
FEATURES = np.zeros((8, 48), np.float32)
ADD: dict[str, Any] = {
    "prompt": PROMPT,
    "sampling": SAMPLING,
    "request_id": "r",
    "cache_salt": "s",
    "marks": (1,),
    "encoder": None,
    "encoder_digest": None,
}


def tensors() -> Mapping[str, Any]:
    """And what only the runner could be given."""
    return {
        "float tensor": torch.tensor([1.5]),
        "0-d tensor": torch.tensor(3),
        "2-d tensor": torch.tensor([[1, 2]]),
        "dtype": torch.float32,
        "module": torch.nn.Linear(1, 1),
        "LoadedModel": LLAMA,
        "options": EngineOptions(),
        "plan": PLAN,
    }


def unnamed(call: Callable[..., object], arguments: Mapping[str, Any]) -> list[str]:
    return unnamed_errors(call, arguments, tensors, functions={"observer"})


# -- functions and values


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (load, {"source": "tiny:llama", "seed": 0, "device": "cpu", "trust_remote_code": False}),
        (tiny_model, {"name": "llama", "seed": 0, "fields": {"num_hidden_layers": 1}}),
        (tiny_model, {"name": "llama", "seed": 0, "fields": {"hidden_size": "x"}}),
        (wrap, {"model": LLAMA.model, "tokenizer": byte_tokenizer(), "name": "x"}),
        (encode, {"loaded": LLAMA, "prompt": "text", "what": "prompt"}),
        (
            plan_for,
            {
                "loaded": LLAMA,
                "lengths": [10],
                "block_size": 16,
                "memory": "1MiB",
                "max_model_len": 20,
                "layout": "natural",
                "placement": "ends",
                "num_speculative_tokens": 0,
                "stored": Stored("int8_per_token_head"),
            },
        ),
        (
            plan_within,
            {
                "loaded": LLAMA,
                "memory": "1MiB",
                "max_model_len": 20,
                "max_batched_tokens": 8,
                "max_in_flight": 1,
                "block_size": 16,
                "num_speculative_tokens": 0,
                "stored": Stored("int8_per_token_head"),
            },
        ),
        (Stored.of_plan, {"plan": PLAN}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_wrong_type_for_a_runner_function_is_rejected(call: Callable[..., object], arguments: dict[str, Any]) -> None:
    assert unnamed(call, arguments) == []


VALUES = [LLAMA, EngineOptions(), NgramDrafter(), Pooling(), Stored("fp8_per_token_head")]


@pytest.mark.parametrize("value", VALUES, ids=lambda one: type(one).__name__)
def test_wrong_type_for_a_runner_value_is_rejected(value: object) -> None:
    assert unnamed(type(value), arguments_of(value)) == []
    if value is not LLAMA:  # whose model and tokenizer are of any class that will do
        assert untyped_fields(value) == []


def test_runner_device_that_holds_no_tensors_is_rejected() -> None:
    for device in ("meta", "cuda:99", "nowhere"):
        with pytest.raises(HybridKVError, match="cannot hold tensors"):
            load("tiny:llama", device=device)


# -- engines


@pytest.fixture(
    scope="module", params=["llama", "t5", *(pytest.param(one, marks=pytest.mark.thorough) for one in OTHERS)]
)
def live(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, dict[str, Any]]]:
    """An engine that runs through all of it, and what is added to it."""
    loaded = loaded_model(request.param)
    heard = {"t5": "some text", "whisper": FEATURES}.get(request.param)
    more = {} if heard is None else {"prompt": [loaded.decoder_start[0]], "encoder": heard, "encoder_digest": b"x"}
    with Engine(loaded, memory="8MiB", max_model_len=64) as engine:
        yield engine, {**ADD, **more}


def drain(engine: Engine) -> None:
    """Nobody is left in ``engine``, and what must hold holds."""
    while not engine.idle:
        engine.step()
    engine.scheduler.check()
    assert engine.runner.cross is None or not len(engine.runner.cross.inputs)


def test_wrong_type_for_an_engine_request_is_rejected(live: tuple[Engine, dict[str, Any]]) -> None:
    engine, arguments = live
    heard = None if arguments["encoder"] is None else [arguments["encoder"]]
    batch = {"prompts": [arguments["prompt"]], "sampling": SAMPLING, "encoders": heard}

    def expected() -> tuple[int, ...]:
        (done,) = engine.generate([arguments["prompt"]], greedy(6), encoders=heard)
        return done.token_ids

    def then_drained(call: Callable[..., object]) -> Callable[..., None]:
        def called(**given: Any) -> None:  # noqa: ANN401  # anything is handed in
            try:
                call(**given)
            finally:
                drain(engine)

        return called

    before = expected()
    assert unnamed(then_drained(engine.add), arguments) == []
    assert unnamed(then_drained(lambda **given: list(engine.stream(**given))), arguments) == []
    assert unnamed(then_drained(engine.generate), batch) == []
    assert unnamed(then_drained(engine.abort), {"request_id": "nobody"}) == []
    assert expected() == before


def test_wrong_type_for_an_engine_part_is_rejected() -> None:
    model = tiny_model("llama")

    def made(**given: Any) -> None:  # noqa: ANN401  # same
        with Engine(**given) as engine:
            engine.generate([PROMPT], greedy(1))

    loaded = wrap(model, byte_tokenizer(), "llama")
    whole = {"model": loaded, "plan": PLAN, "options": EngineOptions(4), "observer": None, "speculate": None}
    assert unnamed(made, whole) == []
    parts = {"model": model, "tokenizer": byte_tokenizer(), "memory": "1MiB", "max_model_len": 32}
    assert unnamed(made, {**parts, "stored": Stored("int8_per_token_head")}) == []

    def runs(**given: Any) -> None:  # noqa: ANN401  # same
        ModelRunner(**given).detach()

    planned = planner_model(model, block_size=16)
    bounds = {"max_running": 2, "max_model_len": 64, "max_batched_tokens": 64, "max_encoder_tokens": 0}
    arguments = {"model": model, "config": PLAN.config, "planned": planned, **bounds, "observer": None}
    assert unnamed(runs, arguments) == []
    held = ModelRunner(**arguments)
    assert unnamed(held.execute, {"step": None}) == []
    held.detach()
    with Engine(loaded, PLAN) as engine, Engine(load("tiny:llama"), PLAN) as other:  # nobody holds the model still
        assert engine.generate([PROMPT], greedy(6)) == other.generate([PROMPT], greedy(6))


def test_wrong_type_for_an_embedder_is_rejected() -> None:
    def made(**given: Any) -> None:  # noqa: ANN401  # of any type
        Embedder(**given).close()

    with Engine(load("tiny:llama"), PLAN) as engine:
        assert unnamed(made, {"engine": engine, "pooling": None}) == []


def test_wrong_type_for_a_drafter_is_rejected() -> None:
    with Engine(loaded_model("llama", 1), memory="1MiB", max_model_len=64) as engine:
        draft = DraftModel(engine, 2)
        requests = [Request("r", PROMPT)]
        expected = draft.propose(requests)
        assert unnamed(DraftModel, {"engine": engine, "num_speculative_tokens": 2}) == []
        assert unnamed(AdaptiveDrafter, {"drafter": draft}) == []
        adaptive = AdaptiveDrafter(NgramDrafter())
        assert unnamed(adaptive.took, {"tokens": 3, "seconds": 0.5}) == []
        for drafter in (draft, NgramDrafter(), adaptive):
            assert unnamed(drafter.require, {"target": LLAMA}) == []
            assert unnamed(drafter.propose, {"requests": requests}) == []
        assert draft.propose(requests) == expected
        engine.scheduler.check()


def test_bad_share_or_file_of_ranks_is_refused(tmp_path: Path) -> None:
    share = {"whole": LLAMA.model, "rank": 0, "ranks": 2}
    assert unnamed(ModelShare.of, share) == []
    file = tmp_path / "joined"
    with Engine(LLAMA, memory="1MiB", max_model_len=64) as engine:
        engine.generate([PROMPT], SAMPLING)
        engine.export(PROMPT, tmp_path / "alone")
    found = unnamed(partial(join_sessions, path=file), {"paths": [tmp_path / "alone"], "key": None})
    assert [one for one in found if "FileNotFoundError" not in one] == []  # a path may name nothing
    for path in (7, None, "a\0b"):
        with pytest.raises(ConfigError, match="path must be the path of a file"):
            join_sessions([tmp_path / "alone"], path)  # type: ignore[arg-type]  # what is refused


def test_engine_and_channels_of_ranks() -> None:
    near, far = Pipe()
    far.close()  # so that an engine that follows ends at once
    model = load("tiny:llama").model
    rank = wrap(model, share=ModelShare.of(model, 0, 2))
    with near, Engine(rank, memory="1MiB", max_model_len=64) as engine:
        assert unnamed(follow, {"engine": engine, "channel": near}) == []
        assert unnamed(lead, {"engine": engine, "channels": [near]}) == []


# -- asyncio


def test_wrong_type_for_ranks_is_rejected() -> None:
    def ended(**given: Any) -> None:  # noqa: ANN401  # of any type
        Ranks(**given).close()

    assert unnamed(ended, {"source": "tiny:llama", "ranks": 2, "device": "cpu"}) == []
    with pytest.raises(ConfigError, match="trust_remote_code must be"):
        Ranks("tiny:llama", 2, trust_remote_code="yes")  # type: ignore[arg-type]  # what is refused


def test_bad_request_fails_its_own_caller_only() -> None:
    """One that is good runs beside all bad ones of each argument."""
    found: list[str] = []

    async def all_of() -> None:
        loaded = load("tiny:llama")
        with Engine(loaded, memory="1MiB", max_model_len=64) as engine:
            expected = engine.generate([PROMPT], greedy(40))[0].token_ids
        with Engine(loaded, memory="1MiB", max_model_len=64) as engine:
            found.extend(unnamed(lambda **given: AsyncEngine(engine, **given), {"max_unread": 3}))
            found.extend(unnamed(AsyncEngine, {"engine": None}))
            async with AsyncEngine(engine) as server:

                async def streamed(**given: Any) -> None:  # noqa: ANN401  # anything is handed in
                    async for _ in server.stream(**given):
                        pass

                async def aborted(**given: Any) -> None:  # noqa: ANN401  # same
                    server.abort(**given)

                async def together(**given: Any) -> None:  # noqa: ANN401  # same
                    with server.read(**given) as reading:
                        while await reading.next():
                            pass

                batch = {"prompts": [PROMPT], "sampling": SAMPLING, "encoders": None, "images": None}
                calls: list[tuple[Any, dict[str, Any]]] = [(streamed, {name: ADD[name]}) for name in ADD]
                calls += [(server.generate, {name: batch[name]}) for name in batch]
                calls.append((aborted, {"request_id": "nobody"}))
                calls.append((together, {"requests": [lambda one: one.stream(PROMPT, SAMPLING)]}))
                for call, one in calls:
                    rest = {**(ADD if call is streamed else batch if call not in {aborted, together} else {})}
                    rest.pop("request_id", None)  # all of them run at once
                    bad = [(name, {**rest, **given}) for name, given in trials(one, tensors)]
                    good = asyncio.create_task(server.generate([PROMPT], greedy(40)))
                    await asyncio.sleep(0)
                    ends = await asyncio.gather(*(call(**given) for _, given in bad), return_exceptions=True)
                    for (name, _), end in zip(bad, ends, strict=True):
                        if isinstance(end, BaseException) and not isinstance(end, HybridKVError):
                            found.append(f"{name}: {end!r}")
                    assert [done.token_ids for done in await good] == [expected]
                    engine.scheduler.check()

    asyncio.run(all_of())
    assert found == []


def test_wrong_type_tests_cover_every_runner_name() -> None:
    functions = {"load", "tiny_model", "wrap", "encode", "plan_for", "plan_within", "join_sessions", "follow", "lead"}
    engines = {Engine, AsyncEngine, ModelRunner, EngineOptions, LoadedModel, Stored}
    classes = engines | {ModelShare, Ranks, Embedder, Pooling, AdaptiveDrafter, DraftModel, NgramDrafter}
    covered = functions | {one.__name__ for one in classes}
    handed_out = {
        "Session",
        "HandedOver",
        "Completion",
        "Increment",
        "TokenLogprob",
        "Stream",
        "byte_tokenizer",
    }  # or without arguments
    no_callables = {"TINY_COMPRESSED", "TINY_ENCODER_DECODERS", "TINY_MODELS", "Observer", "MOST_TOKENS", "Drafter"}
    assert {*runner.__all__, *drafters.__all__} - covered - handed_out - no_callables == set()
