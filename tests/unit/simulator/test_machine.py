"""Replays on machines that hold weights and cache; others are refused, by every command that tells times."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cli_support import error, run
from hybridkv import doctor
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.models.catalog import known_models
from hybridkv.planner import plan
from hybridkv.simulator import (
    H100,
    H100_UNBOUNDED,
    HARDWARE,
    Cell,
    ReplaySettings,
    UniformWorkload,
    plan_for_trace,
    replay,
    replay_replicas,
    sweep,
)
from hybridkv.simulator.hardware import hardware_named, machine_in_words, room_for_cache, too_large

SOURCE = UniformWorkload(conversations=4)
LLAMA_70B = ("workload:uniform", "--model", "llama-3-70b", "--memory", "40GiB")
DOES_NOT_FIT = (
    "llama-3-70b does not fit: 131.42 GiB of bf16 weights and 40 GiB of cache are more than the 74.51 GiB of one "
    "H100 SXM: use --tp 4, or lower --memory; for hit rates without a real machine use --hardware h100-unbounded"
)
FOUR = "4 x H100 SXM: 32.85 GiB of bf16 weights + 40 GiB of cache in 74.51 GiB each"


@pytest.mark.parametrize("command", [("replay",), ("doctor",)])
def test_machine_too_small_for_the_model_is_rejected(command: tuple[str, ...]) -> None:
    assert error(*command, *LLAMA_70B) == f"error: {DOES_NOT_FIT}"


def test_machine_too_small_is_rejected_by_explain() -> None:
    assert error("explain", LLAMA_70B[0], "3", *LLAMA_70B[1:]) == f"error: {DOES_NOT_FIT}"


def test_machine_with_the_named_ranks_fits() -> None:
    tp = ("--tp", "4")
    assert f"\non {FOUR}\n" in run("replay", *LLAMA_70B, *tp).stdout
    assert json.loads(run("replay", *LLAMA_70B, *tp, "--json").stdout)["machine"] == FOUR
    assert f"machine           {FOUR}\n" in run("explain", LLAMA_70B[0], "3", *LLAMA_70B[1:], *tp).stdout
    subject = json.loads(run("doctor", *LLAMA_70B, *tp, "--json").stdout)["subject"]
    assert subject == f"workload:uniform on llama-3-70b in 40 GiB, on {FOUR}"


def test_machine_for_many_experts_names_enough_ranks() -> None:
    asked = ("replay", "workload:uniform", "--model", "deepseek-v3", "--memory", "10GiB", "--json")
    said = error(*asked)
    assert "1.22 TiB of bf16 weights and 10 GiB of cache are more than the 74.51 GiB" in said
    assert "use --tp 32, or lower --memory" in said
    assert json.loads(run(*asked, "--tp", "32").stdout)["machine"].startswith(
        "32 x H100 SXM: 39.06 GiB of bf16 weights"
    )
    assert "use --tp 16, or" in error(*asked, "--weights", "fp8")


def test_machine_counts_the_scales_of_the_checkpoint() -> None:
    """gpt-oss-120b: 60.8 GiB on the hub. Its 116.8e9 weights of half a byte alone would be 54.4 GiB."""
    asked = ("replay", "workload:uniform", "--model", "gpt-oss-120b", "--weights", "int4", "--memory")
    assert "does not fit: 60.77 GiB of int4 weights and 18 GiB of cache" in error(*asked, "18GiB")
    assert "60.77 GiB of int4 weights + 10 GiB of cache" in run(*asked, "10GiB").stdout
    assert "or --weights int4 as in its checkpoint" in error(*asked[:4], *asked[-1:], "10GiB")


def test_machine_unbounded_is_accepted_for_hits_only() -> None:
    """One of any memory has the same times, and its name says that nobody has it; without times there is none."""
    fits, any_memory, timeless = (
        json.loads(run("replay", *LLAMA_70B, *more, "--json").stdout)
        for more in (("--tp", "4"), ("--hardware", "h100-unbounded"), ("--time-scale", "0"))
    )
    assert fits["hit_tokens"] == any_memory["hit_tokens"] > 0
    assert any_memory["machine"] == "1 x H100 SXM of any memory: 131.42 GiB of bf16 weights + 40 GiB of cache"
    assert timeless["machine"] == "no machine: steps take no time"
    assert timeless["time_to_first_token_s"] is timeless["time_per_output_token_s"] is None
    text = run("replay", *LLAMA_70B, "--time-scale", "0").stdout
    assert "\non no machine: steps take no time\n" in text
    assert "time to first token" not in text
    assert "per output token" not in text


def test_machine_unbounded_has_the_same_times() -> None:
    made = plan_for_trace(SOURCE.summary(), read_model("llama-3-8b"), "1GiB")
    bounded, unbounded = (replay(SOURCE, made, ReplaySettings(hardware=one)) for one in (H100, H100_UNBOUNDED))
    assert replace(unbounded, machine=bounded.machine) == bounded


def test_machine_too_small_is_rejected_by_the_library() -> None:
    made = plan_for_trace(SOURCE.summary(), read_model("llama-3-70b"), "40GiB")
    for run_it in (replay, replay_replicas):
        with pytest.raises(ConfigError, match=r"llama-3-70b does not fit.* --tp 4"):
            run_it(SOURCE, made)


def test_machine_too_small_for_a_cell_skips_it(tmp_path: Path) -> None:
    cells = [Cell("llama-3-70b", "40GiB"), Cell("llama-3-70b", "40GiB", tp=4)]
    with ThreadPoolExecutor(1) as executor:
        refused, served = (one.document for one in sweep(SOURCE, cells, tmp_path, executor))
    assert refused["refused"] == DOES_NOT_FIT
    assert "report" not in refused
    report = served["report"]
    assert isinstance(report, dict)
    assert report["machine"] == FOUR


def test_machine_and_refusals_are_in_a_sweep(tmp_path: Path) -> None:
    base = ("sweep", *LLAMA_70B, "--tp", "1,4", "--jobs", "1", "--out", tmp_path)
    text = run(*base).stdout
    assert re.search(r" 1 +refused ", text)
    assert f"refused: {DOES_NOT_FIT}\n" in text
    assert f"2 cells in {tmp_path}; times are those of H100 SXM with bf16 weights\n" in text


@pytest.mark.parametrize("hardware", ["h100", "b200", "l4"])
def test_machine_named_ranks_are_enough_and_valid(hardware: str) -> None:
    """Of every known model: it is read with so many ranks, and fits; with half as many it does not."""
    memory, machine, named = 4 << 30, HARDWARE[hardware], 0
    for known in known_models():
        model = read_model(known.name)
        said = too_large(model, memory, machine, "bf16")
        found = re.search(r"use --tp (\d+)", said or "")
        if found is None:
            continue
        named += 1
        ranks = int(found[1])
        if known.name.startswith(("qwen3.5-122b", "qwen3.5-397b")) and ranks > 16:
            continue  # linear attention has fewer key heads, which the plan does not say
        assert too_large(read_model(known.name, tp=ranks), memory, machine, "bf16") is None
        if ranks > 2:
            assert too_large(read_model(known.name, tp=ranks // 2), memory, machine, "bf16") is not None
    assert named > 20


def test_machine_without_room_for_weights_names_no_ranks() -> None:
    said = too_large(read_model("llama-3-8b"), 90 << 30, H100, "bf16")
    assert said is not None
    assert "of one H100 SXM: lower --memory;" in said


def test_machine_with_unknown_weights_is_not_checked() -> None:
    model = read_model("llama-3-8b")
    assert room_for_cache(model, H100, "bf16") == 80_000_000_000 - 2 * model.parameters
    assert room_for_cache(model, H100, "fp8") == 80_000_000_000 - model.parameters
    assert too_large(model, 999 << 30, HARDWARE["epyc-9654"], "bf16") is None
    uncounted = replace(model, parameters=0, active_parameters=0)
    assert too_large(uncounted, 999 << 30, H100, "bf16") is None
    words = machine_in_words(plan(uncounted, "4GiB"), H100, "bf16", 1.0)
    assert words == "1 x H100 SXM: bf16 weights of unknown size + 4 GiB of cache in 74.51 GiB"


def test_machine_memory_limits_doctor_remedies() -> None:
    """The cache has what weights leave: the remedy is another one, and is not replayed."""
    model = read_model("qwen3.5-35b-a3b")
    small = replace(H100, memory_bytes=2.0 * model.parameters + (1 << 30))
    source = UniformWorkload(conversations=16, turns=1, gap_s=0.0)
    made = plan_for_trace(source.summary(), model, "1GiB")
    told: list[str] = []
    found = doctor.examine_trace(source, made, ReplaySettings(hardware=small), on_replay=told.append)
    (finding,) = [one for one in found.findings if one.name == "states_and_requests"]
    assert finding.remedy == "more ranks or replicas: weights and cache fill the memory of one H100 SXM"
    assert finding.proof is None
    assert not any("GiB" in one for one in told)


def test_machine_error_suggests_checkpoint_weights() -> None:
    said = too_large(read_model("gpt-oss-120b"), 8 << 30, H100, "bf16")
    assert said is not None
    assert "use --tp 4, or --weights int4 as in its checkpoint, or lower --memory" in said
    assert too_large(read_model("gpt-oss-120b"), 8 << 30, H100, "int4") is None


@pytest.mark.parametrize("name", ["nowhere.toml", "."])
def test_machine_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name) if name != "." else f"{tmp_path}/folder.toml"
    if name == ".":
        Path(path).mkdir()
    with pytest.raises(ConfigError, match=rf"cannot read {re.escape(path)}: (No such|not a regular|Is a dir)"):
        hardware_named(path)
