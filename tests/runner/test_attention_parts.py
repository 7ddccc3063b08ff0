"""Attention over gathered contexts in parts: each formula against float64, and the blocks that are gathered."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions
from hybridkv.runner.attention import formulas, gather
from hybridkv.runner.attention.formulas import (
    Attended,
    AttentionForm,
    attention_modules,
    dense_attention,
    eager_function,
    form_of,
)
from hybridkv.runner.attention.gather import GatherBatch
from hybridkv.runner.check import generate_greedy
from hybridkv.runner.tiny import tiny_model

OUTPUT = 10


def written_out(
    states: Attended, scale: float, mask: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, ...]:
    """(out, lse) in float64, key by key repeated for every head."""
    query, key, value = (one.double() for one in states)
    shared = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(shared, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask.double()
    out = torch.softmax(scores, -1) @ value.repeat_interleave(shared, 1)
    return out, torch.logsumexp(scores, -1)


def noise(rows: int, heads: tuple[int, int], tokens: tuple[int, int], widths: tuple[int, int]) -> Attended:
    draw = torch.Generator().manual_seed(1)
    shapes = (heads[0], tokens[0], widths[0]), (heads[1], tokens[1], widths[0]), (heads[1], tokens[1], widths[1])
    # strided as gathered contexts are: tokens before heads in memory
    return Attended(*(torch.randn(rows, t, h, w, generator=draw).transpose(1, 2) for h, t, w in shapes))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (16, 24)])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize("queries", [1, 3])
def test_dense_attention_matches_the_float64_formula(
    queries: int, heads: tuple[int, int], widths: tuple[int, int], softcap: float | None
) -> None:
    states = noise(3, heads, (queries, 7), widths)
    hidden = torch.rand(3, 1, queries, 7, generator=torch.Generator().manual_seed(2)) < 0.4
    hidden[..., 0] = False
    masks = None, torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)
    for mask in masks:
        out, lse = dense_attention(states, 0.7, mask=mask, softcap=softcap)
        wanted = written_out(states, 0.7, mask, softcap)
        torch.testing.assert_close(out.double(), wanted[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(lse.double(), wanted[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_causal_attention_matches_the_float64_formula(softcap: float | None) -> None:
    states = noise(1, (6, 2), (5, 5), (16, 16))
    mask = torch.full((5, 5), -torch.inf).triu(1)
    found = dense_attention(states, 0.7, causal=True, softcap=softcap)
    for one, wanted in zip(found, written_out(states, 0.7, mask, softcap), strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=0, atol=1e-5)


def forms(name: str) -> list[AttentionForm]:
    with Engine(tiny_model(name, 0), memory="4MiB", max_model_len=200) as engine:
        return list(engine.runner._context.forms.values())


def test_attention_forms_have_the_caps_and_sinks_of_the_model() -> None:
    """Each attention layer has its own form. T5 has no form, because no form has biases."""
    assert [(one.softcap, one.sinks) for one in forms("llama")] == [(None, None)] * 3
    assert [(one.softcap, one.sinks, one.scale) for one in forms("gemma2")] == [(50.0, None, 16**-0.5)] * 4
    found = forms("gpt_oss")
    assert len(found) == 4
    assert all(one.sinks is not None and one.sinks.abs().max() > 0 for one in found)
    assert not forms("t5")


def form_of_changed(name: str, change: Callable[..., Any]) -> AttentionForm | None:
    """Of the first attention of a model, whose eager function ``change`` stands around."""
    module: Any = next(attention_modules(tiny_model(name, 0)))
    eager = eager_function(module)
    handed = {"scaling": module.scaling, "softcap": getattr(module, "attn_logit_softcapping", None)}
    sizes = module.config.num_attention_heads, module.config.num_key_value_heads
    return form_of(module, change(eager), noise(1, sizes, (3, 3), (module.head_dim,) * 2), handed)


def louder(eager: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, query, *rest, **handed: eager(module, query * 1.01, *rest, **handed)


def biased(eager: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, query, key, value, mask, **handed: eager(
        module, query, key, value, mask + 0.01 * torch.arange(mask.shape[-1]), **handed
    )


def heads_swapped(eager: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, query, key, *rest, **handed: eager(module, query, key.flip(1), *rest, **handed)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_changed_attention_function_has_no_form(name: str) -> None:
    assert form_of_changed(name, lambda eager: eager) is not None
    for change in (louder, biased, heads_swapped):
        assert form_of_changed(name, change) is None, change.__name__


def test_attention_form_without_cap_or_sinks_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    every = formulas._forms
    monkeypatch.setattr(formulas, "_forms", lambda *args: every(*args)[:1])
    assert not forms("gemma2")
    assert not forms("gpt_oss")
    assert len(forms("llama")) == 3


def prompts(model: PreTrainedModel) -> list[list[int]]:
    """A beginning that four have in common, a longer one that two of these have, one of its own, and one of a block."""
    draw = torch.Generator().manual_seed(3)

    def of(length: int) -> list[int]:
        found: list[int] = torch.randint(1, model.config.vocab_size, (length,), generator=draw).tolist()
        return found

    shared = of(100)
    longer = [*shared, *of(60)]
    return [[*longer, *of(9)], [*shared, *of(3)], [*longer, *of(20)], [*shared, *of(37)], of(90), of(16)]


@contextmanager
def batches(seen: list[GatherBatch]) -> Iterator[None]:
    """``seen`` gets every batch that is made."""
    build = gather._Builder.build

    def noted(self: gather._Builder, *args: Any) -> GatherBatch:  # noqa: ANN401 - as ``build`` takes them
        seen.append(build(self, *args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather._Builder, "build", noted)
        yield


@pytest.mark.parametrize("budget", [2048, 23])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "falcon_h1"])
def test_gathered_parts_with_shared_prefix_give_tokens_of_plain_model(name: str, budget: int) -> None:
    model, seen = tiny_model(name, 0), list[GatherBatch]()
    asked = prompts(model)
    with torch.inference_mode():
        wanted = [tuple(generate_greedy(model, one, OUTPUT)) for one in asked]
    sampling = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    options = EngineOptions(token_budget=budget)
    with Engine(model, options=options, memory="8MiB", max_model_len=256) as engine, batches(seen):
        for _ in ("cold", "warm"):
            assert [one.token_ids for one in engine.generate(asked, sampling)] == wanted
    assert any(batch.pasts for batch in seen)


def test_shared_prefix_is_gathered_once() -> None:
    model, seen = tiny_model("llama", 0), list[GatherBatch]()
    asked, sampling = prompts(model), SamplingParams(max_tokens=2, ignore_eos=True)
    with Engine(model, memory="8MiB", max_model_len=256) as engine:
        engine.generate(asked, sampling)
        with batches(seen):
            engine.generate(asked, sampling)
    decoding = seen[-1]
    (shared,) = decoding.pasts
    # four rows, 100 tokens in common: six whole blocks; the two that share 160 would save less
    assert shared.length == 96
    assert len(range(6)[shared.tokens] if isinstance(shared.tokens, slice) else shared.tokens) == 4
    ids = decoding.read_blocks[: 96 // 16]
    assert not torch.isin(decoding.read_blocks[96 // 16 :], ids).any()
    assert math.prod(decoding.read_blocks.shape) * 16 < sum(map(len, asked))


@pytest.mark.parametrize("fault", ["past weighs as own", "own weighs alone", "past one key short"])
def test_attention_parts_merged_wrongly_give_other_tokens(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "past one key short":
        of_past = gather._of_past
        monkeypatch.setattr(
            gather,
            "_of_past",
            lambda states, past: Attended(
                states.query[:, :, past.tokens], *(one[:, :, 1:] for one in of_past(states, past)[1:])
            ),
        )
    else:
        wrong = torch.maximum if fault == "past weighs as own" else lambda before, _more: before
        monkeypatch.setattr(torch, "logaddexp", wrong)
    model = tiny_model("llama", 0)
    asked, sampling = prompts(model), SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    with torch.inference_mode():
        wanted = [tuple(generate_greedy(model, one, OUTPUT)) for one in asked]
    options = EngineOptions(token_budget=23, self_check=False)
    with Engine(model, options=options, memory="8MiB", max_model_len=256) as engine:
        assert [one.token_ids for one in engine.generate(asked, sampling)] != wanted
