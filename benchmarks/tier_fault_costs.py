"""Measure what faults of tiers cost: hit tokens, right outputs, and seconds.

    python benchmarks/tier_fault_costs.py [--model tiny:qwen3_next]

An engine answers prompts and leaves them on its host and its disk. Then it, or a second one, is asked for the same
prompts, with a fault, one after the other. Device memory holds two of them. Outputs are compared with those of an
engine without tiers. Seconds are those of the answers. Prints a table; ends with 1 if an output differs.
"""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast
from unittest.mock import patch

import torch

from hybridkv.errors import ConfigError
from hybridkv.planner import Plan
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, LoadedModel, load, plan_for
from hybridkv.stores import BlockStore, DiskFolder
from hybridkv.worker.store import Ended
from hybridkv.worker.tier import _InPlace

PROMPTS, TOKENS, OUTPUT = 8, 600, 6
HOST: Final = "64MiB"
DISK: Final = "4MiB"
Change = Callable[[BlockStore], dict[str, Callable[..., Any]]]


@dataclass(frozen=True)
class Faulty:
    """A disk whose calls ``change`` replaces."""

    disk: DiskFolder
    change: Change
    looks_up_at_once: bool

    def open(self, identity: bytes, block_bytes: Sequence[int]) -> BlockStore:
        """Open the disk, and replace calls."""
        store = self.disk.open(identity, block_bytes)
        calls = {name: getattr(store, name) for name in ("exists", "get", "put", "close")}
        return cast("BlockStore", SimpleNamespace(**calls | self.change(store)))


def after(seconds: float, name: str) -> Change:
    """Return a change that lets the call ``name`` take ``seconds`` longer."""

    def change(store: BlockStore) -> dict[str, Callable[..., Any]]:
        def late(*given: Any) -> Any:  # noqa: ANN401 - as the call
            time.sleep(seconds)
            return getattr(store, name)(*given)

        return {name: late}

    return change


def refuse(name: str) -> Change:
    """Return a change that lets the call ``name`` find or keep nothing."""
    return lambda _store: {name: lambda keys, *_: [False] * len(keys)}


@contextmanager
def lost(*, down: bool) -> Iterator[None]:
    """Lose half of the transfers to the host (``down``) or to the device."""
    draw, run = Random(1), _InPlace._run  # noqa: S311 - no secret

    def sometimes(lane: _InPlace, transfer: Any, source: Any, destination: Any) -> None:  # noqa: ANN401 - as _run
        if (source is lane._device) is down and draw.random() < 0.5:
            lane._ended.append(Ended(transfer.number, is_whole=False, seconds=0.0))
        else:
            run(lane, transfer, source, destination)

    with patch.object(_InPlace, "_run", sometimes):
        yield


def damage(folder: Path) -> None:
    """Flip a bit in each quarter of the file of blocks."""
    with (folder / "blocks").open("r+b") as file:
        size = file.seek(0, 2)
        for place in range(size // 8, size, size // 4):
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))


def cut_off(folder: Path) -> None:
    """Cut the file of blocks in half."""
    with (folder / "blocks").open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)


class Asked(NamedTuple):
    """What all prompts together found, how many outputs are right, and the seconds of their answers."""

    found: int
    right: int
    seconds: float


@dataclass(frozen=True)
class Setting:
    """A model, its prompts, a plan for two of them at once, and the outputs without tiers."""

    loaded: LoadedModel
    prompts: list[list[int]]
    plan: Plan
    outputs: list[tuple[int, ...]]

    @classmethod
    def of(cls, model: str) -> Setting:
        """Draw the prompts and compute their outputs."""
        loaded, draw = load(model), Random(1)  # noqa: S311 - no secret
        prompts = [[draw.randrange(3, 200) for _ in range(TOKENS)] for _ in range(PROMPTS)]
        longest = TOKENS + 2 * OUTPUT
        plan = plan_for(loaded, [longest, longest], max_model_len=longest + 1)
        with Engine(loaded, plan, _OPTIONS) as engine:
            return cls(loaded, prompts, plan, [one.token_ids for one in engine.generate(prompts, _GREEDY)])

    def ask(self, engine: Engine, *, failing: bool = False) -> Asked:
        """Ask for each prompt; failing: the first step of each fails."""
        before, right, seconds = engine.scheduler.prompt_tokens_found[1], 0, 0.0
        for prompt, output in zip(self.prompts, self.outputs, strict=True):
            begun, done = time.perf_counter(), list[Any]()
            engine.add(prompt, _GREEDY)
            if failing:
                with suppress(_OnPurposeError), patch.object(engine.worker, "execute", side_effect=_OnPurposeError):
                    engine.step()
            while not engine.idle:
                done += engine.step()
            seconds += time.perf_counter() - begun
            right += done[0].token_ids == output
            if engine.tier is not None:
                engine.settle_tiers()
        return Asked(engine.scheduler.prompt_tokens_found[1] - before, right, seconds)

    def engine(self, store: Any = None, host: str = HOST) -> Engine:  # noqa: ANN401 - a StoreChoice
        """Return an engine."""
        return Engine(self.loaded, self.plan, _OPTIONS, host_memory=host, store=store)


