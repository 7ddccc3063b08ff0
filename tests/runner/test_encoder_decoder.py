"""T5 and Whisper against plain transformers; encoders run once for equal inputs, and no input hears another."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from runner_support import (
    TOLERANCE,
    EngineFactory,
    EveryLogit,
    failing,
    greedy,
    loaded_model,
    relative_difference,
)
from scripted import ScriptedDrafter

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.extra_keys import ExtraKeys
from hybridkv.request import Request
from hybridkv.runner import TINY_ENCODER_DECODERS, AsyncEngine, Completion, Engine, LoadedModel, plan_for, tiny_model
from hybridkv.runner.check import LogitRecorder, check_completions, forced_logits, generate_greedy
from hybridkv.runner.drafters import Drafter, DraftModel
from hybridkv.runner.encoder_inputs import EncoderFeed, Given, encoder_feed
from hybridkv.runner.probe import attention_implementation, page_layout, planner_model, probe
from hybridkv.schedule import FinishReason
from hybridkv.specs import Keeps
from hybridkv.step import Step

OUTPUT = 24
LAYOUTS = ("natural", "reference")
NAMES = pytest.mark.parametrize("name", TINY_ENCODER_DECODERS)


def sound(name: str, number: int) -> Given:
    """An encoder's input: 5 .. 60 token ids, or features."""
    rng = np.random.default_rng(number)
    if name == "t5":
        return [int(one) for one in rng.integers(32, 127, int(rng.integers(5, 61)))]
    return rng.standard_normal((8, 48)).astype(np.float32)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    """Decoder prompts: the first two and the last are the start token alone; the others share a beginning."""
    rng = np.random.default_rng(seed)
    head = [0, *rng.integers(32, 127, 20).tolist()]
    tails = [rng.integers(32, 127, int(rng.integers(1, 30))).tolist() for _ in range(count - 3)]
    return [[0], [0], *(head + tail for tail in tails), [0]]


# the last request hears what the first does, the second something else; 2 and 3 are alike but for their prompts
HEARD = (0, 1, 2, 2, 3, 4, 0)


class Listening:
    """An engine over tiny:``name`` whose every logit is compared with plain transformers."""

    def __init__(self, make: EngineFactory, name: str, **options: int | bool | str | Drafter | None) -> None:
        self.loaded, self.seen = loaded_model(name), EveryLogit()
        self.prompts, self.sounds = prompts_of(len(HEARD)), [sound(name, one) for one in HEARD]
        self.engine: Engine = make(self.loaded, self.prompts, OUTPUT, observer=self.seen, **options)  # type: ignore[arg-type]  # by name

    @property
    def encoded(self) -> int:
        assert self.engine.runner.cross is not None
        return self.engine.runner.cross.encoded

    def run(self) -> list[Completion]:
        done = self.engine.generate(self.prompts, greedy(OUTPUT), encoders=self.sounds)
        self.check(done, self.sounds)
        return done

    def check(self, done: Sequence[Completion], sounds: Sequence[Given]) -> None:
        """Logits and tokens of ``done`` are right, and nothing is held for nothing."""
        for one, given in zip(done, sounds, strict=True):
            moved = self.moved(one, given)
            assert moved.max() <= TOLERANCE, (one.request_id, moved)
            assert list(one.token_ids) == generated(self.loaded, one, given)
        self.engine.scheduler.check()
        assert self.engine.cache.usage == 0
        assert self.engine.runner.cross is not None
        assert not len(self.engine.runner.cross.inputs)

    def moved(self, done: Completion, given: Given) -> torch.Tensor:
        return relative_difference(self.seen.of(done), reference(self.loaded, done, given))


def feed(loaded: LoadedModel, given: Given) -> EncoderFeed:
    return encoder_feed(loaded, given, None, 1 << 20)


_REFERENCE: dict[tuple[str, bytes | str, tuple[int, ...]], torch.Tensor] = {}
_GENERATED: dict[tuple[str, bytes | str, tuple[int, ...]], list[int]] = {}
"""By model, input and text: many runs make the same."""


def reference(loaded: LoadedModel, done: Completion, given: Given) -> torch.Tensor:
    heard = feed(loaded, given)
    key = (loaded.name, heard.read.digest, (len(done.prompt_token_ids), *done.prompt_token_ids, *done.token_ids))
    if key not in _REFERENCE:
        with attention_implementation(loaded.model, "eager"), torch.inference_mode():
            _REFERENCE[key] = forced_logits(loaded.model, done.prompt_token_ids, done.token_ids, encoder=heard.values)
    return _REFERENCE[key]


