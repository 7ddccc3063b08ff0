import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from disk_blocks import IDENTITY, KEYS, SIZES, State, abandon, applied, calls, content, do, get, open_store, put
from how_much import how_many
from hybridkv.errors import CacheError, ConfigError
from hybridkv.stores import BlockStore, DiskStore, disk_file


def views(buffers: list[bytearray]) -> list[memoryview]:
    return [memoryview(buffer) for buffer in buffers]


def require_equal(store: DiskStore, state: State, *, evicts: bool) -> int:
    """Compare all blocks with ``state``; return how many are found."""
    found = 0
    for key in KEYS:
        block = state.get(key)
        (known,) = store.exists([key])
        assert block is not None or not known
        if block is not None:
            assert get(store, key, len(block)) == (block if known else None)
            assert known or evicts
        found += known
    assert found == len(store) == store.statistics().blocks
    store.check()
    return found


@pytest.mark.parametrize("max_bytes", [1 << 18, 1 << 19, 1 << 22])
@pytest.mark.parametrize("seed", range(how_many(20)))
def test_random_calls_equal_a_dictionary(tmp_path: Path, seed: int, max_bytes: int) -> None:
    store, state, made = open_store(tmp_path, max_bytes), State(), random.Random(seed)
    for number, call in zip(range(120), calls(seed), strict=False):
        before = set(store._slots.entries)
        answers = do(store, call)
        if call.removed:
            assert answers == [key in before for key in call.removed]
        else:
            assert all(answers)
        state = applied(state, call)
        if number % 10 == 0:
            require_equal(store, state, evicts=max_bytes < 1 << 22)
            assert (tmp_path / "blocks").stat().st_size <= max_bytes
        if made.random() < 0.1:
            (abandon if made.random() < 0.5 else DiskStore.close)(store)
            store = open_store(tmp_path, max_bytes)
    found = require_equal(store, state, evicts=max_bytes < 1 << 22)
    assert found >= 3
    store.close()


def test_many_blocks_in_one_call_arrive_whole(tmp_path: Path) -> None:
    blocks = {b"%d" % number: content(b"%d" % number, 1) for number in range(300)}
    with open_store(tmp_path, 1 << 24) as store:
        assert put(store, blocks) == [True] * 300
        buffers = [bytearray(len(block)) for block in [*blocks.values(), b"never"]]
        assert store.get([*blocks, b"never"], views(buffers)) == [*[True] * 300, False]
        assert buffers[:-1] == list(blocks.values())
        statistics = store.statistics()
        assert (statistics.found, statistics.missed, statistics.stored, statistics.dropped) == (300, 1, 300, 0)
        assert statistics.block_bytes == statistics.found_bytes == sum(map(len, blocks.values()))


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("length", [4096, 4000])
def test_adjacent_blocks_are_one_call_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, length: int
) -> None:
    blocks = {b"%d" % number: bytes([number]) * length for number in range(100)}
    with open_store(tmp_path, 1 << 22, (length,)) as store:
        put(store, {b"first": bytes(length)})  # gives the slab its size
        real, offsets = getattr(os, call), list[int]()

        def counted(file: int, buffers: list[memoryview], at: int) -> int:
            offsets.append(at)
            return int(real(file, buffers, at))

        monkeypatch.setattr(os, call, counted)
        put(store, blocks)
        buffers = [bytearray(length) for _ in blocks]
        assert all(store.get([*blocks], views(buffers)))
    assert buffers == list(blocks.values())
    assert len(offsets) <= {"preadv": 1, "pwritev": 3}[call]  # blocks, records, and the order when it is closed


@pytest.mark.parametrize("kept", [1, 3, 1000])
def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """The system may read or write fewer bytes than it was asked to."""
    real = os.preadv
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, at: os.pwrite(file, b"".join(buffers)[: kept * 7], at))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: real(file, [buffers[0][: kept * 7]], at))
    blocks = {key: content(key, 2)[:600] for key in KEYS[:4]}
    with open_store(tmp_path, 1 << 18) as store:
        assert put(store, blocks) == [True] * 4
        assert {key: get(store, key, len(block)) for key, block in blocks.items()} == blocks


# -- what is evicted


def lone(folder: Path) -> DiskStore:
    """A store of few slots of one page."""
    return DiskStore(folder, 96 << 10, IDENTITY, [4096])


