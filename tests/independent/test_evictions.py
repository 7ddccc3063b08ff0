"""Whatever is given up next, every read is of what was written: histories with each eviction, checked at every step."""

import pytest
from history import play

pytestmark = pytest.mark.usefixtures("quiet")


def test_no_history_differs() -> None:
    assert sum(play(seed, steps=60, eviction="hazard")["tokens hit"] for seed in (43, 46, 49, 53)) > 100


@pytest.mark.thorough
def test_no_long_history_differs() -> None:
    for seed in range(1000, 1060):
        play(seed, eviction="hazard")
