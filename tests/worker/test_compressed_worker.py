"""The worker's tables, copies and pages store compressed caches at the bytes at which FakeWorker stores them.

FakeWorker finds every place by the offsets and strides of the plan, in plain Python. Here, tables, slots, copies and
views of the same Steps lead to the same bytes, and reads through them find what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from compressed_runs import LAYOUTS, MAX_MODEL_LEN, MODELS, play_all
from how_much import how_many
from hybridkv.errors import WorkerError
from hybridkv.planner import KVCacheConfig, KVCacheTensor
from hybridkv.specs import AttentionSpec
from hybridkv.step import Step, StepResult
from hybridkv.testing import DigestModel, FakeWorker
from hybridkv.testing.fake_worker import Layer, WorkerRow
from hybridkv.worker import (
    BlockCopier,
    MultiGroupBlockTable,
    PagedStorage,
    PagePart,
    RingBatch,
    StepBatch,
    WriteSlots,
    step_batch,
    write_states,
)
from hybridkv.worker.slots import RingSlots, StateSlots

pytestmark = pytest.mark.usefixtures("quiet")


class BothWorkers(FakeWorker):
    """Runs each Step in both workers and compares them."""

    def __init__(self, config: KVCacheConfig, model: DigestModel) -> None:
        super().__init__(config, model)
        named = [
            (name, spec)
            for group in config.groups
            for name, spec in zip(group.layer_names, group.layer_specs, strict=True)
        ]
        # every item is bytes, whatever its elements are
        items = {name: spec.num_states if isinstance(spec, AttentionSpec) else 1 for name, spec in named}
        layout = {name: (PagePart((spec.content_bytes // items[name],), torch.uint8),) for name, spec in named}
        self.pages = PagedStorage(config, layout)
        self.pages.arena.copy_(torch.frombuffer(self.storage, dtype=torch.uint8))
        self.copier = BlockCopier(self.pages)
        self.tables = MultiGroupBlockTable.of_config(
            config, max_num_reqs=8, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64
        )

    def execute(self, step: Step) -> StepResult:
        self.tables.apply(step)
        self.copier.execute_before(step)
        batch = step_batch(step, self.tables)
        self._compare_raw_keys(step, batch)
        result = super().execute(step)
        for layer in self._layers:
            if not layer.recurrent:
                self._write_pages(step, batch, layer)
        for i, row in enumerate(step.rows.tolist()):
            for layer in self._layers:
                if not layer.recurrent:
                    self._compare_row(step, batch, layer, i, self._live(row))
        return result

    def _slots(self, batch: StepBatch, layer: Layer) -> tuple[WriteSlots, int]:
        """Where the items of a step go, and the most items of a token."""
        if layer.ring:
            return batch.rings[layer.group].slots, 1
        if not layer.is_compressed:
            return batch.groups[layer.group].slots, 1
        rate = layer.rate if layer.rate.denominator > 1 else layer.rate.numerator
        return batch.compressed[layer.group, rate].slots, -(-layer.rate.denominator // layer.rate.numerator)

    def _write_pages(self, step: Step, batch: StepBatch, layer: Layer) -> None:
        slots, most = self._slots(batch, layer)
        rows = torch.zeros(step.num_tokens, most, layer.item_bytes, dtype=torch.uint8)
        starts = np.cumsum(step.num_scheduled) - step.num_scheduled
        for start, computed, count, row in zip(
            starts.tolist(), step.num_computed.tolist(), step.num_scheduled.tolist(), step.rows.tolist(), strict=True
        ):
            for position in range(computed, computed + count):
                items = [position] if layer.ring else range(layer.ended(position), layer.ended(position + 1))
                for place, item in enumerate(items):
                    if item in layer.written(computed, computed + count):
                        rows[start + position - computed, place] = self._item(layer, self._live(row), item)
        (view,) = self.pages.views[layer.name]
        if layer.ring:
            batch.rings[layer.group].write(view, rows[:, 0])
        else:
            write_states(slots, view, rows.reshape(-1, layer.item_bytes))

    def _item(self, layer: Layer, row: WorkerRow, item: int) -> torch.Tensor:
        """The bytes at which FakeWorker keeps an item."""
        at = self._slot(layer, row, item)
        return torch.frombuffer(self.storage, dtype=torch.uint8)[at : at + layer.item_bytes]

    def _compare_raw_keys(self, step: Step, batch: StepBatch) -> None:
        """Before the step writes, rings have the raw keys that FakeWorker's have, of the states that are begun."""
        for layer in self._layers:
            for i, row in enumerate(step.rows.tolist()) if layer.ring else ():
                end = int(step.num_computed[i])
                (view,) = self.pages.views[layer.name]
                begun = [int(one.ended(end) * one.rate) for one in self._layers if not one.recurrent]
                kept = range(min(begun), end)
                found = batch.rings[layer.group].keys_of(i, kept.start, kept.stop, view)
                known = row in self._rows and not any(new.row == row for new in step.new_rows)
                for place, position in enumerate(kept if known else ()):
                    assert found[place].equal(self._item(layer, self._live(row), position))

    def _compare_row(self, step: Step, batch: StepBatch, layer: Layer, i: int, row: WorkerRow) -> None:
        computed = int(step.num_computed[i])
        end = computed + int(step.num_scheduled[i])
        first = layer.ended(layer.first_read(computed))
        items = layer.written(computed, end) if layer.ring else range(first, layer.ended(end))
        (view,) = self.pages.views[layer.name]
        if layer.is_compressed:
            rate = layer.rate if layer.rate.denominator > 1 else layer.rate.numerator
            found = batch.compressed[layer.group, rate].states_of(i, view)
            assert len(found) == layer.ended(end)
        elif layer.ring:
            found = batch.rings[layer.group].keys_of(i, items.start, items.stop, view)
        else:
            found = view[batch.groups[layer.group].reads.block_table[i]].flatten(0, 1)
        for item in items:
            expected, at = self._item(layer, row, item), self._slot(layer, row, item)
            assert found[item - items.start * layer.ring].equal(expected), f"{layer.name}: {item} reads another item"
            assert self.pages.arena[at : at + layer.item_bytes].equal(expected), f"{layer.name}: {item} is elsewhere"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_worker_stores_compressed_caches_where_the_plan_says(model: str, layout: str) -> None:
    assert play_all(layout, model, how_many(10), BothWorkers)["drafts accepted"] > 0


