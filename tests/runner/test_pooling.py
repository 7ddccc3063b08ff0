"""Embeddings equal pooled hidden states of plain transformers, cold, in chunks, from a warm cache and beside others."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runner_support import loaded_model

from hybridkv.errors import ConfigError
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions
from hybridkv.runner.pooling import Embedder, Pooling, Vector

PROMPT = [*range(3, 90)]
PROMPTS = [PROMPT, [*PROMPT[:60], 7, 7, 7], [5]]


def expected(name: str, prompt: list[int], pooling: Pooling) -> Vector:
    with torch.no_grad():
        model = loaded_model(name).model
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    found: Vector = (states.mean(dim=0) if pooling.mean else states[-1]).numpy()
    if pooling.normalized:
        found /= np.sqrt((found**2).sum())
    return found


@pytest.mark.parametrize("pooling", [Pooling(), Pooling(mean=True), Pooling(mean=True, normalized=False)])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "mamba"])
def test_embeddings_equal_hidden_states_of_plain_transformers(name: str, pooling: Pooling) -> None:
    want = [expected(name, one, pooling) for one in PROMPTS]
    with Engine(loaded_model(name), memory="4MiB", max_model_len=128, options=EngineOptions(token_budget=40)) as engine:
        embedder = Embedder(engine, pooling)
        other = engine.stream(PROMPT[:50], SamplingParams(max_tokens=30, ignore_eos=True))
        for _ in range(2):  # cold, then from the cache
            for got, right in zip(embedder.embed(PROMPTS), want, strict=True):
                np.testing.assert_allclose(got, right, atol=2e-4 * np.abs(right).max())
        made = [token for part in other for token in part.token_ids]
        embedder.close()
        (alone,) = engine.generate([PROMPT[:50]], SamplingParams(max_tokens=30, ignore_eos=True))
    assert made == list(alone.token_ids)


def test_embedding_of_the_last_token_reads_the_prefix_cache() -> None:
    right = expected("llama", PROMPT, Pooling())
    with Engine(loaded_model("llama"), memory="4MiB", max_model_len=128) as engine:
        embedder = Embedder(engine)
        for least_hits in (0, 80):
            kept = embedder.keep(f"a{least_hits}")
            done = [one.completion for one in engine.stream(PROMPT, embedder.sampling, request_id=f"a{least_hits}")][-1]
            assert done is not None
            assert done.hit_tokens >= least_hits
            np.testing.assert_allclose(embedder.vector(kept), right, atol=1e-4)
        short = embedder.vector(kept, 8)
        assert len(short) == 8
        assert np.linalg.norm(short) == pytest.approx(1)
        with pytest.raises(ConfigError, match="dimensions must be 1 to 64, got 65"):
            embedder.vector(kept, 65)


def test_embedding_of_a_mean_begins_again_after_a_preemption() -> None:
    pooling, options = Pooling(mean=True), EngineOptions(token_budget=9)
    right = expected("llama", PROMPT, pooling)
    with Engine(loaded_model("llama"), memory="108KiB", max_model_len=96, options=options) as engine:
        embedder = Embedder(engine, pooling)
        before = engine.stream(PROMPT[3:33], SamplingParams(max_tokens=60, ignore_eos=True))
        next(iter(before))
        (got,) = embedder.embed([PROMPT])
        assert engine.statistics().preemptions == 1
    np.testing.assert_allclose(got, right, atol=1e-4)


def save(folder: Path, modes: dict[str, bool], *kinds: str) -> Path:
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"path": f"1_{kind}", "type": f"sentence_transformers.models.{kind}"} for kind in ("Pooling", *kinds)]
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}), "utf-8")
    return folder


def test_pooling_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    assert Pooling.of(tmp_path) == Pooling.of("tiny:llama") == Pooling(mean=False, normalized=True)
    mean = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False, "include_prompt": True}
    assert Pooling.of(save(tmp_path, mean)) == Pooling(mean=True, normalized=False)


def test_pooling_with_normalization_is_read(tmp_path: Path) -> None:
    assert Pooling.of(save(tmp_path, {"pooling_mode_lasttoken": True}, "Normalize")) == Pooling()


@pytest.mark.parametrize(
    ("modes", "kinds", "wrong"),
    [
        ({"pooling_mode_cls_token": True}, (), "pooling_mode_cls_token"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            (),
            "pooling_mode_mean_tokens, pooling_mode",
        ),
        ({"pooling_mode_mean_tokens": True}, ("Dense",), "need Dense"),
    ],
)
def test_pooling_of_another_kind_is_rejected(
    modes: dict[str, bool], kinds: tuple[str, ...], wrong: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{wrong}.*not offered"):
        Pooling.of(save(tmp_path, modes, *kinds))
