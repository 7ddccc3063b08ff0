"""Extra keys: they distinguish blocks of equal tokens by adapter, image, embeddings, salt and encoder input.

The extra keys of a block enter its hash, in this order; a block without any has ``None``:

    ("lora", name, path)             every block
    ("mm", id, offset - start)       every block that the item overlaps; start: the block's first token
    ("cache_salt", salt)             the block at token 0
    ("prompt_embeds", digest)        every block that the embeddings overlap; digest of that slice
    ("encoder", digest)              the block at token 0

Later blocks inherit the keys of the first block through their parent. All keys are content, never identities of
objects: equal content in other objects gives equal keys.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import check_fields, instance, instances, integer, text
from hybridkv.errors import ConfigError
from hybridkv.units import MOST_COUNT

Extra = tuple[tuple[object, ...], ...]
"""Extra keys of one block: ``(("cache_salt", "tenant-a"),)``."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter.

    Attributes:
        name: Enters the hashes.
        path: Enters the hashes.
        id: The engine's number for it, which only events report.
    """

    name: str
    path: str
    id: int | None = None

    def __post_init__(self) -> None:
        if _is_empty(self.name) or _is_empty(self.path):
            raise ConfigError(
                f"a LoRA adapter needs a name and a path, got {self.name!r} and {self.path!r}: "
                "requests of different adapters must not share blocks"
            )
        text("name of a LoRA adapter", self.name)
        text("path of a LoRA adapter", self.path)
        if self.id is not None:
            integer("id of a LoRA adapter", self.id)


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, sound or video whose placeholders are tokens offset .. offset + length - 1 of the prompt.

    Attributes:
        id: Names its content, for example by a digest: equal content, equal id.
        offset: First placeholder.
        length: Number of placeholders.
    """

    id: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if _is_empty(self.id):
            raise ConfigError("a multimodal item needs an id that names its content, such as a digest of it")
        text("id of a multimodal item", self.id)
        check_fields(
            self, lambda name, value: integer(f"{name} of multimodal item {self.id!r}", value), "offset", "length"
        )
        if self.offset < 0 or self.length < 1:
            raise ConfigError(
                f"multimodal item {self.id!r} covers {self.length} tokens from {self.offset}: "
                "offset must be 0 or more and length at least 1"
            )


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """The input of an encoder.

    Attributes:
        digest: Digest of its content, bytes or text.
        num_tokens: Tokens of the encoder's output, which cross attention reads.
    """

    digest: bytes | str
    num_tokens: int

    def __post_init__(self) -> None:
        if _is_empty(self.digest):
            raise ConfigError("an encoder input needs a digest of its content: equal content, equal digest")
        if not isinstance(self.digest, bytes):
            text("digest of an encoder input", self.digest)
        check_fields(self, lambda name, value: integer(f"{name} of an encoder input", value), "num_tokens")
        if self.num_tokens < 1:
            raise ConfigError(f"an encoder input needs at least 1 token, got {self.num_tokens}")


def _is_empty(name: object) -> bool:
    return isinstance(name, str | bytes | None) and not name


