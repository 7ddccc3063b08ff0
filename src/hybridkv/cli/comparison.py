"""`hybridkv plan --compare`: the layouts of one model side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from hybridkv.cli.output import console, floor, share, table
from hybridkv.planner import LayoutFacts, Plan, compare_layouts
from hybridkv.planner.plan import LAYOUTS, SHORT_TOKENS
from hybridkv.units import format_bytes, format_count

_NOT_THERE: Final = "-"


def show_comparison(make: Callable[[str], Plan]) -> None:
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
