"""One cell of a sweep: a setting, and what a replay under it gives. A cell crosses processes as it is."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from hybridkv.arguments import integer
from hybridkv.cache.placement import placement_named
from hybridkv.errors import ConfigError
from hybridkv.models import Model, read_model
from hybridkv.planner.plan import ALIGN, DEFAULT_LAYOUT, LAYOUTS, NATURAL, NO_STATES
from hybridkv.simulator.cost import BF16
from hybridkv.simulator.fleet import MOST_REPLICAS, replay_replicas
from hybridkv.simulator.hardware import DEFAULT_HARDWARE, hardware_named
from hybridkv.simulator.routing import ROUND_ROBIN, router_named
from hybridkv.simulator.setup import TOKEN_BUDGET, ReplaySettings, plan_for_trace
from hybridkv.simulator.speculation import ACCEPTANCE, MOST_DRAFTS, Speculation
from hybridkv.simulator.trace import RequestSource, TraceSummary
from hybridkv.units import parse_bytes, shown

SCHEMA: Final = "hybridkv.sweep.cell"
VERSION: Final = 2
_NAME_CHARACTERS: Final = 60


@dataclass(frozen=True, slots=True)
class Cell:
    """A setting. model: as read_model takes it. memory: for the cache of one rank. dtype: of keys and values.

    hardware: as hardware_named takes it. drafts, acceptance: as Speculation has them, 0 drafts for none.
    first_token_s, per_token_s: aims that single requests are counted by.

    Others as plan_for_trace and ReplaySettings have them. ConfigError for what no model or machine could make right.
    """

    model: str
    memory: str
    tp: int = 1
    layout: str = DEFAULT_LAYOUT
    placement: str | None = None
    eviction: str | None = None
    block_size: int = 16
    dtype: str | None = None
    max_running: int = 256
    token_budget: int = TOKEN_BUDGET
    hardware: str = DEFAULT_HARDWARE
    weights: str = BF16
    replicas: int = 1
    router: str = ROUND_ROBIN
    drafts: int = 0
    acceptance: float = ACCEPTANCE
    first_token_s: float = math.inf
    per_token_s: float = math.inf

    def __post_init__(self) -> None:
        parse_bytes(self.memory)
        if self.layout not in LAYOUTS:
            raise ConfigError(f"unknown layout {shown(self.layout)}: use one of {', '.join(LAYOUTS)}")
        if self.layout == NATURAL and self.placement is not None:
            placement_named(self.placement, align_tokens=1)  # only read
        if self.layout != NATURAL and self.placement not in {None, ALIGN, NO_STATES}:
            raise ConfigError(f"placement {shown(self.placement)} is none of the {self.layout} layout's")
        integer("replicas", self.replicas, 1, MOST_REPLICAS)
        integer("drafts", self.drafts, 0, MOST_DRAFTS)
        router_named(self.router)
        self.settings()

    def plainest(self) -> Cell:
        """What runs alike, without what does nothing: a router before one engine, acceptance of no drafts."""
        router = self.router if self.replicas > 1 else ROUND_ROBIN
        return replace(self, router=router, acceptance=self.acceptance if self.drafts else ACCEPTANCE)

    def said(self) -> dict[str, object]:
        """The fields as JSON has them: what is not limited is null."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}

    @property
    def name(self) -> str:
        """Of its file: readable, and another one for any other setting."""
        said = self.said()
        words = [str(said[name]) for name in ("model", "memory", "layout", "placement", "eviction") if said[name]]
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', '_'.join(words))[-_NAME_CHARACTERS:].strip('-')}-{digest}"

    def read(self) -> Model:
        """The model. ConfigError where there is none, or none that is sharded so."""
        return read_model(
            self.model, block_size=self.block_size, tp=self.tp, dtype=self.dtype, num_speculative_tokens=self.drafts
        )

    def settings(self) -> ReplaySettings:
        """How it runs."""
        placed = self.placement if self.layout == NATURAL else None
        return ReplaySettings(
            self.max_running,
            self.token_budget,
            hardware=hardware_named(self.hardware),
            weights=self.weights,
            placement=placed,
            eviction=self.eviction,
            speculation=Speculation(self.drafts, self.acceptance) if self.drafts else None,
        )

    def run(self, source: RequestSource, summary: TraceSummary) -> dict[str, object]:
        """Its document: the report, or why the setting cannot serve these requests."""
        machine = asdict(hardware_named(self.hardware))  # a file may say something else tomorrow
        document: dict[str, object] = {"schema": SCHEMA, "version": VERSION, "cell": self.said(), "machine": machine}
        try:
            plan = plan_for_trace(
                summary,
                self.read(),
                self.memory,
                placement=self.placement,
                layout=self.layout,
                token_budget=self.token_budget,
            )
            report = replay_replicas(
                source, plan, self.settings(), replicas=self.replicas, router=self.router, summary=summary
            )
        except ConfigError as error:
            return {**document, "refused": str(error)}
        within = report.within(self.first_token_s, self.per_token_s)
        return {**document, "report": {**report.to_dict({}), "requests_within_aims": within}}


def is_document_of(cell: Cell, document: object) -> bool:
    """Whether it is what this version made of ``cell``."""
    return (
        isinstance(document, Mapping)
        and document.get("schema") == SCHEMA
        and document.get("version") == VERSION
        and document.get("cell") == cell.said()
        and document.get("machine") == asdict(hardware_named(cell.hardware))
        and isinstance(document.get("report", document.get("refused")), dict | str)
    )


def differing(cells: Sequence[Cell]) -> list[str]:
    """Fields that are not the same in all ``cells``."""
    said = [cell.said() for cell in cells]
    return [name for name in said[0] if len({str(of[name]) for of in said}) > 1]


def machines_of(cells: Sequence[Cell]) -> str:
    """Name the machines that times of ``cells`` are of, and what they keep weights in."""
    return ", ".join(dict.fromkeys(f"{hardware_named(one.hardware).name} with {one.weights} weights" for one in cells))


def in_words(cell: Cell, names: Sequence[str]) -> str:
    """Its ``names``, and what they are."""
    said = cell.said()
    return ", ".join(f"{name.replace('_', ' ')} {said[name]}" for name in names)


def in_short(cell: Cell, names: Sequence[str]) -> str:
    """What its ``names`` are."""
    said = cell.said()
    return ", ".join(str(said[name]) for name in names if said[name] is not None)
