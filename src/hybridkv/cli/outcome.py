"""Exit codes and error lines of all commands.

    0    success                                  1    a check failed (the command reports it), or a pipe was closed
    2    an error that the user can correct       130, 143    SIGINT, SIGTERM (hybridkv.cli)

An error of exit code 2 is printed as one line. A bug keeps its traceback.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

from hybridkv.errors import AssumptionWarning, ConfigError, HybridKVError

USER_ERROR: Final = 2
PIPE_CLOSED: Final = 1
INTERRUPTED: Final = 130
_MOST_CHARACTERS: Final = 1000
_EXTRAS: Final = {
    "typer": ("the command line", "typer and rich", "cli"),
    "rich": ("the command line", "typer and rich", "cli"),
    "torch": ("running a model", "torch and transformers", "cli,runner"),
    "transformers": ("running a model", "torch and transformers", "cli,runner"),
    "safetensors": ("running a model", "safetensors", "cli,runner"),
    "tokenizers": ("running a model", "tokenizers", "cli,runner"),
    "httpx2": ("sending a load", "httpx2", "cli,bench"),
    "zmq": ("publishing events", "pyzmq", "cli,runner,serve,events"),
    "fastapi": ("serving a model", "fastapi", "cli,runner,serve"),
    "starlette": ("serving a model", "fastapi", "cli,runner,serve"),
    "optuna": ("tuning", "optuna", "cli,tune"),
    "pydantic": ("serving a model", "fastapi", "cli,runner,serve"),
    "opentelemetry": ("serving a model", "opentelemetry-api", "cli,runner,serve"),
    "uvicorn": ("serving a model", "uvicorn", "cli,runner,serve"),
    "prometheus_client": ("reading metrics", "prometheus_client", "cli"),
}
"""For a module of an extra: the feature that needs it, the library, and the extras to install."""


def run() -> int:
    """Run the command in ``sys.argv`` and return its exit code; an error is printed on standard error."""
    try:
        _open_streams()
        from hybridkv.cli.app import command  # noqa: PLC0415  # typer may be missing

        with _assumptions_in_one_line():
            code = command()(standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        code = PIPE_CLOSED
    except Exception as error:
        if type(error).__name__ == "Abort" and isinstance(error.__cause__, KeyboardInterrupt):
            return INTERRUPTED  # main's signal handlers were not installed
        message = _user_message(error)
        if message is None:
            raise
        code = USER_ERROR
        _say(f"error: {message}")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            _flush_or_discard(stream)
    return code if isinstance(code, int) else 0


@contextmanager
def _assumptions_in_one_line() -> Iterator[None]:
    """Print each AssumptionWarning once, as one line; leave other warnings unchanged."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", AssumptionWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: object) -> None:
            if issubclass(category, AssumptionWarning):
                _say(f"warning: {message}")
            else:
                others(message, category, *where)  # type: ignore[arg-type]  # passed on unchanged

        warnings.showwarning = show  # type: ignore[assignment]  # the other arguments are passed on unchanged
        yield


def _open_streams() -> None:
    """Make the standard streams accept any text. Raises ConfigError if standard output is closed."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # open until the process exits
    if sys.stdout is None:
        raise ConfigError("standard output is closed: open it, for example with > FILE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _user_message(error: Exception) -> str | None:
    """Return the message of an error that the user can correct, None for a bug."""
    if isinstance(error, HybridKVError | OSError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory: lower the limits, or use a machine with more memory"
    if isinstance(error, ImportError):
        return _missing(error)
    if isinstance(error.__cause__, EOFError):  # typer converts it to an Abort
        return f"a file is truncated: {error.__cause__}"
    if any(one.__name__ == "ClickException" for one in type(error).__mro__):
        # typer exports only subclasses of click's class
        return str(error.format_message())  # type: ignore[attr-defined]
    return None


def _missing(error: ImportError) -> str | None:
    """Return a message that names the extra to install, None for a module that is in no extra."""
    name = (error.name or "").partition(".")[0]
    if name not in _EXTRAS:
        return None
    what, needed, extras = _EXTRAS[name]
    how = f"{what} needs {needed}" if isinstance(error, ModuleNotFoundError) else f"{what}: {error}"
    return f"{how}: pip install 'hybridkv[{extras}]'"


def _say(message: str) -> None:
    """Print one line on standard error, cut in the middle if it is long."""
    line = printable(" ".join(message.split()))
    if len(line) > _MOST_CHARACTERS:
        line = f"{line[: _MOST_CHARACTERS // 2]} ... {line[-_MOST_CHARACTERS // 2 :]}"
    with suppress(OSError):
        print(line, file=sys.stderr)


def _flush_or_discard(stream: TextIO) -> None:
    """Flush ``stream``. If that fails, redirect it to nothing, so that the interpreter's last flush cannot fail."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """Return ``text`` with each unprintable character (controls, escapes, lone surrogates) as a Python escape."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def printable_lines(text: str) -> str:
    """Return ``text`` as ``printable``, but keep its line breaks."""
    return "\n".join(map(printable, text.split("\n")))
