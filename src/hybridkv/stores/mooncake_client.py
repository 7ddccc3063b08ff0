"""Values of a shared store in the memory of a Mooncake cluster.

    processes   each may lend memory to the cluster; values move between them, by TCP or RDMA
    master      knows where each value lies, and evicts

Mooncake moves bytes between registered memory. So values pass through buffers of this client, and a transfer that comes
too late writes into no buffer of the caller.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import integer, text
from hybridkv.errors import ConfigError
from hybridkv.stores.shared import CHECKSUM_BYTES, Value
from hybridkv.units import MOST_BYTES, MiB, shown

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

_PREFIX: Final = "hkv1"

_LOCAL_BUFFER_BYTES: Final = 16 * MiB
"""Memory for transfers that Mooncake takes for itself. Those of this client use buffers of their own."""

_LEASE_EXPIRED: Final = -707
"""The bytes came, but later than the value was safe from eviction. The checksum says whether they are right."""

_open_stores: Final[list[MooncakeDistributedStore]] = []
"""Stores that were set up and not closed. If one were deleted while the master hangs, the process would wait for it."""

_PROBE_S: Final = 1.0
"""Seconds in which a master that is alive ends a connection. It takes some milliseconds."""

_NO_ANSWER: Final = -900
"""This code and those below: the master did not answer."""


class MooncakeClient:
    """A StoreClient for Mooncake Store.

    A value whose owner died may exist for seconds in the answers of the master; reading it is a miss. A value that is
    there is not replaced.

    Args:
        master: ``host:port`` of ``mooncake_master``.
        memory_bytes: Memory that this process lends to the cluster, and that is lost with it. 0: it only uses that of
            others.
        protocol: How values move: ``tcp``, ``rdma`` or another one of Mooncake.
        devices: Network devices for RDMA, with commas.
        metadata: Mooncake's metadata server; by default, processes exchange metadata themselves.
        hostname: Name of this host for other processes; by default, the address from which it reaches the master.

    Raises:
        ConfigError: A value is out of range, or the package mooncake is missing.
    """

    def __init__(
        self,
        master: str,
        memory_bytes: int = 0,
        *,
        protocol: str = "tcp",
        devices: str = "",
        metadata: str = "P2PHANDSHAKE",
        hostname: str | None = None,
    ) -> None:
        host, _, port = text("master", master).rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ConfigError(f"the master of Mooncake must be host:port, got {shown(master)}")
        integer("memory_bytes", memory_bytes, 0, MOST_BYTES)
        self.name = f"mooncake://{master}"
        self._address = host.strip("[]"), int(port)
        self._hostname = hostname
        self._options = metadata, memory_bytes, _LOCAL_BUFFER_BYTES, protocol, devices, master
        self._make_store = _store_class()
        self._store: MooncakeDistributedStore | None = None
        self._lock = threading.Lock()
        self._buffers = queue.SimpleQueue[NDArray[np.uint8]]()

    def _connected(self) -> MooncakeDistributedStore:
        """Return the store of Mooncake. It is set up by the first call, and by later ones until this succeeds."""
        with self._lock:
            if self._store is None:
                self._require_master()
                store = self._make_store()
                code = store.setup(self._hostname or _own_address(self._address), *self._options)
                if code:
                    store.close()
                    raise ConnectionError(f"Mooncake's setup ended with code {code}")
                _open_stores.append(store)
                self._store = store
            return self._store

    def _require_master(self) -> None:
        """Raise OSError unless the master answers.

        Mooncake's setup and close wait 90 seconds for it, and no other thread of Python runs meanwhile. A live master
        ends a connection at once if it gets zeros.
        """
        with socket.create_connection(self._address, _PROBE_S) as probe, suppress(ConnectionResetError):
            probe.sendall(bytes(64))
            probe.recv(1)

    @contextmanager
    def _buffer(self, store: MooncakeDistributedStore, num_bytes: int) -> Iterator[NDArray[np.uint8]]:
        """Lend a registered buffer of at least ``num_bytes`` to one thread."""
        try:
            buffer = self._buffers.get_nowait()
        except queue.Empty:
            buffer = np.empty(0, np.uint8)
        if len(buffer) < num_bytes:
            if len(buffer):
                store.unregister_buffer(buffer.ctypes.data)
            buffer = np.empty(max(num_bytes, MiB), np.uint8)
            if code := store.register_buffer(buffer.ctypes.data, len(buffer)):
                raise ConnectionError(f"Mooncake's register_buffer ended with code {code}")
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the master knows a value.

        Args:
            keys: At most 1,024 keys.
        """
        codes = self._connected().batch_is_exist([_PREFIX + key.hex() for key in keys])
        _require_answer(codes)
        return [code == 1 for code in codes]

    def read(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """Yield the values that are there, each with its place in ``keys``.

        Args:
            keys: At most 1,024 keys.
            lengths: The bytes of each value. Longer values are left out.
        """
        store, ends = self._connected(), np.cumsum(lengths)
        with self._buffer(store, int(ends[-1])) as buffer:
            begins = (ends - lengths).tolist()
            codes = store.batch_get_into(
                [_PREFIX + key.hex() for key in keys], [buffer.ctypes.data + at for at in begins], [*lengths]
            )
            for number, (code, begin, length) in enumerate(zip(codes, begins, lengths, strict=True)):
                arrived = length if code == _LEASE_EXPIRED else code
                if arrived > CHECKSUM_BYTES:
                    yield number, buffer[begin : begin + arrived].data
        _require_answer(codes)

    def write(self, values: Sequence[Value]) -> list[bool]:
        """Write values, and return for each whether the cluster kept it. False: its memory is full.

        Args:
            values: At most 1,024 values.
        """
        store, begins, sizes = self._connected(), list[int](), list[int]()
        with self._buffer(store, sum(CHECKSUM_BYTES + len(block) for _, _, block in values)) as buffer:
            end = 0
            for _, checksum, block in values:
                begins.append(buffer.ctypes.data + end)
                sizes.append(CHECKSUM_BYTES + len(block))
                buffer[end : end + CHECKSUM_BYTES] = np.frombuffer(checksum, np.uint8)
                buffer[end + CHECKSUM_BYTES : end + sizes[-1]] = np.frombuffer(block, np.uint8)
                end += sizes[-1]
            codes = store.batch_put_from([_PREFIX + key.hex() for key, _, _ in values], begins, sizes)
        _require_answer(codes)
        return [code == 0 for code in codes]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove values, even if others read them.

        Args:
            keys: Keys; some may have no value.
        """
        self._connected().batch_remove([_PREFIX + key.hex() for key in keys], force=True)

    def close(self) -> None:
        """Leave the cluster. Memory that this process lent is lost.

        If the master does not answer, the end of the process does so.
        """
        with self._lock:
            if self._store is not None:
                self._require_master()
                self._store.close()
                _open_stores.remove(self._store)


def _require_answer(codes: Sequence[int]) -> None:
    """Raise ConnectionError if the master did not answer."""
    if any(code <= _NO_ANSWER for code in codes):
        raise ConnectionError(f"the master of Mooncake does not answer (code {min(codes)})")


def _own_address(address: tuple[str, int]) -> str:
    """Return the address of this host from which packets go to ``address``. None is sent."""
    family, *_, target = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _store_class() -> type[MooncakeDistributedStore]:
    """Return Mooncake's class of stores."""
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise ConfigError(
            f"mooncake:// needs the package mooncake-transfer-engine: pip install 'hybridkv[mooncake]' ({error})"
        ) from error
    made: type[MooncakeDistributedStore] = MooncakeDistributedStore
    return made
