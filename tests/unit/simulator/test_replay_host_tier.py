"""A replay with a host tier: what it hits, when its transfers end, and that fast-forward changes nothing."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import pytest

from cli_support import document, error, run
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.eviction import TenantShares
from hybridkv.models import read_model
from hybridkv.planner import Plan
from hybridkv.simulator import (
    H100_UNBOUNDED,
    ReplaySettings,
    Simulation,
    StepCost,
    Workload,
    plan_for_trace,
    replay,
    replay_replicas,
    simulation_of,
)
from hybridkv.simulator.transfers import TierTransfers
from hybridkv.step import Cells, Csr, Step, StepResult, StoreTransfer, TierCopies

QWEN = "qwen3.5-35b-a3b"
SETTINGS = ReplaySettings(hardware=H100_UNBOUNDED, host_memory="8GiB")
AGENT = Workload("agent", seed=3, limit=40, hours=0.02, rate=4)
SLOW = replace(H100_UNBOUNDED, compute_efficiency=0.05)
"""So slow that loads at a few gigabytes a second are faster."""


def planned(memory: str, model: str = QWEN) -> Plan:
    return plan_for_trace(AGENT.summary(), read_model(model), memory)


def left(made: Simulation) -> tuple[object, ...]:
    """What a replay leaves on the device and on the host."""
    made.scheduler.check()
    assert made.transfers is not None
    managers = made.scheduler.cache, made.transfers.tier.host
    return (
        made.scheduler.statistics(),
        [(one.statistics(), one.block_pool.free_order(), one.block_pool.keys.evictions) for one in managers],
    )


@pytest.mark.parametrize(
    ("model", "memory", "more"),
    [
        (QWEN, "1GiB", {}),
        (QWEN, "1GiB", {"time_scale": 0.0}),
        (QWEN, "1GiB", {"eviction": "lru", "placement": "interval:512"}),
        ("llama-3-8b", "2GiB", {}),
        ("gemma-3-27b", "8GiB", {}),
    ],
)
def test_host_tier_replay_equals_the_replay_step_by_step(model: str, memory: str, more: dict[str, object]) -> None:
    asked = replace(SETTINGS, **more)  # type: ignore[arg-type]  # settings of this file
    ways = [simulation_of(planned(memory, model), replace(asked, step_by_step=one)) for one in (True, False)]
    slow, fast = (made.run(AGENT) for made in ways)
    assert asdict(slow) == asdict(fast)
    assert left(ways[0]) == left(ways[1])
    assert slow.host_tier is not None
    assert slow.host_tier.stores
    assert slow.host_tier.loads


def test_host_tier_raises_the_hits_of_a_small_device() -> None:
    alone, large = (replay(AGENT, planned(memory), replace(SETTINGS, host_memory=None)) for memory in ("1GiB", "9GiB"))
    both = replay(AGENT, planned("1GiB"), SETTINGS)
    assert alone.host_tier is None
    assert both.host_tier is not None
    assert alone.hit_tokens is not None
    assert both.hit_tokens is not None
    assert large.hit_tokens is not None
    found = both.hit_tokens - alone.hit_tokens
    assert 0.5 * (large.hit_tokens - alone.hit_tokens) < found <= both.host_tier.loaded_tokens
    assert both.computed_tokens < alone.computed_tokens


# -- when transfers end


@dataclass
class Seen:
    """A transfer: its direction, its bytes, when its step began, and when a result told that it had arrived."""

    way: int
    num_bytes: int
    begun_s: float
    told_s: float | None = None


@dataclass
class Watch:
    """Every transfer of a simulation, and the beginning and end of every step that was taken by itself."""

    made: Simulation
    transfers: dict[int, Seen] = field(default_factory=dict)
    steps: list[tuple[float, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler, clock = self.made.scheduler, self.made.clock
        schedule, update = scheduler.schedule, scheduler.update
        config = scheduler.cache.config
        rows = begun_s = 0.0

        def scheduled() -> Step:
            nonlocal rows, begun_s
            step = schedule()
            rows, begun_s = len(step), clock.now_s
            for way, copies in enumerate((step.stores, step.loads)):
                for number, group in zip(copies.transfer.tolist(), copies.group.tolist(), strict=True):
                    self.transfers.setdefault(number, Seen(way, 0, begun_s)).num_bytes += config.block_bytes_of(group)
            return step

        def updated(result: StepResult) -> object:
            for number in result.arrived.tolist():
                assert self.transfers[number].told_s is None
                self.transfers[number].told_s = clock.now_s
            self.steps.append((begun_s, clock.now_s, int(rows)))
            return update(result)

        scheduler.schedule = scheduled  # type: ignore[method-assign]
        scheduler.update = updated  # type: ignore[method-assign,assignment]

    def ends(self, bytes_per_s: float) -> Iterator[tuple[Seen, float]]:
        """Yield each transfer in order, and when it ends if each direction moves one after the other."""
        free_s = [0.0, 0.0]
        for _, one in sorted(self.transfers.items()):
            free_s[one.way] = max(free_s[one.way], one.begun_s) + one.num_bytes / bytes_per_s
            yield one, free_s[one.way]


def watched(settings: ReplaySettings) -> Watch:
    watch = Watch(simulation_of(planned("1GiB"), settings))
    report = watch.made.run(AGENT)
    told = [one for one in watch.transfers.values() if one.told_s is not None]
    assert report.host_tier is not None
    assert report.host_tier.stored_bytes == sum(one.num_bytes for one in told if one.way == 0)
    assert report.host_tier.loaded_bytes == sum(one.num_bytes for one in told if one.way == 1) > 0
    assert report.host_tier.in_flight == len(watch.transfers) - len(told)
    return watch


@pytest.mark.parametrize(("scale", "bytes_per_s"), [(1.0, 4e8), (3.0, 4e9), (1.0, 1e9)])
def test_host_tier_transfers_end_in_turn_and_arrive_with_the_next_step(scale: float, bytes_per_s: float) -> None:
    machine = replace(SLOW, host_bytes_per_s=2 * bytes_per_s, host_efficiency=0.5)
    watch = watched(replace(SETTINGS, hardware=machine, time_scale=scale))
    steps_end_s = np.array([end_s for _, end_s, _ in watch.steps])
    queued = 0
    for one, end_s in watch.ends(bytes_per_s / scale):
        queued += end_s > one.begun_s + one.num_bytes * scale / bytes_per_s
        later = steps_end_s[steps_end_s >= end_s]
        assert one.told_s == (later[0] if len(later) else None)
    assert queued  # some waited for others


def test_host_tier_empty_step_ends_with_a_transfer_or_an_arrival() -> None:
    made = simulation_of(planned("1GiB"), SETTINGS)
    assert made.transfers is not None
    slow = TierTransfers(made.transfers.tier, 4e8)  # than the tier was told, so that requests wait long
    watch = Watch(replace(made, transfers=slow))
    watch.made.run(AGENT)
    arrivals_s, ends_s = {one.timestamp_s for one in AGENT}, {end_s for _, end_s in watch.ends(4e8)}
    waited = {end_s for begun_s, end_s, rows in watch.steps if not rows and end_s > begun_s}
    assert waited <= arrivals_s | ends_s
    assert waited & arrivals_s
    assert waited & ends_s


class Noting(StepCost):
    """A cost model that notes the duration of every step with rows."""

    noted: list[float] = []  # noqa: RUF012 - of the one test

    def seconds(self, step: Step) -> float:
        taken = super().seconds(step)
        if len(step):
            self.noted.append(taken)
        return taken


def test_host_tier_steps_take_no_longer_with_transfers() -> None:
    plan = planned("1GiB")
    made = simulation_of(plan, replace(SETTINGS, step_by_step=True))
    watch = Watch(replace(made, cost=Noting.of(plan, hardware=H100_UNBOUNDED)))
    watch.made.run(AGENT)
    assert [end_s - begun_s for begun_s, end_s, rows in watch.steps if rows] == pytest.approx(Noting.noted)
    assert len(Noting.noted) > 1000


def test_host_tier_without_times_transfers_arrive_with_their_own_step() -> None:
    watch = watched(replace(SETTINGS, time_scale=0.0))
    assert all(one.told_s == one.begun_s for one in watch.transfers.values())


def with_copies(transfers: list[int], groups: list[int], *, loads: bool) -> Step:
    none = np.empty(0, np.int32)
    numbers, of = (np.array(column, np.int32) for column in (transfers, groups))
    copies = TierCopies(numbers, of, np.zeros_like(of), np.zeros_like(of))
    empty = (none, none, none, np.empty(0, np.bool_), Csr.empty(0), Csr.empty(0), Cells.empty(), none)
    return Step(0, -1, *empty, **{"loads" if loads else "stores": copies})  # type: ignore[arg-type]  # by name


def test_host_transfers_by_hand() -> None:
    machine = replace(H100_UNBOUNDED, host_bytes_per_s=1e6, host_efficiency=1.0)
    made = simulation_of(planned("1GiB"), replace(SETTINGS, hardware=machine))
    transfers = made.transfers
    assert transfers is not None
    sizes = [made.scheduler.cache.config.block_bytes_of(group) / 1e6 for group in (0, 5)]  # seconds of a block
    state, page = sizes
    assert transfers.next_end_s is None
    assert [len(one) for one in transfers.ended(1e9)] == [0, 0]
    transfers.begin(with_copies([3, 3, 4], [0, 5, 5], loads=False), 10.0)
    transfers.begin(with_copies([5], [5], loads=True), 11.0)  # the other direction is free
    transfers.begin(with_copies([6], [5], loads=False), 11.0)  # waits for transfers 3 and 4
    assert transfers.next_end_s == pytest.approx(11 + page)
    assert transfers.ended(11 + 0.99 * page)[0].tolist() == []
    assert transfers.ended(11 + 1.01 * page)[0].tolist() == [5]
    assert transfers.next_end_s == pytest.approx(10 + state + page)
    assert transfers.ended(10 + state + 2.01 * page)[0].tolist() == [3, 4]
    assert transfers.next_end_s == pytest.approx(10 + state + 3 * page)
    assert transfers.ended(1e3)[0].tolist() == [6]
    transfers.begin(with_copies([7], [0], loads=False), 2e3)  # idle in between
    assert transfers.next_end_s == pytest.approx(2e3 + state)


def test_disk_transfers_by_hand() -> None:
    """A disk of 1 MB/s: a spill writes what the disk lacks, and a fetch of what it evicted is lost."""
    made = simulation_of(
        planned("1GiB"), replace(SETTINGS, host_memory="4GiB", disk_memory="1GiB", disk_bytes_per_s=1e6)
    )
    transfers = made.transfers
    assert transfers is not None
    page = made.scheduler.cache.config.block_bytes_of(5) / 1e6

    def of(number: int, *keys: bytes, mark: bytes = b"") -> StoreTransfer:
        return StoreTransfer(number, np.full(len(keys), 5, np.int32), np.arange(len(keys), dtype=np.int32), keys, mark)

    step = with_copies([], [], loads=False)
    transfers.begin(replace(step, spills=(of(1, b"a", b"b", mark=b"m"),)), 10.0)
    assert transfers.next_end_s == pytest.approx(10 + 2 * page)
    assert [one.tolist() for one in transfers.ended(10 + 2.01 * page)] == [[1], []]
    transfers.begin(replace(step, spills=(of(2, b"b", b"c", mark=b"m"),)), 100.0)  # b is there
    assert transfers.next_end_s == pytest.approx(100 + page)
    transfers.begin(replace(step, fetches=(of(3, b"a"), of(4, b"a", b"x"))), 100.0)
    assert [one.tolist() for one in transfers.ended(100 + 1.01 * page)] == [[2, 3], []]
    assert [one.tolist() for one in transfers.ended(100 + 3.01 * page)] == [[], [4]]


# -- what is kept and loaded


def test_host_tier_evicts_as_the_device_does() -> None:
    shares = TenantShares.parse(["one=10%..50%"])
    by_value = simulation_of(planned("1GiB"), replace(SETTINGS, shares=shares))
    by_use = simulation_of(planned("1GiB"), replace(SETTINGS, eviction="lru"))
    for made, ranks in ((by_value, True), (by_use, False)):
        assert made.transfers is not None
        host, device = made.transfers.tier.host.statistics(), made.scheduler.cache.statistics()
        assert [one.tenant for one in host.tenants] == [one.tenant for one in device.tenants]
        assert bool(host.tenants) == bool(host.ends) == ranks


def test_disk_keeps_what_the_host_evicts() -> None:
    few = replace(SETTINGS, host_memory="1GiB")
    alone, large, small, slow = (
        replay(AGENT, planned("1GiB"), one)
        for one in (
            few,
            replace(few, disk_memory="64GiB", disk_bytes_per_s=1e12),
            replace(few, disk_memory="1GiB", disk_bytes_per_s=1e12),
            replace(few, disk_memory="64GiB", disk_bytes_per_s=1e6),
        )
    )
    assert large.host_tier is not None
    assert slow.host_tier is not None
    assert large.host_tier.fetches
    assert not large.host_tier.fetches_lost
    assert alone.hit_tokens is not None
    assert small.hit_tokens is not None
    assert large.hit_tokens is not None
    # a disk as small as the host evicts what the host gave up for it: with other seeds it finds less than none
    assert max(alone.hit_tokens, small.hit_tokens) < large.hit_tokens
    assert not slow.host_tier.fetches  # computing is faster


def test_disk_settings_are_checked() -> None:
    for settings, said in (
        ({"disk_memory": "1GiB"}, "needs host memory"),
        ({"host_memory": "1GiB", "disk_memory": "much"}, "not a size"),
        ({"host_memory": "1GiB", "disk_memory": "1GiB", "disk_bytes_per_s": 0.0}, "above 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            ReplaySettings(**settings)


def test_host_tier_loads_nothing_that_is_faster_to_compute() -> None:
    slow = replace(H100_UNBOUNDED, host_bytes_per_s=1e8)
    report = replay(AGENT, planned("1GiB"), replace(SETTINGS, hardware=slow))
    assert report.host_tier is not None
    assert report.host_tier.stores
    assert not report.host_tier.loads


def test_step_cost_tokens_of_a_prompt_take_the_time_of_their_step() -> None:
    cost = StepCost.of(planned("1GiB"), hardware=H100_UNBOUNDED, time_scale=2.0)
    rows = np.zeros(1, np.int32), np.zeros(1, np.int32), np.array([4096], np.int32)
    ids = Csr(np.array([0, 4096]), np.zeros(4096, np.int32))
    step = Step(7, 6, *rows, np.ones(1, np.bool_), ids, Csr.empty(1), Cells.empty(), np.empty(0, np.int32))
    assert cost.prompt_tokens_per_s(4096) == 4096 / cost.seconds(step)
    assert cost.host_bytes_per_s == 64e9 * 0.8 / 2


def test_host_tier_of_replicas_is_summed() -> None:
    plan = planned("1GiB")
    one, two = (replay_replicas(AGENT, plan, SETTINGS, replicas=count) for count in (1, 2))
    assert one.whole.host_tier == replay(AGENT, plan, SETTINGS).host_tier
    tiers = [of.host_tier for of in two.replicas]
    assert two.whole.host_tier is not None
    assert all(tiers)
    assert two.whole.host_tier.stores == sum(of.stores for of in tiers if of is not None) > 0


# -- settings that cannot work


@pytest.mark.parametrize("memory", ["40 apples", -1, 1.5, True])
def test_host_memory_that_is_no_size_is_rejected(memory: object) -> None:
    with pytest.raises(ConfigError, match=r"host_memory \(--host-memory\): "):
        ReplaySettings(host_memory=memory)  # type: ignore[arg-type]  # on purpose


def test_host_memory_below_two_slabs_is_rejected() -> None:
    with pytest.raises(CapacityError, match=r"host_memory \(--host-memory\): 1 MiB is too small for a tier"):
        simulation_of(planned("1GiB"), replace(SETTINGS, host_memory="1MiB"))


def test_host_memory_without_prefix_caching_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"\(--host-memory\) has no effect, as prefix caching is off \(as asked for"):
        simulation_of(planned("1GiB"), replace(SETTINGS, prefix_caching=False))


# -- the command

COMMAND = (
    *("replay", "workload:agent", "--seed", "3", "--limit", "40", "--hours", "0.02", "--rate", "4", "--model", QWEN),
    *("--memory", "1GiB", "--hardware", "h100-unbounded"),
)


def test_host_tier_in_the_text_of_a_replay() -> None:
    text = run(*COMMAND, "--host-memory", "8GiB").stdout
    report = replay(AGENT, planned("1GiB"), SETTINGS)
    host = report.host_tier
    assert host is not None
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "host memory 8 GiB, 51.2 GB/s each way",
        f"hit tokens {report.hit_tokens:,}",
        f"loaded from host memory {host.loaded_tokens:,}",
    ):
        assert line in lines
    (stored,) = (line for line in lines if line.startswith("stored in host memory"))
    assert stored.endswith(f" {host.stores:,} resume points, {host.stores_refused:,} refused")
    assert any(line.endswith(f" {host.loads:,} prefixes, {host.loads_refused:,} refused") for line in lines)
    assert max(map(len, text.splitlines())) <= 80
    assert "host memory" not in run(*COMMAND).stdout


def test_host_tier_in_the_document_of_a_replay() -> None:
    made = document(*COMMAND, "--host-memory", "8GiB", "--host-bandwidth", "20GB/s")
    machine = replace(H100_UNBOUNDED, host_bytes_per_s=20e9, host_efficiency=1.0)
    report = replay(AGENT, planned("1GiB"), replace(SETTINGS, hardware=machine))
    assert report.host_tier is not None
    assert made["host_tier"] == asdict(report.host_tier)
    assert made["settings"]["host_memory"] == "8GiB"
    assert made["settings"]["hardware"]["host_bytes_per_s"] == 20e9
    assert document(*COMMAND)["host_tier"] is None


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--host-memory", "8GiB", "--layout", "reference"), "--eviction hazard"),
        (("--host-memory", "much"), "--host-memory"),
        (("--host-memory", "8GiB", "--no-prefix-caching"), "--host-memory"),
        (("--host-bandwidth", "20GB/s"), "--host-bandwidth has no effect without --host-memory"),
        (("--host-memory", "8GiB", "--host-bandwidth", "fast"), "--host-bandwidth must be a size per second such as"),
    ],
)
def test_host_tier_options_that_cannot_work_are_named(options: tuple[str, ...], what: str) -> None:
    assert what in error(*COMMAND, *options)
