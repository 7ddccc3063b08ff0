"""A plan by itself: where hits may end, what states weigh and how many fit, whether windows are windows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from hybridkv.doctor.findings import BLOCKS, STATES_FIT, STATES_READ, WINDOWS, Diagnosis, Finding, Proof
from hybridkv.planner import Plan
from hybridkv.planner import plan as make_plan
from hybridkv.planner.capacity import blocks_needed, copies_that_fit
from hybridkv.planner.plan import NATURAL
from hybridkv.specs import Keeps
from hybridkv.units import format_bytes, format_count

_LONG_EDGE: Final = 256
"""Tokens between two ends of hits that are more than many a shared beginning has."""
_HEAVY: Final = 4
"""So much more than the tokens between them may states weigh."""
Look = tuple[str, str, Finding | None]


def examine_plan(plan: Plan, max_running: int) -> Diagnosis:
    """max_running: requests at once. O(blocks of a request)."""
    return Diagnosis.of(f"plan of {plan.model.name} in {format_bytes(plan.memory_bytes)}", _looks(plan, max_running))


def _looks(plan: Plan, max_running: int) -> Iterator[Look]:
    yield _edges(plan)
    if _of_kind(plan, Keeps.STATE):
        yield _weight(plan)
        yield _room(plan, max_running)
    if has_windows(plan):
        yield _windows(plan)


def edge_tokens(plan: Plan) -> int:
    """Hits end at multiples of so many tokens; 1: anywhere."""
    if plan.layout == NATURAL:
        return 1
    specs = [
        group.spec for group in plan.config.groups if group.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW, Keeps.STATE}
    ]
    return math.lcm(*(spec.block_size * (1 if spec.keeps is Keeps.STATE else plan.limits.cp) for spec in specs))


def planned_again(plan: Plan, **changed: Any) -> Plan:  # noqa: ANN401 - arguments of hybridkv.planner.plan
    """``plan`` anew, with ``changed`` instead of what it was made with. CapacityError where it does not fit so."""
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
    """Requests that have a state, and a block of everything else, at once."""
    needed = blocks_needed(plan.config.groups, replace(plan.limits, max_model_len=1))
    return copies_that_fit(plan.config, plan.limits, needed)[0]


def has_windows(plan: Plan) -> bool:
    """Whether layers of the model read a window, or a chunk, alone."""
    return any(layer.spec.keeps is Keeps.WINDOW for layer in plan.model.layers)


def windows_are_full(plan: Plan) -> bool:
    """Whether they keep every token all the same."""
    return has_windows(plan) and not _of_kind(plan, Keeps.WINDOW)


def _of_kind(plan: Plan, kind: Keeps) -> list[int]:
    """Groups that keep such."""
    return [number for number, group in enumerate(plan.config.groups) if group.spec.keeps is kind]


def _edges(plan: Plan) -> Look:
    edge = edge_tokens(plan)
    if edge == 1:
        return BLOCKS, "hits end at any token", None
    figure = f"hits end at multiples of {format_count(edge)} tokens"
    if edge < _LONG_EDGE:
        return BLOCKS, figure, None
    said = f"Prompts that share less than {format_count(edge)} tokens find nothing, and others up to as many less."
    return BLOCKS, figure, Finding(BLOCKS, said, figure, "plan with --layout natural, where hits end at any token")


def _weight(plan: Plan) -> Look:
    """A grid of states beside the tokens between them."""
    states = sum(plan.config.block_bytes_of(number) for number in _of_kind(plan, Keeps.STATE))
    tokens = [(number, plan.config.groups[number].spec.block_size) for number in _of_kind(plan, Keeps.TOKENS)]
    each = sum(plan.config.block_bytes_of(number) / size for number, size in tokens)
    worth = round(states / each) if each else 0
    placement = plan.placement or ""
    figure = f"placement {placement}; a state of all layers weighs as much as {format_count(worth)} tokens"
    kind, _, number = placement.partition(":")
    if kind != "interval" or worth <= _HEAVY * int(number):
        return STATES_READ, figure, None
    said = (
        f"States every {number} tokens take {worth / int(number):.0f} times the memory of the tokens between them, and "
        "most are never read again."
    )
    return STATES_READ, figure, Finding(STATES_READ, said, figure, "plan with --placement ends, or a wider interval")


def _room(plan: Plan, max_running: int) -> Look:
    fit = states_that_fit(plan)
    figure = f"room for the states of {format_count(fit)} requests, {format_count(max_running)} may run"
    if fit >= max_running:
        return STATES_FIT, figure, None
    said = "Memory holds fewer states than requests may run: they wait for memory, and no state is kept for a hit."
    remedy = f"more --memory, or --max-running {max(fit // 2, 1)}, which leaves as many states to be kept"
    return STATES_FIT, figure, Finding(STATES_FIT, said, figure, remedy)


def _windows(plan: Plan) -> Look:
    if not windows_are_full(plan):
        return WINDOWS, "windows are kept as windows", None
    other = planned_again(plan, windows_as_full=False)
    before, after = plan.capacity.concurrency, other.capacity.concurrency
    longest = f"requests of {format_count(plan.max_model_len)} tokens"
    figure = f"{before:.2f} {longest} fit, {after:.2f} with windows"
    if after <= before:  # none is longer than a window
        return WINDOWS, figure, None
    said = "Layers that read a window alone keep every token."
    proof = Proof("the plan without --windows-as-full", f"{longest} that fit", round(before, 2), round(after, 2))
    return WINDOWS, figure, Finding(WINDOWS, said, figure, "plan without --windows-as-full", proof)