def generated(loaded: LoadedModel, done: Completion, given: Given) -> list[int]:
    """What transformers' own loop says behind the prompt."""
    heard, count = feed(loaded, given), len(done.token_ids)
    key = (loaded.name, heard.read.digest, done.prompt_token_ids)
    if len(_GENERATED.get(key, [])) < count:
        with attention_implementation(loaded.model, "eager"), torch.inference_mode():
            _GENERATED[key] = generate_greedy(loaded.model, done.prompt_token_ids, count, encoder=heard.values)
    return _GENERATED[key][:count]


# -- regimes


@pytest.mark.parametrize("layout", LAYOUTS)
@NAMES
def test_cold_and_warm(name: str, layout: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name, layout=layout)
    cold = listening.run()
    distinct, natural = len(set(HEARD)), layout == "natural"
    # without sharing, who comes in a step of its own encodes again; all came in one
    assert listening.encoded == distinct
    warm = listening.run()
    assert [one.token_ids for one in warm] == [one.token_ids for one in cold]
    assert listening.encoded == (distinct if natural else 2 * distinct)
    assert [one.hit_tokens for one in warm] == [len(one) - 1 if natural else 0 for one in listening.prompts]


@pytest.mark.parametrize("layout", LAYOUTS)
@NAMES
def test_chunks_of_a_prompt_in_mixed_steps(name: str, layout: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name, layout=layout, token_budget=13, prefix_caching=False)
    listening.run()
    steps = listening.seen.steps
    assert max(step.num_tokens for step in steps) <= 13
    assert any(len(step) > 1 and step.num_scheduled.max() > 1 for step in steps), "no mixed step"


@pytest.mark.parametrize("layout", LAYOUTS)
@NAMES
def test_preempted_and_failed(name: str, layout: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name, layout=layout, room_for=2, token_budget=64, in_flight=2)
    engine = listening.engine
    for place, (prompt, given) in enumerate(zip(listening.prompts, listening.sounds, strict=True)):
        engine.add(prompt, greedy(OUTPUT), request_id=str(place), encoder=given)
    done: list[Completion] = []
    head = engine.runner.model.get_output_embeddings()
    for number in range(1000):
        if engine.idle:
            break
        if number == 1:
            with failing(head), pytest.raises(RuntimeError, match="the device is gone"):
                engine.step()
        else:
            done += engine.step()
        if number in {5, 25} and engine.scheduler.num_running and engine.scheduler.num_in_flight == 1:
            engine.scheduler._preempt_last()
    done.sort(key=lambda one: int(one.request_id))
    listening.check(done, listening.sounds)
    assert sum(one.preemptions for one in done) > 0
    # the failed step's inputs at least were encoded again
    assert listening.encoded > len(set(HEARD))


@NAMES
def test_branches_read_what_their_parent_reads(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name, room_for=2 * len(HEARD))
    sampling = replace(greedy(OUTPUT), n=2)
    done = listening.engine.generate(listening.prompts, sampling, encoders=listening.sounds)
    listening.check(done, [given for given in listening.sounds for _ in range(2)])
    assert listening.encoded == len(set(HEARD))
    assert any(copy.kind == "block" for step in listening.seen.steps for copy in step.copies), "no copy on write"
    encodes = [
        new.encoder is not None and new.encoder.encodes for step in listening.seen.steps for new in step.new_rows
    ]
    assert (len(encodes), sum(encodes)) == (2 * len(HEARD), len(set(HEARD)))


@pytest.mark.parametrize("layout", LAYOUTS)
@NAMES
def test_drafts_are_verified_several_tokens_at_a_time(name: str, layout: str, make_engine: EngineFactory) -> None:
    """All right, all wrong, and some of each, in rows that run beside each other."""
    plain = Listening(make_engine, name)
    sampling = [replace(greedy(OUTPUT), seed=seed) for seed in range(len(HEARD))]  # by which the drafter knows them
    expected = plain.engine.generate(plain.prompts, sampling, encoders=plain.sounds)
    drafter = ScriptedDrafter(lambda request, asked: ((request.sampling.seed + asked) % 4, 3), 3)
    drafter.learn(zip(expected, sampling, strict=True))
    listening = Listening(make_engine, name, layout=layout, speculate=drafter, room_for=2 * len(HEARD))
    done = listening.engine.generate(listening.prompts, sampling, encoders=listening.sounds)
    listening.check(done, listening.sounds)
    assert 0 < sum(one.accepted_tokens for one in done) < sum(one.drafted_tokens for one in done)
    assert listening.encoded == len(set(HEARD))


# -- who hears what


