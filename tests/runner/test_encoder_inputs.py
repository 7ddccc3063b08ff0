"""Encoder inputs: equal ones are encoded once, different ones share nothing, and invalid ones are rejected."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from listening import LAYOUTS, NAMES, OUTPUT, Listening, feed, sound
from runner_support import EngineFactory, drained, failing, greedy, loaded_model

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.runner import AsyncEngine, Completion, Engine, load, plan_for, tiny_model
from hybridkv.runner.check import LogitRecorder, check_completions, forced_logits
from hybridkv.runner.drafters import Drafter, DraftModel, NgramDrafter
from hybridkv.runner.probe import page_layout, planner_model, probe
from hybridkv.schedule import FinishReason
from hybridkv.specs import Keeps
from hybridkv.step import Step

# -- which request reads which input


@NAMES
def test_equal_encoder_inputs_are_encoded_once_and_others_have_no_hits(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name)
    prompt = listening.prompts[2]
    done: list[Completion] = []
    for number in (7, 8, 7):
        done += listening.engine.generate([prompt], greedy(OUTPUT), encoders=[sound(name, number)])
    listening.check(done, [sound(name, number) for number in (7, 8, 7)])
    assert listening.encoded == 2
    assert [one.hit_tokens for one in done] == [0, 0, len(prompt) - 1]
    assert done[0].token_ids == done[2].token_ids != done[1].token_ids


@NAMES
def test_evicted_encoder_input_with_digest_is_encoded_again(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name, room_for=1, max_running=1, eviction="lru")
    engine, prompt = listening.engine, [0]
    heard = (1, 1, *range(2, 13), 1)
    for number in heard:
        engine.add(prompt, greedy(8), encoder=sound(name, number), encoder_digest=f"sound {number}")
    done = drained(engine)
    listening.check(sorted(done, key=lambda one: int(one.request_id)), [sound(name, one) for one in heard])
    digests = {new.encoder.digest for step in listening.seen.steps for new in step.new_rows if new.encoder is not None}
    assert len(digests) == len(set(heard))
    assert listening.encoded == 13  # the first one was gone when it came again


@NAMES
def test_stream_of_an_encoder_decoder_gives_tokens_of_generate(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name)
    given = sound(name, 3)
    with listening.engine.stream([], greedy(10), encoder=given) as stream:
        tokens = [token for part in stream for token in part.token_ids]
    (again,) = listening.engine.generate([[listening.loaded.decoder_start[0]]], greedy(10), encoders=[given])
    assert tuple(tokens) == again.token_ids


def test_async_generate_reads_encoder_inputs(make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, "t5")
    prompts, sounds = listening.prompts[:3], listening.sounds[:3]

    async def both() -> list[Completion]:
        async with AsyncEngine(listening.engine) as engine:
            return await engine.generate(prompts, greedy(8), encoders=sounds)

    listening.check(asyncio.run(both()), sounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@NAMES
def test_check_with_swapped_encoder_inputs_reports_differences(
    name: str, temperature: float, make_engine: EngineFactory
) -> None:
    loaded, recorder = loaded_model(name), LogitRecorder()
    sampling = replace(greedy(12), temperature=temperature, seed=3)
    engine = make_engine(loaded, [[0]] * 2, 12, observer=recorder)  # type: ignore[arg-type]  # an observer as well
    done = engine.generate([[0]] * 2, sampling, encoders=[sound(name, 1), sound(name, 2)])
    engine.close()
    values = [feed(loaded, sound(name, number)).values for number in (1, 2)]
    right, wrong = (
        check_completions(loaded, done, [sampling] * 2, recorder, heard) for heard in (values, values[::-1])
    )
    assert (right.ok, right.tokens, right.differences) == (True, 24, ())
    assert {one.request_id for one in wrong.differences} == {"0", "1"}


# -- the border


@NAMES
def test_planned_encoder_layers_match_the_probed_forward(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(name).to(dtype)
        planned, probed = planner_model(model, block_size=16), probe(model)
        layout = page_layout(planned, probed)
        assert set(layout) == {layer.name for layer in planned.layers}
        assert sum(layer.spec.keeps is Keeps.ENCODER for layer in planned.layers) == len(probed.cross) == 3
        names = dict(model.named_modules())
        assert all(layer.name in names for layer in planned.layers)
        wrong = replace(probed, cross={index: parts[:1] for index, parts in probed.cross.items()})
        with pytest.raises(ConfigError, match="but a forward caches"):
            page_layout(planned, wrong)
        with pytest.raises(ConfigError, match="a forward reads an encoder's output in layers"):
            page_layout(planned, replace(probed, cross={}))


@NAMES
def test_encoder_outputs_of_tenants_are_separate(name: str, make_engine: EngineFactory) -> None:
    """Nor a decoder's prefix behind it."""
    listening = Listening(make_engine, name)
    engine, prompt, given = listening.engine, listening.prompts[2], sound(name, 7)
    hits, encoded = [], []
    for salt in ("a", "b", None, "b"):
        engine.add(prompt, greedy(8), cache_salt=salt, encoder=given)
        done = drained(engine)
        listening.check(done, [given])
        hits.append(done[0].hit_tokens)
        encoded.append(listening.encoded)
    assert hits == [0, 0, 0, len(prompt) - 1]
    assert encoded == [1, 2, 3, 3]


