"""Steps whose results are not in yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.request import MAX_TOKEN_ID, Request
from hybridkv.step import Csr, Step, StepResult


@dataclass(slots=True)
class InFlight:
    """A Step and whose rows it holds.

    detached: position in the step -> request that was preempted since; its row may belong to somebody else.
    moved: blocks, the cache's numbers, that the moves of the step end in.
    """

    step: Step
    rows: NDArray[np.int64]
    requests: tuple[Request, ...]
    moved: NDArray[np.int64]
    detached: dict[int, Request] = field(default_factory=dict)

    @property
    def drafted(self) -> NDArray[np.int64] | None:
        """Drafts of each row, int64[R]; None when there are none."""
        drafts = self.step.drafts
        return np.diff(drafts.indptr) if len(drafts.values) else None

    def detach(self, request: Request, row: int) -> bool:
        """``request`` leaves ``row``; whether this step holds it."""
        for position in np.flatnonzero(self.rows == row).tolist():
            if position not in self.detached and self.requests[position] is request:
                self.detached[position] = request
                return True
        return False

    def attached(self) -> NDArray[np.bool_]:
        """bool[R]: rows that still belong to the request they were scheduled for."""
        mask = np.ones(len(self.rows), np.bool_)
        mask[list(self.detached)] = False
        return mask


def check_result(step: Step, result: StepResult) -> None:
    """WorkerError unless ``result`` has the accepted drafts and one token, 0 or more, for each row that samples."""
    if type(result.id) is not int or type(result.schema_version) is not int:
        raise WorkerError(f"step {step.id}: id and schema_version of its result must be integers")
    if result.schema_version > step.schema_version:
        raise WorkerError(
            f"the result of step {result.id} has schema {result.schema_version}, newer than {step.schema_version}: "
            "upgrade hybridkv on this side"
        )
    if result.id != step.id:
        raise WorkerError(f"the result of step {result.id} came where step {step.id} is next: hand results in in order")
    sampled = result.sampled
    if not isinstance(sampled, Csr) or not _is_row(sampled.indptr) or not _is_row(sampled.values):
        raise WorkerError(f"step {step.id}: the result must hold sampled tokens as a Csr of integer arrays")
    if len(sampled) != len(step.rows):
        raise WorkerError(f"step {step.id} has {len(step.rows)} rows, its result {len(sampled)}")
    indptr = sampled.indptr
    if indptr[0] != 0 or indptr[-1] != len(sampled.values) or (indptr[1:] < indptr[:-1]).any():
        raise WorkerError(
            f"step {step.id}: the result has {len(result.sampled.values)} tokens, its indptr ends at {indptr[-1]}"
        )
    _check_counts(step, result)
    if (sampled.values > MAX_TOKEN_ID).any():
        raise WorkerError(f"step {step.id}: sampled tokens must be integers up to 2**31 - 1")
    if sampled.values.size and sampled.values.min() < 0:
        raise WorkerError(f"step {step.id}: token {sampled.values.min()} was sampled: ids are 0 or more")


def _is_row(values: object) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"


def _check_counts(step: Step, result: StepResult) -> None:
    """WorkerError unless rows have as many tokens as they sample and accept, and accepted drafts are the drafts."""
    counts = np.diff(result.sampled.indptr)
    if result.num_accepted is not None and not np.array_equal(result.num_accepted, counts):
        raise WorkerError(f"step {step.id}: num_accepted of the result must be the number of its tokens of each row")
    if not len(step.drafts.values):
        if not np.array_equal(counts, step.samples):
            raise WorkerError(f"step {step.id}: the result must hold one token for each row that samples, none else")
        return
    if result.num_accepted is None:
        raise WorkerError(f"step {step.id} has drafts: its result must say num_accepted")
    drafted = np.diff(step.drafts.indptr)
    if not (np.array_equal(counts > 0, step.samples) and (counts <= drafted + 1).all()):
        raise WorkerError(
            f"step {step.id}: the result must hold 1 .. drafts + 1 tokens for each row that samples, none else"
        )
    kept = np.maximum(counts - 1, 0)
    owner = np.repeat(np.arange(len(kept)), kept)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(kept) - kept, kept)
    sampled = result.sampled.values[result.sampled.indptr[owner] + place]
    wrong = owner[sampled != step.drafts.values[step.drafts.indptr[owner] + place]]
    if wrong.size:
        row = step.rows[wrong[0]]
        raise WorkerError(f"step {step.id}: tokens accepted of row {row} are not its drafts: accept equal ones only")
