"""Values of a Step."""

import numpy as np

from hybridkv.step import Cells, Csr, Step


def test_csr_is_a_list_of_lists() -> None:
    lists = Csr.from_lists([[1, 2], [], [3]])
    assert [lists[i].tolist() for i in range(len(lists))] == [[1, 2], [], [3]]
    assert (lists.indptr.dtype.name, lists.values.dtype.name) == ("int64", "int32")
    assert lists.indptr.tolist() == [0, 2, 2, 3]


def test_csr_without_anything() -> None:
    assert len(Csr.from_lists([])) == 0
    empty = Csr.empty(3)
    assert [empty[i].tolist() for i in range(3)] == [[], [], []]


def test_an_empty_step() -> None:
    none = np.empty(0, np.int32)
    step = Step(0, -1, none, none, none, np.empty(0, np.bool_), Csr.empty(0), Csr.empty(0), Cells.empty(), none)
    assert (len(step), step.num_tokens, len(step.cells)) == (0, 0, 0)
    assert (len(step.new_rows), len(step.copies)) == (0, 0)
    assert (step.zero.shape, step.state_read.shape, step.state_writes.shape) == ((0, 2), (0, 0), (0, 4))
