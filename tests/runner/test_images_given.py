"""Images from callers: pictures for a processor, outputs of a processor, rejected inputs, and models from folders."""

import math
from pathlib import Path
from typing import Any

import pictures
import pytest
import torch
from image_models import (
    END,
    IMAGE,
    START,
    Size,
    generated,
    image_model,
    pixels,
    placeholders,
    prompt_of,
    require_nothing_held,
)
from runner_support import EngineFactory, greedy, loaded_model
from transformers import AutoProcessor

from hybridkv.errors import ConfigError
from hybridkv.runner import Engine, byte_tokenizer, load, wrap

OUTPUT = 12
WIDE = Size(3, 4)
HEAD, TAIL = list(range(40, 60)), list(range(70, 77))


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


def test_pictures_are_prepared_by_the_processor_of_the_model() -> None:
    loaded = image_model("qwen3_vl")
    prompt = prompt_of("qwen3_vl", [[65, 66], (WIDE, 1), [67], (WIDE, 2), [68]])
    expected = generated(loaded, prompt, OUTPUT)
    with Engine(wrap(loaded.model, processor=processor), memory="1MiB", max_model_len=128) as engine:
        (done,) = engine.generate(["AB#C#D"], greedy(OUTPUT), images=[[1, 2]])
    assert done.prompt_token_ids == tuple(prompt.ids)
    assert done.token_ids == expected


# -- rejected inputs


GIVEN = prompt_of("qwen3_vl", [HEAD, (WIDE, 1), TAIL])
PIXELS: dict[str, Any] = GIVEN.images or {}
GRID = PIXELS["image_grid_thw"]


@pytest.mark.parametrize(
    ("ids", "images", "match"),
    [
        (HEAD, PIXELS, "has 0 placeholders .token 260., but its 1 images fill 12"),
        ([*GIVEN.ids, IMAGE], PIXELS, "has 13 placeholders"),
        ([*HEAD, START, *[IMAGE] * 6, 1, *[IMAGE] * 6, END], PIXELS, "do not match the sizes of the images"),
        (GIVEN.ids, {**PIXELS, "pixel_values_videos": PIXELS["pixel_values"]}, "leave out pixel_values_videos"),
        (GIVEN.ids, {"image_grid_thw": GRID}, "takes images as image_grid_thw, pixel_values, got image_grid_thw"),
        (GIVEN.ids, {**PIXELS, "image_grid_thw": GRID * 2}, "has 48 patches, but image_grid_thw asks for 384"),
        (GIVEN.ids, {**PIXELS, "image_grid_thw": GRID[0]}, r"must be \[images, 3\]"),
        (GIVEN.ids, {**PIXELS, "image_grid_thw": -GRID}, r"must be \[images, 3\]"),
        (GIVEN.ids, {**PIXELS, "pixel_values": PIXELS["pixel_values"] * math.nan}, "must hold finite numbers"),
        (GIVEN.ids, {**PIXELS, "pixel_values": "a cat"}, "pixel_values must be one tensor"),
        (GIVEN.ids, {**PIXELS, "pixel_values": PIXELS["pixel_values"][:, :5]}, "does not take this image"),
        (GIVEN.ids, ["a cat"], "pictures need the processor of qwen3_vl"),
        (GIVEN.ids, "a cat", "must be a list of pictures"),
    ],
)
def test_images_that_do_not_fit_the_prompt_are_rejected(
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


def test_images_for_models_without_image_support_are_rejected(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(loaded_model("llama"), [GIVEN.ids], OUTPUT)
    with pytest.raises(ConfigError, match="LlamaForCausalLM takes no images"):
        engine.add(HEAD, greedy(OUTPUT), images=PIXELS)
    monkeypatch.setattr("hybridkv.runner.images.COMPARED", ("llava",))
    engine = make_engine(image_model("qwen3_vl"), [GIVEN.ids], OUTPUT)
    with pytest.raises(ConfigError, match=r"images of qwen3_vl were not compared .* use a model of llava"):
        engine.add(GIVEN.ids, greedy(OUTPUT), images=PIXELS)


def test_images_for_another_number_of_prompts_are_rejected(make_engine: EngineFactory) -> None:
    engine = make_engine(image_model("qwen3_vl"), [GIVEN.ids], OUTPUT)
    with pytest.raises(ConfigError, match="images of 2 prompts for 1"):
        engine.generate([GIVEN.ids], greedy(OUTPUT), images=[PIXELS, None])
    with pytest.raises(ConfigError, match="must be a list with an entry for each prompt"):
        engine.generate([GIVEN.ids], greedy(OUTPUT), images=PIXELS)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["a", 3])
def test_processor_that_is_not_callable_is_rejected(wrong: object) -> None:
    with pytest.raises(ConfigError, match="the processor must be callable"):
        wrap(image_model("qwen3_vl").model, processor=wrong)


def test_processor_error_is_reported() -> None:
    def fails(**_: object) -> None:
        raise ValueError("no such picture")

    with Engine(wrap(image_model("qwen3_vl").model, processor=fails), memory="1MiB", max_model_len=128) as engine:
        with pytest.raises(ConfigError, match="does not take these images: no such picture"):
            engine.add("a", images=[1])
        with pytest.raises(ConfigError, match="pictures need a prompt of text"):
            engine.add([1], images=[1])


# -- from a folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = image_model("qwen3_vl").model
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_multimodal_model_loaded_from_a_folder_gives_the_same_tokens(folder: Path) -> None:
    loaded, expected = load(folder), generated(image_model("qwen3_vl"), GIVEN, OUTPUT)
    assert loaded.processor is None
    with Engine(loaded, memory="1MiB", max_model_len=128) as engine:
        (done,) = engine.generate([GIVEN.ids], greedy(OUTPUT), images=[GIVEN.images])
    assert done.token_ids == expected


def test_processor_is_loaded_from_the_model_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "preprocessor_config.json").write_text("{}")
    asked = dict[str, Any]()

    def made(where: Path, **options: object) -> object:
        asked.update(options, where=where)
        return processor

    monkeypatch.setattr(AutoProcessor, "from_pretrained", made)
    assert load(folder).processor is processor
    assert asked == {"where": folder, "local_files_only": True, "trust_remote_code": False}


def test_processor_that_cannot_be_made_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "preprocessor_config.json").write_text("[]")
    assert load(folder).processor is None
    assert "takes no pictures here, because its processor cannot be made" in caplog.text


def test_pictures_example_prints_outputs_of_plain_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    pictures.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["sunset", "sunset", "harbour"]
    assert all(line.endswith(" tokens hit, as model.generate") for line in lines)
    hit = [int(line.rpartition(" of ")[0].rpartition("?")[2]) for line in lines]
    assert hit[0] == 0
    assert hit[1] >= 14, "the picture is the same"
    assert hit[2] < 2, "another picture, the same text"
