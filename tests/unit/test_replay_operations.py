"""Operations of attention and of recurrent states: counted pair by pair, and what they do to the time of a step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_replay_cost import step

from hybridkv.models import read_model
from hybridkv.planner import plan
from hybridkv.simulator import H100, StepCost
from hybridkv.simulator.cost import Operations

ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=5)


def pairs(rows: list[tuple[int, int]], window: int | None = None, chunk: int | None = None) -> int:
    """One by one: token ``t`` sees those up to itself, of its window or chunk."""
    seen = 0
    for computed, scheduled in rows:
        for t in range(computed, computed + scheduled):
            seen += sum(
                1
                for s in range(t + 1)
                if (window is None or t - s < window) and (chunk is None or s // chunk == t // chunk)
            )
    return seen


def columns(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    computed, scheduled = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return computed, scheduled


@given(ROWS, st.integers(1, 50), st.integers(1, 50))
def test_pairs_are_those_of_the_mask(rows: list[tuple[int, int]], window: int, chunk: int) -> None:
    made = Operations(3, ((window, 5.0),), ((chunk, 7.0),), 11)
    expected = 3 * pairs(rows) + 5 * pairs(rows, window=window) + 7 * pairs(rows, chunk=chunk)
    expected += 11 * sum(scheduled for _, scheduled in rows)
    assert made.of_rows(*columns(rows)) == expected


@given(ROWS, st.integers(1, 50), st.integers(1, 50), st.integers(1, 60))
def test_decoding_steps_at_once_are_those_one_by_one(
    rows: list[tuple[int, int]], window: int, chunk: int, steps: int
) -> None:
    made = Operations(0.3, ((window, 0.7),), ((chunk, 1.1),), 1.3)
    computed = np.array([row[0] for row in rows], np.int64)
    ones = np.ones_like(computed)
    assert made.of_decodes(computed, steps).tolist() == [made.of_rows(computed + i, ones) for i in range(steps)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # layers x query heads x 2 x (width of a key + of a value)
        ("llama-3-8b", Operations(32 * 32 * 2 * 256)),
        # of 62 layers 52 have a window
        ("gemma-3-27b", Operations(10 * 32 * 2 * 256, ((1024, 52 * 32 * 2 * 256),))),
        # latents, absorbed
        ("deepseek-v3", Operations(61 * 128 * 4 * 576)),
        # 4 of 32 layers attend; 28 have a state of 16 x 8192 and the inputs of a convolution, 3 x 8192
        ("jamba-1.5-mini", Operations(4 * 32 * 2 * 256, token=6 * 28 * 19 * 8192)),
    ],
)
def test_operations_of_models(name: str, expected: Operations) -> None:
    assert Operations.of(plan(read_model(name), "60GiB", max_model_len=8192)) == expected


def test_ranks_share_attention() -> None:
    one, four = (Operations.of(plan(read_model("llama-3-70b", tp=tp), "40GiB")) for tp in (1, 4))
    assert one.pair == 4 * four.pair == 80 * 64 * 2 * 256


def test_a_long_prompt_takes_the_time_of_its_attention() -> None:
    cost = StepCost.of(plan(read_model("llama-3-70b", tp=4), "40GiB"))
    alone = replace(cost, operations=Operations())
    tokens = 100_000
    prompt = step((0, tokens))
    pairs_s = 80 * 64 / 4 * 2 * 256 * tokens * (tokens + 1) / 2 / (989e12 * 0.5)
    assert cost.seconds(prompt) - alone.seconds(prompt) == pytest.approx(pairs_s)
    assert cost.seconds(prompt) > 1.8 * alone.seconds(prompt)
    faster = replace(cost, hardware=replace(H100, attention_efficiency=1.0))
    assert faster.seconds(prompt) - alone.seconds(prompt) == pytest.approx(pairs_s / 2)


def test_a_model_of_unknown_heads_counts_no_attention() -> None:
    model = replace(read_model("llama-3-8b"), query_heads=0)
    assert Operations.of(plan(model, "20GiB")).pair == 0


def test_context_parallel_ranks() -> None:
    """Those of decoding have all heads of a part of the tokens, as many as alone; those of prefill share queries."""
    model = read_model("deepseek-v3", tp=8)
    alone, decoding, prefill = (
        Operations.of(plan(model, "60GiB", max_model_len=8192, layout="reference", dcp=dcp, pcp=pcp)).pair
        for dcp, pcp in ((1, 1), (8, 1), (1, 2))
    )
    assert alone == decoding == 2 * prefill
    whisper = read_model("whisper-large-v3")
    every = [Operations.of(plan(whisper, "8GiB", layout="reference", pcp=pcp)).token for pcp in (1, 2)]
    assert every[0] == every[1] > 0
