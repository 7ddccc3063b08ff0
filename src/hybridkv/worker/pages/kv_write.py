"""Writing keys and values where the slots say: ``slot = block * block_size + offset``, -1 for tokens that go nowhere.

    slots [ 30 31 -1 12 ], block_size 4   ->   tokens 0 1 3 to blocks 7 7 3 at offsets 2 3 0

A step's slots are checked and taken apart once for a group, and used by every layer of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker.pages.storage import KVPages

_ROUNDED: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of states that pages of float8 take."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteSlots:
    """Where a step's tokens go in one group.

    num_tokens: of the step, those that go nowhere included. tokens, blocks, offsets: int64[n], the tokens that are
    written and where. num_blocks, block_size: of the pages they were made for.
    """

    num_tokens: int
    num_blocks: int
    block_size: int
    tokens: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor


def write_slots(slots: torch.Tensor, num_blocks: int, block_size: int) -> WriteSlots:
    """``slots``, int64[tokens], for pages of ``num_blocks`` blocks of ``block_size`` tokens.

    Raises WorkerError for a slot below -1 or behind the last block, and for two tokens in one slot.
    O(tokens log tokens), and a wait for the device that the slots are on.
    """
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise WorkerError(f"slots must be int64[tokens], got {slots.dtype} of shape {tuple(slots.shape)}")
    tokens = torch.nonzero(slots != -1).flatten()
    held = slots[tokens]
    if len(held):
        ordered = held.sort().values
        first, last, limit = int(ordered[0]), int(ordered[-1]), num_blocks * block_size
        if first < 0 or last >= limit:
            raise WorkerError(
                f"slots must lie in 0 .. {limit - 1} ({num_blocks} blocks of {block_size} tokens), or be -1 for a "
                f"token that is not kept; got {first} .. {last}"
            )
        twice = torch.nonzero(ordered[1:] == ordered[:-1]).flatten()
        if len(twice):
            raise WorkerError(
                f"two tokens go to slot {int(ordered[twice[0]])}: a block that is written belongs to one request, and "
                "each position is scheduled once"
            )
    blocks = torch.div(held, block_size, rounding_mode="floor")
    return WriteSlots(len(slots), num_blocks, block_size, tokens, blocks, held % block_size)


def write_kv(slots: WriteSlots, pages: KVPages, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Keys and values of a step's tokens into their slots.

    keys: [tokens, kv heads, width], values likewise, both in the dtype of the pages. Into pages of float8_e4m3fn also
    in another float dtype: divided by the pages' scales, rounded to the nearest, ties to even; what is too large
    becomes the largest, 448. Raises WorkerError, with nothing written, for shapes, dtypes or pages that do not match.
    O(tokens).
    """
    _write(slots, _parts(slots.num_tokens, pages, keys, values))


def write_latent(
    slots: WriteSlots, pages: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, *, scale: float = 1.0
) -> None:
    """The latents of a step's tokens, and their rotary parts behind them, into their slots.

    pages: [blocks, block_size, kv_lora_rank + rotary width]. latent: [tokens, kv_lora_rank]; rotary:
    [tokens, rotary width]; dtypes as of ``write_kv``. scale: of pages of float8. Raises WorkerError as ``write_kv``
    does. O(tokens).
    """
    _write(slots, _latent_parts(slots.num_tokens, pages, latent, rotary, scale))


def triton_write_kv(slots: torch.Tensor, pages: KVPages, keys: torch.Tensor, values: torch.Tensor) -> None:
    """What ``write_kv`` writes, to the bit, in one launch of Triton; a CUDA graph may capture it.

    slots: int64[tokens], contiguous, on the device of the pages, as slot mappings are made. They are not looked at
    before: tokens whose slot does not exist go nowhere, and no two may have one slot (``write_slots`` checks both).
    Raises WorkerError as ``write_kv`` does, ConfigError where Triton is not installed.
    """
    _check_slots(slots)
    _launch(slots, _parts(len(slots), pages, keys, values))


