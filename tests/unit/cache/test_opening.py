"""What continues the last whole hash block of a request is remembered, and follows its tokens."""

import numpy as np

from hybridkv import KVCacheManager, Request
from hybridkv.cache.index import KnownTokens, add_known, opening
from hybridkv.testing.configs import full_spec, natural_model_config


def inside(request: Request, first: int) -> list[int]:
    parent, own = opening(request, first, 1)
    assert request.hasher is not None
    assert parent == (request.hashes[first - 1] if first else request.hasher.root)
    tokens: list[int] = np.frombuffer(own, np.int32).tolist()
    return tokens


def test_opening_follows_appended_and_forgotten_tokens() -> None:
    cache = KVCacheManager(natural_model_config(20, (full_spec(4),), (4,)), 100)
    request = Request("a", [1, 2, 3, 4, 5], hasher=cache.hasher)
    assert inside(request, 1) == [5]
    request.append(6)
    assert inside(request, 1) == [5, 6]
    request.truncate(5)
    request.append(7)
    assert inside(request, 1) == [5, 7]  # as many tokens as before
    assert inside(request, 0) == [1, 2, 3, 4]
    branch = request.prefix("b", 5)
    assert inside(branch, 1) == [5]
    assert cache.allocate_slots(request, 6) is not None
    assert inside(request, 1) == [5, 7]
    request.append(8)
    assert inside(request, 1) == [5, 7, 8]


def test_known_chains_are_the_same_as_with_every_key_added() -> None:
    known, every = KnownTokens(40), KnownTokens(40)
    keys = [[(100 * chain + place).to_bytes(32, "big") for place in range(12)] for chain in range(6)]
    for chain, length in ((0, 5), (0, 12), (1, 12), (0, 3), (2, 12), (3, 12), (0, 12), (1, 4), (1, 12)):
        add_known(known, keys[chain][:length])
        every.young.update(map(hash, keys[chain][:length]))
        if len(every.young) > every.most // 2:
            every.old, every.young = every.young, set(map(hash, keys[chain][:length]))
        assert (known.young, known.old) == (every.young, every.old)
