"""Shares of tenants in random runs: who gives way is foretold by an oracle that keeps no counts.

What a tenant weighs it finds from the keys of whole prefixes, each time anew; who gives way by asking everybody.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from random import Random

import pytest
from test_natural_evictions import MODELS, PAIR
from tier_runs import Run

from how_much import how_many
from hybridkv.eviction import Share, TenantShares
from hybridkv.eviction.ranked import RankedResumePoints
from hybridkv.eviction.resume_points import ResumePoint, keys_of
from hybridkv.eviction.tenants import Standing, TenantRankings
from hybridkv.specs import KVCacheSpec
from hybridkv.testing.event_follower import DifferenceError, same
from oracles import random_natural_options, random_run
from oracles.twins import Twins

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")


@pytest.fixture(autouse=True)
def half_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the requests of random runs are the tenant's."""
    monkeypatch.setattr(
        sys.modules["oracles.random_run"], "random_salt", lambda random: random.choice((None, "tenant"))
    )


SHARES = (
    TenantShares((Share("tenant", 0.4),)),
    TenantShares((Share("tenant", 0.2, 0.3), Share(None, 0.5))),
    TenantShares((Share("tenant"), Share("nobody", 0.5))),
)

HOST_SHARES = TenantShares((Share("a", 0.3),))


