"""Calibration: a machine that is known is found again from the seconds of its shapes; what cannot be is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli_support import error, run
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner import Plan, plan
from hybridkv.schedule import SchedulerLimits
from hybridkv.simulator import HARDWARE, Hardware, ReplaySettings, StepCost, TraceFile, hardware_named, simulation_of
from hybridkv.simulator.calibration import (
    FITTED,
    HELD_BACK,
    Measured,
    Shape,
    fitted,
    predicted,
    relative_errors,
    shapes_within,
    steps_of,
    toml_of,
)

LIMITS = SchedulerLimits(max_running=64, max_batched_tokens=2048)
MACHINES = {
    "a processor": Hardware("cpu", 2e11, 2e10, 1.0, 1.0, 0.01, attention_efficiency=0.4, row_s=0.001),
    "an accelerator": HARDWARE["h100"],
    "prompts that run row by row": Hardware("rows", 2e11, 2e10, 1.0, 1.0, 0.01, row_s=0.001, prompt_row_s=0.02),
    "one that waits for bytes": Hardware("narrow", 1e15, 1e10, 1.0, 1.0, 0.0),
}


def planned(name: str = "qwen3-0.6b") -> Plan:
    return plan(read_model(name), "8GiB", max_model_len=2048)


def measured(made: Plan, shapes: tuple[Shape, ...], hardware: Hardware, noise: float = 0.0) -> list[Measured]:
    cost = StepCost.of(made, hardware=hardware)
    draw = np.random.default_rng(5)
    return [
        Measured(shape, steps, sum(map(cost.seconds, steps)) * float(np.exp(draw.normal(0, noise))))
        for shape in shapes
        for steps in [steps_of(made, LIMITS, shape)]
    ]


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-3-1b", "falcon-h1-7b"])
@pytest.mark.parametrize("machine", MACHINES)
def test_calibration_recovers_a_known_machine(name: str, machine: str) -> None:
    made = planned(name)
    found = fitted(measured(made, FITTED, MACHINES[machine]), StepCost.of(made), "found")
    off = relative_errors(measured(made, HELD_BACK, MACHINES[machine]), StepCost.of(made, hardware=found))
    assert np.abs(off).max() < 0.02


def test_calibration_tells_rows_of_prompts_from_rows_that_decode() -> None:
    made, machine = planned(), MACHINES["prompts that run row by row"]
    found = fitted(measured(made, FITTED, machine), StepCost.of(made), "found")
    assert found.row_s == pytest.approx(0.001, rel=0.02)
    assert found.prompt_row_s == pytest.approx(0.02, rel=0.02)


def test_calibration_with_noise_averages_it() -> None:
    made, machine = planned(), MACHINES["a processor"]
    found = fitted(measured(made, FITTED, machine, noise=0.1), StepCost.of(made), "found")
    off = relative_errors(measured(made, HELD_BACK, machine), StepCost.of(made, hardware=found))
    assert np.median(np.abs(off)) < 0.1
    assert found.flops_per_s == pytest.approx(machine.flops_per_s, rel=0.2)


def test_calibration_held_back_shapes_are_not_fitted() -> None:
    assert not set(FITTED) & set(HELD_BACK)
    assert len(set(FITTED)) == len(FITTED)


def test_calibration_prediction_matches_a_replay(tmp_path: Path) -> None:
    made, shape = planned(), Shape(5, 300, 7)
    path = tmp_path / "shape.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": 0, "input_length": 300, "output_length": 7, "hash_ids": [row]}) + "\n"
            for row in range(5)
        )
    )
    machine = MACHINES["a processor"]
    settings = ReplaySettings(max_running=64, token_budget=2048, hardware=machine)
    report = simulation_of(made, settings).run(TraceFile(str(path)))
    (one,) = measured(made, (shape,), machine)
    assert report.simulated_s == pytest.approx(predicted(one, StepCost.of(made, hardware=machine)))
    assert report.steps == len(one.steps)


def test_calibration_file_round_trips(tmp_path: Path) -> None:
    machine = replace(MACHINES["a processor"], name='a "quoted" \\ name')
    path = tmp_path / "m.toml"
    path.write_text(toml_of(machine, ["off by 3%"]), "utf-8")
    assert path.read_text("utf-8").startswith("# off by 3%\nname = ")
    assert hardware_named(str(path)) == machine


def test_calibration_with_too_few_shapes_is_rejected() -> None:
    made = planned()
    some = measured(made, FITTED[:5], MACHINES["a processor"])
    with pytest.raises(ConfigError, match="5 shapes do not determine 6 rates: measure at least 6"):
        fitted(some, StepCost.of(made), "found")
    nothing = [one._replace(seconds=0.0) for one in measured(made, FITTED, MACHINES["a processor"])]
    with pytest.raises(ConfigError, match=r"shape 1 x 16 \+ 1 took 0 s, not above 0 s: measure it again"):
        fitted(nothing, StepCost.of(made), "found")


def test_calibration_shapes_that_do_not_fit_are_skipped() -> None:
    assert shapes_within(FITTED, planned()) == FITTED
    short = plan(read_model("qwen3-0.6b"), "4GiB", max_model_len=600)
    assert shapes_within(FITTED, short) == tuple(one for one in FITTED if one.prompt + one.output <= 600)
    with pytest.raises(ConfigError, match=r"only \d+ of \d+ shapes fit: .* raise the memory \(--memory\)"):
        shapes_within(FITTED, plan(read_model("qwen3-0.6b"), "64MiB", max_model_len=500))


def test_calibrate_command_writes_a_hardware_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = (*(Shape(1, n, 1) for n in (16, 64, 200)), Shape(4, 32, 4), Shape(8, 16, 4), Shape(2, 100, 3))
    monkeypatch.setattr("hybridkv.cli.calibrate.FITTED", few)
    monkeypatch.setattr("hybridkv.cli.calibrate.HELD_BACK", (Shape(3, 50, 4), Shape(1, 120, 2)))
    out = tmp_path / "here.toml"
    told = run("calibrate", "--model", "tiny:llama", "--repeat", "1", "--out", out)
    assert "3 x 50 + 4" in told.stdout
    assert "--weights fp32" in told.stdout.replace("\n", " ")
    machine = hardware_named(str(out))
    assert machine.name.startswith("measured with")
    assert out.read_text("utf-8").startswith("# hybridkv calibrate: 6 shapes; relative error of 2 others: ")
    run("replay", "workload:chat", "--limit", "3", "--model", "llama-3-8b", "--memory", "4GiB", "--hardware", out)


def test_calibrate_command_with_invalid_name_is_rejected(tmp_path: Path) -> None:
    assert "must end in .toml" in error("calibrate", "--model", "tiny:llama", "--out", tmp_path / "x.txt")
