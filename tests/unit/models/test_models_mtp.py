"""Multi-token prediction layers in a plan: left out, or with caches of their own as vLLM's draft layers have them."""

import pytest

from assumed import plan_of
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner import plan, plan_from_json, plan_to_json
from hybridkv.specs import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

MLA = 576 * 2
INDEXER = 132


@pytest.mark.parametrize(
    ("name", "asked", "each"),
    [
        ("deepseek-v3", 1, MLA),
        ("deepseek-v3.2", 1, MLA + INDEXER),
        ("glm-4.5", 1, 2 * 8 * 128 * 2),
        ("glm-5.2", 1, MLA + INDEXER),
        ("qwen3-next-80b-a3b", 1, 2 * 2 * 256 * 2),
        ("qwen3.5-27b", 1, 2 * 4 * 256 * 2),
        ("mimo-7b", 1, 2 * 8 * 128 * 2),
        ("minimax-m2.5", 3, 2 * 8 * 128 * 2),
        ("nemotron-3-super-120b-a12b", 1, 2 * 2 * 128 * 2),
    ],
)
def test_mtp_layer_keeps_its_own_tokens(name: str, asked: int, each: int) -> None:
    plain, drafting = read_model(name), read_model(name, mtp_layers=asked)
    assert drafting.kv_bytes_per_token - plain.kv_bytes_per_token == asked * each
    assert drafting.layers[: len(plain.layers)] == plain.layers
    assert (drafting.state_bytes, drafting.window_bytes_per_token) == (plain.state_bytes, plain.window_bytes_per_token)
    added = drafting.layers[len(plain.layers) :]
    assert {one.name.removesuffix(".indexer") for one in added} == {f"mtp.layers.{i}.self_attn" for i in range(asked)}
    assert all(isinstance(one.spec, FullAttentionSpec | MLAAttentionSpec) for one in added)
    assert min(one.index for one in added) > max(one.index for one in plain.layers)
    (said,) = (one for one in drafting.read_from if "multi-token" in one.what)
    assert said.value.startswith(f"{asked}, each as layer ")
    # a config has no more of them than it says
    with pytest.raises(ConfigError, match=f"{asked + 1} multi-token prediction layers were asked for"):
        read_model(name, mtp_layers=asked + 1)


def test_mtp_layer_has_the_window_of_its_model() -> None:
    model = read_model("mimo-v2-flash", mtp_layers=1, fields={"num_nextn_predict_layers": 3})
    spec = model.layers[-1].spec
    assert isinstance(spec, SlidingWindowSpec)
    assert (spec.sliding_window, spec.num_kv_heads) == (128, 8)


def test_mtp_layers_of_model_without_them_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"no field says that it has any .*--set num_nextn_predict_layers=N"):
        read_model("llama-3-8b", mtp_layers=1)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers says 0"):
        read_model("kimi-k2", mtp_layers=1)
    told = read_model("llama-3-8b", mtp_layers=2, fields={"num_nextn_predict_layers": 2})
    assert told.kv_bytes_per_token == 34 * 2 * 8 * 128 * 2
    with pytest.raises(ConfigError, match="mtp_layers must not be negative"):
        read_model("glm-4.5", mtp_layers=-1)
    windows_alone = {"num_nextn_predict_layers": 1}
    with pytest.raises(ConfigError, match="no attention layer"):
        read_model("phi-4-mini", mtp_layers=1, fields=windows_alone)


@pytest.mark.parametrize("layout", ["natural", "reference"])
def test_mtp_layers_in_a_plan_round_trip(layout: str) -> None:
    with_them = plan_of(read_model("qwen3.5-27b", mtp_layers=1), "80GiB", layout=layout)
    without = plan(read_model("qwen3.5-27b"), "80GiB", layout=layout)
    assert plan_from_json(plan_to_json(with_them)) == with_them
    assert sum(len(one.layer_names) for one in with_them.config.groups) == 65
    assert with_them.capacity.concurrency < without.capacity.concurrency
    assert "mtp.layers.0.self_attn" in {name for one in with_them.config.groups for name in one.layer_names}


def test_mtp_layers_left_out_are_reported() -> None:
    said = {one.what: one.value for one in read_model("glm-4.5").read_from}
    assert said["multi-token prediction layers"] == "1 left out"
