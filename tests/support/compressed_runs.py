"""Schedulers over small compressed caches, and a worker that checks each Step.

Plans are small: the reference layout pads pages, or packs them side by side; the natural layout has slabs and kernel
blocks. Requests share prefixes, fork, draft, are aborted and preempted, and steps fail.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from random import Random

import numpy as np

from hybridkv.cache import KVCacheManager
from hybridkv.errors import CapacityError
from hybridkv.planner import KVCacheConfig
from hybridkv.planner.packed import packed_block_bytes, packed_config, packed_groups
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Finished, Scheduler, SchedulerLimits
from hybridkv.spec_fields import SparseCacheRole
from hybridkv.specs import AttentionSpec, Keeps, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from hybridkv.step import Step
from hybridkv.testing import FakeWorker, digest_model
from hybridkv.testing.configs import (
    full_spec,
    model_config,
    natural_model_config,
    rate_spec,
    ring_spec,
    state_spec,
    window_spec,
)

MAX_MODEL_LEN = 72
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
    "ring": (rate_spec(8, 4), ring_spec(4 + DRAFTS, 4), full_spec(8)),
    "rings of several rates": (PACKED, ring_spec(10, 8), indexer(16, 4), ring_spec(16, 4), LATENT_WINDOW),
    "ring of an unknown group": (PACKED, ring_spec(16), indexer(16, 4), full_spec(8)),
    "sums": (rate_spec(8, 4), replace(LATENT_WINDOW, sliding_window=8, pools=4), PACKED, ring_spec(10, 8)),
    "compressed window": (replace(window_spec(8, 7), head_size=2, tokens_per_state=4), rate_spec(4, Fraction(1, 2))),
    "thirds": (rate_spec(6, Fraction(3, 2)), rate_spec(4, Fraction(2, 3)), window_spec(4, 5)),
    "states": (rate_spec(8, 4), state_spec(8, DRAFTS), ring_spec(8, 4)),
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
    return isinstance(spec, AttentionSpec) and spec.keeps is not Keeps.RING and spec.num_states % 2 == 0


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
        cache = KVCacheManager(self.config, MAX_MODEL_LEN)
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
        rings = [group for group, of in enumerate(self.config.groups) if of.spec.keeps is Keeps.RING]
        self.counts["rings kept"] += int(np.isin(step.state_writes[:, 1], rings).sum())
        self.counts["rings hit"] += any(copy.group in rings for copy in step.copies if copy.kind == "block")
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
