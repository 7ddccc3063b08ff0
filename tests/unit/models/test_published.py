"""The public models known by name: what they are called, where they were read, sizes against independent numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from assumed import plan_of
from hybridkv.errors import ConfigError
from hybridkv.models import known_model, known_models, read_model
from hybridkv.models.compressed import COMPRESSED
from hybridkv.planner.plan import padding_of
from hybridkv.specs import Keeps

KNOWN = known_models()
NAMES = [one.name for one in KNOWN]


def test_published_models_include_current_families() -> None:
    assert len(NAMES) >= 60
    families = (
        *("qwen2.5-7b", "qwen2.5-vl", "qwen3-8b", "qwen3-30b-a3b", "qwen3-vl", "qwen3-next", "qwen3-coder", "qwen3.5"),
        *("llama-3-", "llama-3.1", "llama-3.2", "llama-3.3", "llama-4", "gemma-2", "gemma-3-", "gemma-3n", "gemma-4"),
        *("gpt-oss-20b", "gpt-oss-120b", "deepseek-v3.2", "deepseek-v4", "deepseek-r1", "kimi-k2", "kimi-linear"),
        *("glm-4.5", "glm-4.6", "glm-5", "minimax-m2", "minimax-text-01", "mistral-7b", "ministral-3", "mixtral"),
        *("phi-4", "olmo-3", "granite-4.0-h", "nemotron-3", "falcon-h1", "lfm2", "jamba", "smollm3", "whisper", "t5"),
    )
    assert [one for one in families if not any(name.startswith(one) for name in NAMES)] == []


@pytest.mark.parametrize("known", KNOWN, ids=NAMES)
def test_published_model_names_its_source(known: object) -> None:
    one = known_model(str(getattr(known, "name", "")))
    assert re.fullmatch(r"https://huggingface\.co/[\w.-]+/[\w.-]+/blob/main/config\.json", one.source)
    assert one.read_in
    assert one.title
    # what was not found in a copy is said; nothing else is left open
    assert one.verified == ("NOT verified" not in one.verification)
    assert one.name == one.name.lower()
    assert {"model_type", "architectures"} <= one.config.keys()


def test_published_model_is_found_by_hub_name_in_any_case() -> None:
    for one in KNOWN:
        organisation, _, model = one.hub.partition("/")
        for name in (one.name, one.name.upper(), one.hub, one.hub.lower(), model):
            assert known_model(name) == one, name
        assert organisation
        assert read_model(one.hub).name == one.name
    assert known_model("Qwen/Qwen3-8B").name == "qwen3-8b"
    with pytest.raises(ConfigError, match="did you mean qwen3-8b"):
        known_model("Qwen/Qwen3-8B/")


def test_published_model_name_yields_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_model("Qwen/Qwen3-8B").name == "qwen3-8b"
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 8, "num_attention_heads": 4, "vocab_size": 9,'
        ' "num_hidden_layers": 3, "torch_dtype": "float16"}',
        "utf-8",
    )
    assert (read_model("Qwen/Qwen3-8B").name, len(read_model("Qwen/Qwen3-8B").layers)) == ("Qwen3-8B", 3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["natural", "reference"])
def test_published_model_is_planned_in_both_layouts(name: str, layout: str) -> None:
    model = read_model(name)
    made = plan_of(model, "640GiB", max_model_len=min(2048, model.max_model_len or 2048), layout=layout)
    assert made.capacity.concurrency >= 1
    grouped = sorted(one for group in made.config.groups for one in group.layer_names)
    assert grouped == sorted(layer.name for layer in model.layers)
    if layout == "natural" and model.model_type in COMPRESSED:
        # compressed caches have pages of their own length, each a multiple of some hundred bytes
        other = plan_of(model, "640GiB", max_model_len=2048, layout="reference")
        assert padding_of(made.config) <= padding_of(other.config) / 8
        assert {one.spec.block_size for one in model.layers} == {one.spec.block_size for one in made.config.groups}
    elif layout == "natural":
        assert padding_of(made.config) <= 0.02
        assert {group.spec.block_size for group in made.config.groups} == {16}


def gqa(layers: int, kv_heads: int, width: int) -> int:
    return layers * 2 * kv_heads * width * 2


def mla(layers: int, latent: int = 512, rope: int = 64) -> int:
    return layers * (latent + rope) * 2


@pytest.mark.parametrize(
    ("name", "token", "window", "state"),
    [
        # by hand from what is published of the architectures; keys and values of 2 bytes
        ("llama-3.1-405b", gqa(126, 8, 128), 0, 0),
        ("llama-3.2-1b", gqa(16, 8, 64), 0, 0),
        ("qwen3-235b-a22b", gqa(94, 4, 128), 0, 0),
        ("qwen3-coder-480b-a35b", gqa(62, 8, 128), 0, 0),
        ("qwen3-vl-30b-a3b", gqa(48, 4, 128), 0, 0),
        ("qwen2.5-vl-7b", gqa(28, 4, 128), 0, 0),
        ("mixtral-8x22b", gqa(56, 8, 128), 0, 0),
        ("phi-4", gqa(40, 10, 128), 0, 0),
        ("glm-4.5", gqa(92, 8, 128), 0, 0),
        ("minimax-m2", gqa(62, 8, 128), 0, 0),
        ("smollm3-3b", gqa(36, 4, 128), 0, 0),
        ("deepseek-r1", mla(61), 0, 0),
        ("kimi-k2", mla(61), 0, 0),
        ("glm-4.7-flash", mla(47), 0, 0),
        # an indexer's keys: 128 values of 8 bits and a scale of 4 bytes
        ("deepseek-v3.2", mla(61) + 61 * 132, 0, 0),
        ("glm-5", mla(78) + 78 * 132, 0, 0),
        # windows in 2 of 2, 5 of 6, 4 of 5, 3 of 4 layers
        ("gemma-2-9b", gqa(21, 8, 256), gqa(21, 8, 256), 0),
        ("gemma-3-12b", gqa(8, 8, 256), gqa(40, 8, 256), 0),
        ("gpt-oss-20b", gqa(12, 8, 64), gqa(12, 8, 64), 0),
        ("olmo-3-32b", gqa(16, 8, 128), gqa(48, 8, 128), 0),
        ("llama-4-maverick", gqa(12, 8, 128), gqa(36, 8, 128), 0),
        # wide heads in global layers; the last 20 of 35 layers read what others keep: 3 full and 12 windowed remain
        ("gemma-4-31b", gqa(10, 4, 512), gqa(50, 16, 256), 0),
        ("gemma-4-e2b", gqa(3, 1, 512), gqa(12, 1, 256), 0),
        # keys of 192, values of 128; twice the heads in windows
        ("mimo-v2-flash", 9 * 4 * 320 * 2, 39 * 8 * 320 * 2, 0),
        # states: 3 columns of the convolution in 2 bytes, a matrix a head in 4
        ("qwen3.5-27b", gqa(16, 4, 256), 0, 48 * (3 * (2 * 16 * 128 + 48 * 128) * 2 + 48 * 128 * 128 * 4)),
        ("kimi-linear-48b-a3b", mla(7), 0, 20 * (3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4)),
        ("granite-4.0-h-small", gqa(4, 8, 128), 0, 36 * (3 * (128 * 64 + 2 * 128) * 2 + 128 * 64 * 128 * 2)),
    ],
)
def test_published_model_bytes_match_hand_calculation(name: str, token: int, window: int, state: int) -> None:
    model = read_model(name, dtype="bf16")
    assert model.kv_bytes_per_token == token
    assert model.window_bytes_per_token == window
    assert model.state_bytes == state


PUBLISHED = {
    "deepseek-r1": 671, "deepseek-v3": 671, "deepseek-v3.2": 671, "deepseek-v4": 1600, "deepseek-v4-flash": 284,
    "devstral-small-2-24b": 23.6,
    "flan-t5-large": 0.783, "gemma-2-2b": 2.61, "gemma-3-1b": 1.0, "gemma-3-4b": 3.88, "gemma-3n-e4b": 6.87,
    "gemma-4-e2b": 4.6, "gemma-4-e4b": 7.5, "glm-4.5": 355, "glm-4.5-air": 106, "glm-4.6": 357, "glm-4.7": 358,
    "glm-4.7-flash": 30, "glm-5": 744, "glm-5.2": 744, "granite-4.0-h-micro": 3.2, "granite-4.0-h-small": 32,
    "granite-4.0-h-tiny": 7, "granite-4.0-micro": 3.4, "jamba-1.5-mini": 51.6, "kimi-k2": 1026, "kimi-k2.5": 1026,
    "llama-3.2-1b": 1.24, "llama-4-maverick": 400, "llama-4-scout": 107.8, "mimo-v2-flash": 309, "minimax-m2": 229,
    "minimax-m2.5": 229, "minimax-text-01": 456, "mistral-large-2": 123, "mixtral-8x22b": 141,
    "mixtral-8x7b": 46.7, "phi-3.5-mini": 3.8, "phi-4": 14.7, "phi-4-mini": 3.84, "qwen3-vl-2b": 1.72,
    "t5-large": 0.738, "t5-small": 0.0605, "whisper-base": 0.074, "whisper-large-v3": 1.55,
    "whisper-large-v3-turbo": 0.809, "whisper-small": 0.244, "whisper-tiny": 0.039,
}  # fmt: skip
"""In billions: where the name says none, rounds coarsely, or counts more than the language model."""
UNIT = {"b": 1e9, "m": 1e6}


def published(name: str) -> float:
    """Parameters: as published, or as the name says."""
    if name in PUBLISHED:
        return PUBLISHED[name] * 1e9
    size = re.search(r"-(\d+(?:\.\d+)?)([bm])(?:-|$)", name)
    assert size is not None, name
    return float(size[1]) * UNIT[size[2]]


@pytest.mark.parametrize("name", NAMES)
def test_published_model_parameters_match_published_counts(name: str) -> None:
    model = read_model(name)
    assert model.parameters == pytest.approx(published(name), rel=0.1)
    # active ones as the name says them: whether embeddings belong to them, names differ
    active = re.search(r"-a(\d+(?:\.\d+)?)b", name)
    if active is not None:
        assert model.active_parameters == pytest.approx(float(active[1]) * 1e9, rel=0.2)


def test_published_model_has_cross_attention_only_with_encoder() -> None:
    crossed = {one.name for one in KNOWN if any(x.spec.keeps is Keeps.ENCODER for x in read_model(one.name).layers)}
    assert crossed == {name for name in NAMES if "whisper" in name or "t5" in name}


def test_published_model_table_in_docs_is_current(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    path = tmp_path / "models.csv"
    done = subprocess.run(  # noqa: S603  # our own script
        [sys.executable, str(root / "tests" / "runner" / "published_table.py"), str(path)],
        check=True,
        capture_output=True,
        timeout=120,
        text=True,
    )
    assert done.stderr == ""
    written = path.read_text("utf-8")
    assert written == (root / "docs" / "data" / "models-by-name.csv").read_text("utf-8")
    assert all(f"\n{name}," in written for name in NAMES)
