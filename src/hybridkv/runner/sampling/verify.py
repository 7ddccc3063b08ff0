"""Drafts against what the model draws: which tokens a Step appends to its rows.

    a row's tokens   [ c  c  c | d0 d1 d2 ]      c: certain, d: drafts
    logits behind            c   d0 d1 d2        its last certain token and each draft
    drawn from them         t0   t1 t2 t3        t0 where d0 stands, .., t3 behind d2
    appended, if d0 = t0 and d1 != t1: t0 t1     two were accepted: a draft, and the token drawn behind it

Every token is drawn as without drafts, by the request's seed and the token's own position. A draft that equals what is
drawn in its place is accepted; the first draw that differs takes its draft's place and ends the row. So outputs do
not depend on drafts, sampled ones as little as greedy ones, but for near-ties: arithmetic over another number of
tokens may round another way. A draft x is accepted with the probability p(x) that the model gives it: that of
speculative sampling when x was certain to be proposed (Leviathan et al., arXiv 2211.17192, section 2.3). A draft model
that draws with the same noise agrees more often than one that draws by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.step import Csr, Step

Bool = NDArray[np.bool_]
Int64 = NDArray[np.int64]

NO_DRAFT: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """The tokens that a Step has drawn, int64[n] each.

    For each row that samples, in order: one behind its last certain token, and one behind each draft.
    row: index into the Step's rows. place: within the row, from 0. position: of the token in its request.
    source: index into the Step's tokens of the one whose logits it is drawn from.
    draft: what was proposed in its place, NO_DRAFT behind the last draft.
    """

    row: Int64
    place: Int64
    position: Int64
    source: Int64
    draft: Int64

    @classmethod
    def of(cls, step: Step) -> Draws:
        """Those of ``step``. O(rows + drafts)."""
        drafts = np.diff(step.drafts.indptr)
        count = np.where(step.samples, drafts + 1, 0)
        row = np.repeat(np.arange(len(step)), count)
        ends = np.cumsum(count)
        place = np.arange(len(row)) - np.repeat(ends - count, count)
        certain = step.num_computed.astype(np.int64) + step.num_scheduled - drafts
        last = step.token_ids.indptr[1:] - 1 - drafts
        draft = np.full(len(row), NO_DRAFT, np.int64)
        if len(step.drafts.values):
            draft[place < drafts[row]] = step.drafts.values
        return cls(row, place, certain[row] + place, last[row] + place, draft)

    def __len__(self) -> int:
        return len(self.row)

    @property
    def before(self) -> Int64:
        """Of each draw, the draft that it assumes to be accepted last; NO_DRAFT where it assumes none."""
        return np.concatenate(([NO_DRAFT], self.draft[:-1]))[: len(self)]

    def kept(self, drawn: Int64) -> Bool:
        """Which of the tokens ``drawn`` are appended: in every row those up to its first that is not the draft."""
        if not (self.draft != NO_DRAFT).any():
            return np.ones(len(self), np.bool_)
        starts = np.flatnonzero(self.place == 0)
        differs = np.where(drawn != self.draft, self.place, len(self))  # the last of a row always does
        first = np.minimum.reduceat(differs, starts)
        kept: Bool = self.place <= np.repeat(first, np.diff(starts, append=len(self)))
        return kept

    def appended(self, drawn: Int64, kept: Bool, rows: int) -> Csr:
        """The ``kept`` ones of the tokens ``drawn``, CSR over the Step's ``rows``."""
        indptr = np.zeros(rows + 1, np.int64)
        np.cumsum(np.bincount(self.row[kept], minlength=rows), out=indptr[1:])
        return Csr(indptr, drawn[kept].astype(np.int32))


def check_drafts(step: Step) -> None:
    """Raise WorkerError unless the drafts of ``step`` are tails of its tokens, behind certain ones of rows that sample.

    O(rows + drafts).
    """
    if len(step.drafts) != len(step) or step.drafts.indptr[-1] != len(step.drafts.values):
        raise WorkerError(f"Step {step.id} has {len(step)} rows, its drafts {len(step.drafts)}: give one list a row")
    if not len(step.drafts.values):
        return
    drafts = np.diff(step.drafts.indptr)
    wrong = np.flatnonzero((drafts > 0) & ~(step.samples & (drafts < step.num_scheduled)))
    if len(wrong):
        raise WorkerError(
            f"Step {step.id}: row {step.rows[wrong[0]]} has {drafts[wrong[0]]} drafts of "
            f"{step.num_scheduled[wrong[0]]} tokens: drafts stand behind a certain token, in rows that sample"
        )
    inside = np.arange(len(step.drafts.values)) - np.repeat(step.drafts.indptr[:-1], drafts)
    tail = np.repeat(step.token_ids.indptr[1:] - drafts, drafts) + inside
    if step.drafts.values.min() < 0 or (step.token_ids.values[tail] != step.drafts.values).any():
        raise WorkerError(f"Step {step.id}: drafts are token ids, the last of their row's tokens")
