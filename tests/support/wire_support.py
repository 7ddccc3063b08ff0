"""Random messages that are valid, and equality of Steps field by field."""

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridkv.request import SamplingParams, StructuredOutput
from hybridkv.step import Cells, Copy, Csr, EncoderRead, Logprobs, NewRow, Step, StepResult, StoreTransfer, TierCopies
from hybridkv.wire import StepFailure, Unreadable

INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)
NAME = st.text(max_size=8)
FORM = st.builds(StructuredOutput, st.sampled_from(["regex", "grammar"]), NAME.filter(bool), NAME)
PENALTY = st.just(0.0) | st.floats(-2, 2)


def same(one: object, other: object) -> bool:
    """Equal in type, dtype, shape and value, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return one == other


def int32s(draw: st.DrawFn, *shape: int, values: st.SearchStrategy[int] = INT32) -> NDArray[np.int32]:
    count = int(np.prod(shape))
    return np.array(draw(st.lists(values, min_size=count, max_size=count)), np.int32).reshape(shape)


def csr_of(draw: st.DrawFn, counts: list[int]) -> Csr:
    return Csr(np.cumsum([0, *counts], dtype=np.int64), int32s(draw, sum(counts)))


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    some = st.one_of(st.none(), st.integers(0, 99))
    most = draw(st.integers(1, 2**40))
    return SamplingParams(
        temperature=draw(st.just(0.0) | st.floats(1e-200, allow_infinity=False)),
        top_k=draw(COUNT),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.floats(1e-6, 1e6)),
        seed=draw(st.integers(-(2**80), 2**80)),
        max_tokens=most,
        stop_token_ids=tuple(draw(st.lists(COUNT, max_size=3))),
        stop=tuple(draw(st.lists(NAME.filter(bool), max_size=2))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(some),
        prompt_logprobs=draw(some),
        n=draw(st.integers(1, 9)),
        presence_penalty=draw(PENALTY),
        frequency_penalty=draw(PENALTY),
        min_tokens=draw(st.just(0) | st.integers(0, most)),
        logit_bias=draw(st.dictionaries(COUNT, st.floats(-1e30, 1e30), max_size=3)),
        bad_words=tuple(map(tuple, draw(st.lists(st.lists(COUNT, min_size=1, max_size=3), max_size=2)))),
        structured=draw(st.none() | FORM),
    )


@st.composite
def new_rows(draw: st.DrawFn) -> NewRow:
    tokens = draw(st.integers(0, 6))
    digest = st.one_of(st.text(min_size=1, max_size=8), st.binary(min_size=1, max_size=8))
    read = st.builds(EncoderRead, digest, st.integers(1, 2**31 - 1), st.booleans())
    return NewRow(
        draw(COUNT),
        draw(NAME),
        int32s(draw, tokens),
        draw(st.integers(0, tokens)),
        draw(samplings()),
        draw(st.one_of(st.none(), read)),
        tuple(draw(st.lists(COUNT, max_size=2))),
        draw(st.none() | NAME),
    )


def copies() -> st.SearchStrategy[Copy]:
    kinds = st.sampled_from(("move", "block", "state"))
    return st.builds(Copy, st.sampled_from(("before", "after")), INT32, INT32, INT32, kinds)


def tier_copies(draw: st.DrawFn, transfers: list[int]) -> TierCopies:
    """Up to three copies of each transfer."""
    numbers = [number for number in transfers for _ in range(draw(st.integers(1, 3)))]
    return TierCopies(np.array(numbers, np.int32), *(int32s(draw, len(numbers)) for _ in range(3)))


def store_transfers(draw: st.DrawFn, numbers: list[int]) -> tuple[StoreTransfer, ...]:
    """One for each number, of up to three blocks."""
    made = []
    for number in numbers:
        keys = tuple(draw(st.lists(st.binary(min_size=1, max_size=64), max_size=3)))
        mark, tail = draw(st.binary(max_size=64)), draw(st.binary(max_size=8))
        made.append(StoreTransfer(number, int32s(draw, len(keys)), int32s(draw, len(keys)), keys, mark, tail))
    return tuple(made)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any Step that does not contradict itself."""
    step_id, rows, groups = draw(st.integers(0, 2**40)), draw(st.integers(0, 5)), draw(st.integers(0, 3))
    counts = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    cells = draw(st.integers(0, 4))
    writes = int32s(draw, draw(st.integers(0, 3)) if rows else 0, 4)
    writes[:, 0] = [draw(st.integers(0, rows - 1)) for _ in writes]
    transfers = draw(st.lists(INT32, max_size=4, unique=True))
    stored = draw(st.integers(0, len(transfers)))
    others = [one for one in draw(st.lists(COUNT, max_size=3, unique=True)) if one not in transfers]
    spilled = draw(st.integers(0, len(others)))
    return Step(
        id=step_id,
        after=draw(st.integers(-1, step_id - 1)),
        rows=int32s(draw, rows),
        num_computed=int32s(draw, rows, values=COUNT),
        num_scheduled=np.array(counts, np.int32),
        samples=np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), np.bool_),
        token_ids=csr_of(draw, counts),
        drafts=csr_of(draw, [draw(st.integers(0, count)) for count in counts]),
        cells=Cells(*(int32s(draw, cells) for _ in range(4))),
        finished_rows=int32s(draw, draw(st.integers(0, 3))),
        new_rows=tuple(draw(st.lists(new_rows(), max_size=2))),
        zero=int32s(draw, draw(st.integers(0, 3)), 2),
        copies=tuple(draw(st.lists(copies(), max_size=3))),
        state_read=int32s(draw, draw(st.sampled_from((0, rows))), groups),
        state_writes=writes,
        stores=tier_copies(draw, transfers[:stored]),
        tier_copies=tuple(draw(st.lists(copies(), max_size=3))),
        loads=tier_copies(draw, transfers[stored:]),
        spills=store_transfers(draw, others[:spilled]),
        fetches=store_transfers(draw, others[spilled:]),
    )


