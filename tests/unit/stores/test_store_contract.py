"""Each kind of store that needs no server keeps the contract of stores."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from disk_blocks import IDENTITY
from hybridkv.stores import DiskStore, MemoryStore, SharedStore, open_store
from hybridkv.stores.disk_folders import DiskFolders
from hybridkv.stores.disk_view import DiskView
from hybridkv.stores.folder_client import FolderClient
from resp_server import RespServer
from store_contract import CONTRACT, Kept

MiB = 1 << 20


def flip_in_file(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 8]))


def disk(folder: Path) -> Kept:
    sizes = [256, 4096, 16_384, 70_000, 300_000, 2 * MiB + 1, 8 * MiB]
    stores = list[DiskStore]()

    def opened() -> DiskStore:
        stores.append(DiskStore(folder, 64 * MiB, IDENTITY, sizes))
        return stores[-1]

    def flip(key: bytes) -> None:
        entry = stores[-1]._slots.entries[key]
        flip_in_file(folder / "blocks", stores[-1]._geometry.block_offset(entry.place) + entry.length // 2)

    return Kept(opened, flip, is_shared=False)


def folders(folder: Path) -> Kept:
    """A disk, and the folder of another engine that has not begun."""
    plain = disk(folder / "own")
    other = partial(DiskView, folder / "other", 64 * MiB, IDENTITY, [256, 8 * MiB])

    def opened() -> DiskFolders:
        own = plain.open()
        assert isinstance(own, DiskStore)
        return DiskFolders(own, [other])

    return replace(plain, open=opened)


def memory(_: Path) -> Kept:
    return Kept(lambda: MemoryStore(16 * MiB), is_shared=False)


def path_of(folder: Path, key: bytes) -> Path:
    return folder / "hkv1" / key.hex()[:2] / key.hex()


def files(folder: Path) -> Kept:
    def flip(key: bytes) -> None:
        size = path_of(folder, key).stat().st_size
        flip_in_file(path_of(folder, key), made[0] % size)
        made[0] += 7

    def move(one: bytes, other: bytes) -> None:
        path_of(folder, other).parent.mkdir(exist_ok=True)
        path_of(folder, other).write_bytes(path_of(folder, one).read_bytes())

    made = [0]
    return Kept(lambda: open_store(f"file://{folder}?timeout_s=20"), flip, move)


def objects(folder: Path) -> Kept:
    """fsspec's own objects in memory, which all file systems of the process share."""
    system = fsspec.filesystem("memory")

    def flip(key: bytes) -> None:
        content = bytearray(system.cat_file(f"{path_of(folder, key)}"))
        content[-1] ^= 1
        system.pipe_file(f"{path_of(folder, key)}", bytes(content))

    def move(one: bytes, other: bytes) -> None:
        system.pipe_file(f"{path_of(folder, other)}", system.cat_file(f"{path_of(folder, one)}"))

    return Kept(lambda: open_store(f"memory://{folder}?timeout_s=20"), flip, move)


def remote_objects(folder: Path) -> Kept:
    """The same behind fsspec's interface for file systems that answer many requests at once, as its S3 does."""
    plain = objects(folder)

    def opened() -> SharedStore:
        client = FolderClient(f"memory://{folder}")
        client._files = AsyncFileSystemWrapper(client._files, asynchronous=False)
        return SharedStore(client, timeout_s=20)

    return replace(plain, open=opened)


@pytest.fixture
def server() -> Iterator[RespServer]:
    with RespServer() as made:
        yield made


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_store_on_redis_keeps_the_contract(server: RespServer, check: Callable[[Kept], None]) -> None:
    def flip(key: bytes) -> None:
        content = bytearray(server.values[b"hkv1" + key])
        content[len(content) // 2] ^= 4
        server.values[b"hkv1" + key] = bytes(content)

    def move(one: bytes, other: bytes) -> None:
        server.values[b"hkv1" + other] = server.values[b"hkv1" + one]

    check(Kept(lambda: open_store(f"redis://127.0.0.1:{server.port}?timeout_s=20"), flip, move))


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", [disk, folders, memory, files, objects, remote_objects])
def test_store_keeps_the_contract(tmp_path: Path, kind: Callable[[Path], Kept], check: Callable[[Kept], None]) -> None:
    check(kind(tmp_path))