def triton_write_latent(
    slots: torch.Tensor, pages: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, *, scale: float = 1.0
) -> None:
    """What ``write_latent`` writes, as ``triton_write_kv`` writes it."""
    _check_slots(slots)
    _launch(slots, _latent_parts(len(slots), pages, latent, rotary, scale))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """States that go to a view [blocks, block_size, heads, width]; times ``factor`` where they are rounded."""

    view: torch.Tensor
    states: torch.Tensor
    factor: float

    @property
    def rounded(self) -> bool:
        return self.view.dtype != self.states.dtype

    def stored(self) -> torch.Tensor:
        """The states as the view holds them."""
        if not self.rounded:
            return self.states
        largest = torch.finfo(self.view.dtype).max
        return (self.states.float() * self.factor).clamp(-largest, largest).to(self.view.dtype)


def _parts(
    num_tokens: int, pages: KVPages, keys: torch.Tensor, values: torch.Tensor, names: Sequence[str] = ("keys", "values")
) -> tuple[_Part, _Part]:
    """Of keys and of values, checked."""
    return (
        _part(num_tokens, pages.keys, keys, names[0], pages.key_scale),
        _part(num_tokens, pages.values, values, names[1], pages.value_scale),
    )


def _latent_parts(
    num_tokens: int, pages: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, scale: float
) -> tuple[_Part, _Part]:
    """Of latents and of what stands behind them, checked."""
    fit = latent.dim() == rotary.dim() == 2 and pages.dim() == 3
    if not fit or latent.shape[1] + rotary.shape[1] != pages.shape[2]:
        raise WorkerError(
            f"latents of shape {tuple(latent.shape)} and rotary parts of shape {tuple(rotary.shape)} do not fill "
            f"pages of shape {tuple(pages.shape)}: give [tokens, width] of both"
        )
    if not 0 < scale < math.inf:
        raise WorkerError(f"the scale of latents must be a positive number, got {scale}; 1 for none")
    width = latent.shape[1]
    views = KVPages(pages[:, :, None, :width], pages[:, :, None, width:], scale, scale)
    return _parts(num_tokens, views, latent[:, None], rotary[:, None], ("latents", "rotary parts"))


def _part(num_tokens: int, view: torch.Tensor, states: torch.Tensor, name: str, scale: float) -> _Part:
    wanted = (num_tokens, *view.shape[2:])
    fits = states.dtype == view.dtype or (view.dtype == torch.float8_e4m3fn and states.dtype in _ROUNDED)
    if states.shape != wanted or not fits:
        raise WorkerError(
            f"{name} of shape {tuple(states.shape)} in {states.dtype}: the pages take {wanted} in {view.dtype}"
        )
    # a float32, as both ways multiply by it
    return _Part(view, states, float(np.float32(1 / scale)))


def _write(slots: WriteSlots, parts: tuple[_Part, _Part]) -> None:
    made_for = (slots.num_blocks, slots.block_size)
    for part in parts:
        if part.view.shape[:2] != made_for:
            raise WorkerError(
                f"slots of {made_for} (blocks, tokens of a block) do not fit pages of {tuple(part.view.shape[:2])}"
            )
    for part in parts:
        view, states = _as_bytes(part.view), _as_bytes(part.stored())
        view[slots.blocks, slots.offsets] = states[slots.tokens]


def _launch(slots: torch.Tensor, parts: tuple[_Part, _Part]) -> None:
    try:
        from hybridkv.worker.kernels.kv_write import launch_write  # noqa: PLC0415 - Triton is optional, so asked for here
    except ImportError as error:
        raise ConfigError("Triton is not installed: pip install 'hybridkv[gpu]', or use write_kv") from error
    if parts[0].rounded != parts[1].rounded:
        raise WorkerError(f"states of {parts[0].states.dtype} and {parts[1].states.dtype}: give both in one dtype")
    if len(slots):
        keys, values = ((_as_bytes(part.view), _as_bytes(part.states), part.factor) for part in parts)
        launch_write(slots, keys, values, fp8=parts[0].rounded)


def _check_slots(slots: torch.Tensor) -> None:
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise WorkerError(f"slots must be int64[tokens], side by side, got {slots.dtype} of shape {tuple(slots.shape)}")


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes as bytes: torch writes them by index, and Triton loads them, of float8 on some devices only."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
