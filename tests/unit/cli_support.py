"""The command line as a user runs it, in a process of its own."""

import subprocess
import sys
from pathlib import Path


def run(*arguments: str | Path, code: int = 0, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """``hybridkv`` with ``arguments``; fails unless it exits with ``code``."""
    done = subprocess.run(  # noqa: S603  # our own command with arguments of the tests
        [sys.executable, "-m", "hybridkv", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == code, done.stderr
    return done


def error(*arguments: str | Path) -> str:
    """The one line of an error, which is all that is printed."""
    done = run(*arguments, code=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line
