"""Rows whose blocks are written from elsewhere while steps go on: by another engine, or from another memory.

0 new tokens, external ones   blocks are taken and locked; nothing of them is published, so nobody hits them
finish: all came              the row goes on behind them, and they can be hit
finish: some came             behind those, where every group has what comes before them
finish: too few came, free    blocks are given back: the next look-up finds what is here, the rest is computed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.slots.holds import BlockLock, Locks
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request import Request


class _Load(NamedTuple):
    """tokens: computed once all has come. hit_tokens: those of them that were here before."""

    tokens: int
    hit_tokens: int
    lock: BlockLock


class Loads:
    """Rows of ``groups`` that wait for a transfer. locks: those of the cache, by which their blocks stay in place.

    of_row: what each of them waits for; for reading, always the same mapping.
    """

    def __init__(self, groups: Sequence[CacheGroup], locks: Locks) -> None:
        self._groups = tuple(groups)
        self._locks = locks
        self.of_row: dict[int, _Load] = {}

    def begin(self, row: int, tokens: int, hit_tokens: int) -> None:
        """Of the first ``tokens`` tokens of ``row``, which holds its blocks, those behind a hit are to come."""
        self.of_row[row] = _Load(tokens, hit_tokens, self._locks.add([group.rows.held(row) for group in self._groups]))

    def end(self, row: int) -> None:
        """No transfer writes the blocks of ``row`` any longer; nothing for a row that waits for none."""
        load = self.of_row.pop(row, None)
        if load is not None:
            self._locks.release(load.lock)

    def refuse(self, request: Request) -> None:
        """CacheError for a request that is loaded."""
        if self.of_row and request.row in self.of_row:
            raise CacheError(f"tokens of {request.request_id!r} are being loaded: tell finish_load what came first")

    def arrived(self, request: Request, tokens: int | None) -> int:
        """Behind how many tokens ``request`` can go on when ``tokens`` came, None for all; 0 behind none.

        Never inside its hit: those blocks are others', too, and what they hold is there.
        ConfigError for more than were asked for, CacheError for a request that is not loaded.
        """
        load = self.of_row.get(request.row)
        if load is None:
            raise CacheError(f"nothing of {request.request_id!r} is being loaded: admit it with 0 new tokens")
        if tokens is None or tokens == load.tokens:
            return load.tokens
        if tokens > load.tokens:
            raise ConfigError(f"{load.tokens} tokens of {request.request_id!r} are loaded, {tokens} cannot have come")
        there = max(tokens, load.hit_tokens)
        return there if all(_goes_on(group, request.row, there) for group in self._groups) else 0


def _goes_on(group: CacheGroup, row: int, tokens: int) -> bool:
    """Whether ``row``, made for more tokens than came, holds what the token behind ``tokens`` reads."""
    if group.states is not None:
        return False  # its state was to be that behind all of them
    policy = group.policy
    return bool(group.rows.ids(row)[policy.droppable(tokens) : policy.columns(tokens)].all())
