"""The scheduler, step by step: docs/contracts.md, 6 and 10, for full attention."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hybridkv.cache import BlockHasher, KVCacheManager
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


# -- ends


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
def test_stop_token_ends_the_request(sampling: dict[str, object], eos: tuple[int, ...], reason: str | None) -> None:
    sched = scheduler()
    request = add(sched, "a", range(3), eos_token_ids=eos, **sampling)
    outcome = update(sched, sched.schedule())
    assert ended(outcome) == ([] if reason is None else [("a", reason)])
    assert request.output_token_ids == [TOKEN]


def test_caller_finish_ends_the_request_with_stop() -> None:
    sched = scheduler()
    add(sched, "a", range(3))
    turn(sched)
    assert sched.finish("a")
    assert not sched.finish("a")
    assert sched.drained
    assert ended(update(sched, sched.schedule())) == [("a", "stop")]
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]


# -- what cannot run


def test_request_that_can_never_fit_is_rejected() -> None:
    sched = scheduler(num_blocks=4)
    with pytest.raises(
        CapacityError, match=r"may reach 13 tokens, which need 4 blocks, 160 B with the null block, .* has 3"
    ):
        add(sched, "a", range(4), max_tokens=10)
    add(sched, "a", range(4), max_tokens=9)  # 12 tokens are computed, the 13th is not
    while not sched.drained:
        turn(sched)
    assert sched.statistics().preemptions == 0


def test_prompt_as_long_as_the_model_is_rejected() -> None:
    sched = scheduler(max_model_len=8)
    with pytest.raises(ConfigError, match="has 8 tokens, but the limit is max_model_len - 1, 7: shorten the prompt"):
        add(sched, "a", range(8))
    add(sched, "a", range(7))


def test_scheduler_rejects_requests_of_another_hasher() -> None:
    sched = scheduler()
    for hasher in (None, BlockHasher(4)):
        with pytest.raises(ConfigError, match=r"hasher=cache\.hasher"):
            sched.add(Request("a", range(3), hasher=hasher))
    assert sched.num_waiting == 0


def test_request_id_in_use_is_rejected() -> None:
    sched = scheduler(in_flight=2)
    add(sched, "a", range(3))
    with pytest.raises(ConfigError, match="request id 'a' is in use"):
        add(sched, "a", range(3))
    step = sched.schedule()
    assert sched.abort("a")
    with pytest.raises(ConfigError, match="request id 'a' is in use"):
        add(sched, "a", range(3))  # its blocks are still in use
    update(sched, step)
    add(sched, "a", range(3))


def test_request_that_has_run_is_rejected() -> None:
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
def test_scheduler_limit_below_one_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        replace(SchedulerLimits(), **{name: 0})  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize("watermark", [-0.1, 1.0])
def test_watermark_outside_a_share_is_rejected(watermark: float) -> None:
    with pytest.raises(ConfigError, match="watermark must be a share"):
        SchedulerLimits(watermark=watermark)


# -- results


def test_result_that_does_not_fit_changes_nothing() -> None:
    sched = scheduler(in_flight=2)
    add(sched, "a", range(3))
    with pytest.raises(CacheError, match="no step is in flight"):
        sched.update(StepResult(0, Csr.empty(0)))
    first, second = sched.schedule(), sched.schedule()
    good = result(first)
    for bad, message in (
        (result(second), "got the result of step 1, but step 0 is next"),
        (StepResult(0, Csr.empty(2)), "step 0 has 1 rows, but its result has 2"),
        (StepResult(0, Csr.empty(1)), "one token for each row that samples"),
        (StepResult(0, Csr.from_lists([[1, 2]])), "one token for each row that samples"),
        (StepResult(0, Csr.from_lists([[-1]])), "token -1"),
        (replace(good, schema_version=99), "schema 99, newer than 6"),
    ):
        with pytest.raises(WorkerError, match=message):
            sched.update(bad)
        sched.check()
    assert sched.num_in_flight == 2
    update(sched, first)


# -- abort


def test_abort_of_unknown_id_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    sched = scheduler()
    with caplog.at_level(logging.INFO, "hybridkv"):
        assert not sched.abort("nobody")
    assert "'nobody': no such request" in caplog.text


def test_abort_of_a_reused_id_spares_the_new_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives from another thread while that very request ends, and the id is used again."""
    sched = scheduler()
    add(sched, "a", range(3), max_tokens=1)
    step = sched.schedule()
    in_thread(lambda: sched.abort("a"))
    original = sched._running.append

    def meanwhile(flight: InFlight, sampled: Csr) -> Csr:
        appended = original(flight, sampled)
        add(sched, "a", range(3), max_tokens=2)
        return appended

    monkeypatch.setattr(sched._running, "append", meanwhile)  # the moment between end and inbox
    assert ended(sched.update(result(step))) == [("a", "length")]
    monkeypatch.undo()
    assert sched.num_waiting == 1
    turn(sched)
    assert ended(update(sched, sched.schedule())) == [("a", "length")]


# -- failure


def test_fail_of_step_not_in_flight_is_rejected() -> None:
    sched = scheduler()
    with pytest.raises(CacheError, match="step 0 is not in flight"):
        sched.fail(0, "broken")
    update(sched, sched.schedule())
    with pytest.raises(CacheError, match="step 0 is not in flight"):
        sched.fail(0, "broken")


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


def test_scheduler_call_from_another_thread_is_rejected() -> None:
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
        assert "another thread owns this scheduler" in str(error)
    update(sched, step)


def test_scheduler_add_abort_and_statistics_work_from_any_thread() -> None:
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


def test_scheduler_with_many_threads_finishes_every_request() -> None:
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


def test_abort_after_the_last_update_is_reported_by_take_finished() -> None:
    sched = scheduler()
    add(sched, "a", range(3))
    update(sched, sched.schedule())
    assert sched.abort("a")
    assert sched.drained
    assert [(one.request.request_id, str(one.reason)) for one in sched.take_finished()] == [("a", "abort")]
    assert sched.take_finished() == ()


def test_result_with_inconsistent_lists_changes_nothing() -> None:
    sched = scheduler()
    add(sched, "a", range(3))
    step = sched.schedule()
    wrong = StepResult(step.id, Csr(np.array([0, 1]), np.empty(0, np.int32)))
    with pytest.raises(WorkerError, match="its number of tokens, 0, but it ends at 1"):
        sched.update(wrong)
    sched.check()
    update(sched, step)
