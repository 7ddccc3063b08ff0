"""vLLM's scheduler and ours on the same loads with little memory, until every request is finished.

    python tests/vllm/pressure_duel.py --loads 50 --csv docs/data/vllm-pressure.csv

No forwards: an output token depends only on its request and its place, so all schedulers write the same texts. A load
draws its policy, chunked prefill, tokens of a step, memory, arrivals, shared heads, second turns and output lengths
from its seed. Each scheduler runs a load on its own: decisions differ, so steps cannot be compared one by one. The
natural layout gets as many bytes as stock's blocks take. Fails if a model is never preempted, if ours preempts more
often in total, or hits fewer tokens, than stock, or if no waiting request is expected, or overtaken. See
docs/design/0036.
"""

import argparse
import copy
import csv
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

from generate_duel import Match, say
from scheduling import answer_to, scheduler_of
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler as Stock
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

import vllm
from hybridkv.runner import tiny_model
from hybridkv.vllm.scheduler import NaturalScheduler, Scheduler

LENGTH, BLOCK, RUNNING, DRAFTS = 1024, 32, 64, 3
MOST_STEPS = 20_000
MODELS = (
    Match("granite_hybrid", {"hidden_size": 128, "mamba_n_groups": 1}, {}),
    Match("qwen3_next", {"head_dim": 32}, {}),
    Match("gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32}, {}),
    Match("mistral", {"head_dim": 32}, {}),
    Match("llama", {"head_dim": 32}, {}),
)
WITH_STATES = ("granite_hybrid", "qwen3_next")
NATURAL = {
    "scheduler_cls": "hybridkv.vllm.NaturalScheduler",
    "worker_cls": "hybridkv.vllm.NaturalWorker",
    "enable_prefix_caching": False,
}
PROMPT_LOOKUP = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3},
    "async_scheduling": False,
}
COLUMNS = (
    "steps",
    "preemptions",
    "hit tokens",
    "computed tokens",
    "mean steps of waiting",
    "longest of each load",
    "mean steps in all",
)


class Ask(NamedTuple):
    """A request of a load. ``step``: it arrives before this step."""

    step: int
    prompt: list[int]
    output: int
    priority: int