class ExtraKeys:
    """The extra keys of one request, in hash blocks of ``block_size`` tokens.

    Accepted values can be hashed.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        block_size: Tokens of a hash block.
        lora: The adapter.
        multimodal: Items inside the prompt, in any order, that do not overlap.
        cache_salt: The salt.
        prompt_embeds: [tokens, hidden], numbers, in place of the first tokens of the prompt. Only digests are kept.
        encoder: The input of the encoder.

    Raises:
        ConfigError: Embeddings or items do not fit the prompt, or UTF-8 cannot hold a name.
    """

    __slots__ = ("_block_size", "_digests", "_encoder", "_end", "_items", "_lora", "_salt", "_stops")

    def __init__(
        self,
        num_prompt_tokens: int,
        block_size: int,
        *,
        lora: LoraAdapter | None = None,
        multimodal: Sequence[MultimodalItem] = (),
        cache_salt: str | None = None,
        prompt_embeds: NDArray[np.generic] | None = None,
        encoder: EncoderInput | None = None,
    ) -> None:
        num_prompt_tokens = integer("num_prompt_tokens", num_prompt_tokens, 0, MOST_COUNT)
        self._block_size = integer("block_size", block_size, 1, MOST_COUNT)
        for name, given, wanted in (("lora", lora, LoraAdapter), ("encoder", encoder, EncoderInput)):
            if given is not None:
                instance(name, given, wanted)
        items = instances("multimodal", multimodal, MultimodalItem)
        self._lora: Extra = () if lora is None else (("lora", lora.name, lora.path),)
        self._items = sorted((item.offset, item.offset + item.length, item.id) for item in items)
        self._stops = [stop for _, stop, _ in self._items]
        _check_items(self._items, num_prompt_tokens)
        self._salt: Extra = () if cache_salt is None else (("cache_salt", text("cache_salt", cache_salt)),)
        self._digests = [] if prompt_embeds is None else _digests(prompt_embeds, num_prompt_tokens, block_size)
        self._encoder: Extra = () if encoder is None else (("encoder", encoder.digest),)
        at_start = block_size if self._salt or self._encoder else 0
        self._end = max(at_start, len(self._digests) * block_size, *self._stops[-1:], 0)

    def of_blocks(self, first: int, count: int) -> list[Extra | None] | None:
        """Return the extra keys of blocks; ``None`` if all are empty. O(count + overlapping items).

        Args:
            first: The first block.
            count: How many.
        """
        size = self._block_size
        if first * size >= self._end and not self._lora:
            return None
        all_over = self._lora or None
        extras: list[Extra | None] = []
        place = bisect_right(self._stops, first * size)
        for start in range(first * size, (first + count) * size, size):
            if start >= self._end:
                extras.append(all_over)
                continue
            keys = list(self._lora)
            while place < len(self._items) and self._items[place][0] < start + size:
                offset, stop, name = self._items[place]
                keys.append(("mm", name, offset - start))
                if stop > start + size:
                    break  # the next block begins with it
                place += 1
            if start == 0:
                keys += self._salt
            if start // size < len(self._digests):
                keys.append(("prompt_embeds", self._digests[start // size]))
            if start == 0:
                keys += self._encoder
            extras.append(tuple(keys) or None)
        return extras if any(extras) else None


def _check_items(items: Sequence[tuple[int, int, str]], num_prompt_tokens: int) -> None:
    """Raise ConfigError unless ``items``, (offset, stop, id) by offset, follow each other inside the prompt.

    An id names one content, so it must not have two lengths.
    """
    end, lengths = 0, dict[str, int]()
    for offset, stop, name in items:
        if lengths.setdefault(name, stop - offset) != stop - offset:
            raise ConfigError(
                f"multimodal item {name!r} has {stop - offset} tokens here and {lengths[name]} elsewhere: an id names "
                "one content, so give items that differ ids that differ"
            )
        if offset < end:
            raise ConfigError(
                f"multimodal item {name!r} begins at token {offset}, but the one before it ends at {end}: "
                "give every placeholder to one item"
            )
        end = stop
    if end > num_prompt_tokens:
        raise ConfigError(
            f"multimodal item {items[-1][2]!r} ends at token {end}, after the prompt's {num_prompt_tokens}: "
            "put all of its placeholders into the prompt"
        )


def _digests(embeds: NDArray[np.generic], num_prompt_tokens: int, block_size: int) -> list[bytes]:
    """Return SHA-256 of each block's slice of ``embeds``: its dtype, shape and bytes.

    Raises ConfigError for other values.
    """
    if not isinstance(embeds, np.ndarray):
        raise ConfigError(f"prompt_embeds must be a numpy array, got {type(embeds).__name__}: convert it first")
    if embeds.ndim != 2 or not 0 < len(embeds) <= num_prompt_tokens or not embeds.shape[1]:
        raise ConfigError(
            f"prompt_embeds must be [tokens, hidden] for 1 to {num_prompt_tokens} tokens, those of the prompt, "
            f"got shape {embeds.shape}"
        )
    if embeds.dtype.hasobject or embeds.dtype.names is not None:
        raise ConfigError(
            f"prompt_embeds must hold numbers, got {embeds.dtype}: convert it, as with astype(np.float32)"
        )
    digests = []
    for start in range(0, len(embeds), block_size):
        part = np.ascontiguousarray(embeds[start : start + block_size])
        digest = hashlib.sha256(f"{part.dtype.str} {part.dtype.name} {part.shape}".encode())
        digest.update(part.view(np.uint8).data)
        digests.append(digest.digest())
    return digests
