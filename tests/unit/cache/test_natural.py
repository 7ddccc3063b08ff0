"""The natural layout by hand: exact hits, states where they are wanted, forks, moves, and who waits for them."""

from random import Random
from typing import cast

import pytest
from ideal_space import IdealSpace

from caches import cache_with
from hybridkv.cache import CacheOptions, KVCacheManager, Reason, Refusal, SlotPlan
from hybridkv.cache.placement import EndsPlacement, Placement
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.errors import BlockError, CacheError, ConfigError
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.planner.natural import natural_config, slab_layout
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Csr, Step, StepResult
from hybridkv.testing.configs import (
    attention_config,
    full_spec,
    model_config,
    natural_model_config,
    state_spec,
    window_spec,
)

B = 4


def config_of(specs: tuple[KVCacheSpec, ...], ks: tuple[int, ...], slabs: int) -> KVCacheConfig:
    """One layer a group; slabs of 1536 bytes, the null slab not counted in ``slabs``."""
    groups = tuple(KVCacheGroupSpec((f"layer{g}",), spec) for g, spec in enumerate(specs))
    return natural_config(groups, slab_layout(1536, slabs + 1, ks, (1,) * len(ks)))


HYBRID = config_of((full_spec(B), state_spec(B)), (3, 1), 12)


def cache_of(config: KVCacheConfig = HYBRID, placement: Placement | None = None, **options: object) -> KVCacheManager:
    return cache_with(config, 200, placement=placement, **options)


class Loop:
    """A scheduler whose worker samples 7 for ever."""

    def __init__(self, cache: KVCacheManager, **limits: object) -> None:
        self.cache = cache
        self.scheduler = Scheduler(cache, SchedulerLimits(**limits), clock=lambda: 0.0)  # type: ignore[arg-type]  # as above
        self.requests: dict[str, Request] = {}

    def add(self, name: str, prompt: list[int], outputs: int = 1, marks: tuple[int, ...] = (), n: int = 1) -> Request:
        sampling = SamplingParams(max_tokens=outputs, n=n)
        request = Request(name, prompt, sampling, hasher=self.cache.hasher, marks=marks)
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def step(self) -> Step:
        step = self.scheduler.schedule()
        sampled = [[7] if samples else [] for samples in step.samples.tolist()]
        self.scheduler.update(StepResult(step.id, Csr.from_lists(sampled)))
        self.scheduler.check()
        return step

    def run(self) -> list[Step]:
        steps = []
        while not self.scheduler.drained:
            steps.append(self.step())
        return steps


def tokens(n: int, first: int = 100) -> list[int]:
    return list(range(first, first + n))


# -- exact hits


def test_natural_layout_with_one_class_gives_reference_ids() -> None:
    """Every cell of every step, over random requests, hits and preemptions."""
    for seed in range(12):
        random, cells = Random(seed), []
        blocks = random.randint(8, 20)
        prompts = [[random.randrange(2) for _ in range(random.randint(1, 20))] for _ in range(12)]
        lengths = [random.randint(1, 8) for _ in prompts]
        natural = cache_of(config_of((full_spec(B),), (1,), blocks - 1), partial_block_hits=False)
        for cache in (natural, KVCacheManager(attention_config(blocks, (B,)), 200)):
            loop, seen = Loop(cache, max_running=4, max_batched_tokens=16, short_share=0.0), []
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                loop.add(f"r{number}", prompt, length)
                seen += [loop.step(), loop.step()]
            seen += loop.run()
            cells.append(
                [
                    (s.cells.row.tolist(), s.cells.column.tolist(), s.cells.block.tolist(), s.num_computed.tolist())
                    for s in seen
                ]
            )
        assert cells[0] == cells[1], seed
        assert any(any(computed) for *_, computed in cells[0])


# -- slabs


def sparse(max_moved_bytes: int | None = None) -> tuple[KVCacheManager, Request, list[Request]]:
    """8 slabs: attention in three of them, two of which hold one block each; six states. And one request more."""
    cache = cache_of(config_of((full_spec(B), state_spec(B)), (3, 1), 8), max_moved_bytes=max_moved_bytes)

    def held(name: str, length: int) -> Request:
        request = Request(name, tokens(length), hasher=cache.hasher, skip_writing_prefix_cache=True)
        assert cache.allocate_slots(request, length) is not None
        return request

    requests = [held(f"r{i}", length) for i, length in enumerate((4, 8, 4, 8, 4))]
    cache.free(requests[1])
    cache.free(requests[3])
    requests = [requests[0], requests[2], requests[4], held("r5", 4), held("r6", 4)]
    cache.fields.take_transfers()
    return cache, Request("last", tokens(4), hasher=cache.hasher), requests


