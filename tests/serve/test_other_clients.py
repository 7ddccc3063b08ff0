"""Clients of others, unchanged, against the server: `make test-clients`. CLIENTS_PYTHON: a Python that has them.

litellm: its completions are the engine's. lm-eval: its log-likelihoods are the engine's. guidellm: it runs to the end.
aiperf: cached tokens that it counts over a trace are the engine's, and to the block those of a replay.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from serve_support import serving
from test_fronts import fronted

from hybridkv.models import read_model
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, load
from hybridkv.runner.chat import chat_ids
from hybridkv.serve.service import Service
from hybridkv.simulator import ReplaySettings, TraceFile, plan_for_trace, simulation_of
from hybridkv.simulator.report import Recording

PYTHON = os.environ.get("CLIENTS_PYTHON")
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(PYTHON is None, reason="CLIENTS_PYTHON names no Python")]
BLOCK = 16
SECONDS = 240.0
NAME = "tiny/llama"


def engine() -> Engine:
    return Engine(load("tiny:llama"), memory="16MiB", max_model_len=2048)


class Target(NamedTuple):
    """A server: where clients reach it, and what it serves."""

    url: str
    service: Service


@pytest.fixture(scope="module", params=["one process", "a front"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    if request.param == "a front":
        with fronted(engine()) as other:
            yield Target(other.fronts[0].url, other.service)
    else:
        with serving(engine()) as served:
            yield Target(served.url, served.service)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub's cache that has the tokenizer as ``tiny/llama``: aiperf looks there alone, whatever folder it is told."""
    home, commit = tmp_path_factory.mktemp("hub"), "0123456789abcdef" * 2 + "01234567"
    model = home / "hub" / "models--tiny--llama"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    loaded = load("tiny:llama")
    assert loaded.tokenizer is not None
    loaded.tokenizer.save_pretrained(model / "snapshots" / commit)
    loaded.model.config.save_pretrained(model / "snapshots" / commit)
    return home


