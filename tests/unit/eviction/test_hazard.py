"""Values of ends: rates that are learned and fade, what waiting is worth, rings, and who inherits."""

from __future__ import annotations

import numpy as np
import pytest

from hybridkv.eviction.hazard import BUCKETS, HazardRanking, bucket_of
from hybridkv.eviction.resume_points import Kind, ResumePoint


def end(
    serial: int, kind: Kind = Kind.PROMPT, used: float = 0.0, saved: float = 1.0, gap: float | None = None
) -> ResumePoint:
    made = ResumePoint(serial, kind, 100, used, gap)
    made.saved = made.worth = saved
    return made


# -- the table


def test_hazard_buckets_match_hand_calculation() -> None:
    assert [bucket_of(age) for age in (0.0, 0.99, 1.0, 1.49, 1.5, 2.25, 1e9)] == [0, 0, 1, 1, 2, 3, BUCKETS - 1]


# -- the ranking


def serve(ranking: HazardRanking, hit: Kind, other: Kind, hundreds: int) -> None:
    """Ends of both kinds, one a request: those of one are hit after five seconds, the others wait a minute in vain."""
    kinds = np.repeat([ranking._number_of(int(kind), 0, -1) for kind in (hit, other)], 100)
    for _ in range(hundreds):
        ranking.wait_all(kinds, np.zeros(200), np.repeat([5.0, 60.0], 100))
        for _ in range(100):
            ranking._count_hit(ranking._number_of(int(hit), 0, -1), 5.0)
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


def test_hazard_ranking_follows_a_workload_change() -> None:
    assert follows_a_change(HazardRanking())


def test_hazard_sums_of_single_updates_match_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    for most in (8192, 7):
        monkeypatch.setattr("hybridkv.eviction.hazard._MOST_LOOKED_AT", most)
        ranking = HazardRanking()
        for serial in range(40):
            ranking.add(end(serial, Kind.GRID, float(serial)), float(serial))
        for _ in range(12):
            ranking._count_waiting(100.0)
        sums.append(ranking.at_risk[0].copy())
    assert np.allclose(*sums)
    assert sums[0].sum() == pytest.approx(sum(100.0 - serial for serial in range(40)))


def test_hazard_check_reports_resume_point_in_wrong_ring() -> None:
    ranking = HazardRanking()
    one = end(1)
    ranking.add(one, 0.0)
    one.worth *= 4
    assert ranking.check() == ["a resume point of 100 tokens is in the wrong ring (3, 1)"]
