"""Single requests explained: files whose tokens add up, what is said of evictions and states, and that it is so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_support import error, run
from hybridkv.cache import Miss, MissReason
from hybridkv.models import read_model
from hybridkv.schedule import Scheduler
from hybridkv.simulator import ReplaySettings, TraceFile, Workload, plan_for_trace, simulation_of
from hybridkv.simulator.report import AT_MOST, ESTIMATE, Explained, explained_file
from token_traces import trace

LLAMA = ("--model", "llama-3-8b")
SMALL = ("workload:chat", *LLAMA, "--memory", "1GiB", "--hours", "0.03")


def explained(
    source: TraceFile | Workload,
    model: str,
    memory: str,
    layout: str = "natural",
    **more: Any,  # noqa: ANN401 - fields of ReplaySettings
) -> tuple[list[Explained], Scheduler]:
    summary = source.summary()
    plan = plan_for_trace(summary, read_model(model), memory, layout=layout)
    settings = ReplaySettings(remembered_losses=1 << 16, block_times=True, **more)
    simulation, told = simulation_of(plan, settings), list[Explained]()
    simulation.run(source, summary=summary, on_explained=told.append)
    return told, simulation.scheduler


@pytest.mark.parametrize("layout", ["natural", "reference"])
def test_explained_prompt_is_the_sum_of_hit_and_misses(layout: str) -> None:
    told, scheduler = explained(Workload("mix", hours=0.1, limit=60), "qwen3.5-35b-a3b", "6GiB", layout)
    assert sorted(one.number for one in told) == list(range(60))
    sums = dict.fromkeys(MissReason, 0)
    for one in told:
        assert one.hit_tokens + sum(miss.tokens for miss in one.misses) == one.trace.num_prompt_tokens
        ends = [one.hit_tokens, *(miss.end for miss in one.misses)]
        assert [miss.first for miss in one.misses] == ends[:-1]
        for miss in one.misses:
            sums[miss.reason] += miss.tokens
    assert {reason: tokens for reason, tokens in sums.items() if tokens} == scheduler.statistics().misses


def test_explained_eviction_names_the_evicting_request_and_idle_time(tmp_path: Path) -> None:
    """Room for one of three prompts: the second takes that of the first one."""
    source = trace(tmp_path / "t.jsonl", [[1, 0, 4000]], [[2, 0, 4000]], [[1, 0, 4000]])
    told, _ = explained(source, "llama-3-8b", "640MiB", "reference", eviction="lru")
    gone, edge, last = told[2].misses
    assert (gone.reason, gone.first, gone.end, gone.by) == (MissReason.EVICTED, told[2].hit_tokens, 3984, "1")
    assert (edge.reason, edge.tokens) == (MissReason.BLOCK_EDGE, 15)
    assert gone.ago_s == pytest.approx(100, abs=1)
    assert gone.idle_s == pytest.approx(100, abs=1)
    assert last.reason is MissReason.LAST_TOKEN
    for in_order, bound in ((True, AT_MOST), (False, ESTIMATE)):
        said = json.loads(json.dumps(told[2].to_dict(in_order=in_order)))["misses"][0]
        assert said["more_bytes_is"] == bound


@pytest.mark.parametrize("seed", range(6))
def test_explained_extra_memory_prevents_the_eviction(seed: int) -> None:
    """In the reference layout, requests one after the other: the bound holds, whatever came in between."""
    source = Workload("chat", seed=seed, hours=0.05, limit=25)
    told, scheduler = explained(source, "llama-3-8b", "1GiB", "reference", max_running=1)
    assert scheduler.cache.bounds.evicts_in_order
    memory, found = scheduler.cache.config.arena_bytes, 0
    for one in told:
        more = [miss for miss in one.misses if miss.more_bytes is not None]
        if not more or found == 3:
            continue
        found += 1
        wanted = max(miss.more_bytes or 0 for miss in more)
        again, _ = explained(source, "llama-3-8b", str(memory + wanted), "reference", max_running=1)
        same = next(other for other in again if other.number == one.number)
        assert not [miss for miss in same.misses if miss.reason is MissReason.EVICTED]
        assert same.hit_tokens > one.hit_tokens
    assert found


def test_explained_interval_keeps_a_state_there(tmp_path: Path) -> None:
    source = trace(tmp_path / "t.jsonl", [[1, 0, 3000]], [[1, 0, 2000], [2, 0, 50]])
    told, _ = explained(source, "qwen3.5-35b-a3b", "8GiB", eviction="lru")
    lacking, *_ = told[1].misses
    assert (lacking.reason, lacking.first, lacking.tokens) == (MissReason.NO_STATE, 0, 2000)
    assert (lacking.nearest_state, lacking.interval) == (0, 1024)
    said = json.loads(json.dumps(told[1].to_dict(in_order=False)))["misses"][0]
    assert (said["placement"], said["state_at"]) == ("interval:1024", 1024)
    again, _ = explained(source, "qwen3.5-35b-a3b", "8GiB", placement=said["placement"], eviction="lru")
    assert again[1].hit_tokens == 1024
    assert again[1].misses[0].nearest_state == 1024


def test_explained_with_small_memory_stays_within_it(tmp_path: Path) -> None:
    out = tmp_path / "few.jsonl"
    few = json.loads(run("replay", *SMALL, "--explain-to", out, "--remember", "64", "--json").stdout)
    many = json.loads(run("replay", *SMALL, "--explain", "--json").stdout)
    assert few["misses"].get("evicted", 0) < many["misses"]["evicted"]
    assert few["misses"]["never_seen"] > many["misses"]["never_seen"] or "unpublished" in few["misses"]
    assert sum(few["misses"].values()) == sum(many["misses"].values())


def test_explained_file_has_a_line_per_request(tmp_path: Path) -> None:
    out = tmp_path / "why.jsonl"
    document = json.loads(run("replay", *SMALL, "--explain-to", out, "--json").stdout)
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len(lines) == document["requests"]
    found = dict.fromkeys(document["misses"], 0)
    for one in lines:
        assert one["hit_tokens"] + sum(miss["tokens"] for miss in one["misses"]) == one["prompt_tokens"]
        for miss in one["misses"]:
            found[miss["reason"]] += miss["tokens"]
    assert found == document["misses"]
    assert any("by" in miss and "more_bytes" in miss and "idle_s" in miss for one in lines for miss in one["misses"])
    asked = next(one for one in lines if len(one["misses"]) > 2)
    alone = json.loads(run("explain", SMALL[0], str(asked["request"]), *SMALL[1:], "--json").stdout)
    machine = "1 x H100 SXM: 14.96 GiB of bf16 weights + 1 GiB of cache in 74.51 GiB"
    assert alone == {"machine": machine, **asked}


def test_explained_parquet_matches_the_lines(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run("replay", *SMALL, "--explain-to", tmp_path / "why.parquet")
    run("replay", *SMALL, "--explain-to", tmp_path / "why.jsonl")
    rows = parquet.read_table(tmp_path / "why.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "why.jsonl").read_text("utf-8").splitlines()]
    for row, line in zip(rows, lines, strict=True):
        assert row["prompt_tokens"] == row["hit_tokens"] + sum(row[reason.value] for reason in MissReason)
        row["misses"] = [{k: v for k, v in miss.items() if v is not None} for miss in row["misses"]]
        assert {name: row[name] for name in line} == line


def test_explained_file_with_invalid_path_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "could not be written" in error_behind_plan("--explain-to", tmp_path / "nowhere" / "a.jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "hybridkv[parquet]" in error_behind_plan("--explain-to", tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == []


def error_behind_plan(*more: str | Path) -> str:
    """The last line of a replay that fails once it is planned."""
    return run("replay", *SMALL, *more, code=2).stderr.splitlines()[-1]


def test_explained_file_of_failed_replay_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), explained_file(tmp_path / "a.jsonl", in_order=True):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_explain_command_describes_one_request(tmp_path: Path) -> None:
    trace(tmp_path / "t.jsonl", [[1, 0, 4000]], [[2, 0, 4000]], [[1, 0, 4000]], [[1, 0, 4000]])
    asked = ("--memory", "640MiB", "--layout", "reference", *LLAMA)
    shown = run("explain", tmp_path / "t.jsonl", "2", *asked).stdout
    assert "evicted 100.0 s before, for request 1, by lru: the blocks of group 0 (full attention)" in shown
    assert "more memory would have kept them" in shown
    assert "1,088 .. 3,983  " + " " * 6 + "▒" * 18 in shown
    shown = run("explain", tmp_path / "t.jsonl", "3", *asked).stdout
    assert "3,984 hit tokens, hit rate 99.60%" in shown
    assert "in a partial block" in shown
    assert "there is no request 4" in error("explain", tmp_path / "t.jsonl", "4", *asked)
    for command in (
        ("explain", tmp_path / "t.jsonl", "3"),
        ("replay", tmp_path / "t.jsonl", "--explain-to", tmp_path / "to.jsonl"),
    ):
        assert "--remember" in error(*command, *asked, "--remember", "0")
    plain = error("replay", tmp_path / "t.jsonl", *asked, "--remember", "64")
    assert "--remember has no effect without --explain" in plain


def test_explain_command_describes_a_missing_state(tmp_path: Path) -> None:
    trace(tmp_path / "t.jsonl", [[1, 0, 3000]], [[1, 0, 2000], [2, 0, 50]])
    asked = ("explain", tmp_path / "t.jsonl", "1", "--model", "qwen3.5-35b-a3b", "--memory", "8GiB")
    shown = run(*asked).stdout
    assert (
        "no recurrent state was saved here: there is none; --placement interval:1024 would have saved one at 1,024"
        in shown
    )


def test_explained_equal_misses_merge_and_keep_details() -> None:
    first = Miss(0, 4, MissReason.NO_STATE)
    assert Miss(4, 3, MissReason.NO_STATE).joined_with(first) == Miss(0, 7, MissReason.NO_STATE)
