"""Codes with scales in the page: bytes by hand, layers that are left out, documents, and errors (docs/design/0037)."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cli_support import error, run
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner import plan, plan_from_json, plan_to_json
from hybridkv.spec_fields import Quantization
from hybridkv.specs import AttentionSpec, CircularBufferSpec, FullAttentionSpec, MLAAttentionSpec

HEADS = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="int8", quantization=Quantization.INT8)
LATENT = MLAAttentionSpec(block_size=16, head_size=576, dtype="uint8", quantization=Quantization.FP8)
FORMS = [one.value for one in Quantization]


def test_bytes_of_a_token_by_hand() -> None:
    # a key and a value of 64 codes in 2 heads, and two float32 scales in each
    assert HEADS.content_bytes == 16 * 2 * (64 + 4 + 64 + 4)
    assert LATENT.content_bytes == 16 * (576 + 8)
    int4 = replace(HEADS, dtype="uint8", quantization=Quantization.INT4, head_size_v=32)
    assert int4.content_bytes == 16 * 2 * (64 // 2 + 4 + 32 // 2 + 4)
    # NVFP4 has one byte of scale for 16 codes of half a byte
    nvfp4 = replace(HEADS, dtype="uint8", quantization=Quantization.NVFP4)
    assert nvfp4.content_bytes == 16 * 2 * 2 * (64 // 2 + 64 // 16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(HEADS, quantization="int2"), "unknown quantization 'int2': use one of int8_per_token_head, "),  # type: ignore[arg-type]
        (lambda: replace(HEADS, dtype="bfloat16"), "codes of int8_per_token_head are int8, not bfloat16"),
        (lambda: replace(HEADS, state_content_bytes=72), "drop state_content_bytes and num_head_slots"),
        (
            lambda: replace(HEADS, dtype="uint8", quantization="int4_per_token_head", head_size_v=63),  # type: ignore[arg-type]
            "a multiple of 2 elements, got 63",
        ),
        (
            lambda: replace(HEADS, dtype="uint8", quantization="nvfp4", head_size=72),  # type: ignore[arg-type]
            "a multiple of 16 elements, got 72",
        ),
        (lambda: replace(LATENT, quantization="nvfp4"), "is for keys and values, and this layer keeps latents"),  # type: ignore[arg-type]
        (lambda: replace(LATENT, cache_role="indexer"), "keys of an indexer have a form of their own"),  # type: ignore[arg-type]
        (
            lambda: CircularBufferSpec(
                block_size=8, num_kv_heads=1, head_size=64, dtype="int8", quantization=Quantization.INT8
            ),
            "a ring holds raw keys",
        ),
    ],
)
def test_wrong_quantization_is_rejected_with_the_fix(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("layout", ["reference", "natural"])
@pytest.mark.parametrize("form", FORMS)
def test_plan_of_quantized_model_round_trips(form: str, layout: str) -> None:
    made = plan(read_model("gemma-2-2b", dtype=form, dtype_skip_layers=["sliding_window", "1"]), "4GiB", layout=layout)
    text = plan_to_json(made)
    assert plan_from_json(text) == made
    forms = {one["quantization"] for one in json.loads(text)["model"]["specs"] if "quantization" in one}
    assert forms == {form}
    assert "quantization" not in plan_to_json(plan(read_model("gemma-2-2b"), "4GiB", layout=layout))


def quantized(model: str, **given: Any) -> dict[int, bool]:  # noqa: ANN401 - options of read_model
    made = read_model(model, dtype="int8_per_token_head", **given)
    assert made.dtype == "int8_per_token_head"
    specs = {layer.index: layer.spec for layer in made.layers if isinstance(layer.spec, AttentionSpec)}
    plain = {spec.dtype for spec in specs.values() if spec.quantization is None}
    assert plain <= {"bfloat16"}
    return {index: spec.quantization is Quantization.INT8 for index, spec in specs.items()}


def test_skipped_layers_keep_the_dtype_of_the_weights() -> None:
    assert quantized("gemma-2-2b") == dict.fromkeys(range(26), True)
    # layers 0, 2, .. of Gemma 2 have a window
    assert quantized("gemma-2-2b", dtype_skip_layers=["sliding_window", "3"]) == {
        index: index % 2 == 1 and index != 3 for index in range(26)
    }
    # layer 3 of every 4 attends, the others keep states
    assert quantized("qwen3-next-80b-a3b", dtype_skip_layers=["3"]) == {i: i != 3 for i in range(3, 48, 4)}
    fp8 = read_model("gemma-2-2b", dtype="fp8", dtype_skip_layers=["0"]).layers
    assert [layer.spec.dtype for layer in fp8[:2]] == ["bfloat16", "fp8"]  # type: ignore[attr-defined]


def test_indexer_and_states_keep_their_own_form() -> None:
    plain, made = read_model("deepseek-v3.2"), read_model("deepseek-v3.2", dtype="fp8_per_token_head")
    kept = [one == other for one, other in zip(plain.layers, made.layers, strict=True)]
    assert kept == [False, True] * 61  # latents and indexer of each layer
    states = read_model("qwen3-next-80b-a3b", dtype="int4_per_token_head")
    assert states.state_bytes == read_model("qwen3-next-80b-a3b").state_bytes


def test_model_that_cannot_be_quantized_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match="no layer '26' with keys and values that could be left out"):
        read_model("gemma-2-2b", dtype="int8_per_token_head", dtype_skip_layers=["26"])
    with pytest.raises(ConfigError, match="no layer of gemma-2-2b keeps keys and values"):
        read_model("gemma-2-2b", dtype="nvfp4", dtype_skip_layers=[str(index) for index in range(26)])
    with pytest.raises(ConfigError, match=r"layer model\.layers\.0.* of deepseek-v3: nvfp4 is for keys and values"):
        read_model("deepseek-v3", dtype="nvfp4")
    with pytest.raises(ConfigError, match="dtype_skip_layers must be text"):
        read_model("gemma-2-2b", dtype="nvfp4", dtype_skip_layers=[1])  # type: ignore[list-item]
    for dtype in (None, "bf16"):
        with pytest.raises(ConfigError, match=r"no effect without a quantization: give dtype \(--kv-dtype\), too"):
            read_model("gemma-2-2b", dtype=dtype, dtype_skip_layers=["sliding_window"])


def test_plan_command_shows_quantization_and_skipped_layers() -> None:
    options = ("plan", "gemma-2-2b", "--memory", "4GiB", "--kv-dtype", "int8_per_token_head")
    shown = run(*options, "--kv-dtype-skip-layers", "sliding_window").stdout
    assert "int8_per_token_head cache" in shown
    assert "keys and values not quantized sliding_window: dtype_skip_layers (given)" in shown
    # 13 full layers, 4 KV heads of 256: 4 * (2 * 256 + 8) bytes each
    assert "26.41 KiB" in shown
    assert "no layer '99'" in error(*options, "--kv-dtype-skip-layers", "99")
    assert "drop --kv-dtype-skip-layers" in error("plan", "--plan", "x.json", "--kv-dtype-skip-layers", "0")
