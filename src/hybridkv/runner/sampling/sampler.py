"""How tokens are chosen: greedy and sampled, all rows at once, whatever runs beside them.

    logits -> repetition penalty -> / temperature -> top-k -> top-p -> min-p -> + noise -> argmax

The order of the filters is transformers'. Sampling is the Gumbel-max trick: adding independent Gumbel noise
to log-probabilities and taking the largest draws from their softmax (Maddison et al., arXiv 1411.0030,
section 2.1). The noise of a token is a hash of (seed, position, token id) alone, so neither the batch nor a
preemption can change a draw. The hash is SplitMix64's finaliser (Steele et al., OOPSLA 2014, figure 16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.request import SamplingParams

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_WORD: Final = 1 << 64
_STEP: Final = 0x9E3779B97F4A7C15 - _WORD  # 64-bit constants as the signed integers that torch has
_MIX_1: Final = 0xBF58476D1CE4E5B9 - _WORD
_MIX_2: Final = 0x94D049BB133111EB - _WORD


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """One entry a row. temperature, top_p, min_p, penalty: float64[R]; top_k, seed, position: int64[R].

    position: of the token to draw, counted from the start of the request.
    seen: for rows with a repetition penalty, bool[vocabulary] of the tokens in prompt and output; else None.
    """

    temperature: Float64
    top_k: Int64
    top_p: Float64
    min_p: Float64
    penalty: Float64
    seed: Int64
    position: Int64
    seen: Sequence[torch.Tensor | None]

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], positions: Sequence[int], seen: Sequence[torch.Tensor | None]
    ) -> SamplingBatch:
        """A batch from one SamplingParams a row."""
        return cls(
            temperature=np.asarray([one.temperature for one in params], np.float64),
            top_k=np.asarray([one.top_k for one in params], np.int64),
            top_p=np.asarray([one.top_p for one in params], np.float64),
            min_p=np.asarray([one.min_p for one in params], np.float64),
            penalty=np.asarray([one.repetition_penalty for one in params], np.float64),
            seed=np.asarray([signed_seed(one.seed) for one in params], np.int64),
            position=np.asarray(positions, np.int64),
            seen=seen,
        )


def signed_seed(seed: int) -> int:
    """``seed`` modulo 2**64 as a signed 64-bit integer."""
    return (seed + (1 << 63)) % _WORD - (1 << 63)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The token of every row, int64[R]. logits: float32[R, vocabulary], left as they are. O(R * vocabulary)."""
    return scores(logits, batch).argmax(dim=-1)


def scores(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """What the choice is the argmax of, [R, vocabulary]: float32 where all rows are greedy, else float64.

    A greedy row's scores are its logits after the penalty, a sampled row's are scaled logits plus noise, -inf
    for tokens that a filter removed.
    """
    out = _penalised(logits, batch)
    sampled = np.flatnonzero(batch.temperature > 0)
    if not len(sampled):
        return out
    at = torch.from_numpy(sampled).to(logits.device)
    scaled = out[at].double() / _column(batch.temperature[sampled], logits.device)
    scaled = _filtered(scaled, batch, sampled)
    noise = gumbel(batch.seed[sampled], batch.position[sampled], logits.shape[-1], logits.device)
    return out.double().index_copy(0, at, scaled + noise)


def gumbel(seed: Int64, position: Int64, vocabulary: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Standard Gumbel noise, float64[R, vocabulary], a function of seed[i], position[i] and the token id."""
    key = _mix(_mix(torch.from_numpy(seed).to(device)) + torch.from_numpy(position).to(device))
    tokens = torch.arange(vocabulary, dtype=torch.int64, device=device)
    bits = (_mix(key[:, None] + tokens * _STEP) >> 11) & ((1 << 53) - 1)
    uniform = (bits.double() + 0.5) / (1 << 53)  # never 0 or 1
    return -(-uniform.log()).log()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser of x plus its increment; int64 arithmetic wraps as uint64's does."""
    x = x + _STEP
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _penalised(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Logits of tokens already seen divided by the penalty where positive, multiplied where negative."""
    rows = [i for i in np.flatnonzero(batch.penalty != 1).tolist() if batch.seen[i] is not None]
    if not rows:
        return logits
    at = torch.as_tensor(rows, device=logits.device)
    chosen = logits[at]
    penalty = _column(batch.penalty[rows], logits.device).to(logits.dtype)
    seen = torch.stack([seen for i in rows if (seen := batch.seen[i]) is not None])
    changed = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    return logits.index_copy(0, at, torch.where(seen, changed, chosen))


def _filtered(scaled: torch.Tensor, batch: SamplingBatch, rows: Int64) -> torch.Tensor:
    """-inf for tokens outside top-k, then top-p, then min-p; a filter that no row uses costs nothing."""
    top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
    device, vocabulary = scaled.device, scaled.shape[-1]
    if (top_k > 0).any() or (top_p < 1).any():
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        limit = np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary)
        # ties with the k-th largest stay, as in transformers
        kth = ordered.gather(1, torch.from_numpy(limit - 1).to(device)[:, None])
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        # a token stays while what is more likely holds less than top_p: the first one always does
        cut = (before >= _column(top_p, device)) & torch.from_numpy(top_p < 1).to(device)[:, None]
        ordered = ordered.masked_fill(cut, -torch.inf)
        scaled = torch.empty_like(scaled).scatter_(1, order, ordered)
    if (min_p > 0).any():
        probabilities = scaled.softmax(dim=-1)
        floor = _column(min_p, device) * probabilities.amax(dim=-1, keepdim=True)
        scaled = scaled.masked_fill(probabilities < floor, -torch.inf)
    return scaled


def _column(values: Float64, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)[:, None]
