"""Runs of keys: a look-up gives what asking key by key gives, whatever was added, lost and moved in between."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from hybridkv.cache.index import LEAST_KEYS, KeyRuns, PrefixIndex
from hybridkv.cache.keys import BlockKeys

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


def test_what_was_found_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_hole_ends_it_and_what_lies_behind_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockKeys(1000)
    index = blocks.indexes[0]
    blocks.publish(0, np.arange(1, 301, dtype=np.int32), KEYS[:300])
    index.leading_run(KEYS[:300])
    blocks.evict(np.array([201], np.int32))
    assert index.leading_run(KEYS[:300]).tolist() == list(range(1, 201))
    blocks.publish(0, np.array([500], np.int32), KEYS[200:201])
    assert index.leading_run(KEYS[:300]).tolist() == [*range(1, 201), 500, *range(202, 301)]
    met = asked(monkeypatch)
    assert index.leading_run(KEYS[:300]).tolist() == [*range(1, 201), 500, *range(202, 301)]
    assert met["asked"] == 0


def test_prompts_that_part_have_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockKeys(1000)
    index = blocks.indexes[0]
    one, other = KEYS[:300], [*KEYS[:100], *KEYS[1000:1200]]
    blocks.publish(0, np.arange(1, 301, dtype=np.int32), one)
    blocks.publish(0, np.arange(401, 601, dtype=np.int32), other[100:])
    wanted = [list(range(1, 301)), [*range(1, 101), *range(401, 601)]]
    assert [index.leading_run(keys).tolist() for keys in (one, other)] == wanted
    met = asked(monkeypatch)
    for _ in range(3):
        assert [index.leading_run(keys).tolist() for keys in (one, other)] == wanted
    assert met["asked"] == 0


def test_prompts_of_one_length_that_part_lengthen_only_their_own_runs() -> None:
    """The first run is as long as what was found of the other prompt, in two runs, and holds other keys."""
    blocks = BlockKeys(1000)
    index = blocks.indexes[0]
    one, other = KEYS[:300], [*KEYS[:100], *KEYS[1000:1201]]
    blocks.publish(0, np.arange(1, 301, dtype=np.int32), one)
    blocks.publish(0, np.arange(401, 601, dtype=np.int32), other[100:300])
    for keys in (one, other):
        assert len(index.leading_run(keys)) == 300
    blocks.publish(0, np.array([601], np.int32), other[300:])
    for _ in range(2):
        assert index.leading_run(other).tolist() == [*range(1, 101), *range(401, 602)]
    assert index.leading_run(one).tolist() == list(range(1, 301))
    blocks.evict(np.array([450], np.int32))
    assert index.leading_run(other).tolist() == [*range(1, 101), *range(401, 450)]


class Compared(bytes):
    """A key that counts how often it is asked whether it is another."""

    asked = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.asked += 1
        return bytes.__eq__(self, other)


@pytest.mark.parametrize(("parted", "most"), [(400, 6), (399, 16), (250, 16), (65, 16)])
def test_runs_are_compared_by_their_ends(parted: int, most: int) -> None:
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
def test_random_histories(seed: int, even: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert index._runs.num_keys == sum(len(run.keys) for run in index._runs._runs.values())
        assert index._runs.num_keys <= 2 * len(index) + 200 + 400 * (act >= 0.35)
    assert compared > 10 * LEAST_KEYS


def test_stamps_are_looked_at_before_they_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**31 losses later a block that was lost would seem to have been kept."""
    monkeypatch.setattr("hybridkv.cache.index._MOST_EVICTIONS", 5)
    blocks = BlockKeys(1000)
    runs = KeyRuns(blocks)
    runs.add(KEYS[:100], 0, np.arange(1, 101, dtype=np.int32))
    blocks.publish(0, np.arange(1, 201, dtype=np.int32), KEYS[:200])
    blocks.evict(np.arange(90, 100, dtype=np.int32))
    assert runs.find(KEYS[1000:1100], 100) == []
    assert runs.num_keys == 89
    assert {run.evictions for run in runs._runs.values()} == {blocks.evictions}
