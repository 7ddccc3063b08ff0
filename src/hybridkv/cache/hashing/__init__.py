"""Keys of blocks: hashed, or known from a prompt that came before."""

from hybridkv.cache.hashing.block_hasher import BlockHasher

__all__ = ["BlockHasher"]
