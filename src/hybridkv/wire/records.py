"""What crosses: Steps, their results, failures. Each as a record of its fields, and what makes its fields fit.

Checked here is what a message says of itself. Whether a row, a group, a column, a block or a token id exists depends
on sizes that only the worker has; whether a Step is next, on what it applied before.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import WireError
from hybridkv.request import SamplingParams
from hybridkv.step import SCHEMA_VERSION, Cells, Copy, Csr, EncoderRead, Logprobs, NewRow, Step, StepResult
from hybridkv.wire.arrays import Array
from hybridkv.wire.codecs import Boolean, Digest, Integer, Local, Nullable, Real, Record, Text, TupleOf
from hybridkv.wire.reader import MOST_LISTED, Reader

STAGES: Final = ("before", "after")
COPY_KINDS: Final = ("move", "block", "state")
MOST_SAID: Final = 10_000
"""Characters of an exception's text that cross: it may print a whole tensor."""
_INT32: Final = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A Step brought no result. id: that of the Step. error: the name of the exception's class. message: its text.

    ``of`` keeps the first MOST_SAID characters of it.
    """

    id: int
    error: str
    message: str
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def of(cls, step_id: int, error: BaseException) -> StepFailure:
        """What ``error`` did to Step ``step_id``."""
        return cls(step_id, *_described(error))

    def __str__(self) -> str:
        return f"{self.error}: {self.message}"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes came that are no Step of this schema, so nobody knows which. error, message: as in StepFailure."""

    error: str
    message: str
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def of(cls, error: BaseException) -> Unreadable:
        """What ``error`` says of the bytes."""
        return cls(*_described(error))


def _described(error: BaseException) -> tuple[str, str]:
    """Class and text of an exception; characters that UTF-8 has not are escaped."""
    text = str(error)[:MOST_SAID].encode(errors="backslashreplace").decode()
    return type(error).__name__, text


Reply = StepResult | StepFailure | Unreadable


class Copies:
    """A tuple of Copy as int32[C, 5]: place in STAGES, group, source, destination, place in COPY_KINDS."""

    _array = Array("int32", (None, 5))

    def pack(self, copies: tuple[Copy, ...]) -> object:
        """A typed array. O(copies)."""
        try:
            numbers = np.array([_numbers(copy) for copy in copies], np.int64).reshape(-1, 5)
        except (TypeError, OverflowError) as error:
            raise WireError(f"group, source and destination must be integers of 32 bits ({error})") from None
        if numbers.size and not _INT32.min <= numbers.min() <= numbers.max() <= _INT32.max:
            raise WireError("group, source and destination must be integers of 32 bits")
        return self._array.pack(numbers.astype(np.int32))

    def read(self, reader: Reader) -> tuple[Copy, ...]:
        """The copies, in order. O(copies)."""
        numbers = self._array.read(reader)
        for column, words in ((0, STAGES), (4, COPY_KINDS)):
            places = numbers[:, column]
            if len(places) and not 0 <= places.min() <= places.max() < len(words):
                raise WireError(f"column {column} must be a place in {', '.join(words)}")
        return tuple(
            Copy(STAGES[stage], group, source, destination, COPY_KINDS[kind])
            for stage, group, source, destination, kind in numbers.tolist()
        )


def _numbers(copy: Copy) -> tuple[int, int, int, int, int]:
    if copy.stage not in STAGES or copy.kind not in COPY_KINDS:
        raise WireError(
            f"stage must be one of {', '.join(STAGES)} and kind one of {', '.join(COPY_KINDS)}, "
            f"got {copy.stage!r} and {copy.kind!r}"
        )
    group, source, destination = map(operator.index, (copy.group, copy.source, copy.destination))
    return STAGES.index(copy.stage), group, source, destination, COPY_KINDS.index(copy.kind)


class Ids:
    """A tuple of token ids as int32[n]."""

    _array = Array("int32")

    def pack(self, ids: tuple[int, ...]) -> object:
        """A typed array. O(ids)."""
        return self._array.pack(_int32s(ids))

    def read(self, reader: Reader) -> tuple[int, ...]:
        """The ids, in order. O(ids)."""
        ids = self._array.read(reader)
        reader.count_listed(len(ids))
        return tuple(ids.tolist())


class Words:
    """Tuples of token ids as lists; text is no such word: which tokens it has is for a tokenizer to say."""

    def pack(self, words: tuple[str | tuple[int, ...], ...]) -> object:
        """Two typed arrays. O(ids)."""
        ids = [word for word in words if not isinstance(word, str)]
        if len(ids) != len(words):
            raise WireError("must be token ids, and are text: an Engine encodes them, or give the ids of each word")
        ends = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        return _CSR.pack(Csr(ends, _int32s([token for word in ids for token in word])))

    def read(self, reader: Reader) -> tuple[tuple[int, ...], ...]:
        """The words, in order. O(ids)."""
        lists = _CSR.read(reader)
        reader.count_listed(len(lists) + len(lists.values))
        return tuple(tuple(lists[i].tolist()) for i in range(len(lists)))


