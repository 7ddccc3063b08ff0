"""Every attention backend that reads pages gives the tokens of the model alone."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from scripted import ScriptedDrafter
from transformers import PreTrainedModel

from hybridkv.errors import ConfigError
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions
from hybridkv.runner.attention import formulas
from hybridkv.runner.attention.formulas import AttentionBackend, AttentionForm, PagedStep
from hybridkv.runner.check import generate_greedy
from hybridkv.runner.drafters import Drafter
from hybridkv.runner.tiny import tiny_model
from hybridkv.worker import AttentionMask, KVPages, PagedBatch
from hybridkv.worker.triton_attention import LayerShape

OUTPUT = 6
KERNELS = [AttentionBackend.TORCH, AttentionBackend.TRITON]
SAMPLING = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
MODELS = ["llama", "gemma2", "gemma3", "gpt_oss", "llama4", "qwen3_next"]
"""Grouped heads, soft caps, windows, sinks, chunks, and states beside attention."""


FAULTS = ["nothing written", "window one short", "no sinks", "heads swapped", "wrong scale"]


def prompts(model: PreTrainedModel) -> list[list[int]]:
    """Two that begin alike, and one that repeats itself."""
    draw = torch.Generator().manual_seed(3)
    first, other = (torch.randint(1, model.config.vocab_size, (50,), generator=draw).tolist() for _ in range(2))
    return [first, [*first[:40], *other[:9]], other[:7] * 5]


def alone(model: PreTrainedModel, asked: Sequence[list[int]]) -> list[tuple[int, ...]]:
    with torch.inference_mode():
        return [tuple(generate_greedy(model, one, OUTPUT)) for one in asked]


def engine(
    model: PreTrainedModel,
    backend: AttentionBackend | str,
    *,
    token_budget: int = 2048,
    speculate: Drafter | None = None,
) -> Engine:
    options = EngineOptions(attention=backend, self_check=False, token_budget=token_budget)
    return Engine(model, options=options, memory="8MiB", max_model_len=128, speculate=speculate)


def pairs(names: Sequence[str]) -> list[Any]:
    """Each of ``names`` with every kernel; `make test-all` alone waits for Triton's interpreter."""
    return [
        pytest.param(
            backend,
            name,
            marks=[pytest.mark.thorough] if backend is AttentionBackend.TRITON else [],
            id=f"{backend}-{name}",
        )
        for backend in KERNELS
        for name in names
    ]


@pytest.mark.parametrize(("backend", "name"), pairs(MODELS))
def test_paged_attention_cold_and_warm_gives_tokens_of_plain_model(backend: AttentionBackend, name: str) -> None:
    """Cold and warm, with a budget that cuts prompts in two."""
    model = tiny_model(name, 0)
    asked = prompts(model)
    wanted = alone(model, asked)
    with engine(model, backend, token_budget=37) as made:
        for _ in ("cold", "warm"):
            assert [one.token_ids for one in made.generate(asked, SAMPLING)] == wanted
        assert made.runner._pages.keys() == made.runner._reads.keys()


def test_triton_attention_in_the_interpreter_gives_tokens_of_plain_model() -> None:
    """One chunk and one decode step. `make test-all` runs more."""
    model = tiny_model("llama", 0)
    asked = [one[:20] for one in prompts(model)[:2]]
    wanted = [one[:2] for one in alone(model, asked)]
    with engine(model, AttentionBackend.TRITON) as made:
        done = made.generate(asked, SamplingParams(max_tokens=2, ignore_eos=True))
        assert [one.token_ids for one in done] == wanted
        assert made.runner._pages.keys() == made.runner._reads.keys()


@pytest.mark.parametrize(("backend", "_"), pairs(["drafts"]))
def test_paged_attention_with_drafts_gives_tokens_of_plain_model(backend: AttentionBackend, _: str) -> None:
    """Two right drafts, then a wrong one: the keys of the wrong draft are overwritten."""
    model = tiny_model("gemma3", 0)
    asked = prompts(model)
    wanted = alone(model, asked)
    drafter = ScriptedDrafter(lambda _request, _asked: (2, 3), 3)
    with engine(model, backend, speculate=drafter) as made:
        first = made.generate(asked, SAMPLING)
        drafter.learn((one, SAMPLING) for one in first)
        second = made.generate(asked, SAMPLING)
        assert [one.token_ids for one in first] == [one.token_ids for one in second] == wanted
        statistics = made.statistics()
        assert 0 < statistics.accepted_tokens < statistics.drafted_tokens


def test_layers_with_uncached_keys_fall_back_to_gathering(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("deepseek_v3", 0)
    asked = prompts(model)
    wanted = alone(model, asked)
    with caplog.at_level(logging.INFO, "hybridkv"), engine(model, AttentionBackend.TORCH) as made:
        assert [one.token_ids for one in made.generate(asked, SAMPLING)] == wanted
    assert "contexts of 3 layers are gathered all the same" in caplog.text


def test_eager_attention_calls_the_function_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = tiny_model("llama", 0), list[int]()
    asked = prompts(model)
    wanted = alone(model, asked)
    with engine(model, "eager") as made:
        own = sys.modules[type(model).__module__]
        eager = own.eager_attention_forward

        def noted(*args: object, **kept: object) -> object:
            called.append(1)
            return eager(*args, **kept)

        monkeypatch.setattr(own, "eager_attention_forward", noted)
        assert [one.token_ids for one in made.generate(asked, SAMPLING)] == wanted
    assert called


@pytest.mark.parametrize(("backend", "fault"), pairs(FAULTS))
def test_attention_backend_with_fault_gives_other_tokens(
    backend: AttentionBackend, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gpt_oss", 0)
    asked = prompts(model)
    wanted = alone(model, asked)
    prepare = formulas.kernel_of(backend, torch.device("cpu"))
    assert prepare is not None

    def faulty(reads: PagedBatch, mask: AttentionMask, heads: LayerShape, pages: KVPages) -> formulas.Attend:
        if fault == "window one short" and mask.window is not None:
            mask = replace(mask, window=mask.window - 1)
        attend = prepare(reads, mask, heads, pages)

        def wrong(query: torch.Tensor, pages: KVPages, form: AttentionForm) -> torch.Tensor:
            if fault == "no sinks":
                form = replace(form, sinks=None)
            if fault == "wrong scale":
                form = replace(form, scale=form.scale * 1.5)
            return attend(query.flip(1) if fault == "heads swapped" else query, pages, form)

        return wrong

    monkeypatch.setattr("hybridkv.runner.runner.kernel_of", lambda *_: faulty)
    if fault == "nothing written":
        monkeypatch.setattr(PagedStep, "write", lambda *_: None)
    with engine(model, backend) as made:
        assert [one.token_ids for one in made.generate(asked, SAMPLING)] != wanted


def test_unknown_attention_backend_is_rejected() -> None:
    with pytest.raises(ConfigError, match="one of gather, eager, triton, torch, got 'paged'"):
        EngineOptions(attention="paged")
    assert EngineOptions(attention="torch").attention is AttentionBackend.TORCH


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_without_gpu_or_interpreter_is_rejected_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match="Triton has no compiler for CPUs: use attention=gather, or set TRITON_INTER"):
        engine(tiny_model("llama", 0), "triton")
