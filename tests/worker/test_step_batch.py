"""A Step over the tables: slots, positions and what is read, beside what each token's row says."""

import numpy as np
import pytest
import torch

from hybridkv.errors import WorkerError
from hybridkv.step import Cells, Csr, Step
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec, window_spec
from hybridkv.worker import MultiGroupBlockTable, StepBatch, step_batch

ROWS = {2: [5, 3, 7], 0: [4, 6]}
"""The blocks of two rows in both groups of attention, 4 tokens each."""


def tables(dcp: int = 1, rank: int = 0) -> MultiGroupBlockTable:
    specs = [full_spec(4), state_spec(4), window_spec(4, 6)]
    config = natural_model_config(6, specs, [2, 1, 2])
    if dcp == 1:
        return MultiGroupBlockTable.of_config(config, max_num_reqs=3, max_model_len=40, max_num_batched_tokens=16)
    return MultiGroupBlockTable(
        3,
        40,
        16,
        False,  # noqa: FBT003  # vLLM's positions
        "cpu",
        [4, 4, 4],
        num_blocks=[config.blocks_of(group) for group in range(3)],
        specs=specs,
        dcp_world_size=dcp,
        dcp_rank=rank,
    )


def step(ids: int = 0) -> Step:
    """Row 2 runs tokens 7, 8 and 9, row 0 its tokens 0 .. 4."""
    cells = [(g, row, column, block) for g in (0, 2) for row in ROWS for column, block in enumerate(ROWS[row])]
    return Step(
        id=ids,
        after=ids - 1,
        rows=np.array([2, 0], np.int32),
        num_computed=np.array([7, 0], np.int32),
        num_scheduled=np.array([3, 5], np.int32),
        samples=np.array([True, True]),
        token_ids=Csr.from_lists([[1, 2, 3], [4, 5, 6, 7, 8]]),
        drafts=Csr.empty(2),
        cells=Cells(*np.array(cells, np.int32).T),
        finished_rows=np.empty(0, np.int32),
    )


def made(of: MultiGroupBlockTable) -> StepBatch:
    of.apply(step())
    return step_batch(step(), of)


def test_every_token_has_its_position_and_slot() -> None:
    batch = made(tables())
    assert batch.positions.tolist() == [7, 8, 9, 0, 1, 2, 3, 4]
    assert list(batch.groups) == [0, 2]  # states have no slots
    for group in batch.groups.values():
        assert group.slots.tokens.tolist() == list(range(8))
        assert group.slots.blocks.tolist() == [3, 7, 7, 4, 4, 4, 4, 6]
        assert group.slots.offsets.tolist() == [3, 0, 1, 0, 1, 2, 3, 0]


def test_every_row_reads_its_own_blocks_up_to_its_last_token() -> None:
    reads = made(tables()).groups[0].reads
    assert (reads.query_start_loc, reads.seq_lens) == ((0, 3, 8), (10, 5))
    assert reads.block_table[0].tolist() == ROWS[2]
    assert reads.block_table[1, :2].tolist() == ROWS[0]
    assert reads.block_table.shape == (2, 3)
    assert (reads.block_size, reads.num_blocks) == (4, 12)


def test_a_rank_has_the_slots_of_its_own_tokens() -> None:
    first, second = (made(tables(2, rank)).groups[0] for rank in (0, 1))
    assert first.slots.tokens.tolist() == [1, 3, 5, 7]  # positions 8, 0, 2, 4
    assert second.slots.tokens.tolist() == [0, 2, 4, 6]
    assert [one.reads.share.rank for one in (first, second)] == [0, 1]


def test_a_step_that_the_tables_do_not_know_is_refused() -> None:
    with pytest.raises(WorkerError, match="row 2 has blocks for 0 tokens in group 0 and needs them for 10: apply"):
        step_batch(step(), tables())


def test_what_the_tables_hold_is_committed() -> None:
    of = tables()
    made(of)
    assert torch.equal(of[0].get_device_tensor()[[2, 0], :2].cpu(), torch.tensor([[5, 3], [4, 6]], dtype=torch.int32))
