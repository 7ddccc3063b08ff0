"""A plan as a JSON document: what `hybridkv plan --json` writes and every command reads back.

Schema ``hybridkv.plan``, version 1; fields that came later have defaults, so older documents are read.
``config.slabs`` is there in the natural layout only: a hybridkv that does not know it refuses the layout by name.
So is ``placement``, where recurrent states are kept; in the reference layout the specs say it.
``capacity`` is derived, for other programs to read; when a document is read, layers, groups, tensors and these
numbers must agree.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import BinaryIO, Final

from hybridkv.arguments import instance
from hybridkv.errors import ConfigError, SchemaError
from hybridkv.models import Layer, Model, ReadFact
from hybridkv.models.json_text import DocumentError, parse_json, read_json
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from hybridkv.planner.natural import natural_config
from hybridkv.planner.node import Node
from hybridkv.planner.plan import LAYOUTS, NATURAL, NO_STATES, Plan
from hybridkv.planner.slabs import SlabClass, SlabLayout
from hybridkv.planner.spec_document import spec_from_json, spec_to_json
from hybridkv.regular_files import open_regular
from hybridkv.specs import RequestLimits
from hybridkv.units import shown

SCHEMA: Final = "hybridkv.plan"
VERSION: Final = 1


def plan_to_json(plan: Plan) -> str:
    """The document of a plan; equal plans give equal text."""
    instance("plan", plan, Plan)
    specs = list(dict.fromkeys(layer.spec for layer in plan.model.layers))
    facts = {one.name: getattr(plan.model, one.name) for one in fields(Model) if one.name != "layers"}
    if plan.model.dtype_from is None:
        del facts["dtype_from"]
    if plan.model.read_from:
        facts["read_from"] = [asdict(fact) for fact in plan.model.read_from]
    else:
        del facts["read_from"]
    for later in ("num_layers", "weight_bytes"):
        if not facts[later]:
            del facts[later]
    layers = [{"name": one.name, "index": one.index, "spec": specs.index(one.spec)} for one in plan.model.layers]
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "layout": plan.layout,
        **({} if plan.states_kept is None else {"placement": plan.states_kept}),
        "memory_bytes": plan.memory_bytes,
        "limits": {key: value for key, value in asdict(plan.limits).items() if value or key != "prefill_checkpoints"},
        "model": {**facts, "specs": [spec_to_json(spec) for spec in specs], "layers": layers},
        "config": {
            "num_blocks": plan.config.num_blocks,
            "tensors": [asdict(tensor) for tensor in plan.config.tensors],
            "groups": [_group_to_json(group) for group in plan.config.groups],
            **({} if plan.config.slabs is None else {"slabs": asdict(plan.config.slabs)}),
        },
        "capacity": asdict(plan.capacity),
    }
    return json.dumps(document, indent=2) + "\n"


def _group_to_json(group: KVCacheGroupSpec) -> dict[str, object]:
    eagle = {"is_eagle_group": True} if group.is_eagle_group else {}
    return {"layer_names": group.layer_names, "spec": spec_to_json(group.spec), **eagle}


def read_plan(path: str | Path) -> Plan:
    """Read the plan in a regular file. Raises ConfigError if it cannot be read, and SchemaError as plan_from_json."""
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
    """The plan in an open file, or a pipe. Raises OSError, and SchemaError as plan_from_json."""
    if not callable(getattr(file, "read", None)):
        raise ConfigError(f"a plan is read from an open file, got {shown(file)}")
    try:
        value = read_json(file)
    except DocumentError as error:
        raise SchemaError(str(error)) from error
    return _plan_of(Node(value, "plan"))


def plan_from_json(text: str | bytes) -> Plan:
    """A plan from its document.

    Raises SchemaError for a document of another schema or a newer version, for a field that is missing or of
    the wrong type, and for one that contradicts itself.
    """
    if not isinstance(text, str | bytes | bytearray):
        raise SchemaError(f"a plan is a document of text, got {shown(text)}")
    try:
        value = parse_json(text)
    except DocumentError as error:
        raise SchemaError(str(error)) from error
    return _plan_of(Node(value, "plan"))


def _plan_of(root: Node) -> Plan:
    """The plan of a document. Raises SchemaError as plan_from_json."""
    _check_schema(root)
    try:
        plan = Plan(
            model=_model(root.child("model")),
            config=_config(root.child("config")),
            memory_bytes=root.integer("memory_bytes", minimum=1),
            limits=_limits(root.child("limits")),
            layout=root.text("layout"),
            states_kept=root.text("placement") if root.has("placement") else None,
        )
    except ConfigError as error:
        raise SchemaError(f"the plan holds values that cannot be: {error}") from error
    _check_consistent(plan, root)
    return plan


def _check_schema(root: Node) -> None:
    schema, version = root.text("schema"), root.integer("version", minimum=1)
    if schema != SCHEMA:
        raise SchemaError(f"schema {schema!r} is not {SCHEMA!r}: give a document written by `hybridkv plan --json`")
    if version != VERSION:
        raise SchemaError(
            f"{SCHEMA} version {version} is newer than version {VERSION}, which this hybridkv reads: "
            "update hybridkv, or write the plan again with this one"
        )
    if root.text("layout") not in LAYOUTS:
        known = " and ".join(map(repr, LAYOUTS))
        raise SchemaError(f"layout {root.text('layout')!r} is not known here: this hybridkv reads {known}")


def _model(node: Node) -> Model:
    specs = [spec_from_json(one) for one in node.children("specs")]
    layers = []
    for one in node.children("layers"):
        at = one.integer("spec")
        if at >= len(specs):
            raise SchemaError(f"{one.where}.spec is {at}, but there are {len(specs)} specs")
        layers.append(Layer(one.text("name"), specs[at], one.integer("index")))
    return Model(
        name=node.text("name"),
        model_type=node.text("model_type"),
        layers=tuple(layers),
        max_model_len=node.optional("max_model_len"),
        vocab_size=node.integer("vocab_size"),
        dtype=node.text("dtype"),
        parameters=node.integer("parameters"),
        active_parameters=node.integer("active_parameters"),
        block_size=node.integer("block_size"),
        tp=node.integer("tp", minimum=1),
        max_encoder_tokens=node.integer("max_encoder_tokens", default=0),
        num_speculative_tokens=node.integer("num_speculative_tokens", default=0),
        hidden_size=node.integer("hidden_size", default=0),
        query_heads=node.integer("query_heads", default=0),
        num_layers=node.integer("num_layers", default=0),
        weight_bytes=node.integer("weight_bytes", default=0),
        dtype_from=node.text("dtype_from") if node.has("dtype_from") else None,
        read_from=_read_from(node) if node.has("read_from") else (),
    )


def _read_from(node: Node) -> tuple[ReadFact, ...]:
    return tuple(ReadFact(*(one.text(field.name) for field in fields(ReadFact))) for one in node.children("read_from"))


def _limits(node: Node) -> RequestLimits:
    later = ("max_encoder_tokens", "num_speculative_tokens", "prefill_checkpoints")
    return RequestLimits(
        **{one.name: node.integer(one.name, default=0 if one.name in later else None) for one in fields(RequestLimits)}
    )


def _config(node: Node) -> KVCacheConfig:
    tensors = tuple(
        KVCacheTensor(
            size=one.integer("size"),
            shared_by=one.texts("shared_by"),
            offset_bytes=one.integer("offset_bytes"),
            block_stride_bytes=one.integer("block_stride_bytes"),
        )
        for one in node.children("tensors")
    )
    groups = tuple(
        KVCacheGroupSpec(one.texts("layer_names"), spec_from_json(one.child("spec")), one.has("is_eagle_group"))
        for one in node.children("groups")
    )
    slabs = _slabs(node.child("slabs")) if node.has("slabs") else None
    return KVCacheConfig(node.integer("num_blocks"), tensors, groups, slabs)


def _slabs(node: Node) -> SlabLayout:
    classes = tuple(
        SlabClass(one.integer("block_bytes"), one.integer("blocks_per_slab"), one.integers("groups"))
        for one in node.children("classes")
    )
    return SlabLayout(node.integer("slab_bytes"), node.integer("num_slabs"), classes, node.integers("kernel_blocks"))


def _check_consistent(plan: Plan, root: Node) -> None:
    """Raise SchemaError unless layers, groups, tensors and numbers agree. O(layers)."""
    layers = sorted(layer.name for layer in plan.model.layers)
    grouped = sorted(name for group in plan.config.groups for name in group.layer_names)
    placed = sorted(name for tensor in plan.config.tensors for name in tensor.shared_by)
    if not layers == grouped == placed:
        raise SchemaError("the plan contradicts itself: its model, groups and tensors do not have the same layers")
    if (plan.layout == NATURAL) != (plan.config.slabs is not None):
        raise SchemaError(f"the plan contradicts itself: slabs are those of the layout {NATURAL!r}, and of no other")
    if plan.states_kept is not None and (plan.layout != NATURAL or plan.placement in (None, NO_STATES)):
        raise SchemaError(
            f"the plan contradicts itself: placement {plan.states_kept!r} is for the layout {NATURAL!r} and layers "
            "whose states are kept"
        )
    end = plan.config.arena_bytes if _are_natural(plan.config) else _end_of_tensors(plan.config)
    if end > plan.memory_bytes:
        raise SchemaError(f"the plan contradicts itself: its tensors need {end} bytes of {plan.memory_bytes}")
    if root.child("capacity").value != json.loads(json.dumps(asdict(plan.capacity))):
        raise SchemaError("the plan contradicts itself: capacity does not follow from config; write the plan again")


def _are_natural(config: KVCacheConfig) -> bool:
    """Whether there are slabs, which the tensors then follow from. Raises SchemaError where they do not."""
    if config.slabs is None:
        return False
    try:
        again = natural_config(config.groups, config.slabs)
    except ConfigError as error:
        raise SchemaError(f"the plan contradicts itself: {error}") from error
    if again != config:
        raise SchemaError("the plan contradicts itself: tensors do not follow from slabs and groups; write it again")
    return True


def _end_of_tensors(config: KVCacheConfig) -> int:
    """Where the last tensor ends. Raises SchemaError unless they hold their pages and lie one behind the other."""
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
