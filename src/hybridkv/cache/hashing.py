"""Block hashes as the ecosystem's routers and stores compute them.

    key(i) = H(canonical CBOR of (parent or root, tokens of block i, extra keys or null))

The root is H of the CBOR text string "vllm-none-hash" unless a seed is configured. A non-cryptographic H
is allowed with a random root only, so that nobody can prepare collisions. Canonical CBOR: RFC 8949, 4.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import cbor2
import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.request import Extra

ROOT_SEED: Final = "vllm-none-hash"
ALGORITHMS: Final = ("sha256_cbor", "xxhash_cbor")

Digest = Callable[[bytes], bytes]


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _digest_of(algorithm: str) -> Digest:
    if algorithm == "sha256_cbor":
        return _sha256
    if algorithm == "xxhash_cbor":
        try:
            import xxhash  # noqa: PLC0415 - optional dependency
        except ImportError as error:
            raise ConfigError("xxhash_cbor needs the package xxhash: pip install 'hybridkv[hash]'") from error
        digest: Digest = xxhash.xxh3_128_digest
        return digest
    raise ConfigError(f"unknown hash algorithm {algorithm!r}: use one of {', '.join(ALGORITHMS)}")


def _head(major: int, n: int) -> bytes:
    """The CBOR head of major type ``major`` with argument ``n``, in its shortest form."""
    if n < 24:
        return bytes([major << 5 | n])
    size = next(s for s in (1, 2, 4, 8) if n < 1 << 8 * s)
    return bytes([major << 5 | 23 + size.bit_length()]) + n.to_bytes(size, "big")


# Which of (head, 4 big-endian bytes) an unsigned integer of 0, 1, 2 or 4 argument bytes consists of.
_KEEP: Final = np.array(
    [[1, 0, 0, 0, 0], [1, 0, 0, 0, 1], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1]],
    dtype=np.bool_,
)
_SIZES: Final = np.array([1, 2, 3, 5], np.int64)
_EDGES: Final = np.array([24, 256, 65536], np.uint32)


def _encode_tokens(tokens: NDArray[np.integer], block_size: int) -> tuple[bytes, list[int]]:
    """Canonical CBOR of all tokens, side by side, and where each block's bytes begin and the last ends.

    tokens: n * block_size ids in 0 .. 2**32 - 1. O(tokens), without a Python loop.
    """
    ids = tokens.astype(np.uint32)
    kind = np.searchsorted(_EDGES, ids, side="right")
    wide = np.empty((ids.size, 5), np.uint8)
    wide[:, 1:] = ids.astype(">u4").view(np.uint8).reshape(-1, 4)
    wide[:, 0] = np.where(kind == 0, ids, 23 + kind)
    body = wide[_KEEP[kind]].tobytes()
    ends = np.cumsum(_SIZES[kind].reshape(-1, block_size).sum(axis=1))
    return body, [0, *ends.tolist()]


class BlockHasher:
    """Hashes blocks of ``block_size`` tokens.

    algorithm: "sha256_cbor", or "xxhash_cbor" with a random root. seed: replaces the text that the root
    is the hash of. root: the root itself, required to be random bytes for a non-cryptographic hash.
    Raises ConfigError for anything else.
    """

    def __init__(
        self,
        block_size: int,
        algorithm: str = "sha256_cbor",
        *,
        seed: str | None = None,
        root: bytes | None = None,
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"the hash block must be at least 1 token, got {block_size}")
        self.block_size = block_size
        self.algorithm = algorithm
        self._digest = _digest_of(algorithm)
        size = len(self._digest(b""))
        if algorithm != "sha256_cbor" and root is None:
            raise ConfigError(
                f"{algorithm} is not collision resistant: hand in a random root, root=os.urandom({size}), "
                "or use sha256_cbor"
            )
        if root is not None and len(root) != size:
            raise ConfigError(f"the root of {algorithm} is {size} bytes long, got {len(root)}")
        self.root = root if root is not None else self._digest(cbor2.dumps(seed or ROOT_SEED, canonical=True))
        self._before_parent = _head(4, 3) + _head(2, size)
        self._before_tokens = _head(4, block_size)

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.integer], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """Hashes of consecutive full blocks behind ``parent`` (None: the root); a shorter tail is left out.

        tokens: int array. extras: extra keys of each block, None when no block has any. O(tokens).
        """
        blocks = len(tokens) // self.block_size
        if blocks == 0:
            return []
        body, ends = _encode_tokens(np.asarray(tokens[: blocks * self.block_size]), self.block_size)
        tails = self._tails(extras, blocks)
        digest, before, middle = self._digest, self._before_parent, self._before_tokens
        key = self.root if parent is None else parent
        out = []
        for start, end, tail in zip(ends, ends[1:], tails, strict=False):
            key = digest(before + key + middle + body[start:end] + tail)
            out.append(key)
        return out

    def hash_rows(
        self,
        parents: Sequence[bytes | None],
        tokens: NDArray[np.integer],
        extras: Sequence[Extra | None] | None = None,
    ) -> list[bytes]:
        """Hashes of unrelated blocks, one a row of ``tokens`` [n, block_size], each behind its own parent."""
        body, ends = _encode_tokens(tokens.reshape(-1), self.block_size)
        digest, before, middle, root = self._digest, self._before_parent, self._before_tokens, self.root
        return [
            digest(before + (parent or root) + middle + body[start:end] + tail)
            for parent, start, end, tail in zip(
                parents, ends, ends[1:], self._tails(extras, len(parents)), strict=False
            )
        ]

    @staticmethod
    def _tails(extras: Sequence[Extra | None] | None, blocks: int) -> list[bytes]:
        """The CBOR of each block's extra keys; null where there are none."""
        if extras is None:
            return [b"\xf6"] * blocks
        return [b"\xf6" if extra is None else cbor2.dumps(extra, canonical=True) for extra in extras]
