"""benchmarks/check_trace.py, which is run by hand on traces that are not part of the repository."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hybridkv.simulator import UniformWorkload


@pytest.fixture
def check() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "check_trace.py"
    spec = importlib.util.spec_from_file_location("check_trace", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "uniform.jsonl"
    lines = (
        {"timestamp": one.timestamp_s * 1000, "prompt": one.prompt.pieces, "output": one.output.pieces}
        for one in UniformWorkload()
    )
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return path


def test_trace_check_matches_the_closed_form(check: ModuleType, trace: Path) -> None:
    assert check.endless_cache(trace.read_bytes()) == (10_960, UniformWorkload().hit_tokens(16), True)


def test_trace_check_blocks_ignore_piece_boundaries(check: ModuleType) -> None:
    whole = list(check.blocks([(1, 0, 40)], 40))
    assert whole == [((1, 0, 16),), ((1, 16, 32),)]
    assert list(check.blocks([(1, 0, 7), (1, 7, 40)], 39)) == whole
    assert list(check.blocks([(1, 0, 10), (2, 3, 30)], 20)) == [((1, 0, 10), (2, 3, 9))]


def test_trace_check_of_equal_counts_passes(
    check: ModuleType, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_trace.py", str(trace)])
    assert check.main() == 0
    assert "the same, in under 180 s" in capsys.readouterr().out


def test_trace_check_reports_a_difference(
    check: ModuleType, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_trace.py", str(trace)])
    hits = UniformWorkload().hit_tokens(16)
    monkeypatch.setattr(check, "endless_cache", lambda _: (10_960, hits + 16, True))
    assert check.main() == 1
    assert f"DIFFERENT: hit tokens: the replay says {hits}, expected {hits + 16}" in capsys.readouterr().out
