"""TierConnector in the natural layout without vLLM: an engine in its manner with host memory; both sides alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_vllm_natural import FULL, HYBRID, OPTIONS, SMALL, STATE, WINDOWS, planned, play

from engine_groups import SIZE, Asked, Sampling
from hybridkv.cache import AllBlocksCleared, BlockStored
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.step import NO_TIER_COPIES, Step, StoreTransfer, TierCopies
from hybridkv.stores import DiskStore, StoreUrl
from hybridkv.stores.disk_view import DiskView
from hybridkv.stores.marks import put_mark
from hybridkv.vllm.natural import Options
from hybridkv.vllm.natural_tier import NaturalTierRequests, NaturalTierWorker, Open, _sizes, host_tier
from natural_engine import Engine
from natural_host import Host

HOST = 2 << 20
IDENTITY = bytes(16)
DISK = 32 << 20


def tiered(
    specs: Any = HYBRID,  # noqa: ANN401 - of vLLM's kinds
    memory: int = SMALL,
    host_bytes: int = HOST,
    options: Options = OPTIONS,
    ranks: int = 1,
    *,
    events: bool = False,
    store: Open | None = None,
    behind: str = "store",
) -> NaturalTierRequests:
    made, manager = planned(memory, specs, options, events=events, tiered=True)
    manager.tier = host_tier(manager.cache, made, host_bytes, store, IDENTITY)
    return NaturalTierRequests(manager, manager.tier, ranks, IDENTITY, behind)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("specs", "delay", "loses"), [(HYBRID, 0, 0), (HYBRID, 2, 0), (HYBRID, 1, 3), (WINDOWS, 2, 5), ((STATE,), 1, 0)]
)
def test_requests_come_up_and_tokens_match_no_cache(specs: Any, delay: int, loses: int, *, ahead: bool) -> None:  # noqa: ANN401
    requests = tiered(specs, SMALL if len(specs) > 1 else 16 << 10)
    host = Host(requests, delay, loses)
    engine = Engine(requests._manager, ahead=ahead, host=host)
    hits, wrong = play(engine)
    assert not wrong
    counts = requests.take_counts()
    assert counts["host_stores"]
    assert counts["host_loaded_tokens"] >= counts["host_hit_tokens"] > 0
    assert counts.get("host_lost", 0) == host.lost
    assert bool(loses) is bool(host.lost)
    assert hits >= 6
    assert not requests.is_busy
    assert not requests._manager.looked_up
    assert requests.take_counts() == {}


def swapped(copies: TierCopies) -> TierCopies:
    return replace(copies, source=copies.source[::-1].copy())


@pytest.mark.parametrize(
    "fault",
    [
        lambda step: replace(step, loads=swapped(step.loads)),
        lambda step: replace(step, stores=swapped(step.stores)),
        lambda step: replace(step, loads=TierCopies(*(column[:-1] for column in columns(step.loads)))),
    ],
)
def test_wrong_transfers_give_wrong_tokens(fault: Any) -> None:  # noqa: ANN401 - of steps
    requests = tiered()
    assert play(Engine(requests._manager, host=Host(requests, 1, sees=fault)))[1]


def columns(copies: TierCopies) -> tuple[np.ndarray, ...]:
    return copies.transfer, copies.group, copies.source, copies.destination


def test_transfer_counts_when_all_ranks_have_told() -> None:
    requests = tiered(ranks=2)
    engine = Engine(requests._manager, host=Host(requests))
    engine.add("a", [*range(1, 40)], 8)
    for _ in range(6):
        engine.step()
    (number,) = requests._answers
    assert requests._tier.num_in_flight == 1
    requests.heard({number: [1]})
    assert requests._tier.num_in_flight == 0
    assert requests.take_counts()["host_stores"] == 1


def test_transfer_that_one_rank_lost_is_lost() -> None:
    requests = tiered(ranks=2)
    engine = Engine(requests._manager, host=Host(requests))
    engine.add("a", [*range(1, 40)], 8)
    for _ in range(6):
        engine.step()
    (number,) = requests._answers
    requests.heard({number: [0]})
    assert requests.take_counts() == {"host_lost": 1}


def test_requests_that_read_no_cache_or_end_do_not_wait() -> None:
    requests = tiered()
    manager = requests._manager
    request = Asked("a", [1, 2, 3])
    assert requests.matched(request, 0) == (0, False), "nobody looked it up"
    manager.get_computed_blocks(request)
    assert list(manager.looked_up) == ["a"]
    assert requests.matched(request, 0) == (0, False)
    requests.failed(["a"])
    requests.finished(request)
    requests.finished(request)
    assert not manager.looked_up


def test_reset_clears_both_and_events_name_both_media() -> None:
    requests = tiered(events=True)
    engine = Engine(requests._manager, host=Host(requests))
    play(engine)
    stored = {one.medium for one in requests._manager.take_events() if isinstance(one, BlockStored)}
    assert stored == {"GPU", "CPU"}
    assert requests.reset()
    assert isinstance(requests._manager.take_events()[0], AllBlocksCleared)
    request = Asked("again", engine.asked[0].all_token_ids)
    requests._manager.get_computed_blocks(request)
    assert requests.matched(request, 0) == (0, False)


def test_host_memory_that_is_too_small_and_other_evictions_are_named() -> None:
    with pytest.raises(CapacityError, match="is too small for a tier"):
        tiered(host_bytes=1)
    with pytest.raises(ConfigError, match="eviction lru knows no resume points"):
        tiered((FULL,), options=Options(SIZE, eviction="lru"))


# -- the worker


def work_of(requests: NaturalTierRequests, tokens: int, **transfers: Any) -> Any:  # noqa: ANN401 - fields of a Step
    made = requests.work(SimpleNamespace(total_num_scheduled_tokens=tokens), None)
    return replace(made, step=replace(made.step, **transfers))


def copy(number: int, group: int, source: int, target: int) -> TierCopies:
    return TierCopies(*(np.array([one], np.int32) for one in (number, group, source, target)))


def test_worker_copies_blocks_down_and_up() -> None:
    requests, worker = tiered(), NaturalTierWorker()
    ours = requests._manager.cache.config
    slabs = ours.slabs
    assert slabs is not None
    arena = torch.arange(ours.arena_bytes, dtype=torch.int64).to(torch.uint8)
    device = SimpleNamespace(config=ours, arena=arena)
    assert worker.answers() == {}
    worker.load()
    size = ours.block_bytes_of(0)
    down, up = ours.null_blocks_of(0) + 1, ours.null_blocks_of(0) + 2
    before = arena.clone()
    worker.begin(work_of(requests, 1, stores=copy(0, 0, down, down)), device)
    arena[down * size : (down + 1) * size] = 0  # the step changes it
    worker.load()
    assert worker.answers() == {0: 1}
    assert worker.answers() == {}
    worker.begin(work_of(requests, 0, loads=copy(1, 0, down, up)), device)
    worker.load()
    assert worker.answers() == {1: 1}
    before[up * size : (up + 1) * size] = before[down * size : (down + 1) * size]
    before[down * size : (down + 1) * size] = 0
    assert torch.equal(arena, before)
    worker.close()


def test_worker_without_the_first_step_says_so() -> None:
    requests = tiered()
    first, second = work_of(requests, 1), work_of(requests, 1)
    assert first.host is not None
    assert (first.step.after, second.step.after, second.host) == (-1, 0, None)
    assert isinstance(first.step, Step)
    assert first.step.loads is NO_TIER_COPIES
    with pytest.raises(ConfigError, match="the first step, which has the layout of host memory"):
        NaturalTierWorker().begin(second, SimpleNamespace())


def of_store(folder: Path, rank: int) -> Open:
    del rank
    return StoreUrl(f"file://{folder}").open


def of_disk(folder: Path, rank: int) -> Open:
    return partial(DiskStore, folder / str(rank), DISK)


@pytest.mark.parametrize("opener", [of_store, of_disk])
def test_workers_of_two_processes_share_a_store_each_with_its_rank(tmp_path: Path, opener: Any) -> None:  # noqa: ANN401 - of both
    requests = tiered()
    ours = requests._manager.cache.config
    size, block = ours.block_bytes_of(0), ours.null_blocks_of(0) + 1
    keys = (b"%061d" % 0,)
    transfer = StoreTransfer(1, np.zeros(1, np.int32), np.array([block], np.int32), keys, b"%049d" % 0, b"")
    arrived = list[dict[int, int]]()

    def do(worker: NaturalTierWorker, device: Any, first: Any, **transfers: Any) -> None:  # noqa: ANN401 - of a Step
        made = replace(first, step=replace(first.step, **transfers))
        worker.begin(made, device)
        worker.load()
        for _ in range(1000):
            if got := worker.answers():
                arrived.append(got)
                return
            worker._step = made.step
        raise AssertionError("no answer")

    first = work_of(requests, 0)
    for rank, content in enumerate((5, 6)):
        worker = NaturalTierWorker(opener(tmp_path, rank), rank)
        arena = torch.full((ours.arena_bytes,), content, dtype=torch.uint8)
        device = SimpleNamespace(config=ours, arena=arena)
        do(worker, device, first, stores=copy(0, 0, block, block))
        do(worker, device, replace(work_of(requests, 0), host=None), spills=(transfer,))
        worker.close()
    assert [one.get(1) for one in arrived] == [None, 1, None, 1]
    for rank, kept in ((0, 5), (1, 6), (2, None)):
        worker = NaturalTierWorker(opener(tmp_path, rank), rank)
        arena = torch.zeros(ours.arena_bytes, dtype=torch.uint8)
        device = SimpleNamespace(config=ours, arena=arena)
        do(worker, device, first, fetches=(replace(transfer, mark=b""),))
        assert arrived[-1] == {1: int(kept is not None)}
        if kept is not None:
            do(worker, device, replace(work_of(requests, 0), host=None), loads=copy(2, 0, block, block))
            assert arena[block * size : (block + 1) * size].tolist() == [kept] * size
        worker.close()
    store = opener(tmp_path, 0)(IDENTITY, _sizes(first.host, first.hash_block))
    assert store.exists([b"%049d" % 0]) == [True], "of the first rank"
    store.close()


@pytest.mark.parametrize("in_memory", [False, True])
def test_host_tier_looks_into_its_store(tmp_path: Path, *, in_memory: bool) -> None:
    requests = tiered(store=StoreUrl(f"file://{tmp_path}").open)
    assert requests._tier.has_store
    engine = Engine(requests._manager, host=Host(requests))
    asked = engine.add("a", [*range(1, 40)], 8)
    asked.sampling_params = Sampling({"hybridkv_hints": {"in_memory": in_memory}})
    engine.step()
    for _ in range(200):
        engine.step()
        if requests._tier.statistics().spilling:
            break
    counts = requests._tier.statistics()
    assert bool(counts.spilling) is not in_memory, "what arrived on the host goes to the store, unless hints say no"
    assert counts.stores
    assert asked.num_computed_tokens


PROMPT = [*range(1, 40)]


def spilled(requests: NaturalTierRequests) -> tuple[StoreTransfer, ...]:
    """The spills of an engine that computes a prompt."""
    steps = list[Step]()

    def see(step: Step) -> Step:
        steps.append(step)
        return step

    engine = Engine(requests._manager, host=Host(requests, sees=see))
    engine.add("a", PROMPT, 8)
    for _ in range(200):
        engine.step()
    return tuple(one for step in steps for one in step.spills)


def fetched(requests: NaturalTierRequests) -> tuple[int | None, tuple[StoreTransfer, ...]]:
    """What a scheduler answers for the prompt, and what its first step fetches."""
    request = Asked("a", PROMPT)
    requests._manager.get_computed_blocks(request)
    for _ in range(500):
        tokens, _ = requests.matched(request, 0)
        made = work_of(requests, 0)
        if tokens == 0 or made.step.fetches:
            return tokens, made.step.fetches
    raise AssertionError("no answer")


def test_scheduler_finds_what_the_first_rank_of_another_process_left_on_its_disk(tmp_path: Path) -> None:
    """The first step of a second process fetches it: nobody has opened the disk before."""
    view, requests = partial(DiskView, tmp_path / "0", DISK), tiered(store=partial(DiskView, tmp_path / "0", DISK))
    first, spills = requests._tier.host, spilled(requests)
    hash_block = 1 if first.hasher is None else first.hasher.block_size
    sizes = _sizes(first.config, hash_block)
    assert spills
    assert fetched(tiered(store=view)) == (0, ()), "nothing was written"
    with DiskStore(tmp_path / "0", DISK, IDENTITY, sizes) as disk:
        for one in spills:
            blocks = [bytes(first.config.block_bytes_of(group)) for group in one.group.tolist()]
            assert all(disk.put(one.keys, [memoryview(block) for block in blocks]))
            assert put_mark(disk, one.mark, one.tail, hash_block)
        again = tiered(store=view, behind="disk")
        tokens, (fetch,) = fetched(again)
        assert tokens is None
        assert set(fetch.keys) <= {key for one in spills for key in one.keys}
        again.heard({fetch.number: [1]})
        assert again.take_counts()["disk_loads"] == 1
        lost = tiered(store=view, ranks=2)
        _, (fetch,) = fetched(lost)
        lost.heard({fetch.number: [1, 0]})
        assert fetched(lost) == (0, ()), "a rank lacks a block, so the tokens are computed"
        disk.remove(fetch.keys[-1:])
        assert not set(fetch.keys[-1:]) & {key for one in fetched(tiered(store=view))[1] for key in one.keys}
    with pytest.raises(ConfigError, match="was made for another model"):
        view(b"other", sizes)
