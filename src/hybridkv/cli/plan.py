"""`hybridkv plan`: the requests that a model's cache holds in a given memory."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from hybridkv.cli.options import (
    as_option,
    cache_option,
    checked_page,
    output_option,
    page_option,
    request_option,
    run_option,
    write_file,
)
from hybridkv.cli.outcome import printable
from hybridkv.cli.output import console, floor, in_words, print_facts, share, table
from hybridkv.cli.running import PlanOptions, load_plan, plan_file_option
from hybridkv.errors import AssumptionWarning, ConfigError
from hybridkv.models import Model
from hybridkv.models.model import ASSUMED
from hybridkv.planner import LayoutFacts, Plan, compare_layouts, plan, plan_to_json
from hybridkv.planner.plan import LAYOUTS, NO_STATES, SHORT_TOKENS
from hybridkv.report import plan_page
from hybridkv.specs import BATCHED_TOKENS, Keeps
from hybridkv.units import format_bytes, format_count

_NOT_THERE: Final = "-"


def plan_command(
    *,
    config: Annotated[
        str | None,
        typer.Argument(
            help="Model: a config.json, a folder with one, or a name of `hybridkv models`.", metavar="CONFIG"
        ),
    ] = None,
    options: PlanOptions,
    max_model_len: int | None = request_option(
        "Tokens of the longest request, prompt and output together.", show_default="the model's limit"
    ),
    token_budget: int | None = run_option(
        "Limit of tokens in a step; layers with a window hold that many tokens more.",
        "--token-budget",
        "--max-batched-tokens",
        metavar="N",
        show_default=format_count(BATCHED_TOKENS),
    ),
    prefill_checkpoints: int | None = cache_option(
        "States that a Mamba-2 layer writes inside a prefill step, in the reference layout; vLLM writes 1.",
        show_default="0",
    ),
    kernel_block_size: int | None = cache_option(
        "Tokens that attention kernels read as one block, in the natural layout.", show_default="the block size"
    ),
    compare: bool = output_option("Compare both layouts in one table.", "--compare", default=False),
    plan_file: Path | None = plan_file_option(),
    as_json: bool = output_option("Print the plan as a JSON document that --plan reads.", "--json", default=False),
    page_file: Path | None = page_option(),
) -> None:
    """Plan the KV cache of a model: groups, pages, blocks, and the requests that fit."""
    bounds = {"max_model_len": max_model_len, "max_batched_tokens": token_budget}
    of_layout = {"prefill_checkpoints": prefill_checkpoints, "kernel_block_size": kernel_block_size}
    page_file = checked_page(page_file)
    if compare:
        besides = {
            "layout": options.layout,
            "plan": plan_file,
            "json": as_json or None,
            "report": page_file,
            **of_layout,
        }
        given = [as_option(name) for name, value in besides.items() if value is not None]
        if given:
            raise ConfigError(f"--compare plans both layouts and prints a table: drop {', '.join(given)}")
        _show_comparison(lambda layout: _make(config, options, bounds, layout))
        return
    limits = {**bounds, **of_layout}
    own = {"max_model_len": max_model_len, "token_budget": token_budget, **of_layout}
    if plan_file is not None:
        options.require_none_with_plan({"CONFIG": config, **{as_option(name): value for name, value in own.items()}})
        made = load_plan(plan_file)
    else:
        with warnings.catch_warnings():
            if not as_json:
                warnings.simplefilter("ignore", AssumptionWarning)  # _show_plan prints the assumptions
            made = _make(config, options, limits)
    if page_file is not None:
        write_file("--report", page_file, plan_page(made))
    if as_json:
        print(plan_to_json(made), end="")
    else:
        _show_plan(made)


def _make(
    config: str | None, options: PlanOptions, limits: Mapping[str, int | None], layout: str | None = None
) -> Plan:
    """Return the plan of ``options``, in ``layout`` if given. limits: more arguments of ``plan``; None: its default."""
    if config is None:
        raise ConfigError("CONFIG is missing: give a config.json, a folder with one or a known name, or --plan FILE")
    if options.memory is None:
        raise ConfigError("--memory is missing: give the cache memory of one rank, for example --memory 40GiB")
    rules = options.rules(layout)
    rules |= {name: value for name, value in limits.items() if value is not None}
    return plan(options.model(config), options.memory, **rules)


def _show_plan(plan: Plan) -> None:
    """Print a plan: the requests that fit, the memory that they take, then the groups of layers."""
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
            "requests": f"{floor(holds.concurrency)} at once, of {longest} each, without shared prefixes",
            "tokens": f"{fit} in one request",
            "longest request": longest,
            "a token takes": _per_token(model),
            **({"a state takes": format_bytes(model.state_bytes)} if model.state_bytes else {}),
            **({"rings take": f"{format_bytes(model.ring_bytes)} a request"} if model.ring_bytes else {}),
            **_rules(plan),
            "memory": f"{format_bytes(holds.memory_bytes)}; {format_bytes(holds.unused_bytes)} unused",
            "padding": f"{format_bytes(holds.padding_bytes)} in the {format_count(blocks)} blocks of a longest request",
            "allocated in": f"{format_count(holds.num_blocks)} {unit}s of {format_bytes(holds.block_bytes)}"
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
    """Return a table of each group's layers and blocks, and of the blocks in a slab if the plan has slabs."""
    slabs = plan.config.slabs
    columns = ("group", "layers", "tokens", "a layer", "a block", "padding")
    shown = table(*columns, *(("in a slab",) if slabs else ()), numbers_from=2)
    for at, (group, layers) in enumerate(zip(plan.capacity.groups, plan.layers_of_groups, strict=True)):
        sizes = (group.page_bytes, group.block_bytes, group.padding_bytes)
        shown.add_row(
            str(at),
            f"{layers} x {in_words(group.kind)}",
            format_count(group.block_size),
            *map(format_bytes, sizes),
            *((format_count(slabs.class_of(at).blocks_per_slab),) if slabs else ()),
        )
    return shown


