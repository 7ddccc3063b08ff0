"""Every token that a step reads is the row's own, though it may have come up from host memory, late or not at all."""

from collections import Counter
from typing import Any

import pytest
from tier_runs import ENCODERS, REFERENCE, RINGS, Run

from how_much import how_many

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")


def test_rows_read_their_own_tokens_through_a_host_tier() -> None:
    seen = sum((Run(seed).run() for seed in range(how_many(150))), Counter[str]())
    assert all(seen[name] > 20 for name in ("stores", "loads", "lost", "failed", "moves")), seen
    assert seen["stores_refused"] > 5


def test_rows_read_their_own_tokens_through_a_store() -> None:
    seen = sum((Run(seed, stored=True).run() for seed in range(how_many(150))), Counter[str]())
    assert all(seen[name] > 20 for name in ("spills", "fetches", "spills_lost", "failed", "restarts")), seen
    assert all(seen[name] > 5 for name in ("fetches_lost", "spills_dropped", "late", "fetches_refused")), seen


def test_rows_read_their_own_tokens_whatever_hints_say() -> None:
    seen = sum((Run(seed, stored=seed % 2 > 0, hinted=True).run() for seed in range(how_many(60))), Counter[str]())
    assert all(seen[name] > 20 for name in ("stores", "loads", "spills")), seen
    assert seen["fetches"] > 5


def test_rows_read_their_own_tokens_whatever_transfers_cost() -> None:
    seen = sum((Run(seed, stored=seed % 3 > 0, timed=True).run() for seed in range(how_many(60))), Counter[str]())
    assert all(seen[name] > 20 for name in ("stores", "loads", "slower")), seen
    assert seen["fetches"] > 5, seen


@pytest.mark.parametrize("kinds", [RINGS, ENCODERS], ids=["rings", "encoders"])
@pytest.mark.parametrize("stored", [False, True])
def test_rows_read_their_own_rings_and_encoders_through_tiers(kinds: Any, *, stored: bool) -> None:  # noqa: ANN401 - SLABS
    seen = sum((Run(seed, stored=stored, kinds=kinds).run() for seed in range(how_many(40))), Counter[str]())
    assert all(seen[name] > 10 for name in ("stores", "loads", "lost", "failed", "moves")), seen
    assert not stored or seen["fetches"] > 5, seen


@pytest.mark.parametrize("stored", [False, True])
def test_rows_read_their_own_tokens_in_the_reference_layout(*, stored: bool) -> None:
    seen = sum((Run(seed, stored=stored, kinds=REFERENCE).run() for seed in range(how_many(60))), Counter[str]())
    assert all(seen[name] > 10 for name in ("stores", "loads", "lost", "failed")), seen
    assert not stored or seen["fetches"] > 5, seen
