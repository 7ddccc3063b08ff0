"""`hybridkv models` and `hybridkv hardware`: models and machines known by name, with facts and their sources."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Final

import typer

from hybridkv.cli.options import output_option
from hybridkv.cli.output import console, table
from hybridkv.models import KnownModel, Model, known_model, known_models, read_model
from hybridkv.simulator import HARDWARE
from hybridkv.units import format_bytes


def models_command(
    text: Annotated[
        str, typer.Argument(help="List only the models with this text in their names.", metavar="TEXT")
    ] = "",
    verbose: bool = output_option("Print the source of each model's facts, too.", "--verbose", "-v", default=False),
    as_json: bool = output_option("Print all facts as JSON.", "--json", default=False),
) -> None:
    """List the models known by name, with their facts."""
    read = [(known, read_model(known.name)) for known in known_models() if text.lower() in known.name]
    if not read:
        known_model(text)  # raises an error that suggests similar names
    if as_json:
        document = {"schema": "hybridkv.models", "version": 1, "models": [_facts(*pair) for pair in read]}
        print(json.dumps(document, indent=2))
        return
    out = console()
    columns = ("name", "a token", "in windows", "a state", "weights", "active")
    listing = table(*columns)
    for known, model in read:
        listing.add_row(
            known.name,
            format_bytes(int(model.kv_bytes_per_token)),
            format_bytes(int(model.window_bytes_per_token)) if model.window_bytes_per_token else "",
            format_bytes(model.state_bytes) if model.state_bytes else "",
            f"{model.parameters / 1e9:.1f}" if model.parameters else "",
            f"{model.active_parameters / 1e9:.1f}" if model.parameters else "",
        )
    out.print(listing)
    out.print("a token: cache bytes while its request runs; in windows: more bytes while a window covers it")
    out.print("a state: bytes of one request; weights, active: parameters in billions")
    if not verbose:
        return
    out.print()
    for known, _ in read:
        out.print(f"{known.name}: {known.source}", soft_wrap=True)
        out.print(f"  {'read' if known.verified else 'read in part'} in {known.read_in}", soft_wrap=True)
        if known.verification:
            out.print(f"  {known.verification}", soft_wrap=True)


_OF_KNOWN: Final = ("name", "title", "source", "read_in", "verified", "verification")
_OF_MODELS: Final = ("dtype", "max_model_len", "vocab_size", "parameters", "active_parameters", "weight_bytes")


def _facts(known: KnownModel, model: Model) -> dict[str, object]:
    return {
        **{name: getattr(known, name) for name in _OF_KNOWN},
        "model_type": model.model_type,
        "layers": model.depth,
        "kv_bytes_per_token": int(model.kv_bytes_per_token),
        "window_bytes_per_token": int(model.window_bytes_per_token),
        "encoder_bytes_per_token": int(model.encoder_bytes_per_token),
        "state_bytes": model.state_bytes,
        **{name: getattr(model, name) for name in _OF_MODELS},
        "config": known.config,
    }


def hardware_command(*, as_json: bool = output_option("Print all fields as JSON.", "--json", default=False)) -> None:
    """List the machines that the cost model knows by name, with peak rates and data sheets."""
    if as_json:
        print(json.dumps({name: asdict(one) for name, one in HARDWARE.items()}, indent=2))
        return
    rows = table("name", "", "bf16 TFLOP/s", "fp8 TFLOP/s", "GB", "GB/s", numbers_from=2)
    for name, one in HARDWARE.items():
        fp8 = f"{one.fp8_flops_per_s / 1e12:,.0f}" if one.fp8_flops_per_s else "-"
        memory = f"{one.memory_bytes / 1e9:,.0f}" if one.memory_bytes else "-"
        rates = f"{one.flops_per_s / 1e12:,.0f}", fp8, memory, f"{one.bytes_per_s / 1e9:,.0f}"
        rows.add_row(name, one.name, *rates)
    console().print(rows)
    for name, one in HARDWARE.items():
        console().print(f"{name:<12} {one.sheet}", soft_wrap=True)
