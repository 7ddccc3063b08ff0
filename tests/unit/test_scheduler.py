"""The scheduler, step by step: docs/contracts.md, 6 and 10, for full attention."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hybridkv.cache import AllBlocksCleared, BlockHasher, BlockStored, KVCacheManager
from hybridkv.errors import CacheError, CapacityError, ConfigError, OwnershipError, WorkerError
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import FinishReason, Outcome, Scheduler, SchedulerLimits
from hybridkv.schedule.running import InFlight
from hybridkv.step import Csr, Step, StepResult
from hybridkv.testing import attention_config

TOKEN = 7


def scheduler(
    num_blocks: int = 32,
    block_size: int = 4,
    *,
    max_model_len: int = 100,
    max_running: int = 8,
    budget: int = 64,
    in_flight: int = 1,
    watermark: float = 0.0,
    caching: bool = True,
    events: bool = False,
    overtaken: int = 64,
) -> Scheduler:
    cache = KVCacheManager(
        attention_config(num_blocks, (block_size,)), max_model_len, caching, enable_kv_cache_events=events
    )
    return Scheduler(cache, SchedulerLimits(max_running, budget, in_flight, watermark, max_overtaken=overtaken))


def add(
    sched: Scheduler, name: str, prompt: Sequence[int], *, eos_token_ids: tuple[int, ...] = (), **sampling: object
) -> Request:
    params = SamplingParams(**{"max_tokens": 8, **sampling})  # type: ignore[arg-type]  # by name
    request = Request(name, prompt, params, hasher=sched.cache.hasher, eos_token_ids=eos_token_ids)
    sched.add(request)
    return request


def result(step: Step, token: int = TOKEN) -> StepResult:
    return StepResult(step.id, Csr.from_lists([[token] if samples else [] for samples in step.samples.tolist()]))


def update(sched: Scheduler, step: Step, token: int = TOKEN) -> Outcome:
    outcome = sched.update(result(step, token))
    sched.check()
    return outcome


def turn(sched: Scheduler, token: int = TOKEN) -> dict[str, int]:
    """A step and its update; tokens that each request computed."""
    step = sched.schedule()
    outcome = update(sched, step, token)
    return {r.request_id: n for r, n in zip(outcome.requests, step.num_scheduled.tolist(), strict=True)}


def ended(outcome: Outcome) -> list[tuple[str, str]]:
    return [(one.request.request_id, str(one.reason)) for one in outcome.finished]


# -- budget


def test_a_prompt_runs_in_chunks_and_samples_at_its_end() -> None:
    sched = scheduler(budget=6)
    request = add(sched, "a", range(14), max_tokens=2)
    steps = []
    for _ in range(4):
        step = sched.schedule()
        steps.append((step.num_computed.tolist(), step.num_scheduled.tolist(), step.samples.tolist()))
        update(sched, step)
    assert steps == [([0], [6], [False]), ([6], [6], [False]), ([12], [2], [True]), ([14], [1], [True])]
    assert request.output_token_ids == [TOKEN, TOKEN]
    assert sched.drained


def test_running_requests_come_before_waiting_ones() -> None:
    sched = scheduler(budget=8)
    add(sched, "a", range(5))
    assert turn(sched) == {"a": 5}
    add(sched, "b", range(50, 59))
    add(sched, "c", range(80, 84))
    assert turn(sched) == {"a": 1, "b": 7}
    assert turn(sched) == {"a": 1, "b": 2, "c": 4}
    assert turn(sched) == {"a": 1, "b": 1, "c": 1}


def test_the_budget_is_shared_in_order_of_admission() -> None:
    sched = scheduler(budget=8)
    add(sched, "a", range(3))
    add(sched, "b", range(50, 65))
    add(sched, "c", range(80, 83))
    assert turn(sched) == {"a": 3, "b": 5}
    assert turn(sched) == {"a": 1, "b": 7}
    assert turn(sched) == {"a": 1, "b": 3, "c": 3}


def test_who_gets_no_budget_waits_its_turn() -> None:
    sched = scheduler(budget=2)
    for name in "abc":
        add(sched, name, [ord(name)])
    assert turn(sched) == {"a": 1, "b": 1}
    assert turn(sched) == {"a": 1, "b": 1}
    assert (sched.num_running, sched.num_waiting) == (2, 1)


def test_rows_are_bounded() -> None:
    sched = scheduler(max_running=2)
    for name in "abc":
        add(sched, name, [1, 2, 3], max_tokens=3 if name == "a" else 9)
    for _ in range(3):
        step = sched.schedule()
        assert step.rows.max() < 2
        assert len(step) == 2
        update(sched, step)
    step = sched.schedule()
    assert step.finished_rows.tolist() == [0]
    assert [(new.row, new.request_id) for new in step.new_rows] == [(0, "c")]
    update(sched, step)


def test_first_come_first_served() -> None:
    sched = scheduler(num_blocks=8, overtaken=0)
    add(sched, "a", range(16))
    add(sched, "large", range(50, 66))
    add(sched, "small", [99])
    assert turn(sched) == {"a": 16}  # 4 of 7 blocks; "large" needs 4, and "small" waits behind it
    assert sched.num_waiting == 2


# -- what a Step says


def test_a_step_of_new_rows() -> None:
    sched = scheduler(budget=6)
    sampling = SamplingParams(max_tokens=3, temperature=0.5, seed=4)
    sched.add(Request("a", range(1, 6), sampling, hasher=sched.cache.hasher))
    step = sched.schedule()
    assert (step.id, step.after, len(step), step.num_tokens) == (0, -1, 1, 5)
    assert step.token_ids[0].tolist() == [1, 2, 3, 4, 5]
    assert step.cells.group.tolist() == step.cells.row.tolist() == [0, 0]
    assert (step.cells.column.tolist(), step.cells.block.tolist()) == ([0, 1], [1, 2])
    (new,) = step.new_rows
    assert (new.row, new.request_id, new.num_prompt_tokens, new.sampling) == (0, "a", 5, sampling)
    assert new.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert [a.dtype.name for a in (step.rows, step.num_computed, step.num_scheduled, new.token_ids)] == ["int32"] * 4
    assert (step.finished_rows.tolist(), step.copies, len(step.drafts)) == ([], (), 1)
    update(sched, step)
    second = sched.schedule()
    assert (second.id, second.after) == (1, 0)
    assert (second.token_ids[0].tolist(), len(second.cells), second.new_rows) == ([TOKEN], 0, ())


def test_a_hit_is_told_with_its_cells() -> None:
    sched = scheduler()
    add(sched, "a", range(14))
    turn(sched)
    add(sched, "b", range(14))
    step = sched.schedule()
    assert step.num_computed.tolist() == [14, 12]
    assert step.num_scheduled.tolist() == [1, 2]
    mine = step.cells.row == step.rows[1]
    assert (step.cells.column[mine].tolist(), step.cells.block[mine].tolist()) == ([0, 1, 2, 3], [1, 2, 3, 5])
    update(sched, step)
    assert sched.statistics().hit_tokens == 12


def test_a_hit_in_the_step_that_writes_it() -> None:
    sched = scheduler()
    add(sched, "a", range(14))
    request = add(sched, "b", range(14))
    step = sched.schedule()
    assert step.num_computed.tolist() == [0, 12]
    assert request.first_hit_tokens == 12
    update(sched, step)


def test_steps_own_their_arrays() -> None:
    sched = scheduler(in_flight=2)
    add(sched, "a", range(5))
    step = sched.schedule()
    seen = [a.tolist() for a in (step.rows, step.num_computed, step.num_scheduled, step.token_ids.values)]
    second = sched.schedule()
    update(sched, step)
    update(sched, second)
    turn(sched)
    assert [a.tolist() for a in (step.rows, step.num_computed, step.num_scheduled, step.token_ids.values)] == seen


def test_an_empty_step() -> None:
    sched = scheduler()
    assert sched.drained
    step = sched.schedule()
    assert (len(step), step.num_tokens, len(step.cells)) == (0, 0, 0)
    assert sched.num_in_flight == 1
    outcome = update(sched, step)
    assert (outcome.requests, outcome.finished, len(outcome.appended)) == ((), (), 0)


# -- admission and preemption


def test_admission_asks_for_all_known_tokens() -> None:
    sched = scheduler(num_blocks=8, budget=16)
    add(sched, "a", range(12))
    add(sched, "b", range(50, 70))  # 5 blocks; its first chunk would need one, and 4 are free
    assert turn(sched) == {"a": 12}
    assert sched.num_waiting == 1


def test_the_watermark_is_kept_free_by_admissions_alone() -> None:
    sched = scheduler(num_blocks=11, watermark=0.3)
    add(sched, "a", range(28))  # 7 blocks: nobody runs, so nothing is reserved
    add(sched, "b", [1])
    turn(sched)
    assert (sched.num_running, sched.num_waiting) == (1, 1)
    alone = scheduler(num_blocks=11, watermark=0.9)
    add(alone, "a", range(32))
    assert turn(alone) == {"a": 32}


def test_the_last_admitted_is_preempted_and_waits_at_the_front() -> None:
    sched = scheduler(num_blocks=8, overtaken=0)  # 7 blocks
    first = add(sched, "a", range(11))
    second = add(sched, "b", range(50, 62))
    assert turn(sched) == {"a": 11, "b": 12}  # 3 + 3
    add(sched, "c", [1, 2, 3])
    assert turn(sched) == {"a": 1, "b": 1}  # b's 4th block is the 7th
    step = sched.schedule()  # a needs its 4th
    assert [int(row) for row in step.rows] == [first.row]
    assert step.new_rows == ()  # a step that preempted admits nobody
    assert step.finished_rows.tolist() == [1]
    assert (second.num_computed_tokens, second.num_preemptions, second.row) == (0, 1, -1)
    assert second.output_token_ids == [TOKEN, TOKEN]
    assert (sched.num_running, sched.num_waiting) == (1, 2)
    update(sched, step)
    step = sched.schedule()  # 3 blocks are free: "b" needs 4, and nobody overtakes it
    assert (len(step), step.new_rows, step.finished_rows.tolist()) == (1, (), [])
    update(sched, step)
    assert sched.finish("a")
    step = sched.schedule()
    assert [new.request_id for new in step.new_rows] == ["b", "c"]
    assert step.num_computed.tolist()[0] == 12  # resumed through the cache
    assert step.new_rows[0].token_ids.tolist() == [*range(50, 62), TOKEN, TOKEN]
    assert step.new_rows[0].num_prompt_tokens == 12
    update(sched, step)
    assert sched.statistics().preemptions == 1
    assert second.first_hit_tokens == 0


def test_a_step_that_preempted_admits_nobody() -> None:
    sched = scheduler(num_blocks=8)
    for name in "ab":  # the same tokens, and b cannot hit what it needs to sample: it has copies of its own
        add(sched, name, range(4), max_tokens=20)
    for _ in range(9):
        assert len(turn(sched)) == 2
    step = sched.schedule()  # both need a block, one is free
    assert sched.statistics().preemptions == 1
    assert (len(step), step.new_rows) == (1, ())  # although b would fit now: three of its blocks are a's
    update(sched, step)
    step = sched.schedule()
    assert step.num_computed.tolist() == [13, 12]
    update(sched, step)


def test_a_request_may_have_to_preempt_itself() -> None:
    sched = scheduler(num_blocks=6)
    add(sched, "a", range(12))
    request = add(sched, "b", range(50, 58))
    assert turn(sched) == {"a": 12, "b": 8}
    step = sched.schedule()  # a takes nothing free: b gives up for a
    assert len(step) == 1
    assert request.num_preemptions == 1
    update(sched, step)
    sched = scheduler(num_blocks=6)
    add(sched, "a", range(9))
    request = add(sched, "b", range(50, 58))
    turn(sched)
    step = sched.schedule()  # b needs a third block and is itself the last
    assert len(step) == 1
    assert request.num_preemptions == 1
    update(sched, step)


def test_preempted_requests_keep_their_order() -> None:
    sched = scheduler(num_blocks=8, overtaken=0)
    for name, first in (("a", 0), ("b", 30), ("c", 60)):
        add(sched, name, range(first, first + 8), max_tokens=14)
    assert turn(sched) == {"a": 8, "b": 8, "c": 8}
    seen: list[str] = []
    while not sched.drained:
        step = sched.schedule()
        seen += [new.request_id for new in step.new_rows]
        update(sched, step)
    assert sched.statistics().preemptions == 3
    assert seen == ["b", "c", "c"]  # c was preempted first, and b before c was back


# -- ends


def test_an_output_ends_at_its_length() -> None:
    sched = scheduler()
    request = add(sched, "a", range(3), max_tokens=2)
    assert ended(update(sched, sched.schedule())) == []
    outcome = update(sched, sched.schedule())
    assert ended(outcome) == [("a", "length")]
    assert outcome.appended[0].tolist() == [TOKEN]
    assert request.num_output_tokens == 2
    assert sched.cache.usage == 0.0
    assert sched.statistics().computed_tokens == 4  # the last token is never computed


def test_no_request_outgrows_the_model() -> None:
    sched = scheduler(max_model_len=6)
    request = add(sched, "a", range(4), max_tokens=50)
    turn(sched)
    assert ended(update(sched, sched.schedule())) == [("a", "length")]
    assert request.num_tokens == 6


@pytest.mark.parametrize(
    ("sampling", "eos", "reason"),
    [
        ({"stop_token_ids": (3, TOKEN)}, (), "stop"),
        ({}, (TOKEN,), "stop"),
        ({}, (1, 2, TOKEN), "stop"),
        ({"ignore_eos": True}, (TOKEN,), None),
        ({"ignore_eos": True, "stop_token_ids": (TOKEN,)}, (TOKEN,), "stop"),
        ({"max_tokens": 1}, (), "length"),
        ({"max_tokens": 1}, (TOKEN,), "stop"),
        ({"stop_token_ids": (3,)}, (4,), None),
    ],
)
def test_stop_tokens(sampling: dict[str, object], eos: tuple[int, ...], reason: str | None) -> None:
    sched = scheduler()
    request = add(sched, "a", range(3), eos_token_ids=eos, **sampling)
    outcome = update(sched, sched.schedule())
    assert ended(outcome) == ([] if reason is None else [("a", reason)])
    assert request.output_token_ids == [TOKEN]


def test_stop_tokens_of_a_row_are_not_those_of_the_request_before() -> None:
    sched = scheduler(max_running=1)
    add(sched, "a", range(3), stop_token_ids=(8, 9, TOKEN))
    add(sched, "b", range(3), stop_token_ids=(5,))
    assert ended(update(sched, sched.schedule())) == [("a", "stop")]
    assert ended(update(sched, sched.schedule())) == []


def test_the_caller_may_end_a_request() -> None:
    sched = scheduler()
    add(sched, "a", range(3))
    turn(sched)
    assert sched.finish("a")
    assert not sched.finish("a")
    assert sched.drained
    assert ended(update(sched, sched.schedule())) == [("a", "stop")]
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]


def test_the_last_full_block_is_published_when_a_request_ends() -> None:
    sched = scheduler()
    add(sched, "a", range(4), max_tokens=5)
    while not sched.drained:
        turn(sched)
    request = Request("again", [*range(4), *[TOKEN] * 5], hasher=sched.cache.hasher)
    assert sched.cache.get_computed_blocks(request)[1] == 8


# -- what cannot run


def test_a_request_that_can_never_fit() -> None:
    sched = scheduler(num_blocks=4)
    with pytest.raises(CapacityError, match=r"may reach 13 tokens: 4 blocks, 160 B with the null block; .* has 3"):
        add(sched, "a", range(4), max_tokens=10)
    add(sched, "a", range(4), max_tokens=9)  # 12 tokens are computed, the 13th is not
    while not sched.drained:
        turn(sched)
    assert sched.statistics().preemptions == 0


def test_prompts_as_long_as_the_model() -> None:
    sched = scheduler(max_model_len=8)
    with pytest.raises(ConfigError, match="has 8 tokens, max_model_len is 8: shorten the prompt"):
        add(sched, "a", range(8))
    add(sched, "a", range(7))


def test_requests_of_another_hasher() -> None:
    sched = scheduler()
    for hasher in (None, BlockHasher(4)):
        with pytest.raises(ConfigError, match=r"hasher=cache\.hasher"):
            sched.add(Request("a", range(3), hasher=hasher))
    assert sched.num_waiting == 0


def test_ids_are_unique_while_in_use() -> None:
    sched = scheduler(in_flight=2)
    add(sched, "a", range(3))
    with pytest.raises(ConfigError, match="a request 'a' is already here"):
        add(sched, "a", range(3))
    step = sched.schedule()
    assert sched.abort("a")
    with pytest.raises(ConfigError, match="a request 'a' is already here"):
        add(sched, "a", range(3))  # its blocks are still in use
    update(sched, step)
    add(sched, "a", range(3))


def test_a_request_runs_once() -> None:
    sched = scheduler()
    request = add(sched, "a", range(3), max_tokens=2)
    turn(sched)
    turn(sched)
    assert sched.drained
    with pytest.raises(ConfigError, match="has run before: make a new Request"):
        sched.add(request)
    waiting = Request("b", range(3), hasher=sched.cache.hasher)
    sched.cache.allocate_slots(waiting, 3)
    with pytest.raises(ConfigError, match="has run before"):
        sched.add(waiting)


@pytest.mark.parametrize("name", ["max_running", "max_batched_tokens", "max_in_flight"])
def test_limits_that_cannot_work(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        replace(SchedulerLimits(), **{name: 0})  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize("watermark", [-0.1, 1.0])
def test_a_watermark_is_a_share(watermark: float) -> None:
    with pytest.raises(ConfigError, match="watermark is a share"):
        SchedulerLimits(watermark=watermark)


# -- steps in flight


def test_two_steps_in_flight() -> None:
    sched = scheduler(in_flight=2)
    request = add(sched, "a", range(4), max_tokens=3)
    first, second = sched.schedule(), sched.schedule()
    assert second.token_ids[0].tolist() == [-1]
    assert (second.num_computed.tolist(), second.samples.tolist()) == ([4], [True])
    with pytest.raises(CacheError, match="2 steps are in flight"):
        sched.schedule()
    update(sched, first, 5)
    third = sched.schedule()
    assert third.token_ids[0].tolist() == [-1]
    update(sched, second, 6)
    assert len(sched.schedule()) == 0  # the limit is reached by what is in flight
    assert ended(update(sched, third, 8)) == [("a", "length")]
    assert request.output_token_ids == [5, 6, 8]


def test_a_stop_token_drops_what_was_scheduled_behind_it() -> None:
    sched = scheduler(in_flight=3)
    request = add(sched, "a", range(4), stop_token_ids=(9,))
    steps = [sched.schedule() for _ in range(3)]
    assert ended(update(sched, steps[0], 9)) == [("a", "stop")]
    drained = [sched.drained]  # not before the last step that uses its blocks
    for step in steps[1:]:
        outcome = update(sched, step, 5)
        assert (outcome.appended.values.tolist(), ended(outcome)) == ([], [])
        assert outcome.requests == (request,)
        drained.append(sched.drained)
    assert request.output_token_ids == [9]
    assert drained == [False, False, True]
    assert sched.cache.usage == 0.0
    assert sched.schedule().finished_rows.tolist() == [0]


def test_blocks_are_published_only_when_their_tokens_are_known() -> None:
    sched = scheduler(in_flight=2)
    add(sched, "a", range(3))
    first = sched.schedule()
    second = sched.schedule()  # token 3 is -1: the block is full but nobody knows of what
    assert sched.cache.statistics().cached_blocks == 0
    update(sched, first)
    third = sched.schedule()
    assert sched.cache.statistics().cached_blocks == 1
    update(sched, second)
    update(sched, third)


def test_a_preempted_request_still_gets_what_steps_in_flight_sample() -> None:
    sched = scheduler(num_blocks=6, in_flight=2)
    add(sched, "a", range(12))
    request = add(sched, "b", range(50, 58), max_tokens=3)
    first = sched.schedule()
    second = sched.schedule()  # a takes a block of b, which is preempted
    assert (len(second), request.num_preemptions) == (1, 1)
    outcome = update(sched, first, 5)
    assert outcome.appended[1].tolist() == [5]
    assert request.output_token_ids == [5]
    update(sched, second)
    assert request.num_tokens == 9


def test_a_preempted_request_may_end_while_it_waits() -> None:
    sched = scheduler(num_blocks=6, in_flight=2)
    add(sched, "a", range(12))
    add(sched, "b", range(50, 58), stop_token_ids=(5,))
    first, second = sched.schedule(), sched.schedule()
    assert ended(update(sched, first, 5)) == [("b", "stop")]
    assert sched.num_waiting == 0
    update(sched, second)


def test_a_preempted_request_is_admitted_again_when_its_results_are_in() -> None:
    sched = scheduler(num_blocks=6, in_flight=3)
    add(sched, "a", range(12), max_tokens=2)
    add(sched, "b", range(50, 58))
    steps = [sched.schedule(), sched.schedule()]
    assert sched.finish("a")
    steps.append(sched.schedule())
    assert len(steps[2]) == 0  # b's first token is not in yet
    for step in steps:
        update(sched, step)
    assert [new.token_ids.tolist() for new in sched.schedule().new_rows] == [[*range(50, 58), TOKEN]]


# -- results


def test_results_that_do_not_fit_change_nothing() -> None:
    sched = scheduler(in_flight=2)
    add(sched, "a", range(3))
    with pytest.raises(CacheError, match="no step is in flight"):
        sched.update(StepResult(0, Csr.empty(0)))
    first, second = sched.schedule(), sched.schedule()
    good = result(first)
    for bad, message in (
        (result(second), "the result of step 1 came where step 0 is next"),
        (StepResult(0, Csr.empty(2)), "step 0 has 1 rows, its result 2"),
        (StepResult(0, Csr.empty(1)), "one token for each row that samples"),
        (StepResult(0, Csr.from_lists([[1, 2]])), "one token for each row that samples"),
        (StepResult(0, Csr.from_lists([[-1]])), "token -1"),
        (replace(good, schema_version=99), "schema 99, newer than 1"),
    ):
        with pytest.raises(WorkerError, match=message):
            sched.update(bad)
        sched.check()
    assert sched.num_in_flight == 2
    update(sched, first)


def test_a_token_for_a_row_that_does_not_sample() -> None:
    sched = scheduler(budget=2)
    add(sched, "a", range(3))
    step = sched.schedule()
    with pytest.raises(WorkerError, match="none else"):
        sched.update(StepResult(0, Csr.from_lists([[1]])))
    update(sched, step)


def test_an_outcome_names_who_got_what() -> None:
    sched = scheduler(budget=5)
    one, two = add(sched, "a", range(3)), add(sched, "b", range(50, 59))
    outcome = update(sched, sched.schedule(), 4)
    assert outcome.step_id == 0
    assert outcome.requests == (one, two)
    assert [outcome.appended[i].tolist() for i in range(2)] == [[4], []]


# -- abort


def test_abort_of_a_waiting_request() -> None:
    sched = scheduler()
    request = add(sched, "a", range(3))
    assert sched.abort("a")
    assert ended(update(sched, sched.schedule())) == [("a", "abort")]
    assert request.output_token_ids == []
    assert sched.drained


def test_abort_with_steps_in_flight() -> None:
    sched = scheduler(in_flight=2)
    request = add(sched, "a", range(9))
    first, second = sched.schedule(), sched.schedule()
    assert sched.abort("a")
    sched.check()
    assert sched.num_running == 0
    assert sched.cache.usage > 0  # steps that read and write its blocks are under way
    assert ended(update(sched, first)) == [("a", "abort")]
    assert sched.cache.usage > 0
    update(sched, second)
    assert sched.cache.usage == 0.0
    assert request.output_token_ids == []
    again = Request("b", range(9), hasher=sched.cache.hasher)
    assert sched.cache.get_computed_blocks(again)[1] == 8  # what was written stays


def test_abort_of_the_unknown_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sched = scheduler()
    with caplog.at_level(logging.INFO, "hybridkv"):
        assert not sched.abort("nobody")
    assert "'nobody': no such request" in caplog.text


def test_an_abort_is_for_the_request_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives from another thread while that very request ends, and the id is used again."""
    sched = scheduler()
    add(sched, "a", range(3), max_tokens=1)
    step = sched.schedule()
    in_thread(lambda: sched.abort("a"))
    original = sched._outcomes.append

    def meanwhile(flight: InFlight, sampled: Csr) -> Csr:
        appended = original(flight, sampled)
        add(sched, "a", range(3), max_tokens=2)
        return appended

    monkeypatch.setattr(sched._outcomes, "append", meanwhile)  # the moment between end and inbox
    assert ended(sched.update(result(step))) == [("a", "length")]
    monkeypatch.undo()
    assert sched.num_waiting == 1
    turn(sched)
    assert ended(update(sched, sched.schedule())) == [("a", "length")]


