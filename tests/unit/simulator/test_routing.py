"""Several replicas behind a router: the counts add up, and each router chooses as it says."""

from dataclasses import replace

import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.cache.journal import AllBlocksCleared, BlockRemoved, BlockStored
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner import Plan
from hybridkv.request import Request, SamplingParams
from hybridkv.simulator import (
    H100_UNBOUNDED,
    Pieces,
    ReplaySettings,
    TraceRequest,
    UniformWorkload,
    plan_for_trace,
    replay,
    replay_replicas,
)
from hybridkv.simulator.fleet import ROUND_ROBIN, FleetReport, _EventIndex
from token_traces import Given

SOURCE = UniformWorkload(templates=5, conversations=11, gap_s=0.02)
ANY = ReplaySettings(hardware=H100_UNBOUNDED)


def plan_of(source: UniformWorkload | Given, model: str = "llama-3-8b", memory: str = "2GiB", **rules: str) -> Plan:
    return plan_for_trace(source.summary(), read_model(model), memory, **rules)  # type: ignore[arg-type]


def asked(time_s: float, segment: int, prompt: int, output: int = 2) -> TraceRequest:
    return TraceRequest(time_s, Pieces(0, ((segment, 0, prompt),)), Pieces(0, ((segment, 10_000, output),)))


def shared(*requests: TraceRequest, router: str, replicas: int = 2) -> FleetReport:
    source = Given(list(requests))
    return replay_replicas(source, plan_of(source), replicas=replicas, router=router)


def requests_of(report: FleetReport) -> list[int]:
    return [one.requests for one in report.replicas]


@pytest.mark.parametrize(
    "router", ["round-robin", "least-loaded", "affinity", "prefix", "prefix:0", "prefix:3", "raw:0"]
)
@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("layout", ["natural", "reference"])
def test_router_counts_add_up(router: str, model: str, layout: str) -> None:
    plan = plan_of(SOURCE, model, layout=layout)
    one = replay_replicas(SOURCE, plan, ANY, router=router)
    assert one.whole == one.replicas[0] == replay(SOURCE, plan, ANY)
    report = replay_replicas(SOURCE, plan, ANY, replicas=3, router=router)
    whole, parts = report.whole, report.replicas
    assert (whole.requests, whole.prompt_tokens, whole.output_tokens) == (44, one.whole.prompt_tokens, 44 * 21)
    for name in ("requests", "prompt_tokens", "hit_tokens", "computed_tokens", "steps"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)
    assert whole.groups[0].published == sum(part.groups[0].published for part in parts)
    assert len(report.first_token_s) == len(report.per_token_s) == 44
    assert whole.computed_tokens >= whole.prompt_tokens - (whole.hit_tokens or 0) + 44 * 20
    again = replay_replicas(SOURCE, plan, ANY, replicas=3, router=router)
    assert again.to_dict({}) == report.to_dict({})
    assert "router" not in one.to_dict({})
    assert [found["requests"] for found in report.to_dict({})["replicas"]] == requests_of(report)  # type: ignore[attr-defined]


def test_router_round_robin_alternates() -> None:
    report = shared(*(asked(k, 5, 64) for k in range(7)), router="round-robin", replicas=3)
    assert requests_of(report) == [3, 2, 2]


def test_router_least_loaded_balances() -> None:
    # the first runs long; the others, one at a time, go elsewhere
    slow = asked(0.0, 1, 64, output=3000)
    report = shared(slow, *(asked(1.0 + k, 2 + k, 64) for k in range(4)), router="least-loaded")
    assert requests_of(report) == [1, 4]
    assert requests_of(shared(*(asked(5.0 * k, k, 64) for k in range(6)), router="least-loaded")) == [3, 3]


def test_router_affinity_keeps_a_session_at_its_replica() -> None:
    # two sessions share 160 tokens and grow; while each first turn runs, the other session begins elsewhere
    def turn(time_s: float, session: int, tokens: int, output: int = 2) -> TraceRequest:
        prompt = Pieces(0, ((1, 0, 160), (1 + session, 0, tokens)))
        return TraceRequest(time_s, prompt, Pieces(0, ((1 + session, tokens, output),)))

    first = [turn(0.0, 1, 320, 900), turn(1.0, 2, 320, 900)]
    later = [turn(90.0 + k, 1 + k % 3 % 2, 480 + 16 * k) for k in range(9)]  # 1 2 1 1 2 1 ...
    report = shared(*first, *later, router="affinity")
    assert requests_of(report) == [7, 4]
    mixed = shared(*first, *later, router="round-robin").whole.hit_tokens
    assert (report.whole.hit_tokens or 0) > (mixed or 0)
    branch = shared(turn(0.0, 1, 320, 900), turn(1.0, 2, 8), router="affinity")
    assert requests_of(branch) == [1, 1]  # it shares a beginning, but continues no prompt


