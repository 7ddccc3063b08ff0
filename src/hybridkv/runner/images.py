"""Images in prompts: the callers' input, the features that a model computes from it, and the rows that read them.

    a processor's output     {"pixel_values": ..., "image_grid_thw": ...} of all images of a prompt; the placeholders
                             in its input_ids are already expanded
    pictures                 the input of the LoadedModel's processor, with a prompt of text

    get_image_features(pixels) -> features [tokens, width], and more of them for some layers (deepstack)
    forward(ids, mm_encoder_outputs={"image": features of all placeholders in ids})

A Step's forward gets features for every placeholder that it runs. A placeholder outside of any image (for example a
sampled one) gets the model's embedding of the token itself.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from hybridkv.errors import ConfigError, HybridKVError, WorkerError
from hybridkv.extra_keys import MultimodalItem
from hybridkv.runner.inputs import encode
from hybridkv.runner.load import LoadedModel
from hybridkv.step import Step
from hybridkv.units import shown

Int64 = NDArray[np.int64]
Images = Mapping[str, Any] | Sequence[Any]
"""The images of one prompt: a processor's output for all of them by name, or pictures for the model's processor."""

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
"""The compared model types that let each token of an image attend to all tokens of the image."""
TOKEN_KINDS: Final = frozenset({"mm_token_type_ids", "token_type_ids"})
"""A processor's outputs that give the kind of each token: text, or part of an image."""
OF_TEXT: Final = TOKEN_KINDS | {"input_ids", "attention_mask"}
"""A processor's outputs for the text around images."""
_PIXELS: Final = "pixel_values"
_MOST_KINDS: Final = 1024
"""Remembered sizes of images, each with its number of placeholders; chosen by hand."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The features of one image.

    Attributes:
        rows: [tokens, width].
        deep: for each layer that adds features of its own, another [tokens, width].
        listed: whether the model's functions return and take a list of one tensor for each image; else one tensor.
    """

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...]
    listed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(one.nbytes for one in (self.rows, *self.deep))

    def __len__(self) -> int:
        """Return the placeholders that the image fills."""
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class ImageCall:
    """The image side of ``model``.

    Attributes:
        model: the model.
        token_id: its placeholder token.
        takes: names of the values of its images.
        rope_index: computes positions on several axes, [axes, 1, tokens]; None if the model has one axis.
    """

    model: PreTrainedModel
    token_id: int
    takes: frozenset[str]
    rope_index: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> ImageCall:
        """Return the image side of ``model``.

        Raises ConfigError if it takes no images, or if its type was not compared.
        """
        kind = str(getattr(model.config, "model_type", ""))
        features = getattr(model, "get_image_features", None)
        token = getattr(model.config, "image_token_id", None)
        if features is None or not isinstance(token, int):
            raise ConfigError(f"{type(model).__name__} takes no images: leave them out, or load a multimodal model")
        if kind not in COMPARED:
            raise ConfigError(
                f"images of {kind} were not compared with transformers: leave them out, or use a model of "
                f"{', '.join(COMPARED)}"
            )
        takes = frozenset(inspect.signature(features).parameters) - {"kwargs"}
        return cls(model, token, takes, getattr(model.model, "get_rope_index", None))

    def features(self, values: Mapping[str, torch.Tensor]) -> Features:
        """Compute the model's features of one image with its vision part. Errors of that part pass through."""
        device, dtype = self.model.device, self.model.dtype
        given = {name: one.to(device, dtype if one.is_floating_point() else one.dtype) for name, one in values.items()}
        with torch.inference_mode():
            output = self.model.get_image_features(**given, return_dict=True)
        pooled = output.pooler_output
        deep = getattr(output, "deepstack_features", None) or ()
        return Features(_rows(pooled), tuple(map(_rows, deep)), isinstance(pooled, list | tuple))

    def of_token(self, like: Features, count: int) -> Features:
        """Return the token's own embedding for ``count`` placeholders outside of images, in the form of ``like``."""
        token = torch.tensor([self.token_id], device=self.model.device)
        rows = self.model.get_input_embeddings()(token).to(like.rows.dtype).repeat(count, 1)
        return Features(rows, tuple(one.new_zeros((count, one.shape[1])) for one in like.deep), like.listed)


