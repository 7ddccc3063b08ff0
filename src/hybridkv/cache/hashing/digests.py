"""How the hashes of blocks are computed: arrays and hashlib, or a compiled module where one is installed.

Both give the same bytes. The compiled one is the package hybridkv-native (docs/design/0024).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

INTERFACE: Final = 1
"""Of the compiled module: the functions that are called here, and what they are handed."""


class _Hash(Protocol):
    def digest(self) -> bytes: ...


Digest = Callable[[bytes], _Hash]
Tails = Sequence[bytes | None]
"""Of each block the bytes that end it in place of null, None where that is null."""


class BlockDigests(Protocol):
    """Hashes blocks of tokens: H(canonical CBOR of (parent, tokens of the block, its tail or null)).

    tokens: whole blocks, ids in 0 .. 2**32 - 1, of any integer type.
    """

    def chain(self, parent: bytes, tokens: NDArray[np.integer], tails: Tails | None) -> Iterator[list[bytes]]:
        """Of blocks one behind the other, some at a time; at once no more than is asked for. O(tokens)."""
        ...

    def rows(self, parents: Sequence[bytes], tokens: NDArray[np.integer], tails: Tails | None) -> list[bytes]:
        """Of unrelated blocks, each behind its own parent. O(tokens)."""
        ...


@cache  # of a hasher's few lengths
def _head(major: int, n: int) -> bytes:
    """The CBOR head of major type ``major`` with argument ``n``, in its shortest form."""
    if n < 24:
        return bytes([major << 5 | n])
    size = next(s for s in (1, 2, 4, 8) if n < 1 << 8 * s)
    return bytes([major << 5 | 23 + size.bit_length()]) + n.to_bytes(size, "big")


_NULL: Final = 0xF6
_NULL_ITEM: Final = bytes([_NULL])
_FEW: Final = 8  # up to so many blocks a Python loop is faster than array operations
_CHUNK: Final = 512  # blocks; what is made of a chunk stays in the processor's cache

# The head byte of an unsigned integer that takes 1, 2, 3 or 5 bytes, in front of its argument.
_HEADS: Final = np.array([0, 0, 0x18 << 8, 0x19 << 16, 0, 0x1A << 32], np.uint64)


def _encode_blocks(tokens: NDArray[np.integer], block_size: int) -> list[bytes]:
    """Of each block the bytes behind the parent: canonical CBOR of its tokens, an array, and null.

    tokens: n * block_size ids in 0 .. 2**32 - 1. O(tokens).
    """
    blocks = len(tokens) // block_size
    if blocks <= _FEW:
        head = _head(4, block_size)
        return [
            b"".join((head, *map(_ENCODED.__getitem__, row), _NULL_ITEM))
            for row in tokens.reshape(blocks, block_size).tolist()
        ]
    size = _CHUNK * block_size
    return [
        part for start in range(0, len(tokens), size) for part in _encode_many(tokens[start : start + size], block_size)
    ]


def _encode_token(n: int) -> bytes:
    """_head(0, n) of at most 4 bytes, without its search."""
    if n < 24:
        return n.to_bytes(1, "big")
    if n < 1 << 8:
        return (0x1800 | n).to_bytes(2, "big")
    if n < 1 << 16:
        return (0x190000 | n).to_bytes(3, "big")
    return (0x1A << 32 | n).to_bytes(5, "big")


class _Encoded(dict[int, bytes]):
    """_encode_token of ids; the first ``most`` that are asked for are remembered, some 140 bytes each."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __missing__(self, n: int) -> bytes:
        found = _encode_token(n)
        if len(self) < self._most:
            self[n] = found
        return found


_ENCODED: Final = _Encoded(1 << 16)


