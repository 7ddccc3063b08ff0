import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest

from hybridkv.stores import SharedStore, bounded, open_store
from hybridkv.stores.folder_client import FolderClient
from store_contract import block, get, put, wait_until

KiB = 1 << 10


def opened(folder: Path, options: str = "") -> SharedStore:
    return open_store(f"file://{folder}?timeout_s=20{options}")


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def wait_for_sweep(store: SharedStore) -> None:
    wait_until(lambda: store._client._is_swept)  # type: ignore[attr-defined]


def test_file_has_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that stops in the middle leaves no file of that name, and the next one succeeds."""
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415

    def torn(_: LocalFileSystem, path: str, value: bytes) -> None:
        Path(path).write_bytes(value[: len(value) // 2])
        raise OSError(errno.EIO, "torn")

    store = opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "pipe_file", torn)
        assert put(store, {b"k": bytes(1000)}) == [False]
    assert files_in(tmp_path) == []
    time.sleep(bounded.PAUSE_S)
    assert put(store, {b"k": bytes(1000)}) == [True]
    assert [path.name for path in files_in(tmp_path)] == [b"k".hex()]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_file_system_that_rejects_writes_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415

    def rejected(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    store = opened(tmp_path)
    put(store, {b"k": b"block"})
    monkeypatch.setattr(LocalFileSystem, "pipe_file", rejected)
    assert put(store, {b"l": b"block"}) == [False]
    assert get(store, {b"k": 5, b"l": 5}) == {b"k": b"block"}
    assert (store.statistics().failed, store.statistics().dropped) == (0, 1)


def test_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    store = opened(tmp_path / "cache")
    assert put(store, {b"k": b"block"}) == [True]
    fsspec.filesystem("file").rm(str(tmp_path / "cache"), recursive=True)
    assert get(store, {b"k": 5}) == {}
    put(store, {b"k": b"block"})  # may be dropped
    assert put(store, {b"k": b"block"}) == [True]
    assert get(store, {b"k": 5}) == {b"k": b"block"}
    assert store.statistics().failed == 0


def test_bounded_folder_keeps_what_was_used_last(tmp_path: Path) -> None:
    store = opened(tmp_path, "&max_bytes=1MiB")
    keys = [b"%d" % number for number in range(150)]
    for key in keys:
        assert put(store, {key: bytes(16 * KiB)}) == [True]
        get(store, {keys[0]: 16 * KiB})
        wait_for_sweep(store)
        assert sum(path.stat().st_size for path in files_in(tmp_path)) < 1.13 * 2**20
    known = store.exists(keys)
    assert known[0]
    assert 50 < sum(known) < 68
    assert known[1:] == sorted(known[1:])


def test_bounded_objects_leave_in_the_order_of_their_puts(tmp_path: Path) -> None:
    with open_store(f"memory://{tmp_path}?max_bytes=100KiB") as store:
        keys = [b"%d" % number for number in range(40)]
        for key in keys:
            assert put(store, {key: bytes(10_000)}) == [True]
            wait_for_sweep(store)
        known = store.exists(keys)
        assert 7 < sum(known) < 11
        assert known == sorted(known)


def test_folder_is_swept_by_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps, go_on = list[int](), threading.Event()

    def sweep(self: FolderClient) -> None:
        sweeps.append(1)
        assert go_on.wait(20)
        self._is_swept = True

    monkeypatch.setattr(FolderClient, "_sweep", sweep)
    store = opened(tmp_path, "&max_bytes=100KiB")
    for number in range(20):
        assert put(store, {b"%d" % number: bytes(10_000)}) == [True]
    assert sweeps == [1]
    go_on.set()
    wait_for_sweep(store)
    assert put(store, {b"next": bytes(10_000)}) == [True]
    wait_until(lambda: sweeps == [1, 1])


def test_folder_without_bound_is_never_swept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert put(store, {b"%d" % number: bytes(KiB) for number in range(200)}) == [True] * 200
    assert len(files_in(tmp_path)) == 200


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Several processes write and read the same keys at once; one of them is killed again and again."""
    script = (
        "import sys; from hybridkv.stores import open_store; from store_contract import put_and_get_at_random\n"
        "store = open_store(sys.argv[1])\n"
        "for seed in range(int(sys.argv[2]), 10**9): print(put_and_get_at_random(store, seed), flush=True)"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, f"file://{tmp_path}?timeout_s=20"]
    children = [
        subprocess.Popen([*command, str(number * 1000)], env=paths, stdout=subprocess.PIPE)  # noqa: S603 - this interpreter
        for number in range(2)
    ]
    try:
        counts = list[int]()
        for child in children:
            assert child.stdout is not None
            counts += [int(child.stdout.readline()) for _ in range(3)]
            child.kill()
            child.wait()
        assert sum(counts) > 100
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
    store = opened(tmp_path)
    assert store.statistics().damaged == 0
    assert put(store, {b"k": block(b"k", 100)}) == [True]


def test_file_system_that_fails_gives_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415

    store = opened(tmp_path)
    put(store, {b"a": b"block", b"b": b"block"})
    real = LocalFileSystem.cat_file

    def failing(self: LocalFileSystem, path: str) -> bytes:
        if path.endswith(b"b".hex()):
            raise OSError(errno.EIO, "broken")
        return bytes(real(self, path))

    monkeypatch.setattr(LocalFileSystem, "cat_file", failing)
    assert get(store, {b"b": 5, b"a": 5}) == {b"a": b"block"}
    assert store.statistics().failed == 1
