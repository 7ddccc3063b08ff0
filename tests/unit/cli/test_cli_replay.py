"""`hybridkv replay` as a user runs it."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_support import error, run
from hybridkv.eviction import DEFAULT_EVICTIONS, EVICTIONS
from hybridkv.simulator import UniformWorkload

BASE = ("--model", "llama-3-8b", "--memory", "4GiB")
CHAT = ("replay", "workload:chat", "--hours", "0.01", *BASE)


def document(*arguments: str | Path) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.stderr == ""
    made = json.loads(done.stdout)
    assert isinstance(made, dict)
    return made


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uniform workload as a file."""
    path = tmp_path_factory.mktemp("traces") / "uniform.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": one.timestamp_s * 1000,
                    "prompt": one.prompt.pieces,
                    "output": one.output.pieces,
                    "marks": [1],
                }
            )
            + "\n"
            for one in UniformWorkload()
        ),
        "utf-8",
    )
    return path


def test_replay_command_prints_text() -> None:
    text = run("replay", "workload:uniform", *BASE).stdout
    hits = UniformWorkload().hit_tokens(16, exact=True)
    for pattern in (
        # before the run: what it finds
        (
            r"\Allama-3-8b, tp 1, 4 GiB: blocks of 16 tokens\n"
            r"layout natural, no recurrent states, bfloat16 cache\n"
            r"up to 256 requests and 8,192 tokens a step\n"
            r"on 1 x H100 SXM: 14\.96 GiB of bf16 weights \+ 4 GiB of cache in 74\.51 GiB\n"
            r"longest request   382 tokens, from request 30\n"
        ),
        r"group +layers +block +published +evictions +cached +copied ",
        r"0 +32 x full attention +16 +[\d,]+ +0 +[\d,]+ +30 ",
        r"requests +40 ",
        r"prompt tokens +10,960 ",
        rf"hit tokens +{hits:,} ",
        rf"hit rate +{hits / 10_960:.2%} ",
        r"preemptions +0 ",
        r"blocks moved +0, 0 B ",
        r"computed tokens",
        r"peak memory use +\d+\.\d\d% ",
        r"steps +\d+",
        r"time to first token \(TTFT\), mean",
        r"took +\d+\.\d s for 39\d\.\d s of simulated time",
    ):
        assert re.search(pattern, text), pattern
    assert "\x1b" not in text
    assert "bad lines" not in text
    assert "caching is off" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_replay_command_prints_json(trace: Path) -> None:
    made = document("replay", trace, *BASE, "--tp", "2", "--max-running", "9", "--token-budget", "100")
    hits = UniformWorkload().hit_tokens(16, exact=True)
    assert (made["schema"], made["version"], made["source"]) == ("hybridkv.replay", 1, "uniform.jsonl")
    assert made["settings"] == {
        "model": "llama-3-8b",
        "dtype": "bfloat16",
        "tp": 2,
        "block_size": 16,
        "layout": "natural",
        "placement": None,
        "dcp": 1,
        "pcp": 1,
        "encoder_tokens": 0,
        "memory_bytes": 4 << 30,
        "num_blocks": 4096,
        "unit": "slab",
        "unit_bytes": 2**20,
        "max_model_len": 382,
        "max_model_len_from": "longest request",
        "max_running": 9,
        "token_budget": 100,
        "time_scale": 1.0,
        "prefix_caching": True,
        "remembered_losses": 0,
        "eviction": DEFAULT_EVICTIONS["natural"].name,
        "prefix_match_unit": None,
        "shares": [{"tenant": None, "guaranteed": 0.0, "greatest": 1.0}],
        "weights": "bf16",
        "speculation": None,
        "short_share": None,
        "host_memory": None,
        "disk_memory": None,
        "disk_bytes_per_s": 3e9,
        "hardware": {
            "name": "H100 SXM",
            "flops_per_s": 989e12,
            "bytes_per_s": 3.35e12,
            "compute_efficiency": 0.5,
            "memory_efficiency": 0.8,
            "overhead_s": 0.001,
            "fp8_flops_per_s": 1979e12,
            "link_bytes_per_s": 450e9,
            "link_efficiency": 0.8,
            "link_latency_s": 0.0,
            "attention_efficiency": 0.0,
            "row_s": 0.0,
            "prompt_row_s": 0.0,
            "memory_bytes": 80e9,
            "host_bytes_per_s": 64e9,
            "host_efficiency": 0.8,
            "sheet": "NVIDIA H100 Tensor Core GPU data sheet, SXM",
        },
    }
    assert made["hit_tokens"] == hits
    assert made["hit_rate"] == hits / 10_960
    assert (made["requests"], made["bad_lines"], made["preemptions"]) == (40, 0, 0)
    assert made["computed_tokens"] == 10_960 - hits + 40 * 20
    assert made["caching_off"] is None
    (group,) = made["groups"]
    assert (group["kind"], group["layers"], group["block_size"], group["copies"]) == ("FullAttentionSpec", 32, 16, 30)
    assert group["published"] == group["cached_blocks"] + group["evictions"] > 0


