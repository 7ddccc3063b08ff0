"""Hash chains of long prompts that came before: what comes again is compared, not hashed.

    root --its first block--> [ b0 b1 b2 ] --b3--> [ b3 b4 ]          a run of blocks with their hashes; what follows
                                            --c3--> [ c3 c4 c5 ]      parts where prompts did

Tokens are compared with tokens, and extra keys with extra keys, so a hash can never be of something else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.extra_keys import Extra

Int32 = NDArray[np.int32]
Extras = Sequence[Extra | None]
_Start = tuple[bytes, Extra | None]
"""Of a run: its first block's tokens, as bytes, and extra keys."""

LEAST_BLOCKS: Final = 256
"""Of a prompt that is remembered: a shorter one is hashed in less time than it is worth."""

_BLOCK_BYTES: Final = 80
"""A hash as an object, and its places in lists."""
_RUN_BYTES: Final = 1000
"""What a run costs beside its tokens and hashes."""


class _Run:
    """Consecutive blocks of a prompt, ``blocks`` of them; behind: the runs that follow, by how they start.

    octets: their tokens as int32. A bytearray compares itself with an array where that lies, and in a third of the time
    that numpy takes. extras: one a block, None when no block has any.
    joined: hashes that nobody has asked for yet. Most prompts never come again: objects kept for them would cost more
    than all else here.
    """

    __slots__ = ("_hashes", "_joined", "behind", "blocks", "extras", "octets", "parent", "start")

    def __init__(
        self,
        parent: _Run | None,
        start: _Start,
        tokens: Int32,
        blocks: int,
        *,
        joined: bytearray,
        extras: Extras | None,
    ) -> None:
        self.parent, self.start, self.blocks = parent, start, blocks
        self.octets, self.extras = bytearray(tokens.data), extras
        self._hashes, self._joined = list[bytes](), joined
        self.behind: dict[_Start, _Run] = {}

    @property
    def tokens(self) -> Int32:
        """Where they lie: hold no reference while the run goes on."""
        return np.frombuffer(self.octets, np.int32)

    @property
    def hashes(self) -> list[bytes]:
        """One a block."""
        if self._joined:
            size = len(self._joined) // (self.blocks - len(self._hashes))
            self._hashes += np.frombuffer(self._joined, f"V{size}").tolist()
            self._joined = bytearray()
        return self._hashes

    def size_bytes(self) -> int:
        """About what it takes."""
        return len(self.octets) + _BLOCK_BYTES * self.blocks + _RUN_BYTES

    def lengthen(self, tokens: Int32, blocks: int, joined: bytearray, extras: Extras | None) -> None:
        """``blocks`` more of them."""
        if self.extras is not None or extras is not None:
            none: list[Extra | None] = [None]
            self.extras = [*(self.extras or none * self.blocks), *(extras or none * blocks)]
        self.octets += tokens.data
        self._joined += joined
        self.blocks += blocks

    def split(self, blocks: int, size: int) -> _Run:
        """The first ``blocks`` blocks, of ``size`` tokens, become a run of their own, which this one follows."""
        extras = None if self.extras is None else self.extras[:blocks]
        head = _Run(self.parent, self.start, self.tokens[: blocks * size], blocks, joined=bytearray(), extras=extras)
        head._hashes, self._hashes = self.hashes[:blocks], self.hashes[blocks:]
        if self.parent is not None:
            self.parent.behind[self.start] = head
        self.octets = bytearray(self.tokens[blocks * size :].data)
        self.extras = None if self.extras is None else self.extras[blocks:]
        self.blocks -= blocks
        self.parent, self.start = head, _start(self.tokens, self.extras, 0, size)
        head.behind[self.start] = self
        return head


class Place(NamedTuple):
    """The end of what a prompt begins with: behind the first ``last`` blocks of ``run``, ``blocks`` in all.

    changes: how often something was remembered before it was found.
    """

    run: _Run
    last: int
    blocks: int
    changes: int


