"""Manager, scheduler and a worker against the naive oracle: everything is compared after every action."""

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hybridkv.testing import Rig, RigOptions, random_options, random_run
from hybridkv.testing.strategies import SALTS, prompts, rig_options, stop_token_ids

pytestmark = pytest.mark.usefixtures("quiet")


class CacheMachine(RuleBasedStateMachine):
    """Any order of add, schedule, update, fail, abort, finish and reset, with up to three steps in flight."""

    rig: Rig

    @initialize(options=rig_options())
    def build(self, options: RigOptions) -> None:
        self.rig = Rig(options)

    @rule(data=st.data(), max_tokens=st.integers(1, 20), salt=SALTS)
    def add(self, data: st.DataObject, max_tokens: int, salt: str | None) -> None:
        vocabulary = self.rig.options.vocabulary
        self.rig.add(
            data.draw(prompts(vocabulary)),
            max_tokens,
            stop_token_ids=data.draw(stop_token_ids(vocabulary)),
            eos_token_ids=data.draw(stop_token_ids(vocabulary)),
            salt=salt,
        )

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

    @rule(data=st.data(), salt=SALTS)
    def probe(self, data: st.DataObject, salt: str | None) -> None:
        self.rig.probe(data.draw(prompts(self.rig.options.vocabulary)), salt)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.drain()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=6 * settings().max_examples, stateful_step_count=50)


def test_random_runs_meet_what_is_rare() -> None:
    """Such runs are no empty ones: each bound is about half of what these seeds give."""
    met: Counter[str] = Counter()
    for seed in range(200):
        random = Random(seed)
        rig = Rig(random_options(random))
        random_run(rig, random)
        met.update(rig.oracle.counts)
        met["evicted"] += rig.cache.block_pool.evictions
        met["tokens checked"] += rig.worker.tokens_checked
    bounds = {"preempted": 80, "late": 80, "dead": 70, "failed": 130, "hit": 350, "evicted": 1500, "finished": 500}
    assert {name: met[name] for name in bounds if met[name] < bounds[name]} == {}
    assert met["tokens checked"] > 30_000