def _encode_many(tokens: NDArray[np.integer], block_size: int) -> list[bytes]:
    """_encode_blocks in array operations.

    Every item (a block's head, its tokens, null) becomes one integer whose ``size`` low bytes are its
    encoding. All items' bytes at distance 5 from their ends are written, then those at 4, ... 1: what an
    item writes in front of its own bytes belongs to earlier items, which write there at a smaller distance.
    """
    stride, head = block_size + 2, _head(4, block_size)
    words = np.zeros(len(tokens) // block_size * stride, np.uint64)
    words.reshape(-1, stride)[:, 1:-1] = tokens.reshape(-1, block_size)
    sizes = (words >= 24).view(np.uint8) + (words >= 256) + (words >= 65536).view(np.uint8) * 2 + np.uint8(1)
    sizes[::stride] = len(head)
    words |= _HEADS[sizes]
    words[::stride] = int.from_bytes(head, "big")
    words[stride - 1 :: stride] = _NULL
    octets = words.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
    place = np.cumsum(sizes, dtype=np.int64)
    stops = place[stride - 1 :: stride].tolist()
    widest = int(sizes.max())
    out = np.empty(stops[-1] + widest, np.uint8)  # the first items write in front of their own bytes, too
    for distance in range(widest, 0, -1):
        out[place] = octets[:, distance - 1]
        place += 1
    body = out[widest:].tobytes()
    return [body[start:stop] for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


class ArrayDigests:
    """Blocks of ``block_size`` tokens hashed by ``digest``, whose hashes have ``size`` bytes."""

    def __init__(self, block_size: int, digest: Digest, size: int) -> None:
        self._block_size, self._digest = block_size, digest
        self._before = before_parent(size)

    def chain(self, parent: bytes, tokens: NDArray[np.integer], tails: Tails | None) -> Iterator[list[bytes]]:
        """See BlockDigests."""
        before, digest, key = self._before, self._digest, parent
        parts = self._parts(tokens, tails)
        for first in range(0, len(parts), _CHUNK):
            yield [key := digest(before + key + part).digest() for part in parts[first : first + _CHUNK]]

    def rows(self, parents: Sequence[bytes], tokens: NDArray[np.integer], tails: Tails | None) -> list[bytes]:
        """See BlockDigests."""
        before, digest = self._before, self._digest
        parts = self._parts(tokens, tails)
        return [digest(before + parent + part).digest() for parent, part in zip(parents, parts, strict=True)]

    def _parts(self, tokens: NDArray[np.integer], tails: Tails | None) -> list[bytes]:
        """What is hashed of each block behind its parent."""
        parts = _encode_blocks(tokens, self._block_size)
        if tails is not None:
            for i, tail in enumerate(tails):
                if tail is not None:
                    parts[i] = parts[i][:-1] + tail
        return parts


class CompiledDigests:
    """Blocks of ``block_size`` tokens hashed by SHA-256 in ``module``, which is hybridkv_native."""

    def __init__(self, block_size: int, module: Any) -> None:  # noqa: ANN401 - a module that may not be installed
        self._block_size, self._chain, self._rows = block_size, module.sha256_chain, module.sha256_rows

    def chain(self, parent: bytes, tokens: NDArray[np.integer], tails: Tails | None) -> Iterator[list[bytes]]:
        """See BlockDigests. Other threads run meanwhile."""
        yield self._chain(parent, _as_uint32(tokens), self._block_size, tails)

    def rows(self, parents: Sequence[bytes], tokens: NDArray[np.integer], tails: Tails | None) -> list[bytes]:
        """See BlockDigests."""
        hashes: list[bytes] = self._rows(parents, _as_uint32(tokens), self._block_size, tails)
        return hashes


def before_parent(size: int) -> bytes:
    """What a block's encoding begins with: an array of three, and in it the head of a parent of ``size`` bytes."""
    return _head(4, 3) + _head(2, size)


def _as_uint32(tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """``tokens``, contiguous; not copied where they lie so as int32."""
    if tokens.dtype == np.int32:
        tokens = tokens.view(np.uint32)
    return np.ascontiguousarray(tokens, np.uint32)


@cache
def compiled_module() -> Any | None:  # noqa: ANN401 - a module that may not be installed
    """hybridkv_native, None where it is not installed; with a warning where it is another version's."""
    try:
        import hybridkv_native  # noqa: PLC0415 - optional
    except ImportError:
        return None
    if hybridkv_native.INTERFACE != INTERFACE:
        warnings.warn(
            f"hybridkv-native is not used: its interface is {hybridkv_native.INTERFACE}, hybridkv calls {INTERFACE}: "
            "install that of the same sources",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return hybridkv_native