# -- failure


def test_a_failed_step_never_happened() -> None:
    sched = scheduler(events=True)
    request = add(sched, "a", range(9))
    step = sched.schedule()
    sched.fail(step.id, "broken")
    sched.check()
    assert (request.num_computed_tokens, sched.num_waiting, sched.cache.usage) == (0, 1, 0.0)
    assert sched.cache.get_computed_blocks(Request("b", range(9), hasher=sched.cache.hasher))[1] == 0
    assert sched.cache.take_events() == []
    again = sched.schedule()
    assert (again.id, again.after, again.finished_rows.tolist()) == (1, -1, [0])
    assert again.num_computed.tolist() == [0]
    update(sched, again)
    assert request.num_preemptions == 0
    assert sched.statistics().failed_steps == 1
    assert sched.statistics().computed_tokens == 9


def test_later_steps_fail_too_and_earlier_ones_stay() -> None:
    sched = scheduler(in_flight=3)
    request = add(sched, "a", range(9))
    first, second, third = (sched.schedule() for _ in range(3))
    sched.fail(second.id, RuntimeError("broken"))
    sched.check()
    assert sched.num_in_flight == 1
    with pytest.raises(CacheError, match=f"step {third.id} is not in flight"):
        sched.fail(third.id, "broken")
    assert len(sched.schedule()) == 0  # the first step's token is to come
    update(sched, first, 5)
    assert request.output_token_ids == [5]
    update(sched, replace_step(sched))
    step = sched.schedule()
    assert step.num_computed.tolist() == [8]  # what the first step wrote is there
    assert step.token_ids[0].tolist() == [8, 5]


