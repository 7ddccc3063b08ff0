"""The prefix index of one group: from keys of blocks to blocks.

    whole     hash of a block -> the block with those tokens
    partial   tokens that end inside a block -> the block that begins with them:

              block   [ tokens of an entry | written later ]     parent: key of the tokens before the block

A partial entry is found by comparing tokens, not by hashing: a parent has at most ``most_partial`` entries
(docs/contracts.md, 10).

Runs of keys that were found one after another are remembered with their blocks, and then compared as arrays:

    keys     k0 k1 k2 k3 | k4 k5      looked up once, one by one; later the run is found by k0 and compared whole
    blocks   17 18 19 40 | 41 44      valid while none of these blocks lost its key

A key covers all tokens before it, so the key that followed k3 once follows it in every request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from math import lcm
from typing import Final, NamedTuple, Protocol

import cbor2
import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import CacheError
from hybridkv.request import Request

MOST_PARTIAL: Final = 4
"""Partial entries of one parent. Chosen by hand."""

MOST_PROMPT_ENDS: Final = 256
"""The same where every prompt adds an entry, as with ``CacheOptions.hit_unit``. Chosen by hand.

Many prompts may differ inside one block. A look-up compares the tokens of all entries, so their number is bounded.
"""

TOKEN_BYTES: Final = 4

Int32 = NDArray[np.int32]

LEAST_KEYS: Final = 64
"""Keys of the shortest run; fewer are looked up one by one just as fast. Chosen by hand."""

_MOST_EVICTIONS: Final = 1 << 30
"""Most evictions between two uses of a run: the stamps of blocks have 32 bits."""

_NONE = np.empty(0, np.int32)
_FIRST_CHUNK = 32
_MORE_IN_RUNS = 1000
_LARGEST_CHUNK = 512  # most useless look-ups of a hit


class PartialBlock(NamedTuple):
    """A partial entry: ``block`` begins with ``tokens`` (bytes of int32), ``length`` tokens."""

    tokens: bytes
    block: int
    length: int


class Losses(Protocol):
    """Knows which blocks lost a key; see ``hybridkv.cache.keys.BlockKeys``."""

    evictions: int

    def num_kept(self, ids: Int32, evictions: int) -> int:
        """Return how many leading ``ids`` lost no key since ``evictions`` had this value."""


@dataclass(slots=True)
class _Run:
    """A run: ``blocks[i]`` was found under ``keys[i]``, and lost no key before ``evictions`` losses were counted."""

    keys: list[bytes]
    blocks: Int32
    evictions: int


class PrefixIndex:
    """The keys of one group. Two blocks may carry one key: a look-up returns the block that got it first.

    Args:
        losses: Knows which blocks lost a key.
        block_size: Tokens of a block.
        hashes_per_block: Hash blocks of a block.

    Attributes:
        num_partial: Number of partial entries.
        most_partial: Most partial entries of one parent.
        additions: Entries added so far, partial ones included.
        empty: The group keeps rings, which are empty at multiples of so many tokens: a hit needs no block there.

            tokens   | 0 1 2 3 | 4 5 6 7 | 8 9      empty 4: a hit may end at 4 and 8, and where a ring was kept

        keys_in_runs: Keys in all runs; a key in two runs counts twice.
    """

    def __init__(self, losses: Losses, block_size: int = 1, hashes_per_block: int = 1) -> None:
        self._losses = losses
        self._block_size, self._hashes_per_block = block_size, hashes_per_block
        self._runs: dict[bytes, _Run] = {}
        self._swept = losses.evictions
        self.keys_in_runs = 0
        self._first: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}
        self._partial: dict[bytes, list[PartialBlock]] = {}
        self._parent: dict[int, bytes] = {}
        self.num_partial = 0
        self.most_partial = MOST_PARTIAL
        self.empty = 0
        self.additions = 0

    def __len__(self) -> int:
        """Return the number of distinct keys."""
        return len(self._first)

    def get(self, key: bytes) -> int | None:
        """Return the block that got ``key`` first; ``None`` for an unknown key."""
        return self._first.get(key)

    def add(self, keys: Sequence[bytes], blocks: list[int]) -> None:
        """Give ``keys[i]`` to ``blocks[i]``; both have the same length. O(keys)."""
        self.additions += len(keys)
        shown = list(map(self._first.setdefault, keys, blocks))
        if shown == blocks:
            return
        for key, block, earlier in zip(keys, blocks, shown, strict=True):
            if earlier != block:
                self._others.setdefault(key, []).append(block)

    def add_one(self, key: bytes, block: int) -> None:
        """Give one key to one block."""
        self.additions += 1
        if self._first.setdefault(key, block) != block:
            self._others.setdefault(key, []).append(block)

    def remove(self, key: bytes, block: int) -> None:
        """Take ``key`` from ``block``. The next block with the same key is found from then on."""
        first, others = self._first, self._others
        if key not in others:
            if first.pop(key, None) != block:
                raise CacheError(f"block {block} is not indexed under {key.hex()}")
            return
        later = others[key]
        if first[key] == block:
            first[key] = later.pop(0)
        else:
            later.remove(block)
        if not later:
            del others[key]

    def remove_many(self, keys: Sequence[bytes], blocks: list[int]) -> None:
        """Take its key from each of ``blocks``. O(keys)."""
        if self._others and not self._others.keys().isdisjoint(keys):
            for key, block in zip(keys, blocks, strict=True):
                self.remove(key, block)
            return
        shown = list(map(self._first.pop, keys, repeat(None)))
        if shown != blocks:
            block = next(block for block, found in zip(blocks, shown, strict=True) if block != found)
            raise CacheError(f"block {block} is not indexed under its key")

    def rename(self, key: bytes | None, source: int, target: int) -> None:
        """Move ``key`` and the partial entries of ``source`` to ``target``."""
        if key is not None:
            if self._first.get(key) == source:
                self._first[key] = target
            else:
                later = self._others[key]
                later[later.index(source)] = target
        parent = self._parent.pop(source, None)
        if parent is not None:
            self._parent[target] = parent
            self._partial[parent] = [
                t._replace(block=target) if t.block == source else t for t in self._partial[parent]
            ]

    def leading_run(self, keys: Sequence[bytes], stop: int | None = None) -> Int32:
        """Return the blocks of the leading keys that are all known, at most ``stop``; int32[hits].

        O(hits), however many keys follow: keys are looked up in chunks, the first one alone. Long runs that were found
        before are compared as arrays.
        """
        get = self._first.get
        left = len(keys) if stop is None else min(stop, len(keys))
        if left <= 0 or get(keys[0]) is None:
            return _NONE
        if left < LEAST_KEYS:
            return self._asked(keys, 0, left)
        parts = self._find_runs(keys, left)
        found = sum(map(len, parts))
        rest = self._asked(keys, found, left)
        if len(rest):
            if self.keys_in_runs > 2 * len(self._first) + _MORE_IN_RUNS:
                before = self.keys_in_runs
                self._forget_lost()
                if self.keys_in_runs > before // 2:
                    self._clear_runs()
            self._add_run(keys, found, rest)
        return np.concatenate((*parts, rest)) if parts else rest

    def _asked(self, keys: Sequence[bytes], first: int, stop: int) -> Int32:
        """Look up ``keys`` from ``first`` on one by one, and return the blocks up to the first unknown key."""
        get, left = self._first.get, stop - first
        coming, chunk = iter(keys[first:] if first else keys), _FIRST_CHUNK
        parts: list[Int32] = []
        while left:
            chunk = min(chunk, left)
            ids = np.fromiter(map(get, islice(coming, chunk), repeat(0)), np.int32, chunk)  # 0, the null block: no key
            if np.count_nonzero(ids) < len(ids):
                parts.append(ids[: int(ids.argmin())])
                break
            parts.append(ids)
            left -= chunk
            chunk = min(4 * chunk, _LARGEST_CHUNK)
        return parts[0] if len(parts) == 1 else np.concatenate(parts or (_NONE,))

    def blocks_of(self, keys: Sequence[bytes]) -> list[int]:
        """Return the block of each of ``keys``; 0 for unknown ones. O(keys)."""
        return list(map(self._first.get, keys, repeat(0)))

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """Yield every (key, block); blocks of one key in the order in which they would be found."""
        for key, block in self._first.items():
            yield key, block
            for later in self._others.get(key, ()):
                yield key, later

    def clear(self) -> None:
        """Remove every entry."""
        self._clear_runs()
        self._first.clear()
        self._others.clear()
        self._partial.clear()
        self._parent.clear()
        self.num_partial = 0

    # -- tokens that end inside a block

    def partial_blocks_of(self, parent: bytes) -> Sequence[PartialBlock]:
        """Return the partial entries of ``parent``, oldest first."""
        return self._partial.get(parent, ())

    def partial_blocks(self) -> Iterable[int]:
        """Return every block with a partial entry."""
        return self._parent.keys()

    def is_partial(self, block: int) -> bool:
        """Return whether ``block`` has a partial entry."""
        return block in self._parent

    def partial_among(self, blocks: Sequence[int]) -> set[int]:
        """Return the ``blocks`` with a partial entry. O(blocks)."""
        return self._parent.keys() & blocks

    def partial_keys_in(self, blocks: Sequence[int]) -> list[tuple[int, bytes, bytes]]:
        """Return the partial entries of ``blocks``: (index in ``blocks``, parent, tokens)."""
        found = [(place, block) for place, block in enumerate(blocks) if block in self._parent]
        return [
            (place, parent, entry.tokens)
            for place, block in found
            for parent in (self._parent[block],)
            for entry in self._partial[parent]
            if entry.block == block
        ]

    def add_partial(self, parent: bytes, entry: PartialBlock) -> int | None:
        """Add a partial entry, which must be new.

        Returns:
            The block whose entry, the oldest of the parent, had to go; else ``None``.
        """
        self.additions += 1
        found = self._partial.setdefault(parent, [])
        gone = None
        if len(found) == self.most_partial:
            gone = found.pop(0).block
            self.num_partial -= 1
            if all(other.block != gone for other in found):
                del self._parent[gone]
        found.append(entry)
        self.num_partial += 1
        self._parent[entry.block] = parent
        return gone

    def remove_partial(self, block: int) -> None:
        """Remove all partial entries of ``block``, which has some."""
        parent = self._parent.pop(block)
        found = self._partial[parent]
        kept = [entry for entry in found if entry.block != block]
        if kept:
            self._partial[parent] = kept
        else:
            del self._partial[parent]
        self.num_partial -= len(found) - len(kept)

    def partial_entries(self) -> Iterator[tuple[bytes, PartialBlock]]:
        """Yield every (parent, partial entry); those of one parent oldest first."""
        for parent, entries in self._partial.items():
            for entry in entries:
                yield parent, entry

    # -- what a request finds

    def reach(self, request: Request, column: int) -> tuple[int, int]:
        """Return how many tokens of ``column`` a cached block begins with, and that block; 0 and 0 without one.

        O(1).
        """
        whole = self._whole(request, column)
        if whole is not None:
            return self._block_size, whole
        length = block = 0
        for entry in self._own_partial_blocks(request, column):
            if entry.length > length:
                length, block = entry.length, entry.block
        return length, block

    def source(self, request: Request, column: int, tokens: int) -> int:
        """Return the block that begins with the first ``tokens`` tokens of ``column``.

        Raises CacheError without one.
        """
        found = self.beginning(request, column, tokens)
        if found is None:
            raise CacheError(f"no block begins with {tokens} tokens of column {column}: look up again")
        return found

    def beginning(self, request: Request, column: int, tokens: int) -> int | None:
        """Return the block that begins with the first ``tokens`` tokens of ``column``; ``None`` without one."""
        whole = self._whole(request, column)
        if whole is not None:
            return whole
        for entry in self._own_partial_blocks(request, column):
            if entry.length >= tokens:
                return entry.block
        return None

    def begins(self, request: Request, block: int, column: int, tokens: int) -> bool:
        """Return whether ``block`` begins with the first ``tokens`` tokens of ``column``."""
        return block == self._whole(request, column) or any(
            entry.block == block and entry.length >= tokens for entry in self._own_partial_blocks(request, column)
        )

    def is_state(self, request: Request, block: int, tokens: int) -> bool:
        """Return whether ``block`` is a state after ``tokens`` tokens."""
        column, rest = divmod(tokens, self._block_size)
        if not rest:
            return bool(column) and block == self.get(request.hashes[column * self._hashes_per_block - 1])
        return any(entry.block == block and entry.length == rest for entry in self._own_partial_blocks(request, column))

    def last_state(self, request: Request, end_tokens: int, alignment: int) -> int:
        """Return the greatest position up to ``end_tokens`` of a state, or of an empty ring; 0 without one."""
        size, least = self._block_size, 0
        if self.empty:
            step = lcm(self.empty, alignment)
            least = end_tokens // step * step
        if not self._first and not self.num_partial:
            return least
        for column in range(end_tokens // size, least // size - 1, -1):
            longest = least
            for entry in self._own_partial_blocks(request, column):
                position = column * size + entry.length
                if longest < position <= end_tokens and position % alignment == 0:
                    longest = position
            if longest > least:
                return longest
            if (
                column * size > least
                and column * size % alignment == 0
                and self.get(request.hashes[column * self._hashes_per_block - 1]) is not None
            ):
                return column * size
        return least

    def state_at(self, request: Request, tokens: int) -> int | None:
        """Return the block of the state after ``tokens`` tokens; ``None`` without one, 0 where a ring is empty."""
        if self.empty and tokens % self.empty == 0:
            return 0
        column, rest = divmod(tokens, self._block_size)
        if not rest:
            return self.get(request.hashes[column * self._hashes_per_block - 1]) if column else None
        for entry in self._own_partial_blocks(request, column):
            if entry.length == rest:
                return entry.block
        return None

    def partial_key(self, request: Request, tokens: int) -> tuple[bytes, bytes]:
        """Return the parent and the tokens of the partial key of the first ``tokens`` tokens."""
        column, inside = divmod(tokens, self._block_size)
        parent, own = opening(request, column * self._hashes_per_block, self._hashes_per_block)
        return parent, own[: inside * TOKEN_BYTES]

    def _whole(self, request: Request, column: int) -> int | None:
        place = (column + 1) * self._hashes_per_block - 1
        return self.get(request.hashes[place]) if place < len(request.hashes) else None

    def _own_partial_blocks(self, request: Request, column: int) -> Sequence[PartialBlock]:
        """Return the partial entries of ``column`` with which the request's own tokens begin, oldest first."""
        if not self.num_partial:
            return ()
        parent, own = opening(request, column * self._hashes_per_block, self._hashes_per_block)
        found = self._partial.get(parent)
        if not found:
            return ()
        if len(found) == 1:
            return found if own.startswith(found[0].tokens) else ()
        return [entry for entry in found if own.startswith(entry.tokens)]

    # -- runs of keys

    def _find_runs(self, keys: Sequence[bytes], stop: int) -> list[Int32]:
        """Return the blocks of leading ``keys``, at most ``stop``, run by run.

        O(runs), and comparisons of arrays and lists.
        """
        parts: list[Int32] = []
        if self._losses.evictions - self._swept > _MOST_EVICTIONS:
            self._forget_lost()
        at, before = 0, None
        while at < stop and (run := self._runs.get(keys[at])) is not None:
            count = _common(run.keys, keys, at, stop)
            kept = self._losses.num_kept(run.blocks[:count], run.evictions)
            parts.append(run.blocks[:kept])
            at += kept
            if kept < count:
                self._cut(run, kept)
                break
            whole = count == len(run.keys)
            if before is not None:
                self._join(before, run)
                run = before
            if whole:  # and so was what it was joined to
                run.evictions = self._losses.evictions
            before = run if whole else None
        return parts

    def _add_run(self, keys: Sequence[bytes], found: int, blocks: Int32) -> None:
        """Remember ``blocks``, found under ``keys`` after the first ``found``. O(len(blocks)).

        They extend the run of exactly those first keys, if there is one. Else they become a run.
        """
        before = self._runs.get(keys[0]) if found else None
        new = _Run(list(keys[found : found + len(blocks)]), blocks, self._losses.evictions)
        if before is not None and len(before.keys) == found and before.keys[-1] == keys[found - 1]:
            _lengthen(before, new)
        elif len(blocks) >= LEAST_KEYS and keys[found] not in self._runs:
            self._runs[keys[found]] = new
        else:
            return
        self.keys_in_runs += len(blocks)

    def _forget_lost(self) -> None:
        """Cut each run at its first block without a key. O(keys in runs)."""
        for run in list(self._runs.values()):
            kept = self._losses.num_kept(run.blocks, run.evictions)
            if kept < len(run.keys):
                self._cut(run, kept)
            run.evictions = self._losses.evictions
        self._swept = self._losses.evictions

    def _cut(self, run: _Run, kept: int) -> None:
        """Keep only the first ``kept`` keys of ``run``; a short run is removed."""
        self.keys_in_runs -= len(run.keys) - kept
        first = run.keys[0]
        del run.keys[kept:]
        run.blocks = run.blocks[:kept].copy()
        if kept < LEAST_KEYS:
            self.keys_in_runs -= kept
            del self._runs[first]

    def _join(self, run: _Run, follower: _Run) -> None:
        """Append the run ``follower`` to ``run``."""
        if self._runs.pop(follower.keys[0], None) is not None:
            _lengthen(run, follower)

    def _clear_runs(self) -> None:
        self._runs.clear()
        self.keys_in_runs = 0


