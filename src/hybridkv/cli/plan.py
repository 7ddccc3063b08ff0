"""`hybridkv plan`: what a model's cache holds in a given memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hybridkv.cli.output import console, table
from hybridkv.errors import ConfigError
from hybridkv.models import DTYPE_NAMES, Model, read_model
from hybridkv.plan import Plan, make_plan, plan_to_json, read_plan
from hybridkv.units import format_bytes, format_count


class CacheDtype(StrEnum):
    """What the cache holds; auto: what the config says."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"


class Layout(StrEnum):
    """How pages are sized and placed; reference: one page size."""

    REFERENCE = "reference"


class Placement(StrEnum):
    """Where recurrent states are kept; align: where chunks end on a block edge."""

    ALIGN = "align"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What was given; None for what was not. The words are those of the options."""

    config: str | None = None
    memory: str | None = None
    max_model_len: int | None = None
    tp: int | None = None
    block_size: int | None = None
    dtype: CacheDtype | None = None
    layout: Layout | None = None
    placement: Placement | None = None
    windows_as_full: bool | None = None

    @property
    def given(self) -> list[str]:
        """Names of the options that were given, as a user writes them."""
        named = {"config": "CONFIG"}
        values = [one.name for one in fields(self) if getattr(self, one.name) is not None]
        return [named.get(name, "--" + name.replace("_", "-")) for name in values]


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
    dtype: Annotated[
        CacheDtype | None, typer.Option("--dtype", "--kv-dtype", help="Of keys and values; auto: the config's.")
    ] = None,
    layout: Annotated[Layout | None, typer.Option(help="How pages are sized and placed; reference.")] = None,
    placement: Annotated[Placement | None, typer.Option(help="Where recurrent states are kept; align.")] = None,
    windows_as_full: Annotated[
        bool | None, typer.Option("--windows-as-full", help="Manage windowed layers as full attention.")
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Show a plan written with --json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as a document that --plan reads.")] = False,
) -> None:
    """Plan the KV cache of a model: groups, pages, blocks, and the requests that fit."""
    options = PlanOptions(config, memory, max_model_len, tp, block_size, dtype, layout, placement, windows_as_full)
    if plan_file is not None:
        if options.given:
            raise ConfigError(f"--plan holds everything already: drop {', '.join(options.given)}, or drop --plan")
        made = read_plan(plan_file)
    else:
        made = _make(options)
    if as_json:
        print(plan_to_json(made), end="")
    else:
        show_plan(made)


def _make(options: PlanOptions) -> Plan:
    if options.config is None:
        raise ConfigError("CONFIG is missing: give a config.json, a folder with one or a known name, or --plan FILE")
    if options.memory is None:
        raise ConfigError("--memory is missing: say what one rank has for its cache, for example --memory 40GiB")
    model = read_model(
        options.config,
        block_size=16 if options.block_size is None else options.block_size,
        tp=1 if options.tp is None else options.tp,
        dtype=DTYPE_NAMES.get(options.dtype or "auto"),
    )
    return make_plan(
        model,
        options.memory,
        max_model_len=options.max_model_len,
        placement=options.placement or Placement.ALIGN,
        windows_as_full=bool(options.windows_as_full),
    )


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
