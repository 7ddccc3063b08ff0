"""`hybridkv plan`: what a model's cache holds in a given memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import typer

from hybridkv.cli.comparison import show_comparison
from hybridkv.cli.output import console, exact_bytes, floor, table
from hybridkv.cli.planning import (
    BlockSize,
    DtypeOption,
    LayoutOption,
    Memory,
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
from hybridkv.errors import ConfigError
from hybridkv.models import Model
from hybridkv.models.reading import ASSUMED
from hybridkv.planner import Plan, plan, plan_to_json
from hybridkv.planner.plan import NO_STATES
from hybridkv.specs import BATCHED_TOKENS, Keeps
from hybridkv.units import format_count


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
    state_dtype: StateDtype = None,
    fields: SetFields = None,
    layout: LayoutOption = None,
    placement: PlacementOption = None,
    windows_as_full: WindowsAsFull = None,
    max_batched_tokens: Annotated[
        int | None, typer.Option(help=f"Tokens of the largest step, which windows keep besides; {BATCHED_TOKENS}.")
    ] = None,
    prefill_checkpoints: Annotated[
        int | None,
        typer.Option(
            help="Reference layout: states that a Mamba-2 layer writes inside a step of a prompt; 0, vLLM's 1."
        ),
    ] = None,
    kernel_block_size: Annotated[
        int | None, typer.Option(help="Natural layout: tokens that attention kernels read as one block; the block.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show the layouts side by side.")] = False,
    plan_file: PlanFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as a document that --plan reads.")] = False,
) -> None:
    """Plan the KV cache of a model: groups, pages, blocks, and the requests that fit."""
    options = PlanOptions(
        config, memory, tp, block_size, dtype, layout, placement, windows_as_full, fields, state_dtype
    )
    bounds = {"max_model_len": max_model_len, "max_batched_tokens": max_batched_tokens}
    of_layout = {"prefill_checkpoints": prefill_checkpoints, "kernel_block_size": kernel_block_size}
    if compare:
        _refuse_beside_compare(
            {"--layout": layout, "--plan": plan_file, "--json": as_json or None, **_as_options(of_layout)}
        )
        show_comparison(partial(_make, options, given=bounds))
        return
    given = {**bounds, **of_layout}
    if plan_file is not None:
        options.refuse_beside_plan({"CONFIG": config, **_as_options(given)})
        made = load_plan(plan_file)
    else:
        made = _make(options, given=given)
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
    """Print a plan for people: its groups, then what it holds."""
    model, holds = plan.model, plan.capacity
    out = console()
    slabs = plan.config.slabs
    groups = table(
        *("group", "layers", "tokens", "page (B)", "block (B)", "padding (B)", *(("k",) if slabs else ())),
        numbers_from=2,
        title=f"{model.name}: {model.model_type}, {len(model.layers)} layers, {model.dtype} cache, tp {model.tp}",
    )
    for at, group in enumerate(holds.groups):
        groups.add_row(
            str(at),
            f"{group.layers} x {group.kind}",
            *map(format_count, (group.block_size, group.page_bytes, group.block_bytes, group.padding_bytes)),
            *((format_count(slabs.class_of(at).blocks_per_slab),) if slabs else ()),
        )
    out.print(groups)
    unit = "slab" if slabs else "block"
    lines = {
        **({} if model.dtype_from is None else {"keys and values": f"{model.dtype}, by {model.dtype_from}"}),
        "memory": exact_bytes(holds.memory_bytes),
        "used by blocks": exact_bytes(holds.arena_bytes),
        "padding lost": f"{exact_bytes(holds.unused_bytes)} left over, "
        f"{exact_bytes(holds.padding_bytes)} inside blocks",
        "bytes per token": _per_token(model),
        unit + "s": f"{format_count(holds.num_blocks)} of {exact_bytes(holds.block_bytes)}, the null {unit} included",
        "blocks a request": format_count(sum(one.blocks_per_request for one in holds.groups)),
        "tokens that fit": "any number" if holds.tokens_that_fit is None else format_count(holds.tokens_that_fit),
        "longest context": f"{format_count(holds.longest_context)} tokens",
        "concurrency": f"{floor(holds.concurrency)} requests of {format_count(holds.longest_context)} tokens",
        **_rules(plan),
    }
    for name, value in lines.items():
        out.print(f"{name:<17} {value}", soft_wrap=True)
    for title, facts in _read(model).items():
        out.print(f"\n{title}")
        for fact in facts:
            out.print(printable(f"  {fact}"), soft_wrap=True)


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
    """What a token takes, and what a request takes besides."""
    parts = {
        "": int(model.kv_bytes_per_token),
        "in windows": int(model.window_bytes_per_token),
        "an encoder token": int(model.encoder_bytes_per_token),
        "of states": model.state_bytes,
    }
    said = [f"{format_count(size)} B {what}".rstrip() for what, size in parts.items() if size]
    return ", ".join(said) or "0 B"
