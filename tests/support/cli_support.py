"""The command line as a user runs it, but in this process: `test_cli_hostile` and `test_readme` start others."""

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hybridkv.cli import outcome


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command wrote, and how it ended."""

    stdout: str
    stderr: str
    returncode: int


def run(*arguments: str | Path, code: int = 0, stdin: str = "") -> Ended:
    """``hybridkv`` with ``arguments``, and ``stdin`` to read; fails unless it ends with ``code``."""
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["hybridkv", *map(str, arguments)]),
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode(errors="surrogateescape")))),
        patch.dict(os.environ, {"COLUMNS": "80"}),  # as without a terminal
    ):
        returncode = outcome.run()
    ended = Ended(out.getvalue(), err.getvalue(), returncode)
    assert returncode == code, ended.stderr
    return ended


def document(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """What ``hybridkv`` prints with --json."""
    made = json.loads(run(*arguments, "--json", code=code).stdout)
    assert isinstance(made, dict)
    return made


def error(*arguments: str | Path, stdin: str = "") -> str:
    """The one line of an error, which is all that is printed."""
    done = run(*arguments, code=2, stdin=stdin)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line
