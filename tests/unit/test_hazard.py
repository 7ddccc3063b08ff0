"""Values of ends: rates that are learned and fade, what waiting is worth, rings, and who inherits."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from hybridkv.eviction.hazard import BUCKETS, HazardRanking, HazardTable, bucket_of
from hybridkv.eviction.ranking import NEVER, NOTHING, SOMETIME, End, Kind, Ring


def end(serial: int, kind: Kind = Kind.PROMPT, used: float = 0.0, saved: float = 1.0, gap: float | None = None) -> End:
    made = End(serial, kind, 100, used, gap)
    made.saved = saved
    return made


# -- the table


def starts() -> list[float]:
    return [0.0] + [1.5**k for k in range(BUCKETS - 1)]


def test_buckets_by_hand() -> None:
    assert [bucket_of(age) for age in (0.0, 0.99, 1.0, 1.49, 1.5, 2.25, 1e9)] == [0, 0, 1, 1, 2, 3, BUCKETS - 1]


def test_waiting_is_counted_in_each_bucket_that_it_passes() -> None:
    table, random = HazardTable(), Random(1)
    spans = [(start, start + random.expovariate(0.01)) for start in (random.expovariate(0.1) for _ in range(50))]
    of = [table.class_of(random.randrange(3), random.randrange(2), random.randrange(2)) for _ in spans]
    other = HazardTable()
    for key in table._numbers:
        other.class_of(*key)
    for number, (start, stop) in zip(of, spans, strict=True):
        other.wait(number, start, stop)
    table.wait_all(np.array(of), *np.array(spans).T)
    assert np.allclose(table.at_risk, other.at_risk)
    edges = [*starts(), math.inf]
    by_hand = [sum(max(min(b, high) - max(a, low), 0.0) for a, b in spans) for low, high in pairwise(edges)]
    assert np.allclose(table.at_risk[0], by_hand)


def worth_by_definition(rates: list[float], first: int) -> float:
    """The greatest P(hit by then) / E[seconds waited], bucket by bucket."""
    edges = [*starts(), 1.5 ** (BUCKETS - 1)]
    best, left, waited = 0.0, 1.0, 0.0
    for rate, low, high in zip(rates[first:], edges[first:], edges[first + 1 :], strict=False):
        stays = math.exp(-rate * (high - low))
        waited += left * (1 - stays) / rate
        left *= stays
        best = max(best, (1 - left) / waited)
    return best


def test_worth_is_the_best_one_can_wait_for() -> None:
    table, random = HazardTable(), Random(2)
    for _ in range(300):
        of, age = table.class_of(random.randrange(2), random.randrange(3), 1), random.expovariate(0.02)
        table.wait(of, 0.0, age)
        if random.random() < 0.5:
            table.note_hit(of, age)
    table.learn()
    rates = table.rates().tolist()
    for number, worth in enumerate(table.worth):
        assert worth == pytest.approx([worth_by_definition(rates[number], b) for b in range(BUCKETS)], rel=1e-6)


def test_a_class_with_little_seen_leans_on_the_one_before_it() -> None:
    table = HazardTable()
    often, rare = table.class_of(0, 1, 3), table.class_of(0, 1, 4)
    for _ in range(1000):
        table.wait(often, 0.0, 10.0)
        table.note_hit(often, 9.9)
    table.learn()
    assert table.worth[rare][0] == pytest.approx(table.worth[table.class_of(0, 1)][0], rel=0.01)
    assert table.worth[table.class_of(1, 1, 3)][0] < table.worth[rare][0]  # of another kind: leans on all


def test_what_was_seen_fades() -> None:
    table = HazardTable()
    of = table.class_of(0, 0, 0)
    table.wait(of, 0.0, 10.0)
    table.note_hit(of, 5.0)
    table.decay(0.5)
    assert (table.hits.sum(), table.at_risk[0].sum()) == (4 * 0.5, 5.0)


# -- the ranking


def serve(ranking: HazardRanking, hit: Kind, other: Kind, hundreds: int) -> None:
    """Ends of both kinds, one a request: those of one are hit after five seconds, the others wait a minute in vain."""
    table = ranking.table
    kinds = np.repeat([table.class_of(int(kind), 0, -1) for kind in (hit, other)], 100)
    for _ in range(hundreds):
        table.wait_all(kinds, np.zeros(200), np.repeat([5.0, 60.0], 100))
        for _ in range(100):
            table.note_hit(table.class_of(int(hit), 0, -1), 5.0)
            ranking.note_request(0.0)


def is_preferred(ranking: HazardRanking, kind: Kind, to: Kind, now: float) -> bool:
    ends = end(-1, kind, now), end(-2, to, now)
    found = ranking.prefers(*ends, now)
    for one in ends:
        ranking.forget(one, now)
    return found


def follows_a_change(ranking: HazardRanking) -> bool:
    """Whether, after outputs' ends were hit for long and then prompts' instead, prompts' are preferred."""
    serve(ranking, Kind.OUTPUT, Kind.PROMPT, 40)
    assert is_preferred(ranking, Kind.OUTPUT, Kind.PROMPT, 0.0)
    serve(ranking, Kind.PROMPT, Kind.OUTPUT, 15)
    return is_preferred(ranking, Kind.PROMPT, Kind.OUTPUT, 0.0)


