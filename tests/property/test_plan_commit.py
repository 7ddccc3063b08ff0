"""What is planned is what happens: counted anew from tables and index before and after each commit.

Managers without a scheduler, so that chunks end anywhere and drafts are accepted and rejected; the oracle's cache goes
along.
"""

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import settings

from hybridkv.cache import KVCacheBlocks, KVCacheManager, Refusal, SlotPlan
from hybridkv.request import Request
from hybridkv.specs import MambaSpec
from hybridkv.testing import model_config
from oracles import OracleCache, OracleHit, OracleRequest, random_specs

MAX_MODEL_LEN = 40
Pair = tuple[Request, OracleRequest]


@dataclass
class Counts:
    """What tables, index and free order say now."""

    free: list[int]
    tables: dict[str, list[list[int]]]
    published: list[list[int]]

    def held(self, group: int) -> Counter[int]:
        """Holders of each block."""
        return Counter(block for tables in self.tables.values() for block in tables[group] if block)


class Twins:
    """A manager and the oracle's, and the requests that they hold."""

    def __init__(self, random: Random) -> None:
        self.random = random
        specs = random_specs(random)
        config = model_config(random.randint(4, 5 + 10 * len(specs)), specs)
        caching, eagle = random.random() < 0.85, random.random() < 0.2
        dcp = random.choice((1, 1, 1, 2))
        self.cache = KVCacheManager(config, MAX_MODEL_LEN, caching, use_eagle=eagle, dcp_world_size=dcp)
        self.oracle = OracleCache(
            [group.spec for group in config.groups],
            config.num_blocks,
            MAX_MODEL_LEN,
            caching=caching,
            eagle=eagle,
            ranks=dcp,
        )
        states = [spec for spec in specs if isinstance(spec, MambaSpec)]
        self.drafts = min((min(spec.num_speculative_blocks, spec.block_size - 1) for spec in states), default=3)
        self.encoder = 5 if any(group.kind == "cross" for group in self.oracle.groups) else 0
        self.live: dict[str, Pair] = {}
        self.met: Counter[str] = Counter()
        self.bases = [[random.randrange(3) for _ in range(30)] for _ in range(2)]

    def count(self) -> Counts:
        pool = self.cache.block_pool
        return Counts(
            pool.free_order(),
            {name: [list(ids) for ids in self.cache.get_block_ids(name)] for name in self.live},
            [sorted(block for _, block in index.entries()) for index in pool.indexes],
        )

    # -- one allocation

    def begin(self, name: str) -> None:
        """A new request computes its first chunk, wherever that ends."""
        prompt = [*self.random.choice(self.bases)[: self.random.randint(1, 30)], self.random.randrange(3)]
        request = Request(name, prompt, hasher=self.cache.hasher)
        twin = OracleRequest(name, list(prompt), len(prompt), encoder=self.encoder)
        blocks, tokens = self.cache.get_computed_blocks(request)
        hit = self.oracle.hit(prompt)
        assert (tokens, [list(ids) for ids in blocks.blocks]) == (hit.tokens, hit.tables)
        self.met["hit"] += tokens > 0
        self.live[name] = request, twin
        count = self.random.randint(1, len(prompt) - tokens)
        if self.allocate(request, twin, count, blocks, hit):
            request.num_computed_tokens = twin.computed = tokens + count
            if count == len(prompt) - tokens:
                self.append(request, twin)
        else:
            del self.live[name]

    def go_on(self, request: Request, twin: OracleRequest) -> None:
        """More of the prompt, or the last token and drafts, of which the first few are accepted."""
        left = request.num_tokens - request.num_computed_tokens
        chunk = self.random.randint(1, left)
        drafts = self.random.randint(0, self.drafts) if left == 1 else 0
        if not self.allocate(request, twin, chunk + drafts, None, None):
            return
        accepted = self.random.randint(0, drafts)
        request.num_computed_tokens = twin.computed = twin.computed + chunk + accepted
        for _ in range(accepted + 1 if chunk == left else 0):
            self.append(request, twin)

    def append(self, request: Request, twin: OracleRequest) -> None:
        request.append(token := self.random.randrange(3))
        twin.tokens.append(token)

    def allocate(
        self, request: Request, twin: OracleRequest, new: int, blocks: KVCacheBlocks | None, hit: OracleHit | None
    ) -> bool:
        """Plan, commit and count; whether it fitted."""
        lookahead, delay = self.random.choice((0, 0, 1, 2)), self.random.random() < 0.1
        tokens = hit.tokens if hit else 0
        encoder = 0 if request.row >= 0 else self.encoder
        before = self.count()
        plan = self.cache.plan_slots(request, new, tokens, blocks, lookahead, delay, encoder)
        assert self.count() == before
        if isinstance(plan, Refusal):
            self.met["refused"] += 1
            assert self.cache.allocate_slots(request, new, tokens, blocks, lookahead, delay, encoder) is None
        else:
            self.cache.commit(plan)
            self.check_commit(plan, request.request_id, before, self.count())
        cells = self.oracle.allocate(twin, new, hit, lookahead=lookahead, delay=delay)
        assert (cells is None) == isinstance(plan, Refusal)
        return cells is not None

    def check_commit(self, plan: SlotPlan, name: str, before: Counts, after: Counts) -> None:
        """The plan said exactly what changed: blocks taken, shared, dropped and published."""
        everybody = [before.held(group) for group in range(len(plan.groups))]
        reused = [[block for block in part.reuse.tolist() if block] for part in plan.groups]
        new = []
        for part, old, table in zip(plan.groups, before.tables[name], after.tables[name], strict=True):
            moved = [old[column] for column in part.vacate]
            appended = table[len(old) + len(part.reuse) :]
            new.append([block for block in appended if block and block not in moved])
        taken = {block for blocks in new for block in blocks}
        adopted = returned = 0
        for group, part in enumerate(plan.groups):
            dropped = [block for block in before.tables[name][group][: part.drop] if block]
            gained = sum(after.held(group).values()) - sum(everybody[group].values())
            assert gained == part.take + len(reused[group]) - len(dropped)
            assert len(new[group]) == part.take
            kept = [block for block in before.published[group] if block not in taken]
            assert set(kept) <= set(after.published[group])
            assert len(after.published[group]) - len(kept) == len(part.publish)
            adopted += sum(block in before.free for block in reused[group])
            returned += sum(everybody[group][block] == 1 for block in dropped)
            self.met["dropped"] += len(dropped)
            self.met["shared"] += len(reused[group])
            self.met["moved"] += len(part.vacate)
            self.met["published"] += len(part.publish)
        assert len(after.free) == len(before.free) - len(taken) - adopted + returned

    # -- everything

    def same(self) -> None:
        counts = self.count()
        assert counts.free == self.oracle.pool.free
        for name, (_, twin) in self.live.items():
            assert counts.tables[name] == twin.tables
        expected = [[block for block, (of, _) in self.oracle.pool.prefix.items() if of == g] for g in self.groups]
        assert counts.published == [sorted(blocks) for blocks in expected]
        self.cache.check()

    @property
    def groups(self) -> range:
        return range(len(self.cache.groups))

    def act(self, turn: int) -> None:
        growing = [pair for pair in self.live.values() if pair[0].num_tokens < MAX_MODEL_LEN - 5]
        choice = self.random.random()
        if choice < 0.25 or not self.live:
            self.begin(f"r{turn}")
        elif choice < 0.35 or not growing:
            name = self.random.choice(sorted(self.live))
            request, twin = self.live.pop(name)
            self.cache.free(request)
            self.oracle.free(twin)
        else:
            self.go_on(*self.random.choice(growing))
        self.same()


def test_what_is_planned_is_what_happens() -> None:
    met: Counter[str] = Counter()
    runs = 3 * settings().max_examples
    for seed in range(runs):
        twins = Twins(Random(seed))
        try:
            for turn in range(40):
                twins.act(turn)
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")
        met.update(twins.met)
    bounds = {"hit": 1, "refused": 1, "dropped": 10, "shared": 1, "moved": 1, "published": 10}
    assert {name: met[name] for name in bounds if met[name] < bounds[name] * runs // 10} == {}, met
