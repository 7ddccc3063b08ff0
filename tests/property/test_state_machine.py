"""Manager, scheduler and a worker against the naive oracle: everything is compared after every action."""

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hybridkv.testing import Rig, RigOptions, random_options, random_run
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec
from hybridkv.testing.strategies import SALTS, prompts, rig_options, stop_token_ids

pytestmark = pytest.mark.usefixtures("quiet")


class CacheMachine(RuleBasedStateMachine):
    """Any model; any order of add, schedule, update, fail, abort, finish and reset, up to three steps in flight."""

    rig: Rig

    @initialize(options=rig_options())
    def build(self, options: RigOptions) -> None:
        self.rig = Rig(options)

    @rule(
        data=st.data(),
        max_tokens=st.integers(1, 20),
        salt=SALTS,
        priority=st.integers(0, 2),
        late=st.sampled_from((0.0, 0.5)),
    )
    def add(self, data: st.DataObject, max_tokens: int, salt: str | None, priority: int, late: float) -> None:
        vocabulary = self.rig.options.vocabulary
        self.rig.add(
            data.draw(prompts(vocabulary)),
            max_tokens,
            stop_token_ids=data.draw(stop_token_ids(vocabulary)),
            eos_token_ids=data.draw(stop_token_ids(vocabulary)),
            salt=salt,
            priority=priority,
            arrival_time=self.rig.now + late,
            reads=data.draw(st.sampled_from((True, True, True, False))),
            writes=data.draw(st.sampled_from((True, True, True, False))),
        )

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data(), max_tokens=st.integers(1, 20))
    def add_fork(self, data: st.DataObject, max_tokens: int) -> None:
        """A request that goes on where another one is, or was."""
        name = data.draw(st.sampled_from(sorted(self.rig.requests)))
        tokens = self.rig.requests[name][1].tokens
        own = data.draw(st.lists(st.integers(0, self.rig.options.vocabulary - 1), max_size=2))
        self.rig.add(tokens[: data.draw(st.integers(1, len(tokens)))] + own, max_tokens)

    @precondition(lambda self: self.rig.num_in_flight < self.rig.options.limits.max_in_flight)
    @rule()
    def schedule(self) -> None:
        self.rig.schedule()

    @precondition(lambda self: self.rig.num_in_flight < self.rig.options.limits.max_in_flight)
    @rule()
    def schedule_once_more(self) -> None:  # twice as likely
        self.rig.schedule()

    @precondition(lambda self: self.rig.num_in_flight)
    @rule()
    def update(self) -> None:
        self.rig.update()

    @precondition(lambda self: self.rig.num_in_flight)
    @rule()
    def update_and_schedule(self) -> None:
        self.rig.update()
        self.rig.schedule()

    @precondition(lambda self: self.rig.num_in_flight)
    @rule(data=st.data(), seed=st.integers(0, 9))
    def fail(self, data: st.DataObject, seed: int) -> None:
        self.rig.fail(data.draw(st.integers(0, self.rig.num_in_flight - 1)), Random(seed))

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.requests))))

    @precondition(lambda self: self.rig.live_ids)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.rig.finish(data.draw(st.sampled_from(self.rig.live_ids)))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.rig.reset_prefix_cache()

    @rule(seconds=st.sampled_from((0.4, 3.0)))
    def wait(self, seconds: float) -> None:
        self.rig.wait(seconds)

    @rule(data=st.data(), salt=SALTS)
    def probe(self, data: st.DataObject, salt: str | None) -> None:
        self.rig.probe(data.draw(prompts(self.rig.options.vocabulary)), salt)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.drain()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=8 * settings().max_examples, stateful_step_count=40)


class HybridMachine(CacheMachine):
    """Full attention, windows, chunks and states only: hits are frequent."""

    @initialize(options=rig_options(("full", "window", "state", "chunk")))
    def build(self, options: RigOptions) -> None:
        self.rig = Rig(options)


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(max_examples=8 * settings().max_examples, stateful_step_count=40)


# -- seeded runs

MODELS = {
    "any": None,
    "full and states": (full_spec(4), state_spec(4)),
    "full, window and states": (full_spec(2), window_spec(4, 9), state_spec(8)),
    "windows": (window_spec(4, 8), window_spec(4, 13), full_spec(4)),
    "chunks and drafts": (chunk_spec(2, 8), full_spec(4), state_spec(4, drafts=2)),
}


@pytest.mark.parametrize("model", MODELS)
def test_random_runs(model: str) -> None:
    for seed in range(2 * settings().max_examples):
        random = Random(f"{model} {seed}")
        random_run(Rig(random_options(random, MODELS[model])), random)


def test_random_runs_meet_what_is_rare() -> None:
    """Such runs are no empty ones: each bound is about half of what these seeds give."""
    met: Counter[str] = Counter()
    for seed in range(300):
        random = Random(seed)
        rig = Rig(random_options(random))
        random_run(rig, random)
        met.update(rig.oracle.counts)
        met["evicted"] += rig.cache.block_pool.evictions
        met["tokens checked"] += rig.worker.tokens_checked
        met["states checked"] += rig.worker.states_checked
    bounds = {
        "preempted": 70,
        "late": 40,
        "dead": 140,
        "failed": 140,
        "finished": 1100,
        "evicted": 3600,
        "hit full": 130,
        "hit window": 120,
        "hit state": 140,
        "hit chunk": 20,
        "hit sink": 6,
        "dropped window": 900,
        "dropped chunk": 400,
        "dropped state": 1700,
        "relocated": 60,
        "split": 1400,
        "unreadable": 20,
        "overtaken": 120,
        "bound": 600,
        "tokens checked": 70_000,
        "states checked": 5_000,
    }
    assert {name: met[name] for name in bounds if met[name] < bounds[name]} == {}
