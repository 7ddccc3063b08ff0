"""Hardware by name and from files; what weights are kept in."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from cli_support import error, run
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner import plan
from hybridkv.simulator import (
    H100,
    HARDWARE,
    CacheTraffic,
    Cell,
    ReplaySettings,
    StepCost,
    UniformWorkload,
    hardware_named,
    sweep,
)


def test_hardware_names_have_their_figures() -> None:
    names = "h100 h100-unbounded h100-pcie h200 b200 a100-40 a100-80 l40s l4 mi300x epyc-9654"
    assert list(HARDWARE) == names.split()
    assert hardware_named("h100") is H100
    for one in HARDWARE.values():
        assert one.sheet
        assert not one.fp8_flops_per_s or 1.9 < one.fp8_flops_per_s / one.flops_per_s < 2.1
    # bytes/s and bytes as the sheets have them
    told = {name: (one.bytes_per_s / 1e9, one.memory_bytes / 1e9) for name, one in HARDWARE.items()}
    assert [told[one] for one in ("h200", "a100-40", "l4")] == [(4800, 141), (1555, 40), (300, 24)]
    of_hosts = {name: one.host_bytes_per_s / 1e9 for name, one in HARDWARE.items()}
    assert of_hosts == {name: 64 if name[:2] in {"h1", "h2", "b2", "mi"} else 32 for name in HARDWARE}


def test_hardware_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('like = "h100"\nname = "ours"\nmemory_efficiency = 0.7\n', "utf-8")
    assert hardware_named(str(path)) == replace(H100, name="ours", memory_efficiency=0.7)
    path.write_text(
        'name = "x"\nflops_per_s = 1e12\nbytes_per_s = 1e11\ncompute_efficiency = 1\n'
        "memory_efficiency = 1\noverhead_s = 0\n",
        "utf-8",
    )
    assert hardware_named(str(path)).flops_per_s == 1e12


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x =", "is not valid TOML"),
        ('like = "h100"\nflops = 1', "unknown field 'flops': use like, attention_efficiency"),
        ('like = "x"', "like = 'x': use one of h100"),
        (
            'name = "x"\nflops_per_s = 1e12',
            "bytes_per_s, compute_efficiency, memory_efficiency, overhead_s are missing: add",
        ),
        ('like = "h100"\nflops_per_s = 0', "flops_per_s must be above 0 and at most 1e+24, got 0"),
        ('like = "h100"\nflops_per_s = "1"', "flops_per_s must be a number"),
        ('like = "h100"\noverhead_s = -1', "overhead_s must be 0 or more"),
        ('like = "h100"\nflops_per_s = 1e25', "flops_per_s must be above 0 and at most 1e+24, got 1e+25"),
        ('like = "h100"\noverhead_s = 1e25', "overhead_s must be 0 or more and at most 1e+24, got 1e+25"),
        ('like = "h100"\nlink_bytes_per_s = 0\nlink_latency_s = 1e-5', "is 1e-05, but link_bytes_per_s 0"),
        ('like = "h100"\nhost_bytes_per_s = 0', "host_bytes_per_s must be above 0"),
        ('like = "h100"\nhost_efficiency = 0', "host_efficiency must be above 0"),
        ('like = "h100"\nbytes_per_s = nan', "bytes_per_s must be a number, and finite"),
        ('like = "h100"\nname = 5', "name must be text"),
    ],
)
def test_hardware_file_with_wrong_field_names_it(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        hardware_named(str(path))
    assert what in str(caught.value)
    assert "ours.toml" in str(caught.value)


def test_hardware_weights_of_fp8_use_their_bytes_and_rate() -> None:
    def seconds(weights: str, tokens: int, hardware: str = "h100") -> float:
        cost = StepCost(1e9, 1e9, CacheTraffic(), replace(HARDWARE[hardware], overhead_s=0.0), weights=weights)
        return max(cost._bounds(tokens)[0], cost._bounds(tokens)[1] / cost._bytes_per_s)

    rate = 3.35e12 * 0.8
    assert [seconds(one, 1) for one in ("bf16", "fp8", "int4")] == pytest.approx([2e9 / rate, 1e9 / rate, 0.5e9 / rate])
    many = 2e9 * 8192 / (989e12 * 0.5)
    assert [seconds(one, 8192) for one in ("bf16", "fp8", "int4")] == pytest.approx([many, many * 989 / 1979, many])
    assert seconds("fp8", 8192, "a100-80") == pytest.approx(seconds("bf16", 8192, "a100-80"))  # no faster fp8
    with pytest.raises(ConfigError, match=r"weights .* must be one of fp32, bf16, fp8, int4, got 'x'"):
        StepCost.of(plan(read_model("llama-3-8b"), "20GiB"), weights="x")
    with pytest.raises(ConfigError, match="weights"):
        ReplaySettings(weights="x")
    with pytest.raises(ConfigError, match="hardware"):
        ReplaySettings(hardware="h100")  # type: ignore[arg-type]  # what is tested


def test_hardware_ranks_pay_for_the_link() -> None:
    def cost(tp: int, hardware: str = "h100") -> StepCost:
        made = plan(read_model("llama-3-70b", tp=tp), "40GiB")
        return StepCost.of(made, hardware=HARDWARE[hardware])

    # 80 layers, 8192 wide, two bytes, twice a layer; a ring of 4 sends three halves of it
    assert cost(4).reduced_bytes == 2 * 80 * 8192 * 2 * 1.5
    assert cost(1).reduced_bytes == 0
    bounds = cost(4)._bounds(8192)
    assert bounds == cost(4, "h200")._bounds(8192)
    spent = [cost(4, name)._not_overlapped_s(8192, 0) - H100.overhead_s for name in ("h100", "h100-pcie")]
    assert spent == pytest.approx([8192 * cost(4).reduced_bytes / (one * 0.8) for one in (450e9, 64e9)])
    computed = np.full(8, 1000, np.int64)
    quiet = replace(H100, link_bytes_per_s=0.0)
    with_link, without = cost(4), replace(cost(4), hardware=quiet)
    more = with_link.decode_seconds(computed, 3) - without.decode_seconds(computed, 3)
    assert more == pytest.approx(8 * cost(4).reduced_bytes / (450e9 * 0.8))
    # and each of the sums, two a layer, waits for its link
    slow = replace(with_link, hardware=replace(H100, link_latency_s=1e-5))
    assert slow._not_overlapped_s(8, 8) - with_link._not_overlapped_s(8, 8) == pytest.approx(160e-5)
    assert without._not_overlapped_s(8, 8) == H100.overhead_s  # a link with rate 0 takes no time
    assert replace(cost(1), hardware=slow.hardware)._not_overlapped_s(8, 8) == H100.overhead_s


def test_hardware_row_overhead_is_counted() -> None:
    cost = StepCost.of(plan(read_model("llama-3-8b"), "20GiB"))
    rows = replace(cost, hardware=replace(H100, row_s=0.25))
    assert rows._not_overlapped_s(100, 3) == cost._not_overlapped_s(100, 3) + 0.75
    computed = np.full(3, 50, np.int64)
    assert rows.decode_seconds(computed, 2) - cost.decode_seconds(computed, 2) == pytest.approx([0.75, 0.75])
    prompts = replace(cost, hardware=replace(H100, prompt_row_s=0.25))
    assert (prompts.decode_seconds(computed, 2) == cost.decode_seconds(computed, 2)).all()
    assert prompts.prompt_tokens_per_s(64) == pytest.approx(64 / (64 / cost.prompt_tokens_per_s(64) + 0.25))
    assert prompts.prompt_tokens_per_s(1) == cost.prompt_tokens_per_s(1)


def test_hardware_file_that_changed_is_another_cell(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  # here alone

    path = tmp_path / "ours.toml"
    path.write_text('like = "h100"\n', "utf-8")
    with ThreadPoolExecutor(1) as executor:
        for text, again in (("", True), ("overhead_s = 0.5\n", False)):
            sweep(UniformWorkload(), [Cell("llama-3-8b", "1GiB", hardware=str(path))], tmp_path / "out", executor)
            path.write_text('like = "h100"\n' + text, "utf-8")
            (one,) = sweep(
                UniformWorkload(), [Cell("llama-3-8b", "1GiB", hardware=str(path))], tmp_path / "out", executor
            )
            assert one.again is again


# -- as commands


def test_hardware_command_lists_machines() -> None:
    text = run("hardware").stdout
    assert "H100 SXM" in text
    assert "NVIDIA L40S data sheet" in text
    assert max(map(len, text.splitlines())) <= 80
    assert json.loads(run("hardware", "--json").stdout)["h100"] == asdict(H100)


def test_hardware_option_of_replay_is_applied() -> None:
    base = ("replay", "workload:uniform", "--model", "llama-3-8b", "--memory", "1GiB", "--json")
    fast, slow, light = (
        json.loads(run(*base, *more).stdout)
        for more in ((), ("--hardware", "l4"), ("--hardware", "l4", "--weights", "int4"))
    )
    assert slow["settings"]["hardware"]["name"] == "L4"
    assert fast["hit_tokens"] == slow["hit_tokens"]
    times = [one["time_per_output_token_s"]["p50"] for one in (fast, slow, light)]
    assert times[1] > times[2] > times[0]
    assert "unknown hardware 'x': use one of h100, " in error(*base, "--hardware", "x")
    assert "--weights" in error(*base, "--weights", "x")
    assert "No such file" in error(*base, "--hardware", "none.toml")
