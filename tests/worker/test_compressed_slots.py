"""Slots of compressed states and rings: token by token, and the same states read back through a Step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import ConfigError, UnsupportedModelError, WorkerError
from hybridkv.specs import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from hybridkv.step import Cells, Step
from hybridkv.testing.configs import rate_spec, ring_spec
from hybridkv.worker import CompressedBatch, MultiGroupBlockTable, StepBatch, step_batch, write_states
from hybridkv.worker.slots import RingSlots, StateSlots
from small_steps import small_step

CPU: dict[str, Any] = {"pin_memory": False, "device": torch.device("cpu")}


def tables_of(tokens: int, step_tokens: int, specs: Sequence[KVCacheSpec], **options: object) -> MultiGroupBlockTable:
    """Of three rows. tokens: of the longest request. step_tokens: of the largest step."""
    sizes = [spec.block_size for spec in specs]
    return MultiGroupBlockTable(
        3,
        tokens,
        step_tokens,
        pin_memory=False,
        device="cpu",
        block_sizes=sizes,
        specs=specs,
        **options,  # type: ignore[arg-type]
    )


def text(slots: torch.Tensor | np.ndarray[Any, Any]) -> str:
    return " ".join("." if slot < 0 else str(slot) for slot in slots.tolist())


# -- the measured lines


@pytest.mark.parametrize(
    ("rate", "block_size", "expected"),
    [
        (4, 8, ". . . 14 . . . 15 . . . 6"),
        (Fraction(1, 2), 4, "56 57 58 59 60 61 62 63 24 25"),
        (Fraction(3, 2), 6, ". 28 29 . 30 31 . 12 13"),
        (Fraction(2, 3), 4, "42 . 43 44 45 . 46 47 18 . 19 20"),
    ],
)
def test_slots_of_states_match_the_contract(rate: int | Fraction, block_size: int, expected: str) -> None:
    of = StateSlots(rate, block_size, 2, 16, **CPU)
    tokens = len(expected.split()) // of.most
    of.compute(np.array([9, 9, 7, 3], np.int32), np.ones(tokens, np.int64), np.arange(tokens))
    of.slots.commit(tokens * of.most)
    assert text(of.slots.device) == " ".join([expected, *["."] * (16 * of.most - tokens * of.most)])


def test_slots_of_a_ring_match_the_contract() -> None:
    of = RingSlots(4, 0, 3, 16, **CPU)
    rows, positions = np.array([1] * 6 + [2] * 3), np.array([2, 3, 4, 5, 6, 7, 0, 1, 2])
    of.compute(np.array([9, 7, 5], np.int32), rows, positions)
    of.slots.commit(9)
    assert text(of.slots.device[:10]) == ". . 28 29 30 31 20 21 22 ."


# -- all rates, token by token


@given(data=st.data())
def test_slots_of_states_match_a_loop(data: st.DataObject) -> None:
    rate = Fraction(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4)))
    kernel_states = data.draw(st.integers(1, 4)) * rate.denominator
    kernel, parts = int(kernel_states * rate), data.draw(st.integers(1, 3))
    ids = data.draw(st.lists(st.lists(st.integers(1, 50), min_size=3, max_size=3), min_size=1, max_size=3))
    specs = [rate_spec(kernel * parts, rate)]
    tables = tables_of(kernel * parts * 3, 64, specs, kernel_block_sizes=[kernel])
    for row, blocks in enumerate(ids):
        tables.add_row([blocks], row)
    place = st.tuples(st.integers(0, len(ids) - 1), st.integers(0, kernel * parts * 3 - 1))
    tokens = data.draw(st.lists(place, max_size=20))
    tables.compute_slot_mapping([0] * 30, [0] * 30)  # more than follow: their slots must be gone
    tables.commit_slot_mapping(30)
    tables.compute_slot_mapping([row for row, _ in tokens], [position for _, position in tokens])
    if rate == 1:
        assert not tables.state_slots
        return
    (of,) = tables.state_slots.values()
    expected = []
    for row, position in tokens:
        # memory blocks whole, as they were before they were split: the states of a block have neighbouring slots
        ends = [s for s in range(1000) if position < Fraction(s + 1) * rate <= position + 1]
        per = kernel_states * parts
        slots = [ids[row][state // per] * per + state % per for state in ends]
        expected += slots + [-1] * (-(-rate.denominator // rate.numerator) - len(slots))
    tables.commit_slot_mapping(len(tokens))
    for found in (of.slots.host, of.slots.device):
        assert found.tolist() == expected + [-1] * (64 * of.most - len(expected))


@given(data=st.data())
def test_slots_of_rings_hold_the_last_tokens(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 6))
    of, blocks = RingSlots(capacity, 0, 4, 40, **CPU), np.array([3, 9, 5, 7], np.int32)
    held = dict[int, tuple[int, int]]()
    ends = dict.fromkeys(range(4), 0)
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.lists(st.integers(0, 3), unique=True, min_size=1))
        tokens = [(row, ends[row] + i) for row in rows for i in range(data.draw(st.integers(1, 9)))]
        for row, position in tokens:
            ends[row] = position + 1
        of.compute(blocks, np.array([row for row, _ in tokens]), np.array([position for _, position in tokens]))
        slots = of.slots.host[: len(tokens)].tolist()
        written = [slot for slot in slots if slot >= 0]
        assert len(set(written)) == len(written)  # order does not matter to a kernel
        held |= {slot: token for slot, token in zip(slots, tokens, strict=True) if slot >= 0}
    for row, end in ends.items():
        for position in range(max(0, end - capacity), end):
            assert held[int(blocks[row]) * capacity + position % capacity] == (row, position)


# -- Steps


def three_kinds() -> MultiGroupBlockTable:
    """Layers of two rates and of tokens in one group, as the reference layout has them, and a ring."""
    layers = (("plain", rate_spec(8, 1)), ("four", rate_spec(8, 4)), ("two", rate_spec(8, 2)))
    specs: list[KVCacheSpec] = [UniformTypeKVCacheSpecs(block_size=8, layers=layers), ring_spec(5)]
    return tables_of(40, 32, specs, num_blocks=12)


def run(number: int, computed: tuple[int, int], scheduled: tuple[int, int]) -> Step:
    """Rows 2 and 0 run tokens behind their computed ones."""
    of = [(0, 2, [5, 3, 7]), (0, 0, [4, 6]), (1, 2, [2]), (1, 0, [8])]
    listed = np.array([(g, row, i, block) for g, row, ids in of for i, block in enumerate(ids)], np.int32).T
    return small_step(
        number,
        scheduled,
        rows=np.array([2, 0], np.int32),
        num_computed=np.array(computed, np.int32),
        cells=Cells(*listed),
    )


def applied(tables: MultiGroupBlockTable, step: Step) -> StepBatch:
    tables.apply(step)
    return step_batch(step, tables)


def test_step_batch_of_compressed_caches_has_states_and_rings() -> None:
    batch = applied(three_kinds(), run(0, (6, 0), (5, 3)))
    assert list(batch.groups) == [0]
    assert batch.groups[0].slots.tokens.tolist() == list(range(8))
    assert list(batch.compressed) == [(0, 2), (0, 4)]
    two, four = batch.compressed.values()
    assert (two.slots.tokens.tolist(), two.slots.blocks.tolist()) == ([1, 3, 6], [5, 3, 4])
    assert two.slots.offsets.tolist() == [3, 0, 0]
    assert (four.slots.tokens.tolist(), four.slots.blocks.tolist(), four.slots.offsets.tolist()) == ([1], [5], [1])
    assert (two.num_states, four.num_states) == ((5, 1), (2, 0))
    assert two.ended.tolist() == [3, 4, 4, 5, 5, 0, 1, 1]
    ring = batch.rings[1]
    assert (ring.blocks.tolist(), ring.capacity) == ([2, 8], 5)
    assert (ring.slots.blocks.tolist(), ring.slots.offsets.tolist()) == ([2] * 5 + [8] * 3, [1, 2, 3, 4, 0, 0, 1, 2])


def test_steps_write_and_read_states_and_raw_keys() -> None:
    tables, pages = three_kinds(), {2: torch.zeros(12, 4, 1), 4: torch.zeros(12, 2, 1)}
    ring_pages, ends = torch.zeros(12, 5, 1), (0, 0)
    for number, scheduled in enumerate(((7, 1), (1, 1), (11, 7), (1, 1), (1, 4))):
        batch = applied(tables, run(number, ends, scheduled))
        tokens = [
            (row, end + i) for row, (end, many) in enumerate(zip(ends, scheduled, strict=True)) for i in range(many)
        ]
        for (_, rate), of in batch.compressed.items():
            # the sum of a state's raw keys; the raw key of a token is 1000 * row + position + 1
            sums = torch.zeros(len(tokens), 1)
            for i, (row, position) in enumerate(tokens):
                first = position // int(rate) * int(rate)
                mine = [1000.0 * row + one + 1 for one in range(max(first, ends[row]), position + 1)]
                before = batch.rings[1].keys_of(row, min(first, ends[row]), ends[row], ring_pages)
                sums[i] = sum(mine) + before[:, 0].sum() * (first < ends[row])
            write_states(of.slots, pages[int(rate)], sums)
        ends = tuple(end + many for end, many in zip(ends, scheduled, strict=True))  # type: ignore[assignment]  # two
        raw = torch.tensor([[1000.0 * row + position + 1] for row, position in tokens])
        batch.rings[1].write(ring_pages, raw)
        for (_, rate), of in batch.compressed.items():
            check_states(of, pages[int(rate)], int(rate), ends)


def check_states(of: CompressedBatch, pages: torch.Tensor, rate: int, ends: tuple[int, int]) -> None:
    for row, end in enumerate(ends):
        found = of.states_of(row, pages)[:, 0].tolist()
        keys = [1000.0 * row + position + 1 for position in range(end)]
        assert found == [sum(keys[first : first + rate]) for first in range(0, end // rate * rate, rate)]


def test_rings_are_kept_with_raw_keys_of_ring_and_step() -> None:
    specs: list[KVCacheSpec] = [rate_spec(8, 4), ring_spec(6, 4)]
    tables, pages = tables_of(40, 32, specs, num_blocks=12), torch.full((12, 6, 1), -1.0)
    for number, (computed, scheduled) in enumerate((((0, 0), (6, 9)), ((6, 9), (5, 1)))):
        step = run(number, computed, scheduled)
        # row 2 after 7 tokens and at its end, after 11; row 0 after 10
        writes = [(0, 1, 7, 9), (0, 1, 11, 10), (1, 1, 10, 11)] if number else []
        step = replace(step, state_writes=np.array(writes, np.int32).reshape(-1, 4))
        of_rows = [
            (end + i, 100 * row)
            for row, (end, many) in enumerate(zip(computed, scheduled, strict=True))
            for i in range(many)
        ]
        applied(tables, step).rings[1].write(pages, torch.tensor([[float(sum(one))] for one in of_rows]))
    assert pages[9, :, 0].tolist() == [6, -1, -1, -1, 4, 5]
    assert pages[10, :, 0].tolist() == [-1, -1, 8, 9, 10, -1]
    assert pages[11, :, 0].tolist() == [-1, -1, 108, 109, -1, -1]
    assert pages[8, :, 0].tolist() == [106, 107, 108, 109, 104, 105]
    assert pages[2, :, 0].tolist() == [6, 7, 8, 9, 10, 5]


def test_ring_of_an_unknown_group_is_not_kept() -> None:
    step = replace(run(0, (0, 0), (5, 3)), state_writes=np.array([(0, 1, 3, 9)], np.int32))
    with pytest.raises(WorkerError, match="keeps a ring after 3 tokens, but the groups of group 1 are unknown"):
        applied(three_kinds(), step)


def test_ring_without_the_asked_tokens_is_rejected() -> None:
    ring = applied(three_kinds(), run(0, (0, 0), (5, 3))).rings[1]
    with pytest.raises(WorkerError, match=r"tokens 2 .. 7 are not in a ring of 5 tokens: enlarge its block_size"):
        ring.keys_of(0, 2, 8, torch.zeros(12, 5, 1))


def test_step_batch_of_a_row_without_a_ring_is_rejected() -> None:
    tables, step = three_kinds(), run(0, (0, 0), (5, 3))
    tables.apply(step)
    tables[1].clear_rows([0])
    with pytest.raises(WorkerError, match="row 0 has no block for its ring: apply"):
        step_batch(step, tables)


def test_ring_is_not_split_into_kernel_blocks() -> None:
    tables = tables_of(16, 8, [rate_spec(8, 2), ring_spec(8)], kernel_block_sizes=[4])
    assert [table.block_size for table in tables] == [4, 8]
    assert tables.ring_slots[1].capacity == 8


# -- what cannot be


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ([rate_spec(8, 4)], {"dcp_world_size": 2}, r"block tables does not support .*tokens_per_state"),
        ([rate_spec(8, 1), ring_spec(4)], {"pcp_world_size": 2}, r"block tables does not support .*CircularBuffer"),
        (
            [CrossAttentionSpec(block_size=8, num_kv_heads=1, head_size=4, dtype="float32", tokens_per_state=2)],
            {},
            r"CrossAttentionSpec: the worker's block tables does not support .*tokens_per_state",
        ),
        (
            [FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=4, dtype="float32", dcp_sharded=False)],
            {"dcp_world_size": 2},
            r"block tables does not support .*dcp_sharded",
        ),
        ([rate_spec(8, 4)], {"kernel_block_sizes": [2]}, "blocks of 2 tokens do not hold whole states of 4 tokens"),
        ([ring_spec(4)], {}, "rings hold no tokens of their own"),
    ],
)
def test_tables_of_compressed_caches_that_cannot_be_are_rejected(
    specs: list[KVCacheSpec], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnsupportedModelError, ConfigError), match=message):
        tables_of(16, 8, specs, **options)


def test_slots_beyond_the_tokens_of_a_step_are_not_sent() -> None:
    tables = tables_of(16, 8, [rate_spec(8, Fraction(1, 2))])
    with pytest.raises(WorkerError, match=r"num_tokens must lie in 0 .. 16 slots, got 18"):
        tables.commit_slot_mapping(9)
