"""Options that several commands share: the source of requests, the plan of the cache, and how a replay runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
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
    skip_layers_option,
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
    Hardware,
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
from hybridkv.simulator.outputs import ACCEPTANCE, Speculation
from hybridkv.simulator.setup import require_placement
from hybridkv.simulator.trace import ARRIVALS_PER_S
from hybridkv.units import parse_bytes, shown

WORKLOAD: Final = "workload:"
_UNIFORM: Final = "uniform"
_STANDARD_INPUT: Final = Path("-")
_DEFAULT: Final = ReplaySettings()
_NOT_WRITTEN: Final = {"placement", "step_by_step", "shares", "block_times"}
"""Settings that a document leaves out because they do not change the result, or that it holds in another form."""


# -- where requests come from

TraceArgument = Annotated[
    str,
    typer.Argument(
        help=f"A trace file, plain or gzip, or a generated workload: {', '.join(WORKLOADS)}, {_UNIFORM}.",
        metavar="TRACE|workload:NAME",
    ),
]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a trace file or a workload. An option that is not given is None or False."""

    format: str | None = request_option(
        f"Format of the trace: {', '.join(FORMATS)}.", metavar="NAME", show_default="detected from its content"
    )
    trace_block_size: int | None = request_option(
        "Tokens that one hash id of a Mooncake trace stands for.", show_default="512"
    )
    tokenizer: str | None = request_option(
        "Tokenizer of a trace that holds text: a tokenizer.json, its folder, or bytes:N for N bytes per token."
    )
    arrivals: float | None = request_option(
        "Requests per second for traces that have no timestamps.", show_default=f"{ARRIVALS_PER_S:g}"
    )
    seed: int | None = request_option("Seed of a workload; equal seeds give equal requests.", show_default="0")
    hours: float | None = request_option("Hours of arrivals of a workload.", show_default="1")
    rate: float | None = request_option("Factor that multiplies the arrival rate of a workload.", show_default="1")
    marks: bool = request_option(
        "Mark the end of the shared prefix in each prompt of a workload.", "--marks", default=False
    )
    limit: int | None = request_option("Read only the first N requests.", show_default="all")
    skip_bad_lines: bool = skip_bad_lines_option()

    def read(self, trace: str) -> RequestSource:
        """Return the trace file or workload named ``trace``. Raises ConfigError for options of the other kind."""
        generated, kind = trace.startswith(WORKLOAD), trace.removeprefix(WORKLOAD)
        of_files = self._given("format", "trace_block_size", "tokenizer", "arrivals", "skip_bad_lines")
        of_workloads, of_both = self._given("seed", "hours", "rate", "marks"), self._given("limit")
        foreign = of_files if generated else of_workloads
        if generated and kind == _UNIFORM:
            foreign |= of_workloads | of_both
        if foreign:
            raise ConfigError(f"{', '.join(map(as_option, foreign))} has no effect on {trace}: leave it out")
        if not generated:
            renamed = {"format": "format_name", "arrivals": "arrivals_per_s"}
            return TraceFile(trace, **of_both, **{renamed.get(name, name): value for name, value in of_files.items()})
        if kind == _UNIFORM:
            return UniformWorkload()
        if kind not in WORKLOADS:
            raise ConfigError(f"unknown workload {kind!r}: use one of {', '.join((*WORKLOADS, _UNIFORM))}")
        return Workload(kind, **of_both, **of_workloads)

    def _given(self, *names: str) -> dict[str, Any]:
        """Return the options among ``names`` that were given."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None and value is not False}


def unknown_facts(source: RequestSource, *, tokens_known: bool) -> dict[str, str]:
    """Return a fact that says which information the format of ``source`` lacks; empty for most formats.

    Args:
        source: a trace file or a workload.
        tokens_known: whether equal tokens of its requests are known, as in TraceSummary.
    """
    if not tokens_known:
        return {"lengths only": "the trace does not say which tokens are equal: hits are unknown, times assume no hits"}
    if not isinstance(source, TraceFile) or source.format_name != KV_EVENTS.name:
        return {}
    return {
        source.format_name: "requests are inferred from stored blocks; requests and tokens that filled no block are "
        "missing"
    }


# -- how a cache is planned


class StateDtype(StrEnum):
    """Dtype of recurrent states; auto: that of the model's config."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"


