"""The host tier step by step: what goes down, what comes up, who waits, and that nobody waits for ever."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hybridkv.errors import CacheError, ConfigError, WorkerError
from hybridkv.eviction.choice import LRU
from hybridkv.extra_keys import EncoderInput
from hybridkv.request import Request
from hybridkv.schedule import Scheduler, WaitReason
from hybridkv.testing.configs import cross_spec, full_spec, ring_spec, state_spec, window_spec
from hybridkv.tiers import HostTier, TierLimits
from tier_driver import BLOCK, Driver, manager, tokens

# -- down and up


def test_prompt_end_goes_down_once_and_comes_up_after_eviction() -> None:
    run = Driver(device=9, host=40)
    first = tokens(1, 8)
    run.served("first", first)
    assert run.tier.statistics().stores == 2  # 128 tokens of the prompt, and all 129 of them
    assert run.tier.statistics().stored_bytes == 9 * run.cache.config.block_bytes_of(0)
    run.served("other", tokens(2, 8))
    run.request("again", [*first[:-1], 5, 6])
    step = run.step()
    assert not len(step)  # its load comes up first
    assert len(step.loads) == 8
    step = run.step()
    assert run.hits["again"] == 128
    run.run()
    counts = run.tier.statistics()
    assert (counts.loads, counts.loaded_tokens, counts.lost, counts.in_flight) == (1, 128, 0, 0)


def test_states_come_up_with_the_tokens_that_they_follow() -> None:
    run = Driver(device=11, host=60, specs=(full_spec(BLOCK), state_spec(BLOCK)))
    first = tokens(1, 4, 6)  # the prompt's end lies inside a block
    run.served("first", first)
    run.served("other", tokens(2, 6))
    run.request("again", [*first, 3])
    step = run.step()
    groups = step.loads.group.tolist()
    assert groups.count(0) == 5
    assert groups.count(1) == 1
    run.run()
    assert run.hits["again"] == len(first) - 1 or run.hits["again"] == len(first)


def test_states_with_blocks_for_drafts_go_down_and_come_up() -> None:
    run = Driver(device=15, host=60, specs=(full_spec(BLOCK), state_spec(BLOCK, 2)), num_speculative_tokens=2)
    first = tokens(1, 4, 6)
    run.served("first", first)
    run.served("other", tokens(2, 8))
    run.request("again", [*first, 3])
    run.run()
    assert run.hits["again"] == len(first)
    assert run.tier.statistics().loads == 1


@pytest.mark.parametrize(("more", "rings"), [(6, 1), (8, 0)])
def test_ring_comes_up_unless_it_is_empty(more: int, rings: int) -> None:
    run = Driver(device=11, host=60, specs=(full_spec(BLOCK), ring_spec(8, 4)))
    first = tokens(1, 4, more)  # it ends 2 or 0 tokens after a group of 4
    run.served("first", first)
    run.served("other", tokens(2, 6))
    run.request("again", [*first, 3])
    groups = run.step().loads.group.tolist()
    assert groups.count(0) > 0
    assert groups.count(1) == rings
    run.run()
    assert run.hits["again"] == len(first)


def test_output_of_an_encoder_comes_up_with_its_prefix() -> None:
    run = Driver(device=12, host=60, specs=(full_spec(BLOCK), cross_spec(BLOCK)))
    heard, first = EncoderInput("speech", 40), tokens(1, 4)
    run.served("first", first, encoder=heard)
    run.served("other", tokens(2, 7), encoder=EncoderInput("music", 40))
    run.request("again", [*first, 3], encoder=heard)
    groups = run.step().loads.group.tolist()
    assert groups.count(0) > 0
    assert groups.count(1) == 3
    step = run.step()
    (new,) = step.new_rows
    assert new.encoder is not None
    assert not new.encoder.encodes
    assert run.hits["again"] == len(first)
    run.run()
    run.request("music", [*first, 3], encoder=EncoderInput("music", 40))
    run.run()
    assert run.hits["music"] == 0


def test_output_that_the_device_has_does_not_come_up_again() -> None:
    run = Driver(device=12, host=60, specs=(full_spec(BLOCK), cross_spec(BLOCK)))
    heard, first = EncoderInput("speech", 40), tokens(1, 4)
    run.served("first", first, encoder=heard)
    run.served("other", tokens(2, 6), encoder=heard)
    run.request("again", [*first, 3], encoder=heard)
    step = run.step()
    assert set(step.loads.group.tolist()) == {0}
    run.run()
    assert run.hits["again"] > 0


def test_what_the_device_has_does_not_come_up() -> None:
    run = Driver(device=20, host=40)
    first = tokens(1, 4)
    run.served("first", first)
    run.request("longer", [*first[:-1], *tokens(3, 4)])
    step = run.step()
    assert len(step) == 1
    assert not len(step.loads)
    run.run()
    assert run.tier.statistics().loads == 0


def test_two_requests_of_one_prefix_load_it_once() -> None:
    run = Driver(device=12, host=40, delay=2)
    first = tokens(1, 8)
    run.served("first", first)
    run.served("other", tokens(2, 10))
    for name in "abc":
        run.request(name, [*first[:-1], ord(name), 9])
    run.run()
    assert run.tier.statistics().loads == 1
    assert [run.hits[name] for name in "abc"] == [128] * 3


def test_other_requests_run_while_a_prefix_comes_up() -> None:
    run = Driver(device=16, host=40, delay=3)
    first = tokens(1, 8)
    run.served("first", first)
    run.served("other", tokens(2, 12))
    run.request("again", [*first[:-1], 5, 6])
    run.request("short", tokens(4, 1), output=4)
    rows = [len(run.step()) for _ in range(4)]
    assert rows == [1, 1, 1, 1]
    assert "again" not in run.hits
    run.run()
    assert run.hits["again"] == 128


def test_salts_of_other_tenants_find_nothing_on_the_host() -> None:
    run = Driver(device=9, host=40)
    first = tokens(1, 8)
    run.request("mine", first, cache_salt="a")
    run.run()
    run.served("other", tokens(2, 8))
    run.request("theirs", [*first[:-1], 5], cache_salt="b")
    run.run()
    assert run.tier.statistics().loads == 0
    assert run.hits["theirs"] == 0


def test_prefix_that_is_faster_to_compute_is_not_loaded() -> None:
    slow = TierLimits(load_bytes_per_s=1.0, tokens_per_s=1e6)
    run = Driver(device=9, host=40, limits=slow)
    first = tokens(1, 8)
    run.served("first", first)
    run.served("other", tokens(2, 8))
    run.request("again", [*first[:-1], 5, 6])
    assert len(run.step()) == 1
    assert run.tier.statistics().loads == 0


@pytest.mark.parametrize(
    ("took_s", "token_s", "is_loaded"), [(0.5, 1e-3, False), (0.5, 1e-2, True), (0.05, 1e-3, True)]
)
def test_loads_and_steps_are_measured(took_s: float, token_s: float, *, is_loaded: bool) -> None:
    """A load of 128 tokens takes the one time, computing them another. Four of each decide."""
    run = Driver(device=9, host=200, took_s=took_s, token_s=token_s)
    for number in range(8):
        run.served(f"new {number}", tokens(number, 8))
    for number in range(4):
        run.served(f"early {number}", [*tokens(number, 8)[:-1], 5, 6])
    assert run.tier.statistics().loads == 4
    run.request("again", [*tokens(5, 8)[:-1], 5, 6])
    run.run()
    assert (run.hits["again"] == 128) is is_loaded


def test_load_that_only_measures_holds_up_nobody() -> None:
    run = Driver(device=24, host=400, took_s=0.5, token_s=1e-4, delay=3)
    for number in range(8):
        run.served(f"new {number}", tokens(number, 8))
    for number in range(4):
        run.served(f"early {number}", [*tokens(number, 8)[:-1], 5, 6])
    run.now += 31.0
    old = run.tier.statistics().loads
    run.request("long", tokens(20, 9), output=20)
    run.step()
    for name in ("again", "another"):
        run.request(name, [*tokens(5, 8)[:-1], 5, 6])
    assert len(run.step().loads) == 8
    for _ in range(2):  # they lack memory: that of the load, and of the long request
        assert {reason for _, reason in run.scheduler.waits()} == {WaitReason.NO_SPACE}
        run.step()
    run.run()
    assert run.tier.statistics().loads == old + 1


def test_result_times_all_transfers_or_none() -> None:
    run = Driver(device=9, host=40)
    run.request("first", tokens(1, 8))
    run.step()
    step = run.scheduler.schedule()
    assert len(step.stores)
    result = run.result(step)
    with pytest.raises(WorkerError, match="arrived_s has 2 values for 1 transfers"):
        run.scheduler.update(replace(result, arrived_s=np.zeros(2, np.float32)))
    run.scheduler.update(result)


def test_secret_requests_and_short_prefixes_do_not_go_down() -> None:
    run = Driver(device=20, host=40, limits=TierLimits(least_tokens=64))
    run.served("short", tokens(1, 3))
    run.request("unwritten", tokens(2, 8), skip_writing_prefix_cache=True)
    run.run()
    run.step()
    assert run.tier.statistics().stores == 0


def test_windows_that_keep_more_than_a_hit_brings_are_not_stored() -> None:
    retained = replace(window_spec(BLOCK, 5), extra_retained_tokens=3 * BLOCK)
    run = Driver(device=60, host=90, specs=(full_spec(BLOCK), retained))
    run.served("first", tokens(1, 8))
    counts = run.tier.statistics()
    assert counts.stores == 0
    assert counts.stores_refused > 0
    assert run.tier.host.usage == 0


# -- nobody waits for ever


def test_loads_that_fit_alone_but_not_with_their_requests_finish() -> None:
    """vllm#45388: two loads hold memory that each request needs for the rest of its prompt."""
    run = Driver(device=40, host=200, delay=1)
    prefixes = [tokens(number, 14) for number in (1, 2)]
    for number, one in enumerate(prefixes):
        run.served(f"warm {number}", one)
    run.served("evicts", tokens(3, 36))
    run.request("a", [*prefixes[0][:-1], *tokens(4, 22)])
    run.request("b", [*prefixes[1][:-1], *tokens(5, 16)])
    assert run.run() < 20
    assert run.tier.statistics().loads >= 1


