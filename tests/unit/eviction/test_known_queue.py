"""Requests that wait: what they begin with goes last, until they begin; within their tenant's share."""

from __future__ import annotations

import pytest
from test_tenants import HYBRID, Cache, chat, unique

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import EndsPlacement
from hybridkv.eviction import EVERYBODY, EVICTIONS, Share, TenantShares, eviction_named, resume_points
from hybridkv.eviction.ranked import RankedResumePoints
from hybridkv.request import Hints, Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec, window_spec
from hybridkv.testing.fake_worker import FakeWorker, digest_model


def asked(cache: Cache, person: int, turn: int, tenant: str | None = None) -> Request:
    return Request(f"{person} {turn}", chat(person, turn), hasher=cache.cache.hasher, tenant=tenant)


def flood(cache: Cache, requests: int, tenant: str | None = None) -> None:
    for prompt, _ in zip(unique(), range(requests), strict=False):
        cache.run(prompt, tenant)


@pytest.mark.parametrize("specs", [HYBRID, (full_spec(4),), (full_spec(4), window_spec(4, 9))])
def test_waiting_request_finds_its_cached_prefix(specs: tuple[KVCacheSpec, ...]) -> None:
    """Though its session was said to be over, so that nothing would go before it."""
    found = []
    for waits in (False, True):
        cache = Cache(EVERYBODY, 13, specs)
        cache.run(chat(1, 1), hints=Hints(over=True))
        request = asked(cache, 1, 2)
        if waits:
            cache.cache.eviction_policy.expect(request)
        flood(cache, 12)
        cache.cache.check()
        found.append(cache.cache.find_hit(request).tokens)
        cache.cache.eviction_policy.expect_no_longer(request)
        assert not any(node.awaited for node in cache.eviction_policy._tree.kept())
        cache.cache.check()
    assert found == [0, 11]


def test_waiting_request_protects_the_deepest_new_resume_point() -> None:
    cache = Cache(EVERYBODY, 30)
    waiting = [asked(cache, 1, 3), asked(cache, 1, 2)]
    for request in waiting:
        cache.cache.eviction_policy.expect(request)
    awaited = []
    for turn in (1, 2):
        cache.run(chat(1, turn))
        awaited.append([node.tokens for node in cache.eviction_policy._tree.kept() if node.awaited])
        cache.cache.check()
    assert awaited == [[11], [16, 17]]  # before the last token of the second turn, and behind it
    cache.cache.eviction_policy.expect_no_longer(waiting[1])
    cache.cache.eviction_policy.expect_no_longer(waiting[1])
    assert [node.tokens for node in cache.eviction_policy._tree.kept() if node.awaited] == [17]
    for node in [node for node in cache.eviction_policy._tree.kept() if node.tokens == 17]:
        cache.eviction_policy._release(node, cache.now)
    assert [node.tokens for node in cache.eviction_policy._tree.kept() if node.awaited] == [16]
    assert cache.cache.reset_prefix_cache()
    cache.cache.check()


def test_waiting_request_ignores_tokens_added_while_it_waits() -> None:
    """Those of steps that were in flight when it was preempted."""
    cache = Cache(EVERYBODY, 30)
    cache.run(chat(1, 1))
    cache.run(chat(1, 2))
    prompt = chat(1, 2)
    request = Request("waits", prompt[:11], hasher=cache.cache.hasher)
    cache.cache.eviction_policy.expect(request)
    for token in prompt[11:]:
        request.append(token)
    cache.cache.check()
    assert [node.tokens for node in cache.eviction_policy._tree.kept() if node.awaited] == [10]


def test_eviction_with_every_prefix_awaited_still_makes_room() -> None:
    cache = Cache(EVERYBODY, 13)
    for person in range(8):
        cache.cache.eviction_policy.expect(asked(cache, person, 2))
        cache.run(chat(person, 1))
    cache.cache.check()
    hits = [cache.cache.find_hit(asked(cache, person, 2)).tokens for person in range(8)]
    assert 0 < sum(one > 0 for one in hits) < 8


def test_waiting_requests_protect_their_tenant_share_only() -> None:
    """However many wait of ``b``, which keeps the most: ``a`` keeps its own."""
    cache = Cache(TenantShares((Share("a", 0.4), Share("b"))), 25)
    cache.run(chat(1, 1), "a")
    for person in range(10, 30):
        cache.cache.eviction_policy.expect(asked(cache, person, 2, "b"))
        cache.run(chat(person, 1), "b")
    cache.cache.check()
    assert cache.cache.find_hit(asked(cache, 1, 2, "a")).tokens == 11


def test_long_queue_protects_its_first_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_points, "_MOST_WAITING", 3)
    cache = Cache(EVERYBODY, 13)
    for person in range(9):
        cache.cache.eviction_policy.expect(asked(cache, person, 1))
    assert len(cache.eviction_policy._tree.waiting) == 3


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_scheduler_reports_waiting_requests_to_eviction(eviction: str) -> None:
    """One runs at a time; behind twelve others waits the second turn of a conversation: only lru has forgotten it."""
    config = natural_model_config(13, (full_spec(4), state_spec(4)), (4, 1))
    cache = KVCacheManager(
        config,
        200,
        options=CacheOptions(placement=EndsPlacement(), eviction=eviction_named(eviction), clock=lambda: 1.0),
    )
    scheduler = Scheduler(cache, SchedulerLimits(max_running=1, max_batched_tokens=64), clock=lambda: 1.0)
    worker = FakeWorker(config, digest_model(config, 1 << 20))

    def add(name: str, prompt: list[int]) -> Request:
        request = Request(name, prompt, SamplingParams(max_tokens=2, ignore_eos=True), hasher=cache.hasher)
        scheduler.add(request)
        return request

    def drain() -> None:
        while not scheduler.drained:
            step = scheduler.schedule()
            scheduler.update(worker.execute(step))
            scheduler.check()

    first = add("first", list(range(50, 61)))
    drain()
    for number, prompt in zip(range(12), unique(), strict=False):
        add(str(number), [one % 1000 for one in prompt])
    second = add("second", [*first.token_ids().tolist(), 1, 2, 3, 4])
    assert scheduler.abort("11")
    drain()
    assert second.first_hit_tokens == (0 if eviction == "lru" else 12)
    kept = cache._parts.eviction_policy
    assert not isinstance(kept, RankedResumePoints) or len(kept._tree.waiting) == 0


# -- faults
