"""What a plan assumes is said once: by a warning of the library, or in what the command prints."""

import json
import warnings
from pathlib import Path

import pytest

from cli_support import run
from hybridkv.errors import AssumptionWarning
from hybridkv.models import read_model
from hybridkv.planner import plan

STRANGER: dict[str, object] = {
    "model_type": "stranger",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 100,
}


def warnings_of(config: dict[str, object] | str, **given: str) -> list[str]:
    """Return the warnings of one plan."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plan(read_model(config), "80GiB", **given)  # type: ignore[arg-type]  # by name
    assert all(issubclass(one.category, AssumptionWarning) for one in seen)
    assert all(one.filename == __file__ for one in seen)
    return [str(one.message) for one in seen]


@pytest.mark.parametrize("layout", ["natural", "reference"])
def test_plan_with_assumptions_warns_once(layout: str) -> None:
    (message,) = warnings_of({**STRANGER, "_name_or_path": "mine"}, layout=layout)
    assert message.startswith("the plan of mine assumes: layers an ordinary decoder (no model type 'stranger' is known")
    for said in (
        "layers 4 of full_attention (there are no layer_types)",
        "width of a head 8 (hidden size / attention heads)",
        "dtype of keys and values bfloat16 (the config names no dtype: say dtype= (--dtype)",
    ):
        assert said in message


def test_values_of_the_config_class_are_no_assumption() -> None:
    assert warnings_of("mixtral-8x7b") == []
    assert warnings_of("llama-3-8b") == []
    read = {fact.what: fact.source for fact in read_model("mixtral-8x7b").read_from}
    assert read["width of a head"] == read["layers"] == "rule of its config class" or read["layers"] == "config"
    (message,) = warnings_of("glm-4.5-air")
    assert message == (
        "the plan of glm-4.5-air assumes: multi-token prediction layers 1 left out "
        "(num_nextn_predict_layers: they draft, where they run)"
    )


def test_plan_command_prints_assumptions_once(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(STRANGER), "utf-8")
    shown = run("plan", path, "--memory", "1MiB")
    assert shown.stdout.count("ordinary decoder") == 1
    assert shown.stderr == ""
    # where the plan is not printed for people, or several are made, one line on standard error
    for more in ("--json", "--compare"):
        shown = run("plan", path, "--memory", "1MiB", more)
        (line,) = shown.stderr.splitlines()
        assert line.startswith(f"warning: the plan of {tmp_path.name} assumes: layers an ordinary decoder")
    assert run("plan", "llama-3-8b", "--memory", "40GiB", "--json").stderr == ""


def test_plan_command_without_room_reports_only_the_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(STRANGER), "utf-8")
    (line,) = run("plan", path, "--memory", "4KiB", code=2).stderr.splitlines()
    assert "too small" in line
