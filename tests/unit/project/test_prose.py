"""The prose check finds what the writing guide forbids, and the repository passes it."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / ".ci" / "prose.py"


@pytest.fixture
def prose(tmp_path: Path) -> dict[str, Any]:
    """Return the functions of the script, for files below ``tmp_path``."""
    names = runpy.run_path(str(SCRIPT))
    names["findings"].__globals__["ROOT"] = tmp_path
    return names


def test_repository_passes_the_prose_check() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout


def test_hard_words_are_counted_per_100_words(prose: dict[str, Any]) -> None:
    assert prose["hard_words"]("What nobody reads " + "word " * 47) == pytest.approx(4.0)
    assert prose["hard_words"]("Whatever is somewhat behindhand") == 0


def test_docstring_that_only_points_elsewhere_is_found(prose: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('def f():\n    """See the class."""\n', "utf-8")
    assert list(prose["findings"](path, set())) == ["module.py:2: this docstring only points elsewhere"]


def test_undocumented_parameter_of_a_public_callable_is_found(prose: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        'def f(one, two):\n    """Add.\n\n    Args:\n        one: a number.\n    """\n\n'
        'class C:\n    """Keep.\n\n    Args:\n        a: a number.\n        *b: others.\n    """\n\n'
        "    def __init__(self, a, *b):\n        pass\n\n"
        '    def method(self, c):\n        """Do."""\n\n'
        "    def _private(self, d):\n        pass\n",
        "utf-8",
    )
    assert list(prose["undocumented"](path, {"f", "C"})) == [
        (1, "f does not document its parameter two"),
        (19, "C.method does not document its parameter c"),
    ]
    assert list(prose["undocumented"](path, set())) == []


def test_sentence_of_more_than_40_words_is_found_outside_code_and_tables(prose: dict[str, Any], tmp_path: Path) -> None:
    long = "word " * 41 + "end."
    page = tmp_path / "page.md"
    page.write_text(f"Short. {long}\n\n| {long} |\n\n```\n{long}\n```\n\n    {long}\n\n- {'word ' * 39}end.\n", "utf-8")
    assert len(list(prose["long_sentences"](page))) == 1
