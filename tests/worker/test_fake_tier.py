"""The tier of the fake worker: the bytes of the loops without faults, and what is late or lost with them."""

from collections.abc import Sequence

import numpy as np
import pytest
from copy_support import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_support import TIERS, Bytewise, block_of, change, copies_of, random_step, transfers_of

from hybridkv.errors import ConfigError
from hybridkv.step import Copy, Step
from hybridkv.testing import ContentError, FakeWorker, TierFaults, digest_model
from hybridkv.testing.fake_tier import FakeTier
from small_steps import small_step


class Side:
    """A FakeTier whose arenas begin as those of ``bytewise``."""

    def __init__(self, bytewise: Bytewise, faults: TierFaults | None = None) -> None:
        self.storage = bytearray(bytewise.device.tobytes())
        self.tier = FakeTier(bytewise.config, self.storage, bytewise.tier, faults)
        self.tier.storage[:] = bytewise.host.tobytes()
        self.bytewise = bytewise

    def execute(self, step: Step) -> tuple[list[int], list[int]]:
        self.tier.begin(step)
        change(np.frombuffer(self.storage, np.uint8), self.bytewise.config, step)
        self.tier.load(step)
        arrived, lost = self.tier.finish()
        return arrived.tolist(), lost.tolist()

    def holds(self, group: int, block: int, wanted: Sequence[np.ndarray], *, host: bool) -> bool:
        arena = np.frombuffer(self.tier.storage if host else self.storage, np.uint8)
        config = self.bytewise.tier if host else self.bytewise.config
        return all((a == b).all() for a, b in zip(block_of(arena, config, group, block), wanted, strict=True))


@settings(max_examples=2 * settings().max_examples)
@given(name=st.sampled_from(list(CONFIGS)), seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 5))
def test_fake_tier_of_random_steps_matches_a_loop(name: str, seed: int, steps: int) -> None:
    bytewise = Bytewise(CONFIGS[name], TIERS[name], seed)
    side, rng = Side(bytewise), np.random.default_rng(seed)
    for number in range(steps):
        step = random_step(number, bytewise.config, bytewise.tier, rng)
        bytewise.apply(step)
        assert side.execute(step) == (transfers_of(step), [])
        assert side.storage == bytewise.device.tobytes()
        assert side.tier.storage == bytewise.host.tobytes()


def steps_until_reported(side: Side, first: int) -> tuple[int, list[int], list[int]]:
    for number in range(first, first + 9):
        arrived, lost = side.execute(small_step(number))
        if arrived or lost:
            return number, arrived, lost
    raise AssertionError("never reported")


@pytest.mark.parametrize("name", ["classes", "gaps"])
def test_fake_transfers_that_are_late_have_random_bytes_until_reported(name: str) -> None:
    bytewise = Bytewise(CONFIGS[name], TIERS[name])
    for seed in range(5):
        side = Side(bytewise, TierFaults(late=1.0, most_steps=4, seed=seed))
        stored, loaded = block_of(bytewise.device, bytewise.config, 0, 3), block_of(bytewise.host, bytewise.tier, 1, 1)
        step = small_step(0, stores=copies_of([(5, 0, 3, 4)]), loads=copies_of([(6, 1, 1, 2)]))
        assert side.execute(step) == ([], [])
        old = block_of(bytewise.host, bytewise.tier, 0, 4)
        assert not side.holds(0, 4, stored, host=True)
        assert not side.holds(0, 4, old, host=True)
        assert not side.holds(1, 2, loaded, host=False)
        ended = set[int]()
        while len(ended) < 2:
            number, arrived, lost = steps_until_reported(side, side.tier._last_id + 1)
            ended |= set(arrived)
            assert (number <= 4, lost) == (True, [])
            assert side.holds(0, 4, stored, host=True) == (5 in ended)
            assert side.holds(1, 2, loaded, host=False) == (6 in ended)


