"""Codecs of quantized caches: keys, values and latents as codes with scales, and back (docs/design/0037).

x are the elements that share a scale s, m is the largest |x|, and y is what is read back:

    form                   s                              code             error of an element
    int8_per_token_head    m / 127                        round(x / s)     |x - y| <= s / 2
    fp8_per_token_head     m / 448                        e4m3(x / s)      |x - y| <= max(|x| / 16, s / 1024)
    int4_per_token_head    m / 7                          round(x / s)     |x - y| <= s / 2
    nvfp4                  m / 6, up to the next e4m3     e2m1(x / s)      |x - y| <= s, as far as |x| <= 2688

The bounds hold for float32 results, up to 2**-15 of their value; another dtype rounds once more. Scales are float32, at
least 2**-126 (NVFP4: e4m3, 2**-9 .. 448, so an element beyond 6 * 448 becomes 2688). Zeros stay zeros. If an element is
NaN or infinite, all elements that share its scale read as NaN: nothing is silently made finite.

    int4, nvfp4   a byte holds elements 2i (low half) and 2i + 1 (high half)
    int4          two's complement          nvfp4   sign, then an index into 0 .5 1 1.5 2 3 4 6

A page of zeros therefore reads as zeros in every form.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch

from hybridkv.spec_fields import Quantization

_LARGEST: Final = {Quantization.INT8: 127.0, Quantization.FP8: 448.0, Quantization.INT4: 7.0}
"""The largest code of each form with one scale for a head."""
_LEAST_SCALE: Final = torch.finfo(torch.float32).tiny
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floats (OCP Microscaling Formats 1.0, table 5)."""
_BETWEEN: Final = tuple((low + high) / 2 for low, high in pairwise(_E2M1))
_LARGEST_E4M3: Final = 448.0
_NAN_E4M3: Final = 0x7F


def stored_shapes(form: Quantization, heads: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of one token's scales and codes: (heads,) or (heads, width / 16), and (heads, bytes).

    Args:
        form: the form of the codes.
        heads: KV heads.
        width: elements of one head.
    """
    scales = (heads, width // form.scaled) if form.scaled else (heads,)
    return scales, (heads, width * form.code_bits // 8)


def quantize(form: Quantization, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of ``states``. O(elements).

    Args:
        form: the form of the codes.
        states: float[..., n]; n is a multiple of ``form.multiple``.

    Returns:
        int8 or uint8[..., n * code_bits / 8], and float32[...], or the bits of e4m3, uint8[..., n / 16], for NVFP4.
    """
    states = states.float()
    if form is Quantization.NVFP4:
        return _to_nvfp4(states)
    most = _LARGEST[form]
    largest = states.abs().amax(-1)
    scales = (largest / most).clamp_min(_LEAST_SCALE)  # NaN or infinity spoils it: 0 * infinity is NaN
    scaled = (states / scales[..., None]).nan_to_num(0.0).clamp(-most, most)
    if form is Quantization.FP8:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales
    codes = scaled.round().to(torch.int8)
    return (codes if form is Quantization.INT8 else _packed(codes.view(torch.uint8))), scales


def dequantize(form: Quantization, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the states of codes and scales, as ``quantize`` makes them, in ``dtype``. O(elements).

    Args:
        form: the form of the codes.
        codes: int8 or uint8[..., n * code_bits / 8].
        scales: float32[...], or uint8[..., n / 16] for NVFP4.
        dtype: a float dtype.
    """
    match form:
        case Quantization.INT8:
            found = codes.float()
        case Quantization.FP8:
            found = codes.view(torch.float8_e4m3fn).float()
        case Quantization.INT4:
            found = ((_unpacked(codes) ^ 8) - 8).float()
        case Quantization.NVFP4:
            bits = _unpacked(codes)
            found = codes.new_tensor(_E2M1, dtype=torch.float32)[(bits & 7).long()]
            signed = torch.where(bits >= 8, -found, found)
            return (signed * _of_e4m3(scales).repeat_interleave(form.scaled, -1)).to(dtype)
    return (found * scales[..., None]).to(dtype)


def _to_nvfp4(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e2m1 codes, two in a byte, and e4m3 scales of every 16 elements."""
    blocks = states.reshape(*states.shape[:-1], -1, Quantization.NVFP4.scaled)
    largest = blocks.abs().amax(-1)
    wanted = largest.nan_to_num(0.0).clamp_max(_E2M1[-1] * _LARGEST_E4M3)
    bits = (wanted / _E2M1[-1]).to(torch.float8_e4m3fn).view(torch.uint8)
    bits = bits + (_of_e4m3(bits) * _E2M1[-1] < wanted)  # never down: the largest element would not fit
    scales = bits.masked_fill(~largest.isfinite(), _NAN_E4M3)
    scaled = (blocks / _of_e4m3(scales)[..., None]).nan_to_num(0.0)
    index = torch.bucketize(scaled.abs(), scaled.new_tensor(_BETWEEN)).to(torch.uint8)
    return _packed((index | (scaled < 0).to(torch.uint8) << 3).flatten(-2)), scales


def _of_e4m3(bits: torch.Tensor) -> torch.Tensor:
    return bits.contiguous().view(torch.float8_e4m3fn).float()


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Return the low four bits of uint8[..., n], two in a byte."""
    return (codes[..., ::2] & 15) | (codes[..., 1::2] << 4)


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Return int8[..., 2n], the four bits of each element in uint8[..., n]."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).view(torch.int8)
