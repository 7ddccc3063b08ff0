"""`hybridkv plan`: what a model's cache holds in a given memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from hybridkv.cli.comparison import show_comparison
from hybridkv.cli.output import console, floor, in_words, print_facts, table
from hybridkv.cli.pages import PageFile, checked_page, write_page
from hybridkv.cli.panels import CACHE, OUTPUT, REQUESTS
from hybridkv.cli.planning import (
    BlockSize,
    DtypeOption,
    LayoutOption,
    Memory,
    MtpLayers,
    PlacementOption,
    PlanFile,
    PlanOptions,
    SetFields,
    StateDtype,
    TensorParallel,
    WindowsAsFull,
    load_plan,
)
from hybridkv.cli.printable import printable
from hybridkv.errors import AssumptionWarning, ConfigError
from hybridkv.models import Model
from hybridkv.models.model import ASSUMED
from hybridkv.planner import Plan, plan, plan_to_json
from hybridkv.planner.plan import NO_STATES
from hybridkv.report import plan_page
from hybridkv.specs import BATCHED_TOKENS, Keeps
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
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest request.", show_default="the model's limit", rich_help_panel=REQUESTS),
    ] = None,
    tp: TensorParallel = None,
    block_size: BlockSize = None,
    dtype: DtypeOption = None,
    state_dtype: StateDtype = None,
    mtp_layers: MtpLayers = None,
    fields: SetFields = None,
    layout: LayoutOption = None,
    placement: PlacementOption = None,
    windows_as_full: WindowsAsFull = None,
    max_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the largest step, which windows keep besides.",
            show_default=format_count(BATCHED_TOKENS),
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    prefill_checkpoints: Annotated[
        int | None,
        typer.Option(
            help="Reference layout: states that a Mamba-2 layer writes inside a step of a prompt; vLLM's 1.",
            show_default="0",
            rich_help_panel=CACHE,
        ),
    ] = None,
    kernel_block_size: Annotated[
        int | None,
        typer.Option(
            help="Natural layout: tokens that attention kernels read as one block.",
            show_default="the block",
            rich_help_panel=CACHE,
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show the layouts side by side.", rich_help_panel=OUTPUT)
    ] = False,
    plan_file: PlanFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as a document that --plan reads.", rich_help_panel=OUTPUT)
    ] = False,
    page_file: PageFile = None,
) -> None:
    """Plan the KV cache of a model: groups, pages, blocks, and the requests that fit."""
    options = PlanOptions(
        config, memory, tp, block_size, dtype, layout, placement, windows_as_full, fields, state_dtype, mtp_layers
    )
    bounds = {"max_model_len": max_model_len, "max_batched_tokens": max_batched_tokens}
    of_layout = {"prefill_checkpoints": prefill_checkpoints, "kernel_block_size": kernel_block_size}
    page_file = checked_page(page_file)
    if compare:
        given_besides = {"--layout": layout, "--plan": plan_file, "--json": as_json or None, "--report": page_file}
        _refuse_beside_compare({**given_besides, **_as_options(of_layout)})
        show_comparison(partial(_make, options, given=bounds))
        return
    given = {**bounds, **of_layout}
    if plan_file is not None:
        options.refuse_beside_plan({"CONFIG": config, **_as_options(given)})
        made = load_plan(plan_file)
    elif as_json:
        made = _make(options, given=given)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AssumptionWarning)  # show_plan says it
            made = _make(options, given=given)
    if page_file is not None:
        write_page(page_file, plan_page(made))
    if as_json:
        print(plan_to_json(made), end="")
    else:
        show_plan(made)


def _refuse_beside_compare(options: Mapping[str, object]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"--compare plans both layouts and prints a table: drop {', '.join(given)}")


def _as_options(given: Mapping[str, object]) -> dict[str, object]:
    """Arguments of plan by the names that they have on the command line."""
    return {"--" + name.replace("_", "-"): value for name, value in given.items()}


def _make(options: PlanOptions, layout: str | None = None, *, given: Mapping[str, int | None]) -> Plan:
    """The plan of ``options``. layout: instead of theirs. given: other arguments of plan, None for its defaults."""
    if options.config is None:
        raise ConfigError("CONFIG is missing: give a config.json, a folder with one or a known name, or --plan FILE")
    if options.memory is None:
        raise ConfigError("--memory is missing: say what one rank has for its cache, for example --memory 40GiB")
    rules = options.rules if layout is None else options.rules_of(layout)
    said = {name: value for name, value in given.items() if value is not None}
    return plan(options.model(), options.memory, **rules, **said)


def show_plan(plan: Plan) -> None:
    """Print a plan for people: what fits, what it takes, then the groups that share blocks."""
    model, holds = plan.model, plan.capacity
    out = console()
    title = f"{model.name}: {model.model_type}, {model.depth} layers, {model.dtype} cache, tp {model.tp}"
    out.print(Text(printable(title), style="bold"), soft_wrap=True)
    longest = f"{format_count(holds.longest_context)} tokens"
    fit = "any number" if holds.tokens_that_fit is None else format_count(holds.tokens_that_fit)
    blocks = sum(one.blocks_per_request for one in holds.groups)
    unit = plan.config.unit
    print_facts(
        {
            "requests": f"{floor(holds.concurrency)} at once, of {longest} each, sharing nothing",
            "tokens": f"{fit}, where one request has them all",
            "longest request": longest,
            "a token takes": _per_token(model),
            **({"a state takes": format_bytes(model.state_bytes)} if model.state_bytes else {}),
            **_rules(plan),
            "memory": f"{format_bytes(holds.memory_bytes)}; {format_bytes(holds.unused_bytes)} left over",
            "padding": f"{format_bytes(holds.padding_bytes)} in the {format_count(blocks)} blocks of a longest request",
            "given out in": f"{format_count(holds.num_blocks)} {unit}s of {format_bytes(holds.block_bytes)}"
            ", one of them always empty",
            **({"a slab holds": "as many blocks of one group as fit"} if plan.config.slabs else {}),
            **({} if model.dtype_from is None else {"keys and values": f"{model.dtype}, by {model.dtype_from}"}),
        }
    )
    out.print(_groups(plan))
    for title, facts in _read(model).items():
        out.print(f"\n{title}")
        for fact in facts:
            out.print(printable(f"  {fact}"), soft_wrap=True)


def _groups(plan: Plan) -> Table:
    """Of each group its layers and blocks; of layers that share slabs, how many blocks one holds."""
    slabs = plan.config.slabs
    columns = ("group", "layers", "tokens", "a layer", "a block", "padding")
    shown = table(*columns, *(("in a slab",) if slabs else ()), numbers_from=2)
    for at, group in enumerate(plan.capacity.groups):
        sizes = (group.page_bytes, group.block_bytes, group.padding_bytes)
        shown.add_row(
            str(at),
            f"{group.layers} x {in_words(group.kind)}",
            format_count(group.block_size),
            *map(format_bytes, sizes),
            *((format_count(slabs.class_of(at).blocks_per_slab),) if slabs else ()),
        )
    return shown


def _read(model: Model) -> dict[str, list[str]]:
    """What was read from where and what was assumed, for people; nothing where a family has a reader of its own."""
    said: dict[str, list[str]] = {}
    for fact in model.read_from:
        if fact.source == ASSUMED:
            said.setdefault("assumed", []).append(f"{fact.what} {fact.value}: {fact.field}")
        else:
            said.setdefault("read", []).append(f"{fact.what} {fact.value}: {fact.field} ({fact.source})")
    return dict(sorted(said.items(), reverse=True))


def _rules(plan: Plan) -> dict[str, str]:
    """What a request holds of windows and states, where there are any, and by which rule."""
    said = {}
    if any(group.spec.keeps is Keeps.WINDOW for group in plan.config.groups):
        said["windows"] = f"with {format_count(plan.limits.max_in_flight_tokens)} tokens in flight"
    states = list(zip(plan.config.groups, plan.capacity.groups, strict=True))
    held = {one.blocks_per_request for group, one in states if group.spec.keeps is Keeps.STATE}
    if held:
        rule = "the one that is rewritten" if plan.placement == NO_STATES else "one read and one written"
        drafts, inside = plan.limits.num_speculative_tokens, plan.limits.prefill_checkpoints
        more = [f"{drafts} of drafts"] * bool(drafts) + [f"{inside} inside a step of a prompt"] * bool(inside)
        said["states a request"] = f"{max(held)}: {', '.join((rule, *more))}"
    return said


def _per_token(model: Model) -> str:
    """What a token takes, and for whom it is taken only while it is in reach."""
    parts = {
        "": int(model.kv_bytes_per_token),
        "in windows": int(model.window_bytes_per_token),
        "of an encoder's": int(model.encoder_bytes_per_token),
    }
    return ", ".join(f"{format_bytes(size)} {what}".rstrip() for what, size in parts.items() if size) or "0 B"
