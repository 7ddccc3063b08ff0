"""Who generates: plain transformers, Engine, and vLLM in a process of its own. All greedy."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from generation import Answer, Round, Tokens

from hybridkv.planner.plan import NATURAL, REFERENCE
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, LoadedModel, plan_for
from hybridkv.runner.check import forced_logits, generate_greedy

OUTPUT = 24
"""Tokens of every output."""
MAX_MODEL_LEN = 512
VLLM_BLOCK_SIZE = 32
"""The smallest that vLLM's attention on CPUs takes."""
MEMORY = "64MiB"
"""Of our cache: like the GiB of vLLM's, so much that nothing is evicted."""
STOP_AFTER_S = 900.0
ENGINE = Path(__file__).with_name("vllm_engine.py")
FREE_SERVERS: list[subprocess.Popen[str]] = []
"""Fork servers that have no fork."""


@dataclass(frozen=True, slots=True)
class Way:
    """How Engine keeps the cache. placement: of states, None for the default of ``layout``."""

    name: str
    layout: str
    block_size: int
    placement: str | None = None


REFERENCE_WAY = Way("reference", REFERENCE, VLLM_BLOCK_SIZE)
NATURAL_WAY = Way("natural", NATURAL, 16)
GRID_WAY = Way("natural, interval:64", NATURAL, 16, "interval:64")


class VllmError(Exception):
    """vLLM did not answer. The message is its own."""


class VllmKilledError(VllmError):
    """vLLM was killed."""


class Plain:
    """Plain transformers."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model

    def generate(self, prompt: Tokens) -> Tokens:
        with torch.inference_mode():
            return tuple(generate_greedy(self._model, prompt, OUTPUT))

    def gap(self, prompt: Tokens, output: Tokens, theirs: int, ours: int) -> float:
        """As generation.Gap has it."""
        with torch.inference_mode():
            logits = forced_logits(self._model, prompt, (*output, theirs))
        last = logits[-1]
        return float((last.max() - last[[theirs, ours]].min()) / (logits.max() - logits.min()))


def our_answers(loaded: LoadedModel, rounds: Sequence[Round], way: Way) -> list[list[Answer]]:
    """Of Engine, round by round."""
    plan = plan_for(
        loaded, [MAX_MODEL_LEN], memory=MEMORY, layout=way.layout, block_size=way.block_size, placement=way.placement
    )
    greedy = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    with Engine(loaded, plan) as engine:
        return [
            [Answer(done.token_ids, done.hit_tokens) for done in engine.generate(one.prompts, greedy)] for one in rounds
        ]


def their_answers(
    model: Path, rounds: Sequence[Round], options: Mapping[str, Any], script: Path | None = None
) -> tuple[str, list[list[Answer]]]:
    """vLLM's version and its answers, round by round. Files are left beside the folder ``model``.

    options: of vllm.LLM, beside those that every run has. script: what runs vLLM, None for vllm_engine.py.
    Raises VllmError as ``answers_of`` does.
    """
    size = {"max_model_len": MAX_MODEL_LEN, "block_size": VLLM_BLOCK_SIZE, "enable_prefix_caching": True}
    found = answers_of(job_of(model, rounds, {**size, **options}), model.parent, script)
    return found["version"], [
        [Answer(tuple(one["tokens"]), one["hit_tokens"]) for one in answered] for answered in found["rounds"]
    ]


def job_of(model: Path, rounds: Sequence[Round], options: Mapping[str, Any], **more: object) -> dict[str, Any]:
    """As vllm_engine.py reads it."""
    prompts = [one.prompts for one in rounds]
    return {"model": str(model), "rounds": prompts, "output": OUTPUT, "options": dict(options), **more}


def several(one: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The connector ``one`` in vLLM's MultiConnector, next to an onlooker, and to one that stores in ``folder``."""
    onlooker = {"kv_connector": "Onlooker", "kv_connector_module_path": "nixl_variants", "kv_role": "kv_both"}
    stores = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    children = [one, onlooker, *([] if folder is None else [stores])]
    shared = {name: value for name, value in one.items() if name in {"kv_role", "kv_load_failure_policy"}}
    return {"kv_connector": "MultiConnector", **shared, "kv_connector_extra_config": {"connectors": children}}


def answers_of(asked: Mapping[str, Any], folder: Path, script: Path | None = None) -> Any:  # noqa: ANN401 - JSON
    """What vllm_engine.py makes of ``asked``, in a fork of a process that has imported vLLM. It leaves its files there.

    script: what does it in a new process instead, as vllm_engine.py itself can. Forks share the seed of ``hash``.
    Raises VllmError, with the last error of its log, when it fails or takes longer than STOP_AFTER_S;
    VllmKilledError when it was killed.
    """
    job, answers, log = (folder / name for name in ("job.json", "answers.json", "log.txt"))
    job.write_text(json.dumps(asked), "utf-8")
    code = forked(job, answers, log) if script is None else started(script, job, answers, log)
    if code == -signal.SIGKILL:
        raise VllmKilledError("killed")
    if code == -signal.SIGALRM:
        raise VllmError(f"no answers within {STOP_AFTER_S:.0f} s")
    if code:
        raise VllmError(last_error(log.read_text("utf-8")))
    return json.loads(answers.read_text("utf-8"))


def forked(job: Path, answers: Path, log: Path) -> int:
    """Do a job in a fork, and return its exit code."""
    server = fork_server()
    tell(server, {"job": [str(job), str(answers)], "log": str(log), "seconds": STOP_AFTER_S})
    code: int = heard(server)
    FREE_SERVERS.append(server)
    return code


def fork_server() -> subprocess.Popen[str]:
    """vllm_engine.py, which imports vLLM once, without a fork. It ends with its lines, and so with this process."""
    if FREE_SERVERS:
        return FREE_SERVERS.pop()
    return subprocess.Popen(  # noqa: S603 - this very Python, and a script of these tests
        [sys.executable, str(ENGINE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def tell(server: subprocess.Popen[str], line: object) -> None:
    assert server.stdin is not None
    with suppress(BrokenPipeError):  # then it does not answer, either
        print(json.dumps(line), file=server.stdin, flush=True)


def heard(server: subprocess.Popen[str]) -> Any:  # noqa: ANN401 - JSON
    """The next line of ``server`` or its fork: a number, when the fork has ended."""
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        server.communicate()
        raise VllmError("vllm_engine.py ended, with its error above")
    return json.loads(line)


def started(script: Path, job: Path, answers: Path, log: Path) -> int:
    """Do a job in a new process, and return its exit code."""
    with log.open("w", encoding="utf-8") as out:
        try:
            return subprocess.run(  # noqa: S603 - as above
                [sys.executable, str(script), str(job), str(answers)],
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=STOP_AFTER_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return -signal.SIGALRM


def last_error(log: str) -> str:
    """The last error of the process that computes, whose cause the others do not know; else of any.

    vLLM's lines are "(Worker pid=7) ERROR date [file:line] IndexError: ...".
    """
    lines = [line for line in log.splitlines() if "Error: " in line or "Exception: " in line]
    named = [line for line in lines if line.startswith("(Worker")] or lines or ["its log names no error"]
    return named[-1].partition("] ")[2].strip() or named[-1].strip()
