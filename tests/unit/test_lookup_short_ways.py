"""Look-ups that need not ask all groups in turn answer what asking them would."""

from random import Random

import numpy as np
import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.cache.lookup import CommonHit
from hybridkv.request import Request
from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import chunk_spec, full_spec, model_config, natural_model_config, state_spec, window_spec

BLOCK = 4
SPECS: dict[str, list[KVCacheSpec]] = {
    "full": [full_spec(BLOCK)],
    "window alone": [window_spec(BLOCK, 10)],
    "chunk": [full_spec(BLOCK), chunk_spec(BLOCK, 16)],
    "window": [full_spec(BLOCK), window_spec(BLOCK, 10)],
    "wide": [full_spec(2 * BLOCK), window_spec(BLOCK, 10)],
    "states": [full_spec(BLOCK), window_spec(BLOCK, 10), state_spec(2 * BLOCK)],
}


def plain(hit: CommonHit) -> object:
    seen = sorted({block for ids in hit.seen for block in ids.tolist()})
    blocks = [(part.tokens, part.blocks.tolist()) for part in hit.groups]
    return hit.tokens, blocks, hit.uncached_tokens, hit.missing, hit.additions, hit.sources, seen


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_short_ways_answer_the_same(name: str, natural: bool, eagle: bool) -> None:
    """Prompts that share beginnings, of all lengths, ended and evicted, in a pool too small for all."""
    random, specs = Random(name), SPECS[name]
    config = natural_model_config(40, specs, [2] * len(specs)) if natural else model_config(40, specs)
    cache = KVCacheManager(config, 400, use_eagle=eagle)
    lookup, met, prompts = cache._lookup, [0, 0], [[1, 2, 3]]
    for turn in range(80):
        prompt = random.choice(prompts)
        prompt = prompt[: random.randrange(len(prompt) + 1)] + [
            random.randrange(2) for _ in range(random.randrange(1, 30))
        ]
        prompts.append(prompt)
        one = Request(f"r{turn}", prompt, hasher=cache.hasher)
        candidate = (one.num_tokens - 1) // lookup._alignment * lookup._alignment
        hit = lookup.find(one)
        if candidate:
            assert plain(hit) == plain(lookup._agreed(one, one.num_tokens - 1, candidate)), turn
            met[hit.tokens > 0] += 1
        if cache.allocate_slots(one, one.num_tokens - hit.tokens, hit.tokens, cache.blocks_of(hit)) is not None:
            one.num_computed_tokens = one.num_tokens
            cache.keep_end(one)
            cache.take_transfers()
            cache.free(one)
    assert met[False] >= 3
    assert met[True] >= 3 or name == "states"  # whose chunks end where nothing is kept


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_what_a_row_held_goes_back_in_its_order(order: tuple[int, ...]) -> None:
    """Last block first, those without key before those with one, whichever of them have one and whoever shares them."""
    for keyed in range(16):
        for shared in range(16):
            cache = KVCacheManager(model_config(8, [full_spec(BLOCK)]), 400)
            pool = cache.block_pool
            ids = pool.get_new_blocks(4)[list(order)]
            some = [block for place, block in enumerate(ids.tolist()) if keyed >> place & 1]
            for block in some:
                pool.publish(0, [block], [block.to_bytes(32, "big")])
            held = ids[[place for place in range(4) if shared >> place & 1]]
            pool.touch(held)
            pool.free_blocks(ids)
            free = [block for block in ids.tolist() if block not in held]
            empty, cached = [b for b in free if b not in some], [b for b in free if b in some]
            assert pool.free_order() == [*empty, 5, 6, 7, *cached]
            assert pool.ref_counts(np.sort(ids)).tolist() == [int(block in held) for block in np.sort(ids).tolist()]
