import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assumed import plan_of
from hybridkv import planner
from hybridkv.errors import ConfigError, SchemaError
from hybridkv.models import Layer, known_models, read_model
from hybridkv.planner import plan_from_json, plan_to_json, read_plan
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
)

plan = partial(planner.plan, layout="reference")

Document = dict[str, Any]


def document() -> Document:
    found: Document = json.loads(plan_to_json(plan(read_model("qwen2.5-7b"), "40GiB")))
    return found


@pytest.mark.parametrize("name", [known.name for known in known_models()])
def test_plan_document_round_trips(name: str) -> None:
    tp = {"smollm2-135m": 3, "smollm2-360m": 5}.get(name, 2)
    made = plan_of(read_model(name, tp=tp), "640GiB", max_model_len=400, max_batched_tokens=8192)
    text = plan_to_json(made)
    again = plan_from_json(text)
    assert again == made
    assert plan_to_json(again) == text


SPECS: list[KVCacheSpec] = [
    FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16", sliding_window=3),
    FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=4, dtype="fp8", head_size_v=2),
    MLAAttentionSpec(block_size=4, head_size=12, dtype="float16"),
    SinkFullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16", sink_len=4),
    SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16", sliding_window=8),
    SlidingWindowMLASpec(block_size=4, head_size=9, dtype="float16", sliding_window=8),
    ChunkedLocalAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16", attention_chunk_size=8),
    CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16"),
    EncoderOnlyAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16"),
    MambaSpec(block_size=4, shapes=((3, 7), (2, 2, 2)), dtypes=("float16", "float32"), num_speculative_blocks=2),
    MambaSpec(block_size=4, shapes=((5,),), dtypes=("float32",), mamba_type="short_conv"),
]


@given(specs=st.lists(st.sampled_from(SPECS), min_size=1, max_size=9), placement=st.sampled_from(["align", "none"]))
def test_plan_document_of_every_spec_round_trips(specs: list[KVCacheSpec], placement: str) -> None:
    layers = tuple(Layer(f"l{i}", spec, i) for i, spec in enumerate(specs))
    model = replace(read_model("llama-3-8b"), layers=layers, max_encoder_tokens=9)
    made = plan(model, "1MiB", max_model_len=100, placement=placement, dcp=2)
    text = plan_to_json(made)
    assert plan_from_json(text) == made
    assert plan_to_json(plan_from_json(text)) == text


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"shapes": [[3, "7"]]}, r"specs\[0\].shapes\[0\]\[1\]: Expected `int`, got `str`"),
        ({"shapes": [3]}, r"specs\[0\].shapes\[0\]: Expected `array`, got `int`"),
        ({"dtypes": "float32"}, r"specs\[0\].dtypes: Expected `array`, got `str`"),
        ({"cache_mode": "everywhere"}, "unknown cache_mode"),
        ({"page_size_padded": 1}, "page_size_padded 1 is smaller"),
    ],
)
def test_plan_document_with_malformed_state_names_the_field(spec: dict[str, object], said: str) -> None:
    found = json.loads(plan_to_json(plan(read_model("jamba-1.5-mini"), "40GiB")))
    found["model"]["specs"][0].update(spec)
    with pytest.raises(SchemaError, match=said):
        plan_from_json(json.dumps(found))


def test_plan_document_with_unsupported_limits_is_rejected() -> None:
    found = json.loads(plan_to_json(plan(read_model("jamba-1.5-mini"), "40GiB")))
    found["limits"]["num_speculative_tokens"] = 3
    with pytest.raises(SchemaError, match="impossible values: 3 speculative tokens need"):
        plan_from_json(json.dumps(found))


