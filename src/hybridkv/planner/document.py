"""A plan as a JSON document, which `hybridkv plan --json` writes and every command reads.

Schema ``hybridkv.plan``, version 1. Fields that were added later have defaults, so older documents can be read.
Only documents of the natural layout have ``config.slabs`` and ``placement`` (where recurrent states are saved). In the
reference layout the specs hold the placement.
``capacity`` is derived, for other programs to read. When a document is read, its layers, groups, tensors and capacity
must agree.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from fractions import Fraction
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from hybridkv.arguments import instance
from hybridkv.errors import ConfigError, SchemaError
from hybridkv.models import Layer, Model
from hybridkv.models.json_text import DocumentError, parse_json, read_json
from hybridkv.planner.config import KVCacheConfig
from hybridkv.planner.natural import natural_config
from hybridkv.planner.packed import packed_config
from hybridkv.planner.plan import LAYOUTS, NATURAL, NO_STATES, Plan
from hybridkv.regular_files import open_regular
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RequestLimits,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from hybridkv.units import MOST_BYTES, shown

SCHEMA: Final = "hybridkv.plan"
VERSION: Final = 1


def plan_to_json(plan: Plan) -> str:
    """Return the document of a plan. Equal plans give equal text.

    Args:
        plan: the plan.
    """
    instance("plan", plan, Plan)
    specs = list(dict.fromkeys(layer.spec for layer in plan.model.layers))
    layers = [_without(one, "spec") | {"spec": specs.index(one.spec)} for one in plan.model.layers]
    facts = _without(plan.model, "layers")
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "layout": plan.layout,
        **({} if plan.states_kept is None else {"placement": plan.states_kept}),
        "memory_bytes": plan.memory_bytes,
        "limits": _to_json(plan.limits),
        "model": {**facts, "specs": _to_json(tuple(specs)), "layers": layers},
        "config": _to_json(plan.config),
        "capacity": asdict(plan.capacity),
    }
    return json.dumps(document, indent=2) + "\n"


def _to_json(value: Any) -> Any:  # noqa: ANN401  # a value of a plan, and what JSON has for it
    """Return the fields of a dataclass, without defaults of _OMITTED. A spec also has its class name as ``kind``."""
    if isinstance(value, tuple):
        return [_to_json(one) for one in value]
    if isinstance(value, Fraction):
        return {"numerator": value.numerator, "denominator": value.denominator}
    if not is_dataclass(value):
        return value
    shown = [one for one in fields(value) if one.name not in _OMITTED or getattr(value, one.name) != one.default]
    found = {one.name: _to_json(getattr(value, one.name)) for one in shown}
    if isinstance(value, UniformTypeKVCacheSpecs):
        found["layers"] = [{"name": name, "spec": spec} for name, spec in found["layers"]]
    kind = {"kind": type(value).__name__} if isinstance(value, KVCacheSpec) else {}
    return kind | found


def _without(value: Layer | Model, left_out: str) -> dict[str, Any]:
    """Return the fields of ``value`` without one of them."""
    return {name: one for name, one in _to_json(value).items() if name != left_out}


def read_plan(path: str | Path) -> Plan:
    """Read the plan in a regular file.

    Args:
        path: path of the file.

    Raises:
        ConfigError: the file cannot be read.
        SchemaError: as ``plan_from_json``.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"a plan is read from the path of a file, got {shown(path)}")
    try:
        with open_regular(path) as file:
            return read_plan_from(file)
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the plan {path}: {error}") from error


def read_plan_from(file: BinaryIO) -> Plan:
    """Read the plan in an open file or a pipe.

    Args:
        file: the binary file.

    Raises:
        OSError: the file cannot be read.
        SchemaError: as ``plan_from_json``.
    """
    if not callable(getattr(file, "read", None)):
        raise ConfigError(f"a plan is read from an open file, got {shown(file)}")
    try:
        value = read_json(file)
    except DocumentError as error:
        raise SchemaError(str(error)) from error
    return _plan_of(value)


def plan_from_json(text: str | bytes) -> Plan:
    """Return the plan of a document.

    Args:
        text: the document.

    Raises:
        SchemaError: the document has another schema or a newer version, lacks a field, has a field of the wrong type,
            or contradicts itself.
    """
    if not isinstance(text, str | bytes | bytearray):
        raise SchemaError(f"a plan is a document of text, got {shown(text)}")
    try:
        value = parse_json(text)
    except DocumentError as error:
        raise SchemaError(str(error)) from error
    return _plan_of(value)


