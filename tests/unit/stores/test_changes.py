"""What stores tell of their blocks is what they have, whatever is put, evicted, removed or damaged."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridkv.stores import DiskStore, MemoryStore
from hybridkv.stores.changes import Change, Changes, Hears

KEYS = [bytes([number]) for number in range(1, 60)]
Open = Callable[[Path, Hears], MemoryStore | DiskStore]


def memory(folder: Path, heard: Hears) -> MemoryStore:
    del folder
    return MemoryStore(2_000, heard)


def disk(folder: Path, heard: Hears) -> DiskStore:
    return DiskStore(folder / "disk", 600_000, b"identity", [100, 20_000], heard)


def following(there: set[bytes], changes: list[Change]) -> set[bytes]:
    for _, key, is_there in changes:
        (there.add if is_there else there.discard)(key)
    return there


@pytest.mark.parametrize("opened", [memory, disk])
def test_changes_follow_the_blocks_of_a_store(opened: Open, tmp_path: Path) -> None:
    draw, changes, there = random.Random(0), Changes(), set[bytes]()
    gone = 0
    with opened(tmp_path, changes.of("x")) as store:
        for _ in range(300):
            some = draw.sample(KEYS, draw.randint(1, 5))
            size = draw.choice((100, 20_000)) if opened is disk else draw.choice((100, 300, 3_000))
            match draw.randrange(4):
                case 0 | 1:
                    store.put(some, [memoryview(bytes([key[0]]) * size) for key in some])
                case 2:
                    store.get(some, [memoryview(bytearray(size)) for _ in some])
                case _:
                    store.remove(some[:1])
            told = changes.take()
            gone += sum(not one.is_there for one in told)
            assert {one.store for one in told} <= {"x"}
            following(there, told)
            assert [key in there for key in KEYS] == store.exists(KEYS)
        assert gone > 50
        assert store.statistics().evicted > 10, "nothing made room"


def test_damaged_block_is_told_as_gone(tmp_path: Path) -> None:
    changes = Changes()
    with disk(tmp_path, changes.of("x")) as store:
        store.put([b"k"], [memoryview(b"block" * 20)])
        blocks = max((tmp_path / "disk").iterdir(), key=lambda one: one.stat().st_size)
        content = blocks.read_bytes()
        blocks.write_bytes(content.replace(b"block", b"black"))
        assert store.get([b"k"], [memoryview(bytearray(100))]) == [False]
    assert changes.take() == [Change("x", b"k", is_there=True), Change("x", b"k", is_there=False)]


def test_block_of_an_earlier_process_is_told_when_it_is_read(tmp_path: Path) -> None:
    changes = Changes()
    with disk(tmp_path, Changes().of("x")) as store:
        store.put([b"k"], [memoryview(b"block" * 20)])
    with disk(tmp_path, changes.of("x")) as store:
        assert changes.take() == []
        assert store.get([b"k"], [memoryview(bytearray(100))]) == [True]
    assert changes.take() == [Change("x", b"k", is_there=True)]
