"""A DiskStore, and the folders of other engines of this machine, which are only read.

put            own folder
exists, get    own folder, then those of the others that are still missing
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from hybridkv.errors import ConfigError
from hybridkv.stores.calls import checked_into
from hybridkv.stores.disk import DiskStore
from hybridkv.stores.disk_view import DiskView

logger = logging.getLogger(__name__)


class _Other:
    """The folder of another engine, for one thread at a time. One that does not fit is left alone.

    Args:
        opened: Makes its view.
    """

    def __init__(self, opened: Callable[[], DiskView]) -> None:
        self._opened: Callable[[], DiskView] | None = opened
        self._view: DiskView | None = None
        self._lock = threading.Lock()

    def ask(self, places: list[int], call: Callable[[DiskView, list[int]], list[bool]]) -> list[bool]:
        """Return what a call of the view answers for ``places``; misses without a view."""
        with self._lock:
            try:
                if self._view is None and self._opened is not None:
                    self._view = self._opened()
                if self._view is not None:
                    return call(self._view, places)
            except ConfigError as error:
                logger.warning("the disk of another engine is not read: %s", error)
                self._close()
        return [False] * len(places)

    def close(self) -> None:
        """Close the view; later calls are misses."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        view, self._view, self._opened = self._view, None, None
        if view is not None:
            view.close()


class DiskFolders:
    """A BlockStore that writes one folder and reads several. Thread safe.

    A block in another folder counts as kept, so it is not written again. Its engine alone decides when it is evicted.

    Args:
        own: The store that is written, closed with this one.
        others: Open the folders of other engines of the same identity and sizes, when they are first needed.
    """

    def __init__(self, own: DiskStore, others: Sequence[Callable[[], DiskView]]) -> None:
        self._own, self._others = own, [_Other(opened) for opened in others]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a folder is known to have its block. O(keys * folders).

        Args:
            keys: Keys of 1 to 64 bytes.
        """
        found = self._own.exists(keys)
        return self._with_others(found, lambda view, left: view.exists([keys[at] for at in left]))

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Read blocks, and return for each whether the whole block arrived and its checksum holds. O(bytes).

        Args:
            keys: Keys of 1 to 64 bytes.
            into: A writable buffer for each key, as long as its block.

        Raises:
            ConfigError: As ``DiskStore.get``.
        """
        buffers = checked_into(keys, into)
        found = self._own.get(keys, buffers)
        return self._with_others(
            found, lambda view, left: view.get([keys[at] for at in left], [buffers[at] for at in left])
        )

    def _with_others(self, found: list[bool], ask: Callable[[DiskView, list[int]], list[bool]]) -> list[bool]:
        """Ask the other folders in turn for the places that are not ``found`` yet, and return ``found``."""
        for other in self._others:
            left = [at for at, is_found in enumerate(found) if not is_found]
            if not left:
                break
            answers = other.ask(left, ask)
            for at, is_found in zip(left, answers, strict=True):
                found[at] = is_found
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        """Write blocks to the own folder, and return for each whether it is kept. O(bytes).

        Args:
            keys: Keys of 1 to 64 bytes.
            blocks: The bytes of each block.
        """
        return self._own.put(keys, blocks)

    def close(self) -> None:
        """Close all folders."""
        for other in self._others:
            other.close()
        self._own.close()
