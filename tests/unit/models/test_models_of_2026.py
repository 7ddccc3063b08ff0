"""Model types of 2026: bytes of a token, of a token in a window and of states, each worked by hand from config fields.

Sources: config classes of transformers 5.24, and configs and model code of vLLM 0.33. The readers' docstrings name the
files. Sizes are those of the classes' defaults where no other model is named.
"""

import pytest

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models import known_model, read_model
from hybridkv.models.reading import table
from hybridkv.specs import FullAttentionSpec, MLAAttentionSpec
from hybridkv.specs import SlidingWindowSpec as Window

BF16 = {"dtype": "bfloat16", "vocab_size": 1000}
KIMI = dict(known_model("kimi-linear-48b-a3b").config)
KIMI_K3 = {
    **KIMI,
    "hidden_size": 7168,
    "num_attention_heads": 96,
    "num_hidden_layers": 8,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
}
LING_3 = {
    **BF16,
    "model_type": "bailing_hybrid",
    "hidden_size": 2560,
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "layer_group_size": 6,
    "short_conv_kernel_size": 4,
}
SPARSE = {
    "use_sparse_attention": True,
    "sparse_index_dim": 128,
    "sparse_num_index_heads": 4,
    "sparse_disable_index_value": [0] * 3 + [1] * 57,
    "sparse_attention_freq": [0] * 3 + [1] * 57,
}
MINIMAX_M3 = {
    **BF16,
    "model_type": "minimax_m3_text",
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sparse_attention_config": SPARSE,
}
STEP_3 = {
    **BF16,
    "model_type": "step3p5",
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "sliding_window": 512,
    # 45 layers, and three drafting layers at the end
    "num_nextn_predict_layers": 3,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    },
}
INKLING = {**BF16, "model_type": "inkling_text", "num_hidden_layers": 66}
LFM3 = {**BF16, "model_type": "lfm3", "num_hidden_layers": 24}
OLMO = {**BF16, "model_type": "olmo_hybrid", "num_hidden_layers": 32, "hidden_size": 3840, "num_attention_heads": 30}
DEEPSEEK_32 = {**BF16, "model_type": "deepseek_v32", "num_hidden_layers": 61, "num_attention_heads": 128}
GLM_5 = {**BF16, "model_type": "glm_moe_dsa", "num_hidden_layers": 78}