def _plan_of(value: object) -> Plan:
    """Return the plan of a document. Raises SchemaError as ``plan_from_json``."""
    _check_schema(_read(value, _Head))
    found = _read(value, _Document)
    try:
        model = _values(found.model)
        specs = model.pop("specs")
        for one in found.model.layers:
            if one.spec >= len(specs):
                raise SchemaError(f"spec of layer {shown(one.name)} is {one.spec}, but there are {len(specs)} specs")
        layers = tuple(Layer(**_values(one) | {"spec": specs[one.spec]}) for one in found.model.layers)
        plan = Plan(
            model=Model(**model | {"layers": layers}),
            config=_value(found.config),
            memory_bytes=found.memory_bytes,
            limits=_value(found.limits),
            layout=found.layout,
            states_kept=found.placement,
        )
        _check_consistent(plan, found.capacity)
    except ConfigError as error:
        raise SchemaError(f"the plan holds impossible values: {error}") from error
    return plan


def _read(value: object, wanted: Any) -> Any:  # noqa: ANN401  # a Struct that is made when this module runs
    """Convert ``value`` to the type ``wanted``. The errors of msgspec end with the path to the wrong field."""
    try:
        return msgspec.convert(value, wanted)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        reason, _, place = str(error).partition(" - at `$")
        raise SchemaError(f"plan{place[:-1]}: {reason[:_MOST_REASON]}") from None


class _Head(Struct):
    """The fields of a plan document of any version."""

    schema: str
    version: _Positive
    layout: str = NATURAL


def _check_schema(head: _Head) -> None:
    if head.schema != SCHEMA:
        raise SchemaError(
            f"schema {shown(head.schema)} is not {SCHEMA!r}: give a document written by `hybridkv plan --json`"
        )
    if head.version != VERSION:
        raise SchemaError(
            f"{SCHEMA} version {head.version} is newer than version {VERSION}, which this hybridkv reads: "
            "update hybridkv, or write the plan again with this one"
        )
    if head.layout not in LAYOUTS:
        known = " and ".join(map(repr, LAYOUTS))
        raise SchemaError(f"unknown layout {shown(head.layout)}: this hybridkv reads {known}; update hybridkv")


# -- what a document has: Structs, made of the fields of the values that it describes

_MOST_REASON: Final = 400
"""Characters of an error of msgspec that are shown: it may quote a value of the document. Chosen by hand."""
_OMITTED: Final = {
    *("prefill_checkpoints", "num_layers", "weight_bytes", "dtype_from", "read_from", "is_eagle_group", "slabs"),
    *("tokens_per_state", "alignment", "num_head_slots", "state_content_bytes", "dcp_sharded", "max_tp_shards"),
    *(
        "packed_block_bytes",
        "block_stride_alignment",
        "quantization",
        "cache_role",
        "is_index_group_leader",
        "extra_retained_tokens",
        "bounded_replay",
        "is_draft",
        "read_by",
        "top_states",
        "index_heads",
        "pools",
    ),
}
"""Fields that a document omits where they have their default."""
_LATER: Final = _OMITTED | {
    *("page_size_padded", "max_encoder_tokens", "num_speculative_tokens", "hidden_size", "query_heads")
}
"""Fields that older documents do not have: they get the default of the class."""
_Size = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
_Positive = Annotated[int, Meta(ge=1, le=MOST_BYTES)]
_CLASSES: Final[dict[type, type]] = {}
"""The class that each Struct describes."""


def _described(made: type, **others: Any) -> Any:  # noqa: ANN401  # a Struct and the types of its fields
    """Return a Struct with the fields of the dataclass ``made``; ``others`` are fields to add or retype."""
    types = get_type_hints(made)
    known = {one.name: _bounded(types[one.name]) for one in fields(made) if one.name not in others}
    defaults = {one.name: one.default for one in fields(made) if one.name in _LATER}
    struct = msgspec.defstruct(
        made.__name__,
        [(name, kind, defaults[name]) if name in defaults else (name, kind) for name, kind in (known | others).items()],
        kw_only=True,
        tag_field="kind" if issubclass(made, KVCacheSpec) else None,
    )
    _CLASSES[struct] = made
    return struct


def _bounded(kind: Any) -> Any:  # noqa: ANN401  # a type
    """Return ``kind`` with bounds for integers, and with Structs in place of dataclasses and Fractions."""
    if kind is int:
        return _Size
    if kind is Fraction:
        return _Ratio
    if kind is KVCacheSpec:
        return _Spec
    if is_dataclass(kind):
        return _described(cast("type", kind))
    parts = tuple(map(_bounded, get_args(kind)))
    if not parts:
        return kind
    return tuple.__class_getitem__(parts) if get_origin(kind) is tuple else reduce(or_, parts)


def _value(item: Any) -> Any:  # noqa: ANN401  # of any type that a document has
    """Return the value that ``item`` describes. Raises ConfigError for impossible values."""
    if isinstance(item, tuple):
        return tuple(map(_value, item))
    if isinstance(item, _NamedSpec):
        return item.name, _value(item.spec)
    made = _CLASSES.get(type(item))
    return item if made is None else made(**_values(item))


