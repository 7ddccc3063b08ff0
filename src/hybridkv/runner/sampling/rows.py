"""What a runner remembers of each row: how its tokens are drawn, the last one drawn, what it changes in logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.request import SamplingParams
from hybridkv.runner.sampling.edits import Edits, RowEdits
from hybridkv.runner.sampling.sampler import SamplingBatch, signed_seed
from hybridkv.runner.sampling.verify import NO_DRAFT
from hybridkv.step import Csr, NewRow

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NONE_DRAWN = -1


class RowState:
    """Columns over ``rows`` rows; a row's values hold from the Step that begins it to the next that does.

    Rows that change logits (RowEdits.wanted) also keep what decides how.
    """

    def __init__(self, rows: int, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.last_token: Int64 = np.full(rows, NONE_DRAWN, np.int64)
        self._temperature = np.zeros(rows)
        self._top_k = np.zeros(rows, np.int64)
        self._top_p = np.ones(rows)
        self._min_p = np.zeros(rows)
        self._seed = np.zeros(rows, np.int64)
        self._edited: Bool = np.zeros(rows, np.bool_)
        self._edits: dict[int, RowEdits] = {}

    def check(self, rows: Sequence[NewRow]) -> None:
        """Raise WorkerError for a row that names tokens which are not there, or words that are no tokens yet."""
        for new in rows:
            if new.sampling.bad_words or new.sampling.logit_bias:
                _check_named(new, self._vocabulary)

    def begin(self, new: NewRow) -> None:
        """The row's request is another one, or the same one resumed. O(tokens) where it changes logits, else O(1)."""
        row, params = new.row, new.sampling
        self.last_token[row] = NONE_DRAWN
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = signed_seed(params.seed)
        self._edits.pop(row, None)
        self._edited[row] = RowEdits.wanted(params)
        if self._edited[row]:
            self._edits[row] = row_edits(
                params, new.token_ids.tolist(), new.num_prompt_tokens, new.held_ids, vocabulary=self._vocabulary
            )

    def end(self, rows: Int32) -> None:
        """Rows without a request."""
        for row in rows.tolist():
            self._edits.pop(row, None)
        self._edited[rows] = False
        self.last_token[rows] = NONE_DRAWN

    def batch(self, rows: Int32, positions: Int64, before: Int64) -> SamplingBatch:
        """How the token at ``positions[i]`` of ``rows[i]`` is drawn.

        before: the draft in front of it, NO_DRAFT where there is none. Drafts of a row follow one another: each of its
        draws knows those of the draws before it, too. O(n), and O(cells) for rows that change logits.
        """
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            position=positions,
            edits=self._edits_of(rows, before) if self._edits else None,
        )

    def _edits_of(self, rows: Int32, before: Int64) -> Edits:
        edits, drafts = Edits(), list[int]()
        for draw in np.flatnonzero(self._edited[rows]).tolist():
            last = before.item(draw)
            drafts = [] if last == NO_DRAFT else [*drafts, last]
            edits.add(draw, self._edits[rows.item(draw)], drafts)
        return edits

    def drawn(self, rows: Int32, tokens: Csr) -> None:
        """``tokens[i]``, maybe none, were appended to ``rows[i]``."""
        some = np.flatnonzero(np.diff(tokens.indptr))
        self.last_token[rows[some]] = tokens.values[tokens.indptr[some + 1] - 1]
        for i in some[self._edited[rows[some]]].tolist() if self._edits else ():
            self._edits[rows.item(i)].add(tokens[i].tolist())


def row_edits(
    params: SamplingParams, tokens: Sequence[int], num_prompt: int, held: Sequence[int], *, vocabulary: int
) -> RowEdits:
    """Of a request with ``tokens``, the first ``num_prompt`` of which are its prompt. held: see NewRow.held_ids."""
    there = [token for token in held if token < vocabulary]
    return RowEdits(params, tokens[:num_prompt], tokens[num_prompt:], np.array(there, np.int64))


def _check_named(new: NewRow, vocabulary: int) -> None:
    if any(isinstance(word, str) for word in new.sampling.bad_words):
        raise WorkerError(
            f"bad_words of {new.request_id!r} are text, and a worker has no tokenizer: give their token ids"
        )
    most = max(new.sampling.named_tokens, default=0)
    if most >= vocabulary:
        raise WorkerError(
            f"logit_bias and bad_words of {new.request_id!r} name token {most}: ids are 0 .. {vocabulary - 1}"
        )