def changed(change: Callable[[Document], object]) -> str:
    found = document()
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(schema="vllm.plan"), "schema 'vllm.plan' is not 'hybridkv.plan'"),
        (lambda d: d.update(version=2), "hybridkv.plan version 2 is newer than version 1.*update hybridkv"),
        (lambda d: d.update(version="1"), "plan.version: Expected `int`, got `str`"),
        (lambda d: d.update(layout="sideways"), "unknown layout 'sideways': .* 'reference' and 'natural'"),
        (lambda d: d.update(layout="natural"), "only the layout 'natural' has slabs"),
        (lambda d: d.pop("schema"), "plan: Object missing required field `schema`"),
        (lambda d: d.pop("model"), "plan: Object missing required field `model`"),
        (lambda d: d.update(model=[]), "plan.model: Expected `object`, got `array`"),
        (lambda d: d["model"].pop("vocab_size"), "plan.model: Object missing required field `vocab_size`"),
        (lambda d: d["model"].update(name=7), "plan.model.name: Expected `str`, got `int`"),
        (lambda d: d["model"].update(max_model_len="long"), r"model.max_model_len: Expected `int \| null`, got `str`"),
        (lambda d: d["model"]["layers"][3].pop("spec"), r"model.layers\[3\]: Object missing required field `spec`"),
        (lambda d: d["model"]["layers"][3].update(spec=1), "spec of layer .* is 1, but there are 1 specs"),
        (lambda d: d["model"]["specs"][0].update(kind="XSpec"), r"plan.model.specs\[0\].kind: Invalid value 'XSpec'"),
        (lambda d: d["model"]["specs"][0].update(kind="MambaSpec"), r"specs\[0\]: .*missing required field `shapes`"),
        (
            lambda d: d["model"]["specs"][0].update(block_size=10**30),
            r"specs\[0\].block_size: Expected `int` <= 46116860184",
        ),
        (lambda d: d["config"]["tensors"][0].update(offset_bytes=-1), r"offset_bytes: Expected `int` >= 0"),
        (lambda d: d["model"]["specs"][0].update(page_size_padded=7), "page_size_padded 7 is smaller"),
        (lambda d: d["model"]["specs"][0].update(dtype="int3"), "impossible values: unknown cache dtype"),
        (lambda d: d["model"]["specs"][0].update(block_size=0), "block_size must be at least 1"),
        (lambda d: d["limits"].pop("dcp"), "plan.limits: Object missing required field `dcp`"),
        (lambda d: d["config"].update(tensors=3), "plan.config.tensors: Expected `array`, got `int`"),
        (lambda d: d["config"].update(groups=[]), "KVCacheConfig has no groups"),
        (lambda d: d["config"].update(num_blocks=True), "plan.config.num_blocks: Expected `int`, got `bool`"),
        (lambda d: d["config"]["tensors"][0].update(shared_by=[1]), r"tensors\[0\].shared_by\[0\]: Expected `str`"),
        (lambda d: d["config"].update(num_blocks=7), "tensor 0 does not hold"),
        (lambda d: d["config"]["tensors"][1].update(offset_bytes=16), "tensor 1 overlaps the one before"),
        (lambda d: d["config"]["tensors"].pop(), "do not have the same layers"),
        (lambda d: d.update(memory_bytes=2**30), "need .* bytes, memory is 1073741824"),
        (lambda d: d["capacity"].update(tokens_that_fit=1), "capacity does not follow"),
        (lambda d: d["capacity"].pop("groups"), "capacity does not follow"),
    ],
)
def test_plan_document_with_malformed_field_names_it(change: Callable[[Document], object], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        plan_from_json(changed(change))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000])
def test_plan_document_of_other_text_is_rejected(text: str) -> None:
    with pytest.raises(SchemaError):
        plan_from_json(text)


@given(st.data())
def test_plan_document_without_a_field_is_read_or_rejected(data: st.DataObject) -> None:
    found = document()
    node: Any = found
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    if data.draw(st.booleans()):
        del node[key]
    else:
        node[key] = data.draw(st.sampled_from([None, -1, "x", [], {}, 0.5]))
    try:
        again = plan_from_json(json.dumps(found))
    except SchemaError:
        return
    # facts that nothing else depends on may change: they are then simply read
    assert plan_to_json(again)


def test_plan_document_file_is_read(tmp_path: Path) -> None:
    made = plan(read_model("llama-3-8b"), "40GiB")
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(made), "utf-8")
    assert read_plan(path) == made
    path.write_text("{}", "utf-8")
    with pytest.raises(SchemaError, match=r"plan\.json: plan: Object missing required field `schema`"):
        read_plan(path)
    with pytest.raises(ConfigError, match="cannot read the plan"):
        read_plan(tmp_path / "other.json")
