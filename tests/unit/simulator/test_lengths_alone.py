"""Traces that tell lengths alone: nobody knows which of their tokens are equal, so hits are unknown, never 0."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli_support import error, run
from hybridkv.models import read_model
from hybridkv.simulator import ReplaySettings, TraceFile, convert, describe, plan_for_trace, replay, replay_replicas

BASE = ("--model", "llama-3-8b", "--memory", "1GiB")
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
UNKNOWN = "unknown: the trace holds only lengths"


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    """Twenty requests of equal lengths, a second apart, whose cache overflows."""
    path = tmp_path / "azure.csv"
    rows = (f"2023-11-16 18:15:{at:02}.0000000,2000,20\n" for at in range(20))
    path.write_text(AZURE + "".join(rows), "utf-8")
    return path


def written(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 1000 * at, **line}) + "\n" for at, line in enumerate(lines)))
    return path


def test_lengths_only_replay_reports_unknown_hits(azure: Path) -> None:
    text = run("replay", azure, *BASE).stdout
    said = "lengths only      the trace does not say which tokens are equal: hits are unknown, times assume no hits\n"
    assert said in text
    for name in ("hit tokens", "hit rate"):
        assert re.search(rf"{name} +unknown ", text)
    for claim in ("0.00%", "ends at", "tokens missed", "of all\n"):
        assert claim not in text
    assert "time to first token (TTFT), mean" in text
    made = json.loads(run("replay", azure, *BASE, "--json").stdout)
    assert [made[name] for name in ("hit_tokens", "hit_rate", "missed_tokens", "missed_a_gib_more")] == [None] * 4
    assert (made["ends"], made["tenants"], made["misses"]) == ([], [], {})
    assert made["computed_tokens"] == made["prompt_tokens"] + made["output_tokens"] - made["requests"]


def test_lengths_only_burstgpt_and_aiperf_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "burstgpt.csv"
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path.write_text(head + "5,ChatGPT,472,18,490,Conversation log\n", "utf-8")
    assert not TraceFile(path).summary().tokens_known
    lengths = {"input_length": 40, "output_length": 3}
    assert not TraceFile(written(tmp_path, lengths, lengths)).summary().tokens_known
    session = tmp_path / "session.jsonl"
    turn = '{"session_id": "a", %s, "input_length": 40, "output_length": 3}\n'
    session.write_text(turn % '"timestamp": 0' + turn % '"delay": 10', "utf-8")
    told = TraceFile(session).summary()
    assert told.tokens_known  # its second turn begins with the first
    with_text = {"text_input": "What is a cache?", "output_length": 3}
    assert TraceFile(written(tmp_path, lengths, with_text), tokenizer="bytes:4").summary().tokens_known


def test_lengths_only_trace_description_has_no_hits(azure: Path) -> None:
    source = TraceFile(azure)
    plan = plan_for_trace(source.summary(), read_model("llama-3-8b"), "1GiB")
    fleet = replay_replicas(source, plan, replicas=2)
    reports = (replay(source, plan, ReplaySettings(remembered_losses=100)), fleet.whole, *fleet.replicas)
    assert {(one.hit_tokens, one.hit_rate, bool(one.misses)) for one in reports} == {(None, None, False)}
    assert [one["hit_rate"] for one in fleet.to_dict({})["replicas"]] == [None, None]  # type: ignore[attr-defined]  # a document
    told = describe(source)
    assert (told.shared_tokens, told.shared_lengths, told.shared, told.hits) == (None, None, (), ())


def test_lengths_only_trace_command_prints_no_hits(azure: Path) -> None:
    text = run("trace", "describe", azure).stdout
    assert re.search(r"shared prefixes +unknown ", text)
    assert "endless cache" not in text
    assert json.loads(run("trace", "describe", azure, "--json").stdout)["shared_tokens"] is None


def test_lengths_only_trace_stays_so_after_conversion(azure: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert convert(TraceFile(azure), out) == 20
    assert json.loads(out.read_text("utf-8").splitlines()[3]) == {"timestamp": 3000, "prompt": 2000, "output": 20}
    made = TraceFile(out)
    assert made.format_name == "token-exact"
    assert made.summary().tokens_known is False
    documents = [json.loads(run("replay", path, *BASE, "--json").stdout) for path in (azure, out)]
    names = ("steps", "simulated_s", "time_to_first_token_s", "computed_tokens", "hit_rate")
    assert [documents[0][name] for name in names] == [documents[1][name] for name in names]
    for wrong, said in (
        ({"prompt": 0, "output": 1}, "Expected `int` >= 1 - at `$.prompt`"),
        ({"prompt": 5}, "`output`"),
    ):
        assert said in error("replay", written(tmp_path, wrong), "--format", "token-exact", *BASE)


def test_lengths_only_trace_is_not_explained(azure: Path, tmp_path: Path) -> None:
    for asked in (
        ("explain", azure, "3"),
        ("replay", azure, "--explain"),
        ("replay", azure, "--explain-to", tmp_path / "why.jsonl"),
    ):
        assert "azure.csv holds only lengths" in error(*asked, *BASE)


def test_lengths_only_sweep_names_no_winner_by_hits(azure: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out", "--jobs", "1")
    page = tmp_path / "sweep.html"
    asked = ("sweep", azure, "--model", "llama-3-8b", "--memory", "1GiB,2GiB", *out)
    text = run(*asked, "--report", page).stdout
    assert len(re.findall(r"GiB +unknown ", text)) == 2
    assert "%" not in text
    assert [one["report"]["hit_rate"] for one in json.loads(run(*asked, "--json").stdout)] == [None, None]
    facts, charts, rows = read(page)
    assert facts["hit rate"] == UNKNOWN
    assert facts["machines"] == "H100 SXM with bf16 weights"
    assert not any("highest hit rate" in name for name in facts)
    assert not any("Hit rate" in title for title in charts)
    assert [row[1] for row in rows[1:]] == ["unknown", "unknown"]


def test_lengths_only_search_names_its_winner_by_times(azure: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    page = tmp_path / "tune.html"
    priced = ("--slo", "ttft-p99=1s", "--price", "h100=2.5/h", "--out", tmp_path / "out", "--jobs", "1")
    text = run("tune", azure, "--model", "llama-3-8b", "--memory", "1GiB,2GiB", *priced, "--report", page).stdout
    assert "cheapest: memory " in text
    facts, _, _ = read(page)
    assert facts["machines"] == "H100 SXM with bf16 weights"
    assert not any("found" in name or "hit" in name for name in facts)


def test_lengths_only_report_page_omits_hits(azure: Path, tmp_path: Path) -> None:
    page = tmp_path / "replay.html"
    run("replay", azure, *BASE, "--report", page)
    facts, charts, _ = read(page)
    assert facts["hit rate"] == UNKNOWN
    assert facts["machine"] == "1 x H100 SXM: 14.96 GiB of bf16 weights + 1 GiB of cache in 74.51 GiB"
    assert "Hit rate" not in charts
    assert "Time to first token" in charts
    run("replay", azure, *BASE, "--time-scale", "0", "--report", page)
    facts, charts, _ = read(page)
    assert facts["machine"] == "no machine: steps take no time"
    assert not any("time to first token" in name or "time per output token" in name for name in facts)
    assert "Time to first token" not in charts


def test_lengths_only_doctor_skips_hit_checks(azure: Path) -> None:
    made = json.loads(run("doctor", azure, "--model", "qwen3.5-35b-a3b", "--memory", "8GiB", "--json").stdout)
    assert made["figures"]["blocks_and_prefixes"] == UNKNOWN
    assert "states_and_requests" in made["figures"]
    assert not any("hit rate" in str(one) for one in made["findings"])


def read(page: Path) -> tuple[dict[str, str], list[str], list[list[str]]]:
    """Facts, titles of charts and tables, and rows of the table."""
    text = page.read_text("utf-8")
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)), titles, rows
