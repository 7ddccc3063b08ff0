"""`hybridkv models`: the public models known by name, with their facts and where these come from."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hybridkv.cli.output import console, table
from hybridkv.cli.panels import OUTPUT
from hybridkv.models import KnownModel, Model, known_models, read_model
from hybridkv.units import format_bytes, format_count


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("models")(models_command)


def models_command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything that is known as JSON.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """List the models known by name, with their facts and sources."""
    read = [(known, read_model(known.name)) for known in known_models()]
    if as_json:
        document = {"schema": "hybridkv.models", "version": 1, "models": [_facts(*pair) for pair in read]}
        print(json.dumps(document, indent=2))
        return
    out = console()
    columns = ("name", "a token", "a state", "context", "weights", "active")
    listing = table(*columns)
    for known, model in read:
        listing.add_row(
            known.name,
            format_bytes(int(model.kv_bytes_per_token)),
            format_bytes(model.state_bytes) if model.state_bytes else "",
            format_count(model.max_model_len or 0),
            f"{model.parameters / 1e9:.1f}",
            f"{model.active_parameters / 1e9:.1f}",
        )
    out.print(listing)
    out.print("a token, a state: what the cache keeps of it. weights, active: 1,000,000,000 parameters\n")
    for known, _ in read:
        mark = "verified" if known.verified else "NOT verified"
        out.print(f"{known.name}: {known.source}", soft_wrap=True)
        out.print(f"  {mark}: {known.verification}", soft_wrap=True)


def _facts(known: KnownModel, model: Model) -> dict[str, object]:
    return {
        "name": known.name,
        "title": known.title,
        "source": known.source,
        "verified": known.verified,
        "verification": known.verification,
        "model_type": model.model_type,
        "layers": len(model.layers),
        "kv_bytes_per_token": int(model.kv_bytes_per_token),
        "window_bytes_per_token": int(model.window_bytes_per_token),
        "encoder_bytes_per_token": int(model.encoder_bytes_per_token),
        "state_bytes": model.state_bytes,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "config": known.config,
    }
