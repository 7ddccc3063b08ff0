"""What a quantized checkpoint says of its KV cache: the dtype of keys and values, or that it cannot be planned.

    compressed-tensors   quantization_config.kv_cache_scheme: {num_bits: 8, type: float, ...}
    modelopt             the same, or kv_cache_quant_algo: FP8; older ones in hf_quant_config.json beside the config

Most quantized checkpoints quantize weights alone and say nothing of it. As in vLLM, 8-bit floats with fixed scales are
read: the scales are weights, so the cache holds one byte an element and nothing besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from hybridkv.errors import UnsupportedModelError
from hybridkv.models.fields import Fields
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
"""Of each field of a scheme, what costs no more than a byte an element."""
_ANYTHING: Final = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""How fixed scales were found, and what they are held in."""


class KVDtype(NamedTuple):
    """name: of the dtype. said_by: where in the checkpoint."""

    name: str
    said_by: str


def kv_dtype(config: Mapping[str, object], name: str, sidecar: Mapping[str, object] | None = None) -> KVDtype | None:
    """What the config of ``name`` says of keys and values; None where it says nothing. sidecar: of SIDECAR.

    Raises UnsupportedModelError for a scheme that is not read, and ConfigError for what is no object.
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
    """What one quantization config says, and the objects in it that have more of it."""
    parts = {where: fields, **{f"{where}{key}.": Fields(fields.mapping(key), fields.name) for key in _INNER}}
    for place, part in parts.items():
        for key, value in part.values.items():
            if "kv_cache" not in str(key) or key == _POST_ROPE or value is None or (value == [] and key != _SCHEME):
                continue
            _require_read(key, value, fields.name, place)
            yield KVDtype(FP8, place + key)


def _require_read(key: str, value: object, name: str, where: str) -> None:
    """UnsupportedModelError unless ``value`` means 8-bit floats with fixed scales."""
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
