"""Context parallelism: which tokens a rank holds, and what all ranks found put together.

    block_size 4, 2 ranks, interleave 2: a block covers 8 tokens, of which each rank holds 4
    tokens of a block   0 1 2 3 4 5 6 7
    held by rank        0 0 1 1 0 0 1 1        rank 0 keeps 0 1 4 5 in its slots 0 .. 3 of the block

Every rank attends to its own slots. The outputs and log-sum-exps of all ranks give the output over all tokens:

    out = sum_j exp(s_j) v_j / sum_j exp(s_j)        lse = log sum_j exp(s_j)

of one query, j over the keys of a part. Parts combine by ``exp(lse)`` as weights, since that is their denominator: the
identity that FlashAttention (arXiv 2205.14135, section 3.1) and Ring Attention (arXiv 2310.01889) use. A part without
keys has out 0 and lse -inf, and weighs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed

from hybridkv.errors import ConfigError, WorkerError


@dataclass(frozen=True, slots=True)
class ContextShare:
    """What one of ``size`` ranks holds: of every ``size * interleave`` tokens those ``rank * interleave`` ...

    interleave: tokens that lie together on one rank. Raises ConfigError for numbers that cannot work.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in ("size", "interleave"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a context share must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} does not exist: {self.size} ranks are 0 .. {self.size - 1}")

    @classmethod
    def of_ranks(
        cls, *, dcp_size: int = 1, dcp_rank: int = 0, pcp_size: int = 1, pcp_rank: int = 0, interleave: int = 1
    ) -> ContextShare:
        """Of a decode and a prefill context parallel rank: ``pcp_rank * dcp_size + dcp_rank`` of their product."""
        for name, rank, size in (("dcp", dcp_rank, dcp_size), ("pcp", pcp_rank, pcp_size)):
            if not 0 <= rank < size:
                raise ConfigError(f"{name} rank {rank} of {size}: ranks are 0 .. size - 1")
        return cls(dcp_size * pcp_size, pcp_rank * dcp_size + dcp_rank, interleave)

    def tokens_of_block(self, block_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64[block_size]: which token of the ``block_size * size`` that a block covers lies in each local slot.

        The inverse of ``off = o // (cp*I) * I + o % I`` (docs/contracts.md, 7). WorkerError unless the interleave
        divides the block: slots of different tokens would be one.
        """
        if block_size < 1 or block_size % self.interleave:
            raise WorkerError(
                f"an interleave of {self.interleave} tokens does not divide blocks of {block_size}: take one that does"
            )
        at = torch.arange(block_size, device=device)
        turn = torch.div(at, self.interleave, rounding_mode="floor")
        return (turn * self.size + self.rank) * self.interleave + at % self.interleave


WHOLE: Final = ContextShare()
"""One rank that holds everything."""


def combine_over_ranks(
    out: torch.Tensor, lse: torch.Tensor, group: torch.distributed.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The partial results of all ranks of ``group`` put together; the same bits on every rank.

    out: float[tokens, heads, width], lse: float[tokens, heads], of one dtype, from this rank's slots.
    One all-gather of ``tokens * heads * (width + 1)`` elements a rank, combined in the order of ranks: a reduction
    would send less, but ranks that draw tokens from its result must agree to the bit. WorkerError for shapes
    that do not match.
    """
    if out.dim() != 3 or lse.shape != out.shape[:2] or lse.dtype != out.dtype:
        raise WorkerError(
            f"partial results of shapes {tuple(out.shape)} and {tuple(lse.shape)}, {out.dtype} and {lse.dtype}: "
            "give [tokens, heads, width] and [tokens, heads] of one dtype"
        )
    mine = torch.cat((out, lse[..., None]), dim=-1)
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(parts, mine, group=group)
    together = torch.stack(parts)
    return combine_partial(together[..., :-1], together[..., -1])


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
