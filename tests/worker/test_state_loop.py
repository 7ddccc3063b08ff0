"""Requests that prefill, decode with drafts, fail, finish and are hit: every state is worth its token count.

The scheduler decides blocks, tables and hits; InPlaceStates copies. A temporal state holds the number of tokens it has
seen, a conv state the numbers of its last tokens. A forward must find the row's own count; then it overwrites the row's
columns. What is hit is read by the request that hits it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from copy_support import reference_config

from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, StepResult
from hybridkv.specs import MambaSpec
from hybridkv.step import Csr, Step
from hybridkv.worker import BlockCopier, InPlaceStates, MultiGroupBlockTable, PagedStorage, StatePlan, state_copies

MAX_LEN = 200
ROWS = 4

Alter = Callable[[StatePlan], StatePlan]


class Loop:
    """A scheduler over one group of states, and the worker of its Steps."""

    def __init__(self, block_size: int, drafts: int, kernel: int) -> None:
        self.block_size, self.drafts, self.kernel = block_size, drafts, kernel
        spec = MambaSpec(
            block_size=block_size,
            shapes=((kernel - 1 + drafts, 2), (3,)),
            dtypes=("float32", "float32"),
            cache_mode="align",
            num_speculative_blocks=drafts,
        )
        config = reference_config(spec, 60, (0, 0))
        limits = SchedulerLimits(max_running=ROWS, max_batched_tokens=64, num_speculative_tokens=drafts)
        self.scheduler = Scheduler(KVCacheManager(config, MAX_LEN), limits, clock=lambda: 0.0)
        storage = PagedStorage(config)
        storage.arena.random_()
        self.views = [[view.numpy() for view in views] for views in storage.views.values()]
        self.tables = MultiGroupBlockTable.of_config(
            config, max_num_reqs=ROWS, max_model_len=MAX_LEN + drafts, max_num_batched_tokens=64
        )
        self.states, self.copier = InPlaceStates(storage, self.tables, drafts), BlockCopier(storage)
        self.random = Random(1)
        self.requests: list[Request] = []

    def admit(self) -> None:
        """A new prompt, or one that goes on from an earlier request."""
        random = self.random
        prompt = [random.randrange(10**6) for _ in range(random.randint(1, 40))]
        if self.requests and random.random() < 0.7:
            earlier = random.choice(self.requests[-6:]).token_ids().tolist()
            prompt = (earlier[: random.randint(1, len(earlier))] + prompt)[: MAX_LEN - 60]
        most = min(60, MAX_LEN - 1 - self.drafts - len(prompt))
        sampling = SamplingParams(max_tokens=random.randint(1, most), ignore_eos=True)
        request = Request(str(len(self.requests)), prompt, sampling, hasher=self.scheduler.cache.hasher)
        self.requests.append(request)
        self.scheduler.add(request)

    def step(self) -> None:
        if self.scheduler.statistics().running < ROWS and self.random.random() < 0.5:
            self.admit()
        drafts = [self.random.randrange(10**6) for _ in range(self.random.randint(0, self.drafts))]
        self.scheduler.propose({one.request_id: drafts for one in self.requests[-2 * ROWS :]})
        step = self.scheduler.schedule()
        self.tables.apply(step)
        self.copier.execute_before(self.states.before(step))
        self.forward(step)
        if len(step) and self.random.random() < 0.02:
            self.scheduler.fail(step.id, RuntimeError("the device is gone"))
            return
        sampled = [self.sampled(step, i) for i in range(len(step))]
        counts = np.array([len(tokens) for tokens in sampled], np.int32)
        self.states.after(step, np.maximum(counts, 1))
        accepted = counts if len(step.drafts.values) else None
        self.scheduler.update(StepResult(step.id, Csr.from_lists(sampled), accepted))

    def sampled(self, step: Step, i: int) -> list[int]:
        """Any number of the row's drafts, and a token behind them."""
        drafts = step.drafts[i].tolist()
        return [*drafts[: self.random.randint(0, len(drafts))], self.random.randrange(10**6)] if step.samples[i] else []

    # -- the model

    def forward(self, step: Step) -> None:
        blocks, bias = self.states.blocks(step, 0)
        ends = (step.num_computed + step.num_scheduled).tolist()
        for i, (computed, end) in enumerate(zip(step.num_computed.tolist(), ends, strict=True)):
            drafts = len(step.drafts[i])
            width = self.kernel - 1 + drafts
            for conv, temporal in self.views:
                if computed:
                    seen = conv[blocks[i, 0], bias[i] : bias[i] + self.kernel - 1]
                    assert (temporal[blocks[i, bias[i]]] == computed).all()
                    assert (seen == window(computed, self.kernel - 1)).all()
                conv[blocks[i, 0]] = -1
                conv[blocks[i, 0], :width] = window(end, width)
                for behind in range(drafts + 1):
                    temporal[blocks[i, behind]] = end - drafts + behind


def window(tokens: int, width: int) -> np.ndarray:
    """The numbers of the last ``width`` tokens, a column each; 0 where there were fewer."""
    return np.arange(tokens - width + 1, tokens + 1).clip(0)[:, None]


def run(sizes: tuple[int, int, int], steps: int) -> Loop:
    """sizes: block size, drafts, kernel width."""
    loop = Loop(*sizes)
    for _ in range(steps):
        loop.step()
    return loop


@pytest.mark.parametrize("sizes", [(4, 2, 4), (4, 0, 4), (16, 3, 4), (8, 7, 6), (2, 1, 3)])
def test_the_accepted_state_goes_on_and_edges_hold_theirs(sizes: tuple[int, int, int]) -> None:
    counts = run(sizes, 400).scheduler.statistics()
    assert min(counts.hit_tokens, counts.failed_steps, counts.requests_finished) > 3


# -- controls


def one_column_off(plan: StatePlan) -> StatePlan:
    return replace(plan, source=np.maximum(plan.source - 1, 0)) if plan.stage == "after" else plan


def no_bias(plan: StatePlan) -> StatePlan:
    return replace(plan, bias=np.zeros_like(plan.bias))


def nothing(stage: str) -> Alter:
    def alter(plan: StatePlan) -> StatePlan:
        none = np.empty(0, np.int64)
        return replace(plan, row=none, source=none, destination=none, bias=none) if plan.stage == stage else plan

    return alter


@pytest.mark.parametrize("alter", [one_column_off, no_bias, nothing("before"), nothing("after")])
def test_wrong_columns_are_noticed(alter: Alter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.worker.states.state_copies", lambda plan, *rest: state_copies(alter(plan), *rest))
    with pytest.raises(AssertionError):
        run((4, 2, 4), 300)
