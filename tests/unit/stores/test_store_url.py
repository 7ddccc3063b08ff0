import sys
from pathlib import Path

import pytest

from hybridkv.errors import ConfigError
from hybridkv.stores import SharedStore, open_store
from hybridkv.stores.mooncake_client import MooncakeClient
from hybridkv.stores.redis_client import RedisClient
from store_contract import get, put


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "url must be text"),
        ("/a/folder", "the URL of a store must be like redis://host or file:///folder, got '/a/folder'"),
        ("://host", "the URL of a store must be like"),
        ("nope://host", r"no store can be opened in 'nope://host' \(Protocol not known: nope\): write file:///folder"),
        ("nope://user:secret@host", r"no store can be opened in 'nope://host' "),
        ("redis://host:port", "no store can be opened on 'redis://'"),
        ("redis://host:70000", "no store can be opened on 'redis://'"),
        ("redis://host?nope=1", "no store can be opened on 'redis://'.*nope"),
        ("redis://host?socket_timeout=x", "no store can be opened on 'redis://'"),
        ("redis://host?ttl_s=long", "ttl_s in the URL of a store must be a number, got 'long'"),
        ("redis://host?ttl_s=0", "ttl_s must be from 0.001 seconds to ten years, got 0"),
        ("redis://host?ttl_s=1e9", "ttl_s must be from"),
        ("redis://host?timeout_s=0", "timeout_s must be more than 0 and at most 3600 seconds, got 0"),
        ("redis://host?timeout_s=nan", "timeout_s must be a number, and finite"),
        ("redis://host?timeout_s=", "timeout_s in the URL of a store must be a number, got ''"),
        ("redis://host?max_block_bytes=1TiB", "max_block_bytes must be at most 268435456"),
        ("redis://host?max_block_bytes=many", "not a size: 'many'"),
        ("memory://?max_bytes=0", "size must be positive"),
        ("memory://?ttl_s=5", "unknown option 'ttl_s': known ones are timeout_s, max_block_bytes, max_bytes"),
        ("mooncake://host", "the master of Mooncake must be host:port, got 'host'"),
        ("mooncake://host:0", "must be host:port"),
        ("mooncake://host:1?memory=x", "not a size: 'x'"),
        ("mooncake://host:1?max_bytes=1", "unknown option 'max_bytes': known ones are .* memory, protocol, devices"),
    ],
)
def test_wrong_url_is_rejected_by_name(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "package", "message"),
    [
        ("redis://host", "redis", r"'redis://' needs the package redis: pip install 'hybridkv\[redis\]'"),
        ("memory://", "fsspec.core", r"'memory://' needs the package fsspec: pip install 'hybridkv\[fsspec\]'"),
        ("mooncake://host:1", "mooncake.store", r"mooncake:// needs .* pip install 'hybridkv\[mooncake\]'"),
        ("memory://", "xxhash", r"a shared store needs the package xxhash: pip install 'hybridkv\[hash\]'"),
        ("sftp://host/x", "paramiko", r"'sftp://host/x' needs another package: .*paramiko"),
    ],
)
def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, url: str, package: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=message):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://host", "redis://host:6379"),
        ("redis://", "redis://localhost:6379"),
        ("valkey://user:secret@host:7/3", "redis://host:7"),
        ("rediss://host:7?ssl_cert_reqs=none", "redis://host:7"),
        ("unix:///run/redis.sock?db=2", "/run/redis.sock"),
        ("file:///a/folder?max_bytes=1GiB", "file:///a/folder"),
        ("memory://cache", "memory:///cache"),
    ],
)
def test_url_chooses_the_engine(url: str, name: str) -> None:
    """Nothing is connected, so no engine needs to be there."""
    store = open_store(url)
    assert type(store) is SharedStore
    assert store._client.name == name
    store.close()


def test_options_of_the_url_reach_redis() -> None:
    with open_store("redis://user:secret@host:7/3?ttl_s=2&timeout_s=0.25&client_name=me") as store:
        assert isinstance(store._client, RedisClient)
        options = store._client._redis.connection_pool.connection_kwargs
        assert {name: options[name] for name in ("username", "password", "db", "client_name")} == {
            "username": "user",
            "password": "secret",
            "db": 3,
            "client_name": "me",
        }
        assert (options["socket_timeout"], store._client._ttl_ms) == (0.25, 2000)


def test_options_of_the_url_reach_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.stores.mooncake_client._store_class", lambda: None)
    store = open_store(
        "mooncake://host:50051/?memory=4GiB&protocol=rdma&devices=mlx5_0&hostname=me&metadata=http://m:1/"
    )
    client = store._client
    assert isinstance(client, MooncakeClient)
    assert (client.name, client._hostname) == ("mooncake://host:50051", "me")
    assert client._options == ("http://m:1/", 4 << 30, 16 << 20, "rdma", "mlx5_0", "host:50051")


def test_longest_block_is_a_choice(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}?max_block_bytes=1KiB") as store:
        assert put(store, {b"k": bytes(1024)}) == [True]
        assert get(store, {b"k": 1024, b"l": 1025}) == {b"k": bytes(1024)}
        with pytest.raises(ConfigError, match=r"a block of 1 KiB is longer than max_block_bytes, which is 1 KiB"):
            put(store, {b"k": bytes(1025)})
