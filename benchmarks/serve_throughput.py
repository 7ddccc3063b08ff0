"""Compare a server with AsyncEngine alone, in alternation: output tokens per second of 32 clients, and processor time.

    python serve_throughput.py [--rounds 5] [--clients 32] [--new-tokens 32] [--model tiny:llama] [--bare]

Clients of the server are in a separate process and read streams. Clients of AsyncEngine alone are tasks in its process.
Each client makes four requests in a row for outputs of different lengths, so that requests begin and end at different
times. Prompts are new in every round, so that both compute them, and both get the same ones. ``--bare`` replaces the
server by a minimal one in one process that sends the same bytes per token and does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from larger_models import llama_100m
from starlette.types import Receive, Scope, Send

from hybridkv.request import SamplingParams
from hybridkv.runner import AsyncEngine, Engine, EngineOptions, load
from hybridkv.serve import Server, create_app, listen

PROMPT = 32
ASKED = 4
"""Requests of a client, one behind the other."""
Requests = Sequence[Sequence[tuple[Sequence[int], int]]]
"""Of each client: prompts, and how many tokens to make of them."""


def requests_of(number: int, clients: int, new_tokens: int) -> Requests:
    """Of round ``number``: prompts that no other round has, and half to one and a half times ``new_tokens``."""
    random = Random(number)  # noqa: S311 - the same ones every time
    return [
        [
            ([random.randrange(250) for _ in range(PROMPT)], random.randint(new_tokens // 2, new_tokens * 3 // 2))
            for _ in range(ASKED)
        ]
        for _ in range(clients)
    ]


def engine_of(model: str, clients: int) -> Engine:
    """All clients run at once."""
    loaded = llama_100m() if model == "llama-100m" else load(model)
    options = EngineOptions(clients, token_budget=2048)
    return Engine(loaded, options=options, memory="256MiB", max_model_len=512)


# -- AsyncEngine alone


def alone_in_turns(asked: argparse.Namespace, rounds: Sequence[Requests]) -> Iterator[tuple[float, float, int]]:
    """Seconds, processor seconds and tokens of each round, run when it is asked for."""
    loop = asyncio.new_event_loop()
    front = AsyncEngine(engine_of(asked.model, asked.clients))

    async def read(requests: Sequence[tuple[Sequence[int], int]]) -> int:
        tokens = 0
        for prompt, most in requests:
            sampling = SamplingParams(max_tokens=most, ignore_eos=True, temperature=1.0, seed=0)
            async for one in front.stream(prompt, sampling):
                tokens += len(one.token_ids)
        return tokens

    async def one_round(requests: Requests) -> tuple[float, float, int]:
        begun, work = time.perf_counter(), time.process_time()
        tokens = sum(await asyncio.gather(*map(read, requests)))
        return time.perf_counter() - begun, time.process_time() - work, tokens

    for requests in rounds:
        yield loop.run_until_complete(one_round(requests))
    loop.run_until_complete(front.close())
    loop.close()


# -- the server


CHUNK = b"data: " + b"x" * 220 + b"\n\n"
"""As long as what a token's chunk of a completion is."""


class Bare:
    """An ASGI application that sends CHUNK for each token, and the count of them that clients read."""

    def __init__(self, engine: Engine) -> None:
        self._front = AsyncEngine(engine)
        self.state = SimpleNamespace(front=SimpleNamespace(draining=False))  # which a Server sets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._front.close()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        asked = json.loads(body)
        sampling = SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=True, temperature=1.0, seed=0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with self._front.read([lambda engine: engine.stream(asked["prompt"], sampling)]) as reading:
            while parts := await reading.next():
                await send({"type": "http.response.body", "body": CHUNK * len(parts), "more_body": True})
        usage = b'data: {"usage":{"completion_tokens":%d}}\n\n' % asked["max_tokens"]
        await send({"type": "http.response.body", "body": usage})


@contextmanager
def served(app: Any) -> Iterator[int]:  # noqa: ANN401 - of create_app, or what is as little as Bare
    """Yield the port of a server in a thread of this process."""
    listening = listen("127.0.0.1", 0)
    ready = threading.Event()
    server = Server(app, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    ready.wait()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def be_clients() -> None:
    """Read rounds from standard input, one a line; write seconds and tokens of each to standard output."""
    told = json.loads(sys.stdin.readline())
    links = [http.client.HTTPConnection("127.0.0.1", told["port"]) for _ in range(told["clients"])]
    for line in sys.stdin:
        each = json.loads(line)
        counts = [0] * len(each)
        asking = [
            threading.Thread(target=_ask, args=(link, requests, counts, at))
            for at, (link, requests) in enumerate(zip(links, each, strict=True))
        ]
        begun = time.perf_counter()
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        print(json.dumps([time.perf_counter() - begun, sum(counts)]), flush=True)


def _ask(
    link: http.client.HTTPConnection, requests: Sequence[tuple[Sequence[int], int]], counts: list[int], at: int
) -> None:
    link.close()  # servers end connections that are idle for some seconds
    for prompt, most in requests:
        body = {"prompt": prompt, "max_tokens": most, "ignore_eos": True, "temperature": 1, "seed": 0, "stream": True}
        options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
        link.request("POST", "/v1/completions", json.dumps(body | options), {"Content-Type": "application/json"})
        last = [one for one in link.getresponse().read().split(b"\n\n") if one.startswith(b"data: {")][-1]
        counts[at] += json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]


# -- in turns


def main() -> None:
    """Print a line for each round, and the median of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--model", default="tiny:llama", help="tiny:NAME, or llama-100m")
    parser.add_argument("--bare", action="store_true", help="the least there can be in place of the server")
    parser.add_argument("--be-clients", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be_clients:
        be_clients()
        return
    torch.set_num_threads(1)
    rounds = [requests_of(number, asked.clients, asked.new_tokens) for number in range(asked.rounds + 1)]
    alone = alone_in_turns(asked, rounds)
    engine = engine_of(asked.model, asked.clients)
    with served(Bare(engine) if asked.bare else create_app(engine)) as port:
        command = [sys.executable, __file__, "--be-clients"]
        with subprocess.Popen(  # noqa: S603 - this file
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as clients:
            if clients.stdin is None or clients.stdout is None:
                raise SystemExit("no pipes")
            told = {"port": port, "clients": asked.clients}
            print(json.dumps(told), file=clients.stdin)
            ratios, works = list[float](), list[float]()
            for number, requests in enumerate(rounds):
                seconds, work, tokens = next(alone)
                begun = time.process_time()
                print(json.dumps(requests), file=clients.stdin, flush=True)
                took, got = json.loads(clients.stdout.readline())
                spent = time.process_time() - begun
                if got != tokens:
                    raise SystemExit(f"{got} tokens served, {tokens} alone")
                if number:  # the first one warms up
                    ratios.append(seconds / took)
                    works.append(spent / work)
                    print(
                        f"round {number}: alone {tokens / seconds:,.0f} tokens a second, {1e6 * work / tokens:.0f} us "
                        f"of processor time each; served {got / took:,.0f}, {1e6 * spent / got:.0f} us"
                    )
            clients.stdin.close()
    for _ in alone:
        pass
    what = f"{asked.model} bare" if asked.bare else asked.model
    print(
        f"{what}, {asked.clients} clients, {asked.new_tokens} tokens: {median(ratios):.3f} of the throughput, "
        f"{median(works):.2f} times the processor time"
    )


if __name__ == "__main__":
    main()
