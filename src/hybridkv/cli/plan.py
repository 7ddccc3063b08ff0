"""`hybridkv plan`: what a model's cache holds in a given memory."""

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
    write_page,
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
            help="A config.json, a folder with one, or a known name (see `hybridkv models`).", metavar="CONFIG"
        ),
    ] = None,
    options: PlanOptions,
    max_model_len: int | None = request_option("Tokens of the longest request.", show_default="the model's limit"),
    max_batched_tokens: int | None = request_option(
        "Tokens of the largest step, which windows keep besides.", show_default=format_count(BATCHED_TOKENS)
    ),
    prefill_checkpoints: int | None = cache_option(
        "Reference layout: states that a Mamba-2 layer writes inside a step of a prompt; vLLM's 1.", show_default="0"
    ),
    kernel_block_size: int | None = cache_option(
        "Natural layout: tokens that attention kernels read as one block.", show_default="the block"
    ),
    compare: bool = output_option("Show the layouts side by side.", "--compare", default=False),
    plan_file: Path | None = plan_file_option(),
    as_json: bool = output_option("Print the plan as a document that --plan reads.", "--json", default=False),
    page_file: Path | None = page_option(),
) -> None:
    """Plan the KV cache of a model: groups, pages, blocks, and the requests that fit."""
    bounds = {"max_model_len": max_model_len, "max_batched_tokens": max_batched_tokens}
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
    if plan_file is not None:
        options.refuse_beside_plan({"CONFIG": config, **{as_option(name): value for name, value in limits.items()}})
        made = load_plan(plan_file)
    else:
        with warnings.catch_warnings():
            if not as_json:
                warnings.simplefilter("ignore", AssumptionWarning)  # _show_plan says it
            made = _make(config, options, limits)
    if page_file is not None:
        write_page(page_file, plan_page(made))
    if as_json:
        print(plan_to_json(made), end="")
    else:
        _show_plan(made)


def _make(
    config: str | None, options: PlanOptions, limits: Mapping[str, int | None], layout: str | None = None
) -> Plan:
    """The plan of ``options``. limits: other arguments of plan, None for its defaults. layout: instead of theirs."""
    if config is None:
        raise ConfigError("CONFIG is missing: give a config.json, a folder with one or a known name, or --plan FILE")
    if options.memory is None:
        raise ConfigError("--memory is missing: say what one rank has for its cache, for example --memory 40GiB")
    rules = options.rules(layout)
    rules |= {name: value for name, value in limits.items() if value is not None}
    return plan(options.model(config), options.memory, **rules)


def _show_plan(plan: Plan) -> None:
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


# -- the layouts of one model side by side


def _show_comparison(make: Callable[[str], Plan]) -> None:
    """Print what each layout makes of one memory. make: the plan in the layout of that name."""
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
    out.print(f"requests of at most {format_count(plan.max_model_len)} tokens, sharing nothing", soft_wrap=True)
    out.print("units: blocks, or slabs that blocks of several requests share", soft_wrap=True)
    out.print("padding: of the group that loses most, over what its layers keep", soft_wrap=True)


def _counted(numbers: Sequence[int]) -> str:
    """``1 x6, 5`` for six times 1 and once 5."""
    counts = Counter(numbers)
    return ", ".join(format_count(n) + (f" x{times}" if times > 1 else "") for n, times in sorted(counts.items()))


def _count(number: int | None) -> str:
    return _NOT_THERE if number is None else format_count(number)


_ROWS: Final[dict[str, Callable[[LayoutFacts], str]]] = {
    "longest request, tokens": lambda f: format_count(f.longest_context),
    "such requests at once": lambda f: floor(f.concurrency),
    f"requests of {format_count(SHORT_TOKENS)} tokens": lambda f: floor(f.short_requests),
    "one of these takes": lambda f: format_bytes(f.short_request_bytes),
    "one alone, in whole units": lambda f: format_bytes(f.short_request_alone_bytes),
    "attention tokens that fit": lambda f: _count(f.attention_tokens),
    "states that fit": lambda f: _count(f.states),
    "attention block, tokens": lambda f: ", ".join(map(format_count, f.attention_block_tokens)) or _NOT_THERE,
    "groups": lambda f: format_count(f.groups),
    "padding": lambda f: share(f.padding),
    "left over": lambda f: format_bytes(f.unused_bytes),
    "memory is given out in": lambda f: f"{format_count(f.units)} x {format_bytes(f.unit_bytes)}",
    "blocks in one, by group": lambda f: _counted(f.blocks_per_slab),
}
