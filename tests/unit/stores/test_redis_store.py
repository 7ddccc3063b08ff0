"""A store on Redis, with a server of the test's own that has faults. tests/stores has real servers."""

import logging
import time
from collections.abc import Iterator

import pytest

from hybridkv.stores import SharedStore, bounded, open_store
from resp_server import RespServer
from store_contract import block, get, lengths_of, put, wait_until

TIMEOUT_S = 0.3
LATE_S = 5.0
"""What a busy machine may add; a server that hangs does so for a minute."""
BLOCKS = {b"%d" % number: block(b"%d" % number, 3000) for number in range(6)}


@pytest.fixture
def server() -> Iterator[RespServer]:
    with RespServer() as made:
        yield made


@pytest.fixture
def url(server: RespServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(bounded, "PAUSE_S", 0.1)
    return f"redis://127.0.0.1:{server.port}"


@pytest.fixture
def store(url: str) -> Iterator[SharedStore]:
    """A store that waits as long as a busy machine needs."""
    with open_store(f"{url}?timeout_s=20") as made:
        yield made


@pytest.fixture
def hasty(url: str) -> Iterator[SharedStore]:
    with open_store(f"{url}?timeout_s={TIMEOUT_S}") as made:
        yield made


def require_misses(store: SharedStore) -> None:
    """All calls answer False, and in time."""
    begun = time.monotonic()
    assert store.exists([*BLOCKS]) == [False] * 6
    assert get(store, lengths_of(BLOCKS)) == {}
    assert put(store, BLOCKS) == [False] * 6
    assert time.monotonic() - begun < LATE_S


@pytest.mark.parametrize("fault", ["hangs", "drips", "dies in an answer", "dies before an answer", "garbage"])
@pytest.mark.parametrize("call", ["exists", "get", "put"])
def test_fault_of_the_server_gives_misses_in_time(
    server: RespServer, store: SharedStore, hasty: SharedStore, fault: str, call: str
) -> None:
    assert put(store, BLOCKS) == [True] * 6
    server.fault = fault
    begun = time.monotonic()
    if call == "exists":
        assert hasty.exists([*BLOCKS]) == [False] * 6
    elif call == "get":
        assert get(hasty, lengths_of(BLOCKS)) == {}
    else:
        assert not all(put(hasty, BLOCKS))
    assert time.monotonic() - begun < LATE_S
    assert hasty.statistics().failed == 1
    server.fault = ""
    wait_until(lambda: put(hasty, {b"after": b"the fault"}) == [True])
    assert store.exists([*BLOCKS]) == [True] * 6
    assert get(store, lengths_of(BLOCKS)) == BLOCKS


def test_server_that_is_down_costs_one_timeout_a_pause(
    server: RespServer, hasty: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "PAUSE_S", 60.0)
    server.fault = "hangs"
    assert hasty.exists([b"k"]) == [False]
    begun = time.monotonic()
    for _ in range(50):
        require_misses(hasty)
    assert time.monotonic() - begun < LATE_S
    assert (hasty.statistics().failed, hasty.statistics().skipped) == (1, 150)


def test_server_that_is_killed_and_back_is_used_again(server: RespServer, store: SharedStore) -> None:
    assert all(put(store, BLOCKS))
    server.stop()
    require_misses(store)
    server.start_empty()
    wait_until(lambda: put(store, {b"new": b"block"}) == [True])
    assert store.exists([b"new", b"0"]) == [True, False]
    assert get(store, {b"new": 5, b"0": 3000}) == {b"new": b"block"}


def test_connection_that_ended_is_made_again(server: RespServer, store: SharedStore) -> None:
    """A server ends idle connections. That is no failure."""
    server.fault = "ends the connection"
    for number in range(5):
        assert put(store, {b"%d" % number: b"block"}) == [True]
        time.sleep(0.02)
    server.fault = ""
    assert store.exists([b"%d" % number for number in range(5)]) == [True] * 5
    assert store.statistics().failed == 0


def test_server_without_room_drops_blocks_and_goes_on(server: RespServer, store: SharedStore) -> None:
    assert put(store, {b"k": b"block"}) == [True]
    server.fault = "rejects"
    assert put(store, BLOCKS) == [False] * 6
    server.fault = ""
    assert get(store, {b"k": 5}) == {b"k": b"block"}
    made = store.statistics()
    assert (made.failed, made.skipped, made.dropped, made.stored) == (0, 0, 6, 1)


def test_blocks_that_came_before_a_failure_are_found(server: RespServer, store: SharedStore) -> None:
    """The second request of a call fails: what the first one brought is there."""
    large = {b"%d" % number: block(b"%d" % number, 7 << 20) for number in range(4)}
    assert all(all(put(store, {key: one})) for key, one in large.items())
    values = server.values

    class Dying(dict[bytes, bytes]):
        def get(self, key: bytes, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
            if key.endswith(b"3"):
                server.fault = "dies before an answer"
            return values.get(key, default)

    server.values = Dying(values)
    assert get(store, lengths_of(large)) == {key: large[key] for key in (b"0", b"1")}
    assert store.statistics().failed == 1


def test_large_calls_are_split(server: RespServer, store: SharedStore) -> None:
    many = {b"%d" % number: b"x" for number in range(2500)}
    server.commands.clear()
    assert all(put(store, many))
    assert len(get(store, lengths_of(many))) == 2500
    assert server.commands.count("MGET") == 3
    large = {b"large %d" % number: block(b"", 7 << 20) for number in range(5)}
    server.commands.clear()
    for key, one in large.items():
        assert put(store, {key: one}) == [True]
    assert get(store, lengths_of(large)) == large
    assert server.commands.count("MGET") == 3


def test_ttl_is_set(server: RespServer) -> None:
    with open_store(f"valkey://127.0.0.1:{server.port}/0?ttl_s=1.5") as store:
        put(store, {b"k": b"block"})
    assert server.lifetimes == {b"hkv1k": 1500}


def test_damaged_values_are_removed_and_counted(server: RespServer, store: SharedStore) -> None:
    put(store, {b"a": b"block", b"b": b"block"})
    whole = server.values[b"hkv1a"]
    for damaged in (b"", b"short", whole[:-1], whole + b"x", whole[:16], server.values[b"hkv1b"]):
        server.values[b"hkv1a"] = damaged
        assert get(store, {b"a": 5, b"b": 5}) == {b"b": b"block"}
        assert b"hkv1a" not in server.values
    assert (store.statistics().damaged, store.statistics().missed, store.statistics().failed) == (6, 6, 0)


def test_failure_and_return_are_logged_once(
    server: RespServer, store: SharedStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hybridkv"):
        server.stop()
        for _ in range(30):
            store.exists([b"k"])
            time.sleep(0.02)
        assert len(caplog.messages) == 1
        assert f"redis://127.0.0.1:{server.port} does not answer" in caplog.messages[0]
        server.start_empty()
        wait_until(lambda: put(store, {b"k": b"block"}) == [True])
        assert store.exists([b"k"]) == [True]
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("answers again")


def test_password_is_not_in_messages(server: RespServer, caplog: pytest.LogCaptureFixture) -> None:
    server.stop()
    with open_store(f"redis://user:secret@127.0.0.1:{server.port}") as store:
        store.exists([b"k"])
    assert len(caplog.messages) == 1
    assert "secret" not in caplog.text
    assert "secret" not in str(store.statistics())


def test_close_ends_a_call_that_hangs(server: RespServer) -> None:
    store = open_store(f"redis://127.0.0.1:{server.port}?timeout_s=0.2")
    server.fault = "hangs"
    store.exists([b"k"])
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < LATE_S