@pytest.mark.parametrize(
    ("config", "token", "window", "state"),
    [
        # 7 layers of MLA keep a latent of 512 and 64 rotary elements in bfloat16. 20 layers of delta attention keep 3
        # columns of queries, keys and values (3 * 32 heads of 128) and a float32 matrix of 128 * 128 for each head
        pytest.param(KIMI, 7 * (512 + 64) * 2, 0, 20 * (3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4), id="kimi_linear"),
        # the same with 96 heads; 2 layers of MLA, 6 of delta attention. The text part need not say its own type
        pytest.param(
            {"model_type": "kimi_k3", "text_config": {k: v for k, v in KIMI_K3.items() if k != "model_type"}},
            2 * (512 + 64) * 2,
            0,
            6 * (3 * 3 * 96 * 128 * 2 + 96 * 128 * 128 * 4),
            id="kimi_k3",
        ),
        # 42 / 6 = 7 layers of MLA, 35 of delta attention with 32 heads of 128
        pytest.param(
            LING_3, 7 * (512 + 64) * 2, 0, 35 * (3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4), id="bailing_hybrid"
        ),
        pytest.param(
            {"model_type": "bailing_moe_v3_vl", "text_config": {**LING_3, "layer_types": ["full_attention"] * 42}},
            42 * (512 + 64) * 2,
            0,
            0,
            id="bailing_moe_v3_vl",
        ),
        # every fourth of 32 layers: 30 heads of 3840 / 30 = 128, keys and values. 24 layers of the delta rule: keys of
        # 0.75 * 3840 / 30 = 96, values of 192; 3 columns of 30 * (96 + 96 + 192) channels, matrices in bfloat16
        pytest.param(
            OLMO, 8 * 30 * (128 + 128) * 2, 0, 24 * (3 * 30 * (96 + 96 + 192) * 2 + 30 * 192 * 96 * 2), id="olmo_hybrid"
        ),
        # layers 2, 6, ... are full (6), layers 4, 8, ... have windows (5), both with 4 KV heads of 128; 13 layers keep
        # 7 columns of 2048 channels
        pytest.param(LFM3, 6 * 4 * (128 + 128) * 2, 5 * 4 * (128 + 128) * 2, 13 * 7 * 2048 * 2, id="lfm3"),
        pytest.param(
            {"model_type": "lfm3_vl", "text_config": {**LFM3, "layer_types": ["conv", "full_attention"] * 12}},
            12 * 4 * (128 + 128) * 2,
            0,
            12 * 7 * 2048 * 2,
            id="lfm3_vl",
        ),
        # LFM2: 3 - 1 = 2 columns of 2048 channels, as vLLM keeps them, and 8 KV heads of 2048 / 32 = 64
        pytest.param(
            {
                "model_type": "lfm2_vl",
                "text_config": {
                    **BF16,
                    "model_type": "lfm2",
                    "hidden_size": 2048,
                    "conv_dim": 2048,
                    "num_hidden_layers": 16,
                    "num_attention_heads": 32,
                    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
                },
            },
            6 * 8 * (64 + 64) * 2,
            0,
            10 * 2 * 2048 * 2,
            id="lfm2_vl",
        ),
        # 60 layers of 4 KV heads of 128; 57 of them with an indexer's key of 128
        pytest.param(MINIMAX_M3, 60 * 4 * (128 + 128) * 2 + 57 * 128 * 2, 0, 0, id="minimax_m3"),
        # 12 full layers (0, 4, ..., 44), 33 windowed ones, all with 8 KV heads of 128
        pytest.param(STEP_3, 12 * 8 * (128 + 128) * 2, 33 * 8 * (128 + 128) * 2, 0, id="step3p5"),
        # every 6th of 66 layers is full attention with 8 KV heads of 128, 55 have windows with 16. vLLM keeps a window
        # of the convolutions' inputs: for each KV head a key, a value and twice its share of 6144 elements. With 8
        # heads these are 2 * 128 + 2 * 768 = 1792 elements, padded to 2048; with 16 heads 2 * 128 + 2 * 384 = 1024
        pytest.param(
            INKLING,
            11 * 8 * (128 + 128) * 2,
            55 * 16 * (128 + 128) * 2 + 11 * 8 * 2048 * 2 + 55 * 16 * 1024 * 2,
            0,
            id="inkling",
        ),
        # 48 layers, 8 of them full, all with 8 KV heads of 128
        pytest.param(
            {"model_type": "inkling2", "text_config": {**BF16, "num_hidden_layers": 48}},
            8 * 8 * (128 + 128) * 2,
            40 * 8 * (128 + 128) * 2,
            48 * 4 * 4 * 2 * (8 * 128 + 4608),
            id="inkling2",
        ),
        # 24 layers, and layers 6 to 17 two more times: 48 caches, of which 4 + 2 * 2 are full
        pytest.param(
            {"model_type": "inkling2_loop", "text_config": {**BF16, "num_hidden_layers": 24}},
            (4 + 2 * 2) * 8 * (128 + 128) * 2,
            (20 + 2 * 10) * 8 * (128 + 128) * 2,
            (24 + 2 * 12) * 4 * 4 * 2 * (8 * 128 + 2304),
            id="inkling2_loop",
        ),
        # a latent of 512 and 64; the indexer's key of 128 in 8 bits with one float32 scale
        pytest.param(DEEPSEEK_32, 61 * ((512 + 64) * 2 + 128 + 4), 0, 0, id="deepseek_v32"),
        # without indexer_types every layer of GLM-5 has an indexer; here layers 0, 1, 3, 5, ..., 77 have one
        pytest.param(GLM_5, 78 * ((512 + 64) * 2 + 128 + 4), 0, 0, id="glm_moe_dsa"),
        pytest.param(
            {**GLM_5, "indexer_types": ["full", "full"] + ["shared", "full"] * 38},
            78 * (512 + 64) * 2 + (2 + 38) * (128 + 4),
            0,
            0,
            id="glm_moe_dsa with shared indexers",
        ),
    ],
)
def test_bytes_match_hand_calculation(config: dict[str, object], token: int, window: int, state: int) -> None:
    model = read_model(config)
    assert model.kv_bytes_per_token == token
    assert model.window_bytes_per_token == window
    assert model.state_bytes == state


