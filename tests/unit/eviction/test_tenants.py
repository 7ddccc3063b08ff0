"""Shares of tenants: who gives way, what is charged to whom, and that a flood takes no more than its share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.index import KnownTokens
from hybridkv.cache.placement import EndsPlacement, NoStates
from hybridkv.errors import ConfigError
from hybridkv.eviction import EVERYBODY, HAZARD, Share, TenantShares, eviction_named
from hybridkv.eviction.ranked import RankedResumePoints
from hybridkv.request import Hints, Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.testing import attention_config
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec, window_spec
from hybridkv.testing.fake_worker import FakeWorker, digest_model

HYBRID = (full_spec(4), state_spec(4))


class Cache:
    """Requests one after the other, each computed in two steps; seconds pass as asked."""

    def __init__(self, shares: TenantShares, slabs: int, specs: tuple[KVCacheSpec, ...] = HYBRID) -> None:
        self.now = 0.0
        per_slab = tuple(1 if "Mamba" in type(spec).__name__ else 4 for spec in specs)
        self.cache = KVCacheManager(
            natural_model_config(slabs, specs, per_slab),
            200,
            options=CacheOptions(placement=EndsPlacement(), eviction=HAZARD, shares=shares, clock=lambda: self.now),
        )
        self._names = count()

    @property
    def eviction_policy(self) -> RankedResumePoints:
        found = self.cache._parts.eviction_policy
        assert isinstance(found, RankedResumePoints)
        return found

    def weight(self, tenant: str) -> int:
        return next(one.kept_bytes for one in self.cache.statistics().tenants if one.tenant == tenant)

    def run(
        self, prompt: list[int], tenant: str | None = None, salt: str | None = None, hints: Hints | None = None
    ) -> int:
        """Tokens hit."""
        self.now += 1.0
        cache = self.cache
        name = str(next(self._names))
        request = Request(name, prompt, hasher=cache.hasher, cache_salt=salt, tenant=tenant, hints=hints)
        hit = cache.look_up(request)
        request.branch_tokens = hit.branch_tokens
        assert cache.allocate_slots(request, len(prompt) - hit.tokens, hit.tokens, hit) is not None
        cache.store_checkpoints(np.array([request.row]), np.array([hit.tokens]), np.array([len(prompt)]))
        request.num_computed_tokens = len(prompt)
        cache.fields.take_transfers()
        request.first_hit_tokens = hit.tokens
        request.append(9)
        cache.cache_blocks(request, len(prompt))
        cache.keep_resume_point(request)
        cache.free(request)
        return hit.tokens


def chat(person: int, turn: int) -> list[int]:
    """11 tokens, and 6 more each turn."""
    return [person, *range(100, 110), *(one for earlier in range(1, turn) for one in (9, *range(earlier, earlier + 5)))]


def unique() -> Iterator[list[int]]:
    """Prompts that nobody ever asks for again."""
    for number in count(1_000_000, 20):
        yield list(range(number, number + 14))


def chats(cache: Cache, flood: int, *, people: int = 4, turns: int = 3) -> int:
    """Tokens hit by ``a``, whose people take turns; between any two of its requests ``flood`` others come by."""
    hit, prompts = 0, unique()
    for turn in range(1, turns + 1):
        for person in range(people):
            hit += cache.run(chat(person, turn), "a")
            for _ in range(flood):
                cache.run(next(prompts), "b")
    cache.cache.check()
    return hit


# -- what a share is


def test_tenant_shares_are_parsed() -> None:
    shares = TenantShares.parse(["a=30%", "b=0.1..0.5", "team=c=0%..100%", "*=20%..60%"])
    assert shares.of == (Share(None, 0.2, 0.6), Share("a", 0.3), Share("b", 0.1, 0.5), Share("team=c"))
    assert shares.numbers() == {"a": 1, "b": 2, "team=c": 3}
    assert (EVERYBODY.of, EVERYBODY.numbers()) == ((Share(None),), {})


def test_tenant_shares_check_names_in_linear_time() -> None:
    compared = count()

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            next(compared)
            return str(self) == other

        __hash__ = str.__hash__

    each = [Share(f"tenant-{number}") for number in range(500)]
    for one in each:
        object.__setattr__(one, "tenant", Name(one.tenant))  # it tells who compares it
    TenantShares(tuple(each))
    assert next(compared) < 20 * 500


@pytest.mark.parametrize("asked", ["a", "=30%", "a=", "a=30%..", "a=x", "a=1..2..3"])
def test_tenant_share_of_invalid_text_is_rejected(asked: str) -> None:
    with pytest.raises(ConfigError, match="not a share"):
        TenantShares.parse([asked])


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        (["a=60%..50%"], "share of a must be"),
        (["*=120%"], r"share of \* must be"),
        (["a=-1%"], "share of a must be"),
        (["a=nan"], "finite"),
        (["a=60%", "b=50%"], "110% of memory"),
        (["a=10%", "a=20%"], "more than one share"),
        (["*=10%", "*=20%"], "more than one share"),
    ],
)
def test_tenant_shares_with_invalid_values_are_rejected(asked: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        TenantShares.parse(asked)


def test_tenant_shares_of_wrong_type_are_rejected() -> None:
    with pytest.raises(ConfigError, match="tenant"):
        Share("")
    with pytest.raises(ConfigError, match="of must be a Share"):
        TenantShares(("a",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shares must be"):
        KVCacheManager(attention_config(8), 100, options=CacheOptions(shares=["a=30%"]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tenant"):
        Request("r", [1], tenant="")


A_THIRD = TenantShares((Share("a", 0.3),))


def test_tenant_shares_without_resume_points_are_rejected() -> None:
    config = natural_model_config(9, HYBRID, (4, 1))
    with pytest.raises(ConfigError, match="hazard: eviction lru evicts"):
        KVCacheManager(config, 100, options=CacheOptions(eviction=eviction_named("lru"), shares=A_THIRD))
    with pytest.raises(ConfigError, match="the reference layout evicts"):
        KVCacheManager(attention_config(8), 100, options=CacheOptions(shares=A_THIRD))
    with pytest.raises(ConfigError, match="placement none keeps no states"):
        KVCacheManager(config, 100, options=CacheOptions(placement=NoStates(), eviction=HAZARD, shares=A_THIRD))


# -- what is charged


def test_tenant_statistics_report_hits_by_tenant() -> None:
    cache = Cache(TenantShares((Share("a"),)), 30)
    cache.run(chat(1, 1), "a")
    cache.run(chat(1, 2), "a")
    cache.run(chat(2, 1))
    others, a = cache.cache.statistics().tenants
    assert (others.tenant, others.requests, others.prompt_tokens, others.hit_tokens) == ("*", 1, 11, 0)
    assert (a.tenant, a.requests, a.prompt_tokens, a.hit_tokens) == ("a", 2, 28, 11)


# -- floods


@pytest.mark.parametrize("specs", [HYBRID, (full_spec(4),), (full_spec(4), window_spec(4, 9))])
def test_tenant_flood_keeps_guaranteed_shares_of_others(specs: tuple[KVCacheSpec, ...]) -> None:
    alone = chats(Cache(EVERYBODY, 11, specs), 0, people=3)
    drowned = chats(Cache(EVERYBODY, 33, specs), 10, people=3)
    kept = chats(Cache(A_THIRD, 33, specs), 10, people=3)
    assert drowned < alone <= kept


def test_tenant_above_its_maximum_share_is_evicted_first() -> None:
    """Nothing is guaranteed, but who is above its greatest share gives way first."""
    shares = TenantShares((Share("b", 0.0, 0.4),))
    assert chats(Cache(shares, 33), 10) > chats(Cache(EVERYBODY, 33), 10)


@pytest.mark.parametrize("share", [Share("a", 0.3), Share("a", 0.0, 0.1), Share("b", 0.2, 0.5)])
def test_tenant_without_rivals_uses_all_memory(share: Share) -> None:
    """As many as fit into the whole, whatever the share is: neither in the part above it nor beside it is one lost."""
    people, slabs = 9, 33
    caches = [Cache(shares, slabs) for shares in (EVERYBODY, TenantShares((share,)))]
    found = [chats(cache, 0, people=people) for cache in caches]
    assert found[0] == found[1] > chats(Cache(EVERYBODY, 11), 0, people=people)
    assert caches[0].cache.block_pool.keys.evictions == caches[1].cache.block_pool.keys.evictions > 0


def test_tenant_flood_keeps_branch_points_of_others() -> None:
    """What was seen of ``a`` stays known for as long as without ``b``, though all of it is gone."""
    cache = Cache(TenantShares((Share("a"),)), 9)
    cache.eviction_policy._known.default_factory = lambda: KnownTokens(12)
    shared = list(range(100, 112))
    cache.run([*shared, 1, 1], "a")
    for node in cache.eviction_policy._tree.kept():
        cache.eviction_policy._release(node, cache.now)
    for prompt, _ in zip(unique(), range(8), strict=False):
        cache.run(prompt)
    other = Request("other", [*shared, 2, 2], hasher=cache.cache.hasher, tenant="a")
    hit = cache.cache.find_hit(other)
    assert (hit.tokens, hit.branch_tokens) == (0, 12)


# -- side by side


def hits_beside(shares: TenantShares, flood: int) -> int:
    """Tokens hit by conversations of ``a``, three requests running at once, in a cache of 39 slabs, or alone in 13."""
    config = natural_model_config(39 if flood else 13, HYBRID, (4, 1))
    now = count()
    cache = KVCacheManager(
        config, 200, options=CacheOptions(eviction=HAZARD, shares=shares, clock=lambda: float(next(now)))
    )
    limits = SchedulerLimits(max_running=3, max_batched_tokens=64)
    scheduler, worker = Scheduler(cache, limits), FakeWorker(config, digest_model(config, 1 << 20))
    prompts, names, mine = unique(), count(), list[Request]()

    def add(prompt: list[int], tenant: str) -> Request:
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        request = Request(str(next(names)), prompt, sampling, hasher=cache.hasher, tenant=tenant)
        scheduler.add(request)
        return request

    said: dict[int, list[int]] = {person: [person, *range(100, 110)] for person in range(2)}
    for _ in range(3):
        for person, prompt in said.items():
            for _ in range(flood):
                add([one % 4096 for one in next(prompts)], "b")
            mine.append(add(prompt, "a"))
            while not scheduler.drained:
                scheduler.update(worker.execute(scheduler.schedule()))
            scheduler.check()
            said[person] = [*mine[-1].token_ids().tolist(), 7, 7, 7]
    return sum(request.first_hit_tokens or 0 for request in mine)


def test_tenant_flood_of_running_requests_keeps_other_shares() -> None:
    """What runs is charged to nobody, and has room beside what was promised."""
    alone = hits_beside(EVERYBODY, 0)
    assert hits_beside(EVERYBODY, 12) < alone <= hits_beside(A_THIRD, 12)
