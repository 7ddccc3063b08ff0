"""The command line as a user runs it, but in this process: `test_cli_hostile` and `test_readme` start others."""

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from hybridkv.cli import outcome


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command wrote, and how it ended."""

    stdout: str
    stderr: str
    returncode: int


def run(*arguments: str | Path, code: int = 0) -> Ended:
    """``hybridkv`` with ``arguments``; fails unless it ends with ``code``."""
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["hybridkv", *map(str, arguments)]),
        patch.dict(os.environ, {"COLUMNS": "80"}),  # as without a terminal
    ):
        returncode = outcome.run()
    ended = Ended(out.getvalue(), err.getvalue(), returncode)
    assert returncode == code, ended.stderr
    return ended


def error(*arguments: str | Path) -> str:
    """The one line of an error, which is all that is printed."""
    done = run(*arguments, code=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line
