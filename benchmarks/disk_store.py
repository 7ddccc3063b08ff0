"""Measure a disk store: bytes per second that it writes and reads, and how long it takes to open.

    python benchmarks/disk_store.py FOLDER [--mebibytes 512] [--repeats 3]

FOLDER lies on the disk to be measured. Each line of the output is a JSON object, with the best of the repeats.

    store           put or get of 16 MiB in each call, with threads that call at once
    plain, direct   pwritev or preadv of adjacent blocks without a store; direct with O_DIRECT
    warm, cold      reads from the kernel's memory, or from the disk
    synced, direct  writes that end on the disk; the others end in the kernel's memory
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hybridkv.stores import DiskStore
from hybridkv.units import KiB, MiB, round_up

BLOCKS: Final = (16 * KiB, 256 * KiB, MiB)
BATCH_BYTES: Final = 16 * MiB
ENTRIES: Final = 100_000


def say(**fields: object) -> None:
    """Print a row."""
    print(json.dumps(fields), flush=True)


@contextmanager
def folder_in(parent: Path) -> Iterator[Path]:
    """Yield a new folder, which is removed at the end."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def forget(path: Path) -> None:
    """Let the kernel forget what it has of a file."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def batches(block_bytes: int, total: int) -> tuple[list[list[bytes]], list[memoryview]]:
    """Return the keys of each batch, and the blocks of one batch in memory that begins at a page."""
    count = BATCH_BYTES // block_bytes
    memory = memoryview(mmap.mmap(-1, BATCH_BYTES))
    memory[:] = random.Random(block_bytes).randbytes(BATCH_BYTES)  # noqa: S311 - content without meaning
    keys = [b"%d" % number for number in range(total // block_bytes)]
    blocks = [memory[begin : begin + block_bytes] for begin in range(0, BATCH_BYTES, block_bytes)]
    return [keys[begin : begin + count] for begin in range(0, len(keys), count)], blocks


def store_rows(parent: Path, block_bytes: int, total: int, threads: int) -> dict[str, float]:
    """Return seconds of writes, a sync, and warm and cold reads of a store."""
    keys, blocks = batches(block_bytes, total)
    into = [batches(block_bytes, BATCH_BYTES)[1] for _ in range(threads)]
    made = dict[str, float]()
    with folder_in(parent) as folder, ThreadPoolExecutor(threads) as pool:
        store = DiskStore(folder, total + total // 8 + 8 * MiB, b"benchmark", [block_bytes])

        def run(call: Callable[[int], bool]) -> float:
            begun = time.perf_counter()
            if not all(pool.map(call, range(len(keys)))):
                raise SystemExit("a block was not kept: the disk is full, or the store is wrong")
            return time.perf_counter() - begun

        made["store write"] = run(lambda number: all(store.put(keys[number], blocks)))
        made["synced write"] = made["store write"] + seconds(store.sync)
        made["store warm read"] = run(lambda number: all(store.get(keys[number], into[number % threads])))
        forget(folder / "blocks")
        made["store cold read"] = run(lambda number: all(store.get(keys[number], into[number % threads])))
        store.close()
    return made


def plain_rows(parent: Path, block_bytes: int, total: int, *, direct: bool) -> dict[str, float]:
    """Return seconds of writes and reads of the system alone, one batch at a time."""
    _, blocks = batches(block_bytes, BATCH_BYTES)
    runs = [blocks[begin : begin + 256] for begin in range(0, len(blocks), 256)]
    steps = [(at, run) for at in range(0, total, BATCH_BYTES) for at, run in offsets(at, runs)]
    made, name = dict[str, float](), "direct" if direct else "plain"
    with folder_in(parent) as folder:
        path = folder / "blocks"
        file = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(file, 0, total)
        made[f"{name} write"] = seconds(lambda: [os.pwritev(file, run, at) for at, run in steps])
        if not direct:
            made["plain warm read"] = seconds(lambda: [os.preadv(file, run, at) for at, run in steps])
        forget(path)
        made[f"{name} cold read"] = seconds(lambda: [os.preadv(file, run, at) for at, run in steps])
        os.close(file)
    return made


def offsets(at: int, runs: Sequence[Sequence[memoryview]]) -> Iterator[tuple[int, Sequence[memoryview]]]:
    """Yield the runs of a batch with their offsets in the file."""
    for run in runs:
        yield at, run
        at += sum(map(len, run))


def measure_rates(parent: Path, total: int, repeats: int) -> None:
    """Print bytes per second of stores and of the system."""
    for block_bytes in BLOCKS:
        for threads in (1, 2):
            made = [store_rows(parent, block_bytes, total, threads) for _ in range(repeats)]
            if threads == 1:
                made += [plain_rows(parent, block_bytes, total, direct=False) for _ in range(repeats)]
                made += [plain_rows(parent, block_bytes, total, direct=True) for _ in range(repeats)]
            for name in dict.fromkeys(name for row in made for name in row):
                best = min(row[name] for row in made if name in row)
                say(block_bytes=block_bytes, threads=threads, what=name, GB_per_s=round(total / best / 1e9, 2))


def measure_open(parent: Path, block_bytes: int) -> None:
    """Print how long a store of many blocks takes to open, and its memory for each block."""
    size = round_up((block_bytes + 160) * ENTRIES, MiB) + 8 * MiB
    with folder_in(parent) as folder:
        store = DiskStore(folder, size, b"benchmark", [block_bytes])
        block = memoryview(bytes(block_bytes))
        for begin in range(0, ENTRIES, 1000):
            store.put([b"%032d" % number for number in range(begin, begin + 1000)], [block] * 1000)
        store.close()
        made = list[float]()
        for is_cold in (False, True):
            if is_cold:
                forget(folder / "blocks")
            begun = time.perf_counter()
            store = DiskStore(folder, size, b"benchmark", [block_bytes])
            made.append(round(time.perf_counter() - begun, 2))
            store.close()
        del store
        tracemalloc.start()
        store = DiskStore(folder, size, b"benchmark", [block_bytes])
        held, entries = tracemalloc.get_traced_memory()[0], len(store)
        tracemalloc.stop()
        store.close()
    warm, cold = made
    say(what="open", block_bytes=block_bytes, entries=entries, warm_s=warm, cold_s=cold, held_bytes=held // entries)


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mebibytes", type=int, default=512, help="bytes of each store, in MiB")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for block_bytes in (256, 16 * KiB):
        measure_open(options.folder, block_bytes)
    measure_rates(options.folder, options.mebibytes * MiB, options.repeats)


if __name__ == "__main__":
    main()
