"""Each finding by a scenario that provokes it, none on a healthy one; remedies are replayed, and prove themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cli_support import error, run
from hybridkv import doctor
from hybridkv.doctor import plans
from hybridkv.models import read_model
from hybridkv.planner import Plan
from hybridkv.planner import plan as make_plan
from hybridkv.simulator import ReplaySettings, Simulation, simulation_of
from token_traces import trace

HYBRID = ("--model", "qwen3.5-35b-a3b")
ALL = {"blocks_and_prefixes", "states_read_again", "states_and_requests", "windows", "salts", "found", "tiers"}


def wrong(*asked: str | Path) -> dict[str, dict[str, Any]]:
    """Findings by name."""
    told = json.loads(run("doctor", *asked, "--json").stdout)
    assert {one["name"] for one in told["findings"]} <= told["figures"].keys() <= ALL
    for one in told["findings"]:
        assert told["figures"][one["name"]] == one["figure"]
        assert one["said"]
        assert one["remedy"]
    return {one["name"]: one for one in told["findings"]}


def plan(tmp_path: Path, *asked: str) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(run("plan", *asked, "--json").stdout, "utf-8")
    return path


# -- plans


def test_doctor_of_healthy_plan_finds_nothing(tmp_path: Path) -> None:
    assert wrong(plan(tmp_path, "qwen3.5-35b-a3b", "--memory", "40GiB")) == {}
    shown = run("doctor", tmp_path / "plan.json").stdout
    assert "no problems found" in shown
    assert "fine: blocks and prefixes: hits end at any token" in shown
    assert wrong(plan(tmp_path, "gemma-3-27b", "--memory", "40GiB", "--layout", "reference")) == {}


def test_doctor_of_plan_with_large_blocks_reports_them(tmp_path: Path) -> None:
    found = wrong(plan(tmp_path, "qwen3.5-35b-a3b", "--memory", "80GiB", "--layout", "reference"))
    assert found.keys() == {"blocks_and_prefixes"}
    assert "1,056 tokens" in found["blocks_and_prefixes"]["figure"]


def test_doctor_of_plan_with_heavy_states_reports_them(tmp_path: Path) -> None:
    asked = ("qwen3.5-35b-a3b", "--memory", "40GiB", "--placement")
    found = wrong(plan(tmp_path, *asked, "interval:128"))
    assert found.keys() == {"states_read_again"}
    assert "3,136 tokens" in found["states_read_again"]["figure"]
    assert wrong(plan(tmp_path, *asked, "interval:2048")) == {}


def test_doctor_of_plan_with_few_states_reports_it(tmp_path: Path) -> None:
    path = plan(tmp_path, "qwen3.5-35b-a3b", "--memory", "8GiB")
    found = wrong(path)
    assert found.keys() == {"states_and_requests"}
    assert "256 may run" in found["states_and_requests"]["figure"]
    assert wrong(path, "--max-running", "32") == {}


def test_doctor_of_plan_with_windows_as_full_reports_it(tmp_path: Path) -> None:
    found = wrong(plan(tmp_path, "gemma-3-27b", "--memory", "80GiB", "--windows-as-full"))
    assert found.keys() == {"windows"}
    proof = found["windows"]["proof"]
    assert proof["after"] > 2 * proof["before"]
    assert "WRONG: Layers that read only a window keep every token." in run("doctor", tmp_path / "plan.json").stdout


# -- traces


def test_doctor_of_healthy_trace_finds_nothing(tmp_path: Path) -> None:
    trace(tmp_path / "t.jsonl", *([[1, 0, 3000], [2 + at, 0, 50]] for at in range(12)))
    for more in ((), ("--layout", "reference")):
        assert wrong(tmp_path / "t.jsonl", *HYBRID, "--memory", "8GiB", *more) == {}
    assert wrong(tmp_path / "t.jsonl", "--model", "gemma-3-27b", "--memory", "8GiB") == {}


def test_doctor_of_trace_sharing_less_than_a_block_reports_it(tmp_path: Path) -> None:
    trace(tmp_path / "t.jsonl", *([[1, 0, 800], [2 + at, 0, 50]] for at in range(12)))
    found = wrong(tmp_path / "t.jsonl", *HYBRID, "--memory", "8GiB", "--layout", "reference")
    assert found.keys() == {"blocks_and_prefixes"}
    proof = found["blocks_and_prefixes"]["proof"]
    assert (proof["figure"], proof["before"]) == ("hit rate", 0.0)
    assert proof["after"] > 0.7
    assert wrong(tmp_path / "t.jsonl", *HYBRID, "--memory", "8GiB") == {}


def test_doctor_of_trace_with_unread_states_reports_it(tmp_path: Path) -> None:
    """Forty conversations that nobody resumes, in the memory of some."""
    trace(tmp_path / "t.jsonl", *([[at, 0, 4000]] for at in range(40)))
    asked = (tmp_path / "t.jsonl", *HYBRID, "--memory", "4GiB", "--eviction", "lru")
    found = wrong(*asked, "--placement", "interval:512")
    assert found.keys() == {"states_read_again"}
    assert "placement interval:512" in found["states_read_again"]["figure"]
    assert found["states_read_again"]["remedy"] == "--placement ends"
    assert wrong(*asked, "--placement", "none") == {}
    roomy = (tmp_path / "t.jsonl", *HYBRID, "--memory", "40GiB", "--eviction", "lru", "--placement", "interval:512")
    assert wrong(*roomy, "--hardware", "b200") == {}  # they are in nobody's way


def test_doctor_of_trace_with_few_states_reports_it(tmp_path: Path) -> None:
    trace(tmp_path / "t.jsonl", *([[1, 0, 400], [2 + at, 0, 100]] for at in range(40)), gap_s=0.01, output=200)
    found = wrong(tmp_path / "t.jsonl", *HYBRID, "--memory", "1GiB")
    assert found.keys() == {"states_and_requests"}
    proof = found["states_and_requests"]["proof"]
    assert proof["after"] < proof["before"] / 2
    assert wrong(tmp_path / "t.jsonl", *HYBRID, "--memory", "8GiB") == {}


def test_doctor_of_short_burst_trace_reports_it(tmp_path: Path) -> None:
    """It is over before the first 64 steps are."""
    trace(tmp_path / "t.jsonl", *([[at, 0, 200]] for at in range(24)), gap_s=0.0, output=8)
    found = wrong(tmp_path / "t.jsonl", *HYBRID, "--memory", "1GiB")
    assert found.keys() == {"states_and_requests"}
    assert ", 24 could run at once" in found["states_and_requests"]["figure"]


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_doctor_remedy_is_replayed_on_the_same_ranks(
    ranks: tuple[int, int], tmp_path: Path, replayed: list[Plan]
) -> None:
    source = trace(tmp_path / "t.jsonl", *([[1, 0, 800], [2 + at, 0, 50]] for at in range(4)))
    made = make_plan(read_model("llama-3-8b", block_size=512), "8GiB", layout="reference", dcp=ranks[0], pcp=ranks[1])
    found = doctor.examine_trace(source, made, ReplaySettings())
    assert [one.name for one in found.findings] == ["blocks_and_prefixes"]
    assert [one.layout for one in replayed] == ["reference", "natural"]
    assert {(one.limits.dcp, one.limits.pcp) for one in replayed} == {ranks}


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans of the replays from now on."""
    seen: list[Plan] = []

    def see(plan: Plan, settings: ReplaySettings) -> Simulation:
        seen.append(plan)
        return simulation_of(plan, settings)

    monkeypatch.setattr(plans, "simulation_of", see)
    return seen