@NAMES
def test_equal_inputs_are_encoded_once_and_others_share_nothing(name: str, make_engine: EngineFactory) -> None:
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
def test_a_caller_may_name_the_content_and_eviction_makes_it_heard_again(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name, room_for=1, max_running=1)
    engine, prompt = listening.engine, [0]
    heard = (1, 1, *range(2, 13), 1)
    for number in heard:
        engine.add(prompt, greedy(8), encoder=sound(name, number), encoder_digest=f"sound {number}")
    done: list[Completion] = []
    while not engine.idle:
        done += engine.step()
    listening.check(sorted(done, key=lambda one: int(one.request_id)), [sound(name, one) for one in heard])
    digests = {new.encoder.digest for step in listening.seen.steps for new in step.new_rows if new.encoder is not None}
    assert digests == {f"sound {number}" for number in range(1, 13)}
    assert listening.encoded == 13  # the first one was gone when it came again


@NAMES
def test_streams_of_an_encoder_decoder(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name)
    given = sound(name, 3)
    with listening.engine.stream([], greedy(10), encoder=given) as stream:
        tokens = [token for part in stream for token in part.token_ids]
    (again,) = listening.engine.generate([[listening.loaded.decoder_start[0]]], greedy(10), encoders=[given])
    assert tuple(tokens) == again.token_ids