class _OnPurposeError(Exception):
    """Raised in place of a step."""


_OPTIONS: Final = EngineOptions(max_running=2, self_check=False)
_GREEDY: Final = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
_NO_FAULT: Final = nullcontext()


def on_the_host(
    of: Setting, fault: AbstractContextManager[None] = _NO_FAULT, host: str = HOST, *, failing: bool = False
) -> Asked:
    """Ask one engine twice; the fault is there all the time. failing: as ``Setting.ask``, the second time."""
    with fault, of.engine(host=host) as engine:
        of.ask(engine)
        return of.ask(engine, failing=failing)


def on_the_disk(
    of: Setting, spoil: Callable[[Path], None] = lambda _: None, change: Change = lambda _: {}, *, at_once: bool = True
) -> Asked:
    """Ask two engines, one after the other.

    spoil: what happens between them. change: calls of the second one. at_once: as ``StoreChoice.looks_up_at_once``.
    """
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskFolder(folder, DISK)
        with of.engine(disk) as engine:
            of.ask(engine)
        spoil(Path(folder))
        with of.engine(Faulty(disk, change, at_once)) as engine:
            return of.ask(engine)


_CHILD: Final = """
import sys, tier_fault_costs
from hybridkv.stores import DiskFolder
of = tier_fault_costs.Setting.of(sys.argv[1])
with of.engine(DiskFolder(sys.argv[2], tier_fault_costs.DISK)) as engine:
    for prompt in of.prompts:
        print("asked", flush=True)
        engine.generate([prompt], tier_fault_costs._GREEDY)
"""


def killed(of: Setting, model: str) -> Asked:
    """Ask a process that is killed while it answers the sixth prompt, and then another."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _CHILD, model, folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as child:  # noqa: S603 - our own
            assert child.stdout is not None  # noqa: S101 - asked for above
            for _ in range(6):
                child.stdout.readline()
            child.send_signal(signal.SIGKILL)
        with of.engine(DiskFolder(folder, DISK)) as engine:
            return of.ask(engine)


def other_weights(of: Setting) -> str:
    """Open the disk with other weights, and return what is said."""
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskFolder(folder, DISK)
        of.engine(disk).close()
        weight = next(iter(of.loaded.model.parameters()))
        with torch.no_grad():
            weight.add_(1)
            try:
                of.engine(disk).close()
            except ConfigError:
                return "ConfigError"
            finally:
                weight.sub_(1)
    return "no error"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny:qwen3_next")
    model = parser.parse_args().model
    logging.getLogger("hybridkv").setLevel(logging.ERROR)
    of = Setting.of(model)
    part = f"{of.plan.config.unit_bytes * of.plan.config.num_blocks * 3 // 2}B"

    def computed() -> Asked:
        with Engine(of.loaded, of.plan, _OPTIONS) as engine:
            return of.ask(engine)

    rows: dict[str, Callable[[], Asked]] = {
        "no tiers: all is computed": computed,
        "host, no fault": lambda: on_the_host(of),
        "half of the transfers to the host are lost": lambda: on_the_host(of, lost(down=True)),
        "half of the transfers to the device are lost": lambda: on_the_host(of, lost(down=False)),
        "the host holds three of the prompts": lambda: on_the_host(of, host=part),
        "the first step of each request fails": lambda: on_the_host(of, failing=True),
        "disk, no fault": lambda: on_the_disk(of),
        "look-ups take 2 s": lambda: on_the_disk(of, change=after(2, "exists"), at_once=False),
        "reads fail": lambda: on_the_disk(of, change=refuse("get")),
        "reads take 0.25 s": lambda: on_the_disk(of, change=after(0.25, "get")),
        "a bit of each quarter of the file is flipped": lambda: on_the_disk(of, damage),
        "half of the file is cut off": lambda: on_the_disk(of, cut_off),
        "the process is killed in the sixth prompt": lambda: killed(of, model),
    }
    wrong = 0
    print(f"| fault | found of {PROMPTS * TOKENS:,} tokens | equal outputs | seconds |\n|---|--:|--:|--:|")
    for what, measure in rows.items():
        asked = measure()
        wrong += asked.right < PROMPTS
        print(f"| {what} | {asked.found:,} | {asked.right} of {PROMPTS} | {asked.seconds:.2f} |", flush=True)
    print(f"| other weights | {other_weights(of)} | | |")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
