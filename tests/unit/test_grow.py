"""A running request that only grows is served without a plan: what a plan would have done, to the last fact."""

from random import Random
from typing import Any

import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import full_spec, model_config, natural_model_config, state_spec, window_spec

BLOCK = 4
MAX_LEN = 200
SPECS: dict[str, list[KVCacheSpec]] = {
    "full": [full_spec(BLOCK)],
    "window": [full_spec(BLOCK), window_spec(BLOCK, 10)],
    "wide": [full_spec(BLOCK), window_spec(2 * BLOCK, 10)],
    "states": [full_spec(BLOCK), state_spec(2 * BLOCK)],
    "window at edges": [full_spec(BLOCK), window_spec(BLOCK, 10)],
    "window at intervals": [full_spec(BLOCK), window_spec(BLOCK, 10)],
    "states at edges": [full_spec(BLOCK), state_spec(2 * BLOCK)],
    "states alone": [state_spec(BLOCK)],
    "natural": [full_spec(BLOCK), window_spec(BLOCK, 10)],
    "natural states": [full_spec(BLOCK), state_spec(2 * BLOCK)],
}
RETENTION = {"window at edges": 0, "states at edges": 0, "window at intervals": 6 * BLOCK}


class World:
    """A manager and its requests. planned: everything takes a plan."""

    def __init__(self, layout: str, blocks: int, *, planned: bool) -> None:
        specs = SPECS[layout]
        natural = layout.startswith("natural")
        config = natural_model_config(blocks, specs, [2] * len(specs)) if natural else model_config(blocks, specs)
        self.manager = KVCacheManager(config, MAX_LEN, enable_kv_cache_events=True, retention=RETENTION.get(layout))
        self.manager._slots._only_grow &= not planned
        self.requests: list[Request] = []
        self.grown = self.plans = 0
        plan = self.manager._planner.plan

        def counted(*asked: Any) -> object:  # noqa: ANN401 - whatever a plan is asked for
            self.plans += 1
            return plan(*asked)

        self.manager._planner.plan = counted  # type: ignore[method-assign, assignment]

    def begin(self, name: str, prompt: list[int], *, silent: bool) -> None:
        one = Request(name, prompt, hasher=self.manager.hasher, skip_writing_prefix_cache=silent)
        hit, tokens = self.manager.get_computed_blocks(one)
        new = 1 if len(prompt) % 2 else len(prompt) - tokens
        if self.manager.allocate_slots(one, new, tokens, hit) is not None:
            one.num_computed_tokens = tokens + new
            self.requests.append(one)

    def go_on(self, place: int, new: int, ahead: int, drafts: int, *, delayed: bool) -> object:
        """``ahead``: tokens that are computed before they are known, as with steps in flight."""
        one, epoch = self.requests[place], self.manager.block_pool.epoch
        new = max(min(new, MAX_LEN - 4 - one.num_tokens), 1)
        for token in range(one.num_computed_tokens + new - ahead - one.num_tokens):
            one.append(token % 3)
        self.manager.rows.in_flight[one.row] = max(one.num_computed_tokens + 1 - one.num_tokens, 0)
        got = self.manager.allocate_slots(one, new, num_lookahead_tokens=drafts, delay_cache_blocks=delayed)
        self.grown += self.manager.block_pool.epoch > epoch
        if got is None:
            return None
        one.num_computed_tokens += new
        return got.blocks

    def facts(self) -> list[object]:
        self.manager.take_transfers()
        self.manager.check()
        held = [self.manager.get_block_ids(request.request_id) for request in self.requests]
        events = [self.manager.next_event(request.row) for request in self.requests]
        return [held, events, self.manager.block_pool.free_order(), repr(self.manager.take_events())]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", SPECS)
def test_growing_is_what_a_plan_does(layout: str, seed: int) -> None:
    """Chunks, tokens one by one, drafts, delays, requests that publish nothing, pools too small, ends of lengths."""
    random = Random(seed)
    blocks = random.choice((24, 60))
    one, other = World(layout, blocks, planned=False), World(layout, blocks, planned=True)
    for turn in range(150):
        act, running = random.random(), len(one.requests)
        if act < 0.15 and running < 6:
            prompt, silent = [random.randrange(3) for _ in range(random.randrange(1, 50))], random.random() < 0.2
            for world in (one, other):
                world.begin(f"r{turn}", prompt, silent=silent)
        elif act < 0.22 and running:
            place = random.randrange(running)
            for world in (one, other):
                world.manager.free(world.requests.pop(place))
        elif running:
            place, new, drafts = random.randrange(running), random.choice((1, 1, 1, 7)), random.choice((0, 0, 0, 3))
            ahead, delayed = random.choice((0, 0, 1)), random.random() < 0.1
            answers = [world.go_on(place, new, ahead, drafts, delayed=delayed) for world in (one, other)]
            assert answers[0] == answers[1], turn
        assert one.facts() == other.facts(), turn
    assert one.grown > 20
    saved = other.plans - one.plans
    assert saved == 0 if layout == "states at edges" else saved > 20


@pytest.mark.parametrize("layout", ["states", "states alone"])
@pytest.mark.parametrize("ahead", range(0, 11, 2))
def test_states_of_tokens_that_are_not_known_yet(layout: str, ahead: int) -> None:
    """With steps in flight a state is published under the tokens that it is of, however late they are known."""
    for prompt in range(4, 8):
        one, other = World(layout, 60, planned=False), World(layout, 60, planned=True)
        for world in (one, other):
            world.begin("r", [token % 3 for token in range(prompt)], silent=False)
        for turn in range(26):
            answers = [world.go_on(0, 1, ahead, 0, delayed=False) for world in (one, other)]
            assert answers[0] == answers[1], turn
            assert one.facts() == other.facts(), turn
        assert one.plans < other.plans


def test_what_only_grows_takes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding asks the planner for nothing; a hit, and what does not fit, still do."""
    manager = KVCacheManager(model_config(6, [full_spec(BLOCK)]), MAX_LEN)
    planned: list[Request] = []
    plan = manager._planner.plan

    def noted(request: Request, *rest: Any) -> object:  # noqa: ANN401 - whatever a plan is asked for
        planned.append(request)
        return plan(request, *rest)

    monkeypatch.setattr(manager._planner, "plan", noted)
    one = Request("a", [1, 2, 3], hasher=manager.hasher)
    manager.allocate_slots(one, 3)
    one.num_computed_tokens = 3
    assert planned == [one]
    for _ in range(17):
        one.append(5)
        assert manager.allocate_slots(one, 1) is not None
        one.num_computed_tokens += 1
    assert planned == [one]
    assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5],)
    assert manager.allocate_slots(one, 1) is None
    assert planned == [one, one]


@pytest.mark.parametrize(
    "wrong", [{"num_new_computed_tokens": 0.0}, {"num_encoder_tokens": False}, {"num_lookahead_tokens": -1}]
)
def test_what_is_no_count_is_refused_for_who_runs(wrong: dict[str, float]) -> None:
    manager = KVCacheManager(model_config(6, [full_spec(BLOCK)]), MAX_LEN)
    one = Request("a", [1, 2, 3, 4, 5, 6, 7, 8], hasher=manager.hasher)
    manager.allocate_slots(one, 3)
    one.num_computed_tokens = 3
    for new in (1, 2):
        with pytest.raises(ConfigError):
            manager.allocate_slots(one, new, **wrong)  # type: ignore[arg-type]
