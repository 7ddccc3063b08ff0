"""Copies on the tier below: a resume point that has one costs no more than its return, so it is evicted first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from test_tenants import HYBRID, Cache, unique

from hybridkv.cache.eviction_policy import Below, LeastRecentlyUsed
from hybridkv.cache.placement import EndsPlacement
from hybridkv.eviction import EVERYBODY
from hybridkv.eviction.resume_points import Kind, ResumePoint, worth_of
from hybridkv.request import Request
from hybridkv.testing.configs import full_spec, window_spec

CHEAP, DEAR = 1e-9, 1e9
"""Prices in tokens per byte, below and above what any resume point here saves."""
KINDS = pytest.mark.parametrize(
    "specs", [HYBRID, (full_spec(4),), (full_spec(4), window_spec(4, 6))], ids=["hybrid", "full", "window"]
)


@dataclass
class Elsewhere:
    """A resume point of another tier."""

    kept: bool = True
    below: Below | None = None


def filled(specs: object, prompts: int = 3) -> tuple[Cache, list[list[int]]]:
    """A cache that holds the ends of some prompts, all as likely to be hit."""
    cache, asked = Cache(EVERYBODY, 12, specs), [one for one, _ in zip(unique(), range(prompts), strict=False)]  # type: ignore[arg-type]  # a parameter
    for prompt in asked:
        cache.run(prompt)
    cache.cache.check()
    return cache, asked


def asked_again(cache: Cache, prompt: list[int]) -> Request:
    return Request("again", [*prompt, 9], hasher=cache.cache.hasher)


def ends(cache: Cache, prompt: list[int]) -> list[ResumePoint]:
    """The kept resume points of a prompt."""
    found = [cache.eviction_policy.copy_at(asked_again(cache, prompt), tokens) for tokens in range(4, len(prompt) + 1)]
    return [one for one in found if one is not None]


def note(cache: Cache, prompt: list[int], below: Below) -> None:
    for tokens in [one.tokens for one in ends(cache, prompt)]:
        cache.eviction_policy.note_below(asked_again(cache, prompt), tokens, below)


def evicted(cache: Cache, prompts: list[list[int]]) -> list[int]:
    """The prompts of which nothing is left after one resume point after the other was evicted, in this order."""
    gone = list[int]()
    for _ in range(100):
        new = [at for at, one in enumerate(prompts) if at not in gone and not ends(cache, one)]
        assert len(new) <= 1
        gone += new
        if len(gone) == len(prompts):
            return gone
        point = cache.eviction_policy._lowest(cache.now)
        assert point is not None
        cache.eviction_policy._release(point, cache.now)
        cache.cache.check()
    raise AssertionError(gone)


@KINDS
@pytest.mark.parametrize("copied", [0, 1, 2])
def test_prefix_with_a_copy_below_is_evicted_before_others_of_the_same_hazard(specs: object, copied: int) -> None:
    cache, prompts = filled(specs)
    assert all(ends(cache, one) for one in prompts)
    note(cache, prompts[copied], Below(Elsewhere(), CHEAP))
    assert evicted(cache, prompts)[0] == copied


@KINDS
def test_price_orders_the_copies(specs: object) -> None:
    cache, prompts = filled(specs)
    for at, price in enumerate((3.0, 1.0, 2.0)):
        note(cache, prompts[at], Below(Elsewhere(), price * CHEAP))
    assert evicted(cache, prompts) == [1, 2, 0]


@KINDS
@pytest.mark.parametrize("when", ["at once", "later"])
def test_copy_that_is_gone_protects_as_no_copy(specs: object, when: str) -> None:
    """Also if it goes after it was noted: nobody tells the cache, so it looks at its choice."""
    cache, prompts = filled(specs)
    usual = evicted(*filled(specs))
    copy = Elsewhere(kept=when == "later")
    note(cache, prompts[2], Below(copy, CHEAP))
    copy.kept = False
    assert evicted(cache, prompts) == usual
    assert usual != [2, 0, 1]


@KINDS
def test_copy_that_came_back_counts_again(specs: object) -> None:
    cache, prompts = filled(specs)
    copy = Elsewhere(kept=False)
    note(cache, prompts[2], Below(copy, CHEAP))
    copy.kept = True
    note(cache, prompts[2], Below(copy, CHEAP))
    assert evicted(cache, prompts)[0] == 2


@KINDS
def test_copy_that_is_dearer_than_computing_changes_nothing(specs: object) -> None:
    cache, prompts = filled(specs)
    note(cache, prompts[1], Below(Elsewhere(), DEAR))
    assert evicted(cache, prompts) == evicted(*filled(specs))
    assert all(one.worth == one.saved for one in ends(*(filled(specs)[0], prompts[1])))


def test_prices_of_tiers_one_below_the_other_add_up() -> None:
    store = Elsewhere()
    host = Elsewhere(below=Below(store, 3.0))
    point = ResumePoint(1, Kind.PROMPT, 100, 0.0, None, saved=50.0, below=Below(host, 2.0))
    assert worth_of(point) == 2.0
    host.kept = False
    assert worth_of(point) == 5.0
    store.kept = False
    assert worth_of(point) == 50.0
    host.below, point.saved = None, math.inf
    assert worth_of(point) == math.inf
    point.below, point.saved = None, 7.0
    assert worth_of(point) == 7.0


def test_copy_of_a_tier_that_keeps_no_resume_points_is_unknown() -> None:
    cache, prompts = filled(HYBRID)
    lru = LeastRecentlyUsed([], cache.cache.block_pool, EndsPlacement())
    assert lru.copy_at(asked_again(cache, prompts[0]), 13) is None
    before = [(one.below, one.worth) for one in ends(cache, prompts[0])]
    cache.eviction_policy.note_below(asked_again(cache, prompts[0]), 5, Below(Elsewhere(), CHEAP))  # no resume point
    assert [(one.below, one.worth) for one in ends(cache, prompts[0])] == before


def test_new_resume_point_is_admitted_by_the_price_of_copies() -> None:
    """It is nowhere else yet, so that it comes in before those that have copies, and after those that have none."""
    admitted = []
    for price in (DEAR, CHEAP):
        cache, prompts = filled(HYBRID, 4)
        for prompt in prompts:
            note(cache, prompt, Below(Elsewhere(), price))
        before = [len(ends(cache, one)) for one in prompts]
        assert min(before) > 0
        goes_on = Request("on", [*prompts[-1], *range(9)], hasher=cache.cache.hasher)
        admitted.append(cache.eviction_policy.admits(goes_on, 16, [0, 4]))  # saves 3 tokens, of 4 states
        assert admitted[-1] == ([len(ends(cache, one)) for one in prompts] != before)
    assert admitted == [False, True]
