"""The ring of ids with lazy removal is a doubly-ended list."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache.spaces.one_size import NOWHERE, FreeOrder


def ids(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(blocks, np.int32)


@given(st.data())
def test_is_a_doubly_ended_list(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12), label="num_blocks")
    order, naive = FreeOrder(size), list(range(1, size))
    for _ in range(data.draw(st.integers(1, 120), label="actions")):
        out = [block for block in range(1, size) if block not in naive]
        action = data.draw(st.sampled_from(["take", "remove", "append", "prepend"]))
        if action == "take":
            n = data.draw(st.integers(0, len(naive)))
            assert order.take(n).tolist() == naive[:n]
            naive = naive[n:]
        elif action == "remove" and naive:
            gone = data.draw(st.lists(st.sampled_from(naive), unique=True))
            order.remove(ids(*gone))
            naive = [block for block in naive if block not in gone]
        elif out:
            back = data.draw(st.lists(st.sampled_from(out), unique=True))
            if action == "append":
                order.append(ids(*back))
                naive = naive + back
            else:
                order.prepend(ids(*back))
                naive = back + naive
        assert order.order().tolist() == naive
        assert len(order) == len(naive)
        assert [block in order for block in range(size)] == [block in naive for block in range(size)]


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


def test_orders_that_share_their_places_start_empty() -> None:
    place = np.full(8, NOWHERE, np.int32)
    low, high = FreeOrder(4, place), FreeOrder(4, place)
    assert (len(low), low.order().tolist(), 1 in low) == (0, [], False)
    low.append(ids(2, 1))
    high.append(ids(7))
    high.prepend(ids(4))
    assert (low.order().tolist(), high.order().tolist()) == ([2, 1], [4, 7])
    assert (len(low), len(high)) == (2, 2)


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