class CacheDtype(StrEnum):
    """Dtype of keys and values: as for states, or codes with scales (Quantization)."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8_per_token_head"
    FP8_WITH_SCALES = "fp8_per_token_head"
    INT4 = "int4_per_token_head"
    NVFP4 = "nvfp4"


class Layout(StrEnum):
    """Layout of the cache; reference: one page size for all layers. natural: a page size for each layer kind."""

    REFERENCE = "reference"
    NATURAL = "natural"


block_size_option: Final = partial(cache_option, "Tokens in a block.", show_default="16")
layout_option: Final = partial(
    cache_option,
    "Cache layout: natural gives each layer kind its own block size, reference is vLLM's with one size for all.",
    show_default=DEFAULT_LAYOUT,
)
placement_option: Final = partial(
    cache_option,
    "Positions where recurrent states are saved: none, ends, interval:N, align or align:N in the natural layout; align "
    "or none in the reference layout.",
    show_default="ends; align in the reference layout",
    metavar="PLACEMENT",
)
plan_file_option: Final = partial(
    model_option, "Plan file written by `hybridkv plan --json`; - reads standard input.", "--plan"
)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of a plan. An option that is not given is None."""

    memory: str | None = cache_option("Cache memory of one rank: 40GiB, 512MiB, or a number of bytes.")
    block_size: int | None = block_size_option()
    dtype: CacheDtype | None = cache_option(
        f"Dtype of keys and values: {', '.join(CacheDtype)}.",
        "--kv-dtype",
        "--dtype",
        metavar="DTYPE",
        show_default="the model's",
    )
    dtype_skip_layers: list[str] | None = skip_layers_option()
    state_dtype: StateDtype | None = cache_option(
        f"Dtype of recurrent states: {', '.join(StateDtype)}.", metavar="DTYPE", show_default="the model's"
    )
    mtp_layers: int | None = cache_option(
        "Number of multi-token prediction layers that draft; each has its own cache.", metavar="N", show_default="0"
    )
    fields: list[str] | None = model_option(
        "Replace a field of the language model's config. May be repeated.", "--set", metavar="FIELD=VALUE"
    )
    layout: Layout | None = layout_option()
    placement: str | None = placement_option()
    windows_as_full: bool | None = cache_option(
        "Keep every token of layers with a sliding window, as for full attention.", "--windows-as-full"
    )
    tp: int | None = model_option("Number of tensor parallel ranks.", show_default="1")

    def require_none_with_plan(self, own: Mapping[str, object], *, placed: bool = True) -> None:
        """Check that no option was given that a plan file already sets.

        Args:
            own: more such options of the command, by option name; None: not given.
            placed: whether the plan sets the placement. A plan of the natural layout does not.

        Raises:
            ConfigError: if such an option was given; it names all of them.
        """
        shared = ["memory", "tp", "block_size", "state_dtype", "mtp_layers", "layout", "windows_as_full"]
        shared[-1:-1] = ["placement"] if placed else []
        repeated = {
            "--kv-dtype": self.dtype,
            "--set": self.fields or None,
            "--kv-dtype-skip-layers": self.dtype_skip_layers or None,
        }
        values = {**own, **{as_option(name): getattr(self, name) for name in shared}, **repeated}
        given = [name for name, value in values.items() if value is not None]
        if given:
            raise ConfigError(f"--plan sets these options already: drop {', '.join(given)}, or drop --plan")

    def model(self, config: str, *, drafts: int = 0) -> Model:
        """Read a model.

        Args:
            config: model, as ``read_model`` takes it.
            drafts: drafted tokens of a step; recurrent layers need a state for each of them.

        Raises:
            ConfigError: as ``read_model``.
        """
        return read_model(
            config,
            block_size=16 if self.block_size is None else self.block_size,
            tp=1 if self.tp is None else self.tp,
            dtype=None if self.dtype is CacheDtype.AUTO else self.dtype,
            dtype_skip_layers=self.dtype_skip_layers or (),
            fields=dict(map(_field, self.fields or ())),
            state_dtype=DTYPE_NAMES.get(self.state_dtype or "auto"),
            mtp_layers=self.mtp_layers or 0,
            num_speculative_tokens=drafts,
        )

    def rules(self, layout: str | None = None) -> dict[str, Any]:
        """Return the arguments of ``plan`` and ``plan_for_trace`` that set layout and placement.

        Args:
            layout: layout to use instead of the given one.

        Raises:
            ConfigError: for a placement that the layout does not have.
        """
        layout = layout or self.layout or DEFAULT_LAYOUT
        require_placement(self.placement, layout)
        return {"placement": self.placement, "windows_as_full": bool(self.windows_as_full), "layout": layout}


