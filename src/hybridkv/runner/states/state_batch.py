"""The recurrent states that a step reads and writes in one group, and the run of a mixer over the step.

    a step's tokens   [ d0 | d1 x1 x1 | d2 x2 | p p p p p p ]       d: rows that decode, x: their drafts, p: a chunk
    calls             [d0]  [d1 x1 x1]  [d2 x2]  [p p p p]  [p p]
                                                          ^ a state is saved here
    token by token    [d0 d1 d2]  [x1 x2]  [x1]  [p p p p]  [p p]

Rows that resume and decode are batched, unless a mixer of the group mixes rows. Rows with equally many tokens run in
one call, which returns the states after each token (``run_every``); otherwise they run token by token. Every other row
is cut where its state is written. A state is read from its block once, passed from call to call, and written only to
blocks that the Step names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import UnsupportedModelError, WorkerError
from hybridkv.runner.states.passing import States
from hybridkv.runner.states.recurrent import (
    Continuation,
    Recurrence,
    RecurrentMixer,
    run_decode,
    run_every,
    run_segment,
)
from hybridkv.runner.step_context import StandIn, StepContext, on_device, places_of
from hybridkv.step import Step

Int64 = NDArray[np.int64]

_ROW_BITS: Final = 32
"""Bits of a token count, in a number with the row in the bits above it."""
_ALL: Final = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class Wave:
    """One token of each of several rows.

    Attributes:
        tokens: the indices of the tokens in the flattened step, a slice or int64[rows].
        continuing: the rows of the wave before that run another token.
        written: the rows with a state to save after this token.
        blocks: int64[w], the block of each of these.
    """

    tokens: slice | torch.Tensor
    continuing: slice | torch.Tensor
    written: slice | torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Rows that resume at a state, and run one certain token and their drafts.

    Attributes:
        read: int64[rows], the blocks of their states.
        waves: the first token of all rows, then the next token of the rows with drafts, and so on.
        tokens: indices of all tokens, row by row, if every row has one in each wave.
    """

    read: torch.Tensor
    waves: tuple[Wave, ...]
    tokens: slice | torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A row that begins, or that runs several certain tokens.

    Attributes:
        read: the block of its state; None if it begins.
        segments: the indices of each segment in the flattened step, and the blocks for the state after it, int64[n].
    """

    read: int | None
    segments: tuple[tuple[slice, torch.Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """One step in one group of states, for all mixers of the group."""

    decode: tuple[DecodeRows, ...]
    chains: tuple[Chain, ...]


def state_batch(
    step: Step, group: int, device: torch.device, *, alike: bool = False, alone: bool = False
) -> StateBatch:
    """Return the reads and writes of ``step`` in ``group``. O(rows + writes) for each distinct length.

    ``alike`` puts rows with equally many tokens together, for mixers that run them in one call. ``alone`` runs every
    row by itself. Raises WorkerError for
    a row without a state, for a state written outside its row's tokens, and if the state after a row's last certain
    token or after a draft is not written.
    """
    states, decodes = _GroupStates(step, group, device), step.decodes & (step.num_computed > 0) & (not alone)
    single = np.flatnonzero(decodes)
    lengths = states.scheduled[single]
    together = [single[lengths == length] for length in np.unique(lengths)] if alike else [single]
    return StateBatch(
        tuple(states.decode(rows) for rows in together if len(rows)),
        tuple(states.chain(row) for row in np.flatnonzero(~decodes).tolist()),
    )


class _GroupStates:
    """The states of one group in a Step. ``first``: the first token of each row in the flattened step.

    ``writes``: int64[w, 3]: row, number of its tokens in this step before the write, block.
    """

    def __init__(self, step: Step, group: int, device: torch.device) -> None:
        self.step, self.device = step, device
        self.scheduled = step.num_scheduled.astype(np.int64)
        self.first = np.cumsum(self.scheduled) - self.scheduled
        self.read = step.state_read[:, group].astype(np.int64)
        if len(self.read) and self.read.min() < 1:
            raise WorkerError(
                f"Step {step.id}: row {step.rows[self.read.argmin()]} has no state in group {group}: give its block, "
                "at least 1"
            )
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
                f"Step {step.id}: row {step.rows[i]} runs {self.scheduled[i]} tokens after the first "
                f"{step.num_computed[i]}, but writes a state of group {group} after {after[wrong[0]]} of them: write "
                f"states after 1 .. {self.scheduled[i]}"
            )
        certain = self.scheduled - np.diff(step.drafts.indptr)
        needed = after >= certain[row]  # after the last certain token and every draft
        if len(np.unique(row[needed] << _ROW_BITS | after[needed])) < len(step) + len(step.drafts.values):
            raise WorkerError(
                f"Step {step.id}: group {group} lacks the state after the last certain token or a draft of some row: "
                "write all of these states"
            )

    def decode(self, single: Int64) -> DecodeRows:
        """Return the rows ``single``, which run one certain token and their drafts."""
        lengths = self.scheduled[single]
        waves = [self._wave(single[lengths > at], single[lengths >= at], at) for at in range(int(lengths.max()))]
        tokens = None
        if lengths.min() == lengths.max():
            tokens = places_of((self.first[single, None] + np.arange(lengths[0])).ravel(), self.device)
        return DecodeRows(on_device(self.read[single], self.device), tuple(waves), tokens)

    def _wave(self, rows: Int64, before: Int64, at: int) -> Wave:
        """Return the token number ``at`` of each of ``rows``. ``before``: the rows of the previous wave."""
        place = np.full(len(self.step), -1, np.int64)
        place[rows] = np.arange(len(rows))
        mine = self.writes[(self.writes[:, 1] == at + 1) & (place[self.writes[:, 0]] >= 0)]
        written = place[mine[:, 0]]
        whole = len(written) == len(rows) and (written == np.arange(len(rows))).all()
        return Wave(
            tokens=places_of(self.first[rows] + at, self.device),
            continuing=_ALL if len(rows) == len(before) else on_device(np.searchsorted(before, rows), self.device),
            written=_ALL if whole else on_device(written, self.device),
            blocks=on_device(mine[:, 2], self.device),
        )

    def chain(self, row: int) -> Chain:
        """Return a row by itself."""
        first = int(self.first[row])
        mine = self.writes[self.writes[:, 0] == row]
        counts = np.unique(mine[:, 1])  # ascending; the last is the end of the row
        boundaries = [first, *(first + counts).tolist()]
        segments = tuple(
            (slice(begin, end), on_device(mine[mine[:, 1] == count, 2], self.device))
            for begin, end, count in zip(boundaries, boundaries[1:], counts.tolist(), strict=False)
        )
        return Chain(int(self.read[row]) if self.step.num_computed[row] else None, segments)


def require_class_forwards(mixers: Iterable[RecurrentMixer]) -> None:
    """Raise UnsupportedModelError for a mixer instance with a forward of its own: the runner would not call it."""
    for mixer in mixers:
        if "forward" in vars(mixer.module):
            raise UnsupportedModelError(
                f"a {type(mixer.module).__name__} has a forward of its own (a hook or a patch), which cannot resume "
                "from states in pages: remove it before you make the engine"
            )


class PagedMixer(StandIn):
    """Replaces the forward of a recurrent mixer: runs it over a flattened step, from blocks to blocks.

    ``how``: how the mixer continues. ``views``: its states, [blocks, *shape] each. ``context`` has the StateBatch of
    ``group``. ``recurrence``: runs drafts in one call; None for token by token.
    """

    def __init__(
        self,
        mixer: RecurrentMixer,
        how: Continuation,
        views: Sequence[torch.Tensor],
        context: StepContext,
        group: int,
        *,
        recurrence: Recurrence | None = None,
    ) -> None:
        super().__init__(mixer.module)
        self._mixer, self._how, self._recurrence, self._views = mixer, how, recurrence, tuple(views)
        self._context, self._group = context, group

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # a mixer's arguments and results depend on the model
        """Map [1, tokens, width] of the step to the mixer's result. Masks and the model's cache are not used.

        While no Step runs, the mixer's own forward runs. Raises WorkerError if the model passes a part of the step.
        """
        batch, positions = self._context.states.get(self._group), self._context.positions
        if batch is None or positions is None:
            return type(self._mixer.module).forward(self._mixer.module, hidden_states, *args, **kwargs)
        if hidden_states.shape[:2] != (1, len(positions)):
            raise WorkerError(
                f"a step of {len(positions)} tokens reached {type(self._mixer.module).__name__} as "
                f"{tuple(hidden_states.shape)}, so the model cuts it: lower max_batched_tokens"
            )
        out = hidden_states.new_empty(1, len(positions), self._mixer.out_width)
        for rows in batch.decode:
            self._run_decode(rows, hidden_states, positions, out)
        for chain in batch.chains:
            self._run_chain(chain, hidden_states, positions, out)
        return self._mixer.parted(out)

    def _run_decode(self, rows: DecodeRows, hidden: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        states = tuple(view.index_select(0, rows.read) for view in self._views)
        if self._recurrence is not None and rows.tokens is not None and len(rows.waves) > 1:
            shape = len(rows.read), len(rows.waves)
            tokens, places = hidden[0, rows.tokens].view(*shape, -1), positions[rows.tokens].view(shape)
            with self._context.seeing(rows.tokens):
                result, after = run_every(self._mixer, tokens, states, self._recurrence, places)
            out[0, rows.tokens] = result.flatten(0, 1)
            for wave, states in zip(rows.waves, after, strict=True):
                self._write(wave, states)
            return
        for wave in rows.waves:
            states = tuple(state[wave.continuing] for state in states)
            tokens, places = hidden[0, wave.tokens].unsqueeze(1), positions[wave.tokens].unsqueeze(1)
            with self._context.seeing(wave.tokens):
                result, states = run_decode(self._mixer, tokens, states, places)
            out[0, wave.tokens] = result.squeeze(1)
            self._write(wave, states)

    def _write(self, wave: Wave, states: States) -> None:
        for view, state in zip(self._views, states, strict=True):
            view.index_copy_(0, wave.blocks, state[wave.written])

    def _run_chain(self, chain: Chain, hidden: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        states: States | None = None
        if chain.read is not None:
            states = tuple(view[chain.read : chain.read + 1] for view in self._views)
        for tokens, blocks in chain.segments:
            with self._context.seeing(slice(tokens.start, tokens.start + 1)):
                result, states = run_segment(self._mixer, hidden[:, tokens], states, self._how, positions[None, tokens])
            out[:, tokens] = result
            for view, state in zip(self._views, states, strict=True):
                view.index_copy_(0, blocks, state.expand(len(blocks), *state.shape[1:]))
