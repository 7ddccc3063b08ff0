"""Six regimes of an engine against plain transformers: teacher-forced logits and tokens."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from runner_support import TOLERANCE, EngineFactory, EveryLogit, failing, greedy, reference_logits, relative_difference

from hybridkv.runner import Completion, Engine, LoadedModel
from hybridkv.runner.check import NEAR_TIE_FACTOR
from hybridkv.runner.probe import planner_model
from hybridkv.specs import Keeps


@dataclass(frozen=True, slots=True)
class Compared:
    """Of all regimes. largest: difference of a logit, as a share of the range."""

    regimes: tuple[str, ...]
    tokens: int
    near_ties: int
    largest: float


class Regimes:
    """Runs the prompts in every regime, ``output`` tokens each, and compares. failing: steps that must."""

    def __init__(
        self,
        make_engine: EngineFactory,
        loaded: LoadedModel,
        prompts: Sequence[list[int]],
        output: int,
        failing: tuple[int, int] = (20, 50),
        *,
        room: int | None = 2,
    ) -> None:
        """room: for how many requests there is memory where they are preempted; None: states outweigh what grows."""
        self.make, self.loaded, self.prompts, self.output, self.failing = make_engine, loaded, prompts, output, failing
        self.room = room

    def compare(self, expected: Mapping[tuple[int, ...], tuple[int, ...]] | None = None) -> Compared:
        """Every logit and token of every regime with plain transformers: an AssertionError for what differs.

        expected: by prompt, what ``generate`` of transformers says; None for what forwards over whole texts do.
        """
        runs: dict[str, Callable[[EveryLogit], list[Completion]]] = {
            "cold": self.cold,
            "warm": self.warm,
            "chunked": self.chunked,
            "preempted": lambda seen: self.preempted(seen, prefix_caching=True),
            "preempted, no cache": lambda seen: self.preempted(seen, prefix_caching=False),
            "forked": self.forked,
        }
        tokens = near_ties = 0
        largest = 0.0
        reference: dict[tuple[int, ...], torch.Tensor] = {}
        for regime, run in runs.items():
            observer = EveryLogit()
            for done in run(observer):
                text = (*done.prompt_token_ids, *done.token_ids)
                if text not in reference:
                    reference[text] = reference_logits(self.loaded, done)
                ours = observer.of(done)
                difference = float(relative_difference(ours, reference[text]).max())
                assert difference <= TOLERANCE, (regime, done.request_id, difference)
                largest = max(largest, difference)
                tokens += len(done.token_ids)
                if expected is None:
                    wanted = tuple(reference[text].argmax(dim=-1).tolist())
                else:
                    wanted = expected[tuple(done.prompt_token_ids)]
                near_ties += _near_ties(done, wanted, ours, reference[text], regime)
        return Compared(tuple(runs), tokens, near_ties, largest)

    def run(self, engine: Engine) -> list[Completion]:
        return engine.generate(self.prompts, greedy(self.output))

    def engine(self, observer: EveryLogit, **options: int | bool | None) -> Engine:
        return self.make(self.loaded, self.prompts, self.output, observer=observer, **options)  # type: ignore[arg-type]  # by name

    def cold(self, observer: EveryLogit) -> list[Completion]:
        engine = self.engine(observer, max_running=1)
        done = self.run(engine)
        assert done[0].hit_tokens == 0
        return done

    def warm(self, observer: EveryLogit) -> list[Completion]:
        engine = self.engine(observer)
        self.run(engine)
        done = self.run(engine)
        assert all(one.hit_tokens == len(one.prompt_token_ids) - 1 for one in done)
        return done

    def chunked(self, observer: EveryLogit) -> list[Completion]:
        done = self.run(self.engine(observer, token_budget=13, prefix_caching=False))
        assert max(step.num_tokens for step in observer.steps) <= 13
        assert any(len(step) > 1 and step.num_scheduled.max() > 1 for step in observer.steps), "no mixed step"
        return done

    def preempted(self, observer: EveryLogit, *, prefix_caching: bool) -> list[Completion]:
        """Requests that hardly grow are never preempted for memory: there steps fail instead, and all start anew."""
        engine = self.engine(observer, room_for=self.room or 2, token_budget=64, prefix_caching=prefix_caching)
        if self.grows and self.room is not None:
            done = self.run(engine)
            assert sum(one.preemptions for one in done) > 0
            assert engine.scheduler.statistics().preemptions > 0
            return done
        for prompt in self.prompts:
            engine.add(prompt, greedy(self.output))
        done = []
        for number in itertools.count():
            if engine.idle:
                assert number > self.failing[-1]
                return sorted(done, key=lambda one: int(one.request_id))
            if number in self.failing:  # in the last module: everything before it has written its pages
                with failing(self.loaded.model.get_output_embeddings()), pytest.raises(RuntimeError, match="is gone"):
                    engine.step()
            else:
                done += engine.step()
        raise AssertionError

    @property
    def grows(self) -> bool:
        """Whether some layer keeps every token."""
        model = planner_model(self.loaded.model, block_size=16)
        return any(layer.spec.keeps is Keeps.TOKENS for layer in model.layers)

    def forked(self, observer: EveryLogit) -> list[Completion]:
        """Each prompt's two outputs are greedy ones, and so equal; they part from the prompt's last token on."""
        engine = self.engine(observer, room_for=2 * len(self.prompts))
        done = engine.generate(self.prompts, replace(greedy(self.output), n=2))
        assert len(done) == 2 * len(self.prompts)
        assert any(copy.kind in {"block", "state"} for step in observer.steps for copy in step.copies), (
            "no copy on write"
        )
        return done


def _near_ties(
    done: Completion, wanted: tuple[int, ...], ours: torch.Tensor, reference: torch.Tensor, regime: str
) -> int:
    """Differing tokens, each of which must be a near-tie; behind the first, teacher forcing decides."""
    chosen = reference.argmax(dim=-1).tolist()
    first = next((i for i, pair in enumerate(zip(done.token_ids, wanted, strict=True)) if pair[0] != pair[1]), None)
    if first is None:
        return 0
    differing = [first, *(i for i in range(first + 1, len(chosen)) if chosen[i] != done.token_ids[i])]
    for i in differing:
        best = reference[i].topk(2).values
        measured = (ours[i] - reference[i]).abs().max()
        assert best[0] - best[1] < NEAR_TIE_FACTOR * measured, (regime, done.request_id, i)
    return len(differing)
