"""benchmarks/floors.py measures rows of the table of comparisons with vLLM."""

import json
from pathlib import Path

import floors
import pytest

BESIDE = Path(floors.__file__).parent / "beside_vllm.json"


def test_floors_are_measured_and_belong_to_rows_compared_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "ROUNDS", 1)
    monkeypatch.setattr(floors, "BLOCKS", 256)
    assert floors.ROWS.keys() <= {ratio["metric"] for ratio in json.loads(BESIDE.read_text())["ratios"]}
    assert all(floor() > 0 for floor in floors.ROWS.values())
