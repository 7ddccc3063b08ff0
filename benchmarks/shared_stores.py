"""Measure shared stores: bytes per second and time of a call, beside the plain client of each engine in the same run.

    make bench-stores, or with tests/stores, tests/support and mooncake on PYTHONPATH:
    python benchmarks/shared_stores.py [--only redis files memory mooncake] [--repeats 5] [--folder FOLDER]

Servers run on loopback, and end with the benchmark. One that is not installed is left out. A batch has 16 MiB. GB/s are
the best of the repeats, microseconds of calls with one block the median of 200.

    store    SharedStore by ``open_store``: checksums, copies, and a thread that ends calls in time
    plain    the client alone, without checksums: redis-py with ``mget`` and a pipeline of ``set``, fsspec with
             ``cat_file`` and ``pipe_file``, Mooncake with ``batch_get_into`` and ``batch_put_from``
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from servers import Child, mooncake_master, redis_server

from hybridkv.stores import BlockStore, MemoryStore, open_store
from hybridkv.units import GiB, KiB, MiB

BLOCKS: Final = (16 * KiB, 256 * KiB, MiB)
BATCH_BYTES: Final = 16 * MiB
CALLS: Final = 200


class Side(NamedTuple):
    """Two calls: put blocks under keys, and get them into buffers."""

    name: str
    put: Callable[[Sequence[bytes], Sequence[memoryview]], object]
    get: Callable[[Sequence[bytes], Sequence[memoryview]], object]


def of_store(store: BlockStore) -> Side:
    """Return the calls of a store, which must keep and find all."""

    def put(keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        require(all(store.put(keys, blocks)))

    def get(keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        require(all(store.get(keys, into)))

    return Side("store", put, get)


def require(done: bool) -> None:
    """End the benchmark if blocks were not kept or found."""
    if not done:
        raise SystemExit("a block was not kept, or not found: the engine has no room, or is too slow")


# -- engines


@contextmanager
def redis_sides(_: Path) -> Iterator[list[Side]]:
    """Yield a store on Redis, and redis-py."""
    import redis  # noqa: PLC0415 - only where it is measured

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(redis_server(folder, "--maxmemory", "3gb"))
        store = stack.enter_context(open_store(f"redis://127.0.0.1:{server.port}?timeout_s=20"))
        client = stack.enter_context(redis.Redis(port=server.port, protocol=2))

        def put(keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
            with client.pipeline(transaction=False) as pipeline:
                for key, block in zip(keys, blocks, strict=True):
                    pipeline.set(key, block)
                require(all(pipeline.execute()))

        def get(keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
            for value, buffer in zip(client.mget(keys), into, strict=True):
                buffer[:] = value

        yield [of_store(store), Side("plain", put, get)]


@contextmanager
def file_sides(parent: Path) -> Iterator[list[Side]]:
    """Yield a store in a folder, and fsspec."""
    import fsspec  # noqa: PLC0415 - only where it is measured

    files = fsspec.filesystem("file")
    with tempfile.TemporaryDirectory(dir=parent) as folder, open_store(f"file://{folder}/a?timeout_s=20") as store:
        files.makedirs(f"{folder}/b")

        def put(keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
            for key, block in zip(keys, blocks, strict=True):
                files.pipe_file(f"{folder}/b/{key.hex()}", block)

        def get(keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
            for key, buffer in zip(keys, into, strict=True):
                buffer[:] = files.cat_file(f"{folder}/b/{key.hex()}")

        yield [of_store(store), Side("plain", put, get)]


@contextmanager
def memory_sides(_: Path) -> Iterator[list[Side]]:
    """Yield a store in memory, and a dictionary."""
    kept = dict[bytes, bytes]()

    def put(keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            kept[key] = bytes(block)

    def get(keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for key, buffer in zip(keys, into, strict=True):
            buffer[:] = kept[key]

    with MemoryStore(GiB) as store:
        yield [of_store(store), Side("plain", put, get)]


@contextmanager
def mooncake_sides(_: Path) -> Iterator[list[Side]]:
    """Yield a store on Mooncake, and its own client. A third process lends the memory."""
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - only where it is measured

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        master = stack.enter_context(mooncake_master(folder))
        url = f"mooncake://127.0.0.1:{master.port}?timeout_s=20"
        lender = stack.enter_context(Child(f"{url}&memory=2GiB"))
        while lender.do("put(store, {b'first': b'block'})") != "[True]":
            time.sleep(0.05)
        store = stack.enter_context(open_store(url))
        client = MooncakeDistributedStore()
        stack.callback(client.close)
        require(client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MiB, "tcp", "", f"127.0.0.1:{master.port}") == 0)
        known = set[int]()

        def addresses(buffers: Sequence[memoryview]) -> list[int]:
            made = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
            if made[0] not in known:  # all lie in one array
                known.add(made[0])
                require(client.register_buffer(made[0], BATCH_BYTES) == 0)
            return made

        def put(keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
            codes = client.batch_put_from([key.hex() for key in keys], addresses(blocks), [len(one) for one in blocks])
            require(not any(codes))

        def get(keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
            lengths = [len(one) for one in into]
            require(client.batch_get_into([key.hex() for key in keys], addresses(into), lengths) == lengths)

        yield [of_store(store), Side("plain", put, get)]


ENGINES: Final = {"redis": redis_sides, "files": file_sides, "memory": memory_sides, "mooncake": mooncake_sides}


def is_here(engine: str) -> bool:
    """Return whether an engine is installed."""
    if engine == "redis":
        return bool(shutil.which("redis-server") or shutil.which("valkey-server"))
    return engine != "mooncake" or importlib.util.find_spec("mooncake") is not None


# -- measurements


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure(engine: str, sides: Sequence[Side], repeats: int) -> None:
    """Print a row of the table for each size of blocks. Both sides take turns."""
    made = np.random.default_rng(1)
    source, target = bytearray(made.bytes(BATCH_BYTES)), bytearray(BATCH_BYTES)
    for size in BLOCKS:
        blocks, into = (
            [memoryview(all_)[at : at + size] for at in range(0, BATCH_BYTES, size)] for all_ in (source, target)
        )
        best, times = dict[str, float](), dict[str, float]()
        for repeat in range(repeats):
            keys = [b"%d/%d/%d" % (size, repeat, number) for number in range(len(blocks))]
            for side in sides:
                for what, call, buffers in (("put", side.put, blocks), ("get", side.get, into)):
                    took = seconds(lambda call=call, keys=keys, buffers=buffers: call(keys, buffers))  # type: ignore[misc]
                    name = f"{side.name} {what}"
                    best[name] = min(took, best.get(name, took))
                require(source == target)
                target[:] = bytes(BATCH_BYTES)
        for side in sides:
            for what, call, buffer in (("put", side.put, blocks[0]), ("get", side.get, into[0])):
                took_all = [
                    seconds(lambda call=call, key=b"one %d %d" % (size, n), buffer=buffer: call([key], [buffer]))  # type: ignore[misc]
                    for n in range(CALLS)
                ]
                times[f"{side.name} {what}"] = statistics.median(took_all)
        names = [f"{side} {what}" for what in ("put", "get") for side in ("store", "plain")]
        rates = " | ".join(f"{BATCH_BYTES / best[name] / 1e9:.2f}" for name in names)
        waits = " | ".join(f"{times[name] * 1e6:,.0f}" for name in names)
        print(f"| {engine} | {size // KiB} KiB | {rates} | {waits} |", flush=True)


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="of the files; default /tmp")
    options = parser.parse_args()
    print("| engine | block | GB/s: put | plain | get | plain | us: put | plain | get | plain |")
    print("|---|" + "--:|" * 9)
    for engine in options.only:
        if is_here(engine):
            with ENGINES[engine](options.folder) as sides:
                measure(engine, sides, options.repeats)
        else:
            print(f"{engine} is not installed", file=sys.stderr)


if __name__ == "__main__":
    main()
