"""What callers hand over as images, made into what an engine needs: content by digest, and where it stands in a prompt.

a processor's output     {"pixel_values": ..., "image_grid_thw": ...} of all images of a prompt whose placeholders
                         are expanded already (its input_ids)
pictures                 whatever the processor of the LoadedModel takes, with a prompt of text
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.extra_keys import MultimodalItem
from hybridkv.runner.images.image_call import ImageCall, attends_both_ways
from hybridkv.runner.inputs import encode
from hybridkv.runner.load import LoadedModel
from hybridkv.units import shown

Int64 = NDArray[np.int64]
Images = Mapping[str, Any] | Sequence[Any]
"""Of one prompt: what a processor made of all of them, by name; or the pictures themselves, for the model's own."""

TOKEN_KINDS: Final = frozenset({"mm_token_type_ids", "token_type_ids"})
"""What a processor says of each token: text, or of an image."""
OF_TEXT: Final = TOKEN_KINDS | {"input_ids", "attention_mask"}
"""What a processor says of the text around images."""
_PIXELS: Final = "pixel_values"


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One image as its model takes it. values: on the CPU, by name. digest: SHA-256 of names, dtypes, shapes, bytes.

    kind: what decides how many placeholders it fills: the shapes, and a digest of whole numbers, which are sizes.
    """

    values: Mapping[str, torch.Tensor]
    digest: str
    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of one prompt.

    items: where each stands, by its digest. pictures: in the same order. places: int64[n] of all placeholders in the
    prompt, ascending. image, row: int64[n], which image fills each, with which of its features.
    positions: int64[axes, prompt tokens] where a model's tokens have several; None where they follow each other.
    """

    pictures: tuple[Picture, ...]
    items: tuple[MultimodalItem, ...]
    places: Int64
    image: Int64
    row: Int64
    positions: Int64 | None

    def last_seen(self, first: int, behind: int) -> Int64:
        """int64[behind - first]: the last token that each sees where images attend in both directions. O(items)."""
        seen = np.arange(first, behind)
        for item in self.items:
            inside = slice(max(item.offset - first, 0), max(item.offset + item.length - first, 0))
            seen[inside] = item.offset + item.length - 1
        return seen

    def positions_of(self, first: int, behind: int) -> Int64:
        """int64[axes, behind - first] of tokens of prompt or output. Behind the prompt they follow each other again."""
        assert self.positions is not None  # noqa: S101 - who asks has looked
        prompt = self.positions.shape[1]
        inside = self.positions[:, first:behind]
        # the first one behind the prompt is one more than the largest in it
        after = np.arange(max(first, prompt), behind) - prompt + 1 + self.positions.max()
        return np.concatenate((inside, np.broadcast_to(after, (len(inside), len(after)))), axis=1)


def images_each(prompts: Sequence[object], images: Sequence[Images | None] | None) -> list[Images | None]:
    """Those of each prompt, None where there are none. ConfigError when the numbers differ, and for what is no list."""
    if images is None:
        return [None] * len(prompts)
    if not isinstance(images, list | tuple):
        raise ConfigError(f"images must be a list with an entry for each prompt, got {shown(images)}")
    if len(images) != len(prompts):
        raise ConfigError(f"images of {len(images)} prompts for {len(prompts)} prompts: give an entry for each")
    return list(images)


def prompt_images(
    loaded: LoadedModel,
    call: ImageCall,
    tokens_of: Callable[[Picture], int],
    prompt: str | Sequence[int],
    given: Images,
) -> tuple[list[int], PromptImages]:
    """Token ids of ``prompt``, placeholders expanded, and its images.

    tokens_of: placeholders that an image fills. Raises ConfigError for images that are none of this model's, pictures
    without a processor or with a prompt of ids, and placeholders that are not as many as the images fill. O(values).
    """
    if isinstance(given, Mapping):
        ids, values = encode(loaded, prompt), dict(given)
    else:
        values = _processed(loaded, prompt, given)
        ids = encode(loaded, _only(values, "input_ids"))
    pictures = _pictures(loaded, call, {name: value for name, value in values.items() if name not in OF_TEXT})
    counts = [tokens_of(one) for one in pictures]
    places = np.flatnonzero(np.asarray(ids) == call.token_id)
    if len(places) != sum(counts):
        raise ConfigError(
            f"the prompt has {len(places)} placeholders (token {call.token_id}), but its {len(pictures)} images fill "
            f"{sum(counts)}: expand each image's placeholder as the model's processor does"
        )
    stops = np.cumsum(counts)
    firsts, lasts = places[stops - counts].tolist(), places[stops - 1].tolist()
    items = tuple(
        MultimodalItem(one.digest, first, last - first + 1)
        for one, first, last in zip(pictures, firsts, lasts, strict=True)
    )
    if attends_both_ways(call.model):
        _refuse_touching(items, counts)
    return ids, PromptImages(
        pictures=tuple(pictures),
        items=items,
        places=places,
        image=np.repeat(np.arange(len(counts)), counts),
        row=np.concatenate([np.arange(count) for count in counts]),
        positions=_positions(call, ids, pictures),
    )


def _refuse_touching(items: Sequence[MultimodalItem], counts: Sequence[int]) -> None:
    """ConfigError for images that are not one run of placeholders each: the model takes a run for one image."""
    ends = [0, *(one.offset + one.length for one in items)]
    for item, count, before in zip(items, counts, ends, strict=False):
        if item.length != count or (item.offset == before and before):
            raise ConfigError(
                f"the image at token {item.offset} must be one run of {count} placeholders, with text before it: its "
                "tokens attend to each other, and to no other image's"
            )


