"""The model that a command runs: its options, and how it is loaded."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Annotated

import typer

from hybridkv.cli.panels import MODEL

if TYPE_CHECKING:  # it needs torch, which is loaded once a command runs
    from hybridkv.runner.load import LoadedModel

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="A folder or .gguf file, ORG/NAME on the hub, or tiny:NAME (tiny:? lists).",
        rich_help_panel=MODEL,
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that model folders hold; else none ever runs.",
        rich_help_panel=MODEL,
    ),
]


def bars_for_terminals() -> None:
    """Bars of what takes long, a file fetched or dequantized, are no part of other output: before torch is imported."""
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read at its import


def load_quietly(source: str, *, trust_remote_code: bool) -> LoadedModel:
    """As hybridkv.runner.load has it, with no chatter on standard error: what matters there is an exception."""
    import torch  # noqa: PLC0415  # takes seconds: only who runs a model pays
    from transformers.utils import logging as chatter  # noqa: PLC0415  # same

    from hybridkv.runner.load import TINY, load  # noqa: PLC0415  # same

    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"transformers\..*")
    if source.startswith(TINY):
        torch.set_num_threads(1)  # such a model is done before threads have met
    return load(source, trust_remote_code=trust_remote_code)
