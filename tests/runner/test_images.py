"""Images in prompts against plain transformers: every regime, shared and separate content, and rejected prompts."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from image_models import (
    IMAGE,
    ImagePrompt,
    Size,
    generated,
    image_model,
    logits_behind,
    prompt_of,
    require_nothing_held,
)
from runner_support import TOLERANCE, EngineFactory, EveryLogit, drained, failing, greedy, relative_difference

from hybridkv.errors import ConfigError
from hybridkv.planner.plan import NATURAL, REFERENCE
from hybridkv.runner import AsyncEngine, Completion, Engine
from hybridkv.runner import engine as engine_module
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.runner.images import COMPARED, ImageCall, Picture, PromptImages, StepImages, _picture, prompt_images
from hybridkv.runner.probe import Forwards

OUTPUT = 12
WIDE, TALL, SMALL = Size(3, 4), Size(5, 2), Size(2, 2)
HEAD, MIDDLE, TAIL = list(range(40, 60)), list(range(60, 67)), list(range(70, 77))
IN_CI = ("qwen3_vl",)
BOTH_WAYS = {"gemma3"}
MODELS = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.thorough) for name in COMPARED]


def prompts_of(name: str) -> list[ImagePrompt]:
    """Two images of other sizes; the same text with another first, and another second one; one of them alone; text."""
    ways: list[list[Sequence[int] | tuple[Size, int]]] = [
        [HEAD, (WIDE, 1), MIDDLE, (TALL, 2), TAIL],
        [HEAD, (WIDE, 3), MIDDLE, (TALL, 2), TAIL],
        [HEAD, (WIDE, 1), MIDDLE, (TALL, 4), TAIL],
        [(TALL, 2), HEAD, HEAD],
        [HEAD, MIDDLE, HEAD, MIDDLE],
        [HEAD, (SMALL, 5), (SMALL, 5), TAIL],
    ]
    return [prompt_of(name, way) for way in ways]


class Compared:
    """Completions of ``loaded`` against what plain transformers says. The reference is made when no engine runs."""

    def __init__(self, name: str, make_engine: EngineFactory) -> None:
        self.name, self.loaded, self.make = name, image_model(name), make_engine
        self.prompts = prompts_of(name)
        self.expected = [generated(self.loaded, one, OUTPUT) for one in self.prompts]
        self.logits = [
            logits_behind(self.loaded, prompt, output)
            for prompt, output in zip(self.prompts, self.expected, strict=True)
        ]

    def engine(self, **options: Any) -> Engine:  # noqa: ANN401  # as EngineFactory has them
        self.seen = EveryLogit()
        return self.make(self.loaded, [one.ids for one in self.prompts], OUTPUT, observer=self.seen, **options)

    def run(self, engine: Engine, outputs: int = 1) -> list[Completion]:
        """All prompts at once, every output token and logit compared, nothing left behind."""
        sampling = replace(greedy(OUTPUT), n=outputs)
        images = [one.images for one in self.prompts]
        done = engine.generate([one.ids for one in self.prompts], sampling, images=images)
        for number, one in enumerate(done):
            self.check(number // outputs, one)
        require_nothing_held(engine)
        return done

    def check(self, number: int, done: Completion) -> None:
        moved = relative_difference(self.seen.of(done), self.logits[number])
        assert moved.max() <= TOLERANCE, (self.name, number, moved)
        assert done.token_ids == self.expected[number], (self.name, number)


def cold(compared: Compared) -> None:
    done = compared.run(compared.engine(max_running=1))
    assert done[0].hit_tokens == 0


def warm(compared: Compared) -> None:
    engine = compared.engine()
    compared.run(engine)
    encoded = engine.runner.images.store.encoded  # type: ignore[union-attr]  # there were images
    done = compared.run(engine)
    assert all(one.hit_tokens == len(one.prompt_token_ids) - 1 for one in done)
    assert engine.runner.images.store.encoded == encoded, "what is hit needs no features"  # type: ignore[union-attr]


def chunked(compared: Compared) -> None:
    compared.run(compared.engine(token_budget=13, prefix_caching=False))
    owner, cut = dict[int, list[int]](), 0
    for step in compared.seen.steps:
        owner |= {new.row: compared.prompts[int(new.request_id)].ids for new in step.new_rows}
        for row, at in zip(step.rows.tolist(), step.num_computed.tolist(), strict=True):
            cut += owner[row][max(at - 1, 0) : at + 1] == [IMAGE, IMAGE]
    assert bool(cut) == (compared.name not in BOTH_WAYS), "chunks end inside images, but for those that run whole"


def chunked_two_in_flight(compared: Compared) -> None:
    compared.run(compared.engine(token_budget=13, in_flight=2))


def preempted(compared: Compared) -> None:
    # in the natural layout, the states of a second qwen3_5 request leave it waiting instead
    layout = REFERENCE if compared.name.startswith("qwen3_5") else NATURAL
    done = compared.run(compared.engine(room_for=2, token_budget=64, block_size=4, layout=layout))
    assert sum(one.preemptions for one in done) > 0


def drafted(compared: Compared) -> None:
    engine = compared.engine(speculate=NgramDrafter(min_ngram=1))
    compared.run(engine)
    done = compared.run(engine)
    assert sum(one.drafted_tokens for one in done) > 0


def forked(compared: Compared) -> None:
    done = compared.run(compared.engine(room_for=2 * len(compared.prompts)), outputs=2)
    assert len(done) == 2 * len(compared.prompts)


def in_blocks(compared: Compared) -> None:
    """Hits that end at blocks, inside images."""
    engine = compared.engine(layout=REFERENCE, max_running=1)
    compared.run(engine)
    done = compared.run(engine)
    assert all(one.hit_tokens % 16 == 0 for one in done)
    assert done[0].hit_tokens > len(HEAD)


def few_features(compared: Compared) -> None:
    """Without room for more than the features read last."""
    engine = compared.engine(image_bytes=0, token_budget=13, prefix_caching=False)
    compared.run(engine)
    assert engine.runner.images.store.encoded > 5  # type: ignore[union-attr]  # there were images


REGIMES = [cold, warm, chunked, chunked_two_in_flight, preempted, drafted, forked, in_blocks, few_features]


@pytest.mark.parametrize("name", MODELS)
def test_image_prompts_in_every_regime_equal_plain_transformers(name: str, make_engine: EngineFactory) -> None:
    compared = Compared(name, make_engine)
    assert len(set(compared.expected)) == len(compared.prompts), "images that make no difference would hide everything"
    for regime in REGIMES:
        make_engine.close()
        regime(compared)


@pytest.mark.parametrize(
    ("attention", "name"),
    [
        ("eager", "qwen3_vl"),
        ("torch", "qwen3_vl"),
        ("gather", "gemma3"),
        pytest.param("eager", "gemma3", marks=pytest.mark.thorough),
    ],
)
def test_image_prompts_with_every_backend_equal_plain_transformers(
    attention: str, name: str, make_engine: EngineFactory
) -> None:
    compared = Compared(name, make_engine)
    engine = compared.engine(attention=attention, token_budget=13)
    compared.run(engine)
    compared.run(engine)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_image_prompts_row_by_row_equal_plain_transformers(
    name: str, make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Compared(name, make_engine)
    model = compared.loaded.model
    if hasattr(model.model, "rope_deltas"):  # what generate leaves there would move rows of text
        monkeypatch.setattr(model.model, "rope_deltas", None)
    monkeypatch.setattr(engine_module, "require_same", lambda *_: Forwards.BY_ROW)
    engine = compared.engine(token_budget=13)
    assert engine.runner.forwards is Forwards.BY_ROW
    compared.run(engine)


def test_sampled_placeholders_are_ordinary_tokens(make_engine: EngineFactory) -> None:
    """Rows with real images run in the same steps."""
    compared = Compared("qwen3_vl", make_engine)
    drawn = [IMAGE] * OUTPUT
    plain = logits_behind(compared.loaded, ImagePrompt(HEAD, None), drawn)
    plain[:, IMAGE] += 100
    engine = compared.engine(token_budget=13, prefix_caching=False)
    first = engine.add(HEAD, replace(greedy(OUTPUT), logit_bias={IMAGE: 100.0}))
    for one in compared.prompts:
        engine.add(one.ids, greedy(OUTPUT), images=one.images)
    done = {one.request_id: one for one in drained(engine)}
    assert done[first].token_ids == tuple(drawn)
    seen = compared.seen.of(done[first])
    seen[:, IMAGE] = plain[:, IMAGE] = 0  # whether an observer sees the bias is not the question
    assert relative_difference(seen, plain).max() <= TOLERANCE
    for number in range(len(compared.prompts)):
        compared.check(number, done[str(int(first) + 1 + number)])
    require_nothing_held(engine)


# -- images whose tokens see each other in both directions


def test_hit_inside_an_image_keeps_the_output(make_engine: EngineFactory) -> None:
    loaded = image_model("gemma3")
    prompt = prompt_of("gemma3", [HEAD[:10], (WIDE, 1), TAIL])
    expected = generated(loaded, prompt, OUTPUT)
    engine = make_engine(loaded, [prompt.ids], OUTPUT, layout=REFERENCE)
    for hit in (0, 16):
        (done,) = engine.generate([prompt.ids], greedy(OUTPUT), images=[prompt.images])
        assert (done.hit_tokens, done.token_ids) == (hit, expected)
    assert prompt.ids[15] == prompt.ids[16] == IMAGE


@pytest.mark.parametrize("wrong", ["chunks", "masks"])
def test_split_or_causal_images_give_other_outputs(
    wrong: str, make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Compared("gemma3", make_engine)
    if wrong == "chunks":
        monkeypatch.setattr(engine_module, "attends_both_ways", lambda _: False)
    else:
        monkeypatch.setattr(PromptImages, "last_seen", lambda _, first, behind: np.arange(first, behind))
    engine = compared.engine(token_budget=13, prefix_caching=False)
    with pytest.raises((AssertionError, IndexError)):
        compared.run(engine)


def test_images_that_cannot_run_whole_are_rejected(make_engine: EngineFactory) -> None:
    loaded = image_model("gemma3")
    prompt = prompt_of("gemma3", [HEAD, (WIDE, 1), TAIL])
    at = prompt.ids.index(IMAGE)
    two = prompt_of("gemma3", [HEAD, (WIDE, 1), (WIDE, 2), TAIL])
    touching = [*HEAD, *[IMAGE] * 18, *TAIL]
    parted = [*prompt.ids[: at + 4], 5, *prompt.ids[at + 4 :]]
    engine = make_engine(loaded, [two.ids], OUTPUT)
    for ids, images, match in (
        (touching, two.images, "must be one run of 9 placeholders after a token of text"),
        (parted, prompt.images, "must be one run of 9 placeholders"),
        (prompt.ids[: at + 9], prompt.images, "ends with item .* add text after the item"),
    ):
        with pytest.raises(ConfigError, match=match):
            engine.add(ids, greedy(OUTPUT), images=images)
    assert engine.idle
    require_nothing_held(engine)
    make_engine.close()
    engine = make_engine(loaded, [two.ids], OUTPUT, token_budget=8)
    with pytest.raises(ConfigError, match="9 tokens, which must run in one step, but a step has at most 8: raise"):
        engine.add(prompt.ids, greedy(OUTPUT), images=prompt.images)
    make_engine.close()
    reads_pages: Any = "torch"
    engine = make_engine(loaded, [two.ids], OUTPUT, attention=reads_pages)
    with pytest.raises(ConfigError, match="attend in both directions: use attention=gather or eager"):
        engine.add(prompt.ids, greedy(OUTPUT), images=prompt.images)


# -- shared content


def hits(make_engine: EngineFactory, first: ImagePrompt, then: ImagePrompt, layout: str) -> int:
    """Tokens of ``then`` found behind ``first``."""
    engine = make_engine(image_model("qwen3_vl"), [first.ids, then.ids], OUTPUT, layout=layout)
    for one in (first, then):
        (done,) = engine.generate([one.ids], greedy(OUTPUT), images=[one.images])
    return done.hit_tokens


@pytest.mark.parametrize("layout", ["natural", REFERENCE])
def test_images_that_are_equal_hit_and_others_do_not(layout: str, make_engine: EngineFactory) -> None:
    base = prompt_of("qwen3_vl", [HEAD, (WIDE, 1), MIDDLE, TAIL])
    other = prompt_of("qwen3_vl", [HEAD, (WIDE, 2), MIDDLE, TAIL])
    again = prompt_of("qwen3_vl", [HEAD, (WIDE, 1), MIDDLE, HEAD])
    behind = len(HEAD) + WIDE.rows * WIDE.columns
    assert base.ids == other.ids
    assert base.images is not None
    assert again.images is not None
    assert base.images["pixel_values"] is not again.images["pixel_values"]
    assert hits(make_engine, base, other, layout) <= len(HEAD) + 1
    assert len(HEAD) + 1 < hits(make_engine, base, again, layout)
    if layout == "natural":
        assert hits(make_engine, base, again, layout) >= behind
    assert hits(make_engine, base, ImagePrompt(base.ids, None), layout) <= len(HEAD) + 1


def test_images_of_equal_patches_and_other_grid_share_no_hit(make_engine: EngineFactory) -> None:
    first = prompt_of("qwen3_vl", [HEAD, (Size(3, 4), 1), TAIL])
    second = prompt_of("qwen3_vl", [HEAD, (Size(4, 3), 1), TAIL])
    assert first.ids == second.ids
    assert first.images is not None
    assert second.images is not None
    assert torch.equal(first.images["pixel_values"], second.images["pixel_values"])
    assert hits(make_engine, first, second, "natural") <= len(HEAD) + 1


def test_image_features_are_computed_once_per_content(make_engine: EngineFactory) -> None:
    prompts = [prompt_of("qwen3_vl", [HEAD[:n], (WIDE, 1), TAIL]) for n in (1, 2, 3)]
    engine = make_engine(image_model("qwen3_vl"), [one.ids for one in prompts], OUTPUT)
    engine.generate([one.ids for one in prompts], greedy(OUTPUT), images=[one.images for one in prompts])
    assert engine.runner.images is not None
    assert engine.runner.images.store.encoded == 1
    require_nothing_held(engine)
    engine.generate([prompts[0].ids], greedy(OUTPUT), images=[prompts[0].images])
    assert engine.runner.images.store.encoded == 1, "all but the last token was hit"


# -- requests that end otherwise


@pytest.mark.parametrize("in_flight", [1, 2])
def test_aborted_and_failed_requests_free_their_images(in_flight: int, make_engine: EngineFactory) -> None:
    compared = Compared("qwen3_vl", make_engine)
    engine = compared.engine(token_budget=13, in_flight=in_flight)
    ids = [engine.add(one.ids, greedy(OUTPUT), images=one.images) for one in compared.prompts]
    for _ in range(3):
        engine.step()
    engine.abort(ids[0])
    with failing(compared.loaded.model.get_output_embeddings()), pytest.raises(RuntimeError, match="is gone"):
        drained(engine)
    for one in drained(engine):
        if one.request_id != ids[0]:
            compared.check(ids.index(one.request_id), one)
    require_nothing_held(engine)


def test_streams_and_async_generate_read_images(make_engine: EngineFactory) -> None:
    compared = Compared("qwen3_vl", make_engine)
    first = compared.prompts[0]
    with compared.engine().stream(first.ids, greedy(OUTPUT), images=first.images) as stream:
        assert tuple(token for part in stream for token in part.token_ids) == compared.expected[0]

    async def asked() -> list[Completion]:
        async with AsyncEngine(compared.engine()) as front:
            images = [one.images for one in compared.prompts]
            return await front.generate([one.ids for one in compared.prompts], greedy(OUTPUT), images=images)

    assert [one.token_ids for one in asyncio.run(asked())] == compared.expected


# -- controls: faults change the outputs


def _one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_kind(values: dict[str, torch.Tensor]) -> Picture:
        return replace(_picture(values), digest=_picture(values).kind)

    monkeypatch.setattr("hybridkv.runner.images._picture", by_kind)


def _straight_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.runner.images._positions", lambda *_: None)


def _no_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    own = PromptImages.positions_of

    def kept(images: PromptImages, first: int, behind: int) -> np.ndarray[Any, Any]:
        found = own(images, first, behind).copy()
        assert images.positions is not None
        late = np.arange(first, behind) >= images.positions.shape[1]
        found[:, late] = np.arange(first, behind)[late]
        return found

    monkeypatch.setattr(PromptImages, "positions_of", kept)


def _no_deepstack(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ImageCall.features
    monkeypatch.setattr(ImageCall, "features", lambda *args: replace(own(*args), deep=()))


def _neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: Any) -> tuple[list[int], PromptImages]:  # noqa: ANN401
        ids, images = prompt_images(*args)
        return ids, replace(images, pictures=images.pictures[::-1], row=images.row % 4)

    monkeypatch.setattr("hybridkv.runner.images.prompt_images", other)


def _token_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepImages, "_features", lambda *_: None)


DAMAGES: list[Callable[[pytest.MonkeyPatch], None]] = [
    _one_digest,
    _straight_positions,
    _no_delta,
    _no_deepstack,
    _neighbour,
    _token_features,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_images_with_a_fault_are_detected(
    damage: Callable[[pytest.MonkeyPatch], None], make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Compared("qwen3_vl", make_engine)
    damage(monkeypatch)
    engine = compared.engine()
    with pytest.raises(AssertionError):
        compared.run(engine)
