"""Opens a shared store by its URL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import parse_qsl, urlencode

from hybridkv.arguments import text
from hybridkv.errors import ConfigError
from hybridkv.stores.folder_client import FolderClient
from hybridkv.stores.mooncake_client import MooncakeClient
from hybridkv.stores.redis_client import RedisClient
from hybridkv.stores.shared import SharedStore, StoreClient
from hybridkv.units import parse_bytes, shown

_REDIS: Final = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
"""Schemes of servers that speak Redis's protocol, and how redis-py writes them."""

_MOONCAKE: Final = ("protocol", "devices", "metadata", "hostname")
"""Options of a Mooncake client that are text."""


def open_store(url: str) -> SharedStore:
    """Return the shared store of a URL. No connection is made: a server that is down gives misses until it is up.

        redis://[user:password@]host[:port][/database]     valkey:// too; rediss:// and valkeys:// with TLS; unix:///path
        mooncake://host:port                               of mooncake_master
        file:///folder, s3://bucket/folder, ..             any file system of fsspec

    Options follow after ``?``, with ``&`` between them:

        timeout_s=1              most seconds of a call
        max_block_bytes=16MiB    longest block
        ttl_s=86400              Redis: seconds that a block is kept. Further options go to redis-py
        max_bytes=100GiB         file systems: the bound that processes sweep to
        memory=4GiB              Mooncake: memory that this process lends; protocol, devices, metadata, hostname

    Args:
        url: The URL.

    Raises:
        ConfigError: The URL is wrong, or a package is missing; the message names the extra to install.
    """
    scheme, found, rest = text("url", url).partition("://")
    if not found or not scheme:
        raise ConfigError(f"the URL of a store must be like redis://host or file:///folder, got {shown(url)}")
    rest, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    timeout_s = _number("timeout_s", options.pop("timeout_s", "1"))
    max_block_bytes = parse_bytes(options.pop("max_block_bytes", "16MiB"))
    client: StoreClient
    if scheme in _REDIS:
        ttl_s = options.pop("ttl_s", None)
        others = f"?{urlencode(options)}" if options else ""
        client = RedisClient(
            f"{_REDIS[scheme]}://{rest}{others}", timeout_s, None if ttl_s is None else _number("ttl_s", ttl_s)
        )
    elif scheme == "mooncake":
        memory = options.pop("memory", None)
        _require_known(options, "memory", _MOONCAKE)
        client = MooncakeClient(rest.rstrip("/"), 0 if memory is None else parse_bytes(memory), **options)
    else:
        max_bytes = options.pop("max_bytes", None)
        _require_known(options, "max_bytes", ())
        client = FolderClient(f"{scheme}://{rest}", None if max_bytes is None else parse_bytes(max_bytes))
    return SharedStore(client, timeout_s, max_block_bytes)


def _require_known(options: Mapping[str, str], taken: str, known: Collection[str]) -> None:
    """Raise ConfigError for options of a URL that nobody takes."""
    for name in options:
        if name not in known:
            names = ", ".join(["timeout_s", "max_block_bytes", taken, *known])
            raise ConfigError(f"the URL of a store has the unknown option {shown(name)}: known ones are {names}")


def _number(name: str, value: str) -> float:
    """Return the number that an option of a URL has."""
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{name} in the URL of a store must be a number, got {shown(value)}") from None
