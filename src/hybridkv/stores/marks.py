"""Marks: which resume points inside a hash block a store has blocks for.

mark of a hash block   [ n0 t t t . ][ n1 t . . . ] ...     8 entries: tokens of the tail + 1, and the tail
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.stores.store import BlockStore, pieces_of

MOST_TAILS: Final = 8
"""Tails that a mark lists, the newest first."""


def mark_bytes(hash_block: int) -> int:
    """Return the length of a mark.

    Args:
        hash_block: Tokens of a hash block.
    """
    return MOST_TAILS * hash_block * np.dtype(np.int32).itemsize


def entry_sizes(block_bytes: Iterable[int], hash_block: int) -> list[int]:
    """Return the different lengths of what a store keeps, the shortest first: pieces of blocks, and marks.

    Args:
        block_bytes: Lengths of whole blocks.
        hash_block: Tokens of a hash block.
    """
    return sorted({mark_bytes(hash_block), *(piece for size in block_bytes for piece in pieces_of(size))})


def tails_of(mark: bytes | bytearray | memoryview, hash_block: int) -> list[bytes]:
    """Return the tails that a mark lists, the newest first; none of a mark that is damaged.

    Args:
        mark: The bytes of the mark.
        hash_block: Tokens of a hash block.
    """
    rows = np.frombuffer(mark, np.int32).reshape(MOST_TAILS, hash_block)
    counts = rows[:, 0]
    return [row[1:count].tobytes() for row, count in zip(rows, counts.tolist(), strict=True) if 0 < count <= hash_block]


def mark_with(mark: bytes | bytearray | memoryview, tail: bytes, hash_block: int) -> bytes:
    """Return a mark that lists one more tail, in the place of the oldest one if it is full.

    Args:
        mark: The bytes of the mark so far; empty for a new one.
        tail: Bytes of int32, fewer tokens than a hash block.
        hash_block: Tokens of a hash block.
    """
    known = [one for one in (tails_of(mark, hash_block) if len(mark) else []) if one != tail]
    rows: NDArray[np.int32] = np.zeros((MOST_TAILS, hash_block), np.int32)
    for row, one in zip(rows, [tail, *known], strict=False):
        tokens = np.frombuffer(one, np.int32)
        row[0], row[1 : len(tokens) + 1] = len(tokens) + 1, tokens
    return rows.tobytes()


def put_mark(store: BlockStore, key: bytes, tail: bytes, hash_block: int) -> bool:
    """List a tail in a mark of a store; return whether it is kept. If two callers do so at once, one tail may be lost.

    Args:
        store: The store.
        key: The key of the mark.
        tail: Bytes of int32, fewer tokens than a hash block.
        hash_block: Tokens of a hash block.
    """
    mark = bytearray(mark_bytes(hash_block))
    found = store.get([key], [memoryview(mark)])[0]
    return store.put([key], [memoryview(mark_with(mark if found else b"", tail, hash_block))])[0]
