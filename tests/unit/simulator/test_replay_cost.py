"""The time of a step by hand: the roofline, the bytes of the cache that it moves, and operations of attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import ConfigError
from hybridkv.models import Layer, Model, read_model
from hybridkv.planner import Plan, plan
from hybridkv.request import SamplingParams
from hybridkv.simulator import H100, CacheTraffic, Hardware, StepCost
from hybridkv.simulator.cost import Operations
from hybridkv.simulator.report import Distribution
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from hybridkv.step import Cells, Copy, Csr, EncoderRead, NewRow, Step

# 1,000 operations and 100 bytes a second, half and a quarter of them reached
SLOW = Hardware("slow", 1000, 100, 0.5, 0.25, 0.125)


def step(*rows: tuple[int, int], copies: tuple[Copy, ...] = ()) -> Step:
    """A Step of rows (computed, scheduled)."""
    computed, scheduled = (np.array(column, np.int32) for column in (zip(*rows, strict=True) if rows else ((), ())))
    total = int(scheduled.sum())
    return Step(
        id=0,
        after=-1,
        rows=np.arange(len(rows), dtype=np.int32),
        num_computed=computed,
        num_scheduled=scheduled,
        samples=np.ones(len(rows), np.bool_),
        token_ids=Csr(np.concatenate(([0], np.cumsum(scheduled))), np.zeros(total, np.int32)),
        drafts=Csr.empty(len(rows)),
        cells=Cells.empty(),
        finished_rows=np.empty(0, np.int32),
        copies=copies,
    )


def test_step_cost_when_compute_bound_matches_hand_calculation() -> None:
    cost = StepCost(parameters=10, active_parameters=10, traffic=CacheTraffic(), hardware=SLOW)
    # 2 * 10 * 100 operations at 500 a second; 20 bytes of weights at 25 a second
    assert cost.seconds(step((0, 60), (7, 40))) == 4 + 0.125


def test_step_cost_when_memory_bound_matches_hand_calculation() -> None:
    cost = StepCost(parameters=10, active_parameters=10, traffic=CacheTraffic(3), hardware=SLOW)
    # 20 bytes of weights, 3 for each of 30 + 1 and 44 + 1 tokens, at 25 a second; 40 operations at 500
    assert cost.seconds(step((30, 1), (44, 1))) == (20 + 3 * 76) / 25 + 0.125


def test_step_cost_skips_unchosen_experts() -> None:
    cost = StepCost(parameters=100, active_parameters=10, traffic=CacheTraffic(), hardware=SLOW)
    assert cost.seconds(step((0, 1))) == 2 * 10 / 25 + 0.125
    assert cost.seconds(step((0, 4))) == 2 * 40 / 25 + 0.125
    assert cost.seconds(step((0, 50))) == 2 * 100 / 25 + 0.125


def test_step_cost_of_encoder_is_paid_at_request_start() -> None:
    cost = StepCost(10, 6, CacheTraffic(), SLOW, encoder_parameters=4)
    assert cost.seconds(step((5, 1), (9, 1))) == 2 * 6 / 25 + 0.125  # nobody reads the encoder's weights

    def new(row: int, tokens: int, *, encodes: bool) -> NewRow:
        read = EncoderRead("input", tokens, encodes)
        return NewRow(row, str(row), np.zeros(1, np.int32), 1, SamplingParams(), read)

    begun = replace(step((0, 1), (0, 1)), new_rows=(new(0, 300, encodes=True), new(1, 900, encodes=False)))
    # 2 * 6 * 2 operations, and 2 * 4 for each of the 300 tokens
    assert cost.seconds(begun) == (24 + 2400) / 500 + 0.125
    small = replace(step((0, 1), (0, 1)), new_rows=(new(0, 1, encodes=True),))
    assert cost.seconds(small) == 2 * (6 + 4) / 25 + 0.125


@pytest.mark.parametrize(("name", "encoder"), [("flan-t5-large", 308_332_032), ("llama-3-8b", 0), ("qwen3-30b-a3b", 0)])
def test_step_cost_encoder_parameters_match_the_model(name: str, encoder: int) -> None:
    assert StepCost.of(plan(read_model(name), "8GiB", max_model_len=4096)).encoder_parameters == encoder


def test_step_cost_of_empty_step_is_the_overhead() -> None:
    assert StepCost(10, 10, CacheTraffic(1), SLOW).seconds(step()) == 0.125


def test_step_cost_is_multiplied_by_the_time_scale() -> None:
    one, half, none = (StepCost(10, 10, CacheTraffic(1), SLOW, time_scale=scale) for scale in (1.0, 0.5, 0.0))
    busy = step((5, 3))
    assert half.seconds(busy) == one.seconds(busy) / 2
    assert none.seconds(busy) == 0


def test_step_cost_of_several_ranks_is_shared() -> None:
    alone, four = (StepCost.of(plan(read_model("llama-3-70b", tp=tp), "40GiB")) for tp in (1, 4))
    assert four.parameters == alone.parameters / 4
    assert four.active_parameters == alone.active_parameters / 4
    assert (alone.traffic.token_bytes, four.traffic.token_bytes) == (327_680, 81_920)
    # one token: about 141 GB of weights at 2.68 TB/s; 8,192 tokens: their operations, and a fifteenth of attention's
    # besides, at 495 TFLOP/s
    assert alone.seconds(step((0, 1))) == pytest.approx(0.0526 + H100.overhead_s, rel=0.02)
    assert alone.seconds(step((0, 8192))) == pytest.approx(2.48, rel=0.01)


@pytest.mark.parametrize("scale", [-0.1, float("inf"), float("nan")])
def test_time_scale_that_is_invalid_is_rejected(scale: float) -> None:
    with pytest.raises(ConfigError, match="time_scale must be 0 or more and finite"):
        StepCost.of(plan(read_model("llama-3-8b"), "4GiB"), time_scale=scale)


def test_percentiles_use_the_nearest_rank() -> None:
    assert Distribution.of([float(n) for n in range(200, 0, -1)]) == Distribution(100.5, 100, 180, 198)
    assert Distribution.of([4.0]) == Distribution(4, 4, 4, 4)
    assert Distribution.of([1.0, 3.0]) == Distribution(2, 1, 3, 3)
    assert Distribution.of([]) == Distribution(0, 0, 0, 0)


# -- bytes of the cache

# 2 * 1 head * 8 elements * 2 bytes = 32 bytes a token
HEADS: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=10)
CHUNK = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=12)
SINK = SinkFullAttentionSpec(**HEADS, sink_len=6)
CROSS = CrossAttentionSpec(**HEADS)
ENCODER = EncoderOnlyAttentionSpec(**HEADS)
STATE = MambaSpec(block_size=4, shapes=((5, 10),), dtypes=("float32",))  # 200 bytes


def planned(*specs: KVCacheSpec, encoder_tokens: int = 0, **limits: object) -> Plan:
    """A plan of layers of these specs."""
    layers = tuple(Layer(f"layers.{i}", spec, i) for i, spec in enumerate(specs))
    model = Model("m", "m", layers, 1000, 9, "bfloat16", 1, 1, 4, max_encoder_tokens=encoder_tokens)
    return plan(model, "1MiB", **limits)  # type: ignore[arg-type]  # of this file


@pytest.mark.parametrize(
    ("spec", "rows", "moved"),
    [
        (FULL, [(0, 50)], 50 * 32),
        (FULL, [(30, 1), (44, 2)], (31 + 46) * 32),
        # a token reads itself and 9 before it; 5 queries reach 13 tokens back from the last
        (WINDOW, [(30, 1)], 10 * 32),
        (WINDOW, [(30, 5)], 14 * 32),
        (WINDOW, [(3, 1), (0, 50), (9, 1), (10, 1)], (4 + 50 + 10 + 10) * 32),
        # token 30 is in the chunk of 24 .. 35
        (CHUNK, [(30, 1)], 7 * 32),
        (CHUNK, [(35, 1), (36, 1), (30, 10)], (12 + 1 + 16) * 32),
        (SINK, [(30, 1), (0, 4)], (31 + 4 + 2 * 6) * 32),
        (STATE, [(30, 1), (0, 500)], 2 * 2 * 200),
        (CROSS, [(30, 1), (0, 7)], 2 * 20 * 32),
        (ENCODER, [(30, 1)], 0),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, KVCacheSpec) else str(one),
)
def test_cache_traffic_of_each_spec_matches_hand_calculation(
    spec: KVCacheSpec, rows: Sequence[tuple[int, int]], moved: int
) -> None:
    traffic = CacheTraffic.of(planned(spec, encoder_tokens=20))
    assert traffic.bytes_of(step(*rows)) == moved


def test_cache_traffic_adds_layers_and_merges_equal_windows() -> None:
    other = SlidingWindowSpec(**HEADS, sliding_window=3)
    traffic = CacheTraffic.of(planned(FULL, WINDOW, FULL, STATE, WINDOW, other))
    assert list(traffic.windows) == [(3, 32), (10, 64)]
    assert traffic.bytes_of(step((30, 1))) == 31 * 64 + 10 * 64 + 3 * 32 + 400


def test_cache_traffic_of_copies_counts_read_and_write() -> None:
    plan = planned(FULL, STATE, STATE)
    group = next(i for i, one in enumerate(plan.config.groups) if isinstance(one.spec, MambaSpec))
    states = len(plan.config.groups[group].layer_names)
    copies = (Copy("before", group, 1, 2, "state"), Copy("before", group, 3, 4, "state"))
    traffic = CacheTraffic.of(plan)
    assert traffic.bytes_of(step((8, 1), copies=copies)) == 9 * 32 + 2 * 400 + 2 * 2 * 200 * states


def test_cache_traffic_of_windows_as_full_is_masked() -> None:
    kept, dropped = (
        CacheTraffic.of(planned(FULL, WINDOW, CHUNK, windows_as_full=as_full)) for as_full in (True, False)
    )
    assert kept.bytes_of(step((30, 1))) == dropped.bytes_of(step((30, 1))) == (31 + 10 + 7) * 32
    remembered = FullAttentionSpec(**HEADS, sliding_window=10)
    assert CacheTraffic.of(planned(remembered)).bytes_of(step((30, 1))) == 10 * 32


def test_cache_traffic_of_context_parallel_shares_tokens_only() -> None:
    traffic = CacheTraffic.of(planned(FULL, WINDOW, STATE, CROSS, encoder_tokens=20, dcp=2, pcp=2))
    assert traffic.bytes_of(step((31, 1))) == (32 + 10) * 8 + 400 + 20 * 32


def test_cache_traffic_of_real_models_matches() -> None:
    qwen = CacheTraffic.of(plan(read_model("qwen3.5-35b-a3b"), "40GiB", max_model_len=8192))
    # 10 layers of 2 * 2 heads * 256 * 2 bytes; 64,389,120 bytes of states, read and written
    assert (qwen.token_bytes, qwen.row_bytes) == (20_480, 2 * 64_389_120)
    gemma = CacheTraffic.of(plan(read_model("gemma-3-27b"), "40GiB", max_model_len=8192))
    assert (gemma.token_bytes, gemma.windows) == (81_920, ((1024, 425_984),))
    whisper = CacheTraffic.of(plan(read_model("whisper-large-v3"), "4GiB"))
    assert whisper.row_bytes == 1500 * 163_840


# -- operations of attention and of recurrent states

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
def test_operations_count_the_pairs_of_the_mask(rows: list[tuple[int, int]], window: int, chunk: int) -> None:
    made = Operations(3, ((window, 5.0),), ((chunk, 7.0),), 11)
    expected = 3 * pairs(rows) + 5 * pairs(rows, window=window) + 7 * pairs(rows, chunk=chunk)
    expected += 11 * sum(scheduled for _, scheduled in rows)
    assert made.of_rows(*columns(rows)) == expected


@given(ROWS, st.integers(1, 50), st.integers(1, 50), st.integers(1, 60))
def test_operations_of_decoding_at_once_match_single_steps(
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
def test_operations_of_models_match(name: str, expected: Operations) -> None:
    assert Operations.of(plan(read_model(name), "60GiB", max_model_len=8192)) == expected


def test_operations_of_several_ranks_share_attention() -> None:
    one, four = (Operations.of(plan(read_model("llama-3-70b", tp=tp), "40GiB")) for tp in (1, 4))
    assert one.pair == 4 * four.pair == 80 * 64 * 2 * 256


def test_step_cost_of_long_prompt_is_its_attention() -> None:
    cost = StepCost.of(plan(read_model("llama-3-70b", tp=4), "40GiB"))
    alone = replace(cost, operations=Operations())
    tokens = 100_000
    prompt = step((0, tokens))
    pairs_s = 80 * 64 / 4 * 2 * 256 * tokens * (tokens + 1) / 2 / (989e12 * 0.5)
    assert cost.seconds(prompt) - alone.seconds(prompt) == pytest.approx(pairs_s)
    assert cost.seconds(prompt) > 1.8 * alone.seconds(prompt)
    faster = replace(cost, hardware=replace(H100, attention_efficiency=1.0))
    assert faster.seconds(prompt) - alone.seconds(prompt) == pytest.approx(pairs_s / 2)


def test_operations_without_head_count_skip_attention() -> None:
    model = replace(read_model("llama-3-8b"), query_heads=0)
    assert Operations.of(plan(model, "20GiB")).pair == 0


def test_operations_of_context_parallel_ranks_match() -> None:
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
