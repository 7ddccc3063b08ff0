"""Where the layers of a FakeWorker lie in its storage, and which tokens they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig, KVCacheTensor
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from hybridkv.testing.model import DIGEST_BYTES, DigestModel


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that holds a digest a token, at offset + block * stride + byte_of(token % block_size).

    A recurrent one holds a single digest at the start of its block. window, chunk: 0 where all tokens are read.
    parts: kernel blocks that a block is made of, each with that part of every layer of the group.
    """

    name: str
    group: int
    block_size: int
    offset: int
    stride: int
    token_bytes: int
    recurrent: bool = False
    window: int = 0
    chunk: int = 0
    parts: int = 1

    def byte_of(self, within: int) -> int:
        """Where a token of a block lies, from the layer's first byte in the block."""
        part, rest = divmod(within, self.block_size // self.parts)
        return part * (self.stride // self.parts) + rest * self.token_bytes

    def first_read(self, position: int) -> int:
        """The first token that the one at ``position`` reads."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position - self.window + 1) if self.window else 0


def layers_of(config: KVCacheConfig) -> tuple[Layer, ...]:
    """The layers that keep something of their own tokens. ConfigError for a page that holds no digest."""
    return _layers(config, lambda spec: not isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec))


def cross_layers_of(config: KVCacheConfig) -> tuple[Layer, ...]:
    """The layers that keep the encoder's output, a digest for each of its tokens. ConfigError as ``layers_of``."""
    return _layers(config, lambda spec: isinstance(spec, CrossAttentionSpec))


def _layers(config: KVCacheConfig, wanted: Callable[[KVCacheSpec], bool]) -> tuple[Layer, ...]:
    tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
    return tuple(
        _layer(name, number, group.spec, tensors[name], config.kernel_blocks_of(number))
        for number, group in enumerate(config.groups)
        for name in group.layer_names
        if wanted(group.spec)
    )


def digest_model(config: KVCacheConfig, vocabulary: int = 4) -> DigestModel:
    """A model of the layers of ``config``."""
    layers = layers_of(config)
    return DigestModel(
        [layer.name for layer in layers], vocabulary, [layer.name for layer in layers if layer.recurrent]
    )


def _layer(name: str, group: int, spec: KVCacheSpec, tensor: KVCacheTensor, parts: int) -> Layer:
    recurrent = isinstance(spec, MambaSpec)
    token_bytes = spec.content_bytes if recurrent else spec.content_bytes // spec.block_size
    if token_bytes < DIGEST_BYTES:
        raise ConfigError(f"{token_bytes} bytes a token hold no digest: use pages of {DIGEST_BYTES} or more")
    return Layer(
        name,
        group,
        spec.block_size,
        tensor.offset_bytes,
        tensor.block_stride_bytes,
        token_bytes,
        recurrent=recurrent,
        window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
        chunk=spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0,
        parts=parts,
    )