def page(number: int) -> State:
    return {b"%d" % number: bytes([number]) * 4096}


def test_least_recently_used_block_is_evicted(tmp_path: Path) -> None:
    with lone(tmp_path) as store:
        number = 0
        while not store.statistics().evicted:
            put(store, page(number))
            number += 1
        assert store.exists([b"0", b"1"]) == [False, True]
        get(store, b"1", 4096)
        store.touch([b"2", b"never"])
        store.exists([b"3"])
        for one in range(number, number + 3):
            put(store, page(one))
        assert store.exists([b"1", b"2", b"3", b"4", b"5", b"6"]) == [True, True, False, False, False, True]


@pytest.mark.parametrize("end", ["close", "sync", "death"])
def test_order_of_use_survives_a_close_or_a_sync(tmp_path: Path, end: str) -> None:
    store = lone(tmp_path)
    for number in range(6):
        put(store, page(number))
    store.touch([b"0"])
    if end == "sync":
        store.sync()
    (DiskStore.close if end == "close" else abandon)(store)
    with lone(tmp_path) as after:
        number = 6
        while not after.statistics().evicted:
            put(after, page(number))
            number += 1
        assert after.exists([b"0", b"1"]) == ([False, True] if end == "death" else [True, False])


def test_sizes_take_slabs_from_each_other(tmp_path: Path) -> None:
    """After a store was full of one size, each other size soon has its share, and gives it back."""
    with open_store(tmp_path, 1 << 20) as store:
        for size in (*SIZES, *SIZES):
            blocks = {b"%d/%d" % (size, number): bytes([number % 251]) * size for number in range(3000000 // size)}
            for key, block in blocks.items():
                assert put(store, {key: block}) == [True]
            kept = sum(store.exists([*blocks])) * size
            assert kept > 0.7 * 2**20, f"blocks of {size} bytes have {kept} bytes of 1 MiB"
            store.check()


def test_two_sizes_in_use_share_the_store(tmp_path: Path) -> None:
    with open_store(tmp_path, 1 << 20) as store:
        for number in range(3000):
            put(store, {b"small %d" % number: bytes(5000), b"large %d" % number: bytes(40_000)})
        places = [entry.place.size for entry in store._slots.entries.values()]
        assert min(places.count(1), places.count(2)) >= 4


def test_batch_larger_than_the_store_keeps_what_fits(tmp_path: Path) -> None:
    with lone(tmp_path) as store:
        put(store, page(200))
        kept = put(store, {key: block for number in range(100) for key, block in page(number).items()})
        assert 5 < sum(kept) < 100
        assert kept == sorted(kept, reverse=True)
        assert [get(store, b"%d" % n, 4096) is not None for n in range(100)] == kept
        assert store.statistics().dropped == kept.count(False)
        store.check()


# -- damage


def filled(folder: Path) -> State:
    """Fill the store of ``folder`` with one block for each key, and close it."""
    blocks = {key: content(key, 0) for key in KEYS}
    with open_store(folder) as store:
        assert all(put(store, blocks))
    return blocks


def survivors(folder: Path, blocks: State) -> set[bytes]:
    """Keys whose block is found with its bytes; the others are not found."""
    with open_store(folder) as store:
        read = {key: get(store, key, len(block)) for key, block in blocks.items()}
        assert all(block in (None, blocks[key]) for key, block in read.items())
        left = {key for key, block in read.items() if block is not None}
        assert len(store) == len(left), "a damaged block is still known, or has another key"
        assert {key for key, known in zip(KEYS, store.exists(KEYS), strict=True) if known} == left
        fresh = {key: content(key, 9) for key in blocks}
        assert all(put(store, fresh))
        assert {key: get(store, key, len(block)) for key, block in fresh.items()} == fresh
        store.check()
    return left


def test_flipped_bit_loses_at_most_its_block(tmp_path: Path) -> None:
    blocks = filled(tmp_path / "whole")
    whole = (tmp_path / "whole" / "blocks").read_bytes()
    spans = {key: (whole.index(block), whole.index(block) + len(block)) for key, block in blocks.items()}
    regions = np.flatnonzero(np.frombuffer(whole, np.uint8)).tolist()
    made, lost = random.Random(3), 0
    small = [at for at in regions if not any(begin <= at < end for begin, end in spans.values())]
    for number in range(how_many(800)):
        at = made.choice(regions if number % 3 == 0 else small)
        image = bytearray(whole)
        image[at] ^= 1 << made.randrange(8)
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "blocks").write_bytes(image)
        if at < 4096:
            with pytest.raises(ConfigError, match=r"the header of .*blocks is damaged: delete .*bad, or give another"):
                open_store(tmp_path / "bad")
            continue
        gone = set(KEYS) - survivors(tmp_path / "bad", blocks)
        hit = {key for key, (begin, end) in spans.items() if begin <= at < end}
        assert gone == hit if hit else len(gone) <= 1
        lost += len(gone)
    assert lost


def test_cut_file_loses_only_what_was_cut(tmp_path: Path) -> None:
    blocks = filled(tmp_path / "whole")
    whole = (tmp_path / "whole" / "blocks").read_bytes()
    ends = {key: whole.index(block) + len(block) for key, block in blocks.items()}
    made = random.Random(4)
    places = [0, 1, 4095, 4096, 8192, *(made.randrange(len(whole)) for _ in range(how_many(150)))]
    for at in [*places, *made.sample([*ends.values()], 3)]:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "blocks").write_bytes(whole[:at])
        if at < 4096:
            with pytest.raises(ConfigError, match=r"the header of .* is damaged: delete"):
                open_store(tmp_path / "bad")
            continue
        left = survivors(tmp_path / "bad", blocks)
        assert left == {key for key, end in ends.items() if end <= at}
        assert (tmp_path / "bad" / "blocks").stat().st_blocks * 512 >= len(whole), "its space is not reserved again"


