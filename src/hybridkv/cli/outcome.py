"""How a command ends: the only place that decides exit codes and the one line of an error.

    0    done                                  1    a check failed (the command says so), or the reader of a pipe left
    2    what a user can mend, in one line     130, 143    SIGINT, SIGTERM (hybridkv.cli)

A bug keeps its traceback.
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
    "zmq": ("publishing events", "pyzmq", "cli,runner,serve,events"),
    "fastapi": ("serving a model", "fastapi", "cli,runner,serve"),
    "starlette": ("serving a model", "fastapi", "cli,runner,serve"),
    "optuna": ("tuning", "optuna", "cli,tune"),
    "pydantic": ("serving a model", "fastapi", "cli,runner,serve"),
    "opentelemetry": ("serving a model", "opentelemetry-api", "cli,runner,serve"),
    "uvicorn": ("serving a model", "uvicorn", "cli,runner,serve"),
    "prometheus_client": ("reading metrics", "prometheus_client", "cli"),
}
"""Of a module of an extra: what needs it, what that needs, and the extras to install."""


def run() -> int:
    """The exit code of the command in ``sys.argv``; what went wrong is on standard error."""
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
            return INTERRUPTED  # called without main's handlers
        message = _mendable(error)
        if message is None:
            raise
        code = USER_ERROR
        _say(f"error: {message}")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            _let_go(stream)
    return code if isinstance(code, int) else 0


@contextmanager
def _assumptions_in_one_line() -> Iterator[None]:
    """Print each AssumptionWarning once, as a line of its own; leave other warnings as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", AssumptionWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: object) -> None:
            if issubclass(category, AssumptionWarning):
                _say(f"warning: {message}")
            else:
                others(message, category, *where)  # type: ignore[arg-type]  # handed on as it came

        warnings.showwarning = show  # type: ignore[assignment]  # the rest of the arguments is handed on
        yield


def _open_streams() -> None:
    """Streams that write any text, in any encoding. ConfigError where there is no standard output."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # as long as the process
    if sys.stdout is None:
        raise ConfigError("standard output is closed: there is nowhere to print to")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _mendable(error: Exception) -> str | None:
    """What to say of an error that a user can mend; None for a bug."""
    if isinstance(error, HybridKVError | OSError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory: ask for less, or run this where there is more"
    if isinstance(error, ImportError):
        return _missing(error)
    if isinstance(error.__cause__, EOFError):  # typer makes an Abort of it
        return f"a file ends too soon: {error.__cause__}"
    if any(one.__name__ == "ClickException" for one in type(error).__mro__):
        # typer exports only subclasses of this class of click's
        return str(error.format_message())  # type: ignore[attr-defined]
    return None


def _missing(error: ImportError) -> str | None:
    """What to install; None for a module that is in no extra."""
    name = (error.name or "").partition(".")[0]
    if name not in _EXTRAS:
        return None
    what, needed, extras = _EXTRAS[name]
    how = f"{what} needs {needed}" if isinstance(error, ModuleNotFoundError) else f"{what}: {error}"
    return f"{how}: pip install 'hybridkv[{extras}]'"


def _say(message: str) -> None:
    """One line on standard error."""
    line = printable(" ".join(message.split()))
    if len(line) > _MOST_CHARACTERS:
        line = f"{line[: _MOST_CHARACTERS // 2]} ... {line[-_MOST_CHARACTERS // 2 :]}"
    with suppress(OSError):
        print(line, file=sys.stderr)


def _let_go(stream: TextIO) -> None:
    """Where nothing can be written any more, let the interpreter's last flush go nowhere."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """``text`` with every character that does not print (controls, escapes, lone surrogates) as Python writes it."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def printable_lines(text: str) -> str:
    """As ``printable``, but lines stay lines."""
    return "\n".join(map(printable, text.split("\n")))
