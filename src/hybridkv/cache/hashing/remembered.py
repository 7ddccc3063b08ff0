"""Hash chains of long prompts that came before: what comes again is compared, not hashed.

    root --its first block--> [ b0 b1 b2 ] --b3--> [ b3 b4 ]          a run of blocks with their hashes; what follows
                                            --c3--> [ c3 c4 c5 ]      parts where prompts did

Tokens are compared with tokens, and extra keys with extra keys, so a hash can never be of something else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

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
    """Consecutive blocks of a prompt. extras: one a block, None when no block has any. behind: runs that follow."""

    __slots__ = ("behind", "extras", "hashes", "parent", "start", "tokens")

    def __init__(
        self, parent: _Run | None, start: _Start, tokens: Int32, hashes: list[bytes], extras: Extras | None
    ) -> None:
        self.parent, self.start = parent, start
        self.tokens, self.hashes, self.extras = tokens, hashes, extras
        self.behind: dict[_Start, _Run] = {}

    def size_bytes(self) -> int:
        """About what it takes."""
        return self.tokens.nbytes + _BLOCK_BYTES * len(self.hashes) + _RUN_BYTES


class RememberedChains:
    """Hashes of prompts in blocks of ``block_size`` tokens, in at most ``max_bytes``; least recently used go first.

    Whoever hashes decides which prompts are worth it, see LEAST_BLOCKS.

    May be called from several threads.
    """

    def __init__(self, block_size: int, max_bytes: int) -> None:
        self._size, self._max_bytes = block_size, max_bytes
        self._root = _Run(None, (b"", None), np.empty(0, np.int32), [], None)
        self._used: dict[_Run, None] = {}  # all but the root, least recently used first; behind those that follow them
        self._lock = threading.Lock()
        self.num_bytes = 0

    def known(self, tokens: Int32, extras: Extras | None) -> list[bytes]:
        """Hashes of as many leading blocks as came before. O(blocks known) in array comparisons."""
        found: list[bytes] = []
        with self._lock:
            path, last = self._path(tokens, extras)
            for run in path[:-1]:
                found += run.hashes
            if path:
                found += path[-1].hashes[:last]
            self._touch(path)
        return found

    def remember(self, tokens: Int32, hashes: Sequence[bytes], extras: Extras | None) -> None:
        """``hashes`` of the whole blocks of ``tokens``. O(blocks that are new)."""
        with self._lock:
            path, last = self._path(tokens, extras)
            first = sum(len(run.hashes) for run in path[:-1]) + last
            if first == len(hashes):
                return
            tail = path[-1] if path else self._root
            if last < len(tail.hashes):
                tail = self._split(tail, last)
            new = np.array(tokens[first * self._size : len(hashes) * self._size], np.int32)
            own = None if extras is None else list(extras[first : len(hashes)])
            if tail is not self._root and not tail.behind:
                self._lengthen(tail, new, list(hashes[first:]), own)
            else:
                start = _start(new, own, 0, self._size)
                run = tail.behind[start] = _Run(tail, start, new, list(hashes[first:]), own)
                self.num_bytes += run.size_bytes()
                tail = run
            self._touch(_upwards(tail))
            while self.num_bytes > self._max_bytes and self._used:
                self._forget(next(iter(self._used)))

    def _path(self, tokens: Int32, extras: Extras | None) -> tuple[list[_Run], int]:
        """The runs that ``tokens`` begins with, and how many blocks of the last one."""
        path, at, blocks, size = list[_Run](), 0, len(tokens) // self._size, self._size
        run: _Run | None = self._root
        while at < blocks and run is not None:
            run = run.behind.get(_start(tokens, extras, at, size))
            if run is None:
                break
            count = _common(run, tokens[at * size :], None if extras is None else extras[at:blocks], size)
            path.append(run)
            at += count
            if count < len(run.hashes):
                return path, count
        return path, len(path[-1].hashes) if path else 0

    def _split(self, run: _Run, blocks: int) -> _Run:
        """``run`` becomes two; the first one, of ``blocks`` blocks."""
        size, parent = self._size, run.parent
        head = _Run(parent, run.start, run.tokens[: blocks * size].copy(), run.hashes[:blocks], _part(run, 0, blocks))
        if parent is not None:
            parent.behind[run.start] = head
        run.extras = _part(run, blocks, len(run.hashes))
        run.tokens, run.hashes, run.parent = run.tokens[blocks * size :].copy(), run.hashes[blocks:], head
        run.start = _start(run.tokens, run.extras, 0, size)
        head.behind[run.start] = run
        self.num_bytes += _RUN_BYTES
        return head

    def _lengthen(self, run: _Run, tokens: Int32, hashes: list[bytes], extras: Extras | None) -> None:
        """``run``, which nothing follows, goes on."""
        before = run.size_bytes()
        if run.extras is not None or extras is not None:
            none: list[Extra | None] = [None]
            run.extras = [*(run.extras or none * len(run.hashes)), *(extras or none * len(hashes))]
        run.tokens = np.concatenate((run.tokens, tokens))
        run.hashes = run.hashes + hashes
        self.num_bytes += run.size_bytes() - before

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


def _part(run: _Run, first: int, last: int) -> Extras | None:
    return None if run.extras is None else run.extras[first:last]


def _common(run: _Run, tokens: Int32, extras: Extras | None, size: int) -> int:
    """Blocks that ``run`` and ``tokens`` with ``extras`` begin with."""
    blocks = min(len(run.hashes), len(tokens) // size)
    differ = run.tokens[: blocks * size] != tokens[: blocks * size]
    if differ.any():
        blocks = int(differ.argmax()) // size
    if run.extras is None and extras is None:
        return blocks
    none: list[Extra | None] = [None] * blocks
    mine = none if run.extras is None else list(run.extras[:blocks])
    theirs = none if extras is None else list(extras[:blocks])
    if mine == theirs:
        return blocks
    return next(i for i, (one, other) in enumerate(zip(mine, theirs, strict=True)) if one != other)
