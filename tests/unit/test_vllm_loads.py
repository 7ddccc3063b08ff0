"""hybridkv.vllm and what connectors bring, without vLLM: see test_vllm_manager.py."""

from itertools import chain
from typing import Any

import pytest

from engine_groups import PROMPT, FullAttentionSpec, MambaSpec, SlidingWindowSpec, manager, run
from engine_request import Asked
from hybridkv.errors import ConfigError
from hybridkv.vllm.manager import CacheManager


def admit_load(cache: CacheManager, request: Asked, external: int, **asked: Any) -> Any:  # noqa: ANN401 - Blocks or None
    """As a scheduler does whose connector brings ``external`` tokens beside the steps."""
    with cache.step():
        blocks, hit, _ = cache.get_computed_blocks(request)
        new = cache.allocate_slots(
            request,
            0,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_external_computed_tokens=external,
            delay_cache_blocks=True,
            **asked,
        )
    if new is not None:
        request.num_computed_tokens = hit + external
    return new


def other_hits(cache: CacheManager) -> int:
    return int(cache.get_computed_blocks(Asked("other", [*PROMPT, 1]))[1])


def test_what_a_connector_brings_beside_the_steps_is_found_when_it_is_there() -> None:
    cache = manager(FullAttentionSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, 8) is not None
    assert len(cache.get_block_ids("a")[0]) == 2
    assert other_hits(cache) == 0
    cache.cache_blocks(request, 8)
    assert other_hits(cache) == 8
    run(cache, request, 6)
    assert other_hits(cache) == 12
    cache.free(request)
    assert cache.usage == 0
    cache.cache.check()


def test_a_prompt_that_comes_whole_has_its_last_token_computed() -> None:
    cache = manager(FullAttentionSpec())
    request = Asked("a", PROMPT[:13])
    assert admit_load(cache, request, 13) is not None
    assert len(cache.get_block_ids("a")[0]) == 4  # what the transfer writes, the 13th token's too
    cache.cache_blocks(request, 13)
    request.num_computed_tokens = 12
    run(cache, request, 1)
    assert other_hits(cache) == 12
    cache.cache.check()


@pytest.mark.parametrize(("came", "goes_on"), [(8, 8), (0, 0)])
def test_what_did_not_come_is_computed(came: int, goes_on: int) -> None:
    cache = manager(FullAttentionSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, 12) is not None
    request.num_computed_tokens = came
    if came:
        cache.cache_blocks(request, came)
    else:
        cache.free(request)  # as vLLM does where nothing came
    assert request.num_computed_tokens == goes_on
    assert other_hits(cache) == goes_on
    run(cache, request, len(PROMPT) - goes_on)
    cache.cache_blocks(request, len(PROMPT))
    assert other_hits(cache) == 12
    cache.cache.check()


def test_where_the_end_of_a_window_did_not_come_it_begins_anew() -> None:
    cache = manager(SlidingWindowSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, 12) is not None
    cache.cache_blocks(request, 4)
    assert request.num_computed_tokens == 0
    assert cache.get_block_ids("a") == ([],)
    run(cache, request, len(PROMPT))
    cache.cache.check()


def test_a_load_leaves_those_that_prefill_what_they_need() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=10)  # 9 blocks
    first = Asked("first", list(range(100, 124)))  # 6 blocks, 2 of them now
    run(cache, first, 8)
    needs = cache.coordinator.get_num_blocks_to_allocate("first", 24, (), 0, 8, 8, 24, apply_admission_cap=True)
    assert needs == 4
    assert cache.coordinator.get_num_blocks_to_allocate("nobody", 24, (), 0, 8, 8, 24) == 0
    second = Asked("second", PROMPT)
    assert admit_load(cache, second, 13, reserved_blocks=needs) is None
    assert admit_load(cache, second, 12, reserved_blocks=needs) is not None
    cache.cache.check()


def test_one_that_was_loaded_is_let_in_only_whole() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=8)
    running, request = Asked("running", [7] * 8), Asked("a", PROMPT)
    run(cache, running, 8)
    assert admit_load(cache, request, 8) is not None
    cache.cache_blocks(request, 8)
    run(cache, Asked("longer", [9] * 5), 5)  # one block is left, where its 14 tokens need two
    assert cache.allocate_slots(request, 4, full_sequence_must_fit=True) is None
    cache.free(running)
    assert cache.allocate_slots(request, 4, full_sequence_must_fit=True) is not None


def test_a_connector_that_has_less_than_is_here_is_taken_at_its_word() -> None:
    """As ExampleConnector says it: 12 tokens are here, it has 4, so it brings -8."""
    cache = manager(FullAttentionSpec())
    run(cache, Asked("a", PROMPT), len(PROMPT))
    for has, took in ((4, 1), (0, 0)):
        request = Asked(f"has {has}", PROMPT)
        blocks, hit, _ = cache.get_computed_blocks(request)
        asked: dict[str, Any] = {"num_new_computed_tokens": hit, "new_computed_blocks": blocks}
        assert cache.allocate_slots(request, 14 - has, num_external_computed_tokens=has - hit, **asked) is not None
        shared = set(cache.get_block_ids("a")[0]) & set(cache.get_block_ids(request.request_id)[0])
        assert len(shared) == took
        cache.cache.check()
    windows = manager(SlidingWindowSpec())
    run(windows, Asked("a", PROMPT), len(PROMPT))
    request = Asked("b", PROMPT)
    blocks, hit, _ = windows.get_computed_blocks(request)
    with pytest.raises(ConfigError, match="cannot be cut to 4"):
        windows.allocate_slots(
            request, 10, num_new_computed_tokens=hit, new_computed_blocks=blocks, num_external_computed_tokens=4 - hit
        )


