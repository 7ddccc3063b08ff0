import numpy as np
import pytest

from hybridkv.request_rows import grown


@pytest.mark.parametrize(("rows", "length"), [(0, 4), (4, 4), (5, 8), (8, 8), (9, 9), (20, 20)])
def test_column_growth_at_least_doubles_it(rows: int, length: int) -> None:
    column = np.arange(1, 5, dtype=np.int32)
    found = grown(column, rows, -7)
    assert found.tolist() == [1, 2, 3, 4] + [-7] * (length - 4)
    assert found.dtype == np.int32
    assert (found is column) == (length == 4)


def test_column_of_arrays_grows_by_zero_rows() -> None:
    column = np.ones((2, 3), np.int64)
    assert grown(column, 3).tolist() == [[1] * 3] * 2 + [[0] * 3] * 2
