"""Every architecture in six regimes equals plain transformers in teacher-forced logits and in tokens."""

import pytest
from checked_engine import models_with
from models_table import ModelResult, layers_of, note_model
from regimes import Regimes
from runner_support import (
    ALL_MODELS,
    REPRESENTATIVE,
    EngineFactory,
    EveryLogit,
    generated,
    greedy,
    loaded_model,
    shared_prompts,
)

from hybridkv.runner import TINY_COMPRESSED

OUTPUT = 70
PROMPTS = 6
SEEDS = (0, 1, 2)
NEAR_TIE_SHARE = 1 / 2000
"""How many near-ties a token are expected at most in float32."""
HITS = {
    **{name: [64, 70] for name in ("gemma3", "mamba", "qwen3_next")},
    **{name: [70] for name in ("llama", "gpt_oss", "llama4", "deepseek_v3", "falcon_h1", "zamba2")},
}
"""Tokens behind which prompts part, in CI: where a block ends for pages, windows and states, inside one for all."""


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_six_short_regimes_equal_plain_transformers(name: str, make_engine: EngineFactory) -> None:
    # so that requests are preempted; beside falcon_h1's states and deepseek_v4's windows, what grows always fits
    room = None if name in {"deepseek_v4", "falcon_h1"} else 1 if name in {"llama4", "qwen3_next", "zamba2"} else 2
    prompts = shared_prompts(4, 1, prefix=8, longest=16)
    found = Regimes(make_engine, loaded_model(name, 1), prompts, 20, failing=(6, 14), room=room).compare()
    assert found.tokens == (len(found.regimes) + 1) * 4 * 20
    assert found.near_ties <= 1


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL_MODELS)
def test_six_regimes_equal_plain_transformers(name: str, seed: int, make_engine: EngineFactory) -> None:
    loaded = loaded_model(name, seed)
    prompts = shared_prompts(PROMPTS, seed)
    regimes = Regimes(make_engine, loaded, prompts, OUTPUT, room=None if name in TINY_COMPRESSED else 2)
    found = regimes.compare({tuple(prompt): generated(loaded, prompt, OUTPUT) for prompt in prompts})
    assert found.tokens == (len(found.regimes) + 1) * PROMPTS * OUTPUT > 2000
    assert found.near_ties <= found.tokens * NEAR_TIE_SHARE
    continues = sorted({str(how) for how in make_engine(loaded, prompts[:1], OUTPUT).runner.continues.values()})
    note_model(
        ModelResult(
            name, seed, layers_of(loaded), found.regimes, found.tokens, found.near_ties, found.largest, tuple(continues)
        )
    )


@pytest.mark.parametrize(("name", "cut"), models_with([64, 70], HITS))
def test_hit_equals_cold_run_with_same_chunks_bitwise(name: str, cut: int, make_engine: EngineFactory) -> None:
    """Hits end at a block boundary and inside a block, which is copied before it is written."""
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
