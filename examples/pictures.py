"""Questions about pictures: a loaded multimodal model, with pages shared between requests that show the same pictures.

    python examples/pictures.py

The model is a tiny random Qwen3-VL, so its answers mean nothing, but they equal the answers of ``model.generate``.
``process`` stands for the model's own processor, ``AutoProcessor.from_pretrained(...)``. From a text and its pictures
it makes pixels, and token ids with a placeholder for every group of patches. ``hybridkv.runner.load`` returns the
processor with a model that it reads from a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from hybridkv import Engine, SamplingParams
from hybridkv.runner import Completion, wrap

IMAGE, START, END = 260, 261, 262
PATCH, MERGE = 4, 2
QUESTIONS = (("sunset", "#Where is this?"), ("sunset", "#What is it?"), ("harbour", "#What is it?"))
SAMPLING = SamplingParams(max_tokens=8, ignore_eos=True)


def tiny_model() -> PreTrainedModel:
    """Build a Qwen3-VL of two layers with random weights."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    vision = {"hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE}
    config = Qwen3VLConfig(
        text_config={**text, "vocab_size": 264, "rope_parameters": rope},
        vision_config={**vision, "intermediate_size": 64, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return Qwen3VLForConditionalGeneration(config).eval()


def process(*, text: list[str], images: Sequence[str], return_tensors: str = "pt") -> dict[str, torch.Tensor]:
    """Bytes as token ids, ``#`` as a picture of 6 by 8 patches: noise of its name's own, here."""
    del return_tensors
    grid = torch.tensor([[1, 6, 8]] * len(images))
    noise = [torch.Generator().manual_seed(sum(name.encode())) for name in images]
    pixels = [torch.randn(6 * 8, 3 * 2 * PATCH * PATCH, generator=one) for one in noise]
    picture = [START, *[IMAGE] * (6 * 8 // MERGE**2), END]
    ids = [token for one in text[0].encode() for token in (picture if one == ord("#") else [one])]
    tokens = torch.tensor([ids])
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": grid,
    }


def answers(model: PreTrainedModel) -> list[Completion]:
    """One question after the other: text and pictures in, the processor does the rest."""
    done: list[Completion] = []
    with Engine(wrap(model, processor=process), memory="16MiB", max_model_len=256) as engine:
        for picture, question in QUESTIONS:
            done += engine.generate([question], SAMPLING, images=[[picture]])
    return done


def by_itself(model: PreTrainedModel) -> list[list[int]]:
    """Return the answer of ``model.generate`` of transformers."""
    outputs: list[list[int]] = []
    for picture, question in QUESTIONS:
        inputs: dict[str, Any] = process(text=[question], images=[picture])
        ids = model.generate(**inputs, max_new_tokens=SAMPLING.max_tokens, do_sample=False, eos_token_id=None)
        outputs.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
    return outputs


def main() -> None:
    """Run it."""
    model = tiny_model()
    for (picture, question), one, plain in zip(QUESTIONS, answers(model), by_itself(model), strict=True):
        same = "as model.generate" if list(one.token_ids) == plain else "not as model.generate"
        print(f"{picture:8}{question:17}{one.hit_tokens} of {len(one.prompt_token_ids)} tokens hit, {same}")


if __name__ == "__main__":
    main()
