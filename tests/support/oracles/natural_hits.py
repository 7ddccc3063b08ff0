"""What a request finds in the natural layout: every number of tokens is tried, the largest first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridkv.testing.model import Origin, Prefix
from oracles.groups import ChunkGroup, OracleGroup, WindowGroup
from oracles.natural_pool import NaturalPool

USUAL_HASH_BLOCK = 16
"""Tokens, where no attention group publishes."""


def hash_block_of(groups: Sequence[OracleGroup]) -> int:
    """Tokens of a block that is hashed: parents of states' keys lie at multiples of it."""
    return math.gcd(*(group.size for group in groups if group.publishes and group.kind != "state")) or USUAL_HASH_BLOCK


class Finder:
    """One request's tokens against the keys of a pool. hash_block: see ``hash_block_of``."""

    def __init__(self, pool: NaturalPool, hash_block: int, tokens: Sequence[int], salt: Origin) -> None:
        self._pool = pool
        self._hash_block = hash_block
        self._tokens = tuple(tokens)
        self._salt = salt

    def prefix(self, end: int) -> Prefix:
        """What stands for the first ``end`` tokens."""
        return self._salt, self._tokens[:end]

    def parent_of(self, group: OracleGroup, end: int) -> int:
        """Tokens of the parent of the key of the first ``end`` tokens; ``end`` itself for a full key."""
        size = self._hash_block if group.kind == "state" else group.size
        return end // size * size

    def state(self, group: OracleGroup, end: int) -> int | None:
        """The block that keeps the state after ``end`` tokens."""
        parent = self.parent_of(group, end)
        if parent == end:
            return self._pool.find(group.number, self.prefix(end))
        return self._pool.find_tail(group.number, self.prefix(end), parent)

    # -- attention

    def full(self, group: OracleGroup, column: int) -> int | None:
        """The block of a full column of the request."""
        end = (column + 1) * group.size
        return self._pool.find(group.number, self.prefix(end)) if end <= len(self._tokens) else None

    def tails(self, group: OracleGroup, column: int) -> list[tuple[int, int]]:
        """Partial keys that the request's tokens match: their tokens in ``column`` and block, the oldest first."""
        first = column * group.size
        entries = self._pool.tails.get((group.number, self.prefix(first)), [])
        return [(len(tail), block) for tail, block in entries if self._tokens[first : first + len(tail)] == tail]

    def reach(self, group: OracleGroup, column: int) -> int:
        """Tokens of ``column`` that a block holds."""
        if self.full(group, column) is not None:
            return group.size
        return max((length for length, _ in self.tails(group, column)), default=0)

    def covers(self, group: OracleGroup, start: int, end: int) -> bool:
        """Whether blocks hold the tokens start .. end - 1."""
        size = group.size
        return all(
            column * size + self.reach(group, column) >= min(end, (column + 1) * size)
            for column in range(start // size, math.ceil(end / size))
        )

    def source(self, group: OracleGroup, end: int) -> int | None:
        """The block that a hit of ``end`` tokens copies; None where it ends at an edge."""
        if group.kind == "state":
            return self.state(group, end)
        column, rest = divmod(end, group.size)
        if not rest:
            return None
        full = self.full(group, column)
        if full is not None:
            return full
        return next((block for length, block in self.tails(group, column) if length >= rest), None)

    # -- hits

    def serves(self, group: OracleGroup, end: int, *, proven: bool) -> bool:
        """Whether ``group`` can go on behind ``end`` tokens. proven: that they were seen is known."""
        if group.kind == "state":
            return self.state(group, end) is not None
        start = first_read(group, end)
        if start < end:
            return self.covers(group, start, end)
        return (proven and end % group.size == 0) or self.covers(group, end - 1, end)

    def columns(self, group: OracleGroup, end: int) -> list[int]:
        """The whole columns of a hit of ``end`` tokens: blocks, 0 for those that nobody reads."""
        if group.kind == "state":
            return []
        whole, first = end // group.size, first_read(group, end) // group.size
        return [0 if column < first else self.full(group, column) or 0 for column in range(whole)]


def first_read(group: OracleGroup, end: int) -> int:
    """The first token that must be there to go on behind ``end`` tokens."""
    if isinstance(group, WindowGroup):
        return max(0, end - max(group.window - 1, 1))
    return end // group.chunk * group.chunk if isinstance(group, ChunkGroup) else 0
