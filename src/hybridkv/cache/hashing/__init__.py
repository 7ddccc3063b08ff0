"""Keys of blocks: hashed, or known from a prompt that came before."""

from hybridkv.cache.hashing.block_hasher import BlockHasher
from hybridkv.cache.hashing.engine_hashes import EngineHashes

__all__ = ["BlockHasher", "EngineHashes"]
