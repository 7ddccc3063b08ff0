"""What describes and plans a model refuses, by name, whatever is of the wrong kind; nothing of it gets inside."""

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from wrong_values import arguments_of, unnamed_errors, untyped_fields

from hybridkv import models, planner, specs
from hybridkv.models import Layer, ReadFact, known_model, read_model
from hybridkv.planner import (
    capacity_of,
    compare_layouts,
    plan,
    plan_from_json,
    plan_to_json,
    read_plan,
    read_plan_from,
    tier_plan,
)
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

CONFIG: dict[str, object] = dict(known_model("lfm2-1.2b").config)
MODEL = read_model(CONFIG)
PLAN = plan(MODEL, "16GiB")
REFERENCE = plan(MODEL, "16GiB", layout="reference")
SLABS: Any = PLAN.config.slabs

ATTENTION: dict[str, Any] = {
    "block_size": 16,
    "page_size_padded": 65536,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": "float16",
    "head_size_v": 4,
}
FULL = FullAttentionSpec(**ATTENTION, sliding_window=32)
SPECS: list[KVCacheSpec] = [
    FULL,
    FullAttentionSpec(**ATTENTION, attention_chunk_size=32),
    MLAAttentionSpec(**{**ATTENTION, "num_kv_heads": 1}),
    SinkFullAttentionSpec(**ATTENTION, sink_len=4),
    SlidingWindowSpec(**ATTENTION, sliding_window=32),
    SlidingWindowMLASpec(**{**ATTENTION, "num_kv_heads": 1}, sliding_window=32),
    ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=32),
    CrossAttentionSpec(**ATTENTION),
    EncoderOnlyAttentionSpec(**ATTENTION),
    MambaSpec(block_size=16, page_size_padded=65536, shapes=((2, 3), (4,)), dtypes=("float32", "bfloat16")),
    UniformTypeKVCacheSpecs(block_size=16, layers=(("a", FULL), ("b", FULL))),
]
LIMITS = RequestLimits(100, 10, 1, 2, 20, 3)
VALUES: list[Any] = [
    *SPECS,
    LIMITS,
    CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=128, head_size_v=0, dtype="bfloat16"),
    MODEL.layers[0],
    ReadFact("KV heads", "8", "num_key_value_heads", "config"),
    MODEL,
    PLAN.config.tensors[0],
    PLAN.config.groups[0],
    PLAN.config,
    REFERENCE.config,
    SLABS.classes[0],
    SLABS,
    PLAN,
]
PLANNING: dict[str, Any] = {
    "model": MODEL,
    "memory": "16GiB",
    "max_model_len": 100,
    "max_batched_tokens": 10,
    "max_in_flight": 1,
    "prefill_checkpoints": 0,
    "placement": None,
    "windows_as_full": False,
    "max_encoder_tokens": 0,
    "dcp": 1,
    "pcp": 1,
}
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "read_model": (
        read_model,
        {
            "source": CONFIG,
            "block_size": 16,
            "tp": 1,
            "dtype": "bf16",
            "backend": "vllm",
            "num_speculative_tokens": 1,
            "fields": {"num_key_value_heads": 8},
            "state_dtype": "bf16",
        },
    ),
    "known_model": (known_model, {"name": "llama-3-8b"}),
    "plan": (plan, {**PLANNING, "layout": "natural", "kernel_block_size": 16}),
    "plan, reference": (plan, {**PLANNING, "layout": "reference", "kernel_block_size": None}),
    "plan_to_json": (plan_to_json, {"plan": PLAN}),
    "plan_from_json": (plan_from_json, {"text": plan_to_json(PLAN)}),
    "read_plan": (read_plan, {"path": Path("none")}),
    "read_plan_from": (read_plan_from, {"file": BytesIO(plan_to_json(PLAN).encode())}),
    "capacity_of": (capacity_of, {"config": PLAN.config, "memory_bytes": PLAN.memory_bytes, "limits": PLAN.limits}),
    "tier_plan": (tier_plan, {"made": PLAN, "memory": "32GiB"}),
    "compare_layouts": (compare_layouts, {"make": lambda layout: plan(MODEL, "16GiB", layout=layout)}),
    "is_uniform_type": (UniformTypeKVCacheSpecs.is_uniform_type, {"kv_cache_specs": {"a": FULL}}),
    "from_specs": (UniformTypeKVCacheSpecs.from_specs, {"kv_cache_specs": {"a": FULL}}),
}
HANDED_OUT = {"Capacity", "GroupCapacity", "LayoutFacts", "KnownModel", "known_models", "AttentionSpec", "KVCacheSpec"}
"""Nobody hands these in: they are results, take no arguments, or are abstract."""
CONSTANTS = {"BATCHED_TOKENS", "CACHE_MODES", "DTYPE_NAMES", "MAMBA_TYPES", "Keeps"}


def kind_of(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("value", VALUES, ids=kind_of)
def test_wrong_type_for_a_plan_value_is_rejected(value: object) -> None:
    def make(**arguments: object) -> None:
        made = type(value)(**arguments)
        if isinstance(made, KVCacheSpec):
            assert made.page_size_bytes >= made.content_bytes or made.page_size_padded is None

    assert unnamed_errors(make, arguments_of(value)) == []
    assert untyped_fields(value) == []


@pytest.mark.parametrize("name", CALLS)
def test_wrong_type_for_a_plan_function_is_rejected(name: str) -> None:
    call, arguments = CALLS[name]
    again = not name.startswith("read_plan")  # else there is no such file, or it has been read
    before = call(**arguments) if again else None
    assert unnamed_errors(call, arguments, functions={"make"}) == []
    if again:  # nothing that was handed in changed
        assert call(**arguments) == before


def test_wrong_type_tests_cover_every_plan_name() -> None:
    covered = {kind_of(one) for one in VALUES} | {name.partition(",")[0] for name in CALLS} | HANDED_OUT | CONSTANTS
    assert {*specs.__all__, *models.__all__, *planner.__all__} - covered == set()
    assert isinstance(MODEL.layers[0], Layer)
