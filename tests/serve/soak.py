"""Many clients at once, some of which leave, talk nonsense or read slowly, for as long as one likes.

this process     a server, and what is looked at: resident memory, what is left behind, the scheduler's own check
another one      the clients, which compare each answer with that of an engine that ran alone

python tests/serve/soak.py --minutes 60
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import soak_clients
from serve_support import LONGEST, WAIT, Served, serving, until
from soak_clients import Case

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.serve import ServeOptions

BEGINNINGS = ["", "one two three " * 3, "four five " * 7, "six " * 12]
EVERY_S = 1.0


@dataclass(frozen=True)
class Soaked:
    """counts: of what clients did. resident: MiB each second of the server's process, behind its warm-up."""

    counts: Counter[str]
    resident: list[float]
    steps: int

    @property
    def grown(self) -> float:
        """The last quarter's resident memory beside the first one's."""
        quarter = max(len(self.resident) // 4, 1)
        return median(self.resident[-quarter:]) / median(self.resident[:quarter]) - 1


def engine(name: str, *, max_running: int = 16) -> Engine:
    """With drafts, and so little memory that blocks are evicted and requests preempted."""
    options = EngineOptions(max_running=max_running, remembered_losses=1 << 12)
    return Engine(
        load(f"tiny:{name}"), memory="2MiB", max_model_len=LONGEST, options=options, speculate=NgramDrafter(2)
    )


def cases(name: str, count: int) -> list[Case]:
    """Bodies and their answers."""
    random = Random(count)
    asked = []
    for number in range(count):
        prompt = f"{random.choice(BEGINNINGS)}and {number}"
        sampling = SamplingParams(
            max_tokens=random.randint(1, 24), ignore_eos=True, temperature=random.choice([0.0, 0.8]), seed=number
        )
        asked.append((prompt, sampling))
    with engine(name) as alone:
        done = alone.generate([prompt for prompt, _ in asked], [sampling for _, sampling in asked])
    return [
        Case(prompt, sampling.max_tokens, sampling.temperature, sampling.seed or 0, one.text or "")
        for (prompt, sampling), one in zip(asked, done, strict=True)
    ]


# -- the server


def soak(name: str, clients: int, seconds: float, *, max_waiting: int = 32) -> Soaked:
    """Raises AssertionError for an answer that is not the engine's own, and for what is left behind."""
    known = cases(name, 200)
    served_engine = engine(name)
    with serving(served_engine, ServeOptions(max_waiting=max_waiting)) as served:
        told = {"url": served.url, "clients": clients, "seconds": seconds, "cases": [asdict(one) for one in known]}
        command = [sys.executable, soak_clients.__file__]
        with subprocess.Popen(  # noqa: S603 - this file
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            process.stdin.write(json.dumps(told))
            process.stdin.close()
            resident = _watch(process, seconds)
            assert process.stdout is not None
            said = process.stdout.read()
        assert process.returncode == 0, "clients found a wrong answer: it is told above"
        nothing_is_left(served, served_engine)
        return Soaked(Counter(json.loads(said)), resident, served.statistics.steps)


def _watch(process: subprocess.Popen[str], seconds: float) -> list[float]:
    """Resident memory while clients run, the first third left out."""
    begun, found = time.monotonic(), list[float]()
    while process.poll() is None:
        assert time.monotonic() - begun < seconds + 2 * WAIT, "clients do not come to an end"
        time.sleep(EVERY_S)
        if time.monotonic() - begun > seconds / 3:
            found.append(_resident_mib())
    return found


def _resident_mib() -> float:
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def nothing_is_left(served: Served, engine: Engine) -> None:
    """No place taken, no row, no block, no step failed; the scheduler's own check passes."""
    service = served.service
    until(lambda: service.places.taken == 0 and service.engine.statistics().running == 0)
    now = service.engine.statistics()
    assert (now.waiting, now.failed_steps) == (0, 0)

    def checked() -> tuple[float, int, int]:
        engine.scheduler.check()
        held = sum(group.held_blocks for group in engine.cache.statistics().groups)
        return engine.cache.usage, held, len(engine.cache.engine.resident_requests())

    assert service.engine._thread.submit(checked).result(WAIT) == (0, 0, 0)


def main() -> None:
    """One soak, told in a line or two."""
    parser = argparse.ArgumentParser(description="Soak a server of a tiny model.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", default="qwen3_next")
    parser.add_argument("--clients", type=int, default=64)
    asked = parser.parse_args()
    found = soak(asked.model, asked.clients, asked.minutes * 60)
    counts = ", ".join(f"{count} {what}" for what, count in found.counts.most_common())
    print(f"{asked.minutes:g} minutes, {asked.clients} clients, {found.steps} steps: {counts}")  # noqa: T201 - a script
    print(f"resident: {found.resident[0]:.1f} MiB, at the end {found.resident[-1]:.1f}, grown by {found.grown:.2%}")  # noqa: T201
    if found.grown > 0.05:
        raise SystemExit("resident memory grows")


if __name__ == "__main__":
    main()
