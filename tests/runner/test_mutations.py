"""Controls: what the equality tests must notice. A cache that is damaged must move the logits."""

from collections.abc import Callable

import pytest
import torch
from runner_support import (
    MODELS,
    TOLERANCE,
    EngineFactory,
    EveryLogit,
    greedy,
    loaded_model,
    reference_logits,
    relative_difference,
    shared_prompts,
)

from hybridkv.runner import Engine

PROMPT = 70
BEFORE = 4


def zero_block(engine: Engine, column: int) -> None:
    block = int(engine.runner.tables[0].get_numpy_array()[0, column])
    for views in engine.runner.storage.views.values():
        for view in views:
            assert view[block].any()
            view[block] = 0


def alias_block(engine: Engine, column: int) -> None:
    table = engine.runner.tables[0]
    other = int(table.get_numpy_array()[0, (column + 1) % 4])
    table.write_cells([0], [column], [other])


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("damage", [zero_block, alias_block])
@pytest.mark.parametrize("name", MODELS)
def test_damage_moves_the_logits(
    name: str, damage: Callable[[Engine, int], None], column: int, make_engine: EngineFactory
) -> None:
    loaded = loaded_model(name)
    prompt = shared_prompts(1, 3, prefix=PROMPT, longest=1)[0][:PROMPT]
    observer = EveryLogit()
    engine = make_engine(loaded, [prompt], 16, observer=observer)
    engine.add(prompt, greedy(16))
    done = []
    while not engine.idle:
        if len(observer.logits) == BEFORE:
            damage(engine, column)
        done += engine.step()
    moved = relative_difference(observer.of(done[0]), reference_logits(loaded, done[0]))
    assert moved[:BEFORE].max() <= TOLERANCE
    assert moved[BEFORE:].max() > 10 * TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_nothing_behind_a_context_is_read(name: str, make_engine: EngineFactory) -> None:
    """What a block's former owner left, were it NaN, never reaches anybody; nor does an unwritten page."""
    loaded = loaded_model(name)
    prompts = shared_prompts(5, 4)
    observer = EveryLogit()
    engine = make_engine(loaded, prompts, 20, observer=observer, token_budget=50)
    for views in engine.runner.storage.views.values():
        for view in views:
            view.fill_(torch.nan)
    for done in engine.generate(prompts, greedy(20)):
        assert relative_difference(observer.of(done), reference_logits(loaded, done)).max() <= TOLERANCE
