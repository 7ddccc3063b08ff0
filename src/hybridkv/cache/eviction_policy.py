"""Eviction policies: which resume points are kept, and which are evicted to make room.

    begin       a request has a row and resumes after its hit
    admits      may a state be stored at this resume point? Room is made for it if so
    keep        the resume point is kept: the blocks that it needs are published
    expect      a request waits to begin: its prefix will be hit
    make_way    blocks are about to be taken: resume points are evicted until there is room
    settle      facts about blocks are read, for callers that take no steps

The states of a resume point, where the policy compares them:

    new --admits, keep--> kept --make_way--> ghost entry --> forgotten
     |                    ^  |                    |
     +--> declined        +--+ hit                +--> kept again, if its tokens come again and its value suffices

    kept          its blocks are published, and a request can resume there; waiting requests (expect) protect it
    ghost entry   a record without blocks, which shows that a prompt would have hit it

``LeastRecentlyUsed`` keeps no records of resume points; ``hybridkv.eviction.ranked`` compares them by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.journal import Ids
from hybridkv.cache.placement import Placement
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.statistics import CacheStatistics
from hybridkv.request import Request


class Copy(Protocol):
    """A resume point that another tier may have, too."""

    @property
    def kept(self) -> bool:
        """Whether that tier still has it."""
        ...

    @property
    def below(self) -> Below | None:
        """Its copy on the tier below that one; None without one."""
        ...


class Below(NamedTuple):
    """The copy of a resume point on the tier below, and the price of bringing it back.

    Attributes:
        copy: The resume point on that tier.
        tokens_per_byte: Tokens of a prompt that are computed in the time in which one of its bytes comes back.
    """

    copy: Copy
    tokens_per_byte: float


class EvictionPolicy(Protocol):
    """Decides which resume points are kept."""

    @property
    def ranks(self) -> bool:
        """Whether it compares resume points, so that also those without new states must be reported to it."""
        ...

    def begin(self, request: Request, hit_tokens: int) -> None:
        """Note that ``request`` has a row and resumes after ``hit_tokens``."""
        ...

    def expect(self, request: Request) -> None:
        """Note that ``request`` waits to begin."""
        ...

    def expect_no_longer(self, request: Request) -> None:
        """Note that ``request`` begins, or never will."""
        ...

    def known_tokens(self, request: Request, hit_tokens: int) -> int:
        """Return how many leading tokens earlier requests shared, in whole hash blocks; 0 if at most ``hit_tokens``."""
        ...

    def admits(self, request: Request, tokens: int, needs: Sequence[int]) -> bool:
        """Return whether the resume point at ``tokens`` may take ``needs`` blocks, by group.

        If so, there is room for them.
        """
        ...

    def keep(self, request: Request, tokens: int, states: Sequence[int], *, ended: bool) -> None:
        """Keep the resume point at ``tokens`` of ``request``. Its blocks are published, new ``states`` among them.

        ``ended``: the request ends there, or may end before its next resume point.
        """
        ...

    def give_up(self, request: Request, tokens: int) -> None:
        """Evict the resume point at ``tokens`` of ``request`` at once: a tier has it."""
        ...

    def copy_at(self, request: Request, tokens: int) -> Copy | None:
        """Return the kept resume point at ``tokens`` of ``request``; None if it is not known."""
        ...

    def resemble(self, request: Request, copy: Copy) -> None:
        """Keep the next resume point of ``request`` as the kind that ``copy`` is, the same one on another tier."""
        ...

    def note_below(self, request: Request, tokens: int, below: Below) -> None:
        """Note that the tier below has a copy of the resume point at ``tokens`` of ``request``."""
        ...

    def spares(self, needs: Sequence[int]) -> bool:
        """Return whether ``needs`` blocks, by group, can be taken without evicting a resume point."""
        ...

    def make_way(self, n: int, group: int) -> None:
        """Make room for ``n`` blocks of ``group``."""
        ...

    def settle(self) -> None:
        """Read the facts about blocks since the last call."""
        ...

    def all_needed(self, ids: Ids) -> bool:
        """Return whether all cached ``ids`` are kept when they are released."""
        ...

    def add_statistics(self, counts: CacheStatistics) -> CacheStatistics:
        """Add counts of resume points to ``counts``."""
        ...

    def check(self) -> Iterator[str]:
        """Yield a line for each record that differs from one made anew."""
        ...


class LeastRecentlyUsed:
    """Evicts in the order of last use, superseded checkpoints first; see ``EndsPlacement.is_supersedable``.

    ``groups`` are those whose states or rings are kept.
    """

    ranks = False

    def __init__(self, groups: Sequence[CacheGroup], pool: BlockPool, placement: Placement) -> None:
        self._groups = tuple(groups)
        self._pool = pool
        self._placement = placement
        self._consumed: dict[int, int] = {}

    def begin(self, request: Request, hit_tokens: int) -> None:
        """Remember the checkpoint at which ``request`` resumes: it is useless once a later one is kept."""
        self._consumed.pop(request.row, None)
        if self._groups and 0 < hit_tokens < request.num_prompt_tokens - 1:
            self._consumed[request.row] = hit_tokens

    def expect(self, request: Request) -> None:
        """Ignore requests that wait."""

    def expect_no_longer(self, request: Request) -> None:
        """Ignore requests that wait."""

    def known_tokens(self, request: Request, hit_tokens: int) -> int:  # noqa: ARG002 - a method of EvictionPolicy
        """Return 0: no earlier request is remembered."""
        return 0

    def admits(self, request: Request, tokens: int, needs: Sequence[int]) -> bool:  # noqa: ARG002 - as above
        """Return True: the least recently used blocks make room."""
        return True

    def keep(self, request: Request, tokens: int, states: Sequence[int], *, ended: bool) -> None:
        """Flag a stored checkpoint, and supersede the one at which ``request`` resumed."""
        if ended or self._placement.is_supersedable(request, tokens):
            for block in states:
                self._pool.keys.flag_supersedable(block)
        consumed = self._consumed.get(request.row, 0)
        if not 0 < consumed < tokens:
            return
        found = [group.index.state_at(request, consumed) for group in self._groups]
        if self._pool.supersede([block for block in found if block]):
            del self._consumed[request.row]

    def give_up(self, request: Request, tokens: int) -> None:
        """Do nothing: no resume point is known."""

    def copy_at(self, request: Request, tokens: int) -> Copy | None:  # noqa: ARG002 - a method of EvictionPolicy
        """Return None: no resume point is known."""
        return None

    def resemble(self, request: Request, copy: Copy) -> None:
        """Do nothing: no resume point is known."""

    def note_below(self, request: Request, tokens: int, below: Below) -> None:
        """Do nothing: no resume point is known."""

    def spares(self, needs: Sequence[int]) -> bool:  # noqa: ARG002 - as above
        """Return True: no resume point is kept."""
        return True

    def make_way(self, n: int, group: int) -> None:
        """Do nothing: the space evicts by itself."""

    def settle(self) -> None:
        """Do nothing: no facts are read."""

    def all_needed(self, ids: Ids) -> bool:  # noqa: ARG002 - as above
        """Return True: released blocks stay cached."""
        return True

    def add_statistics(self, counts: CacheStatistics) -> CacheStatistics:
        """Return ``counts``: there are no counts of resume points."""
        return counts

    def check(self) -> Iterator[str]:
        """Return no lines: there are no records."""
        return iter(())
