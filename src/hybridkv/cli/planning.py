"""What `plan` and `replay` both ask for to plan a cache: the options, and what is made of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypedDict

import typer

from hybridkv.cache.placement import placement_named
from hybridkv.cli.panels import CACHE, MODEL
from hybridkv.errors import ConfigError, SchemaError
from hybridkv.models import DTYPE_NAMES, Model, read_model
from hybridkv.models.json_text import DocumentError, parse_json
from hybridkv.planner import Plan, read_plan, read_plan_from
from hybridkv.planner.plan import ALIGN, DEFAULT_LAYOUT, NATURAL, NO_STATES
from hybridkv.units import shown

_STANDARD_INPUT: Final = Path("-")


class CacheDtype(StrEnum):
    """What the cache holds; auto: what the config says."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"


class Layout(StrEnum):
    """How pages are sized and placed; reference: one page size. natural: their own sizes, in slabs."""

    REFERENCE = "reference"
    NATURAL = "natural"


Memory = Annotated[
    str | None, typer.Option(help="For the cache of one rank: 40GiB, 512MiB, or bytes.", rich_help_panel=CACHE)
]
TensorParallel = Annotated[
    int | None, typer.Option(help="Tensor parallel ranks.", show_default="1", rich_help_panel=MODEL)
]
BlockSize = Annotated[int | None, typer.Option(help="Tokens of a block.", show_default="16", rich_help_panel=CACHE)]
DtypeOption = Annotated[
    CacheDtype | None,
    typer.Option(
        "--dtype",
        "--kv-dtype",
        metavar="DTYPE",
        help="Of keys and values: auto, bf16, fp16, fp32, fp8.",
        show_default="that of the config",
        rich_help_panel=CACHE,
    ),
]
LayoutOption = Annotated[
    Layout | None,
    typer.Option(
        help="natural: blocks keep their own sizes. reference: vLLM's, all of one size.",
        show_default=DEFAULT_LAYOUT,
        rich_help_panel=CACHE,
    ),
]
PlacementOption = Annotated[
    str | None,
    typer.Option(
        help="Where recurrent states are kept. Natural layout: none, ends, interval:N, align, align:N. Reference "
        "layout: align, none.",
        show_default="ends; of the reference layout align",
        rich_help_panel=CACHE,
        metavar="PLACEMENT",
    ),
]
WindowsAsFull = Annotated[
    bool | None,
    typer.Option("--windows-as-full", help="Manage windowed layers as full attention.", rich_help_panel=CACHE),
]
SetFields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A field of the language model's config, instead of what it says; may be given more than once.",
        rich_help_panel=MODEL,
        metavar="FIELD=VALUE",
    ),
]
StateDtype = Annotated[
    CacheDtype | None,
    typer.Option(
        "--state-dtype",
        metavar="DTYPE",
        help="Of recurrent states, as --dtype.",
        show_default="that of the config",
        rich_help_panel=CACHE,
    ),
]
MtpLayers = Annotated[
    int | None,
    typer.Option(
        "--mtp-layers",
        help="Multi-token prediction layers that draft, with caches of their own.",
        show_default="0",
        rich_help_panel=CACHE,
        metavar="N",
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan", help="A plan written by `hybridkv plan --json`; - is standard input.", rich_help_panel=MODEL
    ),
]


class PlanRules(TypedDict):
    """Arguments of plan and plan_for_trace besides model, memory and limits."""

    placement: str | None
    windows_as_full: bool
    layout: str


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What was given; None for what was not. config: where the model is described. fields: as FIELD=VALUE.

    num_speculative_tokens: drafts that recurrent layers have room for.
    """

    config: str | None = None
    memory: str | None = None
    tp: int | None = None
    block_size: int | None = None
    dtype: CacheDtype | None = None
    layout: Layout | None = None
    placement: str | None = None
    windows_as_full: bool | None = None
    fields: Sequence[str] | None = None
    state_dtype: CacheDtype | None = None
    mtp_layers: int | None = None
    num_speculative_tokens: int = 0

    def refuse_beside_plan(self, own: Mapping[str, object], *, placed: bool = True) -> None:
        """ConfigError when anything was given that a plan file holds. own: the command's names of such options.

        placed: --placement is among them; the natural layout leaves it open.
        """
        shared = ["memory", "tp", "block_size", "dtype", "state_dtype", "mtp_layers", "layout", "windows_as_full"]
        shared[-1:-1] = ["placement"] if placed else []
        values = {**own, **{"--" + name.replace("_", "-"): getattr(self, name) for name in shared}}
        values["--set"] = self.fields or None
        given = [name for name, value in values.items() if value is not None]
        if given:
            raise ConfigError(f"--plan holds everything already: drop {', '.join(given)}, or drop --plan")

    def model(self) -> Model:
        """The model of ``config``, which was given."""
        return read_model(
            str(self.config),
            block_size=16 if self.block_size is None else self.block_size,
            tp=1 if self.tp is None else self.tp,
            dtype=DTYPE_NAMES.get(self.dtype or "auto"),
            fields=dict(map(_field, self.fields or ())),
            state_dtype=DTYPE_NAMES.get(self.state_dtype or "auto"),
            mtp_layers=self.mtp_layers or 0,
            num_speculative_tokens=self.num_speculative_tokens,
        )

    @property
    def rules(self) -> PlanRules:
        """How layers are managed."""
        return self.rules_of(self.layout or Layout(DEFAULT_LAYOUT))

    def rules_of(self, layout: str) -> PlanRules:
        """How layers are managed in ``layout``. ConfigError for a placement that it does not know."""
        name = self.placement
        if layout == NATURAL:
            if name is not None:
                placement_named(name, align_tokens=1)  # only read: the plan carries the name
        elif name not in {None, ALIGN, NO_STATES}:
            raise ConfigError(
                f"placement {name!r} is none of the reference layout's: choose {ALIGN} or {NO_STATES}, or "
                f"--layout {NATURAL}"
            )
        return PlanRules(placement=name, windows_as_full=bool(self.windows_as_full), layout=layout)


def _field(given: str) -> tuple[str, object]:
    """The name and the value of FIELD=VALUE: JSON, or else text."""
    name, mark, value = given.partition("=")
    if not name or not mark:
        raise ConfigError(f"--set {shown(given)} is no FIELD=VALUE: for example --set num_key_value_heads=8")
    try:
        return name, parse_json(value)
    except DocumentError:
        return name, value


def load_plan(path: Path) -> Plan:
    """The plan in a file, or on standard input for ``-``. Raises ConfigError and SchemaError as read_plan."""
    if path != _STANDARD_INPUT:
        return read_plan(path)
    if sys.stdin is None:
        raise ConfigError("standard input is closed: there is no plan to read")
    try:
        return read_plan_from(sys.stdin.buffer)
    except SchemaError as error:
        raise SchemaError(f"standard input: {error}") from error
