"""A forward over 3 tokens that shows what a model keeps, and the proof that the plan is of this model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models import Model, read_model
from hybridkv.specs import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from hybridkv.worker import PagePart

PROBE_TOKENS: Final = 3


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """``model`` with the attention function ``name`` for a while; UnsupportedModelError when it cannot switch."""
    before = model.config._attn_implementation
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, before)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Make ``model`` call the attention function ``name``. Raises UnsupportedModelError when it cannot switch."""
    if model.config._attn_implementation == name:
        return
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface: not supported"
        )


class ProbeCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Keeps nothing but the shapes and dtypes of what each layer hands over."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.parts: dict[int, tuple[PagePart, ...]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note [1, heads, tokens, width] of keys and values and hand them back."""
        self.parts[layer_idx] = tuple(
            PagePart((states.shape[1], states.shape[3]), states.dtype) for states in (key_states, value_states)
        )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is cached."""
        del layer_idx
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As long as the query."""
        del layer_idx
        return query_length, 0


def probe(model: PreTrainedModel) -> dict[int, tuple[PagePart, ...]]:
    """The page parts of every layer that caches, by layer index: from a forward over PROBE_TOKENS tokens.

    Raises UnsupportedModelError for a model that caches through anything but ``update`` of keys and values.
    """
    cache = ProbeCache()
    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=model.device)
    positions = torch.arange(PROBE_TOKENS, device=model.device)[None]
    with attention_implementation(model, "eager"), torch.inference_mode():
        try:
            model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        except (TypeError, AttributeError, IndexError) as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not run on a cache of keys and values alone: not supported yet ({error})"
            ) from error
    if not cache.parts:
        raise UnsupportedModelError(f"{type(model).__name__} cached nothing in a forward: not supported")
    return cache.parts


def planner_model(model: PreTrainedModel, *, block_size: int, name: str | None = None) -> Model:
    """The planner's view of ``model``: from its config, with the dtype of its weights.

    Raises UnsupportedModelError as require_runnable does.
    """
    source = dict(model.config.to_dict())
    if name is not None:
        source["_name_or_path"] = name
    dtype = str(model.dtype).removeprefix("torch.")
    planned = read_model(source, block_size=block_size, dtype=dtype, backend="transformers")
    require_runnable(planned)
    return planned


def require_runnable(planned: Model) -> None:
    """Raise UnsupportedModelError, naming them, for layers that the gather backend would run wrongly.

    It runs plain full attention and MLA: it knows no window, no chunk and no state.
    """
    wrong = [f"{layer.name} ({type(layer.spec).__name__})" for layer in planned.layers if not _is_runnable(layer.spec)]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UnsupportedModelError(
            f"{planned.name} can be planned, but not run yet: {wrong[0]}{more} of {len(planned.layers)} layers; "
            "full attention and MLA without window or chunk can be run"
        )


def _is_runnable(spec: KVCacheSpec) -> bool:
    """Whether ``spec`` is full attention or MLA itself, none of their relatives, and nothing is masked."""
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec) or not isinstance(spec, FullAttentionSpec):
        return False
    return spec.sliding_window is None and spec.attention_chunk_size is None


def page_layout(planned: Model, probed: dict[int, tuple[PagePart, ...]]) -> dict[str, tuple[PagePart, ...]]:
    """The page parts of every planned layer.

    Raises ConfigError unless the forward cached in exactly the planned layers, and as many bytes in each.
    """
    layers = {layer.index: layer for layer in planned.layers}
    if set(layers) != set(probed):
        raise ConfigError(
            f"{planned.name}: planned layers {sorted(layers)}, but a forward caches in layers {sorted(probed)}: "
            "the config does not describe this model"
        )
    for index, layer in layers.items():
        parts = probed[index]
        held = layer.spec.block_size * sum(part.token_bytes for part in parts)
        if held != layer.spec.page_size_bytes:
            shapes = " and ".join(f"{part.shape} {str(part.dtype).removeprefix('torch.')}" for part in parts)
            raise ConfigError(
                f"{planned.name}, layer {layer.name}: planned {layer.spec.page_size_bytes} bytes a page, but a forward "
                f"caches {held} ({layer.spec.block_size} tokens of {shapes}): the config does not describe this model"
            )
    return {layer.name: probed[index] for index, layer in layers.items()}