@NAMES
def test_encoder_digest_is_separate_per_tenant_and_length(name: str, make_engine: EngineFactory) -> None:
    """Run twice: with the other input still cached, and after its eviction."""
    listening = Listening(make_engine, name)
    engine, prompt = listening.engine, listening.prompts[2]
    wanted = [(None, sound(name, 1)), ("a", sound(name, 2)), ("b", sound(name, 3))]
    if name == "t5":
        wanted.append((None, [40] * 100))
    for _ in range(2):
        for salt, given in wanted:
            engine.add(prompt, greedy(8), cache_salt=salt, encoder=given, encoder_digest="theirs")
        done = drained(engine)
        done.sort(key=lambda one: int(one.request_id))
        listening.check(done, [given for _, given in wanted])
    assert [one.hit_tokens for one in done] == [len(prompt) - 1] * len(wanted)
    for salt, given in reversed(wanted):
        engine.add(prompt, greedy(8), cache_salt=salt, encoder=given, encoder_digest=b"theirs")
        (one,) = drained(engine)
        assert one.hit_tokens == 0  # text and bytes are two names
    with pytest.raises(ConfigError, match="needs a digest of its content"):
        engine.add(prompt, encoder=wanted[0][1], encoder_digest="")


# -- drafters


@pytest.mark.parametrize("drafter", ["prompt lookup", "draft model"])
@NAMES
def test_encoder_decoder_with_real_drafters_gives_outputs_without_drafts(
    name: str, drafter: str, make_engine: EngineFactory
) -> None:
    """A causal draft model does not read the encoder input. Its drafts are seldom right and change no output."""
    given, prompt = sound(name, 4), [0, *[65, 66, 67] * 6]
    sampling = [greedy(OUTPUT), replace(greedy(OUTPUT), repetition_penalty=0.2)]
    plain = Listening(make_engine, name).engine.generate([prompt] * 2, sampling, encoders=[given] * 2)
    made: Drafter = NgramDrafter(3)
    if drafter == "draft model":
        made = DraftModel(Engine(load("tiny:llama"), memory="8MiB", max_model_len=80), 3)
    listening = Listening(make_engine, name, speculate=made, in_flight=2)
    done = listening.engine.generate([prompt] * 2, sampling, encoders=[given] * 2)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert done[1].drafted_tokens > 0
    assert drafter == "draft model" or done[1].accepted_tokens > 0
    listening.check(done[:1], [given])


def test_encoder_decoder_as_draft_model_is_rejected(make_engine: EngineFactory) -> None:
    with pytest.raises(ConfigError, match="tiny:t5 is an encoder-decoder, and drafts have no encoder input"):
        DraftModel(make_engine(loaded_model("t5"), [[0]], 4))


@NAMES
def test_encoder_input_that_is_invalid_is_rejected(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name)
    engine = listening.engine
    with pytest.raises(ConfigError, match="is an encoder-decoder: give the input of its encoder"):
        engine.add([0])
    wrong: list[tuple[object, str]] = [
        ([], "encoder input is empty"),
        ([300], "outside the vocabulary"),
        ([1.5], "got 1.5 in it"),
    ]
    wrong += [([40] * 257, "257 tokens exceeds the 256")]
    if name == "whisper":
        wrong = [(np.zeros((8, 47), np.float32), r"shape \(8, 48\), got ndarray \(8, 47\)"), ([1], "got list")]
        wrong += [
            (np.zeros((8, 48), np.int64), "takes float features of shape"),
            (torch.zeros(1, 8, 48), r"got ndarray \(1, 8, 48\)"),
        ]
        wrong += [(np.full((8, 48), value, np.float32), "contain NaN or infinity") for value in (np.nan, np.inf)]
    for given, message in wrong:
        with pytest.raises(ConfigError, match=message):
            engine.add([0], encoder=given)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigError, match="1 encoder inputs for 2 prompts"):
        engine.generate([[0], [0]], encoders=[sound(name, 1)])
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        engine.generate([[0], [999]], encoders=[sound(name, 1)] * 2)
    assert engine.runner.cross is not None
    engine.step()
    assert not len(engine.runner.cross.inputs)
    assert engine.idle
    engine.close()
    llama = make_engine(loaded_model("llama"), [[65]], 4)
    with pytest.raises(ConfigError, match="has no encoder"):
        llama.add([65], encoder=[1])


