"""Requests that wait: their order, and what each operation on one of them costs however many there are."""

import sys
from collections.abc import Callable
from contextlib import closing
from random import Random
from types import FrameType
from typing import Any, Literal

import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.models import read_model
from hybridkv.planner import plan
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.schedule.queue import Waiting, WaitingQueue
from hybridkv.step import Csr, StepResult
from hybridkv.testing import attention_config

Policy = Literal["fcfs", "priority"]
FEW, MANY, OPERATIONS = 250, 4000, 60


class Rank(int):
    """A priority that is compared in Python, so that the comparisons of a heap or a bisection are counted, too."""

    def __lt__(self, other: object) -> bool:
        return int(self) < int(other)  # type: ignore[call-overload, no-any-return]  # another Rank

    def __eq__(self, other: object) -> bool:
        return int(self) == int(other)  # type: ignore[call-overload, no-any-return]  # as above

    __hash__ = int.__hash__


def bytecodes(work: Callable[[], object]) -> int:
    """How many instructions of Python ``work`` runs, in whatever function."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401 - itself: a type that has no end
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


class Crowd:
    """A scheduler with one seat, which is taken, and ``waiting`` requests in the queue."""

    def __init__(self, waiting: int, policy: Policy) -> None:
        self.random = Random(waiting)
        self.cache = KVCacheManager(attention_config(32, (4,)), 100)
        limits = SchedulerLimits(max_running=1, policy=policy, max_in_flight=2)
        self.scheduler = Scheduler(self.cache, limits, clock=lambda: 0.0)
        self.queue = self.scheduler._waiting
        self.scheduler.add(self.new("runs", -1))
        self.scheduler.schedule()
        self.requests = [self.new(f"r{number}") for number in range(waiting)]
        for request in self.requests:
            self.scheduler.add(request)
        self.random.shuffle(self.requests)
        self.scheduler.abort("nobody")
        self.scheduler.finish("nobody")  # the inbox is empty behind it
        assert len(self.queue) == waiting

    def new(self, name: str, rank: int | None = None) -> Request:
        priority = Rank(self.random.randrange(1000) if rank is None else rank)
        return Request(name, [1, 2, 3], SamplingParams(max_tokens=4), hasher=self.cache.hasher, priority=priority)

    def add(self) -> None:
        for number in range(OPERATIONS):
            self.scheduler.add(self.new(f"new{number}"))
        self.scheduler.finish("nobody")

    def abort(self) -> None:
        for request in self.requests[:OPERATIONS]:
            assert self.scheduler.abort(request.request_id)

    def finish(self) -> None:
        for request in self.requests[:OPERATIONS]:
            assert self.scheduler.finish(request.request_id)

    def abort_in_one_go(self) -> None:
        """As from other threads: the owner finds all of them when it looks."""
        for request in self.requests[:OPERATIONS]:
            self.scheduler._waiting.abort(request.request_id)
        step = self.scheduler._in_flight[0].step
        self.scheduler.update(StepResult(step.id, Csr.from_lists([[7]])))

    def ask(self) -> None:
        for request in self.requests[:OPERATIONS]:
            assert self.queue.find(request.request_id) is request
            assert self.queue.complete(request)
            assert self.scheduler.num_waiting == len(self.requests)

    def come_and_return(self) -> None:
        """Admitted and preempted again, by turns."""
        for _ in range(OPERATIONS):
            with closing(self.queue.in_order()) as entries:
                first = next(entries)
                self.queue.remove(first.request)
            self.queue.return_to_front([Waiting(first.request, first.queue_key)])

    def supersede(self) -> None:
        """A step looks at some that it does not admit."""
        for _ in range(OPERATIONS // 10):
            with closing(self.queue.in_order()) as entries:
                for _ in range(10):
                    next(entries)

    def schedule(self) -> None:
        """A step in which somebody waits behind a full house."""
        self.scheduler.schedule()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    "operation",
    [
        Crowd.add,
        Crowd.abort,
        Crowd.finish,
        Crowd.abort_in_one_go,
        Crowd.ask,
        Crowd.come_and_return,
        Crowd.supersede,
        Crowd.schedule,
    ],
)
def test_waiting_queue_operation_costs_at_most_a_logarithm(operation: Callable[[Crowd], None], policy: Policy) -> None:
    few, many = Crowd(FEW, policy), Crowd(MANY, policy)
    cost = bytecodes(lambda: operation(few))
    assert bytecodes(lambda: operation(many)) < 1.6 * cost  # log2(4000) / log2(250) = 1.50; 16 if it were linear
    few.scheduler.check()


def test_waiting_queue_hands_out_requests_added_during_iteration() -> None:
    """As the branches of a request that ends when its admission fails."""
    queue = WaitingQueue()
    requests = [Request(name, [1]) for name in "abcd"]
    for request in requests:
        queue.append(request)
    late = Request("late", [1])
    with closing(queue.in_order()) as entries:
        assert [next(entries).request, next(entries).request] == requests[:2]
        queue.remove(requests[1])
        queue.return_to_front([queue.entry(late)])
        assert [entry.request for entry in entries] == [late, *requests[2:]]
    assert [one.request for one in queue.entries()] == [late, requests[0], *requests[2:]]
    with closing(queue.in_order()) as entries:
        assert [entry.request for entry in entries] == [late, requests[0], *requests[2:]]


def test_waiting_request_reports_its_reason() -> None:
    """For a seat, memory, a turn, or a step that was not made yet."""
    cache = KVCacheManager(attention_config(12, (4,)), 40)
    scheduler = Scheduler(cache, SchedulerLimits(max_running=2, max_batched_tokens=24, max_overtaken=0))
    for name, tokens in (("a", 20), ("b", 36), ("c", 4)):
        scheduler.add(_asked(cache, name, tokens))
    assert _waits(scheduler) == {"a": "arrived", "b": "arrived", "c": "arrived"}
    scheduler.schedule()
    assert _waits(scheduler) == {"b": "admission_limit", "c": "turn"}
    scheduler.abort("b")
    scheduler.add(_asked(cache, "d", 4))
    scheduler.update(StepResult(0, Csr.from_lists([[7]])))
    scheduler.schedule()
    assert _waits(scheduler) == {"d": "seats"}


def test_branches_wait_for_their_parent_request() -> None:
    cache = KVCacheManager(plan(read_model("llama-3-8b"), memory="1GiB", max_model_len=512))
    scheduler = Scheduler(cache, SchedulerLimits(max_batched_tokens=64))
    scheduler.add(_asked(cache, "p", 100, n=3))
    scheduler.schedule()
    assert _waits(scheduler) == {"p#1": "parent", "p#2": "parent"}


def _asked(cache: KVCacheManager, name: str, tokens: int, n: int = 1) -> Request:
    prompt = [ord(name), *range(200, 199 + tokens)]
    return Request(name, prompt, SamplingParams(max_tokens=4, n=n), hasher=cache.hasher)


def _waits(scheduler: Scheduler) -> dict[str, str]:
    return {one.request.request_id: str(one.reason) for one in scheduler.waits()}
