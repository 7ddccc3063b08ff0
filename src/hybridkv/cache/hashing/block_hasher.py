"""Block hashes as the ecosystem's routers and stores compute them.

    key(i) = H(canonical CBOR of (parent or root, tokens of block i, extra keys or null))

The root is H of the CBOR text string "vllm-none-hash" unless a seed is configured. A non-cryptographic H
is allowed with a random root only, so that nobody can prepare collisions. Canonical CBOR: RFC 8949, 4.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

import cbor2
import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instance, integer, text
from hybridkv.cache.hashing.digests import ArrayDigests, BlockDigests, CompiledDigests, Digest, Tails, compiled_module
from hybridkv.cache.hashing.remembered import LEAST_BLOCKS, RememberedChains
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import Extra
from hybridkv.units import MOST_COUNT, shown

ROOT_SEED: Final = "vllm-none-hash"
ALGORITHMS: Final = ("sha256_cbor", "xxhash_cbor")
REMEMBERED_BYTES: Final = 64 << 20
"""Tokens and hashes of some 7 million tokens."""


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
        digest = _digest_of(algorithm)
        size = len(digest(b"").digest())
        if algorithm != "sha256_cbor" and root is None:
            raise ConfigError(
                f"{algorithm} is not collision resistant: hand in a random root, root=os.urandom({size}), "
                "or use sha256_cbor"
            )
        if root is not None and len(instance("root", root, bytes)) != size:
            raise ConfigError(f"the root of {algorithm} is {size} bytes long, got {len(root)}")
        named = ROOT_SEED if seed is None else text("seed", seed)
        self.root = root if root is not None else digest(cbor2.dumps(named, canonical=True)).digest()
        module = compiled_module() if algorithm == "sha256_cbor" else None
        self._digests: BlockDigests = (
            ArrayDigests(self.block_size, digest, size) if module is None else CompiledDigests(self.block_size, module)
        )
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
        blocks = len(tokens) // self.block_size
        whole = np.asarray(tokens[: blocks * self.block_size])
        return self._digests.chain(self.root if parent is None else parent, whole, _tails(extras, blocks))

    def hash_rows(
        self, parents: Sequence[bytes | None], tokens: NDArray[np.integer], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """Hashes of unrelated blocks, one a row of ``tokens`` [n, block_size], each behind its own parent."""
        root = self.root
        return self._digests.rows(
            [parent or root for parent in parents], tokens.reshape(-1), _tails(extras, len(parents))
        )


def _tails(extras: Sequence[Extra | None] | None, blocks: int) -> Tails | None:
    """Of the first ``blocks`` their extra keys as they are hashed, None where there are none, or of no block."""
    if extras is None:
        return None
    return [None if extra is None else cbor2.dumps(extra, canonical=True) for extra in extras[:blocks]]
