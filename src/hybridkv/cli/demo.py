"""`hybridkv demo`: plan, replay and generate, each as a user would call it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

import typer

COMMANDS: Final = (
    ("plan", "llama-3-8b", "--memory", "40GiB"),
    ("replay", "workload:chat", "--hours", "0.05", "--model", "llama-3-8b", "--memory", "40GiB"),
    ("generate", "--model", "tiny:llama", "--repeat", "2", "--check"),
)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("demo")
    def demo_command() -> None:
        """Plan a real model, replay a workload, and generate cold and warm, compared with plain transformers."""
        for name in ("torch", "transformers"):  # of the last command: those before take half a minute
            if find_spec(name) is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        for words in COMMANDS:
            print(f"\n$ hybridkv {' '.join(words)}", flush=True)
            failed = app(list(words), standalone_mode=False)
            sys.stdout.flush()
            if failed:
                raise typer.Exit(int(failed))
