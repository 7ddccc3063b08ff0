"""Bytes that a checkpoint's weights take, by its ``quantization_config``.

    mxfp4, nvfp4          4 bits, and a scale of 8 for every 32 or 16 (OCP Microscaling Formats 1.0; NVIDIA's NVFP4)
    fp8, mxfp8            8 bits, and a scale of 32 for every block of weight_block_size, or of 8 for every 32
    awq, gptq, integers   their bits, and a scale of 16 and a zero point for every group_size

Embeddings and the output head keep the dtype of the config, and so do modules that the config leaves out. A config that
leaves out the attention is read as one that quantizes the routed experts alone; they must be nine tenths of the
matrices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from math import prod
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.models.fields import Fields
from hybridkv.models.layers import Weights

_ALGORITHMS: Final[Mapping[str, Fraction]] = {
    "fp8": Fraction(8),
    "mxfp4": 4 + Fraction(8, 32),
    "mxfp8": 8 + Fraction(8, 32),
    "nvfp4": 4 + Fraction(8, 16),
}
"""Bits of a weight with its share of the scales."""
_MOST_BITS: Final = 16
_LEFT_OUT: Final = ("modules_to_not_convert", "ignore", "exclude_modules")
_SMALL: Final = re.compile(r"head|embed|norm|gate$|router|bias|indexer|vision|visual|projector|mtp")
"""Modules that are small, counted apart, or not counted at all."""
_BESIDE_EXPERTS: Final = re.compile(r"attn|attention|shared_expert|mlp|proj")
_NEARLY_ALL: Final = Fraction(9, 10)


def weight_bytes(weights: Weights, quantization: Fields, element_bytes: int) -> int:
    """Count the bytes of ``weights``; 0 where the scheme, or which modules it holds for, is not known here.

    quantization: the config's, with no fields where nothing is quantized. element_bytes: of a weight that is not.
    """
    if not quantization.values:
        return weights.every * element_bytes
    try:
        bits = _bits(quantization)
        names = [one for key in _LEFT_OUT for one in quantization.names(key) or ()]
    except ConfigError:
        return 0  # a cache can be planned without it
    if bits is None:
        return 0
    others = [one for one in names if not _SMALL.search(one.rstrip("*.$"))]
    narrow = weights.every - weights.embedded
    if quantization.text("quant_method") == "mxfp4" or others:
        if weights.routed < _NEARLY_ALL * narrow or not all(_BESIDE_EXPERTS.search(one) for one in others):
            return 0
        narrow = weights.routed
    return int(narrow * bits / 8) + (weights.every - narrow) * element_bytes


def _bits(quantization: Fields) -> Fraction | None:
    """Bits of a weight, its share of the scales included; None for a scheme that is not known here."""
    method = (quantization.text("quant_method") or "").lower()
    algorithm = (quantization.text("quant_algo") or method).lower()
    blocks = quantization.integers("weight_block_size")
    if algorithm == "fp8" and blocks:
        return 8 + Fraction(32, prod(blocks)) if all(blocks) else None
    if algorithm in _ALGORITHMS:
        return _ALGORITHMS[algorithm]
    if method in {"awq", "gptq"}:
        zeros = quantization.flag("zero_point", default=not quantization.flag("sym"))
        return _grouped(
            quantization.integer("bits", most=_MOST_BITS), quantization.optional("group_size", minimum=-1), zeros=zeros
        )
    groups = list(quantization.mapping("config_groups").values())
    if method != "compressed-tensors" or len(groups) != 1 or not isinstance(groups[0], dict):
        return None
    scheme = Fields(Fields(groups[0], quantization.name).mapping("weights"), quantization.name)
    packed = (quantization.text("format") or "").partition("-")[0]
    if packed in _ALGORITHMS:
        return _ALGORITHMS[packed]
    zeros = not scheme.flag("symmetric", default=True)
    return _grouped(scheme.integer("num_bits", most=_MOST_BITS), scheme.optional("group_size"), zeros=zeros)


def _grouped(bits: int, group: int | None, *, zeros: bool) -> Fraction:
    """group: weights that share a scale, and a zero point if there are zeros; None or -1 for a whole row."""
    return bits + Fraction(16 + bits * zeros, group) if group and group > 0 else Fraction(bits)
