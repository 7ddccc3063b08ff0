"""Engines of one machine that each write a folder and read those of the others."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from disk_blocks import IDENTITY, KEYS, SIZES, abandon, content, get, open_store, put
from hybridkv.errors import CacheError, ConfigError
from hybridkv.stores import BlockStore, DiskFolder, DiskStore, disk_view
from hybridkv.stores.disk_folders import DiskFolders
from hybridkv.stores.disk_view import DiskView

ROOMY = 1 << 22
BLOCKS = {key: content(key, 1) for key in KEYS[:6]}


@pytest.fixture(autouse=True)
def _looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_view, "_REST", 0)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[BlockStore]]:
    names = [tmp_path / name for name in "abc"]
    made = [
        DiskFolder(one, ROOMY, [other for other in names if other != one]).open(IDENTITY, SIZES)  # type: ignore[arg-type]  # a list, as users give it
        for one in names
    ]
    yield made
    for one in made:
        one.close()


def files(stores: list[BlockStore]) -> list[DiskStore]:
    return [one._own for one in stores if isinstance(one, DiskFolders)]


def found(store: BlockStore) -> list[bool]:
    """Whether each block arrives, all in one call; those that do have their bytes."""
    buffers = [bytearray(len(block)) for block in BLOCKS.values()]
    arrived = store.get([*BLOCKS], [memoryview(buffer) for buffer in buffers])
    assert all(buffer == block for buffer, block, here in zip(buffers, BLOCKS.values(), arrived, strict=True) if here)
    return arrived


def test_each_block_is_found_by_all_and_written_by_one(three: list[BlockStore]) -> None:
    """Two blocks in each folder: one call reads from all of them."""
    parts = [dict([*BLOCKS.items()][at : at + 2]) for at in (0, 2, 4)]
    for store, part in zip(three, parts, strict=True):
        assert not any(store.exists([*part]))
        assert all(store.put([*part], [memoryview(block) for block in part.values()]))
        assert all(one.exists([*part]) == [True, True] for one in three)
    assert [found(one) for one in three] == [[True] * 6] * 3
    assert [one.exists([*BLOCKS]) for one in files(three)] == [[key in part for key in BLOCKS] for part in parts]


def test_blocks_of_an_engine_that_died_are_found_until_its_successor_evicts_them(
    tmp_path: Path, three: list[BlockStore]
) -> None:
    first, second, _ = files(three)
    put(first, BLOCKS)
    put(second, {KEYS[0]: BLOCKS[KEYS[0]]})
    abandon(first)  # the lock goes with the process
    assert found(three[1]) == [True] * 6
    with open_store(tmp_path / "a", ROOMY) as again:
        again.remove([*BLOCKS])
        assert found(three[1]) == three[1].exists([*BLOCKS]) == [True] + [False] * 5


def test_damaged_block_of_another_engine_is_a_miss_and_can_be_written_again(
    tmp_path: Path, three: list[BlockStore]
) -> None:
    first, second, _ = files(three)
    put(first, BLOCKS)
    at = first._geometry.block_offset(first._slots.entries[KEYS[0]].place)
    with (tmp_path / "a" / "blocks").open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([BLOCKS[KEYS[0]][5] ^ 1]))
    assert three[1].exists([KEYS[0]]) == [True]
    assert found(three[1]) == [False] + [True] * 5
    assert three[1].exists([KEYS[0]]) == [False], "so a spill writes it"
    assert put(second, {KEYS[0]: BLOCKS[KEYS[0]]}) == [True]
    assert found(three[1]) == [True] * 6


def test_folder_of_another_identity_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, identity in (("a", IDENTITY), ("b", b"other")):
        with DiskStore(tmp_path / name, ROOMY, identity, SIZES) as other:
            put(other, BLOCKS)
    own = open_store(tmp_path / "own", ROOMY)
    views = [partial(DiskView, tmp_path / name, ROOMY, IDENTITY, SIZES) for name in "ba"]
    store = DiskFolders(own, views)
    with caplog.at_level(logging.WARNING):
        assert [found(store) for _ in range(3)] == [[True] * 6] * 3
    assert len(caplog.records) == 1
    assert "was made for another model" in caplog.text
    store.close()


def test_closed_folders_reject_calls_and_let_others_open_them(tmp_path: Path) -> None:
    store = DiskFolder(tmp_path / "a", ROOMY, (tmp_path / "b",)).open(IDENTITY, SIZES)
    with pytest.raises(ConfigError):
        open_store(tmp_path / "a", ROOMY)
    store.close()
    with pytest.raises(CacheError):
        store.exists(KEYS)
    with open_store(tmp_path / "a", ROOMY) as again:
        assert get(again, KEYS[0], 3) is None


def test_look_ups_in_folders_of_others_may_take_long() -> None:
    assert DiskFolder("a", 1).looks_up_at_once
    assert not DiskFolder("a", 1, ("b",)).looks_up_at_once
    with pytest.raises(ConfigError, match="others must be a list"):
        DiskFolder("a", 1, "b")  # type: ignore[arg-type]  # what a user might give


def test_each_rank_of_each_replica_writes_one_folder_and_reads_all_others() -> None:
    replicas = [DiskFolder("a", 1, ("b",)), DiskFolder("b", 1, ("a",))]
    found = [of.of_rank(rank, 2) for of in replicas for rank in range(2)]
    assert [str(one.path) for one in found] == ["a", "a/rank-1", "b", "b/rank-1"]
    for one in found:
        assert sorted(map(str, (one.path, *one.others))) == ["a", "a/rank-1", "b", "b/rank-1"]
    assert DiskFolder("a", 1).of_rank(0, 1).looks_up_at_once
