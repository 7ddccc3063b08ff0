"""Estimate the most hits that an eviction finds in the reference layout, in the documents of ``bench_vllm.py``.

    PYTHONPATH=src:tests/vllm VLLM_PYTHON benchmarks/vllm_foreseen.py      VLLM_PYTHON: the Python of vLLM

    stock       hits of stock's scheduler; no forward pass runs
    foreseen    hits of this library's scheduler with an eviction that knows all later requests
    frequent    hits with an eviction that knows how often each document is asked about, but not when
    endless     its hits in memory for everything

The foreseen hits are an estimate, as in ``belady.py``: the best choice of resume points is a knapsack over time. The
value of a resume point is the tokens that it saves per byte, divided by the requests until its next use; where only
frequencies are known, multiplied by its uses in the whole load. Each question chooses its document independently, and
then no eviction without knowledge of the future hits more in the long run than one that keeps the most frequent entries
(Coffman and Denning, Operating Systems Theory, 1973, for entries of one size). Resume points are also kept where later
prompts diverge, if their states exist.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import islice, pairwise, product
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from bench_vllm import STOCK, VARIANTS, Variant, options_of
from scheduling import answer_to, scheduler_of
from vllm.v1.core.sched.scheduler import Scheduler as Stock
from vllm.v1.request import Request
from vllm_loads import LOADS, MIB, SHAPES, Load

import vllm
from hybridkv.eviction import HAZARD
from hybridkv.eviction.hazard import HazardRanking
from hybridkv.eviction.resume_points import ResumePoint, children_of
from hybridkv.runner import tiny_model
from hybridkv.vllm.natural import ReferenceOptions
from hybridkv.vllm.scheduler import Scheduler

Worth = Callable[[AbstractSet[int], Collection[int]], float]


def soon(users: AbstractSet[int], left: Collection[int]) -> float:
    """Return 1 / the requests until the first of ``users`` begins, 0 without one. ``left`` are the next, in order."""
    return 1 / next((place for place, number in enumerate(left, 1) if number in users), float("inf"))


def often(users: AbstractSet[int], left: Collection[int]) -> float:  # noqa: ARG001 - the signature of a worth
    """Return the uses of a point after the first one, which computes its tokens."""
    return max(0, len(users) - 1)


class Foreseen(HazardRanking):
    """A ranking that knows ``prompts``. ``worth`` rates those that resume at a point; hits end at ``unit`` tokens."""

    def __init__(self, prompts: Sequence[Request], unit: int, worth: Worth) -> None:
        super().__init__()
        self._worth = worth
        self._prompts, self._unit, self._ranked = prompts, unit, dict[int, ResumePoint]()
        self._left = dict.fromkeys(range(len(prompts)))  # those that have not begun, in order
        self._uses = defaultdict[bytes, set[int]](set)  # by the key of a hash block, the prompts that resume after it
        for number, prompt in enumerate(prompts):
            for key in prompt.block_hashes[: (prompt.num_prompt_tokens - 1) // unit]:
                self._uses[key].add(number)

    def add(self, point: ResumePoint, now: float) -> None:  # noqa: ARG002 - the signature of a ranking
        """Rank ``point``."""
        self._ranked[point.serial] = point

    def remove(self, point: ResumePoint) -> None:
        """Rank ``point`` no longer."""
        del self._ranked[point.serial]

    def lowest(self, now: float) -> ResumePoint | None:
        """Return the least valuable point. O(ranked points * requests)."""
        return min(self._ranked.values(), key=lambda one: (self.value(one, now), one.used, one.serial), default=None)

    def value(self, point: ResumePoint, now: float) -> float:  # noqa: ARG002 - as above
        """Return the tokens per byte that ``point`` saves, times the worth of the prompts that resume there."""
        deeper = {number for child in children_of(point) for number in self._uses[child.chain]}
        mine = self._uses[point.chain] - deeper
        return point.saved * self._worth(mine, self._left)

    def follow(self, policy: Any) -> None:  # noqa: ANN401 - patched
        """Note which requests begin under ``policy``, and keep resume points where later prompts diverge."""
        begin, keep = policy.begin, policy.keep

        def noted(request: Any, hit_tokens: int) -> None:  # noqa: ANN401 - EngineRequest or Request
            self._left.pop(int(request.request_id), None)
            begin(request, hit_tokens)

        def kept(request: Any, tokens: int, states: Sequence[int], *, ended: bool) -> None:  # noqa: ANN401 - as above
            keys = self._prompts[int(request.request_id)].block_hashes[: tokens // self._unit]
            sharers = [len(self._left.keys() & self._uses[key]) for key in keys]
            for place, (count, after) in enumerate(pairwise(sharers), 1):
                if count > after:
                    keep(request, place * self._unit, (), ended=False)
            keep(request, tokens, states, ended=ended)

        policy.begin, policy.keep = noted, kept


def play(kind: Any, blocks: int, worth: Worth, core: Any, load: Load) -> float:  # noqa: ANN401 - vLLM's
    """Return the hits of ``load``, conversations of one turn, in a scheduler of ``kind`` for the engine of ``core``."""
    prompts = list[Request]()
    for number, (turn,) in enumerate(load.conversations):
        asked = vllm.SamplingParams(temperature=0, max_tokens=turn.output, ignore_eos=True, detokenize=False)
        prompts.append(Request(f"{number}", list(turn.tokens), asked, None, block_hasher=core.request_block_hasher))
    ranking = Foreseen(prompts, core.scheduler.hash_block_size, worth)
    with patch.object(ReferenceOptions, "chosen", lambda *_, **__: replace(HAZARD, ranking=lambda: ranking)):
        scheduler = scheduler_of(kind, core, replace(core.scheduler.kv_cache_config, num_blocks=blocks))
    if kind is Scheduler:
        ranking.follow(scheduler.kv_cache_manager.cache.eviction_policy)
    waiting, hits, more = iter(prompts), 0, load.at_once
    while more or scheduler.requests:
        for prompt in islice(waiting, more):
            scheduler.add_request(prompt)
        output = scheduler.schedule()
        hits += sum(one.num_computed_tokens for one in output.scheduled_new_reqs)
        tokens = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in output.num_scheduled_tokens]
        answers = scheduler.update_from_output(output, answer_to(output, tokens)).values()
        more = sum(one.finish_reason is not None for some in answers for one in some.outputs)
    return float(hits / sum(prompt.num_prompt_tokens for prompt in prompts))


def measure(load: Load, variant: Variant) -> None:
    """Print the line of ``load`` with the options of ``variant``."""
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # vLLM would prefer it to the memory of the load
    shape = SHAPES[load.shape]
    with TemporaryDirectory() as name:
        tiny_model(shape.family, 0, shape.fields).save_pretrained(name)
        options = options_of(variant, shape, load.memory)
        engine = vllm.LLM(model=name, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", **options)
    core = engine.llm_engine.engine_core.engine_core
    blocks = core.scheduler.kv_cache_config.num_blocks
    kinds = ((Stock, blocks, soon), (Scheduler, blocks, soon), (Scheduler, blocks, often), (Scheduler, 4096, soon))
    hits = [play(kind, count, worth, core, load) for kind, count, worth in kinds]
    print(load.shape, load.memory // MIB, variant.name, *(f"{one:.1%}" for one in hits), sep=",", flush=True)
    os._exit(0)  # vLLM's threads and groups are of no use any longer


if __name__ == "__main__":
    print("model,memory,variant,stock,foreseen,frequent,endless", flush=True)
    loads = (one for one in LOADS if one.name == "documents" and one.is_pressed)
    for load, variant in product(loads, (one for one in VARIANTS if one.name.startswith(STOCK))):
        if not variant.has_unit or SHAPES[load.shape].unit is not None:
            process = get_context("spawn").Process(target=measure, args=(load, variant))  # an engine for each
            process.start()
            process.join()
