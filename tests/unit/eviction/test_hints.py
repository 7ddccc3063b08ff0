"""Hints: what callers know of when a prefix is wanted again raises or lowers what is kept, and nothing else."""

from __future__ import annotations

import numpy as np
import oracle_hints
import pytest
from test_tenants import HYBRID, Cache, chat, unique

from hybridkv.errors import ConfigError
from hybridkv.eviction import EVERYBODY, Share, TenantShares, hazard
from hybridkv.eviction.hazard import HazardRanking
from hybridkv.eviction.resume_points import (
    BY_ALL,
    NEVER,
    NOTHING,
    SOMETIME,
    WITHIN,
    Kind,
    ResumePoint,
    hint_of,
    keys_of,
    of_session,
)
from hybridkv.request import NO_HINTS, Hints, Request
from hybridkv.simulator import Pieces, TraceRequest
from hybridkv.simulator.tokens import NEW_OUTPUT, PROMPT_SEGMENT
from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import full_spec, window_spec

# -- what a hint is


def test_hint_with_return_time_continues_the_session() -> None:
    assert Hints(within_s=5).goes_on
    assert Hints() == NO_HINTS


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"over": 1}, "over must be true or false"),
        ({"within_s": "soon"}, "within_s must be a number"),
        ({"within_s": -1}, "within_s must lie in"),
        ({"within_s": 1e10}, "within_s must lie in"),
        ({"shared_tokens": -1}, "shared_tokens must not be negative"),
        ({"shared_tokens": 1.5}, "shared_tokens must be an integer"),
        ({"over": True, "goes_on": True}, "goes on, and that it is over"),
        ({"scratch": True, "within_s": 5}, "goes on, and that it is scratch"),
        ({"secret": True, "goes_on": True}, "goes on, and that it is secret"),
        ({"secret": True, "shared_tokens": 8}, "shared, and that it is secret"),
        ({"ttl_s": -1}, "ttl_s must lie in"),
        ({"ttl_s": True}, "ttl_s must be a number"),
        ({"demote": 1}, "demote must be true or false"),
        ({"in_memory": 1}, "in_memory must be true or false"),
        ({"ttl_s": 5, "over": True}, "hints say ttl_s of what is over, which nobody wants again"),
        ({"demote": True, "scratch": True}, "hints say demote of what is scratch"),
        ({"prefetch": True, "secret": True}, "hints say prefetch of what is secret"),
        ({"prefetch": True, "demote": True}, "demote and prefetch, which are opposites"),
    ],
)
def test_hint_with_invalid_value_is_rejected(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Hints(**wrong)  # type: ignore[arg-type]


def test_request_with_hints_gets_a_shared_resume_mark() -> None:
    with pytest.raises(ConfigError, match="hints must be a Hints"):
        Request("r", [1], hints={"over": True})  # type: ignore[arg-type]
    request = Request("r", list(range(20)), hints=Hints(shared_tokens=8), marks=[4])
    assert (request.marks, request.branch("b", request.sampling).hints) == ((4, 8), request.hints)


def test_hint_of_each_resume_point_matches_its_position() -> None:
    def hinted(hints: Hints, tokens: int, marks: tuple[int, ...] = ()) -> int:
        request = Request("r", list(range(100)), hints=hints, marks=marks)
        request.branch_tokens = 20
        return hint_of(request, tokens)

    soon, late = Hints(within_s=3.0), Hints(within_s=5.0, shared_tokens=10)
    assert [hinted(NO_HINTS, tokens) for tokens in (20, 99)] == [NOTHING] * 2
    assert (hinted(soon, 99), hinted(late, 99), hinted(Hints(within_s=4.1**12), 99)) == (
        WITHIN,
        WITHIN + 1,
        WITHIN + 11,
    )
    assert (hinted(late, 10), hinted(late, 5), hinted(late, 20)) == (BY_ALL, BY_ALL, NOTHING)
    assert (hinted(Hints(goes_on=True), 99), hinted(Hints(scratch=True), 99)) == (SOMETIME, NEVER)
    assert [hinted(late, tokens, (50,)) for tokens in (50, 99, 101)] == [WITHIN + 1, NEVER, NEVER]
    assert [of_session(one) for one in (NO_HINTS, Hints(over=True), soon)] == [NOTHING, NEVER, WITHIN]


# -- what it does to what is kept


def test_hint_secret_prefix_is_never_hit() -> None:
    cache = Cache(EVERYBODY, 30)
    cache.run(chat(1, 1), hints=Hints(secret=True))
    assert cache.run(chat(1, 1)) == 0
    assert cache.run(chat(1, 1), hints=Hints(secret=True)) == 10  # it reads what others left


def goes(*hints: Hints) -> list[int]:
    """Two ends of each of several sessions, which end with these hints, in turn: in which order they are given up."""
    cache = Cache(EVERYBODY, 30)
    for person, one in enumerate(hints):
        cache.run(chat(person, 1), hints=one)
    cache.cache.check()
    first = [Request("r", chat(person, 1), hasher=cache.cache.hasher).hashes[0] for person in range(len(hints))]
    gone = []
    for _ in range(2 * len(hints)):
        node = cache.eviction_policy._lowest(cache.now)
        assert node is not None
        gone.append(first.index(keys_of(node, 0, 1)[0]))
        cache.eviction_policy._release(node, cache.now)
    return gone


@pytest.mark.parametrize("gone", [Hints(over=True), Hints(scratch=True)])
def test_hint_of_finished_session_evicts_it_first(gone: Hints) -> None:
    assert goes(NO_HINTS, gone) == [1, 1, 0, 0]
    assert goes(NO_HINTS, NO_HINTS) != [1, 1, 0, 0]


@pytest.mark.parametrize("stays", [Hints(goes_on=True), Hints(within_s=20), Hints(shared_tokens=10), Hints(ttl_s=99)])
def test_hint_of_continued_session_evicts_it_last(stays: Hints) -> None:
    assert goes(stays, NO_HINTS)[-1] == 0
    assert goes(NO_HINTS, NO_HINTS)[-1] == 1


def flooded(cache: Cache, tenant: str | None = None) -> None:
    """As many prompts as push everything else out."""
    for prompt, _ in zip(unique(), range(20), strict=False):
        cache.run(prompt, tenant)


@pytest.mark.parametrize(("ttl_s", "waited", "hit"), [(None, 0.0, 0), (100.0, 0.0, 10), (100.0, 1000.0, 0)])
def test_time_to_live_protects_until_it_ends(ttl_s: float | None, waited: float, hit: int) -> None:
    cache = Cache(EVERYBODY, 14)
    cache.run(chat(1, 1), hints=Hints(ttl_s=ttl_s))
    cache.now += waited
    flooded(cache)
    cache.cache.check()
    assert cache.run(chat(1, 1)) == hit


def test_later_time_to_live_of_the_same_prefix_counts() -> None:
    cache = Cache(EVERYBODY, 14)
    cache.run(chat(1, 1), hints=Hints(ttl_s=1000.0))
    cache.run(chat(1, 1), hints=Hints(ttl_s=1.0))
    cache.now += 100.0
    cache.cache.check()
    assert {node.tokens: node.protected for node in cache.eviction_policy._tree.kept()} == {10: True, 11: True}


def test_time_to_live_yields_to_running_requests_and_to_shares() -> None:
    shares = TenantShares((Share("a", 0.4), Share("b", 0.4)))
    cache = Cache(shares, 20)
    for person in range(20):
        cache.run(chat(person, 1), "b", hints=Hints(ttl_s=1e6))
    for _ in range(3):
        for person in range(100, 102):
            cache.run(chat(person, 1), "a")
    assert cache.run(chat(100, 1), "a") == 10  # within its share, whatever b asks for
    assert cache.run(chat(19, 1), "b") == 10
    assert cache.run(chat(0, 1), "b") == 0
    cache.cache.check()


KINDS = pytest.mark.parametrize("specs", [(full_spec(4),), (full_spec(4), window_spec(4, 9)), HYBRID])


@KINDS
def test_session_that_pauses_for_a_tool_keeps_its_end_while_its_hint_says_so(specs: tuple[KVCacheSpec, ...]) -> None:
    """Other prompts fill the memory while the tool runs; what they leave saves as many tokens per byte."""

    def keeps_end(hints: Hints, pause_s: float) -> bool:
        cache = Cache(EVERYBODY, 14, specs)
        cache.run(chat(1, 1), hints=hints)
        for prompt, _ in zip(unique(), range(20), strict=False):
            cache.now += pause_s / 20
            cache.run(prompt[:13])
        cache.cache.check()
        return cache.run(chat(1, 2)) == 11

    assert [keeps_end(Hints(within_s=60), pause_s) for pause_s in (0, 30, 200, 1000)] == [True, True, False, False]
    assert not any(keeps_end(hints, 30) for hints in (NO_HINTS, Hints(over=True), Hints(within_s=4)))


@KINDS
@pytest.mark.parametrize("pauses", [Hints(within_s=86400.0), Hints(ttl_s=86400.0)])
def test_paused_sessions_above_a_share_evict_their_own_tenant(specs: tuple[KVCacheSpec, ...], pauses: Hints) -> None:
    """A tenant that promises to return with everything, for a day, takes nothing from another's guaranteed share."""
    cache = Cache(TenantShares((Share("a", 0.4), Share("b", 0.4))), 20, specs)
    for person in range(2):
        cache.run(chat(person, 1), "a")
    for person in range(2, 42):
        cache.run(chat(person, 1), "b", hints=pauses)
    cache.cache.check()
    asked = [Request("r", chat(person, 1), hasher=cache.cache.hasher) for person in range(42)]
    kept = [cache.cache.find_hit(request).tokens == 10 for request in asked]
    assert (all(kept[:2]), any(kept[2:]), all(kept[2:])) == (True, True, False)


def test_ends_of_many_times_to_live_take_bounded_memory() -> None:
    cache = Cache(EVERYBODY, 11)
    policy = cache.eviction_policy
    for _ in range(200):
        cache.run(chat(1, 1), hints=Hints(ttl_s=1e6))
    assert len(policy._lives) <= 2 * len(policy._tree.points) + 66


def test_given_up_resume_point_is_evicted_at_once_unless_it_is_shared() -> None:
    for hints, left in ((NO_HINTS, 0), (Hints(shared_tokens=10), 10)):
        cache = Cache(EVERYBODY, 40)
        cache.run(chat(1, 1), hints=hints)
        request = Request("r", chat(1, 1), hasher=cache.cache.hasher, hints=hints)
        for tokens in (10, 11):
            cache.eviction_policy.give_up(request, tokens)
        cache.eviction_policy.give_up(request, 9)  # not there
        assert max((node.tokens for node in cache.eviction_policy._tree.kept()), default=0) == left
        cache.cache.check()


def test_hint_of_shared_prefix_keeps_it() -> None:
    """Though nobody has hit it yet, and all that came later did not begin so."""
    hit = []
    for hints in (NO_HINTS, Hints(shared_tokens=8)):
        cache = Cache(EVERYBODY, 11)
        cache.run(list(range(100, 112)), hints=hints)
        for prompt, _ in zip(unique(), range(20), strict=False):
            cache.run(prompt)
        hit.append(cache.run([*range(100, 108), 1, 2, 3]))
    assert hit == [0, 8]


def test_hint_moves_with_its_session() -> None:
    cache = Cache(EVERYBODY, 30)
    hinted = Hints(within_s=60)
    cache.run(chat(1, 1), hints=hinted)
    cache.run(chat(1, 2), hints=hinted)
    found = {node.tokens: node.hint for node in cache.eviction_policy._tree.kept()}
    assert (found[11], found[16], found[17]) == (NEVER, WITHIN + 2, WITHIN + 2)
    cache.run(chat(1, 2)[:-1], hints=Hints(over=True))  # on from 16, and nothing new is kept behind it
    assert {node.tokens: node.hint for node in cache.eviction_policy._tree.kept()}[16] == NEVER
    cache.cache.check()


def test_hint_that_fails_often_is_ignored() -> None:
    ranking = HazardRanking()

    def end(serial: int, hint: int, used: float) -> ResumePoint:
        made = ResumePoint(serial, Kind.OUTPUT, 100, used, None)
        made.saved = made.worth = 1.0
        ranking.note_hint(made, hint, used)
        return made

    def is_believed(now: float) -> bool:
        pair = end(-1, WITHIN + 2, now), end(-2, NOTHING, now)
        answer = ranking.prefers(*pair, now)
        for one in pair:
            ranking.forget(one, now)
        return answer

    assert is_believed(0.0)
    broken = [end(serial, WITHIN + 2, 0.0) for serial in range(100)]
    for _ in range(100):
        ranking.note_request(600.0)
    kept = end(1000, NOTHING, 500.0)
    ranking.hit(kept, 600.0)
    for _ in range(100):
        ranking.note_request(700.0)
    assert len(broken) == 100
    assert not is_believed(700.0)


def test_hint_that_is_false_harms_its_own_tenant_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another tenant's flood promises of its prompts changes nothing of what is found here."""
    monkeypatch.setattr(hazard, "_LEARN_AT", 1000)  # before measured rates outweigh hints
    shares = TenantShares((Share("a", 0.3), Share("b", 0.3)))
    found = []
    for lies in (NO_HINTS, Hints(within_s=1, shared_tokens=12), Hints(ttl_s=1e6)):
        cache, prompts, hit, own = Cache(shares, 40), unique(), 0, 0
        for turn in (1, 2, 3):
            for person in range(4):
                hit += cache.run(chat(person, turn), "a", hints=Hints(within_s=40))
                own += cache.run(chat(100 + person, turn), "b")
                for _ in range(6):
                    cache.run(next(prompts), "b", hints=lies)
        found.append((hit, own))
    assert found[0][0] == found[1][0] == found[2][0] > 0
    assert found[0][1] > max(found[1][1], found[2][1])


# -- what it does not do


def test_hint_leaves_block_hashes_unchanged() -> None:
    cache = Cache(EVERYBODY, 30)
    prompt = np.arange(12)
    hashes = [Request("r", prompt, hasher=cache.cache.hasher, hints=one).hashes for one in (None, Hints(over=True))]
    assert hashes[0] == hashes[1]


# -- hints of one who knows the future


def test_hint_oracle_finds_where_sessions_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of two turns, its answer stripped; others that only begin alike."""
    monkeypatch.setattr(oracle_hints, "MANY", 4)

    def asked(at: float, *segments: tuple[int, int]) -> TraceRequest:
        pieces = tuple((segment, 0, length) for segment, length in segments)
        return TraceRequest(at, Pieces(PROMPT_SEGMENT, pieces), Pieces(NEW_OUTPUT, ((round(at), 0, 5),)))

    shared = (1, 32)
    turns = asked(0.0, shared, (2, 40)), asked(30.0, shared, (2, 40), (3, 9))
    others = asked(10.0, shared, (4, 20)), asked(20.0, shared, (5, 20))
    first, *rest = oracle_hints.hinted([turns[0], *others, turns[1]], 16)
    assert (first.hints, first.marks) == (Hints(within_s=30.0, shared_tokens=32), (72,))
    assert [(one.hints, one.marks) for one in rest] == [(Hints(over=True, shared_tokens=32), ())] * 3
