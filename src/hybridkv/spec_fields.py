"""Values of the fields of layer specs: rates, roles, alignments, quantization, and features that a part may lack.

A spec of ``hybridkv.specs`` holds these values. They say how a compressed cache differs from plain attention:

    tokens       | 0 1 2 3 | 4 5 6 7 | 8 9            tokens_per_state 4, block_size 8
    states       |    a    |    b    |  (open group)
    block 0      [ a b ]                              block_size / tokens_per_state states
    ring         [ 8 9 - - ]                          raw keys of the open group, one block of each request
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Final, Protocol, Self

from hybridkv.arguments import Positive, check_types, instance, integer
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.units import shown

__all__ = ["Feature", "KernelBlocks", "Quantization", "Rate", "SparseCacheRole", "StrideAlignment", "require_supported"]


class SparseCacheRole(StrEnum):
    """The role of a latent cache in sparse attention.

    Attributes:
        SPARSE: the latents that attention reads. Plain latent attention has this role, too.
        INDEXER: the keys of an indexer, which chooses the tokens that attention reads.
    """

    SPARSE = "sparse"
    INDEXER = "indexer"


_FLOAT32_BYTES: Final = 4


class Quantization(StrEnum):
    """A form of keys, values and latents in pages: codes of few bits, and scales in the same page.

    Every head of every token has scales of its own. The names are those of vLLM's ``--kv-cache-dtype``; the bytes are
    those of ``customize_spec`` of its attention backends (vLLM 0.33).

        int8_per_token_head   [ codes of a key ][ codes of a value ][ float32 scale of each ]   a state of one head
        nvfp4                 [ codes of a key ][ codes of a value ][ an e4m3 scale for every 16 elements ]

    Attributes:
        INT8: integers of 8 bits.
        FP8: floats of 8 bits, e4m3.
        INT4: integers of 4 bits, two in a byte.
        NVFP4: floats of 4 bits, e2m1, two in a byte.
        dtype: canonical name of the dtype in which a page stores codes.
        code_bits: bits of the code of one element.
        scaled: elements that share a scale; 0 for all elements of a key, or of a value.
    """

    dtype: str
    code_bits: int
    scaled: int

    INT8 = "int8_per_token_head", "int8", 8, 0
    FP8 = "fp8_per_token_head", "uint8", 8, 0
    INT4 = "int4_per_token_head", "uint8", 4, 0
    NVFP4 = "nvfp4", "uint8", 4, 16

    def __new__(cls, name: str, dtype: str, code_bits: int, scaled: int) -> Self:
        """Make a member with its facts."""
        made = str.__new__(cls, name)
        made._value_ = name
        made.dtype, made.code_bits, made.scaled = dtype, code_bits, scaled
        return made

    @classmethod
    def named(cls, name: object) -> Self | None:
        """Return the member with this name; ``None`` for any other value."""
        return next((one for one in cls if isinstance(name, str) and one == name), None)

    @property
    def multiple(self) -> int:
        """Elements of a key, and of a value, are a multiple of this number: whole bytes and whole scales."""
        return max(self.scaled, 8 // self.code_bits)

    def state_bytes(self, elements: int) -> int:
        """Return the bytes of one state of one head.

        A state without blocks of elements has two float32 scales. A latent has two as well, as in vLLM.

        Args:
            elements: elements of key and value together, or of the latent.
        """
        scales = elements // self.scaled if self.scaled else 2 * _FLOAT32_BYTES
        return elements * self.code_bits // 8 + scales


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """An alignment of block strides: whole kernel blocks, where a kernel reads a block in parts.

    vLLM writes it ``MultipleOf(tokens)``.

    Attributes:
        tokens: most tokens of a kernel block.
    """

    tokens: Positive

    def __post_init__(self) -> None:
        check_types(self)


def _rate(name: str, value: object) -> int | Fraction:
    """Check a positive integer or Fraction. A Fraction without a denominator becomes an integer."""
    given = integer(name, value, 1) if not isinstance(value, Fraction) else value
    if given <= 0:
        raise ConfigError(f"{name} must be at least 1, or a positive Fraction, got {shown(value)}")
    return given.numerator if given.denominator == 1 else given


def _stride_alignment(name: str, value: object) -> int | KernelBlocks | None:
    """Check ``None``, a positive number of bytes, or KernelBlocks."""
    if value is None or isinstance(value, KernelBlocks):
        return value
    return integer(name, value, 1)


def _quantization(name: str, value: object) -> Quantization | None:
    """Check ``None``, a Quantization or its name."""
    known = Quantization.named(value)
    if known is None and value is not None:
        raise ConfigError(f"unknown {name} {shown(value)}: use one of {', '.join(Quantization)}")
    return known


def _role(name: str, value: object) -> SparseCacheRole:
    """Check a SparseCacheRole or its text."""
    if isinstance(value, str) and value in tuple(SparseCacheRole):
        return SparseCacheRole(value)
    return instance(name, value, SparseCacheRole)


Rate = Annotated[int | Fraction, _rate]
"""Annotation of tokens per state, for ``check_types``."""
StrideAlignment = Annotated[int | KernelBlocks | None, _stride_alignment]
"""Annotation of the alignment of block strides, for ``check_types``."""
QuantizationOrNone = Annotated[Quantization | None, _quantization]
"""Annotation of a quantization, for ``check_types``. Accepts its name."""
Role = Annotated[SparseCacheRole, _role]
"""Annotation of a role, for ``check_types``. Accepts its text."""


class Feature(StrEnum):
    """A feature of specs that the planner supports, and that other parts of the library may lack.

    Attributes:
        RATE: ``tokens_per_state`` other than 1: a block holds fewer or more states than tokens.
        RING: a ring of raw keys, one block of each request (CircularBufferSpec).
        INDEXER: the keys of an indexer (``cache_role``).
        RETAINED: tokens before a window that are kept, too (``extra_retained_tokens``).
        PACKED: bytes of a state that do not follow from heads, head size and dtype (``state_content_bytes``,
            ``num_head_slots``).
        REPLICATED: attention that is whole on each context parallel rank (``dcp_sharded=False``).
        QUANTIZED: codes and scales of each token and head (``quantization``).
        REPLAY: a window that is computed again after a hit (``bounded_replay``).
    """

    RATE = "several tokens in one state (tokens_per_state)"
    RING = "a ring of raw keys (CircularBufferSpec)"
    INDEXER = "keys of an indexer (cache_role)"
    RETAINED = "tokens kept before a window (extra_retained_tokens)"
    PACKED = "packed states (state_content_bytes, num_head_slots)"
    REPLICATED = "attention that is whole on each context parallel rank (dcp_sharded)"
    QUANTIZED = "codes with scales of each token and head (quantization)"
    REPLAY = "a window that is computed again after a hit (bounded_replay)"


class _Featured(Protocol):
    """A spec, as far as this module reads it."""

    @property
    def features(self) -> frozenset[Feature]:
        """The features that the spec needs."""


def require_supported(specs: Iterable[_Featured], where: str, supported: Collection[Feature] = ()) -> None:
    """Check that a part of the library supports every feature of the specs. O(specs).

    Args:
        specs: the specs of layers or groups.
        where: the part of the library, as the error names it.
        supported: the features that the part supports.

    Raises:
        UnsupportedModelError: a spec needs another feature. The error names the spec and the feature.
    """
    for spec in specs:
        for feature in sorted(spec.features.difference(supported)):
            raise UnsupportedModelError(
                f"{type(spec).__name__}: {where} does not support {feature}: only plan this model (hybridkv plan)"
            )
