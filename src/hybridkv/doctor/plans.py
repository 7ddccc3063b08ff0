"""Checks of a plan, and of a trace in a given memory, with replays of each remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from hybridkv.doctor.findings import (
    BLOCKS,
    LITTLE,
    MANY,
    SALTED,
    SALTS,
    STATES_FIT,
    STATES_READ,
    WINDOWS,
    Diagnosis,
    Finding,
    Proof,
    fine,
)
from hybridkv.planner import Plan
from hybridkv.planner import plan as make_plan
from hybridkv.planner.config import blocks_needed, copies_that_fit
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
from hybridkv.simulator.described import Prefixes
from hybridkv.simulator.hardware import room_for_cache
from hybridkv.specs import Keeps
from hybridkv.units import MiB, format_bytes, format_count

_LONG_INTERVAL: Final = 256
"""Tokens between two possible ends of a hit that exceed many shared prefixes; chosen by hand."""
_HEAVY: Final = 4
"""States may take this many times the bytes of the tokens between two states; chosen by hand."""


def examine_plan(plan: Plan, max_running: int) -> Diagnosis:
    """Check a plan. O(blocks of a request).

    Args:
        plan: the plan of model and cache.
        max_running: most requests that run at once.
    """
    return Diagnosis.of(
        f"plan of {plan.model.name} in {format_bytes(plan.memory_bytes)}", _plan_looks(plan, max_running)
    )


def _plan_looks(plan: Plan, max_running: int) -> Iterator[Finding]:
    yield _hit_boundaries(plan)
    if _of_kind(plan, Keeps.STATE):
        yield _weight(plan)
        yield _plan_room(plan, max_running)
    if has_windows(plan):
        yield _windows(plan)


def hit_interval(plan: Plan) -> int:
    """Return the tokens between two positions where hits may end; 1 if hits end at any token.

    Args:
        plan: the plan of model and cache.
    """
    if plan.layout == NATURAL:
        return 1
    specs = [
        group.spec for group in plan.config.groups if group.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW, Keeps.STATE}
    ]
    return math.lcm(*(spec.block_size * (1 if spec.keeps is Keeps.STATE else plan.limits.cp) for spec in specs))


def planned_again(plan: Plan, **changed: Any) -> Plan:  # noqa: ANN401 - arguments of hybridkv.planner.plan
    """Plan again with other arguments; all others stay as in the given plan.

    Args:
        plan: the plan to change.
        changed: arguments of ``hybridkv.planner.plan``.

    Raises:
        CapacityError: if the memory does not hold the new plan.
    """
    same = changed.get("layout", plan.layout) == plan.layout
    asked = {
        "memory": plan.memory_bytes,
        "max_model_len": plan.max_model_len,
        "max_batched_tokens": plan.limits.max_in_flight_tokens,
        "prefill_checkpoints": plan.limits.prefill_checkpoints if same else 0,
        "placement": plan.placement if same else None,
        "windows_as_full": windows_are_full(plan),
        "max_encoder_tokens": plan.limits.max_encoder_tokens,
        "dcp": plan.limits.dcp,
        "pcp": plan.limits.pcp,
        "layout": plan.layout,
        "kernel_block_size": plan.kernel_block_size if same else None,
        **changed,
    }
    return make_plan(replace(plan.model, max_model_len=plan.max_model_len), **asked)


def states_that_fit(plan: Plan) -> int:
    """Return the number of requests that can hold a state and a block of each other group at the same time.

    Args:
        plan: the plan of model and cache.
    """
    needed = blocks_needed(plan.config.groups, replace(plan.limits, max_model_len=1))
    return copies_that_fit(plan.config, plan.limits, needed)[0]


def has_windows(plan: Plan) -> bool:
    """Return whether some layers of the model read only a window or a chunk.

    Args:
        plan: the plan of model and cache.
    """
    return any(layer.spec.keeps is Keeps.WINDOW for layer in plan.model.layers)


def windows_are_full(plan: Plan) -> bool:
    """Return whether layers with windows keep every token.

    Args:
        plan: the plan of model and cache.
    """
    return has_windows(plan) and not _of_kind(plan, Keeps.WINDOW)


def _of_kind(plan: Plan, kind: Keeps) -> list[int]:
    """Return the groups that keep ``kind``."""
    return [number for number, group in enumerate(plan.config.groups) if group.spec.keeps is kind]


def _hit_boundaries(plan: Plan) -> Finding:
    """Check the tokens between two positions where hits may end."""
    interval = hit_interval(plan)
    if interval == 1:
        return fine(BLOCKS, "hits end at any token")
    figure = f"hits end at multiples of {format_count(interval)} tokens"
    if interval < _LONG_INTERVAL:
        return fine(BLOCKS, figure)
    said = (
        f"Prompts that share fewer than {format_count(interval)} tokens get no hit; other hits lose up to as many "
        "tokens."
    )
    return Finding(BLOCKS, said, figure, "plan with --layout natural, where hits end at any token")


def _weight(plan: Plan) -> Finding:
    """Compare the bytes of a state with the bytes of the tokens between two states."""
    states = sum(plan.config.block_bytes_of(number) for number in _of_kind(plan, Keeps.STATE))
    tokens = [(number, plan.config.groups[number].spec.block_size) for number in _of_kind(plan, Keeps.TOKENS)]
    each = sum(plan.config.block_bytes_of(number) / size for number, size in tokens)
    worth = round(states / each) if each else 0
    placement = plan.placement or ""
    figure = f"placement {placement}; a state of all layers weighs as much as {format_count(worth)} tokens"
    kind, _, number = placement.partition(":")
    if kind != "interval" or worth <= _HEAVY * int(number):
        return fine(STATES_READ, figure)
    said = (
        f"States every {number} tokens take {worth / int(number):.0f} times the memory of the tokens between them, and "
        "most are never read again."
    )
    return Finding(STATES_READ, said, figure, "plan with --placement ends, or a wider interval")


def _plan_room(plan: Plan, max_running: int) -> Finding:
    """Check whether each running request has memory for a state."""
    fit = states_that_fit(plan)
    figure = f"room for the states of {format_count(fit)} requests, {format_count(max_running)} may run"
    if fit >= max_running:
        return fine(STATES_FIT, figure)
    said = (
        "Memory holds states for fewer requests than may run: requests wait for memory, and no state is kept for hits."
    )
    remedy = f"more --memory, or --max-running {max(fit // 2, 1)}, which leaves as many states for hits"
    return Finding(STATES_FIT, said, figure, remedy)


def _windows(plan: Plan) -> Finding:
    """Check whether a plan that keeps windows as windows holds more requests."""
    if not windows_are_full(plan):
        return fine(WINDOWS, "windows are kept as windows")
    other = planned_again(plan, windows_as_full=False)
    before, after = plan.capacity.concurrency, other.capacity.concurrency
    longest = f"requests of {format_count(plan.max_model_len)} tokens"
    figure = f"{before:.2f} {longest} fit, {after:.2f} with windows"
    if after <= before:  # no request is longer than a window
        return fine(WINDOWS, figure)
    said = "Layers that read only a window keep every token."
    proof = Proof("the plan without --windows-as-full", f"{longest} that fit", round(before, 2), round(after, 2))
    return Finding(WINDOWS, said, figure, "plan without --windows-as-full", proof)


_HALF: Final = 0.5
"""Share of the possible hits below which blocks or salts are a problem; chosen by hand, as the limit below."""
_UNREAD: Final = 0.05
"""Share of states that are read again, below which states are a problem."""
_WITH_SALTS: Final = "openai"
"""The trace format with salts."""


def examine_trace(
    source: RequestSource,
    plan: Plan,
    settings: ReplaySettings,
    *,
    summary: TraceSummary | None = None,
    on_replay: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Check a trace with a plan. O(replays): one of the trace, and one for each remedy.

    Args:
        source: the trace or workload.
        plan: the plan of model and cache.
        settings: how the replays run.
        summary: counts of the trace from ``source.summary()``; ``None`` computes them.
        on_replay: called before each replay with its name.

    Raises:
        ConfigError: for settings that cannot work, and for a request that can never fit.
        TraceError: for a malformed line.
    """
    counted = source.summary() if summary is None else summary
    on_replay("as it is")
    case = _Case(source, plan, settings, counted, on_replay)
    ran = _run(source, plan, settings, counted)
    subject = f"{source.name} on {plan.model.name} in {format_bytes(plan.memory_bytes)}, on {ran.report.machine}"
    return Diagnosis.of(subject, case.looks(ran))


