"""Whatever is given up next, every read is of what was written: histories with each eviction, checked at every step."""

import pytest
from history import play

from hybridkv.cache.placement import EVICTIONS

pytestmark = pytest.mark.usefixtures("quiet")

JUDGED = [name for name in EVICTIONS if name != "lru"]


@pytest.mark.parametrize("eviction", JUDGED)
def test_no_history_differs(eviction: str) -> None:
    assert sum(play(seed, steps=60, eviction=eviction)["tokens hit"] for seed in (43, 46, 49, 53)) > 100


@pytest.mark.thorough
@pytest.mark.parametrize("eviction", JUDGED)
def test_no_long_history_differs(eviction: str) -> None:
    for seed in range(1000, 1060):
        play(seed, eviction=eviction)