def test_minimax_m3_in_both_forms_gives_one_model() -> None:
    types = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57
    form = {**MINIMAX_M3, "sparse_attention_config": None, "layer_types": types, "index_head_dim": 128}
    assert read_model(form).layers == read_model(MINIMAX_M3).layers
    facts = {fact.field for fact in read_model(MINIMAX_M3).read_from}
    assert {"sparse_attention_config.sparse_attention_freq", "sparse_attention_config.sparse_index_dim"} <= facts
    eight = read_model(MINIMAX_M3, dtype="fp8").layers
    assert {one.spec.dtype for one in eight if isinstance(one.spec, MLAAttentionSpec)} == {"bfloat16"}
    assert {one.spec.dtype for one in eight if type(one.spec) is FullAttentionSpec} == {"fp8"}


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"sparse_attention_freq": None}, "sparse_attention_freq"),
        ({"sparse_attention_freq": [1] * 59}, "sparse_attention_freq"),
        ({"sparse_attention_freq": [2] * 60}, "sparse_attention_freq"),
        ({"sparse_disable_index_value": [0] * 60}, "sparse_disable_index_value"),
        ({"use_sparse_attention": False}, "use_sparse_attention"),
    ],
)
def test_minimax_m3_with_an_ambiguous_field_is_rejected(section: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        read_model({**MINIMAX_M3, "sparse_attention_config": {**SPARSE, **section}})
    with pytest.raises(ConfigError, match="layer_types"):
        read_model({**MINIMAX_M3, "layer_types": ["full_attention"] * 60})


def test_bailing_file_of_transformers_keeps_its_heads() -> None:
    """transformers saves the rotary width as head_dim, and every layer's type."""
    types = (["linear_attention"] * 5 + ["full_attention"]) * 7
    saved = {"head_dim": 64, "linear_head_dim": 128, "linear_num_heads": 32, "layer_types": types}
    assert read_model({**LING_3, **saved}).layers == read_model(LING_3).layers
    # what the layers after the last whole group are, two engines do not agree about
    with pytest.raises(ConfigError, match=r"layers 42 to 43 .*layer_types"):
        read_model({**LING_3, "num_hidden_layers": 44})


def test_step_windows_with_other_kv_heads_are_rejected() -> None:
    setting = {"attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 4}
    with pytest.raises(ConfigError, match="num_attention_groups 4 of attention_other_setting"):
        read_model({**STEP_3, "attention_other_setting": setting})
    with pytest.raises(ConfigError, match="layer_types"):
        read_model({**STEP_3, "num_nextn_predict_layers": 0})
    with pytest.raises(ConfigError, match="sliding_window"):
        read_model({**STEP_3, "sliding_window": None})
    # 96 query heads of windowed layers: 64 would allow 64 ranks
    assert read_model(STEP_3, tp=32).layers
    with pytest.raises(ConfigError, match="tp=64 does not divide the 96"):
        read_model(STEP_3, tp=64)


def test_inkling_layers_follow_each_form_of_the_field() -> None:
    local = {"local_layer_ids": [i for i in range(66) if (i + 1) % 6]}
    types = {"layer_types": (["hybrid_sliding"] * 5 + ["hybrid"]) * 11}
    layers = read_model(INKLING).layers
    assert read_model({**INKLING, **local}).layers == layers
    assert read_model({**INKLING, **types}).layers == layers
    assert read_model({**INKLING, "model_type": "inkling_model", "sconv_kernel_size": 4}).layers == layers
    with pytest.raises(ConfigError, match="local_layer_ids"):
        read_model({**INKLING, "local_layer_ids": [66]})
    loop = {"model_type": "inkling2_loop_text", "num_hidden_layers": 24, **BF16}
    once = read_model({**loop, "loop_config": {"core_start": 6, "core_end": 12, "num_passes": 2}})
    assert len({one.index for one in once.layers}) == 24 + 6
    with pytest.raises(ConfigError, match="loop_layer_index_end"):
        read_model({**loop, "loop_layer_index_end": 25})


def test_inkling_convolutions_are_states_in_transformers() -> None:
    """Four convolutions of 4 columns in float32: of keys and of values, and of the hidden size after both blocks."""
    model = read_model(INKLING, backend="transformers")
    assert model.state_bytes == 11 * 4 * 4 * 2 * (8 * 128 + 6144) + 55 * 4 * 4 * 2 * (16 * 128 + 6144)
    assert model.window_bytes_per_token == 55 * 16 * (128 + 128) * 2
    windows = [one.spec for one in read_model(INKLING, tp=8).layers if one.name.endswith("conv")]
    assert {(one.block_size, one.sliding_window, one.num_kv_heads) for one in windows if isinstance(one, Window)} == {
        (4, 4, 1),
        (4, 4, 2),
    }
    with pytest.raises(ConfigError, match="KV heads with convolutions"):
        read_model(INKLING, tp=16)


def test_lfm2_with_two_widths_of_convolutions_is_rejected() -> None:
    moe = {**BF16, "model_type": "lfm2_moe", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    dense = {**moe, "model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32}
    for config in (moe, dense):
        assert read_model({**config, "conv_dim": 2048}).state_bytes == 2 * 2048 * 2
        with pytest.raises(ConfigError, match="conv_dim 1024"):
            read_model({**config, "conv_dim": 1024})


def test_kimi_k3_counts_its_gates() -> None:
    """A gate of full rank in 6 layers, one in both layers of MLA, four vectors a layer for residuals and two more."""
    linear = KIMI_K3["linear_attn_config"]
    assert isinstance(linear, dict)
    plain = {**KIMI_K3, "linear_attn_config": {**linear, "use_full_rank_gate": False}}
    base = read_model(plain).parameters
    assert read_model(KIMI_K3).parameters - base == 6 * (7168 * 96 * 128 - 128 * (7168 + 96 * 128))
    assert read_model({**plain, "mla_use_output_gate": True}).parameters - base == 2 * 7168 * 96 * 128
    assert read_model({**plain, "attn_res_block_size": 4}).parameters - base == (4 * 8 + 2) * 7168


def test_states_of_newer_models_are_not_split_over_ranks() -> None:
    for config in (LFM3, {**INKLING, "model_type": "inkling2_text"}):
        with pytest.raises(ConfigError, match="use tp=1"):
            read_model(config, tp=2)


def test_newer_classes_name_the_versions_they_are_from() -> None:
    newer, older = table("newer"), table("defaults")
    assert newer["written_with"] == {"transformers": "5.24.0", "vllm": "0.33.0"}
    assert not newer["defaults"].keys() & older["defaults"].keys()


def test_unknown_type_with_a_sparse_section_is_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match="sparse_attention_config"):
        read_model({**MINIMAX_M3, "model_type": "minimax_m4"})
