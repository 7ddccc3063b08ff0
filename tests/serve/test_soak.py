"""Many clients at once, some of which leave, talk nonsense or read slowly: nothing is lost, mixed up or left behind."""

import pytest
from soak import soak


@pytest.mark.parametrize("fronts", [0, 1])
def test_crowd_of_clients_loses_nothing(fronts: int) -> None:
    found = soak("llama", 12, 4, max_waiting=8, fronts=fronts)
    assert {"answered", "streamed", "left", "left in the middle", "refused"} <= found.counts.keys()
    assert len(found.processes) == 1 + fronts


@pytest.mark.thorough
@pytest.mark.parametrize("fronts", [0, 1])
def test_crowd_of_clients_for_long_loses_nothing(fronts: int) -> None:
    """As `python tests/serve/soak.py`, which takes as long as one likes."""
    found = soak("qwen3_next", 64, 20, fronts=fronts)
    assert found.counts["turned away"] > 0
    assert found.counts["answered"] + found.counts["streamed"] > 100
    assert found.grown < 0.05
