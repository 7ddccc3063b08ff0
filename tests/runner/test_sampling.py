"""Sampling: filters of transformers, the distribution of draws, and independence of other requests."""

from typing import Any

import numpy as np
import pytest
import torch
from runner_support import MODELS, EngineFactory, loaded_model, shared_prompts
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybridkv.request import SamplingParams
from hybridkv.runner.sampling.sampler import Edits, RowEdits, SamplingBatch, gumbel, sample, scores, signed_seed

VOCABULARY = 40


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def batch(params: list[SamplingParams], seen: list[list[int]] | None = None) -> SamplingBatch:
    edits = Edits()
    for row, tokens in enumerate(seen or []):
        edits.add(row, RowEdits(params[row], tokens, len(tokens), [], VOCABULARY))
    return SamplingBatch.of(params, [5] * len(params), edits)


def drawn(logits: torch.Tensor, one: SamplingBatch) -> torch.Tensor:
    tokens, wrong = sample(logits, one)
    assert not wrong
    return tokens


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_k=400),
        SamplingParams(temperature=0.9, top_p=0.6),
        SamplingParams(temperature=1.0, top_p=0.01),
        SamplingParams(temperature=1.5, min_p=0.1),
        SamplingParams(temperature=0.8, repetition_penalty=1.7),
        SamplingParams(temperature=0.8, repetition_penalty=0.6, top_k=12, top_p=0.8, min_p=0.05),
    ],
)
def test_sampling_filters_match_transformers(params: SamplingParams) -> None:
    logits = logits_of(20)
    seen = [[1, 2, 3, 7]] * 20
    chain = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    if params.repetition_penalty != 1:
        chain.insert(0, RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    expected = LogitsProcessorList(chain)(torch.tensor(seen), logits.clone())
    one = batch([params] * 20, seen)
    ours = scores(logits, one) - gumbel(one.how["seed"], one.position, VOCABULARY)
    assert torch.equal(ours.isinf(), expected.isinf())
    kept = ~expected.isinf()
    torch.testing.assert_close(ours[kept].float(), expected[kept], rtol=1e-5, atol=1e-5)


def test_batched_draws_equal_single_draws() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.5, top_k=3, seed=1),
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(temperature=2.0, top_p=0.7, repetition_penalty=1.3, seed=8),
        SamplingParams(temperature=1.1, min_p=0.2, seed=-5),
    ]
    logits, seen = logits_of(6, 1), [[i, i + 4] for i in range(6)]
    before = logits.clone()
    together = drawn(logits, batch(params, seen))
    assert torch.equal(logits, before)
    for i in range(6):
        assert drawn(logits[i : i + 1], batch(params[i : i + 1], seen[i : i + 1])).item() == together[i]
    order = [4, 2, 0, 5, 1, 3]
    shuffled = drawn(logits[order], batch([params[i] for i in order], [seen[i] for i in order]))
    assert torch.equal(shuffled, together[order])
    assert together[0] == logits[0].argmax()


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 2**31 - 1}])
def test_smallest_temperature_draws_the_best_token(filters: dict[str, Any]) -> None:
    logits = torch.cat([logits_of(4), 1e38 * logits_of(4).clamp(-1, 1)])
    logits[4:, 7] = 2e38
    one = batch([SamplingParams(temperature=1e-200, **filters)] * 8)
    assert torch.equal(drawn(logits, one), logits.argmax(dim=-1))


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_extreme_penalties_give_finite_scores(penalty: float, temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, repetition_penalty=penalty)] * 4
    assert scores(1e30 * logits_of(4), batch(params, [[3, 4, 5]] * 4)).isfinite().all()


def test_draws_follow_the_distribution() -> None:
    draws, vocabulary = 40_000, 8
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
    for seeds, positions in ((np.arange(draws), np.full(draws, 9)), (np.full(draws, 9), np.arange(draws))):
        noise = gumbel(seeds.astype(np.int64), positions.astype(np.int64), vocabulary)
        counts = (probabilities.log() + noise).argmax(dim=-1).bincount(minlength=vocabulary)
        expected = probabilities * draws
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 24.3  # 99.9 % of a chi-square with 7 degrees of freedom


def test_noise_differs_by_seed_position_and_token() -> None:
    noise = gumbel(np.array([0, 1, 0, 2**62]), np.array([0, 0, 1, 0]), 1000)
    assert len(set(noise.flatten().tolist())) == 4000
    assert torch.equal(noise[:1], gumbel(np.array([0]), np.array([0]), 1000))
    assert noise.isfinite().all()
    assert [signed_seed(s) for s in (0, -1, 2**63, 2**64 + 3)] == [0, -1, -(2**63), 3]


def rising(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Tokens below the last one are less likely, the more so the longer it goes on."""
    logits[: output[-1] if output else prompt[-1]] -= 0.05 * len(output)
    return logits


SAMPLED = [
    SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=12, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, min_p=0.02, repetition_penalty=1.3, seed=13, max_tokens=24, ignore_eos=True),
    SamplingParams(repetition_penalty=1.5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=14, max_tokens=24, ignore_eos=True),
    SamplingParams(presence_penalty=2.0, frequency_penalty=2.0, max_tokens=24, ignore_eos=True),
    SamplingParams(
        temperature=0.7,
        seed=15,
        max_tokens=24,
        min_tokens=8,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={40: 1.0, 41: 1.0, 42: 1.0},
        bad_words=((40, 41), (41, 40), (42,)),
        logits_processors=(rising,),
    ),
]


@pytest.mark.parametrize("name", [MODELS[0], *(pytest.param(one, marks=pytest.mark.thorough) for one in MODELS[1:])])
def test_sampled_outputs_do_not_depend_on_other_requests(name: str, make_engine: EngineFactory) -> None:
    loaded = loaded_model(name)
    prompts = shared_prompts(len(SAMPLED), 9)
    alone = []
    for prompt, params in zip(prompts, SAMPLED, strict=True):
        alone.append(make_engine(loaded, [prompt], 24).generate([prompt], params)[0].token_ids)
    assert len(set(alone)) == len(SAMPLED)
    settings: list[dict[str, Any]] = [
        {},
        {"in_flight": 2},
        {"token_budget": 9},
        {"memory_blocks": 14, "token_budget": 60},
        {"memory_blocks": 14, "token_budget": 60, "in_flight": 2},
    ]
    if name == MODELS[0]:
        settings += [{"attention": "eager"}, {"attention": "torch"}]
    for options in settings:
        engine = make_engine(loaded, prompts, 24, **options)
        done = engine.generate(prompts, SAMPLED)
        assert [one.token_ids for one in done] == alone, options
        assert (sum(one.preemptions for one in done) > 0) == ("memory_blocks" in options)
