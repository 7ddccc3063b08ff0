"""hybridkv.vllm.requests without vLLM: slots given before they are asked for are those asked for one by one."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine_groups import SIZE, Asked, FullAttentionSpec, MambaSpec, SlidingWindowSpec, manager, run
from hybridkv.vllm.manager import CacheManager


def running(cache: CacheManager, count: int) -> list[Asked]:
    """Requests of different prompts, as long as blocks are, that decode next."""
    found = [Asked(str(number), [number + 1] * (SIZE * 2)) for number in range(count)]
    for request in found:
        run(cache, request, request.num_tokens)
        request.append(7)
    cache.take_new_block_ids()
    return found


def ids_of(blocks: Any) -> Any:  # noqa: ANN401 - Blocks or None
    return None if blocks is None else blocks.get_block_ids()


def test_prepared_slots_of_a_step_equal_single_allocations() -> None:
    specs = FullAttentionSpec(), SlidingWindowSpec()
    together, alone = manager(*specs, num_blocks=180), manager(*specs, num_blocks=180)
    batch, single = running(together, 12), running(alone, 12)
    for token in range(9):
        with together.step():
            together.ahead.give(batch, 1, 0)
            given = [together.allocate_slots(one, 1) for one in batch]
        with alone.step():
            wanted = [alone.allocate_slots(one, 1) for one in single]
        assert [one and one.get_block_ids() for one in given] == [one and one.get_block_ids() for one in wanted]
        assert sorted(together.take_new_block_ids()) == sorted(alone.take_new_block_ids())
        for cache, requests in ((together, batch), (alone, single)):
            cache.scheduled(token)
            cache.executed(token)
            for one in requests:
                one.num_computed_tokens += 1
                one.append(token)
                cache.cache_blocks(one, one.num_computed_tokens)
    for first, second in zip(batch, single, strict=True):
        assert together.get_block_ids(first.request_id) == alone.get_block_ids(second.request_id)
        assert together.get_computed_blocks(Asked("x", first.all_token_ids))[1] == 16
    together.cache.check()


def test_prepared_blocks_that_were_not_taken_come_in_the_next_step() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=60)
    first, second, *others = running(cache, 9)
    with cache.step():
        cache.ahead.give([first, second, *others], 1, 0)
        given = cache.allocate_slots(first, 1)
    assert given is not None
    assert given.get_block_ids() == ([19],)
    with cache.step():
        assert cache.decode([second], 1) is not None, "it is looked at, though it has blocks for what it runs"
        given = cache.allocate_slots(second, 5)
    assert given is not None
    assert given.get_block_ids() == ([28],)
    with cache.step():
        given = cache.allocate_slots(others[0], 5)
    assert given is not None
    assert given.get_block_ids() == ([21, 29],)
    with cache.step():
        cache.ahead.give([first, second], 1, 0)
    cache.free(second)
    assert cache.get_block_ids("1") == ([],)


def test_prepared_slots_end_before_the_first_prefill() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=60)
    third, *leading = running(cache, 12)
    prefills, behind = leading.pop(), leading.pop()
    prefills.append(*range(8))
    third.num_output_placeholders = -1  # nothing left to run
    leading[0].num_in_flight_tokens = 99  # of before it was preempted
    with cache.step():
        cache.ahead.give([third, *leading, prefills, behind], 1, 0)
        assert all(cache.ahead.take(one, 1, 0) for one in leading)
        assert not any(cache.ahead.take(one, 1, 0) for one in (prefills, behind, third))
        assert all(one.request_id in cache.ahead.owed for one in leading)
        assert third.request_id not in cache.ahead.owed


def test_prepared_slots_end_before_a_chunk_that_fits_its_block() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=60)
    prefills, *behind = running(cache, 12)
    with cache.step():
        assert cache.allocate_slots(prefills, 1) is not None  # a new block: a step of one token needs nothing now
    prefills.num_computed_tokens += 1
    prefills.append(*range(8))
    prefills.is_prefill_chunk = True
    with cache.step():
        cache.ahead.give([prefills, *behind], 1, 0)
        assert cache.ahead.take(prefills, 1, 0)
        assert not any(cache.ahead.take(one, 1, 0) for one in behind)


QUIET = {1: {1, 2}, 2: {2}}
"""By number of groups: of each block, tokens whose step needs nothing."""


@pytest.mark.parametrize("specs", [(FullAttentionSpec(),), (FullAttentionSpec(), MambaSpec())])
def test_requests_that_need_nothing_are_skipped_with_equal_slots(specs: Sequence[Any]) -> None:
    """All calls give equal results. Of four tokens one takes a block, one drops a state, one publishes a block."""
    some, each = manager(*specs), manager(*specs)
    requests = [running(cache, 2) for cache in (some, each)]
    for place in range(4 * SIZE):
        given = []
        with some.step(), each.step():
            for cache, several in zip((some, each), requests, strict=True):
                for request in several if cache is each else ():
                    cache.ahead.forget(request.request_id)
                given.append([ids_of(cache.allocate_slots(request, 1)) for request in several])
            looked_at = list(some.ahead.served)
        assert given[0] == given[1]
        assert looked_at == ([] if place % SIZE in QUIET[len(specs)] else ["0", "1"])
        for cache, several in zip((some, each), requests, strict=True):
            cache.scheduled(several)
            cache.executed(several)
            for request in several:
                request.num_computed_tokens += 1
                request.append(place)
                cache.cache_blocks(request, request.num_computed_tokens)
            cache.cache.check()
    assert some.get_block_ids("0") == each.get_block_ids("0")
    other = [Asked("other", list(requests[0][0].all_token_ids)) for _ in range(2)]
    hits = [cache.get_computed_blocks(one)[1] for cache, one in zip((some, each), other, strict=True)]
    assert hits[0] == hits[1] > 8


def test_prepared_slots_that_do_not_fit_are_allocated_singly() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=6)
    first, second = running(cache, 2)
    with cache.step():
        cache.ahead.give([first, second], 1, 0)
        assert cache.allocate_slots(first, 1) is not None
        assert cache.allocate_slots(second, 1) is None


# -- steps in which all decode one token


def settle(cache: CacheManager, several: Sequence[Asked], token: int) -> None:
    """Their step has run."""
    cache.scheduled(several)
    cache.executed(several)
    for request in several:
        request.num_computed_tokens += 1
        request.append(token)


@pytest.mark.parametrize("count", [3, 12])
@pytest.mark.parametrize(
    "specs", [(FullAttentionSpec(),), (FullAttentionSpec(), SlidingWindowSpec()), (FullAttentionSpec(), MambaSpec())]
)
def test_decode_of_one_token_each_equals_single_allocations(specs: Sequence[Any], count: int) -> None:
    """Ids, blocks to clear and hits are equal, for requests that cross a block boundary together or at other times."""
    batched, asked = (manager(*specs, num_blocks=40 * count) for _ in range(2))
    sides = [running(cache, count) for cache in (batched, asked)]
    for cache, several in zip((batched, asked), sides, strict=True):
        for request in several[::2]:
            run(cache, request, 1)
            request.append(3)
        cache.take_new_block_ids()
    for place in range(4 * SIZE):
        with batched.step(), asked.step():
            decoded = batched.decode(sides[0], count)
            assert decoded is not None
            assert decoded.requests == sides[0]
            assert decoded.num_computed_tokens == [request.num_computed_tokens for request in sides[0]]
            one_by_one = [asked.allocate_slots(request, 1) for request in sides[1]]
        assert decoded.new_blocks == [new.get_block_ids(allow_none=True) for new in one_by_one if new is not None]
        assert batched.take_new_block_ids() == asked.take_new_block_ids()
        for cache, several in zip((batched, asked), sides, strict=True):
            settle(cache, several, place)
        again = [Asked(f"again {place}", sides[0][0].all_token_ids) for _ in range(2)]
        hits = [cache.get_computed_blocks(one)[1] for cache, one in zip((batched, asked), again, strict=True)]
        assert hits[0] == hits[1]
    assert hits[0] > SIZE * 2


def covered_by(cache: CacheManager, several: Sequence[Any]) -> int:
    """Return how many of ``several`` decode, if two suffice; with three to be covered, none may."""
    decoded = cache.decode(several, 2)
    assert decoded is not None
    assert [one.request_id for one in decoded.requests] == [one.request_id for one in several[: decoded.covered]]
    return decoded.covered


def test_decode_ends_before_a_request_with_other_than_one_token() -> None:
    cache = manager(FullAttentionSpec())
    several = running(cache, 4)
    third = several[2]
    with cache.step():
        third.append(8)  # two tokens to run
        assert cache.decode(several, 3) is None
        assert covered_by(cache, several) == 2
        third.all_token_ids.pop()
        for name, value in (("is_prefill_chunk", True), ("mm_features", [object()])):
            before = getattr(third, name)
            setattr(third, name, value)
            assert cache.decode(several, 3) is None
            assert covered_by(cache, several) == 2
            setattr(third, name, before)
        assert cache.decode([*several[:2], Asked("nobody knows", [1])], 3) is None
        assert covered_by(cache, [*several[:2], Asked("nobody knows", [1])]) == 2
        assert covered_by(cache, several) == 4
    short = manager(FullAttentionSpec(), max_model_len=SIZE * 2 + 1)
    ends = running(short, 1)
    with short.step():
        assert short.decode(ends, 1) is None


def test_decode_omits_requests_that_wait_for_their_last_token() -> None:
    cache = manager(FullAttentionSpec())
    first, second = running(cache, 2)
    second.num_output_placeholders, second.num_computed_tokens, second.max_tokens = 1, SIZE * 2 + 1, 2
    with cache.step():
        decoded = cache.decode([first, second], 2)
    assert decoded is not None
    assert (decoded.covered, decoded.requests) == (2, [first])


def test_decode_without_enough_blocks_leaves_allocation_to_the_loop() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=8)  # one is none, each of two holds two: four are left, less one
    several = running(cache, 3)
    with cache.step():
        assert cache.decode(several, 3) is None
        given = [ids_of(cache.allocate_slots(request, 1)) for request in several]
    assert [ids is None for ids in given] == [False, True, True]
    assert sum(map(len, given[0])) == 1


def test_decode_ends_before_the_request_that_gets_no_slot() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=8)
    several = running(cache, 3)
    with cache.step():
        decoded = cache.decode(several, 1)
        assert decoded is not None
        assert (decoded.covered, decoded.requests, len(decoded.new_blocks)) == (1, several[:1], 1)
        assert ids_of(cache.allocate_slots(several[1], 1)) is None


def test_requests_that_decode_count_as_scheduled_when_others_are_admitted() -> None:
    """vLLM's loop does not see them, and a request that runs alone may take blocks that are kept free for growth."""
    seen = list[bool]()
    cache: Any = manager(FullAttentionSpec())
    cache._admissions.admit = lambda *_, has_running, **__: seen.append(has_running)
    for decodes in (False, True):
        with cache.step():
            if decodes:
                assert cache.decode([], 0) is not None
            cache.allocate_slots(Asked(f"new {decodes}", [1, 2, 3]), 3, has_scheduled_reqs=False)
    assert seen == [False, True]


def test_prepared_slots_skip_requests_with_no_token_left() -> None:
    """The last token of the first request is in flight, so the only free block goes to the other request."""
    cache = manager(FullAttentionSpec(), num_blocks=6)
    first, second = running(cache, 2)
    first.num_output_placeholders = first.num_in_flight_tokens = 1
    first.all_token_ids.pop()
    first.max_tokens = first.num_computed_tokens + 1 - first.num_prompt_tokens
    with cache.step():
        cache.ahead.give([first, second], 1, 0)
        assert ids_of(cache.allocate_slots(second, 1)) == ([5],)


class FailingTier:
    def store(self, step: int) -> None:
        raise RuntimeError(f"step {step}: the disk is full")


def test_step_is_closed_if_its_tier_fails() -> None:
    cache: Any = manager(FullAttentionSpec())
    cache.tier = FailingTier()
    with pytest.raises(RuntimeError, match="the disk is full"), cache.step():
        pass
    cache.tier = None
    requests = running(cache, 1)
    with cache.step():
        assert cache.decode(requests, 1) is not None
