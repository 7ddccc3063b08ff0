"""A resume point is of one class on all tiers: else a shared template is worth no more than the end of a prompt."""

import pytest

from hybridkv.eviction.resume_points import NEVER, Kind, ResumePoint
from hybridkv.request import Hints, Request
from hybridkv.testing.configs import full_spec, state_spec
from tier_driver import BLOCK, Driver, tokens

TEMPLATE = tokens(1, 3, more=0)
PROMPTS = [[*TEMPLATE, *tokens(number, 2, more=5)] for number in (2, 3, 4)]
PROMPTS.append([*PROMPTS[-1], 7, *tokens(5, 2)])


@pytest.fixture(name="run")
def served() -> Driver:
    """Prompts that begin with a template; the last one goes on after an output."""
    run = Driver(device=40, host=400, specs=(full_spec(BLOCK), state_spec(BLOCK)), took_s=0.0, token_s=0.5)
    for number, prompt in enumerate(PROMPTS):
        run.served(f"request {number}", prompt, output=2)
    return run


def classes(run: Driver, *, host: bool) -> dict[tuple[int, int], tuple[Kind, float | None, int]]:
    """The kind, the gap and the hits of each resume point of a prompt that is kept."""
    found = dict[tuple[int, int], tuple[Kind, float | None, int]]()
    policy = (run.tier.host if host else run.cache).eviction_policy
    policy.settle()
    for number, prompt in enumerate(PROMPTS):
        asked = Request("?", [*prompt, 7, 7], hasher=run.cache.hasher)
        for end in range(BLOCK, asked.num_tokens):
            if isinstance(point := policy.copy_at(asked, end), ResumePoint):
                found[number, end] = point.kind, point.session_gap, point.hits
    return found


def test_host_knows_what_the_device_knows(run: Driver) -> None:
    on_host = classes(run, host=True)
    assert {kind for kind, _, _ in on_host.values()} == {Kind.PROMPT, Kind.OUTPUT, Kind.BRANCH}
    assert {gap for _, gap, _ in on_host.values()} > {None}
    assert {hits for _, _, hits in on_host.values()} == {0, 1}
    assert on_host == classes(run, host=False)


def test_device_learns_them_back(run: Driver) -> None:
    """It knows no resume point that it lost long ago."""
    on_host = classes(run, host=True)
    assert run.cache.reset_prefix_cache()
    assert not classes(run, host=False)
    for number, prompt in enumerate(PROMPTS):
        run.served(f"again {number}", [*prompt[: len(TEMPLATE)], *tokens(10 + number, 1)])
    assert run.tier.statistics().loads == 1
    on_device = classes(run, host=False)
    assert on_device
    assert {place: one[:2] for place, one in on_device.items()} == {place: on_host[place][:2] for place in on_device}
    assert classes(run, host=True)[0, len(TEMPLATE)][2] == on_host[0, len(TEMPLATE)][2] + len(PROMPTS)


def test_session_that_went_on_is_over_on_the_host_too() -> None:
    run = Driver(device=40, host=400, specs=(full_spec(BLOCK), state_spec(BLOCK)), took_s=0.0)
    said = tokens(1, 3)
    run.served("first", said, output=2, hints=Hints(goes_on=True))
    known = [*said, 7]
    asked = Request("?", [*known, 7], hasher=run.cache.hasher)
    run.served("second", [*known, *tokens(2, 1)], output=2, hints=Hints(goes_on=True))
    for manager in (run.cache, run.tier.host):
        point = manager.eviction_policy.copy_at(asked, len(known))
        assert isinstance(point, ResumePoint)
        assert point.hint == NEVER
