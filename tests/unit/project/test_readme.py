"""The README's Python runs, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli_support import run

README = Path(__file__).parents[3] / "README.md"
TEXT = README.read_text("utf-8")
DOCUMENTS = [README, *sorted((README.parent / "docs").rglob("*.md"))]
SNIPPETS = [one for path in DOCUMENTS for one in re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL)]
COMMANDS = sorted(set(re.findall(r"`hybridkv (\w+)", TEXT)))


def test_there_is_something_to_test() -> None:
    assert SNIPPETS
    assert {"plan", "replay", "generate", "models"} <= set(COMMANDS)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs(snippet: str) -> None:
    names: dict[str, object] = {}
    exec(compile(snippet, str(README), "exec"), names)  # noqa: S102 - our own README
    assert len(names["step"].rows) == 1  # type: ignore[attr-defined]  # a Step, made by the snippet


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command: str) -> None:
    assert f"hybridkv {command}" in run(command, "--help").stdout


@pytest.mark.parametrize(("command", "lines"), [("generate", 9), ("replay", 4)])
def test_the_output_shown_is_what_the_command_prints(command: str, lines: int) -> None:
    """The README leaves lines out; what it shows is there, in order, to the character."""
    if command == "generate":
        pytest.importorskip("torch")
    block = re.search(rf"^    \$ hybridkv ({command} .*)\n((?:    .*\n|\n)+)", TEXT, re.MULTILINE)
    assert block is not None
    done = run(*block[1].split())
    shown = [line.removeprefix("    ").rstrip() for line in block[2].splitlines() if line.strip()]
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert len(shown) >= lines
    rest = iter(printed)
    assert [line for line in shown if line not in rest] == []


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)", TEXT))
def test_link_leads_somewhere(link: str) -> None:
    assert (README.parent / link).exists()
