"""Model types of 2026: bytes of a token, of a token in a window and of states, each worked by hand from config fields.

Sources: config classes of transformers 5.24, and configs and model code of vLLM 0.33. The readers' docstrings name the
files. Sizes are those of the classes' defaults where no other model is named.
"""

from fractions import Fraction

import pytest

from assumed import plan_of
from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models import known_model, read_model
from hybridkv.models.reading import table
from hybridkv.planner import plan_from_json, plan_to_json
from hybridkv.spec_fields import SparseCacheRole
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


def test_glm_5_pattern_places_indexers() -> None:
    types = {"indexer_types": ["full", "shared", "shared"] * 26}
    layers = read_model({**GLM_5, **types}).layers
    assert sum(one.name.endswith("indexer") for one in layers) == 26
    assert read_model({**GLM_5, "index_topk_pattern": "FSS" * 26}).layers == layers
    assert read_model({**GLM_5, "index_topk_pattern": types["indexer_types"]}).layers == layers
    for wrong in ("FSX" * 26, "FS", ["F", "S", "S"] * 26, 3):
        with pytest.raises(ConfigError, match="index_topk_pattern"):
            read_model({**GLM_5, "index_topk_pattern": wrong})


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
    with pytest.raises(ConfigError, match="num_attention_groups or head_dim of attention_other_setting"):
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


# -- compressed caches

DEEPSEEK_4 = {**BF16, "model_type": "deepseek_v4", "num_hidden_layers": 43}
DEEPSEEK_41 = {
    "model_type": "deepseek_v41",
    "text_config": {
        **BF16,
        "num_hidden_layers": 8,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_head_dim": 128,
        # two layers of a window only, two at a rate of 1, four at a rate of 2, and a drafting layer
        "compress_ratios": [0, 1, 1, 2, 2, 2, 0, 2, 0],
        "kv_source_layer_ids": [1, 3, 7],
        "index_source_layer_ids": [1, 2, 3, 5, 7],
    },
}
V41: dict[str, object] = DEEPSEEK_41["text_config"]  # type: ignore[assignment]  # a config in a config
GLM_5_NEXT = {**BF16, "model_type": "glm5_next_text", "num_hidden_layers": 45}
QWEN_4 = {
    **BF16,
    "model_type": "qwen4_exp_text",
    "num_hidden_layers": 40,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "ple_layer_ids": [2],
}
STEP_5 = {
    **BF16,
    "model_type": "step5",
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "sliding_window": 512,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
    "sparse_config": {"enabled": True, "proxy_dim": 256, "region_block_size": 8},
}


