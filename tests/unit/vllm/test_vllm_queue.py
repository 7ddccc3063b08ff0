"""WaitingByPrefix: who is admitted next, by a count of cached tokens; and with the counts of a cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from engine_groups import PROMPT, SIZE, Asked, FullAttentionSpec, MambaSpec, SlidingWindowSpec, manager, run
from hybridkv.eviction import HAZARD
from hybridkv.vllm.queue import LOOKED_AT, WaitingByPrefix
from hybridkv.vllm.requests import GROWTH, growth_of


@dataclass(eq=False)
class Waits:
    """A waiting request. cached: tokens of its longest cached prefix."""

    request_id: str
    cached: int = 0
    num_preemptions: int = 0


@dataclass
class Memory:
    """is_full: whether each request evicts something. looked_at: requests whose cached tokens were read."""

    is_full: bool = True
    looked_at: list[str] = field(default_factory=list)

    def queue(self, *requests: Waits, most: int = 2) -> WaitingByPrefix:
        waiting: Any = requests
        return WaitingByPrefix(waiting, most, lambda _: self.is_full, self._cached)

    def _cached(self, request: Any) -> int:  # noqa: ANN401 - a Waits
        self.looked_at.append(request.request_id)
        return int(request.cached)


def admit(queue: WaitingByPrefix, count: int = 100) -> str:
    """Admit up to ``count`` requests; their ids in order."""
    admitted = list[str]()
    while queue and len(admitted) < count:
        following = queue.peek_request()
        assert queue.pop_request() is following
        admitted.append(following.request_id)
    return "".join(admitted)


def test_longest_cached_prefix_is_next_while_memory_is_full() -> None:
    requests = [Waits("a", 5), Waits("b", 9), Waits("c", 20), Waits("d", 9)]
    assert admit(Memory().queue(*requests, most=9)) == "cbda"
    assert admit(Memory(is_full=False).queue(*requests)) == "abcd"


def test_request_is_overtaken_at_most_the_limit_of_times() -> None:
    queue: Any = Memory().queue(Waits("a"), most=3)
    admitted = ""
    for number in range(8):  # each has more cached tokens than any before
        queue.add_request(Waits(str(number), 10 + number))
        admitted += admit(queue, 1)
    assert admitted == "012a4563"
    assert queue._overtaken.keys() == {one.request_id for one in queue} - {"7"}


def test_request_that_must_be_next_stops_those_after_it() -> None:
    queue = Memory().queue(Waits("a", 9), Waits("b", 1), Waits("c", 5), Waits("d", 99), most=1)
    assert admit(queue, 1) == "d"
    assert admit(queue) == "abc"


def test_preempted_requests_are_not_overtaken() -> None:
    assert admit(Memory().queue(Waits("a", 0, 1), Waits("b", 9))) == "ab"
    assert admit(Memory().queue(Waits("a"), Waits("b", 9, 1), Waits("c", 99))) == "bca"


def test_requests_that_were_skipped_go_first_and_cost_no_look_up() -> None:
    """As vLLM's loop does with a request of an adapter for which there is no room, in each step."""
    memory = Memory()
    queue: Any = memory.queue(Waits("skipped"), most=3)
    for number in range(9):
        queue.add_request(Waits(f"a {number}", 10 + number))
        queue.add_request(Waits(f"b {number}", 10 + number))
        skipped = [queue.pop_request()] if queue.peek_request().request_id == "skipped" else []
        assert len(skipped) == (number > 2)
        assert admit(queue, 1) != "skipped"
        queue.prepend_requests(skipped)
        memory.looked_at.clear()
        assert (queue.peek_request().request_id == "skipped") == (number > 1)
        assert bool(memory.looked_at) == (number < 2)
    assert admit(queue, 1) == "skipped"


def test_next_request_is_chosen_again_when_others_come_or_go() -> None:
    memory = Memory()
    queue: Any = memory.queue(*(Waits(str(number)) for number in range(LOOKED_AT + 5)))
    assert queue.peek_request().request_id == "0"
    memory.looked_at.clear()
    assert queue.peek_request().request_id == "0"
    queue.add_request(Waits("far", 99))
    assert queue.peek_request().request_id == "0"
    assert not memory.looked_at
    last = [*queue][1]
    last.cached = 5
    changes: list[Callable[[], None]] = [
        lambda: queue.remove_request([*queue][3]),
        lambda: queue.remove_requests([[*queue][3], Waits("unknown")]),
        lambda: queue.prepend_request(Waits("front")),
        lambda: queue.prepend_requests([]),
    ]
    for change in changes:
        last.cached += 1
        queue._next = next(iter(queue))
        change()
        assert queue.peek_request() is last
    near: Any = memory.queue(Waits("a"))
    for number in range(1, 2 * LOOKED_AT):
        near.add_request(Waits(str(number), number))
        assert near.peek_request().request_id == str(min(number, LOOKED_AT - 1))


def test_choice_holds_until_others_come_or_go() -> None:
    memory = Memory()
    first, second, third = Waits("a", 2), Waits("b", 9), Waits("c", 5)
    queue: Any = memory.queue(first, second, third)
    assert queue.peek_request() is second
    memory.is_full = False
    assert queue.peek_request() is second
    memory.is_full = True
    second.cached = 2
    assert queue.peek_request() is second
    queue.remove_requests([])
    assert queue.peek_request() is third


def test_removed_requests_leave_no_count() -> None:
    queue: Any = Memory().queue(*(Waits(str(number), number) for number in range(6)), most=9)
    assert admit(queue, 2) == "54"
    assert queue._overtaken == dict.fromkeys("0123", 2)
    queue.remove_requests([*queue][:2])
    queue.remove_request([*queue][1])
    assert queue._overtaken == {"2": 2}


