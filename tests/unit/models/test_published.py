"""The public models known by name: what they are called, where they were read, sizes against independent numbers."""

import csv
import json
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
from hybridkv.specs import ChunkedLocalAttentionSpec, Keeps, SlidingWindowSpec

ROOT = Path(__file__).parents[3]
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


BY_HAND = list(csv.DictReader((ROOT / "docs" / "data" / "models-by-hand.csv").read_text("utf-8").splitlines()))
"""Bytes worked by hand from what is published of the architectures: layers, then what each of them keeps.

2 * KV heads * width * 2 bytes for keys and values; a latent of 512 and 64 elements; 128 values of 8 bits and a scale of
4 bytes for an indexer; for a state K - 1 columns of the convolution, and a matrix for each head.
"""
OTHERS: dict[str, dict[str, object]] = json.loads(Path(__file__).with_name("hand_configs.json").read_text("utf-8"))
"""Configs of models that have no name here."""


def worked(formula: str) -> float:
    """The value of sums and products of numbers; 0 for a dash."""
    assert re.fullmatch(r"-|[\d+*/() -]+", formula)
    return 0 if formula == "-" else float(eval(formula))  # noqa: S307 - digits and operators


@pytest.mark.parametrize("row", BY_HAND, ids=[row["model"] for row in BY_HAND])
def test_bytes_of_a_model_match_the_table_worked_by_hand(row: dict[str, str]) -> None:
    name, token, window, width, state = row.values()
    model = read_model(OTHERS.get(name, name), dtype="bf16")
    assert model.kv_bytes_per_token == worked(token)
    assert model.window_bytes_per_token == worked(window)
    assert model.state_bytes == worked(state)
    specs = [one.spec for one in model.layers]
    widths = {one.sliding_window for one in specs if isinstance(one, SlidingWindowSpec)}
    widths |= {one.attention_chunk_size for one in specs if isinstance(one, ChunkedLocalAttentionSpec)}
    assert widths == ({int(width)} if width != "-" else set())


def test_table_worked_by_hand_has_40_models() -> None:
    assert len({row["model"] for row in BY_HAND}) == 40
    assert OTHERS.keys() <= {row["model"] for row in BY_HAND}


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
    path = tmp_path / "models.csv"
    done = subprocess.run(  # noqa: S603  # our own script
        [sys.executable, str(ROOT / "tests" / "runner" / "published_table.py"), str(path)],
        check=True,
        capture_output=True,
        timeout=120,
        text=True,
    )
    assert done.stderr == ""
    written = path.read_text("utf-8")
    assert written == (ROOT / "docs" / "data" / "models-by-name.csv").read_text("utf-8")
    assert all(f"\n{name}," in written for name in NAMES)
