"""Step and StepResult: the only contract between the control plane and a worker.

    schedule() -> Step ----> worker: stores, finished_rows, new_rows, cells, copies that are moves, zero, the other
                                     copies "before", loads, encoders, forward, copies "after", sampling
    update(StepResult) <---- sampled tokens

A Step owns its arrays: they are never views of live tables, and are not changed after the Step is made. Rows are
numbers below the scheduler's ``max_running``. A row belongs to one request from the Step that lists it in ``new_rows``
to the Step that lists it in ``finished_rows``. In one Step finished rows come first, so a row may end and begin in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.request import SamplingParams

SCHEMA_VERSION: Final = 6

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


def ranges(first: Int64, counts: Int64) -> Int64:
    """Return the numbers ``first[i]`` .. ``first[i] + counts[i] - 1`` for each i. O(sum of counts).

    ((5, 9), (2, 1)) gives (5, 6, 9).

    Args:
        first: int64[n].
        counts: int[n], each at least 0.
    """
    ends = np.cumsum(counts)
    total = ends.item(-1) if len(ends) else 0
    numbers: Int64 = np.arange(total) + np.repeat(first - (ends - counts), counts)
    return numbers


@dataclass(frozen=True, slots=True, eq=False)
class Csr:
    """A list of R lists of token ids, held in two arrays: row i is ``values[indptr[i]:indptr[i + 1]]``.

        >>> sampled = Csr.from_lists([[5], [], [7, 8]])
        >>> sampled.indptr.tolist(), sampled.values.tolist(), sampled[2].tolist()
        ([0, 1, 1, 3], [5, 7, 8], [7, 8])

    Attributes:
        indptr: int64[R + 1], from 0 to len(values), never falling.
        values: int32.
    """

    indptr: Int64
    values: Int32

    @classmethod
    def empty(cls, rows: int) -> Csr:
        """Return empty lists.

        Args:
            rows: How many.
        """
        return cls(np.zeros(rows + 1, np.int64), np.empty(0, np.int32))

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> Csr:
        """Return lists as a Csr. O(tokens).

        Args:
            lists: Token ids of each row.
        """
        indptr = np.array([*accumulate(map(len, lists), initial=0)], np.int64)
        return cls(indptr, np.array([*chain.from_iterable(lists)], np.int32))

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, i: int) -> Int32:
        """Return row i, a view."""
        return self.values[self.indptr[i] : self.indptr[i + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Cells of the block tables to write, in order; a later one may overwrite an earlier one. int32[C] each.

    Attributes:
        group: Group of each cell.
        row: Its row.
        column: Its column.
        block: Its block, as an id within the group's class.
    """

    group: Int32
    row: Int32
    column: Int32
    block: Int32

    @classmethod
    def empty(cls) -> Cells:
        """Return no cells."""
        none = np.empty(0, np.int32)
        return cls(none, none, none, none)

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a block within a group.

    Attributes:
        stage: "before" or "after" the forward.
        group: The group.
        source: Block to read.
        destination: Block to write.
        kind: "move", "block" or "state".
    """

    stage: str
    group: int
    source: int
    destination: int
    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class TierCopies:
    """Copies of blocks between the device and the host tier, int32[n] each.

    All copies of one transfer arrive, or none of them counts.

    Attributes:
        transfer: Number of the transfer that each copy belongs to; equal numbers are next to each other.
        group: Group of both blocks.
        source: Block to read, as an id within the group's class.
        destination: Block to write.
    """

    transfer: Int32
    group: Int32
    source: Int32
    destination: Int32

    def __len__(self) -> int:
        return len(self.transfer)


_NO_NUMBERS: Final = np.empty(0, np.int32)
_NO_SECONDS: Final = np.empty(0, np.float32)
NO_TIER_COPIES: Final = TierCopies(_NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS)


@dataclass(frozen=True, slots=True, eq=False)
class StoreTransfer:
    """Blocks of the host tier that go to a store of blocks by key, or come from it.

    All of them arrive, or none counts.

    Attributes:
        number: Number of the transfer; those of TierCopies are others.
        group: int32[n], group of each block.
        block: int32[n], the block, as an id within the group's class.
        keys: n keys in the store.
        mark: On the way to the store, the key of the mark that is written after all blocks; else empty.
        tail: The entry of the mark: tokens after the last whole hash block, bytes of int32.
    """

    number: int
    group: Int32
    block: Int32
    keys: tuple[bytes, ...]
    mark: bytes = b""
    tail: bytes = b""

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True, slots=True)
class EncoderRead:
    """The encoder output that cross attention of a row reads.

    Attributes:
        digest: Digest of the encoder's input, by which the worker knows the input itself.
        num_tokens: Tokens of the encoder's output, in the row's blocks.
        encodes: The worker runs the encoder and writes these blocks, before the forward of this Step. Else they are
            written, or another row of this Step writes them.
    """

    digest: bytes | str
    num_tokens: int
    encodes: bool


@dataclass(frozen=True, slots=True, eq=False)
class NewRow:
    """Facts about a request whose row begins.

    Attributes:
        row: Its row.
        request_id: Its id.
        token_ids: int32[n], all known tokens: the prompt and, for a resumed request, its outputs.
        num_prompt_tokens: How many of them are the prompt.
        sampling: How its tokens are sampled.
        encoder: Its encoder output; ``None`` without cross attention.
        held_ids: With ``sampling.min_tokens``, the tokens that are not sampled before so many outputs.
        lora: Name of its adapter; ``None`` for the model itself.
    """

    row: int
    request_id: str
    token_ids: Int32
    num_prompt_tokens: int
    sampling: SamplingParams
    encoder: EncoderRead | None = None
    held_ids: tuple[int, ...] = ()
    lora: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward of the model over all scheduled rows.

    Attributes:
        id: Consecutive from 0.
        after: The Step that must have been applied before: id - 1, or, after a failure, the last one that did not fail.
            A worker accepts a Step if it has applied ``after`` and has not seen its id.
        rows: int32[R], in the order of their tokens in the batch.
        num_computed: int32[R], tokens in the cache before this Step.
        num_scheduled: int32[R], tokens to run.
        samples: bool[R], whether a token is sampled after the row's last scheduled one.
        token_ids: The tokens to run, a row each; -1 is the token that the worker itself sampled last for this row.
        drafts: Drafted tokens of each row, the last ones in ``token_ids``.
        cells: Changes of the block tables.
        finished_rows: int32[F], rows that ended since the Step before.
        new_rows: Rows that begin.
        zero: int32[Z, 2], (group, block) to clear.
        copies: Copies, in this order.
        state_read: int32[R, G], the block of each group with the row's recurrent state, after the copies before the
            forward; -1 for a group without states. int32[0, G] if no group has any.
        state_writes: int32[W, 4], (index into rows, group, token count, block). In the group of a ring: write the raw
            keys of the open group after so many tokens into the block, each to its place in the ring.
        stores: Copies from the device to the host tier, of blocks as they are before this Step.
        tier_copies: Copies within the host tier, in this order, before any store is written there.
        loads: Copies from the host tier to the device, of blocks as they are after the stores. No row of this Step or a
            later one reads them before the result of some Step says that their transfer arrived.
        spills: Blocks of the host tier that go to its store. They do not change before their transfer ends.
        fetches: Blocks of the host tier that come from its store. Nothing else reads or writes them from this Step on
            until their transfer ends.
        schema_version: Version of this format.
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
    stores: TierCopies = NO_TIER_COPIES
    tier_copies: tuple[Copy, ...] = ()
    loads: TierCopies = NO_TIER_COPIES
    spills: tuple[StoreTransfer, ...] = ()
    fetches: tuple[StoreTransfer, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def has_transfers(self) -> bool:
        """Whether a tier has anything to do."""
        return bool(len(self.stores) or self.tier_copies or len(self.loads) or self.spills or self.fetches)

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
        """Return the number of scheduled rows."""
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Log probabilities (natural logarithm) of tokens, under the model's own distribution.

    They are of sampled tokens, for rows whose request asks for them, and of the prompt tokens that the Step predicts.

    Attributes:
        row: int32[E], index into the Step's rows.
        position: int32[E], position of the token in its request; ascending within a row.
        token: int32[E].
        logprob: float32[E].
        rank: int32[E], 1 for the most probable token.
        best: The most probable tokens of each entry, best first.
        best_logprobs: float32, one for each of them.
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
    """The outcome of a Step.

    Attributes:
        id: Id of the Step.
        sampled: Sampled tokens of each row; empty where ``samples`` was False.
        num_accepted: int32[R], accepted drafts and the token sampled after them; ``None`` without speculation.
        logprobs: ``None`` if no row asks for any.
        arrived: int32, transfers of this Step or earlier ones whose bytes have all arrived since the result before.
        lost: int32, the same for transfers that failed: their blocks hold anything.
        arrived_s: float32, the seconds that each of ``arrived`` took; empty if the worker does not say.
        schema_version: Version of this format.
    """

    id: int
    sampled: Csr
    num_accepted: Int32 | None = None
    logprobs: Logprobs | None = None
    arrived: Int32 = field(default_factory=_NO_NUMBERS.copy)
    lost: Int32 = field(default_factory=_NO_NUMBERS.copy)
    arrived_s: Float32 = field(default_factory=_NO_SECONDS.copy)
    schema_version: int = SCHEMA_VERSION
