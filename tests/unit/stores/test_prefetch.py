"""Prefixes in stores, found and held by threads: rules against token sets, lost blocks, bounds, drops, counts."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from disk_blocks import IDENTITY
from hybridkv.errors import CacheError, ConfigError
from hybridkv.stores import DiskStore, MemoryStore
from hybridkv.stores.prefetch import GroupNeeds, Prefetcher, PrefetchLimits, PrefixRules, Rows, pieces_of
from hybridkv.stores.stack import StoreStack
from store_contract import CONTRACT, Kept

MiB = 1 << 20
FULL, WINDOW, CHUNK, STATE = (
    GroupNeeds(4), GroupNeeds(4, window=9), GroupNeeds(4, chunk=12), GroupNeeds(8, is_state=True),
)  # fmt: skip
RULES = PrefixRules((FULL, WINDOW, STATE), unit=8, hash_tokens=4)
SIZES = (24, 40, 100)
HASHES = [b"hash %d" % number for number in range(16)]


def needed(group: GroupNeeds, start: int, end: int) -> set[int]:
    """Columns, token by token: what the next token at ``end`` reads and the request lacks."""
    if group.is_state:
        return {end // group.block_tokens - 1}
    first = 0
    if group.window is not None:
        first = end - group.window
    if group.chunk is not None:
        first = end - end % group.chunk
    return {token // group.block_tokens for token in range(max(first, start), end)}


def test_longest_prefix_equals_a_search_by_tokens() -> None:
    rng, longer = random.Random(3), 0
    for _ in range(3000):
        groups = tuple(
            GroupNeeds(rng.choice((2, 4)), *rng.choice([(None, None, False), (rng.randrange(9), None, False),
                       (None, rng.choice((4, 6, 12)), False), (None, None, True)]))
            for _ in range(rng.randint(1, 4))
        )  # fmt: skip
        rules = PrefixRules(groups, unit=4 * rng.choice((1, 2)), hash_tokens=2)
        start, most = rules.unit * rng.randrange(3), rng.randrange(60)
        share = rng.choice((0.5, 0.8, 0.97))
        there = {(g, c) for g in range(len(groups)) for c in range(40) if rng.random() < share}
        wanted = start
        for end in range(start + 1, most + 1):
            have = all((g, c) in there for g, group in enumerate(groups) for c in needed(group, start, end))
            if end % rules.unit == 0 and have:
                wanted = end
        assert rules.longest(start, most, lambda *at: at in there) == wanted, (groups, start, most)  # noqa: B023
        longer += wanted > start
    assert longer > 500


def test_hash_of_a_block_ends_where_the_block_ends() -> None:
    for start in (0, 8, 16):
        hashes = HASHES[start // 4 :]
        for group, needs in enumerate(RULES.groups):
            for column in range(start // needs.block_tokens, 64 // needs.block_tokens):
                end = (column + 1) * needs.block_tokens
                assert RULES.hash_of(hashes, start, group, column) == HASHES[end // 4 - 1]


# -- stacks


def stack(folder: Path) -> Kept:
    sizes = [256, 4096, 16_384, 70_000, 300_000, 2 * MiB + 1, 8 * MiB]

    def opened() -> StoreStack:
        disk = DiskStore(folder, 64 * MiB, IDENTITY, sizes)
        return StoreStack({"host": MemoryStore(16 * MiB), "disk": disk})

    return Kept(opened, is_shared=False)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda one: one.__name__)
def test_stack_keeps_the_contract(tmp_path: Path, check: Callable[[Kept], None]) -> None:
    check(stack(tmp_path))


def test_block_of_the_slower_store_is_kept_in_the_faster_one() -> None:
    fast, slow = MemoryStore(100), MemoryStore(1000)
    stores = StoreStack({"fast": fast, "slow": slow})
    slow.put([b"a", b"b"], [memoryview(b"first"), memoryview(b"other")])
    fast.put([b"b"], [memoryview(b"other")])
    into = [bytearray(5) for _ in range(3)]
    assert stores.get([b"a", b"b", b"c"], [memoryview(one) for one in into]) == [True, True, False]
    assert into[:2] == [b"first", b"other"]
    assert fast.exists([b"a", b"b", b"c"]) == [True, True, False]
    counts = stores.take_counts()
    assert {name: counts[name] for name in counts if "seconds" not in name} == {
        "fast_found_blocks": 1, "fast_found_bytes": 5, "fast_missed_blocks": 2,
        "slow_found_blocks": 1, "slow_found_bytes": 5, "slow_missed_blocks": 1,
    }  # fmt: skip
    assert counts["slow_found_seconds"] > 0
    assert stores.take_counts() == {}


def test_block_is_stored_only_where_it_is_missing() -> None:
    fast, slow = MemoryStore(100), MemoryStore(1000)
    stores = StoreStack({"fast": fast, "slow": slow})
    slow.put([b"a"], [memoryview(b"first")])
    assert stores.put([b"a", b"b"], [memoryview(b"first"), memoryview(b"x" * 101)]) == [True, True]
    assert slow.statistics().stored == 2
    assert fast.statistics().dropped == 1
    assert stores.take_counts()["fast_dropped_blocks"] == 1


def test_stack_without_stores_is_rejected() -> None:
    with pytest.raises(ConfigError, match="at least one store"):
        StoreStack({})


# -- prefetching


class Loose(MemoryStore):
    """A store that loses some blocks between exists and get, and waits until it may answer."""

    def __init__(self) -> None:
        super().__init__(MiB)
        self.lost, self.may_answer, self.is_asked = set[bytes](), threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.may_answer.set()

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        self.is_asked.set()
        self.may_answer.wait(10)
        if self.error is not None:
            raise self.error
        return [one not in self.lost and found for one, found in zip(keys, super().get(keys, into), strict=True)]

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        self.may_answer.wait(10)
        return super().put(keys, blocks)


def np_rows(rows: int, size: int) -> Rows:
    return np.empty((rows, size), np.uint8)


def key_of(group: int, column: int) -> bytes:
    return b"%d/%d" % (group, column)


def content(group: int, column: int) -> bytes:
    return random.Random(group * 100 + column).randbytes(SIZES[group])


@pytest.fixture
def store() -> Loose:
    made = Loose()
    for group, needs in enumerate(RULES.groups):
        columns = range(64 // needs.block_tokens)
        made.put([key_of(group, one) for one in columns], [memoryview(content(group, one)) for one in columns])
    return made


@pytest.fixture
def prefetcher(store: Loose) -> Iterator[Prefetcher]:
    made = Prefetcher(StoreStack({"host": store}), RULES, SIZES, PrefetchLimits(2000, 300), np_rows)
    yield made
    store.may_answer.set()
    made.close()


def answered(prefetcher: Prefetcher, number: int) -> int:
    for _ in range(1000):
        answers = prefetcher.answers(0.01)
        if number in answers:
            return answers[number]
    raise AssertionError("no answer")


def test_found_prefix_is_held_with_the_bytes_of_each_block(prefetcher: Prefetcher, store: Loose) -> None:
    prefetcher.find(7, 8, 47, key_of)
    assert answered(prefetcher, 7) == 40
    store.lost = {key_of(group, column) for group in range(3) for column in range(16)}  # too late to harm
    found = prefetcher.take(7)
    assert found is not None
    assert (found.start, found.end) == (8, 40)
    assert found.columns == (range(2, 10), range(7, 10), range(4, 5))
    for group, (columns, rows) in enumerate(zip(found.columns, found.rows, strict=True)):
        assert [row.tobytes() for row in rows] == [content(group, column) for column in columns]
    assert found.num_bytes == sum(rows.nbytes for rows in found.rows)
    assert prefetcher.take(7) is None


@pytest.mark.parametrize(("lost", "end"), [((0, 9), 32), ((1, 9), 32), ((1, 0), 40), ((2, 4), 32), ((0, 2), 8)])
def test_lost_block_leaves_the_longest_prefix_without_it(
    prefetcher: Prefetcher, store: Loose, lost: tuple[int, int], end: int
) -> None:
    store.lost = {key_of(*lost)}
    prefetcher.find(0, 8, 47, key_of)
    assert answered(prefetcher, 0) == end
    counts = prefetcher.take_counts()
    assert counts.get("lost_blocks", 0) == (0 if lost == (1, 0) else 1)
    assert counts.get("found_tokens", 0) == end - 8
    prefetcher.drop(0)
    assert prefetcher._held_bytes == 0


def test_prefix_is_cut_to_the_memory_that_is_left_and_grows_when_it_is_given_back(prefetcher: Prefetcher) -> None:
    ends = []
    for number in range(6):  # 40 tokens hold 460 bytes, 2000 bytes in all
        prefetcher.find(number, 0, 47, key_of)
        ends.append(answered(prefetcher, number))
    assert ends[:4] == [40] * 4
    assert ends[4] == ends[5] == 0
    assert prefetcher.take_counts()["cut_finds"] >= 2
    prefetcher.drop(0)
    prefetcher.find(6, 0, 47, key_of)
    assert answered(prefetcher, 6) == 40


def test_dropped_look_up_gives_its_memory_back_after_it_has_ended(prefetcher: Prefetcher, store: Loose) -> None:
    for number in range(12):  # as many bytes as no 12 look-ups may hold
        store.may_answer.clear()
        store.is_asked.clear()
        prefetcher.find(number, 0, 47, key_of)
        assert store.is_asked.wait(10)
        prefetcher.drop(number)
        store.may_answer.set()
        assert prefetcher.answers() == {}
    prefetcher.find(12, 0, 47, key_of)
    assert answered(prefetcher, 12) == 40


@pytest.mark.parametrize("error", [CacheError("closed"), OSError("gone"), MemoryError(), RuntimeError("of a device")])
def test_store_that_raises_is_a_miss_and_holds_no_memory(
    prefetcher: Prefetcher, store: Loose, error: Exception
) -> None:
    store.error = error
    for number in range(12):
        prefetcher.find(number, 0, 47, key_of)
        assert answered(prefetcher, number) == 0
    store.error = None
    prefetcher.find(12, 0, 47, key_of)
    assert answered(prefetcher, 12) == 40
    assert prefetcher.take_counts()["failed_finds"] == 12


def test_stores_beyond_the_bound_are_dropped_counted_and_not_copied(prefetcher: Prefetcher, store: Loose) -> None:
    store.may_answer.clear()
    copied = list[int]()

    def stage(number: int) -> tuple[Rows, Callable[[], None]]:
        copied.append(number)
        return np.full((1, 100), number, np.uint8), lambda: None

    for number in range(5):
        prefetcher.store(2, [b"new %d" % number], lambda number=number: stage(number))  # type: ignore[misc]
    assert copied == [0, 1, 2]
    store.may_answer.set()
    prefetcher._writer.submit(lambda: None).result()
    prefetcher.store(2, [b"new 5"], lambda: stage(5))
    assert copied == [0, 1, 2, 5]
    prefetcher.close()
    counts = prefetcher.take_counts()
    assert (counts["dropped_blocks"], counts["dropped_bytes"], counts["host_stored_blocks"]) == (2, 200, 4)


def test_blocks_are_read_after_they_have_arrived(prefetcher: Prefetcher, store: Loose) -> None:
    rows = np.zeros((2, 100), np.uint8)

    def ready() -> None:
        rows[:] = [[1], [2]]

    prefetcher.store(2, [b"x", b"y"], lambda: (rows, ready))
    prefetcher._writer.shutdown()
    into = [bytearray(100), bytearray(100)]
    assert store.get([b"x", b"y"], [memoryview(one) for one in into]) == [True, True]
    assert into == [b"\1" * 100, b"\2" * 100]


def test_large_block_is_found_with_all_its_pieces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.stores.prefetch.MOST_PIECE_BYTES", 30)
    assert [one.stop - one.start for one in pieces_of(100)] == [25] * 4
    assert [one.stop - one.start for one in pieces_of(61)] == [21, 21, 19]
    assert pieces_of(30) == [slice(0, 30)]
    for missing in (None, *range(4)):
        store = Loose()
        made = Prefetcher(StoreStack({"host": store}), RULES, SIZES, PrefetchLimits(2000, 3000), np_rows)
        for group, needs in enumerate(RULES.groups):
            columns = range(40 // needs.block_tokens)
            rows = np.stack([np.frombuffer(content(group, one), np.uint8) for one in columns])
            made.store(group, [key_of(group, one) for one in columns], lambda rows=rows: (rows, lambda: None))  # type: ignore[misc]
        made._writer.submit(lambda: None).result()
        keys = [one for one in store._blocks if one.startswith(key_of(2, 4))]
        assert len(keys) == 4
        if missing is not None:
            store.remove([keys[missing]])
        made.find(0, 0, 47, key_of)
        assert answered(made, 0) == (40 if missing is None else 32)
        found = made.take(0)
        assert found is not None
        assert found.rows[2].tobytes() == content(2, 4 if missing is None else 3)
        made.close()
