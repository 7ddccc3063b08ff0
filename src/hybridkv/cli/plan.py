"""`hybridkv plan`: what a model's cache holds in a given memory."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from hybridkv.cli.output import console, table
from hybridkv.cli.planning import (
    BlockSize,
    DtypeOption,
    LayoutOption,
    Memory,
    PlacementOption,
    PlanFile,
    PlanOptions,
    TensorParallel,
    WindowsAsFull,
    load_plan,
)
from hybridkv.errors import ConfigError
from hybridkv.models import Model
from hybridkv.plan import Plan, make_plan, plan_to_json
from hybridkv.units import format_bytes, format_count


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan_command)


def plan_command(
    *,
    config: Annotated[
        str | None,
        typer.Argument(
            help="A config.json, a folder with one, or a known name (see `hybridkv models`).", metavar="CONFIG"
        ),
    ] = None,
    memory: Memory = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of the longest request; the model's limit.")] = None,
    tp: TensorParallel = None,
    block_size: BlockSize = None,
    dtype: DtypeOption = None,
    layout: LayoutOption = None,
    placement: PlacementOption = None,
    windows_as_full: WindowsAsFull = None,
    plan_file: PlanFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as a document that --plan reads.")] = False,
) -> None:
    """Plan the KV cache of a model: groups, pages, blocks, and the requests that fit."""
    options = PlanOptions(config, memory, tp, block_size, dtype, layout, placement, windows_as_full)
    if plan_file is not None:
        options.refuse_beside_plan({"CONFIG": config, "--max-model-len": max_model_len})
        made = load_plan(plan_file)
    else:
        made = _make(options, max_model_len)
    if as_json:
        print(plan_to_json(made), end="")
    else:
        show_plan(made)


def _make(options: PlanOptions, max_model_len: int | None) -> Plan:
    if options.config is None:
        raise ConfigError("CONFIG is missing: give a config.json, a folder with one or a known name, or --plan FILE")
    if options.memory is None:
        raise ConfigError("--memory is missing: say what one rank has for its cache, for example --memory 40GiB")
    return make_plan(options.model(), options.memory, max_model_len=max_model_len, **options.rules)


def show_plan(plan: Plan) -> None:
    """Print a plan for people: its groups, then what it holds."""
    model, holds = plan.model, plan.capacity
    out = console()
    groups = table(
        *("group", "layers", "tokens", "page (B)", "block (B)", "padding (B)"),
        numbers_from=2,
        title=f"{model.name}: {model.model_type}, {len(model.layers)} layers, {model.dtype} cache, tp {model.tp}",
    )
    for at, group in enumerate(holds.groups):
        groups.add_row(
            str(at),
            f"{group.layers} x {group.kind}",
            *map(format_count, (group.block_size, group.page_bytes, group.block_bytes, group.padding_bytes)),
        )
    out.print(groups)
    lines = {
        "memory": _bytes(holds.memory_bytes),
        "used by blocks": _bytes(holds.arena_bytes),
        "padding lost": f"{_bytes(holds.unused_bytes)} left over, {_bytes(holds.padding_bytes)} inside blocks",
        "bytes per token": _per_token(model),
        "blocks": f"{format_count(holds.num_blocks)} of {_bytes(holds.block_bytes)}, the null block included",
        "blocks a request": format_count(sum(one.blocks_per_request for one in holds.groups)),
        "tokens that fit": "any number" if holds.tokens_that_fit is None else format_count(holds.tokens_that_fit),
        "longest context": f"{format_count(holds.longest_context)} tokens",
        "concurrency": f"{_floor(holds.concurrency)} requests of {format_count(holds.longest_context)} tokens",
    }
    for name, value in lines.items():
        out.print(f"{name:<17} {value}", soft_wrap=True, markup=False)


def _per_token(model: Model) -> str:
    """What a token takes, and what a request takes besides."""
    parts = {
        "": int(model.kv_bytes_per_token),
        "in windows": int(model.window_bytes_per_token),
        "an encoder token": int(model.encoder_bytes_per_token),
        "of states": model.state_bytes,
    }
    said = [f"{format_count(size)} B {what}".rstrip() for what, size in parts.items() if size]
    return ", ".join(said) or "0 B"


def _floor(number: float) -> str:
    """Two decimals, never rounded up: 15.998 requests are not 16."""
    return f"{math.floor(number * 100) / 100:.2f}"


def _bytes(size_bytes: int) -> str:
    """Exact, and readable where the two differ."""
    readable = format_bytes(size_bytes)
    return readable if readable.endswith(" B") else f"{format_count(size_bytes)} B ({readable})"
