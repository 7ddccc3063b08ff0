"""An engine whose every output is compared with plain transformers. At its end it must use no block."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from runner_support import (
    TOLERANCE,
    EngineFactory,
    EveryLogit,
    drained,
    loaded_model,
    reference_logits,
    relative_difference,
)

from hybridkv.request import SamplingParams
from hybridkv.runner import TINY_MODELS, Completion
from hybridkv.runner.drafters import Drafter
from hybridkv.specs import Keeps
from hybridkv.step import Step

_REFERENCE: dict[tuple[str, int, tuple[int, ...]], torch.Tensor] = {}
"""By model, tokens of the prompt, and text: many runs make the same."""


def models(*in_ci: str) -> list[object]:
    """All tiny models as parameters; CI runs those named."""
    return [pytest.param(name, marks=() if name in in_ci else pytest.mark.thorough, id=name) for name in TINY_MODELS]


def models_with(every: Sequence[object], in_ci: Mapping[str, Sequence[object]]) -> list[object]:
    """All tiny models, each with every one of ``every``; CI runs the pairs of ``in_ci``.

    Tuples are several parameters.
    """
    assert all(one in every for some in in_ci.values() for one in some)
    return [
        pytest.param(
            name,
            *(one if isinstance(one, tuple) else (one,)),
            marks=() if one in in_ci.get(name, ()) else pytest.mark.thorough,
        )
        for name in TINY_MODELS
        for one in every
    ]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got a row in ``step``, with ``hit`` tokens computed already."""

    step: int
    request_id: str
    hit: int


class CheckedEngine:
    """``make``: with the options of EngineFactory. largest: difference of any logit so far, a share of the range."""

    def __init__(
        self,
        make: EngineFactory,
        name: str,
        prompts: Sequence[Sequence[int]],
        output: int,
        **options: int | bool | str | Drafter | None,
    ) -> None:
        self.loaded, self.seen = loaded_model(name), EveryLogit()
        self.engine = make(self.loaded, prompts, output, observer=self.seen, **options)  # type: ignore[arg-type]  # by name
        self.largest = 0.0
        self.keeps_states = bool(self.engine.runner.continues)
        self.attends = any(group.spec.keeps is not Keeps.STATE for group in self.engine.plan.config.groups)

    @property
    def steps(self) -> list[Step]:
        """Since the last ``forget``."""
        return self.seen.steps

    def forget(self) -> None:
        self.seen.steps.clear()

    def run(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        done = self.engine.generate(prompts, sampling)
        self.check(done)
        return done

    def drain(self) -> dict[str, Completion]:
        """Run whatever was added to its end, by request."""
        done = drained(self.engine)
        self.check(done)
        return {one.request_id: one for one in done}

    def check(self, done: Sequence[Completion]) -> None:
        """Every logit of ``done`` is right, and nothing is held, by anybody, for nothing."""
        for one in done:
            if one.token_ids:
                key = (self.loaded.name, len(one.prompt_token_ids), (*one.prompt_token_ids, *one.token_ids))
                if key not in _REFERENCE:
                    _REFERENCE[key] = reference_logits(self.loaded, one)
                moved = relative_difference(self.seen.of(one), _REFERENCE[key])
                self.largest = max(self.largest, float(moved.max()))
                assert moved.max() <= TOLERANCE, (one.request_id, moved)
        self.engine.scheduler.check()
        self.engine.cache.check()
        assert self.engine.cache.usage == 0

    # -- what the steps said

    def copies(self) -> Counter[str]:
        """How many of each kind."""
        return Counter(copy.kind for step in self.steps for copy in step.copies)

    def inner_stops(self) -> set[int]:
        """Token counts behind which a state was kept in the middle of a chunk."""
        found: set[int] = set()
        for step in self.steps:
            ends = (step.num_computed + step.num_scheduled)[step.state_writes[:, 0]]
            found |= set(step.state_writes[step.state_writes[:, 2] < ends, 2].tolist())
        return found

    def admitted(self) -> list[Admitted]:
        """Every row that began, in order; one of a request seen before is a resumption."""
        return [
            Admitted(step.id, new.request_id, int(step.num_computed[step.rows.tolist().index(new.row)]))
            for step in self.steps
            for new in step.new_rows
        ]