def test_blocks_that_a_transfer_writes_are_not_cleared() -> None:
    cache = manager(FullAttentionSpec())
    admit_load(cache, Asked("a", PROMPT), 8, skip_zeroing_group_ids=(0,))
    assert cache.take_new_block_ids() == []
    admit_load(cache, Asked("b", [3] * 9), 8)
    assert len(cache.take_new_block_ids()) == 2


def test_blocks_that_were_not_loaded_are_found_no_longer() -> None:
    cache = manager(FullAttentionSpec())
    request = Asked("a", PROMPT)
    run(cache, request, len(PROMPT))
    cache.evict_blocks(set(cache.get_block_ids("a")[0][1:]))
    assert other_hits(cache) == 4
    cache.cache.check()


@pytest.mark.parametrize(("external", "hits"), [(13, 0), (12, 12)])
def test_a_state_that_came_with_its_tokens_is_gone_on_from(external: int, hits: int) -> None:
    """And hit by others where it lies at a block's edge; not before it is there."""
    cache = manager(FullAttentionSpec(), MambaSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, external) is not None
    attention, states = cache.get_block_ids("a")
    assert len(attention) == len(states)
    assert [bool(one) for one in states] == [False] * (len(states) - 1) + [True]
    assert other_hits(cache) == 0
    cache.cache_blocks(request, external)
    assert request.num_computed_tokens == external
    assert other_hits(cache) == hits
    assert run(cache, request, len(PROMPT) - external) is not None
    cache.free(request)
    assert cache.usage == 0
    cache.cache.check()


def test_behind_a_hit_the_state_of_the_load_takes_the_place_of_that_of_the_hit() -> None:
    cache = manager(FullAttentionSpec(), MambaSpec())
    first = Asked("a", PROMPT[:8])
    run(cache, first, 8)
    request = Asked("b", PROMPT)
    assert admit_load(cache, request, 5) is not None
    attention, states = cache.get_block_ids("b")
    assert attention[:2] == cache.get_block_ids("a")[0]
    assert [bool(one) for one in states] == [False, False, False, True]
    cache.cache_blocks(request, 13)
    run(cache, request, 1)
    cache.cache.check()


def test_part_of_what_a_state_needs_is_nothing() -> None:
    cache = manager(FullAttentionSpec(), MambaSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, 13) is not None
    cache.cache_blocks(request, 12)
    assert request.num_computed_tokens == 0
    assert cache.get_block_ids("a") == ([], [])
    assert other_hits(cache) == 0
    assert admit_load(cache, request, 13) is not None  # and may come once more
    cache.free(request)
    assert cache.usage == 0
    cache.cache.check()


def test_the_state_behind_a_whole_prompt_is_none_that_its_last_token_is_computed_from() -> None:
    """It begins anew, and may be brought all tokens but the last; not the whole prompt for ever."""
    cache = manager(FullAttentionSpec(), MambaSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, 14) is not None
    cache.cache_blocks(request, 14)
    assert request.num_computed_tokens == 0
    assert cache.get_block_ids("a") == ([], [])
    assert other_hits(cache) == 0
    with pytest.raises(ConfigError, match="all tokens but the last"):
        admit_load(cache, request, 14)
    assert admit_load(cache, request, 13) is not None
    cache.cache_blocks(request, 13)
    assert request.num_computed_tokens == 13
    cache.free(request)
    assert admit_load(cache, Asked("a", PROMPT), 14) is not None
    cache.cache.check()


@pytest.mark.parametrize(
    ("external", "new", "mode", "fits"),
    [(9, 3, "align", True), (9, 4, "align", False), (8, 1, "align", False), (8, 6, "none", True)],
)
def test_a_state_is_loaded_within_a_step_only_where_no_copy_of_it_goes_before(
    external: int, new: int, mode: str, *, fits: bool
) -> None:
    """vLLM's worker copies a row's state to the column where its step ends, and lets the connector load thereafter."""
    cache = manager(FullAttentionSpec(), MambaSpec(mamba_cache_mode=mode), enable_caching=mode == "align")
    request = Asked("a", PROMPT)
    with cache.step():
        if not fits:
            with pytest.raises(ConfigError, match="beside the steps"):
                cache.allocate_slots(request, new, num_external_computed_tokens=external)
        else:
            assert cache.allocate_slots(request, new, num_external_computed_tokens=external) is not None
    cache.cache.check()


def test_who_ends_hands_over_the_state_behind_its_last_token() -> None:
    """And what its windows still have: all else was given back before a connector is told."""
    cache = manager(FullAttentionSpec(), SlidingWindowSpec(), MambaSpec())
    request = Asked("a", PROMPT)
    run(cache, request, 12)
    run(cache, request, 2)
    cache.remove_skipped_blocks("a", 14, num_prompt_tokens=14)
    tables = cache.get_block_ids_for_computed_tokens("a", 14)
    assert [[bool(one) for one in table] for table in tables] == [
        [True] * 4,
        [False] * 2 + [True] * 2,
        [False] * 3 + [True],
    ]
    held = cache.usage
    with cache.step():  # it has ended; a transfer reads its blocks
        cache.allocate_slots(Asked("b", [5] * 9), 9)
    assert cache.usage > held
    assert not {*chain(*cache.get_block_ids("b"))} & {*chain(*tables)} - {0}
    cache.free(request)
    cache.cache.check()