def replace_step(sched: Scheduler) -> Step:
    """The step that is next in flight."""
    return sched._in_flight[0].step


def test_failed_requests_return_in_order_to_the_front() -> None:
    sched = scheduler(budget=10)
    for name in "abc":
        add(sched, name, [ord(name)] * 5)
    step = sched.schedule()
    sched.fail(step.id, "broken")
    step = sched.schedule()
    assert [new.request_id for new in step.new_rows] == ["a", "b"]
    update(sched, step)


def test_who_was_not_in_a_failed_step_goes_on() -> None:
    sched = scheduler(budget=3)
    one, two = add(sched, "a", range(9)), add(sched, "b", [1])
    for _ in range(3):
        turn(sched)
    assert turn(sched) == {"a": 1, "b": 1}
    sched.fail(sched.schedule().id, "broken")
    assert (one.num_computed_tokens, two.num_computed_tokens) == (0, 0)
    assert turn(sched) == {"a": 3}  # 8 of its tokens were hits
    assert one.num_computed_tokens == 11
    assert turn(sched) == {"a": 1, "b": 2}
    slow = scheduler(budget=1, max_running=2)
    add(slow, "a", [1])
    turn(slow)
    other = add(slow, "b", [2])
    slow._running.limit[0] = 2  # a wants nothing more
    turn(slow)
    slow._running.limit[0] = 50
    step = slow.schedule()  # the budget is for a alone
    slow.fail(step.id, "broken")
    slow.check()
    assert (other.num_computed_tokens, slow.num_running, slow.num_waiting) == (1, 1, 1)


