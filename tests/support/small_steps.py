"""Steps by the fields that matter."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridkv.step import Cells, Csr, Step


def small_step(number: int = 0, scheduled: Sequence[int] = (), **fields: Any) -> Step:  # noqa: ANN401  # of a Step
    """Rows 0 .. that run so many tokens each from the beginning, and sample nothing; ``fields`` say otherwise."""
    rows = len(scheduled)
    values: dict[str, Any] = {
        "id": number,
        "after": number - 1,
        "rows": np.arange(rows, dtype=np.int32),
        "num_computed": np.zeros(rows, np.int32),
        "num_scheduled": np.array(scheduled, np.int32),
        "samples": np.zeros(rows, np.bool_),
        "token_ids": Csr.from_lists([[1] * count for count in scheduled]),
        "drafts": Csr.empty(rows),
        "cells": Cells.empty(),
        "finished_rows": np.empty(0, np.int32),
    }
    return Step(**values | fields)
