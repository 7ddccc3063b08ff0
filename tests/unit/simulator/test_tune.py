"""The cheapest setting that keeps the aims: the search, what it remembers, what it says."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from cli_support import error, run
from hybridkv.errors import ConfigError
from hybridkv.simulator import Tried, UniformWorkload, tune
from hybridkv.simulator.sweep import Cell
from hybridkv.simulator.tune import Aim, parse_aims, parse_prices, worst

AXES: dict[str, Sequence[object]] = {
    "model": ["llama-3-8b"],
    "memory": ["1GiB"],
    "tp": [1],
    "hardware": ["l4", "l40s", "h100"],
    "replicas": [1, 2],
    "router": ["round-robin"],
}
PRICES = {"l4": 0.8, "l40s": 1.2, "h100": 2.5}
SOURCE = UniformWorkload(conversations=4, turns=2)


def tuned(folder: Path, slo: str, *, trials: int = 50, memory: str = "1GiB") -> list[Tried]:
    pytest.importorskip("optuna")
    with ThreadPoolExecutor(1) as executor:
        axes = {**AXES, "memory": [memory]}
        return tune(SOURCE, axes, parse_aims(slo), PRICES, folder, executor=executor, trials=trials)


def test_tune_aims_are_parsed() -> None:
    assert parse_aims("ttft-p99=1s, tpot-mean = 50 ms") == (Aim("ttft", "p99", 1.0), Aim("tpot", "mean", 0.05))
    report = {"time_to_first_token_s": {"p99": 2.0}, "time_per_output_token_s": {"mean": 0.05}}
    aim, taken = worst(parse_aims("ttft-p99=1s,tpot-mean=50ms"), report)
    assert (aim.name, taken) == ("ttft-p99", 2.0)
    for wrong, what in (
        ("", "is not an aim"),
        ("x-p99=1s", "is not an aim"),
        ("ttft-p98=1s", "is not an aim"),
        ("ttft-p99", "is not an aim"),
        ("ttft-p99=1", "has no unit of time"),
        ("ttft-p99=1h", "has no unit of time"),
        ("ttft-p99=0s", "must be above 0: every request takes some time"),
        ("ttft-p99=1s,ttft-p99=2s", "--slo has two limits of ttft-p99"),
    ):
        with pytest.raises(ConfigError, match=what):
            parse_aims(wrong)


def test_tune_prices_are_parsed() -> None:
    assert parse_prices("h100=2.5/h, l4 = 24 / d,b200=730/mo") == {"h100": 2.5, "l4": 1.0, "b200": 1.0}
    for wrong, what in (
        ("h100=2.5", "has no unit of time: use /h"),
        ("h100=2.5/y", "has no unit of time"),
        ("h100", "is not a price"),
        ("h100=x/h", "is not a price"),
        ("h100=0/h", "must be above 0: a free machine"),
        ("x=1/h", "unknown hardware 'x'"),
    ):
        with pytest.raises(ConfigError, match=what):
            parse_prices(wrong)


def test_tune_finds_the_cheapest_within_aims(tmp_path: Path) -> None:
    tried = tuned(tmp_path, "tpot-p99=40ms")
    assert len(tried) == 6
    best, runner_up, *_ = tried
    # an L4 takes 16 GB / 240 GB/s = 67 ms a token, an L40S 23
    assert (best.cell.hardware, best.cell.replicas, best.price_per_h, best.keeps_aims) == ("l40s", 1, 1.2, True)
    assert (runner_up.cell.hardware, runner_up.cell.replicas, runner_up.price_per_h) == ("l40s", 2, 2.4)
    assert [one.keeps_aims for one in tried] == [True] * 4 + [False] * 2
    assert [one.price_per_h for one in tried[:4]] == [1.2, 2.4, 2.5, 5.0]
    assert best.reached is not None
    assert best.worst == ("tpot-p99", best.reached["tpot-p99"] / 0.04)
    report = json.loads((tmp_path / "cells" / f"{best.cell.name}.json").read_text("utf-8"))["report"]
    assert best.goodput_per_s == report["requests_within_aims"] / report["simulated_s"] == 8 / report["simulated_s"]
    assert best.tokens == pytest.approx(report["output_tokens"] / (1.2 * report["simulated_s"] / 3600))


def test_tune_searches_drafts(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    axes = {**AXES, "hardware": ["l4"], "replicas": [1], "drafts": [0, 4], "acceptance": [0.5, 1.0]}
    with ThreadPoolExecutor(1) as executor:
        tried = tune(SOURCE, axes, parse_aims("tpot-p99=40ms"), PRICES, tmp_path, executor=executor)
    assert [(one.cell.options()["drafts"], one.cell.options()["acceptance"], one.keeps_aims) for one in tried] == [
        (4, 1.0, True),
        (4, 0.5, False),
        (0, 0.7, False),
    ]


def test_tune_without_solution_reports_the_nearest(tmp_path: Path) -> None:
    tried = tuned(tmp_path, "tpot-p99=1ms")
    assert not any(one.keeps_aims for one in tried)
    assert tried[0].cell.hardware == "h100"
    assert tried[0].worst[1] == min(one.worst[1] for one in tried) > 1
    assert tried[0].goodput_per_s == 0


def test_tune_resumes_an_earlier_search(tmp_path: Path) -> None:
    first = tuned(tmp_path, "tpot-p99=40ms", trials=3)
    assert 1 <= len(first) <= 3
    with patch.object(Cell, "run", side_effect=AssertionError("it was run before")):
        assert tuned(tmp_path, "tpot-p99=40ms", trials=3) == first
    other = tuned(tmp_path, "tpot-p99=1ms")  # another search in the same folder
    assert not any(one.keeps_aims for one in other)
    every = tuned(tmp_path, "tpot-p99=40ms", trials=50)
    assert len(every) == 6
    assert {one.cell for one in first} <= {one.cell for one in every}
    with patch.object(Cell, "run", side_effect=AssertionError("it was run before")):
        assert tuned(tmp_path, "tpot-p99=40ms") == every


def test_tune_settings_that_cannot_serve_come_last(tmp_path: Path) -> None:
    tried = tuned(tmp_path, "tpot-p99=40ms", memory="1MiB")
    assert all(one.refused is not None and not one.keeps_aims for one in tried)
    assert len(tried) == 6


def test_tune_machine_without_room_is_rejected(tmp_path: Path) -> None:
    tried = tuned(tmp_path, "tpot-p99=1s", memory="10GiB")  # 16 GB of weights beside it, in 24
    refused = [one for one in tried if one.refused is not None]
    assert [(one.cell.hardware, one.cell.replicas) for one in refused] == [("l4", 1), ("l4", 2)]
    held = "14.96 GiB of bf16 weights and 10 GiB of cache are more than the 22.35 GiB of one L4: use --tp 2, or lower"
    assert held in str(refused[0].refused)


def test_tune_refusal_reports_its_reason(tmp_path: Path) -> None:
    """In the terminal, beside settings that can serve the trace."""
    pytest.importorskip("optuna")
    done = run(
        *("tune", "workload:uniform", "--model", "llama-3-8b", "--memory", "10GiB", "--hardware", "l4,l40s"),
        *("--slo", "tpot-p99=1s", "--price", "l4=0.8/h,l40s=1.2/h", "--out", tmp_path, "--jobs", "1"),
    )
    assert "\nrefused: llama-3-8b does not fit: 14.96 GiB of bf16 weights and 10 GiB of cache are more" in done.stdout
    assert "cheapest: hardware l40s, 1.20 an hour" in done.stdout
    assert "times are those of L40S with bf16 weights, L4 with bf16 weights\n" in done.stdout
    assert sum(line.endswith(": refused") for line in done.stderr.splitlines()) == 1


def test_tune_hardware_without_price_is_rejected(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor, pytest.raises(ConfigError, match="no price for l40s, h100"):
        tune(SOURCE, AXES, parse_aims("ttft-p99=1s"), {"l4": 1.0}, tmp_path, executor=executor)


def test_tune_command_writes_its_trials(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    base = ("tune", "workload:uniform", "--model", "llama-3-8b", "--memory", "1GiB", "--out", tmp_path, "--jobs", "1")
    priced = (*base, "--hardware", "l40s,h100", "--price", "l40s=1.2/h,h100=60/d")
    text = run(*priced, "--slo", "ttft-p99=1s,tpot-p99=40ms").stdout
    for part in (
        "2 settings tried, 2 meet the aims",
        "cheapest: hardware l40s, 1.20 an hour; tpot-p99 is ",
        "runner-up: hardware h100, 108.33% dearer; ",
        "goodput/s",
    ):
        assert part in text
    text = run(*priced, "--slo", "tpot-p99=10ms").stdout
    assert "cheapest: hardware h100, 2.50 an hour" in text
    assert "no other setting meets the aims; nearest: hardware l40s; tpot-p99 is " in text
    text = run(*priced, "--slo", "tpot-p99=1ms").stdout
    assert "no setting meets the aims; nearest: hardware h100, 2.50 an hour; tpot-p99 is " in text
    made = json.loads(run(*priced, "--slo", "tpot-p99=10ms", "--json").stdout)
    assert [one["keeps_aims"] for one in made] == [True, False]
    assert "no unit of time" in error(*base, "--slo", "ttft-p99=1s", "--price", "h100=2.5")
    assert "no price for h100" in error(*base, "--slo", "ttft-p99=1s", "--price", "l4=2.5/h")
    assert "trials" in error(*base, "--slo", "ttft-p99=1s", "--price", "h100=2.5/h", "--trials", "0")


def test_tune_without_optuna_names_the_extra(tmp_path: Path) -> None:
    with patch.dict("sys.modules", {"optuna": None}):
        line = error(
            *("tune", "workload:uniform", "--model", "llama-3-8b", "--memory", "1GiB", "--out", tmp_path),
            *("--slo", "ttft-p99=1s", "--price", "h100=2.5/h", "--jobs", "1"),
        )
    assert "hybridkv[cli,tune]" in line
