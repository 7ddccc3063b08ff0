"""Each router in front of two servers: restarts, a killed worker and lost events. ROUTERS_ENV: their environments."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zmq
from workers import Between, Worker, asked, same

from routers import ROUTERS

MODELS = ("llama", "qwen3_next")


def head(number: int) -> list[int]:
    """A prompt of five blocks."""
    return Random(number).choices(range(5, 200), k=80)


def body(number: int) -> dict[str, Any]:
    return {"prompt": head(number), "max_tokens": 1}


def longer(number: int) -> dict[str, Any]:
    return {"prompt": [*head(number), 1, 2], "max_tokens": 1}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ROUTERS)
def test_router_expects_what_workers_have(name: str, model: str, tmp_path: Path, stack: ExitStack) -> None:
    context = stack.enter_context(zmq.Context())
    workers = [Worker(f"tiny:{model}", tmp_path) for _ in range(2)]
    for worker in workers:
        stack.enter_context(worker.server)
    between = [Between(context, worker) for worker in workers]
    for one in between:
        stack.callback(one.close)
    for number in range(6):
        workers[number % 2].post(body(number))
    router = ROUTERS[name](workers, [one.port for one in between], tmp_path, stack)

    def expect(*heads: int) -> None:
        answers = [(number, router.ask(longer(number))) for number in heads]
        assert [(number, one.worker, one.credited) for number, one in answers] == [
            (number, number % 2, 80) for number in heads
        ]
        assert all(same(one) for _, one in answers)

    expect(0, 1)  # a late router is told all
    router.restart()
    expect(2, 3)

    for one in between:
        one.is_losing = True
    workers[0].post(body(10))
    workers[1].post(body(11))
    asked(f"{workers[1].url}/reset_prefix_cache", {})
    workers[1].post(body(13))
    for one in between:
        one.is_losing = False
    workers[0].post(body(12))  # the numbers tell that batches are missing
    workers[1].post(body(15))
    expect(10, 12, 13, 15, 4)
    forgotten = router.ask(longer(11))
    assert (forgotten.credited, forgotten.found) == (0, 0)

    workers[1].server.kill()
    workers[1].server.start()
    router.take_back()
    forgotten = router.ask(longer(15))
    assert (forgotten.credited, forgotten.found) == (0, 0)
    workers[1].post(body(17))
    expect(17, 10)

    workers[1].server.kill()
    router.leave_out(1)
    moved = router.ask(longer(17))
    assert (moved.worker, moved.credited, moved.found) == (0, 0, 0)
