"""Record an engine's requests, and predict its hits and preemptions under other settings.

    python twin.py [--model qwen3_next|DIR] [--requests 1000] [--chats 50] [--rate 9] [--outputs 4 40] [--out FILE]

An engine serves random chats with shared beginnings on this machine, under the first of several settings. Its requests
are recorded as `hybridkv trace record --requests` records them. The trace is then replayed under each setting, and the
same requests are served under it by a real engine. The machine's rates are those of `hybridkv calibrate`. The first
setting is served once more at the end: two real runs differ, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from hybridkv.kv_events import RequestPublisher, ended_requests
from hybridkv.planner import Plan
from hybridkv.request import SamplingParams
from hybridkv.runner import AsyncEngine, Engine, EngineOptions, LoadedModel, load, plan_for, tiny_model, wrap
from hybridkv.simulator import ReplaySettings, TraceFile, convert, replay
from hybridkv.simulator.hardware import FP32, Hardware, hardware_named
from hybridkv.simulator.live import LiveRequests
from hybridkv.simulator.twin import fitted_time_scale


@dataclass(frozen=True)
class Setting:
    """How an engine runs: its memory as a multiple of the first one's, eviction and layout."""

    memory: float
    eviction: str
    layout: str = "natural"

    def __str__(self) -> str:
        return f"{self.memory:g} x memory, {self.eviction}, {self.layout}"


SETTINGS = (
    Setting(1, "hazard"),
    Setting(2, "hazard"),
    Setting(0.6, "hazard"),
    Setting(1, "lru"),
    Setting(1, "hazard", "reference"),
)
MAX_MODEL_LEN = 512
MAX_RUNNING, TOKEN_BUDGET = 16, 256


@dataclass(frozen=True)
class Asked:
    """A request: when it arrives, its prompt and the length of its answer."""

    at_s: float
    prompt: tuple[int, ...]
    output: int


def asked(count: int, rate: float, vocabulary: int, *, chats: int, outputs: Sequence[int]) -> list[Asked]:
    """Chats that share one of three beginnings; each turn continues the one before."""
    random = Random(1)  # noqa: S311 - a load

    def some(least: int, most: int) -> list[int]:
        return [random.randrange(5, vocabulary) for _ in range(random.randint(least, most))]

    heads, turns, found, now = (
        [some(40, 120) for _ in range(3)],
        [list[int]() for _ in range(chats)],
        list[Asked](),
        0.0,
    )
    for _ in range(count):
        now += random.expovariate(rate)
        at = random.randrange(chats)
        turns[at] = [*(turns[at] or random.choice(heads)), *some(5, 60)]
        found.append(Asked(now, tuple(turns[at]), random.randint(*outputs)))
        turns[at] = [] if len(turns[at]) > MAX_MODEL_LEN - 110 - outputs[-1] else [*turns[at], *some(4, 30)]
    return found


def plan_of(loaded: LoadedModel, setting: Setting, memory: int) -> Plan:
    """Return the plan of a setting."""
    size = int(memory * setting.memory)
    return plan_for(loaded, [MAX_MODEL_LEN], memory=size, max_model_len=MAX_MODEL_LEN, layout=setting.layout)


@dataclass(frozen=True)
class Counted:
    """What an engine or a replay counted."""

    prompt_tokens: int
    hit_tokens: int
    preemptions: int

    @property
    def rate(self) -> float:
        """Share of the prompt tokens that were hit, in percent."""
        return 100 * self.hit_tokens / self.prompt_tokens


def served(
    loaded: LoadedModel, plan: Plan, setting: Setting, requests: Sequence[Asked], record: Path | None = None
) -> Counted:
    """Serve ``requests`` as they arrive; record them to ``record`` if given."""
    options = EngineOptions(
        max_running=MAX_RUNNING, token_budget=TOKEN_BUDGET, eviction=setting.eviction, self_check=False
    )
    with RequestPublisher("tcp://127.0.0.1:*") as publisher:
        recorder = None
        if record is not None:
            recorder = threading.Thread(target=_record, args=(publisher.endpoint, record, len(requests)))
            recorder.start()
            time.sleep(0.5)  # its subscription reaches the publisher
        engine = Engine(loaded, plan, options, requests=publisher)
        counted = asyncio.run(_serve(engine, requests))
        if recorder is not None:
            recorder.join(60)
    return counted


