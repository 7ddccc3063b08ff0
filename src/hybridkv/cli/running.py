"""What `plan`, `replay` and others read: where requests come from, how a cache is planned, and how a replay runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from hybridkv.cache import placement_of
from hybridkv.cli.options import (
    as_option,
    cache_option,
    eviction_option,
    model_option,
    no_prefix_caching_option,
    request_option,
    run_option,
    shares_option,
    short_share_option,
    skip_bad_lines_option,
)
from hybridkv.errors import ConfigError, SchemaError
from hybridkv.eviction import TenantShares, eviction_of
from hybridkv.models import DTYPE_NAMES, Model, read_model
from hybridkv.models.json_text import DocumentError, parse_json
from hybridkv.planner import Plan, read_plan, read_plan_from
from hybridkv.planner.plan import DEFAULT_LAYOUT
from hybridkv.simulator import (
    FORMATS,
    WORKLOADS,
    ReplaySettings,
    RequestSource,
    Simulation,
    TraceFile,
    TraceSummary,
    UniformWorkload,
    Workload,
    hardware_named,
    plan_for_trace,
    plan_with_length,
    simulation_of,
)
from hybridkv.simulator.formats.events import KV_EVENTS
from hybridkv.simulator.hardware import BF16, DEFAULT_HARDWARE, WEIGHT_BYTES
from hybridkv.simulator.loop import ACCEPTANCE, Speculation
from hybridkv.simulator.setup import require_placement
from hybridkv.simulator.trace import ARRIVALS_PER_S
from hybridkv.units import shown

WORKLOAD: Final = "workload:"
_UNIFORM: Final = "uniform"
_STANDARD_INPUT: Final = Path("-")
_DEFAULT: Final = ReplaySettings()
_NOT_TOLD: Final = {"placement", "step_by_step", "shares", "block_times"}
"""Settings that say nothing, or stand elsewhere in documents."""


# -- where requests come from

TraceArgument = Annotated[
    str,
    typer.Argument(
        help=f"A trace, plain or gzip, or workload:NAME of {', '.join(WORKLOADS)}, {_UNIFORM}.",
        metavar="TRACE|workload:NAME",
    ),
]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What was given; None for what was not."""

    format: str | None = request_option(
        f"Of the trace: {', '.join(FORMATS)}.", metavar="NAME", show_default="known by its content"
    )
    trace_block_size: int | None = request_option("Tokens of a Mooncake hash id.", show_default="512")
    tokenizer: str | None = request_option(
        "Of a trace that holds text: a tokenizer.json, its folder, or bytes:N, N bytes a token."
    )
    arrivals: float | None = request_option("A second, of a trace without times.", show_default=f"{ARRIVALS_PER_S:g}")
    seed: int | None = request_option("Of a workload.", show_default="0")
    hours: float | None = request_option("Of arrivals of a workload.", show_default="1")
    rate: float | None = request_option("Multiplies the arrivals of a workload.", show_default="1")
    marks: bool = request_option(
        "Of a workload: mark where the shared beginning of each prompt ends.", "--marks", default=False
    )
    limit: int | None = request_option("The first N requests only.", show_default="all")
    skip_bad_lines: bool = skip_bad_lines_option()

    def read(self, trace: str) -> RequestSource:
        """The trace file or workload. ConfigError for options of the other kind."""
        generated, kind = trace.startswith(WORKLOAD), trace.removeprefix(WORKLOAD)
        of_files = self._given("format", "trace_block_size", "tokenizer", "arrivals", "skip_bad_lines")
        of_workloads, of_both = self._given("seed", "hours", "rate", "marks"), self._given("limit")
        foreign = of_files if generated else of_workloads
        if generated and kind == _UNIFORM:
            foreign |= of_workloads | of_both
        if foreign:
            raise ConfigError(f"{', '.join(map(as_option, foreign))} means nothing for {trace}: leave it out")
        if not generated:
            renamed = {"format": "format_name", "arrivals": "arrivals_per_s"}
            return TraceFile(trace, **of_both, **{renamed.get(name, name): value for name, value in of_files.items()})
        if kind == _UNIFORM:
            return UniformWorkload()
        if kind not in WORKLOADS:
            raise ConfigError(f"unknown workload {kind!r}: use one of {', '.join((*WORKLOADS, _UNIFORM))}")
        return Workload(kind, **of_both, **of_workloads)

    def _given(self, *names: str) -> dict[str, Any]:
        """Those of ``names`` that were given."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None and value is not False}


def untold(source: RequestSource, *, tokens_known: bool) -> dict[str, str]:
    """What the format of ``source`` cannot tell, as a fact by its name; nothing of most.

    tokens_known: as TraceSummary has it.
    """
    if not tokens_known:
        return {"lengths alone": "which tokens are equal is unknown, and so are hits; times are those without any"}
    if not isinstance(source, TraceFile) or source.format_name != KV_EVENTS.name:
        return {}
    return {source.format_name: "requests as blocks tell of them, without those that stored none, and what fills none"}


# -- how a cache is planned


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


block_size_option: Final = partial(cache_option, "Tokens of a block.", show_default="16")
layout_option: Final = partial(
    cache_option,
    "natural: blocks keep their own sizes. reference: vLLM's, all of one size.",
    show_default=DEFAULT_LAYOUT,
)
placement_option: Final = partial(
    cache_option,
    "Where recurrent states are kept. Natural layout: none, ends, interval:N, align, align:N. Reference "
    "layout: align, none.",
    show_default="ends; of the reference layout align",
    metavar="PLACEMENT",
)
plan_file_option: Final = partial(
    model_option, "A plan written by `hybridkv plan --json`; - is standard input.", "--plan"
)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What was given; None for what was not."""

    memory: str | None = cache_option("For the cache of one rank: 40GiB, 512MiB, or bytes.")
    block_size: int | None = block_size_option()
    dtype: CacheDtype | None = cache_option(
        "Of keys and values: auto, bf16, fp16, fp32, fp8.",
        "--dtype",
        "--kv-dtype",
        metavar="DTYPE",
        show_default="that of the config",
    )
    state_dtype: CacheDtype | None = cache_option(
        "Of recurrent states, as --dtype.", metavar="DTYPE", show_default="that of the config"
    )
    mtp_layers: int | None = cache_option(
        "Multi-token prediction layers that draft, with caches of their own.", metavar="N", show_default="0"
    )
    fields: list[str] | None = model_option(
        "A field of the language model's config, instead of what it says; may be given more than once.",
        "--set",
        metavar="FIELD=VALUE",
    )
    layout: Layout | None = layout_option()
    placement: str | None = placement_option()
    windows_as_full: bool | None = cache_option("Manage windowed layers as full attention.", "--windows-as-full")
    tp: int | None = model_option("Tensor parallel ranks.", show_default="1")

    def refuse_beside_plan(self, own: Mapping[str, object], *, placed: bool = True) -> None:
        """ConfigError when anything was given that a plan file holds. own: the command's names of such options.

        placed: --placement is among them; the natural layout leaves it open.
        """
        shared = ["memory", "tp", "block_size", "dtype", "state_dtype", "mtp_layers", "layout", "windows_as_full"]
        shared[-1:-1] = ["placement"] if placed else []
        values = {**own, **{as_option(name): getattr(self, name) for name in shared}, "--set": self.fields or None}
        given = [name for name, value in values.items() if value is not None]
        if given:
            raise ConfigError(f"--plan holds everything already: drop {', '.join(given)}, or drop --plan")

    def model(self, config: str, *, drafts: int = 0) -> Model:
        """The model described in ``config``, with room for so many drafts in recurrent layers."""
        return read_model(
            config,
            block_size=16 if self.block_size is None else self.block_size,
            tp=1 if self.tp is None else self.tp,
            dtype=DTYPE_NAMES.get(self.dtype or "auto"),
            fields=dict(map(_field, self.fields or ())),
            state_dtype=DTYPE_NAMES.get(self.state_dtype or "auto"),
            mtp_layers=self.mtp_layers or 0,
            num_speculative_tokens=drafts,
        )

    def rules(self, layout: str | None = None) -> dict[str, Any]:
        """Arguments of plan and plan_for_trace that say how layers are managed. layout: instead of that given.

        ConfigError for a placement that the layout does not know.
        """
        layout = layout or self.layout or DEFAULT_LAYOUT
        require_placement(self.placement, layout)
        return {"placement": self.placement, "windows_as_full": bool(self.windows_as_full), "layout": layout}


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