def test_a_change_of_what_comes_is_noticed() -> None:
    assert follows_a_change(HazardRanking())


def test_without_fading_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HazardTable, "decay", lambda *_: None)
    assert not follows_a_change(HazardRanking())


def test_waiting_counts_while_more_ends_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those of long ago, too: one more end comes with each request."""
    monkeypatch.setattr(HazardTable, "decay", lambda *_: None)
    ranking = HazardRanking()
    for request in range(1, 401):
        ranking.add(end(request, used=float(request)), float(request))
        ranking.note_request(float(request))
    assert ranking.table.at_risk[0].sum() == pytest.approx(400 * 399 / 2)


def test_many_ends_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.eviction.hazard._MOST_LOOKED_AT", 7)
    monkeypatch.setattr(HazardTable, "decay", lambda *_: None)
    ranking = HazardRanking()
    for serial in range(10):
        ranking.add(end(serial), 0.0)
    waited = []
    for _ in range(2):
        for _ in range(100):
            ranking.note_request(5.0)
        waited.append(ranking.table.at_risk[0].sum())
    assert waited == [7 * 5.0, 10 * 5.0]  # three are looked at first, and four again


def test_of_a_ghost_that_is_kept_again_a_new_age_begins_though_it_is_hit_before_it_is_ranked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HazardTable, "decay", lambda *_: None)
    ranking, one = HazardRanking(), end(1)
    ranking.add(one, 0.0)
    for _ in range(100):
        ranking.note_request(50.0)
    ranking.remove(one)
    ranking.given_up(one, None, 50.0, declined=False)
    ranking.kept(one, 60.0)
    ranking.hit(one, 61.5)
    assert (ranking.table.at_risk[0].sum(), ranking.table.at_risk[0, 0]) == (60.0 + 1.5, 2.0)
    assert ranking.check() == []


@pytest.mark.parametrize("seed", range(20))
def test_each_second_of_waiting_is_counted_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of events, under a clock that may stand still; the ranking counts what an end's own record says."""
    monkeypatch.setattr("hybridkv.eviction.hazard._LEARN_EVERY", 3)
    monkeypatch.setattr(HazardTable, "decay", lambda *_: None)
    ranking, random, now, waited = HazardRanking(), Random(seed), 0.0, 0.0
    ghosts: list[End] = []
    for serial in range(12):
        ghosts.append(end(serial))
        ranking.given_up(ghosts[-1], None, now, declined=False)
    for _ in range(400):
        now += random.choice((0.0, 0.0, 0.25, 1.0, 50.0))
        one = random.choice(ghosts)
        match random.choice(("request", "request", "kept", "hit", "promised", "ranked", "forget")):
            case "request":
                ranking.note_request(now)
            case "kept":
                waited += now - one.used
                ranking.kept(one, now)
            case "hit":
                waited += now - one.used
                ranking.hit(one, now)
            case "promised":
                ranking.promised(one, random.choice((NOTHING, NEVER, SOMETIME)), now)
            case "ranked":
                ranking.add(one, now)
                ranking.remove(one)
            case "forget":
                waited += now - one.used
                ranking.forget(one, now)
                ghosts.remove(one)
                ghosts.append(end(one.serial, used=now))
                ranking.given_up(ghosts[-1], None, now, declined=False)
        assert ranking.check() == []
    for one in ghosts:
        waited += now - one.used
        ranking.forget(one, now)
    assert ranking.table.at_risk[0].sum() == pytest.approx(waited)


