"""What a trace holds, and any trace as a token-exact one; the commands too."""

import errno
import gzip
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from cli_support import error, run
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.simulator import (
    ReplaySettings,
    RequestSource,
    TraceFile,
    UniformWorkload,
    Workload,
    convert,
    describe,
    plan_for_trace,
    replay,
)


def report_of(source: RequestSource) -> dict[str, Any]:
    plan = plan_for_trace(source.summary(), read_model("llama-3-8b"), "4GiB")
    made = replay(source, plan, ReplaySettings(max_running=8)).to_dict({})
    del made["source"]
    return made


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_described_trace_with_endless_cache_matches_the_closed_form(block_size: int) -> None:
    workload = UniformWorkload()
    (found,) = describe(workload, [block_size]).hits
    assert found.hit_tokens == workload.hit_tokens(block_size)


def test_described_trace_has_its_counts() -> None:
    workload = UniformWorkload()
    told = describe(workload)
    summary = workload.summary()
    assert (told.requests, told.prompt_tokens, told.output_tokens) == (40, summary.prompt_tokens, summary.output_tokens)
    assert (told.seconds, told.requests_per_s, told.longest_tokens) == (
        390.0,
        round(40 / 390, 6),
        summary.longest_tokens,
    )
    assert (
        sum(told.arrivals)
        == sum(one.requests for one in told.prompts)
        == sum(one.requests for one in told.shared)
        == 40
    )
    assert (told.shared[0].least, told.shared[0].most, told.shared[0].requests) == (0, 0, 3)
    assert told.shared_tokens == told.hits[0].hit_tokens
    assert [(one.least, one.most) for one in told.outputs] == [(16, 31)]
    assert json.loads(told.to_json())["hits"][0]["block_size"] == 1
    with pytest.raises(ConfigError, match="block_sizes must be at least 1"):
        describe(workload, [0])


def test_described_trace_bounds_replay_hits(tmp_path: Path) -> None:
    workload = Workload("chat", hours=0.02)
    told = describe(workload, [1])
    assert 0 < report_of(workload)["hit_tokens"] <= told.shared_tokens
    assert tmp_path.exists()


def test_converted_trace_replays_alike(tmp_path: Path) -> None:
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text(
        "".join(
            json.dumps({"timestamp": 100 * k, "input_length": 1000, "output_length": 9, "hash_ids": [k % 3, 100 + k]})
            + "\n"
            for k in range(40)
        ),
        "utf-8",
    )
    for source, name in ((TraceFile(mooncake), "a.jsonl"), (Workload("chat", hours=0.02, marks=True), "b.jsonl.gz")):
        out = tmp_path / name
        assert convert(source, out) == source.summary().requests
        again = TraceFile(out)
        assert again.format_name == "token-exact"
        assert report_of(again) == report_of(source)
        assert out.read_bytes()[:2] == (b"\x1f\x8b" if name.endswith("gz") else b'{"')
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.gz", "m.jsonl"]


def test_converted_trace_keeps_marks_tenants_and_hints_without_text(tmp_path: Path) -> None:
    line = {
        "timestamp": 1.5,
        "prompt": [[9, 0, 20]],
        "output": [[8, 0, 2]],
        "marks": [7],
        "tenant": "a",
        "hints": {"over": True},
    }
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text(json.dumps(line), "utf-8")
    convert(TraceFile(source), out)
    assert json.loads(out.read_text("utf-8")) == {**line, "prompt": [[0, 0, 20]], "output": [[1, 0, 2]]}
    source.write_text(json.dumps({"time": 5, "body": {"prompt": "my secret words", "max_tokens": 3}}), "utf-8")
    convert(TraceFile(source, tokenizer="bytes:4"), out)
    assert json.loads(out.read_text("utf-8")) == {"timestamp": 0, "prompt": [[0, 0, 4]], "output": [[1, 0, 3]]}


def test_converted_trace_on_full_disk_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("before", "utf-8")
    with (
        patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(OSError, match="No space left"),
    ):
        convert(UniformWorkload(), out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert out.read_text("utf-8") == "before"


# -- as commands


def test_describe_command_prints_text(tmp_path: Path) -> None:
    text = run("trace", "describe", "workload:uniform").stdout
    for part in ("generated, 40 requests", "390.0 s, 0.10 requests/s", "shared prefixes", "16 .. 31", "█"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\nx,1,1\n", "utf-8")
    assert "azure, 1 requests, 1 bad lines skipped" in run("trace", "describe", path, "--skip-bad-lines").stdout
    assert f"{path}, line 3: not a date and time: 'x'" in error("trace", "describe", path)


def test_describe_command_prints_json() -> None:
    made = json.loads(run("trace", "describe", "workload:uniform", "--json", "--block-sizes", "16,32").stdout)
    assert (made["schema"], made["version"], [one["block_size"] for one in made["hits"]]) == (
        "hybridkv.trace",
        1,
        [16, 32],
    )
    assert "--block-sizes 'x' must be numbers" in error("trace", "describe", "workload:uniform", "--block-sizes", "x")


def test_convert_command_writes_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    assert run("trace", "convert", "workload:uniform", out).stdout == f"40 requests written to {out}\n"
    assert len(gzip.decompress(out.read_bytes()).splitlines()) == 40
    assert json.loads(run("trace", "convert", "workload:uniform", out, "--json").stdout)["requests"] == 40
    assert "is the trace itself" in error("trace", "convert", out, out)
    assert "No such file" in error("trace", "convert", out, tmp_path / "none" / "out")
    assert "--tokenizer" in error("trace", "convert", "workload:uniform", out, "--tokenizer", "bytes:4")


def test_text_trace_replays(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [
        {"time": k, "messages": [{"role": "user", "content": "tell me of caches " * 9}], "max_tokens": 5}
        for k in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    base = ("replay", path, "--model", "llama-3-8b", "--memory", "4GiB")
    assert "holds text: name a tokenizer (--tokenizer)" in error(*base)
    made = json.loads(run(*base, "--tokenizer", "bytes:4", "--json").stdout)
    assert made["requests"] == 4
    assert made["hit_tokens"] > 0.7 * made["prompt_tokens"]
