"""The simulated router `prefix:0` chooses the worker that vllm-router chooses. ROUTERS_ENV: environments of routers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
import pytest
from real_vllm_router import Fleet

from hybridkv.request import Request
from hybridkv.runner import plan_within, tiny_model, wrap
from hybridkv.simulator import ReplaySettings, simulation_of
from hybridkv.simulator.fleet import router_named
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.formats.texts import TokenTree
from hybridkv.simulator.loop import run_replicas
from hybridkv.simulator.tokens import Pieces
from hybridkv.simulator.trace import TraceSummary, summarise
from hybridkv.units import parse_bytes

Sent = tuple[list[int], int | None]
"""A prompt, and the worker that got it past the router."""


def traffic(random: Random, requests: int) -> Iterator[Sent]:
    """Chats: each turn goes to one worker past the router, or through it; both workers know some turns of a chat."""
    chats = [list[int]() for _ in range(6)]
    for _ in range(requests):
        at = random.randrange(len(chats))
        begins = not chats[at] or len(chats[at]) > 300
        more = [random.randrange(5, 200) for _ in range(random.randrange(20, 60))]
        chats[at] = more if begins else [*chats[at], *more]
        yield chats[at], random.randrange(2) if begins or random.random() < 0.4 else None


class Recorded:
    """The requests that were sent, each when all workers are idle."""

    name = "recorded"

    def __init__(self, sent: Sequence[Sent]) -> None:
        tree, outputs = TokenTree(count()), count(1 << 40)
        self._requests = [
            TraceRequest(
                100.0 * at, Pieces(0, tuple(tree.pieces(np.array(ids, np.int32)))), Pieces(0, ((next(outputs), 0, 1),))
            )
            for at, (ids, _) in enumerate(sent)
        ]

    def summary(self) -> TraceSummary:
        return summarise(self._requests, self.name)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)


@pytest.mark.parametrize("model", ["qwen3_next", "llama"])
def test_simulated_router_chooses_as_the_real_one(model: str, tmp_path: Path) -> None:
    random, sent, chosen, credited = Random(model), list[Sent](), list[int](), list[int]()
    with ExitStack() as stack:
        fleet = Fleet(model, tmp_path, stack)
        for ids, past in traffic(random, 110):
            body = {"prompt": ids, "max_tokens": 1}
            if past is not None:
                fleet.prime(past, body)
                chosen.append(past)
                credited.append(0)
            else:
                answer = fleet.ask(body)
                chosen.append(answer.worker)
                credited.append(answer.credited)
            sent.append((ids, past))
    plan = plan_within(wrap(tiny_model(model)), parse_bytes("16MiB"), max_model_len=512)
    first = simulation_of(plan, ReplaySettings(), events=True)
    second = simulation_of(plan, ReplaySettings(), hasher=first.scheduler.cache.hasher, events=True)
    runs, router = [first.replica(), second.replica()], router_named("prefix:0")()
    simulated = list[int]()

    def choose(request: Request, now_s: float) -> int:
        said = router.choose(request, runs, now_s)
        at = len(simulated)
        simulated.append(said)
        return chosen[at]  # what the real one chose, so that both know the same

    run_replicas(Recorded(sent), runs, choose, on_steps=lambda at: router.heard(at, runs[at]))
    routed = [at for at, (_, past) in enumerate(sent) if past is None]
    same = sum(simulated[at] == chosen[at] for at in routed)
    assert sum(credited[at] > 0 for at in routed) > 40
    assert {chosen[at] for at in routed} == {0, 1}
    assert same >= 0.99 * len(routed), (same, len(routed))