def test_the_least_valuable_goes_first() -> None:
    ranking = HazardRanking()
    serve(ranking, Kind.OUTPUT, Kind.PROMPT, 3)
    now = 100.0
    ends = [
        end(9000 + i, kind, now - i, saved)
        for i, (kind, saved) in enumerate([(Kind.PROMPT, 1.0), (Kind.OUTPUT, 1.0)] * 4)
    ]
    ends.append(end(9100, Kind.OUTPUT, now, 1e-9))
    for one in ends:
        ranking.add(one, now)
    assert ranking.check() == []
    order = []
    while (lowest := ranking.lowest(now)) is not None:
        order.append(lowest)
        ranking.remove(lowest)
    assert order[0].saved == 1e-9
    assert [one.kind for one in order[1:]] == [Kind.PROMPT] * 4 + [Kind.OUTPUT] * 4


def outermost(ranking: HazardRanking, now: float) -> End | None:
    """The least by looking at both ends of every ring."""
    found = [one for ring in ranking._rings.values() for one in ring.both_ends()]
    return min(found, key=lambda one: (ranking.value(one, now), one.serial), default=None)


@pytest.mark.parametrize("seed", range(6))
def test_the_least_is_that_of_all_rings_as_time_passes_and_ends_come_and_go(seed: int) -> None:
    ranking, random, now, ranked = HazardRanking(), Random(seed), 0.0, list[End]()
    for serial in range(600):
        now += random.expovariate(1.0) * random.choice((0.01, 1.0, 30.0))
        ranking.note_request(now)
        ranked.append(end(serial, Kind(random.randrange(4)), now, random.lognormvariate(0.0, 1.5)))
        ranking.add(ranked[-1], now)
        for _ in range(random.randrange(4)):
            one = ranked.pop(random.randrange(len(ranked)))
            ranking.remove(one)
            if random.random() < 0.6 or not ranked:
                ranking.hit(one, now)
                ranking.add(one, now)
                ranked.append(one)
            else:
                ranking.given_up(one, random.choice(ranked), now, declined=False)
        for later in (0.0, random.expovariate(1.0)):
            now += later
            assert ranking.lowest(now) is outermost(ranking, now)
    assert ranking.check() == []


def heir_of_a_hit_end() -> tuple[HazardRanking, End, End, float]:
    ranking = HazardRanking()
    serve(ranking, Kind.OUTPUT, Kind.PROMPT, 3)
    now = 100.0
    parent, child = end(9000, Kind.PROMPT, now), end(9001, Kind.OUTPUT, now)
    for one in (parent, child):
        ranking.add(one, now)
    return ranking, parent, child, now


def test_who_serves_what_was_given_up_inherits_its_worth() -> None:
    ranking, parent, child, now = heir_of_a_hit_end()
    before, theirs = ranking.value(parent, now), ranking.value(child, now)
    ranking.remove(child)
    ranking.given_up(child, parent, now, declined=False)
    assert ranking.value(parent, now) == pytest.approx(before + theirs)
    # handed on, the better of two, and gone with a hit
    third = end(9002, Kind.BRANCH, now)
    ranking.remove(parent)
    ranking.given_up(parent, third, now, declined=False)
    assert ranking.heir_of(third) == ranking.heir_of(parent)
    ranking.hit(third, now + 1)
    assert ranking.heir_of(third) is None


