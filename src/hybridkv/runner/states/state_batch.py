"""What a step reads and writes of recurrent states in one group, and running a mixer over it.

    a step's tokens   [ d0 | d1 x1 x1 | d2 x2 | p p p p p p ]       d: rows that decode, x: their drafts, p: a chunk
    calls             [d0 d1 d2]  [x1 x2]  [x1]  [p p p p]  [p p]
                                                          ^ a state is kept here

Rows that decode are true batches, token by token: the state behind each token is written before the next one runs.
Every other row is cut where its state is written. A state is read from its block once, goes on from call to call, and
is only ever written to blocks that the Step names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import UnsupportedModelError, WorkerError
from hybridkv.runner.states.recurrent import Continuation, RecurrentMixer, States, run_decode, run_segment
from hybridkv.runner.step_context import StepContext
from hybridkv.step import Step

Int64 = NDArray[np.int64]

_ROW_BITS: Final = 32
"""A row above, a token count below: one number for both."""


@dataclass(frozen=True, slots=True, eq=False)
class Wave:
    """One token of each of several rows. tokens: their places in the step's flattened row, a slice or int64[rows].

    goes_on: int64[rows], which rows of the wave before run another token; None: all of them.
    written, blocks: int64[w] each, the state behind row ``written[i]`` goes to block ``blocks[i]``; ``whole``: they are
    all rows in their order.
    """

    tokens: slice | torch.Tensor
    goes_on: torch.Tensor | None
    written: torch.Tensor
    blocks: torch.Tensor
    whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Rows that run one certain token and their drafts. read: int64[rows], the blocks of their states.

    begins: int64[b], which of them begin, from zeros. waves: the first token of all, the next of those with drafts, ..
    """

    read: torch.Tensor
    begins: torch.Tensor
    waves: tuple[Wave, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A row that runs several certain tokens. read: the block of its state, None where it begins.

    segments: places of each in the step's flattened row, and int64[n], the blocks that the state behind it goes to.
    """

    read: int | None
    segments: tuple[tuple[slice, torch.Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """One step in one group of states, used by every mixer of it."""

    decode: DecodeRows | None
    chains: tuple[Chain, ...]


def state_batch(step: Step, group: int, device: torch.device) -> StateBatch:
    """What ``step`` does to the states of ``group``. O(rows + writes).

    Raises WorkerError for a row without a state to read, for states written where their row does not get, and where
    the state behind a row's last certain token, or behind one of its drafts, is not written.
    """
    states = _GroupStates(step, group, device)
    decoding = step.num_scheduled == np.diff(step.drafts.indptr) + 1
    single = np.flatnonzero(decoding)
    return StateBatch(
        states.decode(single) if len(single) else None,
        tuple(states.chain(row) for row in np.flatnonzero(~decoding).tolist()),
    )


class _GroupStates:
    """What a Step says of one group. first: of each row in the flattened step.

    writes: int64[w, 3], which row, after how many of its tokens in this step, block.
    """

    def __init__(self, step: Step, group: int, device: torch.device) -> None:
        self.step, self.device = step, device
        self.scheduled = step.num_scheduled.astype(np.int64)
        self.first = np.cumsum(self.scheduled) - self.scheduled
        self.read = step.state_read[:, group].astype(np.int64)
        if len(self.read) and self.read.min() < 1:
            raise WorkerError(f"Step {step.id}: row {step.rows[self.read.argmin()]} has no state in group {group}")
        self.writes = step.state_writes[step.state_writes[:, 1] == group][:, (0, 2, 3)].astype(np.int64)
        row = self.writes[:, 0]
        self.writes[:, 1] -= step.num_computed[row]
        self._check(group)

    def _check(self, group: int) -> None:
        step, (row, after, _) = self.step, self.writes.T
        wrong = np.flatnonzero((after < 1) | (after > self.scheduled[row]))
        if len(wrong):
            i = row[wrong[0]]
            raise WorkerError(
                f"Step {step.id}: a state of row {step.rows[i]} is written behind {step.num_computed[i]} + "
                f"{after[wrong[0]]} tokens in group {group}, the row runs {self.scheduled[i]}"
            )
        certain = self.scheduled - np.diff(step.drafts.indptr)
        needed = after >= certain[row]  # behind the last certain token and every draft
        if len(np.unique(row[needed] << _ROW_BITS | after[needed])) < len(step) + len(step.drafts.values):
            raise WorkerError(
                f"Step {step.id}: the state behind a row's last certain token, or behind one of its drafts, is not "
                f"written in group {group}"
            )

    def decode(self, single: Int64) -> DecodeRows:
        """The rows ``single``, which run one certain token and their drafts."""
        lengths = self.scheduled[single]
        waves = [self._wave(single[lengths > at], single[lengths >= at], at) for at in range(int(lengths.max()))]
        begins = np.flatnonzero(self.step.num_computed[single] == 0)
        return DecodeRows(self._tensor(self.read[single]), self._tensor(begins), tuple(waves))

    def _wave(self, rows: Int64, before: Int64, at: int) -> Wave:
        """The ``at``-th token of each of ``rows``. before: the rows of the wave before it."""
        place = np.full(len(self.step), -1, np.int64)
        place[rows] = np.arange(len(rows))
        mine = self.writes[(self.writes[:, 1] == at + 1) & (place[self.writes[:, 0]] >= 0)]
        written = place[mine[:, 0]]
        tokens = self.first[rows] + at
        contiguous = len(tokens) == tokens[-1] - tokens[0] + 1
        return Wave(
            tokens=slice(int(tokens[0]), int(tokens[-1]) + 1) if contiguous else self._tensor(tokens),
            goes_on=None if len(rows) == len(before) else self._tensor(np.searchsorted(before, rows)),
            written=self._tensor(written),
            blocks=self._tensor(mine[:, 2]),
            whole=bool(len(written) == len(rows) and (written == np.arange(len(rows))).all()),
        )

    def chain(self, row: int) -> Chain:
        """A row that runs several certain tokens."""
        first = int(self.first[row])
        mine = self.writes[self.writes[:, 0] == row]
        counts = np.unique(mine[:, 1])  # ascending; the last is the end of the row
        edges = [first, *(first + counts).tolist()]
        segments = tuple(
            (slice(begin, end), self._tensor(mine[mine[:, 1] == count, 2]))
            for begin, end, count in zip(edges, edges[1:], counts.tolist(), strict=False)
        )
        return Chain(int(self.read[row]) if self.step.num_computed[row] else None, segments)

    def _tensor(self, values: Int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def require_class_forwards(mixers: Iterable[RecurrentMixer]) -> None:
    """Raise UnsupportedModelError for a mixer whose instance has a forward of its own: it would be left out."""
    for mixer in mixers:
        if "forward" in vars(mixer.module):
            raise UnsupportedModelError(
                f"a {type(mixer.module).__name__} has a forward of its own, of a hook or a patch, which cannot go on "
                "from states in pages: remove it before the engine is made"
            )


class PagedMixer:
    """Stands in for the forward of a recurrent mixer: runs it over a flattened step, from blocks to blocks.

    how: the mixer continues. views: its states, [blocks, *shape] each. context: has the StateBatch of ``group``.
    """

    def __init__(
        self,
        mixer: RecurrentMixer,
        how: Continuation,
        views: Sequence[torch.Tensor],
        context: StepContext,
        group: int,
    ) -> None:
        self._mixer, self._how, self._views = mixer, how, tuple(views)
        self._context, self._group = context, group

    def install(self) -> None:
        """The mixer's instance, which has no forward of its own, calls this instead of its class's."""
        self._mixer.module.forward = self

    def remove(self) -> None:
        """It calls its own again, or what was put in the place of this one meanwhile."""
        if vars(self._mixer.module).get("forward") is self:
            del self._mixer.module.forward

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401  # whatever the model hands to its mixers
        """[1, tokens, width] of the step -> [1, tokens, width]. Masks and the model's cache are of no use here.

        While no Step runs, whoever calls the model gets what the mixer itself does.
        """
        batch = self._context.states.get(self._group)
        if batch is None:
            own: torch.Tensor = type(self._mixer.module).forward(self._mixer.module, hidden_states, *args, **kwargs)
            return own
        out = torch.empty_like(hidden_states)
        if batch.decode is not None:
            self._run_decode(batch.decode, hidden_states, out)
        for chain in batch.chains:
            self._run_chain(chain, hidden_states, out)
        return out

    def _run_decode(self, rows: DecodeRows, hidden: torch.Tensor, out: torch.Tensor) -> None:
        states = tuple(view.index_select(0, rows.read) for view in self._views)
        if len(rows.begins):
            for state in states:
                state.index_fill_(0, rows.begins, 0)
        for wave in rows.waves:
            if wave.goes_on is not None:
                states = tuple(state.index_select(0, wave.goes_on) for state in states)
            result, states = run_decode(self._mixer, hidden[0, wave.tokens].unsqueeze(1), states)
            out[0, wave.tokens] = result.squeeze(1)
            for view, state in zip(self._views, states, strict=True):
                view.index_copy_(0, wave.blocks, state if wave.whole else state.index_select(0, wave.written))

    def _run_chain(self, chain: Chain, hidden: torch.Tensor, out: torch.Tensor) -> None:
        states: States | None = None
        if chain.read is not None:
            states = tuple(view[chain.read : chain.read + 1] for view in self._views)
        for tokens, blocks in chain.segments:
            result, states = run_segment(self._mixer, hidden[:, tokens], states, self._how)
            out[:, tokens] = result
            for view, state in zip(self._views, states, strict=True):
                view.index_copy_(0, blocks, state.expand(len(blocks), *state.shape[1:]))
