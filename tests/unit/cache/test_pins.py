"""Prefixes that stay: pin, unpin, their limit."""

import pytest

from hybridkv.errors import CacheError, CapacityError, ConfigError
from hybridkv.request import Request
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, StepResult
from kinds_support import cache_of, full, hit_tokens, start, state, window

PROMPT = list(range(40))


def test_pinned_prefix_survives_memory_pressure() -> None:
    cache = cache_of(full(), num_blocks=13, max_pinned_blocks=4)
    cache.free(start(cache, PROMPT[:24], (24,)))
    pin = cache.pin(PROMPT[:16])
    assert (pin.tokens, pin.num_blocks) == (16, 4)
    assert cache.usage == pytest.approx(4 / 12)
    assert cache.statistics().pinned_blocks == 4
    cache.check()
    cache.free(start(cache, list(range(100, 132)), (32,), "b"))  # takes everything else
    assert hit_tokens(cache, PROMPT) == 16
    cache.unpin(pin)
    assert cache.usage == 0
    cache.check()
    start(cache, list(range(200, 248)), (48,), "c")
    assert hit_tokens(cache, PROMPT) == 0


def test_pin_of_uncached_prefix_is_empty() -> None:
    cache = cache_of(full(), max_pinned_blocks=4)
    pin = cache.pin(PROMPT)
    assert (pin.tokens, pin.num_blocks) == (0, 0)
    cache.unpin(pin)


def test_pin_with_salt_is_separate() -> None:
    cache = cache_of(full(), max_pinned_blocks=9)
    request = Request("a", PROMPT[:16], hasher=cache.hasher, cache_salt="s")
    cache.allocate_slots(request, 16)
    assert cache.pin(PROMPT[:16]).tokens == 0
    assert cache.pin(PROMPT[:16], "s").tokens == 16


def test_pin_of_windows_and_states_holds_blocks_of_a_hit() -> None:
    cache = cache_of(full(), window(8), state(8), max_pinned_blocks=20)
    cache.free(start(cache, PROMPT, (16, 16, 8)))
    pin = cache.pin(PROMPT[:32])
    assert pin.tokens == 32
    assert [len(ids) for ids in pin.blocks] == [8, 2, 1]
    cache.check()
    assert not cache.reset_prefix_cache()
    cache.unpin(pin)
    assert cache.reset_prefix_cache()


def test_pin_is_not_counted_as_running_request() -> None:
    cache = cache_of(full(), max_pinned_blocks=9)
    start(cache, PROMPT[:16], (16,))
    cache.pin(PROMPT[:8])
    assert cache.get_num_common_prefix_blocks("a", 1) == [4]


def test_pin_skips_blocks_a_step_in_flight_writes() -> None:
    cache = cache_of(full(), max_pinned_blocks=9)
    sched = Scheduler(cache, SchedulerLimits(max_batched_tokens=8, max_in_flight=2))
    sched.add(Request("a", PROMPT[:16], hasher=cache.hasher))
    first = sched.schedule()
    assert cache.pin(PROMPT[:16]).tokens == 0
    sched.update(StepResult(first.id, Csr.empty(1)))
    second = sched.schedule()
    pin = cache.pin(PROMPT[:16])
    assert pin.tokens == 8
    sched.fail(second.id, "lost")
    cache.check()
    cache.unpin(pin)
    cache.check()


def test_pin_beyond_the_limit_is_rejected() -> None:
    cache = cache_of(full(), max_pinned_blocks=5)
    start(cache, PROMPT, (40,))
    first = cache.pin(PROMPT[:16])
    with pytest.raises(CapacityError, match="needs 4 blocks, 4 of 5 are pinned: release a pin or raise"):
        cache.pin(PROMPT[:16])
    cache.check()
    cache.unpin(first)
    assert cache.pin(PROMPT[:20]).num_blocks == 5
    without = cache_of(full())
    start(without, PROMPT, (40,))
    with pytest.raises(CapacityError, match="0 of 0 are pinned"):
        without.pin(PROMPT)
    with pytest.raises(ConfigError, match="max_pinned_blocks must not be negative"):
        cache_of(full(), max_pinned_blocks=-1)
    with pytest.raises(ConfigError, match="max_pinned_blocks is 10, the pool has 9 blocks"):
        cache_of(full(), num_blocks=10, max_pinned_blocks=10)


def test_pin_released_twice_is_rejected() -> None:
    cache, other = cache_of(full(), max_pinned_blocks=9), cache_of(full(), max_pinned_blocks=9)
    start(cache, PROMPT, (40,))
    start(other, PROMPT, (40,))
    pin = cache.pin(PROMPT[:8])
    other.pin(PROMPT[:8])
    with pytest.raises(CacheError, match="pin 0 is not held here"):
        other.unpin(pin)
    cache.unpin(pin)
    with pytest.raises(CacheError, match="pin 0 is not held here"):
        cache.unpin(pin)


def test_admission_excludes_blocks_that_may_be_pinned() -> None:
    cache = cache_of(full(), num_blocks=11, max_pinned_blocks=4)
    sched = Scheduler(cache)
    assert cache.bounds.guaranteed_blocks == 6
    with pytest.raises(CapacityError, match="the pool has 6"):
        sched.add(Request("large", PROMPT[:20], hasher=cache.hasher))
    sched.add(Request("fits", PROMPT[:8], hasher=cache.hasher))


def test_group_statistics_balance_after_unpin() -> None:
    cache = cache_of(full(), window(8), num_blocks=40)
    request = start(cache, PROMPT, (24, 16))
    groups = cache.statistics().groups
    assert [(g.held_blocks, g.cached_blocks, g.published, g.evictions) for g in groups] == [
        (10, 10, 10, 0),
        (6, 10, 10, 0),
    ]
    cache.free(request)
    start(cache, list(range(100, 172)), (72,), "b")
    groups = cache.statistics().groups
    assert [g.published for g in groups] == [28, 28]
    assert sum(g.evictions for g in groups) == cache.statistics().evictions > 0
    assert [g.published - g.evictions for g in groups] == [g.cached_blocks for g in groups]
    cache.free("b")
    assert cache.reset_prefix_cache()
    groups = cache.statistics().groups
    assert [(g.held_blocks, g.cached_blocks, g.published - g.evictions) for g in groups] == [(0, 0, 0)] * 2


def test_pin_with_eagle_holds_the_block_after_the_hit() -> None:
    for specs in ((full(),), (full(), window(8))):
        cache = cache_of(*specs, num_blocks=20 * len(specs), max_pinned_blocks=12, use_eagle=True)
        cache.free(start(cache, PROMPT[:24], (24,)))
        pin = cache.pin(PROMPT[:16])
        assert pin.tokens == 12
        cache.free(start(cache, list(range(100, 156)), (56,), "b"))
        cache.check()
        assert hit_tokens(cache, PROMPT) >= 12
