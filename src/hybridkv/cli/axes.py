"""Settings that `sweep` and `tune` vary: the options, each a list, and the combinations of their values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final

import typer

from hybridkv.cli.hardware import HardwareList, WeightsList
from hybridkv.cli.panels import CACHE, MODEL, RUN
from hybridkv.cli.speculation import require_drafts
from hybridkv.errors import ConfigError
from hybridkv.models import DTYPE_NAMES
from hybridkv.planner.plan import DEFAULT_LAYOUT
from hybridkv.simulator import Cell, ReplaySettings
from hybridkv.simulator.fleet import ROUND_ROBIN, ROUTERS
from hybridkv.simulator.hardware import BF16, DEFAULT_HARDWARE
from hybridkv.simulator.loop import ACCEPTANCE
from hybridkv.units import GiB, MiB, format_count, parse_bytes, shown

_MOST_CELLS: Final = 100_000
_DEFAULTS: Final = ReplaySettings()
_NUMBERED: Final = {"tp", "block_size", "max_running", "token_budget", "replicas", "drafts"}

_Models = Annotated[
    str,
    typer.Option("--model", help="Models: config.json files, folders with one, or known names.", rich_help_panel=MODEL),
]
_Memories = Annotated[
    str,
    typer.Option(
        "--memory",
        help="For the cache of one rank: 20GiB,40GiB, or from:to:step, as 20GiB:80GiB:20GiB.",
        rich_help_panel=CACHE,
    ),
]
_Ranks = Annotated[str, typer.Option("--tp", help="Tensor parallel ranks.", rich_help_panel=MODEL)]
_Layouts = Annotated[str, typer.Option("--layout", help="natural, reference.", rich_help_panel=CACHE)]
_Placements = Annotated[
    str | None,
    typer.Option(
        "--placement", help="Where recurrent states are kept.", show_default="that of the layout", rich_help_panel=CACHE
    ),
]
_Evictions = Annotated[
    str | None,
    typer.Option(
        "--eviction",
        help="What is given up next, in the natural layout.",
        show_default="what suits",
        rich_help_panel=CACHE,
    ),
]
_BlockSizes = Annotated[str, typer.Option("--block-size", help="Tokens of a block.", rich_help_panel=CACHE)]
_Dtypes = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype", help="Of keys and values: bf16, fp8.", show_default="the config's", rich_help_panel=CACHE
    ),
]
_MaxRunning = Annotated[str, typer.Option("--max-running", help="Requests at once.", rich_help_panel=RUN)]
_TokenBudget = Annotated[str, typer.Option("--token-budget", help="Tokens of a step.", rich_help_panel=RUN)]
_Replicas = Annotated[str, typer.Option("--replicas", help="Engines behind a router.", rich_help_panel=RUN)]
_Router = Annotated[str, typer.Option("--router", help=f"{', '.join(ROUTERS)}.", rich_help_panel=RUN)]
_Drafts = Annotated[
    str, typer.Option("--drafts", help="Drafts of each row that decodes, in a step.", rich_help_panel=RUN)
]
_Acceptances = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        help="Of a draft, if those before it were accepted: 0 .. 1.",
        show_default=str(ACCEPTANCE),
        rich_help_panel=RUN,
    ),
]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", help="Processes at once.", show_default="one a core", rich_help_panel=RUN)
]


@dataclass(frozen=True, slots=True)
class AxesOptions:
    """Lists as they were given."""

    model: _Models
    memory: _Memories
    tp: _Ranks = "1"
    layout: _Layouts = DEFAULT_LAYOUT
    placement: _Placements = None
    eviction: _Evictions = None
    block_size: _BlockSizes = "16"
    dtype: _Dtypes = None
    max_running: _MaxRunning = str(_DEFAULTS.max_running)
    token_budget: _TokenBudget = str(_DEFAULTS.token_budget)
    hardware: HardwareList = DEFAULT_HARDWARE
    weights: WeightsList = BF16
    replicas: _Replicas = "1"
    router: _Router = ROUND_ROBIN
    drafts: _Drafts = "0"
    acceptance: _Acceptances = None

    def values(self) -> dict[str, Sequence[object]]:
        """By the fields of Cell, which these are. ConfigError for lists that are none."""
        found: dict[str, Sequence[object]] = {}
        for field in fields(self):
            name, given = field.name, getattr(self, field.name)
            option = "--kv-dtype" if name == "dtype" else "--" + name.replace("_", "-")
            if given is None:
                found[name] = [None]
            elif name == "acceptance":
                found[name] = shares(option, given)
            elif name == "memory":
                found[name] = sizes(given)
            else:
                found[name] = numbers(option, given) if name in _NUMBERED else words(option, given)
        require_drafts(any(found["drafts"]), self.acceptance)
        found["acceptance"] = [ACCEPTANCE if one is None else one for one in found["acceptance"]]
        found["dtype"] = [DTYPE_NAMES.get(str(one), one) for one in found["dtype"]]
        return found


def cells_of(axes: Mapping[str, Sequence[object]]) -> list[Cell]:
    """Every combination. ConfigError for more than anybody waits for."""
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > _MOST_CELLS:
        raise ConfigError(f"{format_count(count)} cells are more than a sweep takes ({format_count(_MOST_CELLS)})")
    chosen: Iterator[tuple[Any, ...]] = itertools.product(*axes.values())
    cells = [Cell(**dict(zip(axes, values, strict=True))) for values in chosen]
    return list(dict.fromkeys(one.plainest() for one in cells))


def words(option: str, given: str) -> list[str]:
    """A list separated by commas, each once."""
    found = list(dict.fromkeys(one.strip() for one in given.split(",")))
    if not all(found):
        raise ConfigError(f"{option} {shown(given)} has an empty entry")
    return found


def numbers(option: str, given: str) -> list[int]:
    """Whole numbers, separated by commas."""
    found = words(option, given)
    for one in found:
        if not (one.isascii() and one.isdigit() and len(one) < 10):
            raise ConfigError(f"{option} {shown(one)} is no number: say {option} 1,2")
    return list(map(int, found))


def shares(option: str, given: str) -> list[float]:
    """Numbers of 0 .. 1, separated by commas."""
    found = words(option, given)
    try:
        return list(map(float, found))
    except ValueError:
        raise ConfigError(f"{option} {shown(given)}: say numbers of 0 .. 1, as {option} 0.6,0.8") from None


def sizes(given: str) -> list[str]:
    """Memories: each by itself, or from:to:step with both ends."""
    found: list[str] = []
    for one in words("--memory", given):
        first, *more = one.split(":")
        if not more:
            parse_bytes(first)
            found.append(first)
            continue
        if len(more) != 2:
            raise ConfigError(f"--memory {shown(one)}: a range is from:to:step, as 20GiB:80GiB:20GiB")
        least, most, step = map(parse_bytes, (first, *more))
        if least > most or (most - least) // step >= _MOST_CELLS:
            raise ConfigError(f"--memory {shown(one)}: the range must ascend, in fewer than {_MOST_CELLS} steps")
        found += map(_exact, range(least, most + 1, step))
    return list(dict.fromkeys(found))


def _exact(size_bytes: int) -> str:
    """As short as it can be said exactly."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)