def test_doctor_remedy_is_replayed_with_the_same_encoder_tokens(tmp_path: Path, replayed: list[Plan]) -> None:
    source = trace(tmp_path / "t.jsonl", *([[1, 0, 450], [2 + at, 0, 50]] for at in range(4)))
    model = read_model("flan-t5-large", block_size=512)
    given = make_plan(model, "4GiB", max_model_len=1024, max_encoder_tokens=10, layout="reference")
    doctor.examine_trace(source, given, ReplaySettings())
    assert [one.limits.max_encoder_tokens for one in replayed] == [10, 10]


def test_doctor_remedy_is_replayed_with_valid_kernel_blocks(tmp_path: Path, replayed: list[Plan]) -> None:
    source = trace(tmp_path / "t.jsonl", *([[at % 4, 0, 6000], [100 + at, 0, 20]] for at in range(8)))
    model = read_model("gemma-3-27b", block_size=32)
    given = make_plan(model, "6GiB", max_model_len=8000, windows_as_full=True, kernel_block_size=16)
    found = doctor.examine_trace(source, given, ReplaySettings())
    assert [one.name for one in found.findings] == ["windows"]
    assert [one.kernel_block_size for one in replayed] == [16, 16]
    assert make_plan(model, "6GiB", max_model_len=8000).kernel_block_size is None


