"""Models loaded from folders, and the probe that compares a model with its plan."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runner_support import MODELS, EngineFactory, greedy, loaded_model, shared_prompts
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models import Layer, read_model
from hybridkv.runner import TINY_ENCODER_DECODERS, Engine, byte_tokenizer, load, tiny_model, wrap
from hybridkv.runner.attention.formulas import eager_function
from hybridkv.runner.inputs import Given
from hybridkv.runner.probe import page_layout, planner_model, probe, require_runnable
from hybridkv.specs import CircularBufferSpec, EncoderOnlyAttentionSpec, MLAAttentionSpec


@pytest.mark.parametrize("name", MODELS)
def test_saved_model_generates_the_same_tokens(name: str, tmp_path: Path, make_engine: EngineFactory) -> None:
    tiny, prompts = loaded_model(name), shared_prompts(3, 1)
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    expected = make_engine(tiny, prompts, 12).generate(prompts, greedy(12))
    saved = load(str(tmp_path))
    assert saved.eos_token_ids == tiny.eos_token_ids == (256,)
    done = make_engine(saved, prompts, 12).generate(prompts, greedy(12))
    assert [(one.token_ids, one.text) for one in done] == [(one.token_ids, one.text) for one in expected]


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_model_uses_half_the_page_bytes(name: str, make_engine: EngineFactory) -> None:
    whole, prompts = loaded_model(name), shared_prompts(2, 1)
    half = wrap(tiny_model(name).to(torch.bfloat16), whole.tokenizer, "half")
    engine = make_engine(half, prompts, 8)
    assert engine.plan.capacity.block_bytes * 2 == make_engine(whole, prompts, 8).plan.capacity.block_bytes
    engine = make_engine(half, prompts, 8)
    assert [len(one.token_ids) for one in engine.generate(prompts, greedy(8))] == [8, 8]


def test_plan_that_differs_from_the_probed_model_is_rejected() -> None:
    model = tiny_model("llama")
    planned = planner_model(model, block_size=16)
    fewer = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "num_key_value_heads": 1}))
    with pytest.raises(ConfigError, match=r"the plan has 4096 bytes a page, but a forward caches 2048"):
        page_layout(planned, probe(fewer))
    shorter = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"the plan has layers \[0, 1, 2\], but a forward caches in layers \[0, 1\]"):
        page_layout(planned, probe(shorter))


def test_byte_tokenizer_decodes_its_own_encoding() -> None:
    tokenizer = byte_tokenizer()
    for text in ("plain", " lead and trail ", "Zürich, 東京, 🦙", "\n\t\x00", "".join(map(chr, range(32, 400)))):
        ids = tokenizer.encode(text)
        assert ids == list(text.encode("utf-8"))
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([72, 105, tokenizer.eos_token_id], skip_special_tokens=True) == "Hi"


def test_model_with_dynamic_rope_is_rejected(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="rope_type 'dynamic'"):
        load(str(tmp_path))


def test_folders_without_a_loadable_model_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor tiny:NAME"):
        load(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="use tiny:llama, tiny:qwen2"):
        load("tiny:gpt9")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load(str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_model("llama").config.to_dict()), "utf-8")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="cannot load the model"):
        load(str(tmp_path))


def test_layers_without_a_backend_are_rejected() -> None:
    spec = EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")
    planned = planner_model(tiny_model("llama"), block_size=16)
    mixed = replace(planned, layers=(*planned.layers, Layer("odd", spec, 3), Layer("odder", spec, 4)))
    with pytest.raises(UnsupportedModelError, match=r"odd \(EncoderOnlyAttentionSpec\) and 1 more of 5 layers"):
        require_runnable(mixed)
    latent = MLAAttentionSpec(block_size=16, head_size=8, dtype="uint8", state_content_bytes=24)
    with pytest.raises(UnsupportedModelError, match=r"the runner of .* does not support packed states"):
        require_runnable(replace(planned, layers=(*planned.layers, Layer("packed", latent, 3))))
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=8, dtype="float32")
    with pytest.raises(UnsupportedModelError, match=r"ring \(CircularBufferSpec\) of 4 layers cannot run"):
        require_runnable(replace(planned, layers=(*planned.layers, Layer("ring", ring, 3))))


@pytest.mark.parametrize("name", TINY_ENCODER_DECODERS)
def test_saved_encoder_decoder_generates_the_same_tokens(name: str, tmp_path: Path, make_engine: EngineFactory) -> None:
    tiny = loaded_model(name)
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    rng = np.random.default_rng(1)
    heard: list[Given] = ["some text" if name == "t5" else rng.standard_normal((8, 48)).astype(np.float32)]
    expected = make_engine(tiny, [[0]], 12).generate([""], greedy(12), encoders=heard)
    saved = load(str(tmp_path))
    done = make_engine(saved, [[0]], 12).generate([""], greedy(12), encoders=heard)
    assert [one.prompt_token_ids for one in done] == [tuple(tiny.decoder_start)]
    assert [(one.token_ids, one.text) for one in done] == [(one.token_ids, one.text) for one in expected]


def test_checkpoint_with_missing_or_misshapen_weights_is_rejected(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    kept = weights.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of the weights .*model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(str(tmp_path))
    save_file({**weights, "model.layers.1.self_attn.k_proj.weight": kept[:-1]}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="has in another shape 1 of the weights"):
        load(str(tmp_path))


def test_attention_without_an_eager_function_is_rejected() -> None:
    class Odd(torch.nn.Module):
        layer_idx, is_causal = 0, True

    with pytest.raises(UnsupportedModelError, match="has no eager_attention_forward"):
        eager_function(Odd())


@pytest.mark.parametrize("number", ["float", "int"])
def test_quantized_cache_that_is_not_applied_is_logged(number: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    wrap(model)
    assert not caplog.records
    scheme = {"num_bits": 8, "type": number, "strategy": "tensor", "dynamic": False, "symmetric": True}
    model.config.quantization_config = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    with Engine(model, memory="2MiB", max_model_len=128) as engine:
        assert engine.plan.model.dtype == "float32"
    (message,) = caplog.messages
    assert "kv_cache_scheme" in message
    assert message.endswith("the pages hold them in the model's dtype, float32")


def test_model_with_a_config_that_the_planner_rejects_loads(tmp_path: Path) -> None:
    """The planner needs an option for this cache scheme. The engine ignores it and keeps the dtype of the model."""
    tiny_model("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["compression_config"] = {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UnsupportedModelError, match="--kv-dtype"):
        read_model(tmp_path)
    assert load(str(tmp_path)).model.dtype == torch.float32
