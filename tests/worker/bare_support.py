"""examples/bare_engine.py under given conditions, and what of its outputs a dense forward would not have said."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from bare_engine import DRAFTS, VOCABULARY, Hybrid, InPlace, Named, Worker, draw, serve, wrong

from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, plan
from hybridkv.schedule import SchedulerStatistics

LAYOUTS: dict[str, tuple[str, type[Named | InPlace]]] = {
    "natural": ("natural", Named),
    "reference": ("reference", Named),
    "in place": ("reference", InPlace),
}
MAX_MODEL_LEN, BUDGET = 120, 40


@dataclass(frozen=True)
class Regime:
    """What a run is like. hits: half of the prompts have one beginning, and all come twice."""

    memory: str = "1MiB"
    hits: bool = False
    drafts: bool = False
    in_flight: int = 1
    temperature: float = 0.0
    max_tokens: int = 16


REGIMES = {
    "plain": Regime(),
    "hits": Regime(hits=True),
    "preemption": Regime(memory="88KiB", max_tokens=48),
    "drafts": Regime(drafts=True),
    "ahead": Regime(in_flight=2, hits=True, temperature=0.8),
    "all": Regime(memory="88KiB", hits=True, drafts=True, temperature=0.8, max_tokens=40),
}


@dataclass(frozen=True)
class Run:
    """What came of one. wrong: output tokens that are not those of a dense forward, of all requests."""

    wrong: int
    counts: SchedulerStatistics
    worker: Worker


@cache
def model() -> Hybrid:
    return Hybrid()


@cache
def dense_output(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    """What a dense forward says, token by token."""
    tokens = list(prompt)
    for _ in range(sampling.max_tokens):
        tokens.append(draw(model().dense(tokens)[-1], sampling, len(tokens)))
    return tuple(tokens[len(prompt) :])


def guesses(request: Request) -> list[int]:
    """Drafts of which some are what comes, by request and place: none, some or all of them are accepted."""
    random = Random(f"{request.request_id} {request.num_tokens}")
    right = dense_output(tuple(request.token_ids().tolist()[: request.num_prompt_tokens]), request.sampling)
    done = request.num_tokens - request.num_prompt_tokens
    count = random.randint(0, DRAFTS)
    return [one if random.random() < 0.7 else random.randrange(VOCABULARY) for one in right[done : done + count]]


def run(layout: str, regime: Regime, worker_of: type[Worker] = Worker, seed: int = 1) -> Run:
    """Six requests, or four twice, through a ``worker_of``."""
    random = Random(seed)
    name, states = LAYOUTS[layout]
    planned = plan(
        model().described(),
        regime.memory,
        max_model_len=MAX_MODEL_LEN,
        max_batched_tokens=BUDGET,
        max_in_flight=regime.in_flight,
        layout=name,
    )
    manager = KVCacheManager(planned, enable_caching=regime.hits)
    limits = SchedulerLimits(
        max_running=4,
        max_batched_tokens=BUDGET,
        max_in_flight=regime.in_flight,
        num_speculative_tokens=DRAFTS if regime.drafts else 0,
    )
    scheduler, worker = Scheduler(manager, limits, clock=lambda: 0.0), worker_of(model(), planned, limits, states)
    common = [random.randrange(VOCABULARY) for _ in range(36)]
    prompts = [
        (common if regime.hits and n % 2 else [])
        + [random.randrange(VOCABULARY) for _ in range(random.randint(20, 50))]
        for n in range(4 if regime.hits else 6)
    ]
    wrong_tokens = 0
    for turn in range(2 if regime.hits else 1):
        requests = [
            Request(
                f"{turn}.{n}",
                prompt,
                SamplingParams(max_tokens=regime.max_tokens, temperature=regime.temperature, seed=n),
                hasher=manager.hasher,
            )
            for n, prompt in enumerate(prompts)
        ]
        serve(scheduler, worker, requests, guesses if regime.drafts else None)
        wrong_tokens += sum(len(wrong(model(), request)) for request in requests)
    scheduler.check()
    return Run(wrong_tokens, scheduler.statistics(), worker)
