"""Attention over dense keys, whose query heads share KV heads without a copy of them for each, and its log-sum-exp.

    out = softmax(softcap(scale * query . key) + mask) . value        lse = log of the sum of all exponentials

Where all queries see the same keys, those of the heads that share a KV head are queries of that one head. On a CPU
torch's flash kernel runs, which reads strided keys and makes no scores of its own size; elsewhere, and for soft caps,
plain products do.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional

from hybridkv.runner.attention.attention_modules import Attended

_FLASH: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What scaled_dot_product_attention calls on a CPU, which throws the log-sum-exp away."""


def dense_attention(
    states: Attended,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of ``states``, whose heads are a multiple of the KV heads: neighbouring ones share one.

    mask: added to the scores, of their dtype, [rows or 1, 1, queries, keys]; every query sees some key. causal: as many
    queries as keys, each of which sees the keys up to its own place; no mask then.
    out: [rows, heads, queries, width of a value], of the query's dtype. lse: [rows, heads, queries], of float32
    (float64 for float64). O(queries * keys).
    """
    query, key, value = states
    rows, heads, queries, width = query.shape
    shared = heads // key.shape[1]
    together = shared > 1 and not causal and (mask is None or queries == 1)
    if together:
        query = query.reshape(rows, key.shape[1], shared * queries, width)
    grouped = Attended(query, key, value)
    if softcap is None and query.device.type == "cpu" and value.shape[3] <= width:
        out, lse = _flash(grouped, scale, mask, causal=causal)
    else:
        out, lse = _products(grouped, scale, mask, causal=causal, softcap=softcap)
    return out.reshape(rows, heads, queries, -1), lse.reshape(rows, heads, queries)


def _flash(
    states: Attended, scale: float, mask: torch.Tensor | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values narrower than keys (MLA) are made as wide: the kernel knows one width."""
    query, key, value = states
    width = value.shape[3]
    wide = value if width == key.shape[3] else functional.pad(value, (0, key.shape[3] - width))
    out, lse = _FLASH(query, key, wide, 0.0, causal, attn_mask=mask, scale=scale)
    return out[..., :width], lse


def _products(
    states: Attended, scale: float, mask: torch.Tensor | None, *, causal: bool, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and sums in float32 at least."""
    query, key, value = states
    rows, heads, queries, width = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], queries, width)
    scores = torch.matmul(grouped, key.transpose(2, 3).unsqueeze(2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask.unsqueeze(2)
    if causal:
        hidden = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).to(value.dtype)
    out = torch.matmul(weights, value.unsqueeze(2))
    return out.reshape(rows, heads, queries, -1), lse.reshape(rows, heads, queries)