class RememberedChains:
    """Hashes of prompts in blocks of ``block_size`` tokens, in at most ``max_bytes``; least recently used go first.

    Whoever hashes decides which prompts are worth it, see LEAST_BLOCKS. May be called from several threads.
    """

    def __init__(self, block_size: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._size = block_size
        self._root = _Run(None, (b"", None), np.empty(0, np.int32), 0, joined=bytearray(), extras=None)
        self._nowhere = Place(self._root, 0, 0, -1)
        self._used: dict[_Run, None] = {}  # all but the root, least recently used first; behind those that follow them
        self._changes = 0
        self._lock = threading.Lock()
        self.num_bytes = 0

    def find(self, tokens: Int32, extras: Extras | None) -> tuple[list[bytes], Place]:
        """Hashes of as many leading blocks as came before, a new list. O(those blocks) in array comparisons."""
        with self._lock:
            place = self._place(tokens, extras)
            if place is self._nowhere:  # as for most prompts
                return [], place
            first, *others = _upwards(place.run)
            if not others:
                return first.hashes[: place.last], place
            hashes = first.hashes.copy()
            for run in others[:-1]:
                hashes += run.hashes
            hashes += place.run.hashes[: place.last]
            return hashes, place

    def remember(self, tokens: Int32, extras: Extras | None, place: Place, joined: bytearray) -> None:
        """Of the whole blocks of ``tokens`` behind ``place``, which ``find`` gave, the hashes one behind the other.

        ``joined`` is kept. O(new blocks).
        """
        size, all_blocks = self._size, len(tokens) // self._size
        with self._lock:
            start = _start(tokens, extras, place.blocks, size)
            if place.changes != self._changes and (place is not self._nowhere or start in self._root.behind):
                now = self._place(tokens, extras)  # another thread remembered something
                if not place.blocks <= now.blocks < all_blocks:
                    return
                del joined[: len(joined) // (all_blocks - place.blocks) * (now.blocks - place.blocks)]
                place, start = now, _start(tokens, extras, now.blocks, size)
            tail, last, first, _ = place
            self._changes += 1
            if last < tail.blocks:
                tail = tail.split(last, size)
                self.num_bytes += _RUN_BYTES
            new, before = tokens[first * size : all_blocks * size], 0
            own = None if extras is None else list(extras[first:all_blocks])
            if tail is not self._root and not tail.behind:
                before = tail.size_bytes()
                tail.lengthen(new, all_blocks - first, joined, own)
            else:
                tail.behind[start] = tail = _Run(tail, start, new, all_blocks - first, joined=joined, extras=own)
            self.num_bytes += tail.size_bytes() - before
            self._touch(_upwards(tail))
            while self.num_bytes > self.max_bytes and self._used:
                self._forget(next(iter(self._used)))

    def _place(self, tokens: Int32, extras: Extras | None) -> Place:
        """Where what ``tokens`` begin with ends; it is used."""
        size, blocks = self._size, len(tokens) // self._size
        run = self._root.behind.get(_start(tokens, extras, 0, size))
        if run is None:
            return self._nowhere
        path, at, count = list[_Run](), 0, 0
        while run is not None:
            path.append(run)
            count = _common(run, tokens[at * size :], None if extras is None else extras[at:blocks], size)
            at += count
            whole = count == run.blocks and at < blocks
            run = run.behind.get(_start(tokens, extras, at, size)) if whole else None
        self._touch(path)
        return Place(path[-1], count, at, self._changes)

    def _touch(self, path: Sequence[_Run]) -> None:
        """``path``, from the root on, was used: whoever follows another stands before it, and goes first."""
        for run in reversed(path):
            self._used.pop(run, None)
            self._used[run] = None

    def _forget(self, run: _Run) -> None:
        """``run``, which nothing follows."""
        del self._used[run]
        if run.parent is not None:
            del run.parent.behind[run.start]
        self.num_bytes -= run.size_bytes()


def _upwards(run: _Run | None) -> list[_Run]:
    """From the first below the root to ``run``."""
    path: list[_Run] = []
    while run is not None and run.parent is not None:
        path.append(run)
        run = run.parent
    return path[::-1]


def _start(tokens: Int32, extras: Extras | None, block: int, size: int) -> _Start:
    return tokens[block * size : (block + 1) * size].tobytes(), None if extras is None else extras[block]


def _common(run: _Run, tokens: Int32, extras: Extras | None, size: int) -> int:
    """Blocks that ``run`` and ``tokens`` with ``extras`` begin with."""
    blocks = min(run.blocks, len(tokens) // size)
    tokens = tokens[: blocks * size]
    if run.octets != tokens.data and (differ := run.tokens[: len(tokens)] != tokens).any():
        blocks = int(differ.argmax()) // size
    if run.extras is None and extras is None:
        return blocks
    none: list[Extra | None] = [None] * blocks
    mine = none if run.extras is None else list(run.extras[:blocks])
    theirs = none if extras is None else list(extras[:blocks])
    if mine == theirs:
        return blocks
    return next(i for i, (one, other) in enumerate(zip(mine, theirs, strict=True)) if one != other)
