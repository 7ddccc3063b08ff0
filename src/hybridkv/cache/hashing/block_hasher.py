"""Block hashes as the ecosystem's routers and stores compute them.

    key(i) = H(canonical CBOR of (parent or root, tokens of block i, extra keys or null))

The root is H of the CBOR text string "vllm-none-hash" unless a seed is configured. A non-cryptographic H
is allowed with a random root only, so that nobody can prepare collisions. Canonical CBOR: RFC 8949, 4.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Final, Protocol

import cbor2
import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instance, integer, text
from hybridkv.cache.hashing.remembered import LEAST_BLOCKS, RememberedChains
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import Extra
from hybridkv.units import MOST_COUNT, shown

ROOT_SEED: Final = "vllm-none-hash"
ALGORITHMS: Final = ("sha256_cbor", "xxhash_cbor")
REMEMBERED_BYTES: Final = 64 << 20
"""Tokens and hashes of some 7 million tokens."""


class _Hash(Protocol):
    def digest(self) -> bytes: ...


Digest = Callable[[bytes], _Hash]


def _digest_of(algorithm: str) -> Digest:
    if not isinstance(algorithm, str):
        raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {shown(algorithm)}")
    if algorithm == "sha256_cbor":
        return hashlib.sha256
    if algorithm == "xxhash_cbor":
        try:
            import xxhash  # noqa: PLC0415 - optional dependency
        except ImportError as error:
            raise ConfigError("xxhash_cbor needs the package xxhash: pip install 'hybridkv[hash]'") from error
        digest: Digest = xxhash.xxh3_128
        return digest
    raise ConfigError(f"unknown hash algorithm {shown(algorithm)}: use one of {', '.join(ALGORITHMS)}")


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
            b"".join((head, *map(_encode_token, row), _NULL_ITEM))
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


class BlockHasher:
    """Hashes blocks of ``block_size`` tokens.

    algorithm: "sha256_cbor", or "xxhash_cbor" with a random root. seed: replaces the text that the root
    is the hash of. root: the root itself, required to be random bytes for a non-cryptographic hash.
    remembered_bytes: for chains of long prompts, which are then compared when they come again (docs/design/0023).
    Raises ConfigError for anything else.
    """

    def __init__(
        self,
        block_size: int,
        algorithm: str = "sha256_cbor",
        *,
        seed: str | None = None,
        root: bytes | None = None,
        remembered_bytes: int = REMEMBERED_BYTES,
    ) -> None:
        self.block_size = integer("the hash block", block_size, most=MOST_COUNT)
        if self.block_size < 1:
            raise ConfigError(f"the hash block must be at least 1 token, got {block_size}")
        self.algorithm = algorithm
        self._digest = _digest_of(algorithm)
        size = len(self._digest(b"").digest())
        if algorithm != "sha256_cbor" and root is None:
            raise ConfigError(
                f"{algorithm} is not collision resistant: hand in a random root, root=os.urandom({size}), "
                "or use sha256_cbor"
            )
        if root is not None and len(instance("root", root, bytes)) != size:
            raise ConfigError(f"the root of {algorithm} is {size} bytes long, got {len(root)}")
        named = ROOT_SEED if seed is None else text("seed", seed)
        self.root = root if root is not None else self._digest(cbor2.dumps(named, canonical=True)).digest()
        self._before_parent = _head(4, 3) + _head(2, size)
        self.remembered = RememberedChains(self.block_size, integer("remembered_bytes", remembered_bytes, 0))

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.integer], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """Hashes of consecutive full blocks behind ``parent`` (None: the root); a shorter tail is left out.

        tokens: int array. extras: extra keys of each block, None when no block has any. O(tokens); what a long prompt
        begins with, and was hashed before, is only compared.
        """
        if parent is not None or len(tokens) < LEAST_BLOCKS * self.block_size or not self.remembered.max_bytes:
            return list(chain.from_iterable(self._chunks(parent, tokens, extras)))
        ids = np.ascontiguousarray(tokens, np.int32)
        hashes, place = self.remembered.find(ids, extras)
        done, joined = place.blocks, bytearray()
        rest = None if extras is None else extras[done:]
        for part in self._chunks(hashes[-1] if done else None, tokens[done * self.block_size :], rest):
            hashes += part
            joined += b"".join(part)
        if joined:
            self.remembered.remember(ids, extras, place, joined)
        return hashes

    def _chunks(
        self, parent: bytes | None, tokens: NDArray[np.integer], extras: Sequence[Extra | None] | None
    ) -> Iterator[list[bytes]]:
        """Hashes of all full blocks, some at a time."""
        size, before, digest = self.block_size, self._before_parent, self._digest
        key = self.root if parent is None else parent
        parts = self._parts(np.asarray(tokens[: len(tokens) // size * size]), extras)
        for first in range(0, len(parts), _CHUNK):
            yield [key := digest(before + key + part).digest() for part in parts[first : first + _CHUNK]]

    def hash_rows(
        self,
        parents: Sequence[bytes | None],
        tokens: NDArray[np.integer],
        extras: Sequence[Extra | None] | None = None,
    ) -> list[bytes]:
        """Hashes of unrelated blocks, one a row of ``tokens`` [n, block_size], each behind its own parent."""
        before, digest, root = self._before_parent, self._digest, self.root
        parts = self._parts(tokens.reshape(-1), extras)
        return [digest(before + (parent or root) + part).digest() for parent, part in zip(parents, parts, strict=True)]

    def _parts(self, tokens: NDArray[np.integer], extras: Sequence[Extra | None] | None) -> list[bytes]:
        """What is hashed of each block behind its parent: tokens and extra keys, null where there are none."""
        parts = _encode_blocks(tokens, self.block_size)
        for i, extra in zip(range(len(parts)), extras or (), strict=False):
            if extra is not None:
                parts[i] = parts[i][:-1] + cbor2.dumps(extra, canonical=True)
        return parts
