"""MiniMax-Text-01 and -M1, Ling and Ring linear: which layers keep a matrix a head, and how large it is."""

import json
from pathlib import Path

import pytest

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models import known_model, read_model
from hybridkv.models.reading import CONFIG
from hybridkv.planner import plan, plan_to_json
from hybridkv.specs import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from hybridkv.units import GiB

GOLDEN = Path(__file__).parents[2] / "golden"
CONFIGS: dict[str, dict[str, object]] = json.loads(Path(__file__).with_name("hand_configs.json").read_text("utf-8"))
MINIMAX_M1, RING_MINI, LING_3_FLASH = (CONFIGS[one] for one in ("minimax-m1", "ring-mini-linear-2.0", "ling-3.0-flash"))
"""As in MiniMaxAI/MiniMax-M1-80k, which names no dtype, and inclusionAI/Ring-mini-linear-2.0.

Of inclusionAI/Ling-3.0-flash the fields that its cache depends on.
"""


@pytest.mark.parametrize(
    ("name", "config", "memory"), [("minimax-m1", MINIMAX_M1, 640 * GiB), ("ring-mini-linear-2.0", RING_MINI, 40 * GiB)]
)
def test_lightning_plan_matches_the_golden_file(name: str, config: dict[str, object], memory: int) -> None:
    made = plan(read_model({**config, "_name_or_path": name}), memory, layout="reference")
    assert plan_to_json(made) == (GOLDEN / f"{name}.plan.json").read_text("utf-8")


@pytest.mark.parametrize(
    ("config", "token", "state", "full"),
    [
        # 2 * KV heads * width * 2 bytes for each layer of softmax; heads * width * width * 2 bytes for each other one
        (MINIMAX_M1, 10 * 2 * 8 * 128 * 2, 70 * 64 * 128 * 128 * 2, range(7, 80, 8)),
        ({**MINIMAX_M1, "model_type": "minimax_text_01"}, 40_960, 146_800_640, range(7, 80, 8)),
        (RING_MINI, 4 * 2 * 4 * 128 * 2, 16 * 16 * 128 * 128 * 2, range(4, 20, 5)),
        # 22 layers: the two behind the last group of five are full attention
        ({**RING_MINI, "num_hidden_layers": 22}, 6 * 2048, 16 * 16 * 128 * 128 * 2, (4, 9, 14, 19, 20, 21)),
        # a latent of 512 and 64; matrices in float32, and 3 columns of queries, keys and values
        (LING_3_FLASH, 7 * 576 * 2, 35 * (32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2), range(5, 42, 6)),
    ],
)
def test_lightning_bytes_match_hand_calculation(
    config: dict[str, object], token: int, state: int, full: tuple[int, ...]
) -> None:
    model = read_model(config)
    assert model.kv_bytes_per_token == token
    assert model.window_bytes_per_token == 0
    assert model.state_bytes == state
    attention = [one.index for one in model.layers if isinstance(one.spec, FullAttentionSpec | MLAAttentionSpec)]
    assert attention == list(full)
    assert model.depth == config["num_hidden_layers"]


def test_minimax_config_in_both_forms_gives_one_model() -> None:
    """transformers' form, with layer_types, and that of the checkpoint's own code."""
    known = read_model("minimax-text-01", dtype="bf16")
    own = read_model({**MINIMAX_M1, "model_type": "minimax_text_01"})
    assert (own.layers, own.parameters, own.active_parameters) == (
        known.layers,
        known.parameters,
        known.active_parameters,
    )
    assert own.max_model_len == 10_240_000
    assert any(fact.field == "attn_type_list" and fact.source == CONFIG for fact in own.read_from)
    split = read_model(MINIMAX_M1, tp=8)
    assert {one.spec.shapes for one in split.layers if isinstance(one.spec, MambaSpec)} == {((8, 128, 128),)}
    with pytest.raises(ConfigError, match="tp=3"):
        read_model(MINIMAX_M1, tp=3)


def test_lightning_parameters_match_the_model_cards() -> None:
    flash = {"hidden_size": 4096, "num_hidden_layers": 32, "layer_group_size": 8, "num_attention_heads": 32}
    flash |= {"moe_intermediate_size": 1024, "moe_shared_expert_intermediate_size": 1024, "intermediate_size": 9216}
    assert read_model(MINIMAX_M1).parameters == pytest.approx(456e9, rel=0.01)
    assert read_model(RING_MINI).parameters == pytest.approx(16.4e9, rel=0.01)
    assert read_model({**RING_MINI, **flash}).parameters == pytest.approx(104e9, rel=0.01)


def test_lightning_state_dtype_follows_the_backend() -> None:
    """vLLM's calculator takes the dtype of the model; the checkpoint's own recurrence of Ring runs in float32."""
    for config, wide in ((MINIMAX_M1, "bfloat16"), (RING_MINI, "float32")):
        for backend, dtype in (("vllm", "bfloat16"), ("transformers", wide)):
            layers = read_model(config, backend=backend).layers
            assert {one.spec.dtypes for one in layers if isinstance(one.spec, MambaSpec)} == {(dtype,)}
    states = [one.spec for one in read_model(RING_MINI, state_dtype="fp32").layers if isinstance(one.spec, MambaSpec)]
    assert {one.dtypes for one in states} == {("float32",)}


@pytest.mark.parametrize("codes", [[0, 1] * 20, [0, 2] * 40, ["0", "1"] * 40])
def test_lightning_attention_code_that_is_unknown_is_rejected(codes: list[object]) -> None:
    with pytest.raises(ConfigError, match="attn_type_list"):
        read_model({**MINIMAX_M1, "attn_type_list": codes})


def test_lightning_fields_in_other_model_types_are_rejected() -> None:
    known = dict(known_model("minimax-m2").config)
    layers = known["num_hidden_layers"]
    assert isinstance(layers, int)
    # MiniMax-M2's files have the list, too, with nothing but softmax in it
    assert read_model({**known, "attn_type_list": [1] * layers}).layers == read_model(known).layers
    with pytest.raises(UnsupportedModelError, match=r"layers 0-60 \(linear_attention\)"):
        read_model({**known, "attn_type_list": [0] * (layers - 1) + [1]})
    with pytest.raises(UnsupportedModelError, match="layer_group_size is 5"):
        read_model({**RING_MINI, "model_type": "bailing_moe_next"})
    with pytest.raises(ConfigError, match="--set layer_group_size=N"):
        read_model({key: value for key, value in RING_MINI.items() if key != "layer_group_size"})


def test_kimi_k3_experts_count_their_narrower_width() -> None:
    """896 experts of 3 matrices of 3,584 x 3,072, not of 7,168, and two projections in each layer of experts."""
    base = dict(known_model("kimi-linear-48b-a3b").config)
    wide = {"hidden_size": 7168, "moe_intermediate_size": 3072, "num_experts": 896}
    layers = base["num_hidden_layers"]
    assert isinstance(layers, int)
    fewer = (
        read_model({**base, **wide}).parameters
        - read_model({**base, **wide, "routed_expert_hidden_size": 3584}).parameters
    )
    assert fewer == (layers - 1) * (896 * 3 * 3584 * 3072 - 2 * 7168 * 3584)


def test_lightning_golden_files_name_these_models() -> None:
    for name, tokens in (("minimax-m1", 10_240_000), ("ring-mini-linear-2.0", 131_072)):
        assert json.loads((GOLDEN / f"{name}.plan.json").read_text("utf-8"))["limits"]["max_model_len"] == tokens
