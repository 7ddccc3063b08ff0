"""The GPU benchmark runs on any machine with tiny models and writes the same columns as on a GPU."""

import json
from pathlib import Path

import bench_gpu
import pytest


@pytest.mark.parametrize("model", ["llama-1b", "qwen3-next-like", "nemotron-h-like"])
def test_gpu_benchmark_times_every_engine_and_hit_rate(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    asked = ["--tiny", "--models", model, "--attention", "gather", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["bench_gpu.py", *asked])
    bench_gpu.main()
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert [(row["engine"], row["hits"]) for row in rows] == [
        ("hybridkv, gather", 0),
        ("static", 0),
        ("hybridkv, gather", 90),
    ]
    assert all(row["seconds"] > 0 and not row["why"] for row in rows)
    assert capsys.readouterr().out.count(model) == len(rows)


def test_gpu_benchmark_without_graph_support_reports_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    asked = ["--tiny", "--models", "llama-1b", "--attention", "gather+decode", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["bench_gpu.py", *asked])
    bench_gpu.main()
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert [row["why"].split(":")[0] for row in rows if "decode" in row["engine"]] == ["ConfigError", "ConfigError"]
    assert "as they are" in capsys.readouterr().out
