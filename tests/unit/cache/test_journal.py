"""Facts that wait: of callers that take no steps, that ask in between, and that raise."""

import pytest

from hybridkv import KVCacheManager, Request
from hybridkv.cache import CacheOptions
from hybridkv.eviction import HAZARD
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec


def _cache(*, attention: bool = False, **options: object) -> KVCacheManager:
    specs = [full_spec(2), full_spec(2)] if attention else [full_spec(4), state_spec(4)]
    config = natural_model_config(12, specs, [2, 3] if attention else [4, 1])
    return KVCacheManager(config, 400, options=CacheOptions(eviction=HAZARD, clock=lambda: 0.0, **options))  # type: ignore[arg-type]


def _start(cache: KVCacheManager, tokens: list[int]) -> tuple[Request, tuple[list[int], ...]]:
    request = Request(str(tokens), tokens, hasher=cache.hasher)
    blocks = cache.allocate_slots(request, len(tokens))
    assert blocks is not None
    request.num_computed_tokens = len(tokens)
    return request, blocks.blocks


def _serve(cache: KVCacheManager) -> list[int]:
    request, blocks = _start(cache, list(range(17)))
    cache.keep_resume_point(request)
    cache.free(request)
    return blocks[0]


@pytest.mark.parametrize("how", ["reset", "evict"])
def test_statistics_after_an_eviction_report_no_resume_point(how: str) -> None:
    cache = _cache()
    ids = _serve(cache)
    assert sum(end.kept for end in cache.statistics().ends) == 1
    if how == "reset":
        assert cache.reset_prefix_cache()
    else:
        cache.evict_blocks(0, ids)
    assert sum(end.kept for end in cache.statistics().ends) == 0


def test_reset_keeps_the_free_order_of_a_settled_cache() -> None:
    taken = []
    for settled in (False, True):
        cache = _cache(attention=True)
        for request, _ in [_start(cache, [number] * 5) for number in range(3)]:
            cache.free(request)
        if settled:
            cache.check()
        assert cache.reset_prefix_cache()
        taken.append(_start(cache, [9] * 9)[1])
    assert taken[0] == taken[1]


def test_pin_and_unpin_leave_the_journal_empty() -> None:
    cache = _cache(max_pinned_blocks=8)
    _serve(cache)
    for _ in range(100):
        cache.unpin(cache.pin(list(range(17))))
    assert not cache.block_pool.journal.blocks
