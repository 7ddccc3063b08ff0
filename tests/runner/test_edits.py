"""Edits of logits by requests, against a row-by-row reference, transformers' processors and whole runs."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hand_steps import HandRows
from runner_support import EngineFactory, drained, loaded_model, reference_logits, shared_prompts
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.request import SamplingParams
from hybridkv.runner import AsyncEngine, Engine, LoadedModel, load
from hybridkv.runner.drafters import DraftModel, NgramDrafter
from hybridkv.runner.inputs import with_word_ids
from hybridkv.runner.sampling.draws import NO_DRAFT
from hybridkv.runner.sampling.sampler import RowState, sample, scores
from hybridkv.step import Csr, NewRow
from hybridkv.wire import decode_step, encode_step

VOCABULARY = 12
"""So small that tokens, words and drafts meet."""

INFINITE = float("inf")


# -- one row, one token at a time


def edited_logits(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], held: Sequence[int]
) -> torch.Tensor:
    """Return the ``logits`` of one draw with the edits of ``params``, token by token, after vLLM's description."""
    values = logits.tolist()
    for word in params.bad_words:
        before = list(word[:-1])
        if list(output)[len(output) - len(before) :] == before:
            values[int(word[-1])] = -INFINITE
    if len(output) < params.min_tokens:
        for token in held:
            values[token] = -INFINITE
    for token, bias in params.biases:
        values[token] += bias
    changed = torch.tensor(values)
    for function in params.logits_processors:
        changed = function(list(output), changed)
    values = changed.tolist()
    for token in range(len(values)):
        if token in prompt or token in output:
            values[token] *= params.repetition_penalty if values[token] <= 0 else 1 / params.repetition_penalty
        times = list(output).count(token)
        values[token] -= params.frequency_penalty * times
        values[token] -= params.presence_penalty if times else 0
    return torch.tensor(values)


