from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_support import SlotCase, slot_cases

from hybridkv.errors import WorkerError
from hybridkv.worker import BlockTable, ContextShare, PagedIndex
from hybridkv.worker.tables.paged_index import local_tokens


@dataclass(frozen=True, slots=True)
class Query:
    """Rows asked for, with the length of each context and the first token still read."""

    rows: tuple[int, ...]
    context: tuple[int, ...]
    first: tuple[int, ...]


@st.composite
def queries(draw: st.DrawFn) -> tuple[SlotCase, Query]:
    case = draw(slot_cases())
    end = min(case.width * case.block_size * case.cp, 600)  # the loop counts tokens one by one
    rows = draw(st.lists(st.integers(0, len(case.rows) - 1), max_size=3))
    context = [draw(st.integers(0, end)) for _ in rows]
    first = [draw(st.one_of(st.just(0), st.integers(0, n))) for n in context]
    return case, Query(tuple(rows), tuple(context), tuple(first))


def expected(case: SlotCase, query: Query) -> tuple[list[int], list[int], list[int]]:
    """Token by token: the kernel blocks that hold a live token of this rank, and the tokens in each row's last one."""
    indptr, indices, last = [0], [], []
    covered = case.kernel_size * case.cp
    for row, n, first in zip(query.rows, query.context, query.first, strict=True):
        local = [p for p in range(n) if case.is_local(p)]
        columns = list(dict.fromkeys(p // covered for p in local if p >= first))
        block = {p // covered: case.slot(row, p) // case.kernel_size for p in local}
        indices += [block[column] for column in columns]
        indptr.append(len(indices))
        last.append(sum(p // covered == columns[-1] for p in local) if columns else 0)
    return indptr, indices, last


def lists(index: PagedIndex[torch.Tensor]) -> tuple[list[int], list[int], list[int]]:
    return index.indptr.tolist(), index.indices.tolist(), index.last_page_len.tolist()


@settings(max_examples=2 * settings().max_examples)
@given(asked=queries())
def test_pages_are_those_of_a_loop(asked: tuple[SlotCase, Query]) -> None:
    case, query = asked
    table, wanted = case.table(), expected(case, query)
    host = table.paged_index(query.rows, query.context, query.first)
    assert (host.indptr.tolist(), host.indices.tolist(), host.last_page_len.tolist()) == wanted
    assert {array.dtype for array in (host.indptr, host.indices, host.last_page_len)} == {np.dtype(np.int32)}
    tensors = [torch.tensor(one, dtype=torch.int64) for one in (query.rows, query.context, query.first)]
    device = table.paged_index_on_device(tensors[0], tensors[1], tensors[2])
    assert lists(device) == wanted
    assert {tensor.dtype for tensor in (device.indptr, device.indices, device.last_page_len)} == {torch.int32}
    whole = expected(case, replace(query, first=(0,) * len(query.rows)))
    host = table.paged_index(query.rows, query.context)
    assert (host.indptr.tolist(), host.indices.tolist(), host.last_page_len.tolist()) == whole
    assert lists(table.paged_index_on_device(tensors[0].int(), tensors[1].int())) == whole


@settings(max_examples=settings().max_examples)
@given(case=slot_cases())
def test_local_tokens_are_counted_one_by_one(case: SlotCase) -> None:
    share = ContextShare(case.cp, case.rank, case.interleave)
    lens = np.arange(3 * case.cp * case.interleave + 2)
    assert local_tokens(lens, share).tolist() == [sum(map(case.is_local, range(n))) for n in lens.tolist()]


def test_the_example_of_the_docstring() -> None:
    table = BlockTable(4, 2, 4, 8)
    table.add_row([7, 3, 5], 0)
    table.add_row([8], 1)
    index = table.paged_index([0, 1], [9, 4])
    assert (index.indptr.tolist(), index.indices.tolist(), index.last_page_len.tolist()) == (
        [0, 3, 4],
        [7, 3, 5, 8],
        [1, 4],
    )


def test_blocks_that_a_window_dropped_are_left_out() -> None:
    """Sliding, W = 8, bs 4 (docs/contracts.md, 4): at 25 tokens the first live one is 18, in column 4."""
    table = BlockTable(4, 1, 8, 8)
    table.write_cells([0, 0, 0], [4, 5, 6], [5, 6, 7])
    index = table.paged_index([0], [25], [18])
    assert (index.indices.tolist(), index.last_page_len.tolist()) == ([5, 6, 7], [1])
    # a context without a live token has no page, though the block of its last token is there
    assert table.paged_index([0], [25], [25]).indptr.tolist() == [0, 0]


def test_a_rank_without_tokens_has_no_page() -> None:
    table = BlockTable(4, 1, 2, 8, dcp_world_size=4, dcp_rank=3, cp_kv_cache_interleave_size=2)
    table.add_row([5], 0)
    index = table.paged_index([0, 0, 0], [6, 7, 16])
    assert index.indptr.tolist() == [0, 0, 1, 2]
    assert index.last_page_len.tolist() == [0, 1, 4]


BAD = [
    ([2], [1], None, r"rows must lie in 0 \.\. 1"),
    ([-1], [1], None, r"rows must lie in 0 \.\. 1"),
    ([0], [17], None, "row 0: a context of 17 tokens"),
    ([0], [-1], None, "row 0: a context of -1 tokens"),
    ([0], [4], [5], "from token 5 on"),
    ([0], [4], [-1], "from token -1 on"),
    ([0, 1], [4], None, "2 rows, 1 context lengths"),
    ([0], [4], [0, 0], "1 rows, 1 context lengths and 2 first"),
]


@pytest.mark.parametrize(("rows", "context", "first", "message"), BAD)
def test_contexts_that_do_not_fit(rows: list[int], context: list[int], first: list[int] | None, message: str) -> None:
    table = BlockTable(4, 2, 4, 8)
    table.add_row([1, 2, 3, 4], 0)
    with pytest.raises(WorkerError, match=message):
        table.paged_index(rows, context, first)
    with pytest.raises(WorkerError, match=message):
        table.paged_index_on_device(
            torch.tensor(rows), torch.tensor(context), None if first is None else torch.tensor(first)
        )


def test_a_context_longer_than_the_blocks_of_its_row() -> None:
    table = BlockTable(4, 2, 4, 8, kernel_block_size=2, dcp_world_size=2)
    table.add_row([1], 0)
    assert table.paged_index([0], [8]).indices.tolist() == [2, 3]
    with pytest.raises(WorkerError, match="end by 8, the tokens that the row has blocks for"):
        table.paged_index([0], [9])


def test_device_rows_must_be_integers() -> None:
    table = BlockTable(4, 2, 4, 8)
    with pytest.raises(WorkerError, match="context_lens must be int32 or int64"):
        table.paged_index_on_device(torch.tensor([0]), torch.tensor([1.0]))
