"""vLLM's schedulers and ours on the same random requests, step for step: what workers are told, and what comes out.

    python tests/vllm/schedule_duel.py --seeds 40

No forwards: outputs are made up of the place they stand in. Requests come while others run, share heads, end by a stop
token, by length and by being aborted; blocks are so few that some are preempted; the cache is forgotten in between.
Some loads have priorities, few requests at once, or prompts in short parts. Two clients ask; some requests want
logprobs, or end when they repeat themselves, which ``take_tokens`` leaves to vLLM. Every step's outputs and every
request's counters are those of stock's, field by field; of models with states those of ours without ``decode`` and
``take_tokens``: who is admitted beside states may differ from stock (docs/differential.md).
"""

import argparse
import copy
import os
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Self

import scheduling
from generate_duel import MATCHES, say
from msgspec.structs import asdict
from scheduling import KINDS, answer_to, engine_core, said_to_workers, scheduler_of
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import Request, RequestStatus

import hybridkv.vllm.scheduler as ours
import vllm
from hybridkv.vllm.decoding import decode, take_tokens

STOP, STEPS, REQUESTS = 7, 250, 30
REPEATS = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=2)
COUNTERS = ("prefill_capacity_bound", "current_step", "num_executed_steps", "last_prefill_step")
"""Of schedulers, where their release has them."""
OF_REQUESTS = (
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_output_placeholders",
    "num_stale_output_tokens",
    "num_tokens",
    "num_output_tokens",
)
MADE: Counter[str] = Counter()
"""Steps of requests that ``decode`` scheduled alone, those beside others of the loop, and those of the loop alone."""
TAKEN: Counter[bool] = Counter()
"""Tokens that ``take_tokens`` took in, and requests of a step that it left to the loop."""


def counted(scheduler: Any, *, throttled: bool, by: Any = decode) -> Any:  # noqa: ANN401 - of vLLM
    """``decode``, but for a scheduler that goes without."""
    if getattr(scheduler, "goes_without", False):
        return None
    decoded = by(scheduler, throttled=throttled)
    alone = decoded is not None and decoded.covered == len(scheduler.running) and not scheduler.get_request_counts()[1]
    MADE["loop" if decoded is None else "alone" if alone else "beside"] += 1
    return decoded


def taken(scheduler: Any, step: Any, answer: Any, take: Any = take_tokens) -> Any:  # noqa: ANN401 - of vLLM
    """``take_tokens``, but for a scheduler that goes without."""
    if getattr(scheduler, "goes_without", False):
        return {}, step.num_scheduled_tokens
    tokens, others = take(scheduler, step, answer)
    TAKEN[True] += sum(map(len, tokens.values()))
    TAKEN[False] += len(others)
    return tokens, others


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler may use. long_prefill: tokens of a prompt in one step, 0 for all."""

    blocks: int
    requests: int
    policy: str
    long_prefill: int

    @classmethod
    def of(cls, random: Random) -> Self:
        policy = "priority" if random.random() < 0.2 else "fcfs"
        return cls(random.randrange(14, 60), random.choice([4, 8, 64]), policy, random.choice([0, 0, 0, 24]))


class Side:
    """A scheduler and its steps in flight. ahead: how many are scheduled before the first one's output is in."""

    def __init__(self, kind: Any, core: Any, ahead: int, limits: Limits, *, goes_without: bool) -> None:  # noqa: ANN401
        made, config = core.scheduler, copy.copy(core.scheduler.kv_cache_config)
        config.num_blocks = made.vllm_config.cache_config.num_gpu_blocks = limits.blocks
        made.vllm_config.scheduler_config.policy = limits.policy
        made.vllm_config.scheduler_config.long_prefill_token_threshold = limits.long_prefill
        self.scheduler = scheduler_of(kind, core, config)
        self.scheduler.max_num_active_reqs = limits.requests
        self.scheduler.goes_without = goes_without
        self.hasher, self.ahead = core.request_block_hasher, ahead
        self.flight: deque[tuple[Any, dict[str, int]]] = deque()

    def does(self, act: tuple[Any, ...]) -> None:
        what, name, *rest = act
        if what == "asks":
            prompt, most, more = rest
            sampling = vllm.SamplingParams(
                temperature=0, max_tokens=most, ignore_eos=True, detokenize=False, stop_token_ids=[STOP], **more
            )
            request = Request(
                name,
                list(prompt),
                sampling,
                None,
                client_index=len(prompt) % 2,
                priority=len(prompt) % 3,
                arrival_time=float(name),
                block_hasher=self.hasher,
            )
            self.scheduler.add_request(request)
        elif what == "leaves":
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        else:
            self.scheduler.reset_prefix_cache()

    def step(self, seed: int, *, throttled: bool) -> list[Any]:
        """What the step's output says, what comes of the one that ends, and how things stand."""
        output = self.scheduler.schedule(throttled)
        told: list[Any] = copy.deepcopy(said_to_workers(output))
        ends = {
            name: self.scheduler.requests[name].num_computed_tokens
            for name in output.num_scheduled_tokens
            if not self.scheduler.requests[name].is_prefill_chunk
        }
        self.flight.append((output, ends))
        if len(self.flight) > self.ahead or not output.num_scheduled_tokens:
            first, ends = self.flight.popleft()
            names = list(first.num_scheduled_tokens)
            tokens = [[token_at(name, ends[name], seed)] if name in ends else [] for name in names]
            came = self.scheduler.update_from_output(first, answer_to(first, tokens))
            told += [
                (client, [asdict(one) for one in outputs.outputs], outputs.finished_requests)
                for client, outputs in sorted(came.items())
            ]
        stands = self.scheduler
        usage = stands.kv_cache_manager.usage
        counters = [getattr(stands, name, None) for name in COUNTERS]
        counters += [[getattr(one, name) for name in OF_REQUESTS] for one in stands.requests.values()]
        return [*told, len(stands.running), len(stands.waiting), usage, *counters]