def test_requests_behind_the_first_ones_do_not_compete() -> None:
    memory = Memory()
    queue = memory.queue(*(Waits(str(number), number) for number in range(3 * LOOKED_AT)))
    assert queue.peek_request().request_id == str(LOOKED_AT - 1)
    assert set(memory.looked_at) == {str(number) for number in range(LOOKED_AT)}


def test_order_of_arrival_equals_vllms_queue_while_memory_is_not_full() -> None:
    random, queue, known = Random(0), Memory(is_full=False).queue(), deque[Any]()
    for number in range(2000):
        new: list[Any] = [Waits(f"{number} {one}", random.randrange(9)) for one in range(random.randrange(1, 4))]
        gone: list[Any] = random.sample([*known], min(len(known), 2))
        match random.choice("aappfrx"):
            case "a":
                queue.add_request(new[0])
                known.append(new[0])
            case "f":
                queue.prepend_request(new[0])
                known.appendleft(new[0])
            case "r":
                queue.prepend_requests(new)
                known.extendleft(new)
            case "x" if number % 2:
                queue.remove_requests([*gone, new[0]])
                known = deque(one for one in known if one not in gone)
            case "x" if gone:
                queue.remove_request(gone[0])
                known.remove(gone[0])
            case "p" if known:
                assert queue.pop_request() is known.popleft()
        assert ([*queue], len(queue), bool(queue)) == ([*known], len(known), bool(known))
    assert queue._overtaken.keys() <= {one.request_id for one in queue}


def test_pop_takes_the_request_that_was_admitted() -> None:
    memory = Memory()
    queue: Any = memory.queue(Waits("a", 2), Waits("b", 9), Waits("c", 5))
    for name, is_full in (("b", False), ("a", True)):
        chosen = queue.peek_request()
        chosen.cached, memory.is_full = 0, is_full
        assert queue.pop_request() is chosen
        assert chosen.request_id == name


def test_pop_without_peek_takes_the_same_request() -> None:
    assert Memory().queue(Waits("a"), Waits("b", 3)).pop_request().request_id == "b"
    with pytest.raises(IndexError):
        Memory().queue().peek_request()


# -- the counts of a cache


@pytest.mark.parametrize("specs", [(FullAttentionSpec(),), (FullAttentionSpec(), MambaSpec())])
def test_vllm_manager_counts_cached_tokens_of_waiting_requests(specs: tuple[object, ...]) -> None:
    cache = manager(*specs, eviction=HAZARD)
    known, other = Asked("known", [*PROMPT, 1, 2, 3]), Asked("other", [50] * 9)
    assert cache.cached_tokens(known) == 0
    first = Asked("first", PROMPT)
    run(cache, first, 12)
    run(cache, first, 2)
    cache.free(first)
    assert (cache.cached_tokens(known), cache.cached_tokens(other)) == (12, 0)
    assert cache.get_computed_blocks(known)[1] == 12
    known.append(9)
    assert cache.get_computed_blocks(known)[1] == 12
    unread = Asked("unread", PROMPT)
    unread.skip_reading_prefix_cache = True
    assert cache.cached_tokens(unread) == 0
    for number in range(8):
        last = Asked(f"filler {number}", [20 + number] * len(PROMPT))
        run(cache, last, 12)
        run(cache, last, 2)
        cache.free(last)
    assert cache.get_computed_blocks(known)[1] == 0  # the remembered hit was evicted
    assert cache.cached_tokens(known) == 0
    run(cache, known, known.num_tokens)
    cache.free(other)
    assert not cache._hits


def test_vllm_manager_knows_which_requests_evict_something() -> None:
    cache, lru = manager(FullAttentionSpec(), eviction=HAZARD), manager(FullAttentionSpec())
    ask = Asked("ask", [60] * 24)  # six of 19 blocks
    for number in range(5):
        for one in (cache, lru):
            request = Asked(f"{number}", [number + 1] * 16)
            run(one, request, 16)
            one.free(request)
        assert cache.evicts(ask) == (4 * (number + 1) + 6 > 19)
        assert not lru.evicts(ask)
    assert not cache.evicts(Asked("cached", [*[5] * 16, 7, 7]))  # one block more, and three are free


def test_vllm_manager_counts_the_blocks_of_all_groups_and_those_just_freed() -> None:
    cache = manager(FullAttentionSpec(), SlidingWindowSpec(), eviction=HAZARD)
    asks = [Asked(f"{blocks}", [60] * SIZE * blocks) for blocks in range(1, 16)]
    empty = [cache.evicts(ask) for ask in asks]
    assert (empty[0], empty[-1]) == (False, True)
    assert not any(manager(FullAttentionSpec(), eviction=HAZARD).evicts(ask) for ask in asks)
    first = Asked("first", [1] * SIZE * 8)
    run(cache, first, first.num_tokens)
    ids = {one for group in cache.get_block_ids("first") for one in group} - {0}
    cache.free(first)
    assert [cache.evicts(ask) for ask in asks] > empty
    cache.evict_blocks(ids)
    assert [cache.evicts(ask) for ask in asks] == empty


@pytest.mark.parametrize(
    ("specs", "kept"),
    [((FullAttentionSpec(),), 0.25), ((SlidingWindowSpec(),), 0), ((FullAttentionSpec(), SlidingWindowSpec()), 0.25)],
)
def test_ranked_eviction_keeps_blocks_free_for_running_requests_of_full_attention(
    specs: tuple[object, ...], kept: float
) -> None:
    assert GROWTH * growth_of(manager(*specs, eviction=HAZARD).cache) == kept
    assert not growth_of(manager(*specs).cache)
