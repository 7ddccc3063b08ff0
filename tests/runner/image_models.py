"""Tiny multimodal models, pictures in the form of their processors, and the outputs of plain transformers for both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from hybridkv.runner import Engine, LoadedModel, wrap
from hybridkv.runner.tiny import fill

_GRIDS = ("qwen", "glm")
IMAGE, START, END = 260, 262, 263


def fields_of(model_type: str) -> dict[str, Any]:
    """Of its config, as image_models.json has them: text configs share fields, and vision configs of a kind do."""
    models = json.loads((Path(__file__).parent / "image_models.json").read_text("utf-8"))
    shared, own = models["shared"], models[model_type]
    text = {**shared["text"], **own["text_config"]}
    vision = {**shared[own["vision_config"].pop("like")], **own["vision_config"]}
    return {**own, "text_config": text, "vision_config": vision}


@cache
def image_model(model_type: str, seed: int = 0) -> LoadedModel:
    """In float32 on the CPU, with weights with which images matter."""
    config = CONFIG_MAPPING[model_type](**fields_of(model_type))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    fill(model, torch.Generator().manual_seed(seed))
    if model_type == "gemma3":  # its features are as large as its scaled embeddings
        model.model.multi_modal_projector.mm_input_projection_weight.data.mul_(5)
    return wrap(model, None, model_type)


@dataclass(frozen=True, slots=True)
class Size:
    """Of a picture, in groups of four patches."""

    rows: int
    columns: int


def pixels(model_type: str, sizes: Sequence[Size], seeds: Sequence[int]) -> dict[str, torch.Tensor]:
    """What a processor makes of pictures whose content is drawn by ``seeds``; of its own size where it has one."""
    draws = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
    if model_type.startswith(_GRIDS):
        grid = torch.tensor([[1, 2 * size.rows, 2 * size.columns] for size in sizes])
        parts = [
            torch.randn(int(one.prod()), 3 * 2 * 4 * 4, generator=draw) for one, draw in zip(grid, draws, strict=True)
        ]
        return {"pixel_values": torch.cat(parts), "image_grid_thw": grid}
    if model_type == "mistral3":
        most = (max(8 * size.rows for size in sizes), max(8 * size.columns for size in sizes))
        values = torch.zeros(len(sizes), 3, *most)
        for one, size, draw in zip(values, sizes, draws, strict=True):
            one[:, : 8 * size.rows, : 8 * size.columns] = torch.randn(
                3, 8 * size.rows, 8 * size.columns, generator=draw
            )
        return {"pixel_values": values, "image_sizes": torch.tensor([[8 * one.rows, 8 * one.columns] for one in sizes])}
    side = 24 if model_type == "gemma3" else 16
    return {"pixel_values": torch.stack([torch.randn(3, side, side, generator=draw) for draw in draws])}


def placeholders(model_type: str, size: Size) -> list[int]:
    """Of one picture, as the processor writes it into a prompt."""
    if model_type.startswith(_GRIDS):
        return [START, *[IMAGE] * (size.rows * size.columns), END]
    if model_type == "mistral3":
        return [*([IMAGE] * size.columns + [START]) * (size.rows - 1), *[IMAGE] * size.columns, END]
    if model_type == "gemma3":
        return [START, *[IMAGE] * 9, END]
    return [IMAGE] * (4 if model_type in {"internvl", "aya_vision"} else 16)


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """Token ids, and what a processor made of the pictures; None for none."""

    ids: list[int]
    images: dict[str, torch.Tensor] | None


def prompt_of(model_type: str, parts: Sequence[Sequence[int] | tuple[Size, int]]) -> ImagePrompt:
    """Text as lists of ids, pictures as (size, seed)."""
    ids: list[int] = []
    pictures: list[tuple[Size, int]] = []
    for part in parts:
        if isinstance(part, tuple):
            pictures.append(part)
            ids += placeholders(model_type, part[0])
        else:
            ids += part
    sizes, seeds = [one for one, _ in pictures], [one for _, one in pictures]
    return ImagePrompt(ids, pixels(model_type, sizes, seeds) if pictures else None)


def _inputs(loaded: LoadedModel, prompt: ImagePrompt, ids: Sequence[int]) -> dict[str, Any]:
    tokens = torch.tensor([ids])
    given = {} if prompt.images is None else dict(prompt.images)
    if given and loaded.name.startswith(_GRIDS):
        given["mm_token_type_ids"] = (tokens == IMAGE).int()
    if given and loaded.name == "gemma3":
        given["token_type_ids"] = (tokens == IMAGE).int()
    return {"input_ids": tokens, **given}


def generated(loaded: LoadedModel, prompt: ImagePrompt, count: int) -> tuple[int, ...]:
    """What transformers' own generate says. The model is free: no engine holds it."""
    with torch.inference_mode():
        out = loaded.model.generate(
            **_inputs(loaded, prompt, prompt.ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt.ids) :].tolist())


def logits_behind(loaded: LoadedModel, prompt: ImagePrompt, output: Sequence[int]) -> torch.Tensor:
    """float32[output, vocabulary]: what each of ``output`` is chosen from in one plain forward. The model is free."""
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(**_inputs(loaded, prompt, [*prompt.ids, *output])).logits[0]
    return logits[len(prompt.ids) - 1 : -1].float().clone()


def require_nothing_held(engine: Engine) -> None:
    """No block, no image and no feature is left behind."""
    assert engine.cache.usage == 0
    engine.scheduler.check()
    engine.cache.check()
    images = engine.runner.images
    assert images is None or (len(images.store) == 0 and images.store.nbytes == 0)
