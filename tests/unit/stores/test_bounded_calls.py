"""Calls that hang or fail never hold their caller, and never touch what it has taken back."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from hybridkv.stores import SharedStore, bounded
from hybridkv.stores.bounded import BoundedCalls, Call
from hybridkv.stores.shared import Value
from store_contract import get, lengths_of, put, wait_until


class Waiting:
    """A client in memory that waits before each answer, as long as the test wants, and says what it does."""

    name = "a client of the test"

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.running = 0
        self.most_running = 0
        self.is_closed = False
        self._lock = threading.Lock()

    def _wait(self) -> None:
        with self._lock:
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        assert self.goes_on.wait(20)
        with self._lock:
            self.running -= 1

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._wait()
        return [key in self.values for key in keys]

    def read(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        assert len(keys) == len(lengths) > 0
        for number, key in enumerate(keys):
            if number:
                self._wait()
            if key in self.values:
                yield number, self.values[key]

    def write(self, values: Sequence[Value]) -> list[bool]:
        assert values
        self._wait()
        for key, checksum, block in values:
            self.values[key] = checksum + bytes(block)
        return [True] * len(values)

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def close(self) -> None:
        assert not self.running, "some clients crash if they are closed during a call"
        self.is_closed = True


@pytest.fixture
def client() -> Waiting:
    return Waiting()


def test_late_answer_writes_no_buffer(client: Waiting) -> None:
    assert put(SharedStore(client, timeout_s=20), {b"a": b"first", b"b": b"later"}) == [True, True]
    store = SharedStore(client, timeout_s=0.5)
    client.goes_on.clear()
    buffers = [bytearray(5), bytearray(5)]
    assert store.get([b"a", b"b"], [memoryview(one) for one in buffers]) == [True, False]
    assert buffers == [b"first", bytes(5)]
    client.goes_on.set()
    wait_until(lambda: not client.running)
    time.sleep(0.02)
    assert buffers == [b"first", bytes(5)]


def test_late_write_of_a_block_that_changed_is_a_miss(client: Waiting) -> None:
    """A put that took too long may still write. The caller has its block back, and changes it."""
    store, source = SharedStore(client, timeout_s=0.1), bytearray(b"a block")
    client.goes_on.clear()
    assert store.put([b"k"], [memoryview(source)]) == [False]
    source[:] = b"another"
    client.goes_on.set()
    wait_until(lambda: not client.running)
    after = SharedStore(client, timeout_s=20)
    wait_until(lambda: after.exists([b"k"]) == [True])
    assert get(after, {b"k": 7}) == {}
    assert after.statistics().damaged == 1


def test_calls_that_hang_take_eight_threads_at_most(client: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "PAUSE_S", 0.0)
    store = SharedStore(client, timeout_s=0.05)
    client.goes_on.clear()
    before = threading.active_count()
    for _ in range(30):
        assert store.exists([b"k"]) == [False]
    assert threading.active_count() - before == client.most_running == 8
    client.goes_on.set()
    wait_until(lambda: not client.running)
    client.values[b"k"] = b""
    wait_until(lambda: store.exists([b"k"]) == [True])
    assert client.most_running == 8
    store.close()
    assert client.is_closed


def test_call_that_nobody_waits_for_is_not_begun(client: Waiting) -> None:
    calls, begun = BoundedCalls("name", 0.05, threads=1), list[int]()
    client.goes_on.clear()
    assert calls.run(lambda _: client._wait()) is False
    calls._is_failing = False
    assert calls.run(lambda _: begun.append(1)) is False
    client.goes_on.set()
    wait_until(lambda: not client.running)
    calls._is_failing, calls._timeout_s = False, 20
    assert calls.run(lambda _: begun.append(2)) is True
    assert begun == [2]


def test_one_call_at_a_time_tries_a_server_that_failed(client: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "PAUSE_S", 0.05)
    calls = BoundedCalls("name", 20, threads=8)

    def fails(_: Call) -> None:
        raise OSError("down")

    assert calls.run(fails) is False
    assert calls.run(lambda _: None) is None
    time.sleep(0.06)
    client.goes_on.clear()
    answers = list[bool | None]()
    threads = [threading.Thread(target=lambda: answers.append(calls.run(lambda _: client._wait()))) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    client.goes_on.set()
    for thread in threads:
        thread.join()
    assert sorted(answers, key=str) == [None] * 5 + [True]
    assert calls.run(lambda _: None) is True


def test_close_waits_for_calls_and_does_not_hang(client: Waiting) -> None:
    store = SharedStore(client, timeout_s=0.3)
    client.goes_on.clear()
    caller = threading.Thread(target=store.exists, args=([b"k"],))
    caller.start()
    time.sleep(0.02)
    begun = time.monotonic()
    store.close()
    assert not caller.is_alive()
    assert 0.2 < time.monotonic() - begun < 10
    time.sleep(0.02)
    assert not client.is_closed
    client.goes_on.set()
    wait_until(lambda: client.is_closed)


def test_threads_end_with_their_store(client: Waiting) -> None:
    """Calls one after another share one thread."""
    before = threading.active_count()
    for _ in range(5):
        with SharedStore(client, timeout_s=20) as store:
            for _ in range(20):
                store.exists([b"k"])
            assert threading.active_count() <= before + 1
    wait_until(lambda: threading.active_count() <= before)


def test_client_gets_no_request_without_keys(client: Waiting) -> None:
    store = SharedStore(client, timeout_s=20, max_block_bytes=32 << 20)
    assert store.exists([]) == store.get([], []) == store.put([], []) == []
    blocks = {b"longer than a request": bytes(17 << 20), b"after it": b"block"}
    assert put(store, blocks) == [True, True]
    assert get(store, lengths_of(blocks)) == blocks
    assert store.statistics().failed == 0


def test_statistics_count_seconds(client: Waiting) -> None:
    store = SharedStore(client, timeout_s=20)
    put(store, {b"k": b"block"})
    made = store.statistics()
    assert 0 < made.put_s < 20
    assert made.get_s == 0
    get(store, {b"k": 5, b"l": 1})
    made = store.statistics()
    assert 0 < made.get_s < 20
    assert (made.found, made.found_bytes, made.missed, made.stored, made.stored_bytes) == (1, 5, 1, 1, 5)
