"""Model sources other than folders with safetensors: GGUF files and the cache of the hub."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_support import EngineFactory, greedy, shared_prompts
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridkv.errors import ConfigError
from hybridkv.runner import byte_tokenizer, load, tiny_model
from hybridkv.runner.chat import chat_ids
from hybridkv.runner.load import ModelFiles, files_of

LOADING = sys.modules["hybridkv.runner.load"]  # the package exports a function of that name
PIECE = "ab"
"""A token behind the bytes and the end: transformers makes no tokenizer without merges."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def small_model() -> Qwen2ForCausalLM:
    config = {**tiny_model("qwen2").config.to_dict(), "vocab_size": 258}
    torch.manual_seed(1)
    made = Qwen2ForCausalLM(Qwen2Config(**config))
    with torch.no_grad():
        for one in made.parameters():
            one.mul_(3)  # tokens that differ
    return made


def write_gguf(path: Path, model: Qwen2ForCausalLM, *, without: str | None = None) -> None:
    gguf: Any = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    config, tokenizer = model.config, byte_tokenizer()
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokenizer.convert_ids_to_tokens(list(range(257))), PIECE])
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges([" ".join(PIECE)])
    writer.add_eos_token_id(256)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weights in model.state_dict().items():
        owner, kind = name.rsplit(".", 1)
        layer = ""
        if owner.startswith("model.layers."):
            _, _, number, owner = owner.split(".", 3)
            layer = f"blk.{number}."
        written = f"{layer}{NAMES[owner]}.{kind}"
        if written != without:
            writer.add_tensor(written, weights.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_generates_tokens_of_its_weights(tmp_path: Path, make_engine: EngineFactory) -> None:
    model, prompts = small_model(), shared_prompts(3, 1)
    write_gguf(tmp_path / "small.gguf", model)
    model.save_pretrained(tmp_path / "saved")
    byte_tokenizer().save_pretrained(tmp_path / "saved")
    expected = make_engine(load(tmp_path / "saved"), prompts, 12).generate(prompts, greedy(12))
    for source in (tmp_path / "small.gguf", str(tmp_path)):
        loaded = load(source)
        assert (loaded.name, loaded.eos_token_ids, loaded.model.dtype) == (str(source), (256,), torch.float32)
        done = make_engine(loaded, prompts, 12).generate(prompts, greedy(12))
        assert [one.token_ids for one in done] == [one.token_ids for one in expected]
        assert chat_ids(loaded, [{"role": "user", "content": "cab"}])[:9] == [*b"user: c", 257, ord("\n")]
        assert not hasattr(loaded.model.config, "quantization_config")


def test_invalid_gguf_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(path, small_model(), without="blk.1.ffn_up.weight")
    with pytest.raises(ConfigError, match=r"small.gguf lacks 1 of the weights .*model.layers.1.mlp.up_proj.weight"):
        load(path)
    path.write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match=f"cannot load the model in {path}: "):
        load(path)


@pytest.mark.parametrize("missing", [("gguf",), ("gguf", "accelerate")])
def test_gguf_file_without_its_packages_names_the_extra(
    missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.gguf").touch()
    monkeypatch.setattr(
        sys.modules["hybridkv.runner.load"], "find_spec", lambda name: None if name in missing else object()
    )
    words = ", ".join(missing)
    with pytest.raises(ConfigError, match=rf"missing: {words}\): pip install 'hybridkv\[runner,gguf\]'"):
        load(tmp_path)


def test_model_file_of_a_folder_is_found_or_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOADING, "find_spec", lambda _: object())
    with pytest.raises(ConfigError, match=r"has no config.json and no .gguf file"):
        files_of(str(tmp_path))
    (tmp_path / "one.gguf").touch()
    assert files_of(str(tmp_path)) == ModelFiles(tmp_path, "one.gguf")
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ConfigError, match=r"has 2 .gguf files: name one, such as .*one.gguf"):
        files_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{}", "utf-8")
    assert files_of(str(tmp_path)) == ModelFiles(tmp_path)
    assert files_of(str(tmp_path / "other.gguf")) == ModelFiles(tmp_path, "other.gguf")


# -- the hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub without a network; where a snapshot of ORG/NAME would be."""
    from huggingface_hub import constants  # noqa: PLC0415  # what the client asks at each call

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--org--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40, "utf-8")
    return model / "snapshots" / ("0" * 40)


def test_hub_name_is_loaded_from_the_local_cache(hub: Path, make_engine: EngineFactory) -> None:
    tiny, prompts = load("tiny:llama"), shared_prompts(2, 1)
    tiny.model.save_pretrained(hub)
    tiny.tokenizer.save_pretrained(hub)
    loaded = load("org/name")
    assert loaded.name == "org/name"
    done = make_engine(loaded, prompts, 6).generate(prompts, greedy(6))
    assert [one.token_ids for one in done] == [
        one.token_ids for one in make_engine(tiny, prompts, 6).generate(prompts, greedy(6))
    ]


def test_hub_model_without_safetensors_is_rejected(hub: Path) -> None:
    tiny = load("tiny:llama")
    tiny.model.save_pretrained(hub)
    (hub / "model.safetensors").unlink()
    (hub / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"has no \*.safetensors"):
        load("org/name")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/other", "as a name on the hub it is not in the local cache and cannot be fetched: "),
        ("org/name", "not in the local cache and cannot"),  # known, but no file of it is there
        ("a/b/c", "neither a folder nor tiny:NAME, nor a .gguf file or a name on the hub"),
        ("../name", "neither a folder nor tiny:NAME, nor"),
        ("no.gguf", "neither a folder nor tiny:NAME, nor"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_unknown_model_name_is_rejected(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--model '{name}' is neither a folder nor tiny:NAME") as raised:
        load(name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("code", "fetched"), [(False, False), (True, True)])
def test_code_from_the_hub_is_fetched_only_if_trusted(
    code: bool, fetched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.extend((name, allow_patterns))
        (tmp_path / "config.json").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert files_of("org/name", code=code) == ModelFiles(tmp_path)
    name, patterns = asked
    assert (name, "*.py" in patterns, "*.safetensors" in patterns) == ("org/name", fetched, True)
    assert not any("bin" in one or "pt" in one for one in patterns)
