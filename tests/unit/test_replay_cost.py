"""The cost model, by hand, and the report's numbers."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner import plan
from hybridkv.request import SamplingParams
from hybridkv.simulator import H100, CacheTraffic, Hardware, ReplayReport, StepCost
from hybridkv.simulator.report import Distribution
from hybridkv.step import Cells, Csr, EncoderRead, NewRow, Step

# 1,000 operations and 100 bytes a second, half and a quarter of them reached
SLOW = Hardware("slow", 1000, 100, 0.5, 0.25, 0.125)


def step(*rows: tuple[int, int]) -> Step:
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
    )


def test_compute_bound() -> None:
    cost = StepCost(parameters=10, active_parameters=10, traffic=CacheTraffic(), hardware=SLOW)
    # 2 * 10 * 100 operations at 500 a second; 20 bytes of weights at 25 a second
    assert cost.seconds(step((0, 60), (7, 40))) == 4 + 0.125


def test_memory_bound() -> None:
    cost = StepCost(parameters=10, active_parameters=10, traffic=CacheTraffic(3), hardware=SLOW)
    # 20 bytes of weights, 3 for each of 30 + 1 and 44 + 1 tokens, at 25 a second; 40 operations at 500
    assert cost.seconds(step((30, 1), (44, 1))) == (20 + 3 * 76) / 25 + 0.125


def test_experts_that_no_token_chooses_are_not_read() -> None:
    cost = StepCost(parameters=100, active_parameters=10, traffic=CacheTraffic(), hardware=SLOW)
    assert cost.seconds(step((0, 1))) == 2 * 10 / 25 + 0.125
    assert cost.seconds(step((0, 4))) == 2 * 40 / 25 + 0.125
    assert cost.seconds(step((0, 50))) == 2 * 100 / 25 + 0.125


def test_encoders_run_where_requests_begin() -> None:
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
def test_weights_of_an_encoder(name: str, encoder: int) -> None:
    assert StepCost.of(plan(read_model(name), "8GiB", max_model_len=4096)).encoder_parameters == encoder


def test_an_empty_step_costs_its_overhead() -> None:
    assert StepCost(10, 10, CacheTraffic(1), SLOW).seconds(step()) == 0.125


def test_the_time_scale_multiplies() -> None:
    one, half, none = (StepCost(10, 10, CacheTraffic(1), SLOW, time_scale=scale) for scale in (1.0, 0.5, 0.0))
    busy = step((5, 3))
    assert half.seconds(busy) == one.seconds(busy) / 2
    assert none.seconds(busy) == 0


def test_ranks_share_the_work() -> None:
    alone, four = (StepCost.of(plan(read_model("llama-3-70b", tp=tp), "40GiB")) for tp in (1, 4))
    assert four.parameters == alone.parameters / 4
    assert four.active_parameters == alone.active_parameters / 4
    assert (alone.traffic.token_bytes, four.traffic.token_bytes) == (327_680, 81_920)
    # one token: about 141 GB of weights at 2.68 TB/s; 8,192 tokens: their operations, and a fifteenth of attention's
    # besides, at 495 TFLOP/s
    assert alone.seconds(step((0, 1))) == pytest.approx(0.0526 + H100.overhead_s, rel=0.02)
    assert alone.seconds(step((0, 8192))) == pytest.approx(2.48, rel=0.01)


@pytest.mark.parametrize("scale", [-0.1, float("inf"), float("nan")])
def test_time_scales_that_cannot_be(scale: float) -> None:
    with pytest.raises(ConfigError, match="time scale must be 0 or more and finite"):
        StepCost.of(plan(read_model("llama-3-8b"), "4GiB"), time_scale=scale)


def test_percentiles_are_those_of_nearest_rank() -> None:
    assert Distribution.of([float(n) for n in range(200, 0, -1)]) == Distribution(100.5, 100, 180, 198)
    assert Distribution.of([4.0]) == Distribution(4, 4, 4, 4)
    assert Distribution.of([1.0, 3.0]) == Distribution(2, 1, 3, 3)
    assert Distribution.of([]) == Distribution(0, 0, 0, 0)


def test_a_report_as_json() -> None:
    none = Distribution.of([])
    report = ReplayReport("x.jsonl", 2, 80, 5, 45, 1, 60, 24, 3, 0.25, 9, 1.5, 12.5, none, none)
    document = json.loads(report.to_json({"model": "m"}))
    assert (document["schema"], document["version"]) == ("hybridkv.replay", 1)
    assert document["settings"] == {"model": "m"}
    assert document["hit_rate"] == 0.75
    assert document["time_to_first_token_s"] == {"mean": 0, "p50": 0, "p90": 0, "p99": 0}
    assert {"requests", "prompt_tokens", "hit_tokens", "computed_tokens", "preemptions", "peak_usage", "steps"} <= set(
        document
    )
