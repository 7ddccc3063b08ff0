"""Look-ups on a thread: their times count, and a request that waits no longer leaves no question behind."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
from typing import Any

from hybridkv.request import Request
from hybridkv.tiers import StoreLookups


class Found:
    """In place of Prefixes: finds seven tokens of each request, once it may."""

    def __init__(self) -> None:
        self.may, self.begun, self.asked = Event(), Event(), list[str]()

    def find(self, store: Any, request: Request, least: int) -> int:  # noqa: ANN401 - none
        del store, least
        self.begun.set()
        self.may.wait(60)
        self.asked.append(request.request_id)
        return 7


def test_late_look_ups_are_withdrawn_and_those_that_ran_are_timed() -> None:
    found, ticks = Found(), count()
    requests = [Request(name, [1, 2, 3]) for name in ("runs", "queued")]
    with ThreadPoolExecutor(1) as threads:
        lookups = StoreLookups(found, found, threads, 5.0, clock=lambda: float(next(ticks)))  # type: ignore[arg-type]
        assert [lookups.ask(one, 0, 10.0) for one in requests] == [None, None]
        found.begun.wait(60)
        assert [lookups.ask(one, 0, 14.9) for one in requests] == [None, None]
        assert [lookups.ask(one, 0, 15.0) for one in requests] == [0, 0]
        assert [lookups.knows(one) for one in ("runs", "queued", "other")] == [True, True, False]
        found.may.set()
    assert found.asked == ["runs"]  # the other one had not begun
    assert [lookups.ask(one, 0, 16.0) for one in requests] == [0, 0]
    assert lookups.take_times() == [(5.0, True), (1.0, False)]  # time in the queue says nothing about the store
    assert lookups.take_times() == []


def test_look_ups_without_a_clock_are_not_timed() -> None:
    found = Found()
    found.may.set()
    with ThreadPoolExecutor(1) as threads:
        lookups = StoreLookups(found, found, threads)  # type: ignore[arg-type]
        lookups.ask(Request("one", [1, 2, 3]), 0, 0.0)
    assert lookups.ask(Request("one", [1, 2, 3]), 0, 0.0) == 7
    assert lookups.take_times() == []
