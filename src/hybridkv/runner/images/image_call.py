"""How a multimodal model takes images: the features that it makes of one, and the forward that is handed them.

    get_image_features(pixels) -> features [tokens, width], and for some layers more of them (deepstack)
    forward(ids, mm_encoder_outputs={"image": features of all placeholders in ids})

A forward of a Step is handed features for every placeholder that it runs: those that stand in no image, such as a
sampled one, get what the model has for the token itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from hybridkv.errors import ConfigError

COMPARED: Final = (
    "aya_vision",
    "gemma3",
    "glm4v",
    "internvl",
    "llava",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
)
"""Model types whose images were compared with plain transformers in every regime (tests/runner/test_images.py)."""
_BOTH_WAYS: Final = frozenset({"gemma3"})
"""Of these, the ones that mask an image's tokens so that each sees all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Of one image. rows: [tokens, width]. deep: as many for each of the layers that add some.

    listed: whether the model's own function gives a list of images' features, and its forward takes one; else a tensor.
    """

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...]
    listed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(one.nbytes for one in (self.rows, *self.deep))

    def __len__(self) -> int:
        """Placeholders that the image fills."""
        return len(self.rows)

    def outputs(self) -> dict[str, Any]:
        """As the forward of the model takes them."""
        output = SimpleNamespace(
            pooler_output=[self.rows] if self.listed else self.rows[None],
            deepstack_features=[[one] for one in self.deep],
        )
        return {"image": output}


@dataclass(frozen=True, slots=True, eq=False)
class ImageCall:
    """Of ``model``. token_id: its placeholder. takes: names of what its images are given as.

    rope_index: makes positions in several axes, [axes, 1, tokens]; None where tokens simply follow each other.
    """

    model: PreTrainedModel
    token_id: int
    takes: frozenset[str]
    rope_index: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> ImageCall:
        """Raises ConfigError for a model that takes no images, or whose images were not compared."""
        kind = str(getattr(model.config, "model_type", ""))
        features = getattr(model, "get_image_features", None)
        token = getattr(model.config, "image_token_id", None)
        if features is None or not isinstance(token, int):
            raise ConfigError(f"{type(model).__name__} takes no images: leave them out, or load a multimodal model")
        if kind not in COMPARED:
            raise ConfigError(
                f"images of {kind} were not compared with transformers: it runs its text part; images run with "
                f"{', '.join(COMPARED)}"
            )
        takes = frozenset(inspect.signature(features).parameters) - {"kwargs"}
        return cls(model, token, takes, getattr(model.model, "get_rope_index", None))

    def features(self, values: Mapping[str, torch.Tensor]) -> Features:
        """The model's features of one image. Runs its vision part; raises what that raises."""
        given = {name: self._placed(value) for name, value in values.items()}
        with torch.inference_mode():
            output = self.model.get_image_features(**given, return_dict=True)
        pooled = output.pooler_output
        deep = getattr(output, "deepstack_features", None) or ()
        return Features(_rows(pooled), tuple(map(_rows, deep)), isinstance(pooled, list | tuple))

    def of_token(self, like: Features, count: int) -> Features:
        """For ``count`` placeholders outside of images: what the model has for the token. like: of any image."""
        token = torch.tensor([self.token_id], device=self.model.device)
        rows = self.model.get_input_embeddings()(token).to(like.rows.dtype).repeat(count, 1)
        return Features(rows, tuple(one.new_zeros((count, one.shape[1])) for one in like.deep), like.listed)

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        """On the model's device; floats in its dtype."""
        return value.to(self.model.device, self.model.dtype if value.is_floating_point() else value.dtype)


def _rows(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """[tokens, width] of one tensor, or of several."""
    parts = [features] if isinstance(features, torch.Tensor) else features
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in parts])


def attends_both_ways(model: PreTrainedModel) -> bool:
    """Whether an image's tokens see each other in both directions: they must run in one forward."""
    return getattr(model.config, "model_type", "") in _BOTH_WAYS


def towers_of(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Parts of ``model`` with a config that take no part in its text: they neither are its decoder nor hold it."""
    if not hasattr(model, "get_image_features"):
        return
    text = set(model.get_decoder().modules())
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part not in text and text.isdisjoint(part.modules()):
            yield part


@contextmanager
def kept_attention(model: PreTrainedModel) -> Iterator[None]:
    """Whatever attention ``model`` is given meanwhile, its towers have their own again at the end."""
    own = [(part, part.config._attn_implementation) for part in towers_of(model)]
    yield
    for part, name in own:
        if part.config._attn_implementation != name:
            part.set_attn_implementation(name)