def test_replay_command_reports_are_byte_equal_with_gzip(trace: Path, tmp_path: Path) -> None:
    zipped = tmp_path / "uniform.jsonl"
    zipped.write_bytes(gzip.compress(trace.read_bytes()))
    first, again, other = (run("replay", path, *BASE, "--json").stdout for path in (trace, trace, zipped))
    assert first == again == other


def test_replay_command_workload_follows_its_seed() -> None:
    first, again, other = (run(*CHAT, "--seed", seed, "--json").stdout for seed in ("7", "7", "8"))
    assert first == again
    assert first != other
    made = json.loads(first)
    assert made["source"] == "workload:chat"
    assert {name: made["settings"][name] for name in ("seed", "hours", "rate", "marks")} == {
        "seed": 7,
        "hours": 0.01,
        "rate": 1.0,
        "marks": False,
    }


def test_replay_command_options_are_applied(trace: Path) -> None:
    made = document("replay", trace, *BASE, "--time-scale", "0", "--block-size", "32", "--limit", "11")
    assert made["simulated_s"] == 100
    assert made["requests"] == 11
    # 7 conversations of the first turn hit the system prompt, the eleventh request 187 + 20 tokens
    assert made["hit_tokens"] == 7 * 32 * 4 + 207
    assert document("replay", trace, *BASE, "--no-prefix-caching")["hit_tokens"] == 0


