"""Measure the least time that numpy and Python need for rows of the control-plane benchmark that miss their aims.

    python floors.py

Each function does a row's work without checks, errors, statistics and choices: it reads and writes the same data in the
fewest calls. It gives no answers and could not serve; a row cannot be faster without compiled code. One in sixteen
requests fills a block in a step. A prompt has 8,192 blocks. Prints medians of thread time in nanoseconds.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from time import thread_time_ns
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.hashing import ArrayDigests

T = TypeVar("T")
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

BLOCK: Final = 16
BLOCKS: Final = 8192
ROUNDS: Final = 41
DRAW: Final = np.random.default_rng(7)
HASHES: Final = ArrayDigests(BLOCK, hashlib.sha256, 32)
ROOT: Final = bytes(32)


def keys(count: int) -> list[bytes]:
    """As many as there are blocks, each an object of its own."""
    octets = DRAW.bytes(32 * count)
    return [octets[i : i + 32] for i in range(0, len(octets), 32)]


def nanoseconds(act: Callable[[T], object], prepare: Callable[[], T]) -> float:
    """Median of ``act`` of what ``prepare`` makes outside the clock."""
    spent = []
    for _ in range(ROUNDS):
        given = prepare()
        begun = thread_time_ns()
        act(given)
        spent.append(thread_time_ns() - begun)
    return float(np.median(spent))


class Owner:
    """What a request has: its row, and hashes."""

    __slots__ = ("hashes", "row", "rows", "tokens")

    def __init__(self, row: int) -> None:
        self.row, self.rows, self.hashes, self.tokens = row, 0, keys(1), bytearray()


class Answer(NamedTuple):
    """What a call gives."""

    ids: Int32
    due: Int64


class Step:
    """Rows that decode: columns, a table, a ring of free blocks, an index of keys."""

    def __init__(self, requests: int) -> None:
        self.owners = [Owner(row) for row in range(requests)]
        self.tokens = np.arange(requests) % BLOCK + 1024
        self.computed = self.tokens.copy()
        self.due = self.tokens // BLOCK * BLOCK + BLOCK
        self.tail = np.zeros((requests, BLOCK), np.int32)
        self.table = np.zeros((requests, 128), np.int32)
        self.ring = np.arange(1 << 20, dtype=np.int32)
        self.counts = np.zeros(1 << 20, np.int32)
        self.index: dict[bytes, int] = {}
        self.key_of: list[bytes | None] = [None] * (1 << 20)
        self.head, self.all = 0, np.arange(requests)

    def asked(self) -> tuple[list[Owner], list[int]]:
        """Return requests in a new order, and a token of each."""
        order = DRAW.permutation(len(self.owners)).tolist()
        return [self.owners[i] for i in order], order

    def rows(self, requests: list[Owner]) -> Int64:
        """Where they are."""
        return np.fromiter([one.row for one in requests], np.int64, len(requests))

    def allocated(self, rows: Int64, groups: int = 1) -> Answer:
        """Take a block for each request that is due one."""
        many = max(len(rows) // BLOCK, 1)  # as many as are due
        for _ in range(groups):
            due = (self.due[rows] <= self.computed[rows] + 1).nonzero()[0][:many]
            ids = self.ring[self.head : self.head + many]
            some = rows[:many]
            self.head += many
            self.table[some, (self.computed[some] // BLOCK) % 128] = ids
            self.counts[ids] = 1
            self.due[some[: len(due)]] += BLOCK
            hashed = [self.owners[row].hashes[-1] for row in some.tolist()]
            self.index.update(zip(hashed, ids.tolist(), strict=True))
            for place, key in zip(ids.tolist(), hashed, strict=True):
                self.key_of[place] = key
        self.computed[rows] += 1
        return Answer(ids, due)

    def appended(self, rows: Int64, tokens: list[int]) -> None:
        """Append one more token, and hash the full blocks."""
        many = np.array(tokens, np.int32)
        known = self.tokens[rows]
        place = known % BLOCK
        (place == BLOCK - 1).nonzero()
        self.tail[rows, place] = many
        self.tokens[rows] = known + 1
        some = rows[: len(rows) // BLOCK]
        owners = [self.owners[row] for row in some.tolist()]
        made = HASHES.rows([one.hashes[-1] for one in owners], self.tail[some].reshape(-1), None)
        octets = self.tail[some].tobytes()
        for i, (one, key) in enumerate(zip(owners, made, strict=True)):
            one.hashes[-1:] = [key]
            one.tokens[:] = octets[64 * i : 64 * i + 64]

    def said(self, rows: Int64) -> None:
        """Make an event for each filled block: its tokens as a list, its key, and its parent's key."""
        some = rows[: len(rows) // BLOCK]
        lists = self.tail[some].tolist()
        owners = [self.owners[row] for row in some.tolist()]
        self.told = [(one.hashes[-1], None, tokens, BLOCK, 0) for one, tokens in zip(owners, lists, strict=True)]


def decode(requests: int, groups: int = 1, *, events: bool = False, found: bool = True) -> float:
    """Nanoseconds a request and step."""
    step = Step(requests)

    def act(given: tuple[list[Owner], list[int]]) -> None:
        rows = step.rows(given[0]) if found else step.all
        step.allocated(rows, groups)
        if events:
            step.said(rows)
        step.appended(step.rows(given[0]) if found else step.all, given[1])

    return nanoseconds(act, step.asked) / requests


def one_call() -> float:
    """Two functions a request, which read and write columns and answer; one block in sixteen, taken and hashed."""
    step = Step(256)
    computed, tokens, due = step.computed.data, step.tokens.data, step.due.data
    nothing = Answer(step.ring[:0], step.all[:0])

    def allocate(request: Owner, count: int, hit: int = 0) -> Answer | None:
        row = request.row
        now = computed[row] + count + hit
        if now > tokens[row] + 100 or now >= due[row] + 100:
            return None
        computed[row] = now
        return nothing

    def append(request: Owner, token: int) -> None:
        row = request.row
        n = tokens[row]
        step.tail[row, n % BLOCK] = token
        tokens[row] = n + 1

    def act(given: tuple[list[Owner], list[int]]) -> None:
        for one in given[0]:
            allocate(one, 1)
        for one, token in zip(*given, strict=True):
            append(one, token)

    crossing = nanoseconds(lambda rows: step.allocated(rows[:1]), lambda: DRAW.permutation(256))
    hashed = nanoseconds(lambda parents: HASHES.rows(parents, step.tail[0], None), lambda: [ROOT])
    return nanoseconds(act, step.asked) / 256 + (crossing + hashed) / BLOCK


def hashing(*, as_list: bool) -> float:
    """Hash a block: tokens as an array, bytes ready, SHA-256 of them after their parent."""
    ids = DRAW.integers(0, 150_000, BLOCKS * BLOCK).astype(np.int32)
    parts = [DRAW.bytes(90) for _ in range(BLOCKS)]
    before = bytes(3)

    def act(given: list[int] | Int32) -> None:
        np.array(given, np.int32).tobytes()
        key = ROOT
        for part in parts:
            key = hashlib.sha256(before + key + part).digest()

    return nanoseconds(act, lambda: ids.tolist() if as_list else ids) / BLOCKS


class Pool:
    """Blocks that are given, published, evicted and given back."""

    def __init__(self, blocks: int) -> None:
        self.index: dict[bytes, int] = {}
        self.key_of: list[bytes | None] = [None] * blocks
        self.ring = np.arange(blocks, dtype=np.int32)
        self.counts = np.zeros(blocks, np.int32)
        self.stamp = np.zeros(blocks, np.int64)
        self.row = np.zeros(BLOCKS, np.int32)
        self.head = 0

    def given(self, hashes: list[bytes]) -> list[int]:
        """Return the block of each key."""
        ids = self.ring[self.head : self.head + len(hashes)]
        self.head = (self.head + len(hashes)) % (len(self.ring) - BLOCKS)
        self.counts[ids] = 1
        self.row[:] = ids
        places: list[int] = ids.tolist()
        self.index.update(zip(hashes, places, strict=True))
        for place, key in zip(places, hashes, strict=True):
            self.key_of[place] = key
        return places

    def evicting(self, hashes: list[bytes]) -> list[int]:
        """Take a block for each key, from blocks that lose another key."""
        for place in self.ring[self.head : self.head + len(hashes)].tolist():
            key = self.key_of[place]
            if key is not None:
                self.index.pop(key, None)
        return self.given(hashes)

    def freed(self) -> None:
        """All of them, the last one first."""
        ids = self.row[::-1]
        self.counts[ids] -= 1
        gone = ids[self.counts[ids] == 0]
        self.stamp[gone] = np.arange(len(gone))
        self.ring[: len(gone)] = gone


def prompts(way: str) -> float:
    """Measure the time per block of a prompt: taken, taken while evicting other prompts, or freed."""

    def prepared() -> tuple[Pool, list[bytes]]:
        pool = Pool(2 * BLOCKS)
        if way == "evicting":
            pool.given(keys(BLOCKS))
            pool.head = 0
        if way == "freed":
            pool.given(keys(BLOCKS))
        return pool, keys(BLOCKS)

    def act(made: tuple[Pool, list[bytes]]) -> None:
        pool, hashes = made
        if way == "freed":
            pool.freed()
        else:
            getattr(pool, way)(hashes)

    return nanoseconds(act, prepared) / BLOCKS


def hybrid_look_up() -> float:
    """2,048 keys of full attention found, and those of a window at their end."""
    hashes = keys(2048)
    index = {key: i for i, key in enumerate(hashes)}

    def act(hashes: list[bytes]) -> None:
        found = [index.get(key) for key in hashes]
        np.array(found, np.int32)
        window = [index.get(key) for key in hashes[-64:]]
        np.array(window, np.int32)

    return nanoseconds(act, lambda: hashes)


def slots(tokens: int) -> float:
    """Range checks, the row of each token, its cell, its block, its slot, and all sent."""
    table = DRAW.integers(0, 1 << 20, (1024, 8192)).astype(np.int32).reshape(-1)
    rows = np.arange(1024) if tokens == 1024 else np.zeros(1, np.int64)
    counts = np.full(len(rows), tokens // len(rows))
    device = np.empty(tokens, np.int64)

    def act(positions: Int64) -> None:
        of = np.repeat(rows, counts)
        if of.max() >= 1024 or of.min() < 0 or positions.max() >= 1 << 17 or positions.min() < 0:
            raise ValueError
        cell = of * 8192
        cell += positions >> 4
        block = table.take(cell, mode="clip")
        out = block.astype(np.int64)
        out <<= 4
        out += positions & 15
        device[:] = out

    return nanoseconds(act, lambda: DRAW.integers(0, 1000, tokens))


ROWS: Final[dict[str, Callable[[], float]]] = {
    "decode.1024.total.per_req_step": lambda: decode(1024),
    "decode_observed.1024.total.per_req_step": lambda: decode(1024, events=True),
    "hybrid.full_swa.decode.256.total.per_req_step": lambda: decode(256, 2),
    "decode_one.256.total.per_req_step": one_call,
    "sched.decode1024.total.per_req_step": lambda: decode(1024, found=False),
    "sched.hybrid4.decode256.total.per_req_step": lambda: decode(256, 4, found=False),
    "hybrid.full_swa.lookup_hit32k.per_call": hybrid_look_up,
    "hash.sha256_cbor.128k.per_block": lambda: hashing(as_list=True),
    "hash.sha256_cbor.128k_int32.per_block": lambda: hashing(as_list=False),
    "prefill.128k_one_shot.per_block": lambda: prompts("given"),
    "prefill.128k_evicting.per_block": lambda: prompts("evicting"),
    "free.128k.per_block": lambda: prompts("freed"),
    "table.slots.prefill8192_1req.per_call": lambda: slots(8192),
    "table.slots.decode1024.per_call": lambda: slots(1024),
}


def main() -> None:
    """See the module."""
    gc.disable()
    for row, floor in ROWS.items():
        print(f"{row:50} {floor():10,.0f} ns")


if __name__ == "__main__":
    main()
