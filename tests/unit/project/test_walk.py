"""How far one request travels through the library: ceilings of files, classes, file changes and calls, which only fall.

The cache is built as a user builds it: KVCacheManager(plan(read_model(NAME), memory=...)), with every default.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

import pytest

import hybridkv
from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, plan, read_model
from hybridkv.step import Csr, StepResult

ROOT = f"{Path(hybridkv.__file__).parent}/"


@dataclass
class Walk:
    """Counts the library's own Python calls made inside the context."""

    calls: int = 0
    changes: int = 0
    files: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    last: str = ""

    def __enter__(self) -> Self:
        gc.collect()  # else what other tests left is finalized, and counted, inside
        gc.disable()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT):
            return
        file = code.co_filename.removeprefix(ROOT)
        self.calls += 1
        self.files.add(file)
        self.changes += file != self.last
        self.last = file
        owner = code.co_qualname.rpartition(".<locals>")[0] or code.co_qualname
        if "." in owner:
            self.classes.add(f"{file}:{owner.partition('.')[0]}")

    def counts(self) -> tuple[int, int, int, int]:
        """Files, classes, changes of file, calls."""
        return len(self.files), len(self.classes), self.changes, self.calls


def walk(model: str, layout: str) -> tuple[Walk, Walk]:
    """The admission of a request that hits a cached prefix of 1,499 tokens, and its decode of one token."""
    cache = KVCacheManager(plan(read_model(model), memory="80GiB", max_model_len=8192, layout=layout))
    scheduler = Scheduler(cache, SchedulerLimits(max_running=256, max_batched_tokens=8192))

    def request(name: str, tokens: list[int], output: int = 2000) -> Request:
        return Request(name, tokens, SamplingParams(max_tokens=output, ignore_eos=True), hasher=cache.hasher)

    def step() -> None:
        made = scheduler.schedule()
        sampled = Csr.from_lists([[7] if samples else [] for samples in made.samples.tolist()])
        scheduler.update(StepResult(made.id, sampled))

    prefix = list(range(5000, 6499))
    for name, tokens in ("other", list(range(100, 1600))), ("first", [*prefix, 1]):
        scheduler.add(request(name, tokens, 1))
        step()
    step()
    hit = request("hit", [*prefix, 1, 2, 3])
    with Walk() as admission:
        scheduler.add(hit)
        step()
    for _ in range(4):
        step()
    with Walk() as decode:
        step()
    return admission, decode


CEILINGS = {
    ("qwen3-next-80b-a3b", "natural"): ((29, 34, 354, 632), (14, 16, 53, 82)),
    ("qwen3-next-80b-a3b", "reference"): ((24, 30, 223, 365), (15, 17, 54, 86)),
    ("llama-3-8b", "natural"): ((28, 32, 279, 500), (13, 15, 50, 74)),
    ("llama-3-8b", "reference"): ((21, 26, 143, 211), (13, 15, 50, 74)),
}
"""Files, classes, changes of file and calls of an admission, and of the decode of one token. Never raise one."""


@pytest.mark.parametrize(("model", "layout"), CEILINGS)
def test_request_walk_stays_below_its_ceilings(model: str, layout: str) -> None:
    found = tuple(one.counts() for one in walk(model, layout))
    over = [
        (step, name, count, ceiling)
        for step, counts, ceilings in zip(("admission", "decode"), found, CEILINGS[model, layout], strict=True)
        for name, count, ceiling in zip(("files", "classes", "changes", "calls"), counts, ceilings, strict=True)
        if count > ceiling
    ]
    assert not over, f"{model}, {layout}: {found}"