def _record(endpoint: str, out: Path, count: int) -> None:
    def ended() -> object:
        for number, one in enumerate(ended_requests(endpoint), 1):
            yield one
            if number == count:
                return

    convert(LiveRequests(ended()), out)  # type: ignore[arg-type]


async def _serve(engine: Engine, requests: Sequence[Asked]) -> Counted:
    async with AsyncEngine(engine) as front:
        begun = time.monotonic()

        async def ask(one: Asked) -> None:
            await asyncio.sleep(max(one.at_s - (time.monotonic() - begun), 0))
            sampling = SamplingParams(max_tokens=one.output, ignore_eos=True)
            async with aclosing(front.stream(list(one.prompt), sampling)) as stream:
                async for _ in stream:
                    pass

        await asyncio.gather(*map(ask, requests))
        counts = front.statistics()
    return Counted(counts.prompt_tokens, counts.hit_tokens, counts.preemptions)


def settings_of(setting: Setting, hardware: Hardware, scale: float = 1.0) -> ReplaySettings:
    """Return the settings of a replay."""
    return ReplaySettings(
        max_running=MAX_RUNNING,
        token_budget=TOKEN_BUDGET,
        time_scale=scale,
        hardware=hardware,
        weights=FP32,
        eviction=setting.eviction,
    )


def predicted(trace: Path, plan: Plan, settings: ReplaySettings) -> Counted:
    """Replay the recorded requests."""
    report = replay(TraceFile(trace), plan, settings)
    return Counted(report.prompt_tokens, report.hit_tokens or 0, report.preemptions)


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_next")
    parser.add_argument("--memory", type=int, default=4 << 20)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--outputs", type=int, nargs=2, default=(4, 40))
    parser.add_argument("--rate", type=float, default=9.0)
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="how many of the settings to serve")
    parser.add_argument("--hardware", type=Path, help="a file of `hybridkv calibrate`; measured here by default")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    loaded = load(given.model) if Path(given.model).is_dir() else wrap(tiny_model(given.model), name=given.model)
    if not Path(given.model).is_dir():
        torch.set_num_threads(1)  # as commands do for tiny models
    vocabulary = loaded.model.config.get_text_config().vocab_size
    requests = asked(given.requests, given.rate, vocabulary, chats=given.chats, outputs=given.outputs)
    with tempfile.TemporaryDirectory() as folder:
        machine = given.hardware or Path(folder) / "machine.toml"
        if given.hardware is None:
            name = given.model if Path(given.model).is_dir() else f"tiny:{given.model}"
            command = (sys.executable, "-m", "hybridkv", "calibrate", "--model", name, "--out", str(machine))
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own program
        hardware = hardware_named(str(machine))
        trace, lines, scale = Path(folder) / "trace.jsonl", list[dict[str, object]](), 1.0
        for number, setting in enumerate(SETTINGS[: given.settings]):
            plan = plan_of(loaded, setting, given.memory)
            real = served(loaded, plan, setting, requests, None if number else trace)
            if not number:
                scale = fitted_time_scale(TraceFile(trace), plan, settings_of(setting, hardware))
                print(f"time scale {scale:.3f}, fitted to the recorded times", flush=True)
            twin = predicted(trace, plan, settings_of(setting, hardware, scale))
            print(
                f"{setting!s:40} hit rate {real.rate:6.2f} % real, {twin.rate:6.2f} % replayed; "
                f"preemptions {real.preemptions} and {twin.preemptions}",
                flush=True,
            )
            lines.append({"setting": str(setting), "real": vars(real), "replayed": vars(twin)})
        again = served(loaded, plan_of(loaded, SETTINGS[0], given.memory), SETTINGS[0], requests)
        print(f"{SETTINGS[0]!s:40} hit rate {again.rate:6.2f} % real, once more; preemptions {again.preemptions}")
        lines.append({"setting": str(SETTINGS[0]), "real": vars(again)})
    if given.out:
        given.out.write_text(json.dumps(lines, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
