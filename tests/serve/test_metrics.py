"""Metrics are the engine's counts and the clients' times, under names that dashboards know."""

import time
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families
from serve_support import LONG, PATH, Served, engine_of, serving

from hybridkv.cache import MissReason
from hybridkv.errors import ConfigError
from hybridkv.runner import Completion, Engine, EngineOptions, load
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.serve import ServeOptions
from hybridkv.serve.families import Families
from hybridkv.serve.metrics import Tally


def samples(served: Served) -> dict[str, float]:
    """Sums of every name over its labels; a label that tells values apart is part of the name."""
    answer = served.client.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for one in family.samples:
            labels = {key: value for key, value in one.labels.items() if key not in {"model_name", "le"}}
            name = f"{one.name}{sorted(labels.values())}" if labels else one.name
            assert one.labels["model_name"] == served.front.name
            if "le" not in one.labels or one.labels["le"] == "+Inf":
                found[name] = one.value
    return found


def test_metrics_match_the_engine_counts(llama: Served) -> None:
    before = samples(llama)
    llama.post(PATH, prompt=["count this prompt, which has two blocks", "and this"], n=2, max_tokens=5, ignore_eos=True)
    now, found = llama.statistics, samples(llama)
    assert found["hybridkv:num_requests_running"] == now.running == 0
    assert found["hybridkv:num_requests_waiting"] == 0
    assert found["hybridkv:kv_cache_usage_perc"] == 0
    assert found["hybridkv:prefix_cache_queries_total"] == now.prompt_tokens > 0
    assert found["hybridkv:prefix_cache_hits_total"] == now.hit_tokens
    assert found["hybridkv:engine_steps_total"] == now.steps
    grown = {name: value - before.get(name, 0) for name, value in found.items()}
    assert grown["hybridkv:generation_tokens_total"] == 4 * 5
    assert grown["hybridkv:request_success_total['length']"] == 4
    for histogram in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_queue_time_seconds"):
        assert grown[f"hybridkv:{histogram}_count"] == 4
        assert grown[f"hybridkv:{histogram}_sum"] > 0
    assert grown["hybridkv:inter_token_latency_seconds_count"] == 4 * 4
    assert grown["hybridkv:request_generation_tokens_sum"] == 4 * 5
    queue, first, whole = (
        grown[f"hybridkv:{name}_sum"]
        for name in ("request_queue_time_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds")
    )
    assert queue < first < whole


def test_metrics_histogram_matches_prometheus_client() -> None:
    edges = (0.001, 0.5, 1.0, 20.0)
    values = [0.0, 0.001, 0.0011, 0.5, 0.7, 20.0, 20.5, 300.0, *Random(1).choices(range(30), k=50)]
    registry = CollectorRegistry()
    theirs = Histogram("a:seconds", "Said.", ["model_name"], registry=registry, buckets=edges).labels("tiny")
    ours = Tally("seconds", "Said.", edges)
    for value in values:
        theirs.observe(value)
        theirs.observe(value)
        ours.add(value, 2)
    (family,) = registry.collect()
    mine = ours.family(Families("a", "tiny"))
    assert (mine.name, mine.type, mine.documentation) == (family.name, family.type, family.documentation)
    expected = {(one.name, *one.labels.items()): one.value for one in family.samples if "created" not in one.name}
    assert {(one.name, *one.labels.items()): pytest.approx(one.value) for one in mine.samples} == expected


def test_metrics_report_group_blocks_while_a_request_runs(llama: Served) -> None:
    with llama.streaming(**LONG | {"prompt": "a prompt of more than two blocks of tokens", "max_tokens": 400}):
        found = samples(llama)
        assert found["hybridkv:num_requests_running"] == 1
        assert 0 < found["hybridkv:kv_cache_usage_perc"] <= found["hybridkv:kv_cache_peak_usage_perc"] <= 1
        (held,) = (value for name, value in found.items() if "kv_group_blocks" in name and "'held'" in name)
        assert held >= 3


@pytest.mark.parametrize(
    ("seats", "memory", "reason"), [(1, "4MiB", "seats"), (8, "420KiB", "no_space")], ids=["seats", "memory"]
)
def test_metrics_report_why_requests_wait(seats: int, memory: str, reason: str) -> None:
    """One of four prompts runs, and the others lack its seat, or its memory."""
    options = EngineOptions(max_running=seats)
    target = Engine(load("tiny:llama"), memory=memory, max_model_len=512, options=options)
    prompts = [[one, *([7] * 400)] for one in range(4)]
    with serving(target) as served:
        with served.streaming(prompt=prompts, max_tokens=100, ignore_eos=True, return_token_ids=True):
            found = samples(served)
        waiting = {name: value for name, value in found.items() if "waiting_by_reason" in name and value}
    assert waiting == {f"hybridkv:num_requests_waiting_by_reason['{reason}']": 3}
    assert found["hybridkv:num_requests_waiting"] == 3