@dataclass(frozen=True, slots=True)
class _Ran:
    """A finished replay.

    Attributes:
        report: its report.
        most_at_once: most requests that ran and waited at the same time, at least 1.
    """

    report: ReplayReport
    most_at_once: int


def _run(source: RequestSource, plan: Plan, settings: ReplaySettings, summary: TraceSummary) -> _Ran:
    """Replay ``source``."""
    most = 0

    def see(now: Progress) -> None:
        nonlocal most
        most = now.most_at_once

    report = simulation_of(plan, settings).run(source, summary=summary, on_progress=see)
    return _Ran(report, max(most, 1))


@dataclass(frozen=True, slots=True)
class _Case:
    """A trace with its plan, and the checks of it. The fields are those of ``examine_trace``."""

    source: RequestSource
    plan: Plan
    settings: ReplaySettings
    summary: TraceSummary
    on_replay: Callable[[str], None]

    def looks(self, ran: _Ran) -> Iterator[Finding]:
        """Yield the result of each check. A trace of lengths only has no checks that depend on hits."""
        keeps_states = bool(_of_kind(self.plan, Keeps.STATE))
        if not self.summary.tokens_known:
            yield fine(BLOCKS, "unknown: the trace holds only lengths")
            if keeps_states:
                yield self._states_fit(ran)
            return
        shared = _shared(self.source)
        prompts = self.summary.prompt_tokens
        yield self._blocks(ran, shared, prompts)
        if isinstance(self.source, TraceFile) and self.source.format_name == _WITH_SALTS:
            yield self._salts(ran, self.source, sum(shared), prompts)
        if keeps_states:
            yield self._states_read(ran)
            yield self._states_fit(ran)
        if has_windows(self.plan):
            yield self._windows(ran)

    def _blocks(self, ran: _Ran, shared: list[int], prompts: int) -> Finding:
        """Check whether hits reach the ends of shared prefixes."""
        interval, possible = hit_interval(self.plan), sum(shared)
        reached = sum(one // interval * interval for one in shared)
        figure = f"{possible / prompts:.2%} of the prompt tokens are shared with an earlier prompt"
        if interval > 1:
            figure += f", {reached / prompts:.2%} up to multiples of {format_count(interval)} tokens, where hits end"
        if possible < LITTLE * prompts or reached >= _HALF * possible:
            return fine(BLOCKS, figure)
        said = "Blocks are larger than most shared prefixes, which therefore cannot be hit."
        remedy = "--layout natural, where hits end at any token"
        proof = self._hits("with --layout natural", ran, layout=NATURAL)
        return Finding(BLOCKS, said, figure, remedy, proof)

    def _salts(self, ran: _Ran, source: TraceFile, shared: int, prompts: int) -> Finding:
        """Check whether different salts keep prompts from sharing blocks."""
        plain = source.without_salts()
        possible = sum(_shared(plain))
        figure = (
            f"{shared / prompts:.2%} of the prompt tokens are shared with an earlier prompt of the same salt, "
            f"{possible / prompts:.2%} with one of any salt"
        )
        if possible < LITTLE * prompts or shared >= _HALF * possible:
            return fine(SALTS, figure)
        said, change = SALTED
        self.on_replay("with one salt")
        after = _run(plain, self.plan, self.settings, self.summary).report
        proof = Proof("with one salt", "hit rate", _rate(ran.report), _rate(after))
        return Finding(SALTS, said, figure, change, proof)

    def _states_read(self, ran: _Ran) -> Finding:
        """Check whether kept states are read again."""
        groups = zip(self.plan.config.groups, ran.report.groups, strict=True)
        states = [report for group, report in groups if group.spec.keeps is Keeps.STATE]
        kept, read = max(one.published for one in states), max(one.copies for one in states)
        placement = self.settings.placement or self.plan.placement
        figure = f"placement {placement}: {format_count(kept)} states kept, {format_count(read)} read again"
        lost = max(one.evictions for one in ran.report.groups)
        if kept < MANY or read >= _UNREAD * kept or not lost or placement == NO_STATES:
            return fine(STATES_READ, figure)
        for remedy, changed in (
            ("--placement ends", {"placement": "ends", "layout": NATURAL}),
            ("--placement none", {"placement": NO_STATES}),
        ):
            if changed["placement"] == placement:
                continue
            proof = self._hits(f"with {remedy}", ran, **changed)
            if proof.after >= proof.before:
                said = "States that are never read again take the memory of tokens and other states."
                return Finding(STATES_READ, said, figure, remedy, proof)
        return fine(STATES_READ, figure)

    def _states_fit(self, ran: _Ran) -> Finding:
        """Check whether the memory holds a state for each request that could run."""
        fit, wanted = states_that_fit(self.plan), min(ran.most_at_once, self.settings.max_running)
        figure = f"room for the states of {format_count(fit)} requests, {format_count(wanted)} could run at once"
        if fit >= wanted:
            return fine(STATES_FIT, figure)
        memory = self.plan.memory_bytes * (2 * wanted // max(fit, 1) + 1)
        said = "Memory holds states for fewer requests than could run: requests wait, and no state is kept for hits."
        hardware = self.settings.hardware
        room = room_for_cache(self.plan.model, hardware, self.settings.weights) if self.settings.time_scale else None
        if room is not None:
            memory = min(memory, room // MiB * MiB)
        if memory <= self.plan.memory_bytes:
            remedy = f"more ranks or replicas: weights and cache fill the memory of one {hardware.name}"
            return Finding(STATES_FIT, said, figure, remedy)
        remedy, change = f"more memory, such as {format_bytes(memory)}, or more ranks or replicas", format_bytes(memory)
        if not ran.report.timed:
            return Finding(STATES_FIT, said, figure, remedy)
        after = self._replay(f"with {change}", memory=memory).report.time_to_first_token_s
        before = ran.report.time_to_first_token_s
        proof = Proof(f"with {change}", "seconds to 99% of first tokens", before.p99, after.p99)
        return Finding(STATES_FIT, said, figure, remedy, proof)

    def _windows(self, ran: _Ran) -> Finding:
        """Check whether windows that are kept as windows raise the hit rate."""
        if not windows_are_full(self.plan):
            return fine(WINDOWS, "windows are kept as windows")
        figure = f"all layers keep every token; at most {ran.report.peak_usage:.1%} of the memory was held by requests"
        said = "Layers that read only a window keep every token."
        proof = self._hits("without --windows-as-full", ran, windows_as_full=False)
        if proof.after <= proof.before:  # memory is not the bottleneck
            return fine(WINDOWS, figure)
        return Finding(WINDOWS, said, figure, "plan without --windows-as-full", proof)

    def _hits(self, change: str, ran: _Ran, **planned: Any) -> Proof:  # noqa: ANN401 - arguments of planned_again
        """Compare the hit rate with that of a replay with ``planned`` arguments."""
        return Proof(change, "hit rate", _rate(ran.report), _rate(self._replay(change, **planned).report))

    def _replay(self, change: str, **planned: Any) -> _Ran:  # noqa: ANN401 - as above
        """Replay the trace with a plan that has the arguments ``planned``."""
        self.on_replay(change)
        plan, settings = self.plan, self.settings
        placed = planned.get("layout", plan.layout) == plan.layout and settings.placement is not None
        wanted = {"placement": settings.placement, **planned} if placed else planned
        made = planned_again(plan, max_batched_tokens=settings.token_budget, **wanted)
        return _run(self.source, made, replace(settings, placement=None), self.summary)


def _rate(report: ReplayReport) -> float:
    """Return the hit rate of a replay, 0 without prompt tokens."""
    return report.hit_rate or 0.0


def _shared(source: RequestSource) -> list[int]:
    """Return the tokens of each prompt's longest prefix that an earlier request had."""
    prefixes = Prefixes()
    return [prefixes.shared_tokens(request) for request in source]
