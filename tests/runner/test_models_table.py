import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from models_table import LIMITS, DraftResult, ModelResult, draft_table, main, table

from hybridkv.runner import TINY_MODELS

RESULT = ModelResult("mamba", 0, ("3 state",), ("cold", "warm"), 2940, 1, 2.5e-6, ("superposition",))
HEADS = 2
LAYOUTS = ("natural", "reference", "natural")
DRAFTED = [DraftResult("mamba", seed, LAYOUTS[seed], 100, 20, 10, seed * 1e-6) for seed in range(3)]


def of_seeds(name: str, *seeds: int) -> list[ModelResult]:
    return [replace(RESULT, name=name, seed=seed, largest=seed * 1e-6) for seed in seeds]


def test_a_row_sums_up_the_seeds() -> None:
    lines = list(table(of_seeds("mamba", 0, 1, 2)))
    assert len(lines) == HEADS + 1
    assert lines[HEADS] == (
        "| tiny:mamba | 3 state | 2 | 3 | 8,820 | 3 | 2.0e-06 | superposition | "
        "its own scan starts from zero whatever it is given |"
    )


@pytest.mark.parametrize("seeds", [(0,), (0, 2), (1, 1, 1)])
def test_fewer_seeds_than_all_are_marked(seeds: tuple[int, ...]) -> None:
    lines = list(table(of_seeds("mamba", 0, 1, 2) + of_seeds("llama", *seeds)))
    assert f"| **{len(set(seeds))} of 3** |" in lines[HEADS]
    assert "**" not in lines[HEADS + 1]
    assert lines[-2:] == ["", "**Not finished: fewer than 3 seeds so far of tiny:llama.**"]


def test_known_limits_are_of_models_that_are_there() -> None:
    assert LIMITS.keys() <= set(TINY_MODELS)
    (line,) = list(table([replace(one, continues=()) for one in of_seeds("zamba2", 0, 1, 2)]))[HEADS:]
    assert line.endswith(f" | - | {LIMITS['zamba2']} |")
    (line,) = list(table([replace(one, continues=()) for one in of_seeds("llama", 0, 1, 2)]))[HEADS:]
    assert line.endswith(" | - | - |")


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    lines, document = tmp_path / "lines.jsonl", tmp_path / "models.md"
    lines.write_text("".join(json.dumps(asdict(one)) + "\n" for one in of_seeds("mamba", 0, 1, 2)), "utf-8")
    with lines.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(asdict(one)) + "\n" for one in DRAFTED)
    marks = ("<!-- written by make test-all -->", "<!-- of drafts, written by make test-all -->")
    tables = [f"{mark}\nold\n<!-- end -->\nbehind\n" for mark in marks]
    document.write_text("before\n" + "".join(tables), "utf-8")
    main(str(lines), str(document))
    main(str(lines), str(document))
    written = document.read_text("utf-8").splitlines()
    models, drafts = list(table(of_seeds("mamba", 0, 1, 2))), list(draft_table(DRAFTED))
    end = ["<!-- end -->", "behind"]
    assert written == ["before", marks[0], *models, *end, marks[1], *drafts, *end]
    lines.write_text("", "utf-8")
    main(str(lines), str(document))
    assert document.read_text("utf-8").splitlines() == written


def test_drafts_are_summed_up() -> None:
    lines = list(draft_table(DRAFTED))
    assert lines[HEADS:] == ["| tiny:mamba | 3 | natural, reference | 300 | 60 | 30 | 2.0e-06 |"]
    assert list(draft_table(DRAFTED[:2]))[-1] == "**Not finished: fewer than 3 seeds so far of tiny:mamba.**"
