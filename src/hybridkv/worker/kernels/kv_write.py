"""Keys and values of a step's tokens into their slots in Triton, one launch: float8 is rounded on the way.

A launch is a line of programs, one for each (token, tile of its keys, then of its values), the tile running fastest.
Needs Triton: ``kv_write.triton_write_kv`` imports this module and names what is missing.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hybridkv.units import ceil_div

# elements of a program: a token of 8 heads of 128 is one tile of keys and one of values
_TILE: Final = 1024


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _e4m3(value: tl.tensor) -> tl.tensor:
    """The byte of the float8_e4m3fn nearest to a float32, ties to even; what is too large becomes 448."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    largest = 0x43E00000  # 448
    held = tl.minimum(size, largest)
    # 3 of 23 bits of the mantissa stay, the exponent's bias falls from 127 to 7; a carry goes up into the exponent
    normal = ((held + 0x7FFFF + ((held >> 20) & 1)) >> 20) - (120 << 3)
    # below 2 ** -6 the bytes count steps of 2 ** -9, which is the last bit of a float32 near 2 ** 14
    steps = (held.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(held < 0x3C800000, steps, normal)
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _put(  # noqa: PLR0917 - a kernel has no keywords
    view: tl.tensor,
    states: tl.tensor,
    inverse: tl.tensor,
    slot: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    view_block: tl.tensor,
    view_token: tl.tensor,
    view_head: tl.tensor,
    view_column: tl.tensor,
    state_token: tl.tensor,
    state_head: tl.tensor,
    state_column: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    fp8: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    at = first + tl.arange(0, tile)
    head, column = at // width, at % width
    inside = at < heads * width
    held = tl.load(states + token * state_token + head * state_head + column * state_column, mask=inside)
    if fp8:
        held = _e4m3(held.to(tl.float32) * inverse)
    to = view + slot // block_size * view_block + slot % block_size * view_token
    tl.store(to + head * view_head + column * view_column, held, mask=inside)


@triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator]  # Triton is not typed
def write_kernel(  # noqa: PLR0917 - a kernel has no keywords
    slots: tl.tensor,
    limit: tl.tensor,
    keys: tl.tensor,
    key_states: tl.tensor,
    key_inverse: tl.tensor,
    key_block: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    key_column: tl.tensor,
    key_state_token: tl.tensor,
    key_state_head: tl.tensor,
    key_state_column: tl.tensor,
    values: tl.tensor,
    value_states: tl.tensor,
    value_inverse: tl.tensor,
    value_block: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    value_column: tl.tensor,
    value_state_token: tl.tensor,
    value_state_head: tl.tensor,
    value_state_column: tl.tensor,
    heads: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    block_size: tl.constexpr,
    fp8: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """A tile of one token's keys or values; of a token without a slot nothing."""
    key_tiles = tl.cdiv(heads * key_width, tile)
    tiles = key_tiles + tl.cdiv(heads * value_width, tile)
    program = tl.program_id(0)
    token = (program // tiles).to(tl.int64)
    number = program % tiles
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < limit):
        if number < key_tiles:
            _put(
                keys,
                key_states,
                key_inverse,
                slot,
                token,
                number * tile,
                key_block,
                key_token,
                key_head,
                key_column,
                key_state_token,
                key_state_head,
                key_state_column,
                heads,
                key_width,
                block_size,
                fp8,
                tile,
            )
        else:
            _put(
                values,
                value_states,
                value_inverse,
                slot,
                token,
                (number - key_tiles) * tile,
                value_block,
                value_token,
                value_head,
                value_column,
                value_state_token,
                value_state_head,
                value_state_column,
                heads,
                value_width,
                block_size,
                fp8,
                tile,
            )


def launch_write(
    slots: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, float],
    values: tuple[torch.Tensor, torch.Tensor, float],
    *,
    fp8: bool,
) -> None:
    """Pages, states of the tokens and the factor before rounding, of both; pages and states integers but for fp8."""
    _, block_size, heads, key_width = keys[0].shape
    tile = min(_TILE, triton.next_power_of_2(heads * max(key_width, values[0].shape[3])))
    tiles = sum(ceil_div(heads * one[0].shape[3], tile) for one in (keys, values))
    parts = [
        argument
        for view, states, factor in (keys, values)
        for argument in (view, states, factor, *view.stride(), *states.stride())
    ]
    write_kernel[len(slots) * tiles,](
        slots,
        keys[0].shape[0] * block_size,
        *parts,
        heads=heads,
        key_width=key_width,
        value_width=values[0].shape[3],
        block_size=block_size,
        fp8=fp8,
        tile=tile,
    )
