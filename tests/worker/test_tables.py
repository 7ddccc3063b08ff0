"""Block tables of all groups, and a Step over them: slots, positions and what is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.request import SamplingParams
from hybridkv.specs import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from hybridkv.step import SCHEMA_VERSION, Cells, NewRow, Step
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
from hybridkv.worker.block_table import KernelSize
from small_steps import small_step


def tables(groups: int = 2) -> MultiGroupBlockTable:
    return MultiGroupBlockTable(4, 64, 32, False, "cpu", [4, 8][:groups], num_blocks=100)  # noqa: FBT003  # vLLM's positions


def cells(*items: tuple[int, int, int, int]) -> Cells:
    columns = np.asarray(items, np.int32).reshape(-1, 4).T
    return Cells(*(np.ascontiguousarray(one) for one in columns))


def new_row(row: int) -> NewRow:
    return NewRow(row, f"r{row}", np.arange(3, dtype=np.int32), 3, SamplingParams())


def step(number: int, written: Cells, *, new: tuple[int, ...] = (), finished: tuple[int, ...] = ()) -> Step:
    begin = tuple(new_row(row) for row in new)
    return small_step(number, cells=written, finished_rows=np.asarray(finished, np.int32), new_rows=begin)


def blocks(t: MultiGroupBlockTable, group: int, row: int) -> list[int]:
    ids: list[int] = t[group].get_numpy_array()[row, : t[group].num_blocks_per_row[row]].tolist()
    return ids


def test_tables_apply_calls_to_every_group() -> None:
    t = tables()
    assert [t[g].max_num_blocks_per_req for g in range(len(t))] == [16, 8]
    t.add_row([[7, 3], [5]], 0)
    t.append_row([[4], []], 0)
    t.append_row([[8], [1]], 0)
    t.append_row([[9], [2]], 1)
    assert (blocks(t, 0, 0), blocks(t, 1, 0)) == ([7, 3, 4, 8], [5, 1])
    t.swap_row(0, 1)
    t.move_row(1, 3)
    assert (blocks(t, 0, 0), blocks(t, 1, 3), blocks(t, 0, 1)) == ([9], [5, 1], [])
    t.compute_slot_mapping([3, 3], [4, 9])
    t.commit_slot_mapping(3)
    assert [one.slot_mapping[:3].tolist() for one in t] == [[12, 17, -1], [44, 9, -1]]
    assert t.commit_block_table(4) > 0
    t.clear()
    assert not any(one.get_numpy_array().any() for one in t)


def test_tables_with_explicit_widths_use_them() -> None:
    t = MultiGroupBlockTable(2, 64, 32, False, "cpu", [4, 8], max_num_blocks=[3, 5])  # noqa: FBT003  # vLLM's positions
    assert [one.max_num_blocks_per_req for one in t] == [3, 5]
    with pytest.raises(ConfigError, match="1 entries in max_num_blocks for 2 groups"):
        MultiGroupBlockTable(2, 64, 32, False, "cpu", [4, 8], max_num_blocks=[3])  # noqa: FBT003  # same
    with pytest.raises(ConfigError, match="at least one group"):
        MultiGroupBlockTable(2, 64, 32, False, "cpu", [])  # noqa: FBT003  # same


def full(block_size: int, window: int = 0) -> KVCacheSpec:
    if window:
        return SlidingWindowSpec(
            block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=window
        )
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32")


def mamba(block_size: int, mode: str, spec: int = 0) -> KVCacheSpec:
    return MambaSpec(
        block_size=block_size, shapes=((4,),), dtypes=("float32",), cache_mode=mode, num_speculative_blocks=spec
    )


def cross(block_size: int) -> KVCacheSpec:
    return CrossAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32")


@pytest.mark.parametrize(
    ("cp", "spec", "widths"),
    [
        # attention bs 4, attention bs 16, window bs 4, Mamba align bs 16, none bs 16, cross of 20 tokens bs 4
        (1, 0, [16, 4, 16, 4, 1, 5]),
        (1, 5, [16, 6, 16, 9, 6, 5]),
        (2, 0, [8, 2, 8, 4, 1, 5]),
        (2, 2, [8, 3, 8, 6, 3, 5]),
    ],
)
def test_tables_row_widths_match_the_contract(cp: int, spec: int, widths: list[int]) -> None:
    specs = [full(4), full(16), full(4, 8), mamba(16, "align", spec), mamba(16, "none", spec), cross(4)]
    sizes = [one.block_size for one in specs]
    for dcp, pcp in ((cp, 1), (1, cp)):
        t = MultiGroupBlockTable(
            4,
            61,
            32,
            False,  # noqa: FBT003  # vLLM's positions
            "cpu",
            sizes,
            num_speculative_tokens=spec,
            specs=specs,
            max_encoder_tokens=20,
            dcp_world_size=dcp,
            pcp_world_size=pcp,
        )
        assert [one.max_num_blocks_per_req for one in t] == widths
        assert {one.num_rows for one in t} == {t.num_rows} == {4 * (1 + spec) if cp > 1 else 4}
        attention = MultiGroupBlockTable(
            4,
            61,
            32,
            False,  # noqa: FBT003  # vLLM's positions
            "cpu",
            sizes[:3],
            num_speculative_tokens=spec,
            dcp_world_size=dcp,
            pcp_world_size=pcp,
        )
        assert [one.max_num_blocks_per_req for one in attention] == widths[:3]


def test_tables_of_encoder_blocks_have_no_slots() -> None:
    specs = [full(4), mamba(16, "none"), cross(4)]
    t = MultiGroupBlockTable(
        2,
        64,
        32,
        False,  # noqa: FBT003  # vLLM's positions
        "cpu",
        [4, 16, 4],
        [2],
        cp_kv_cache_interleave_size=2,
        specs=specs,
        max_encoder_tokens=8,
        dcp_world_size=2,
        dcp_rank=1,
    )
    assert [one.block_size for one in t] == [2, 16, 2]  # a state is never split
    t.add_row([[7, 3], [9], [5, 6]], 0)
    t.compute_slot_mapping([0, 0, 0], [1, 2, 15])  # further than the state has columns
    t.commit_slot_mapping(3)
    assert [one.slot_mapping[:3].tolist() for one in t] == [[-1, 28, 15], [-1] * 3, [-1] * 3]
    t[2].compute_slot_mapping([0, 0], [1, 7])  # positions in the encoder's output, all of it on every rank
    assert t[2].slot_mapping_np[:2].tolist() == [21, 27]
    no_tokens = MultiGroupBlockTable(2, 64, 32, False, "cpu", [16], specs=specs[1:2])  # noqa: FBT003  # same
    no_tokens.compute_slot_mapping([0], [50])
    assert (no_tokens[0].slot_mapping_np == -1).all()


def test_tables_kernel_sizes_are_per_group_or_shared() -> None:
    def sizes(kernel: list[KernelSize] | None) -> list[tuple[int, int]]:
        t = MultiGroupBlockTable(2, 64, 32, False, "cpu", [32, 16], kernel)  # noqa: FBT003  # vLLM's positions
        return [(one.block_size, one.max_num_blocks_per_req) for one in t]

    assert sizes(None) == sizes([None]) == sizes([0]) == sizes([[0]]) == [(32, 2), (16, 4)]
    assert sizes([8]) == [(8, 8), (8, 8)]
    assert sizes([[64, 16, 8]]) == [(16, 4), (16, 4)]
    assert sizes([8, None]) == [(8, 8), (16, 4)]
    assert sizes([[0], [8, 16]]) == [(32, 2), (8, 8)]
    with pytest.raises(ConfigError, match="3 entries in kernel_block_sizes for 2 groups"):
        sizes([8, 8, 8])
    with pytest.raises(ConfigError, match="0 entries in kernel_block_sizes"):
        sizes([])
    with pytest.raises(ConfigError, match=r"none of the kernel block sizes \[32\] divides blocks of 16"):
        sizes([32])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"specs": [full(4)]}, "1 entries in specs for 2 groups"),
        ({"specs": [full(4), full(4)]}, "group 1: block size 8, but its spec has 4"),
        ({"num_blocks": [4]}, "1 entries in num_blocks for 2 groups"),
        ({"max_num_blocks": [4, 0]}, "max_num_blocks_per_req must be at least 1"),
        ({"dcp_world_size": 2, "dcp_rank": 2}, "dcp rank 2 of 2"),
        ({"pcp_world_size": 2, "cp_kv_cache_interleave_size": 3}, "does not divide"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_tables_with_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultiGroupBlockTable(2, 64, 32, False, "cpu", [4, 8], **arguments)  # noqa: FBT003  # vLLM's positions


def test_tables_check_block_ids_against_the_limit_of_their_group() -> None:
    t = MultiGroupBlockTable(2, 64, 32, False, "cpu", [4, 8], num_blocks=[100, 10])  # noqa: FBT003  # vLLM's positions
    t.apply(step(0, cells((0, 0, 0, 99), (1, 0, 0, 9)), new=(0,)))
    with pytest.raises(WorkerError, match=r"cells.block must lie in 0 \.\. 9 in group 1, got 10"):
        t.apply(step(1, cells((0, 0, 1, 5), (1, 0, 1, 10))))
    assert (blocks(t, 0, 0), blocks(t, 1, 0)) == ([99], [9])


def test_tables_split_memory_blocks_into_kernel_blocks() -> None:
    t = MultiGroupBlockTable(2, 64, 32, False, "cpu", [32], [16], num_blocks=8)  # noqa: FBT003  # vLLM's positions
    t.apply(step(0, cells((0, 1, 0, 3), (0, 1, 1, 7)), new=(1,)))
    assert blocks(t, 0, 1) == [6, 7, 14, 15]
    with pytest.raises(WorkerError, match=r"cells.column must lie in 0 \.\. 1 in group 0, got 2 for row 1"):
        t.apply(step(1, cells((0, 1, 2, 3))))


def test_tables_clear_a_row_for_a_new_request() -> None:
    """A window's hit sends its live columns alone; what lies before them must not be the last request's blocks."""
    t = tables(1)
    t.apply(step(0, cells((0, 0, 0, 11), (0, 0, 1, 12), (0, 0, 2, 13)), new=(0,)))
    t.commit_block_table(4)
    t.apply(step(1, cells((0, 0, 2, 21), (0, 0, 3, 22)), new=(0,), finished=(0,)))
    t.commit_block_table(4)
    assert blocks(t, 0, 0) == t[0].get_device_tensor()[0, :4].tolist() == [0, 0, 21, 22]


def test_tables_with_an_invalid_position_write_no_slot() -> None:
    t = MultiGroupBlockTable(2, 64, 32, False, "cpu", [4, 4], max_num_blocks=[4, 2])  # noqa: FBT003  # vLLM's positions
    t.add_row([[1, 2, 3], [4, 5]], 0)
    t.commit_block_table(2)
    with pytest.raises(WorkerError, match=r"positions must lie in 0 \.\. 7"):
        t.compute_slot_mapping([0, 0], [1, 8])
    for one in t:
        assert (one.slot_mapping_np == -1).all()
        assert (one.slot_mapping == -1).all()


def test_tables_clear_finished_rows_then_write_cells_in_order() -> None:
    t = tables()
    t.apply(step(0, cells((0, 0, 0, 11), (0, 0, 1, 12), (1, 0, 0, 13), (0, 1, 0, 14)), new=(0, 1)))
    assert (blocks(t, 0, 0), blocks(t, 1, 0), blocks(t, 0, 1)) == ([11, 12], [13], [14])
    # row 0 ends and begins in one Step; a cell written twice keeps the later id
    t.apply(step(1, cells((0, 0, 0, 21), (0, 0, 0, 22)), new=(0,), finished=(0, 1)))
    assert (blocks(t, 0, 0), blocks(t, 1, 0), blocks(t, 0, 1)) == ([22], [], [])
    # it may also begin without having been finished
    t.apply(step(2, cells((0, 0, 0, 31)), new=(0,)))
    t.apply(step(3, cells((0, 0, 1, 32)), new=(0,)))
    assert t[0].num_blocks_per_row.tolist() == [2, 0, 0, 0]
    t.apply(step(4, cells((0, 0, 0, 33)), new=(0,)))
    assert blocks(t, 0, 0) == [33]
    assert t.last_step_id == 4


def test_missed_or_repeated_step_is_rejected() -> None:
    t = tables()
    t.apply(step(0, cells((0, 0, 0, 11)), new=(0,)))
    for wrong in (step(2, cells((0, 0, 1, 12))), step(0, cells((0, 0, 1, 12)))):
        with pytest.raises(
            WorkerError, match=f"Step {wrong.id} follows Step {wrong.after}, but the last Step applied here is 0"
        ):
            t.apply(wrong)
    assert (blocks(t, 0, 0), t.last_step_id) == ([11], 0)


def test_step_id_after_a_failed_step_may_jump() -> None:
    t = tables()
    t.apply(step(0, cells((0, 0, 0, 11)), new=(0,)))
    t.apply(step(1, cells((0, 0, 1, 12))))  # its forward raised; step 2 was in flight and never came here
    t.apply(replace(step(3, cells((0, 0, 0, 13)), new=(0,), finished=(0,)), after=0))
    assert (blocks(t, 0, 0), t.last_step_id) == ([13], 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(step(1, cells()), schema_version=SCHEMA_VERSION + 1), "schema version"),
        (step(1, cells((0, 0, 1, 5), (2, 0, 0, 5))), "cells.group"),
        (step(1, cells((0, 0, 1, 5), (0, 4, 0, 5))), "cells.row"),
        (step(1, cells((0, 0, 1, 5), (1, 0, 8, 5))), "cells.column .* got 8 for row 0"),
        (step(1, cells((0, 0, 1, 5), (0, 0, -1, 5))), "cells.column .* got -1"),
        (step(1, cells((0, 0, 1, 5), (0, 0, 2, 100))), "cells.block"),
        (step(1, cells((0, 0, 1, 5), (0, 0, 2, -1))), "cells.block"),
        (step(1, cells((0, 0, 1, 5)), new=(4,)), "new_rows"),
        (step(1, cells((0, 0, 1, 5)), finished=(9,)), "finished_rows"),
        (replace(step(1, cells((0, 0, 1, 5))), rows=np.asarray([7], np.int32)), "rows must lie"),
    ],
)
def test_invalid_step_changes_no_table(wrong: Step, message: str) -> None:
    t = tables()
    t.apply(step(0, cells((0, 0, 0, 11), (1, 0, 0, 12)), new=(0,)))
    t.commit_block_table(4)
    with pytest.raises(WorkerError, match=message):
        t.apply(wrong)
    assert (blocks(t, 0, 0), blocks(t, 1, 0), t.last_step_id) == ([11], [12], 0)
    assert t.commit_block_table(4) == 0
    t.apply(step(1, cells((0, 0, 1, 5))))


def test_invalid_rows_of_one_group_change_no_group() -> None:
    t = tables()
    calls: list[Callable[[], None]] = [
        lambda: t.append_row([[1], [1] * 9], 0),
        lambda: t.add_row([[1], [100]], 0),
        lambda: t.append_row([[1], [-1]], 0),
        lambda: t.append_row([[1]], 0),
        lambda: t.move_row(0, 4),
    ]
    for call in calls:
        with pytest.raises(WorkerError):
            call()
        assert [one.num_blocks_per_row.tolist() for one in t] == [[0] * 4] * 2


def test_tables_of_a_plan_have_its_sizes() -> None:
    specs = [full(4, 8), mamba(16, "align"), cross(4)]
    config = natural_model_config(6, specs, [2, 1, 4], kernel_blocks=[2, 1, 1])
    t = MultiGroupBlockTable.of_config(
        config, max_num_reqs=3, max_model_len=61, max_num_batched_tokens=32, max_encoder_tokens=20
    )
    assert [one.block_size * one.blocks_per_kv_block for one in t] == [4, 16, 4]
    assert [one.block_size for one in t] == [2, 16, 4]
    assert [one.max_num_kv_blocks_per_req for one in t] == [16, 4, 5]
    assert [one.id_limit for one in t] == [12, 6, 24]
    assert {one.num_rows for one in t} == {3}
    assert t.token_groups == (0,)


ROWS = {2: [5, 3, 7], 0: [4, 6]}
"""The blocks of two rows in both groups of attention, 4 tokens each."""


def three_groups(dcp: int = 1, rank: int = 0, pcp: int = 1, interleave: int = 1) -> MultiGroupBlockTable:
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


def two_rows(number: int = 0, computed: tuple[int, int] = (7, 0), scheduled: tuple[int, int] = (3, 5)) -> Step:
    """Row 2 runs tokens 7, 8 and 9, row 0 its tokens 0 .. 4."""
    of_rows = [(g, row, column, block) for g in (0, 2) for row in ROWS for column, block in enumerate(ROWS[row])]
    return small_step(
        number,
        scheduled,
        rows=np.array([2, 0], np.int32),
        num_computed=np.array(computed, np.int32),
        cells=cells(*of_rows),
    )


def made(of: MultiGroupBlockTable) -> StepBatch:
    of.apply(two_rows())
    return step_batch(two_rows(), of)


def test_step_batch_has_position_and_slot_of_every_token() -> None:
    batch = made(three_groups())
    assert batch.positions.tolist() == [7, 8, 9, 0, 1, 2, 3, 4]
    assert list(batch.groups) == [0, 2]  # states have no slots
    for group in batch.groups.values():
        assert group.slots.tokens.tolist() == list(range(8))
        assert group.slots.blocks.tolist() == [3, 7, 7, 4, 4, 4, 4, 6]
        assert group.slots.offsets.tolist() == [3, 0, 1, 0, 1, 2, 3, 0]


def test_step_batch_rows_read_their_blocks_up_to_the_last_token() -> None:
    reads = made(three_groups()).groups[0].reads
    assert (reads.query_start_loc, reads.seq_lens) == ((0, 3, 8), (10, 5))
    assert reads.block_table[0].tolist() == ROWS[2]
    assert reads.block_table[1, :2].tolist() == ROWS[0]
    assert reads.block_table.shape == (2, 3)
    assert (reads.block_size, reads.num_blocks) == (4, 12)


def test_step_batch_of_a_rank_has_slots_of_its_own_tokens() -> None:
    first, second = (made(three_groups(2, rank)).groups[0] for rank in (0, 1))
    assert first.slots.tokens.tolist() == [1, 3, 5, 7]  # positions 8, 0, 2, 4
    assert second.slots.tokens.tolist() == [0, 2, 4, 6]
    assert [one.reads.share.rank for one in (first, second)] == [0, 1]


def test_step_batch_of_an_unapplied_step_is_rejected() -> None:
    with pytest.raises(WorkerError, match="row 2 has blocks for 0 tokens in group 0 and needs them for 10: apply"):
        step_batch(two_rows(), three_groups())


def test_step_batch_commits_the_tables() -> None:
    of = three_groups()
    made(of)
    assert torch.equal(of[0].get_device_tensor()[[2, 0], :2].cpu(), torch.tensor([[5, 3], [4, 6]], dtype=torch.int32))


MASKS = {0: AttentionMask(), 2: AttentionMask(window=6)}
STEPS = (((0, 0), (7, 2)), ((7, 2), (3, 3)), ((10, 5), (1, 1)))
"""Computed and scheduled tokens of both rows: two chunks each, and a token behind them."""


def found(dcp: int = 1, pcp: int = 1, interleave: int = 1, ranks: Sequence[int] | None = None) -> list[torch.Tensor]:
    """What the tokens of the last step attend to in both groups, put together from ``ranks``; None for all of them."""
    parts = []
    for rank in range(dcp * pcp) if ranks is None else ranks:
        of, draw = three_groups(dcp, rank, pcp, interleave), torch.Generator().manual_seed(3)
        pages = {group: KVPages(*torch.full((2, 12, 4, 1, 8), torch.nan)) for group in MASKS}
        mine = {}
        for number, (computed, scheduled) in enumerate(STEPS):
            of.apply(now := two_rows(number, computed, scheduled))
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
def test_attention_over_ranks_equals_attention_on_one_rank(dcp: int, pcp: int, interleave: int) -> None:
    torch.testing.assert_close(found(dcp, pcp, interleave), found(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [[0], [0, 0], [1, 1]])
def test_attention_without_one_rank_gives_another_result(ranks: list[int]) -> None:
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found(2, ranks=ranks), found(), rtol=1e-5, atol=1e-5)
