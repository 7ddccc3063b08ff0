import numpy as np
import torch

from hybridkv.request import SamplingParams
from hybridkv.runner.rows import NONE_DRAWN, RowState
from hybridkv.step import NewRow


def new(tokens: list[int], params: SamplingParams) -> NewRow:
    return NewRow(1, "r", np.asarray(tokens, np.int32), len(tokens), params)


def seen(rows: RowState) -> list[int] | None:
    mask = rows.batch(np.array([1], np.int32), np.array([9])).seen[0]
    return None if mask is None else torch.nonzero(mask).flatten().tolist()


def test_a_row_that_begins_remembers_nothing_of_the_one_before() -> None:
    rows = RowState(3, 20, "cpu")
    rows.begin(new([4, 2, 4], SamplingParams(temperature=0.5, top_k=3, repetition_penalty=2.0, seed=-1)))
    rows.drawn(np.array([1, 0], np.int32), np.array([7, 8]))
    assert (seen(rows), rows.last_token.tolist()) == ([2, 4, 7], [8, 7, NONE_DRAWN])
    batch = rows.batch(np.array([1, 2], np.int32), np.array([9, 3]))
    assert (batch.temperature.tolist(), batch.top_k.tolist(), batch.seed.tolist()) == ([0.5, 0], [3, 0], [-1, 0])
    assert (batch.penalty.tolist(), batch.position.tolist()) == ([2.0, 1.0], [9, 3])
    # begins again without having been finished: a resumed request
    rows.begin(new([5], SamplingParams()))
    assert (seen(rows), rows.last_token[1]) == (None, NONE_DRAWN)
    rows.begin(new([5, 6], SamplingParams(repetition_penalty=1.5)))
    assert seen(rows) == [5, 6]
    rows.drawn(np.array([1], np.int32), np.array([3]))
    rows.end(np.array([1], np.int32))
    assert (seen(rows), rows.last_token[1]) == (None, NONE_DRAWN)
