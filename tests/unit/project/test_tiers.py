"""The baseline of benchmarks/tiers.py: ARC over resume points decides as the figure of the paper."""

from random import Random

import pytest
from tiers import Arc

from hybridkv.eviction.resume_points import Kind, ResumePoint


class Figure:
    """ARC(c) as figure 4 of Megiddo and Modha (FAST 2003) has it, for pages of one size."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = list[int](), list[int](), list[int](), list[int]()  # the oldest first

    def replace(self, x: int) -> None:
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def ask(self, x: int) -> bool:
        if x in self.t1 or x in self.t2:  # case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        if x in self.b1:  # case II
            self.p = min(self.p + max(len(self.b2) / len(self.b1), 1), self.c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # case III
            self.p = max(self.p - max(len(self.b1) / len(self.b2), 1), 0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:  # case IV
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    self.replace(x)
                else:
                    self.t1.pop(0)
            elif (held := sum(map(len, (self.t1, self.t2, self.b1, self.b2)))) >= self.c:
                if held == 2 * self.c:
                    self.b2.pop(0)
                self.replace(x)
            self.t1.append(x)
        return False


def ask(arc: Arc, point: ResumePoint, c: int) -> bool:
    """Ask for a page as the cache asks for a resume point, with room for ``c`` of them."""
    was_kept = any(point.serial in kept for kept in arc.kept_in)
    if was_kept:
        arc.remove(point)
    arc.hit(point, 0.0)
    if not was_kept:
        if sum(map(len, arc.kept_in)) == c:
            victim = arc.lowest(0.0)
            assert victim is not None
            arc.remove(victim)
            arc.evicted(victim, None, 0.0, declined=False)
        arc.kept(point, 0.0)
    arc.add(point, 0.0)
    assert not arc.check()
    return was_kept


@pytest.mark.parametrize("seed", range(20))
def test_arc_decides_as_the_figure(seed: int) -> None:
    rng = Random(seed)
    c, pages = rng.randint(2, 12), rng.randint(8, 60)
    points = [ResumePoint(serial, Kind.PROMPT, 64, 0.0, None) for serial in range(pages)]
    arc, figure = Arc(), Figure(c)
    hits = 0
    for turn in range(2000):
        scan = turn // 200 % 2
        x = turn % pages if scan and rng.random() < 0.8 else min(int(rng.expovariate(4 / pages)), pages - 1)
        found = figure.ask(x)
        hits += found
        assert ask(arc, points[x], c) == found
        assert arc.target == figure.p
        lists = [list(held) for held in (*arc.kept_in, *arc.ghosts)]
        assert lists == [figure.t1, figure.t2, figure.b1, figure.b2]
    assert 0 < hits < 2000


def test_arc_passes_over_what_may_not_be_evicted() -> None:
    points = [ResumePoint(serial, Kind.PROMPT, 64, 0.0, None) for serial in range(3)]
    arc = Arc()
    for point in points:
        arc.kept(point, 0.0)
        arc.add(point, 0.0)
    arc.remove(points[0])
    assert arc.lowest(0.0) is points[1]
    arc.remove(points[1])
    arc.remove(points[2])
    assert arc.lowest(0.0) is None
    arc.add(points[0], 0.0)
    assert arc.lowest(0.0) is points[0]
