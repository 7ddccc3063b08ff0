"""Read the quantization of a checkpoint, and give layers the quantization that a caller asks for.

The dtype of keys and values comes from one of these fields:

    compressed-tensors   quantization_config.kv_cache_scheme: {num_bits: 8, type: float, ...}
    modelopt             the same, or kv_cache_quant_algo: FP8; older ones in hf_quant_config.json next to the config

Most quantized checkpoints quantize weights alone and have no such field. As in vLLM, only 8-bit floats with fixed
scales are read. The scales are weights, so the cache holds one byte per element.

The bytes of the weights come from ``quantization_config``:

    mxfp4, nvfp4          4 bits, and a scale of 8 for every 32 or 16 (OCP Microscaling Formats 1.0; NVIDIA's NVFP4)
    fp8, mxfp8            8 bits, and a scale of 32 for every block of weight_block_size, or of 8 for every 32
    awq, gptq, integers   their bits, and a scale of 16 and a zero point for every group_size

Embeddings, the output head and modules that the config excludes keep the dtype of the config. A config that excludes
the attention is read as one that quantizes the routed experts alone. They must be nine tenths of the matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Final, NamedTuple

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models.fields import Fields
from hybridkv.models.layers import Weights
from hybridkv.models.model import Layer
from hybridkv.spec_fields import Feature, Quantization
from hybridkv.specs import AttentionSpec
from hybridkv.units import shown

FP8: Final = "fp8"
SIDECAR: Final = "hf_quant_config.json"

QUANTIZED: Final = ("quantization_config", "compression_config")
_INNER: Final = ("quantization", "export")
_SCHEME: Final = "kv_cache_scheme"
_ALGORITHM: Final = "kv_cache_quant_algo"
_POST_ROPE: Final = "kv_cache_post_rope"  # of quark: which keys, not how many bits

_READ: Final[Mapping[str, tuple[object, ...]]] = {
    "num_bits": (8,),
    "type": ("float",),
    "dynamic": (None, False),
    "symmetric": (None, True),
    "strategy": (None, "tensor", "channel", "attn_head"),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None,),
}
"""The values of each field of a scheme that cost no more than a byte per element."""
_ANYTHING: Final = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Fields that describe how fixed scales were found, and their dtype."""


class KVDtype(NamedTuple):
    """The dtype of a KV cache.

    Attributes:
        name: name of the dtype.
        said_by: field of the checkpoint that gives it.
    """

    name: str
    said_by: str


def kv_dtype(config: Mapping[str, object], name: str, sidecar: Mapping[str, object] | None = None) -> KVDtype | None:
    """Return the dtype of keys and values that the config of ``name`` gives; ``None`` without one.

    ``sidecar`` is the content of SIDECAR. Raises UnsupportedModelError for a scheme that is not read, and ConfigError
    for a field that is not an object.
    """
    fields = Fields(config, name)
    found = list(_said(fields, ""))
    if text := fields.mapping("text_config"):
        found += _said(Fields(text, name), "text_config.")
    if sidecar is not None:
        found += _said_in(Fields(sidecar, name), f"{SIDECAR}: ")
    return found[0] if found else None


def _said(fields: Fields, where: str) -> Iterator[KVDtype]:
    for key in QUANTIZED:
        yield from _said_in(Fields(fields.mapping(key), fields.name), f"{where}{key}.")


def _said_in(fields: Fields, where: str) -> Iterator[KVDtype]:
    """Yield the dtypes in one quantization config and in its nested objects."""
    parts = {where: fields, **{f"{where}{key}.": Fields(fields.mapping(key), fields.name) for key in _INNER}}
    for place, part in parts.items():
        for key, value in part.values.items():
            if "kv_cache" not in str(key) or key == _POST_ROPE or value is None or (value == [] and key != _SCHEME):
                continue
            _require_read(key, value, fields.name, place)
            yield KVDtype(FP8, place + key)


def _require_read(key: str, value: object, name: str, where: str) -> None:
    """Raise UnsupportedModelError unless ``value`` means 8-bit floats with fixed scales."""
    if key == _ALGORITHM and isinstance(value, str) and value.upper() == FP8.upper():
        return
    wrong = f"{key} {shown(value)}"
    if key == _SCHEME and isinstance(value, Mapping):
        odd = [one for one in (*_READ, *value) if not _is_read(one, value.get(one))]
        if not odd:
            return
        wrong = f"{key} with {odd[0]} {shown(value.get(odd[0]))}"
    raise UnsupportedModelError(
        f"the checkpoint of {name} has a quantized KV cache, {where}{wrong}: planned are 8-bit floats with fixed "
        "scales; say what the cache holds: --kv-dtype (dtype=)"
    )


def _is_read(key: str, value: object) -> bool:
    if key in _ANYTHING:
        return True
    return any(value is one or (type(value) is type(one) and value == one) for one in _READ.get(key, ()))