def require_processor(loaded: LoadedModel) -> None:
    """Raise ConfigError where ``loaded`` has none, saying why where that is known."""
    if loaded.processor is None:
        because = f" ({loaded.no_processor})" if loaded.no_processor else ""
        raise ConfigError(
            f"pictures need the processor of {loaded.name}, which was loaded without one{because}: wrap the model with "
            "processor=..., or give its output (pixel_values and the like) with token ids"
        )


def _processed(loaded: LoadedModel, prompt: str | Sequence[int], pictures: object) -> dict[str, Any]:
    """What the processor makes of a prompt and its pictures."""
    if isinstance(pictures, str | bytes) or not isinstance(pictures, Sequence):
        raise ConfigError(
            f"images must be a list of pictures, or what a processor made of them, by name; got {shown(pictures)}"
        )
    require_processor(loaded)
    if not isinstance(prompt, str):
        raise ConfigError("pictures need a prompt of text: for token ids give what the processor made of the pictures")
    try:
        return dict(loaded.processor(text=[prompt], images=list(pictures), return_tensors="pt"))
    except Exception as error:  # whatever it does not like
        raise ConfigError(f"the processor of {loaded.name} does not take these images: {error}") from error


def _only(values: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401  # whoever takes it judges it
    """The one row of ``name``."""
    rows = values.get(name)
    if rows is None or len(rows) != 1:
        raise ConfigError(f"the processor gave no {name} of one prompt: give its output with token ids instead")
    return rows[0]


def _pictures(loaded: LoadedModel, call: ImageCall, values: Mapping[str, Any]) -> list[Picture]:
    """One of each image. ConfigError for names that the model does not take, and what cannot be told apart by image."""
    wrong = sorted(set(values) - call.takes)
    if wrong or _PIXELS not in values:
        raise ConfigError(
            f"{loaded.name} takes images as {', '.join(sorted(call.takes))}, got {', '.join(sorted(values)) or 'none'}"
            f"{': leave out ' + wrong[0] if wrong else ''}"
        )
    tensors = {name: _tensor(name, value) for name, value in values.items()}
    return [_picture(one) for one in _by_image(tensors)]


def _tensor(name: str, given: object) -> torch.Tensor:
    """On the CPU, numbers. ConfigError for anything else."""
    try:
        value = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} must be one tensor of all images of the prompt: {error}") from error
    if value.dim() < 1 or not len(value) or (value.is_floating_point() and not bool(value.isfinite().all())):
        raise ConfigError(f"{name} must hold numbers for at least one image, got shape {tuple(value.shape)}")
    return value


def _by_image(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Split along the first dimension: patches by a grid of (frames, rows, columns), everything else one each."""
    grids = tensors.get("image_grid_thw")
    pixels = tensors[_PIXELS]
    if grids is not None and (grids.dim() != 2 or grids.is_floating_point() or bool((grids < 1).any())):
        raise ConfigError(f"image_grid_thw must be [images, 3], whole numbers, got shape {tuple(grids.shape)}")
    sizes = [1] * len(pixels) if grids is None else grids.prod(dim=-1).tolist()
    if sum(sizes) != len(pixels):
        raise ConfigError(f"{_PIXELS} has {len(pixels)} patches, but image_grid_thw asks for {sum(sizes)}")
    parts = {name: torch.split(value, sizes if name == _PIXELS else 1) for name, value in tensors.items()}
    for name, split in parts.items():
        if len(split) != len(sizes):
            raise ConfigError(f"{name} is of {len(split)} images, but {_PIXELS} of {len(sizes)}")
    for number in range(len(sizes)):
        yield {name: split[number].clone() for name, split in parts.items()}


def _picture(values: dict[str, torch.Tensor]) -> Picture:
    content, sizes, shapes = hashlib.sha256(), hashlib.sha256(), []
    for name in sorted(values):
        value = values[name].contiguous()
        shapes.append(f"{name} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}")
        octets = value.flatten().view(torch.uint8).numpy().data
        for digest in (content,) if value.is_floating_point() else (content, sizes):
            digest.update(shapes[-1].encode())
            digest.update(octets)
    return Picture(values, content.hexdigest(), f"{', '.join(shapes)}, sizes {sizes.hexdigest()[:16]}")


def _positions(call: ImageCall, ids: Sequence[int], pictures: Sequence[Picture]) -> Int64 | None:
    """int64[axes, tokens]. ConfigError for images whose placeholders do not stand as their sizes say."""
    if call.rope_index is None:
        return None
    tokens = torch.tensor([ids])
    sizes = {name for one in pictures for name in one.values if name != _PIXELS}
    given = {name: torch.cat([one.values[name] for one in pictures]) for name in sizes}
    try:
        found, _ = call.rope_index(
            input_ids=tokens, mm_token_type_ids=(tokens == call.token_id).to(torch.int32), **given
        )
    except (RuntimeError, StopIteration, IndexError) as error:
        raise ConfigError(
            f"the placeholders do not stand as the images' sizes say: give each image one run of them ({error})"
        ) from error
    positions: Int64 = found[:, 0].numpy().astype(np.int64)
    return positions
