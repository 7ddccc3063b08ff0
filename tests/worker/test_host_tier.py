"""The host tier beside loops over bytes: random Steps, their order, what is rejected, and what is reported when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from copy_support import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_support import TIERS, Bytewise, Copied, Tiers, copies_of, random_step, transfers_of

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.step import NO_TIER_COPIES, Copy, Step
from hybridkv.worker import HostTierCopier, PagedStorage
from small_steps import small_step


def pair(name: str, seed: int = 0) -> tuple[Bytewise, Tiers]:
    bytewise = Bytewise(CONFIGS[name], TIERS[name], seed)
    return bytewise, Tiers(bytewise)


@settings(max_examples=3 * settings().max_examples)
@given(name=st.sampled_from(list(CONFIGS)), seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 6))
def test_host_tier_of_random_steps_matches_a_loop(name: str, seed: int, steps: int) -> None:
    bytewise, tiers = pair(name, seed)
    rng = np.random.default_rng(seed)
    for number in range(steps):
        step = random_step(number, bytewise.config, bytewise.tier, rng)
        bytewise.apply(step)
        assert tiers.execute(step) == (transfers_of(step), [])
        tiers.require_equal(bytewise)


def move(group: int, source: int, destination: int) -> Copy:
    return Copy("before", group, source, destination, "move")


def step_of(
    stores: Sequence[Copied] = (),
    loads: Sequence[Copied] = (),
    number: int = 1,
    **more: Any,  # noqa: ANN401  # of a Step
) -> Step:
    return small_step(number, stores=copies_of(stores), loads=copies_of(loads), **more)


ORDER = {
    "classes": step_of(
        # block 3 of group 0 is moved over, 4 is cleared, 5 is copied over: all are stored as they were
        stores=[(1, 0, 3, 5), (1, 0, 4, 2), (1, 0, 5, 3), (1, 1, 3, 4)],
        # host block 2 moves away before a store takes its place; the next copy reads where it went
        tier_copies=(move(0, 2, 6), Copy("before", 0, 6, 7, "block")),
        copies=(move(0, 2, 3), Copy("before", 0, 2, 5, "block")),
        zero=np.array([(0, 4)], np.int32),
        # a block that was stored goes to a block that was cleared; then what a copy within the tier wrote
        loads=[(2, 0, 5, 4), (2, 0, 7, 2), (3, 1, 4, 3)],
    ),
    "gaps": step_of(
        stores=[(1, 0, 3, 4), (1, 2, 4, 2)],
        tier_copies=(move(2, 2, 3), move(2, 3, 1)),
        copies=(move(0, 2, 3),),
        zero=np.array([(2, 4)], np.int32),
        loads=[(2, 2, 2, 4), (2, 2, 1, 6), (3, 0, 4, 5)],
    ),
}


@pytest.mark.parametrize("name", list(ORDER))
def test_host_tier_runs_stores_tier_copies_the_step_and_loads_in_this_order(name: str) -> None:
    bytewise, tiers = pair(name)
    bytewise.apply(ORDER[name])
    assert tiers.execute(ORDER[name]) == ([1, 2, 3], [])
    tiers.require_equal(bytewise)


# -- controls


class Late(Tiers):
    """Stores after the Step has changed blocks."""

    def execute(self, step: Step) -> tuple[list[int], list[int]]:
        self.copier.execute_before(step)
        return super().execute(replace(step, copies=(), zero=step.zero[:0]))


class Early(Tiers):
    """Loads before the Step clears blocks."""

    def execute(self, step: Step) -> tuple[list[int], list[int]]:
        self.tier.begin(step)
        self.tier.load(step)
        self.copier.execute_before(step)
        arrived, lost, _ = self.tier.finish(step)
        return arrived.tolist(), lost.tolist()


class TierCopiesLast(Tiers):
    """Copies within the tier after the stores."""

    def execute(self, step: Step) -> tuple[list[int], list[int]]:
        super().execute(replace(step, tier_copies=()))
        return super().execute(replace(step, id=2, copies=(), zero=step.zero[:0], stores=NO_TIER_COPIES))


@pytest.mark.parametrize("name", list(ORDER))
@pytest.mark.parametrize("wrong", [Late, Early, TierCopiesLast])
def test_host_tier_in_another_order_is_detected(wrong: type[Tiers], name: str) -> None:
    bytewise = Bytewise(CONFIGS[name], TIERS[name])
    tiers = wrong(bytewise)
    bytewise.apply(ORDER[name])
    tiers.execute(ORDER[name])
    with pytest.raises(AssertionError):
        tiers.require_equal(bytewise)


# -- rejected Steps


REJECTED: list[tuple[str, Step, str]] = [
    ("classes", step_of([(1, 3, 2, 2)]), "stores, source: group 3 does not exist: groups are 0 .. 2"),
    ("classes", step_of([(1, -1, 2, 2)]), "stores, source: group -1 does not exist"),
    ("classes", step_of([(1, 0, 1, 2)]), "stores, source: block 1 of group 0 .* 2 .. 7"),
    ("classes", step_of([(1, 0, 8, 2)]), "stores, source: block 8 of group 0 .* 2 .. 7"),
    ("classes", step_of([(1, 0, 2, 10)]), "stores, destination: block 10 of group 0 .* 2 .. 9"),
    ("classes", step_of([(1, 0, 2, 0)]), "stores, destination: block 0 of group 0"),
    ("classes", step_of(loads=[(1, 0, 9, 8)]), "loads, destination: block 8 of group 0 .* 2 .. 7"),
    ("classes", step_of(loads=[(1, 1, 5, 2)]), "loads, source: block 5 of group 1 .* 1 .. 4"),
    ("one size", step_of(loads=[(1, 1, 9, 7)]), "loads, destination: block 7 of group 1 .* 1 .. 6"),
    ("classes", step_of([(1, 0, 2, 3), (2, 0, 4, 3)]), "stores: block 3 of group 0 has bytes .* destination"),
    ("classes", step_of(loads=[(1, 0, 2, 3), (1, 0, 4, 3)]), "loads: block 3 of group 0 has bytes"),
    # block 2 of group 1 is slab 2, in which block 7 of group 2 lies
    ("classes", step_of([(1, 2, 4, 7), (1, 1, 3, 2)]), "stores: block 2 of group 1 has bytes"),
    # groups with pages in the same tensors share the bytes of an id
    ("one size", step_of([(1, 0, 2, 3), (1, 1, 4, 3)]), "stores: block 3 of group 1 has bytes"),
    ("one class", step_of([(1, 0, 2, 3), (1, 1, 4, 3)]), "stores: block 3 of group 1 has bytes"),
    ("classes", step_of([(1, 0, 2, 3), (2, 0, 4, 5), (1, 0, 4, 6)]), "transfer 1 are not next to each other"),
    ("classes", step_of([(4, 0, 2, 3)], [(4, 0, 4, 5)]), "transfer 4 has two directions"),
    ("classes", step_of(tier_copies=(move(3, 2, 3),)), "tier_copies: group 3"),
    ("classes", step_of(tier_copies=(move(0, 2, 10),)), "tier_copies: block 10 of group 0 .* 2 .. 9"),
    ("classes", step_of(tier_copies=(move(0, 1, 3),)), "tier_copies: block 1 of group 0"),
    ("classes", step_of(tier_copies=(Copy("after", 0, 2, 3, "block"),)), "tier_copies: .*the stage 'before'"),
    ("classes", step_of(tier_copies=(Copy("before", 0, 2, 3, "other"),)), "tier_copies: .*the kind"),
    (
        "classes",
        replace(step_of(), stores=replace(copies_of([(1, 0, 2, 3)]), group=np.empty(0, np.int32))),
        "stores: transfer, group, source and destination have 1, 0, 1, 1 values",
    ),
]


@pytest.mark.parametrize(("name", "step", "message"), REJECTED)
def test_host_tier_with_bad_step_writes_nothing(name: str, step: Step, message: str) -> None:
    """The bad copy stands beside good ones."""
    bytewise, tiers = pair(name)
    good = replace(
        step,
        tier_copies=(move(0, 3, 4), *step.tier_copies),
        zero=np.array([(0, 5)], np.int32),
        loads=copies_of([(90, 0, 4, 6)]) if not len(step.loads) else step.loads,
    )
    for one in (step, good):
        with pytest.raises(WorkerError, match=message):
            tiers.execute(one)
        tiers.require_equal(bytewise)
    assert tiers.execute(step_of([(1, 0, 2, 3)], [(4, 0, 3, 5)])) == ([1, 4], [])


def test_host_tier_of_another_plan_is_rejected() -> None:
    for one, other in (("classes", "one class"), ("one size", "classes"), ("gaps", "one size")):
        with pytest.raises(ConfigError, match="the host tier has other groups or blocks than the device"):
            HostTierCopier(PagedStorage(CONFIGS[one]), TIERS[other])


# -- what is reported, and when


def test_host_tier_names_transfers_of_discarded_results_again() -> None:
    """Steps 1 and 2 ran, and then counted as failed."""
    _, tiers = pair("classes")
    for number in range(3):
        step = step_of([(number, 0, 2, 3)], [(10 + number, 0, 2, 4)], number)
        assert tiers.execute(step) == ([number, 10 + number], [])
    assert tiers.execute(replace(step_of([(3, 0, 2, 3)], number=3), after=0)) == ([1, 11, 2, 12, 3], [])
    assert tiers.execute(step_of(number=4)) == ([], [])
    assert tiers.execute(replace(step_of(number=5), after=2)) == ([1, 11, 2, 12, 3], [])


def test_host_tier_reports_what_a_step_that_raised_did_not_begin_as_lost() -> None:
    bytewise, tiers = pair("classes")
    step = step_of([(1, 0, 2, 3)], [(2, 0, 2, 4)], 0)
    tiers.tier.check(step)
    tiers.tier.begin(step)  # then something raises
    with pytest.raises(WorkerError, match="transfer 2 has begun in an earlier Step and not ended"):
        tiers.execute(step_of(loads=[(2, 0, 2, 4)], number=1))
    assert tiers.execute(replace(step_of(number=1), after=-1)) == ([1], [2])
    bytewise.apply(replace(step, loads=NO_TIER_COPIES))
    tiers.require_equal(bytewise)


def test_host_tier_reports_a_copy_that_raises_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tiers = pair("classes")
    copy = torch.Tensor.copy_

    at = tiers.tier.arena.data_ptr() + 6 * TIERS["classes"].block_bytes_of(0)

    def failing(self: torch.Tensor, read: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        if self.data_ptr() == at:
            raise RuntimeError("the device is gone")
        return copy(self, read, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    step = step_of([(1, 0, 2, 3), (2, 0, 3, 6), (2, 0, 4, 2), (3, 0, 4, 5)], number=0)
    assert tiers.execute(step) == ([1, 3], [2])