@pytest.mark.parametrize(
    ("config", "dtype", "token", "window", "state", "ring"),
    [
        # layers 3, 5, ..., 41 (20 of them) have a rate of 4, the other 23 of 128. A latent has 512 elements; a rate of
        # 4 also keeps an indexer's key of 128 bytes and a float32 scale. Windows: a latent in each layer, and the
        # compressor's sums and scores in float32, twice where groups overlap (rate 4), of latents and of keys
        pytest.param(
            DEEPSEEK_4,
            "bf16",
            20 * Fraction(512 * 2 + 128 + 4, 4) + 23 * Fraction(512 * 2, 128),
            43 * 512 * 2 + 20 * 2 * 2 * (512 + 128) * 4 + 23 * 2 * 512 * 4,
            0,
            0,
            id="deepseek_v4",
        ),
        # the same in 8 bits: 448 bytes, 64 rotary elements in bfloat16 and 8 scales for each latent
        pytest.param(
            DEEPSEEK_4,
            "fp8",
            20 * Fraction(448 + 64 * 2 + 8 + 128 + 4, 4) + 23 * Fraction(448 + 64 * 2 + 8, 128),
            43 * (448 + 64 * 2 + 8) + 20 * 2 * 2 * (512 + 128) * 4 + 23 * 2 * 512 * 4,
            0,
            0,
            id="deepseek_v4 in 8 bits",
        ),
        # layer 1 keeps latents and keys at a rate of 1, layers 3 and 7 at a rate of 2; the others read theirs. Every
        # layer has a window. Layers 3 and 7 have a ring of 8 rows of 2 * 512 float32
        pytest.param(
            DEEPSEEK_41,
            "bf16",
            (1 + 2 * Fraction(1, 2)) * (512 * 2 + 128 + 4),
            8 * 512 * 2,
            0,
            2 * 8 * 2 * 512 * 4,
            id="deepseek_v41",
        ),
        # layers 3, 7, ... (11) keep a latent of 512 without a rotary part, and an indexer's key for each 16 tokens. The
        # ring of 16 tokens holds raw keys and gates of 128 in bfloat16. 34 layers of delta attention, 64 heads of 128
        pytest.param(
            GLM_5_NEXT,
            "bf16",
            11 * (512 * 2 + Fraction(128 + 4, 16)),
            0,
            34 * (3 * 3 * 64 * 128 * 2 + 64 * 128 * 128 * 4),
            11 * 16 * 2 * 128 * 2,
            id="glm5_next",
        ),
        # every 4th of 40 layers: 2 KV heads of 256 and a key of 128 in bfloat16 for each 16 tokens; a ring of 16 raw
        # keys. 30 layers of the delta rule: 3 columns of 2 * 16 * 128 + 32 * 128, matrices of 32 * 128 * 128, and one
        # convolution of (4 - 1) * 3 columns over 4 streams of 2048
        pytest.param(
            QWEN_4,
            "bf16",
            10 * (2 * (256 + 256) * 2 + Fraction(128 * 2, 16)),
            0,
            30 * (3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2) + 9 * 4 * 2048 * 2,
            10 * 16 * 128 * 2,
            id="qwen4_exp",
        ),
        # with three 64-bit positions beside each raw key
        pytest.param(
            {"model_type": "qwen4_exp", "text_config": {**QWEN_4, "rope_parameters": {"mrope_section": [11, 11, 10]}}},
            "bf16",
            10 * (2 * (256 + 256) * 2 + Fraction(128 * 2, 16)),
            0,
            30 * (3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2) + 9 * 4 * 2048 * 2,
            10 * 16 * (128 * 2 + 3 * 8),
            id="qwen4_exp with positions",
        ),
        # 12 full layers: 8 KV heads of 128 and a summary of 256 bytes for each 8 tokens, and a ring of 7 rows of 1024
        # bytes. 36 windowed layers
        pytest.param(
            STEP_5,
            "bf16",
            12 * (8 * (128 + 128) * 2 + Fraction(256, 8)),
            36 * 8 * (128 + 128) * 2,
            0,
            12 * 7 * 1024,
            id="step5",
        ),
        pytest.param(
            {"model_type": "step5_vl", "text_config": {**STEP_5, "sparse_config": {"enabled": False}}},
            "bf16",
            12 * 8 * (128 + 128) * 2,
            36 * 8 * (128 + 128) * 2,
            0,
            0,
            id="step5 without summaries",
        ),
    ],
)
def test_compressed_bytes_match_hand_calculation(
    config: dict[str, object], dtype: str, *, token: Fraction | int, window: int, state: int, ring: int
) -> None:
    model = read_model(config, dtype=dtype)
    assert model.kv_bytes_per_token == token
    assert model.window_bytes_per_token == window
    assert model.state_bytes == state
    assert model.ring_bytes == ring


@pytest.mark.parametrize("config", [DEEPSEEK_4, DEEPSEEK_41, GLM_5_NEXT, QWEN_4, STEP_5])
def test_compressed_model_is_planned_and_managed_in_both_layouts(config: dict[str, object]) -> None:
    model = read_model(config, dtype="bf16")
    for layout in ("natural", "reference"):
        made = plan_of(model, "200GiB", max_model_len=4096, layout=layout)
        assert made.capacity.concurrency >= 1
        assert plan_from_json(plan_to_json(made)) == made
        KVCacheManager(made)


@pytest.mark.parametrize(
    ("config", "token", "window", "state"),
    [
        # as for vLLM, but an indexer's key has 128 bfloat16, and so have the rows of compressors
        pytest.param(
            DEEPSEEK_4,
            20 * Fraction((512 + 128) * 2, 4) + 23 * Fraction(512 * 2, 128),
            43 * 512 * 2 + 20 * 2 * 2 * (512 + 128) * 2 + 23 * 2 * 512 * 2,
            0,
            id="deepseek_v4",
        ),
        # every 4th of 40 layers: keys and values, and a raw key of 128. 30 convolutions keep 4 columns, and matrices
        # are float32
        pytest.param(
            {**QWEN_4, "ple_layer_ids": None},
            10 * (2 * (256 + 256) + 128) * 2,
            0,
            30 * (4 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 4),
            id="qwen4_exp",
        ),
    ],
)
def test_compressed_bytes_in_transformers_layout_match_hand_calculation(
    config: dict[str, object], token: Fraction | int, window: int, state: int
) -> None:
    model = read_model(config, dtype="bf16", backend="transformers")
    assert model.kv_bytes_per_token == token
    assert model.window_bytes_per_token == window
    assert model.state_bytes == state


