"""The general reader: what it takes from where, what it says of it, and what it refuses by name."""

import json
from pathlib import Path

import pytest

from assumed import plan_of
from cli_support import error, run
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models import ReadFact, read_model
from hybridkv.models.model import ASSUMED
from hybridkv.models.reading import CONFIG, DEFAULT, GIVEN
from hybridkv.planner import plan, plan_from_json, plan_to_json
from hybridkv.simulator.cost import StepCost
from hybridkv.spec_fields import SparseCacheRole
from hybridkv.specs import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from hybridkv.units import format_bytes

STRANGER: dict[str, object] = {
    "model_type": "stranger",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 100,
    "dtype": "float16",
}
MIXTRAL = {**STRANGER, "model_type": "mixtral"}
LATENT = {**STRANGER, "model_type": "deepseek_v32", "kv_lora_rank": 32, "qk_rope_head_dim": 8, "index_head_dim": 128}

STEP_3 = {"model_type": "step3_text", "num_hidden_layers": 2, "dtype": "bfloat16"}


def without(config: dict[str, object], *keys: str) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in keys}


def test_general_reader_reads_unknown_model_type_by_fields() -> None:
    model = read_model(STRANGER)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float16")
    assert [layer.spec for layer in model.layers] == [spec] * 4
    assert ReadFact("KV heads", "2", "num_key_value_heads", CONFIG) in model.read_from
    assert ReadFact("width of a head", "8", "hidden size / attention heads", ASSUMED) in model.read_from
    assert any(fact.source == ASSUMED and "'stranger'" in fact.field for fact in model.read_from)


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("n_embd", "n_layer", "n_head", "n_head_kv", "n_positions"), (64, 4, 8, 2, 256)),
        (("d_model", "n_layers", "n_heads", "num_kv_heads", "max_seq_len"), (64, 4, 8, 2, 256)),
    ],
)
def test_general_reader_accepts_alternative_field_names(names: tuple[str, ...], values: tuple[int, ...]) -> None:
    model = read_model(
        {"model_type": "stranger", "vocab_size": 9, "dtype": "float16", **dict(zip(names, values, strict=True))}
    )
    assert (model.layers, model.max_model_len) == (read_model(STRANGER).layers, 256)
    assert {fact.field for fact in model.read_from if fact.source == CONFIG} == set(names[:4])


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (without(STRANGER, "num_key_value_heads"), "--set num_key_value_heads=N"),
        (without(STRANGER, "num_attention_heads"), "--set num_attention_heads=N"),
        (without(STRANGER, "hidden_size"), "--set hidden_size=N"),
        (without(MIXTRAL, "num_hidden_layers"), "--set num_hidden_layers=N"),
        ({**STRANGER, "hidden_size": 60}, "--set head_dim=N"),
        ({**STRANGER, "sliding_window": 32}, "--set layer_types="),
        ({**STRANGER, "model_type": "cwm"}, "--set layer_types="),
        (without({**LATENT, "model_type": "hy_v4"}, "indexer_types"), "--set indexer_types="),
        (without(LATENT, "qk_rope_head_dim", "model_type") | {"model_type": "stranger"}, "--set qk_rope_head_dim=N"),
    ],
)
def test_general_reader_with_missing_field_names_the_option(config: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError, match=r"bytes|say the width") as caught:
        read_model(config)
    assert option in str(caught.value)


def test_general_reader_prefers_the_callers_fields() -> None:
    config = without(STRANGER, "num_key_value_heads")
    model = read_model(config, fields={"num_key_value_heads": 4, "head_dim": 16})
    assert {layer.spec for layer in model.layers} == {
        FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=16, dtype="float16")
    }
    assert ReadFact("KV heads", "4", "num_key_value_heads", GIVEN) in model.read_from
    # of a family with a reader of its own, too, and of the part inside
    nested = {"model_type": "llava", "text_config": {**STRANGER, "model_type": "llama", "intermediate_size": 8}}
    assert read_model(nested, fields={"num_key_value_heads": 1}).kv_bytes_per_token * 2 == (
        read_model(nested).kv_bytes_per_token
    )
    with pytest.raises(ConfigError, match="fields must be values by the names"):
        read_model(config, fields=["num_key_value_heads"])  # type: ignore[arg-type]  # on purpose


def test_general_reader_reports_class_defaults() -> None:
    model = read_model(without(MIXTRAL, "num_key_value_heads", "hidden_size") | {"num_attention_heads": 32})
    assert ReadFact("KV heads", "8", "num_key_value_heads", DEFAULT) in model.read_from
    assert model.layers[0].spec == FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="float16")


