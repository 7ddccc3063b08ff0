"""Runs of keys: a look-up gives what asking key by key gives, whatever was added, lost and moved in between."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from hybridkv.cache.index import LEAST_KEYS, PrefixIndex
from hybridkv.cache.keys import WRITTEN, BlockKeys

KEYS = [number.to_bytes(32, "big") for number in range(100_000)]


def one_by_one(index: PrefixIndex, keys: list[bytes]) -> list[int]:
    found: list[int] = []
    for key in keys:
        block = index.get(key)
        if block is None:
            break
        found.append(block)
    return found


def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many keys were asked for one by one."""
    met: Counter[str] = Counter()
    own = PrefixIndex._asked

    def counted(self: PrefixIndex, keys: list[bytes], first: int, stop: int) -> object:
        found = own(self, keys, first, stop)
        met["asked"] += len(found)
        return found

    monkeypatch.setattr(PrefixIndex, "_asked", counted)
    return met


def test_key_run_found_once_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockKeys(1000)
    index = blocks.indexes[0]
    blocks.publish(0, np.arange(1, 301, dtype=np.int32), KEYS[:300])
    met = asked(monkeypatch)
    assert index.leading_run(KEYS[:400]).tolist() == list(range(1, 301))
    assert met["asked"] == 300
    assert index.leading_run(KEYS[:250]).tolist() == list(range(1, 251))
    assert index.leading_run(KEYS[:400], 270).tolist() == list(range(1, 271))
    assert met["asked"] == 300
    blocks.publish(0, np.arange(301, 311, dtype=np.int32), KEYS[300:310])
    for _ in range(2):
        assert index.leading_run(KEYS[:400]).tolist() == list(range(1, 311))
        assert met["asked"] == 310


class Compared(bytes):
    """A key that counts how often it is asked whether it is another."""

    asked = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.asked += 1
        return bytes.__eq__(self, other)


@pytest.mark.parametrize(("parted", "most"), [(400, 6), (399, 16), (250, 16), (65, 16)])
def test_key_runs_are_compared_by_their_last_keys(parted: int, most: int) -> None:
    """A key says all that lies before it: one comparison where all agree, a handful where prompts part."""
    blocks = BlockKeys(1000)
    index = blocks.indexes[0]
    blocks.publish(0, np.arange(1, 401, dtype=np.int32), KEYS[:400])
    index.leading_run(KEYS[:400])
    fresh = [Compared(key) for key in [*KEYS[:parted], *KEYS[1000 : 1400 - parted]]]
    before = Compared.asked
    assert index.leading_run(fresh).tolist() == list(range(1, parted + 1))
    assert Compared.asked - before <= most


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_key_runs_in_random_histories_match_single_look_ups(
    seed: int, even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Duplicates, holes, moves and clearing among prompts that share beginnings; even: of few different lengths."""
    random = Random(seed)
    blocks = BlockKeys(4000)
    index = blocks.indexes[0]
    prompts = [KEYS[:400]]
    for number in range(12):
        base = random.choice(prompts)
        first = 1000 * (number + 1)
        shared = random.randrange(0, len(base), 100) if even else random.randrange(len(base))
        more = random.choice((100, 101, 201)) if even else random.choice((10, 90, 300))
        prompts.append([*base[:shared], *KEYS[first : first + more]])
    monkeypatch.setattr("hybridkv.cache.index._MORE_IN_RUNS", 200)
    free = list(range(1, 4000))
    random.shuffle(free)
    carried: dict[int, bytes] = {}
    met, compared = asked(monkeypatch), 0
    for turn in range(400):
        act = random.random()
        if act < 0.35 and len(free) > 500:
            keys = random.choice(prompts)
            first = len(one_by_one(index, keys)) if random.random() < 0.8 else random.randrange(len(keys))
            keys = keys[first : first + random.choice((1, 50, 400))]
            ids = [free.pop() for _ in keys]
            blocks.publish(0, np.array(ids, np.int32), keys)
            carried |= dict(zip(ids, keys, strict=True))
        elif act < 0.5 and carried:
            gone = random.sample(sorted(carried), min(len(carried), random.choice((1, 1, 3, 200))))
            blocks.evict(np.array(gone, np.int32))
            for block in gone:
                del carried[block]
            free += gone
        elif act < 0.55 and carried and free:
            source, target = random.choice(sorted(carried)), free.pop()
            blocks.follow(np.array([[source, target]]))
            carried[target] = carried.pop(source)
            free.append(source)
        elif act < 0.555:
            blocks.clear()
            free += carried
            carried.clear()
        else:
            keys = random.choice(prompts)
            keys = keys[: len(keys) - len(keys) % 100 if even and turn % 2 else random.randrange(1, len(keys) + 1)]
            wanted, before = one_by_one(index, keys), met["asked"]
            assert index.leading_run(keys).tolist() == wanted, turn
            compared += len(wanted) - (met["asked"] - before)
        assert index.keys_in_runs == sum(len(run.keys) for run in index._runs.values())
        assert index.keys_in_runs <= 2 * len(index) + 200 + 400 * (act >= 0.35)
    assert compared > 10 * LEAST_KEYS


def test_key_run_stamps_are_checked_before_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**31 losses later a block that was lost would seem to have been kept."""
    monkeypatch.setattr("hybridkv.cache.index._MOST_EVICTIONS", 5)
    blocks = BlockKeys(1000)
    index = PrefixIndex(blocks)
    index._add_run(KEYS[:100], 0, np.arange(1, 101, dtype=np.int32))
    blocks.publish(0, np.arange(1, 201, dtype=np.int32), KEYS[:200])
    blocks.evict(np.arange(90, 100, dtype=np.int32))
    assert index._find_runs(KEYS[1000:1100], 100) == []
    assert index.keys_in_runs == 89
    assert {run.evictions for run in index._runs.values()} == {blocks.evictions}


def test_step_that_ran_marks_no_block_that_a_later_step_writes() -> None:
    """Block 4 lost its key and got another one while step 1 was in flight."""
    keys = BlockKeys(10)
    keys.publish(0, [3, 4, 5, 6], KEYS[:4], step=1)
    keys.evict_few([4, 6])
    keys.publish(0, [4, 6], KEYS[4:6], step=2)
    keys.mark_few_written([3, 4], 1)
    keys.mark_written(np.array([5, 6], np.int32), 1)
    assert [keys.step_of(block) for block in (3, 4, 5, 6)] == [WRITTEN, 2, WRITTEN, 2]
    keys.mark_few_written([4, 6], 2)
    assert keys.all_written(np.array([3, 4, 5, 6], np.int32))
