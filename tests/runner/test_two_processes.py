"""The example with a scheduler and a worker in two processes gives the outputs of the engine in one process."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

from runner_support import EngineFactory, loaded_model

from examples_run import run_example

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_processes.py"
LINE = re.compile(r"(request \d|after a loss): (\d+) of (\d+) hit, (.*)")


def test_two_process_example_gives_tokens_of_one_process(make_engine: EngineFactory) -> None:
    done = run_example(EXAMPLE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = runpy.run_path(str(EXAMPLE))  # its constants; nothing runs
    prompts = [list((names["BEGINNING"] + question).encode()) for question in names["QUESTIONS"]]
    engine = make_engine(loaded_model("llama"), prompts, names["SAMPLING"].max_tokens)
    expected = engine.generate(prompts, names["SAMPLING"])
    found = [LINE.fullmatch(line) for line in lines]
    answers = [(hit.group(1), int(hit.group(2)), int(hit.group(3)), hit.group(4)) for hit in found if hit is not None]
    # a token is a byte, so equal outputs are equal tokens
    outputs = [repr(bytes(one.token_ids).decode("latin-1")) for one in expected]
    hits = [one.hit_tokens for one in expected]
    assert min(hits[1:]) >= len(names["BEGINNING"]) // 16 * 16
    assert answers == [
        *((f"request {i}", hits[i], len(prompts[i]), outputs[i]) for i in range(len(prompts))),
        ("after a loss", len(prompts[0]) - 1, len(prompts[0]), outputs[0]),
    ]
    counts = re.fullmatch(r"(\d+) Steps: ([\d,]+) bytes went out, ([\d,]+) came back", lines[4])
    assert counts is not None
    steps, sent, received = (int(one.replace(",", "")) for one in counts.groups())
    assert steps == names["SAMPLING"].max_tokens + 1  # one more was on its way when the last outputs came
    assert 100 * steps < received < sent
    assert lines[5].startswith(
        f"Step {steps} failed, and what was in flight behind it. The worker says: WorkerError: Step {steps + 1} "
        f"follows Step {steps}, but the last Step applied here is {steps - 1}"
    )
    assert lines[7:] == ["the worker ended with exit code 0"]


def test_two_process_example_parent_does_not_import_torch() -> None:
    code = f"import runpy, sys; runpy.run_path({str(EXAMPLE)!r}); print('torch' in sys.modules)"
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False"]
