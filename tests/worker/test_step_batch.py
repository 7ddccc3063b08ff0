"""A Step over the tables: slots, positions and what is read, beside what each token's row says."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hybridkv.errors import WorkerError
from hybridkv.step import Cells, Csr, Step
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec, window_spec
from hybridkv.worker import (
    AttentionMask,
    KVPages,
    MultiGroupBlockTable,
    StepBatch,
    combine_partial,
    paged_attention,
    step_batch,
    write_kv,
)

ROWS = {2: [5, 3, 7], 0: [4, 6]}
"""The blocks of two rows in both groups of attention, 4 tokens each."""


def tables(dcp: int = 1, rank: int = 0, pcp: int = 1, interleave: int = 1) -> MultiGroupBlockTable:
    """Of full attention, states and a window. rank: of ``dcp * pcp``."""
    config = natural_model_config(6, [full_spec(4), state_spec(4), window_spec(4, 6)], [2, 1, 2])
    return MultiGroupBlockTable.of_config(
        config,
        max_num_reqs=3,
        max_model_len=40,
        max_num_batched_tokens=16,
        cp_kv_cache_interleave_size=interleave,
        dcp_world_size=dcp,
        dcp_rank=rank % dcp,
        pcp_world_size=pcp,
        pcp_rank=rank // dcp,
    )


def step(number: int = 0, computed: tuple[int, int] = (7, 0), scheduled: tuple[int, int] = (3, 5)) -> Step:
    """Row 2 runs tokens 7, 8 and 9, row 0 its tokens 0 .. 4."""
    cells = [(g, row, column, block) for g in (0, 2) for row in ROWS for column, block in enumerate(ROWS[row])]
    return Step(
        id=number,
        after=number - 1,
        rows=np.array([2, 0], np.int32),
        num_computed=np.array(computed, np.int32),
        num_scheduled=np.array(scheduled, np.int32),
        samples=np.array([True, True]),
        token_ids=Csr.from_lists([[1] * count for count in scheduled]),
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


MASKS = {0: AttentionMask(), 2: AttentionMask(window=6)}
STEPS = (((0, 0), (7, 2)), ((7, 2), (3, 3)), ((10, 5), (1, 1)))
"""Computed and scheduled tokens of both rows: two chunks each, and a token behind them."""


def found(dcp: int = 1, pcp: int = 1, interleave: int = 1, ranks: Sequence[int] | None = None) -> list[torch.Tensor]:
    """What the tokens of the last step attend to in both groups, put together from ``ranks``; None for all of them."""
    parts = []
    for rank in range(dcp * pcp) if ranks is None else ranks:
        of, draw = tables(dcp, rank, pcp, interleave), torch.Generator().manual_seed(3)
        pages = {group: KVPages(*torch.full((2, 12, 4, 1, 8), torch.nan)) for group in MASKS}
        mine = {}
        for number, (computed, scheduled) in enumerate(STEPS):
            of.apply(now := step(number, computed, scheduled))
            for group, one in step_batch(now, of).groups.items():
                keys, values, query = torch.randn(3, sum(scheduled), 1, 8, generator=draw)
                write_kv(one.slots, pages[group], keys, values)
                mine[group] = paged_attention(query, pages[group], one.reads, 1.5, mask=MASKS[group])
        parts.append(mine)
    outs = (torch.stack([mine[group][0] for mine in parts]) for group in MASKS)
    sums = (torch.stack([mine[group][1] for mine in parts]) for group in MASKS)
    return [combine_partial(out, lse)[0] for out, lse in zip(outs, sums, strict=True)]


@pytest.mark.parametrize(
    ("dcp", "pcp", "interleave"), [(2, 1, 1), (2, 1, 4), (1, 2, 2), (2, 2, 1), (4, 1, 4), (1, 3, 2)]
)
def test_ranks_find_together_what_one_finds_alone(dcp: int, pcp: int, interleave: int) -> None:
    torch.testing.assert_close(found(dcp, pcp, interleave), found(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [[0], [0, 0], [1, 1]])
def test_a_rank_that_is_missing_is_noticed(ranks: list[int]) -> None:
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found(2, ranks=ranks), found(), rtol=1e-5, atol=1e-5)
