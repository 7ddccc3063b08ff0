"""What requests in a scheduler's rows say next: their traces' outputs, token by token, and which drafts come true."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import CacheError
from hybridkv.request_rows import grown
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.speculation import Speculation
from hybridkv.simulator.tokens import token_ids_at
from hybridkv.step import Csr, NewRow, Step


class Live:
    """A request between arrival and end. piece: index of the output piece that comes next."""

    __slots__ = ("begun_s", "first_token_s", "piece", "trace")

    def __init__(self, trace: TraceRequest) -> None:
        self.trace = trace
        self.begun_s: float | None = None
        self.first_token_s = 0.0
        self.piece = 0

    @property
    def has_begun(self) -> bool:
        """Whether its first token is out."""
        return self.first_token_s > 0


class OutputRows:
    """What the requests in the scheduler's rows say next, as columns over the rows.

    starts, positions: uint64, the next output token (tokens.py). left: int64, tokens left of the current
    piece. silent: bool, no token yet. live: who has the row.
    """

    def __init__(self) -> None:
        self.starts = np.zeros(64, np.uint64)
        self.positions = np.zeros(64, np.uint64)
        self.left = np.zeros(64, np.int64)
        self.silent = np.zeros(64, np.bool_)
        self.live: list[Live | None] = [None] * 64

    def begin(self, new: NewRow, live: Live) -> None:
        """``new`` begins or, after a preemption, goes on. O(pieces of the output)."""
        self._make_room(new.row + 1)
        said = len(new.token_ids) - new.num_prompt_tokens
        self.live[new.row] = live
        self.silent[new.row] = said == 0
        live.piece = 0
        self._next_piece(new.row, live)
        while said > self.left[new.row]:
            said -= self.left.item(new.row)
            self._next_piece(new.row, live)
        self.positions[new.row] += np.uint64(said)
        self.left[new.row] -= said

    def sample(self, step: Step) -> tuple[Csr, NDArray[np.int32]]:
        """The sampled tokens of ``step``, and the rows that gave their first one. A few numpy calls."""
        rows = step.rows[step.samples]
        indptr = np.zeros(len(step) + 1, np.int64)
        np.cumsum(step.samples, out=indptr[1:])
        self._begin_pieces(rows)
        positions = self.positions[rows]
        tokens = token_ids_at(self.starts[rows], positions)
        self.positions[rows] = positions + np.uint64(1)
        self.left[rows] -= 1
        first = rows[self.silent[rows]]
        if first.size:
            self.silent[first] = False
        return Csr(indptr, tokens), first

    def drafts(self, rows: NDArray[np.int64], speculation: Speculation) -> list[list[int]]:
        """The next tokens of each of ``rows``: as many as drafts, none where it has not had its first one.

        One token of the piece stays to be sampled behind them. A few numpy calls.
        """
        self._begin_pieces(rows)
        more = np.arange(speculation.drafts).astype(np.uint64)
        tokens = token_ids_at(self.starts[rows][:, None], self.positions[rows][:, None] + more).tolist()
        most = np.where(self.silent[rows], 0, self.left[rows] - 1).tolist()
        return [some[:count] for some, count in zip(tokens, most, strict=True)]

    def sample_drafted(self, step: Step, speculation: Speculation) -> tuple[Csr, NDArray[np.int32]]:
        """As ``sample``, with the drafts of each row that come true in front."""
        rows = step.rows[step.samples]
        self._begin_pieces(rows)
        starts, positions = self.starts[rows], self.positions[rows]
        num_drafts = np.diff(step.drafts.indptr)[step.samples]
        counts = np.minimum(speculation.accepted(starts, positions), num_drafts) + 1
        indptr = np.zeros(len(step) + 1, np.int64)
        indptr[1:][step.samples] = counts
        np.cumsum(indptr, out=indptr)
        owner = np.repeat(np.arange(len(rows)), counts)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = token_ids_at(starts[owner], positions[owner] + place.astype(np.uint64))
        self.positions[rows] = positions + counts.astype(np.uint64)
        self.left[rows] -= counts
        first = rows[self.silent[rows]]
        self.silent[first] = False
        return Csr(indptr, tokens), first

    def say(self, rows: NDArray[np.int64], most: int) -> NDArray[np.int32]:
        """What ``rows`` sample in as many of the next ``most`` steps as can be said at once; int32[rows, steps].

        No column where one has its first token to say. Nothing is said until ``pass_by``. A few numpy calls.
        """
        if self.silent[rows].any():
            return np.empty((len(rows), 0), np.int32)
        self._begin_pieces(rows)
        more = np.arange(min(most, int(self.left[rows].min()))).astype(np.uint64)
        positions = self.positions[rows][:, None] + more
        return token_ids_at(self.starts[rows][:, None], positions)

    def pass_by(self, rows: NDArray[np.int64], steps: int) -> None:
        """``rows`` have said their next ``steps`` tokens."""
        self.positions[rows] += np.uint64(steps)
        self.left[rows] -= steps

    def note_first(self, rows: NDArray[np.int32], now_s: float) -> None:
        """The first token of ``rows`` came out now."""
        for row in rows.tolist():
            self._owner(row).first_token_s = now_s

    def _owner(self, row: int) -> Live:
        live = self.live[row]
        if live is None:
            raise CacheError(f"a step names row {row}, which no request began")
        return live

    def _begin_pieces(self, rows: NDArray[np.integer]) -> None:
        """The next piece of each of ``rows`` that has said all of its last one."""
        for row in rows[self.left[rows] == 0].tolist():
            self._next_piece(row, self._owner(row))

    def _next_piece(self, row: int, live: Live) -> None:
        if live.piece == len(live.trace.output.pieces):
            raise CacheError(f"{live.trace.origin} was asked for more tokens than its trace has")
        starts, positions, lengths = live.trace.output.columns()
        self.starts[row] = starts[live.piece]
        self.positions[row] = positions[live.piece]
        self.left[row] = lengths[live.piece]
        live.piece += 1

    def _make_room(self, rows: int) -> None:
        for name in ("starts", "positions", "left", "silent"):
            setattr(self, name, grown(getattr(self, name), rows))
        self.live += [None] * (len(self.left) - len(self.live))