@dataclass(frozen=True, slots=True, eq=False)
class _Biases:
    token: NDArray[np.int32]
    bias: NDArray[np.float64]


class Biases:
    """Pairs of a token id and a number, as two columns, by ascending id."""

    def pack(self, biases: tuple[tuple[int, float], ...]) -> object:
        """Two typed arrays. O(biases)."""
        return _BIASES.pack(_Biases(_int32s([token for token, _ in biases]), np.array([bias for _, bias in biases])))

    def read(self, reader: Reader) -> tuple[tuple[int, float], ...]:
        """The pairs. O(biases)."""
        read = _BIASES.read(reader)
        reader.count_listed(len(read.token))
        return tuple(zip(read.token.tolist(), read.bias.tolist(), strict=True))


def _check_biases(biases: _Biases) -> None:
    if len(biases.token) != len(biases.bias):
        raise WireError("token and bias must have one length")
    if (np.diff(biases.token.astype(np.int64)) <= 0).any():
        raise WireError("token must ascend")


def _int32s(values: Sequence[int]) -> NDArray[np.int32]:
    try:
        return np.array(values, np.int32)
    except (OverflowError, TypeError, ValueError) as error:
        raise WireError(f"must be integers of 32 bits ({error})") from None


# -- what one value says of itself


def _check_csr(csr: Csr) -> None:
    indptr = csr.indptr
    if not len(indptr) or indptr[0] != 0 or indptr[-1] != len(csr.values) or (indptr[1:] < indptr[:-1]).any():
        raise WireError(f"indptr must rise from 0 to the {len(csr.values)} values, and never fall")


def _check_cells(cells: Cells) -> None:
    if len({len(cells.group), len(cells.row), len(cells.column), len(cells.block)}) != 1:
        raise WireError("group, row, column and block must have one length")


def _check_new_row(new: NewRow) -> None:
    if new.num_prompt_tokens > len(new.token_ids):
        raise WireError(f"num_prompt_tokens is {new.num_prompt_tokens}, but there are {len(new.token_ids)} tokens")


def _listed(new: NewRow) -> int:
    """Items of lists in a row, itself counted: as many as its reader makes one by one."""
    asked = new.sampling
    found = 1 + len(asked.stop) + len(asked.stop_token_ids) + len(new.held_ids) + len(asked.logit_bias)
    return found + (sum(map(len, asked.bad_words), len(asked.bad_words)) if asked.bad_words else 0)


def _check_step(step: Step) -> None:
    rows = len(step.rows)
    if step.after >= step.id:
        raise WireError(f"after must lie below id {step.id}, got {step.after}")
    listed = sum(map(_listed, step.new_rows))
    if listed > MOST_LISTED:
        raise WireError(
            f"new_rows and what their sampling lists may have {MOST_LISTED:,} items together, not {listed:,}"
        )
    for name in ("num_computed", "num_scheduled", "samples", "token_ids", "drafts"):
        if len(getattr(step, name)) != rows:
            raise WireError(f"{name} is for {len(getattr(step, name))} rows, but there are {rows}")
    if rows and step.num_computed.min() < 0:
        raise WireError("num_computed must be 0 or more")
    counts = np.diff(step.token_ids.indptr)
    if not np.array_equal(counts, step.num_scheduled):
        raise WireError("token_ids must hold as many tokens of each row as num_scheduled says")
    if len(step.drafts.values) and (np.diff(step.drafts.indptr) > counts).any():
        raise WireError("drafts must be a tail of token_ids: some row has more of them than tokens")
    if len(step.state_read) not in (0, rows):
        raise WireError(f"state_read is for {len(step.state_read)} rows, but there are {rows}")
    writers = step.state_writes[:, 0]
    if len(writers) and not 0 <= writers.min() <= writers.max() < rows:
        raise WireError(f"state_writes must begin with places in rows, 0 .. {rows - 1}")


def _check_logprobs(logprobs: Logprobs) -> None:
    columns = (logprobs.row, logprobs.position, logprobs.token, logprobs.logprob, logprobs.rank, logprobs.best)
    if len({len(column) for column in columns}) != 1:
        raise WireError("row, position, token, logprob, rank and best must have one length")
    if len(logprobs.best_logprobs) != len(logprobs.best.values):
        raise WireError(f"best_logprobs must be one for each of the {len(logprobs.best.values)} tokens of best")


