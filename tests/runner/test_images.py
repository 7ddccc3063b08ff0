"""Images in prompts against plain transformers: every regime, what is shared and what is not, and what is refused."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from image_models import (
    END,
    IMAGE,
    START,
    ImagePrompt,
    Size,
    generated,
    image_model,
    logits_behind,
    pixels,
    placeholders,
    prompt_of,
)
from runner_support import (
    TOLERANCE,
    EngineFactory,
    EveryLogit,
    drained,
    failing,
    greedy,
    loaded_model,
    relative_difference,
)

from hybridkv.errors import ConfigError
from hybridkv.planner.plan import REFERENCE
from hybridkv.runner import AsyncEngine, Completion, Engine, wrap
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.runner.images import image_call, prompt_images, step_images
from hybridkv.runner.images.image_call import COMPARED, ImageCall
from hybridkv.runner.images.prompt_images import PromptImages

OUTPUT = 12
WIDE, TALL, SMALL = Size(3, 4), Size(5, 2), Size(2, 2)
HEAD, MIDDLE, TAIL = list(range(40, 60)), list(range(60, 67)), list(range(70, 77))
IN_CI = ("llava", "mistral3", "qwen3_vl")
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


def require_nothing_held(engine: Engine) -> None:
    assert engine.cache.usage == 0
    engine.scheduler.check()
    engine.cache.check()
    images = engine.runner.images
    assert images is None or (len(images.store) == 0 and images.store.nbytes == 0)


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
    inside = [
        step.num_computed[place]
        for step in compared.seen.steps
        for place in range(len(step))
        if step.num_scheduled[place] > 1
    ]
    assert any(len(HEAD) < one < len(HEAD) + 12 for one in inside), "no chunk ended inside an image"


def chunked_two_in_flight(compared: Compared) -> None:
    compared.run(compared.engine(token_budget=13, in_flight=2))


def preempted(compared: Compared) -> None:
    done = compared.run(compared.engine(room_for=2, token_budget=64, block_size=4))
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
def test_every_regime_equals_plain_transformers(name: str, make_engine: EngineFactory) -> None:
    compared = Compared(name, make_engine)
    assert len(set(compared.expected)) == len(compared.prompts), "images that make no difference would hide everything"
    for regime in REGIMES:
        make_engine.close()
        regime(compared)


# -- what is shared


def hits(make_engine: EngineFactory, first: ImagePrompt, then: ImagePrompt, layout: str) -> int:
    """Tokens of ``then`` found behind ``first``."""
    engine = make_engine(image_model("qwen3_vl"), [first.ids, then.ids], OUTPUT, layout=layout)
    for one in (first, then):
        (done,) = engine.generate([one.ids], greedy(OUTPUT), images=[one.images])
    return done.hit_tokens


@pytest.mark.parametrize("layout", ["natural", REFERENCE])
def test_equal_images_are_hit_and_others_never(layout: str, make_engine: EngineFactory) -> None:
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


def test_the_same_patches_in_another_grid_are_another_image(make_engine: EngineFactory) -> None:
    first = prompt_of("qwen3_vl", [HEAD, (Size(3, 4), 1), TAIL])
    second = prompt_of("qwen3_vl", [HEAD, (Size(4, 3), 1), TAIL])
    assert first.ids == second.ids
    assert first.images is not None
    assert second.images is not None
    assert torch.equal(first.images["pixel_values"], second.images["pixel_values"])
    assert hits(make_engine, first, second, "natural") <= len(HEAD) + 1


def test_features_are_made_once_per_content_while_it_lives(make_engine: EngineFactory) -> None:
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
def test_aborted_and_failed_requests_leave_no_image_behind(in_flight: int, make_engine: EngineFactory) -> None:
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


def test_streams_and_tasks_take_images(make_engine: EngineFactory) -> None:
    compared = Compared("qwen3_vl", make_engine)
    first = compared.prompts[0]
    with compared.engine().stream(first.ids, greedy(OUTPUT), images=first.images) as stream:
        assert tuple(token for part in stream for token in part.token_ids) == compared.expected[0]

    async def asked() -> list[Completion]:
        async with AsyncEngine(compared.engine()) as front:
            images = [one.images for one in compared.prompts]
            return await front.generate([one.ids for one in compared.prompts], greedy(OUTPUT), images=images)

    assert [one.token_ids for one in asyncio.run(asked())] == compared.expected


# -- a processor


def processor(*, text: list[str], images: list[int], return_tensors: str) -> dict[str, Any]:
    """As transformers' have it: "#" in a text is a picture, here a number; other characters are ids."""
    assert return_tensors == "pt"
    ids: list[int] = []
    for one in text[0]:
        ids += placeholders("qwen3_vl", WIDE) if one == "#" else [ord(one)]
    tokens = torch.tensor([ids])
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE).int(),
        **pixels("qwen3_vl", [WIDE] * len(images), images),
    }


def test_pictures_go_through_the_processor_of_the_model() -> None:
    loaded = image_model("qwen3_vl")
    prompt = prompt_of("qwen3_vl", [[65, 66], (WIDE, 1), [67], (WIDE, 2), [68]])
    expected = generated(loaded, prompt, OUTPUT)
    with Engine(wrap(loaded.model, processor=processor), memory="1MiB", max_model_len=128) as engine:
        (done,) = engine.generate(["AB#C#D"], greedy(OUTPUT), images=[[1, 2]])
    assert done.prompt_token_ids == tuple(prompt.ids)
    assert done.token_ids == expected


# -- what is refused


