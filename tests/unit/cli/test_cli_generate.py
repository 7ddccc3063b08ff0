"""`hybridkv generate` as a user runs it: as a process where that matters, else through the same entry."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from cli_support import document, error, run
from hybridkv.cli.engine_options import ModelOptions
from hybridkv.cli.outcome import printable_lines
from hybridkv.errors import ConfigError
from hybridkv.planner import plan_to_json
from hybridkv.request import Request, SamplingParams
from hybridkv.runner import Engine, load, plan_for
from hybridkv.runner.check import CheckReport, Difference
from hybridkv.schedule import Scheduler

MODEL = ("generate", "--model", "tiny:llama")


def prompts(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(line + "\n" for line in lines), "utf-8")
    return path


def test_generate_command_with_check_passes() -> None:
    done = run("generate", "--model", "tiny:llama", "--max-new-tokens", "12", "--check")
    for said in ("tiny:llama: llama, natural layout", "320 of 654 prompt tokens", "48 tokens equal to plain"):
        assert said in done.stdout
    # the bar and nothing else: neither transformers nor Python has anything to say
    assert "4/4 requests" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.strip() and "requests" not in line]) == 0


def test_generate_command_prints_one_json_document(tmp_path: Path) -> None:
    file = prompts(
        tmp_path,
        '{"prompt": "a prompt of text that takes more than one block"}',
        '{"prompt": "a prompt of text that takes more than one block", "sampling": {"temperature": 1, "seed": 3}}',
        '{"prompt": [1, 2, 3], "sampling": {"max_tokens": 5, "temperature": 0.7, "top_k": 9, "min_p": 0.01}}',
    )
    arguments = (
        "--model",
        "tiny:qwen2",
        "--prompts",
        file,
        "--max-new-tokens",
        "20",
        "--max-running",
        "1",
        "--json",
        "--check",
    )
    done = run("generate", *arguments)
    found = json.loads(done.stdout)
    assert (found["schema"], found["version"], found["model"]) == ("hybridkv.generate", 2, "tiny:qwen2")
    assert [len(one["token_ids"]) for one in found["requests"]] == [20, 20, 5]
    assert [one["hit_tokens"] for one in found["requests"]] == [0, 46, 0]
    assert found["statistics"]["hit_tokens"] == 46
    assert found["check"] == {
        "ok": True, "requests": 3, "tokens": 45, "near_ties": 0, "differences": [], "wrong_ends": [],
    }  # fmt: skip
    again = run("generate", *arguments, "--in-flight", "2", "--token-budget", "8")
    assert [one["token_ids"] for one in json.loads(again.stdout)["requests"]] == [
        one["token_ids"] for one in found["requests"]
    ]
    assert run("generate", *arguments).stdout == done.stdout


def test_generate_command_reads_folder_and_plan(tmp_path: Path) -> None:
    tiny = load("tiny:llama")
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    plan_file = tmp_path / "plan.json"
    saved = load(str(tmp_path))
    plan = plan_for(saved, [400], memory="500KiB", block_size=8)
    plan_file.write_text(plan_to_json(plan), "utf-8")
    found = document("generate", "--model", tmp_path, "--plan", plan_file, "--check", "--max-new-tokens", "6")
    assert (found["block_size"], found["num_blocks"]) == (8, plan.config.num_blocks)
    assert found["check"]["ok"]
    # the plan of another model
    assert "the plan is not of tiny:deepseek_v3" in error(
        "generate", "--model", "tiny:deepseek_v3", "--plan", plan_file
    )
    # a newer schema
    newer = json.loads(plan_file.read_text("utf-8"))
    newer["version"] += 1
    plan_file.write_text(json.dumps(newer), "utf-8")
    assert "newer" in error("generate", "--model", tmp_path, "--plan", plan_file)


def test_generate_command_with_little_memory_keeps_outputs() -> None:
    roomy = document(*MODEL, "--check")
    tight = document(*MODEL, "--check", "--memory", "228KiB", "--token-budget", "64")
    assert tight["statistics"]["preemptions"] > 0 == roomy["statistics"]["preemptions"]
    assert [one["token_ids"] for one in roomy["requests"]] == [one["token_ids"] for one in tight["requests"]]


def test_generate_command_second_round_hits_the_cache() -> None:
    found = document(*MODEL, "--repeat", "2", "--max-new-tokens", "8", "--check")["requests"]
    assert [one["round"] for one in found] == [0] * 4 + [1] * 4
    assert [one["token_ids"] for one in found[:4]] == [one["token_ids"] for one in found[4:]]
    assert all(one["hit_tokens"] == one["prompt_tokens"] - 1 for one in found[4:])
    out = run(*MODEL, "--repeat", "2", "--max-new-tokens", "8").stdout
    for said in ("round 2 of 2", "hit tokens 1      320 of 654", "hit tokens 2      650 of 654"):
        assert said in out
    # times stand by themselves: two runs differ in one line
    assert re.search(r"^took +\d+\.\d\d s, then \d+\.\d\d s$", out, re.MULTILINE)
    assert [line for line in out.splitlines() if line.startswith("hit tokens") and " s" in line] == []
    assert max(map(len, out.splitlines())) <= 80
    assert not any(word in out for word in ("slab", "null"))


def test_generate_command_passes_resume_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[int, ...]] = []
    add = Scheduler.add

    def noted(scheduler: Scheduler, request: Request) -> tuple[Request, ...]:
        added.append(request.marks)
        return add(scheduler, request)

    monkeypatch.setattr(Scheduler, "add", noted)
    file = prompts(tmp_path, '{"prompt": "marked", "marks": [8, 3]}', '{"prompt": "plain"}')
    run(*MODEL, "--prompts", file, "--max-new-tokens", "3", "--repeat", "2")
    assert added == [(3, 8), (), (3, 8), ()]
    file = prompts(tmp_path, '{"prompt": "good"}', '{"prompt": "bad", "marks": [0]}')
    assert "prompts.jsonl, line 2: marks must be token counts" in error(*MODEL, "--prompts", file)


def test_generate_command_passes_tenants_and_hints(tmp_path: Path) -> None:
    said = "what a tenant asks again takes nothing of anybody else's share"
    lines = [
        {"prompt": said, "tenant": "a"},
        {"prompt": said, "tenant": "b", "hints": {"secret": True}},
        {"prompt": f"{said}.", "tenant": "a"},
        {"prompt": [5] * 40, "tenant": "b", "hints": {"secret": True}},
    ]
    file = prompts(tmp_path, *map(json.dumps, lines))
    arguments = (*MODEL, "--prompts", file, "--max-new-tokens", "2", "--max-running", "1")
    shared = (*arguments, "--share", "a=30%..60%", "--share", "b=20%", "--eviction", "hazard")
    found = document(*shared)
    assert found["eviction"] == "hazard"
    assert found["shares"][1:] == [
        {"tenant": "a", "guaranteed": 0.3, "greatest": 0.6},
        {"tenant": "b", "guaranteed": 0.2, "greatest": 1.0},
    ]
    told = {one["tenant"]: one for one in found["tenants"]}
    assert {name: (one["requests"], one["hit_tokens"]) for name, one in told.items()} == {
        "*": (0, 0),
        "a": (2, len(said) - 1),
        "b": (2, len(said) - 1),
    }
    assert (told["a"]["kept_bytes"] > 0, told["b"]["kept_bytes"]) == (True, 0)
    assert re.search(r"^\W*a +2 +\d+ +61 ", run(*shared).stdout, re.MULTILINE)
    found = document(*arguments)
    assert (found["eviction"], found["tenants"]) == ("hazard", [])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a", "hints": {"over": true, "goes_on": true}}', "line 1: hints say that a session goes on"),
        ('{"prompt": "a", "hints": {"open": true}}', "line 1: hints have no field 'open'"),
        ('{"prompt": "a", "tenant": ""}', "line 1: tenant must"),
    ],
)
def test_generate_command_with_invalid_tenants_or_hints_is_rejected(tmp_path: Path, line: str, said: str) -> None:
    assert said in error(*MODEL, "--prompts", prompts(tmp_path, line))


def test_generate_command_counts_bad_lines_on_demand(tmp_path: Path) -> None:
    file = prompts(tmp_path, '{"prompt": "good"}', "bad", '{"prompt": [900]}')
    assert "prompts.jsonl, line 2: not JSON" in error(*MODEL, "--prompts", file)
    out = run(*MODEL, "--prompts", file, "--skip-bad-lines", "--max-new-tokens", "3").stdout
    assert ("bad lines" in out, "2 skipped" in out) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "tiny:gpt9"), "unknown tiny model 'gpt9': use tiny:llama"),
        (("--model", "no/such/folder"), "neither a folder nor tiny:NAME"),
        (("--memory", "20KiB"), "raise memory (--memory) to that"),
        (("--memory", "-1"), "not a size"),
        (("--block-size", "0"), "block_size must be at least 1"),
        (("--max-new-tokens", "0"), "max_tokens must be at least 1"),
        (("--max-tokens", "9999"), "lower --max-tokens"),
        (("--max-running", "0"), "max_running must be at least 1"),
        (("--token-budget", "-3"), "token_budget must be at least 1"),
        (("--repeat", "0"), "--repeat must be at least 1"),
        (("--in-flight", "3"), "in_flight must be at most 2"),
        (("--prompts", "no/such/file"), "cannot read the prompts in no/such/file"),
        (
            ("--model", "tiny:mamba", "--layout", "reference", "--placement", "ends"),
            "the reference layout has no placement",
        ),
        (("--plan", "no/such/plan"), "cannot read the plan"),
        (("--plan", "p", "--memory", "1GiB"), "drop --memory"),
        (("--speculate", "ngram:0"), "num_speculative_tokens must be in 1 .. 8"),
        (("--speculate", "draft"), "--speculate must be ngram[:K] or draft:DIR[:K]"),
        (("--speculate", "ngram:x"), "--speculate must be ngram[:K] or draft:DIR[:K]"),
        (("--speculate", "ngram:²"), "--speculate must be ngram[:K] or draft:DIR[:K]"),
        (("--speculate", "ngram:--5"), "--speculate must be ngram[:K] or draft:DIR[:K]"),
        (("--speculate", "draft:no/such:3"), "'no/such' is neither a folder nor tiny:NAME"),
        (("--model", "tiny:whisper"), "but --prompt and the built-in prompts are text: give --prompts FILE"),
        (("--speculate", "ngram:" + "9" * 5000), "ngram[:K] or draft:DIR[:K], got"),
        (("--memory", "130TiB", "--block-size", "65536"), "cannot allocate 130 TiB"),  # no process addresses so much
        (("--memory", "9" * 400), "not a size"),
        (("--max-running", str(10**9)), "'--max-running'"),
        (("--token-budget", str(2**63)), "'--token-budget'"),
        (("--max-tokens", "9" * 400), "'--max-tokens'"),
        (("--repeat", str(10**30)), "'--repeat'"),
        (("--prompts", "/"), "cannot read the prompts"),
        (("--eviction", "lruu"), "did you mean lru?"),
        (("--share", "a=30%", "--eviction", "lru"), "eviction lru evicts the blocks"),
        (("--share", "a=much"), "a=much"),
    ],
)
def test_generate_command_with_mistake_prints_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in error(*MODEL, *arguments)  # a second --model counts


def test_generate_command_without_model_is_rejected() -> None:
    assert "--model" in error("generate")


def test_generate_command_with_failed_check_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Difference("0", 3, 65, 66, margin=1.0, measured=1e-6, rounding=1e-5)
    report = CheckReport(4, 128, (wrong, replace(wrong, at=5, margin=1e-7)), ())
    monkeypatch.setattr("hybridkv.runner.check.check_completions", lambda *_, **__: report)
    out = run(*MODEL, "--check", code=1).stdout
    assert (
        "FAILED: 1 differences, 0 wrong ends, 1 near-ties; the first: request 0, output token 3: 65, expected 66" in out
    )
    assert document(*MODEL, "--check", code=1)["check"]["near_ties"] == 1


def test_generate_command_gives_n_outputs_per_prompt(tmp_path: Path) -> None:
    file = prompts(tmp_path, json.dumps({"prompt": list(range(40)), "sampling": {"n": 3, "temperature": 1.0}}))
    found = document(*MODEL, "--prompts", file, "--max-new-tokens", "8", "--check")
    assert [one["id"] for one in found["requests"]] == ["0", "0#1", "0#2"]
    assert [one["hit_tokens"] for one in found["requests"]] == [0, 39, 39]
    assert found["statistics"]["computed_tokens"] == 39 + 3 * 8
    assert len({tuple(one["token_ids"]) for one in found["requests"]}) == 3
    assert found["check"]["ok"]


def test_generate_command_puts_logprobs_in_json_only(tmp_path: Path) -> None:
    asked = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=0)
    sampling = {"logprobs": 2, "prompt_logprobs": 0}
    file = prompts(tmp_path, json.dumps({"prompt": [65, 66, 67], "sampling": sampling}), '{"prompt": [65, 66, 67]}')
    arguments = (*MODEL, "--prompts", file, "--max-new-tokens", "4")
    one, plain = document(*arguments)["requests"]
    with Engine(load("tiny:llama"), memory="1MiB", max_model_len=32) as engine:
        (done,) = engine.generate([[65, 66, 67]], asked)
    assert done.logprobs is not None
    assert done.prompt_logprobs is not None
    assert (len(one["logprobs"]), len(one["prompt_logprobs"])) == (4, 2)
    for found, expected in zip(
        one["logprobs"] + one["prompt_logprobs"], done.logprobs + done.prompt_logprobs, strict=True
    ):
        assert (found["token_id"], found["rank"]) == (expected.token_id, expected.rank)
        assert found["logprob"] == pytest.approx(expected.logprob, abs=1e-5)  # beside another row: rounding
        assert [token for token, _ in found["best"]] == [token for token, _ in expected.best]
        assert [value for _, value in found["best"]] == pytest.approx([value for _, value in expected.best], abs=1e-5)
        assert found.keys() == {"token_id", "logprob", "rank", "best"}
    assert [one["token_id"] for one in one["prompt_logprobs"]] == [66, 67]
    assert [len(one["best"]) for one in one["logprobs"] + one["prompt_logprobs"]] == [2] * 4 + [0] * 2
    assert (plain["logprobs"], plain["prompt_logprobs"]) == (None, None)
    assert plain["token_ids"] == one["token_ids"]
    out = run(*arguments).stdout
    assert ("logprob" in out, f"{done.logprobs[0].logprob:.3f}" in out) == (False, False)


@pytest.mark.parametrize(
    ("layout", "placement", "hits"),
    [
        ("reference", "align", [96, 16]),  # whole blocks
        ("reference", "none", [0, 0]),
        ("natural", "ends", [99, 24]),  # all but the last token
        ("natural", "interval:32", [96, 0]),
    ],
)
def test_generate_command_of_recurrent_model_works_in_both_layouts(
    layout: str, placement: str, hits: list[int], tmp_path: Path
) -> None:
    file = prompts(tmp_path, *(json.dumps({"prompt": [*range(40, 40 + tokens)]}) for tokens in (100, 25)))
    arguments = (
        "generate",
        "--model",
        "tiny:qwen3_next",
        "--layout",
        layout,
        "--placement",
        placement,
        "--repeat",
        "2",
    )
    found = document(*arguments, "--prompts", file, "--max-new-tokens", "6", "--check")
    assert (found["layout"], found["placement"], found["check"]["ok"]) == (layout, placement, True)
    assert [one["token_ids"] for one in found["requests"][:2]] == [one["token_ids"] for one in found["requests"][2:]]
    assert [one["hit_tokens"] for one in found["requests"]] == [0, 0, *hits]


def test_generate_command_with_drafts_keeps_outputs_and_counts_them(tmp_path: Path) -> None:
    file = prompts(
        tmp_path,
        json.dumps({"prompt": list(range(40)), "sampling": {"temperature": 0.8, "seed": 4}}),
        json.dumps({"prompt": [65, 66, 67, 68] * 8, "sampling": {"repetition_penalty": 0.2}}),  # repeats itself
    )
    arguments = ("generate", "--model", "tiny:mamba", "--prompts", file, "--max-new-tokens", "20", "--check")
    plain = document(*arguments)
    for who, drafts in (("ngram:3", 3), ("draft:tiny:mamba", 4), ("draft:tiny:mamba:2", 2)):
        found = document(*arguments, "--speculate", who)
        assert found["check"]["ok"]
        assert [one["token_ids"] for one in found["requests"]] == [one["token_ids"] for one in plain["requests"]]
        stats = found["statistics"]
        assert len(stats["drafted_by_position"]) in ({drafts} if who.startswith("draft") else range(1, drafts + 1))
        drafted = [sum(one[f"{what}_tokens"] for one in found["requests"]) for what in ("drafted", "accepted")]
        assert drafted == [sum(stats["drafted_by_position"]), sum(stats["accepted_by_position"])]
        if who.startswith("draft"):
            assert drafted[0] == drafted[1] > 20
            assert stats["steps"] < plain["statistics"]["steps"] / drafts + 4
    assert plain["statistics"]["drafted_by_position"] == []
    out = run(*arguments[:-1], "--speculate", "draft:tiny:mamba:2").stdout
    assert "by position 100% 100%" in out
    assert "drafts            24 of 24 accepted (100.00%)" in out


def test_generate_command_of_encoder_decoder_encodes_equal_text_once(tmp_path: Path) -> None:
    file = prompts(
        tmp_path,
        '{"encoder": "a text that is heard"}',
        '{"encoder": "another text", "prompt": [0, 65, 66], "sampling": {"n": 2, "temperature": 1, "seed": 3}}',
        '{"encoder": "a text that is heard", "prompt": [0, 65]}',
    )
    arguments = (
        "generate",
        "--model",
        "tiny:t5",
        "--prompts",
        file,
        "--max-new-tokens",
        "8",
        "--repeat",
        "2",
        "--check",
    )
    found = document(*arguments)
    assert (found["encoder_runs"], found["check"]["ok"], found["check"]["differences"]) == (2, True, [])
    assert [one["prompt_tokens"] for one in found["requests"]][:4] == [1, 3, 3, 2]
    assert "encoder runs      2 for 6 inputs" in run(*arguments).stdout
    plain = tmp_path / "plain.txt"
    plain.write_text("a text that is heard\nanother text\n", "utf-8")
    lines = document("generate", "--model", "tiny:t5", "--prompts", plain, "--max-new-tokens", "8")
    assert lines["requests"][0]["token_ids"] == found["requests"][0]["token_ids"]
    run("generate", "--model", "tiny:t5", "--max-new-tokens", "4", "--check")


def test_generate_command_reads_features_from_files(tmp_path: Path) -> None:
    for number in (1, 2):
        features = np.random.default_rng(number).standard_normal((8, 48)).astype(np.float32)
        np.save(tmp_path / f"sound{number}.npy", features)
    file = prompts(tmp_path, *(f'{{"encoder": "sound{number}.npy", "prompt": [1, 70]}}' for number in (1, 2, 1)))
    arguments = (
        "generate",
        "--model",
        "tiny:whisper",
        "--prompts",
        file,
        "--max-new-tokens",
        "6",
        "--max-running",
        "1",
        "--check",
    )
    found = document(*arguments)
    assert (found["encoder_runs"], found["check"]["differences"]) == (2, [])
    assert [one["hit_tokens"] for one in found["requests"]] == [0, 0, 1]
    for line, message in (
        ('{"encoder": "none.npy"}', "cannot read the features in"),
        ('{"encoder": [1, 2]}', "reads features: give the name of a .npy file"),
        ('{"prompt": "no sound"}', "encoder is missing"),
    ):
        assert message in error("generate", "--model", "tiny:whisper", "--prompts", prompts(tmp_path, line))


def test_generate_command_continues_texts_in_full() -> None:
    texts = ("--prompt", "once", "--prompt", "upon a [bold]time")
    found = document(*MODEL, *texts, "--max-tokens", "60")["requests"]
    assert [one["prompt_tokens"] for one in found] == [4, 17]
    assert found == document(*MODEL, *texts, "--max-new-tokens", "60")["requests"]
    shown = run(*MODEL, *texts, "--max-tokens", "60").stdout
    assert all(printable_lines(one["text"]) in shown for one in found)


def test_generate_command_shows_the_progress_of_its_check() -> None:
    done = run(*MODEL, "--prompt", "once", "--prompt", "upon", "--max-tokens", "4", "--check")
    assert re.search("checking .* 2/2 requests", done.stderr)


@pytest.mark.parametrize(
    ("threads", "environment", "expected"), [(("--threads", "3"), "2", 3), ((), "2", 2), ((), None, 1)]
)
def test_generate_command_sets_threads(
    threads: tuple[str, ...], environment: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    if environment is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
        torch.set_num_threads(int(environment))  # as torch does when it is imported
    try:
        ModelOptions("tiny:llama", threads=int(threads[1]) if threads else None).load()
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_commands_make_threads_wait_without_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str | None]()

    def load(_: ModelOptions) -> None:
        seen.append(os.environ.get("OMP_WAIT_POLICY"))
        raise ConfigError("enough")

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(ModelOptions, "load", load)
    error(*MODEL)
    assert seen == ["PASSIVE"]


def test_generate_command_with_deeply_nested_line_is_rejected(tmp_path: Path) -> None:
    path = prompts(tmp_path, '{"prompt": "a"}', '{"prompt": ' + "[" * 100_000)
    assert "line 2: not JSON" in error(*MODEL, "--prompts", path)


@pytest.mark.parametrize("method", ["forward", "generate"])
def test_generate_command_of_failing_model_prints_one_line(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("shapes cannot be\nmultiplied")

    monkeypatch.setattr("hybridkv.runner.self_check._COMPARED", {})
    monkeypatch.setattr(LlamaForCausalLM, method, fails)
    done = run(*MODEL, "--check", "--max-new-tokens", "2", code=2)
    said = done.stderr.splitlines()[-1]
    assert done.stdout == ""
    assert said.startswith("error: LlamaForCausalLM fails in plain transformers, without pages: RuntimeError: shapes ")
    assert "shapes cannot be multiplied: correct the model" in said
    assert "Traceback" not in done.stderr
