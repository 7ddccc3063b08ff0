"""Many clients at once, some of which leave, talk nonsense or read slowly: nothing is lost, mixed up or left behind."""

import asyncio
import json
from contextlib import suppress
from random import Random
from typing import Any

import httpx2
import pytest
from serve_support import LONGEST, WAIT, Served, serving, until

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.serve import ServeOptions

PROMPTS = [f"{'one two three ' * (at % 4)}and {at}" for at in range(8)]
TOKENS = 12


def engine(name: str) -> Engine:
    options = EngineOptions(max_running=4)  # fewer than clients: some wait
    return Engine(
        load(f"tiny:{name}"), memory="3MiB", max_model_len=LONGEST, options=options, speculate=NgramDrafter(2)
    )


def body(random: Random, prompt: str) -> dict[str, Any]:
    n = random.randint(1, 2)
    salt = random.choice([None, "one"])
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "n": n, "cache_salt": salt}


async def client(number: int, url: str, requests: int, expected: dict[str, str]) -> int:
    """How many whole answers it got, all of them right."""
    random, right = Random(number), 0
    async with httpx2.AsyncClient(base_url=url, timeout=WAIT) as http:
        for _ in range(requests):
            prompt = random.choice(PROMPTS)
            asked, what = body(random, prompt), random.random()
            if what < 0.1:
                answer = await http.post("/v1/completions", json={**asked, "nonsense": 1})
                assert answer.status_code == 400
            elif what < 0.3:
                with suppress(httpx2.TimeoutException):
                    await http.post("/v1/completions", json=asked, timeout=random.random() / 5)
            elif what < 0.5:
                async with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
                    lines = answer.aiter_lines()
                    for _ in range(random.randrange(1, 4)):
                        await anext(lines, None)  # 429 has one
            elif what < 0.7:
                texts = [""] * asked["n"]
                async with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            (choice,) = json.loads(line[6:])["choices"]
                            texts[choice["index"]] += choice["text"]
                            await asyncio.sleep(random.random() / 100)
                assert answer.status_code == 429 or texts == [expected[prompt]] * asked["n"]
                right += answer.status_code == 200
            else:
                answer = await http.post("/v1/completions", json=asked)
                if answer.status_code == 429:
                    await asyncio.sleep(0.02)
                    continue
                assert [one["text"] for one in answer.json()["choices"]] == [expected[prompt]] * asked["n"]
                right += 1
    return right


async def crowd(url: str, clients: int, requests: int, expected: dict[str, str]) -> list[int]:
    return await asyncio.gather(*(client(number, url, requests, expected) for number in range(clients)))


def soak(name: str, clients: int, requests: int) -> None:
    with engine(name) as alone:
        done = alone.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        expected = {prompt: one.text or "" for prompt, one in zip(PROMPTS, done, strict=True)}
    served_engine = engine(name)
    with serving(served_engine, ServeOptions(max_waiting=8)) as served:
        right = asyncio.run(crowd(served.url, clients, requests, expected))
        assert sum(right) > clients / 2  # others were turned away, or left
        _nothing_is_left(served, served_engine)


def _nothing_is_left(served: Served, engine: Engine) -> None:
    front = served.front
    until(lambda: front.places.taken == 0 and front.engine.statistics().running == 0)
    now = front.engine.statistics()
    assert (now.waiting, now.failed_steps) == (0, 0)

    def checked() -> float:
        engine.scheduler.check()
        return engine.cache.usage

    assert front.engine._thread.submit(checked).result(WAIT) == 0


def test_a_crowd() -> None:
    soak("llama", 6, 5)


@pytest.mark.thorough
def test_a_crowd_that_stays() -> None:
    soak("qwen3_next", 12, 15)
