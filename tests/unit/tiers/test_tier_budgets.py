"""Each tier has bytes of its own, which the shares of tenants divide; a time to live keeps some of them."""

from collections.abc import Iterable

import pytest

from hybridkv.eviction import Share, TenantShares
from hybridkv.request import Hints, Request
from hybridkv.testing.configs import full_spec, state_spec, window_spec
from tier_driver import BLOCK, Driver, tokens

BLOCKS, CHATS = 3, 40
SOON = Hints(within_s=1000.0)
"""What is worth more than a prefix of which nothing is said."""
KINDS = {
    "full": (full_spec(BLOCK),),
    "hybrid": (full_spec(BLOCK), state_spec(BLOCK)),
    "window": (full_spec(BLOCK), window_spec(BLOCK, 24)),
}


def driver(kind: str, host: int, *shares: Share) -> Driver:
    """Its clock stands still; the device holds about two chats."""
    return Driver(device=14, host=host, specs=KINDS[kind], took_s=0.0, shares=TenantShares(shares))


def on_host(run: Driver, chats: Iterable[int]) -> set[int]:
    """Chats whose prompt the host has."""
    asked = {chat: Request("?", [*tokens(chat, BLOCKS), 5], hasher=run.cache.hasher) for chat in chats}
    return {chat for chat, one in asked.items() if run.tier.host.find_hit(one).tokens >= BLOCKS * BLOCK}


def chat(run: Driver, number: int, tenant: str | None = None, hints: Hints | None = None) -> None:
    run.now += 1.0
    run.served(f"chat {number}", tokens(number, BLOCKS), tenant=tenant, hints=hints)


@pytest.mark.parametrize("kind", KINDS)
def test_time_to_live_keeps_a_demoted_prefix_on_the_host_until_it_ends(kind: str) -> None:
    run = driver(kind, 40)
    chat(run, 0, hints=Hints(ttl_s=100.0, demote=True))
    for number in range(1, CHATS):
        chat(run, number, hints=SOON)
    kept = on_host(run, range(CHATS))
    assert 0 in kept
    assert run.cache.find_hit(Request("?", tokens(0, BLOCKS), hasher=run.cache.hasher)).tokens == 0
    assert max(set(range(CHATS)) - kept) > 10  # the host is full
    run.now = 98.0
    chat(run, CHATS, hints=SOON)
    assert 0 in on_host(run, [0])
    run.now = 101.0
    older, gone = on_host(run, range(CHATS)), set[int]()
    for number in range(CHATS + 1, CHATS + 9):
        chat(run, number, hints=SOON)
        gone = gone or older - on_host(run, range(CHATS))
    assert 0 in gone
    assert len(gone) < 4


@pytest.mark.parametrize("kind", KINDS)
def test_longest_use_is_evicted_where_everything_lives(kind: str) -> None:
    """Protected chats take no more than the tier has, and the newest ones stay."""
    run = driver(kind, 40)
    for number in range(CHATS):
        chat(run, number, hints=Hints(ttl_s=1e6, demote=True))
    kept = sorted(on_host(run, range(CHATS)))
    assert kept == list(range(CHATS - len(kept), CHATS))
    assert 3 <= len(kept) <= 40 // BLOCKS


@pytest.mark.parametrize("kind", KINDS)
def test_tenant_keeps_its_share_of_each_tier(kind: str) -> None:
    """One tenant asks for three chats that fit into half of the host. Then another one asks for forty."""
    kept = dict[bool, set[int]]()
    for is_guaranteed in (False, True):
        run = driver(kind, 40, *([Share("a", guaranteed=0.5)] if is_guaranteed else ()))
        for number in range(3):
            chat(run, number, "a")
        for number in range(3, CHATS):
            chat(run, number, "b", Hints(ttl_s=1e6))  # hints of one tenant take nothing from another
        kept[is_guaranteed] = on_host(run, range(3))
        assert len(on_host(run, range(3, CHATS))) >= 3
    assert kept == {False: set(), True: {0, 1, 2}}


@pytest.mark.parametrize("kind", KINDS)
def test_tenant_above_its_greatest_share_goes_first(kind: str) -> None:
    """It may use memory that nobody else wants, and gives it up before others."""
    run = driver(kind, 38 if kind == "full" else 50, Share("a", greatest=0.25))
    for number in range(8):
        chat(run, number, "a")
    before = on_host(run, range(8))
    assert before == set(range(8))
    for number in range(8, 14):
        chat(run, number, "b")
    assert on_host(run, range(8, 14)) == set(range(8, 14))
    assert len(on_host(run, range(8))) < 8


@pytest.mark.parametrize("kind", KINDS)
def test_each_tier_keeps_within_its_own_bytes(kind: str) -> None:
    """Counted from keys: what a tier has fills it, and never more."""
    run = driver(kind, 40)
    for number in range(CHATS):
        chat(run, number)
    for cache in (run.cache, run.tier.host):
        config, counts = cache.config, cache.statistics().groups
        sizes = [config.block_bytes_of(group) for group in range(len(config.groups))]
        filled = sum(size * of.cached_blocks for size, of in zip(sizes, counts, strict=True))
        assert 0.5 * config.arena_bytes < filled <= config.arena_bytes
