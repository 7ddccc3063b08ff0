"""What tells equal tokens apart: adapters, images, embeddings, tenants, encoder inputs.

The extra keys of a block enter its hash (contracts, 3), in this order, and a block without any has None:

    ("lora", name, path)             every block
    ("mm", id, offset - start)       every block that the item overlaps; start: the block's first token
    ("cache_salt", salt)             the block at token 0
    ("prompt_embeds", digest)        every block that the embeddings overlap; digest of that slice
    ("encoder", digest)              the block at token 0

Later blocks inherit what stands in the first one through their parent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError

Extra = tuple[tuple[object, ...], ...]
"""Extra keys of one block: ``(("cache_salt", "tenant-a"),)``."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter. name and path enter the hashes; id, the engine's number for it, is told in events alone."""

    name: str
    path: str
    id: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a LoRA adapter needs a name: requests of different adapters must not share blocks")


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, sound or video whose placeholders are tokens offset .. offset + length - 1 of the prompt.

    id: names its content, such as a digest of it: equal content, equal id.
    """

    id: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if not self.id:
            raise ConfigError("a multimodal item needs an id that names its content, such as a digest")
        if self.offset < 0 or self.length < 1:
            raise ConfigError(
                f"multimodal item {self.id!r} covers {self.length} tokens from {self.offset}: "
                "offset must be 0 or more and length at least 1"
            )


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """What an encoder reads. digest: of its content, bytes or text. num_tokens: that cross attention reads."""

    digest: bytes | str
    num_tokens: int

    def __post_init__(self) -> None:
        if not self.digest or self.num_tokens < 1:
            raise ConfigError("an encoder input needs a digest of its content and at least 1 token")


class ExtraKeys:
    """The extra keys of one request. num_prompt_tokens: items and embeddings lie inside the prompt.

    prompt_embeds: [tokens, hidden], in place of the first tokens of the prompt. Raises ConfigError for items
    that overlap or stick out, and for embeddings of another shape.
    """

    __slots__ = ("_embeds", "_items", "_lora", "_start")

    def __init__(
        self,
        num_prompt_tokens: int,
        *,
        lora: LoraAdapter | None = None,
        multimodal: Sequence[MultimodalItem] = (),
        cache_salt: str | None = None,
        prompt_embeds: NDArray[np.generic] | None = None,
        encoder: EncoderInput | None = None,
    ) -> None:
        self._lora: Extra = () if lora is None else (("lora", lora.name, lora.path),)
        self._items = tuple(sorted(multimodal, key=lambda item: item.offset))
        self._embeds = prompt_embeds
        salt: Extra = () if cache_salt is None else (("cache_salt", cache_salt),)
        self._start = salt, (() if encoder is None else (("encoder", encoder.digest),))
        _check_items(self._items, num_prompt_tokens)
        if prompt_embeds is not None and (prompt_embeds.ndim != 2 or not 0 < len(prompt_embeds) <= num_prompt_tokens):
            raise ConfigError(
                f"prompt_embeds must be [tokens, hidden] for at most {num_prompt_tokens} tokens of the prompt, "
                f"got shape {prompt_embeds.shape}"
            )

    def __bool__(self) -> bool:
        """Whether any block has extra keys."""
        return bool(self._lora or self._items or self._embeds is not None or any(self._start))

    def of_block(self, start: int, size: int) -> Extra | None:
        """Extra keys of tokens start .. start + size - 1; None without any. O(items)."""
        end = start + size
        salt, encoder = self._start if start == 0 else ((), ())
        items = tuple(
            ("mm", item.id, item.offset - start)
            for item in self._items
            if item.offset < end and start < item.offset + item.length
        )
        return (*self._lora, *items, *salt, *self._embeds_of(start, end), *encoder) or None

    def of_blocks(self, first: int, count: int, size: int) -> list[Extra | None] | None:
        """Extra keys of blocks first .. first + count - 1 of ``size`` tokens; None when all are empty."""
        extras = [self.of_block(block * size, size) for block in range(first, first + count)]
        return extras if any(extras) else None

    def _embeds_of(self, start: int, end: int) -> Extra:
        if self._embeds is None or start >= len(self._embeds):
            return ()
        part = np.ascontiguousarray(self._embeds[start:end])
        digest = hashlib.sha256(f"{part.dtype.str}{part.shape}".encode())
        digest.update(part.tobytes())
        return (("prompt_embeds", digest.digest()),)


def _check_items(items: Sequence[MultimodalItem], num_prompt_tokens: int) -> None:
    """ConfigError unless ``items``, sorted by offset, lie one behind the other inside the prompt."""
    end = 0
    for item in items:
        if item.offset < end:
            raise ConfigError(
                f"multimodal item {item.id!r} begins at {item.offset}, before the one before ends at {end}"
            )
        end = item.offset + item.length
    if end > num_prompt_tokens:
        raise ConfigError(
            f"multimodal item {items[-1].id!r} ends at {end}, behind the prompt's {num_prompt_tokens} tokens"
        )
