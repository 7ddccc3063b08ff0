"""Prompt lookup against its definition, and a draft model that knows its target's tokens, noise and prefix cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from checked_engine import models
from hypothesis import given
from hypothesis import strategies as st
from runner_support import greedy, loaded_model, shared_prompts

from hybridkv.errors import ConfigError
from hybridkv.request import Request, SamplingParams
from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.runner.drafters import MOST_TOKENS, DraftModel, NgramDrafter

# -- prompt lookup


def request(tokens: list[int], sampling: SamplingParams | None = None) -> Request:
    return Request("x", tokens, sampling)


def looked_up(tokens: list[int], count: int, most: int, least: int) -> list[int]:
    """The definition: the longest suffix that occurs before, its last occurrence with ``count`` tokens behind it."""
    for length in range(min(most, len(tokens) - 1), least - 1, -1):
        suffix = tokens[-length:]
        starts = [at for at in range(len(tokens) - length) if tokens[at : at + length] == suffix]
        if starts:
            full = [at for at in starts if at + length + count <= len(tokens)]
            start = full[-1] if full else starts[0]
            return tokens[start + length : start + length + count]
    return []


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    count=st.integers(1, MOST_TOKENS),
    least=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_ngram_drafts_follow_the_longest_match(tokens: list[int], count: int, least: int, more: int) -> None:
    drafter = NgramDrafter(count, least + more, least)
    assert drafter.propose([request(tokens)]) == [looked_up(tokens, count, least + more, least)]


def test_ngram_drafts_come_from_the_text_of_their_request() -> None:
    drafter = NgramDrafter(3, 4, 2)
    texts = [[1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5, 2], [7, 8, 9, 7, 8], [7]]
    assert drafter.propose([request(text) for text in texts]) == [[3, 4, 1], [], [9, 7, 8], []]
    # the last of two matches has only one token behind it: the first has more
    assert drafter.propose([request([1, 2, 5, 6, 1, 2, 1, 2])]) == [[5, 6, 1]]


@pytest.mark.parametrize("counts", [(0, 2, 1), (MOST_TOKENS + 1, 2, 1), (1, 1, 2), (1, 2, 0)])
def test_ngram_drafter_with_invalid_counts_is_rejected(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens must be in 1 \.\. 8|n-grams need 1 <= min_ngram"):
        NgramDrafter(*counts)


# -- a draft model


@contextmanager
def drafting(name: str, count: int = 4, *, in_flight: int = 1) -> Iterator[DraftModel]:
    loaded = load(f"tiny:{name}")  # of its own: the engine holds the model's attention
    drafter = DraftModel(
        Engine(loaded, None, EngineOptions(in_flight=in_flight), memory="64MiB", max_model_len=200), count
    )
    try:
        yield drafter
    finally:
        drafter.close()


def target_request(prompt: list[int], sampling: SamplingParams, *outputs: int) -> Request:
    made = Request("x", prompt, sampling)
    for token in outputs:
        made.append(token)
    return made


SAMPLED = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.2, seed=5, max_tokens=40)


@pytest.mark.parametrize("name", models("llama", "mamba"))
def test_draft_model_equal_to_target_proposes_the_next_tokens(name: str) -> None:
    prompts = shared_prompts(3, 4)
    sampling = [greedy(40), SAMPLED, replace(SAMPLED, seed=6)]
    with drafting(name) as drafter:
        outputs = [list(one.token_ids) for one in drafter.engine.generate(prompts, sampling)]
        for known in (0, 1, 6):
            asked = [target_request(*one[:2], *one[2][:known]) for one in zip(prompts, sampling, outputs, strict=True)]
            assert drafter.propose(asked) == [output[known : known + 4] for output in outputs]
        assert drafter.propose([]) == []
        drafter.engine.cache.check()
        assert drafter.engine.cache.usage == 0


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("name", models("llama", "mamba"))
def test_draft_model_computes_only_the_newest_tokens(name: str, in_flight: int) -> None:
    prompt = shared_prompts(1, 5, prefix=90)[0]
    with drafting(name, in_flight=in_flight) as drafter:

        def ran(*outputs: int) -> int:
            before = drafter.engine.statistics().computed_tokens
            drafts.append(drafter.propose([target_request(prompt, greedy(40), *outputs)])[0])
            return drafter.engine.statistics().computed_tokens - before

        drafts: list[list[int]] = []
        behind = 3 if in_flight == 1 else 4  # all drafts but the last are fed back; a step ahead knows no end
        assert ran() == len(prompt) + 3
        all_right = (*drafts[0], 7)
        assert ran(*all_right) <= 2 + behind  # the last draft, the token behind it, and what is drafted now
        assert ran(*all_right, drafts[1][0], 9) <= 3 + behind  # back to the end of the prompt that was drafted for
        assert ran(*all_right, drafts[1][0], 9, 11) <= 2 + behind


def test_draft_model_stops_at_stop_tokens_and_plan_length() -> None:
    prompts = [shared_prompts(1, 6)[0], np.random.default_rng(1).integers(32, 127, 198).tolist()]
    with drafting("llama") as drafter:
        (plain,) = drafter.propose([target_request(prompts[0], greedy(40))])
        stop = replace(greedy(40), stop_token_ids=(plain[2],), stop=("x",), n=2, logprobs=3, prompt_logprobs=1)
        long = [*prompts[1], 50, 51, 52]
        asked = [target_request(prompts[0], stop), *(request(long[:known], greedy(40)) for known in (198, 200, 201))]
        drafts = drafter.propose(asked)
        assert drafts[0] == plain[: plain.index(plain[2]) + 1]
        assert [len(one) for one in drafts[1:]] == [2, 0, 0]
        drafter.engine.scheduler.check()


def test_draft_model_after_failed_forward_has_no_requests() -> None:
    prompts = shared_prompts(2, 7)
    asked = [target_request(prompt, greedy(40)) for prompt in prompts]

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with drafting("qwen3_next") as drafter:
        expected = drafter.propose(asked)
        hook = drafter.engine.loaded.model.get_output_embeddings().register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            drafter.propose(asked)
        hook.remove()
        assert drafter.propose(asked[1:]) == expected[1:]
        assert drafter.engine.idle
        assert drafter.engine.cache.usage == 0


def test_draft_model_with_another_vocabulary_is_rejected() -> None:
    target = loaded_model("llama")
    with drafting("mamba") as drafter:
        drafter.require(target)
        drafter.require(replace(target, tokenizer=None))
        with pytest.raises(ConfigError, match="cannot draft for itself: load the model a second time"):
            drafter.require(drafter.engine.loaded)
        other = load("tiny:llama")
        other.model.resize_token_embeddings(300)
        with pytest.raises(
            ConfigError, match="257 tokens, but tiny:llama has 300: use a draft model with the vocabulary"
        ):
            drafter.require(other)
        renamed = load("tiny:llama")
        renamed.tokenizer.add_tokens(["a new one"])
        with pytest.raises(ConfigError, match="the tokenizer of tiny:mamba has other tokens than that of tiny:llama"):
            drafter.require(renamed)
    for count in (0, MOST_TOKENS + 1):
        with pytest.raises(ConfigError, match="num_speculative_tokens must be in"):
            DraftModel(drafter.engine, count)
