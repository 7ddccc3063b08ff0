"""CPU time of one admission: add a request, schedule its step, and take in the result.

    python admission_cost.py                            microseconds, cold and with a hit, for two models and layouts
    python admission_cost.py --against SRC [--pairs N]  the same and another `src` folder, in N interleaved pairs

A prompt has 1,500 new tokens (cold), or shares all but the last of them with an earlier prompt (hit). Each figure is
the median of 150 requests in one process. A ratio is the median over the pairs of this folder's time divided by the
other's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, plan, read_model
from hybridkv.step import Csr, StepResult

MODELS = ("qwen3-next-80b-a3b", "llama-3-8b")
LAYOUTS = ("natural", "reference")
REQUESTS = 150
Times = dict[str, tuple[float, float]]


def admissions(model: str, layout: str) -> tuple[float, float]:
    """Return the median microseconds of a cold admission and of one with a hit."""
    cache = KVCacheManager(plan(read_model(model), memory="80GiB", max_model_len=8192, layout=layout))
    scheduler = Scheduler(cache, SchedulerLimits(max_running=256, max_batched_tokens=8192))
    cold, hit = list[float](), list[float]()
    gc.disable()
    for number in range(REQUESTS):
        first = number * 3000
        for name, tokens, spent in (
            (f"c{number}", list(range(first, first + 1500)), cold),
            (f"h{number}", [*range(first, first + 1499), 1, 2, 3], hit),
        ):
            request = Request(name, tokens, SamplingParams(max_tokens=1, ignore_eos=True), hasher=cache.hasher)
            begun = time.process_time_ns()
            scheduler.add(request)
            _step(scheduler)
            spent.append((time.process_time_ns() - begun) / 1e3)
            while not scheduler.drained:
                _step(scheduler)
    return median(cold), median(hit)


def _step(scheduler: Scheduler) -> None:
    """Schedule a step and return a token for each row that samples."""
    step = scheduler.schedule()
    tokens = [[7] if samples else [] for samples in step.samples.tolist()]
    scheduler.update(StepResult(step.id, Csr.from_lists(tokens)))


def measured(source: Path) -> Times:
    """Return the times of the library in the folder ``source``, measured in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603 - this file
    times: Times = json.loads(done.stdout)
    return times


def compared(ours: list[Times], theirs: list[Times]) -> Iterator[str]:
    """Yield a line for each row: both medians in microseconds, and the median ratio of the pairs."""
    for row in ours[0]:
        for place, kind in enumerate(("cold", "hit")):
            mine, other = ([one[row][place] for one in side] for side in (ours, theirs))
            ratio = median(a / b for a, b in zip(mine, other, strict=True))
            yield f"{row:32} {kind:5} {median(mine):8.0f} {median(other):8.0f} {ratio:6.2f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another src folder")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one run as JSON")
    asked = parser.parse_args()
    if asked.against is None:
        times = {f"{model} {layout}": admissions(model, layout) for model in MODELS for layout in LAYOUTS}
        lines = (f"{row:32} cold {cold:8.0f}   hit {hit:8.0f}" for row, (cold, hit) in times.items())
        print(json.dumps(times) if asked.json else "\n".join(lines))
        return
    ours, theirs = list[Times](), list[Times]()
    for number in range(asked.pairs):
        sides = [(ours, Path(__file__).parents[1] / "src"), (theirs, asked.against)]
        for results, source in sides if number % 2 else reversed(sides):
            results.append(measured(source))
    print("\n".join(compared(ours, theirs)))


if __name__ == "__main__":
    main()
