"""An error of one request in the cache or scheduler ends that request only, in Engine and AsyncEngine."""

import asyncio

import pytest
from runner_support import generated, greedy, loaded_model, shared_prompts

from hybridkv.errors import ConfigError, HashError
from hybridkv.request import Request
from hybridkv.runner import AsyncEngine, Engine, EngineOptions, Increment

LLAMA = loaded_model("llama")
PROMPTS = shared_prompts(4, 12)
OUTPUT = 40  # over several blocks


def engine_of(in_flight: int) -> Engine:
    return Engine(LLAMA, memory="2MiB", max_model_len=160, options=EngineOptions(in_flight=in_flight))


def break_hashes(engine: Engine, prompt: list[int]) -> None:
    """The first block that outputs behind ``prompt`` fill cannot be hashed, whoever is hashed in the same call."""
    hasher = engine.cache.hasher
    assert hasher is not None
    last, whole = Request("probe", prompt, hasher=hasher).hashes[-1], hasher.hash_rows

    def hash_rows(parents: list[bytes | None], *rest: object) -> list[bytes]:
        if last in parents:
            raise RuntimeError("the hasher is broken")
        return whole(parents, *rest)  # type: ignore[arg-type]  # as it came

    hasher.hash_rows = hash_rows  # type: ignore[method-assign, assignment]  # on purpose


def expected(*which: int) -> list[tuple[int, ...]]:
    return [generated(LLAMA, PROMPTS[at], OUTPUT) for at in which]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_async_hash_error_reaches_its_own_task_only(in_flight: int) -> None:
    async def read(front: AsyncEngine, prompt: list[int]) -> list[Increment]:
        return [part async for part in front.stream(prompt, greedy(OUTPUT))]

    async def work() -> list[list[Increment] | BaseException]:
        engine = engine_of(in_flight)
        break_hashes(engine, PROMPTS[1])
        async with asyncio.timeout(60), AsyncEngine(engine) as front:
            return await asyncio.gather(*(read(front, prompt) for prompt in PROMPTS), return_exceptions=True)

    found = asyncio.run(work())
    assert isinstance(found[1], HashError)
    whole = [one for one in found if isinstance(one, list)]
    assert [tuple(token for part in one for token in part.token_ids) for one in whole] == expected(0, 2, 3)


@pytest.mark.parametrize("known", [{"request_id": "\ud800"}, {"cache_salt": "\ud800"}, {"cache_salt": ""}])
def test_stream_with_invalid_id_or_salt_is_rejected_and_others_finish(known: dict[str, str]) -> None:
    """The prompt is shorter than a block, so its first hash comes only after many output tokens."""

    async def read(front: AsyncEngine, prompt: list[int], **more: str) -> list[Increment]:
        return [part async for part in front.stream(prompt, greedy(OUTPUT), **more)]  # type: ignore[arg-type]  # by name

    async def work() -> list[list[Increment] | BaseException]:
        async with asyncio.timeout(60), AsyncEngine(engine_of(2)) as front:
            tasks = [read(front, PROMPTS[0]), read(front, PROMPTS[1][:5], **known), read(front, PROMPTS[2])]
            return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(work())
    assert isinstance(found[1], ConfigError)
    whole = [one for one in found if isinstance(one, list)]
    assert [tuple(token for part in one for token in part.token_ids) for one in whole] == expected(0, 2)
