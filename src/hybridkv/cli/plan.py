"""`hybridkv plan`: what a model's cache holds in a given memory."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hybridkv.cli.output import console, table
from hybridkv.errors import ConfigError
from hybridkv.models import DTYPE_NAMES, read_model
from hybridkv.plan import Plan, make_plan, plan_to_json, read_plan
from hybridkv.units import format_bytes, format_count


class CacheDtype(StrEnum):
    """What the cache holds; auto: what the config says."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


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
    memory: Annotated[str | None, typer.Option(help="For the cache of one rank: 40GiB, 512MiB, or bytes.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of the longest request; the model's limit.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel ranks; 1.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block; 16.")] = None,
    dtype: Annotated[CacheDtype | None, typer.Option("--dtype", "--kv-dtype", help="Of the cache; auto.")] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Show a plan written with --json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as a document that --plan reads.")] = False,
) -> None:
    """Plan the KV cache of a model: groups, pages, blocks, and the requests that fit."""
    options = {
        "CONFIG": config,
        "--memory": memory,
        "--max-model-len": max_model_len,
        "--tp": tp,
        "--block-size": block_size,
        "--dtype": dtype,
    }
    if plan_file is not None:
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ConfigError(f"--plan holds everything already: drop {', '.join(given)}, or drop --plan")
        made = read_plan(plan_file)
    else:
        made = _make(
            config=config, memory=memory, max_model_len=max_model_len, tp=tp, block_size=block_size, dtype=dtype
        )
    if as_json:
        print(plan_to_json(made), end="")
    else:
        show_plan(made)


def _make(
    *,
    config: str | None,
    memory: str | None,
    max_model_len: int | None,
    tp: int | None,
    block_size: int | None,
    dtype: CacheDtype | None,
) -> Plan:
    if config is None:
        raise ConfigError("CONFIG is missing: give a config.json, a folder with one or a known name, or --plan FILE")
    if memory is None:
        raise ConfigError("--memory is missing: say what one rank has for its cache, for example --memory 40GiB")
    model = read_model(
        config,
        block_size=16 if block_size is None else block_size,
        tp=1 if tp is None else tp,
        dtype=DTYPE_NAMES.get(dtype or "auto"),
    )
    return make_plan(model, memory, max_model_len=max_model_len)


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
        "bytes per token": f"{format_count(int(model.kv_bytes_per_token))} B",
        "blocks": f"{format_count(holds.num_blocks)} of {_bytes(holds.block_bytes)}, the null block included",
        "blocks a request": format_count(sum(one.blocks_per_request for one in holds.groups)),
        "tokens that fit": format_count(holds.tokens_that_fit),
        "longest context": f"{format_count(holds.longest_context)} tokens",
        "concurrency": f"{_floor(holds.concurrency)} requests of {format_count(holds.longest_context)} tokens",
    }
    for name, value in lines.items():
        out.print(f"{name:<17} {value}", soft_wrap=True, markup=False)


def _floor(number: float) -> str:
    """Two decimals, never rounded up: 15.998 requests are not 16."""
    return f"{math.floor(number * 100) / 100:.2f}"


def _bytes(size_bytes: int) -> str:
    """Exact, and readable where the two differ."""
    readable = format_bytes(size_bytes)
    return readable if readable.endswith(" B") else f"{format_count(size_bytes)} B ({readable})"
