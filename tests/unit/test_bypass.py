"""Who is admitted: priorities, overtaking, states not yet readable, look-ahead; docs/contracts.md, 6, 9, 10."""

from collections.abc import Sequence

import pytest
from kinds_support import cache_of, full, state, window

from hybridkv.cache import CommonHit, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import EncoderInput
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Csr, Step, StepResult


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


def test_an_encoder_input_needs_cross_attention() -> None:
    """Refused when it arrives: no step may break in the middle for it."""
    sched, _ = scheduler(num_blocks=40)
    with pytest.raises(ConfigError, match="the model has no cross attention"):
        add(sched, "a", range(8), encoder=EncoderInput(b"audio", 4))
    add(sched, "b", range(8), 1)
    assert turn(sched) == ["b"]


# -- overtaking


def test_a_request_that_does_not_fit_lets_others_pass() -> None:
    sched, _ = scheduler()
    add(sched, "a", range(16))
    add(sched, "large", range(50, 80), 1)
    add(sched, "small", [99])
    assert turn(sched) == ["a", "small"]
    assert "large" in [name for _ in range(5) for name in turn(sched)]


def test_at_most_so_many_pass() -> None:
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


def test_at_most_for_so_long() -> None:
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


def test_the_bound_is_64_or_a_second_unless_told() -> None:
    sched, clock = scheduler(num_blocks=40)
    add(sched, "a", range(16), 14)
    add(sched, "large", range(50, 194), 1)
    assert turn(sched) == ["a"]
    passed = 0
    for i in range(13):
        for j in range(7):
            add(sched, f"small{i}.{j}", [100 + i], 1)
        passed += len(turn(sched))
    assert passed == 64
    other, clock = scheduler()
    add(other, "a", range(16), 14)
    add(other, "large", range(50, 80), 1)
    for now, admitted in ((5.0, ["a"]), (5.999, ["b5.999"]), (6.0, [])):
        clock.now = now
        if now > 5:
            add(other, f"b{now}", [1], 1)
        assert turn(other) == admitted


def test_retrying_costs_no_look_up_while_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    sched, _ = scheduler()
    add(sched, "a", range(16), 8)
    add(sched, "large", range(50, 80), 1)
    assert turn(sched) == ["a"]
    asked: list[str] = []
    look_up = KVCacheManager.look_up

    def counted(cache: KVCacheManager, request: Request) -> CommonHit:
        asked.append(request.request_id)
        return look_up(cache, request)

    monkeypatch.setattr(KVCacheManager, "look_up", counted)
    for _ in range(3):
        assert turn(sched) == []
    assert asked == []


@pytest.mark.parametrize("field", ["max_overtaken", "max_overtaken_seconds", "num_lookahead_tokens"])
def test_limits_are_not_negative(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must not be negative"):
        SchedulerLimits(**{field: -1})  # type: ignore[arg-type]  # by name


def test_an_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="policy must be fcfs or priority, got 'random'"):
        SchedulerLimits(policy="random")  # type: ignore[arg-type]  # on purpose


# -- priorities


def test_the_victim_is_the_worst_priority_then_the_latest_and_returns_to_its_place() -> None:
    """Four rows of 8 tokens fill 8 blocks; each needs a third at its ninth token."""
    sched, _ = scheduler(policy="priority", max_overtaken=0)
    for name, priority in (("worst", 2), ("a", 0), ("b", 1), ("late", 2)):
        add(sched, name, [priority + 10 * len(name)] * 7, 12, priority=priority, arrival_time=float(len(name)))
    assert turn(sched) == ["a", "b", "late", "worst"]
    step = sched.schedule()  # each runs its eighth token
    update(sched, step)
    step = sched.schedule()
    owners = [request.request_id for request in sched.cache.rows.owners(step.rows)]
    assert owners == ["a", "b"]
    assert [request.request_id for request in sched._waiting.requests()] == ["late", "worst"]
    update(sched, step)


# -- states that are not written yet


def test_d4_who_waits_for_a_state_does_not_hold_up_the_others() -> None:
    """The first request leaves the state at 16 in this very step: the second can read it in the next one."""
    sched, _ = scheduler(full(16), state(), num_blocks=60)
    shared = list(range(16))
    add(sched, "first", [*shared, 1])
    sched.add(Request("second", [*shared, 2], hasher=sched.cache.hasher))
    add(sched, "third", [3] * 20)
    step = sched.schedule()
    assert [new.request_id for new in step.new_rows] == ["first", "third"]
    update(sched, step)
    step = sched.schedule()
    assert [new.request_id for new in step.new_rows] == ["second"]
    assert step.num_computed.tolist()[-1] == 16
    update(sched, step)


# -- thrashing


def test_d9_nobody_returns_before_all_of_it_fits() -> None:
    sched, _ = scheduler()
    add(sched, "a", range(13), 12)
    add(sched, "b", range(50, 63), 12)
    assert turn(sched) == ["a", "b"]
    admissions = 0
    while not sched.drained:
        step = sched.schedule()
        for new in step.new_rows:
            admissions += 1
            assert step.finished_rows.size == 0 or sched.statistics().running > 1 or new.request_id == "b"
        update(sched, step)
    stats = sched.statistics()
    assert stats.preemptions == 1
    assert admissions == 1  # once, when "a" was gone


# -- states in a Step


def test_what_a_step_says_of_states() -> None:
    sched, _ = scheduler(full(16), state(), state(64, 0, "none"), num_blocks=80, max_batched_tokens=32)
    add(sched, "a", range(40))
    step = sched.schedule()
    first, running = sched.cache.get_block_ids("a")[1][1], sched.cache.get_block_ids("a")[2][0]
    assert step.zero.tolist() == [[1, first], [2, running]]
    assert step.copies == ()
    assert step.state_read.tolist() == [[-1, first, running]]
    assert step.state_writes.tolist() == [[0, 1, 32, first], [0, 2, 32, running]]
    update(sched, step)
    step = sched.schedule()
    second = sched.cache.get_block_ids("a")[1][2]
    assert step.zero.tolist() == []
    assert [(c.stage, c.group, c.source, c.destination, c.kind) for c in step.copies] == [
        ("before", 1, first, second, "state")
    ]
    assert step.state_read.tolist() == [[-1, second, running]]
    assert step.state_writes.tolist() == [[0, 1, 40, second], [0, 2, 40, running]]


def test_models_without_states_say_nothing_of_them() -> None:
    sched, _ = scheduler(full(4), window(8), num_blocks=40)
    add(sched, "a", range(10))
    step = sched.schedule()
    assert (step.zero.shape, step.copies, step.state_read.shape, step.state_writes.shape) == (
        (0, 2),
        (),
        (0, 2),
        (0, 4),
    )


# -- who returns where


def test_who_came_later_with_a_better_priority_is_not_the_victim() -> None:
    sched, _ = scheduler(policy="priority")
    add(sched, "low", range(14), 16, priority=5)
    assert turn(sched) == ["low"]
    add(sched, "mid", range(100, 128), 1, priority=3)
    add(sched, "high", range(50, 62), 16, priority=0)
    assert turn(sched) == ["high"]
    while sched.num_running == 2:
        turn(sched)
    assert [request.request_id for request in sched._waiting.requests()] == ["mid", "low"]
    assert [request.request_id for request in sched._running.requests] == ["high"]
