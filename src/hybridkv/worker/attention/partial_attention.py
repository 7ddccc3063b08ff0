"""Attention over a part of the keys, put together with other parts.

    out = sum_j exp(s_j) v_j / sum_j exp(s_j)        lse = log sum_j exp(s_j)

of one query, j over the keys of a part. Parts combine by ``exp(lse)`` as weights, since that is their denominator: the
identity behind FlashAttention (arXiv 2205.14135, section 3.1) and Ring Attention (arXiv 2310.01889). A part without
keys has out 0 and lse -inf, and weighs nothing.
"""

from __future__ import annotations

import torch

from hybridkv.errors import WorkerError


def combine_partial(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all parts: float[tokens, heads, width] and float[tokens, heads].

    out: float[parts, tokens, heads, width]; lse: float[parts, tokens, heads], natural logarithms. Weights are taken
    relative to the largest, so that none overflows. What ``out`` holds where lse is -inf does not matter.
    Raises WorkerError for shapes that do not match. O(elements of out).
    """
    if out.dim() != 4 or lse.shape != out.shape[:3]:
        raise WorkerError(
            f"partial results of shapes {tuple(out.shape)} and {tuple(lse.shape)}: "
            "give [parts, tokens, heads, width] and [parts, tokens, heads]"
        )
    largest = lse.amax(0)
    largest = largest.masked_fill(largest == -torch.inf, 0)  # no part has keys: -inf - 0 is -inf, not NaN
    weights = torch.exp(lse - largest)
    total = weights.sum(0)
    weighted = (out * weights[..., None]).masked_fill((weights == 0)[..., None], 0)
    # a query without any key: 0 / 1
    combined = weighted.sum(0) / total.masked_fill(total == 0, 1)[..., None]
    return combined, largest + torch.log(total)


def with_sink(out: torch.Tensor, lse: torch.Tensor, sink_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with one more key for each head, whose score is ``sink_logits[head]`` and whose value is 0.

    out: float[tokens, heads, width]; lse: float[tokens, heads]; sink_logits: [heads], learned (gpt-oss model card,
    arXiv 2508.10925, section 2.2). It counts once: after parts have been combined, never in each of them.
    Raises WorkerError for shapes that do not match. O(elements of out).
    """
    if out.dim() != 3 or lse.shape != out.shape[:2] or sink_logits.shape != out.shape[1:2]:
        raise WorkerError(
            f"shapes {tuple(out.shape)}, {tuple(lse.shape)} and {tuple(sink_logits.shape)}: "
            "give [tokens, heads, width], [tokens, heads] and one sink logit a head"
        )
    logits = sink_logits.to(lse.dtype)
    # exp(lse) / (exp(lse) + exp(logit)), exact also where both are large
    kept = torch.sigmoid(lse - logits).masked_fill(lse == -torch.inf, 0)
    return out * kept[..., None], torch.logaddexp(lse, logits)