def test_loads_leave_no_request_without_blocks_for_its_drafts() -> None:
    """vllm#57104: all blocks hold loaded prefixes, and drafts need one more."""
    run = Driver(device=9, host=40, delay=1, num_lookahead_tokens=BLOCK)
    for name, number, blocks in (("a", 1, 4), ("b", 2, 3)):
        run.served(name, tokens(number, blocks, 0))
    run.served("evicts", tokens(3, 7, 0))
    run.request("again a", [*tokens(1, 4, 0), 5])
    run.request("again b", [*tokens(2, 3, 0), 5])
    assert run.run() < 20


def test_requests_behind_one_that_does_not_fit_run() -> None:
    """vllm#57841: the head of the queue does not fit; behind it one waits for a load, and one fits."""
    run = Driver(device=42, host=200, delay=2, max_running=4)
    loaded = tokens(1, 20)
    run.served("warm", loaded)
    run.served("evicts", tokens(2, 38))
    run.request("runs", tokens(3, 8), output=30)
    run.step()
    run.request("head", tokens(4, 38))
    run.request("loads", [*loaded[:-1], 5])
    run.request("fits", tokens(5, 1))
    for _ in range(3):
        run.step()
    assert "fits" in run.hits
    assert run.run() < 60


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_aborted_request_leaves_its_load_to_others(delay: int) -> None:
    run = Driver(device=9, host=40, delay=delay)
    first = tokens(1, 8)
    run.served("first", first)
    run.served("other", tokens(2, 8))
    run.request("again", [*first[:-1], 5, 6])
    run.step()
    run.scheduler.abort("again")
    for _ in range(delay + 1):
        run.step()
    assert run.scheduler.drained
    assert run.tier.num_in_flight == 0
    run.request("third", [*first[:-1], 7, 8])
    run.run()
    assert run.hits["third"] == 128
    assert run.tier.statistics().loads == 1


