"""`hybridkv hardware`: what the cost model knows by name, and the options that choose it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from hybridkv.cli.output import console, table
from hybridkv.cli.panels import OUTPUT, RUN
from hybridkv.simulator import HARDWARE
from hybridkv.simulator.hardware import WEIGHT_BYTES

HardwareOption = Annotated[
    str, typer.Option(help="A name of `hybridkv hardware`, or a TOML file.", metavar="NAME|FILE", rich_help_panel=RUN)
]
HardwareList = Annotated[
    str, typer.Option(help="Names of `hybridkv hardware`, or TOML files.", metavar="NAMES", rich_help_panel=RUN)
]
WeightsOption = Annotated[
    str, typer.Option(help=f"What weights are kept in: {', '.join(WEIGHT_BYTES)}.", rich_help_panel=RUN)
]
WeightsList = Annotated[
    str, typer.Option(help=f"What weights are kept in: {', '.join(WEIGHT_BYTES)}.", rich_help_panel=RUN)
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("hardware")(hardware_command)


def hardware_command(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.", rich_help_panel=OUTPUT)] = False
) -> None:
    """Machines that the cost model knows by name, with peaks and where they stand."""
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