def needed(kept: RankedResumePoints, node: ResumePoint) -> set[int]:
    """Blocks that ``node`` needs, those of its whole prefix among them."""
    found = set(node.own)
    for group in kept._blocks._full + kept._blocks._windows:
        size, stride = group.policy.block_size, group.hashes_per_block
        first = 0 if group.policy.hits.downward_closed else group.policy.hits.first_needed(node.tokens) // size
        keys = keys_of(node, 0, node.depth)[stride - 1 :: stride]
        found.update(group.index.blocks_of(keys[first : node.tokens // size]))
    return found


def weights_of(kept: RankedResumePoints, shares: TenantShares) -> list[int]:
    """Bytes of each tenant: salts keep their blocks apart."""
    blocks: list[set[int]] = [set() for _ in shares.of]
    for node in kept._tree.kept():
        blocks[node.tenant] |= needed(kept, node)
    bytes_of = [
        sum(int(kept._blocks._bytes_of[kept._pool.class_of(block)]) for block in sorted(mine)) for mine in blocks
    ]
    assert sum(map(len, blocks)) == len(set().union(*blocks))
    return bytes_of


def is_before(shares: TenantShares, one: int, other: int, weights: Sequence[int], memory: int) -> bool:
    """Whether ``one`` gives way before ``other``."""
    too_much = []
    for tenant in (one, other):
        share, weight = shares.of[tenant], weights[tenant]
        if weight > share.greatest * memory:
            too_much.append((2, weight - share.greatest * memory))
        elif weight > share.guaranteed * memory:
            too_much.append((1, weight - share.guaranteed * memory))
        else:
            too_much.append((0, weight - share.guaranteed * memory))
    return too_much[0] > too_much[1] or (too_much[0] == too_much[1] and one < other)


class Watch:
    """Looks at every victim. victims: of each tenant so far. wishes: bytes by tenant before a wish that is answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shares: TenantShares) -> None:
        self.shares = shares
        self.victims = [0] * len(shares.of)
        self.wishes: dict[RankedResumePoints, list[int]] = {}
        self._lowest = RankedResumePoints._lowest
        self._prefers = TenantRankings.prefers
        give_way = RankedResumePoints._give_way

        def lowest(kept: RankedResumePoints, now: float) -> ResumePoint | None:
            return self.lowest(kept, now)

        def wish(kept: RankedResumePoints, needs: Sequence[int], now: float, wants: ResumePoint) -> bool:
            self.wishes[kept] = weights_of(kept, self.shares)
            answer = give_way(kept, needs, now, wants)
            del self.wishes[kept]
            same("bytes by tenant after a wish", kept._blocks.weights.of, weights_of(kept, self.shares))
            return answer

        def prefers(rankings: TenantRankings, end: ResumePoint, other: ResumePoint, now: float) -> bool:
            return self.prefers(rankings, end, other, now)

        monkeypatch.setattr(RankedResumePoints, "_lowest", lowest)
        monkeypatch.setattr(RankedResumePoints, "_give_way", wish)
        monkeypatch.setattr(TenantRankings, "prefers", prefers)

    def lowest(self, kept: RankedResumePoints, now: float) -> ResumePoint | None:
        """As the library, and what must be true of it."""
        weights = list(kept._blocks.weights.of)
        if kept in self.wishes:  # without the ends that would go for it
            more = [now > before for now, before in zip(weights, self.wishes[kept], strict=True)]
            same("tenants that are charged more for a wish", more, [False] * len(weights))
        else:
            same("bytes by tenant", weights, weights_of(kept, self.shares))
        found = self._lowest(kept, now)
        ranked = {node.tenant for node in kept._tree.kept() if node.ranked}
        first = None
        for tenant in sorted(ranked):
            memory = kept._rankings._memory_bytes
            if first is None or is_before(self.shares, tenant, first, weights, memory):
                first = tenant
        same("who gives way", None if found is None else found.tenant, first)
        if found is not None:
            self.victims[found.tenant] += 1
        return found

    def prefers(self, rankings: TenantRankings, end: ResumePoint, other: ResumePoint, now: float) -> bool:
        """Of two tenants the one that gives way first."""
        answer = self._prefers(rankings, end, other, now)
        if end.tenant != other.tenant:
            weights = rankings._weights.of
            before = is_before(self.shares, other.tenant, end.tenant, weights, rankings._memory_bytes)
            same("whose end goes", answer, before)
        return answer


def twins(random: Random, specs: tuple[KVCacheSpec, ...] | None, shares: TenantShares) -> Twins:
    options = random_natural_options(random, specs)
    while options.placement == "none":  # which has nothing to share
        options = random_natural_options(random, specs)
    return Twins(options, PAIR, shares)


@pytest.mark.parametrize("model", MODELS)
def test_tenant_random_runs_match_the_oracle(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    for seed in range(how_many(3)):
        random = Random(f"{model} {seed}")
        with monkeypatch.context() as patch:
            Watch(patch, SHARES[seed % len(SHARES)])
            random_run(twins(random, MODELS[model], SHARES[seed % len(SHARES)]), random)


def test_tenant_runs_evict_from_both_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, SHARES[0])
    random = Random(43)
    random_run(twins(random, MODELS["full, window and states"], SHARES[0]), random)
    assert min(watch.victims) > 0


def by_number(self: TenantShares, tenant: int, weight: int, memory_bytes: int) -> Standing:  # noqa: ARG001
    """Who gives way, whatever anybody has."""
    return False, 0.0, tenant


def test_tenant_eviction_in_another_order_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenantShares, "standing", by_number)
    Watch(monkeypatch, SHARES[0])
    random = Random(43)
    rig = twins(random, MODELS["full, window and states"], SHARES[0])
    with pytest.raises(DifferenceError, match=r"who gives way|whose end goes"):
        random_run(rig, random)


@pytest.mark.thorough
def test_tenant_many_random_runs_match_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20_000, 20_000 + how_many(30)):
        random, shares = Random(seed), SHARES[seed % len(SHARES)]
        with monkeypatch.context() as patch:
            Watch(patch, shares)
            random_run(twins(random, None, shares), random, 120)


def test_tenant_shares_hold_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, on_the_host = Watch(monkeypatch, HOST_SHARES), [0, 0]
    lowest = watch.lowest
    for seed in (1, 5, 7):
        run = Run(seed, shares=HOST_SHARES)

        def counted(kept: RankedResumePoints, now: float, run: Run = run) -> ResumePoint | None:
            found = lowest(kept, now)
            if found is not None and kept._pool is run.tier.host.block_pool:
                on_the_host[found.tenant] += 1
            return found

        monkeypatch.setattr(watch, "lowest", counted)
        run.run()
    assert min(on_the_host) > 5, on_the_host
