"""The tables of docs/models.md sum up the seeds of each model."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from csv_table import read
from models_table import DRAFTS_HEADER, HEADER, LIMITS, DraftResult, ModelResult, draft_table, main, table

from hybridkv.runner import TINY_MODELS

RESULT = ModelResult("mamba", 0, ("3 state",), ("cold", "warm"), 2940, 1, 2.5e-6, ("superposition",))
LAYOUTS = ("natural", "reference", "natural")
DRAFTED = [DraftResult("mamba", seed, LAYOUTS[seed], 100, 20, 10, seed * 1e-6) for seed in range(3)]


def of_seeds(name: str, *seeds: int) -> list[ModelResult]:
    return [replace(RESULT, name=name, seed=seed, largest=seed * 1e-6) for seed in seeds]


def test_table_seeds_are_summed_up() -> None:
    (row,) = table(of_seeds("mamba", 0, 1, 2))
    scan = "its own scan starts from zero whatever it is given"
    assert row == ("tiny:mamba", "3 state", 2, "3", "8,820", 3, "2.0e-06", "superposition", scan)
    assert len(row) == len(HEADER)


@pytest.mark.parametrize("seeds", [(0,), (0, 2), (1, 1, 1)])
def test_table_with_missing_seeds_is_marked_unfinished(seeds: tuple[int, ...]) -> None:
    rows = list(table(of_seeds("mamba", 0, 1, 2) + of_seeds("llama", *seeds)))
    assert [row[3] for row in rows] == [f"unfinished: {len(set(seeds))} of 3", "3"]


def test_table_limits_name_existing_models() -> None:
    assert LIMITS.keys() <= set(TINY_MODELS)
    (row,) = table([replace(one, continues=()) for one in of_seeds("zamba2", 0, 1, 2)])
    assert row[-2:] == ("-", LIMITS["zamba2"])
    (row,) = table([replace(one, continues=()) for one in of_seeds("llama", 0, 1, 2)])
    assert row[-2:] == ("-", "-")


def test_main_writes_each_table_that_has_results(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    models = [json.dumps(asdict(one)) + "\n" for one in of_seeds("mamba", 0, 1, 2)]
    lines.write_text("".join(models), "utf-8")
    main(str(lines), str(tmp_path))
    assert not (tmp_path / "models-drafts.csv").exists()
    lines.write_text("".join(json.dumps(asdict(one)) + "\n" for one in DRAFTED), "utf-8")
    main(str(lines), str(tmp_path))
    (row,) = read(tmp_path / "models-equality.csv")
    assert list(row.values()) == [str(value) for value in next(table(of_seeds("mamba", 0, 1, 2)))]
    (row,) = read(tmp_path / "models-drafts.csv")
    assert list(row) == list(DRAFTS_HEADER)
    assert list(row.values()) == [str(value) for value in next(draft_table(DRAFTED))]


def test_draft_table_seeds_are_summed_up() -> None:
    (row,) = draft_table(DRAFTED)
    assert row == ("tiny:mamba", "3", "natural, reference", "300", "60", "30", "2.0e-06")
    (row,) = draft_table(DRAFTED[:2])
    assert row[1] == "unfinished: 2 of 3"
