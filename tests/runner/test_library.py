"""The engine as a library: model objects, batches and streams."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_support import EngineFactory, failing, fallback_tokenizer, generated, greedy, loaded_model, shared_prompts
from transformers import PreTrainedTokenizerFast

from hybridkv.errors import CapacityError, ConfigError
from hybridkv.request import SamplingParams
from hybridkv.runner import (
    Completion,
    Engine,
    EngineOptions,
    Increment,
    byte_tokenizer,
    plan_for,
    plan_within,
    tiny_model,
)
from hybridkv.runner.completion import Detokenizer
from hybridkv.schedule import FinishReason

TOKENIZER = byte_tokenizer()
BYTE_TOKENIZERS = (TOKENIZER, fallback_tokenizer())
ENGINE_SETTINGS = [{"in_flight": 1}, {"in_flight": 2}]


# -- a model in hand


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_engine_of_a_model_object_uses_the_given_memory(name: str) -> None:
    loaded, prompts = loaded_model(name), shared_prompts(4, 3)
    expected = [generated(loaded, prompt, 12) for prompt in prompts]
    with Engine(loaded.model, tokenizer=TOKENIZER, memory="2MiB", max_model_len=200) as engine:
        assert (engine.plan.memory_bytes, engine.plan.max_model_len) == (2 << 20, 200)
        done = engine.generate(prompts, greedy(12))
        assert loaded.model.config._attn_implementation == "hybridkv_gather"
    assert loaded.model.config._attn_implementation == "eager"
    assert [one.token_ids for one in done] == expected
    assert [one.text for one in done] == [TOKENIZER.decode(list(one)) for one in expected]


def test_engine_without_tokenizer_takes_and_returns_ids() -> None:
    with Engine(tiny_model("llama"), memory="1MiB") as engine:
        request_id = engine.add([1, 2, 3], greedy(4))
        done: list[Completion] = []
        while not engine.idle:
            done += engine.step()
        assert [(one.request_id, len(one.token_ids), one.text) for one in done] == [(request_id, 4, None)]
        with pytest.raises(ConfigError, match="needs a tokenizer"):
            engine.add("text")


def test_default_max_model_len_is_limited_by_model_and_memory() -> None:
    loaded = loaded_model("llama")
    limit = loaded.model.config.max_position_embeddings
    assert plan_within(loaded).max_model_len == limit
    small = plan_within(loaded, "100KiB")
    fits = small.max_model_len
    assert 0 < fits < limit
    assert small.capacity.longest_context == fits
    with pytest.raises(CapacityError):
        plan_within(loaded, "100KiB", max_model_len=fits + 1)
    assert plan_within(loaded, "100KiB", max_model_len=fits).config == small.config
    with pytest.raises(CapacityError, match="memory is too small"):
        plan_within(loaded, 100)
    with pytest.raises(ConfigError, match=f"exceeds the {limit} tokens"):
        plan_within(loaded, max_model_len=limit + 1)


def test_window_plan_has_room_for_tokens_in_flight() -> None:
    loaded = loaded_model("mistral")
    limit = loaded.model.config.max_position_embeddings
    assert plan_within(loaded, "64KiB", max_batched_tokens=0).max_model_len == limit  # a window is all that it keeps
    assert 0 < plan_within(loaded, "64KiB", max_batched_tokens=64).max_model_len < limit
    with Engine(loaded, memory="64KiB", options=EngineOptions(token_budget=64)) as engine:
        assert engine.plan.max_model_len < limit


def test_engine_with_contradicting_arguments_is_rejected() -> None:
    loaded = loaded_model("llama")
    plan = plan_for(loaded, [32])
    with pytest.raises(ConfigError, match="leave the plan out"):
        Engine(loaded, plan, memory="1MiB")
    with pytest.raises(ConfigError, match="leave the plan out"):
        Engine(loaded, plan, max_model_len=16)
    with pytest.raises(ConfigError, match="leave the argument tokenizer out"):
        Engine(loaded, plan, tokenizer=TOKENIZER)
    assert loaded.model.config._attn_implementation == "eager"


# -- batches


@pytest.mark.parametrize("options", ENGINE_SETTINGS)
def test_generate_leaves_completions_of_other_requests_to_step(
    options: dict[str, int], make_engine: EngineFactory
) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(3, 4)
    engine = make_engine(loaded, prompts, 20, **options)  # type: ignore[arg-type]  # ints by name
    early = engine.add(prompts[0], greedy(3))
    late = engine.add(prompts[1], greedy(20))
    (own,) = engine.generate(prompts[2:], greedy(8))
    assert own.token_ids == generated(loaded, prompts[2], 8)
    done: dict[str, Completion] = {}
    while not engine.idle:
        done.update((one.request_id, one) for one in engine.step())
    assert {name: one.token_ids for name, one in done.items()} == {
        early: generated(loaded, prompts[0], 3),
        late: generated(loaded, prompts[1], 20),
    }


def test_batch_with_invalid_prompt_runs_no_prompt(make_engine: EngineFactory) -> None:
    prompts = shared_prompts(2, 4)
    engine = make_engine(loaded_model("llama"), prompts, 8)
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        engine.generate([*prompts, [999]], greedy(8))
    (done,) = engine.generate(prompts[:1], greedy(8))
    assert engine.idle
    assert engine.statistics().computed_tokens == len(prompts[0]) + 7 == done.computed_tokens


# -- streams


def joined(parts: Sequence[Increment]) -> tuple[tuple[int, ...], str]:
    return tuple(token for part in parts for token in part.token_ids), "".join(part.text or "" for part in parts)


@pytest.mark.parametrize("options", ENGINE_SETTINGS)
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_streams_read_in_turns_match_their_completions(
    name: str, options: dict[str, int], make_engine: EngineFactory
) -> None:
    loaded, prompts = loaded_model(name), shared_prompts(4, 5)
    text = TOKENIZER.decode(list(generated(loaded, prompts[1], 30)))
    sampling = [greedy(9), replace(greedy(30), stop=("no such", text[10:13])), greedy(1), greedy(20)]
    engine = make_engine(loaded, prompts, 30, **options)  # type: ignore[arg-type]  # ints by name
    streams = [engine.stream(prompt, one) for prompt, one in zip(prompts, sampling, strict=True)]
    parts: list[list[Increment]] = [[] for _ in prompts]
    while not all(one.ended for one in streams):
        for place, stream in enumerate(streams):
            if (part := next(stream, None)) is not None:
                parts[place].append(part)
    for prompt, one, read in zip(prompts, sampling, parts, strict=True):
        assert all(part.completion is None for part in read[:-1])
        done = read[-1].completion
        assert done is not None
        assert joined(read) == (done.token_ids, done.text)
        assert done.token_ids == generated(loaded, prompt, len(done.token_ids))
        assert read[-1].finish_reason is (FinishReason.STOP if one.stop else FinishReason.LENGTH)
        assert len(read) >= len(done.token_ids) - options["in_flight"]
    assert parts[1][-1].completion is not None
    assert parts[1][-1].completion.text == text[: text.index(text[10:13])]
    assert engine.step() == []  # a stream's completions are its own
    assert engine.idle


def test_engine_does_not_run_ahead_of_every_reader(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(2, 6)
    engine = make_engine(loaded, prompts, 24)
    quick, slow = (engine.stream(prompt, greedy(24)) for prompt in prompts)
    assert engine.statistics().steps == 0
    first = next(quick)
    assert (len(first.token_ids), engine.statistics().steps) == (1, 1)
    assert len(next(slow).token_ids) == 1
    assert engine.statistics().steps == 1  # it was there already
    for _ in range(5):
        next(quick)
    assert engine.statistics().steps == 6
    part = next(slow)  # all that came meanwhile, in one piece
    assert (len(part.token_ids), engine.statistics().steps) == (5, 6)
    rest = list(quick)
    assert engine.statistics().steps == 24
    (last,) = list(slow)
    assert engine.statistics().steps == 24
    assert len(rest) == len(last.token_ids) == 18
    assert last.completion is not None
    assert last.completion.token_ids == generated(loaded, prompts[1], 24)


def test_engine_stream_that_is_closed_frees_its_blocks(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(2, 6)
    engine = make_engine(loaded, prompts, 24)
    other = engine.stream(prompts[1], greedy(24))
    with engine.stream(prompts[0], greedy(24)) as stream:
        next(stream)
    assert stream.ended
    assert list(stream) == []
    assert engine.statistics().running == 1  # nothing is in flight, so it is gone at once
    assert joined(list(other))[0] == generated(loaded, prompts[1], 24)
    assert engine.idle
    assert engine.cache.usage == 0
    engine.scheduler.check()
    aborted = engine.stream(prompts[0], greedy(24))
    next(aborted)
    assert engine.abort(aborted.request_id)
    assert [one.finish_reason for one in aborted] == [FinishReason.ABORT]


def test_stream_of_several_outputs_names_the_output_of_each_part(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(1, 7)
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, n=3)
    expected = make_engine(loaded, prompts * 3, 8).generate(prompts, drawn)
    read: dict[str, list[Increment]] = {}
    for part in make_engine(loaded, prompts * 3, 8).stream(prompts[0], drawn, request_id="0"):
        read.setdefault(part.request_id, []).append(part)
    assert {name: joined(parts)[0] for name, parts in read.items()} == {
        one.request_id: one.token_ids for one in expected
    }
    assert max(map(len, read.values())) >= 7  # none waits for another's end


def test_stream_read_once_per_step_alternates_its_outputs(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(1, 7)
    engine = make_engine(loaded, prompts * 2, 8)
    stream = engine.stream(prompts[0], SamplingParams(max_tokens=8, ignore_eos=True, n=2))
    for _ in range(3):
        engine.step()
    found = []
    for _ in range(4):
        part = stream.take()
        assert part is not None
        found.append(part.output)
        engine.step()
    assert found == [0, 1, 0, 1]


def test_stream_after_a_failed_forward_is_complete(make_engine: EngineFactory) -> None:
    loaded, (prompt,) = loaded_model("llama"), shared_prompts(1, 8)
    expected = generated(loaded, prompt, 10)
    stream = make_engine(loaded, [prompt], 10).stream(prompt, greedy(10))
    parts = [next(stream), next(stream)]
    with failing(loaded.model.model.layers[1]), pytest.raises(RuntimeError, match="the device is gone"):
        next(stream)
    parts += list(stream)
    assert joined(parts)[0] == expected


# -- text increments


def read_bytes(
    tokenizer: PreTrainedTokenizerFast, data: bytes, stop: tuple[str, ...], pauses: Sequence[bool]
) -> tuple[list[str], str]:
    """Increments of text when a request outputs ``data``, a token a byte, read where ``pauses`` says so; and all."""
    detokenizer = Detokenizer(tokenizer, stop)
    shown: list[str] = []
    read = 0
    for token, pause in zip(data, pauses, strict=True):
        done = detokenizer.add([token])
        settled = detokenizer.settled_characters
        if pause and not done:
            shown.append(detokenizer.text[read:settled])
            read = settled
        if done:
            break
    whole = detokenizer.finish()
    return [*shown, whole[read:]], whole


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(BYTE_TOKENIZERS))
def test_increments_hold_back_partial_characters_and_stop_strings(
    data: st.DataObject, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = data.draw(st.text("ab\u00e9\U0001f999", max_size=30))
    stop = tuple(data.draw(st.lists(st.text("ab\u00e9\U0001f999", min_size=1, max_size=4), max_size=3)))
    octets = text.encode()
    pauses = data.draw(st.lists(st.booleans(), min_size=len(octets), max_size=len(octets)))
    shown, whole = read_bytes(tokenizer, octets, stop, pauses)
    places = [place for one in stop if (place := text.find(one)) >= 0]
    ends = [place + len(one) for one in stop if (place := text.find(one)) >= 0]
    if not places:
        assert whole == text
    else:  # the first stop string that is complete ends the output; of several at once, the longest
        first = min(ends)
        assert whole == text[: min(text.find(one) for one in stop if text[:first].endswith(one))]
    assert "".join(shown) == whole


def test_possible_stop_string_is_held_back_until_it_is_excluded() -> None:
    detokenizer = Detokenizer(TOKENIZER, ("abcd", "bx"))
    held = []
    for token in b"zabca":
        detokenizer.add([token])
        held.append(detokenizer.text[: detokenizer.settled_characters])
    assert held == ["z", "z", "z", "z", "zabc"]
    assert detokenizer.finish() == "zabca"
