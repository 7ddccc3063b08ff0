"""`--report FILE.html`: a page with pictures, beside what a command prints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from hybridkv.cli.panels import OUTPUT
from hybridkv.errors import ConfigError
from hybridkv.regular_files import write_whole

PageFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE.html",
        help="Write a page with pictures, which needs no network.",
        rich_help_panel=OUTPUT,
    ),
]


def checked_page(path: Path | None) -> Path | None:
    """``path``, said early: ConfigError where it cannot be written, or nothing draws."""
    if path is None:
        return None
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("--report needs plotly: pip install 'hybridkv[report]'")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--report: no file can be written at {path}: name one in a folder that is there")
    return path


def write_page(path: Path, page: str) -> None:
    """``page`` as ``path``, whole or not at all. ConfigError where there is no room or no right to."""
    try:
        write_whole(path, page.encode())
    except OSError as error:
        raise ConfigError(f"--report: {path} could not be written: {error.strerror or error}") from error
