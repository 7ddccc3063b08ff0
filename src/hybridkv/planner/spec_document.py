"""Specs in a plan document: an object with ``kind``, the class's name, and the class's fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Final

from hybridkv.errors import SchemaError
from hybridkv.planner.node import Node
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from hybridkv.units import shown

SPEC_KINDS: Final[Mapping[str, type[KVCacheSpec]]] = {
    kind.__name__: kind
    for kind in (
        FullAttentionSpec,
        MLAAttentionSpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
        SlidingWindowMLASpec,
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        MambaSpec,
        UniformTypeKVCacheSpecs,
    )
}


def spec_to_json(spec: KVCacheSpec) -> dict[str, object]:
    """The object of a spec."""
    values = {one.name: getattr(spec, one.name) for one in fields(spec)}
    if isinstance(spec, UniformTypeKVCacheSpecs):
        values["layers"] = [{"name": name, "spec": spec_to_json(one)} for name, one in spec.layers]
    return {"kind": type(spec).__name__, **values}


def spec_from_json(node: Node) -> KVCacheSpec:
    """The spec of an object. Raises SchemaError for an unknown kind or field, ConfigError for sizes that cannot be."""
    kind = node.text("kind")
    if kind not in SPEC_KINDS:
        raise SchemaError(f"{node.where}.kind {shown(kind)} is not known here: known are {', '.join(SPEC_KINDS)}")
    values: dict[str, object] = {}
    for one in fields(SPEC_KINDS[kind]):
        if one.name == "page_size_padded" and not node.has(one.name):
            # documents written before pages could be padded do not have it
            continue
        if one.name in _READERS:
            values[one.name] = _READERS[one.name](node, one.name)
        elif one.default is None:
            values[one.name] = node.optional(one.name)
        else:
            values[one.name] = node.integer(one.name)
    return SPEC_KINDS[kind](**values)  # type: ignore[arg-type]  # fields of a class chosen at run time


def _layers(node: Node, key: str) -> tuple[tuple[str, KVCacheSpec], ...]:
    found = [(one.text("name"), one.child("spec")) for one in node.children(key)]
    for _, spec in found:
        if spec.text("kind") == node.text("kind"):
            raise SchemaError(f"{spec.where}.kind {node.text('kind')!r} holds layers of its own: give the layer's spec")
    return tuple((name, spec_from_json(spec)) for name, spec in found)


_READERS: Final[Mapping[str, Callable[[Node, str], object]]] = {
    "dtype": Node.text,
    "mamba_type": Node.text,
    "cache_mode": Node.text,
    "dtypes": Node.texts,
    "shapes": Node.shapes,
    "layers": _layers,
}
"""How fields that are no integers are read, by name."""
