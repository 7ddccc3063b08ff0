"""A trace in a memory: it is replayed, what is wrong is looked for, and each remedy is replayed, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from hybridkv.doctor.findings import BLOCKS, SALTS, STATES_FIT, STATES_READ, WINDOWS, Diagnosis, Finding, Proof
from hybridkv.doctor.plans import edge_tokens, has_windows, planned_again, states_that_fit, windows_are_full
from hybridkv.planner import Plan
from hybridkv.planner.plan import NATURAL, NO_STATES
from hybridkv.simulator import (
    Progress,
    ReplayReport,
    ReplaySettings,
    RequestSource,
    TraceFile,
    TraceSummary,
    simulation_of,
)
from hybridkv.simulator.machine import room_for_cache
from hybridkv.simulator.prefixes import Prefixes
from hybridkv.specs import Keeps
from hybridkv.units import MiB, format_bytes, format_count

_LITTLE: Final = 0.01
"""Of the prompt tokens; less is not worth a word."""
_HALF: Final = 0.5
_MANY: Final = 100
_UNREAD: Final = 0.05
_SALTED: Final = "openai"
Look = tuple[str, str, Finding | None]


def examine_trace(
    source: RequestSource,
    plan: Plan,
    settings: ReplaySettings,
    *,
    summary: TraceSummary | None = None,
    on_replay: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """``source`` under ``plan``. on_replay: told which replay comes next. O(replays), one and one for each remedy."""
    counted = source.summary() if summary is None else summary
    on_replay("as it is")
    case = _Case(source, plan, settings, counted, on_replay)
    ran = _run(source, plan, settings, counted)
    subject = f"{source.name} on {plan.model.name} in {format_bytes(plan.memory_bytes)}, on {ran.report.machine}"
    return Diagnosis.of(subject, case.looks(ran))


@dataclass(frozen=True, slots=True)
class _Ran:
    """A replay, and the most requests that ran and waited at once."""

    report: ReplayReport
    most_at_once: int


def _run(source: RequestSource, plan: Plan, settings: ReplaySettings, summary: TraceSummary) -> _Ran:
    most = 0

    def see(now: Progress) -> None:
        nonlocal most
        most = now.most_at_once

    report = simulation_of(plan, settings).run(source, summary=summary, on_progress=see)
    return _Ran(report, max(most, 1))


@dataclass(frozen=True, slots=True)
class _Case:
    source: RequestSource
    plan: Plan
    settings: ReplaySettings
    summary: TraceSummary
    on_replay: Callable[[str], None]

    def looks(self, ran: _Ran) -> Iterator[Look]:
        """All that there is to look at; of a trace of lengths alone, what does not depend on hits."""
        keeps_states = any(group.spec.keeps is Keeps.STATE for group in self.plan.config.groups)
        if not self.summary.tokens_known:
            yield BLOCKS, "unknown: the trace tells lengths alone", None
            if keeps_states:
                yield self._states_fit(ran)
            return
        shared = _shared(self.source)
        prompts = self.summary.prompt_tokens
        yield self._blocks(ran, shared, prompts)
        if isinstance(self.source, TraceFile) and self.source.format_name == _SALTED:
            yield self._salts(ran, self.source, sum(shared), prompts)
        if keeps_states:
            yield self._states_read(ran)
            yield self._states_fit(ran)
        if has_windows(self.plan):
            yield self._windows(ran)

    def _blocks(self, ran: _Ran, shared: list[int], prompts: int) -> Look:
        edge, all_ = edge_tokens(self.plan), sum(shared)
        reached = sum(one // edge * edge for one in shared)
        where = f", {reached / prompts:.2%} up to multiples of {format_count(edge)} tokens, where hits end"
        figure = f"{all_ / prompts:.2%} of the prompt tokens are shared with one before{where if edge > 1 else ''}"
        if all_ < _LITTLE * prompts or reached >= _HALF * all_:
            return BLOCKS, figure, None
        said = "Blocks are larger than most of what prompts share: it cannot be found."
        remedy = "--layout natural, where hits end at any token"
        proof = self._hits("with --layout natural", ran, layout=NATURAL)
        return BLOCKS, figure, Finding(BLOCKS, said, figure, remedy, proof)

    def _salts(self, ran: _Ran, source: TraceFile, shared: int, prompts: int) -> Look:
        plain = source.without_salts()
        possible = sum(_shared(plain))
        figure = (
            f"{shared / prompts:.2%} of the prompt tokens are shared with one before of the same salt, "
            f"{possible / prompts:.2%} with any"
        )
        if possible < _LITTLE * prompts or shared >= _HALF * possible:
            return SALTS, figure, None
        said = "Prompts that begin alike have different salts, and share nothing."
        change = "one salt for all who may share, such as a tenant, instead of one a request"
        self.on_replay("with one salt")
        after = _run(plain, self.plan, self.settings, self.summary).report
        proof = Proof("with one salt", "hit rate", _rate(ran.report), _rate(after))
        return SALTS, figure, Finding(SALTS, said, figure, change, proof)

    def _states_read(self, ran: _Ran) -> Look:
        groups = zip(self.plan.config.groups, ran.report.groups, strict=True)
        states = [report for group, report in groups if group.spec.keeps is Keeps.STATE]
        kept, read = max(one.published for one in states), max(one.copies for one in states)
        placement = self.settings.placement or self.plan.placement
        figure = f"placement {placement}: {format_count(kept)} states kept, {format_count(read)} read again"
        lost = max(one.evictions for one in ran.report.groups)
        if kept < _MANY or read >= _UNREAD * kept or not lost or placement == NO_STATES:
            return STATES_READ, figure, None
        for remedy, changed in (
            ("--placement ends", {"placement": "ends", "layout": NATURAL}),
            ("--placement none", {"placement": NO_STATES}),
        ):
            if changed["placement"] == placement:
                continue
            proof = self._hits(f"with {remedy}", ran, **changed)
            if proof.after >= proof.before:
                said = "States are kept that nobody reads again, where tokens and other states could be."
                return STATES_READ, figure, Finding(STATES_READ, said, figure, remedy, proof)
        return STATES_READ, figure, None

    def _states_fit(self, ran: _Ran) -> Look:
        fit, wanted = states_that_fit(self.plan), min(ran.most_at_once, self.settings.max_running)
        figure = f"room for the states of {format_count(fit)} requests, {format_count(wanted)} wanted to run at once"
        if fit >= wanted:
            return STATES_FIT, figure, None
        memory = self.plan.memory_bytes * (2 * wanted // max(fit, 1) + 1)
        said = "Memory holds fewer states than requests want to run: they wait, and no state is kept for a hit."
        hardware = self.settings.hardware
        room = room_for_cache(self.plan.model, hardware, self.settings.weights) if self.settings.time_scale else None
        if room is not None:
            memory = min(memory, room // MiB * MiB)
        if memory <= self.plan.memory_bytes:
            remedy = f"more ranks or replicas: the cache has what weights leave of one {hardware.name}"
            return STATES_FIT, figure, Finding(STATES_FIT, said, figure, remedy, None)
        remedy, change = f"more memory, such as {format_bytes(memory)}, or more ranks or replicas", format_bytes(memory)
        if not ran.report.timed:
            return STATES_FIT, figure, Finding(STATES_FIT, said, figure, remedy, None)
        after = self._replay(f"with {change}", memory=memory).report.time_to_first_token_s
        before = ran.report.time_to_first_token_s
        proof = Proof(f"with {change}", "seconds to 99% of first tokens", before.p99, after.p99)
        return STATES_FIT, figure, Finding(STATES_FIT, said, figure, remedy, proof)

    def _windows(self, ran: _Ran) -> Look:
        if not windows_are_full(self.plan):
            return WINDOWS, "windows are kept as windows", None
        figure = f"all layers keep every token; at most {ran.report.peak_usage:.1%} of the memory was held by requests"
        said = "Layers that read a window alone keep every token."
        proof = self._hits("without --windows-as-full", ran, windows_as_full=False)
        if proof.after <= proof.before:  # memory is not what lacks
            return WINDOWS, figure, None
        return WINDOWS, figure, Finding(WINDOWS, said, figure, "plan without --windows-as-full", proof)

    def _hits(self, change: str, ran: _Ran, **planned: Any) -> Proof:  # noqa: ANN401 - arguments of plan_for_trace
        return Proof(change, "hit rate", _rate(ran.report), _rate(self._replay(change, **planned).report))

    def _replay(self, change: str, **planned: Any) -> _Ran:  # noqa: ANN401 - as above
        """With ``planned`` instead of what the plan has."""
        self.on_replay(change)
        plan, settings = self.plan, self.settings
        placed = planned.get("layout", plan.layout) == plan.layout and settings.placement is not None
        wanted = {"placement": settings.placement, **planned} if placed else planned
        made = planned_again(plan, max_batched_tokens=settings.token_budget, **wanted)
        return _run(self.source, made, replace(settings, placement=None), self.summary)


def _rate(report: ReplayReport) -> float:
    """Its hit rate; asked for where tokens are known alone."""
    return report.hit_rate or 0.0


def _shared(source: RequestSource) -> list[int]:
    """Of each request, the tokens that it begins with and one before had."""
    prefixes = Prefixes()
    return [prefixes.shared_tokens(request) for request in source]
