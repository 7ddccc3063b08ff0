"""What is asked of each side, in plain ints and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from calls import DecodeRow

Ids = tuple[tuple[int, ...], ...]
"""Block ids, one tuple a group; 0 is the null block."""

Keys = tuple[tuple[bytes | None, ...], ...]
"""The key under which a block can be hit, for every id."""


@dataclass(frozen=True)
class Found:
    tokens: int
    ids: Ids


class Ask(NamedTuple):
    """Slots for ``chunk`` tokens. found: what look_up answered last, to be adopted; external: tokens behind it."""

    chunk: int
    lookahead: int
    delay: bool
    found: Found | None = None
    external: int = 0


class Slots(NamedTuple):
    """What a decode step got. accepted: leading rows; the others are refused. cells: (row, group, column, block)."""

    accepted: int
    cells: tuple[tuple[int, ...], ...]


class Side(Protocol):
    """A cache manager. Requests go by name; computed tokens are advanced by ``advance`` alone."""

    def begin_step(self) -> None: ...

    def add(self, name: str, tokens: tuple[int, ...]) -> None: ...

    def append(self, name: str, tokens: tuple[int, ...]) -> None: ...

    def advance(self, name: str, tokens: int) -> None: ...

    def fly(self, name: str, tokens: int) -> None:
        """So many of the computed tokens are of steps not yet settled."""
        ...

    def look_up(self, name: str) -> Found: ...

    def allocate(self, name: str, ask: Ask) -> Ids | None: ...

    def decode(self, rows: Sequence[DecodeRow], lookahead: int) -> Slots:
        """The next token and the drafts behind it for each."""
        ...

    def cached(self, name: str) -> tuple[tuple[bool, ...], ...]:
        """Per group and full column of a request's tokens, whether its key can be found."""
        ...

    def publish(self, name: str, tokens: int) -> None: ...

    def free(self, name: str) -> None: ...

    def forget(self, name: str) -> None: ...

    def reset(self) -> bool: ...

    def table(self, name: str) -> Ids: ...

    def keys(self, ids: Ids) -> Keys: ...

    def num_free(self) -> int: ...

    def free_order(self) -> tuple[int, ...]: ...

    def usage(self) -> float: ...
