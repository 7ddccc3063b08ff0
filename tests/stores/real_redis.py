"""Stores on a real Redis or Valkey server: the contract, and faults of the server."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from servers import Child, Server, redis_server

from hybridkv.stores import SharedStore, open_store
from store_contract import CONTRACT, Kept, block, get, lengths_of, put, put_and_get_at_random, wait_until

TIMEOUT_S = 0.5
BLOCKS = {b"%d" % number: block(b"%d" % number, 100_000) for number in range(20)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with redis_server(tmp_path) as made:
        yield made


@pytest.fixture
def store(server: Server) -> Iterator[SharedStore]:
    with open_store(f"redis://127.0.0.1:{server.port}?timeout_s={TIMEOUT_S}") as made:
        yield made


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_store_keeps_the_contract(server: Server, check: Callable[[Kept], None]) -> None:
    client = redis.Redis(port=server.port)

    def flip(key: bytes) -> None:
        content = bytearray(client.get(b"hkv1" + key))
        content[len(content) // 2] ^= 4
        client.set(b"hkv1" + key, bytes(content))

    check(
        Kept(
            lambda: open_store(f"redis://127.0.0.1:{server.port}?timeout_s=20"),
            flip,
            lambda one, other: client.copy(b"hkv1" + one, b"hkv1" + other),
        )
    )
    client.close()


def require_misses_in_time(store: SharedStore) -> None:
    begun = time.monotonic()
    assert store.exists([*BLOCKS]) == [False] * 20
    assert get(store, lengths_of(BLOCKS)) == {}
    assert put(store, BLOCKS) == [False] * 20
    assert time.monotonic() - begun < TIMEOUT_S + 0.3


def test_server_that_hangs_gives_misses_until_it_goes_on(server: Server, store: SharedStore) -> None:
    assert all(put(store, BLOCKS))
    server.hang()
    require_misses_in_time(store)
    server.go_on()
    wait_until(lambda: get(store, lengths_of(BLOCKS)) == BLOCKS)


def test_server_that_is_killed_gives_misses_until_it_is_back_empty(server: Server, store: SharedStore) -> None:
    assert all(put(store, BLOCKS))
    server.kill()
    require_misses_in_time(store)
    server.start()
    wait_until(lambda: put(store, {b"new": b"block"}) == [True])
    assert store.exists([b"new", *BLOCKS]) == [True, *[False] * 20]
    assert all(put(store, BLOCKS))
    assert get(store, lengths_of(BLOCKS)) == BLOCKS


def test_server_that_is_killed_and_hung_during_calls_raises_nothing(server: Server, store: SharedStore) -> None:
    """Threads put and read all the time. Every block that is found has its bytes, and no call is late."""
    longest = [0.0]

    def work(seed: int) -> int:
        found, end = 0, time.monotonic() + 8
        while time.monotonic() < end:
            begun = time.monotonic()
            found += put_and_get_at_random(store, seed)
            longest[0] = max(longest[0], time.monotonic() - begun)
            seed += 4
        return found

    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(work, range(4))
        for _ in range(2):
            time.sleep(0.5)
            server.hang()
            time.sleep(0.7)
            server.go_on()
            time.sleep(1)
            server.kill()
            time.sleep(0.2)
            server.start()
        assert sum(answers) > 1000
    assert longest[0] < 40 * TIMEOUT_S  # 40 calls, of which at most a few waited
    assert store.statistics().failed >= 4
    assert store.statistics().damaged == 0


def test_full_server_evicts_the_least_recently_used(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru") as server:
        store = open_store(f"valkey://127.0.0.1:{server.port}?timeout_s=20")
        blocks = {b"%d" % number: block(b"%d" % number, 1 << 20) for number in range(40)}
        for key, one in blocks.items():
            assert put(store, {key: one}) == [True]
        found = get(store, lengths_of(blocks))
        assert 8 < len(found) < 20
        assert found.items() <= blocks.items()
        store.close()


def test_full_server_that_does_not_evict_drops_blocks(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "20mb", "--maxmemory-policy", "noeviction") as server:
        store = open_store(f"redis://127.0.0.1:{server.port}?timeout_s=20")
        blocks = {b"%d" % number: block(b"%d" % number, 1 << 20) for number in range(40)}
        kept = put(store, blocks)
        assert 8 < sum(kept) < 25
        assert len(get(store, lengths_of(blocks))) == sum(kept)
        assert store.statistics().failed == 0
        store.close()


def test_block_leaves_after_its_time(server: Server) -> None:
    with open_store(f"redis://127.0.0.1:{server.port}?ttl_s=0.4") as store:
        put(store, {b"k": b"block"})
        assert store.exists([b"k"]) == [True]
        time.sleep(0.5)
        assert store.exists([b"k"]) == [False]
        assert get(store, {b"k": 5}) == {}


def test_wrong_password_gives_misses(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "secret") as server:
        with open_store(f"redis://:wrong@127.0.0.1:{server.port}") as store:
            assert put(store, {b"k": b"block"}) == [False]
        with open_store(f"redis://:secret@127.0.0.1:{server.port}") as store:
            assert put(store, {b"k": b"block"}) == [True]


def test_processes_share_blocks(server: Server, store: SharedStore) -> None:
    with Child(f"redis://127.0.0.1:{server.port}?timeout_s=20") as child:
        assert child.do("put(store, {b'k': block(b'k', 100000)})") == "[True]"
        assert get(store, {b"k": 100_000}) == {b"k": block(b"k", 100_000)}
        assert put(store, {b"l": block(b"l", 100)}) == [True]
        assert child.do("get(store, {b'l': 100}) == {b'l': block(b'l', 100)}") == "True"
        child.process.kill()
    assert get(store, {b"k": 100_000}) == {b"k": block(b"k", 100_000)}