def test_who_inherits_is_the_least_no_longer() -> None:
    ranking, parent, child, now = heir_of_a_hit_end()
    ranking.remove(child)
    beside = end(9002, Kind.PROMPT, now, 1.001 * parent.saved)
    ranking.add(beside, now)
    ranking.remove(parent)
    parent.saved = 0.4  # in a ring of its own
    ranking.add(parent, now)
    assert ranking.lowest(now) is parent
    ranking.given_up(child, parent, now, declined=False)
    assert ranking.value(parent, now) > ranking.value(beside, now)
    assert ranking.lowest(now) is beside


def test_of_equal_ends_in_two_rings_the_one_made_first_goes() -> None:
    ranking = HazardRanking()
    for serial, kind in ((2, Kind.PROMPT), (1, Kind.OUTPUT), (3, Kind.BRANCH)):
        ranking.add(end(serial, kind), 0.0)
    assert len({ranking.value(end(serial, kind), 0.0) for serial, kind in ((2, Kind.PROMPT), (1, Kind.OUTPUT))}) == 1
    assert getattr(ranking.lowest(0.0), "serial", None) == 1


def test_an_heir_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HazardRanking, "given_up", lambda *_, **__: None)
    ranking, parent, child, now = heir_of_a_hit_end()
    before = ranking.value(parent, now)
    ranking.given_up(child, parent, now, declined=False)
    assert ranking.value(parent, now) == before


def test_of_one_declined_only_what_nobody_hit_is_inherited() -> None:
    ranking, parent, child, now = heir_of_a_hit_end()
    ranking.remove(child)
    ranking.hit(child, now + 1.0)
    ranking.given_up(child, parent, now + 1.0, declined=True)
    assert ranking.heir_of(parent) is None


def test_ends_in_turns_are_counted_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    for most in (8192, 7):
        monkeypatch.setattr("hybridkv.eviction.hazard._MOST_LOOKED_AT", most)
        ranking = HazardRanking()
        for serial in range(40):
            ranking.add(end(serial, Kind.GRID, float(serial)), float(serial))
        for _ in range(12):
            ranking._count_waiting(100.0)
        sums.append(ranking.table.at_risk[0].copy())
    assert np.allclose(*sums)
    assert sums[0].sum() == pytest.approx(sum(100.0 - serial for serial in range(40)))


def test_equal_calls_have_equal_answers() -> None:
    orders = []
    for _ in range(2):
        ranking, random, now, order = HazardRanking(), Random(5), 0.0, list[int]()
        for serial in range(400):
            now += random.expovariate(1.0)
            ranking.note_request(now)
            ranking.add(end(serial, Kind(random.randrange(4)), now, random.random() + 0.1), now)
            if serial > 30 and (lowest := ranking.lowest(now)) is not None:
                ranking.remove(lowest)
                ranking.given_up(lowest, None, now, declined=False)
                order.append(lowest.serial)
        assert ranking.check() == []
        orders.append(order)
    assert orders[0] == orders[1]


def test_check_sees_an_end_in_another_ring() -> None:
    ranking = HazardRanking()
    one = end(1)
    ranking.add(one, 0.0)
    one.saved *= 4
    assert ranking.check() == ["an end of 100 tokens stands in the ring (3, 1)"]


# -- rings


def test_rings_are_in_the_order_of_last_use() -> None:
    ring, random = Ring(), Random(3)
    ends = [end(serial, used=float(random.randrange(20))) for serial in range(60)]
    for one in ends:
        ring.add(one)
    for one in random.sample(ends, 30):
        ring.remove(one)
        ends.remove(one)
    ordered = sorted(ends, key=lambda one: (one.used, one.serial))
    assert (ring.first(), *ring.both_ends(), len(ring)) == (ordered[0], ordered[0], ordered[-1], 30)
    for one in ordered[1:]:
        ring.remove(one)
    assert ring.both_ends() == (ordered[0],)
