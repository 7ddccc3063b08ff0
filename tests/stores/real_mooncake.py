"""Stores on a real Mooncake master: the contract, and faults of the master and of processes that lend memory."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mooncake.store import MooncakeDistributedStore
from servers import Child, Server, mooncake_master

from hybridkv.stores import SharedStore, open_store
from store_contract import CONTRACT, Kept, block, get, lengths_of, put, wait_until

TIMEOUT_S = 1.0
BLOCKS = {b"%d" % number: block(b"%d" % number, 100_000) for number in range(20)}


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Server]:
    with mooncake_master(tmp_path) as made:
        yield made


def url_of(master: Server, memory: str = "", timeout_s: float = TIMEOUT_S) -> str:
    lent = f"&memory={memory}" if memory else ""
    return f"mooncake://127.0.0.1:{master.port}?timeout_s={timeout_s}{lent}"


@pytest.fixture
def store(master: Server) -> Iterator[SharedStore]:
    """A store that lends memory itself."""
    with open_store(url_of(master, "64MiB")) as made:
        wait_until(lambda: put(made, {b"first": b"block"}) == [True])
        yield made


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_store_keeps_the_contract(master: Server, check: Callable[[Kept], None]) -> None:
    """Another process lends the memory."""
    client = MooncakeDistributedStore()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{master.port}") == 0

    def name(key: bytes) -> str:
        return "hkv1" + key.hex()

    def flip(key: bytes) -> None:
        content = bytearray(client.get(name(key)))
        content[len(content) // 2] ^= 4
        assert client.remove(name(key), force=True) == 0
        assert client.put(name(key), bytes(content)) == 0

    def move(one: bytes, other: bytes) -> None:
        assert client.put(name(other), client.get(name(one))) == 0

    with Child(url_of(master, "256MiB")) as child:
        wait_until(lambda: child.do("put(store, {b'first': b'block'})") == "[True]")
        check(Kept(lambda: open_store(url_of(master, timeout_s=20)), flip, move))
    client.close()


def require_misses_in_time(store: SharedStore) -> None:
    begun = time.monotonic()
    assert store.exists([*BLOCKS]) == [False] * 20
    assert get(store, lengths_of(BLOCKS)) == {}
    assert put(store, BLOCKS) == [False] * 20
    assert time.monotonic() - begun < TIMEOUT_S + 0.3


def test_master_that_hangs_gives_misses_until_it_goes_on(master: Server, store: SharedStore) -> None:
    assert all(put(store, BLOCKS))
    master.hang()
    require_misses_in_time(store)
    master.go_on()
    wait_until(lambda: get(store, lengths_of(BLOCKS)) == BLOCKS)


def test_master_that_is_killed_gives_misses_until_it_is_back_empty(master: Server, store: SharedStore) -> None:
    assert all(put(store, BLOCKS))
    master.kill()
    require_misses_in_time(store)
    master.start()
    wait_until(lambda: all(put(store, BLOCKS)))
    assert get(store, lengths_of(BLOCKS)) == BLOCKS


def test_master_may_start_after_the_store(master: Server) -> None:
    master.kill()
    with open_store(url_of(master, "64MiB")) as store:
        require_misses_in_time(store)
        master.start()
        wait_until(lambda: all(put(store, BLOCKS)))
        assert get(store, lengths_of(BLOCKS)) == BLOCKS


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_blocks_of_a_process_that_died_or_hangs_are_misses(master: Server, fault: signal.Signals) -> None:
    """The master takes them for existing some seconds longer. Blocks that this process lends memory for stay."""
    with Child(url_of(master, "64MiB")) as child, open_store(url_of(master)) as store:
        wait_until(lambda: child.do("put(store, {b'k': block(b'k', 100000)})") == "[True]")
        assert get(store, {b"k": 100_000}) == {b"k": block(b"k", 100_000)}
        child.process.send_signal(fault)
        time.sleep(0.2)
        begun = time.monotonic()
        assert get(store, {b"k": 100_000}) == {}
        assert time.monotonic() - begun < TIMEOUT_S + 0.3


def test_block_that_comes_after_its_lease_is_found(tmp_path: Path) -> None:
    with (
        mooncake_master(tmp_path, "--default_kv_lease_ttl=1") as master,
        open_store(url_of(master, "256MiB", timeout_s=20)) as store,
    ):
        blocks = {b"%d" % number: block(b"%d" % number, 3 << 20) for number in range(30)}
        wait_until(lambda: put(store, {b"first": b"block"}) == [True])
        assert all(put(store, blocks))
        assert get(store, lengths_of(blocks)) == blocks


def test_full_cluster_drops_or_evicts(tmp_path: Path) -> None:
    with (
        mooncake_master(tmp_path, "--default_kv_lease_ttl=100") as master,
        open_store(url_of(master, "64MiB", timeout_s=20)) as store,
    ):
        wait_until(lambda: put(store, {b"first": b"block"}) == [True])
        blocks = {b"%d" % number: block(b"%d" % number, 1 << 20) for number in range(150)}
        kept = [put(store, {key: one})[0] for key, one in blocks.items()]
        found = get(store, lengths_of(blocks))
        assert 20 < len(found) < 64
        assert sum(kept) >= len(found)
        assert found.items() <= blocks.items()
        assert store.statistics().failed == 0
        wait_until(lambda: put(store, {b"after": b"block"}) == [True])


def test_processes_share_blocks(master: Server, store: SharedStore) -> None:
    with Child(url_of(master, timeout_s=20)) as child:
        assert put(store, BLOCKS) == [True] * 20
        assert child.do("get(store, {b'7': 100000}) == {b'7': block(b'7', 100000)}") == "True"
        assert child.do("put(store, {b'k': block(b'k', 100000)})") == "[True]"
        assert get(store, {b"k": 100_000}) == {b"k": block(b"k", 100_000)}
        child.process.kill()
    assert get(store, {b"k": 100_000}) == {b"k": block(b"k", 100_000)}  # this process lends its memory


def test_close_of_a_store_whose_master_hangs_ends_in_time(master: Server) -> None:
    store = open_store(url_of(master, "16MiB"))
    wait_until(lambda: put(store, {b"k": b"block"}) == [True])
    master.hang()
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < TIMEOUT_S + 0.3
