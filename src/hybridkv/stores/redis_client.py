"""Values of a shared store on a server that speaks the protocol of Redis: Redis, Valkey, and others.

    SET hkv1<key> value [PX ttl]    EXISTS hkv1<key> ..    MGET hkv1<key> ..    DEL hkv1<key> ..

The server evicts, if it has ``maxmemory`` and ``maxmemory-policy allkeys-lru``. With ``maxmemory`` alone, it rejects
what is too much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from hybridkv.arguments import real
from hybridkv.errors import ConfigError
from hybridkv.stores.shared import Value
from hybridkv.units import shown

if TYPE_CHECKING:
    import redis

_PREFIX: Final = b"hkv1"
_LONGEST_TTL_S: Final = 10 * 366 * 86400


class RedisClient:
    """A StoreClient for Redis and Valkey, one server or a proxy. Values of a batch move in one request.

    Args:
        url: ``redis://[user:password@]host[:port][/database]``, ``rediss://`` with TLS, or ``unix:///path``. Further
            options of ``redis.from_url`` may follow after ``?``.
        timeout_s: Seconds to connect, and between two pieces of an answer.
        ttl_s: Seconds that the server keeps a value; ``None`` for no limit.

    Raises:
        ConfigError: The URL or an option is wrong, or the package redis is missing.
    """

    def __init__(self, url: str, timeout_s: float = 1.0, ttl_s: float | None = None) -> None:
        if ttl_s is not None and not 0.001 <= real("ttl_s", ttl_s) <= _LONGEST_TTL_S:
            raise ConfigError(f"ttl_s must be from 0.001 seconds to ten years, got {ttl_s}")
        self._ttl_ms = None if ttl_s is None else int(ttl_s * 1000)
        self._redis = _connections(url, timeout_s)
        options = self._redis.connection_pool.connection_kwargs
        self.name = options.get("path") or f"redis://{options.get('host', 'localhost')}:{options.get('port', 6379)}"

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether there is a value.

        Args:
            keys: At most 1,024 keys.
        """
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(_PREFIX + key)
            return [answer == 1 for answer in pipeline.execute()]

    def read(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:  # noqa: ARG002  # as the server has them
        """Yield the values that are there, each with its place in ``keys``.

        Args:
            keys: At most 1,024 keys.
            lengths: Not used.
        """
        for number, value in enumerate(self._redis.mget([_PREFIX + key for key in keys])):
            if value is not None:
                yield number, value

    def write(self, values: Sequence[Value]) -> list[bool]:
        """Write values, and return for each whether the server kept it. False: its memory is full.

        Args:
            values: At most 1,024 values.
        """
        with self._redis.pipeline(transaction=False) as pipeline:
            for key, checksum, block in values:
                pipeline.set(_PREFIX + key, b"".join((checksum, block)), px=self._ttl_ms)
            return [answer is True for answer in pipeline.execute(raise_on_error=False)]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove values.

        Args:
            keys: At most 1,024 keys.
        """
        self._redis.delete(*(_PREFIX + key for key in keys))

    def close(self) -> None:
        """Close connections."""
        self._redis.close()
        self._redis.connection_pool.disconnect()


def _connections(url: str, timeout_s: float) -> redis.Redis:
    """Return a client that connects when it is used."""
    try:
        import redis  # noqa: PLC0415 - optional dependency
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.retry import Retry  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"{_scheme(url)} needs the package redis: pip install 'hybridkv[redis]'") from error
    try:
        made = redis.Redis.from_url(
            url,
            protocol=2,  # servers before version 6 speak no other
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # a block is not worth a second try
        )
        made.connection_pool.make_connection()  # which connects later: it checks the options
    except (ValueError, TypeError, AttributeError, redis.RedisError) as error:
        raise ConfigError(
            f"no store can be opened on {_scheme(url)} ({error}): write redis://host:port/database"
        ) from error
    return made


def _scheme(url: str) -> str:
    """Return the part of a URL before passwords."""
    return shown(url.partition("://")[0] + "://")