# -- the dtype that a caller asks for

SLIDING_WINDOW: Final = "sliding_window"
"""Name of all layers with a window, among layers that are left out."""
SKIPPED: Final = "dtype_skip_layers"
"""The option that leaves layers out, for notes."""
_OWN_FORM: Final = frozenset({Feature.RING, Feature.INDEXER, Feature.PACKED})
"""Features of caches with a form of their own, which the dtype of keys and values does not set."""


def quantized(
    layers: Sequence[Layer], quantization: Quantization | None, skipped: Sequence[str], plain: str, name: str
) -> tuple[Layer, ...]:
    """Return the layers with ``quantization``, as vLLM's ``kv_cache_dtype`` and ``kv_cache_dtype_skip_layers`` do.

    States, rings, rows of compressors, keys of indexers and packed latents stay as they are. O(layers).

    Args:
        layers: the layers of a model, without quantization.
        quantization: the form of keys, values and latents; ``None`` for the dtype that the layers have.
        skipped: layers that hold ``plain`` instead: indices of decoder layers, or ``sliding_window`` for all layers
            with a window.
        plain: canonical name of the dtype of the skipped layers.
        name: name of the model, for messages.

    Raises:
        ConfigError: nothing is quantized, a layer cannot be, or an entry of ``skipped`` names no layer or changes none.
    """
    if quantization is None and not skipped:
        return tuple(layers)
    left = set(skipped)
    made, changed = [], 0
    for layer in layers:
        spec = layer.spec
        of_kernel = layer.index_heads or layer.pools  # keys of an indexer, rows of a compressor
        if not isinstance(spec, AttentionSpec) or spec.features & _OWN_FORM or of_kernel:
            made.append(layer)
            continue
        names = {str(layer.index), *([SLIDING_WINDOW] if spec.mask[0] is not None else [])}
        left -= names
        form, dtype = (None, plain) if names & set(skipped) else (quantization, spec.dtype)
        changed += form is not None
        try:
            own = replace(spec, quantization=form, dtype=dtype if form is None else form.dtype)
        except ConfigError as error:
            raise ConfigError(f"layer {layer.name} of {name}: {error}") from error
        made.append(replace(layer, spec=own))
    if left:
        raise ConfigError(
            f"{name} has no layer {shown(min(left))} with keys and values that could be left out: give the index "
            f"of a decoder layer, or {SLIDING_WINDOW} for all layers with a window"
        )
    if quantization is not None and not changed:
        raise ConfigError(f"no layer of {name} keeps keys and values that {quantization} could hold: leave it out")
    if quantization is None and made == list(layers):
        raise ConfigError(
            "layers that skip quantization have no effect without a quantization: give dtype (--kv-dtype), too"
        )
    return tuple(made)


# -- bytes of weights

_ALGORITHMS: Final[Mapping[str, Fraction]] = {
    "fp8": Fraction(8),
    "mxfp4": 4 + Fraction(8, 32),
    "mxfp8": 8 + Fraction(8, 32),
    "nvfp4": 4 + Fraction(8, 16),
}
"""Bits of a weight with its share of the scales."""
_EXPERTS: Final = {"fp4": _ALGORITHMS["mxfp4"]}
"""Bits of a routed expert's weight where ``expert_dtype`` differs (vLLM's DeepseekV4FP8Config)."""
_MOST_BITS: Final = 16
_LEFT_OUT: Final = ("modules_to_not_convert", "ignore", "exclude_modules")
_SMALL: Final = re.compile(r"head|embed|norm|gate$|router|bias|indexer|vision|visual|projector|mtp")
"""Modules that are small, counted separately, or not counted at all."""
_BESIDE_EXPERTS: Final = re.compile(r"attn|attention|shared_expert|mlp|proj")
_NEARLY_ALL: Final = Fraction(9, 10)


def weight_bytes(weights: Weights, quantization: Fields, element_bytes: int) -> int:
    """Return the bytes of ``weights``; 0 if the scheme or the modules that it applies to are not known here.

    ``quantization`` is the config's object with its ``expert_dtype``, without fields if nothing is quantized.
    ``element_bytes`` is the size of a weight that is not quantized.
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
    experts = _EXPERTS.get(quantization.text("expert_dtype") or FP8, bits)
    quantized = (narrow - weights.routed) * bits + weights.routed * experts
    return int(quantized / 8) + (weights.every - narrow) * element_bytes


def _bits(quantization: Fields) -> Fraction | None:
    """Return the bits of a weight with its share of the scales; ``None`` for a scheme that is not known here."""
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
    """Return the bits of a weight. ``group`` weights share a scale, and a zero point if ``zeros``; -1: a whole row."""
    return bits + Fraction(16 + bits * zeros, group) if group and group > 0 else Fraction(bits)
