"""Ends that are kept to be resumed, and what is given up for others: what both ways of eviction answer.

begin       a request has a row and goes on behind its hit
admits      may a state be stored at that end, room being made for it
keep        the end is kept from now on: what it needs is published
expect      a request waits to begin: what it begins with will be hit
make_way    blocks are to be taken: resume points are given up until there is room
settle      what happened to blocks is read: for callers that take no steps
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.journal import Ids
from hybridkv.cache.placement import Placement
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.statistics import CacheStatistics
from hybridkv.request import Request


class EvictionPolicy(Protocol):
    """See the module. ranks: whether every end is of interest, those without new states, too."""

    @property
    def ranks(self) -> bool:
        """See the class."""
        ...

    def begin(self, request: Request, hit_tokens: int) -> None:
        """``request`` has a row and goes on behind ``hit_tokens``."""
        ...

    def expect(self, request: Request) -> None:
        """``request`` waits to begin from now on."""
        ...

    def expect_no_longer(self, request: Request) -> None:
        """``request`` begins, or never will."""
        ...

    def known_tokens(self, request: Request) -> int:
        """How far others had the same tokens, in whole hash blocks, as far as that is remembered; 0 for nowhere."""
        ...

    def admits(self, request: Request, tokens: int, needs: Sequence[int]) -> bool:
        """Whether the end at ``tokens`` may take ``needs`` blocks, by group; there is room for them then."""
        ...

    def keep(self, request: Request, tokens: int, states: Sequence[int], *, ended: bool) -> None:
        """The end at ``tokens`` of ``request`` is kept, its blocks published, new ``states`` among them.

        ended: the request ends there.
        """
        ...

    def make_way(self, n: int, group: int) -> None:
        """``n`` blocks of ``group`` will be taken."""
        ...

    def settle(self) -> None:
        """Read what happened to blocks since the last call."""
        ...

    def all_needed(self, ids: Ids) -> bool:
        """Whether none of ``ids``, cached, is given up when it is released."""
        ...

    def add_statistics(self, counts: CacheStatistics) -> CacheStatistics:
        """``counts`` and those of ends."""
        ...

    def check(self) -> Iterator[str]:
        """A line for each thing kept that is not what it would be when made anew."""
        ...


class LeastRecentlyUsed:
    """Nothing but the order of last use, and checkpoints that are passed by: see ``EndsPlacement.is_supersedable``.

    groups: those whose states are kept.
    """

    ranks = False

    def __init__(self, groups: Sequence[CacheGroup], pool: BlockPool, placement: Placement) -> None:
        self._groups = tuple(groups)
        self._pool = pool
        self._placement = placement
        self._consumed: dict[int, int] = {}

    def begin(self, request: Request, hit_tokens: int) -> None:
        """The checkpoint that it goes on from is of no use once a later one is kept."""
        self._consumed.pop(request.row, None)
        if self._groups and 0 < hit_tokens < request.num_prompt_tokens - 1:
            self._consumed[request.row] = hit_tokens

    def expect(self, request: Request) -> None:
        """Nothing."""

    def expect_no_longer(self, request: Request) -> None:
        """Nothing."""

    def known_tokens(self, request: Request) -> int:  # noqa: ARG002 - the answer of kept ends
        """Nothing is remembered."""
        return 0

    def admits(self, request: Request, tokens: int, needs: Sequence[int]) -> bool:  # noqa: ARG002 - as above
        """Always: what was used longest ago makes room."""
        return True

    def keep(self, request: Request, tokens: int, states: Sequence[int], *, ended: bool) -> None:
        """A checkpoint is stored: the one that ``request`` went on from has done its duty."""
        if ended or self._placement.is_supersedable(request, tokens):
            for block in states:
                self._pool.keys.flag_supersedable(block)
        consumed = self._consumed.get(request.row, 0)
        if not 0 < consumed < tokens:
            return
        found = [group.index.state_at(request, consumed) for group in self._groups]
        if self._pool.supersede([block for block in found if block is not None]):
            del self._consumed[request.row]

    def make_way(self, n: int, group: int) -> None:
        """Nothing: the space evicts as it is."""

    def settle(self) -> None:
        """Nothing is read."""

    def all_needed(self, ids: Ids) -> bool:  # noqa: ARG002 - as above
        """Always: nothing is given up."""
        return True

    def add_statistics(self, counts: CacheStatistics) -> CacheStatistics:
        """No ends are known."""
        return counts

    def check(self) -> Iterator[str]:
        """Nothing is kept but flags of blocks."""
        return iter(())
