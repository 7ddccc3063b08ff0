"""Every state, indexer's key and raw key that a step reads is the row's own: schedulers over compressed caches.

Plans are small: the reference layout pads pages, or packs them side by side; the natural layout has slabs and kernel
blocks. The worker knows Steps alone. Requests share prefixes, fork, draft, are aborted and preempted, and steps fail.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from random import Random

import pytest

from how_much import how_many
from hybridkv.cache import KVCacheManager
from hybridkv.errors import CapacityError
from hybridkv.planner import KVCacheConfig
from hybridkv.planner.packed import packed_block_bytes, packed_config, packed_groups
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Finished, Scheduler, SchedulerLimits
from hybridkv.spec_fields import SparseCacheRole
from hybridkv.specs import AttentionSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from hybridkv.step import Copy, Step
from hybridkv.testing import ContentError, FakeWorker, digest_model
from hybridkv.testing.configs import (
    full_spec,
    model_config,
    natural_model_config,
    rate_spec,
    ring_spec,
    state_spec,
    window_spec,
)
from hybridkv.testing.fake_worker import Layer, WorkerRow

pytestmark = pytest.mark.usefixtures("quiet")

DRAFTS = 2


def indexer(block_size: int, rate: int) -> MLAAttentionSpec:
    return replace(rate_spec(block_size, rate), cache_role=SparseCacheRole.INDEXER, is_index_group_leader=True)


PACKED = MLAAttentionSpec(
    block_size=16, head_size=8, dtype="uint8", tokens_per_state=8, state_content_bytes=13, alignment=16
)
LATENT_WINDOW = SlidingWindowMLASpec(
    block_size=4, head_size=8, dtype="uint8", sliding_window=6, state_content_bytes=12, extra_retained_tokens=3
)
MODELS: dict[str, tuple[KVCacheSpec, ...]] = {
    "rates and indexer": (rate_spec(16, 4), indexer(16, 4), PACKED),
    "indexer of each token": (full_spec(4), replace(indexer(8, 1), head_size=3), LATENT_WINDOW),
    "ring": (rate_spec(8, 4), ring_spec(4 + DRAFTS), full_spec(8)),
    "rings of several rates": (PACKED, ring_spec(16), indexer(16, 4), LATENT_WINDOW),
    "compressed window": (replace(window_spec(8, 7), head_size=2, tokens_per_state=4), rate_spec(4, Fraction(1, 2))),
    "thirds": (rate_spec(6, Fraction(3, 2)), rate_spec(4, Fraction(2, 3)), window_spec(4, 5)),
    "states": (rate_spec(8, 4), state_spec(8, DRAFTS), ring_spec(8)),
}
LAYOUTS = ("padded", "packed", "natural", "kernel blocks")


def config_of(layout: str, specs: Sequence[KVCacheSpec], blocks: int) -> KVCacheConfig:
    """Two layers of each spec; in the packed layout, layers with the same tokens share a group."""
    if layout == "padded":
        return model_config(blocks, specs, layers_per_group=2, gap_bytes=8)
    if layout == "packed":
        groups = packed_groups([(f"layer{i}.{j}", spec) for i, spec in enumerate(specs) for j in range(2)])
        return packed_config(groups, packed_block_bytes(groups), blocks)
    parts = [2 if layout == "kernel blocks" and _splits(spec) else 1 for spec in specs]
    slabs = [3 if isinstance(spec, AttentionSpec) else 1 for spec in specs]
    return natural_model_config(blocks // 2, specs, slabs, layers_per_group=2, kernel_blocks=parts)


def _splits(spec: KVCacheSpec) -> bool:
    return isinstance(spec, AttentionSpec) and spec.keeps.value != "ring" and spec.num_states % 2 == 0


@dataclass
class Run:
    """Random requests over one scheduler. counts: what happened."""

    random: Random
    config: KVCacheConfig
    kind: type[FakeWorker]
    counts: Counter[str]
    requests: list[Request] = field(default_factory=list)
    live: dict[str, Request] = field(default_factory=dict)
    flights: deque[Step] = field(default_factory=deque)

    def __post_init__(self) -> None:
        draw = self.random
        cache = KVCacheManager(self.config, 72)
        limits = SchedulerLimits(
            max_running=draw.randint(2, 5),
            max_batched_tokens=draw.choice((5, 12, 40)),
            max_in_flight=draw.choice((1, 2)),
            num_speculative_tokens=DRAFTS,
        )
        self.cache, self.scheduler = cache, Scheduler(cache, limits, clock=lambda: 0.0)
        self.worker = self.kind(self.config, digest_model(self.config))
        self.heads = [draw.choices(range(4), k=40) for _ in range(2)]

    def play(self, steps: int) -> None:
        for _ in range(steps):
            self._act()
        while not self.scheduler.drained:
            self._advance()
        while self.flights:
            self._settle()
        self.scheduler.check()
        statistics = self.scheduler.statistics()
        self.counts["hits"] += statistics.hit_tokens > 0
        self.counts["preemptions"] += statistics.preemptions
        for request in self.requests:
            tokens = request.token_ids().tolist()
            for end in range(request.num_prompt_tokens, len(tokens)):
                assert tokens[end] == self.worker.model.next_token(tokens[:end])

    def _act(self) -> None:
        draw, live = self.random, list(self.live.values())
        what = draw.random()
        if what < 0.2 and len(live) < 6:
            head = draw.choice(self.heads)[: draw.randint(0, 40)]
            prompt = head + draw.choices(range(4), k=draw.randint(1, 9))
            sampling = SamplingParams(max_tokens=draw.randint(1, 18))
            request = Request(f"r{len(self.requests)}", prompt, sampling, hasher=self.cache.hasher)
            with suppress(CapacityError):  # it could not run even alone
                self.scheduler.add(request)
                self._know([request])
        elif what < 0.26 and live:
            self._know(self.scheduler.fork(draw.choice(live).request_id, 1))
            self.counts["forks"] += 1
        elif what < 0.28 and live:
            self.scheduler.abort(draw.choice(live).request_id)
        elif what < 0.31 and self.flights:
            step = self.flights[0]
            self.worker.break_down(step, draw)
            self.scheduler.fail(step.id, "on purpose")
            self.flights.clear()
            self.counts["failures"] += 1
        elif what < 0.6:
            for request in live:
                tokens = request.token_ids().tolist()
                right = self.worker.model.next_token(tokens)
                self.scheduler.propose({request.request_id: [right, draw.randrange(4)][: draw.randint(1, DRAFTS)]})
        self._forget(self.scheduler.take_finished())
        self._advance()

    def _advance(self) -> None:
        if len(self.flights) < self.scheduler.limits.max_in_flight and self.random.random() < 0.7:
            self.flights.append(self.scheduler.schedule())
        elif self.flights:
            self._settle()

    def _settle(self) -> None:
        step = self.flights.popleft()
        result = self.worker.execute(step)
        self.counts["drafts accepted"] += 0 if result.num_accepted is None else int((result.num_accepted > 1).sum())
        self.counts["copies"] += len(step.copies)
        self._forget(self.scheduler.update(result).finished)

    def _know(self, requests: Iterable[Request]) -> None:
        self.requests += requests
        self.live |= {request.request_id: request for request in requests}

    def _forget(self, finished: Iterable[Finished]) -> None:
        for one in finished:
            self.live.pop(one.request.request_id, None)


def play_all(layout: str, model: str, runs: int, kind: type[FakeWorker] = FakeWorker) -> Counter[str]:
    counts = Counter[str]()
    for seed in range(runs):
        random = Random(seed)
        config = config_of(layout, MODELS[model], random.choice((24, 40, 90)))
        Run(random, config, kind, counts).play(50)
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_compressed_content_of_every_step_is_right(model: str, layout: str) -> None:
    counts = play_all(layout, model, how_many(30))
    assert counts["drafts accepted"] > 0


def test_compressed_content_runs_meet_every_event() -> None:
    counts = play_all("natural", "ring", 12)
    assert min(counts[name] for name in ("hits", "preemptions", "forks", "failures", "copies", "drafts accepted")) > 0


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


@pytest.mark.parametrize(
    ("kind", "layout", "model"),
    [
        *((RingOffByOneGroup, layout, "ring") for layout in LAYOUTS),
        *((StateOfAnotherToken, layout, "rates and indexer") for layout in LAYOUTS),
        *((IndexerPageOfAnotherLayer, layout, "rates and indexer") for layout in LAYOUTS),
        *((NeighbouringState, layout, "rates and indexer") for layout in LAYOUTS),
        (NeighbouringState, "natural", "compressed window"),
        (StaleRing, "natural", "ring"),
        (StaleRing, "kernel blocks", "rings of several rates"),
    ],
)
def test_compressed_content_runs_detect_a_faulty_worker(kind: type[FakeWorker], layout: str, model: str) -> None:
    with pytest.raises(ContentError, match=r"reads a wrong (state|raw key)"):
        play_all(layout, model, 25, kind)