@NAMES
def test_step_with_invalid_encoder_input_changes_nothing(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name)
    engine = listening.engine
    engine.add([0], greedy(4), encoder=sound(name, 1))
    step: Step = engine.scheduler.schedule()
    (new,) = step.new_rows
    assert new.encoder is not None
    wrong = [
        (replace(new, encoder=None), "begins without an encoder input"),
        (
            replace(new, encoder=replace(new.encoder, digest=b"other")),
            "input b'other', which this runner does not have",
        ),
        (replace(new, encoder=replace(new.encoder, num_tokens=200)), "needs blocks for 200 encoder tokens"),
    ]
    for row, message in wrong:
        with pytest.raises(WorkerError, match=message):
            engine.runner.execute(replace(step, new_rows=(row,)))
        assert engine.runner.tables.last_step_id == -1
    engine.runner.execute(step)


@NAMES
def test_encoder_input_of_undeclared_length_fails_its_step(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name)
    engine = listening.engine
    engine.add([0], greedy(4), encoder=sound(name, 1))
    step = engine.scheduler.schedule()
    (new,) = step.new_rows
    assert new.encoder is not None
    short = replace(new, encoder=replace(new.encoder, num_tokens=new.encoder.num_tokens - 1))
    with pytest.raises(WorkerError, match="encoder tokens, but its rows expect"):
        engine.runner.execute(replace(step, new_rows=(short,)))


@NAMES
def test_encoder_decoder_after_engine_close_is_unchanged(name: str, make_engine: EngineFactory) -> None:
    loaded = loaded_model(name)
    before = forced_logits(loaded.model, [0], [5, 6], encoder=feed(loaded, sound(name, 1)).values)
    engine = make_engine(loaded, [[0]], 4)
    engine.generate([[0]], greedy(4), encoders=[sound(name, 1)])
    engine.close()
    after = forced_logits(loaded.model, [0], [5, 6], encoder=feed(loaded, sound(name, 1)).values)
    assert torch.equal(before, after)


def test_plan_has_memory_for_the_encoder_inputs() -> None:
    loaded = loaded_model("whisper")
    one, two = (plan_for(loaded, [20] * count).config.arena_bytes for count in (1, 2))
    model = planner_model(loaded.model, block_size=16)
    assert two - one >= 2 * 16 * int(model.encoder_bytes_per_token)  # 24 tokens: two blocks


# -- requests that end before their encoder ran


def step_while(engine: Engine, leaving: Sequence[str]) -> list[Completion]:
    """The next step, and somebody aborts ``leaving`` while its forward runs."""

    def leave(*_: object) -> None:
        for one in leaving:
            engine.abort(one)

    hook = engine.runner.model.get_output_embeddings().register_forward_pre_hook(leave)
    done = engine.step()
    hook.remove()
    return done


@pytest.mark.parametrize("layout", LAYOUTS)
@NAMES
def test_encoder_request_aborted_early_fails_no_other(name: str, layout: str, make_engine: EngineFactory) -> None:
    """Its step is in flight already, and whoever else wanted its input has left, too."""
    listening = Listening(make_engine, name, layout=layout, in_flight=2)
    engine, sounds = listening.engine, {"first": sound(name, 1), "stays": sound(name, 3)}
    engine.add([0], greedy(OUTPUT), request_id="first", encoder=sounds["first"])
    engine._launch(engine.scheduler.schedule())
    leaving = ("leaves", "hears the same")
    for request_id in (*leaving, "stays"):
        engine.add([0], greedy(OUTPUT), request_id=request_id, encoder=sounds.get(request_id, sound(name, 2)))
    engine._launch(engine.scheduler.schedule())
    assert [len(step.new_rows) for step in engine._in_flight] == [1, 3]
    done = step_while(engine, leaving)
    while not engine.idle:
        done += engine.step()
    assert {one.request_id for one in done if one.finish_reason is FinishReason.ABORT} == set(leaving)
    assert listening.encoded == len(sounds) + 1
    listening.check([one for one in done if one.request_id in sounds], [sounds[one] for one in ("first", "stays")])


@NAMES
def test_encoder_inputs_of_failed_steps_are_freed(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name, in_flight=2)
    engine = listening.engine
    for number in (1, 2):
        engine.add([0], greedy(4), request_id=str(number), encoder=sound(name, number))
        engine._launch(engine.scheduler.schedule())
    with failing(engine.runner.model.get_output_embeddings()), pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    for number in (1, 2):
        engine.abort(str(number))
    while not engine.idle:
        engine.step()
    assert engine.runner.cross is not None
    assert not len(engine.runner.cross.inputs)
