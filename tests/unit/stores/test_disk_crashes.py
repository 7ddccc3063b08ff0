"""After a process dies, or the power fails, at any moment: each block of a disk store is there whole, or not at all."""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import count, islice
from pathlib import Path

import pytest

import disk_blocks
from disk_blocks import (
    KEYS,
    Call,
    Killed,
    State,
    abandon,
    applied,
    calls,
    content,
    dies_after,
    do,
    get,
    open_store,
    put,
    require_whole,
)
from how_much import how_many
from hybridkv.stores import DiskStore

ROOMY, SMALL = 1 << 22, 1 << 18
"""Bytes of a store that holds all blocks, and of one that must evict."""


@pytest.mark.parametrize("max_bytes", [ROOMY, SMALL])
@pytest.mark.parametrize("torn", [0.0, 0.37, 1.0])
def test_death_in_each_write_leaves_whole_blocks(tmp_path: Path, torn: float, max_bytes: int) -> None:
    """Die in the first write of a run, then go on from there and die in the second, and so on."""
    store, state = open_store(tmp_path, max_bytes), State()
    run, deaths = calls(7), 0
    for writes in islice(count(), how_many(400) + 60):
        with dies_after(writes % 13, torn):
            call = None
            try:
                for call in run:
                    answers = do(store, call)
                    state = applied(state, call)
                    assert call.removed or all(answers)
            except Killed:
                deaths += 1
        abandon(store)
        store = open_store(tmp_path, max_bytes)
        require_whole(store, state, call, evicts=max_bytes == SMALL)
        state = {key: kept for key in KEYS if (kept := found(store, key, state, call)) is not None}
    assert deaths >= 60


def found(store: DiskStore, key: bytes, state: State, call: Call | None) -> bytes | None:
    """What the store has of a key: the block of ``state``, or the one of ``call``."""
    blocks = {state.get(key), call.blocks.get(key) if call else None} - {None}
    return next((block for block in blocks if block is not None and get(store, key, len(block)) == block), None)


@pytest.mark.parametrize("max_bytes", [ROOMY, SMALL])
def test_killed_process_leaves_whole_blocks(tmp_path: Path, max_bytes: int) -> None:
    made, kills, in_the_middle = random.Random(max_bytes), how_many(40), 0
    with subprocess.Popen(  # noqa: S603  # this interpreter
        [sys.executable, disk_blocks.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None
        for number in range(kills):
            folder, seed = tmp_path / str(number % 5), made.randrange(1 << 30)
            state = contents_of(folder, max_bytes)
            runner.stdin.write(b"%s\t%d\t%d\n" % (bytes(folder), seed, max_bytes))
            runner.stdin.flush()
            process = int(runner.stdout.readline())
            time.sleep(made.random() * 0.05)
            os.kill(process, signal.SIGKILL)
            done = len(runner.stdout.readline()) - 1
            run = calls(seed)
            for call in islice(run, done):
                state = applied(state, call)
            in_the_middle += done > 0
            with open_store(folder, max_bytes) as store:
                require_whole(store, state, next(run), evicts=max_bytes == SMALL)
    assert in_the_middle >= kills // 2


def contents_of(folder: Path, max_bytes: int) -> State:
    """What an earlier run left in a folder. Its blocks were checked at its end."""
    with open_store(folder, max_bytes) as store:
        entries = [*store._slots.entries.values()]
        return {entry.key: block for entry in entries if (block := get(store, entry.key, entry.length)) is not None}


@pytest.mark.parametrize("seed", range(how_many(40)))
def test_power_loss_never_gives_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of the pages that were written since the last sync, any may be on the disk, and any may not."""
    made, real = random.Random(seed), os.pwritev
    written = list[tuple[int, bytes]]()

    def pwritev(file: int, buffers: list[memoryview], offset: int) -> int:
        whole, at = b"".join(buffers), 0
        while at < len(whole):
            length = 4096 - (offset + at) % 4096
            written.append((offset + at, whole[at : at + length]))
            at += length
        return real(file, buffers, offset)

    store, run = open_store(tmp_path, SMALL), calls(seed)
    for call in islice(run, 20):
        do(store, call)
    store.sync()
    image = bytearray((tmp_path / "blocks").read_bytes())
    at_sync = {entry.key: get(store, entry.key, entry.length) for entry in store._slots.entries.values()}
    contents = {key: {block} for key, block in at_sync.items()}
    monkeypatch.setattr(os, "pwritev", pwritev)
    for call in islice(run, made.randrange(12)):
        do(store, call)
        for key, block in call.blocks.items():
            contents.setdefault(key, set()).add(block)
    monkeypatch.undo()
    abandon(store)
    share = made.random()
    for offset, page in written:
        if made.random() < share:
            image[offset : offset + len(page)] = page
    (tmp_path / "blocks").write_bytes(image)
    with open_store(tmp_path, SMALL) as after:
        for key, blocks in contents.items():
            (known,) = after.exists([key])
            sizes = {len(block) for block in blocks if block}
            read = [one for size in sizes if (one := get(after, key, size)) is not None]
            assert all(one in blocks for one in read)
            assert known or not read
        after.check()
        fresh = {key: content(key, -1) for key in KEYS[:3]}
        assert put(after, fresh) == [True] * 3
        assert {key: get(after, key, len(block)) for key, block in fresh.items()} == fresh


def test_removed_block_stays_removed_after_death(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for version in range(5):
        put(store, {KEYS[0]: content(KEYS[0], version)})
    assert store.remove([KEYS[0], KEYS[1]]) == [True, False]
    abandon(store)
    with open_store(tmp_path) as after:
        assert len(after) == 0
