"""Tiny multimodal models, pictures as their processors make them, and what plain transformers says to both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from hybridkv.runner import Engine, LoadedModel, wrap
from hybridkv.runner.tiny import fill

_GRIDS = ("qwen", "glm")
IMAGE, VIDEO, START, END, VOCABULARY = 260, 261, 262, 263, 300
_TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "eos_token_id": VOCABULARY - 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_MARKS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_PATCHES = {"depth": 3, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
_QWEN3_VISION = {
    **_PATCHES,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 2],
}
_QWEN3_TEXT = {**_TEXT, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 1.0,
}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_LLAMA = {**_TEXT, "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_vl": {**_MARKS, "text_config": _QWEN3_TEXT, "vision_config": _QWEN3_VISION},
    "qwen3_vl_moe": {**_MARKS, "text_config": {**_QWEN3_TEXT, **_EXPERTS}, "vision_config": _QWEN3_VISION},
    "qwen2_vl": {
        **_MARKS,
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "vision_config": {**_PATCHES, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        **_MARKS,
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "vision_config": {
            **_PATCHES,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_5": {
        **_MARKS,
        "text_config": {**_TEXT, **_DELTA, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        "vision_config": {name: value for name, value in _QWEN3_VISION.items() if name != "deepstack_visual_indexes"},
    },
    "qwen3_5_moe": {
        **_MARKS,
        "text_config": {
            **_TEXT,
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": {**_ROPE, "mrope_interleaved": True},
        },
        "vision_config": {name: value for name, value in _QWEN3_VISION.items() if name != "deepstack_visual_indexes"},
    },
    "glm4v": {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "text_config": {**_TEXT, "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}},
        "vision_config": {
            **_PATCHES,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "image_size": 32,
        },
    },
    "aya_vision": {
        "image_token_id": IMAGE,
        "image_token_index": IMAGE,
        "downsample_factor": 2,
        "vision_feature_layer": -1,
        "text_config": {**_LLAMA, "model_type": "cohere2", "sliding_window": 24},
        "vision_config": {**_CLIP, "model_type": "siglip_vision_model"},
    },
    "llava": {
        "image_token_index": IMAGE,
        "image_token_id": IMAGE,
        "text_config": _LLAMA,
        "vision_config": {**_CLIP, "model_type": "clip_vision_model", "projection_dim": 32},
    },
    "gemma3": {
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
        "mm_tokens_per_image": 9,
        "tie_word_embeddings": False,
        "text_config": {
            **_TEXT,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": {**_CLIP, "image_size": 24},
    },
    "internvl": {
        "image_token_id": IMAGE,
        "downsample_ratio": 0.5,
        "text_config": {**_LLAMA, "model_type": "qwen2"},
        "vision_config": {**_CLIP, "image_size": [16, 16], "patch_size": [4, 4]},
    },
    "mistral3": {
        "image_token_index": IMAGE,
        "image_token_id": IMAGE,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "text_config": {**_LLAMA, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**_CLIP, "model_type": "pixtral", "head_dim": 16, "image_size": 64},
    },
}


@cache
def image_model(model_type: str, seed: int = 0) -> LoadedModel:
    """In float32 on the CPU, with weights with which images matter."""
    config = CONFIG_MAPPING[model_type](**FIELDS[model_type])
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
