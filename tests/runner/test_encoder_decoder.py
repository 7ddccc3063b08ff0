"""T5 and Whisper against plain transformers in every regime and layout, and faults that these tests must find."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from listening import HEARD, LAYOUTS, NAMES, OUTPUT, Listening, sound
from runner_support import TOLERANCE, EngineFactory, failing, greedy
from scripted import ScriptedDrafter

from hybridkv.extra_keys import ExtraKeys
from hybridkv.request import Request
from hybridkv.runner import Completion, Engine
from hybridkv.runner.attention.gather import SegmentBias

ONE_LAYOUT_EACH = pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("t5", "natural"),
        ("whisper", "reference"),
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in (("t5", "reference"), ("whisper", "natural"))),
    ],
)
"""Cold and warm runs have both: what is cached, and found again, is what layouts differ in."""

# -- regimes


@pytest.mark.parametrize("layout", LAYOUTS)
@NAMES
def test_encoder_runs_once_per_input_and_warm_outputs_match(name: str, layout: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name, layout=layout)
    cold = listening.run()
    distinct, natural = len(set(HEARD)), layout == "natural"
    # without sharing, who comes in a step of its own encodes again; all came in one
    assert listening.encoded == distinct
    warm = listening.run()
    assert [one.token_ids for one in warm] == [one.token_ids for one in cold]
    assert listening.encoded == (distinct if natural else 2 * distinct)
    assert [one.hit_tokens for one in warm] == [len(one) - 1 if natural else 0 for one in listening.prompts]


@ONE_LAYOUT_EACH
def test_encoder_decoder_prompt_chunks_run_in_mixed_steps(name: str, layout: str, make_engine: EngineFactory) -> None:
    listening = Listening(make_engine, name, layout=layout, token_budget=13, prefix_caching=False)
    listening.run()
    steps = listening.seen.steps
    assert max(step.num_tokens for step in steps) <= 13
    assert any(len(step) > 1 and step.num_scheduled.max() > 1 for step in steps), "no mixed step"


@ONE_LAYOUT_EACH
def test_encoder_decoder_outputs_survive_preemption_and_failed_step(
    name: str, layout: str, make_engine: EngineFactory
) -> None:
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
            engine.scheduler._running.preempt_last(engine.scheduler._in_flight)
    done.sort(key=lambda one: int(one.request_id))
    listening.check(done, listening.sounds)
    assert sum(one.preemptions for one in done) > 0
    # the failed step's inputs at least were encoded again
    assert listening.encoded > len(set(HEARD))


@NAMES
def test_encoder_input_of_a_parent_is_shared_by_its_branches(name: str, make_engine: EngineFactory) -> None:
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


@ONE_LAYOUT_EACH
def test_encoder_decoder_with_drafts_gives_outputs_without_drafts(
    name: str, layout: str, make_engine: EngineFactory
) -> None:
    """Rows with right, wrong and mixed drafts run in the same steps."""
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
def test_damaged_encoder_blocks_change_the_logits(
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


def test_position_biases_of_another_position_change_the_logits(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = Listening(make_engine, "t5")
    (bias,) = (one for one in listening.engine.runner._stand_ins if isinstance(one, SegmentBias))
    own = bias._of
    monkeypatch.setattr(bias, "_of", lambda segment, positions: own(segment, (positions - 1).clamp(min=0)))
    (done,) = listening.engine.generate([[0]], greedy(16), encoders=[sound("t5", 5)])
    assert listening.moved(done, sound("t5", 5)).max() > 10 * TOLERANCE


@pytest.mark.parametrize("careless", ["cross attention", "decoder"])
@NAMES
def test_ignored_encoder_digest_changes_the_logits(
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
def test_encoder_blocks_are_not_read_beyond_the_output(name: str, make_engine: EngineFactory) -> None:
    """All blocks start as NaN, which would show in any output that reads beyond its own tokens."""
    listening = Listening(make_engine, name, token_budget=30)
    for views in listening.engine.runner.storage.views.values():
        for view in views:
            view.fill_(torch.nan)
    listening.run()
