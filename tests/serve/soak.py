"""Many clients at once, some of which leave, talk nonsense or read slowly, for as long as one likes.

this process     an engine, and what is looked at: memory and open files, what is left behind, the scheduler's own check
its fronts       HTTP and text, with --front-workers; without, this process has them, too
another one      the clients, which compare each answer with that of an engine that ran alone

python tests/serve/soak.py --minutes 60 --front-workers 1
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import soak_clients
from serve_support import LONGEST, WAIT, serving, until
from soak_clients import Case

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.serve import ConnectionLimits, ServeOptions
from hybridkv.serve.fronts import Desk, Fronts, listen_for
from hybridkv.serve.service import Service

BEGINNINGS = ["", "one two three " * 3, "four five " * 7, "six " * 12]
EVERY_S = 1.0


@dataclass
class Watched:
    """A process of the server. resident: MiB each second behind its warm-up; files: how many it had open then."""

    process: int
    resident: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    @property
    def grown(self) -> float:
        """The last quarter's resident memory beside the first one's."""
        quarter = max(len(self.resident) // 4, 1)
        return median(self.resident[-quarter:]) / median(self.resident[:quarter]) - 1

    @property
    def open_files(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process}/fd").iterdir())

    def look(self) -> None:
        said = Path(f"/proc/{self.process}/status").read_text().splitlines()
        (line,) = (one for one in said if one.startswith("VmRSS"))
        self.resident.append(int(line.split()[1]) / 1024)
        self.files.append(self.open_files)


@dataclass(frozen=True)
class Soaked:
    """counts: of what clients did. processes: the engine's first, then the fronts."""

    counts: Counter[str]
    processes: list[Watched]
    steps: int

    @property
    def grown(self) -> float:
        return max(one.grown for one in self.processes)


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


def soak(name: str, clients: int, seconds: float, *, max_waiting: int = 32, fronts: int = 0) -> Soaked:
    """Raises AssertionError for an answer that is not the engine's own, and for what is left behind."""
    crowd = Crowd(clients, seconds, cases(name, 200))
    served_engine, options = engine(name), ServeOptions(max_waiting=max_waiting)
    if fronts:
        return _through_fronts(crowd, served_engine, options, fronts)
    with serving(served_engine, options) as served:
        return crowd.at(served.url, served.service, served_engine)


def _through_fronts(crowd: "Crowd", engine: Engine, options: ServeOptions, fronts: int) -> Soaked:
    """Fronts need this thread, for signals; another one waits for the clients, and then drains the server."""
    service, ready, found = Service(engine, options), threading.Event(), Future[Soaked]()
    server = Fronts(service, options, ConnectionLimits(), ready.set)
    sockets = listen_for("127.0.0.1", 0, fronts)
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"

    def look() -> None:
        try:
            assert ready.wait(WAIT)
            found.set_result(crowd.at(url, service, engine, server))
        except BaseException as error:  # noqa: BLE001  # told by the other thread
            found.set_exception(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    looking = threading.Thread(target=look)
    looking.start()
    server.run(sockets)
    looking.join()
    assert server.cut_off == 0
    return found.result()


@dataclass(frozen=True)
class Crowd:
    """Clients, for how long they ask, and for what."""

    clients: int
    seconds: float
    known: list[Case]

    def at(self, url: str, service: Service, engine: Engine, fronts: Fronts | None = None) -> Soaked:
        """Let them at a server that answers; then nothing may be left of them."""
        of_fronts = [] if fronts is None else [one.pid for one in fronts._processes.values()]
        watched = [Watched(one) for one in (os.getpid(), *of_fronts)]
        before = [one.open_files for one in watched]
        command = [sys.executable, soak_clients.__file__]
        with subprocess.Popen(  # noqa: S603 - this file
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            told = {"url": url, "clients": self.clients, "seconds": self.seconds}
            process.stdin.write(json.dumps(told | {"cases": [asdict(one) for one in self.known]}))
            process.stdin.close()
            _watch(process, self.seconds, watched)
            assert process.stdout is not None
            said = process.stdout.read()
        assert process.returncode == 0, "clients found a wrong answer: it is told above"
        nothing_is_left(service, engine)
        until(lambda: all(one.open_files <= most for one, most in zip(watched, before, strict=True)))
        if fronts is not None:
            assert [one.pid for one in fronts._processes.values()] == of_fronts, "a front has ended"
            desks = [one for one in gc.get_objects() if type(one) is Desk]  # isinstance would import lazily
            assert len(desks) == len(of_fronts)
            until(lambda: not any(desk._bodies or desk._calls for desk in desks))
        return Soaked(Counter(json.loads(said)), watched, service.engine.statistics().steps)


def _watch(process: subprocess.Popen[str], seconds: float, watched: list[Watched]) -> None:
    """Look each second while clients run, but for the first third."""
    begun = time.monotonic()
    while process.poll() is None:
        assert time.monotonic() - begun < seconds + 2 * WAIT, "clients do not come to an end"
        time.sleep(EVERY_S)
        if time.monotonic() - begun > seconds / 3:
            for one in watched:
                one.look()


def nothing_is_left(service: Service, engine: Engine) -> None:
    """No place taken, no row, no block, no step failed; the scheduler's own check passes."""
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
    parser.add_argument("--front-workers", type=int, default=0)
    asked = parser.parse_args()
    found = soak(asked.model, asked.clients, asked.minutes * 60, fronts=asked.front_workers)
    counts = ", ".join(f"{count} {what}" for what, count in found.counts.most_common())
    print(f"{asked.minutes:g} minutes, {asked.clients} clients, {found.steps} steps: {counts}")  # noqa: T201 - a script
    for number, one in enumerate(found.processes):
        print(  # noqa: T201
            f"{f'front {number}' if number else 'engine'}: {one.resident[0]:.1f} MiB, at the end "
            f"{one.resident[-1]:.1f}, grown by {one.grown:.2%}; at most {max(one.files)} open files"
        )
    if found.grown > 0.05:
        raise SystemExit("resident memory grows")


if __name__ == "__main__":
    main()
