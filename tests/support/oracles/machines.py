"""Hypothesis state machines that drive a Rig: any order of actions, everything compared after each of them.

A test gives one its settings: ``TestCase = CacheMachine.TestCase; TestCase.settings = settings(...)``. Needs the
package hypothesis.
"""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hybridkv.extra_keys import EncoderInput
from oracles.rig import Rig, RigOptions
from oracles.strategies import INPUTS, SALTS, natural_rig_options, prompts, rig_options, stop_token_ids, verdicts


class CacheMachine(RuleBasedStateMachine):
    """Any model; any order of add, propose, schedule, update, fail, abort, finish and reset; three steps in flight."""

    rig: Rig

    @initialize(options=rig_options())
    def build(self, options: RigOptions) -> None:
        """The rig that all actions drive."""
        self.rig = Rig(options)

    @rule(
        data=st.data(),
        max_tokens=st.integers(1, 20),
        salt=SALTS,
        priority=st.integers(0, 2),
        late=st.sampled_from((0.0, 0.5)),
    )
    def add(self, data: st.DataObject, max_tokens: int, salt: str | None, priority: int, late: float) -> None:
        """A request that may begin like another one."""
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
            encoder=data.draw(INPUTS),
        )

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data(), max_tokens=st.integers(1, 20))
    def add_fork(self, data: st.DataObject, max_tokens: int) -> None:
        """A request that goes on where another one is, or was."""
        name = data.draw(st.sampled_from(sorted(self.rig.requests)))
        tokens = self.rig.requests[name][1].tokens
        own = data.draw(st.lists(st.integers(0, self.rig.options.vocabulary - 1), max_size=2))
        self.rig.add(tokens[: data.draw(st.integers(1, len(tokens)))] + own, max_tokens, encoder=data.draw(INPUTS))

    @precondition(lambda self: self.rig.num_in_flight < self.rig.options.limits.max_in_flight)
    @rule()
    def schedule(self) -> None:
        """The next step."""
        self.rig.schedule()

    @precondition(lambda self: self.rig.num_in_flight < self.rig.options.limits.max_in_flight)
    @rule()
    def schedule_once_more(self) -> None:
        """Twice as likely."""
        self.rig.schedule()

    @precondition(lambda self: self.rig.options.limits.num_speculative_tokens and self.rig.live_ids)
    @rule(patterns=verdicts())
    def propose(self, patterns: list[tuple[int, int]]) -> None:
        """Drafts for the next step, whatever comes before it."""
        for name, (right, wrong) in zip(self.rig.live_ids, patterns, strict=False):
            self.rig.propose(name, right, wrong)

    @precondition(lambda self: self.rig.num_in_flight < self.rig.options.limits.max_in_flight)
    @rule(patterns=verdicts())
    def schedule_drafts(self, patterns: list[tuple[int, int]]) -> None:
        """The next step, with drafts."""
        if self.rig.options.limits.num_speculative_tokens:
            self.propose(patterns)
        self.rig.schedule()

    @precondition(lambda self: self.rig.num_in_flight)
    @rule()
    def update(self) -> None:
        """The oldest result."""
        self.rig.update()

    @precondition(lambda self: self.rig.num_in_flight)
    @rule()
    def update_and_schedule(self) -> None:
        """A result, and the next step."""
        self.rig.update()
        self.rig.schedule()

    @precondition(lambda self: self.rig.num_in_flight)
    @rule(data=st.data(), seed=st.integers(0, 9))
    def fail(self, data: st.DataObject, seed: int) -> None:
        """A step that is in flight fails."""
        self.rig.fail(data.draw(st.integers(0, self.rig.num_in_flight - 1)), Random(seed))

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A request is aborted, known or not."""
        self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.requests))))

    @precondition(lambda self: self.rig.live_ids)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """The caller saw a stop string."""
        self.rig.finish(data.draw(st.sampled_from(self.rig.live_ids)))

    @rule()
    def reset_prefix_cache(self) -> None:
        """All keys are forgotten, if nothing is held."""
        self.rig.reset_prefix_cache()

    @rule(seconds=st.sampled_from((0.4, 3.0)))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.rig.wait(seconds)

    @rule(data=st.data(), salt=SALTS, encoder=INPUTS)
    def probe(self, data: st.DataObject, salt: str | None, encoder: EncoderInput | None) -> None:
        """A look-up that nothing follows."""
        self.rig.probe(data.draw(prompts(self.rig.options.vocabulary)), salt, encoder=encoder)

    def teardown(self) -> None:
        """Everything is drained."""
        if hasattr(self, "rig"):
            self.rig.drain()


class NaturalMachine(CacheMachine):
    """The natural layout: marks, several outputs of one prompt, turns of a conversation and branches besides."""

    @initialize(options=natural_rig_options())
    def build(self, options: RigOptions) -> None:
        """The rig that all actions drive."""
        self.rig = Rig(options)

    @rule(
        data=st.data(),
        max_tokens=st.integers(1, 12),
        marks=st.lists(st.integers(1, 30), max_size=2, unique=True),
        n=st.sampled_from((1, 1, 2, 3)),
    )
    def add_marked(self, data: st.DataObject, max_tokens: int, marks: list[int], n: int) -> None:
        """A request that the caller wants to be resumable, or wants several outputs of."""
        prompt = data.draw(prompts(self.rig.options.vocabulary))
        self.rig.add(prompt, max_tokens, marks=marks, n=n, encoder=data.draw(INPUTS))

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data(), max_tokens=st.integers(1, 12))
    def next_turn(self, data: st.DataObject, max_tokens: int) -> None:
        """A request that goes on behind all tokens of another."""
        name = data.draw(st.sampled_from(sorted(self.rig.requests)))
        own = data.draw(st.lists(st.integers(0, self.rig.options.vocabulary - 1), min_size=1, max_size=3))
        self.rig.add(self.rig.requests[name][1].tokens + own, max_tokens)

    @precondition(lambda self: self.rig.live_ids)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data: st.DataObject, n: int) -> None:
        """Branches of a request that waits or runs."""
        self.rig.fork(data.draw(st.sampled_from(self.rig.live_ids)), n)
