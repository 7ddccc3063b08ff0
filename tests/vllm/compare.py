"""The same random calls on vLLM's KVCacheManager and on ours: ``make test-vllm VLLM_PYTHON=...``.

A difference is a defect of vLLM that defects.py knows (counted, and the run ends), or it fails, with the
smallest list of calls that shows it.
"""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields
from random import Random

from calls import Call, Decode, Difference, Found, Free, Grow, Preempt, Probe, Publish, Start
from cases import Case, Kind, compressed, random_case
from defects import ENDS, LOOK_UP, defect_of
from duel import Duel
from random_calls import Caller
from vllm_side import prepare

from few import few_are_many

CALLS_OF_A_RUN = 120
SHRINK_SECONDS = 20.0
MANY = 4  # numbers in a row from which on they are written as a range


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Totals:
    """What was done: operations by kind, runs by kinds of groups, differences by defect."""

    def __init__(self) -> None:
        self.runs = 0
        self.operations: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.excused: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.shapes: Counter[str] = Counter()

    def add(self, duel: Duel) -> None:
        self.runs += 1
        self.operations += duel.operations
        self.seen += duel.seen
        self.excused += duel.excused
        self.shapes[" + ".join(group.kind for group in duel.case.groups)] += 1

    def tell(self, seconds: float) -> None:
        for shape, count in sorted(self.shapes.items()):
            say(f"  {count:6} runs of {shape}")
        say(f"{self.operations.total()} operations in {self.runs} runs, {seconds:.0f} s, no unexplained difference")
        say("  " + _counts(self.operations))
        say("  " + _counts(self.seen))
        for name, what in LOOK_UP.items():
            say(f"  {self.excused[name]:6} look-ups excused, {name}: {what}")
        for name, what in ENDS.items():
            say(f"  {self.ended[name]:6} runs ended, {name}: {what}")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))


def replay(case: Case, calls: Sequence[Call]) -> tuple[Difference | None, Duel]:
    """Play ``calls``; the first difference."""
    duel = Duel(case, defect_of)
    for call in calls:
        difference = duel.play(call)
        if difference is not None:
            return difference, duel
    return duel.finish(), duel


def fails(case: Case, calls: Sequence[Call], what: str) -> bool:
    """Whether ``calls`` show an unexplained difference of that kind."""
    difference, duel = replay(case, calls)
    return difference is not None and difference.what == what and defect_of(difference, duel) is None


def shrink(case: Case, calls: list[Call], what: str) -> list[Call]:
    """Fewer calls that still differ: whole requests are left out first, then single calls."""
    end = time.monotonic() + SHRINK_SECONDS
    for name in sorted({getattr(call, "name", "") for call in calls}):
        fewer = [call for call in calls if getattr(call, "name", "") != name]
        if time.monotonic() < end and fails(case, fewer, what):
            calls = fewer
    size = len(calls)
    while size:
        at = 0
        while at < len(calls) and time.monotonic() < end:
            fewer = calls[:at] + calls[at + size :]
            if fewer and fails(case, fewer, what):
                calls = fewer
            else:
                at += size
        size //= 2
    return calls


def run(number: int, options: argparse.Namespace, kinds: Sequence[Kind], totals: Totals) -> bool:
    """One run; whether nothing unexplained was found."""
    seed, random = options.seed, Random(f"{options.seed}/{number}")
    case = random_case(random, kinds, plain=options.plain)
    if options.compressed:
        case = compressed(random, case)
    try:
        duel = Duel(case, defect_of)
    except Exception as error:  # noqa: BLE001 - a case that one side refuses is a difference
        say(f"CANNOT BE BUILT, seed {seed} run {number}\n  {case}\n  {error!r}")
        return False
    calls: list[Call] = []
    caller = Caller(random, case)
    difference: Difference | None = None
    while difference is None and len(calls) < CALLS_OF_A_RUN:
        calls.append(caller.next(duel))
        difference = duel.play(calls[-1])
    if difference is None:
        difference = duel.finish()
    totals.add(duel)
    if difference is None:
        return True
    name = defect_of(difference, duel)
    if name is None:
        report(number, seed, case, shrink(case, calls, difference.what))
        return False
    totals.ended[name] += 1
    return True


def report(number: int, seed: int, case: Case, calls: list[Call]) -> None:
    """Everything needed to see a difference again."""
    difference, _ = replay(case, calls)
    say(f"DIFFERENCE, seed {seed} run {number} (--seed {seed} --first {number} --runs 1)\n  {case}")
    for call in calls:
        say(f"  {short(call)}")
    if difference is not None:
        say(f"  {difference.what} of {difference.name or 'the pool'}, known {difference.request}")
        say(f"    theirs {short(difference.theirs)}\n    ours   {short(difference.ours)}")


def short(value: object) -> str:
    """``value`` with runs of numbers as first..last, and keys as their first digits."""
    match value:
        case bytes():
            return value.hex()[:4]
        case tuple() | list():
            return "(" + " ".join(_runs(list(value))) + ")"
        case Start() | Grow() | Decode() | Probe() | Publish() | Preempt() | Free() | Found():
            parts = (f"{field.name}={short(getattr(value, field.name))}" for field in fields(value))
            return f"{type(value).__name__}({', '.join(parts)})"
        case _:
            return repr(value)


def _runs(values: list[object]) -> Iterator[str]:
    at = 0
    while at < len(values):
        first, end = values[at], at + 1
        while end < len(values) and isinstance(first, int) and values[end] == first + end - at:
            end += 1
        yield short(first) if end - at < MANY else f"{first}..{values[end - 1]}"
        at += 1 if end - at < MANY else end - at


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--runs", type=int, default=None, help="at most so many runs")
    parser.add_argument("--kinds", default=",".join(Kind), help="kinds of groups to compare")
    parser.add_argument("--plain", action="store_true", help="one rank, no EAGLE, dense publishing")
    parser.add_argument("--compressed", action="store_true", help="rates, rings, windows of more kinds, several ranks")
    parser.add_argument("--failures", type=int, default=3, help="stop after so many unexplained differences")
    parser.add_argument(
        "--short-runs", action="store_true", help="keys in runs and remembered chains from two blocks on"
    )
    options = parser.parse_args(arguments)
    kinds = [Kind(kind) for kind in options.kinds.split(",")]
    prepare()
    logging.disable()
    with few_are_many() if options.short_runs else nullcontext():
        return compare(options, kinds)


def compare(options: argparse.Namespace, kinds: Sequence[Kind]) -> int:
    """As many runs as it takes; 1 where a difference is not explained."""
    totals, failed, number, start = Totals(), 0, options.first, time.monotonic()
    while totals.operations.total() < options.operations and failed < options.failures:
        if options.runs is not None and totals.runs >= options.runs:
            break
        failed += not run(number, options, kinds, totals)
        number += 1
    if failed:
        say(f"{failed} unexplained differences in {totals.operations.total()} operations, {totals.runs} runs")
        return 1
    totals.tell(time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