def _rows(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one or several tensors as one, [tokens, width]."""
    parts = [features] if isinstance(features, torch.Tensor) else features
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in parts])


def attends_both_ways(model: PreTrainedModel) -> bool:
    """Return whether an image's tokens see each other in both directions; they must then run in one forward."""
    return getattr(model.config, "model_type", "") in _BOTH_WAYS


def towers_of(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Return the parts of ``model`` that have a config and are outside of its text decoder."""
    if not hasattr(model, "get_image_features"):
        return
    text = set(model.get_decoder().modules())
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part not in text and text.isdisjoint(part.modules()):
            yield part


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One image in the form that its model takes.

    Attributes:
        values: tensors on the CPU, by name.
        digest: SHA-256 of their names, dtypes, shapes and bytes.
        kind: their shapes, and a digest of the whole numbers among them, which are sizes. Images of one kind fill
            equally many placeholders.
    """

    values: Mapping[str, torch.Tensor]
    digest: str
    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of one prompt.

    Attributes:
        pictures: the images.
        items: the place and digest of each image.
        places: int64[n], the index of each placeholder in the prompt, ascending.
        image: int64[n], the number of the image that fills the placeholder.
        row: int64[n], the feature of that image for the placeholder.
        positions: int64[axes, prompt tokens]; None if the model's positions have one axis.
    """

    pictures: tuple[Picture, ...]
    items: tuple[MultimodalItem, ...]
    places: Int64
    image: Int64
    row: Int64
    positions: Int64 | None

    def last_seen(self, first: int, end: int) -> Int64:
        """Return the last token that each of the tokens first .. end-1 sees, if images attend both ways. O(items)."""
        seen = np.arange(first, end)
        for item in self.items:
            inside = slice(max(item.offset - first, 0), max(item.offset + item.length - first, 0))
            seen[inside] = item.offset + item.length - 1
        return seen

    def positions_of(self, first: int, end: int) -> Int64:
        """Return the positions of tokens first .. end-1 of prompt or output, int64[axes, end - first].

        The first output token continues after the largest position of the prompt, on all axes.
        """
        assert self.positions is not None  # noqa: S101 - the caller has checked it
        prompt = self.positions.shape[1]
        inside = self.positions[:, first:end]
        after = np.arange(max(first, prompt), end) - prompt + 1 + self.positions.max()
        return np.concatenate((inside, np.broadcast_to(after, (len(inside), len(after)))), axis=1)


def prompt_images(
    loaded: LoadedModel,
    call: ImageCall,
    tokens_of: Callable[[Picture], int],
    prompt: str | Sequence[int],
    given: Images,
) -> tuple[list[int], PromptImages]:
    """Return the token ids of ``prompt`` with expanded placeholders, and its images. O(values).

    tokens_of: placeholders that an image fills. Raises ConfigError for images that the model does not take, for
    pictures without a processor or with a prompt of ids, and for a wrong number of placeholders.
    """
    if isinstance(given, Mapping):
        ids, values = encode(loaded, prompt), dict(given)
    else:
        values = _processed(loaded, prompt, given)
        rows = values.get("input_ids")
        if rows is None or len(rows) != 1:
            raise ConfigError("the processor gave no input_ids for the prompt: give its output with token ids instead")
        ids = encode(loaded, rows[0])
    of_images = {name: value for name, value in values.items() if name not in OF_TEXT}
    pictures = list(map(_picture, _by_image(loaded, call, of_images)))
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
        _require_apart(items, counts)
    return ids, PromptImages(
        pictures=tuple(pictures),
        items=items,
        places=places,
        image=np.repeat(np.arange(len(counts)), counts),
        row=np.concatenate([np.arange(count) for count in counts]),
        positions=_positions(call, ids, pictures),
    )


def _require_apart(items: Sequence[MultimodalItem], counts: Sequence[int]) -> None:
    """Raise ConfigError unless each image is one run of placeholders: the model takes a run for one image."""
    ends = [0, *(one.offset + one.length for one in items)]
    for item, count, before in zip(items, counts, ends, strict=False):
        if item.length != count or (item.offset == before and before):
            raise ConfigError(
                f"the image at token {item.offset} must be one run of {count} placeholders after a token of text, "
                "because its tokens attend to each other alone: insert text between images, and none inside"
            )


def require_processor(loaded: LoadedModel) -> None:
    """Raise ConfigError if ``loaded`` has no processor, with the reason if it is known."""
    if loaded.processor is None:
        because = f" ({loaded.no_processor})" if loaded.no_processor else ""
        raise ConfigError(
            f"pictures need the processor of {loaded.name}, which was loaded without one{because}: wrap the model with "
            "processor=..., or give the processor's output (pixel_values and so on) with token ids"
        )


def _processed(loaded: LoadedModel, prompt: str | Sequence[int], pictures: object) -> dict[str, Any]:
    """Return the processor's output for a prompt and its pictures."""
    if isinstance(pictures, str | bytes) or not isinstance(pictures, Sequence):
        raise ConfigError(f"images must be a list of pictures or a processor's output by name, got {shown(pictures)}")
    require_processor(loaded)
    if not isinstance(prompt, str):
        raise ConfigError("pictures need a prompt of text: with token ids, give the processor's output for them")
    try:
        return dict(loaded.processor(text=[prompt], images=list(pictures), return_tensors="pt"))
    except Exception as error:  # a processor may raise any error, and its text is the reason
        raise ConfigError(f"the processor of {loaded.name} does not take these images: {error}") from error


def _tensor(name: str, given: object) -> torch.Tensor:
    """Return numbers on the CPU. Raises ConfigError for anything else."""
    try:
        value = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} must be one tensor of all images of the prompt: {error}") from error
    if value.dim() < 1 or not len(value) or (value.is_floating_point() and not bool(value.isfinite().all())):
        raise ConfigError(f"{name} must hold finite numbers for at least one image, got shape {tuple(value.shape)}")
    return value


def _by_image(loaded: LoadedModel, call: ImageCall, values: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Split values along the first dimension, and yield the values of each image by name.

    A grid (frames, rows, columns) gives the number of patches of an image; all other values have one entry an image.
    Raises ConfigError for names that the model does not take, and for values that cannot be split by image.
    """
    wrong = sorted(values.keys() - call.takes)
    if wrong or _PIXELS not in values:
        raise ConfigError(
            f"{loaded.name} takes images as {', '.join(sorted(call.takes))}, got {', '.join(sorted(values)) or 'none'}"
            f": {'leave out ' + wrong[0] if wrong else 'give ' + _PIXELS}"
        )
    tensors = {name: _tensor(name, value) for name, value in values.items()}
    grids = tensors.get("image_grid_thw")
    pixels = tensors[_PIXELS]
    if grids is not None and (grids.dim() != 2 or grids.is_floating_point() or bool((grids < 1).any())):
        raise ConfigError(f"image_grid_thw must be [images, 3], whole numbers above 0, got shape {tuple(grids.shape)}")
    sizes = [1] * len(pixels) if grids is None else grids.prod(dim=-1).tolist()
    if sum(sizes) != len(pixels):
        raise ConfigError(
            f"{_PIXELS} has {len(pixels)} patches, but image_grid_thw asks for {sum(sizes)}: give both from one call "
            "of the processor"
        )
    parts = {name: torch.split(value, sizes if name == _PIXELS else 1) for name, value in tensors.items()}
    for name, split in parts.items():
        if len(split) != len(sizes):
            raise ConfigError(
                f"{name} is of {len(split)} images, but {_PIXELS} of {len(sizes)}: give both from one call of the "
                "processor"
            )
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
    """Return the positions of a prompt, int64[axes, tokens]; None for one axis.

    Raises ConfigError if the placeholders do not match the sizes of the images.
    """
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
            f"the placeholders do not match the sizes of the images: give each image one run of them ({error})"
        ) from error
    positions: Int64 = found[:, 0].numpy().astype(np.int64)
    return positions


class ImageStore:
    """Features of pictures by digest. Each stays while a request holds its digest.

    Beyond ``max_bytes``, features read longest ago are dropped, and computed again when they are read. The features
    read last always stay.

    Attributes:
        max_bytes: bytes of kept features.
        encoded: number of computations.
    """

    def __init__(self, call: ImageCall, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.encoded = 0
        self._call = call
        self._holders = Counter[str]()
        self._features: dict[str, Features] = {}  # in the order of their last reads
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of distinct images."""
        return len(self._holders)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept features. O(images)."""
        return sum(one.nbytes for one in self._features.values())

    def tokens_of(self, picture: Picture) -> int:
        """Return the number of placeholders that ``picture`` fills: as many as every picture of its kind.

        The features of the first picture of a kind are computed here. Raises ConfigError, with the model's text, if the
        model rejects the picture.
        """
        if picture.kind in self._tokens:
            return self._tokens[picture.kind]
        try:
            tokens = self._tokens[picture.kind] = len(self._made(picture))
        except HybridKVError:
            raise
        except Exception as error:  # a vision part may raise any error for unexpected input
            raise ConfigError(f"the model does not take this image ({picture.kind}): {error}") from error
        if len(self._tokens) > _MOST_KINDS:
            del self._tokens[next(iter(self._tokens))]
        return tokens

    def hold(self, pictures: Iterable[Picture]) -> None:
        """Count one more user of each of ``pictures``."""
        self._holders.update(one.digest for one in pictures)

    def release(self, pictures: Iterable[Picture]) -> None:
        """Count one user less; the last one drops the features."""
        for one in pictures:
            self._holders[one.digest] -= 1
            if self._holders[one.digest] <= 0:
                del self._holders[one.digest]
                self._features.pop(one.digest, None)

    def drop_unheld(self) -> None:
        """Drop features of rejected prompts. O(images)."""
        self._features = {digest: one for digest, one in self._features.items() if digest in self._holders}

    def features(self, picture: Picture) -> Features:
        """Return the features of a held picture. O(1) if they are kept, else the model's vision part runs."""
        if picture.digest in self._features:
            kept = self._features[picture.digest] = self._features.pop(picture.digest)
            return kept
        made = self._made(picture)
        if len(made) != self._tokens[picture.kind]:
            raise WorkerError(
                f"an image fills {len(made)} tokens, but another one of the same sizes ({picture.kind}) fills "
                f"{self._tokens[picture.kind]}: the model must compute equally many features for both"
            )
        return made

    def _made(self, picture: Picture) -> Features:
        """Compute and keep features. Drop others until the bound holds."""
        made = self._features[picture.digest] = self._call.features(picture.values)
        self.encoded += 1
        excess = self.nbytes - self.max_bytes
        while excess > 0 and len(self._features) > 1:
            oldest = next(iter(self._features))
            excess -= self._features.pop(oldest).nbytes
        return made


@dataclass(frozen=True, slots=True, eq=False)
class ImageRead:
    """The image arguments of a forward.

    Attributes:
        arguments: arguments of the model by name: positions, int64[1 + axes, 1, tokens], text positions first, and
            features of all placeholders.
        last_seen: int64[tokens], the position of the last token that each token sees; None if that is the token itself.
    """

    arguments: dict[str, Any]
    last_seen: Int64 | None


class StepImages:
    """The images of requests, by id, and of the Steps in flight, by row.

    A Step in flight holds the images of its rows until it has run, because their requests may end before.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        self.call = ImageCall.of(model)
        self.store = ImageStore(self.call, max_bytes)
        self._requests: dict[str, PromptImages] = {}
        self._rows: dict[int, PromptImages] = {}  # as of the newest Step in flight
        self._steps: dict[int, dict[int, PromptImages]] = {}

    # -- requests, and steps in flight

    def of_prompt(
        self, loaded: LoadedModel, prompt: str | Sequence[int], given: Images
    ) -> tuple[list[int], PromptImages]:
        """Return the same as ``prompt_images``. The features of a rejected prompt are not kept."""
        self.store.drop_unheld()
        try:
            return prompt_images(loaded, self.call, self.store.tokens_of, prompt, given)
        except BaseException:
            self.store.drop_unheld()
            raise

    def begin(self, request_id: str, images: PromptImages) -> None:
        """Add the images of a queued request."""
        self._requests[request_id] = images
        self.store.hold(images.pictures)

    def end(self, request_id: str) -> None:
        """Remove a request that ended. Unknown ids are a no-op."""
        images = self._requests.pop(request_id, None)
        if images is not None:
            self.store.release(images.pictures)

    def launched(self, step: Step) -> None:
        """Note that ``step`` was scheduled. O(rows)."""
        for row in step.finished_rows.tolist():
            self._rows.pop(row, None)
        for new in step.new_rows:
            self._rows.pop(new.row, None)
            if new.request_id in self._requests:
                self._rows[new.row] = self._requests[new.request_id]
        if self._rows:
            mine = {row: self._rows[row] for row in step.rows.tolist() if row in self._rows}
            self._steps[step.id] = mine
            for images in mine.values():
                self.store.hold(images.pictures)

    def landed(self, step: Step) -> None:
        """Note that ``step`` has run or failed."""
        for images in self._steps.pop(step.id, {}).values():
            self.store.release(images.pictures)

    # -- the forward

    def read(self, step: Step, tokens: Int64, positions: Int64) -> ImageRead | None:
        """Return the image arguments of a forward over ``tokens`` at ``positions``, int64[n] each, or None."""
        mine = _tokens_with_images(step, self._steps.get(step.id, {}))
        if not mine:
            return None
        arguments, seen = dict[str, Any](), None
        axes = next((len(one.positions) for one, *_ in mine if one.positions is not None), 0)
        if axes:
            on_axes = np.tile(positions, (1 + axes, 1))
            for images, place, first, end in mine:
                on_axes[1:, place : place + end - first] = images.positions_of(first, end)
            arguments["position_ids"] = torch.from_numpy(on_axes)[:, None].to(self.call.model.device)
        with torch.inference_mode():
            features = self._features(mine, tokens)
        if features is not None:
            pooled = [features.rows] if features.listed else features.rows[None]
            deep = [[one] for one in features.deep]
            arguments["mm_encoder_outputs"] = {"image": SimpleNamespace(pooler_output=pooled, deepstack_features=deep)}
        if attends_both_ways(self.call.model):
            seen = positions.copy()
            for images, place, first, end in mine:
                seen[place : place + end - first] = images.last_seen(first, end)
        return ImageRead(arguments, seen)

    def _features(self, mine: Sequence[_Reading], tokens: Int64) -> Features | None:
        """Return image features at their placeholders and the token's own elsewhere; None without a placeholder."""
        parts: list[tuple[Int64, Features, Int64]] = []  # (places in the step, features of an image, rows of these)
        for images, place, first, end in mine:
            inside = slice(*np.searchsorted(images.places, (first, end)).tolist())
            for number in np.unique(images.image[inside]).tolist():
                of_image = np.flatnonzero(images.image[inside] == number) + inside.start
                features = self.store.features(images.pictures[number])
                parts.append((images.places[of_image] - first + place, features, images.row[of_image]))
        if not parts:
            return None
        placeholders = np.flatnonzero(tokens == self.call.token_id)
        merged = self.call.of_token(parts[0][1], len(placeholders))
        for places, features, wanted in parts:
            at, taken = (
                torch.from_numpy(one).to(merged.rows.device) for one in (np.searchsorted(placeholders, places), wanted)
            )
            for whole, part in zip((merged.rows, *merged.deep), (features.rows, *features.deep), strict=True):
                whole[at] = part[taken]
        return merged


_Reading = tuple[PromptImages, int, int, int]
"""Images of a row, its first token's place in the Step, that token's position, and the position after its last."""


def _tokens_with_images(step: Step, rows: Mapping[int, PromptImages]) -> list[_Reading]:
    """Return the images and tokens of each row of ``step`` that is among ``rows``."""
    firsts, counts = step.num_computed.astype(np.int64), step.num_scheduled.astype(np.int64)
    columns = (step.rows, np.cumsum(counts) - counts, firsts, firsts + counts)
    every = zip(*(one.tolist() for one in columns), strict=True)
    return [(rows[row], *where) for row, *where in every if row in rows]