@st.composite
def logprobs(draw: st.DrawFn, rows: int) -> Logprobs:
    counts = draw(st.lists(st.integers(0, 2), max_size=3))
    entries = len(counts)
    owners = int32s(draw, entries, values=st.integers(0, rows - 1))
    best = csr_of(draw, counts)
    floats = st.floats(max_value=0, width=32)
    logprob, most = (
        np.array(draw(st.lists(floats, min_size=n, max_size=n)), np.float32) for n in (entries, len(best.values))
    )
    position, token, rank = (int32s(draw, entries) for _ in range(3))
    return Logprobs(owners, position, token, logprob, rank, best, most)


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    counts = draw(st.lists(st.integers(0, 3), max_size=5))
    accepted = int32s(draw, len(counts)) if draw(st.booleans()) else None
    found = draw(st.one_of(st.none(), logprobs(len(counts)))) if counts else None
    ended = np.array(draw(st.lists(INT32, max_size=4, unique=True)), np.int32)
    arrived = draw(st.integers(0, len(ended)))
    step_id, sampled = draw(st.integers(0, 2**40)), csr_of(draw, counts)
    timed = arrived if draw(st.booleans()) else 0
    seconds = draw(st.lists(st.floats(0, 1e6, width=32), min_size=timed, max_size=timed))
    return StepResult(
        step_id, sampled, accepted, found, ended[:arrived], ended[arrived:], np.array(seconds, np.float32)
    )


def failures() -> st.SearchStrategy[StepFailure | Unreadable]:
    return st.one_of(st.builds(StepFailure, COUNT, NAME, NAME), st.builds(Unreadable, NAME, NAME))


def example_step(**changes: Any) -> Step:  # noqa: ANN401  # any field
    """Two rows in three groups; every field holds something."""
    sampling, read = SamplingParams(seed=5, stop=("x",)), EncoderRead(b"audio", 30, encodes=True)
    values: dict[str, Any] = {
        "id": 7,
        "after": 5,
        "rows": np.array([4, 2], np.int32),
        "num_computed": np.array([16, 0], np.int32),
        "num_scheduled": np.array([1, 3], np.int32),
        "samples": np.array([True, False]),
        "token_ids": Csr.from_lists([[-1], [10, 11, 12]]),
        "drafts": Csr.from_lists([[], [12]]),
        "cells": Cells(*(np.array(column, np.int32) for column in ([0, 1], [4, 2], [1, 0], [9, 3]))),
        "finished_rows": np.array([3], np.int32),
        "new_rows": (NewRow(2, "r2", np.array([10, 11, 12, 13], np.int32), 3, sampling, read),),
        "zero": np.array([[1, 3]], np.int32),
        "copies": (Copy("before", 2, 5, 6, "move"), Copy("after", 1, 3, 4, "state")),
        "state_read": np.array([[-1, 3, 5], [-1, 4, 6]], np.int32),
        "state_writes": np.array([[1, 2, 19, 8]], np.int32),
        "stores": TierCopies(*(np.array(column, np.int32) for column in ([4, 4, 6], [0, 1, 0], [7, 3, 8], [2, 5, 9]))),
        "tier_copies": (Copy("before", 0, 2, 4, "move"),),
        "loads": TierCopies(*(np.array(column, np.int32) for column in ([5], [1], [5], [9]))),
        "spills": (
            StoreTransfer(8, np.array([0, 1], np.int32), np.array([4, 6], np.int32), (b"a", b"b"), b"m", b"tail"),
        ),
        "fetches": (StoreTransfer(9, np.array([1], np.int32), np.array([3], np.int32), (b"c",)),),
    }
    return Step(**values | changes)
