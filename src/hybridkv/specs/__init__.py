"""What one layer keeps in the cache: frozen specs, sized from explicit limits.

A spec answers: how many bytes is a page (one block in this layer), how many blocks may one request need,
and which layers may share a block table (``merge``, ``UniformTypeKVCacheSpecs``).

    KVCacheSpec
    ├── AttentionSpec               a row for every token
    │   ├── FullAttentionSpec           every token
    │   │   ├── MLAAttentionSpec            one latent vector a token
    │   │   └── SinkFullAttentionSpec       behind learned sink tokens
    │   ├── SlidingWindowSpec           the last tokens
    │   │   └── SlidingWindowMLASpec        one latent vector a token
    │   ├── ChunkedLocalAttentionSpec   the tokens of the present chunk
    │   ├── CrossAttentionSpec          the encoder's tokens
    │   └── EncoderOnlyAttentionSpec    nothing
    ├── MambaSpec                   one state
    └── UniformTypeKVCacheSpecs     layers of one kind whose pages differ
"""

from hybridkv.specs.attention import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from hybridkv.specs.base import BATCHED_TOKENS, Keeps, KVCacheSpec, RequestLimits
from hybridkv.specs.state import CACHE_MODES, MAMBA_TYPES, MambaSpec
from hybridkv.specs.uniform import UniformTypeKVCacheSpecs

__all__ = [
    "BATCHED_TOKENS",
    "CACHE_MODES",
    "MAMBA_TYPES",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "KVCacheSpec",
    "Keeps",
    "MLAAttentionSpec",
    "MambaSpec",
    "RequestLimits",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
]
