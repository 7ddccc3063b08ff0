"""Processor time that scheduling takes, a request and step: vLLM's scheduler and ours in turn, no forwards.

    python tests/vllm/scheduling.py --requests 64 256 1024

An engine is started once a model, for its config; then schedulers of either kind run the same requests side by side,
step for step in turn, and are handed made-up outputs: microseconds of schedule() and update_from_output() in each step
that decodes, medians over all steps. Prompts differ in length, so in every step some requests need a block. Prints a
table in Markdown; see docs/design/0036.
"""

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its scheduler's arguments are looked up

from generate_duel import MATCHES, say
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsync
from vllm.v1.core.sched.scheduler import Scheduler as Stock
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

import vllm
from hybridkv.runner import tiny_model
from hybridkv.vllm.scheduler import AsyncScheduler, Scheduler

MODELS = ("llama", "gemma3", "granite_hybrid")
KINDS = {"one step at a time": (Stock, Scheduler), "a step ahead": (StockAsync, AsyncScheduler)}
PROMPT, OUTPUT, BLOCK = 48, 64, 32


def scheduler_of(kind: Any, core: Any, config: Any = None) -> Any:  # noqa: ANN401 - vLLM's
    """A scheduler for the engine of ``core``; config: of its cache, where that is another."""
    made = core.scheduler
    return kind(
        vllm_config=made.vllm_config,
        kv_cache_config=config or made.kv_cache_config,
        structured_output_manager=made.structured_output_manager,
        block_size=made.block_size,
        hash_block_size=made.hash_block_size,
        log_stats=False,
    )


def answer_to(output: Any, tokens: Sequence[Sequence[int]]) -> ModelRunnerOutput:  # noqa: ANN401 - vLLM's
    """What a worker would say: ``tokens`` of each request."""
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [list(one) for one in tokens])


class Side:
    """One scheduler. ahead: steps that are scheduled before the first one's output is in. took: us a decoding step."""

    def __init__(self, kind: Any, core: Any, ahead: int) -> None:  # noqa: ANN401 - vLLM's
        self.scheduler = scheduler_of(kind, core)
        self.hasher, self.ahead = core.request_block_hasher, ahead
        self.flight: deque[Any] = deque()
        self.took: list[float] = []

    def add(self, count: int) -> None:
        asked = vllm.SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
        for number in range(count):
            prompt = [(7 * number + 3 * place) % 500 for place in range(PROMPT - number % BLOCK)]
            self.scheduler.add_request(Request(f"{number}", prompt, asked, None, block_hasher=self.hasher))

    def step(self, count: int) -> tuple[int, list[Any]]:
        """Schedules a step, answers the first one in flight; how many requests it ran, what workers are told."""
        began = time.thread_time()
        output = self.scheduler.schedule()
        scheduled = time.thread_time() - began
        self.flight.append(output)
        if len(self.flight) <= self.ahead and output.num_scheduled_tokens:
            return -1, said_to_workers(output)
        first = self.flight.popleft()
        names = list(first.num_scheduled_tokens)
        # sampled where the prompt is through, as every prompt is within a step here
        answer = answer_to(first, [[int(name) % 500] for name in names])
        began = time.thread_time()
        self.scheduler.update_from_output(first, answer)
        updated = time.thread_time() - began
        if first.total_num_scheduled_tokens == len(names) == count == len(output.num_scheduled_tokens):
            self.took.append(1e6 * (scheduled + updated) / count)
        return len(names), said_to_workers(output)


def said_to_workers(output: Any) -> list[Any]:  # noqa: ANN401 - vLLM's
    """What a step's output says of those that ran before, and of all; new ones by their blocks."""
    told = {one.name: getattr(output, one.name) for one in fields(output) if one.name != "scheduled_new_reqs"}
    old = told.pop("scheduled_cached_reqs")
    new = [(one.req_id, one.block_ids, one.num_computed_tokens) for one in output.scheduled_new_reqs]
    return [new, {one.name: getattr(old, one.name) for one in fields(old)}, told]


def run(core: Any, kinds: tuple[Any, Any], ahead: int, count: int) -> tuple[list[float], list[float]]:  # noqa: ANN401 - vLLM's
    """us a request and decoding step, stock's and ours."""
    sides = [Side(kind, core, ahead) for kind in kinds]
    for side in sides:
        side.add(count)
    going = True
    while going:
        going, heard = False, []
        for side in sides:
            ran, told = side.step(count)
            going |= ran != 0
            heard.append(told)
        if heard[0] != heard[1]:
            raise SystemExit(f"stock's workers would be told\n{heard[0]}\nours\n{heard[1]}")
    stock, ours = sides
    if len(stock.took) != len(ours.took) or not ours.took:
        raise SystemExit(f"{len(stock.took)} decoding steps of stock, {len(ours.took)} of ours")
    return stock.took, ours.took


def engine_core(match: Any, most: int, eviction: str = "lru") -> tuple[Any, Any]:  # noqa: ANN401 - vLLM's
    """Of an engine of that model, for up to ``most`` requests, and that engine: with it goes what the core knows.

    eviction: of our schedulers. Block ids equal those of stock with ``lru`` only.
    """
    with TemporaryDirectory() as name:
        folder = Path(name) / "model"
        tiny_model(match.name, 0, match.fields).save_pretrained(folder)
        options = {"dtype": "float32", "max_model_len": 320, "block_size": BLOCK, **match.options}
        options |= {"max_num_seqs": most, "max_num_batched_tokens": most, "num_gpu_blocks_override": 8 * most}
        options |= {"additional_config": {"hybridkv": {"eviction": eviction}}}
        llm = vllm.LLM(
            model=str(folder), skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=True, **options
        )
    core = llm.llm_engine.engine_core.engine_core
    # whole prompts in one step: of what no forward runs there may be as many tokens
    core.scheduler.vllm_config.scheduler_config.max_num_batched_tokens = PROMPT * most
    return core, llm


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--requests", nargs="+", type=int, default=(64, 256, 1024))
    parser.add_argument("--eviction", default="hazard", help="of our schedulers: hazard, their default, or lru")
    asked = parser.parse_args(arguments)
    say("| model | steps | requests | us a request and step: stock | ours | stock / ours |")
    say("|---|---|--:|--:|--:|--:|")
    for match in (match for match in MATCHES if match.name in asked.models):
        core, _engine = engine_core(match, max(asked.requests), asked.eviction)
        for title, kinds in KINDS.items():
            for count in asked.requests:
                stock, ours = (median(took) for took in run(core, kinds, int(kinds[0] is StockAsync), count))
                say(f"| tiny:{match.name} | {title} | {count:,} | {stock:.2f} | {ours:.2f} | {stock / ours:.2f} |")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads and groups are of no use any longer