def _field(given: str) -> tuple[str, object]:
    """Split FIELD=VALUE into the name and the value, which is JSON or else text."""
    name, mark, value = given.partition("=")
    if not name or not mark:
        raise ConfigError(f"--set {shown(given)} must be FIELD=VALUE, for example --set num_key_value_heads=8")
    try:
        return name, parse_json(value)
    except DocumentError:
        return name, value


def load_plan(path: Path) -> Plan:
    """Read a plan file, or standard input for ``-``. Raises ConfigError and SchemaError as ``read_plan``."""
    if path != _STANDARD_INPUT:
        return read_plan(path)
    if sys.stdin is None:
        raise ConfigError("standard input is closed, so --plan - has nothing to read: name a plan file")
    try:
        return read_plan_from(sys.stdin.buffer)
    except SchemaError as error:
        raise SchemaError(f"standard input: {error}") from error


# -- how a replay runs


weights_option: Final = partial(run_option, f"Format of the model's weights: {', '.join(WEIGHT_BYTES)}.", default=BF16)


def require_drafts(drafts: object, acceptance: object) -> None:
    """Raise ConfigError if ``acceptance`` was given without ``drafts``, where it has no effect."""
    if acceptance is not None and not drafts:
        raise ConfigError("--acceptance has no effect without drafts: give --drafts N too, or leave it out")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a replay. An option that is not given is None, or has the default of ReplaySettings."""

    model: str | None = model_option("Model: a config.json, a folder with one, or a name of `hybridkv models`.")
    plan_file: Path | None = plan_file_option()
    planned: PlanOptions = PlanOptions()
    max_model_len: int | None = request_option(
        "Tokens of the longest request, prompt and output together.", show_default="that of the trace"
    )
    max_running: int = run_option("Limit of requests that run at once.", default=_DEFAULT.max_running)
    token_budget: int = run_option("Limit of tokens in a step.", default=_DEFAULT.token_budget)
    short_share: float | None = short_share_option()
    time_scale: float = run_option(
        "Factor that multiplies the modelled duration of steps; 0 makes steps take no time.",
        default=_DEFAULT.time_scale,
    )
    source: SourceOptions = SourceOptions()
    hardware: str = run_option(
        "Machine of one rank: a name of `hybridkv hardware`, or a TOML file.",
        metavar="NAME|FILE",
        default=DEFAULT_HARDWARE,
    )
    weights: str = weights_option()
    eviction: str | None = eviction_option()
    prefix_match_unit: int | None = cache_option(
        "Reference layout of models with recurrent states: tokens of which hits inside a block are a multiple.",
        show_default="hits end at blocks",
    )
    shares: list[str] | None = shares_option()
    host_memory: str | None = cache_option(
        "Host memory of one rank that keeps what leaves the cache: 40GiB, 512MiB, or a number of bytes.",
        show_default="none",
    )
    host_bandwidth: str | None = run_option(
        "Rate of copies to and from host memory, in each direction: 50GB/s.",
        metavar="RATE",
        show_default="that of the machine",
    )
    disk_memory: str | None = cache_option(
        "Disk of one rank behind the host memory: 200GiB, or a number of bytes.", metavar="SIZE", show_default="none"
    )
    disk_bandwidth: str | None = run_option(
        "Rate of the disk, for reads and for writes: 3GB/s.", metavar="RATE", show_default="3GB/s"
    )
    drafts: int = run_option("Drafted tokens of each decoding request in a step.", metavar="N", default=0)
    acceptance: float | None = run_option(
        "Probability that a draft is accepted if the drafts before it were, 0 to 1.", show_default=str(ACCEPTANCE)
    )
    no_prefix_caching: bool = no_prefix_caching_option()
    step_by_step: bool = run_option(
        "Simulate every step by itself, without fast-forward; slower, with the same report.",
        "--step-by-step",
        default=False,
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
        given["hardware"] = self._machine()
        given["shares"] = TenantShares.parse(self.shares or ())
        if self.disk_bandwidth is not None:
            if self.disk_memory is None:
                raise ConfigError("--disk-bandwidth has no effect without --disk-memory: give both, or leave it out")
            given["disk_bytes_per_s"] = _rate_of("--disk-bandwidth", self.disk_bandwidth)
        return ReplaySettings(
            **given,
            prefix_caching=not self.no_prefix_caching,
            placement=self.planned.placement,
            remembered_losses=remembered_losses,
            block_times=block_times,
            speculation=Speculation.of(self.drafts, self.acceptance),
        )

    def _machine(self) -> Hardware:
        """Return the machine of one rank."""
        machine, rate = hardware_named(self.hardware), self.host_bandwidth
        if rate is None:
            return machine
        if self.host_memory is None:
            raise ConfigError("--host-bandwidth has no effect without --host-memory: give both, or leave it out")
        return replace(machine, host_bytes_per_s=_rate_of("--host-bandwidth", rate), host_efficiency=1.0)

    def prepare(self, trace: str, settings: ReplaySettings) -> Prepared:
        """Read the trace and the model, plan the cache, and return a replay that is ready to run.

        Args:
            trace: file of the trace, or ``workload:NAME``.
            settings: how the replay runs.

        Raises:
            ConfigError: for options that cannot work together.
        """
        source = self.source.read(trace)
        summary = source.summary()
        if settings.remembered_losses and not summary.tokens_known:
            raise ConfigError(
                f"{source.name} holds only lengths: misses cannot be explained because equal tokens are unknown; "
                "leave out --explain and --explain-to"
            )
        plan, own_length = self._plan(summary)
        length_from = "longest request" if self.max_model_len is None else "--max-model-len"
        return Prepared(source, summary, plan, settings, simulation_of(plan, settings), length_from, own_length)

    def _plan(self, summary: TraceSummary) -> tuple[Plan, int | None]:
        """Return the plan, and the maximum length of its model if that is known."""
        options, length, budget = self.planned, self.max_model_len, self.token_budget
        if self.plan_file is not None:
            options.require_none_with_plan({"--model": self.model}, placed=False)
            read = load_plan(self.plan_file)
            options.require_none_with_plan({}, placed=read.config.slabs is None)
            return plan_with_length(summary, read, length, token_budget=budget), read.model.max_model_len
        needed = {"--model": self.model, "--memory": options.memory}
        missing = " and ".join(name for name, value in needed.items() if value is None)
        if self.model is None or options.memory is None:
            raise ConfigError(f"{missing} missing: give for example --model llama-3-8b --memory 40GiB, or --plan FILE")
        model = options.model(self.model, drafts=self.drafts)
        plan = plan_for_trace(summary, model, options.memory, length, token_budget=budget, **options.rules())
        return plan, model.max_model_len


@dataclass(frozen=True, slots=True)
class Prepared:
    """A replay that is ready to run; its simulation is unused so far.

    Attributes:
        length_from: origin of the plan's maximum length, in words.
        own_length: maximum length of the model in tokens, None if unknown.
    """

    source: RequestSource
    summary: TraceSummary
    plan: Plan
    settings: ReplaySettings
    simulation: Simulation
    length_from: str
    own_length: int | None

    @property
    def placement(self) -> str | None:
        """Name of the placement of recurrent states, None for a model without any."""
        placement = placement_of(self.plan, self.settings.placement)
        return self.plan.placement if placement is None or self.plan.placement is None else placement.name

    def conditions(self) -> dict[str, object]:
        """Return the model, the plan and the settings for the ``settings`` of the JSON document."""
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
            **{name: value for name, value in asdict(settings).items() if name not in _NOT_WRITTEN},
            "eviction": eviction_of(plan, settings.eviction).name,
            "shares": [asdict(one) for one in settings.shares.of],
            **{name: getattr(source, name) for name in names},
        }


def _rate_of(name: str, rate: str) -> int:
    """Return the bytes per second of an option such as 50GB/s."""
    try:
        return parse_bytes(rate.removesuffix("/s"))
    except ConfigError:
        raise ConfigError(f"{name} must be a size per second such as 50GB/s, got {shown(rate)}") from None