def test_replay_command_reads_a_mooncake_trace(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1030, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 9000, "input_length": 1030, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 18000, "input_length": 600, "output_length": 3, "hash_ids": [0, 5]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    made = document("replay", path, *BASE)
    # the second prompt is the first one again: all but its last token
    assert made["hit_tokens"] == 1029 + 512
    assert made["longest_tokens"] == 1033
    assert "--trace-block-size" in error("replay", path, *BASE, "--trace-block-size", "256")


def test_replay_command_with_little_memory_preempts(tmp_path: Path) -> None:
    path = tmp_path / "crowd.jsonl"
    path.write_text(
        "".join(f'{{"timestamp": 0, "prompt": [[{k}, 0, 40]], "output": [[{k}, 99, 60]]}}\n' for k in range(20))
    )
    short, ample = (document("replay", path, "--model", "llama-3-8b", "--memory", size) for size in ("64MiB", "1GiB"))
    assert (short["requests"], short["output_tokens"]) == (20, 1200)
    assert ample["preemptions"] == 0
    assert short["preemptions"] > 0
    # who waited for blocks is counted by reason; where layers are all of one kind nothing moves
    assert ample["refusals"] == {}
    assert short["refusals"]
    assert set(short["refusals"]) <= {"no_space", "admission_limit"}
    assert min(short["refusals"].values()) > 0
    assert (short["moves"], short["moved_bytes"]) == (0, 0)
    shown = run("replay", path, "--model", "llama-3-8b", "--memory", "64MiB").stdout
    words = {"no_space": "memory full", "admission_limit": "no memory to grow"}
    for reason, count in short["refusals"].items():
        assert re.search(rf"not admitted: {words[reason]} +{count:,} ", shown)
        assert reason not in shown
    # what was given up ran again
    assert ample["computed_tokens"] == 20 * (40 + 59)
    assert short["computed_tokens"] > 20 * (40 + 59)


def test_replay_command_uses_a_plan_file(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(run("plan", "llama-3-8b", "--memory", "4GiB", "--tp", "2", "--json").stdout, "utf-8")
    assert document("replay", trace, "--plan", path) == document("replay", trace, *BASE, "--tp", "2")
    assert "--plan sets these options already: drop --memory, --tp" in error(
        "replay", trace, "--plan", path, "--memory", "4GiB", "--tp", "2"
    )
    newer = tmp_path / "newer.json"
    newer.write_text(path.read_text("utf-8").replace('"version": 1', '"version": 2'), "utf-8")
    assert "hybridkv.plan version 2 is newer" in error("replay", trace, "--plan", newer)


HYBRID = ("workload:uniform", "--model", "qwen3.5-35b-a3b", "--memory", "4GiB")


def test_replay_command_plan_options_match_the_plan_command() -> None:
    made = document("replay", *HYBRID, "--layout", "reference", "--placement", "align", "--kv-dtype", "fp8")
    assert {name: made["settings"][name] for name in ("dtype", "layout", "placement", "prefix_caching")} == {
        "dtype": "fp8",
        "layout": "reference",
        "placement": "align",
        "prefix_caching": True,
    }
    # half the bytes of a token: 2,096 of them cover a state
    assert [group["block_size"] for group in made["groups"]] == [2096] * 4
    assert made["hit_tokens"] == 0
    text = run("replay", "workload:uniform", "--model", "gemma-3-27b", "--memory", "8GiB", "--windows-as-full").stdout
    assert re.search(r"0 +62 x full attention +16 ", text)


def test_replay_command_reports_states_not_kept() -> None:
    text = run("replay", *HYBRID, "--placement", "none").stdout
    assert "layout natural, placement none, bfloat16 cache\n" in text
    assert "prefix caching is off: placement none keeps no state to resume from\n" in text
    assert re.search(r"hit tokens +0 ", text)
    assert run("replay", "workload:uniform", *BASE, "--no-prefix-caching").stdout.count("off: as asked for\n") == 1


ANY = ("--hardware", "h100-unbounded")
NATURAL = ("workload:uniform", "--model", "jamba-1.5-mini", "--memory", "4GiB", "--layout", "natural", *ANY)


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        (None, "ends"),
        ("ends", "ends"),
        ("align", "align:80"),
        ("align:32", "align:32"),
        ("interval:64", "interval:64"),
        ("none", "none"),
    ],
)
def test_replay_command_placements_are_applied(asked: str | None, used: str) -> None:
    done = run("replay", *NATURAL, *(() if asked is None else ("--placement", asked)))
    assert f"layout natural, placement {used}, bfloat16 cache\n" in done.stdout
    assert re.search(r"blocks moved +[\d,]+, ", done.stdout)
    hits = re.search(r"hit tokens +([\d,]+) ", done.stdout)
    assert hits is not None
    assert (hits[1] == "0") == (used == "none")
    assert ("prefix caching is off: placement none keeps no state" in done.stdout) == (used == "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layout", "natural", "--prefix-match-unit", "32"), "means nothing in the natural layout"),
        (("--layout", "reference", "--prefix-match-unit", "0"), "(--prefix-match-unit) must be at least 1, got 0"),
        (("--layout", "reference", "--prefix-match-unit", "32"), "needs full attention and recurrent states"),
    ],
)
def test_replay_command_rejects_units_that_end_no_hit(options: tuple[str, ...], message: str) -> None:
    shown = error("replay", "workload:uniform", "--model", "llama-3-8b", "--memory", "1GiB", *options)
    assert message in " ".join(shown.split())


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_replay_command_evictions_are_applied(eviction: str) -> None:
    text = run("replay", *NATURAL, "--eviction", eviction).stdout
    assert f"layout natural, placement ends, eviction {eviction}, bfloat16 cache\n" in text
    found = re.search(r"hit tokens +([\d,]+) ", text)
    assert found is not None
    assert found[1] != "0"
    kinds = document("replay", *NATURAL, "--eviction", eviction)["ends"]
    assert bool(kinds) == ("new session" in text) == (eviction != "lru")
    for kind in kinds:
        assert kind["kept"] == sum(one["kept"] for one in kind["classes"])
        assert kind["hits"] == sum(one["hits"] for one in kind["classes"])
    assert any(kind["hits"] for kind in kinds) == bool(kinds)


