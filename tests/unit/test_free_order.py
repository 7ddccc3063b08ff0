"""The ring of ids with lazy removal is a doubly-ended list."""

from random import Random

import numpy as np
import pytest

from hybridkv.cache.spaces.one_size import FreeOrder


def ids(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(blocks, np.int32)


def test_positions_start_anew_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are 32 bits wide: with a small bound the ring is written anew often, and nothing is lost."""
    monkeypatch.setattr("hybridkv.cache.spaces.one_size._FARTHEST", 30)
    random, order, naive = Random(0), FreeOrder(12), list(range(1, 12))
    for _ in range(2000):
        gone = random.sample(naive, random.randint(0, len(naive)))
        order.remove(ids(*gone))
        naive = [block for block in naive if block not in gone]
        if random.random() < 0.5:
            order.append(ids(*gone))
            naive = naive + gone
        else:
            order.prepend(ids(*gone))
            naive = gone + naive
        assert order.order().tolist() == naive
        assert np.abs(order._place[naive]).max() <= 30


def test_a_renamed_block_hands_over_its_place() -> None:
    random, order, naive = Random(1), FreeOrder(12), list(range(1, 12))
    for _ in range(500):
        out = [block for block in range(1, 12) if block not in naive]
        source = random.sample(naive, random.randint(0, min(len(naive), len(out))))
        target = random.sample(out, len(source))
        order.rename(ids(*source), ids(*target))
        names = dict(zip(source, target, strict=True))
        naive = [names.get(block, block) for block in naive]
        gone = random.sample(naive, random.randint(0, len(naive)))
        order.remove(ids(*gone))
        naive = [block for block in naive if block not in gone]
        back = random.sample(
            [block for block in range(1, 12) if block not in naive], random.randint(0, 11 - len(naive))
        )
        if random.random() < 0.5:
            order.append(ids(*back))
            naive = naive + back
        else:
            order.prepend(ids(*back))
            naive = back + naive
        assert order.order().tolist() == naive
        assert len(order) == len(naive)
        if naive:
            assert order.first() == naive[0]
