"""What one request can find in the index of one group."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import cbor2
import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.index import PrefixIndex
from hybridkv.cache.blocks.partial import Tail
from hybridkv.errors import CacheError
from hybridkv.request import Request

Int32 = NDArray[np.int32]


def parent_key(request: Request, first: int, count: int) -> bytes:
    """What the tails of hash blocks first .. first + count - 1 are found behind: the key before, and extra keys."""
    if request.hasher is None:
        raise CacheError(f"request {request.request_id!r} has no keys: construct it with hasher=cache.hasher")
    parent = request.hashes[first - 1] if first else request.hasher.root
    extras = request.extra_keys(first, count)
    return parent if extras is None else parent + cbor2.dumps(extras, canonical=True)


class PrefixView:
    """Keys of ``request`` in blocks of ``stride`` hash blocks, ``block_size`` tokens, looked up in ``index``."""

    __slots__ = ("_block_size", "_index", "_request", "_stride", "get", "leading_run")

    def __init__(self, index: PrefixIndex, request: Request, stride: int, block_size: int) -> None:
        self._index = index
        self._request = request
        self._stride = stride
        self._block_size = block_size
        self.get = index.get
        self.leading_run = index.leading_run

    @property
    def additions(self) -> int:
        """Keys that the index was ever given."""
        return self._index.additions

    def reach(self, column: int) -> tuple[int, int]:
        """How many tokens of ``column`` a cached block begins with, and that block; 0 and 0 without one. O(1)."""
        whole = self._whole(column)
        if whole is not None:
            return self._block_size, whole
        return max(((tail.length, tail.block) for tail in self._tails(column)), default=(0, 0), key=itemgetter(0))

    def source(self, column: int, tokens: int) -> int:
        """The block that begins with the first ``tokens`` tokens of ``column``. CacheError where reach is less."""
        whole = self._whole(column)
        if whole is not None:
            return whole
        for tail in self._tails(column):
            if tail.length >= tokens:
                return tail.block
        raise CacheError(f"no block begins with {tokens} tokens of column {column}: look up again")

    def begins(self, block: int, column: int, tokens: int) -> bool:
        """Whether ``block`` begins with the first ``tokens`` tokens of ``column``."""
        return block == self._whole(column) or any(
            tail.block == block and tail.length >= tokens for tail in self._tails(column)
        )

    def is_state(self, block: int, tokens: int) -> bool:
        """Whether ``block`` is a state after ``tokens`` tokens."""
        column, rest = divmod(tokens, self._block_size)
        if not rest:
            return bool(column) and block == self._index.get(self._request.hashes[column - 1])
        return any(tail.block == block and tail.length == rest for tail in self._tails(column))

    def label(self, end_tokens: int, alignment: int) -> int:
        """The greatest token count up to ``end_tokens`` that a state is labelled with, 0 for none."""
        size, partial, index = self._block_size, self._index.partial, self._index
        if not len(index) and not partial:
            return 0
        hashes: Sequence[bytes] = self._request.hashes
        for column in range(end_tokens // size, -1, -1):
            found = [column * size + tail.length for tail in self._tails(column)] if partial else []
            fitting = [label for label in found if label <= end_tokens and label % alignment == 0]
            if fitting:
                return max(fitting)
            if column and column * size % alignment == 0 and index.get(hashes[column - 1]) is not None:
                return column * size
        return 0

    def labelled(self, tokens: int) -> int | None:
        """The block of the state after ``tokens`` tokens."""
        column, rest = divmod(tokens, self._block_size)
        if not rest:
            return self._index.get(self._request.hashes[column - 1]) if column else None
        return next((tail.block for tail in self._tails(column) if tail.length == rest), None)

    def tail(self, tokens: int) -> tuple[bytes, bytes]:
        """Parent and tail of the partial key of the first ``tokens`` tokens."""
        column = tokens // self._block_size
        parent = parent_key(self._request, column * self._stride, self._stride)
        return parent, self._request.token_ids(column * self._block_size, tokens).tobytes()

    def _whole(self, column: int) -> int | None:
        place = (column + 1) * self._stride - 1
        return self._index.get(self._request.hashes[place]) if place < len(self._request.hashes) else None

    def _tails(self, column: int) -> Sequence[Tail]:
        """Those that the request's own tokens begin with, oldest first."""
        partial = self._index.partial
        if not partial:
            return ()
        tails = partial.of(parent_key(self._request, column * self._stride, self._stride))
        if not tails:
            return ()
        start = column * self._block_size
        own = self._request.token_ids(start, start + self._block_size).tobytes()
        return [tail for tail in tails if own.startswith(tail.tokens)]
