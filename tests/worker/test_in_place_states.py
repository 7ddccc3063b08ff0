"""States in columns, followed Step by Step. What they are worth in a model: tests/worker/test_bare_engine.py."""

import numpy as np
import pytest
import torch
from bare_engine import DRAFTS, Hybrid

from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, StepResult, plan
from hybridkv.errors import ConfigError, WorkerError
from hybridkv.models import Layer, Model
from hybridkv.planner import KVCacheConfig
from hybridkv.specs import FullAttentionSpec
from hybridkv.step import Cells, Csr, Step
from hybridkv.worker import InPlaceStates, MultiGroupBlockTable, PagedStorage, StateCopier, StateCopies


def planned(layout: str = "reference", placement: str | None = None) -> KVCacheConfig:
    return plan(Hybrid().described(), "1MiB", max_model_len=60, layout=layout, placement=placement).config


def states_of(config: KVCacheConfig) -> InPlaceStates:
    tables = MultiGroupBlockTable.of_config(config, max_num_reqs=2, max_model_len=60, max_num_batched_tokens=64)
    return InPlaceStates(PagedStorage(config), tables, DRAFTS)


@pytest.mark.parametrize(("layout", "placement"), [("natural", None), ("reference", "none")])
def test_states_without_columns_are_refused(layout: str, placement: str | None) -> None:
    with pytest.raises(ConfigError, match="no states in columns here: plan with layout='reference'"):
        states_of(planned(layout, placement))


def test_a_model_without_states_is_refused() -> None:
    layer = Layer("0", FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32"), 0)
    config = plan(Model("a", "a", (layer,), 60, 9, "float32", 1, 1, 4), "1MiB", layout="reference").config
    with pytest.raises(ConfigError, match="no states in columns here"):
        states_of(config)


def test_blocks_are_those_of_the_columns_from_the_state_on() -> None:
    """A prompt of 20 tokens in blocks of 16, then two steps of one token and two drafts, of which two are accepted."""
    made = plan(Hybrid().described(), "1MiB", max_model_len=60, layout="reference")
    storage = PagedStorage(made.config)
    tables = MultiGroupBlockTable.of_config(made.config, max_num_reqs=2, max_model_len=60, max_num_batched_tokens=64)
    states = InPlaceStates(storage, tables, DRAFTS)
    manager = KVCacheManager(made)
    scheduler = Scheduler(manager, SchedulerLimits(max_running=2, max_batched_tokens=64, num_speculative_tokens=DRAFTS))
    scheduler.add(Request("r", list(range(20)), SamplingParams(max_tokens=20), hasher=manager.hasher))
    group = next(g for g, one in enumerate(made.config.groups) if "0" in one.layer_names)
    biases, columns = [], []
    for drafts in ([], [], [7, 7], [7, 7], []):
        scheduler.propose({"r": drafts})
        step = scheduler.schedule()
        tables.apply(step)
        left = states.before(step)
        assert not left.copies
        blocks, bias = states.blocks(step, group)
        row = tables[group].get_numpy_array()[step.rows[0]]
        columns.append((int(step.num_computed[0] + step.num_scheduled[0]) - 1) // 16)
        biases.append(bias.tolist())
        held = tables[group].num_blocks_per_row[step.rows[0]]
        assert blocks[0].tolist() == [int(row[c]) if c < held else 0 for c in range(columns[-1], columns[-1] + 4)]
        storage.views["0"][1][blocks[0, 0]] = len(columns)
        count = min(len(step.drafts[0]), 1) + int(step.samples[0])
        states.after(step, [max(count, 1)])
        accepted = np.array([count], np.int32) if len(step.drafts.values) else None
        scheduler.update(StepResult(step.id, Csr.from_lists([[7] * count]), accepted))
    assert columns == [0, 1, 1, 1, 1]
    assert biases == [[0], [0], [0], [1], [1]]


def test_behind_a_row_there_are_null_blocks() -> None:
    config = planned()
    storage = PagedStorage(config)
    tables = MultiGroupBlockTable.of_config(config, max_num_reqs=2, max_model_len=60, max_num_batched_tokens=64)
    states = InPlaceStates(storage, tables, DRAFTS)
    group = next(g for g, one in enumerate(config.groups) if "0" in one.layer_names)
    tables[group].add_row([5, 6, 7, 8, 9], 1)
    tables[group].add_row([3, 4], 1)  # whose columns behind hold old ids
    none = np.empty(0, np.int32)
    step = Step(
        id=0,
        after=-1,
        rows=np.array([1], np.int32),
        num_computed=np.array([16], np.int32),
        num_scheduled=np.array([2], np.int32),
        samples=np.array([False]),
        token_ids=Csr.from_lists([[1, 2]]),
        drafts=Csr.empty(1),
        cells=Cells.empty(),
        finished_rows=none,
    )
    blocks, bias = states.blocks(step, group)
    assert (blocks.tolist(), bias.tolist()) == ([[4, 0, 0, 0]], [0])


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_a_copier_of_a_group_copies_the_states_of_its_layers(layout: str) -> None:
    config = planned(layout)
    storage = PagedStorage(config)
    group, attention = (
        next(g for g, one in enumerate(config.groups) if layer in one.layer_names) for layer in ("0", "3")
    )
    copier, first = StateCopier.of_group(storage, group), config.null_blocks_of(group)
    for view in storage.views["0"]:
        view[first] = torch.arange(view[first].numel()).view_as(view[first])
    source, destination, bias = np.array([first]), np.array([first + 2]), np.array([1])
    copier.copy(StateCopies(source, source, destination, bias))
    windows, states = storage.views["0"]
    assert torch.equal(windows[first + 2, :-1], windows[first, 1:])  # rows are columns: columns_axis 0
    assert torch.equal(states[first + 2], states[first])
    with pytest.raises(WorkerError, match="lower ones are null"):
        copier.copy(StateCopies(source - 1, source, destination, bias))
    with pytest.raises(ConfigError, match="keeps no recurrent states: name a group of states"):
        StateCopier.of_group(storage, attention)