def run(hub: Path, folder: Path, *command: object, python: bool = False) -> str:
    """What it prints. command: of the environment of CLIENTS_PYTHON."""
    environment = {**os.environ, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
    name, *more = map(str, command)
    first = [str(PYTHON), "-c", name] if python else [str(Path(str(PYTHON)).parent / name)]
    done = subprocess.run(  # noqa: S603 - clients that are tried
        [*first, *more], capture_output=True, text=True, cwd=folder, env=environment, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


LITELLM = """
import json, sys, litellm
at = {"api_base": sys.argv[1], "api_key": "none", "max_tokens": 7, "temperature": 0}
said = [{"role": "user", "content": "Why?"}]
whole = litellm.completion(model="openai/tiny:llama", messages=said, **at)
parts = litellm.completion(model="openai/tiny:llama", messages=said, stream=True, **at)
text = litellm.text_completion(model="text-completion-openai/tiny:llama", prompt="Hello", **at)
print(json.dumps({
    "chat": whole.choices[0].message.content,
    "streamed": "".join(one.choices[0].delta.content or "" for one in parts),
    "text": text.choices[0].text,
    "prompt_tokens": whole.usage.prompt_tokens,
}))
"""


def test_litellm_client_gets_the_engines_text(target: Target, hub: Path, tmp_path: Path) -> None:
    found = json.loads(run(hub, tmp_path, LITELLM, f"{target.url}/v1", python=True).splitlines()[-1])
    with engine() as alone:
        sampling = SamplingParams(max_tokens=7)
        chat = chat_ids(alone.loaded, [{"role": "user", "content": "Why?"}])
        wanted, text = alone.generate([chat, "Hello"], sampling)
    assert found["chat"] == found["streamed"] == wanted.text
    assert found["prompt_tokens"] == len(chat)
    assert found["text"] == text.text


def test_lm_eval_client_gets_the_engines_logprobs(target: Target, hub: Path, tmp_path: Path) -> None:
    documents = [
        {"query": "the sky is", "choices": [" blue", " a table", " seven"], "gold": 0},
        {"query": "one two three one two", "choices": [" three", " nine"], "gold": 1},
    ]
    (tmp_path / "task.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in documents))
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "task.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(task))
    at = f"base_url={target.url}/v1/completions,model=tiny:llama,tokenizer_backend=huggingface,tokenizer={NAME}"
    command = ("lm_eval", "--model", "local-completions", "--model_args", f"{at},tokenized_requests=False")
    run(hub, tmp_path, *command, "--include_path", tmp_path, "--tasks", "mine", "--output_path", "out", "--log_samples")
    (file,) = (tmp_path / "out").rglob("samples*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["doc_id"])
    with engine() as alone:
        for document, sample in zip(documents, samples, strict=True):
            wanted = [log_likelihood(alone, str(document["query"]), choice) for choice in document["choices"]]  # type: ignore[attr-defined]  # a list
            assert [float(one[0][0]) for one in sample["resps"]] == pytest.approx(wanted, abs=1e-3)


def log_likelihood(alone: Engine, context: str, choice: str) -> float:
    """Of ``choice`` behind ``context``: tokens are letters."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (done,) = alone.generate([context + choice], sampling)
    assert done.prompt_logprobs is not None
    return sum(one.logprob for one in done.prompt_logprobs[len(context) - 1 :])


def test_guidellm_client_finishes_all_requests(target: Target, hub: Path, tmp_path: Path) -> None:
    before = target.service.engine.statistics()
    asked = (
        ("--backend", f"kind=openai_http,target={target.url},model=tiny:llama"),
        ("--tokenizer", f"kind=huggingface_auto,model={NAME}"),
        ("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=4"),
        ("--profile", "kind=synchronous"),
        ("--constraint", "kind=max_requests,count=4"),
        ("--output", "kind=json,path=found.json"),
    )
    run(hub, tmp_path, "guidellm", "run", *(word for pair in asked for word in pair))
    (benchmark,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (4, 0)
    assert target.service.engine.statistics().requests_finished - before.requests_finished >= 4


def trace(file: Path) -> None:
    """Twelve requests of three shapes, which share their first 32 tokens, and more."""
    with file.open("w") as written:
        for at in range(12):
            shape = at % 3
            ids = [1, 2, 10 + shape, *([20 + at % 2] if shape else []), *([30 + at] if shape == 2 else [])]
            row = {"timestamp": 400 * at, "input_length": BLOCK * len(ids), "output_length": 4, "hash_ids": ids}
            written.write(f"{json.dumps(row)}\n")


def test_aiperf_counts_match_the_engine_and_a_replay(hub: Path, tmp_path: Path) -> None:
    trace(tmp_path / "trace.jsonl")
    with serving(engine()) as served:
        asked: dict[str, Any] = {
            "--model": "tiny:llama",
            "--url": served.url,
            "--endpoint-type": "completions",
            "--input-file": tmp_path / "trace.jsonl",
            "--custom-dataset-type": "mooncake_trace",
            "--isl-block-size": BLOCK,
            "--tokenizer": NAME,
            "--ui": "simple",
            "--output-artifact-dir": "out",
        }
        words = [word for pair in asked.items() for word in pair]
        run(hub, tmp_path, "aiperf", "profile", *words, "--streaming", "--fixed-schedule", "--no-gpu-telemetry")
        now = served.service.engine.statistics()
    rows = [
        json.loads(line)["metrics"] for line in (tmp_path / "out" / "profile_export.jsonl").read_text().splitlines()
    ]
    cached = [one["usage_prompt_cache_read_tokens"]["value"] for one in rows]
    assert len(rows) == 12
    assert sum(cached) == now.hit_tokens > 0
    assert sum(one["usage_prompt_tokens"]["value"] for one in rows) == now.prompt_tokens
    assert sum(one // BLOCK for one in cached) == sum(one // BLOCK for one in replayed(hub, tmp_path / "trace.jsonl"))


def replayed(hub: Path, file: Path) -> list[int]:
    """Tokens found of each request, by a replay of the trace on the same model and memory."""
    source = TraceFile(file, trace_block_size=BLOCK)
    (config,) = hub.rglob("config.json")
    summary = source.summary()
    plan = plan_for_trace(summary, read_model(str(config), dtype="float32"), "16MiB")
    simulation = simulation_of(plan, ReplaySettings(block_times=True))
    recording = Recording(simulation.scheduler)
    simulation.run(source, summary=summary, recording=recording)
    found: list[int] = recording.recorded().requests.hit_tokens.tolist()
    return found