def test_a_failed_step_frees_those_that_ended() -> None:
    sched = scheduler()
    add(sched, "a", range(9))
    step = sched.schedule()
    sched.abort("a")
    sched.fail(step.id, "broken")
    sched.check()
    assert sched.drained
    assert sched.cache.usage == 0.0
    assert sched.cache.statistics().cached_blocks == 0
    assert sched.schedule().finished_rows.tolist() == [0]


def test_rows_that_a_failed_step_ended_are_told_again() -> None:
    sched = scheduler()
    add(sched, "a", range(3), max_tokens=1)
    add(sched, "b", range(9))
    turn(sched)
    step = sched.schedule()
    assert step.finished_rows.tolist() == [0]
    sched.fail(step.id, "broken")
    assert sorted(sched.schedule().finished_rows.tolist()) == [0, 1]


def test_failing_what_is_not_in_flight() -> None:
    sched = scheduler()
    with pytest.raises(CacheError, match="step 0 is not in flight"):
        sched.fail(0, "broken")
    update(sched, sched.schedule())
    with pytest.raises(CacheError, match="step 0 is not in flight"):
        sched.fail(0, "broken")


def test_a_failed_step_whose_blocks_were_evicted_already() -> None:
    sched = scheduler(num_blocks=6, in_flight=2)
    add(sched, "a", range(9), max_tokens=7)
    add(sched, "b", range(50, 58), max_tokens=3)
    first = sched.schedule()
    sched.abort("b")
    sched.schedule()
    sched.cache.block_pool.evict_blocks(np.arange(1, 6, dtype=np.int32))
    sched.fail(first.id, "broken")
    sched.check()
    assert sched.num_waiting == 1


