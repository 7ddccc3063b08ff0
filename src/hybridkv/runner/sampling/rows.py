"""What a runner remembers of each row: how its tokens are drawn, the last one drawn, which ones were seen."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.runner.sampling.sampler import SamplingBatch, signed_seed
from hybridkv.runner.sampling.verify import NO_DRAFT
from hybridkv.step import Csr, NewRow

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NONE_DRAWN = -1


class RowState:
    """Columns over ``rows`` rows; a row's values hold from the Step that begins it to the next that does.

    Rows with a repetition penalty also keep bool[vocabulary] of the tokens in their prompt and output.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        self._vocabulary, self._device = vocabulary, device
        self.last_token: Int64 = np.full(rows, NONE_DRAWN, np.int64)
        self._temperature = np.zeros(rows)
        self._top_k = np.zeros(rows, np.int64)
        self._top_p = np.ones(rows)
        self._min_p = np.zeros(rows)
        self._penalty = np.ones(rows)
        self._seed = np.zeros(rows, np.int64)
        self._seen: dict[int, torch.Tensor] = {}

    def begin(self, new: NewRow) -> None:
        """The row's request is another one, or the same one resumed. O(tokens) with a penalty, else O(1)."""
        row, params = new.row, new.sampling
        self.last_token[row] = NONE_DRAWN
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._penalty[row] = params.repetition_penalty
        self._seed[row] = signed_seed(params.seed)
        self._seen.pop(row, None)
        if params.repetition_penalty != 1:
            seen = torch.zeros(self._vocabulary, dtype=torch.bool, device=self._device)
            seen[torch.from_numpy(new.token_ids.astype(np.int64)).to(self._device)] = True
            self._seen[row] = seen

    def end(self, rows: Int32) -> None:
        """Rows without a request."""
        for row in rows.tolist():
            self._seen.pop(row, None)
        self.last_token[rows] = NONE_DRAWN

    def batch(self, rows: Int32, positions: Int64, before: Int64) -> SamplingBatch:
        """How the token at ``positions[i]`` of ``rows[i]`` is drawn.

        before: the draft in front of it, NO_DRAFT where there is none. Drafts of a row follow one another: each of its
        draws has seen those of the draws before it, too. O(n), and O(vocabulary) for a draft in a row with a penalty.
        """
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            penalty=self._penalty[rows],
            seed=self._seed[rows],
            position=positions,
            seen=self._seen_by(rows, before) if self._seen else [None] * len(rows),
        )

    def _seen_by(self, rows: Int32, before: Int64) -> list[torch.Tensor | None]:
        """What each draw has seen: its row's tokens and the drafts in front of it."""
        seen: list[torch.Tensor | None] = []
        for row, draft in zip(rows.tolist(), before.tolist(), strict=True):
            if draft == NO_DRAFT:
                seen.append(self._seen.get(row))
                continue
            last = seen[-1]
            if last is not None:
                last = last.clone()
                last[draft] = True
            seen.append(last)
        return seen

    def drawn(self, rows: Int32, tokens: Csr) -> None:
        """``tokens[i]``, maybe none, were appended to ``rows[i]``."""
        some = np.flatnonzero(np.diff(tokens.indptr))
        self.last_token[rows[some]] = tokens.values[tokens.indptr[some + 1] - 1]
        if self._seen:
            for i in some.tolist():
                if (seen := self._seen.get(int(rows[i]))) is not None:
                    seen[torch.from_numpy(tokens[i].astype(np.int64)).to(self._device)] = True
