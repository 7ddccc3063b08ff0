"""Log probabilities of tokens under the model's own distribution: log_softmax of its logits as they are.

    logits behind token p - 1  ->  log_softmax  ->  token p: its value, its rank, the most probable tokens

Temperature, penalties and filters do not show in them. Those of a prompt need the logits behind every one of its
tokens but the last, so a chunk of t prompt tokens costs t * vocabulary numbers of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.runner.sampling.verify import Bool, Draws
from hybridkv.step import Csr, Logprobs, NewRow, Step

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_OFF: Final = -1
_ROWS_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How probable a token was where it stands.

    rank: 1 for the most probable; as many tokens are strictly more probable as rank - 1.
    best: (token id, log probability) of the most probable tokens, best first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Tokens whose log probabilities are wanted: int64[E] each.

    source: where the logits behind the token before it are. row: index into the Step's rows. position: of the token
    in its request. best: how many most probable tokens.
    """

    source: Int64
    row: Int64
    position: Int64
    token: Int64
    best: Int64

    def __len__(self) -> int:
        return len(self.source)


class LogprobRows:
    """What each of ``rows`` rows asks for; a row's values hold from the Step that begins it, as in RowState."""

    def __init__(self, rows: int) -> None:
        self._sampled = np.full(rows, _OFF, np.int64)
        self._prompts: dict[int, tuple[Int64, int]] = {}

    def begin(self, new: NewRow) -> None:
        """The row's request is another one, or the same one resumed. O(prompt) where its logprobs are wanted."""
        wanted, of_prompt = new.sampling.logprobs, new.sampling.prompt_logprobs
        self._sampled[new.row] = _OFF if wanted is None else wanted
        self._prompts.pop(new.row, None)
        if of_prompt is not None:
            self._prompts[new.row] = new.token_ids[: new.num_prompt_tokens].astype(np.int64), of_prompt

    def end(self, rows: Int32) -> None:
        """Rows without a request."""
        self._sampled[rows] = _OFF
        for row in rows.tolist():
            self._prompts.pop(row, None)

    def of_prompts(self, step: Step) -> Targets:
        """Prompt tokens that ``step`` predicts; source: index into its tokens. O(rows) where nobody asks."""
        found = []
        starts = step.token_ids.indptr
        for i, row in enumerate(step.rows.tolist()) if self._prompts else ():
            if row not in self._prompts:
                continue
            prompt, best = self._prompts[row]
            first = int(step.num_computed[i])
            # the logits behind the last prompt token are those of the first output
            behind = np.arange(first, min(first + int(step.num_scheduled[i]), len(prompt) - 1))
            found.append(
                Targets(
                    source=starts[i] + behind - first,
                    row=np.full(len(behind), i),
                    position=behind + 1,
                    token=prompt[behind + 1],
                    best=np.full(len(behind), best),
                )
            )
        return _joined(found)

    def of_drawn(self, step: Step, draws: Draws, drawn: Int64, kept: Bool) -> Targets:
        """The ``kept`` ones of the tokens ``drawn``; source: index into ``draws``. O(draws)."""
        best = self._sampled[step.rows[draws.row]]
        wanted = np.flatnonzero((best != _OFF) & kept)
        return Targets(
            source=wanted,
            row=draws.row[wanted],
            position=draws.position[wanted],
            token=drawn[wanted],
            best=best[wanted],
        )


def _joined(parts: Sequence[Targets]) -> Targets:
    if len(parts) == 1:
        return parts[0]
    none = np.empty(0, np.int64)
    return Targets(*(np.concatenate([none, *(getattr(one, name) for one in parts)]) for name in Targets.__slots__))


def logprobs_of(parts: Sequence[tuple[torch.Tensor, Targets]]) -> Logprobs | None:
    """The values of every part, in order; None where nothing is wanted.

    parts: logits [n, vocabulary], of which ``source`` names a row for every target. O(targets * vocabulary), and
    float32[_ROWS_AT_ONCE, vocabulary] of memory at a time.
    """
    pieces = [
        _values(logits, Targets(*(getattr(targets, name)[start : start + _ROWS_AT_ONCE] for name in Targets.__slots__)))
        for logits, targets in parts
        for start in range(0, len(targets), _ROWS_AT_ONCE)
    ]
    if not pieces:
        return None
    ends = np.cumsum([0, *(len(one.best.values) for one in pieces)])
    indptr = [one.best.indptr[1:] + end for one, end in zip(pieces, ends[:-1], strict=True)]
    best = Csr(np.concatenate([np.zeros(1, np.int64), *indptr]), np.concatenate([one.best.values for one in pieces]))
    names = ("row", "position", "token", "logprob", "rank", "best_logprobs")
    columns = {name: np.concatenate([getattr(one, name) for one in pieces]) for name in names}
    return Logprobs(best=best, **columns)


def _values(logits: torch.Tensor, targets: Targets) -> Logprobs:
    """Those of a few targets, in one go."""
    device = logits.device
    with torch.inference_mode():
        values = logits[torch.from_numpy(targets.source).to(device)].float().log_softmax(dim=-1)
        chosen = values.gather(1, torch.from_numpy(targets.token).to(device)[:, None])
        rank = (values > chosen).sum(dim=-1) + 1
        most = values.topk(int(targets.best.max()), dim=-1)
        kept = np.arange(most.values.shape[1]) < targets.best[:, None]
        indptr = np.zeros(len(targets) + 1, np.int64)
        np.cumsum(targets.best, out=indptr[1:])
        return Logprobs(
            row=targets.row.astype(np.int32),
            position=targets.position.astype(np.int32),
            token=targets.token.astype(np.int32),
            logprob=chosen[:, 0].cpu().numpy(),
            rank=rank.cpu().numpy().astype(np.int32),
            best=Csr(indptr, most.indices.cpu().numpy()[kept].astype(np.int32)),
            best_logprobs=most.values.cpu().numpy()[kept],
        )


def tokens_of(logprobs: Logprobs | None, rows: int) -> list[list[tuple[int, TokenLogprob]]]:
    """For each of a Step's ``rows``: (position, value), in order. O(values)."""
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
