"""Measure how long it takes to send Steps to another process, and the bytes of one Step of 1,024 decoding rows.

    python benchmarks/steps_on_the_wire.py

CPU time of one thread, the median over decode steps of a real scheduler. "in process" is the time of the Step itself:
schedule and update, with a made-up token for every row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np

from hybridkv.cache import KVCacheManager
from hybridkv.models import read_model
from hybridkv.planner import plan
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, Step, StepResult
from hybridkv.wire import decode_reply, decode_step, encode_reply, encode_step

ROWS: Final = 1024
STEPS: Final = 200
MODELS: Final = (("llama-3-8b", "natural"), ("qwen3-next-80b-a3b", "natural"), ("qwen3-next-80b-a3b", "reference"))

A = TypeVar("A")
T = TypeVar("T")


def scheduler(name: str, layout: str) -> Scheduler:
    """One that has admitted ROWS requests of 64 tokens and computed their prompts."""
    config = plan(read_model(name), memory="800GiB", max_model_len=4096, layout=layout).config
    cache = KVCacheManager(config, max_model_len=4096)
    made = Scheduler(cache, SchedulerLimits(max_running=ROWS, max_batched_tokens=64 * ROWS))
    sampling = SamplingParams(max_tokens=2000)
    for number in range(ROWS):
        made.add(Request(f"request-{number}", [number] * 64, sampling, hasher=cache.hasher))
    while made.num_waiting or int(made.cache.rows.num_computed[:ROWS].min()) < 64:
        step = made.schedule()
        made.update(result_of(step))
    return made


def result_of(step: Step) -> StepResult:
    """Return a token for every row that samples."""
    indptr = np.zeros(len(step) + 1, np.int64)
    np.cumsum(step.samples, out=indptr[1:])
    return StepResult(step.id, Csr(indptr, np.full(int(indptr[-1]), 7, np.int32)))


def timed(seconds: list[float], call: Callable[[A], T], argument: A) -> T:
    """Return the result of ``call``, and add its time to ``seconds``."""
    begun = time.thread_time_ns()
    made = call(argument)
    seconds.append((time.thread_time_ns() - begun) / 1e9)
    return made


def main() -> None:
    """Print a line a model."""
    columns = ("in process", "encode", "decode", "encode reply", "decode reply")
    print(f"{'1,024 rows, us':<34}" + "".join(f"{name:>14}" for name in columns) + f"{'Step':>12}{'reply':>10}")
    for name, layout in MODELS:
        sched = scheduler(name, layout)
        times: dict[str, list[float]] = {column: [] for column in columns}
        sizes = []
        for _ in range(STEPS):
            own: list[float] = []
            data = timed(times["encode"], encode_step, timed(own, Scheduler.schedule, sched))
            result = result_of(timed(times["decode"], decode_step, data))
            reply = timed(times["encode reply"], encode_reply, result)
            timed(times["decode reply"], decode_reply, reply)
            timed(own, sched.update, result)
            times["in process"].append(sum(own))
            sizes.append((len(data), len(reply)))
        numbers = "".join(f"{statistics.median(times[column]) * 1e6:>14.0f}" for column in columns)
        step_bytes, reply_bytes = (statistics.median(one) for one in zip(*sizes, strict=True))
        print(f"{name + ', ' + layout:<34}{numbers}{step_bytes:>10,.0f} B{reply_bytes:>8,.0f} B")


if __name__ == "__main__":
    main()