@dataclass(frozen=True, slots=True)
class Load:
    """A random load. ``tokens``: most of a step. ``share``: its memory, in requests of the longest length."""

    seed: int
    asks: Sequence[Ask]
    policy: str
    chunked: bool
    tokens: int
    share: float

    @classmethod
    def of(cls, seed: int) -> "Load":
        """Return the load of a seed."""
        random = Random(f"load {seed}")
        heads = [some(random, random.randrange(64, 320)) for _ in range(random.choice([1, 3, 8]))]
        gap, longest = random.choice([0, 1, 4, 10]), random.choice([60, 150, 300])
        asks, step = list[Ask](), 0
        for _ in range(random.choice([30, 60])):
            step += random.randrange(2 * gap + 1)
            if asks and random.random() < 0.3:  # the next turn of an earlier request
                at = random.randrange(len(asks))
                before = asks[at]
                first = len(before.prompt)
                said = [token_at(at, place, seed) for place in range(first, first + before.output)]
                prompt = before.prompt + said + some(random, random.randrange(1, 60))
            else:
                prompt = random.choice(heads) + some(random, random.randrange(1, 250))
            output = random.randrange(1, longest)
            asks.append(Ask(step, prompt[: LENGTH - output - 1], output, random.randrange(3)))
        chunked = random.random() < 0.7
        policy = random.choice(["fcfs", "priority"])
        tokens = random.choice([128, 256, 512]) if chunked else LENGTH
        return cls(seed, asks, policy, chunked, tokens, random.uniform(1.5, 5))

    def configure(self, core: Any) -> None:  # noqa: ANN401 - vLLM's
        """Set the options of the load in the engine's config."""
        given = core.scheduler.vllm_config.scheduler_config
        given.policy, given.enable_chunked_prefill = self.policy, self.chunked
        given.max_num_batched_tokens, given.max_num_scheduled_tokens = self.tokens, None

    def memory(self, core: Any) -> tuple[int, int]:  # noqa: ANN401 - vLLM's
        """Return the number of stock's blocks, and their bytes."""
        self.configure(core)
        config, started = core.scheduler.kv_cache_config, core.scheduler.vllm_config
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        whole = sum(-(-spec.max_memory_usage_bytes(started) // spec.page_size_bytes) for spec in specs)
        blocks = int(self.share * whole) + 1
        return blocks, blocks * next(iter(config.kv_cache_tensors)).size // config.num_blocks


def some(random: Random, count: int) -> list[int]:
    return [random.randrange(8, 500) for _ in range(count)]


def token_at(number: int, place: int, seed: int) -> int:
    """Return the token of a request; numbers have the same hash in every process."""
    return 8 + hash((number, place, seed)) % 492


@dataclass
class Counts:
    """What comes of loads, added up.

    hits: tokens that first admissions found. computed: tokens of all steps. waited: steps from arrival to the first
    admission. longest: of one request, added up over the loads. took: steps from arrival to the end. expected: waiting
    requests whose prefixes go last, and overtaken: those that others overtook, over all steps.
    """

    steps: int = 0
    preemptions: int = 0
    hits: int = 0
    computed: int = 0
    waited: int = 0
    longest: int = 0
    took: int = 0
    expected: int = 0
    overtaken: int = 0

    def __iadd__(self, other: "Counts") -> Self:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        return self

    def cells(self, requests: int) -> list[str]:
        whole = (self.steps, self.preemptions, self.hits, self.computed)
        means = [f"{one / requests:.1f}" for one in (self.waited, self.took)]
        return [*(f"{one:,}" for one in whole), means[0], f"{self.longest:,}", means[1]]


class Side:
    """A scheduler on a load. ``blocks``: stock's, of ``size`` bytes together."""

    def __init__(self, kind: Any, core: Any, load: Load, blocks: int, size: int) -> None:  # noqa: ANN401 - of vLLM
        load.configure(core)
        config = copy.copy(core.scheduler.kv_cache_config)
        config.num_blocks = core.scheduler.vllm_config.cache_config.num_gpu_blocks = blocks
        config.kv_cache_tensors = [replace(one, size=size) for one in config.kv_cache_tensors]
        self.scheduler = scheduler_of(kind, core, config)
        self.load, self.hasher, self.counts = load, core.request_block_hasher, Counts()
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            self.counts.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def play(self) -> Counts:
        """Run the load to its end. SystemExit if it has none, or if blocks are in use after it."""
        due, counts = deque(enumerate(self.load.asks)), self.counts
        while due or self.scheduler.requests:
            while due and due[0][1].step <= counts.steps:
                self.add(*due.popleft())
            self.step()
            counts.steps += 1
            if counts.steps > MOST_STEPS:
                raise SystemExit(f"load {self.load.seed} never ends: {len(self.scheduler.requests)} requests are left")
        if self.scheduler.kv_cache_manager.usage:
            raise SystemExit(f"load {self.load.seed}: blocks are in use after the last request")
        of, waiting = self.scheduler.kv_cache_manager, self.scheduler.waiting
        for holder, name in ((of, "_expected"), (of, "_hits"), (waiting, "_overtaken")):
            if getattr(holder, name, ()):
                raise SystemExit(f"load {self.load.seed}: {name} has requests after the last one")
        return counts

    def add(self, number: int, ask: Ask) -> None:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=ask.output, ignore_eos=True, detokenize=False)
        more = {"arrival_time": float(number), "block_hasher": self.hasher, "priority": ask.priority}
        self.scheduler.add_request(Request(str(number), list(ask.prompt), sampling, None, **more))

    def step(self) -> None:
        scheduler, counts, asks = self.scheduler, self.counts, self.load.asks
        output = scheduler.schedule()
        for one in output.scheduled_new_reqs:
            counts.hits += one.num_computed_tokens
            waited = counts.steps - asks[int(one.req_id)].step
            counts.waited, counts.longest = counts.waited + waited, max(counts.longest, waited)
        counts.computed += output.total_num_scheduled_tokens
        counts.expected += len(getattr(scheduler.kv_cache_manager, "_expected", ()))
        counts.overtaken += len(getattr(scheduler.waiting, "_overtaken", ()))
        sampled, ends = list[list[int]](), dict[str, int]()
        for name in output.num_scheduled_tokens:
            request = scheduler.requests[name]
            if request.is_prefill_chunk:
                sampled.append([])
                continue
            drafts = output.scheduled_spec_decode_tokens.get(name, ())
            first = request.num_computed_tokens - len(drafts)
            sampled.append(self.right(int(name), first, drafts))
            ends[name] = first + len(sampled[-1])
        came = scheduler.update_from_output(output, answer_to(output, sampled))
        if scheduler.num_spec_tokens:
            guesses = {name: self.guess(int(name), end) for name, end in ends.items() if name in scheduler.requests}
            scheduler.update_draft_token_ids(DraftTokenIds(list(guesses), list(guesses.values())))
        for outputs in came.values():
            ended = (int(one.request_id) for one in outputs.outputs if one.finish_reason is not None)
            counts.took += sum(counts.steps - asks[number].step for number in ended)

    def right(self, number: int, first: int, drafts: Sequence[int]) -> list[int]:
        """Return the tokens from place ``first`` on: those of the right drafts, and the one after them."""
        tokens = [token_at(number, first, self.load.seed)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(token_at(number, first + len(tokens), self.load.seed))
        return tokens

    def guess(self, number: int, first: int) -> list[int]:
        """Return up to DRAFTS tokens from place ``first`` on. Three of five are right."""
        random = Random(f"{number} {first} {self.load.seed}")
        places = range(first, first + random.randrange(DRAFTS + 1))
        return [token_at(number, place, self.load.seed) if random.random() < 0.6 else 7 for place in places]


def core_of(match: Match, **options: Any) -> tuple[Any, Any]:  # noqa: ANN401 - vLLM's
    """Return the core of an engine of the model, and the engine: with it goes what the core knows."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "model"
        tiny_model(match.name, 0, match.fields).save_pretrained(folder)
        given = {"dtype": "float32", "max_model_len": LENGTH, "block_size": BLOCK, "enable_prefix_caching": True}
        given |= {"max_num_seqs": RUNNING, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 512, **options}
        engine = vllm.LLM(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, **given)
    # with drafts, vLLM's CPU platform fails when a second engine of a process registers its kernels again
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    return engine.llm_engine.engine_core.engine_core, engine


def play(match: Match, loads: Sequence[Load], *, drafts: bool, each: bool) -> dict[str, Counts]:
    """Return the totals of each scheduler over all loads of a model."""
    more = PROMPT_LOOKUP if drafts else {}
    core, engine = core_of(match, **more)
    sides, engines = {"stock": (Stock, core), "reference": (Scheduler, core)}, [engine]
    if not (drafts and match.name in WITH_STATES):
        natural, engine = core_of(match, **more, **NATURAL)
        sides["natural"] = NaturalScheduler, natural
        engines.append(engine)
    totals = {title: Counts() for title in sides}
    for load in loads:
        memory = load.memory(core)
        for title, (kind, of) in sides.items():
            found = Side(kind, of, load, *memory).play()
            totals[title] += found
            if each:
                about = f"{match.name} {load.seed} {load.policy} {load.tokens} {load.chunked}"
                say(f"| {about} | {title} | {' | '.join(found.cells(len(load.asks)))} |")
    return totals


def faults(name: str, totals: dict[str, Counts]) -> Iterator[str]:
    """Yield what is worse than stock's, and models that nobody pressed."""
    stock = totals["stock"]
    for title, found in totals.items():
        if not found.preemptions:
            yield f"{name}, {title}: no request was preempted"
        if found.preemptions > stock.preemptions:
            yield f"{name}, {title}: {found.preemptions} preemptions, stock has {stock.preemptions}"
        if found.hits < stock.hits:
            yield f"{name}, {title}: {found.hits} hit tokens, stock has {stock.hits}"
        if title != "stock" and not found.expected:
            yield f"{name}, {title}: no waiting request was expected"
        if title != "stock" and not found.overtaken:
            yield f"{name}, {title}: no waiting request was overtaken"


def main() -> int:
    names = [match.name for match in MODELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--loads", type=int, default=50)
    parser.add_argument("--each", action="store_true", help="print each load, too")
    parser.add_argument("--drafts", action="store_true", help="with prompt lookup")
    parser.add_argument("--csv", type=Path, help="write the table to this file, model by model")
    asked = parser.parse_args()
    loads = [Load.of(seed) for seed in range(asked.loads)]
    requests = sum(len(load.asks) for load in loads)
    rows, wrong = [["model", "scheduler", *COLUMNS]], list[str]()
    say(f"| {' | '.join(rows[0])} |")
    say("|---|---|" + "--:|" * len(COLUMNS))
    for match in (match for match in MODELS if match.name in asked.models):
        totals = play(match, loads, drafts=asked.drafts, each=asked.each)
        for title, found in totals.items():
            rows.append([f"tiny:{match.name}", title, *found.cells(requests)])
            say(f"| {' | '.join(rows[-1])} |")
        wrong += faults(match.name, totals)
        if asked.csv is not None:
            with asked.csv.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)
    for line in wrong:
        say(line)
    return int(bool(wrong))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's threads and groups are of no use any longer