# -- failures


def test_lost_load_is_computed() -> None:
    run = Driver(device=9, host=40)
    first = tokens(1, 8)
    run.served("first", first)
    run.served("other", tokens(2, 8))
    run.request("again", [*first[:-1], 5, 6])
    step = run.scheduler.schedule()
    result = run.result(step)
    lost = np.unique(step.loads.transfer)
    run.scheduler.update(replace(result, arrived=np.setdiff1d(result.arrived, lost), lost=lost))
    run.scheduler.check()
    run.run()
    assert run.hits["again"] == 0
    assert run.tier.statistics().lost == 1


def test_failed_step_cancels_its_transfers() -> None:
    run = Driver(device=9, host=40)
    first = tokens(1, 8)
    run.served("first", first)
    run.served("other", tokens(2, 8))
    run.request("again", [*first[:-1], 5, 6])
    step = run.scheduler.schedule()
    assert len(step.loads)
    run.scheduler.fail(step.id, "broken")
    run.scheduler.check()
    assert run.tier.num_in_flight == 0
    late = run.scheduler.schedule()  # the worker may still report the cancelled transfer
    result = run.result(late)
    run.scheduler.update(replace(result, arrived=np.append(step.loads.transfer[:1], result.arrived)))
    run.run()
    assert run.scheduler.drained


