"""The tokens that a Step draws, the drafts that it accepts, and the log probabilities of tokens.

    a row's tokens   [ c  c  c | d0 d1 d2 ]      c: certain, d: drafts
    logits after             c   d0 d1 d2        its last certain token and each draft
    drawn from them         t0   t1 t2 t3        t0 in the place of d0, .., t3 after d2
    appended, if d0 = t0 and d1 != t1: t0 t1     one accepted draft, and the token drawn after it

Every token is drawn as without drafts, by the request's seed and the token's own position. A draft that equals the
token drawn in its place is accepted. The first draw that differs replaces its draft and ends the row. So drafts change
neither greedy nor sampled outputs, except near-ties: arithmetic over another number of tokens may round differently.

A draft x is accepted with the probability p(x) that the model gives it. Speculative sampling has the same rate for a
drafter that proposes x with certainty (Leviathan et al., arXiv 2211.17192, section 2.3). A draft model that draws with
the same noise agrees more often than one with noise of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.step import Csr, Logprobs, NewRow, Step, ranges

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NO_DRAFT: Final = -1
_OFF: Final = -1
"""The requested number of most probable tokens, if no log probabilities are requested."""
_ROWS_AT_ONCE: Final = 256
"""Rows of logits in one call of log_softmax, which bounds its memory; chosen by hand."""


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """The tokens that a Step draws, int64[n] each.

    Each row that samples has, in order, one draw after its last certain token and one after each draft.

    Attributes:
        row: index into the Step's rows.
        place: number of the draw in its row, from 0.
        position: position of the token in its request.
        source: index of the Step's token after which the logits are.
        draft: the draft proposed in its place, or NO_DRAFT.
    """

    row: Int64
    place: Int64
    position: Int64
    source: Int64
    draft: Int64

    @classmethod
    def of(cls, step: Step) -> Draws:
        """Return the draws of ``step``. O(rows + drafts)."""
        drafts = np.diff(step.drafts.indptr)
        count = np.where(step.samples, drafts + 1, 0)
        row, place = np.repeat(np.arange(len(step)), count), ranges(np.zeros_like(count), count)
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
        """The draft that each draw assumes to be the last accepted one; NO_DRAFT if it assumes none."""
        return np.concatenate(([NO_DRAFT], self.draft[:-1]))[: len(self)]

    def kept(self, drawn: Int64) -> Bool:
        """Return which of the tokens ``drawn`` are appended: in every row, up to the first that differs from its draft.

        The result is bool[n].
        """
        if not (self.draft != NO_DRAFT).any():
            return np.ones(len(self), np.bool_)
        starts = np.flatnonzero(self.place == 0)
        differs = np.where(drawn != self.draft, self.place, len(self))  # the last of a row has no draft, so it differs
        first = np.minimum.reduceat(differs, starts)
        kept: Bool = self.place <= np.repeat(first, np.diff(starts, append=len(self)))
        return kept

    def appended(self, drawn: Int64, kept: Bool, rows: int) -> Csr:
        """Return the ``kept`` tokens of ``drawn``, CSR over the Step's ``rows``."""
        indptr = np.zeros(rows + 1, np.int64)
        np.cumsum(np.bincount(self.row[kept], minlength=rows), out=indptr[1:])
        return Csr(indptr, drawn[kept].astype(np.int32))