def test_live_block_moves_when_its_slab_is_needed() -> None:
    cache, last, _ = sparse()
    assert cache.allocate_slots(last, 4) is not None
    transfers = cache.fields.take_transfers()
    assert [(one.group, one.kind) for one in transfers.copies] == [(0, "move")]
    rows = cache.get_block_ids("r0")[0] + cache.get_block_ids("r2")[0]
    assert transfers.copies[0].destination in rows
    cache.check()


def test_plan_beyond_the_move_limit_is_fragmented() -> None:
    cache = cache_of(config_of((full_spec(B), state_spec(B)), (3, 1), 11), max_moved_bytes=1)

    def asked(name: str, length: int = 4) -> Request:
        return Request(name, tokens(length), hasher=cache.hasher, skip_writing_prefix_cache=True)

    filler = asked("filler", 48)
    for number in range(5):  # a slab of attention each: one block that stays, two of the filler
        assert cache.allocate_slots(asked(f"r{number}"), 4) is not None
        assert cache.allocate_slots(filler, 8) is not None
        filler.num_computed_tokens += 8
    cache.free(filler)
    assert cache.allocate_slots(asked("the last free slab"), 4) is not None
    assert cache.allocate_slots(asked("moves"), 4) is not None
    refused = cache.plan_slots(asked("moves, too"), 4)
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.needed_blocks, refused.free_blocks) == (Reason.FRAGMENTED, 11, 11)
    assert [one.kind for one in cache.fields.take_transfers().copies] == ["move"]
    assert cache.allocate_slots(asked("moves, too"), 4) is not None
    cache.check()


@pytest.mark.parametrize("bound", [0, -1, 1.5, "1", True])
def test_max_moved_bytes_below_one_is_rejected(bound: object) -> None:
    with pytest.raises(ConfigError, match=r"max_moved_bytes must be (an integer|at least 1), got"):
        cache_of(max_moved_bytes=bound)


@pytest.mark.parametrize(("option", "value"), [("max_moved_bytes", 1), ("partial_block_hits", False), ("space", "any")])
def test_natural_options_in_reference_layout_are_rejected(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match="mean nothing in the reference layout"):
        cache_of(model_config(8, (full_spec(B),)), None, **{option: value})


def test_pool_blocks_taken_directly_move_no_others() -> None:
    """Whoever takes them from the pool tells no row: what would need room is refused, and nothing is done."""
    cache = cache_of(natural_model_config(6, (full_spec(16), window_spec(16, 48), state_spec(16)), [8, 8, 1]))
    held = [Request(name, tokens(40, first), hasher=cache.hasher) for name, first in (("a", 100), ("b", 200))]
    for one in held:
        assert cache.allocate_slots(one, 40) is not None
    cache.free(held[0])
    cache.block_pool.free_blocks(cache.block_pool.get_new_blocks(1, 2))
    before = cache.block_pool.free_order(), cache.get_block_ids("b")
    with pytest.raises(BlockError, match="without making room"):
        cache.block_pool.get_new_blocks(3, 2)
    assert (cache.block_pool.free_order(), cache.get_block_ids("b")) == before
    cache.check()


def test_least_move_limit_lets_every_request_finish() -> None:
    """Two requests run and neither has its next block without a move: at 0 bytes a step both would wait for ever."""
    loop = Loop(cache_of(config_of((full_spec(B), state_spec(B)), (2, 3), 5), max_moved_bytes=1), max_running=8)
    random = Random(1)
    for number in range(5):
        loop.add(f"r{number}", tokens(random.randint(1, 12), 100 * number), outputs=random.randint(1, 20))
    for _ in range(200):
        if not loop.scheduler.drained:
            loop.step()
    assert loop.scheduler.statistics().requests_finished == 5


