"""Look-ups on a thread: their times count, and a request that waits no longer leaves no question behind."""

from concurrent.futures import ThreadPoolExecutor
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
    found, clock = Found(), [0.0]
    requests = [Request(name, [1, 2, 3]) for name in ("runs", "queued")]
    with ThreadPoolExecutor(1) as threads:
        lookups = StoreLookups(found, found, threads, 5.0, clock=lambda: clock[0])  # type: ignore[arg-type]
        assert [lookups.ask(one, 0, 10.0) for one in requests] == [None, None]
        found.begun.wait(60)
        clock[0] = 4.9
        assert [lookups.ask(one, 0, 14.9) for one in requests] == [None, None]
        clock[0] = 5.0
        assert [lookups.ask(one, 0, 15.0) for one in requests] == [0, 0]
        assert [lookups.knows(one) for one in ("runs", "queued", "other")] == [True, True, False]
        clock[0] = 6.0
        found.may.set()
    assert found.asked == ["runs"]  # the other one had not begun
    assert [lookups.ask(one, 0, 16.0) for one in requests] == [0, 0]
    assert lookups.take_times() == [(5.0, True), (6.0, False)]  # time in the queue says nothing about the store
    assert lookups.take_times() == []


def test_look_up_that_waited_for_its_thread_is_not_late() -> None:
    found, clock = Found(), [3.0]
    with ThreadPoolExecutor(1) as threads:
        lookups = StoreLookups(found, found, threads, 5.0, clock=lambda: clock[0])  # type: ignore[arg-type]
        request = Request("one", [1, 2, 3])
        assert lookups.ask(request, 0, 0.0) is None
        found.begun.wait(60)  # 3 s after it was asked
        clock[0] = 5.0
        assert lookups.ask(request, 0, 5.0) == 0
        found.may.set()
    assert lookups.take_times() == [(2.0, False)]


def test_look_ups_without_a_clock_are_not_timed() -> None:
    found = Found()
    found.may.set()
    with ThreadPoolExecutor(1) as threads:
        lookups = StoreLookups(found, found, threads)  # type: ignore[arg-type]
        lookups.ask(Request("one", [1, 2, 3]), 0, 0.0)
    assert lookups.ask(Request("one", [1, 2, 3]), 0, 0.0) == 7
    assert lookups.take_times() == []