def _check_result(result: StepResult) -> None:
    named = None if result.logprobs is None else result.logprobs.row
    if named is not None and len(named) and not 0 <= named.min() <= named.max() < len(result.sampled):
        raise WireError(f"logprobs must be of places in rows, 0 .. {len(result.sampled) - 1}")
    if result.num_accepted is not None and len(result.num_accepted) != len(result.sampled):
        raise WireError(f"num_accepted is for {len(result.num_accepted)} rows, sampled for {len(result.sampled)}")


# -- records


class _Version(Integer):
    """This schema's version. Another one is said apart, before anything else that is wrong with a message."""

    def read(self, reader: Reader) -> int:
        """SCHEMA_VERSION."""
        version = super().read(reader)
        if version != SCHEMA_VERSION:
            raise WireError(f"must be {SCHEMA_VERSION}")
        return version


_VERSION: Final = _Version()
_CSR: Final = Record(Csr, {"indptr": Array("int64"), "values": Array("int32")}, _check_csr)
_CELLS: Final = Record(Cells, dict.fromkeys(("group", "row", "column", "block"), Array("int32")), _check_cells)
_BIASES: Final = Record(_Biases, {"token": Array("int32"), "bias": Array("float64")}, _check_biases)
_LOCAL: Final = (
    "are functions, which no message holds: run them where the Engine is, or say it by logit_bias and bad_words"
)
_SAMPLING: Final = Record(
    SamplingParams,
    {
        "temperature": Real(),
        "top_k": Integer(),
        "top_p": Real(),
        "min_p": Real(),
        "repetition_penalty": Real(),
        "seed": Integer(),
        "max_tokens": Integer(),
        "stop_token_ids": TupleOf(Integer()),
        "stop": TupleOf(Text()),
        "ignore_eos": Boolean(),
        "logprobs": Nullable(Integer()),
        "prompt_logprobs": Nullable(Integer()),
        "n": Integer(),
    },
    later={
        "presence_penalty": (Real(), 0.0),
        "frequency_penalty": (Real(), 0.0),
        "min_tokens": (Integer(), 0),
        "logit_bias": (Biases(), ()),
        "bad_words": (Words(), ()),
        "logits_processors": (Local(_LOCAL), ()),
    },
)
_ENCODER: Final = Record(EncoderRead, {"digest": Digest(), "num_tokens": Integer(minimum=1), "encodes": Boolean()})
_NEW_ROW: Final = Record(
    NewRow,
    {
        "row": Integer(minimum=0),
        "request_id": Text(),
        "token_ids": Array("int32"),
        "num_prompt_tokens": Integer(minimum=0),
        "sampling": _SAMPLING,
        "encoder": Nullable(_ENCODER),
    },
    _check_new_row,
    later={"held_ids": (Ids(), ())},
)
_LOGPROBS: Final = Record(
    Logprobs,
    {
        "row": Array("int32"),
        "position": Array("int32"),
        "token": Array("int32"),
        "logprob": Array("float32"),
        "rank": Array("int32"),
        "best": _CSR,
        "best_logprobs": Array("float32"),
    },
    _check_logprobs,
)
STEP: Final = Record(
    Step,
    {
        "id": Integer(minimum=0),
        "after": Integer(minimum=-1),
        "rows": Array("int32"),
        "num_computed": Array("int32"),
        "num_scheduled": Array("int32"),
        "samples": Array("bool"),
        "token_ids": _CSR,
        "drafts": _CSR,
        "cells": _CELLS,
        "finished_rows": Array("int32"),
        "new_rows": TupleOf(_NEW_ROW),
        "zero": Array("int32", (None, 2)),
        "copies": Copies(),
        "state_read": Array("int32", (None, None)),
        "state_writes": Array("int32", (None, 4)),
        "schema_version": _VERSION,
    },
    _check_step,
    {"kind": "step"},
)
RESULT: Final = Record(
    StepResult,
    {
        "id": Integer(minimum=0),
        "sampled": _CSR,
        "num_accepted": Nullable(Array("int32")),
        "logprobs": Nullable(_LOGPROBS),
        "schema_version": _VERSION,
    },
    _check_result,
    {"kind": "result"},
)
FAILURE: Final = Record(
    StepFailure,
    {"id": Integer(minimum=0), "error": Text(), "message": Text(), "schema_version": _VERSION},
    marks={"kind": "failure"},
)
UNREADABLE: Final = Record(
    Unreadable, {"error": Text(), "message": Text(), "schema_version": _VERSION}, marks={"kind": "unreadable"}
)
