"""Clients of soak.py, in a process of their own: without torch they begin at once. Cases come in, counts go out."""

import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import httpx2

PATH, WAIT = "/v1/completions", 60.0
MALFORMED = [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": 1}', b'{"prompt": "a", "max_tokens": -1}', b"[" * 2000]


@dataclass(frozen=True)
class Case:
    """A body that is asked for, and what an engine alone makes of it."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    text: str

    def body(self, random: Random) -> dict[str, Any]:
        asked = {key: value for key, value in asdict(self).items() if key != "text"}
        n = random.choice([1, 1, 1, 2]) if not self.temperature else 1  # a branch has a seed of its own
        return {**asked, "ignore_eos": True, "n": n, "cache_salt": random.choice([None, "one", "two"])}


async def _streamed(
    http: httpx2.AsyncClient, asked: dict[str, Any], random: Random, most: int | None
) -> list[str] | None:
    """What a stream says, read slowly, at most so many events of it; None where it is turned away."""
    texts, read = [""] * asked["n"], 0
    async with http.stream("POST", PATH, json=asked) as answer:
        if answer.status_code == 429:
            return None
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
                read += 1
                if read == most:
                    break
                await asyncio.sleep(random.random() / 50)
    return texts


async def _one(http: httpx2.AsyncClient, random: Random, known: list[Case]) -> str:
    """One request, and what came of it."""
    case = random.choice(known)
    asked, what = case.body(random), random.random()
    right = [case.text] * asked["n"]
    if what < 0.1:
        answer = await http.post(PATH, content=random.choice(MALFORMED), headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        return "refused"
    if what < 0.3:
        with suppress(httpx2.TimeoutException):
            await http.post(PATH, json=asked, timeout=random.random() / 5)
        return "left"
    if what < 0.6:
        read = random.randrange(1, 6) if what < 0.4 else None
        texts = await _streamed(http, {**asked, "stream": True}, random, read)
        assert texts is None or read or texts == right, (case, texts)
        return "turned away" if texts is None else "left in the middle" if read else "streamed"
    answer = await http.post(PATH, json=asked)
    if answer.status_code == 429:
        await asyncio.sleep(int(answer.headers["retry-after"]) * random.random())
        return "turned away"
    texts = [one["text"] for one in answer.json()["choices"]]
    assert texts == right, (case, texts)
    return "answered"


async def _client(number: int, url: str, known: list[Case], end: float) -> Counter[str]:
    random, counts = Random(number), Counter[str]()
    async with httpx2.AsyncClient(base_url=url, timeout=WAIT) as http:
        while time.monotonic() < end:
            counts[await _one(http, random, known)] += 1
    return counts


async def _looker(url: str, end: float) -> Counter[str]:
    """Somebody who watches the page and scrapes."""
    counts = Counter[str]()
    async with httpx2.AsyncClient(base_url=url, timeout=WAIT) as http:
        while time.monotonic() < end:
            async with http.stream("GET", "/live") as answer:
                lines = answer.aiter_lines()
                for _ in range(9):
                    await anext(lines)
            counts["looked"] += (await http.get("/metrics")).status_code == 200
    return counts


async def _crowd(url: str, clients: int, seconds: float, known: list[Case]) -> Counter[str]:
    end = time.monotonic() + seconds
    asking = [_client(number, url, known, end) for number in range(clients)]
    return sum(await asyncio.gather(_looker(url, end), *asking), Counter())


if __name__ == "__main__":
    told = json.loads(sys.stdin.read())
    cases = [Case(**one) for one in told["cases"]]
    print(json.dumps(asyncio.run(_crowd(told["url"], told["clients"], told["seconds"], cases))))  # noqa: T201 - to who began it