@pytest.mark.parametrize("given", ["unknown", "twice", "both"])
def test_wrong_reports_of_transfers_are_rejected_and_change_nothing(given: str) -> None:
    run = Driver(device=9, host=40)
    run.request("first", tokens(1, 8))
    run.step()
    step = run.scheduler.schedule()
    good = run.result(step)
    number = good.arrived[:1]
    wrong = {
        "unknown": replace(good, arrived=np.array([99], np.int32)),
        "twice": replace(good, arrived=np.append(number, number)),
        "both": replace(good, arrived=number, lost=number),
    }
    with pytest.raises(WorkerError, match="transfer 99 is not in flight" if given == "unknown" else "reported twice"):
        run.scheduler.update(wrong[given])
    run.scheduler.update(good)
    run.scheduler.check()
    assert run.tier.statistics().stores == len(good.arrived)


# -- construction


def test_managers_that_do_not_fit_are_rejected_by_name() -> None:
    full = (full_spec(BLOCK),)
    device = manager(9, full)
    tier = HostTier(device, manager(9, full, device))
    unranked = manager(9, full, eviction=LRU)
    makes: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: HostTier(device, manager(9, full)), ConfigError, "hasher=device.hasher"),
        (lambda: HostTier(device, manager(9, (full_spec(32),), device)), ConfigError, "planner.tier_plan"),
        (lambda: HostTier(manager(9, full, device), manager(9, full, device)), ConfigError, "log_resume_points=True"),
        (lambda: HostTier(unranked, manager(9, full, unranked)), ConfigError, "eviction lru knows no resume points"),
        (lambda: HostTier(device, None), ConfigError, "host must be a KVCacheManager"),  # type: ignore[arg-type]
        (lambda: HostTier(device, manager(9, full, device), 5), ConfigError, "limits must be"),  # type: ignore[arg-type]
        (lambda: Scheduler(manager(9, full), tier=tier), ConfigError, "another cache"),
        (lambda: Scheduler(device, tier=object()), ConfigError, "tier must be a HostTier"),  # type: ignore[arg-type]
    ]
    for make, error, message in makes:
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_loads": 0}, "max_loads"),
        ({"least_tokens": 0}, "least_tokens"),
        ({"load_bytes_per_s": 0.0}, "load_bytes_per_s must be above 0"),
        ({"tokens_per_s": -1.0}, "tokens_per_s must be above 0"),
        ({"tokens_per_s": "fast"}, "tokens_per_s"),
    ],
)
def test_tier_limits_out_of_range_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierLimits(**fields)