def _lengthen(run: _Run, follower: _Run) -> None:
    run.keys += follower.keys
    run.blocks = np.concatenate((run.blocks, follower.blocks))
    run.evictions = min(run.evictions, follower.evictions)


def _common(run: list[bytes], keys: Sequence[bytes], at: int, stop: int) -> int:
    """Return how many keys ``run`` and ``keys[at:stop]`` have in common: if one agrees, so do all before it.

    O(log keys), and O(1) if all agree.
    """
    low, high = 0, min(len(run), stop - at)
    if high and run[high - 1] == keys[at + high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if run[middle] == keys[at + middle]:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(slots=True)
class KnownTokens:
    """The keys seen last, between half of ``most`` and ``most`` of them; see ``add_known`` and ``leading_known``.

    There are two generations: when the young one is full, the old one is forgotten. Keys are remembered by their
    hashes. Two keys with one hash would cost one useless state, no more.
    """

    most: int
    young: set[int] = field(default_factory=set)
    old: set[int] = field(default_factory=set)


def add_known(known: KnownTokens, keys: Sequence[bytes]) -> None:
    """Remember the keys of a request, in order. O(log keys + keys that are not young)."""
    young = known.young
    if keys and hash(keys[0]) not in young:  # most new prompts
        young.update(map(hash, keys))
    elif keys and hash(keys[-1]) not in young:
        young.update(map(hash, keys[bisect_left(keys, 1, key=lambda key: hash(key) not in young) :]))
    if len(young) > max(known.most // 2, 1):
        known.old, known.young = young, set(map(hash, keys))


def leading_known(known: KnownTokens, keys: Sequence[bytes]) -> int:
    """Return how many leading ``keys`` are known: with a key, all before it were seen. O(log keys)."""
    young, old = known.young, known.old
    if not keys or ((first := hash(keys[0])) not in young and first not in old):  # most new prompts
        return 0
    return bisect_left(keys, 1, key=lambda key: (found := hash(key)) not in young and found not in old)


def parent_key(request: Request, first: int, count: int) -> bytes:
    """Return the parent of partial entries in hash blocks first ..

    first + count - 1: the key before them, with extra keys.
    """
    if request.hasher is None:
        raise CacheError(f"request {request.request_id!r} has no keys: construct it with hasher=cache.hasher")
    parent = request.hashes[first - 1] if first else request.hasher.root
    if request._extras is None:
        return parent
    extras = request.extra_keys(first, count)
    return parent if extras is None else parent + cbor2.dumps(extras, canonical=True)


def opening(request: Request, first: int, count: int) -> tuple[bytes, bytes]:
    """Return the parent of partial entries in hash blocks first .. first + count - 1, and their known tokens as bytes.

    A request remembers its last answer, because the entries of one position are asked for several times.
    """
    asked = (first, count, request.num_tokens, request.truncations)
    known = request.opening
    if known is None or known[0] != asked:
        parent = parent_key(request, first, count)
        size = 0 if request.hasher is None else request.hasher.block_size
        own = request.token_bytes(first * size, (first + count) * size)
        known = request.opening = asked, parent, own
    return known[1], known[2]
