"""Layouts, placements, salts and resume marks with real tensors: right outputs, and hits of the expected length."""

import numpy as np
import pytest
from checked_engine import CheckedEngine, models, models_with
from runner_support import EngineFactory, greedy

from hybridkv.cache.placement import AlignPlacement, placement_of

OUTPUT = 12
STATES_AND_ATTENTION = ("qwen3_next", "falcon_h1")

# layout, placement, tokens of a block
SETTINGS = [
    ("natural", "ends", 64),
    ("natural", "none", 16),
    ("natural", "align:24", 32),
    ("natural", "interval:24", 16),
    ("reference", None, 32),
]
MORE_SETTINGS = [
    ("natural", "ends", 16),
    ("natural", "ends", 32),
    ("natural", "align", 16),
    ("natural", "interval:40", 64),
    ("reference", None, 16),
    ("reference", None, 64),
]
LAYOUTS = ["natural", "reference"]


def random_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    """With nothing in common."""
    rng = np.random.default_rng(seed)
    return [rng.integers(32, 127, length).tolist() for length in lengths]


def expected_hit(checked: CheckedEngine, placement: str | None, block: int, prompt: int) -> int:
    """Of a prompt of so many tokens that ran before, with room for all that is to be kept."""
    if placement is None:  # the reference layout: edges of blocks, the same for all groups
        sizes = [group.spec.block_size for group in checked.engine.plan.config.groups]
        assert block <= sizes[0] == max(sizes) == min(sizes)
        return (prompt - 1) // sizes[0] * sizes[0]
    if not checked.keeps_states or placement == "ends":
        return prompt - 1
    if placement == "none":
        return 0
    kept = placement_of(checked.engine.plan)
    step = kept.tokens if isinstance(kept, AlignPlacement) else int(placement.removeprefix("interval:"))
    return (prompt - 1) // step * step


@pytest.mark.parametrize(
    ("name", "layout", "placement", "block"),
    models_with(
        [*SETTINGS, *MORE_SETTINGS],
        {"gemma3": [SETTINGS[0], SETTINGS[-1]], "qwen3_next": SETTINGS, "falcon_h1": [("natural", "interval:24", 16)]},
    ),
)
def test_hits_match_the_placement_for_every_layout_and_block_size(
    name: str, layout: str, placement: str | None, block: int, make_engine: EngineFactory
) -> None:
    prompts = random_prompts([50, 97, 130], 1)
    checked = CheckedEngine(
        make_engine, name, prompts, OUTPUT, layout=layout, placement=placement, block_size=block, room_for=16
    )
    cold = checked.run(prompts, greedy(OUTPUT))
    warm = checked.run(prompts, greedy(OUTPUT))
    assert [one.hit_tokens for one in cold] == [0, 0, 0]
    assert [one.hit_tokens for one in warm] == [expected_hit(checked, placement, block, len(one)) for one in prompts]
    assert [one.token_ids for one in warm] == [one.token_ids for one in cold]


@pytest.mark.parametrize(
    ("name", "layout"),
    models_with(LAYOUTS, {"llama4": ["natural"], "qwen3_next": ["reference"], "falcon_h1": ["natural"]}),
)
def test_cache_salt_separates_hits_and_keeps_outputs(name: str, layout: str, make_engine: EngineFactory) -> None:
    prompt = random_prompts([70], 2)[0]
    checked = CheckedEngine(make_engine, name, [prompt], OUTPUT, layout=layout, room_for=8)

    def run(salt: str | None) -> tuple[int, tuple[int, ...]]:
        request = checked.engine.add(prompt, greedy(OUTPUT), cache_salt=salt)
        done = checked.drain()[request]
        return done.hit_tokens, done.token_ids

    first, *others = [run(salt) for salt in (None, "one", "two", None, "two")]
    hit = expected_hit(checked, "ends" if layout == "natural" else None, 16, len(prompt))
    assert [first[0], *(one[0] for one in others)] == [0, 0, 0, hit, hit]
    assert all(one[1] == first[1] for one in others)


@pytest.mark.parametrize("name", models("gemma3", "deepseek_v3", "mamba", *STATES_AND_ATTENTION))
def test_resume_marks_are_hit_to_the_token(name: str, make_engine: EngineFactory) -> None:
    marks = (37, 53)
    first, other, *_ = prompts = random_prompts([80, 90], 3)
    checked = CheckedEngine(make_engine, name, prompts, OUTPUT, room_for=8)
    checked.engine.add(first, greedy(OUTPUT), marks=marks)
    checked.drain()
    assert checked.inner_stops() == ({*marks, len(first) - 1} if checked.keeps_states else set())
    # what follows a shared prefix of so many tokens is new; what is hit is copied, for both will be written behind it
    for shared, hit in ((37, 37), (40, 37), (53, 53), (60, 53)):
        checked.forget()
        request = checked.engine.add([*first[:shared], *other[shared:]], greedy(OUTPUT), request_id=f"shares {shared}")
        assert checked.drain()[request].hit_tokens == hit
        assert set(checked.copies()) - {"move"} == set(["block"] * checked.attends + ["state"] * checked.keeps_states)
    checked.forget()
    again = checked.engine.add(first, greedy(OUTPUT))  # nobody wrote to what was copied
    assert checked.drain()[again].hit_tokens == len(first) - 1
