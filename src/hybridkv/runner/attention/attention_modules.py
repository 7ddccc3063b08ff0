"""The modules of a transformers model that attend, and the eager attention that their modelling file brings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch

from hybridkv.errors import UnsupportedModelError

Eager = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""eager(module, query, key, value, mask, **kwargs): out [rows, queries, heads, width], and weights or None."""


class Attended(NamedTuple):
    """What a layer attends with: query [rows, heads, queries, width]; key, value [rows, KV heads, keys, width]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


_EAGER: Final = "eager_attention_forward"


def eager_function(module: torch.nn.Module) -> Eager:
    """The eager attention of the modelling module that ``module`` comes from; UnsupportedModelError without one."""
    found = getattr(sys.modules[type(module).__module__], _EAGER, None)
    if found is None:
        raise UnsupportedModelError(
            f"{type(module).__module__} has no {_EAGER}: its attention cannot run on gathered contexts"
        )
    function: Eager = found
    return function


def attention_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Those of ``model`` that attend, layer by layer, as transformers marks them."""
    return (module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal"))