def test_metrics_of_drafts_and_groups_use_vllm_names() -> None:
    target = Engine(load("tiny:qwen3_next"), memory="8MiB", max_model_len=512, speculate=NgramDrafter(2))
    with serving(target, ServeOptions(metrics_prefix="vllm")) as served:
        served.post(PATH, prompt="aaaa", max_tokens=20, temperature=0, logit_bias={"97": 1000})
        found = samples(served)
        now = served.statistics
        assert all(name.startswith("vllm:") for name in found)
        assert found["vllm:spec_decode_num_draft_tokens_total"] == now.drafted_tokens > 0
        assert found["vllm:spec_decode_num_accepted_tokens_total"] == now.accepted_tokens
        accepted = [value for name, value in found.items() if "_per_pos" in name]
        assert sum(accepted) == now.accepted_tokens
        assert all(one >= other for one, other in pairwise(accepted))
        groups = {name.partition("[")[2] for name in found if "kv_group_evictions" in name}
        assert len(groups) == len(target.plan.config.groups) > 1


def test_metrics_report_resume_points_misses_and_times_on_request() -> None:
    options = EngineOptions(remembered_losses=1000, block_times=True, kv_events=False)
    target = Engine(load("tiny:granite_hybrid"), memory="8MiB", max_model_len=512, options=options)
    with serving(target) as served:
        prompt = "a prompt that comes twice, of more tokens than a block has"
        for _ in range(2):
            served.post(PATH, prompt=prompt, max_tokens=3, ignore_eos=True)
        found, now, cache = samples(served), target.statistics(), target.cache.statistics()
    assert sum(one.hits for one in cache.ends) == 1
    for name, of in (("ends", "kept"), ("ends_stored_total", "made"), ("end_hits_total", "hits")):
        assert {one.kind: found[f"hybridkv:kv_{name}['{one.kind}']"] for one in cache.ends} == {
            one.kind: getattr(one, of) for one in cache.ends
        }
    missed = {name: value for name, value in found.items() if "prompt_tokens_missed_total" in name}
    assert len(missed) == len(MissReason)
    assert sum(missed.values()) == sum(now.misses.values()) == now.prompt_tokens - now.hit_tokens
    assert missed["hybridkv:prompt_tokens_missed_total['never_seen']"] == now.misses["never_seen"] > 0
    by_source = [
        found[f"hybridkv:prompt_tokens_by_source_total['{one}']"] for one in ("local_compute", "local_cache_hit")
    ]
    assert by_source == [now.prompt_tokens - now.hit_tokens, now.hit_tokens]
    assert cache.times is not None
    assert found["hybridkv:kv_block_reuse_gap_seconds_count"] == sum(cache.times.gap.counts) > 0
    assert found["hybridkv:kv_block_reuse_gap_seconds_sum"] == pytest.approx(cache.times.gap.sum_s)
    assert found["hybridkv:kv_block_lifetime_seconds_count"] == sum(cache.times.lifetime.counts)
    evictable = sum(value for name, value in found.items() if "kv_group_blocks" in name and "'evictable'" in name)
    assert evictable == sum(group.cached_blocks for group in cache.groups) > 0


def test_metrics_omit_what_is_not_counted(llama: Served) -> None:
    assert not any("missed" in name or "kv_block_" in name or "tiering" in name for name in samples(llama))


@pytest.mark.parametrize("prefix", ["", "a:b", "1a", "a b"])
def test_metrics_prefix_that_is_no_name_is_rejected(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix"):
        replace(ServeOptions(), metrics_prefix=prefix)


def test_metrics_count_queue_time(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def slow(engine: Engine) -> list[Completion]:
        time.sleep(0.01)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)
    with serving(engine_of("llama", max_running=1)) as served:
        served.post(PATH, prompt=["one", "two"], max_tokens=20, ignore_eos=True)
        found = samples(served)
        whole, queued = (
            found[f"hybridkv:{name}_sum"] for name in ("e2e_request_latency_seconds", "request_queue_time_seconds")
        )
        # the second ran when the first was done, and each needs 20 steps
        assert queued >= 19 * 0.01
        assert whole - queued >= 2 * 19 * 0.01
