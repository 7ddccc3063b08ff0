"""What a replay runs: the options of model, memory and schedule, and the simulation that is made of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Final

import typer

from hybridkv.cache.placement import placement_of
from hybridkv.cli.hardware import HardwareOption, WeightsOption
from hybridkv.cli.keeping import EvictionOption, ShareOption
from hybridkv.cli.panels import MODEL, REQUESTS, RUN
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
from hybridkv.cli.requests import SourceOptions
from hybridkv.cli.speculation import require_drafts
from hybridkv.cli.stepping import ShortShareOption
from hybridkv.errors import ConfigError
from hybridkv.eviction import TenantShares, eviction_of
from hybridkv.planner import Plan
from hybridkv.simulator import (
    ReplaySettings,
    RequestSource,
    Simulation,
    TraceSummary,
    Workload,
    hardware_named,
    plan_for_trace,
    plan_with_length,
    simulation_of,
)
from hybridkv.simulator.hardware import BF16, DEFAULT_HARDWARE
from hybridkv.simulator.loop import ACCEPTANCE, Speculation

_DEFAULT: Final = ReplaySettings()
_SAID_NOTHING: Final = SourceOptions()
_NOT_TOLD: Final = {"placement", "step_by_step", "shares", "block_times"}
"""Settings that say nothing, or stand elsewhere in documents."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What was given; None for what was not."""

    model: Annotated[
        str | None, typer.Option(help="A config.json, a folder with one, or a known name.", rich_help_panel=MODEL)
    ] = None
    memory: Memory = None
    plan_file: PlanFile = None
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest request.", show_default="that of the trace", rich_help_panel=REQUESTS),
    ] = None
    max_running: Annotated[int, typer.Option(help="Requests at once.", rich_help_panel=RUN)] = _DEFAULT.max_running
    token_budget: Annotated[int, typer.Option(help="Tokens of a step.", rich_help_panel=RUN)] = _DEFAULT.token_budget
    short_share: ShortShareOption = None
    time_scale: Annotated[
        float, typer.Option(help="Multiplies the modelled durations; 0: steps take no time.", rich_help_panel=RUN)
    ] = _DEFAULT.time_scale
    block_size: BlockSize = None
    dtype: DtypeOption = None
    state_dtype: StateDtype = None
    mtp_layers: MtpLayers = None
    fields: SetFields = None
    layout: LayoutOption = None
    placement: PlacementOption = None
    windows_as_full: WindowsAsFull = None
    source: SourceOptions = _SAID_NOTHING
    tp: TensorParallel = None
    hardware: HardwareOption = DEFAULT_HARDWARE
    weights: WeightsOption = BF16
    eviction: EvictionOption = None
    shares: ShareOption = None
    drafts: Annotated[
        int,
        typer.Option("--drafts", metavar="N", help="Drafts of each row that decodes, in a step.", rich_help_panel=RUN),
    ] = 0
    acceptance: Annotated[
        float | None,
        typer.Option(
            help="Of a draft, if those before it were accepted: 0 .. 1.",
            show_default=str(ACCEPTANCE),
            rich_help_panel=RUN,
        ),
    ] = None
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Share nothing.", rich_help_panel=RUN)
    ] = False
    step_by_step: Annotated[
        bool,
        typer.Option(
            "--step-by-step",
            help="Never take several steps as one; slower, the report is the same.",
            rich_help_panel=RUN,
        ),
    ] = False

    def settings(self, *, remembered_losses: int = 0, block_times: bool = False) -> ReplaySettings:
        """How it runs. ConfigError for values out of range."""
        return ReplaySettings(
            self.max_running,
            self.token_budget,
            self.time_scale,
            prefix_caching=not self.no_prefix_caching,
            hardware=hardware_named(self.hardware),
            weights=self.weights,
            placement=self.placement,
            eviction=self.eviction,
            step_by_step=self.step_by_step,
            shares=TenantShares.parse(self.shares or ()),
            remembered_losses=remembered_losses,
            block_times=block_times,
            speculation=self._speculation(),
            short_share=self.short_share,
        )

    def _speculation(self) -> Speculation | None:
        require_drafts(self.drafts, self.acceptance)
        if not self.drafts:
            return None
        return Speculation(self.drafts, ACCEPTANCE if self.acceptance is None else self.acceptance)

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
        simulation = simulation_of(plan, settings)
        return Prepared(source, summary, plan, settings, simulation, length_from, own_length)

    def _plan(self, summary: TraceSummary) -> tuple[Plan, int | None]:
        """The plan, and the model's own limit where the plan's maximum length is above it."""
        options = PlanOptions(
            self.model,
            self.memory,
            self.tp,
            self.block_size,
            self.dtype,
            self.layout,
            self.placement,
            self.windows_as_full,
            self.fields,
            self.state_dtype,
            self.mtp_layers,
            self.drafts,
        )
        length, budget = self.max_model_len, self.token_budget
        if self.plan_file is not None:
            options.refuse_beside_plan({"--model": self.model}, placed=False)
            read = load_plan(self.plan_file)
            options.refuse_beside_plan({}, placed=read.config.slabs is None)
            model, plan = read.model, plan_with_length(summary, read, length, token_budget=budget)
        else:
            needed = {"--model": self.model, "--memory": self.memory}
            missing = [name for name, value in needed.items() if value is None]
            if missing:
                raise ConfigError(
                    f"{' and '.join(missing)} missing: for example --model llama-3-8b --memory 40GiB, or --plan FILE"
                )
            model = options.model()
            plan = plan_for_trace(summary, model, str(self.memory), length, token_budget=budget, **options.rules)
        own = model.max_model_len
        return plan, own if own is not None and own < plan.max_model_len else None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A replay about to begin.

    length_from: what set the plan's maximum length. own_length: the model's own, where the plan's is above it.
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
