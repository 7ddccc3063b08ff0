"""Processor time of vLLM's scheduler and ours without forwards: of short requests, busy servers, and evictions.

    python tests/vllm/cpu_costs.py [--models llama gemma3] [--rows 1 8] [--outputs 1 32] [--running 64] [--loads 20]
                                    [--cold 40]

Requests of 430 tokens, of which other requests had the first 400, ask for ``outputs`` tokens, ``rows`` in each step.
The memory is full, so each evicts something. The schedulers take turns. Prints microseconds of a request from its
construction, which hashes its blocks, to its last output, the median of 200 rounds; and the Python and C calls of a
request, which do not depend on the machine. Then ``running`` requests decode, and in each step one ends and another one
is admitted: microseconds of a step. Last ``hazard`` and ``lru`` run loads of pressure_duel in the reference
layout, in turns: the median over the loads of what a step takes, one divided by the other. See docs/design/0036.

With ``--cold``, so many MiB are written before each call of a scheduler. Then the processor's caches hold none of its
code and data, as after a forward pass.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator
from itertools import product
from random import Random
from statistics import median
from types import FrameType
from typing import Any

import numpy as np
from generate_duel import Match, say
from pressure_duel import MODELS, NATURAL, Load, core_of
from pressure_duel import Side as Pressed
from scheduling import answer_to, scheduler_of
from vllm.v1.core.sched.scheduler import Scheduler as Stock
from vllm.v1.request import Request

import vllm
from hybridkv.vllm.scheduler import NaturalScheduler, Scheduler

SHARED, OWN, WARM, ROUNDS, COUNTED = 400, 30, 60, 200, 20
PROMPT, STEPS = 40, 400
"""Of the requests of a busy server: tokens of a prompt, and steps that are measured after a quarter as many."""
written = np.zeros(0)
"""The memory of ``--cold``."""


def timed(call: Any, *given: object) -> tuple[Any, float]:  # noqa: ANN401 - a method of a scheduler
    """Return the result of ``call`` and its processor seconds. The memory of ``--cold`` is written first."""
    np.add(written, 1, out=written)
    began = time.thread_time()
    result = call(*given)
    return result, time.thread_time() - began


class Side:
    """A scheduler, with ``rows`` requests of ``outputs`` tokens in each step. took: us of a request, by round."""

    def __init__(self, kind: Any, core: Any, rows: int, outputs: int, eviction: str = "") -> None:  # noqa: ANN401 - of vLLM
        core.scheduler.vllm_config.additional_config = {"hybridkv": {"eviction": eviction}} if eviction else {}
        self.scheduler, self.hasher, self.rows = scheduler_of(kind, core), core.request_block_hasher, rows
        self.outputs, self.number, self.took = outputs, 0, list[float]()
        self._shared = [[(17 * row + 5 + 3 * place) % 500 for place in range(SHARED)] for row in range(rows)]
        self._random = Random(0)  # own tokens that came again would be learnt as a prefix

    def prompts(self) -> list[list[int]]:
        """Return the prompts of the next round."""
        return [shared + self._random.choices(range(500), k=OWN) for shared in self._shared]

    def round(self, prompts: list[list[int]]) -> None:
        """Run the requests of ``prompts`` to their end."""
        began = time.thread_time()
        for prompt in prompts:
            self.scheduler.add_request(self._request(prompt, self.outputs))
        spent = time.thread_time() - began
        while self.scheduler.requests:
            output, took = timed(self.scheduler.schedule)
            spent += took
            ends = [not self.scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens]
            answer = answer_to(output, [[7] if one else [] for one in ends])
            spent += timed(self.scheduler.update_from_output, output, answer)[1]
        self.took.append(1e6 * spent / self.rows)

    def _request(self, prompt: list[int], outputs: int) -> Request:
        self.number += 1
        asked = vllm.SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        return Request(f"{self.number}", prompt, asked, None, block_hasher=self.hasher)

    def fill(self) -> None:
        """Add ``rows`` requests with new prompts, of which one ends in each step."""
        self.scheduler.max_num_active_reqs = self.rows
        for outputs in range(2, self.rows + 2):
            self._add(outputs)

    def _add(self, outputs: int) -> None:
        self.scheduler.add_request(self._request(self._random.choices(range(500), k=PROMPT), outputs))

    def step(self) -> None:
        """Run a step, and add a request for each that ends."""
        output, spent = timed(self.scheduler.schedule)
        requests = self.scheduler.requests
        answer = answer_to(
            output, [[] if requests[name].is_prefill_chunk else [7] for name in output.num_scheduled_tokens]
        )
        came, took = timed(self.scheduler.update_from_output, output, answer)
        self.took.append(1e6 * (spent + took))
        for one in (one for outputs in came.values() for one in outputs.outputs):
            if one.finish_reason is not None:
                self._add(self.rows)

    def calls(self) -> float:
        """Return the calls of a request, those of this file included."""
        seen = 0

        def count(frame: FrameType, event: str, argument: object) -> None:  # noqa: ARG001 - as sys.setprofile calls it
            nonlocal seen
            seen += event == "c_call" or (event == "call" and frame.f_code is not timed.__code__)

        for _ in range(COUNTED):
            prompts = self.prompts()
            sys.setprofile(count)
            self.round(prompts)
            sys.setprofile(None)
        return seen / COUNTED / self.rows


def sides_of(match: Match, rows: int, outputs: int) -> tuple[dict[str, Side], object]:
    """Return the schedulers by title, and the engines that keep what the schedulers know."""
    core, engine = core_of(match)
    natural, other = core_of(match, **NATURAL)
    sides = {
        "stock": Side(Stock, core, rows, outputs),
        "reference, lru": Side(Scheduler, core, rows, outputs, "lru"),
        "reference, hazard": Side(Scheduler, core, rows, outputs, "hazard"),
        "natural, lru": Side(NaturalScheduler, natural, rows, outputs, "lru"),
        "natural, hazard": Side(NaturalScheduler, natural, rows, outputs, "hazard"),
    }
    return sides, (engine, other)


def rows_of(match: Match, rows: int, outputs: int) -> Iterator[str]:
    """Yield a line of the table for each scheduler."""
    sides, engines = sides_of(match, rows, outputs)
    gc.disable()
    for _ in range(WARM + ROUNDS):
        for side in sides.values():
            side.round(side.prompts())
    gc.enable()
    stock = median(sides["stock"].took[WARM:])
    for title, side in sides.items():
        took = median(side.took[WARM:])
        of_stock = f"{took:,.0f} | {took / stock:.2f} | {side.calls():,.0f}"
        yield f"| tiny:{match.name} | {rows} | {outputs} | {title} | {of_stock} |"
    del engines


def server_of(match: Match, running: int) -> Iterator[str]:
    """Yield a line for each scheduler: of a step in which a request is admitted and the others decode."""
    sides, engines = sides_of(match, running, running)
    gc.disable()
    for side in sides.values():
        side.fill()
    for _ in range(STEPS + STEPS // 4):
        for side in sides.values():
            side.step()
    gc.enable()
    stock = sides["stock"].took[-STEPS:]
    for title, side in sides.items():
        took = side.took[-STEPS:]
        ratio = median(mine / theirs for mine, theirs in zip(took, stock, strict=True))
        yield f"| tiny:{match.name} | a step, {running} running | | {title} | {median(took):,.0f} | {ratio:.2f} | |"
    del engines


def step_of(core: Any, load: Load, memory: tuple[int, int], eviction: str) -> float:  # noqa: ANN401 - of vLLM
    """Return the seconds of a step of ``load``, the arrivals and answers of its requests left out."""
    core.scheduler.vllm_config.additional_config = {"hybridkv": {"eviction": eviction}}
    side, spent = Pressed(Scheduler, core, load, *memory), 0.0

    def counted(call: Any) -> Any:  # noqa: ANN401 - a method of the scheduler
        def run(*given: object) -> object:
            nonlocal spent
            result, took = timed(call, *given)
            spent += took
            return result

        return run

    for name in ("schedule", "update_from_output"):
        setattr(side.scheduler, name, counted(getattr(side.scheduler, name)))
    steps = side.play().steps
    return spent / steps


def evictions_of(match: Match, loads: int) -> str:
    """Return the line of ``hazard`` divided by ``lru``."""
    core, engine = core_of(match)
    ratios = []
    gc.disable()
    for seed in range(loads):
        load = Load.of(seed)
        memory, order = load.memory(core), ("lru", "hazard") if seed % 2 else ("hazard", "lru")
        took = {eviction: step_of(core, load, memory, eviction) for eviction in order}
        ratios.append(took["hazard"] / took["lru"])
    gc.enable()
    del engine
    return f"| tiny:{match.name} | under pressure | | hazard / lru | | {median(ratios):.2f} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama", "granite_hybrid"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--outputs", nargs="*", type=int, default=[1])
    parser.add_argument("--running", nargs="*", type=int, default=[64])
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--cold", type=int, default=0, metavar="MIB")
    asked = parser.parse_args()
    written.resize(asked.cold << 17, refcheck=False)  # of 8 bytes
    say("| model | in a step | output tokens | scheduler | us | of stock | calls |\n|---|--:|--:|---|--:|--:|--:|")
    for match in (match for match in MODELS if match.name in asked.models):
        for rows, outputs in product(asked.rows, asked.outputs):
            for line in rows_of(match, rows, outputs):
                say(line)
        for running in asked.running:
            for line in server_of(match, running):
                say(line)
        if asked.loads:
            say(evictions_of(match, asked.loads))
    os._exit(0)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main()
