"""Every state, indexer's key and raw key that a step reads is the row's own: the worker knows Steps alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compressed_runs import LAYOUTS, MODELS, play_all
from how_much import how_many
from hybridkv.step import Copy
from hybridkv.testing import ContentError, FakeWorker
from hybridkv.testing.fake_worker import Layer, WorkerRow

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_compressed_content_of_every_step_is_right(model: str, layout: str) -> None:
    counts = play_all(layout, model, how_many(30))
    assert counts["drafts accepted"] > 0


def test_compressed_content_runs_meet_every_event() -> None:
    counts = play_all("natural", "ring", 12)
    assert (
        min(
            counts[name]
            for name in (
                "hits",
                "preemptions",
                "forks",
                "failures",
                "copies",
                "rings kept",
                "rings hit",
                "drafts accepted",
            )
        )
        > 0
    )


# -- controls: the worker must see what is wrong


class RingOffByOneGroup(FakeWorker):
    """Writes raw keys one group of tokens further."""

    writing = False

    def _write(self, row: WorkerRow, computed: int, end: int) -> None:
        self._read_rings(row, computed, end)
        read, self._read_rings = self._read_rings, lambda *_: None  # type: ignore[method-assign]  # read already
        self.writing = True
        super()._write(row, computed, end)
        self.writing, self._read_rings = False, read  # type: ignore[method-assign]

    def _slot(self, layer: Layer, row: WorkerRow, item: int) -> int:
        return super()._slot(layer, row, item + 4 * (layer.ring and self.writing))


class StateOfAnotherToken(FakeWorker):
    """Compresses a group of tokens that begins one token too early."""

    def _write(self, row: WorkerRow, computed: int, end: int) -> None:
        super()._write(row, computed, end)
        for layer in self._layers:
            for item in layer.written(computed, end) if layer.is_compressed else ():
                before = self._expected(layer, row, end)[max(layer.last_token(item) - 1, 0)]
                super()._put(self._slot(layer, row, item), self._of_item(layer, item, before))


class IndexerPageOfAnotherLayer(FakeWorker):
    """Writes the keys of a layer's indexer into the page of the next layer of the same group."""

    def _write(self, row: WorkerRow, computed: int, end: int) -> None:
        kept = self._layers
        self._layers = tuple(replace(one, offset=self._next_page(one)) for one in kept)
        super()._write(row, computed, end)
        self._layers = kept

    def _next_page(self, layer: Layer) -> int:
        pages = [one.offset for one in self._layers if one.group == layer.group]
        return pages[(pages.index(layer.offset) + 1) % len(pages)] if layer.is_compressed else layer.offset


class NeighbouringState(FakeWorker):
    """Writes a state into the slot of its neighbour."""

    def _write(self, row: WorkerRow, computed: int, end: int) -> None:
        super()._write(row, computed, end)
        for layer in self._layers:
            for item in layer.written(computed, end) if layer.is_compressed else ():
                self._put(self._slot(layer, row, item ^ 1), self._expected_item(layer, row, item))


class StaleRing(FakeWorker):
    """Begins with the ring that its block's former owner left."""

    def _copy_one(self, copy: Copy) -> None:
        if not any(layer.ring for layer in self._layers if layer.group == copy.group):
            super()._copy_one(copy)


class KeepsRingsTooEarly(FakeWorker):
    """Keeps a ring one token before its position."""

    def _write_state(self, row: WorkerRow, group: int, position: int, block: int) -> None:
        rings = any(layer.ring for layer in self._layers if layer.group == group)
        super()._write_state(row, group, position - rings, block)


@pytest.mark.parametrize(
    ("kind", "layout", "model"),
    [
        *((RingOffByOneGroup, layout, "ring") for layout in LAYOUTS),
        *((StateOfAnotherToken, layout, "rates and indexer") for layout in LAYOUTS),
        *((IndexerPageOfAnotherLayer, layout, "rates and indexer") for layout in LAYOUTS),
        *((NeighbouringState, layout, "rates and indexer") for layout in LAYOUTS),
        (NeighbouringState, "natural", "compressed window"),
        (StaleRing, "natural", "ring"),
        (KeepsRingsTooEarly, "natural", "ring"),
        (KeepsRingsTooEarly, "kernel blocks", "rings of several rates"),
        (StaleRing, "kernel blocks", "rings of several rates"),
    ],
)
def test_compressed_content_runs_detect_a_faulty_worker(kind: type[FakeWorker], layout: str, model: str) -> None:
    with pytest.raises(ContentError, match=r"reads a wrong (state|raw key)"):
        play_all(layout, model, 25, kind)
