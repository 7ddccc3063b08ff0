"""One price on all tiers: each gives up first what comes back soonest from the tier below."""

import pytest

from hybridkv.request import Hints, Request
from hybridkv.testing.configs import full_spec, state_spec, window_spec
from hybridkv.tiers import TierLimits
from tier_driver import BLOCK, Driver, tokens

BLOCKS = 3
KINDS = pytest.mark.parametrize(
    "specs",
    [(full_spec(BLOCK),), (full_spec(BLOCK), state_spec(BLOCK)), (full_spec(BLOCK), window_spec(BLOCK, 24))],
    ids=["full", "hybrid", "window"],
)
FAST = TierLimits(load_bytes_per_s=1e12, fetch_bytes_per_s=1e9, tokens_per_s=1e3)


def chats(run: Driver, *numbers: int, hints: Hints | None = None) -> None:
    for number in numbers:
        run.request(f"chat {number}", tokens(number, BLOCKS), hints=hints)
        run.run()
        for _ in range(4):  # the ends of its output go down after those of its prompt, and spills after both
            run.step()
        assert not run.tier.num_in_flight


def kept(run: Driver, number: int, *, host: bool = False) -> list[int]:
    """The resume points of a chat that are kept."""
    asked = Request("?", [*tokens(number, BLOCKS), 7, 7], hasher=run.cache.hasher)
    policy = (run.tier.host if host else run.cache).eviction_policy
    return [end for end in range(BLOCK, asked.num_tokens) if policy.copy_at(asked, end) is not None]


def first_gone(run: Driver, known: range, *, host: bool = False) -> set[int]:
    """Serve more chats until one of ``known`` is evicted."""
    for number in range(100, 140):
        chats(run, number, hints=Hints(in_memory=True))
        gone = {one for one in known if not kept(run, one, host=host)}
        if gone:
            return gone
    raise AssertionError("nothing was evicted")


def lose_on_host(run: Driver, number: int) -> None:
    """Evict all of a chat from the host."""
    request = Request("?", [*tokens(number, BLOCKS), 7, 7], hasher=run.cache.hasher)
    for end in kept(run, number, host=True):
        run.tier.host.eviction_policy.give_up(request, end)
    assert not kept(run, number, host=True)


@KINDS
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_device_gives_up_first_what_the_host_has(specs: tuple[object, ...], lost: int) -> None:
    """Without prices, the oldest of them goes first: all are as likely to come again."""
    run = Driver(device=30, host=400, specs=specs, took_s=0.0, limits=FAST)  # type: ignore[arg-type]  # a parameter
    chats(run, 0, 1, 2)
    assert all(kept(run, one) for one in range(3))
    lose_on_host(run, lost)
    gone = first_gone(run, range(3))
    assert gone
    assert lost not in gone
    assert kept(run, lost)


@KINDS
def test_tier_without_known_rates_changes_no_order(specs: tuple[object, ...]) -> None:
    run = Driver(device=30, host=400, specs=specs, took_s=0.0)  # type: ignore[arg-type]  # a parameter
    chats(run, 0, 1, 2)
    lose_on_host(run, 0)
    assert 0 in first_gone(run, range(3))


@KINDS
def test_prefix_that_came_up_from_the_host_is_given_up_first_again(specs: tuple[object, ...]) -> None:
    run = Driver(device=30, host=400, specs=specs, took_s=0.0, limits=FAST)  # type: ignore[arg-type]  # a parameter
    chats(run, 0)
    number = 1
    while kept(run, 0):
        chats(run, number)
        number += 1
    chats(run, 0)
    assert run.tier.statistics().loads >= 1
    request = Request("?", [*tokens(0, BLOCKS), 5], hasher=run.cache.hasher)
    point = run.cache.eviction_policy.copy_at(request, BLOCKS * BLOCK)
    assert point is not None
    assert point.below is not None
    assert point.below.copy.kept
    assert point.below.tokens_per_byte == 1e3 / 1e12


@KINDS
def test_host_gives_up_first_what_the_store_has(specs: tuple[object, ...]) -> None:
    """Chats that stay in memory have no copy behind the host."""
    run = Driver(device=400, host=30, specs=specs, took_s=0.0, limits=FAST, stored=True)  # type: ignore[arg-type]  # a parameter
    chats(run, 0, hints=Hints(in_memory=True))
    chats(run, 1)
    chats(run, 2, hints=Hints(in_memory=True))
    assert run.tier.statistics().spills > 0
    assert all(kept(run, one, host=True) for one in range(3))
    assert first_gone(run, range(3), host=True) == {1}