def test_prefix_computed_in_the_same_step_is_prefix_not_written() -> None:
    """A model of attention alone: the copy of its last block would come before what it copies."""
    loop = Loop(cache_of(config_of((full_spec(B),), (3,), 12)))
    loop.add("first", tokens(6))
    loop.add("same", [*tokens(6), 1])
    assert loop.step().num_scheduled.tolist() == [6]
    assert loop.scheduler.statistics().refusals == {"prefix_not_written": 1}
    assert loop.step().num_scheduled.tolist() == [1]


def test_plan_that_needs_moves_waits_for_locked_blocks() -> None:
    cache, last, (one, other, *_) = sparse()
    locks = [cache.engine.lock(one), cache.engine.lock("r2"), cache.engine.lock("r5")]
    refused = cache.plan_slots(last, 4)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.FRAGMENTED
    cache.free(other)  # its blocks stay held while they are locked
    cache.check()
    assert cache.usage == pytest.approx((5 / 3 + 5) / 8)
    cache.engine.unlock(locks[1])
    assert isinstance(cache.plan_slots(last, 4), SlotPlan)
    cache.engine.unlock(locks[2])
    cache.engine.unlock(locks[0])
    with pytest.raises(CacheError, match="not held"):
        cache.engine.unlock(locks[0])
    with pytest.raises(CacheError, match="holds no blocks"):
        cache.engine.lock("nobody")
    cache.check()


def test_placement_in_reference_layout_is_rejected() -> None:
    with pytest.raises(ConfigError, match="needs the natural layout"):
        KVCacheManager(attention_config(8), 100, options=CacheOptions(placement=EndsPlacement()))
    assert cache_of().placement == EndsPlacement()


@pytest.mark.parametrize("fails", [False, True])
def test_state_overwritten_by_a_failed_step_is_dropped(fails: bool) -> None:
    """The row of an aborted request is released by a step before the failed one, which rewrote its state in place."""
    cache = cache_of()
    sched = Scheduler(cache, SchedulerLimits(max_in_flight=2, max_batched_tokens=6, segments=False))
    request = Request("a", tokens(20), hasher=cache.hasher)
    sched.add(request)
    first, second = sched.schedule(), sched.schedule()
    sched.abort("a")
    if fails:
        sched.fail(second.id, "broken")
    else:
        sched.update(StepResult(first.id, Csr.from_lists([[]])))
        first = second
    sched.update(StepResult(first.id, Csr.from_lists([[]])))
    sched.check()
    hit = cache.find_hit(Request("b", tokens(20), hasher=cache.hasher)).tokens
    assert hit == (0 if fails else 12)


# -- another space


@pytest.mark.parametrize("seed", range(4))
def test_cache_over_a_foreign_space_runs(seed: int) -> None:
    """An ideal pool, memory by the byte: where free blocks come from is behind one seam."""
    random = Random(seed)
    config = config_of((full_spec(B), state_spec(B)), (3, 1), 12)
    sizes = [config.block_bytes_of(group) for group in range(len(config.groups))]
    space = cast("SlabSpace", IdealSpace(config.arena_bytes, sizes, (0, 1)))
    loop = Loop(cache_of(config, space=space), max_running=4)
    prompts = [[random.randrange(50) for _ in range(random.randint(1, 30))] for _ in range(4)]
    for number in range(12):
        prompt = random.choice(prompts)
        loop.add(f"r{number}", prompt[: random.randint(1, len(prompt))], random.randint(1, 9))
        for _ in range(random.randint(0, 3)):
            loop.step()
    loop.run()
    assert loop.cache.usage == 0
    assert loop.cache.block_pool.keys.evictions > 0


@pytest.mark.parametrize("length", [3, 4, 6])
def test_partial_block_with_another_salt_is_not_hit(length: int) -> None:
    loop = Loop(cache_of(config_of((full_spec(B),), (3,), 12)))
    cache = loop.cache
    loop.scheduler.add(
        Request("a", tokens(length), SamplingParams(max_tokens=1), hasher=cache.hasher, cache_salt="tenant")
    )
    while not loop.scheduler.drained:
        loop.step()
    asked = [Request("b", [*tokens(length), 1], hasher=cache.hasher, cache_salt=salt) for salt in ("tenant", "x", None)]
    assert [cache.find_hit(request).tokens for request in asked] == [length, 0, 0]