def test_replay_command_uses_tenants_and_hints(tmp_path: Path) -> None:
    """Of three equal prompts of ``a`` the first is secret: the third finds what the second left."""
    path = tmp_path / "tenants.jsonl"
    line: dict[str, Any] = {"prompt": [[1, 0, 100]], "output": [[2, 0, 3]], "tenant": "a"}
    lines = [{**line, "hints": {"secret": True}}, line, line, {**line, "tenant": "b", "prompt": [[3, 0, 50]]}]
    path.write_text("".join(json.dumps({"timestamp": 1e6 * at, **one}) + "\n" for at, one in enumerate(lines)), "utf-8")
    asked = (path, *NATURAL[1:], "--eviction", "hazard", "--share", "a=30%..60%")
    made = document("replay", *asked)
    assert made["settings"]["shares"][1] == {"tenant": "a", "guaranteed": 0.3, "greatest": 0.6}
    others, a = made["tenants"]
    assert (others["tenant"], others["requests"], others["hit_tokens"]) == ("*", 1, 0)
    assert (a["tenant"], a["requests"], a["prompt_tokens"], a["hit_tokens"]) == ("a", 3, 300, 99)
    assert re.search(r"a +3 +300 +99 +33\.0+ ?% +[\d.]+ [KM]iB", run("replay", *asked).stdout)


def test_replay_command_keeps_the_plan_placement(tmp_path: Path) -> None:
    path, reference = tmp_path / "plan.json", tmp_path / "reference.json"
    options = ("plan", "jamba-1.5-mini", "--memory", "4GiB", "--max-model-len", "400", "--json")
    path.write_text(run(*options, "--layout", "natural", "--placement", "interval:64").stdout, "utf-8")
    made = document("replay", "workload:uniform", "--plan", path, *ANY)
    assert made["settings"]["placement"] == "interval:64"
    assert made == document("replay", *NATURAL, "--placement", "interval:64")
    # the groups are the same for all but none: another placement may be tried on them
    other = document("replay", "workload:uniform", "--plan", path, "--placement", "align", *ANY)
    assert other == document("replay", *NATURAL, "--placement", "align")
    assert other["settings"]["placement"] == "align:80"
    reference.write_text(run(*options, "--layout", "reference").stdout, "utf-8")
    assert "--plan sets these options already: drop --placement, or drop --plan" in error(
        "replay", "workload:uniform", "--plan", reference, "--placement", "align"
    )


