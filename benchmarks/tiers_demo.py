"""Two engines share a hybrid's system prompt through Mooncake; one is killed in the middle of an answer.

    make tiers-demo

The other engine's answers are compared with those of an engine that has no store.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, Self

from servers import mooncake_master

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.stores import open_store

MODEL: Final = "tiny:qwen3_next"
SYSTEM_TOKENS: Final = 1500
OUTPUT: Final = 8


class Worker:
    """An engine in a process of its own, which answers one prompt after another."""

    SCRIPT: Final = """
import json, sys, time
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.stores import StoreUrl

options = EngineOptions(self_check=False)
engine = Engine(load(sys.argv[1]), options=options, memory="64MiB", host_memory="64MiB", store=StoreUrl(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    begun = time.perf_counter()
    (done,) = engine.generate([asked["prompt"]], SamplingParams(max_tokens=asked["output"], ignore_eos=True))
    seconds = time.perf_counter() - begun
    engine.settle_tiers()
    fetched = engine.tier.statistics().fetched_tokens
    print(json.dumps([list(done.token_ids), done.hit_tokens, fetched, seconds]), flush=True)
"""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-c", self.SCRIPT, MODEL, url],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def _line(self) -> str:
        if self.process.stdout is None:
            raise RuntimeError("the engine has no output")
        return self.process.stdout.readline()

    def ask(self, prompt: list[int], output: int = OUTPUT) -> None:
        """Send a prompt."""
        if self.process.stdin is None:
            raise RuntimeError("the engine has no input")
        self.process.stdin.write(json.dumps({"prompt": prompt, "output": output}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:  # noqa: ANN401 - output tokens, hit tokens, fetched tokens so far, seconds
        """Return the answer to the prompt sent last."""
        return json.loads(self._line())


def main() -> int:
    """Run the demonstration; return 1 if an answer differs."""
    draw = random.Random(1)  # noqa: S311 - tokens
    system = [draw.randrange(3, 200) for _ in range(SYSTEM_TOKENS)]
    prompts = [[*system, *(draw.randrange(3, 200) for _ in range(20))] for _ in range(5)]
    with Engine(load(MODEL), options=EngineOptions(self_check=False), memory="64MiB") as alone:
        plain = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        expected = [list(one.token_ids) for one in alone.generate(prompts, plain)]
    with tempfile.TemporaryDirectory() as folder, mooncake_master(Path(folder)) as master:
        url = f"mooncake://127.0.0.1:{master.port}?timeout_s=20"
        lender = open_store(f"{url}&memory=256MiB")  # memory that outlives both engines
        lender.exists([b"connect"])
        with Worker(url) as first, Worker(url) as second:
            asked = [(first, "A", 0), (first, "A", 1), (second, "B", 2)]
            answers = list[tuple[str, int, Any]]()
            for worker, name, number in asked:
                worker.ask(prompts[number])
                answers.append((name, number, worker.answer()))
            first.ask(prompts[3], output=400)
            time.sleep(0.3)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            print("engine A was killed in the middle of an answer")
            for number in (3, 4):
                second.ask(prompts[number])
                answers.append(("B", number, second.answer()))
        lender.close()
    wrong = 0
    for name, number, (tokens, hits, fetched, seconds) in answers:
        equal = tokens == expected[number]
        wrong += not equal
        said = "equal to those without a store" if equal else "DIFFERENT"
        print(
            f"engine {name}, prompt {number}: {hits} of {len(prompts[number])} tokens hit, {fetched} fetched from "
            f"Mooncake so far, {seconds:.2f} s, outputs {said}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
