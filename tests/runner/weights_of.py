"""Parameters that transformers' own model has, counted: the oracle that counted weights are held against.

    transformers config -> the model, on the meta device -> every parameter of its language model

It never asks ``hybridkv.models``. Parts for images and sounds are left out, as in the plan of a language model.
"""

import re

import torch
from measured_caches import _build
from transformers import PreTrainedConfig

_OTHER_PARTS = re.compile(r"vision|visual|image|audio|projector|multi_modal")
_ROUTED = re.compile(r"experts\.(gate_up|up|down)_proj(_bias|\.weight)?$|experts\.(in|out)put_linear|experts\.\d+\.")
_SHARED = re.compile(r"shared_expert")
_LOOK_UPS = re.compile(r"(embed_tokens(_per_layer)?|\bwte|\bembeddings)\.weight$")


def weights_of(config: PreTrainedConfig, chosen: int, total: int) -> tuple[int, int]:
    """Parameters of the language model of ``config``, and those that a token is multiplied with.

    chosen, total: of routed experts. A look-up counts as the head where the head is tied to it. O(parameters).
    """
    model = _build(config, "meta")
    tied = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    every = active = 0
    for name, one in model.named_parameters():
        if _OTHER_PARTS.search(name):
            continue
        size = torch.Size(one.shape).numel()
        every += size
        if _ROUTED.search(name) and not _SHARED.search(name):
            active += size * min(chosen, total) // total
        elif not _LOOK_UPS.search(name) or (tied and "per_layer" not in name):
            active += size
    return every, active