GIVEN = prompt_of("qwen3_vl", [HEAD, (WIDE, 1), TAIL])
PIXELS: dict[str, Any] = GIVEN.images or {}
GRID = PIXELS["image_grid_thw"]


@pytest.mark.parametrize(
    ("ids", "images", "match"),
    [
        (HEAD, PIXELS, "has 0 placeholders .token 260., but its 1 images fill 12"),
        ([*GIVEN.ids, IMAGE], PIXELS, "has 13 placeholders"),
        ([*HEAD, START, *[IMAGE] * 6, 1, *[IMAGE] * 6, END], PIXELS, "do not stand as the images' sizes say"),
        (GIVEN.ids, {**PIXELS, "pixel_values_videos": PIXELS["pixel_values"]}, "leave out pixel_values_videos"),
        (GIVEN.ids, {"image_grid_thw": GRID}, "takes images as image_grid_thw, pixel_values, got image_grid_thw"),
        (GIVEN.ids, {**PIXELS, "image_grid_thw": GRID * 2}, "has 48 patches, but image_grid_thw asks for 384"),
        (GIVEN.ids, {**PIXELS, "image_grid_thw": GRID[0]}, r"must be \[images, 3\]"),
        (GIVEN.ids, {**PIXELS, "image_grid_thw": -GRID}, r"must be \[images, 3\]"),
        (
            GIVEN.ids,
            {**PIXELS, "pixel_values": PIXELS["pixel_values"] * math.nan},
            "pixel_values must hold numbers",
        ),
        (GIVEN.ids, {**PIXELS, "pixel_values": "a cat"}, "pixel_values must be one tensor"),
        (GIVEN.ids, {**PIXELS, "pixel_values": PIXELS["pixel_values"][:, :5]}, "does not take this image"),
        (GIVEN.ids, ["a cat"], "pictures need the processor of qwen3_vl"),
        (GIVEN.ids, "a cat", "must be a list of pictures"),
    ],
)
def test_images_that_do_not_fit_are_refused_by_name(
    ids: list[int],
    images: Any,  # noqa: ANN401  # wrong ones, too
    match: str,
    make_engine: EngineFactory,
) -> None:
    engine = make_engine(image_model("qwen3_vl"), [GIVEN.ids], OUTPUT)
    with pytest.raises(ConfigError, match=match):
        engine.add(ids, greedy(OUTPUT), images=images)
    assert engine.idle
    require_nothing_held(engine)
    (done,) = engine.generate([HEAD], greedy(OUTPUT))
    assert len(done.token_ids) == OUTPUT


def test_models_without_images_say_so(make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(loaded_model("llama"), [GIVEN.ids], OUTPUT)
    with pytest.raises(ConfigError, match="LlamaForCausalLM takes no images"):
        engine.add(HEAD, greedy(OUTPUT), images=PIXELS)
    monkeypatch.setattr(image_call, "COMPARED", ("llava",))
    engine = make_engine(image_model("qwen3_vl"), [GIVEN.ids], OUTPUT)
    with pytest.raises(ConfigError, match=r"images of qwen3_vl were not compared .* images run with llava"):
        engine.add(GIVEN.ids, greedy(OUTPUT), images=PIXELS)


def test_as_many_images_as_prompts(make_engine: EngineFactory) -> None:
    engine = make_engine(image_model("qwen3_vl"), [GIVEN.ids], OUTPUT)
    with pytest.raises(ConfigError, match="images of 2 prompts for 1"):
        engine.generate([GIVEN.ids], greedy(OUTPUT), images=[PIXELS, None])
    with pytest.raises(ConfigError, match="must be a list with an entry for each prompt"):
        engine.generate([GIVEN.ids], greedy(OUTPUT), images=PIXELS)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["a", 3])
def test_a_processor_must_be_one(wrong: object) -> None:
    with pytest.raises(ConfigError, match="the processor must take a text and its pictures"):
        wrap(image_model("qwen3_vl").model, processor=wrong)


def test_what_a_processor_raises_is_said() -> None:
    def fails(**_: object) -> None:
        raise ValueError("no such picture")

    with Engine(wrap(image_model("qwen3_vl").model, processor=fails), memory="1MiB", max_model_len=128) as engine:
        with pytest.raises(ConfigError, match="does not take these images: no such picture"):
            engine.add("a", images=[1])
        with pytest.raises(ConfigError, match="pictures need a prompt of text"):
            engine.add([1], images=[1])


# -- controls: what would be wrong shows


def _one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    own = prompt_images._picture
    monkeypatch.setattr(prompt_images, "_picture", lambda values: replace(own(values), digest=own(values).kind))


def _straight_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_images, "_positions", lambda *_: None)


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
    own = prompt_images.prompt_images

    def other(*args: Any) -> tuple[list[int], PromptImages]:  # noqa: ANN401
        ids, images = own(*args)
        return ids, replace(images, pictures=images.pictures[::-1], row=images.row % 4)

    monkeypatch.setattr("hybridkv.runner.images.step_images.prompt_images", other)


def _token_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_images.StepImages, "_features", lambda *_: None)


DAMAGES: list[Callable[[pytest.MonkeyPatch], None]] = [
    _one_digest,
    _straight_positions,
    _no_delta,
    _no_deepstack,
    _neighbour,
    _token_features,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_would_be_wrong_shows(
    damage: Callable[[pytest.MonkeyPatch], None], make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Compared("qwen3_vl", make_engine)
    damage(monkeypatch)
    engine = compared.engine()
    with pytest.raises(AssertionError):
        compared.run(engine)