def check_drafts(step: Step) -> None:
    """Raise WorkerError unless drafts are the last tokens of rows that sample, after a certain token. O(rows + drafts).

    The drafts are also among the tokens of ``step``.
    """
    if len(step.drafts) != len(step) or step.drafts.indptr[-1] != len(step.drafts.values):
        raise WorkerError(
            f"Step {step.id} has {len(step)} rows, but its drafts have {len(step.drafts)}: give one list for each row"
        )
    if not len(step.drafts.values):
        return
    drafts = np.diff(step.drafts.indptr)
    wrong = np.flatnonzero((drafts > 0) & ~(step.samples & (drafts < step.num_scheduled)))
    if len(wrong):
        raise WorkerError(
            f"Step {step.id}: row {step.rows[wrong[0]]} has {drafts[wrong[0]]} drafts of "
            f"{step.num_scheduled[wrong[0]]} tokens: give drafts after a certain token, in rows that sample"
        )
    last = ranges(step.token_ids.indptr[1:] - drafts, drafts)
    if step.drafts.values.min() < 0 or (step.token_ids.values[last] != step.drafts.values).any():
        raise WorkerError(f"Step {step.id}: drafts must be token ids, and equal the last tokens of their row")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How probable a token was at its position, by log_softmax of the model's logits before any edit.

    Temperature, penalties and filters do not change it.

    Attributes:
        token_id: the token.
        logprob: its natural log probability.
        rank: 1 for the most probable token; rank - 1 tokens are strictly more probable.
        best: (token id, log probability) of the most probable tokens, best first, as many as were requested.
    """

    token_id: int
    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...]


class Targets(NamedTuple):
    """Tokens with requested log probabilities, int64[E] each.

    Attributes:
        source: index of the logits from which the token is predicted.
        row: index into the Step's rows.
        position: position of the token in its request.
        token: the token.
        best: requested number of most probable tokens.
    """

    source: Int64
    row: Int64
    position: Int64
    token: Int64
    best: Int64


_NONE: Final = Targets(*[np.empty(0, np.int64)] * 5)


class LogprobRows:
    """The log probabilities that each of ``rows`` rows requests, from the Step that begins the row, as in RowState."""

    def __init__(self, rows: int) -> None:
        self._sampled = np.full(rows, _OFF, np.int64)
        self._prompts: dict[int, tuple[Int64, int]] = {}

    def begin(self, new: NewRow) -> None:
        """Start a row with another request, or with the same one resumed. O(prompt) if its logprobs are wanted."""
        wanted, of_prompt = new.sampling.logprobs, new.sampling.prompt_logprobs
        self._sampled[new.row] = _OFF if wanted is None else wanted
        self._prompts.pop(new.row, None)
        if of_prompt is not None:
            self._prompts[new.row] = new.token_ids[: new.num_prompt_tokens].astype(np.int64), of_prompt

    def end(self, rows: Int32) -> None:
        """Clear rows without a request."""
        self._sampled[rows] = _OFF
        for row in rows.tolist():
            self._prompts.pop(row, None)

    def of_prompts(self, step: Step) -> Targets:
        """Return the prompt tokens that ``step`` predicts; ``source`` is an index into its tokens.

        Their logits take memory for the whole vocabulary at each prompt token. O(1) if no row requests them.
        """
        found = [_NONE]
        for i, row in enumerate(step.rows.tolist()) if self._prompts else ():
            if row not in self._prompts:
                continue
            prompt, best = self._prompts[row]
            first = int(step.num_computed[i])
            # the logits after the last prompt token predict the first output token
            before = np.arange(first, min(first + int(step.num_scheduled[i]), len(prompt) - 1))
            row_of, best_of = np.full_like(before, i), np.full_like(before, best)
            source = step.token_ids.indptr[i] + before - first
            found.append(Targets(source, row_of, before + 1, prompt[before + 1], best_of))
        return Targets(*map(np.concatenate, zip(*found, strict=True)))

    def of_drawn(self, step: Step, draws: Draws, drawn: Int64, kept: Bool) -> Targets:
        """Return the ``kept`` tokens of ``drawn``; ``source`` is an index into ``draws``. O(draws)."""
        best = self._sampled[step.rows[draws.row]]
        wanted = np.flatnonzero((best != _OFF) & kept)
        return Targets(wanted, draws.row[wanted], draws.position[wanted], drawn[wanted], best[wanted])


def logprobs_of(parts: Sequence[tuple[torch.Tensor, Targets]]) -> Logprobs | None:
    """Return the log probabilities of all targets, in order; ``None`` without a target.

    parts: logits [n, vocabulary] with their targets, whose ``source`` is a row of the logits. O(targets * vocabulary),
    with float32[_ROWS_AT_ONCE, vocabulary] of memory at a time.
    """
    every = Targets(*map(np.concatenate, zip(*(targets for _, targets in parts), strict=True)))
    if not len(every.source):
        return None
    pieces = [
        _values(logits, Targets(*(column[start : start + _ROWS_AT_ONCE] for column in targets)))
        for logits, targets in parts
        for start in range(0, len(targets.source), _ROWS_AT_ONCE)
    ]
    logprob, rank, best_ids, best_logprobs = map(np.concatenate, zip(*pieces, strict=True))
    return Logprobs(
        row=every.row.astype(np.int32),
        position=every.position.astype(np.int32),
        token=every.token.astype(np.int32),
        logprob=logprob,
        rank=rank,
        best=Csr(np.concatenate(([0], np.cumsum(every.best))), best_ids),
        best_logprobs=best_logprobs,
    )


def _values(logits: torch.Tensor, targets: Targets) -> tuple[NDArray[Any], ...]:
    """Return log probabilities and ranks of a few targets, then ids and log probabilities of the best tokens."""
    device = logits.device
    with torch.inference_mode():
        values = logits[torch.from_numpy(targets.source).to(device)].float().log_softmax(dim=-1)
        chosen = values.gather(1, torch.from_numpy(targets.token).to(device)[:, None])
        rank = (values > chosen).sum(dim=-1) + 1
        most = values.topk(int(targets.best.max()), dim=-1)
    found = [one.cpu().numpy() for one in (chosen[:, 0], rank.int(), most.indices.int(), most.values)]
    kept = np.arange(found[2].shape[1]) < targets.best[:, None]
    return found[0], found[1], found[2][kept], found[3][kept]


def tokens_of(logprobs: Logprobs | None, rows: int) -> list[list[tuple[int, TokenLogprob]]]:
    """Return (position, value) pairs, in order, for each of a Step's ``rows``. O(values)."""
    found: list[list[tuple[int, TokenLogprob]]] = [[] for _ in range(rows)]
    if logprobs is None:
        return found
    columns = (logprobs.row, logprobs.position, logprobs.token, logprobs.logprob, logprobs.rank)
    indptr, ids, values = (one.tolist() for one in (logprobs.best.indptr, logprobs.best.values, logprobs.best_logprobs))
    for i, (row, position, token, value, rank) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
        span = slice(indptr[i], indptr[i + 1])
        best = tuple(zip(ids[span], values[span], strict=True))
        found[row].append((position, TokenLogprob(token, value, rank, best)))
    return found