def test_rates_of_transformers_layout_are_those_of_the_config() -> None:
    """vLLM has blocks for rates of 4 and 128 only."""
    config = {**DEEPSEEK_4, "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8}}
    layers = {one.name.partition(".3.")[2]: one.spec for one in read_model(config, backend="transformers").layers}
    latents = layers["self_attn"]
    assert isinstance(latents, MLAAttentionSpec)
    assert latents.tokens_per_state == 2
    assert layers["self_attn.compressor.state_cache"].mask == (4, None)
    with pytest.raises(ConfigError, match="compress_rates"):
        read_model(config)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (DEEPSEEK_41, r"transformers layout .*only plan this model"),
        (GLM_5_NEXT, r"transformers layout .*only plan this model"),
        (STEP_5, r"transformers layout .*only plan this model"),
        (QWEN_4, "ple_layer_ids"),
        (
            {**QWEN_4, "ple_layer_ids": None, **dict.fromkeys(key for key in QWEN_4 if "indexer" in key)},
            "indexer_n_heads",
        ),
    ],
)
def test_compressed_model_without_a_transformers_layout_is_rejected(config: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_model(config, dtype="bf16", backend="transformers")


def test_deepseek_v4_pages_are_those_of_vllm() -> None:
    """Blocks and pages of vLLM 0.33 for the same fields, with blocks of 256 tokens."""
    specs = {one.name.partition(".3.self_attn")[2]: one.spec for one in read_model(DEEPSEEK_4, block_size=256).layers}
    pages = {name: (spec.block_size, spec.page_size_bytes) for name, spec in specs.items() if name}
    assert pages == {
        ".swa_cache": (64, 64 * 1024),
        ".compressor.state_cache": (4, 4 * 2048 * 4),
        ".indexer.k_cache": (256, 8704),  # 64 * 132 bytes, a multiple of 512
        ".indexer.compressor.state_cache": (4, 4 * 512 * 4),
    }
    small = {one.spec.block_size for one in read_model(DEEPSEEK_4, block_size=16).layers if ".i" in one.name}
    assert small == {128, 4}
    eight = read_model(DEEPSEEK_4, block_size=256, dtype="fp8").layers
    assert {one.spec.page_size_bytes for one in eight if one.name.endswith("self_attn")} == {64 * 584 + 64, 1728}


def test_deepseek_v4_layers_follow_each_form_of_the_field() -> None:
    window, four, many = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    ratios = {"compress_ratios": [0, 4, 128, 4, 0], "num_hidden_layers": 4}
    types = {"layer_types": [window, four, many, four], "num_hidden_layers": 4}
    layers = read_model({**DEEPSEEK_4, **ratios}).layers
    assert layers == read_model({**DEEPSEEK_4, **types}).layers
    assert [sum(one.index == i for one in layers) for i in range(4)] == [1, 5, 3, 5]
    drafting = [one for one in read_model(DEEPSEEK_4, mtp_layers=1).layers if one.index == 43]
    assert [(one.name, one.spec.block_size) for one in drafting] == [("mtp.layers.0.self_attn.swa_cache", 64)]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**DEEPSEEK_4, "compress_ratios": [8] * 43}, "compress_ratios"),
        ({**DEEPSEEK_4, "compress_ratios": [4] * 42}, "compress_ratios"),
        ({**DEEPSEEK_4, "layer_types": ["linear_attention"] * 43}, "linear_attention"),
        ({**DEEPSEEK_4, "compress_rate_csa": 8}, "compress_rates"),
        ({**DEEPSEEK_4, "compress_rates": {"compressed_sparse_attention": 2}}, "compress_rates"),
        ({**V41, "model_type": "deepseek_v41", "compress_ratios": None}, "compress_ratios"),
        ({**V41, "model_type": "deepseek_v41", "compress_ratios": [4] * 8}, "compress_ratios"),
        ({**V41, "model_type": "deepseek_v41", "kv_source_layer_ids": None}, "kv_source_layer_ids"),
        ({**V41, "model_type": "deepseek_v41", "kv_source_layer_ids": [0, 1, 3, 7]}, "layer 0 of kv_source_layer_ids"),
        ({**V41, "model_type": "deepseek_v41", "kv_source_layer_ids": [3, 7]}, "layer 1 has no layer"),
        ({**V41, "model_type": "deepseek_v41", "kv_source_layer_ids": [1]}, "layer 3 has rate 2 .* layer 1 at rate 1"),
        ({**V41, "model_type": "deepseek_v41", "index_source_layer_ids": []}, "index_source_layer_ids"),
        ({**GLM_5_NEXT, "index_topk_freq": 2}, "indexer_types"),
        ({**GLM_5_NEXT, "index_topk_pattern": "FS" * 22 + "F"}, "indexer_types"),
        ({**GLM_5_NEXT, "indexer_types": ["full"] * 44 + ["shared"]}, "indexer_types"),
        ({**GLM_5_NEXT, "index_kpool": 1}, "index_kpool"),
        ({**QWEN_4, "indexer_budget": None}, "indexer_budget"),
        ({**QWEN_4, "indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({**QWEN_4, "ple_layer_ids": [4]}, "ple_layer_ids"),
        ({**QWEN_4, "layer_types": ["sliding_attention"] * 40}, "sliding_attention"),
        ({**STEP_5, "layer_types": None}, "layer_types"),
        ({**STEP_5, "sparse_config": None}, "sparse_config"),
        ({**STEP_5, "sparse_config": {"region_block_size": 16}}, "region_block_size"),
        ({**STEP_5, "sparse_config": {"apply_to_layer_types": ["sliding_attention"]}}, "apply_to_layer_types"),
        ({**STEP_5, "sparse_config": {"compression_method": "mean"}}, "compression_method"),
        ({**STEP_5, "step5_sparse_config": {"enabled": True}}, "step5_sparse_config"),
        ({**STEP_5, "head_dim": None}, "head_dim"),
    ],
)
def test_compressed_config_with_an_open_field_is_rejected(config: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        read_model(config)


def test_deepseek_v41_names_the_layers_that_read_another() -> None:
    layers = {one.name: one for one in read_model(DEEPSEEK_41).layers}
    assert layers["model.layers.3.self_attn"].read_by == ("model.layers.4.self_attn", "model.layers.5.self_attn")
    keys = layers["model.layers.3.self_attn.indexer.k_cache"]
    assert keys.read_by == ("model.layers.5.self_attn.indexer.k_cache",)
    assert isinstance(keys.spec, MLAAttentionSpec)
    assert (keys.spec.cache_role, keys.spec.tokens_per_state) == (SparseCacheRole.INDEXER, 2)
    assert {one.what for one in read_model(DEEPSEEK_41).assumptions} == {"parameters"}
    (assumed,) = (one for one in read_model(DEEPSEEK_41, dtype="fp8").assumptions if one.what != "parameters")
    assert assumed.field.startswith("Blackwell's kernels keep 528")
    drafts = read_model(DEEPSEEK_41, num_speculative_tokens=7).layers
    assert {one.spec.block_size for one in drafts if one.name.endswith("state_cache")} == {16}  # 7 + 2 rows


def test_rings_have_room_for_drafts() -> None:
    rows = {
        "tail_cache": (GLM_5_NEXT, {0: 16, 1: 32, 16: 32, 17: 64}),
        "raw_key_cache": (QWEN_4, {0: 16, 1: 32, 16: 32, 17: 48}),
        "csa_tail_ring": (STEP_5, {0: 7, 3: 10}),
    }
    for name, (config, capacities) in rows.items():
        for drafts, capacity in capacities.items():
            layers = read_model(config, num_speculative_tokens=drafts).layers
            assert {one.spec.block_size for one in layers if one.name.endswith(name)} == {capacity}, name


def test_drafting_layers_of_step_models_are_rejected() -> None:
    for config in (STEP_3, STEP_5):
        with pytest.raises(ConfigError, match="types of their own"):
            read_model(config, mtp_layers=1)


def test_glm_5_next_drafting_layer_has_an_indexer_and_a_ring() -> None:
    layers = read_model({**GLM_5_NEXT, "num_nextn_predict_layers": 1}, mtp_layers=1).layers
    assert [one.name.removeprefix("mtp.layers.0.self_attn") for one in layers if one.name.startswith("mtp")] == [
        "",
        ".indexer.k_cache",
        ".indexer.tail_cache",
    ]
