"""One block that loses its key alone loses it as in company, whoever hears of it."""

from random import Random

import numpy as np
import pytest

from hybridkv.cache.block_times import BlockTimes
from hybridkv.cache.events import EventQueue
from hybridkv.cache.journal import NoNeeds
from hybridkv.cache.keys import BlockKeys
from hybridkv.cache.lost_keys import LostKeys

BLOCKS = 40


class Heard(NoNeeds):
    """Which blocks lost their keys."""

    def __init__(self) -> None:
        self.lost: list[int] = []

    def lose(self, ids: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> None:
        self.lost += ids.tolist()

    def lose_one(self, block: int) -> None:
        self.lost.append(block)


def made(who_hears: str, seed: int, *, tails: bool) -> BlockKeys:
    """Some blocks have keys, two of them the same one; some are of a step in flight, some checkpoints, some tailed."""
    random = Random(seed)
    keys = BlockKeys(BLOCKS, 2, events=EventQueue(1000) if who_hears == "events" else None)
    keys.needs = Heard()
    if who_hears == "losses":
        keys.lost_keys = LostKeys(100, [1, 1], lambda: 1.0)
    if who_hears == "times":
        keys.times = BlockTimes(BLOCKS, lambda: 1.0)
    for block in range(1, BLOCKS):
        key = bytes([block // 2 if block < 12 else block])
        keys.publish(block % 2 if block >= 12 else 0, (block,), (key,), random.choice((-1, -1, 3)))
        if block % 5 == 0:
            keys.flag_supersedable(block)
        if tails and block % 7 == 0:
            keys.publish_tail(block % 2 if block >= 12 else 0, block, key, b"tail")
    return keys


def told(keys: BlockKeys) -> list[object]:
    """All that is known of the blocks."""
    every = range(BLOCKS)
    heard = keys.needs
    assert isinstance(heard, Heard)
    return [
        [(keys.key_of(block), keys.group_of(block), keys.step_of(block)) for block in every],
        [sorted(index.entries()) for index in keys.indexes],
        [sorted(index.tails()) for index in keys.indexes],
        [keys.kept_since(np.array([block], np.int32), before) for block in every for before in range(keys.evictions)],
        (keys.evictions, keys.given, keys.lost, heard.lost),
        keys.take_supersedable(every).tolist(),
        repr(keys.take_events()),
        None if keys.lost_keys is None else keys.lost_keys.lost_bytes,
        None if keys.times is None else keys.times.statistics(),
    ]


@pytest.mark.parametrize("tails", [False, True])
@pytest.mark.parametrize("who_hears", ["nobody", "events", "losses", "times"])
def test_alone_as_in_company(who_hears: str, tails: bool) -> None:
    for seed in range(4):
        one, other = made(who_hears, seed, tails=tails), made(who_hears, seed, tails=tails)
        for block in Random(seed).sample(range(1, BLOCKS), 25):
            one.evict_one(block)
            other.evict(np.array([block], np.int32))
        assert told(one) == told(other)
