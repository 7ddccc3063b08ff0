"""Who is admitted: priorities, overtaking, states not yet readable, look-ahead; docs/contracts.md, 6, 9, 10."""

from collections.abc import Sequence

import pytest

from hybridkv.cache import Hit, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import EncoderInput
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Csr, Step, StepResult
from kinds_support import cache_of, full


class Clock:
    """Seconds that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def scheduler(*specs: KVCacheSpec, num_blocks: int = 9, **limits: object) -> tuple[Scheduler, Clock]:
    clock = Clock()
    known = {"max_running": 8, "max_batched_tokens": 64, **limits}
    cache = cache_of(*(specs or (full(),)), num_blocks=num_blocks)
    return Scheduler(cache, SchedulerLimits(**known), clock=clock), clock  # type: ignore[arg-type]  # by name


def add(sched: Scheduler, name: str, prompt: Sequence[int], max_tokens: int = 4, **known: object) -> Request:
    request = Request(name, prompt, SamplingParams(max_tokens=max_tokens), hasher=sched.cache.hasher, **known)  # type: ignore[arg-type]  # by name
    sched.add(request)
    return request


def update(sched: Scheduler, step: Step) -> None:
    sched.update(StepResult(step.id, Csr.from_lists([[7] if samples else [] for samples in step.samples.tolist()])))
    sched.check()


def turn(sched: Scheduler) -> list[str]:
    """A step and its update; who came in."""
    step = sched.schedule()
    update(sched, step)
    return [new.request_id for new in step.new_rows]


def test_encoder_input_without_cross_attention_is_rejected_on_add() -> None:
    """Refused when it arrives: no step may break in the middle for it."""
    sched, _ = scheduler(num_blocks=40)
    with pytest.raises(ConfigError, match="the model has no cross attention"):
        add(sched, "a", range(8), encoder=EncoderInput(b"audio", 4))
    add(sched, "b", range(8), 1)
    assert turn(sched) == ["b"]


# -- overtaking


def test_refused_request_is_overtaken_at_most_the_limit_of_times() -> None:
    sched, _ = scheduler(max_overtaken=3)
    add(sched, "a", range(16), 12)
    add(sched, "large", range(50, 80), 1)
    admitted = turn(sched)
    assert admitted == ["a"]
    for i in range(5):
        add(sched, f"small{i}", [90 + i], 1)
    assert turn(sched) == ["small0", "small1", "small2"]
    assert turn(sched) == []
    assert sched.num_waiting == 3


def test_refused_request_is_overtaken_at_most_for_the_time_limit() -> None:
    sched, clock = scheduler(max_overtaken_seconds=1.0)
    clock.now = 50.0
    add(sched, "a", range(16), 12)
    add(sched, "large", range(50, 80), 1)
    add(sched, "small", [1], 1)
    assert turn(sched) == ["a", "small"]
    add(sched, "second", [2], 1)
    clock.now = 50.9
    assert turn(sched) == ["second"]
    add(sched, "third", [3], 1)
    clock.now = 51.0
    assert turn(sched) == []


def test_refused_request_retry_costs_no_look_up_without_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    sched, _ = scheduler()
    add(sched, "a", range(16), 8)
    add(sched, "large", range(50, 80), 1)
    assert turn(sched) == ["a"]
    asked: list[str] = []
    look_up = KVCacheManager.look_up

    def counted(cache: KVCacheManager, request: Request) -> Hit:
        asked.append(request.request_id)
        return look_up(cache, request)

    monkeypatch.setattr(KVCacheManager, "look_up", counted)
    for _ in range(3):
        assert turn(sched) == []
    assert asked == []


@pytest.mark.parametrize("field", ["max_overtaken", "max_overtaken_seconds", "num_lookahead_tokens"])
def test_scheduler_limit_below_zero_is_rejected(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must not be negative"):
        SchedulerLimits(**{field: -1})  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan"), "half", True])
def test_short_share_outside_zero_to_one_is_rejected(share: object) -> None:
    with pytest.raises(ConfigError, match="short_share"):
        SchedulerLimits(short_share=share)  # type: ignore[arg-type]  # on purpose


def test_scheduler_with_unknown_policy_is_rejected() -> None:
    with pytest.raises(ConfigError, match="policy must be fcfs or priority, got 'random'"):
        SchedulerLimits(policy="random")  # type: ignore[arg-type]  # on purpose
