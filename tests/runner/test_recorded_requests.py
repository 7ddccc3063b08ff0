"""Requests of a real engine, recorded and replayed: the replay counts what the engine counted."""

import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from threading import Thread

import pytest

from hybridkv.errors import ConfigError
from hybridkv.kv_events import RequestPublisher, ended_requests
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, plan_for, tiny_model, wrap
from hybridkv.simulator import ReplaySettings, TraceFile, convert, replay
from hybridkv.simulator.hardware import FP32
from hybridkv.simulator.live import LiveRequests
from hybridkv.simulator.twin import fitted_time_scale

COUNT = 30


def prompts(random: Random) -> list[list[int]]:
    heads = [[random.randrange(5, 200) for _ in range(48)] for _ in range(3)]
    return [
        [*random.choice(heads), *(random.randrange(5, 200) for _ in range(random.randrange(1, 40)))]
        for _ in range(COUNT)
    ]


@pytest.mark.parametrize("layout", ["natural", "reference"])
@pytest.mark.parametrize("model", ["qwen3_next", "llama"])
def test_replay_of_recorded_requests_counts_as_the_engine(model: str, layout: str, tmp_path: Path) -> None:
    loaded, random, trace = wrap(tiny_model(model)), Random(model), tmp_path / "trace.jsonl"
    least = plan_for(loaded, [190], max_model_len=190, layout=layout).memory_bytes
    plan = plan_for(loaded, [190], memory=3 * least, max_model_len=190, layout=layout)
    with RequestPublisher("tcp://127.0.0.1:*") as publisher:
        ended = LiveRequests(islice(ended_requests(publisher.endpoint, seconds=60), COUNT))
        recorder = Thread(target=lambda: convert(ended, trace), daemon=True)
        recorder.start()
        time.sleep(0.4)  # the subscription reaches the publisher
        with Engine(loaded, plan, EngineOptions(self_check=False, max_running=6), requests=publisher) as engine:
            for one in prompts(random):
                engine.add(one, SamplingParams(max_tokens=random.randrange(40, 100), ignore_eos=True))
            while not engine.idle:
                engine.step()
            counts = engine.statistics()
    recorder.join()
    # the first step begins after the last request arrived
    lines = [{**json.loads(line), "timestamp": 0} for line in trace.read_text("utf-8").splitlines()]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    settings = ReplaySettings(max_running=6, token_budget=EngineOptions().token_budget, weights=FP32)
    scale = fitted_time_scale(TraceFile(trace), plan, settings)
    report = replay(TraceFile(trace), plan, replace(settings, time_scale=scale))
    assert (report.requests, report.prompt_tokens) == (COUNT, counts.prompt_tokens)
    off = abs((report.hit_tokens or 0) - counts.hit_tokens) / counts.prompt_tokens
    # a request that does not fit lets others pass for a second of the engine's time, so a busy machine counts otherwise
    assert off < 0.05
    assert counts.hit_tokens > 0.2 * counts.prompt_tokens
    assert abs(report.preemptions - counts.preemptions) <= 3


def test_time_scale_is_fitted_to_recorded_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 9000 * at, "prompt": [[at, 0, 600]], "output": [[at, 600, 30]]} for at in range(5)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    loaded = wrap(tiny_model("llama"))
    plan, settings = plan_for(loaded, [640]), ReplaySettings()
    with pytest.raises(ConfigError, match="does not say how long its requests took"):
        fitted_time_scale(TraceFile(path), plan, settings)
    with pytest.raises(ConfigError, match="time scale of 0"):
        fitted_time_scale(TraceFile(path), plan, replace(settings, time_scale=0))
    alone = replay(TraceFile(path), plan, settings)
    first, later = alone.time_to_first_token_s, alone.time_per_output_token_s
    took = first.mean + 29 * later.mean
    for factor in (0.5, 7.0, 500.0):
        timed = [{**line, "took": 1000 * took * factor} for line in lines]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in timed), "utf-8")
        if factor > 64:
            with pytest.raises(ConfigError, match="no time scale within a factor of 64"):
                fitted_time_scale(TraceFile(path), plan, settings)
        else:
            assert fitted_time_scale(TraceFile(path), plan, settings) == pytest.approx(factor, rel=0.01)
