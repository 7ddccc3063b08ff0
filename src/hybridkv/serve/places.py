"""How many outputs are in hand at once: those that run, and a queue with an end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hybridkv.serve.errors import ApiError

RETRY_AFTER: Final = 1
"""Seconds until a client that was turned away should ask again."""


class Places:
    """``most`` outputs at once, whether they run or wait; of one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    def require(self, count: int) -> None:
        """Raise ApiError 400 for more outputs than there are places."""
        if count > self._most:
            raise ApiError(400, f"{count} outputs asked for at once: at most {self._most} are in hand at a time")

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """``count`` of them, given back behind. ApiError 429 while too few are left, 400 where there never are."""
        self.require(count)
        if self.taken + count > self._most:
            raise ApiError(
                429,
                f"{self.taken} outputs are in hand, {self._most} at most: ask again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER)},
            )
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count