def _values(item: Struct) -> dict[str, Any]:
    return {name: _value(getattr(item, name)) for name in item.__struct_fields__}


class _Ratio(Struct):
    """A Fraction: tokens per state, where a token has several."""

    numerator: _Positive
    denominator: _Positive


_CLASSES[_Ratio] = Fraction
_LAYER_KINDS: Final = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    MambaSpec,
)
_LayerSpec: Any = reduce(or_, map(_described, _LAYER_KINDS))


class _NamedSpec(Struct):
    """A layer of a UniformTypeKVCacheSpecs and its spec, which holds no layers of its own."""

    name: str
    spec: _LayerSpec


_Spec: Any = _LayerSpec | _described(UniformTypeKVCacheSpecs, layers=tuple[_NamedSpec, ...])


class _IndexedLayer(Struct):
    """A layer of the model. ``spec`` is an index in the model's specs."""

    name: str
    index: _Size
    spec: _Size
    is_draft: bool = False
    read_by: tuple[str, ...] = ()
    top_states: _Size = 0
    index_heads: _Size = 0


_Limits: Any = _described(RequestLimits)
_Model: Any = _described(Model, tp=_Positive, layers=tuple[_IndexedLayer, ...], specs=tuple[_Spec, ...])
_Config: Any = _described(KVCacheConfig)


class _Document(Struct):
    """A plan document of this version."""

    memory_bytes: _Positive
    layout: str
    limits: _Limits
    model: _Model
    config: _Config
    capacity: dict[str, Any]
    placement: str | None = None


def _check_consistent(plan: Plan, capacity: dict[str, Any]) -> None:
    """Raise SchemaError unless layers, groups, tensors and numbers agree. O(layers)."""
    layers = sorted(layer.name for layer in plan.model.layers)
    grouped = sorted(name for group in plan.config.groups for name in group.layer_names)
    placed = sorted(name for tensor in plan.config.tensors for name in tensor.shared_by)
    if not layers == grouped == placed:
        raise SchemaError("the plan contradicts itself: its model, groups and tensors do not have the same layers")
    if (plan.layout == NATURAL) != (plan.config.slabs is not None):
        raise SchemaError(f"the plan contradicts itself: only the layout {NATURAL!r} has slabs, and it must have them")
    if plan.states_kept is not None and (plan.layout != NATURAL or plan.placement in (None, NO_STATES)):
        raise SchemaError(
            f"the plan contradicts itself: placement {plan.states_kept!r} needs the layout {NATURAL!r} and recurrent "
            "layers that save states"
        )
    derived = _are_natural(plan.config) or _are_packed(plan.config)
    end = plan.config.arena_bytes if derived else _end_of_tensors(plan.config)
    if end > plan.memory_bytes:
        raise SchemaError(f"the plan contradicts itself: its tensors need {end} bytes, memory is {plan.memory_bytes}")
    if capacity != json.loads(json.dumps(asdict(plan.capacity))):
        raise SchemaError("the plan contradicts itself: capacity does not follow from config; write the plan again")


def _are_natural(config: KVCacheConfig) -> bool:
    """Return whether there are slabs. Raises SchemaError where the tensors do not follow from the slabs."""
    if config.slabs is None:
        return False
    if natural_config(config.groups, config.slabs) != config:
        raise SchemaError("the plan contradicts itself: tensors do not follow from slabs and groups; write it again")
    return True


def _are_packed(config: KVCacheConfig) -> bool:
    """Return whether blocks are packed. Raises SchemaError where the tensors do not follow from the groups."""
    if config.packed_block_bytes is None:
        return False
    if packed_config(config.groups, config.packed_block_bytes, config.num_blocks) != config:
        raise SchemaError("the plan contradicts itself: tensors do not follow from packed blocks; write it again")
    return True


def _end_of_tensors(config: KVCacheConfig) -> int:
    """Return the end of the last tensor in bytes. Raises SchemaError if tensors overlap or do not hold their pages."""
    pages = {
        name: spec.page_size_bytes
        for group in config.groups
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True)
    }
    end = 0
    for at, tensor in enumerate(config.tensors):
        page = max((pages[name] for name in tensor.shared_by), default=0)
        if tensor.size != tensor.block_stride_bytes * config.num_blocks or tensor.block_stride_bytes < page:
            raise SchemaError(f"the plan contradicts itself: tensor {at} does not hold the pages of its layers")
        if tensor.offset_bytes < end:
            raise SchemaError(f"the plan contradicts itself: tensor {at} overlaps the one before")
        end = tensor.offset_bytes + tensor.size
    return end
