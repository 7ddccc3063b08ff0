"""benchmarks/floors.py: rows that the table beside vLLM has, each measured."""

import json
from pathlib import Path

import floors
import pytest

BESIDE = Path(floors.__file__).parent / "beside_vllm.json"


def test_floors_are_of_rows_beside_vllm_and_each_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "ROUNDS", 1)
    monkeypatch.setattr(floors, "BLOCKS", 256)
    assert floors.ROWS.keys() <= {ratio["metric"] for ratio in json.loads(BESIDE.read_text())["ratios"]}
    assert all(floor() > 0 for floor in floors.ROWS.values())
