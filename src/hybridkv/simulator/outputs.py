"""The output tokens of replayed requests, by row of the scheduler, and how many drafts are accepted.

Speculation: each draft is accepted with the same probability if the drafts before it were accepted (Leviathan, Kalman
and Matias, arXiv 2211.17192, section 3.1). A step with n drafts and acceptance a gives (1 - a**(n + 1)) / (1 - a)
tokens on average. Acceptance depends only on the request's output and the position, so each replay gives the same
result. Drafts run as tokens of the step and take its time; proposing them takes no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import check_fields, integer, real
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request_rows import grown
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.tokens import UInt64, chances_at, token_ids_at
from hybridkv.step import Csr, NewRow, Step
from hybridkv.units import shown

MOST_DRAFTS: Final = 64
"""Limit of drafts of a request in a step. Chosen by hand."""
ACCEPTANCE: Final = 0.7
"""Default probability that a draft is accepted. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are made and accepted.

    Attributes:
        drafts: drafted tokens of each decoding row in a step.
        acceptance: probability, 0 to 1, that a draft is accepted if the drafts before it were.

    Raises:
        ConfigError: for values out of range.
    """

    drafts: int
    acceptance: float

    def __post_init__(self) -> None:
        check_fields(self, partial(integer, least=1, most=MOST_DRAFTS), "drafts")
        if not 0 <= real("acceptance", self.acceptance) <= 1:
            raise ConfigError(
                f"acceptance (--acceptance) must be a probability in 0 .. 1, such as 0.7, got {shown(self.acceptance)}"
            )

    @classmethod
    def of(cls, drafts: int, acceptance: float | None = None) -> Speculation | None:
        """Return the speculation of ``drafts`` drafts, or ``None`` for 0 drafts.

        Args:
            drafts: drafted tokens of each decoding request in a step.
            acceptance: probability that a draft is accepted if the drafts before it were; ``None``: ACCEPTANCE.

        Raises:
            ConfigError: for values out of range.
        """
        return cls(drafts, ACCEPTANCE if acceptance is None else acceptance) if drafts else None

    def accepted(self, starts: UInt64, positions: UInt64) -> NDArray[np.int64]:
        """Return how many of its drafts each row accepts, int64[rows]. O(rows).

        The number of accepted drafts is geometric: floor(log(u) / log(acceptance)) for a uniform chance u, at most
        ``drafts``.

        Args:
            starts: start of the output piece of each row's next token, uint64[rows].
            positions: position of that token in the piece, uint64[rows].
        """
        if self.acceptance in {0, 1}:
            return np.full(len(starts), self.drafts * int(self.acceptance))
        run = np.log(np.maximum(chances_at(starts, positions), 2.0**-60)) / math.log(self.acceptance)
        return np.minimum(run.astype(np.int64), self.drafts)


class Live:
    """An unfinished request.

    Args:
        trace: the request of the trace.

    Attributes:
        trace: the request of the trace.
        begun_s: time of its first step; ``None`` before.
        first_token_s: time of its first output token; 0 before.
        piece: index of the next output piece.
    """

    __slots__ = ("begun_s", "first_token_s", "piece", "trace")

    def __init__(self, trace: TraceRequest) -> None:
        self.trace = trace
        self.begun_s: float | None = None
        self.first_token_s = 0.0
        self.piece = 0

    @property
    def has_begun(self) -> bool:
        """Whether its first output token was sampled."""
        return self.first_token_s > 0


class OutputRows:
    """The next output tokens of the requests in the scheduler's rows, as columns.

    Attributes:
        starts: start of the piece that holds the row's next output token, uint64[rows] (tokens.py).
        positions: position of that token in the piece, uint64[rows].
        left: tokens of the piece from that token on, int64[rows].
        silent: whether the row has no output token yet, bool[rows].
        live: the request of each row.
    """

    def __init__(self) -> None:
        self.starts = np.zeros(64, np.uint64)
        self.positions = np.zeros(64, np.uint64)
        self.left = np.zeros(64, np.int64)
        self.silent = np.zeros(64, np.bool_)
        self.live: list[Live | None] = [None] * 64

    def begin(self, new: NewRow, live: Live) -> None:
        """Set the columns of a row that starts, or that resumes after a preemption. O(pieces of the output).

        Args:
            new: the row, with the tokens that it has.
            live: the request of the row.
        """
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
        """Return the sampled tokens of ``step``, and the rows that sampled their first one. O(rows), in numpy."""
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
        """Return the next tokens of each row as drafts; none for a row before its first token. O(rows), in numpy.

        The last token of a piece is never a draft, so that the step can sample a token of the piece after the drafts.
        """
        self._begin_pieces(rows)
        more = np.arange(speculation.drafts).astype(np.uint64)
        tokens = token_ids_at(self.starts[rows][:, None], self.positions[rows][:, None] + more).tolist()
        most = np.where(self.silent[rows], 0, self.left[rows] - 1).tolist()
        return [some[:count] for some, count in zip(tokens, most, strict=True)]

    def sample_drafted(self, step: Step, speculation: Speculation) -> tuple[Csr, NDArray[np.int32]]:
        """Return the same as ``sample``, but with the accepted drafts of each row before its sampled token."""
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

    def next_tokens(self, rows: NDArray[np.int64], most: int) -> NDArray[np.int32]:
        """Return the tokens that ``rows`` sample in the next steps, int32[rows, steps]. O(tokens), in numpy.

        There are at most ``most`` steps, none past the end of a row's piece, and none if a row has no token yet. The
        rows do not advance; call ``skip`` for that.
        """
        if self.silent[rows].any():
            return np.empty((len(rows), 0), np.int32)
        self._begin_pieces(rows)
        more = np.arange(min(most, int(self.left[rows].min()))).astype(np.uint64)
        positions = self.positions[rows][:, None] + more
        return token_ids_at(self.starts[rows][:, None], positions)

    def skip(self, rows: NDArray[np.int64], steps: int) -> None:
        """Advance ``rows`` by ``steps`` sampled tokens."""
        self.positions[rows] += np.uint64(steps)
        self.left[rows] -= steps

    def note_first(self, rows: NDArray[np.int32], now_s: float) -> None:
        """Record the time of the first token of ``rows``."""
        for row in rows.tolist():
            self._owner(row).first_token_s = now_s

    def _owner(self, row: int) -> Live:
        live = self.live[row]
        if live is None:
            raise CacheError(f"a step names row {row}, but no request has that row: this is a bug of the scheduler")
        return live

    def _begin_pieces(self, rows: NDArray[np.integer]) -> None:
        """Start the next piece of each row that has sampled all of its last one."""
        for row in rows[self.left[rows] == 0].tolist():
            self._next_piece(row, self._owner(row))

    def _next_piece(self, row: int, live: Live) -> None:
        if live.piece == len(live.trace.output.pieces):
            most = live.trace.num_output_tokens
            raise CacheError(
                f"{live.trace.origin} samples more than its {most} output tokens: this is a bug of the scheduler"
            )
        starts, positions, lengths = live.trace.output.columns()
        self.starts[row] = starts[live.piece]
        self.positions[row] = positions[live.piece]
        self.left[row] = lengths[live.piece]
        live.piece += 1

    def _make_room(self, rows: int) -> None:
        for name in ("starts", "positions", "left", "silent"):
            setattr(self, name, grown(getattr(self, name), rows))
        self.live += [None] * (len(self.left) - len(self.live))
