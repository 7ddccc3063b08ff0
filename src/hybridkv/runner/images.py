"""Images in prompts: the callers' input, the features that a model computes of it, and the rows that read them.

    a processor's output     {"pixel_values": ..., "image_grid_thw": ...} of all images of a prompt, whose placeholders
                             are already expanded (its input_ids)
    pictures                 the input of the LoadedModel's processor, with a prompt of text

    get_image_features(pixels) -> features [tokens, width], and more of them for some layers (deepstack)
    forward(ids, mm_encoder_outputs={"image": features of all placeholders in ids})

A Step's forward gets features for every placeholder that it runs. A placeholder outside of any image, such as a sampled
one, gets the model's embedding of the token itself.
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
"""The images of one prompt: a processor's output for all of them, by name.

Or pictures for the model's own processor.
"""

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
TOKEN_KINDS: Final = frozenset({"mm_token_type_ids", "token_type_ids"})
"""What a processor says of each token: text, or of an image."""
OF_TEXT: Final = TOKEN_KINDS | {"input_ids", "attention_mask"}
"""What a processor says of the text around images."""
_PIXELS: Final = "pixel_values"
_MOST_KINDS: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The features of one image. rows: [tokens, width]. deep: the same number for each layer that adds some.

    listed: whether the model's own function returns a list of images' features and its forward takes one, or a tensor.
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
    """The image side of ``model``. token_id: its placeholder. takes: names of the values of its images.

    rope_index: computes positions in several axes, [axes, 1, tokens]; None if tokens simply follow each other.
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
                f"images of {kind} were not compared with transformers: it runs its text part; images run with "
                f"{', '.join(COMPARED)}"
            )
        takes = frozenset(inspect.signature(features).parameters) - {"kwargs"}
        return cls(model, token, takes, getattr(model.model, "get_rope_index", None))

    def features(self, values: Mapping[str, torch.Tensor]) -> Features:
        """Compute the model's features of one image by its vision part, whose errors pass through."""
        device, dtype = self.model.device, self.model.dtype
        given = {name: one.to(device, dtype if one.is_floating_point() else one.dtype) for name, one in values.items()}
        with torch.inference_mode():
            output = self.model.get_image_features(**given, return_dict=True)
        pooled = output.pooler_output
        deep = getattr(output, "deepstack_features", None) or ()
        return Features(_rows(pooled), tuple(map(_rows, deep)), isinstance(pooled, list | tuple))

    def of_token(self, like: Features, count: int) -> Features:
        """Return the token's own embedding for ``count`` placeholders outside of images; ``like`` is of any image."""
        token = torch.tensor([self.token_id], device=self.model.device)
        rows = self.model.get_input_embeddings()(token).to(like.rows.dtype).repeat(count, 1)
        return Features(rows, tuple(one.new_zeros((count, one.shape[1])) for one in like.deep), like.listed)


def _rows(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor, or several, as [tokens, width]."""
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
    """One image as its model takes it. values: on the CPU, by name. digest: SHA-256 of names, dtypes, shapes, bytes.

    kind: the values that decide how many placeholders it fills: shapes, and a digest of whole numbers, which are sizes.
    """

    values: Mapping[str, torch.Tensor]
    digest: str
    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of one prompt.

    items: the place of each image, with its digest. pictures: in the same order. places: int64[n] of all placeholders
    in the prompt, ascending. image, row: int64[n], the image that fills each, and the feature of it. positions:
    int64[axes, prompt tokens] if the model's tokens have several; None if they follow each other.
    """

    pictures: tuple[Picture, ...]
    items: tuple[MultimodalItem, ...]
    places: Int64
    image: Int64
    row: Int64
    positions: Int64 | None

    def last_seen(self, first: int, behind: int) -> Int64:
        """Return int64[behind - first], the last token that each sees if images attend both ways. O(items)."""
        seen = np.arange(first, behind)
        for item in self.items:
            inside = slice(max(item.offset - first, 0), max(item.offset + item.length - first, 0))
            seen[inside] = item.offset + item.length - 1
        return seen

    def positions_of(self, first: int, behind: int) -> Int64:
        """Return int64[axes, behind - first] for tokens of prompt or output.

        After the prompt they follow each other again.
        """
        assert self.positions is not None  # noqa: S101 - who asks has looked
        prompt = self.positions.shape[1]
        inside = self.positions[:, first:behind]
        # the first one behind the prompt is one more than the largest in it
        after = np.arange(max(first, prompt), behind) - prompt + 1 + self.positions.max()
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
            raise ConfigError("the processor gave no input_ids of one prompt: give its output with token ids instead")
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
                f"the image at token {item.offset} must be one run of {count} placeholders, with text before it: its "
                "tokens attend to each other, and to no other image's"
            )


def require_processor(loaded: LoadedModel) -> None:
    """Raise ConfigError if ``loaded`` has no processor, with the reason if it is known."""
    if loaded.processor is None:
        because = f" ({loaded.no_processor})" if loaded.no_processor else ""
        raise ConfigError(
            f"pictures need the processor of {loaded.name}, which was loaded without one{because}: wrap the model with "
            "processor=..., or give its output (pixel_values and the like) with token ids"
        )