def lower(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A function of a caller: the last token of the output, and the first of all, lose."""
    changed = logits.clone()
    changed[output[-1] if output else 0] -= 1.25
    return changed


def any_params(rng: np.random.Generator) -> SamplingParams:
    """Each thing that can be asked, or not."""

    def maybe(value: Any, off: Any) -> Any:  # noqa: ANN401  # of any field
        return value if rng.random() < 0.4 else off

    words = [tuple(rng.integers(0, VOCABULARY, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(1, 5))]
    return SamplingParams(
        temperature=maybe(float(rng.uniform(0.5, 2)), 0.0),
        min_p=maybe(0.05, 0.0),
        seed=int(rng.integers(100)),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        min_tokens=maybe(int(rng.integers(1, 6)), 0),
        logit_bias=maybe({int(token): float(rng.normal()) for token in rng.integers(0, VOCABULARY, 3)}, ()),
        bad_words=maybe(tuple(words), ()),
        logits_processors=maybe((lower,), ()),
    )


@pytest.mark.parametrize("seed", range(30))
def test_logit_edits_of_a_step_match_single_rows(seed: int) -> None:
    rng, count = np.random.default_rng(seed), 6
    rows = RowState(count, VOCABULARY)
    params = [any_params(rng) for _ in range(count)]
    prompts = [rng.integers(0, VOCABULARY, rng.integers(1, 5)).tolist() for _ in range(count)]
    outputs = [
        rng.integers(0, VOCABULARY, rng.integers(0, 4)).tolist() for _ in range(count)
    ]  # as of a resumed request
    held = (1, 3, VOCABULARY + 5)  # an end token that the model's embedding has no row of
    for row in range(count):
        tokens = np.array(prompts[row] + outputs[row], np.int32)
        rows.begin(NewRow(row, str(row), tokens, len(prompts[row]), params[row], None, held))
    for _ in range(4):
        order = rng.permutation(count)[: rng.integers(1, count + 1)].tolist()
        drafts = [rng.integers(0, VOCABULARY, rng.integers(0, 3)).tolist() for _ in order]
        draws = [
            (row, behind[:place]) for row, behind in zip(order, drafts, strict=True) for place in range(len(behind) + 1)
        ]
        at, before = [row for row, _ in draws], [behind[-1] if behind else NO_DRAFT for _, behind in draws]
        positions = [len(prompts[row]) + len(outputs[row]) + len(behind) for row, behind in draws]
        logits = 2 * torch.randn(len(draws), VOCABULARY, generator=torch.Generator().manual_seed(seed))
        kept = logits.clone()
        batch = rows.batch(np.array(at, np.int32), np.array(positions), np.array(before))
        expected = torch.stack(
            [
                edited_logits(logits[i], params[row], prompts[row], outputs[row] + behind, held[:2])
                for i, (row, behind) in enumerate(draws)
            ]
        )
        greedy = batch.how.copy()
        greedy["temperature"] = 0
        torch.testing.assert_close(scores(logits, replace(batch, how=greedy)), expected)
        drawn, wrong = sample(logits, batch)
        expected_tokens, _ = sample(expected, replace(batch, edits=None))
        assert torch.equal(drawn, expected_tokens)
        assert torch.equal(logits, kept)
        assert not wrong
        appended = [rng.integers(0, VOCABULARY, rng.integers(0, 3)).tolist() for _ in order]
        rows.drawn(np.array(order, np.int32), Csr.from_lists(appended))
        for row, more in zip(order, appended, strict=True):
            outputs[row] += more


@pytest.mark.parametrize(
    ("params", "theirs"),
    [
        (SamplingParams(repetition_penalty=1.4), lambda _: RepetitionPenaltyLogitsProcessor(1.4)),
        (
            SamplingParams(min_tokens=3),
            lambda prompt: MinNewTokensLengthLogitsProcessor(prompt, 3, eos_token_id=[2, 5], device="cpu"),
        ),
        (
            SamplingParams(bad_words=((4,), (6, 7), (8, 9, 10))),
            lambda _: NoBadWordsLogitsProcessor([[4], [6, 7], [8, 9, 10]], eos_token_id=[2, 5]),
        ),
    ],
    ids=["repetition", "min tokens", "bad words"],
)
@pytest.mark.parametrize("output", [[], [6], [3, 8, 9], [7, 6], [11, 11, 11, 9]], ids=str)
def test_logit_edits_match_transformers_processors(
    params: SamplingParams, theirs: Callable[[int], Any], output: list[int]
) -> None:
    prompt, rows = [1, 3, 0], RowState(1, VOCABULARY)
    rows.begin(NewRow(0, "r", np.array(prompt + output, np.int32), len(prompt), params, None, (2, 5)))
    batch = rows.batch(np.array([0], np.int32), np.array([len(prompt) + len(output)]), np.array([NO_DRAFT]))
    logits = 2 * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    expected = LogitsProcessorList([theirs(len(prompt))])(torch.tensor([prompt + output]), logits.clone())
    torch.testing.assert_close(scores(logits, batch), expected)


def test_logit_edits_without_requests_copy_nothing() -> None:
    rows = RowState(3, VOCABULARY)
    for row, params in enumerate(
        [SamplingParams(), SamplingParams(min_tokens=1), SamplingParams(presence_penalty=1.0)]
    ):
        rows.begin(NewRow(row, str(row), np.array([4, 4], np.int32), 1 + (row == 1), params, None, (2,)))
    every = np.arange(3, dtype=np.int32), np.array([2, 2, 2]), np.full(3, NO_DRAFT)
    edits = rows.batch(*every).edits
    assert edits is not None
    assert edits.rows == [1, 2]
    rows.drawn(every[0], Csr.from_lists([[5], [5], [5]]))
    edits = rows.batch(*every).edits
    assert edits is not None
    assert edits.rows == [2]  # the first has its tokens now
    rows.end(np.array([1, 2], np.int32))
    assert rows.batch(*every).edits is None


# -- whole runs


def rising(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[: output[-1] if output else 0] -= 0.1 * len(output)
    return logits


EVERY = [
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, max_tokens=20, ignore_eos=True),
    SamplingParams(repetition_penalty=1.4, presence_penalty=-0.5, max_tokens=20, ignore_eos=True),
    SamplingParams(
        logit_bias={66: 3.0, 67: 3.0}, bad_words=((66, 67), (67, 66), (70,)), max_tokens=20, ignore_eos=True
    ),
    SamplingParams(logits_processors=(rising,), frequency_penalty=0.2, max_tokens=20, ignore_eos=True),
]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_edited_sampling_matches_reference_edits_of_plain_logits(name: str, make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model(name), shared_prompts(len(EVERY), 5)
    done = make_engine(loaded, prompts, 20, token_budget=24).generate(prompts, EVERY)
    changed = 0
    for one, params in zip(done, EVERY, strict=True):
        plain = reference_logits(loaded, one)
        for at, token in enumerate(one.token_ids):
            expected = edited_logits(plain[at], params, one.prompt_token_ids, one.token_ids[:at], ())
            assert expected.max() - expected[token] < 1e-3, (params, at)
            changed += int(plain[at].argmax()) != token
    assert changed > 20


def settings_of(name: str) -> Sequence[dict[str, int]]:
    return (
        [{"in_flight": 2}, {"token_budget": 9}, {"memory_blocks": 16, "token_budget": 60}] if name == "llama" else [{}]
    )


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_edited_sampling_with_drafts_gives_outputs_without_drafts(name: str, make_engine: EngineFactory) -> None:
    """Also chunked, preempted, with steps ahead, and with the prompt found in the cache."""
    loaded = loaded_model(name)
    repeated = [
        [*b"one two one two one two one two "],
        [*b"abcabcabcabcabcabc"],
        [*b"xyxyxyxyxyxyxyxy"],
        [*b"0123012301230123"],
    ]
    greedy = [replace(one, logit_bias={**dict(one.biases), 98: 2.0, 99: 1.5}) for one in EVERY]
    asked = [*greedy, *(replace(one, temperature=0.7, seed=at) for at, one in enumerate(greedy))]
    prompts = repeated * 2
    plain = make_engine(loaded, prompts, 20).generate(prompts, asked)
    for options in settings_of(name):
        engine = make_engine(loaded, prompts, 20, speculate=NgramDrafter(3, min_ngram=1), **options)  # type: ignore[arg-type]  # ints by name
        for _ in range(2):
            drafted = engine.generate(prompts, asked)
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain], options
        assert sum(one.accepted_tokens for one in drafted) > 0, options
        assert sum(one.drafted_tokens - one.accepted_tokens for one in drafted) > 0
        assert sum(one.hit_tokens for one in drafted) > 0
        assert (sum(one.preemptions for one in drafted) > 0) == ("memory_blocks" in options)


def test_draft_model_applies_the_edits_of_its_target(make_engine: EngineFactory) -> None:
    """With equal weights and equal edits every draft is accepted."""
    loaded, prompts = loaded_model("llama"), shared_prompts(len(EVERY), 5)
    asked = [replace(one, repetition_penalty=1.0, presence_penalty=0.0) for one in EVERY]
    plain = make_engine(loaded, prompts, 20).generate(prompts, asked)
    drafter = DraftModel(Engine(load("tiny:llama"), memory="4MiB"), 3)
    engine = make_engine(loaded, prompts, 20, speculate=drafter)
    done = engine.generate(prompts, asked)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert engine.drafter is drafter
    for one in done:
        assert one.accepted_tokens >= one.drafted_tokens - 3, one  # bad words that begin before the drafts


def test_encoded_step_gives_the_same_edited_outputs(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(4, 5)
    (end,) = loaded.eos_token_ids
    held = SamplingParams(logit_bias={end: 9.0}, min_tokens=4, frequency_penalty=0.5, max_tokens=20)
    asked = [*EVERY[:3], replace(held, bad_words=("a", "bc"))]
    here = make_engine(loaded, prompts, 20).generate(prompts, asked)
    engine = make_engine(loaded, prompts, 20)
    execute = engine.runner.execute
    monkeypatch.setattr(engine.runner, "execute", lambda step: execute(decode_step(encode_step(step))))
    assert [one.token_ids for one in engine.generate(prompts, asked)] == [one.token_ids for one in here]
    assert len(here[3].token_ids) > 4


def test_penalties_of_a_branch_count_its_own_output(make_engine: EngineFactory) -> None:
    loaded, (prompt,) = loaded_model("llama"), shared_prompts(1, 6)
    params = SamplingParams(temperature=1.0, seed=4, frequency_penalty=1.0, repetition_penalty=1.2, max_tokens=16)
    engine = make_engine(loaded, [prompt] * 3, 16)
    together = engine.generate([prompt], replace(params, n=3))
    alone = engine.generate([prompt] * 3, [params.of_branch(number) for number in range(3)])
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({one.token_ids for one in together}) == 3


# -- least tokens


def test_output_does_not_end_before_min_tokens(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), [[*b"a first prompt"]] * 3
    (end,) = loaded.eos_token_ids
    ends = {end: 100.0, 66: 60.0}
    asked = [
        SamplingParams(logit_bias=ends, min_tokens=5, max_tokens=9),
        SamplingParams(logit_bias=ends, min_tokens=5, stop_token_ids=(66,), ignore_eos=True, max_tokens=9),
        SamplingParams(logit_bias={67: 100.0}, min_tokens=5, stop=("CC",), max_tokens=9),
    ]
    eos, ignored, text = make_engine(loaded, prompts, 9).generate(prompts, asked)
    assert (eos.token_ids, str(eos.finish_reason)) == ((66,) * 5 + (end,), "stop")
    assert set(ignored.token_ids[:5]).isdisjoint({end, 66})
    assert ignored.token_ids[5:] == (end,) * 4
    assert (text.text, len(text.token_ids), str(text.finish_reason)) == ("CCCC", 6, "stop")
    asked[0] = replace(asked[0], min_tokens=0)
    assert make_engine(loaded, prompts, 9).generate(prompts, asked)[0].token_ids == (end,)


# -- words


class Spaced:
    """A tokenizer where a word behind a space is a token of its own, but "long", which then is two."""

    pieces = ("word", " word", "two", " two", "b", " b", "long", " lo", "ng")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [90] if add_special_tokens else []
        while text:
            piece = max((one for one in self.pieces if text.startswith(one)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[one] for one in ids)


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (("word",), ((0,), (1,))),
        ((" word",), ((0,), (1,))),
        (("two word",), ((2, 1), (3, 1))),
        (("long",), ((6,),)),  # behind a space it is two tokens: as vLLM has it
        (("b", "b", (5, 4)), ((4,), (5,), (5, 4))),
    ],
)
def test_bad_words_are_encoded_with_and_without_a_leading_space(words: Any, ids: Any) -> None:  # noqa: ANN401  # any words
    loaded = LoadedModel("spaced", loaded_model("llama").model, Spaced(), ())
    assert with_word_ids(SamplingParams(bad_words=words), loaded).bad_words == ids


def test_bad_words_never_appear_in_the_text(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), [[*b"say: "]] * 2
    free = SamplingParams(logit_bias={97: 100.0, 98: 99.5, 99: 99.0}, frequency_penalty=1.0, max_tokens=12)
    bound = replace(free, bad_words=("ab", "ca"))
    without, words = make_engine(loaded, prompts, 12).generate(prompts, [free, bound])
    assert without.text is not None
    assert words.text is not None
    assert "ab" in without.text or "ca" in without.text
    assert "ab" not in words.text
    assert "ca" not in words.text
    assert set(words.text) == set("abc")


# -- the caller's functions


class Choice:
    """Guided choice: the output is one of ``options``, then the end."""

    def __init__(self, options: Sequence[Sequence[int]], end: int) -> None:
        self._options = [[*one, end] for one in options]

    def __call__(self, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        allowed = [one[len(output)] for one in self._options if one[: len(output)] == output]
        return torch.full_like(logits, -INFINITE).index_copy(0, torch.tensor(allowed), logits[allowed])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logits_processor_restricts_output_to_given_choices(temperature: float, make_engine: EngineFactory) -> None:
    loaded, options = loaded_model("llama"), ["yes", "yesterday", "no"]
    prompts, (end,) = [[*f"{at} is it so?".encode()] for at in range(6)], loaded.eos_token_ids
    choice = Choice([[*one.encode()] for one in options], end)
    asked = [SamplingParams(temperature=temperature, seed=at, logits_processors=(choice,)) for at in range(6)]
    engine = make_engine(loaded, prompts, 16, speculate=NgramDrafter(2))
    done = engine.generate(prompts, asked)
    assert {one.text for one in done} <= set(options)
    assert {str(one.finish_reason) for one in done} == {"stop"}
    assert engine.drafter is not None


def raising(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output) == 3:
        raise LookupError("no such state")
    return logits


def shapeless(_: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits[:5]


def nothing(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits if len(output) < 2 else logits - INFINITE


def numberless(_: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits * float("nan")


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (raising, LookupError, "no such state"),
        (shapeless, ConfigError, "one for each of 257 tokens"),
        (nothing, ConfigError, "no token is left to draw"),
        (numberless, ConfigError, "numbers and -inf alone, got nan"),
    ],
)
def test_failed_logits_processor_ends_its_request_only(
    function: Any,  # noqa: ANN401  # one each
    error: type[Exception],
    message: str,
    in_flight: int,
    make_engine: EngineFactory,
) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(3, 7)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine = make_engine(loaded, prompts, 8, in_flight=in_flight)
    expected = engine.generate(prompts, params)
    for at, prompt in enumerate(prompts):
        engine.add(prompt, replace(params, logits_processors=(function,)) if at == 1 else params, request_id=f"r{at}")
    with pytest.raises(error, match=message) as raised:
        drained(engine)
    assert "'r1'" in raised.value.__notes__[0]
    done = {one.request_id: one.token_ids for one in drained(engine)}
    assert done == {"r0": expected[0].token_ids, "r2": expected[2].token_ids}
    assert [one.token_ids for one in engine.generate(prompts, params)] == [one.token_ids for one in expected]


def test_async_failed_logits_processor_reaches_its_reader_only() -> None:
    async def read() -> tuple[list[int], Exception | None]:
        tokens: list[int] = []
        async with AsyncEngine(Engine(loaded_model("llama"), memory="4MiB")) as engine:

            async def other() -> None:
                async for part in engine.stream(
                    b"an other prompt".decode(), SamplingParams(max_tokens=12, ignore_eos=True)
                ):
                    tokens.extend(part.token_ids)

            beside = asyncio.create_task(other())
            found: Exception | None = None
            try:
                async for _ in engine.stream("a prompt", SamplingParams(logits_processors=(raising,))):
                    pass
            except LookupError as error:
                found = error
            await beside
        return tokens, found

    tokens, found = asyncio.run(read())
    assert len(tokens) == 12
    assert "no such state" in str(found)


def test_logits_processor_error_after_a_rejected_draft_is_ignored() -> None:
    """The function raises an error at the second draft, but the first draft is already rejected."""
    expected = [HandRows(loaded_model("llama"), [[*b"ab"]], [SamplingParams()], max_tokens=32)]
    expected[0].step()
    expected[0].runner.detach()
    token = expected[0].tokens[0][-1]

    def picky(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if 7 in output:
            raise LookupError("7")
        return logits

    rows = HandRows(loaded_model("llama"), [[*b"ab"]], [SamplingParams(logits_processors=(picky,))], max_tokens=32)
    try:
        assert rows.step() == [[token]]
        (more,) = rows.step([[7, 7]])
        assert len(more) == 1
        rows.tokens[0][-1] = 7  # a token that the function does not expect
        again = NewRow(0, "0", np.array([*b"ab", token, 7], np.int32), 2, SamplingParams(logits_processors=(picky,)))
        rows.runner._rows.begin(again)
        with pytest.raises(LookupError, match="7"):
            rows.step()
    finally:
        rows.runner.detach()


# -- rejected at the entry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be a number, and finite"),
        ({"min_tokens": -1}, "min_tokens must be 0"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens, 16, got 17"),
        ({"logit_bias": {3: INFINITE}}, "logit_bias of token 3 must be a number, and finite"),
        ({"logit_bias": {-3: 1.0}}, "token ids of logit_bias must lie in 0"),
        ({"logit_bias": {3: 1e31}}, "logit_bias must lie between -1e"),
        ({"logit_bias": {3: 1.0, "3": 2.0}}, "token 3 twice"),
        ({"logit_bias": [3]}, "logit_bias must be a mapping of token ids"),
        ({"bad_words": [""]}, "bad_words must be text, and not empty"),
        ({"bad_words": [[]]}, "each of bad_words must be text or a list of token ids"),
        ({"bad_words": [3]}, "each of bad_words must be text or a list of token ids"),
        ({"bad_words": [["a"]]}, "bad_words must be a list of token ids"),
        ({"logits_processors": [3]}, "logits_processors must be a list of functions"),
        ({"logits_processors": [lambda logits: logits]}, "must take .output ids, logits. or"),
    ],
)
def test_logit_edit_with_invalid_value_is_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**change)


def test_sampling_params_of_equivalent_forms_are_equal() -> None:
    given: dict[str, Any] = {
        "logit_bias": {7: 1, "3": np.float32(0.5)},
        "bad_words": ["ab", np.array([1, 2])],
        "logits_processors": lower,
    }
    one = SamplingParams(**given)
    assert one == SamplingParams(logit_bias=((3, 0.5), (7, 1.0)), bad_words=("ab", (1, 2)), logits_processors=(lower,))
    none: dict[str, Any] = dict.fromkeys(given)  # vLLM's defaults
    assert SamplingParams(**none) == SamplingParams()
    assert len({one, replace(one)}) == 1


def test_edits_with_tokens_outside_the_vocabulary_are_rejected(make_engine: EngineFactory) -> None:
    loaded, prompt = loaded_model("llama"), [1, 2, 3]
    engine = make_engine(loaded, [prompt], 8)
    for change in ({"logit_bias": {257: 1.0}}, {"bad_words": ((1, 257),)}):
        with pytest.raises(ConfigError, match="name token 257, which is outside the vocabulary of tiny:llama"):
            engine.add(prompt, SamplingParams(**change))
    assert engine.idle
    bare = make_engine(LoadedModel("bare", loaded.model, None, ()), [prompt], 8)
    with pytest.raises(ConfigError, match="bad_words of text need a tokenizer"):
        bare.add(prompt, SamplingParams(bad_words=("word",)))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(bad_words=("word",)), "bad_words of '0' are text, and a worker has no tokenizer"),
        (SamplingParams(logit_bias={400: 1.0}), "name token 400, which is outside the vocabulary: ids are 0 .. 256"),
    ],
)
def test_worker_rejects_edits_that_it_cannot_apply(params: SamplingParams, message: str) -> None:
    rows = HandRows(loaded_model("llama"), [[1, 2]], [params], max_tokens=16)
    try:
        with pytest.raises(WorkerError, match=message):
            rows.step()
    finally:
        rows.runner.detach()
