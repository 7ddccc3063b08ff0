"""examples/bare_engine.py under given conditions, and what of its outputs a dense forward would not have said."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from bare_engine import DRAFTS, VOCABULARY, Hybrid, InPlace, Named, Worker, draw, serve, wrong

from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, plan
from hybridkv.planner import Plan
from hybridkv.schedule import SchedulerStatistics

LAYOUTS: dict[str, tuple[str, type[Named | InPlace]]] = {
    "natural": ("natural", Named),
    "reference": ("reference", Named),
    "in place": ("reference", InPlace),
}
MAX_MODEL_LEN, BUDGET = 120, 40


@dataclass(frozen=True)
class Regime:
    """What a run is like.

    hits: half of the prompts have one beginning. mixed: lengths of any size come and go; else all go on once more.
    """

    memory: str = "1MiB"
    hits: bool = False
    drafts: bool = False
    in_flight: int = 1
    temperature: float = 0.0
    max_tokens: int = 16
    mixed: bool = False
    seed: int = 1


REGIMES = {
    "plain": Regime(),
    "hits": Regime(hits=True),
    "preemption": Regime(memory="88KiB", max_tokens=48),
    "drafts": Regime(drafts=True),
    "ahead": Regime(in_flight=2, hits=True, temperature=0.8),
    "crowded": Regime(memory="80KiB", hits=True, max_tokens=40, mixed=True, seed=2),
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


def given(regime: Regime, random: Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, and how each goes on."""
    common = [random.randrange(VOCABULARY) for _ in range(36)]
    return [
        (
            (common if regime.hits and n % 2 else [])
            + [random.randrange(VOCABULARY) for _ in range(random.randint(2 if regime.mixed else 20, 50))],
            SamplingParams(
                max_tokens=random.randint(1, regime.max_tokens) if regime.mixed else regime.max_tokens,
                temperature=regime.temperature,
                seed=n,
            ),
        )
        for n in range(12 if regime.mixed else 4 if regime.hits else 6)
    ]


def control(layout: str, regime: Regime) -> tuple[Plan, Scheduler]:
    """All but the worker."""
    planned = plan(
        model().described(),
        regime.memory,
        max_model_len=MAX_MODEL_LEN,
        max_batched_tokens=BUDGET,
        max_in_flight=regime.in_flight,
        layout=LAYOUTS[layout][0],
    )
    limits = SchedulerLimits(
        max_running=4,
        max_batched_tokens=BUDGET,
        max_in_flight=regime.in_flight,
        num_speculative_tokens=DRAFTS if regime.drafts else 0,
    )
    manager = KVCacheManager(planned, enable_caching=regime.hits)
    return planned, Scheduler(manager, limits, clock=lambda: 0.0)


def run(layout: str, regime: Regime, worker_of: type[Worker] = Worker, *, to_the_end: bool = True) -> Run:
    """The requests of a regime, in two turns where prefixes are hit and lengths are not mixed.

    to_the_end: though tokens of the first turn are wrong.
    """
    planned, scheduler = control(layout, regime)
    worker = worker_of(model(), planned, scheduler.limits, LAYOUTS[layout][1])
    asked, wrong_tokens = given(regime, Random(regime.seed)), 0
    for turn in range(2 if regime.hits and not regime.mixed else 1):
        requests = [
            Request(f"{turn}.{n}", prompt, sampling, hasher=scheduler.cache.hasher)
            for n, (prompt, sampling) in enumerate(asked)
        ]
        serve(scheduler, worker, requests, guesses if regime.drafts else None)
        wrong_tokens += sum(len(wrong(model(), request)) for request in requests)
        if wrong_tokens and not to_the_end:
            break
        asked = [
            ([*request.token_ids().tolist()[: MAX_MODEL_LEN - 50], turn], request.sampling) for request in requests
        ]
    scheduler.check()
    return Run(wrong_tokens, scheduler.statistics(), worker)
