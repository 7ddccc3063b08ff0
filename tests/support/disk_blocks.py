"""Blocks with known content for tests of a disk store, and runs whose result is known after any number of calls."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from hybridkv.stores import DiskStore, disk_file

IDENTITY: Final = b"model weights dtype layout version"
SIZES: Final = (700, 5000, 40_000)
KEYS: Final = tuple(b"key %d" % number for number in range(24))

State = dict[bytes, bytes]


def open_store(folder: Path, max_bytes: int = 1 << 21, sizes: tuple[int, ...] = SIZES) -> DiskStore:
    return DiskStore(folder, max_bytes, IDENTITY, sizes)


def content(key: bytes, version: int) -> bytes:
    """Bytes that no other key or version has. Their length is one of SIZES or a little less."""
    made = random.Random(key + b"/%d" % version)
    return made.randbytes(made.choice(SIZES) - made.choice((0, 0, 13)))


def put(store: DiskStore, blocks: State) -> list[bool]:
    return store.put([*blocks], [memoryview(block) for block in blocks.values()])


def get(store: DiskStore, key: bytes, length: int) -> bytes | None:
    buffer = bytearray(length)
    return bytes(buffer) if store.get([key], [memoryview(buffer)]) == [True] else None


class Call(NamedTuple):
    """A call of a run: blocks to put, or keys to remove."""

    blocks: State
    removed: tuple[bytes, ...]


def calls(seed: int) -> Iterator[Call]:
    """Endless puts of one to five blocks, which a store of six slabs has room for, and removals."""
    made, version = random.Random(seed), 0
    while True:
        keys = made.sample(KEYS, made.choice((1, 2, 5)))
        if made.random() < 0.2:
            yield Call({}, tuple(keys))
        else:
            version += 1
            yield Call({key: content(key, version) for key in keys}, ())


def do(store: DiskStore, call: Call) -> list[bool]:
    return store.remove(call.removed) if call.removed else put(store, call.blocks)


def applied(state: State, call: Call) -> State:
    """The state after a call that kept all its blocks."""
    kept = {key: block for key, block in state.items() if key not in call.removed}
    return {**kept, **call.blocks}


def require_whole(store: DiskStore, before: State, call: Call | None, *, evicts: bool) -> None:
    """Compare all of a store with its state ``before`` a call that may have happened in part, for each key."""
    after = before if call is None else applied(before, call)
    found = 0
    for key in KEYS:
        allowed = {before.get(key), after.get(key)} | ({None} if evicts else set())
        (known,) = store.exists([key])
        blocks = [block for block in allowed - {None} if block is not None and get(store, key, len(block)) == block]
        found += known
        assert known or None in allowed, f"{key!r} is lost"
        assert bool(blocks) == known, f"{key!r} is known, but is neither of the blocks that were put last"
    assert found == len(store), "a key was found that nobody put"
    assert store.statistics().damaged == 0, "a block was half written, but could be found"
    store.check()


class Killed(BaseException):
    """Stands for the death of the process."""


@contextmanager
def dies_after(writes: int, torn: float = 0.0) -> Iterator[None]:
    """Let the process die in a write: the ``writes``-th is the first that is done only to the share ``torn``."""
    real, left = os.pwritev, writes

    def pwritev(file: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal left
        left -= 1
        if left >= 0:
            return real(file, buffers, offset)
        if left == -1:
            whole = b"".join(buffers)
            os.pwrite(file, whole[: int(len(whole) * torn)], offset)
        raise Killed

    disk_file.os.pwritev = pwritev  # type: ignore[attr-defined]
    try:
        yield
    finally:
        disk_file.os.pwritev = real  # type: ignore[attr-defined]


def abandon(store: DiskStore) -> None:
    """Close the files as the kernel does when a process dies: nothing is saved."""
    store._file.close()


def run_until_killed(folder: str, seed: str, max_bytes: str) -> None:
    """Report each call that returned with a byte, until somebody kills this process."""
    store = open_store(Path(folder), int(max_bytes))
    os.write(1, b"%d\n" % os.getpid())
    for call in calls(int(seed)):
        if not all(do(store, call)) and not call.removed:
            raise SystemExit(f"{store.statistics()} has no room")
        os.write(1, b".")


def run_for_each_line() -> None:
    """Run each line of the input in a process of its own, which imports nothing again, and end its output."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            signal.alarm(60)  # in case nobody kills it
            run_until_killed(*line.split("\t"))
        os.waitpid(child, 0)
        os.write(1, b"\n")


if __name__ == "__main__":
    run_for_each_line()
