"""How long blocks keep their keys, wait for a hit and lie idle: by hand, and of a manager by what it tells."""

from random import Random

import numpy as np
import pytest

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.errors import CacheError, ConfigError
from hybridkv.observe.block_times import EDGES_S, TimeCounts
from hybridkv.request import Request
from hybridkv.testing.configs import full_spec, model_config


def are(said: TimeCounts, *seconds: float) -> bool:
    """Whether ``said`` is so, by definition."""
    edges = (*EDGES_S, np.inf)
    found = [0] * len(edges)
    for one in seconds:
        found[next(i for i, edge in enumerate(edges) if one <= edge)] += 1
    return said.counts == tuple(found) and said.sum_s == pytest.approx(sum(seconds))


def test_block_times_of_a_manager_are_recorded() -> None:
    now, random = [0.0], Random(3)
    cache = KVCacheManager(
        model_config(13, (full_spec(4),)), 64, options=CacheOptions(block_times=True, clock=lambda: now[0])
    )
    begun, hit = dict[int, float](), dict[int, float]()
    gaps, lives, idles = list[float](), list[float](), list[float]()
    for number in range(60):
        now[0] += random.choice((0.005, 0.2, 4.0))
        request = Request(str(number), [random.randrange(3)] * 4 + [random.randrange(3)] * 8, hasher=cache.hasher)
        found = cache.look_up(request)
        before = {block for block in range(13) if cache.block_pool.keys.key_of(block) is not None}
        blocks = cache.engine.blocks_of(found)
        shared = blocks.ids[0].tolist()
        for block in shared:
            gaps.append(now[0] - hit[block])
            hit[block] = now[0]
        with cache.step(number):
            if cache.allocate_slots(request, 12 - found.tokens, found.tokens, blocks) is None:
                raise CacheError("it does not fit")
        cache.mark_written(number)
        after = {block for block in range(13) if cache.block_pool.keys.key_of(block) is not None}
        taken = set(cache.get_block_ids(request.request_id)[0]) - set(shared)
        for block in (before - after) | (before & taken):
            lives.append(now[0] - begun.pop(block))
            idles.append(now[0] - hit.pop(block))
        for block in after - begun.keys():
            begun[block] = hit[block] = now[0]
        cache.free(request)
        cache.check()
    said = cache.statistics().times
    assert said is not None
    assert are(said.gap, *gaps)
    assert are(said.lifetime, *lives)
    assert are(said.idle, *idles)
    assert len(gaps) > 10
    assert len(lives) > 10


def test_block_times_without_the_option_are_off() -> None:
    cache = KVCacheManager(model_config(13, (full_spec(4),)), 64)
    assert cache.statistics().times is None
    with pytest.raises(ConfigError, match="block_times"):
        cache.engine.idle_blocks()
