"""The sampling state of rows is reset for a new request and follows accepted drafts."""

import numpy as np
import torch

from hybridkv.request import SamplingParams
from hybridkv.runner.sampling.draws import NO_DRAFT
from hybridkv.runner.sampling.sampler import NONE_DRAWN, RowState
from hybridkv.step import Csr, NewRow

VOCABULARY = 20


def new(tokens: list[int], params: SamplingParams) -> NewRow:
    return NewRow(1, "r", np.asarray(tokens, np.int32), len(tokens), params)


def seen(rows: RowState, at: tuple[int, ...] = (1,), before: tuple[int, ...] = (NO_DRAFT,)) -> list[list[int] | None]:
    """Of each draw the tokens that its penalties change; None where it changes nothing at all."""
    edits = rows.batch(np.array(at, np.int32), np.arange(len(at)), np.array(before)).edits
    found: list[list[int] | None] = [None] * len(at)
    if edits is not None and edits.rows:
        logits = torch.ones(len(at), VOCABULARY)
        changed, _ = edits.apply(logits, None)
        for place, row in enumerate(edits.rows):
            found[row] = torch.nonzero(changed[place] != 1).flatten().tolist()
    return found


def test_new_row_has_no_state_of_the_previous_request() -> None:
    rows = RowState(3, VOCABULARY)
    rows.begin(new([4, 2, 4], SamplingParams(temperature=0.5, top_k=3, repetition_penalty=2.0, seed=-1)))
    rows.drawn(np.array([1, 2, 0], np.int32), Csr.from_lists([[7], [], [8]]))
    assert (seen(rows), rows.last_token.tolist()) == ([[2, 4, 7]], [8, 7, NONE_DRAWN])
    batch = rows.batch(np.array([1, 2], np.int32), np.array([9, 3]), np.array([NO_DRAFT] * 2))
    assert [batch.how[name].tolist() for name in ("temperature", "top_k", "seed")] == [[0.5, 0], [3, 0], [-1, 0]]
    assert batch.position.tolist() == [9, 3]
    # begins again without having been finished: a resumed request
    rows.begin(new([5], SamplingParams()))
    assert (seen(rows), rows.last_token[1]) == ([None], NONE_DRAWN)
    rows.begin(new([5, 6], SamplingParams(repetition_penalty=1.5)))
    assert seen(rows) == [[5, 6]]
    rows.drawn(np.array([1], np.int32), Csr.from_lists([[3]]))
    rows.end(np.array([1], np.int32))
    assert (seen(rows), rows.last_token[1]) == ([None], NONE_DRAWN)


def test_penalties_see_earlier_drafts_and_rows_keep_accepted_ones() -> None:
    rows = RowState(3, VOCABULARY)
    rows.begin(new([4, 2], SamplingParams(repetition_penalty=2.0)))
    found = seen(rows, (0, 1, 1, 1, 2), (NO_DRAFT, NO_DRAFT, 9, 5, NO_DRAFT))
    assert found == [None, [2, 4], [2, 4, 9], [2, 4, 5, 9], None]
    assert seen(rows) == [[2, 4]]
    rows.drawn(np.array([1], np.int32), Csr.from_lists([[9, 6]]))
    assert (seen(rows), rows.last_token[1]) == ([[2, 4, 6, 9]], 6)