def token_at(name: str, place: int, seed: int) -> int:
    """One in sixty ends its request, one in thirty is the one before it."""
    token = Random(f"{name} {place} {seed}").randrange(60)
    return STOP if token == 0 else 8 + token // 2


def acts_of(random: Random, prompts: list[list[int]], live: Sequence[str]) -> list[tuple[Any, ...]]:
    """What happens before a step."""
    acts: list[tuple[Any, ...]] = []
    if len(prompts) < REQUESTS and (not live or random.random() < 0.06):
        prompt = [random.randrange(500) for _ in range(random.randrange(1, 150))]
        if prompts and random.random() < 0.5:
            head = random.choice(prompts)
            prompt = head[: random.randrange(1, len(head) + 1)] + prompt[:20]
        more = random.choice([{}, {}, {}, {"logprobs": 1}, {"repetition_detection": REPEATS}, {"min_tokens": 2}])
        acts.append(("asks", str(len(prompts)), prompt, random.choice([2, 3, 40, 90, 150]), more))
        prompts.append(prompt)
    if live and random.random() < 0.01:
        acts.append(("leaves", random.choice(live)))
    if random.random() < 0.005:
        acts.append(("forgets", ""))
    return acts


def duel(core: Any, kinds: tuple[Any, Any], ahead: int, seed: int, *, beside_stock: bool) -> None:  # noqa: ANN401
    """SystemExit where the two differ."""
    random = Random(seed)
    limits, (stock, mine) = Limits.of(random), kinds
    sides = [
        Side(stock if beside_stock else mine, core, ahead, limits, goes_without=True),
        Side(mine, core, ahead, limits, goes_without=False),
    ]
    prompts = list[list[int]]()
    for step in range(STEPS):
        live = sorted(sides[0].scheduler.requests)
        acts = acts_of(random, prompts, live)
        told, throttled = [], random.random() < 0.1
        for side in sides:
            for act in acts:
                side.does(act)
            told.append(side.step(seed, throttled=throttled))
        if told[0] != told[1]:
            other = "stock" if beside_stock else "without our own loops"
            raise SystemExit(f"seed {seed}, step {step}, {limits}: {other}\n{told[0]}\nours\n{told[1]}")
        if not live and len(prompts) == REQUESTS:
            break
    sides[1].scheduler.kv_cache_manager.cache.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=scheduling.MODELS, choices=scheduling.MODELS)
    parser.add_argument("--seeds", type=int, default=40)
    asked = parser.parse_args()
    vars(ours).update(decode=counted, take_tokens=taken)
    say("| model | steps | compared with | seeds | decoding alone | beside the loop | loop | tokens at once | loop |")
    say("|---|---|---|--:|--:|--:|--:|--:|--:|")
    for match in (match for match in MATCHES if match.name in asked.models):
        core, _engine = engine_core(match, 64)
        core.scheduler.vllm_config.scheduler_config.max_num_batched_tokens = 64
        beside_stock = match.name != "granite_hybrid"
        for title, kinds in KINDS.items():
            MADE.clear()
            TAKEN.clear()
            for seed in range(asked.seeds):
                duel(core, kinds, int("ahead" in title), seed, beside_stock=beside_stock)
            if not (MADE["alone"] and MADE["beside"] and TAKEN[True]):
                raise SystemExit("decode scheduled no request, or take_tokens took no token")
            beside = "stock" if beside_stock else "ours without"
            steps = " | ".join(f"{MADE[how]:,}" for how in ("alone", "beside", "loop"))
            counts = f"{steps} | {TAKEN[True]:,} | {TAKEN[False]:,}"
            say(f"| tiny:{match.name} | {title} | {beside} | {asked.seeds} | {counts} |")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads and groups are of no use any longer
