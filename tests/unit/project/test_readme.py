"""The README's Python runs, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli_support import run
from hybridkv.models import read_model
from hybridkv.simulator import HARDWARE
from hybridkv.simulator.hardware import too_large
from hybridkv.units import parse_bytes

README = Path(__file__).parents[3] / "README.md"
TEXT = README.read_text("utf-8")
DOCUMENTS = [README, *sorted((README.parent / "docs").rglob("*.md"))]
SNIPPETS = [one for path in DOCUMENTS for one in re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL)]
COMMANDS = sorted(set(re.findall(r"`hybridkv (\w+)", TEXT)))
BLOCKS = [
    (line, [one.removeprefix("    ").rstrip() for one in shown.splitlines() if one.strip()])
    for line, shown in re.findall(r"^    \$ (.*)\n((?:    (?!\$).*\n)*)", TEXT, re.MULTILINE)
]
ELSEWHERE = ("make vllm-env", ".venv/vllm-", "vllm serve", "hybridkv serve")
"""Commands that this test does not run: they need the network or a GPU, or tests/serve/test_command.py runs them."""
RUN = [(line, shown) for line, shown in BLOCKS if not line.startswith(ELSEWHERE)]


def test_readme_has_snippets_and_commands() -> None:
    assert SNIPPETS
    assert {"plan", "replay", "generate", "models"} <= set(COMMANDS)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_readme_snippet_runs(snippet: str) -> None:
    names: dict[str, object] = {}
    exec(compile(snippet, str(README), "exec"), names)  # noqa: S102 - our own README
    assert len(names["step"].rows) == 1  # type: ignore[attr-defined]  # a Step, made by the snippet


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_command_exists(command: str) -> None:
    assert f"hybridkv {command}" in run(command, "--help").stdout


def test_readme_command_blocks_show_their_output() -> None:
    assert len(BLOCKS) - len(RUN) == len(ELSEWHERE)
    assert {line.split()[1] for line, _ in RUN} == {"sweep", "examples/continuous_batching.py"}
    assert all(len(shown) >= 2 for _, shown in RUN)


@pytest.mark.parametrize(("line", "shown"), RUN, ids=lambda one: one.split()[1] if isinstance(one, str) else "")
def test_readme_output_is_printed_by_the_command(
    line: str, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README leaves lines out; what it shows is there, in order, to the character."""
    program, *arguments = line.split()
    if program == "python":
        pytest.importorskip("torch")
        done = subprocess.run(  # noqa: S603 - our own example
            [sys.executable, *arguments], cwd=README.parent, capture_output=True, text=True, timeout=300, check=True
        ).stdout
    else:
        monkeypatch.chdir(tmp_path)
        done = run(*arguments).stdout
    rest = iter([one.rstrip() for one in done.splitlines()])
    assert [one for one in shown if one not in rest] == []


TIMED = re.compile(r"hybridkv (?:replay|sweep|tune|explain|doctor) ([^`|\n]*)")
"""Commands that need a machine."""


def test_documented_commands_fit_the_machines_they_name() -> None:
    """One setting of each at least: a search shows which others are refused."""
    wrong, seen = [], 0
    for path in DOCUMENTS:
        for found in TIMED.finditer(path.read_text("utf-8").replace("\\\n", " ")):
            asked = dict(re.findall(r"--(model|memory|hardware|weights|tp) (\S+)", found[1]))
            machines = [one for one in asked.get("hardware", "h100").split(",") if one in HARDWARE]
            shows_a_refusal = found.string.startswith("\nerror: ", found.end())
            outline = not {"model", "memory"} <= asked.keys() or asked["model"].isupper()
            if shows_a_refusal or outline or not machines:
                continue
            model, memory = (re.split("[,:]", asked[key])[0] for key in ("model", "memory"))
            of_rank = read_model(model, tp=int(asked.get("tp", "1").split(",")[0]))
            weights = asked.get("weights", "bf16").split(",")[0]
            refused = [too_large(of_rank, parse_bytes(memory), HARDWARE[one], weights) for one in machines]
            wrong += [] if None in refused else [(path.name, found[1])]
            seen += 1
    assert wrong == []
    assert seen > 20


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)", TEXT))
def test_readme_link_target_exists(link: str) -> None:
    assert (README.parent / link).exists()
