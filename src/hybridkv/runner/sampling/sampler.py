"""How tokens are chosen: greedy and sampled, all rows at once, whatever runs beside them.

    logits -> edits -> / temperature -> top-k -> top-p -> min-p -> + noise -> argmax

Edits are biases, penalties and the like (hybridkv.runner.sampling.edits). The order of the filters is transformers'.
Sampling is the Gumbel-max trick: adding independent Gumbel noise to log-probabilities and taking the largest draws
from their softmax (Maddison et al., arXiv 1411.0030, section 2.1). The noise of a token is a hash of (seed, position,
token id) alone, so neither the batch nor a preemption can change a draw. The hash is SplitMix64's finaliser (Steele et
al., OOPSLA 2014, figure 16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.request import SamplingParams
from hybridkv.runner.sampling.edits import Edits

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_WORD: Final = 1 << 64
_STEP: Final = 0x9E3779B97F4A7C15 - _WORD  # 64-bit constants as the signed integers that torch has
_MIX_1: Final = 0xBF58476D1CE4E5B9 - _WORD
_MIX_2: Final = 0x94D049BB133111EB - _WORD


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """One entry a row. temperature, top_p, min_p: float64[R]; top_k, seed, position: int64[R].

    position: of the token to draw, counted from the start of the request. edits: of the rows' logits; None for none.
    """

    temperature: Float64
    top_k: Int64
    top_p: Float64
    min_p: Float64
    seed: Int64
    position: Int64
    edits: Edits | None = None

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], positions: Sequence[int], edits: Edits | None = None
    ) -> SamplingBatch:
        """A batch from one SamplingParams a row."""
        return cls(
            temperature=np.asarray([one.temperature for one in params], np.float64),
            top_k=np.asarray([one.top_k for one in params], np.int64),
            top_p=np.asarray([one.top_p for one in params], np.float64),
            min_p=np.asarray([one.min_p for one in params], np.float64),
            seed=np.asarray([signed_seed(one.seed) for one in params], np.int64),
            position=np.asarray(positions, np.int64),
            edits=edits,
        )


def signed_seed(seed: int) -> int:
    """``seed`` modulo 2**64 as a signed 64-bit integer."""
    return (seed + (1 << 63)) % _WORD - (1 << 63)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, dict[int, Exception]]:
    """The token of every row, int64[R], and what went wrong with the edits of a row, by row.

    logits: float32[R, vocabulary], left as they are. O(R * vocabulary). The token of a row that went wrong is drawn
    from its logits as they are.
    """
    drawn = logits.max(dim=-1).indices  # the first of equal ones, as argmax in half its time
    parts, wrong = _changed(logits, batch)
    for at, changed in parts:
        drawn[at] = changed.argmax(dim=-1)
    return drawn, wrong


def scores(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """What the choice is the argmax of, [R, vocabulary]: float32 where all rows are greedy, else float64.

    A greedy row's scores are its edited logits, a sampled row's are scaled logits plus noise, -inf
    for tokens that a filter removed. Raises what went wrong with the edits of the first row of which some did.
    """
    parts, wrong = _changed(logits, batch)
    if wrong:
        raise wrong[min(wrong)]
    out = logits.double() if (batch.temperature > 0).any() else logits.clone()
    for at, changed in parts:
        out[at] = changed.to(out.dtype)
    return out


def _changed(
    logits: torch.Tensor, batch: SamplingBatch
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], dict[int, Exception]]:
    """Scores of the rows that are edited or sampled: (rows, scores) of some at a time, the last of a row count.

    And what went wrong, by row.
    """
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    wrong: dict[int, Exception] = {}
    edits = batch.edits
    if edits is not None and edits.rows:
        edited, wrong = edits.apply(logits)
        parts.append((torch.tensor(edits.rows, device=logits.device), edited))
    sampled = np.flatnonzero(batch.temperature > 0)
    if len(sampled):
        at = torch.from_numpy(sampled).to(logits.device)
        chosen = logits[at]
        if edits is not None and edits.rows:
            _, places, of_edited = np.intersect1d(sampled, edits.rows, assume_unique=True, return_indices=True)
            chosen[torch.from_numpy(places).to(at)] = edited[torch.from_numpy(of_edited).to(at)]
        scaled = chosen.double() / _column(batch.temperature[sampled], logits.device)
        scaled = _filtered(scaled, batch, sampled)
        noise = gumbel(batch.seed[sampled], batch.position[sampled], logits.shape[-1], logits.device)
        parts.append((at, scaled + noise))
    return parts, wrong


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
