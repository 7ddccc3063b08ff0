"""Decode and prefill context parallelism in the control plane: blocks of block_size * dcp * pcp tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.planner import capacity_of
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec, RequestLimits
from hybridkv.step import Csr, Step, StepResult
from kinds_support import cache_of, chunked, config, cross, full, mla, sink, state, table, window

PROMPT = list(range(200))


def test_context_parallel_encoder_and_sink_blocks_are_counted() -> None:
    cache = cache_of(full(4), cross(4), dcp_world_size=2)
    cache.allocate_slots(Request("a", PROMPT[:9], hasher=cache.hasher), 9, num_encoder_tokens=9)
    assert [len(table(cache, g)) for g in (0, 1)] == [2, 3]
    assert [len(ids) for ids in cache_of(sink(4, 9), dcp_world_size=2).sink_blocks] == [2]


def test_context_parallel_size_below_one_is_rejected() -> None:
    with pytest.raises(ConfigError, match="dcp_world_size must be at least 1"):
        cache_of(full(4), dcp_world_size=0)


SPECS = st.sampled_from((full(2), full(4), mla(4), window(5, 2), window(12, 4), chunked(8, 2), state(8), state(16)))


@given(
    st.lists(SPECS, min_size=1, max_size=4),
    st.sampled_from(((1, 1), (2, 1), (1, 2), (2, 2))),
    st.integers(1, 3),
    st.integers(4, 40),
    st.integers(1, 60),
    st.integers(1, 20),
)
def test_accepted_request_in_the_smallest_pool_finishes(  # noqa: PLR0917 - one strategy each
    specs: list[KVCacheSpec], ranks: tuple[int, int], in_flight: int, budget: int, prompt: int, outputs: int
) -> None:
    """The smallest pool that a scheduler takes a request into is large enough to finish it, alone."""
    dcp, pcp = ranks
    limits = SchedulerLimits(4, budget, in_flight)
    for num_blocks in range(1, 400):
        cache = KVCacheManager(config(num_blocks, *specs), 100, dcp_world_size=dcp, pcp_world_size=pcp)
        sched = Scheduler(cache, limits)
        try:
            sched.add(Request("a", PROMPT[:prompt], SamplingParams(max_tokens=outputs), hasher=cache.hasher))
        except ConfigError:
            continue
        break
    flights: list[Step] = []
    for _ in range(2000):
        if sched.drained:
            break
        if len(flights) < in_flight:
            flights.append(sched.schedule())
            continue
        step = flights.pop(0)
        sched.update(StepResult(step.id, Csr.from_lists([[7] if one else [] for one in step.samples.tolist()])))
        sched.check()
    assert sched.drained
    assert sched.statistics().preemptions == 0


@given(
    specs=st.lists(st.one_of(SPECS, st.sampled_from((sink(4, 6), cross(4)))), min_size=1, max_size=4),
    ranks=st.sampled_from(((1, 1), (2, 1), (1, 3))),
    chunk=st.integers(1, 40),
    num_blocks=st.integers(1, 150),
    caching=st.booleans(),
)
def test_reported_plan_capacity_can_be_allocated(
    specs: list[KVCacheSpec], ranks: tuple[int, int], chunk: int, num_blocks: int, *, caching: bool
) -> None:
    """So many requests of the longest context, side by side, in chunks of what may be in flight."""
    dcp, pcp = ranks
    made = config(num_blocks, *specs)
    holds = capacity_of(made, 0, RequestLimits(100, chunk, dcp=dcp, pcp=pcp, max_encoder_tokens=9))
    length, together = max(holds.longest_context, 0), int(holds.concurrency)
    if not length or not together:
        return
    cache = KVCacheManager(made, 100, dcp_world_size=dcp, pcp_world_size=pcp, enable_caching=caching)
    prompts = [[1000 * i + token for token in range(length)] for i in range(together)]
    requests = [Request(f"r{i}", prompt, hasher=cache.hasher) for i, prompt in enumerate(prompts)]
    encoder = 9 if cross(4) in specs else 0
    for first in range(0, length, chunk):
        for request in requests:
            new = min(chunk, length - first)
            assert cache.allocate_slots(request, new, num_encoder_tokens=encoder) is not None
            request.num_computed_tokens += new
    cache.check()
