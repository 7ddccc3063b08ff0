"""What a step reads and writes of recurrent states in one group, and running a mixer over it.

    a step's tokens   [ d0 | d1 | d2 | p p p p p p ]        d: rows that run one token, p: a prompt's chunk
    calls             one over the batch [3, 1, width]; one over each segment of the chunk: [p p p p], [p p]
                                                                                              ^ a state is kept here

Rows with one token are one true batch; every other row is cut where its state is written. A state is read from its
block once, goes on from segment to segment, and is only ever written to blocks that the Step names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.runner.recurrent import Continuation, RecurrentMixer, States, run_decode, run_segment
from hybridkv.runner.step_context import StepContext
from hybridkv.step import Step

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Rows that run one token. tokens: their places in the step's flattened row, a slice or int64[rows].

    read: int64[rows], the blocks of their states. begins: int64[b], which of them begin, from zeros.
    written, blocks: int64[w] each, the state behind row ``written[i]`` goes to block ``blocks[i]``; ``whole``: they are
    all rows in their order.
    """

    tokens: slice | torch.Tensor
    read: torch.Tensor
    begins: torch.Tensor
    written: torch.Tensor
    blocks: torch.Tensor
    whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A row that runs several tokens. read: the block of its state, None where it begins.

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

    Raises WorkerError for a row without a state to read, or whose state behind its last token is not written.
    """
    states = _GroupStates(step, group, device)
    scheduled = step.num_scheduled
    single = np.flatnonzero(scheduled == 1)
    return StateBatch(
        states.decode(single) if len(single) else None,
        tuple(states.chain(row) for row in np.flatnonzero(scheduled > 1).tolist()),
    )


class _GroupStates:
    """What a Step says of one group. ends: of each row in the flattened step. writes: int64[w, 3], see Step."""

    def __init__(self, step: Step, group: int, device: torch.device) -> None:
        self.step, self.device = step, device
        self.ends = np.cumsum(step.num_scheduled.astype(np.int64))
        self.read = step.state_read[:, group].astype(np.int64)
        if len(self.read) and self.read.min() < 1:
            raise WorkerError(f"Step {step.id}: row {step.rows[self.read.argmin()]} has no state in group {group}")
        self.writes = step.state_writes[step.state_writes[:, 1] == group][:, (0, 2, 3)].astype(np.int64)
        last = (step.num_computed + step.num_scheduled)[self.writes[:, 0]] == self.writes[:, 1]
        if len(np.unique(self.writes[last, 0])) < len(step):
            raise WorkerError(f"Step {step.id}: the state behind a row's last token is not written in group {group}")

    def decode(self, single: Int64) -> DecodeRows:
        """The rows ``single``, which run one token."""
        place = np.full(len(self.step), -1, np.int64)
        place[single] = np.arange(len(single))
        mine = self.writes[place[self.writes[:, 0]] >= 0]
        written = place[mine[:, 0]]
        tokens = self.ends[single] - 1
        contiguous = len(tokens) == tokens[-1] - tokens[0] + 1
        return DecodeRows(
            tokens=slice(int(tokens[0]), int(tokens[-1]) + 1) if contiguous else self._tensor(tokens),
            read=self._tensor(self.read[single]),
            begins=self._tensor(np.flatnonzero(self.step.num_computed[single] == 0)),
            written=self._tensor(written),
            blocks=self._tensor(mine[:, 2]),
            whole=bool(len(written) == len(single) and (written == np.arange(len(single))).all()),
        )

    def chain(self, row: int) -> Chain:
        """A row that runs several tokens. WorkerError for a state written where it does not get."""
        computed, scheduled = int(self.step.num_computed[row]), int(self.step.num_scheduled[row])
        first = int(self.ends[row]) - scheduled
        mine = self.writes[self.writes[:, 0] == row]
        counts = np.unique(mine[:, 1])  # ascending; the last is the end of the row
        if counts[0] <= computed or counts[-1] > computed + scheduled:
            raise WorkerError(
                f"Step {self.step.id}: states of row {self.step.rows[row]} are written behind {counts.tolist()} "
                f"tokens, the row runs {computed + 1} .. {computed + scheduled}"
            )
        edges = [first, *(first + counts - computed).tolist()]
        segments = tuple(
            (slice(begin, end), self._tensor(mine[mine[:, 1] == count, 2]))
            for begin, end, count in zip(edges, edges[1:], counts.tolist(), strict=False)
        )
        return Chain(int(self.read[row]) if computed else None, segments)

    def _tensor(self, values: Int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


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
        """The mixer's instance calls this instead of its class's forward."""
        self._mixer.module.forward = self

    def remove(self) -> None:
        """It calls its own again."""
        self._mixer.module.__dict__.pop("forward", None)

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
        result, states = run_decode(self._mixer, hidden[0, rows.tokens].unsqueeze(1), states)
        out[0, rows.tokens] = result.squeeze(1)
        for view, state in zip(self._views, states, strict=True):
            view.index_copy_(0, rows.blocks, state if rows.whole else state.index_select(0, rows.written))

    def _run_chain(self, chain: Chain, hidden: torch.Tensor, out: torch.Tensor) -> None:
        states: States | None = None
        if chain.read is not None:
            states = tuple(view[chain.read : chain.read + 1] for view in self._views)
        for tokens, blocks in chain.segments:
            result, states = run_segment(self._mixer, hidden[:, tokens], states, self._how)
            out[:, tokens] = result
            for view, state in zip(self._views, states, strict=True):
                view.index_copy_(0, blocks, state.expand(len(blocks), *state.shape[1:]))
