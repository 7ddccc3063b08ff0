"""The identity of a model: what decides the bytes of its cache, besides the tokens.

Sessions name it in their manifest, and stores of blocks have it in each key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from hybridkv.runner.probe import Stored
from hybridkv.tiers.prefixes import IDENTITY_BYTES

_SAMPLED: Final = 1024
"""Elements of each weight that the identity of a model covers: a few megabytes of any model."""
_OWN_FIELDS: Final = frozenset(
    {"architectures", "transformers_version", "name_or_path", "dtype", "torch_dtype", "attn_implementation"}
)
"""Fields of a config that say how a model was loaded or saved, not what it computes."""


def identity_of(model: PreTrainedModel, stored: Stored) -> dict[str, Any]:
    """Return what two engines must have in common to read each other's rows. O(weights * 1024).

    Args:
        model: the model.
        stored: how its keys and values are stored.
    """
    return {
        "model": type(model).__name__,
        "config": _config_sum(model),
        "weights": weights_sum(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": [stored.kv_dtype, *stored.skipped],
    }


def blocks_identity(*said: object) -> bytes:
    """Return a hash of what gives the bytes of a block their meaning, and of the version of hybridkv: 16 bytes.

    Args:
        said: values of JSON.
    """
    text = json.dumps([*said, version("hybridkv")])
    return hashlib.blake2b(text.encode(), digest_size=IDENTITY_BYTES).digest()


def weights_sum(model: PreTrainedModel) -> str:
    """Return a SHA-256 over the weights of a model. O(weights * 1024).

    It covers the name, shape and dtype of each weight, and 1024 elements of it, evenly spaced; all of a smaller one. So
    another model and another fine-tuning are found, but not a change of a few other elements.

    Args:
        model: the model.
    """
    made = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        step = max(1, -(-flat.numel() // _SAMPLED))
        made.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        made.update(bytes_of(flat[::step]))
    return made.hexdigest()


def _config_sum(model: PreTrainedModel) -> str:
    """Return a SHA-256 over the config of a model, without the fields that say how it was loaded."""

    def kept(value: object) -> object:
        if isinstance(value, Mapping):
            own = {str(name): of for name, of in value.items()}
            return {name: kept(of) for name, of in own.items() if not name.startswith("_") and name not in _OWN_FIELDS}
        return [kept(one) for one in value] if isinstance(value, list | tuple) else value

    said = json.dumps(kept(model.config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def bits_of(view: torch.Tensor) -> torch.Tensor:
    """Return bytes in place of elements: every dtype can be indexed, and keeps every bit."""
    return view.view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, row after row. O(bytes).

    Args:
        tensor: any tensor.
    """
    data: bytes = bits_of(tensor.contiguous().reshape(-1)).cpu().numpy().tobytes()
    return data
