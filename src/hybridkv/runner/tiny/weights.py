"""Seeded weights with which the logits depend on what is cached.

With ordinary random weights attention is nearly uniform, recurrent states fade within a few tokens, and equality
tests prove nothing. Here queries and keys are scaled until attention is sharp, values and outputs until a block
more or less moves the logits, and decays are slow; tests/runner/test_tiny.py holds the controls that prove it.

    A_log      log of U(0.01, 0.3)    a state loses 1 % to 20 % a token
    dt bias    U(-3, -1)
    Q, K norms 0.6 more than built
    norms, D   as built (1, or 0 where the model adds 1)
"""

from __future__ import annotations

import math
from typing import Final

import torch
from transformers import PreTrainedModel

_EMBEDDING_STD: Final = 0.5
_GAINS: Final = (
    ("adapter_list", 0.7),  # Zamba2: added to projections that are large enough
    ("shared_transformer.self_attn", 1.1),  # Zamba2: sharper than that, rounding errors grow from layer to layer
    (".q_proj.", 2.5),
    (".k_proj.", 2.5),
    (".q_b_proj.", 2.5),
    (".linear.", 4.0),  # Zamba: what attention says is added to an input that is normalised afterwards
)
"""The first part of a name that matches says the gain, else _OTHER_GAIN."""
_OTHER_GAIN: Final = 1.5
_NORM_GAIN: Final = 0.6
_EMBEDDINGS: Final = ("embed", "shared.weight", "relative_attention_bias")
"""By tokens and by positions; T5's by tokens is its head as well, and its third of distances."""
_BIAS_STD: Final = 1.5
_UNREADABLE: Final = 0.2
_DECAY: Final = (0.01, 0.3)
_STEP_BIAS: Final = (-3.0, -1.0)
_SHARP_NORMS: Final = ("q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")
_STEP_NAMES: Final = ("dt_bias", "dt_proj.bias", "dt_proj_bias")


def fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Give every parameter of ``model`` its weights from ``generator``, in the order of ``named_parameters``."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, generator)


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Weights of one parameter; a matrix is normal with std ``gain / sqrt(inputs)``."""
    if name.endswith("A_log"):
        weight.uniform_(*_DECAY, generator=generator).log_()
    elif name.endswith(_STEP_NAMES):
        weight.uniform_(*_STEP_BIAS, generator=generator)
    elif name.endswith(".D"):
        return
    elif name.endswith(_SHARP_NORMS):
        weight.add_(_NORM_GAIN)
    elif weight.dim() == 1:
        if name.endswith(("bias", "sinks")):
            weight.normal_(0, 0.5, generator=generator)
    elif any(part in name for part in _EMBEDDINGS):
        weight.normal_(0, _BIAS_STD if "relative" in name else _EMBEDDING_STD, generator=generator)
    elif "lm_head" in name or "proj_out" in name:
        weight.normal_(0, _OTHER_GAIN / math.sqrt(weight.shape[-1]), generator=generator)
        readable = torch.zeros(weight.shape[0], 1, dtype=torch.bool)
        readable[32:127] = True
        weight.mul_(torch.where(readable, 1.0, _UNREADABLE))  # the output is printable ASCII: fit for a terminal
    else:
        gain = next((gain for part, gain in _GAINS if part in name), _OTHER_GAIN)
        weight.normal_(0, gain / math.sqrt(weight.shape[-1]), generator=generator)
