"""The command line: one file per command; commands print, the library computes.

``main`` turns what a user can mend into one line on standard error and exit code 2; a bug keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated, Final

import typer

from hybridkv.cli import demo, generate, models, plan, replay
from hybridkv.errors import HybridKVError

USER_ERROR: Final = 2
_USAGE_ERROR: Final = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "UsageError")

app = typer.Typer(
    name="hybridkv",
    help="Plan, share, schedule and simulate the KV cache of hybrid LLMs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        print(f"hybridkv {version('hybridkv')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


for _command in (plan, generate, replay, models, demo):
    _command.register(app)


def main() -> None:
    """Run the command line and exit. Exit codes: 0, 2 for a user's mistake, whatever a command chose otherwise."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader of a pipe left (`| head`): nothing more can be written, not even by the interpreter's last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (HybridKVError, OSError) as error:
        _fail(str(error))
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        if not isinstance(error, _USAGE_ERROR):
            raise
        _fail(error.format_message())  # type: ignore[attr-defined]  # typer exports only subclasses of this class
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(USER_ERROR)