def test_tasks_of_an_event_loop_hear(make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, "t5")
    prompts, sounds = listening.prompts[:3], listening.sounds[:3]

    async def both() -> list[Completion]:
        async with AsyncEngine(listening.engine) as engine:
            return await engine.generate(prompts, greedy(8), encoders=sounds)

    listening.check(asyncio.run(both()), sounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@NAMES
def test_the_check_of_generate_knows_encoders(name: str, temperature: float, make_engine: EngineFactory) -> None:
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


# -- controls: what these tests must notice


def zero_cross(engine: Engine, layer: int, column: int) -> None:
    """A block of the encoder's output of row 0 is lost in one layer."""
    assert engine.runner.cross is not None
    of = engine.runner.cross._layers[layer]
    block = int(engine.runner.tables[of.group].get_numpy_array()[0, column])
    for pages in of.pages:
        assert pages[block].any()
        pages[block] = 0


def alias_cross(engine: Engine, layer: int, column: int) -> None:
    """Row 0 reads another column's block instead, in all layers of the group."""
    assert engine.runner.cross is not None
    table = engine.runner.tables[engine.runner.cross._layers[layer].group]
    other = int(table.get_numpy_array()[0, 1 - column])
    assert other
    table.write_cells([0], [column], [other])


@pytest.mark.parametrize("damage", [zero_cross, alias_cross])
@pytest.mark.parametrize("layer", range(3))
@NAMES
def test_damage_of_the_encoders_output_moves_the_logits(
    name: str, layer: int, damage: Callable[[Engine, int, int], None], make_engine: EngineFactory
) -> None:
    listening = Listening(make_engine, name)
    engine, given = listening.engine, sound(name, 5)
    engine.add([0], greedy(16), encoder=given)
    done: list[Completion] = []
    while not engine.idle:
        if len(listening.seen.logits) == 4:
            damage(engine, layer, 0)
        done += engine.step()
    moved = listening.moved(done[0], given)
    assert moved[:4].max() <= TOLERANCE
    assert moved[4:].max() > 10 * TOLERANCE


def test_biases_of_another_position_move_the_logits(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = Listening(make_engine, "t5")
    (bias,) = listening.engine.runner._biases
    own = bias._of
    monkeypatch.setattr(bias, "_of", lambda segment, positions: own(segment, (positions - 1).clamp(min=0)))
    (done,) = listening.engine.generate([[0]], greedy(16), encoders=[sound("t5", 5)])
    assert listening.moved(done, sound("t5", 5)).max() > 10 * TOLERANCE


@pytest.mark.parametrize("careless", ["cross attention", "decoder"])
@NAMES
def test_a_digest_that_is_ignored_is_seen(
    name: str, careless: str, make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if careless == "decoder":
        plain = ExtraKeys.__init__

        def without(self: ExtraKeys, *args: object, **known: object) -> None:
            plain(self, *args, **({**known, "encoder": None} if args[0] != 1 else known))  # type: ignore[arg-type]  # as it came

        monkeypatch.setattr(ExtraKeys, "__init__", without)
    else:
        monkeypatch.setattr(
            Request, "encoder_keys", lambda _, size: [b"%d" % column for column in range(24 // size + 1)]
        )
    listening = Listening(make_engine, name)
    inputs = [sound(name, number) for number in (7, 8)]
    if name == "t5":
        inputs = [list(range(40, 64)), list(range(60, 84))]
    done = [listening.engine.generate([listening.prompts[2]], greedy(8), encoders=[given])[0] for given in inputs]
    moved = [float(listening.moved(one, given).max()) for one, given in zip(done, inputs, strict=True)]
    assert moved[0] <= TOLERANCE
    assert moved[1] > 10 * TOLERANCE


@NAMES
def test_nothing_behind_an_output_is_read(name: str, make_engine: EngineFactory) -> None:
    """What a block's former owner left, were it NaN, never reaches anybody."""
    listening = Listening(make_engine, name, token_budget=30)
    for views in listening.engine.runner.storage.views.values():
        for view in views:
            view.fill_(torch.nan)
    listening.run()


# -- the border


@NAMES
def test_planned_bytes_are_what_a_forward_shows(name: str) -> None:
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


def test_an_encoder_decoder_cannot_draft(make_engine: EngineFactory) -> None:
    with pytest.raises(ConfigError, match="tiny:t5 reads an encoder's input, which drafts have none of"):
        DraftModel(make_engine(loaded_model("t5"), [[0]], 4))


@NAMES
def test_inputs_that_cannot_be_heard(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name)
    engine = listening.engine
    with pytest.raises(ConfigError, match="is an encoder-decoder: hand over what its encoder reads"):
        engine.add([0])
    wrong: list[tuple[object, str]] = [
        ([], "encoder input is empty"),
        ([300], "outside the vocabulary"),
        ([1.5], "got 1.5 in it"),
    ]
    wrong += [([40] * 257, "257 tokens exceeds the 256")]
    if name == "whisper":
        wrong = [(np.zeros((8, 47), np.float32), r"shape \(8, 48\), floats, got \(8, 47\)"), ([1], "got list")]
        wrong += [(np.zeros((8, 48), np.int64), "floats"), (torch.zeros(1, 8, 48), r"got \(1, 8, 48\)")]
        wrong += [(np.full((8, 48), value, np.float32), "there are NaN or infinite ones") for value in (np.nan, np.inf)]
    for given, message in wrong:
        with pytest.raises(ConfigError, match=message):
            engine.add([0], encoder=given)  # type: ignore[arg-type]  # on purpose
    if name == "t5":
        held = engine.add([0], encoder=[40] * 3, encoder_digest="x")
        with pytest.raises(ConfigError, match="equal digests to equal inputs only"):
            engine.add([0], encoder=[40] * 4, encoder_digest="x")
        engine.abort(held)
        while not engine.idle:
            engine.step()
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
def test_steps_whose_encoders_cannot_run_change_nothing(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name)
    engine = listening.engine
    engine.add([0], greedy(4), encoder=sound(name, 1))
    step: Step = engine.scheduler.schedule()
    (new,) = step.new_rows
    assert new.encoder is not None
    wrong = [
        (replace(new, encoder=None), "begins without an encoder input"),
        (replace(new, encoder=replace(new.encoder, digest=b"other")), "input b'other', which is not here"),
        (replace(new, encoder=replace(new.encoder, num_tokens=200)), "needs blocks for 200 encoder tokens"),
    ]
    for row, message in wrong:
        with pytest.raises(WorkerError, match=message):
            engine.runner.execute(replace(step, new_rows=(row,)))
        assert engine.runner.tables.last_step_id == -1
    engine.runner.execute(step)


@NAMES
def test_an_input_of_other_length_than_promised_fails_its_step(name: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name)
    engine = listening.engine
    engine.add([0], greedy(4), encoder=sound(name, 1))
    step = engine.scheduler.schedule()
    (new,) = step.new_rows
    assert new.encoder is not None
    short = replace(new, encoder=replace(new.encoder, num_tokens=new.encoder.num_tokens - 1))
    with pytest.raises(WorkerError, match="encoder tokens, not"):
        engine.runner.execute(replace(step, new_rows=(short,)))


@NAMES
def test_a_model_is_itself_again_when_the_engine_is_closed(name: str, make_engine: EngineFactory) -> None:
    loaded = loaded_model(name)
    before = forced_logits(loaded.model, [0], [5, 6], encoder=feed(loaded, sound(name, 1)).values)
    engine = make_engine(loaded, [[0]], 4)
    engine.generate([[0]], greedy(4), encoders=[sound(name, 1)])
    engine.close()
    after = forced_logits(loaded.model, [0], [5, 6], encoder=feed(loaded, sound(name, 1)).values)
    assert torch.equal(before, after)


def test_room_for_inputs_is_planned() -> None:
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
def test_who_leaves_before_the_encoder_runs_fails_nobody(name: str, layout: str, make_engine: EngineFactory) -> None:
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
def test_inputs_of_steps_that_failed_are_given_back(name: str, make_engine: EngineFactory) -> None:
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