def _processed(loaded: LoadedModel, prompt: str | Sequence[int], pictures: object) -> dict[str, Any]:
    """Return the processor's output for a prompt and its pictures."""
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


def _tensor(name: str, given: object) -> torch.Tensor:
    """Return numbers on the CPU. Raises ConfigError for anything else."""
    try:
        value = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} must be one tensor of all images of the prompt: {error}") from error
    if value.dim() < 1 or not len(value) or (value.is_floating_point() and not bool(value.isfinite().all())):
        raise ConfigError(f"{name} must hold numbers for at least one image, got shape {tuple(value.shape)}")
    return value


def _by_image(loaded: LoadedModel, call: ImageCall, values: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Split values along the first dimension: patches by a grid of (frames, rows, columns), everything else one each.

    Raises ConfigError for names that the model does not take, and for values that cannot be split by image.
    """
    wrong = sorted(values.keys() - call.takes)
    if wrong or _PIXELS not in values:
        raise ConfigError(
            f"{loaded.name} takes images as {', '.join(sorted(call.takes))}, got {', '.join(sorted(values)) or 'none'}"
            f"{': leave out ' + wrong[0] if wrong else ''}"
        )
    tensors = {name: _tensor(name, value) for name, value in values.items()}
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
    """Return int64[axes, tokens]. Raises ConfigError for images whose placeholders do not match their sizes."""
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


class ImageStore:
    """Features of pictures by digest. Each stays while a request holds its digest.

    Beyond ``max_bytes``, features read longest ago are dropped, and computed again when they are read. Those read last
    stay, whatever their size. ``encoded`` counts computations.
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
        """Return the placeholders that ``picture`` fills: the number of others of its shapes and sizes.

        The features of the first such picture are computed here. Raises ConfigError, with the model's text, if it
        rejects it.
        """
        if picture.kind in self._tokens:
            return self._tokens[picture.kind]
        try:
            tokens = self._tokens[picture.kind] = len(self._made(picture))
        except HybridKVError:
            raise
        except Exception as error:  # a vision part that was handed what it does not expect raises anything
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
                f"an image of {len(made)} tokens has the sizes of one of {self._tokens[picture.kind]} ({picture.kind})"
            )
        return made

    def _made(self, picture: Picture) -> Features:
        """Compute and keep features; drop others until the bound holds, but not these."""
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

    arguments: of the model, by name: positions, int64[1 + axes, 1, tokens], text positions first, and features of all
    placeholders. last_seen: int64[tokens], the position of the last token that each sees if that is not itself, or
    None.
    """

    arguments: dict[str, Any]
    last_seen: Int64 | None


class StepImages:
    """The images of requests, by id, and of the Steps in flight, by row.

    A Step launched holds the images of its rows until it has landed: their requests may end before it runs.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        self.call = ImageCall.of(model)
        self.store = ImageStore(self.call, max_bytes)
        self._requests: dict[str, PromptImages] = {}
        self._rows: dict[int, PromptImages] = {}  # as of the Step launched last
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
        """Note that ``step`` was scheduled, after those before it. O(rows)."""
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
        """Note that ``step`` ran, or never will."""
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
            for images, place, first, behind in mine:
                on_axes[1:, place : place + behind - first] = images.positions_of(first, behind)
            arguments["position_ids"] = torch.from_numpy(on_axes)[:, None].to(self.call.model.device)
        with torch.inference_mode():
            features = self._features(mine, tokens)
        if features is not None:
            pooled = [features.rows] if features.listed else features.rows[None]
            deep = [[one] for one in features.deep]
            arguments["mm_encoder_outputs"] = {"image": SimpleNamespace(pooler_output=pooled, deepstack_features=deep)}
        if attends_both_ways(self.call.model):
            seen = positions.copy()
            for images, place, first, behind in mine:
                seen[place : place + behind - first] = images.last_seen(first, behind)
        return ImageRead(arguments, seen)

    def _features(self, mine: Sequence[_Reading], tokens: Int64) -> Features | None:
        """Return image features at their placeholders and the token's own elsewhere; None without a placeholder."""
        parts: list[tuple[Int64, Features, Int64]] = []  # (places in the step, of an image, which of its rows)
        for images, place, first, behind in mine:
            inside = slice(*np.searchsorted(images.places, (first, behind)).tolist())
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
"""Images of a row, its first token's place in the Step, that token's position, the one behind its last."""


def _tokens_with_images(step: Step, rows: Mapping[int, PromptImages]) -> list[_Reading]:
    """Return the tokens of each row of ``step`` that is among ``rows``."""
    firsts, counts = step.num_computed.astype(np.int64), step.num_scheduled.astype(np.int64)
    columns = (step.rows, np.cumsum(counts) - counts, firsts, firsts + counts)
    every = zip(*(one.tolist() for one in columns), strict=True)
    return [(rows[row], *where) for row, *where in every if row in rows]