def test_fake_transfers_that_are_lost_leave_other_bytes() -> None:
    bytewise = Bytewise(CONFIGS["classes"], TIERS["classes"])
    whole = 0
    for seed in range(20):
        side = Side(bytewise, TierFaults(lost=1.0, seed=seed))
        step = small_step(0, stores=copies_of([(1, 0, 2, 5), (1, 0, 3, 4), (1, 0, 4, 6)]))
        assert side.execute(step) == ([], [1])
        whole += all(
            side.holds(0, to, block_of(bytewise.device, bytewise.config, 0, source), host=True)
            for source, to in ((2, 5), (3, 4), (4, 6))
        )
    assert whole < 5  # each block has one chance in three to be right


def test_fake_tier_ends_and_names_transfers_again_after_failed_steps() -> None:
    bytewise = Bytewise(CONFIGS["classes"], TIERS["classes"])
    side = Side(bytewise, TierFaults(late=0.5, most_steps=8, seed=3))
    stores = [copies_of([(number, 0, 2 + number % 6, 2 + number)]) for number in range(6)]
    named = [side.execute(small_step(number, stores=stores[number]))[0] for number in range(6)]
    assert 0 < len([one for some in named for one in some]) < 6
    again = [one for some in named[2:] for one in some]
    after = side.execute(small_step(6, after=1))[0]  # results of 2 .. 5 were thrown away
    assert sorted(after) == sorted({*range(6)} - {one for some in named[:2] for one in some})
    assert after[: len(again)] == again
    assert side.execute(small_step(7)) == ([], [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stores": copies_of([(9, 0, 1, 2)])}, "block 1 of group 0 is no block of the device"),
        ({"stores": copies_of([(9, 0, 2, 10)])}, "block 10 of group 0 is no block of the host tier"),
        ({"stores": copies_of([(9, 4, 2, 2)])}, "group 4 does not exist"),
        ({"stores": copies_of([(9, 0, 2, 3), (10, 0, 4, 3)])}, "block 3 of group 0 on the host tier is written twice"),
        ({"stores": copies_of([(9, 0, 2, 6), (10, 0, 4, 7), (9, 0, 4, 8)])}, "transfer 9 .* next to each other"),
        ({"tier_copies": (Copy("before", 0, 2, 0, "move"),)}, "block 0 of group 0 is no block of the host tier"),
        # blocks of transfers 1 (host block 5) and 2 (device block 6) that are late
        ({"stores": copies_of([(9, 0, 2, 5)])}, "of the host tier are used while transfer 1 runs"),
        ({"stores": copies_of([(9, 0, 6, 2)])}, "of the device are used while transfer 2 runs"),
        ({"loads": copies_of([(9, 0, 5, 2)])}, "of the host tier are used while transfer 1 runs"),
        ({"tier_copies": (Copy("before", 0, 5, 7, "move"),)}, "of the host tier are used while transfer 1 runs"),
        ({"zero": np.array([(0, 6)], np.int32)}, "of the device are used while transfer 2 runs"),
        ({"copies": (Copy("before", 0, 6, 2, "move"),)}, "of the device are used while transfer 2 runs"),
        ({"loads": copies_of([(1, 0, 7, 2)])}, "transfer 1 is outstanding"),
    ],
)
def test_fake_tier_refuses_steps_that_do_not_fit(fields: dict[str, object], message: str) -> None:
    side = Side(Bytewise(CONFIGS["classes"], TIERS["classes"]), TierFaults(late=1.0, most_steps=1))
    late = small_step(0, stores=copies_of([(1, 0, 3, 5)]), loads=copies_of([(2, 0, 2, 6)]))
    assert side.execute(late) == ([], [])
    with pytest.raises(ContentError, match=message):
        side.execute(small_step(1, (), **fields))


def test_fake_worker_without_a_tier_refuses_transfers() -> None:
    config = CONFIGS["classes"]
    step = small_step(0, stores=copies_of([(1, 0, 3, 5)]))
    with pytest.raises(ContentError, match="step 0 has transfers, but the worker has no host tier"):
        FakeWorker(config, digest_model(config)).execute(step)
    with pytest.raises(ConfigError, match="the host tier has other groups"):
        FakeWorker(config, digest_model(config), tier=TIERS["one size"])
    worker = FakeWorker(config, digest_model(config), tier=TIERS["classes"])
    result = worker.execute(step)
    assert (result.arrived.tolist(), result.lost.tolist()) == ([1], [])