def _read(model: Model) -> dict[str, list[str]]:
    """Return the facts that were read from config fields or assumed; empty if the model's family has its own reader."""
    said: dict[str, list[str]] = {}
    for fact in model.read_from:
        if fact.source == ASSUMED:
            said.setdefault("assumed", []).append(f"{fact.what} {fact.value}: {fact.field}")
        else:
            said.setdefault("read", []).append(f"{fact.what} {fact.value}: {fact.field} ({fact.source})")
    return dict(sorted(said.items(), reverse=True))


def _rules(plan: Plan) -> dict[str, str]:
    """Return the facts about windows and states that a request holds, if the model has any."""
    said = {}
    if any(group.spec.keeps is Keeps.WINDOW for group in plan.config.groups):
        said["windows"] = f"plus {format_count(plan.limits.max_in_flight_tokens)} tokens in flight"
    states = list(zip(plan.config.groups, plan.capacity.groups, strict=True))
    held = {one.blocks_per_request for group, one in states if group.spec.keeps is Keeps.STATE}
    if held:
        rule = "one that is overwritten" if plan.placement == NO_STATES else "one read and one written"
        drafts, inside = plan.limits.num_speculative_tokens, plan.limits.prefill_checkpoints
        more = [f"{drafts} for drafts"] * bool(drafts) + [f"{inside} inside a prefill step"] * bool(inside)
        said["states a request"] = f"{max(held)}: {', '.join((rule, *more))}"
    return said


def _per_token(model: Model) -> str:
    """Return the bytes of a token: in layers that keep every token, in windows, and in cross attention."""
    parts = {
        "": int(model.kv_bytes_per_token),
        "in windows": int(model.window_bytes_per_token),
        "for an encoder token": int(model.encoder_bytes_per_token),
    }
    return ", ".join(f"{format_bytes(size)} {what}".rstrip() for what, size in parts.items() if size) or "0 B"


# -- comparison of the layouts of one model


def _show_comparison(make: Callable[[str], Plan]) -> None:
    """Print a table that compares the layouts. make: returns the plan in the layout of a name."""
    made: list[Plan] = []

    def remembered(layout: str) -> Plan:
        made.append(make(layout))
        return made[-1]

    facts = compare_layouts(remembered)
    plan = made[0]
    model = plan.model
    shown = table(
        *("", *LAYOUTS),
        title=f"{model.name}: {model.depth} layers, {model.dtype} cache, tp {model.tp}, "
        f"{format_bytes(plan.memory_bytes)}",
    )
    for name, show in _ROWS.items():
        shown.add_row(name, *("does not fit" if one is None else show(one) for one in facts))
    out = console()
    out.print(shown)
    limit = format_count(plan.max_model_len)
    out.print(f"requests of at most {limit} tokens, without shared prefixes", soft_wrap=True)
    out.print("units: blocks, or slabs that hold blocks of several requests", soft_wrap=True)
    out.print("padding: of the group with most padding, relative to its content", soft_wrap=True)
    out.print("lost: padding in all blocks of one longest request", soft_wrap=True)


def _counted(numbers: Sequence[int]) -> str:
    """Return distinct numbers with their counts: ``1 x6, 5`` for six times 1 and once 5."""
    counts = Counter(numbers)
    return ", ".join(format_count(n) + (f" x{times}" if times > 1 else "") for n, times in sorted(counts.items()))


def _count(number: int | None) -> str:
    return _NOT_THERE if number is None else format_count(number)


_ROWS: Final[dict[str, Callable[[LayoutFacts], str]]] = {
    "longest request, tokens": lambda f: format_count(f.longest_context),
    "longest requests at once": lambda f: floor(f.concurrency),
    f"requests of {format_count(SHORT_TOKENS)} tokens": lambda f: floor(f.short_requests),
    "one of these takes": lambda f: format_bytes(f.short_request_bytes),
    "one alone, in whole units": lambda f: format_bytes(f.short_request_alone_bytes),
    "attention tokens that fit": lambda f: _count(f.attention_tokens),
    "states that fit": lambda f: _count(f.states),
    "attention block, tokens": lambda f: ", ".join(map(format_count, f.attention_block_tokens)) or _NOT_THERE,
    "groups": lambda f: format_count(f.groups),
    "padding": lambda f: share(f.padding),
    "lost in a longest request": lambda f: format_bytes(f.padding_bytes),
    "share of the request": lambda f: share(f.padding_share),
    "unused memory": lambda f: format_bytes(f.unused_bytes),
    "allocation units": lambda f: f"{format_count(f.units)} x {format_bytes(f.unit_bytes)}",
    "blocks in a unit, by group": lambda f: _counted(f.blocks_per_slab),
}