def test_garbage_gives_no_other_bytes(tmp_path: Path) -> None:
    blocks = filled(tmp_path / "whole")
    whole = (tmp_path / "whole" / "blocks").read_bytes()
    made = random.Random(5)
    for number in range(how_many(150)):
        image = bytearray(whole)
        length = made.choice((8, 100, 4096, 20_000))
        at = made.randrange(4096, len(image) // (1 + number % 3) - length)
        source = made.randrange(4096, len(image) - length)
        image[at : at + length] = (
            made.randbytes(length) if number % 2 else image[source : source + length]  # whole records elsewhere
        )
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "blocks").write_bytes(image)
        survivors(tmp_path / "bad", blocks)


def test_record_of_another_slot_loses_only_the_block_that_it_hides(tmp_path: Path) -> None:
    blocks = filled(tmp_path / "whole")
    whole = (tmp_path / "whole" / "blocks").read_bytes()
    with open_store(tmp_path / "whole") as store:
        at = {key: store._geometry.record_offset(store._slots.entries[key].place) for key in blocks}
    made = random.Random(8)
    for _ in range(how_many(60)):
        one, other = made.sample(KEYS, 2)
        image = bytearray(whole)
        image[at[other] : at[other] + 128] = whole[at[one] : at[one] + 128]
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "blocks").write_bytes(image)
        assert survivors(tmp_path / "bad", blocks) == set(KEYS) - {other}


def test_block_damaged_while_open_is_lost_alone(tmp_path: Path) -> None:
    blocks = {key: content(key, 0) for key in KEYS}
    with open_store(tmp_path) as store:
        assert all(put(store, blocks))
        at = (tmp_path / "blocks").read_bytes().index(blocks[KEYS[5]])
        with (tmp_path / "blocks").open("r+b") as file:
            file.seek(at + 3)
            file.write(bytes([blocks[KEYS[5]][3] ^ 16]))
        buffers = [bytearray(len(block)) for block in blocks.values()]
        found = store.get(KEYS, views(buffers))
        assert [key for key, hit in zip(KEYS, found, strict=True) if not hit] == [KEYS[5]]
        assert (store.statistics().damaged, store.statistics().missed) == (1, 1)
        assert store.exists([KEYS[5]]) == [False]
        os.truncate(tmp_path / "blocks", at)
        assert get(store, KEYS[5], len(blocks[KEYS[5]])) is None
        assert all(get(store, key, len(block)) in (None, block) for key, block in blocks.items())
        store.check()