# -- written


def test_events_speak_of_written_blocks() -> None:
    sched = scheduler(events=True)
    add(sched, "a", range(9), max_tokens=1)
    step = sched.schedule()
    assert sched.cache.take_events() == []
    assert sched.cache.statistics().unwritten_blocks == 2
    update(sched, step)
    (event,) = sched.cache.take_events()
    assert isinstance(event, BlockStored)
    assert event.token_ids == tuple(range(8))
    assert sched.cache.reset_prefix_cache()
    assert sched.cache.take_events() == [AllBlocksCleared()]


# -- threads


def in_thread(action: Callable[[], object]) -> list[object]:
    """What ``action`` returned or raised in another thread."""
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(action())
        except CacheError as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return outcome


def test_one_thread_owns_a_scheduler() -> None:
    sched = scheduler()
    step = sched.schedule()
    for action in (
        sched.schedule,
        lambda: sched.update(result(step)),
        lambda: sched.fail(step.id, "broken"),
        lambda: sched.finish("a"),
        sched.take_finished,
    ):
        (error,) = in_thread(action)
        assert isinstance(error, OwnershipError)
        assert "another thread drives this scheduler" in str(error)
    update(sched, step)


def test_add_abort_and_statistics_come_from_anywhere() -> None:
    sched = scheduler()
    step = sched.schedule()
    requests = [Request(name, range(3), hasher=sched.cache.hasher) for name in "ab"]
    for request in requests:
        assert in_thread(lambda request=request: sched.add(request)) == [()]  # type: ignore[misc]  # bound early
    assert (sched.num_waiting, sched.drained) == (2, False)
    assert in_thread(lambda: sched.abort("a")) == [True]
    assert in_thread(lambda: sched.abort("nobody")) == [False]
    assert sched.num_waiting == 2  # it takes effect at the owner's next call
    assert ended(update(sched, step)) == [("a", "abort")]
    assert sched.num_waiting == 1
    statistics = in_thread(sched.statistics)
    assert statistics == [sched.statistics()]
    assert turn(sched) == {"b": 3}


