"""Step and StepResult: the only contract between the control plane and a worker.

    schedule() -> Step ----> worker: finished_rows, new_rows, cells, copies that are moves, zero, the other copies
                                     "before", encoders, forward, copies "after", sampling
    update(StepResult) <---- sampled tokens

A Step owns its arrays: they are never views of live tables, and nobody writes to them again.
Rows are numbers below the scheduler's ``max_running``; a row belongs to one request from the Step that
lists it in ``new_rows`` to the Step that lists it in ``finished_rows``. In one Step finished rows come
first, so a row may end and begin in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.request import SamplingParams

SCHEMA_VERSION: Final = 2

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Csr:
    """Hold a list of R lists of token ids as two arrays: row i is ``values[indptr[i]:indptr[i + 1]]``.

    indptr: int64[R + 1], from 0 to len(values), never falling. values: int32.

        >>> sampled = Csr.from_lists([[5], [], [7, 8]])
        >>> sampled.indptr.tolist(), sampled.values.tolist(), sampled[2].tolist()
        ([0, 1, 1, 3], [5, 7, 8], [7, 8])
    """

    indptr: Int64
    values: Int32

    @classmethod
    def empty(cls, rows: int) -> Csr:
        """Return ``rows`` empty lists."""
        return cls(np.zeros(rows + 1, np.int64), np.empty(0, np.int32))

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> Csr:
        """Return the rows of ``lists``. O(tokens)."""
        indptr = np.array([*accumulate(map(len, lists), initial=0)], np.int64)
        return cls(indptr, np.array([*chain.from_iterable(lists)], np.int32))

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, i: int) -> Int32:
        """Return row i, a view."""
        return self.values[self.indptr[i] : self.indptr[i + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Cells of the block tables to write, in order; a later one may overwrite an earlier one.

    group, row, column, block: int32[C] each; block ids are memory blocks of the group.
    """

    group: Int32
    row: Int32
    column: Int32
    block: Int32

    @classmethod
    def empty(cls) -> Cells:
        """No cell."""
        none = np.empty(0, np.int32)
        return cls(none, none, none, none)

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a block within a group. stage: "before" or "after" the forward; kind: "move", "block" or "state"."""

    stage: str
    group: int
    source: int
    destination: int
    kind: str


@dataclass(frozen=True, slots=True)
class EncoderRead:
    """What cross attention reads of a row. digest: of the encoder's input, by which a worker knows the input itself.

    num_tokens: of the encoder's output, in the row's blocks. encodes: whether the worker runs the encoder and writes
    them, before the forward of this Step; else they are there, or another row of this Step writes the same blocks.
    """

    digest: bytes | str
    num_tokens: int
    encodes: bool


@dataclass(frozen=True, slots=True, eq=False)
class NewRow:
    """What a worker must know of a request whose row begins.

    token_ids: int32[n], all tokens known: the prompt and, for a resumed request, its outputs.
    num_prompt_tokens: how many of them are the prompt. encoder: None without cross attention.
    held_ids: with ``sampling.min_tokens``, the tokens that are not drawn before so many outputs.
    """

    row: int
    request_id: str
    token_ids: Int32
    num_prompt_tokens: int
    sampling: SamplingParams
    encoder: EncoderRead | None = None
    held_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward of the model over all scheduled rows.

    id: consecutive from 0. after: the Step that must have been applied before this one: id - 1, or after a
    failure the last one that did not fail. A worker takes a Step whose ``after`` it has applied and whose
    id is new to it.
    rows: int32[R], in the order of their tokens in the batch.
    num_computed: int32[R], tokens in the cache before this step. num_scheduled: int32[R], tokens to run.
    samples: bool[R], whether a token is sampled behind the row's last scheduled one.
    token_ids: the tokens to run, CSR; -1 is the token that the worker itself sampled last for this row.
    drafts: speculated tokens, CSR, the tail of token_ids.
    cells: what changes in the block tables. zero: int32[Z, 2], (group, block id) to clear.
    copies: in this order. state_read: int32[R, G], the block of each group that holds the row's recurrent state
    once the copies before the forward are done (-1: the group keeps none); int32[0, G] where no group does.
    state_writes: int32[W, 4], (index into rows, group, token count, block id).
    finished_rows: int32[F], rows that ended since the Step before.
    """

    id: int
    after: int
    rows: Int32
    num_computed: Int32
    num_scheduled: Int32
    samples: NDArray[np.bool_]
    token_ids: Csr
    drafts: Csr
    cells: Cells
    finished_rows: Int32
    new_rows: tuple[NewRow, ...] = ()
    zero: Int32 = field(default_factory=lambda: np.empty((0, 2), np.int32))
    copies: tuple[Copy, ...] = ()
    state_read: Int32 = field(default_factory=lambda: np.empty((0, 0), np.int32))
    state_writes: Int32 = field(default_factory=lambda: np.empty((0, 4), np.int32))
    schema_version: int = SCHEMA_VERSION

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward runs."""
        return len(self.token_ids.values)

    @property
    def decodes(self) -> NDArray[np.bool_]:
        """bool[R]: whether a row runs one token and its drafts, no chunk of a prompt. O(R)."""
        one_each: NDArray[np.bool_] = self.num_scheduled == np.diff(self.drafts.indptr) + 1
        return one_each

    def __len__(self) -> int:
        """Rows scheduled."""
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Natural logarithms of the probabilities of tokens, under the model's own distribution.

    Of the sampled tokens of rows whose request asks for them, and of the prompt tokens that the Step predicts.
    row: int32[E], index into the Step's rows. position: int32[E], of the token in its request; those of a row ascend.
    token: int32[E]. logprob: float32[E]. rank: int32[E], 1 for the most probable token.
    best: the most probable tokens, CSR over the E entries, best first. best_logprobs: float32, one for each of them.
    """

    row: Int32
    position: Int32
    token: Int32
    logprob: Float32
    rank: Int32
    best: Csr
    best_logprobs: Float32

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What came of a Step.

    id: that of the Step. sampled: CSR over the Step's rows, empty where ``samples`` was False.
    num_accepted: int32[R], drafts accepted and the token sampled behind them; None without speculation.
    logprobs: None where no row asks for any.
    """

    id: int
    sampled: Csr
    num_accepted: Int32 | None = None
    logprobs: Logprobs | None = None
    schema_version: int = SCHEMA_VERSION