def test_unreadable_block_is_a_miss_and_others_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {b"%d" % number: bytes([number]) * 4096 for number in range(6)}
    with lone(tmp_path) as store:
        put(store, blocks)
        bad, real = store._geometry.block_offset(store._slots.entries[b"3"].place), os.preadv

        def preadv(file: int, buffers: list[memoryview], at: int) -> int:
            if at <= bad < at + sum(map(len, buffers)):
                raise OSError(errno.EIO, "bad sector")
            return real(file, buffers, at)

        monkeypatch.setattr(os, "preadv", preadv)
        buffers = [bytearray(4096) for _ in blocks]
        assert store.get([*blocks], views(buffers)) == [True, True, True, False, True, True]


# -- disks that are full or broken


def test_full_disk_drops_blocks_and_keeps_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real, is_full = random.Random(6), os.pwritev, False

    def pwritev(file: int, buffers: list[memoryview], at: int) -> int:
        if is_full and made.random() < 0.4:
            os.pwrite(file, b"".join(buffers)[: made.randrange(99)], at)
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(file, buffers, at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    store, state, dropped, failed = open_store(tmp_path, 1 << 19), State(), 0, 0
    for number, asked in zip(range(300), calls(11), strict=False):
        call = asked
        is_full = number % 20 >= 5
        try:
            answers = do(store, call)
        except CacheError as error:
            assert "rejected a write (no space left on device), so removed blocks may be back" in str(error)  # noqa: PT017
            failed, answers = failed + 1, [True] * len(call.removed)
        if not call.removed:
            dropped += answers.count(False)
            call = call._replace(
                blocks={key: block for (key, block), kept in zip(call.blocks.items(), answers, strict=True) if kept}
            )
        state = applied(state, call)
        if number % 20 == 19:
            is_full = False
            store.sync()  # the disk takes writes again: what could not be made void is void now
            require_equal(store, state, evicts=True)
            (abandon if number % 40 == 19 else DiskStore.close)(store)
            store = open_store(tmp_path, 1 << 19)
            require_equal(store, state, evicts=True)
    assert dropped > 10
    assert failed > 2
    monkeypatch.setattr(os, "pwritev", real)
    assert all(put(store, {key: content(key, 1) for key in KEYS[:3]}))
    store.close()


def test_rejected_writes_lose_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {key: block for number in range(50) for key, block in page(number).items()}
    with lone(tmp_path) as store:
        room = sum(put(store, many))
        for name in ("pwritev", "preadv"):
            real = getattr(os, name)

            def full(file: int, buffers: list[memoryview], at: int, real: Callable[..., int] = real) -> int:
                if sum(map(len, buffers)) >= 4096:  # a block, and no record
                    raise OSError(errno.ENOSPC, "no space left on device")
                return real(file, buffers, at)

            monkeypatch.setattr(os, name, full)
            for _ in range(30):
                assert name == "preadv" or not any(put(store, page(99)))
                assert get(store, b"7" if name == "preadv" else b"99", 4096) is None
            monkeypatch.undo()
        store.check()
        assert sum(put(store, many)) == room


def test_replaced_block_stays_replaced_if_its_record_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes blocks and records, but does not make others void. So the file has two records of the key."""
    real = os.pwritev

    def pwritev(file: int, buffers: list[memoryview], at: int) -> int:
        if len(buffers) == 1 and bytes(buffers[0]) == bytes(128):
            raise OSError(errno.EIO, "bad sector")
        return real(file, buffers, at)

    for version in range(4):
        block = content(KEYS[0], version)
        store = open_store(tmp_path)
        monkeypatch.setattr(os, "pwritev", pwritev)
        assert put(store, {KEYS[0]: block}) == [True]
        abandon(store)
        with open_store(tmp_path) as after:
            assert get(after, KEYS[0], len(block)) == block
        monkeypatch.undo()
    store = open_store(tmp_path)
    store.remove([KEYS[0]])
    abandon(store)
    with open_store(tmp_path) as after:
        assert len(after) == 0, "an older block is back"


def test_no_room_for_the_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no disk store of .* can be opened in .*: give another folder, or less max"):
        open_store(tmp_path / "huge", 1 << 55)
    assert [path.name for path in (tmp_path / "huge").iterdir()] == ["lock"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="no space left on device"):
        open_store(tmp_path / "full")
    monkeypatch.undo()
    assert len(open_store(tmp_path / "full")) == 0


def test_interrupted_creation_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "blocks.new").write_bytes(b"half of a file")
    with open_store(tmp_path) as store:
        assert put(store, {KEYS[0]: content(KEYS[0], 0)}) == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks", "lock"]
    assert (tmp_path / "blocks").stat().st_mode & 0o777 == 0o600


def test_path_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"can be opened in .*file"):
        open_store(tmp_path / "file")


# -- who may open it


def test_other_identity_version_and_size_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    with pytest.raises(ConfigError, match=r"blocks was made for another model, .*delete .* or give another folder"):
        DiskStore(tmp_path, 1 << 21, b"another", SIZES)
    for max_bytes, sizes in ((1 << 22, SIZES), (1 << 21, (700, 5000))):
        with pytest.raises(ConfigError, match=r"blocks has .* but max_bytes and block_bytes give .*give the same"):
            DiskStore(tmp_path, max_bytes, IDENTITY, sizes)
    monkeypatch.setattr(disk_file, "FORMAT_VERSION", 2)
    with pytest.raises(ConfigError, match=r"blocks has format 1, and this version reads 2: delete"):
        open_store(tmp_path)
    monkeypatch.undo()
    with open_store(tmp_path) as store:
        assert len(store) == len(KEYS)


def test_second_process_is_rejected_until_the_first_ends(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from disk_blocks import open_store;"
        "store = open_store(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(  # noqa: S603  # this interpreter
        [sys.executable, "-c", script, str(tmp_path)], env=paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match="is in use by another store: close it, or give another folder"):
            open_store(tmp_path)
        child.kill()
    with open_store(tmp_path), pytest.raises(ConfigError, match="in use"):
        open_store(tmp_path)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"needs the package xxhash: pip install 'hybridkv\[hash\]'"):
        open_store(tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(ConfigError, match="needs flock"):
        open_store(tmp_path)


# -- misuse


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_bytes": 0}, "max_bytes must be at least 1"),
        ({"max_bytes": 4096}, "max_bytes 4096 is too small for blocks of 39.25 KiB: give at least"),
        ({"identity": b""}, "identity must have 1 to 256 bytes, got 0"),
        ({"identity": "text"}, "identity must be a bytes"),
        ({"block_bytes": ()}, "block_bytes must have 1 to 64 sizes, got 0"),
        ({"block_bytes": (0,)}, "each of block_bytes must be at least 1"),
        ({"block_bytes": ((16 << 20) + 1,)}, "each of block_bytes must be at most 16777216"),
    ],
)
def test_wrong_argument_is_named(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    arguments = {"max_bytes": 1 << 20, "identity": IDENTITY, "block_bytes": SIZES, **changed}
    with pytest.raises(ConfigError, match=message):
        DiskStore(tmp_path / "new", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_least_bytes_that_an_error_names_are_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        open_store(tmp_path, 4096)
    with open_store(tmp_path, int(str(error.value).rsplit(" ", 1)[1])) as store:
        assert all(put(store, {KEYS[0]: bytes(40_000)}))


def test_wrong_keys_and_buffers_are_named(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        block = memoryview(bytearray(10))
        for key in (b"", b"k" * 65, "text"):
            for call in (store.exists, store.touch, store.remove):
                with pytest.raises(ConfigError, match="a key must be bytes, 1 to 64 of them"):
                    call([key])  # type: ignore[list-item]
            with pytest.raises(ConfigError, match="a key must be bytes"):
                store.put([key], [block])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="1 keys came with 2 blocks"):
            store.get([b"k"], [block, block])
        with pytest.raises(ConfigError, match="each of into must be writable"):
            store.get([b"k"], [memoryview(bytes(10))])
        with pytest.raises(ConfigError, match="a contiguous buffer"):
            store.put([b"k"], [block[::2]])
        with pytest.raises(ConfigError, match="at least 1 byte"):
            store.put([b"k"], [memoryview(b"")])
        with pytest.raises(ConfigError, match="a block of 41000 bytes is larger than every slot"):
            store.put([b"k"], [memoryview(bytes(41_000))])
        assert store.put([b"k" * 64], [np.arange(6, dtype=np.int32).data]) == [True]
        assert get(store, b"k" * 64, 23) is None  # another length
        assert get(store, b"k" * 64, 24) == np.arange(6, dtype=np.int32).tobytes()
        assert store.put([], []) == store.get([], []) == []


def test_closed_store_raises(tmp_path: Path) -> None:
    store: BlockStore = open_store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(CacheError, match=r"the store in .* is closed: open it again"):
        store.exists([b"k"])
    with pytest.raises(CacheError, match="is closed"):
        store.put([b"k"], [memoryview(b"block")])


# -- threads and time


@pytest.mark.parametrize("seed", range(how_many(8)))
def test_threads_never_read_other_bytes(tmp_path: Path, seed: int) -> None:
    """Threads put, read, remove and evict the same keys. Each block says its key and version."""
    store, failures, found = DiskStore(tmp_path, 1 << 18, IDENTITY, [4096, 12_000]), list[str](), [0]

    def made_of(key: int, version: int) -> bytes:
        return (b"%8d/%8d" % (key, version)) * ((4096 if key % 3 else 12_000) // 17)

    def work(number: int) -> None:
        made = random.Random(seed * 100 + number)
        for version in range(150):
            keys = made.sample(range(60), 4)
            names = [b"%d" % key for key in keys]
            if made.random() < 0.5:
                store.put(names, [memoryview(made_of(key, version)) for key in keys])
            elif made.random() < 0.1:
                store.remove(names)
            else:
                buffers = [bytearray(len(made_of(key, 0))) for key in keys]
                for key, buffer, hit in zip(keys, buffers, store.get(names, views(buffers)), strict=True):
                    found[0] += hit
                    if hit and buffer != made_of(key, int(buffer[9:17])):
                        failures.append(f"key {key}: {bytes(buffer[:40])!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.check()
    assert failures == []
    assert found[0] > 50
    assert store.statistics().damaged == 0, "a block that was evicted during a read was taken for damaged"
    store.close()


@pytest.mark.parametrize("is_back", [True, False])
def test_block_that_is_evicted_while_it_is_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_back: bool
) -> None:
    """Its slot is written before it is read. If its key is put again meanwhile, the new block stays."""
    with lone(tmp_path) as store:
        put(store, page(0))
        real = os.preadv

        def preadv(file: int, buffers: list[memoryview], at: int) -> int:
            monkeypatch.undo()
            for number in range(1, 60):
                put(store, page(number))
            if is_back:
                put(store, {b"0": bytes([99]) * 4096})
            return real(file, buffers, at)

        monkeypatch.setattr(os, "preadv", preadv)
        assert get(store, b"0", 4096) is None
        assert get(store, b"0", 4096) == (bytes([99]) * 4096 if is_back else None)
        assert store.statistics().damaged == 0
        store.check()


def test_close_waits_for_a_call_of_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real, begun, go_on = open_store(tmp_path), os.pwritev, threading.Event(), threading.Event()
    blocks = {KEYS[0]: content(KEYS[0], 0)}

    def pwritev(file: int, buffers: list[memoryview], at: int) -> int:
        if sum(map(len, buffers)) >= 512 and threading.current_thread() is not threading.main_thread():
            begun.set()
            go_on.wait(20)
        return real(file, buffers, at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    put(store, blocks)
    writer = threading.Thread(target=put, args=(store, {KEYS[1]: blocks[KEYS[0]]}))
    writer.start()
    assert begun.wait(20)
    closer = threading.Thread(target=store.close)
    closer.start()
    time.sleep(0.05)
    assert closer.is_alive()
    go_on.set()
    closer.join(20)
    writer.join(20)
    with open_store(tmp_path) as after:
        assert after.exists(KEYS[:2]) == [True, True]


def test_hundred_thousand_blocks_open_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count, block = 100_000, memoryview(bytes(range(256)))
    store = DiskStore(tmp_path, 44 << 20, IDENTITY, [256])
    for begin in range(0, count, 2000):
        keys = [number.to_bytes(32, "big") for number in range(begin, begin + 2000)]
        assert all(store.put(keys, [block] * 2000))
    assert len(store) == count
    abandon(store)
    begun, processor = time.perf_counter(), time.process_time()
    with DiskStore(tmp_path, 44 << 20, IDENTITY, [256]) as after:
        seconds, processor = time.perf_counter() - begun, time.process_time() - processor
        assert len(after) == count
        assert get(after, (777).to_bytes(32, "big"), 256) == bytes(block)
    with capsys.disabled():
        print(f"\n{count} blocks opened in {seconds:.2f} s, {processor:.2f} s of a processor")  # noqa: T201
    assert processor < 3  # 0.7 s on a quiet machine
