"""A reader without a lock finds what another process wrote to a disk store, and never other bytes."""

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import count, islice
from pathlib import Path

import pytest

import disk_blocks
from disk_blocks import (
    IDENTITY,
    KEYS,
    SIZES,
    Call,
    Killed,
    State,
    abandon,
    applied,
    calls,
    content,
    dies_after,
    do,
    open_store,
    put,
)
from how_much import how_many
from hybridkv.errors import ConfigError
from hybridkv.stores import disk_view
from hybridkv.stores.disk_view import DiskView

ROOMY, SMALL = 1 << 22, 1 << 18


@pytest.fixture(autouse=True)
def _looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_view, "_REST", 0)


def view_of(folder: Path, max_bytes: int = ROOMY, identity: bytes = IDENTITY) -> DiskView:
    return DiskView(folder, max_bytes, identity, SIZES)


def found(view: DiskView, key: bytes, blocks: set[bytes]) -> bytes | None:
    """Which of some blocks a view has."""
    for block in blocks:
        buffer = bytearray(len(block))
        if view.get([key], [memoryview(buffer)]) == [True]:
            return bytes(buffer)
    return None


@pytest.mark.parametrize("max_bytes", [ROOMY, SMALL])
@pytest.mark.parametrize("seed", range(how_many(6)))
def test_view_has_what_the_writer_has_after_each_call(tmp_path: Path, seed: int, max_bytes: int) -> None:
    view, state = view_of(tmp_path, max_bytes), State()
    assert not any(view.exists(KEYS))
    with open_store(tmp_path, max_bytes) as store:
        for call in islice(calls(seed), 150):
            do(store, call)
            state = applied(state, call)
            known = view.exists(KEYS)
            assert known == store.exists(KEYS)
            assert max_bytes == SMALL or known == [key in state for key in KEYS]
            for key, is_known in zip(KEYS, known, strict=True):
                assert found(view, key, {state[key]} if key in state else set()) == (state[key] if is_known else None)
        late = view_of(tmp_path, max_bytes)
        assert late.exists(KEYS) == view.exists(KEYS)
        late.close()
    view.close()


@pytest.mark.parametrize("torn", [0.0, 0.37, 1.0])
def test_view_has_whole_blocks_when_the_writer_dies_in_a_write(tmp_path: Path, torn: float) -> None:
    """The same view goes on with the writers that follow."""
    view, state, run, deaths = view_of(tmp_path), State(), calls(7), 0
    for writes in islice(count(), how_many(80) + 30):
        store, call = open_store(tmp_path, ROOMY), None
        with dies_after(writes % 13, torn):
            try:
                for call in run:
                    do(store, call)
                    state = applied(state, call)
            except Killed:
                deaths += 1
        abandon(store)
        state = whole(view, state, call)
        assert whole(view_of(tmp_path), state, None) == state, "one that is opened now"
    assert deaths >= 30


def whole(view: DiskView, before: State, call: Call | None) -> State:
    """What a view has, which is the state before a call or after it, for each key."""
    after, has = before if call is None else applied(before, call), State()
    for key, is_known in zip(KEYS, view.exists(KEYS), strict=True):
        allowed = {before.get(key), after.get(key)}
        block = found(view, key, {one for one in allowed if one is not None})
        assert (block is not None) == is_known
        assert block in allowed, f"{key!r} is lost"
        if block is not None:
            has[key] = block
    return has


@pytest.mark.parametrize("max_bytes", [ROOMY, SMALL])
def test_view_reads_while_another_process_writes_and_is_killed(tmp_path: Path, max_bytes: int) -> None:
    with subprocess.Popen(  # noqa: S603  # this interpreter
        [sys.executable, disk_blocks.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None
        for seed in range(how_many(4)):
            folder = tmp_path / str(seed)
            view = view_of(folder, max_bytes)
            runner.stdin.write(b"%s\t%d\t%d\n" % (bytes(folder), seed, max_bytes))
            runner.stdin.flush()
            process = int(runner.stdout.readline())
            seen, killer, end = 0, threading.Timer(0.3, os.kill, (process, signal.SIGKILL)), time.monotonic() + 45
            while killer.ident is None or killer.is_alive():
                seen += sum(require_own(view, key, entry.length) for key, entry in list(view._entries.items()))
                view.exists(KEYS)
                if killer.ident is None and seen > 5:
                    killer.start()
                assert time.monotonic() < end, f"read {seen} blocks"
            done = len(runner.stdout.readline()) - 1
            state = State()
            run = calls(seed)
            for call in islice(run, done):
                state = applied(state, call)
            if max_bytes == ROOMY:
                whole(view, state, next(run))
            view.close()


def require_own(view: DiskView, key: bytes, length: int) -> bool:
    """Read a block, which must be one that a call put under this key; return whether it arrived."""
    buffer = bytearray(length)
    if view.get([key], [memoryview(buffer)]) != [True]:
        return False
    assert any(content(key, version) == buffer for version in range(1, 1 << 16)), f"{key!r} has other bytes"
    return True


def test_view_neither_writes_nor_locks(tmp_path: Path) -> None:
    blocks = {key: content(key, 1) for key in KEYS[:4]}
    with open_store(tmp_path, ROOMY) as store:
        assert all(put(store, blocks))
    before = (tmp_path / "blocks").read_bytes()
    view = view_of(tmp_path)
    with open_store(tmp_path, ROOMY) as store:
        assert store.exists(KEYS) == view.exists(KEYS)
    assert view.put(KEYS[5:6], [memoryview(b"block")]) == [False]
    assert view.exists(KEYS[:6]) == [True] * 4 + [False] * 2
    buffer = memoryview(bytearray(3))
    assert view.get(KEYS[:1], [buffer]) == [False], "of another length"
    view.close()
    assert len(before) == (tmp_path / "blocks").stat().st_size


def test_damaged_block_is_a_miss(tmp_path: Path) -> None:
    block = content(KEYS[0], 1)
    with open_store(tmp_path, ROOMY) as store:
        put(store, {KEYS[0]: block})
        at = store._geometry.block_offset(store._slots.entries[KEYS[0]].place)
    view = view_of(tmp_path)
    assert found(view, KEYS[0], {block}) == block
    with (tmp_path / "blocks").open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([block[5] ^ 1]))
    assert found(view, KEYS[0], {block}) is None
    view.close()


def test_another_identity_is_rejected_before_the_writer_opens(tmp_path: Path) -> None:
    open_store(tmp_path, ROOMY).close()
    with pytest.raises(ConfigError, match="was made for another model"):
        view_of(tmp_path, identity=b"other")
    missing = view_of(tmp_path / "missing", identity=b"other")
    assert missing.get(KEYS[:1], [memoryview(bytearray(3))]) == [False]
    missing.close()
    assert not (tmp_path / "missing").exists()


def test_records_are_looked_at_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(disk_view, "_REST", 50)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with open_store(tmp_path, ROOMY) as store:
        view = view_of(tmp_path)
        changes, slow = view._file.changes, [0]  # type: ignore[union-attr]

        def changed(seen: object) -> object:
            slow[0] += 1
            clock[0] += 0.1
            return changes(seen)  # type: ignore[arg-type]

        monkeypatch.setattr(view._file, "changes", changed)
        assert view.exists(KEYS[:1]) == [False]
        put(store, {KEYS[0]: content(KEYS[0], 1)})
        clock[0] += 4.9
        assert view.exists(KEYS[:1]) == [False]
        clock[0] += 0.2
        assert view.exists(KEYS[:1]) == [True]
        assert slow == [2]
        view.close()