# -- faults of the worker


def _rings_off_by_one_group(patch: pytest.MonkeyPatch) -> None:
    compute = RingSlots.compute
    patch.setattr(RingSlots, "compute", lambda self, table, rows, at: compute(self, table, rows, at + 4))


def _states_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    compute = StateSlots.compute
    patch.setattr(StateSlots, "compute", lambda self, table, rows, at: compute(self, table, rows, at + 1))


def _neighbouring_slots(patch: pytest.MonkeyPatch) -> None:
    ended = StateSlots.ended
    patch.setattr(StateSlots, "ended", lambda self, tokens: ended(self, tokens) ^ 1)


def _pages_of_the_next_layer(patch: pytest.MonkeyPatch) -> None:
    views = PagedStorage._views

    def swapped(self: PagedStorage, name: str, tensor: KVCacheTensor, *more: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        other = name[:-1] + ("1" if name.endswith("0") else "0")
        tensors = {layer: one for one in self.config.tensors for layer in one.shared_by}
        return views(self, name, tensors.get(other, tensor), *more)

    patch.setattr(PagedStorage, "_views", swapped)


def _stale_rings(patch: pytest.MonkeyPatch) -> None:
    before = BlockCopier.execute_before

    def without(self: BlockCopier, step: Step) -> None:
        before(self, replace(step, copies=tuple(one for one in step.copies if one.group != 1)))

    patch.setattr(BlockCopier, "execute_before", without)


def _kept_rings_lack_earlier_tokens(patch: pytest.MonkeyPatch) -> None:
    write = RingBatch.write
    patch.setattr(
        RingBatch, "write", lambda self, pages, keys: write(replace(self, moved=self.moved[:, :0]), pages, keys)
    )


def _kept_rings_lack_tokens_of_the_step(patch: pytest.MonkeyPatch) -> None:
    write = RingBatch.write
    patch.setattr(
        RingBatch, "write", lambda self, pages, keys: write(replace(self, kept=self.kept[:, :0]), pages, keys)
    )


@pytest.mark.parametrize(
    ("fault", "model", "layout"),
    [
        *((_rings_off_by_one_group, "ring", layout) for layout in LAYOUTS),
        *((_states_of_the_token_before, "rates and indexer", layout) for layout in LAYOUTS),
        *((_neighbouring_slots, "rates and indexer", layout) for layout in LAYOUTS),
        *((_pages_of_the_next_layer, "rates and indexer", layout) for layout in LAYOUTS),
        (_stale_rings, "ring", "natural"),
        (_kept_rings_lack_earlier_tokens, "sums", "natural"),
        (_kept_rings_lack_tokens_of_the_step, "ring", "natural"),
        (_stale_rings, "rings of several rates", "kernel blocks"),
    ],
)
def test_faults_of_the_worker_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None], model: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, WorkerError)):
        play_all(layout, model, 25, BothWorkers)