def test_many_threads_at_once() -> None:
    sched = scheduler(num_blocks=200, max_running=16)

    def work(first: int) -> None:
        for i in range(first, first + 25):
            add(sched, str(i), [i, 2, 3], max_tokens=2)
            if i % 5 == 0:
                sched.abort(str(i))

    sched.schedule()
    threads = [threading.Thread(target=work, args=(25 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    reasons = [reason for _, reason in ended(sched.update(StepResult(0, Csr.empty(0))))]
    while not sched.drained or any(thread.is_alive() for thread in threads):
        reasons += [reason for _, reason in ended(sched.update(result(sched.schedule())))]
    reasons += [reason for _, reason in ended(update(sched, sched.schedule()))]
    assert len(reasons) == 100
    assert reasons.count("abort") <= 20
    assert sched.statistics().requests_finished == 100


# -- statistics


def test_statistics() -> None:
    sched = scheduler(num_blocks=9)
    add(sched, "a", range(14), max_tokens=2)
    turn(sched)
    add(sched, "b", range(14), max_tokens=1)
    turn(sched)
    now = sched.statistics()
    assert (now.steps, now.waiting, now.running, now.requests_finished) == (2, 0, 0, 2)
    assert (now.prompt_tokens, now.hit_tokens, now.computed_tokens) == (28, 12, 14 + 1 + 2)
    assert (now.preemptions, now.failed_steps, now.peak_usage) == (0, 0, 5 / 8)


def test_resumed_requests_count_once_as_prompts() -> None:
    sched = scheduler(num_blocks=6)
    add(sched, "a", range(12), max_tokens=3)
    add(sched, "b", range(50, 58), max_tokens=3)
    while not sched.drained:
        turn(sched)
    now = sched.statistics()
    assert (now.preemptions, now.prompt_tokens, now.hit_tokens) == (1, 20, 0)


def test_reset_between_steps() -> None:
    sched = scheduler()
    add(sched, "a", range(9), max_tokens=1)
    turn(sched)
    assert sched.cache.reset_prefix_cache()
    add(sched, "b", range(9), max_tokens=1)
    assert turn(sched) == {"b": 9}


def test_without_caching() -> None:
    sched = scheduler(caching=False)
    for name in "ab":
        add(sched, name, range(9), max_tokens=2)
    assert turn(sched) == {"a": 9, "b": 9}
    assert turn(sched) == {"a": 1, "b": 1}
    assert sched.statistics().hit_tokens == 0
    assert sched.cache.statistics().cached_blocks == 0


def test_an_abort_behind_the_last_update_is_told_when_asked() -> None:
    sched = scheduler()
    add(sched, "a", range(3))
    update(sched, sched.schedule())
    assert sched.abort("a")
    assert sched.drained
    assert [(one.request.request_id, str(one.reason)) for one in sched.take_finished()] == [("a", "abort")]
    assert sched.take_finished() == ()


def test_a_result_whose_lists_do_not_add_up_changes_nothing() -> None:
    sched = scheduler()
    add(sched, "a", range(3))
    step = sched.schedule()
    wrong = StepResult(step.id, Csr(np.array([0, 1]), np.empty(0, np.int32)))
    with pytest.raises(WorkerError, match="the result has 0 tokens, its indptr ends at 1"):
        sched.update(wrong)
    sched.check()
    update(sched, step)
