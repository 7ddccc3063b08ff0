"""Every architecture against plain transformers, in six regimes: teacher-forced logits and tokens."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from models_table import ModelResult, layers_of, note_model
from runner_support import (
    ALL_MODELS,
    TOLERANCE,
    EngineFactory,
    EveryLogit,
    failing,
    generated,
    greedy,
    loaded_model,
    reference_logits,
    relative_difference,
    shared_prompts,
)

from hybridkv.runner import Completion, Engine, LoadedModel
from hybridkv.runner.check import NEAR_TIE_FACTOR
from hybridkv.runner.probe import planner_model
from hybridkv.specs import Keeps

OUTPUT = 70
PROMPTS = 6
SEEDS = (0, pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough))
NEAR_TIE_SHARE = 1 / 2000
"""How many near-ties a token are expected at most in float32."""


FAILING = (20, 50)
"""Steps."""


class Regimes:
    """Runs the prompts in every regime and returns what was observed."""

    def __init__(self, make_engine: EngineFactory, loaded: LoadedModel, prompts: Sequence[list[int]]) -> None:
        self.make, self.loaded, self.prompts = make_engine, loaded, prompts

    def run(self, engine: Engine) -> list[Completion]:
        return engine.generate(self.prompts, greedy(OUTPUT))

    def engine(self, observer: EveryLogit, **options: int | bool | None) -> Engine:
        return self.make(self.loaded, self.prompts, OUTPUT, observer=observer, **options)  # type: ignore[arg-type]  # by name

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
        """Requests that never grow are never preempted for memory: there steps fail instead, and all start anew."""
        engine = self.engine(observer, room_for=2, token_budget=64, prefix_caching=prefix_caching)
        if self.grows:
            done = self.run(engine)
            assert sum(one.preemptions for one in done) > 0
            assert engine.scheduler.statistics().preemptions > 0
            return done
        for prompt in self.prompts:
            engine.add(prompt, greedy(OUTPUT))
        done = []
        for number in itertools.count():
            if engine.idle:
                assert number > FAILING[-1]
                return sorted(done, key=lambda one: int(one.request_id))
            if number in FAILING:  # in the last module: everything before it has written its pages
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
        engine = self.engine(observer, room_for=2 * PROMPTS)
        done = engine.generate(self.prompts, replace(greedy(OUTPUT), n=2))
        assert len(done) == 2 * PROMPTS
        assert any(copy.kind in {"block", "state"} for step in observer.steps for copy in step.copies), (
            "no copy on write"
        )
        return done


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL_MODELS)
def test_six_regimes_equal_plain_transformers(name: str, seed: int, make_engine: EngineFactory) -> None:
    loaded = loaded_model(name, seed)
    prompts = shared_prompts(PROMPTS, seed)
    regimes = Regimes(make_engine, loaded, prompts)
    expected = {tuple(prompt): generated(loaded, prompt, OUTPUT) for prompt in prompts}
    runs: dict[str, Callable[[EveryLogit], list[Completion]]] = {
        "cold": regimes.cold,
        "warm": regimes.warm,
        "chunked": regimes.chunked,
        "preempted": lambda seen: regimes.preempted(seen, prefix_caching=True),
        "preempted, no cache": lambda seen: regimes.preempted(seen, prefix_caching=False),
        "forked": regimes.forked,
    }
    tokens = near_ties = 0
    largest = 0.0
    reference: dict[tuple[int, ...], torch.Tensor] = {}
    for regime, run in runs.items():
        observer = EveryLogit()
        for done in run(observer):
            text = (*done.prompt_token_ids, *done.token_ids)
            if text not in reference:
                reference[text] = reference_logits(loaded, done)
            ours = observer.of(done)
            difference = float(relative_difference(ours, reference[text]).max())
            assert difference <= TOLERANCE, (regime, done.request_id)
            largest = max(largest, difference)
            tokens += len(done.token_ids)
            wanted = expected[tuple(done.prompt_token_ids)]
            near_ties += _near_ties(done, wanted, ours, reference[text], regime)
    assert tokens == (len(runs) + 1) * PROMPTS * OUTPUT > 2000
    assert near_ties <= tokens * NEAR_TIE_SHARE
    continues = sorted({str(how) for how in make_engine(loaded, prompts[:1], OUTPUT).runner.continues.values()})
    note_model(ModelResult(name, seed, layers_of(loaded), tuple(runs), tokens, near_ties, largest, tuple(continues)))


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


@pytest.mark.parametrize("cut", [64, 70])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_a_hit_is_bitwise_a_cold_run_with_the_same_chunks(name: str, cut: int, make_engine: EngineFactory) -> None:
    """Where a block ends, and inside one, which is copied before it is written."""
    loaded = loaded_model(name)
    prompt = shared_prompts(1, 5, prefix=cut, longest=20)[0]

    def logits(*, warm: bool) -> EveryLogit:
        observer = EveryLogit()
        engine = make_engine(loaded, [prompt], 8, observer=observer, token_budget=cut)
        if warm:
            other = [*prompt[:cut], (prompt[cut] + 1) % 127]
            engine.generate([other], greedy(1))  # leaves a state behind so many tokens
            observer.logits.clear()
        done = engine.generate([prompt], greedy(8))[0]
        assert done.hit_tokens == (cut if warm else 0)
        observer.logits = {("x", position): one for (_, position), one in observer.logits.items()}
        return observer

    # chunks of ``cut`` and the rest in both: the hit run computed its first one in an earlier request
    cold, hit = logits(warm=False), logits(warm=True)
    assert cold.logits.keys() == hit.logits.keys()
    assert len(cold.logits) == 8
    assert all((cold.logits[key] == hit.logits[key]).all() for key in cold.logits)
