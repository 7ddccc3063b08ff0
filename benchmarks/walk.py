"""How far one thing travels through the code: calls, files, classes, and changes from one file to another.

    python walk.py

A natural cache of attention, a window and recurrent states, eight requests that decode, and one at a time: a request
that is let in with a hit inside a block; a step in which all decode and nobody crosses a block, and one in which all
do; a step that keeps a state; an abort; and the admission again without states, its ``schedule`` alone. What is
counted are Python calls into hybridkv, in the steps that do it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self

import hybridkv
from hybridkv.cache import KVCacheManager
from hybridkv.cache.placement import EndsPlacement
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, StepResult
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec, window_spec

ROOT = str(Path(hybridkv.__file__).parent)
BLOCK = 16


class Walk:
    """Counts what is called while it is entered."""

    def __init__(self) -> None:
        self.calls, self.changes = 0, 0
        self.files, self.classes = set[str](), set[str]()
        self._last = ""

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT):
            return
        file = code.co_filename.removeprefix(ROOT + "/")
        self.calls += 1
        self.files.add(file)
        self.changes += file != self._last
        self._last = file
        owner = code.co_qualname.rpartition(".<locals>")[0] or code.co_qualname
        if "." in owner:
            self.classes.add(f"{file}:{owner.partition('.')[0]}")


class World:
    """A scheduler with eight requests that decode. Every sampled token is 7."""

    def __init__(self, *, states: bool = True) -> None:
        specs = (full_spec(BLOCK), window_spec(BLOCK, 48), *([state_spec(BLOCK, mode="none")] if states else []))
        config = natural_model_config(400, specs, [8, 8, 1][: len(specs)])
        self.cache = KVCacheManager(config, 4096, placement=EndsPlacement(), log_stats=True)
        self.scheduler = Scheduler(self.cache, SchedulerLimits(max_running=64, max_batched_tokens=4096))
        for number in range(8):
            self.add(f"r{number}", [100 * number + i for i in range(96)], 2000)
        self.step()

    def add(self, name: str, prompt: list[int], outputs: int) -> None:
        """A request that waits."""
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True)
        self.scheduler.add(Request(name, prompt, sampling, hasher=self.cache.hasher))

    def step(self) -> None:
        """One step and its result."""
        step = self.scheduler.schedule()
        sampled = Csr.from_lists([[7] if one else [] for one in step.samples.tolist()])
        self.scheduler.update(StepResult(step.id, sampled))


def walks() -> dict[str, Walk]:
    """Each thing, walked once."""
    world = World()
    for _ in range(20):
        world.step()
    found = dict[str, Walk]()

    def walked(name: str, act: Callable[[], object]) -> None:
        with Walk() as walk:
            act()
        found[name] = walk

    tokens = world.cache.resident_requests()[0].num_tokens
    while tokens % BLOCK in {0, BLOCK - 1, 1}:
        world.step()
        tokens += 1
    walked("decode, nobody crosses a block", world.step)
    while world.cache.resident_requests()[0].num_tokens % BLOCK:
        world.step()
    walked("decode, all cross a block", world.step)
    world.add("first", list(range(5000, 5100)), 1)
    world.step()
    world.step()
    world.add("hit", [*range(5000, 5099), 1, 2, 3], 2000)
    walked("admission with a hit", world.step)
    world.add("kept", list(range(9000, 9100)), 2000)
    walked("admission that keeps a state", world.step)
    walked("abort", lambda: world.scheduler.abort("hit"))
    plain = World(states=False)
    plain.add("first", list(range(5000, 5100)), 1)
    plain.step()
    plain.step()
    plain.add("hit", [*range(5000, 5099), 1, 2, 3], 2000)
    walked("no states, a hit, schedule alone", plain.scheduler.schedule)
    return found


def main() -> None:
    """A table."""
    print(f"{'':32}{'calls':>8}{'files':>8}{'classes':>9}{'changes of file':>17}")
    for name, walk in walks().items():
        print(f"{name:32}{walk.calls:8}{len(walk.files):8}{len(walk.classes):9}{walk.changes:17}")


if __name__ == "__main__":
    main()