@pytest.mark.parametrize(
    "model",
    [
        "qwen3.5-35b-a3b",
        "whisper-large-v3",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ("gpt-oss-120b", "llama-4-scout")),
    ],
)
def test_replay_command_reads_a_plan_from_a_pipe(model: str) -> None:
    options = ("--memory", "8GiB", "--max-model-len", "400")
    plan = run("plan", model, *options, "--json").stdout
    piped = subprocess.run(
        [
            sys.executable,
            "-m",
            "hybridkv",
            "replay",
            "workload:uniform",
            "--plan",
            "-",
            "--json",
            "--hardware",
            "h100-unbounded",
        ],
        input=plan,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert piped.stdout == run("replay", "workload:uniform", "--model", model, *options[:2], "--json", *ANY).stdout
    broken = subprocess.run(
        [sys.executable, "-m", "hybridkv", "replay", "workload:uniform", "--plan", "-"],
        input=plan[:-9],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (broken.returncode, broken.stdout) == (2, "")
    assert broken.stderr.startswith("error: standard input: not JSON: ")


def test_replay_command_maximum_length_is_applied(trace: Path, tmp_path: Path) -> None:
    assert (
        "longest request   500 tokens, set by --max-model-len\n"
        in run("replay", trace, *BASE, "--max-model-len", "500").stdout
    )
    said = error("replay", trace, *BASE, "--max-model-len", "381")
    assert (
        "max_model_len 381 is below the 382 tokens of the longest request (line 31): raise it (--max-model-len)" in said
    )
    long = tmp_path / "long.jsonl"
    long.write_text('{"timestamp": 0, "prompt": [[1, 0, 9000]], "output": [[2, 0, 2]]}', "utf-8")
    shown = run("replay", long, *BASE).stdout
    said = "longest request   9,002 tokens, from line 1; the limit of llama-3-8b is 8,192\n"
    assert -1 < shown.find(said) < shown.find("prompt tokens")  # at the start


def test_replay_command_bad_lines_stop_or_are_counted(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = trace.read_text("utf-8").splitlines()
    path.write_text("\n".join([*good[:3], '{"timestamp": 1}', *good[3:], "oops"]), "utf-8")
    assert f"{path}, line 4: Object missing required field `prompt`" in error("replay", path, *BASE)
    made = document("replay", path, *BASE, "--skip-bad-lines")
    assert (made["bad_lines"], made["requests"]) == (2, 40)
    shown = run("replay", path, *BASE, "--skip-bad-lines").stdout
    assert re.search(r"bad lines skipped +2 ", shown)
    assert f"first bad line    {path}, line 4: Object missing required field `prompt`\n" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.jsonl", *BASE), "cannot read nowhere.jsonl: No such file or directory"),
        (("workload:chats", *BASE), "unknown workload 'chats': use one of agent, api, chat, documents, mix, think"),
        (("workload:chat",), "--model and --memory missing: give for example --model llama-3-8b --memory 40GiB"),
        (("workload:chat", "--model", "llama-3-8b"), "--memory missing"),
        (("workload:chat", "--model", "llama-3-8", "--memory", "4GiB"), "llama-3-8b"),
        (("workload:chat", "--model", "llama-3-8b", "--memory", "4 Gigs"), "not a size"),
        (("workload:chat", "--model", "llama-3-8b", "--memory", "1MiB"), "too small"),
        (("workload:chat", *BASE, "--max-running", "0"), "max_running (--max-running) must be at least 1, got 0"),
        (("workload:chat", *BASE, "--token-budget", "-1"), "token_budget (--token-budget) must be at least 1"),
        (("workload:chat", *BASE, "--time-scale", "-1"), "time_scale (--time-scale) must be 0 or more"),
        (("workload:chat", *BASE, "--block-size", "0"), "block_size must be at least 1, got 0"),
        (("workload:chat", *BASE, "--tp", "3"), "tp"),
        (("workload:chat", *BASE, "--kv-dtype", "int4"), "'auto', 'bf16', 'fp16', 'fp32', 'fp8'"),
        (("workload:chat", *BASE, "--layout", "slabs"), "'reference', 'natural'"),
        (
            ("workload:chat", *BASE, "--placement", "all"),
            "unknown placement 'all': use none, ends, interval:N, align or align:N",
        ),
        (("workload:uniform", *BASE, "--eviction", "lruu"), "use lru, hazard (did you mean lru?)"),
        (("workload:chat", *BASE, "--share", "a"), "not a share: 'a'; write it like team-a=30% or team-a=30%..60%"),
        (
            ("workload:uniform", *BASE, "--share", "a=30%", "--eviction", "lru"),
            "shares of tenants need the natural layout and an eviction that compares resume points",
        ),
        (
            ("workload:chat", *BASE, "--layout", "reference", "--placement", "interval:8"),
            "the reference layout has no placement 'interval:8': choose align or none, or --layout natural",
        ),
        (
            ("workload:chat", *BASE, "--plan", "p.json", "--placement", "none", "--windows-as-full"),
            "drop --model, --memory, --windows-as-full, or drop --plan",
        ),
        (("workload:chat", *BASE, "--seed", "-1"), "the seed (--seed) must be at least 0"),
        (("workload:chat", *BASE, "--hours", "0"), "hours must be above 0"),
        (("workload:chat", *BASE, "--limit", "0"), "limit (--limit) must be at least 1 request"),
        (("workload:chat", *BASE, "--trace-block-size", "16"), "--trace-block-size has no effect on workload:chat"),
        (("workload:chat", *BASE, "--skip-bad-lines"), "--skip-bad-lines has no effect on workload:chat"),
        (("workload:uniform", *BASE, "--seed", "1"), "--seed has no effect on workload:uniform"),
        (("workload:uniform", *BASE, "--marks"), "--marks has no effect on workload:uniform"),
        (("pyproject.toml", *BASE, "--seed", "1", "--rate", "2"), "--seed, --rate has no effect on pyproject.toml"),
        (("pyproject.toml", *BASE), "pyproject.toml, line 1: not JSON"),
        (("tests", *BASE), "cannot read tests: Is a directory"),
        (("workload:chat", *BASE, "--seed", "x"), "--seed"),
        ((), "TRACE|workload:NAME"),
    ],
    ids=str,
)
def test_replay_command_with_mistake_prints_one_line(arguments: tuple[str, ...], message: str) -> None:
    root = Path(__file__).parents[3]
    placed = [str(root / one) if one in {"pyproject.toml", "tests"} else one for one in arguments]
    assert message in error("replay", *placed).replace(f"{root}/", "")


def test_replay_command_imports_no_torch_or_transformers() -> None:
    arguments = ["hybridkv", "replay", "workload:uniform", *BASE]
    code = (
        f"import sys; sys.argv = {arguments}; from hybridkv.cli import main\n"
        "try: main()\n"
        "finally: print('reached', sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(  # noqa: S603  # code of this file
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("reached []\n")
