"""Which blocks stores get and lose, in order, for readers that report it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple


class Change(NamedTuple):
    """A block that is there from now on, or gone.

    Attributes:
        store: Name of the store.
        key: The key of the block.
        is_there: Whether it is there.
    """

    store: str
    key: bytes
    is_there: bool


class Hears(NamedTuple):
    """What a store calls, under its lock. It may repeat what is known.

    Attributes:
        there: Is told the key of a block that is there.
        gone: Is told the key of a block that is gone.
    """

    there: Callable[[bytes], None]
    gone: Callable[[bytes], None]


class Changes:
    """Collects changes of several stores. Several threads may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes = list[Change]()

    def of(self, store: str) -> Hears:
        """Return what a store calls.

        Args:
            store: Its name.
        """
        return Hears(partial(self._hear, store, is_there=True), partial(self._hear, store, is_there=False))

    def _hear(self, store: str, key: bytes, *, is_there: bool) -> None:
        with self._lock:
            self._changes.append(Change(store, key, is_there))

    def take(self) -> list[Change]:
        """Return the changes since the last call; those of a store are in order."""
        with self._lock:
            changes, self._changes = self._changes, []
        return changes


def _ignore(key: bytes) -> None:
    del key


UNHEARD: Final = Hears(_ignore, _ignore)
"""Nobody listens."""