@pytest.mark.parametrize("router", ["prefix", "prefix:0", "raw:0"])
def test_router_prefix_follows_the_prefix(router: str) -> None:
    # two long prompts, asked in turn, each stays where it was first; round robin of three in turn would mix them
    turns = [asked(5.0 * k, k % 3 % 2, 640 if k % 3 % 2 else 656) for k in range(9)]
    report = shared(*turns, router=router)
    assert requests_of(report) == [6, 3]
    assert report.whole.hit_tokens == 5 * 655 + 2 * 639
    mixed = shared(*turns, router="round-robin").whole.hit_tokens
    assert (mixed or 0) < (report.whole.hit_tokens or 0)


def test_router_prefix_limits_the_queue() -> None:
    # many at once with one prefix: some go where they must compute it
    first = asked(0.0, 1, 8000)
    burst = [replace(first, timestamp_s=9.0, prompt=Pieces(0, ((1, 0, 800), (10 + k, 0, 7200)))) for k in range(8)]
    report = shared(first, *burst, router="prefix")
    assert min(requests_of(report)) >= 3


def test_router_with_stale_index_misses_new_prefixes() -> None:
    turns = [asked(1.0 * k, k // 2, 640) for k in range(12)]  # each prompt comes twice, a second apart
    exact, stale = shared(*turns, router="prefix:0"), shared(*turns, router="prefix:100")
    assert exact.whole.hit_tokens == 6 * 639
    assert (stale.whole.hit_tokens or 0) < (exact.whole.hit_tokens or 0)
    assert shared(*turns, router="prefix:0.5").whole.hit_tokens == exact.whole.hit_tokens


def test_router_index_applies_events_at_arrival() -> None:
    cache = KVCacheManager(plan_of(SOURCE))
    request = Request("r", list(range(100)), SamplingParams(max_tokens=1), hasher=cache.hasher)
    keys = tuple(request.hashes)
    index = _EventIndex(2.0)
    index.add(0, [BlockStored(keys[:5], None, tuple(range(80)), 16)], 1.0)
    assert [index.known_tokens(request, 0, now) for now in (2.9, 3.0)] == [0, 80]
    assert index.known_tokens(request, 1, 9.0) == 0  # another replica's
    index.add(0, [BlockRemoved(keys[3:4])], 4.0)
    index.add(0, [BlockStored(keys[3:4], keys[2], tuple(range(48, 64)), 16)], 6.0)
    index.add(0, [AllBlocksCleared()], 7.0)
    assert [index.known_tokens(request, 0, now) for now in (5.9, 6.0, 8.0, 9.0)] == [80, 48, 80, 0]


def test_router_report_counts_latencies_within_aims() -> None:
    report = replay_replicas(SOURCE, plan_of(SOURCE), replicas=2)
    assert report.within(1e9, 1e9) == 44
    assert report.within(0.0, 1e9) == report.within(1e9, 0.0) == 0
    middle = sorted(report.first_token_s)[22]
    assert report.within(middle, 1e9) == sum(one <= middle for one in report.first_token_s)
    single = shared(asked(0, 1, 64, output=1), router=ROUND_ROBIN)
    assert single.within(1e9, 0.0) == 1  # no second token


def test_router_with_invalid_values_is_rejected() -> None:
    for wrong in ("x", "prefix:", "prefix:x", "least-loaded:1", "least-loaded:x", "raw"):
        with pytest.raises(ConfigError, match="unknown router"):
            replay_replicas(SOURCE, plan_of(SOURCE), router=wrong)
    for delay in ("-1", "nan", "1e7", "inf"):
        with pytest.raises(ConfigError, match=f"delay of router 'prefix:{delay}' must lie in 0 .. 1000000 seconds"):
            replay_replicas(SOURCE, plan_of(SOURCE), router=f"prefix:{delay}")
    with pytest.raises(ConfigError, match="replicas must be at least 1"):
        replay_replicas(SOURCE, plan_of(SOURCE), replicas=0)
    off = replay_replicas(SOURCE, plan_of(SOURCE), ReplaySettings(prefix_caching=False), replicas=2, router="prefix")
    assert off.whole.hit_tokens == 0
