"""States in columns: what is refused. Followed Step by Step: test_state_loop.py; in a model: test_bare_engine.py."""

import numpy as np
import pytest
import torch
from bare_engine import DRAFTS, Hybrid

from hybridkv import plan
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
