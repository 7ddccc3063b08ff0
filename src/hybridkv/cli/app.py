"""All commands as one typer app."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any

import typer

from hybridkv.cli import (
    calibrate,
    chat,
    demo,
    doctor,
    explain,
    generate,
    hardware,
    models,
    plan,
    replay,
    serve,
    sweep,
    top,
    trace,
    tune,
)

app = typer.Typer(
    name="hybridkv",
    help="Plan, share, schedule and simulate the KV cache of hybrid LLMs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
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
        print(context.get_help())  # panels are printed by it, and nothing is returned


@cache  # options are read from signatures and hints: some milliseconds
def command() -> Callable[..., Any]:
    """What runs a command line."""
    return typer.main.get_command(app)


for _command in (
    plan,
    generate,
    chat,
    serve,
    top,
    replay,
    explain,
    doctor,
    sweep,
    tune,
    trace,
    hardware,
    calibrate,
    models,
    demo,
):
    _command.register(app)
