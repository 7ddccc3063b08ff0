"""Diagnoses of a plan, a trace in a given memory, or a running server: problems, and how to fix them (docs/doctor.md).

Each check returns a figure and, if something is wrong, a finding. A plan is checked by itself: where hits may end, the
bytes of states and how many fit, whether windows are kept as windows. A trace is replayed, and so is each remedy, which
proves it. A server is asked for its metrics only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from hybridkv.cache import MissReason
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

BLOCKS: Final = "blocks_and_prefixes"
STATES_READ: Final = "states_read_again"
WINDOWS: Final = "windows"
STATES_FIT: Final = "states_and_requests"
SALTS: Final = "salts"
FOUND: Final = "found"


@dataclass(frozen=True, slots=True)
class Proof:
    """The effect of a remedy, from a replay or a plan.

    Attributes:
        change: the remedy.
        figure: the compared quantity.
        before: its value without the remedy.
        after: its value with the remedy.
    """

    change: str
    figure: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem.

    Attributes:
        name: of the check.
        said: the problem in a sentence; empty if nothing is wrong.
        figure: the figure that shows it.
        remedy: how to fix it.
        proof: the effect of the remedy, if it was tried.
    """

    name: str
    said: str
    figure: str
    remedy: str
    proof: Proof | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The results of all checks.

    Attributes:
        subject: what was checked.
        findings: the problems.
        figures: the figure of every check by its name, without checks that could not be done.
    """

    subject: str
    findings: tuple[Finding, ...]
    figures: Mapping[str, str]

    @classmethod
    def of(cls, subject: str, looks: Iterable[Finding]) -> Diagnosis:
        """Separate the problems from the figures of checks that found nothing wrong."""
        every = list(looks)
        return cls(subject, tuple(one for one in every if one.said), {one.name: one.figure for one in every})


def _fine(name: str, figure: str) -> Finding:
    """Return the figure of a check that found nothing wrong."""
    return Finding(name, "", figure, "")


_LONG_EDGE: Final = 256
"""Tokens between two possible ends of hits that exceed many shared prefixes; chosen by hand."""
_HEAVY: Final = 4
"""States may take this many times the bytes of the tokens between them; chosen by hand."""


def examine_plan(plan: Plan, max_running: int) -> Diagnosis:
    """Check a plan for ``max_running`` requests at once. O(blocks of a request)."""
    return Diagnosis.of(
        f"plan of {plan.model.name} in {format_bytes(plan.memory_bytes)}", _plan_looks(plan, max_running)
    )


def _plan_looks(plan: Plan, max_running: int) -> Iterator[Finding]:
    yield _edges(plan)
    if _of_kind(plan, Keeps.STATE):
        yield _weight(plan)
        yield _plan_room(plan, max_running)
    if has_windows(plan):
        yield _windows(plan)


def edge_tokens(plan: Plan) -> int:
    """Return the tokens between two possible ends of hits; 1 if hits end at any token."""
    if plan.layout == NATURAL:
        return 1
    specs = [
        group.spec for group in plan.config.groups if group.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW, Keeps.STATE}
    ]
    return math.lcm(*(spec.block_size * (1 if spec.keeps is Keeps.STATE else plan.limits.cp) for spec in specs))


def planned_again(plan: Plan, **changed: Any) -> Plan:  # noqa: ANN401 - arguments of hybridkv.planner.plan
    """Return ``plan`` made anew with ``changed`` arguments. CapacityError if that does not fit the memory."""
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
    """Return how many requests can have a state, and a block of everything else, at once."""
    needed = blocks_needed(plan.config.groups, replace(plan.limits, max_model_len=1))
    return copies_that_fit(plan.config, plan.limits, needed)[0]


def has_windows(plan: Plan) -> bool:
    """Return whether some layers of the model read only a window or a chunk."""
    return any(layer.spec.keeps is Keeps.WINDOW for layer in plan.model.layers)


def windows_are_full(plan: Plan) -> bool:
    """Return whether layers with windows keep every token."""
    return has_windows(plan) and not _of_kind(plan, Keeps.WINDOW)


def _of_kind(plan: Plan, kind: Keeps) -> list[int]:
    """Return the groups that keep ``kind``."""
    return [number for number, group in enumerate(plan.config.groups) if group.spec.keeps is kind]


def _edges(plan: Plan) -> Finding:
    edge = edge_tokens(plan)
    if edge == 1:
        return _fine(BLOCKS, "hits end at any token")
    figure = f"hits end at multiples of {format_count(edge)} tokens"
    if edge < _LONG_EDGE:
        return _fine(BLOCKS, figure)
    said = (
        f"Prompts that share fewer than {format_count(edge)} tokens get no hit; other hits lose up to as many tokens."
    )
    return Finding(BLOCKS, said, figure, "plan with --layout natural, where hits end at any token")


def _weight(plan: Plan) -> Finding:
    """Compare the bytes of states at an interval with the bytes of the tokens between them."""
    states = sum(plan.config.block_bytes_of(number) for number in _of_kind(plan, Keeps.STATE))
    tokens = [(number, plan.config.groups[number].spec.block_size) for number in _of_kind(plan, Keeps.TOKENS)]
    each = sum(plan.config.block_bytes_of(number) / size for number, size in tokens)
    worth = round(states / each) if each else 0
    placement = plan.placement or ""
    figure = f"placement {placement}; a state of all layers weighs as much as {format_count(worth)} tokens"
    kind, _, number = placement.partition(":")
    if kind != "interval" or worth <= _HEAVY * int(number):
        return _fine(STATES_READ, figure)
    said = (
        f"States every {number} tokens take {worth / int(number):.0f} times the memory of the tokens between them, and "
        "most are never read again."
    )
    return Finding(STATES_READ, said, figure, "plan with --placement ends, or a wider interval")


def _plan_room(plan: Plan, max_running: int) -> Finding:
    fit = states_that_fit(plan)
    figure = f"room for the states of {format_count(fit)} requests, {format_count(max_running)} may run"
    if fit >= max_running:
        return _fine(STATES_FIT, figure)
    said = (
        "Memory holds states for fewer requests than may run: requests wait for memory, and no state is kept for hits."
    )
    remedy = f"more --memory, or --max-running {max(fit // 2, 1)}, which leaves as many states for hits"
    return Finding(STATES_FIT, said, figure, remedy)


def _windows(plan: Plan) -> Finding:
    if not windows_are_full(plan):
        return _fine(WINDOWS, "windows are kept as windows")
    other = planned_again(plan, windows_as_full=False)
    before, after = plan.capacity.concurrency, other.capacity.concurrency
    longest = f"requests of {format_count(plan.max_model_len)} tokens"
    figure = f"{before:.2f} {longest} fit, {after:.2f} with windows"
    if after <= before:  # no request is longer than a window
        return _fine(WINDOWS, figure)
    said = "Layers that read a window alone keep every token."
    proof = Proof("the plan without --windows-as-full", f"{longest} that fit", round(before, 2), round(after, 2))
    return Finding(WINDOWS, said, figure, "plan without --windows-as-full", proof)


_LITTLE: Final = 0.01
"""A share of the prompt tokens below this is not reported; chosen by hand, as the shares and counts below."""
_HALF: Final = 0.5
_MANY: Final = 100
_UNREAD: Final = 0.05
_SALTED: Final = "openai"


def examine_trace(
    source: RequestSource,
    plan: Plan,
    settings: ReplaySettings,
    *,
    summary: TraceSummary | None = None,
    on_replay: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Check a trace under a plan. O(replays): one for the trace and one for each remedy.

    Args:
        source: the trace.
        plan: the plan to replay it with.
        settings: of the replays.
        summary: of the trace; None computes it.
        on_replay: called with the name of each replay before it begins.
    """
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

    def looks(self, ran: _Ran) -> Iterator[Finding]:
        """Yield the result of every check; for a trace of lengths alone, of checks that do not depend on hits."""
        keeps_states = any(group.spec.keeps is Keeps.STATE for group in self.plan.config.groups)
        if not self.summary.tokens_known:
            yield _fine(BLOCKS, "unknown: the trace holds only lengths")
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

    def _blocks(self, ran: _Ran, shared: list[int], prompts: int) -> Finding:
        edge, all_ = edge_tokens(self.plan), sum(shared)
        reached = sum(one // edge * edge for one in shared)
        where = f", {reached / prompts:.2%} up to multiples of {format_count(edge)} tokens, where hits end"
        figure = (
            f"{all_ / prompts:.2%} of the prompt tokens are shared with an earlier prompt{where if edge > 1 else ''}"
        )
        if all_ < _LITTLE * prompts or reached >= _HALF * all_:
            return _fine(BLOCKS, figure)
        said = "Blocks are larger than most shared prefixes, which therefore cannot be hit."
        remedy = "--layout natural, where hits end at any token"
        proof = self._hits("with --layout natural", ran, layout=NATURAL)
        return Finding(BLOCKS, said, figure, remedy, proof)

    def _salts(self, ran: _Ran, source: TraceFile, shared: int, prompts: int) -> Finding:
        plain = source.without_salts()
        possible = sum(_shared(plain))
        figure = (
            f"{shared / prompts:.2%} of the prompt tokens are shared with an earlier prompt of the same salt, "
            f"{possible / prompts:.2%} with one of any salt"
        )
        if possible < _LITTLE * prompts or shared >= _HALF * possible:
            return _fine(SALTS, figure)
        said = "Prompts with a common prefix have different salts, so they share no blocks."
        change = "one salt for all requests that may share, such as those of a tenant, instead of one for each request"
        self.on_replay("with one salt")
        after = _run(plain, self.plan, self.settings, self.summary).report
        proof = Proof("with one salt", "hit rate", _rate(ran.report), _rate(after))
        return Finding(SALTS, said, figure, change, proof)

    def _states_read(self, ran: _Ran) -> Finding:
        groups = zip(self.plan.config.groups, ran.report.groups, strict=True)
        states = [report for group, report in groups if group.spec.keeps is Keeps.STATE]
        kept, read = max(one.published for one in states), max(one.copies for one in states)
        placement = self.settings.placement or self.plan.placement
        figure = f"placement {placement}: {format_count(kept)} states kept, {format_count(read)} read again"
        lost = max(one.evictions for one in ran.report.groups)
        if kept < _MANY or read >= _UNREAD * kept or not lost or placement == NO_STATES:
            return _fine(STATES_READ, figure)
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
        return _fine(STATES_READ, figure)

    def _states_fit(self, ran: _Ran) -> Finding:
        fit, wanted = states_that_fit(self.plan), min(ran.most_at_once, self.settings.max_running)
        figure = f"room for the states of {format_count(fit)} requests, {format_count(wanted)} could run at once"
        if fit >= wanted:
            return _fine(STATES_FIT, figure)
        memory = self.plan.memory_bytes * (2 * wanted // max(fit, 1) + 1)
        said = "Memory holds states for fewer requests than could run: requests wait, and no state is kept for hits."
        hardware = self.settings.hardware
        room = room_for_cache(self.plan.model, hardware, self.settings.weights) if self.settings.time_scale else None
        if room is not None:
            memory = min(memory, room // MiB * MiB)
        if memory <= self.plan.memory_bytes:
            remedy = f"more ranks or replicas: the cache has what weights leave of one {hardware.name}"
            return Finding(STATES_FIT, said, figure, remedy)
        remedy, change = f"more memory, such as {format_bytes(memory)}, or more ranks or replicas", format_bytes(memory)
        if not ran.report.timed:
            return Finding(STATES_FIT, said, figure, remedy)
        after = self._replay(f"with {change}", memory=memory).report.time_to_first_token_s
        before = ran.report.time_to_first_token_s
        proof = Proof(f"with {change}", "seconds to 99% of first tokens", before.p99, after.p99)
        return Finding(STATES_FIT, said, figure, remedy, proof)

    def _windows(self, ran: _Ran) -> Finding:
        if not windows_are_full(self.plan):
            return _fine(WINDOWS, "windows are kept as windows")
        figure = f"all layers keep every token; at most {ran.report.peak_usage:.1%} of the memory was held by requests"
        said = "Layers that read a window alone keep every token."
        proof = self._hits("without --windows-as-full", ran, windows_as_full=False)
        if proof.after <= proof.before:  # memory is not the bottleneck
            return _fine(WINDOWS, figure)
        return Finding(WINDOWS, said, figure, "plan without --windows-as-full", proof)

    def _hits(self, change: str, ran: _Ran, **planned: Any) -> Proof:  # noqa: ANN401 - arguments of plan_for_trace
        return Proof(change, "hit rate", _rate(ran.report), _rate(self._replay(change, **planned).report))

    def _replay(self, change: str, **planned: Any) -> _Ran:  # noqa: ANN401 - as above
        """Replay the trace with ``planned`` arguments instead of the plan's."""
        self.on_replay(change)
        plan, settings = self.plan, self.settings
        placed = planned.get("layout", plan.layout) == plan.layout and settings.placement is not None
        wanted = {"placement": settings.placement, **planned} if placed else planned
        made = planned_again(plan, max_batched_tokens=settings.token_budget, **wanted)
        return _run(self.source, made, replace(settings, placement=None), self.summary)


def _rate(report: ReplayReport) -> float:
    """Return the hit rate of a replay with known tokens."""
    return report.hit_rate or 0.0


def _shared(source: RequestSource) -> list[int]:
    """Return for each request how many of its first tokens an earlier request began with."""
    prefixes = Prefixes()
    return [prefixes.shared_tokens(request) for request in source]


_MUCH: Final = 0.1
"""A share of the prompt tokens; chosen by hand, as the shares and counts below."""
_NEVER_HIT: Final = 0.9
_FEW_HITS: Final = 0.05
_ENOUGH_TOKENS: Final = 10_000


class Figures(Protocol):
    """The metrics of one moment, by their names without a prefix."""

    def of(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples with ``labels``; ``None`` if there is no sample."""

    def by(self, name: str, label: str) -> Mapping[str, float]:
        """Return the sum of the samples for each value of ``label``."""


def examine_server(subject: str, now: Figures) -> Diagnosis:
    """Check the metrics of a server; ``subject`` names it."""
    looks = (_found(now), *_reasons(now), _ends(now), _server_room(now))
    return Diagnosis.of(subject, (one for one in looks if one is not None))


def _found(now: Figures) -> Finding | None:
    asked, found = now.of("prefix_cache_queries_total"), now.of("prefix_cache_hits_total")
    if not asked or found is None:
        return None
    figure = f"hit rate {found / asked:.2%} of {format_count(int(asked))} prompt tokens"
    if found or asked < _ENOUGH_TOKENS:
        return _fine(FOUND, figure)
    why = (
        "start it with --explain to see the reasons; hybridkv doctor TRACE shows the possible hit rate of its traffic"
        if now.of("prompt_tokens_missed_total") is None
        else "see the reasons below"
    )
    return Finding(FOUND, "No prompt has ever hit the cache.", figure, why)


def _reasons(now: Figures) -> Iterator[Finding]:
    """Yield findings from the reasons of misses, if the server explains them."""
    missed, prompts = now.by("prompt_tokens_missed_total", "reason"), now.of("prefix_cache_queries_total")
    if not missed or not prompts:
        return
    for name, reason, said, remedy in (
        (
            BLOCKS,
            MissReason.BLOCK_EDGE,
            "Hits end at block boundaries, and many shared tokens follow the last boundary.",
            "plan with --layout natural, or a smaller --block-size",
        ),
        (
            SALTS,
            MissReason.OTHER_SALT,
            "Prompts with a common prefix have different salts, so they share no blocks.",
            "one salt for all requests that may share, such as those of a tenant, instead of one for each request",
        ),
    ):
        tokens = missed.get(reason, 0.0)
        figure = f"{tokens / prompts:.2%} of the prompt tokens missed for {reason.value.replace('_', ' ')}"
        yield Finding(name, said, figure, remedy) if tokens >= _MUCH * prompts else _fine(name, figure)


def _ends(now: Figures) -> Finding | None:
    """Check whether resume points, such as states, are hit again."""
    made, hits = now.of("kv_ends_stored_total"), now.of("kv_end_hits_total")
    gone, unused = now.of("kv_ends_evicted_total"), now.of("kv_ends_evicted_unused_total")
    if made is None or hits is None or gone is None or unused is None:
        return None
    figure = f"{format_count(int(made))} resume points stored, {format_count(int(hits))} hits of them"
    if gone:
        figure += f"; {unused / gone:.2%} of the evicted ones were never hit"
    if gone < _MANY or unused < _NEVER_HIT * gone or hits >= _FEW_HITS * made:
        return _fine(STATES_READ, figure)
    said = "States and blocks are kept for prompts that never come back."
    remedy = "--placement ends if an interval is set; otherwise prompts share little, or memory is too small"
    return Finding(STATES_READ, said, figure, remedy)


def _server_room(now: Figures) -> Finding | None:
    held = now.of("kv_group_blocks", kind="state", state="held")
    free = now.of("kv_group_blocks", kind="state", state="evictable")
    if held is None or free is None:
        return None
    waits = now.of("num_requests_waiting_by_reason", reason="no_space") or 0.0
    figure = (
        f"{format_count(int(held))} blocks of states held by requests, {format_count(int(free))} kept for hits, "
        f"{format_count(int(waits))} requests wait for memory"
    )
    if free or not (waits and held):
        return _fine(STATES_FIT, figure)
    said = "Memory holds states for fewer requests than could run: no state is kept for hits."
    return Finding(STATES_FIT, said, figure, "more memory, or fewer requests at once (--max-running)")