def test_check_finds_blocks_that_nobody_stores() -> None:
    run = Driver(device=9, host=40)
    run.served("first", tokens(1, 8))
    stray = Request("stray", tokens(5, 1), hasher=run.cache.hasher)
    assert run.tier.host.allocate_slots(stray, 3) is not None
    with pytest.raises(CacheError, match="stray"):
        run.scheduler.check()


# -- ahead of a step that is full


def queued(device: int, max_ahead: int) -> tuple[Driver, list[int]]:
    """A request that runs four steps, then two whose prefixes the host has; return the transfers that load in each."""
    run = Driver(device=device, host=200, max_running=1, limits=TierLimits(max_ahead=max_ahead))
    for number in range(12):
        run.served(f"new {number}", tokens(number, 8))
    run.request("runs", tokens(20, 2), output=4)
    for number in range(3):
        run.request(f"again {number}", [*tokens(number, 8)[:-1], 5, 6])
    loads = [len({*run.step().loads.transfer.tolist()}) for _ in range(4)]
    run.step()
    return run, loads


def test_full_step_loads_for_the_next_requests() -> None:
    """The row is taken for four steps; in the fifth one the next request begins after its hit."""
    run, loads = queued(60, 2)
    assert loads == [2, 0, 0, 0]
    assert run.hits["again 0"] == 128
    late, loads = queued(60, 0)
    assert loads == [0, 0, 0, 0]
    assert "again 0" not in late.hits
    assert late.run() > run.run()
    assert late.hits == run.hits


@pytest.mark.parametrize(("device", "most"), [(23, 0), (24, 1), (32, 1), (33, 2)])
def test_load_ahead_takes_no_memory_that_running_requests_need(device: int, most: int) -> None:
    """It needs 15 blocks for its last token, and each of the others 9."""
    run = Driver(device=device, host=300, max_running=1)
    for number in range(8):
        run.served(f"new {number}", tokens(number, 8))
    run.request("runs", tokens(20, 2), output=BLOCK * 13)
    for number in range(3):
        run.request(f"again {number}", [*tokens(number, 8)[:-1], 5, 6])
    step = run.step()
    assert len({*step.loads.transfer.tolist()}) == most
    run.run(1000)
    assert run.scheduler.statistics().preemptions == 0


def test_step_without_tokens_left_loads_for_the_next_requests() -> None:
    run = Driver(device=90, host=300, max_batched_tokens=BLOCK * 9)
    for number in range(12):
        run.served(f"new {number}", tokens(number, 8))
    run.request("long", tokens(20, 20))
    run.request("again", [*tokens(0, 8)[:-1], 5, 6])
    step = run.step()
    assert (len(step), step.num_tokens, len(step.loads)) == (1, BLOCK * 9, 8)


def test_prefix_that_is_evicted_before_its_request_begins_comes_up_once_more() -> None:
    """Three prefixes come up at once; the outputs of the first two requests then take the blocks of the third."""
    run = Driver(device=28, host=300, max_running=2)
    for number in range(6):
        run.served(f"new {number}", tokens(number, 8))
    for number in range(3):
        run.request(f"again {number}", [*tokens(number, 8)[:-1], 5, 6], output=BLOCK * 5)
    assert len({*run.step().loads.transfer.tolist()}) == 3
    run.run(1000)
    assert run.hits["again 2"] == 128
    counts = run.tier.statistics()
    assert (counts.loads, counts.hit_tokens) == (4, 3 * 128)
