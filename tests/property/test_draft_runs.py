"""Drafts: every acceptance pattern over edges of blocks and states, and what EAGLE and preemption make of it."""

from collections import Counter
from dataclasses import replace

import pytest

from hybridkv.schedule import SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import full_spec, state_spec, window_spec
from oracles import Rig, RigOptions

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

LAYOUTS = ("natural", "reference")


def draft_rig(layout: str, drafts: int, specs: tuple[KVCacheSpec, ...], **other: object) -> Rig:
    """With room to spare, and a state kept every five tokens."""
    options = RigOptions(
        num_blocks=120,
        specs=specs,
        max_model_len=64,
        limits=SchedulerLimits(max_batched_tokens=40),
        placement="interval:5",
        blocks_per_slab=tuple(2 for _ in specs) if layout == "natural" else (),
    )
    return Rig(replace(options.with_drafts(drafts), **other))  # type: ignore[arg-type]  # fields by name


def run_with(rig: Rig, name: str, right: int, wrong: int) -> None:
    """``name`` to its end, with the same drafts in every step."""
    while name in rig.live_ids:
        rig.propose(name, right, wrong)
        rig.schedule()
        rig.update()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_every_acceptance_pattern_at_every_place(layout: str, drafts: int) -> None:
    """Each step, cell, state and cached block is foretold, and what is read and cached is compared in bytes."""
    for right in range(drafts + 1):
        for length in range(5, 6 + right):  # so that steps begin at every place, whatever they accept
            rig = draft_rig(layout, drafts, (full_spec(4), state_spec(12), window_spec(2, 5)))
            name = rig.add([1] * (length - 1) + [2], 26, marks=(12, 17, 18, 19))
            assert name is not None
            run_with(rig, name, right, drafts - right)
            accepted = [rig.oracle.counts[f"accepted {place}"] for place in range(drafts)]
            assert [bool(count) for count in accepted] == [place < right for place in range(drafts)]
            again = rig.add([*rig.requests[name][1].tokens, 0], 3)
            rig.drain()
            assert again is not None
            hit = rig.requests[again][0].first_hit_tokens
            assert hit is not None
            assert hit >= (24 if layout == "reference" else 25 + length - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_stop_token_among_accepted_drafts(layout: str, stop: int) -> None:
    """Whatever token it is, and wherever among the drafts it comes."""
    cut = 0
    for length in range(2, 14, 2):
        rig = draft_rig(layout, 3, (full_spec(4), state_spec(5)))
        name = rig.add([length % 4, *[3] * (length - 1)], 20, stop_token_ids=(stop,))
        assert name is not None
        run_with(rig, name, 3, 0)
        cut += rig.oracle.counts["cut drafts"]
        rig.add([*rig.requests[name][1].tokens, 1], 4)
        rig.drain()
    assert cut


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_eagle_hits_what_accepted_drafts_filled_less_a_block(layout: str, right: int) -> None:
    """After every step, however many of its drafts were accepted."""
    rig = draft_rig(layout, 3, (full_spec(4), window_spec(2, 5)), eagle=True)
    name = rig.add([1] * 9 + [2], 26)
    assert name is not None
    while name in rig.live_ids:
        rig.propose(name, right, 3 - right)
        rig.schedule()
        rig.update()
        tokens = rig.requests[name][1].tokens
        assert rig.probe([*tokens, 0]) == (len(tokens) - 1) // 4 * 4 - 4
    assert bool(rig.oracle.counts["accepted 2"]) == (right == 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_preempted_with_drafts_in_flight(layout: str) -> None:
    """Those that are accepted come late, all at once, and the row starts anew behind them: random runs miss this."""
    met: Counter[str] = Counter()
    limits = SchedulerLimits(max_batched_tokens=40, max_in_flight=2, num_speculative_tokens=3)
    for num_blocks in range(9, 12) if layout == "natural" else range(17, 23):  # room for one of them, but not for both
        rig = draft_rig(layout, 3, (full_spec(2), window_spec(2, 5)), num_blocks=num_blocks, limits=limits)
        rig.add([0, 1, 2, 3], 12)
        rig.add([3, 2, 1, 0], 12)
        while len(rig.live_ids) == 2:
            rig.propose("r1", 3, 0)
            rig.schedule()
            rig.schedule()
            rig.update()
            rig.update()
        rig.drain()
        met.update(rig.oracle.counts)
    assert met["preempted with drafts"]
    assert met["late"]
