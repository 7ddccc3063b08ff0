"""Dynamo's own indexer follows a cache, and finds what it finds. DYNAMO_PYTHON: a Python with ai-dynamo-runtime."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from socket import create_server
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from events_support import BLOCK, SALTS, cache_of, looked_up, prompt, publisher_of, run
from exact_support import CACHES, Run, cache_of_layers, can_be_hit

from hybridkv.kv_events import KVEventPublisher

PYTHON = os.environ.get("DYNAMO_PYTHON")
SECONDS = 30.0


@contextmanager
def indexer(log: Path) -> Iterator[str]:
    """Where it answers."""
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(PYTHON), "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    with log.open("w") as written, subprocess.Popen(command, stdout=written, stderr=written) as process:  # noqa: S603
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def post(url: str, body: dict[str, Any]) -> Any:  # noqa: ANN401  # what it says
    """Its answer, once it answers at all."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310  # loopback
    end = time.monotonic() + SECONDS
    while True:
        try:
            with urlopen(request, timeout=SECONDS) as answer:  # noqa: S310  # same
                return json.load(answer)
        except URLError:
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.mark.thorough
@pytest.mark.skipif(PYTHON is None, reason="DYNAMO_PYTHON names no Python")
@pytest.mark.parametrize("kept", [10_000, 5], ids=["replayed", "from a snapshot"])
def test_dynamo_indexer_matches_the_cache(tmp_path: Path, kept: int) -> None:
    random = Random(3)
    config, cache = cache_of()
    with indexer(tmp_path / "log") as url, publisher_of(config, kept_batches=kept) as publisher:
        for number in range(30):  # before it knows of us
            run(cache, random, number)
            publisher.publish(cache.take_events())
        worker = {"instance_id": 1, "model_name": "m", "block_size": BLOCK}
        endpoints = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        assert post(f"{url}/register", {**worker, **endpoints}) == {"status": "ok"}
        time.sleep(1)  # until it has subscribed: else nothing tells it that it missed the last
        for number in range(100, 200):
            run(cache, random, number)
            publisher.publish(cache.take_events())
        time.sleep(1)  # until it has heard
        hits = 0
        for number in range(1000):
            tokens, salt = prompt(random), random.choice(SALTS)
            found = looked_up(cache, tokens, salt, number)
            query = {"token_ids": tokens, "model_name": "m"} | ({} if salt is None else {"cache_salt": salt})
            told = post(f"{url}/query", query)["scores"].get("1", {}).get("0", 0)
            # the last token is always computed; the indexer counts its block, too
            assert told == found or told == found + BLOCK == len(tokens), (tokens, salt)
            hits += found > 0
        assert hits > 100


@pytest.mark.thorough
@pytest.mark.skipif(PYTHON is None, reason="DYNAMO_PYTHON names no Python")
@pytest.mark.parametrize("kept", [10_000, 5], ids=["replayed", "from a snapshot"])
@pytest.mark.parametrize("layers", ["states", "all"])
def test_dynamo_indexer_with_exact_events_matches_hits(tmp_path: Path, layers: str, kept: int) -> None:
    config, cache = cache_of_layers(CACHES[layers], natural=True, size=60)
    run, anywhere, known = Run(cache, Random(4)), "tcp://127.0.0.1:0", 0
    with (
        indexer(tmp_path / "log") as url,
        KVEventPublisher(config, anywhere, anywhere, exact=True, kept_batches=kept) as publisher,
    ):
        for turns in (60, 100):
            for _ in range(turns):
                run.turn()
                publisher.publish(cache.take_events())
            if turns == 60:
                worker = {"instance_id": 1, "model_name": "m", "block_size": BLOCK}
                endpoints = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
                assert post(f"{url}/register", {**worker, **endpoints}) == {"status": "ok"}
                time.sleep(1)  # until it has subscribed
        while not run.settled:
            run.turn()
            publisher.publish(cache.take_events())
        time.sleep(1)  # until it has heard
        hittable = can_be_hit(cache, run.prompts())
        for salt, tokens in run.prompts():
            ends = [end for end in range(0, len(tokens) + 1, BLOCK) if not end or (salt, tokens[:end]) in hittable]
            query = {"token_ids": [*tokens, 77], "model_name": "m"} | ({} if salt is None else {"cache_salt": salt})
            assert post(f"{url}/query", query)["scores"].get("1", {}).get("0", 0) == ends[-1], (tokens, salt)
            known += ends[-1] > 0
        assert known > 5