# -- how a replay runs


weights_option: Final = partial(run_option, f"What weights are kept in: {', '.join(WEIGHT_BYTES)}.", default=BF16)
_NOTHING_SAID: Final = SourceOptions()
_NOTHING_PLANNED: Final = PlanOptions()


def require_drafts(drafts: object, acceptance: object) -> None:
    """ConfigError where ``acceptance`` was given, and there are no drafts to accept."""
    if acceptance is not None and not drafts:
        raise ConfigError("--acceptance is of drafts, and there are none: give --drafts N, too")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What was given; None for what was not."""

    model: str | None = model_option("A config.json, a folder with one, or a known name.")
    plan_file: Path | None = plan_file_option()
    planned: PlanOptions = _NOTHING_PLANNED
    max_model_len: int | None = request_option("Tokens of the longest request.", show_default="that of the trace")
    max_running: int = run_option("Requests at once.", default=_DEFAULT.max_running)
    token_budget: int = run_option("Tokens of a step.", default=_DEFAULT.token_budget)
    short_share: float | None = short_share_option()
    time_scale: float = run_option(
        "Multiplies the modelled durations; 0: steps take no time.", default=_DEFAULT.time_scale
    )
    source: SourceOptions = _NOTHING_SAID
    hardware: str = run_option(
        "A name of `hybridkv hardware`, or a TOML file.", metavar="NAME|FILE", default=DEFAULT_HARDWARE
    )
    weights: str = weights_option()
    eviction: str | None = eviction_option()
    shares: list[str] | None = shares_option()
    drafts: int = run_option("Drafts of each row that decodes, in a step.", metavar="N", default=0)
    acceptance: float | None = run_option(
        "Of a draft, if those before it were accepted: 0 .. 1.", show_default=str(ACCEPTANCE)
    )
    no_prefix_caching: bool = no_prefix_caching_option()
    step_by_step: bool = run_option(
        "Never take several steps as one; slower, the report is the same.", "--step-by-step", default=False
    )

    def settings(self, *, remembered_losses: int = 0, block_times: bool = False) -> ReplaySettings:
        """Return the settings of the replay.

        An option that ReplaySettings has under the same name is passed on as it was given.

        Args:
            remembered_losses: keys of evicted blocks to remember.
            block_times: whether to measure how long blocks stay cached.

        Raises:
            ConfigError: for values out of range.
        """
        require_drafts(self.drafts, self.acceptance)
        names = {one.name for one in fields(ReplaySettings)} & {one.name for one in fields(self)}
        given = {name: getattr(self, name) for name in names}
        given["hardware"] = hardware_named(self.hardware)
        given["shares"] = TenantShares.parse(self.shares or ())
        return ReplaySettings(
            **given,
            prefix_caching=not self.no_prefix_caching,
            placement=self.planned.placement,
            remembered_losses=remembered_losses,
            block_times=block_times,
            speculation=Speculation.of(self.drafts, self.acceptance),
        )

    def prepare(self, trace: str, settings: ReplaySettings) -> Prepared:
        """All that is needed to begin. What cannot work is said here."""
        source = self.source.read(trace)
        summary = source.summary()
        if settings.remembered_losses and not summary.tokens_known:
            raise ConfigError(
                f"{source.name} tells lengths alone: which tokens are equal is unknown, and so is why they are missed; "
                "replay it without explaining misses"
            )
        plan, own_length = self._plan(summary)
        length_from = "longest request" if self.max_model_len is None else "--max-model-len"
        return Prepared(source, summary, plan, settings, simulation_of(plan, settings), length_from, own_length)

    def _plan(self, summary: TraceSummary) -> tuple[Plan, int | None]:
        """The plan, and the length that its model is made for, if known."""
        options, length, budget = self.planned, self.max_model_len, self.token_budget
        if self.plan_file is not None:
            options.refuse_beside_plan({"--model": self.model}, placed=False)
            read = load_plan(self.plan_file)
            options.refuse_beside_plan({}, placed=read.config.slabs is None)
            return plan_with_length(summary, read, length, token_budget=budget), read.model.max_model_len
        needed = {"--model": self.model, "--memory": options.memory}
        missing = " and ".join(name for name, value in needed.items() if value is None)
        if self.model is None or options.memory is None:
            raise ConfigError(f"{missing} missing: for example --model llama-3-8b --memory 40GiB, or --plan FILE")
        model = options.model(self.model, drafts=self.drafts)
        plan = plan_for_trace(summary, model, options.memory, length, token_budget=budget, **options.rules())
        return plan, model.max_model_len


@dataclass(frozen=True, slots=True)
class Prepared:
    """A replay about to begin. length_from: what set the plan's maximum length. own_length: the model's own."""

    source: RequestSource
    summary: TraceSummary
    plan: Plan
    settings: ReplaySettings
    simulation: Simulation
    length_from: str
    own_length: int | None

    @property
    def placement(self) -> str | None:
        """Where recurrent states are kept, None without any."""
        placement = placement_of(self.plan, self.settings.placement)
        return self.plan.placement if placement is None or self.plan.placement is None else placement.name

    def told(self) -> dict[str, object]:
        """What the numbers were made under, for the JSON document."""
        plan, settings, source = self.plan, self.settings, self.source
        names = ("seed", "hours", "rate", "marks") if isinstance(source, Workload) else ()
        return {
            "model": plan.model.name,
            "dtype": plan.model.dtype,
            "tp": plan.model.tp,
            "block_size": plan.model.block_size,
            "layout": plan.layout,
            "placement": self.placement,
            "dcp": plan.limits.dcp,
            "pcp": plan.limits.pcp,
            "encoder_tokens": plan.limits.max_encoder_tokens,
            "memory_bytes": plan.memory_bytes,
            "num_blocks": plan.config.num_blocks,
            "unit": plan.config.unit,
            "unit_bytes": plan.config.unit_bytes,
            "max_model_len": plan.max_model_len,
            "max_model_len_from": self.length_from,
            **{name: value for name, value in asdict(settings).items() if name not in _NOT_TOLD},
            "eviction": eviction_of(plan, settings.eviction).name,
            "shares": [asdict(one) for one in settings.shares.of],
            **{name: getattr(source, name) for name in names},
        }
