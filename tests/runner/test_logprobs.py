"""Log probabilities of outputs and prompts against log_softmax of plain forwards."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from runner_support import EngineFactory, failing, greedy, loaded_model, shared_prompts

from hybridkv.errors import ConfigError
from hybridkv.request import SamplingParams
from hybridkv.runner import Completion, Engine, EngineOptions, Increment, LoadedModel, TokenLogprob
from hybridkv.runner.probe import attention_implementation
from hybridkv.runner.sampling.draws import Draws, LogprobRows, Targets, logprobs_of
from hybridkv.schedule import FinishReason

CLOSE = 1e-4
OUTPUT = 12
MODELS = ("llama", "qwen3_next")
MORE = pytest.mark.thorough


def asking(logprobs: int | None, prompt_logprobs: int | None, **changes: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=OUTPUT,
        ignore_eos=True,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **changes,  # type: ignore[arg-type]  # numbers by name
    )


def reference(loaded: LoadedModel, done: Completion) -> torch.Tensor:
    """float32[tokens - 1, vocabulary]: row i is of token i + 1 of prompt and output."""
    ids = torch.tensor([[*done.prompt_token_ids, *done.token_ids]])
    with attention_implementation(loaded.model, "eager"), torch.inference_mode():
        values: torch.Tensor = loaded.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(dim=-1)
    return values[:-1]


def agree(found: Sequence[TokenLogprob] | None, expected: torch.Tensor, tokens: Sequence[int], best: int) -> None:
    """``found`` is of ``tokens``, with the values of ``expected`` [tokens, vocabulary] and ``best`` best ones."""
    assert found is not None
    assert [one.token_id for one in found] == list(tokens)
    for one, values in zip(found, expected, strict=True):
        assert abs(one.logprob - float(values[one.token_id])) < CLOSE
        # tokens as probable as this one up to rounding may stand before or behind it
        above = values - values[one.token_id]
        assert int((above > CLOSE).sum()) < one.rank <= int((above > -CLOSE).sum())
        assert len(one.best) == best
        assert len({token for token, _ in one.best}) == best
        for (token, value), most in zip(one.best, values.topk(best).values.tolist(), strict=True):
            assert abs(value - float(values[token])) < CLOSE
            assert abs(value - most) < CLOSE


def check(loaded: LoadedModel, done: Completion, sampling: SamplingParams) -> None:
    """All that ``done`` says is what a plain forward says."""
    values, start = reference(loaded, done), len(done.prompt_token_ids)
    if sampling.logprobs is None:
        assert done.logprobs is None
    else:
        agree(done.logprobs, values[start - 1 :], done.token_ids, sampling.logprobs)
    if sampling.prompt_logprobs is None:
        assert done.prompt_logprobs is None
    else:
        agree(done.prompt_logprobs, values[: start - 1], done.prompt_token_ids[1:], sampling.prompt_logprobs)


SAMPLINGS = [
    asking(3, None),
    asking(None, 2),
    asking(0, 0),
    asking(5, 4, temperature=1.3, seed=3, top_k=5, repetition_penalty=1.5),
    asking(None, None),
    asking(1, 257, temperature=0.7, top_p=0.6, seed=8),
]


@pytest.mark.parametrize(
    ("budget", "in_flight"), [(2048, 2), (13, 1), *(pytest.param(*one, marks=MORE) for one in ((2048, 1), (13, 2)))]
)
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_match_a_plain_forward(name: str, budget: int, in_flight: int, make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model(name), [*shared_prompts(5, 21), [65]]
    engine = make_engine(loaded, prompts, OUTPUT, token_budget=budget, in_flight=in_flight)
    engine.generate(prompts, greedy(2))  # a warm cache, which prompt log probabilities do not read
    done = engine.generate(prompts, SAMPLINGS)
    for one, sampling in zip(done, SAMPLINGS, strict=True):
        check(loaded, one, sampling)
        reads = sampling.prompt_logprobs is None
        assert one.hit_tokens == (len(one.prompt_token_ids) - 1 if reads else 0)
    # what they wrote can be read
    (again,) = engine.generate([list(done[3].prompt_token_ids) + list(done[3].token_ids)], greedy(1))
    assert again.hit_tokens >= len(done[3].prompt_token_ids)


@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=MORE), 2])
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_of_preempted_requests_are_complete(name: str, in_flight: int, make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model(name), shared_prompts(6, 22)
    blocks = 22 if name == "llama" else 12
    engine = make_engine(
        loaded, prompts, OUTPUT * 4, memory_blocks=blocks, token_budget=24, in_flight=in_flight, prefix_caching=True
    )
    sampling = SamplingParams(max_tokens=OUTPUT * 4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    done = engine.generate(prompts, sampling)
    assert sum(one.preemptions for one in done) > 0
    for one in done:
        assert len(one.token_ids) == OUTPUT * 4
        check(loaded, one, sampling)


def test_logprobs_after_a_failed_step_are_complete(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(3, 23)
    engine = make_engine(loaded, prompts, OUTPUT, token_budget=30, in_flight=2)
    done: list[Completion] = []
    failures = 0
    with failing(loaded.model.model.layers[1], {2, 9}.__contains__):
        for prompt in prompts:
            engine.add(prompt, asking(2, 2))
        while not engine.idle:
            try:
                done += engine.step()
            except RuntimeError:
                failures += 1
    assert (len(done), failures) == (3, 2)
    for one in done:
        check(loaded, one, asking(2, 2))


def test_prompt_logprobs_are_in_every_output_of_a_prompt(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(1, 24)
    sampling = asking(2, 3, temperature=1.0, seed=4, n=3)
    done = make_engine(loaded, prompts * 3, OUTPUT).generate(prompts, sampling)
    assert len({one.token_ids for one in done}) == 3
    for one in done:
        check(loaded, one, sampling)
    assert sum(one.computed_tokens for one in done) < 2 * len(prompts[0]) + 3 * OUTPUT  # the prompt ran once


def test_stream_parts_have_the_logprobs_of_their_tokens(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(2, 25)
    engine = make_engine(loaded, prompts, OUTPUT)
    asked, plain = (engine.stream(prompt, one) for prompt, one in zip(prompts, (asking(2, 1), greedy(5)), strict=True))
    parts: list[Increment] = [next(asked)]
    assert all(part.logprobs is None for part in plain)
    parts += list(asked)
    assert len(parts) < OUTPUT  # some bring several tokens
    for part in parts:
        assert part.logprobs is not None
        assert [one.token_id for one in part.logprobs] == list(part.token_ids)
    done = parts[-1].completion
    assert done is not None
    assert done.logprobs == tuple(one for part in parts for one in part.logprobs or ())
    check(loaded, done, asking(2, 1))


def test_aborted_request_has_the_logprobs_computed_so_far() -> None:
    loaded, prompt = loaded_model("llama"), shared_prompts(1, 26, prefix=60)[0]
    with Engine(loaded, memory="1MiB", options=EngineOptions(token_budget=16)) as engine:
        request_id = engine.add(prompt, asking(1, 1))
        engine.step()
        engine.step()
        engine.abort(request_id)
        done: list[Completion] = []
        while not engine.idle:
            done += engine.step()
    assert done[0].finish_reason is FinishReason.ABORT
    assert done[0].logprobs == ()
    assert done[0].prompt_logprobs is not None
    values = reference(loaded, done[0])
    agree(done[0].prompt_logprobs, values[:32], prompt[1:33], 1)


def test_logprobs_beyond_the_vocabulary_are_rejected(make_engine: EngineFactory) -> None:
    engine = make_engine(loaded_model("llama"), [[65] * 20], 4)
    with pytest.raises(ConfigError, match="prompt_logprobs is 258, but the vocabulary of tiny:llama has 257 tokens"):
        engine.add([65], SamplingParams(prompt_logprobs=258))
    with pytest.raises(ConfigError, match="logprobs is 300"):
        engine.add([65], SamplingParams(logprobs=300))
    assert engine.idle


def test_logprobs_of_many_targets_match_log_softmax() -> None:
    count, vocabulary = 600, 30
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(700, vocabulary, generator=generator).bfloat16()
    rng = np.random.default_rng(0)
    targets = Targets(
        source=rng.permutation(700)[:count],
        row=np.arange(count) // 100,
        position=np.arange(count),
        token=rng.integers(0, vocabulary, count),
        best=rng.integers(0, 4, count),
    )
    found = logprobs_of([(logits, targets)])
    assert found is not None
    values = logits.float().log_softmax(dim=-1)[targets.source]
    chosen = values[torch.arange(count), targets.token]
    assert np.array_equal(found.logprob, chosen.numpy())
    assert np.array_equal(found.rank, 1 + (values > chosen[:, None]).sum(dim=-1).numpy())
    for i in range(count):
        assert found.best[i].tolist() == values[i].topk(int(targets.best[i])).indices.tolist()
    flat = [values[i].topk(int(targets.best[i])).values for i in range(count)]
    assert np.array_equal(found.best_logprobs, torch.cat(flat).numpy())
    nothing = Targets(*(np.empty(0, np.int64) for _ in range(5)))
    assert logprobs_of([(logits, nothing)]) is None


def test_equal_logits_share_the_best_rank() -> None:
    one = np.zeros(1, np.int64)
    found = logprobs_of([(torch.zeros(1, 4), Targets(one, one, one, one + 3, one))])
    assert found is not None
    assert found.rank.tolist() == [1]
    assert np.allclose(found.logprob, np.log(0.25))
    assert found.best.values.size == 0


def test_logprob_rows_forget_the_previous_request(make_engine: EngineFactory) -> None:
    prompts = shared_prompts(1, 27)
    engine = make_engine(loaded_model("llama"), prompts, OUTPUT)
    engine.add(prompts[0], asking(2, 2))
    step = engine.scheduler.schedule()
    rows, draws, one = LogprobRows(4), Draws.of(step), np.ones(1, np.bool_)

    def counts() -> tuple[int, int, int]:
        of_drawn = [len(rows.of_drawn(step, draws, np.array([7]), kept).source) for kept in (one, ~one)]
        return len(rows.of_prompts(step).source), of_drawn[0], of_drawn[1]

    rows.begin(step.new_rows[0])
    assert counts() == (len(prompts[0]) - 1, 1, 0)
    rows.begin(replace(step.new_rows[0], sampling=greedy(3)))  # another one
    assert counts() == (0, 0, 0)
    rows.begin(step.new_rows[0])
    rows.end(step.rows)
    assert counts() == (0, 0, 0)