@pytest.mark.parametrize(
    "odd",
    [
        {"ssm_state_size": 16},
        {"linear_num_key_heads": 4},
        {"index_topk": 8},
        {"compress_ratio": 4},
        {"kv_share_map": [0, 0]},
        {"mem_len": 16},
        {"conv_kernel": 4},
        {"block_types": ["recurrent"]},
        {"local_window": 16},
        {"swa_num_key_value_heads": 4},
        {"loop_num": 2},
        {"param_sink_number": 128},
        {"mla_latent": 16},
        {"cross_attention_interval": 2},
        {"sliding_window_pattern": 2},
    ],
)
def test_general_reader_rejects_fields_of_other_mechanisms(odd: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(odd))):
        read_model({**STRANGER, **odd})
    if "pattern" in next(iter(odd)):
        read_model({**STRANGER, **odd, "layer_types": ["full_attention"] * 4})
    # an absent mechanism is none
    read_model({**STRANGER, **dict.fromkeys(odd)})


def test_general_reader_accepts_expert_and_position_fields() -> None:
    read_model(
        {**STRANGER, "num_shared_experts": 2, "moe_layer_freq": 1, "rope_local_base_freq": 1e4, "max_window_layers": 9}
    )


@pytest.mark.parametrize(
    ("types", "named"),
    [
        (
            ["full_attention", "linear_attention", "full_attention", "conv"],
            r"layers 1 \(linear_attention\); 3 \(conv\)",
        ),
        (["mystery"] * 4, r"layers 0-3 \(mystery\)"),
    ],
)
def test_general_reader_rejects_unknown_layer_types(types: list[str], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_model({**STRANGER, "layer_types": types})


def test_general_reader_gives_shared_kv_layers_no_cache() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    model = read_model({**STRANGER, "layer_types": types, "sliding_window": 32, "num_kv_shared_layers": 1})
    assert [(layer.index, type(layer.spec).__name__) for layer in model.layers] == [
        (0, "SlidingWindowSpec"),
        (1, "FullAttentionSpec"),
        (2, "SlidingWindowSpec"),
    ]
    with pytest.raises(ConfigError, match="num_kv_shared_layers 4 leaves none of 4 layers"):
        read_model({**STRANGER, "num_kv_shared_layers": 4})


def test_general_reader_shares_layers_of_cla() -> None:
    """Five layers in twos: 0, 2 and 4 keep, 1 and 3 read. Without use_cla the factor means nothing (Hunyuan-7B)."""
    shared = {**STRANGER, "num_hidden_layers": 5, "use_cla": True, "cla_share_factor": 2}
    for config in (shared, {**shared, "model_type": "mixtral"}, {**shared, "model_type": "hunyuan"}):
        model = read_model(config)
        assert {one.name: one.read_by for one in model.layers} == {
            "model.layers.0.self_attn": ("model.layers.1.self_attn",),
            "model.layers.2.self_attn": ("model.layers.3.self_attn",),
            "model.layers.4.self_attn": (),
        }
        assert model.depth == 5
        # 3 of 5 layers of 2 KV heads of 8, keys and values of 2 bytes
        assert model.kv_bytes_per_token == 3 * 2 * 2 * 8 * 2
    whole = read_model({**shared, "use_cla": False})
    assert (len(whole.layers), whole.layers) == (5, read_model(without(shared, "use_cla")).layers)
    dense = {**MIXTRAL, "model_type": "hunyuan_v1_dense", "intermediate_size": 128}
    # a layer that reads has no matrices for its two heads' keys and values
    fewer = read_model(dense).parameters - read_model({**dense, "use_cla": True, "cla_share_factor": 4}).parameters
    assert fewer == 3 * (2 * 64 * 2 * 8 + 8)
    for wrong, field in (
        ({"cla_share_factor": None}, "cla_share_factor"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"], "sliding_window": 8}, "cla"),
    ):
        with pytest.raises(ConfigError, match=field):
            read_model({**shared, **wrong})
    # a reader of its own does not know the field
    with pytest.raises(UnsupportedModelError, match="use_cla"):
        read_model({**shared, "model_type": "gemma3_text"})


def test_step_3_keeps_one_kv_head_on_every_rank() -> None:
    for tp in (1, 8, 64):
        assert (
            read_model({"model_type": "step3_vl", "text_config": {**STEP_3}}, tp=tp).kv_bytes_per_token
            == 2 * 2 * 256 * 2
        )
    assert read_model(STEP_3).max_model_len == 65536
    with pytest.raises(ConfigError, match="num_attention_groups"):
        read_model({**STEP_3, "num_attention_groups": 8})


def test_general_reader_leaves_out_draft_layers_and_reports_them() -> None:
    model = read_model({**STRANGER, "num_nextn_predict_layers": 2})
    assert model.layers == read_model(STRANGER).layers
    (said,) = [fact for fact in model.read_from if "prediction" in fact.what]
    assert (said.value, said.source) == ("2 left out", ASSUMED)


def test_general_reader_counts_indexer_keys_with_the_latent() -> None:
    """As vLLM keeps them: 8-bit floats and a float32 for every 128 of them; transformers keeps the model's dtype."""
    model = read_model(LATENT)
    latent, keys = (layer.spec for layer in model.layers[:2])
    assert latent == MLAAttentionSpec(block_size=16, head_size=40, dtype="float16")
    assert keys == MLAAttentionSpec(block_size=16, head_size=132, dtype="uint8", cache_role=SparseCacheRole.INDEXER)
    assert model.kv_bytes_per_token == 4 * (40 * 2 + 132)
    assert read_model(LATENT, backend="transformers").kv_bytes_per_token == 4 * (40 * 2 + 128 * 2)


def test_general_reader_state_dtype_follows_the_option() -> None:
    wide = read_model("nemotron-h-8b", state_dtype="fp32")
    assert wide.state_bytes == 2 * read_model("nemotron-h-8b").state_bytes
    assert {spec.dtypes for spec in (x.spec for x in wide.layers) if isinstance(spec, MambaSpec)} == {("float32",) * 2}
    assert wide.kv_bytes_per_token == read_model("nemotron-h-8b").kv_bytes_per_token
    with pytest.raises(ConfigError, match="state_dtype is for the vllm backend"):
        read_model("nemotron-h-8b", state_dtype="fp32", backend="transformers")
    with pytest.raises(ConfigError, match="unknown cache dtype"):
        read_model("nemotron-h-8b", state_dtype="int3")


def test_plan_keeps_the_sources_of_read_fields() -> None:
    made = plan(read_model(MIXTRAL), "1MiB")
    document = json.loads(plan_to_json(made))
    assert {"what": "KV heads", "value": "2", "field": "num_key_value_heads", "source": CONFIG} in (
        document["model"]["read_from"]
    )
    assert plan_from_json(plan_to_json(made)) == made
    # families with a reader of their own say nothing, as before
    assert "read_from" not in json.loads(plan_to_json(plan(read_model("llama-3-8b"), "40GiB")))["model"]


def test_general_reader_options_work_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(without(STRANGER, "num_key_value_heads")), "utf-8")
    assert "--set num_key_value_heads=N" in error("plan", path, "--memory", "1MiB")
    text = run("plan", path, "--memory", "1MiB", "--set", "num_key_value_heads=2").stdout
    assert "  KV heads 2: num_key_value_heads (given)\n" in text
    assert "  width of a head 8: hidden size / attention heads\n" in text
    assert text.index("\nread\n") < text.index("\nassumed\n")
    types = '["full_attention", "sliding_attention", "sliding_attention", "full_attention"]'
    options = ("--set", "num_key_value_heads=2", "--set", "sliding_window=16", "--set", f"layer_types={types}")
    assert "x window" in run("plan", path, "--memory", "1MiB", *options).stdout
    assert "--set 'num_key_value_heads' must be FIELD=VALUE" in error(
        "plan", path, "--memory", "1MiB", "--set", "num_key_value_heads"
    )
    assert "drop --set" in error("plan", "--plan", path, "--set", "a=1")
    states = run("plan", "nemotron-h-8b", "--memory", "40GiB", "--state-dtype", "fp32").stdout
    assert f"a state takes     {format_bytes(read_model('nemotron-h-8b', state_dtype='fp32').state_bytes)}\n" in states
    drafting = run("plan", "glm-4.5", "--memory", "80GiB", "--mtp-layers", "1").stdout
    assert "  multi-token prediction layers 1, each as layer 91: num_nextn_predict_layers\n" in drafting


def test_step_time_without_parameter_count_is_rejected() -> None:
    made = plan_of(read_model(STRANGER), "1MiB")
    assert made.model.parameters == 0
    with pytest.raises(ConfigError, match="--set parameters=N"):
        StepCost.of(made)
    assert StepCost.of(made, time_scale=0).parameters == 0
    counted = read_model(MIXTRAL, fields={"parameters": 1000, "active_parameters": 500})
    assert (counted.parameters, counted.active_parameters) == (1000, 500)
    assert StepCost.of(plan(counted, "1MiB")).active_parameters == 500