def test_doctor_of_trace_with_windows_as_full_reports_it(tmp_path: Path) -> None:
    prompts = [[[at % 4, 0, 6000], [100 + at, 0, 20]] for at in range(16)]
    trace(tmp_path / "t.jsonl", *prompts)
    asked = (tmp_path / "t.jsonl", "--model", "gemma-3-27b", "--memory", "6GiB")
    found = wrong(*asked, "--windows-as-full")
    assert found.keys() == {"windows"}
    assert found["windows"]["proof"]["after"] > found["windows"]["proof"]["before"]
    assert wrong(*asked) == {}
    shown = run("doctor", *asked, "--windows-as-full")
    assert "proof:    hit rate" in shown.stdout
    assert "doctor: replay without --windows-as-full" in shown.stderr


@pytest.mark.parametrize("salted", [True, False])
def test_doctor_of_trace_with_a_salt_per_request_reports_it(salted: bool, tmp_path: Path) -> None:
    system = "You are a helpful assistant. " * 40
    lines = [
        {
            "time": at,
            "body": {
                "messages": [{"role": "system", "content": system}, {"role": "user", "content": f"Question {at}?"}],
                "max_tokens": 4,
                "cache_salt": f"request-{at}" if salted else "team",
            },
        }
        for at in range(12)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    asked = (tmp_path / "log.jsonl", "--tokenizer", "bytes:4", "--model", "llama-3-8b", "--memory", "8GiB")
    found = wrong(*asked)
    assert found.keys() == ({"salts"} if salted else set())
    if salted:
        assert (found["salts"]["proof"]["before"], found["salts"]["proof"]["after"] > 0.8) == (0.0, True)


# -- servers


def metrics(
    tmp_path: Path,
    *,
    hits: int = 50_000,
    held: int = 4,
    evictable: int = 10,
    no_space: int = 0,
    ends: str = "",
    **missed: int,
) -> Path:
    lines = [
        "hybridkv:num_requests_running 4",
        "hybridkv:prefix_cache_queries_total 100000",
        f"hybridkv:prefix_cache_hits_total {hits}",
        f'hybridkv:kv_group_blocks{{group="0",kind="state",state="held"}} {held}',
        f'hybridkv:kv_group_blocks{{group="0",kind="state",state="evictable"}} {evictable}',
        f'hybridkv:num_requests_waiting_by_reason{{reason="no_space"}} {no_space}',
        *(f'hybridkv:prompt_tokens_missed_total{{reason="{name}"}} {count}' for name, count in missed.items()),
        *ends.splitlines(),
    ]
    path = tmp_path / "metrics.txt"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def ends(made: int, hits: int, gone: int, unused: int) -> str:
    return (
        f"hybridkv:kv_ends_stored_total {made}\nhybridkv:kv_end_hits_total {hits}\n"
        f"hybridkv:kv_ends_evicted_total {gone}\nhybridkv:kv_ends_evicted_unused_total {unused}\n"
    )


def test_doctor_of_healthy_metrics_finds_nothing(tmp_path: Path) -> None:
    assert wrong(metrics(tmp_path, block_edge=100, other_salt=0, ends=ends(1000, 900, 500, 200))) == {}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("blocks_and_prefixes", {"block_edge": 30_000}),
        ("salts", {"other_salt": 30_000}),
        ("states_and_requests", {"evictable": 0, "no_space": 3}),
        ("states_read_again", {"ends": ends(1000, 3, 900, 890)}),
        ("found", {"hits": 0}),
    ],
)
def test_doctor_of_metrics_reports_findings(name: str, given: dict[str, Any], tmp_path: Path) -> None:
    assert wrong(metrics(tmp_path, **given)).keys() == {name}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    text = metrics(tmp_path, other_salt=30_000).read_bytes()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Answers)
    thread = Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    thread.join()
    listening.server_close()


def test_doctor_of_server_reads_its_metrics(server: str) -> None:
    assert wrong(server).keys() == wrong(f"{server}/metrics").keys() == {"salts"}


# -- what is none of these


def test_doctor_with_bad_input_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"a": 1, "b": [2]}, indent=2), "utf-8")
    assert "is not a plan" in error("doctor", tmp_path / "other.json")
    (tmp_path / "broken.json").write_text('{"schema": "hybridkv.plan", "version": 1}', "utf-8")
    error("doctor", tmp_path / "broken.json")
    (tmp_path / "half.txt").write_text("hybridkv:num_requests_running{", "utf-8")
    assert "half.txt" in error("doctor", tmp_path / "half.txt")
    assert "cannot read" in error("doctor", tmp_path / "nowhere.jsonl", *HYBRID, "--memory", "8GiB")
    assert "--model and --memory missing" in error("doctor", "workload:chat")
    assert "check that a server listens there" in error("doctor", "http://127.0.0.1:1")
