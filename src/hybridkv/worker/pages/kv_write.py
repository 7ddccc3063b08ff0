"""Writing keys and values where the slots say: ``slot = block * block_size + offset``, -1 for tokens that go nowhere.

    slots [ 30 31 -1 12 ], block_size 4   ->   tokens 0 1 3 to blocks 7 7 3 at offsets 2 3 0

A step's slots are checked and taken apart once for a group, and used by every layer of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridkv.errors import WorkerError
from hybridkv.worker.pages.kv_pages import KVPages


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

    keys: [tokens, kv heads, width], values likewise, both in the dtype of the pages. Raises WorkerError, with nothing
    written, for shapes, dtypes or pages that do not match. O(tokens).
    """
    pairs = ((pages.keys, keys), (pages.values, values))
    for name, (view, states) in zip(("keys", "values"), pairs, strict=True):
        _check(slots, view, states, name)
    for view, states in pairs:
        _put(slots, view, states)


def write_latent(slots: WriteSlots, pages: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor) -> None:
    """The latents of a step's tokens, and their rotary parts behind them, into their slots.

    pages: [blocks, block_size, kv_lora_rank + rotary width]. latent: [tokens, kv_lora_rank]; rotary:
    [tokens, rotary width]; both in the dtype of the pages. Raises WorkerError as ``write_kv`` does. O(tokens).
    """
    if latent.dim() != 2 or rotary.dim() != 2 or latent.shape[1] + rotary.shape[1] != pages.shape[-1]:
        raise WorkerError(
            f"latents of shape {tuple(latent.shape)} and rotary parts of shape {tuple(rotary.shape)} do not fill "
            f"pages of shape {tuple(pages.shape)}: give [tokens, width] of both"
        )
    parts = (pages[..., : latent.shape[1]], pages[..., latent.shape[1] :])
    for name, view, states in zip(("latents", "rotary parts"), parts, (latent, rotary), strict=True):
        _check(slots, view, states, name)
    for view, states in zip(parts, (latent, rotary), strict=True):
        _put(slots, view, states)


def _check(slots: WriteSlots, view: torch.Tensor, states: torch.Tensor, name: str) -> None:
    made_for = (slots.num_blocks, slots.block_size)
    if view.shape[:2] != made_for:
        raise WorkerError(
            f"slots of {made_for} (blocks, tokens of a block) do not fit pages of {tuple(view.shape[:2])}"
        )
    wanted = (slots.num_tokens, *view.shape[2:])
    if states.shape != wanted or states.dtype != view.dtype:
        raise WorkerError(
            f"{name} of shape {tuple(states.shape)} in {states.dtype}: the pages take {wanted} in {view.dtype}"
        )


def _put(slots: WriteSlots, view: torch.Tensor, states: torch.Tensor) -> None:
    if view.dtype.itemsize == 1:  # torch writes bytes by index, of the float8 types on some devices only
        view, states = view.view(torch.uint8), states.view(torch.uint8)
    view[slots.blocks, slots.offsets] = states[slots.tokens]
