"""Requests that prefill, decode with drafts, are preempted, finish and are hit: every state is worth its token count.

The cache decides blocks, tables and hits; columns, copies and storage are the worker's. A temporal state holds the
number of tokens it has seen, a conv state the numbers of its last tokens. A forward reads what StatePlan says and must
find the row's own count; then it overwrites the row's columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from copy_support import reference_config

from hybridkv.cache import KVCacheManager
from hybridkv.request import Request
from hybridkv.specs import MambaSpec
from hybridkv.worker import (
    BlockTable,
    PagedStorage,
    RowColumns,
    StateCopier,
    StatePlan,
    parts_of,
    state_copies,
)

MAX_LEN = 200
ROWS = 4

Alter = Callable[[StatePlan], StatePlan]


@dataclass(eq=False)
class Running:
    """A request in a row. a: accepted tokens of its last step."""

    request: Request
    row: int
    length: int
    a: int = 1


class Loop:
    """A cache of one group of states, and the worker beside it."""

    def __init__(self, block_size: int, drafts: int, kernel: int, seed: int, alter: Alter) -> None:
        self.block_size, self.drafts, self.kernel, self.alter = block_size, drafts, kernel, alter
        spec = MambaSpec(
            block_size=block_size,
            shapes=((kernel - 1 + drafts, 2), (3,)),
            dtypes=("float32", "float32"),
            cache_mode="align",
            num_speculative_blocks=drafts,
        )
        config = reference_config(spec, 60, (0, 0))
        self.cache = KVCacheManager(config, MAX_LEN)
        names = config.groups[0].layer_names
        storage = PagedStorage(config, dict.fromkeys(names, parts_of(spec)))
        storage.arena.random_()
        self.views = [[view.numpy() for view in views] for views in storage.views.values()]
        self.copier = StateCopier.of_group(storage, 0)
        self.table = BlockTable(block_size, ROWS, MAX_LEN // block_size + 2 + drafts, 1, num_blocks=60)
        self.columns = RowColumns(block_size, ROWS, drafts)
        self.random = Random(seed)
        self.running: list[Running] = []
        self.done: list[list[int]] = []
        self.hits = self.published = self.reached = self.preempted = self.steps = 0

    # -- one step

    def step(self) -> None:
        if len(self.running) < ROWS and self.random.random() < 0.5:
            self.admit()
        for one in self.running:
            if one.request.num_computed_tokens and self.random.random() < 0.004:
                self.preempt(one)
        # what this step publishes is readable in the next one only: at most one look-up, before others publish
        looking = [one for one in self.running if one.request.row < 0][:1]
        going = [one for one in self.running if one.request.row >= 0]
        batch = [(one, *size) for one in looking + going if (size := self.slots(one))]
        if batch:
            self.execute(batch)
        for one in list(self.running):
            if one.request.num_tokens >= one.length:
                self.done.append(one.request.token_ids().tolist())
                self.leave(one)
        self.steps += 1

    def admit(self) -> None:
        """A new prompt, or one that goes on from an earlier request."""
        random = self.random
        prompt = [random.randrange(10**6) for _ in range(random.randint(1, 40))]
        if self.done and random.random() < 0.7:
            earlier = random.choice(self.done[-6:])
            prompt = (earlier[: random.randint(1, len(earlier))] + prompt)[: MAX_LEN - 60]
        length = min(len(prompt) + random.randint(1, 60), MAX_LEN - 1 - self.drafts)
        row = min(set(range(ROWS)) - {one.row for one in self.running})
        self.columns.drop([row])
        self.running.append(Running(Request(f"r{self.steps}", prompt, hasher=self.cache.hasher), row, length))

    def slots(self, one: Running) -> tuple[int, int, int] | None:
        """(computed, scheduled, drafts) of the row, whose new blocks go to the table; None where it cannot run."""
        request, computed, hit = one.request, one.request.num_computed_tokens, None
        if request.row < 0:
            hit, computed = self.cache.get_computed_blocks(request)
            self.hits += computed > 0
        left = request.num_tokens - computed
        drafts = self.drafted() if left == 1 and computed else 0
        count = 1 + drafts if left == 1 else self.chunk(computed, left)
        new = self.cache.allocate_slots(request, count, computed if hit else 0, hit)
        if new is None:
            self.preempt(one)
            return None
        ids = new.blocks[0]
        if hit is not None:
            self.table.add_row([*hit.blocks[0], *ids], one.row)
        else:
            self.table.append_row(ids, one.row)
        return computed, count, drafts

    def drafted(self) -> int:
        """Any number; always the same where they fill a block: fewer would go back to a column that is gone."""
        return self.drafts if self.drafts >= self.block_size else self.random.randint(0, self.drafts)

    def chunk(self, computed: int, left: int) -> int:
        """Half of the chunks end at a multiple of the block, as the scheduler's do."""
        end = computed + self.random.randint(1, left)
        aligned = end // self.block_size * self.block_size
        return (aligned if aligned > computed and self.random.random() < 0.5 else end) - computed

    def preempt(self, one: Running) -> None:
        """Back to the start, in the same row."""
        self.cache.free(one.request)
        one.request.num_computed_tokens = 0
        one.a = 1
        self.columns.drop([one.row])
        self.table.clear_rows([one.row])
        self.preempted += 1

    def leave(self, one: Running) -> None:
        self.cache.free(one.request)
        self.columns.drop([one.row])
        self.running.remove(one)

    def execute(self, batch: list[tuple[Running, int, int, int]]) -> None:
        rows = [one.row for one, *_ in batch]
        computed, scheduled, drafts = (list(column) for column in zip(*(sizes for _, *sizes in batch), strict=True))
        plan = self.columns.before(rows, computed, scheduled, [one.a for one, *_ in batch])
        self.copy(plan)
        for (one, begin, count, drafted), a in zip(batch, plan.accepted.tolist(), strict=True):
            self.forward(one.row, begin, count, drafted, a=a)
        accepted = [self.random.randint(1, 1 + drafted) for drafted in drafts]
        plan = self.columns.after(rows, computed, scheduled, drafts, accepted)
        self.copy(plan)
        for (one, begin, count, drafted), a, kept in zip(batch, accepted, plan.accepted.tolist(), strict=True):
            one.a = kept
            one.request.num_computed_tokens = begin + count - drafted + a - 1
            new = one.request.num_computed_tokens + 1 - one.request.num_tokens
            for _ in range(max(new, 0)):
                one.request.append(self.random.randrange(10**6))
            self.check_published(one)

    def copy(self, plan: StatePlan) -> None:
        copies = state_copies(self.alter(plan), self.table.get_numpy_array(), self.table.num_blocks_per_row)
        self.copier.copy(copies)

    # -- the model

    def window(self, tokens: int, width: int) -> list[int]:
        """The numbers of the last ``width`` tokens, 0 where there were fewer."""
        return [max(0, token) for token in range(tokens - width + 1, tokens + 1)]

    def forward(self, row: int, computed: int, scheduled: int, drafts: int, *, a: int) -> None:
        blocks = self.table.get_numpy_array()[row]
        state = -(-(computed + scheduled) // self.block_size) - 1
        if computed:
            self.check(blocks[state], blocks[state + a - 1], a - 1, computed)
        certain = computed + scheduled - drafts
        width = self.kernel - 1 + drafts
        for conv, temporal in self.views:
            conv[blocks[state]] = -1
            conv[blocks[state], :width] = np.array(self.window(certain + drafts, width))[:, None]
            for i in range(drafts + 1):
                temporal[blocks[state + i]] = certain + i

    def check(self, conv_block: int, temporal_block: int, bias: int, tokens: int) -> None:
        """Both states are those of ``tokens`` tokens, in every layer."""
        wanted = np.array(self.window(tokens, self.kernel - 1))
        for conv, temporal in self.views:
            assert (temporal[temporal_block] == tokens).all()
            assert (conv[conv_block, bias : bias + self.kernel - 1] == wanted[:, None]).all()

    def check_published(self, one: Running) -> None:
        """Whatever can be hit of the row's tokens holds the state of its own edge."""
        group = self.cache.groups[0]
        reached = one.request.num_computed_tokens // self.block_size
        for column, key in enumerate(group.keys(one.request)[:reached]):
            block = group.index.get(key)
            if block is not None:
                self.check(block, block, 0, (column + 1) * self.block_size)
                self.published += 1


def run(sizes: tuple[int, int, int], steps: int, *, alter: Alter = lambda plan: plan, seed: int = 1) -> Loop:
    """sizes: block size, drafts, kernel width."""
    block_size, drafts, kernel = sizes
    loop = Loop(block_size, drafts, kernel, seed, alter)
    for _ in range(steps):
        loop.step()
    if drafts < block_size:  # the audit knows of no state that lies behind its own column
        loop.cache.check()
    return loop


SIZES = [(4, 2, 4), (4, 0, 4), (2, 5, 2), (16, 3, 4), (1, 2, 3), (8, 8, 6)]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_accepted_state_goes_on_and_edges_hold_theirs(sizes: tuple[int, int, int]) -> None:
    loop = run(sizes, 400)
    assert min(loop.hits, loop.published, loop.preempted, len(loop.done)) > 3


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
def test_wrong_columns_are_noticed(alter: Alter) -> None:
    with pytest.raises(AssertionError):
        run((4, 2, 4), 300, alter=alter)


def test_columns_that_are_gone_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at later columns an edge's state overwrites that of an accepted draft."""
    monkeypatch.setattr(
        "hybridkv.worker.copies.state_plan._comes_again",
        lambda _table, row, _column, _held: np.zeros(len(row), np.bool_),
    )
    with pytest.raises(AssertionError):
        run((2, 5, 2), 300)
