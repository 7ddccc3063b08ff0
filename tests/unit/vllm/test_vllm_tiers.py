"""Both sides of TierConnector without vLLM: look-ups, loads and stores in the scheduler, bytes in the worker, options.

Whole engines are compared beside vLLM itself: tests/vllm/tier_duel.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_groups import Asked, CircularBufferSpec, Config, FullAttentionSpec, Group, MambaSpec, SlidingWindowSpec
from hybridkv.errors import ConfigError
from hybridkv.stores import GroupNeeds, MemoryStore, PrefetchLimits, PrefixRules, StoreStack, StoreUrl
from hybridkv.stores.changes import Changes
from hybridkv.vllm import tier_requests
from hybridkv.vllm.manager import Block
from hybridkv.vllm.specs import WORKER
from hybridkv.vllm.tier_options import TierOptions, folder_of, identity_of, needs_of, refuse_tiers
from hybridkv.vllm.tier_requests import Find, Load, Store, TierRequests, TierWork, key
from hybridkv.vllm.tier_worker import TierWorker

RULES = PrefixRules((GroupNeeds(4), GroupNeeds(4, window=5), GroupNeeds(8, is_state=True)), unit=8, hash_tokens=4)
MiB = 1 << 20


class Blocks:
    """Blocks of all requests; ``get_blocks`` as vLLM's manager. ids: of each group, 0 for null. unhashed: ids."""

    def __init__(self, **ids: tuple[list[int], ...]) -> None:
        self.ids, self.unhashed = ids, set[int]()

    def get_blocks(self, name: str) -> Any:  # noqa: ANN401 - vLLM's
        ids = self.ids[name]
        blocks = [[Block(one, None if one in self.unhashed else b"hash", one == 0) for one in own] for own in ids]
        return SimpleNamespace(blocks=blocks, get_block_ids=lambda: ids)


@dataclass
class Step:
    """vLLM's SchedulerOutput, as far as it is read."""

    num_scheduled_tokens: Mapping[str, int]
    states: Mapping[str, list[tuple[int, int, int]]]

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def kv_connector_block_state(self) -> Any:  # noqa: ANN401 - vLLM's
        return SimpleNamespace(boundary_state_offloads=self.states)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(requests: TierRequests, blocks: Blocks | None = None, **tokens: int) -> TierWork:
    return requests.work(Step(tokens, {}), blocks)


def asked(name: str = "a", tokens: int = 25, first: int = 1) -> Any:  # noqa: ANN401 - vLLM's
    return Asked(name, [first + number % 90 for number in range(tokens)])


def stored(requests: TierRequests, request: Any) -> TierWork:  # noqa: ANN401 - vLLM's
    """The work of a step that computes all tokens of ``request``, and hands over the states of its boundaries."""
    assert requests.matched(request, 0) == (0, False)
    columns = request.num_tokens // 4
    table = ([*range(1, columns + 1)], [0, *range(31, columns + 30)], [0] * (columns // 2))
    blocks = Blocks(**{request.request_id: table})
    states = [(2, 60 + number, 8 * number) for number in range(1, request.num_tokens // 8 + 1)]
    return requests.work(Step({request.request_id: request.num_tokens}, {request.request_id: states}), blocks)


def made(ranks: int = 1, *, remembers: bool = False, clock: Clock | None = None) -> TierRequests:
    return TierRequests(RULES, ranks, remembers=remembers, clock=clock or Clock())


# -- stores


def test_filled_blocks_are_stored_once_under_the_hash_of_their_end() -> None:
    requests, request = made(), asked()
    work = stored(requests, request)
    hashes = request.block_hashes
    assert (
        work.stores
        == {
            0: Store([1, 2, 3, 4, 5, 6], hashes),
            1: Store([31, 32, 33, 34, 35], hashes[1:]),  # the null block is no block
            2: Store([61, 62, 63], hashes[1::2]),
        }
    )
    assert work.runs
    other = asked("b")
    requests.matched(other, 0)
    table = Blocks(b=([*range(1, 7)], [*range(31, 37)], [0, 0, 61]))
    assert step(requests, table, b=25).stores == {1: Store([31], hashes[:1])}, "what is known is stored again"


def test_blocks_are_stored_in_the_step_that_fills_them() -> None:
    requests, request = made(), asked()
    blocks = Blocks(a=([*range(1, 8)], [0] * 7, []))
    requests.matched(request, 0)
    for computed, tokens, ids in ((0, 3, []), (3, 1, [1]), (4, 7, [2]), (11, 1, [3]), (12, 13, [4, 5, 6])):
        request.num_computed_tokens = computed
        assert step(requests, blocks, a=tokens).stores.get(0, Store()).blocks == ids
    request.num_computed_tokens = 25
    assert step(requests, blocks, a=3).stores == {}, "tokens that are no tokens yet fill a block"
    request.append(26, 27, 28)
    assert step(requests, blocks, a=4).stores[0].blocks == [7]


def test_blocks_that_vllm_does_not_publish_are_not_stored() -> None:
    requests, request = made(), asked()
    blocks = Blocks(a=([*range(1, 7)], [*range(31, 37)], []))
    blocks.unhashed = {2, 31, 32, 33}
    requests.matched(request, 0)
    work = step(requests, blocks, a=25)
    assert {group: one.blocks for group, one in work.stores.items()} == {0: [1, 3, 4, 5, 6], 1: [34, 35, 36]}


def test_states_are_stored_only_if_handed_over_by_a_request_of_the_step_at_a_block() -> None:
    requests, blocks = made(), Blocks(a=([], [], [0, 77]), b=([], [], [0]))
    for name in ("a", "b"):
        requests.matched(asked(name, first=1 if name == "a" else 40), 0)
    states = {"a": [(2, 62, 12), (2, 61, 8), (2, 63, 400)], "b": [(2, 64, 8)], "gone": [(2, 65, 8)]}
    work = requests.work(Step({"a": 12}, states), blocks)
    assert work.stores == {2: Store([61], [asked().block_hashes[1]])}


# -- look-ups


def test_prefix_is_asked_for_answered_and_loaded_into_the_blocks_that_it_needs() -> None:
    requests = made()
    stored(requests, asked())
    request = asked("b")
    assert requests.matched(request, 8) == (None, False)
    (find,) = step(requests).finds
    assert (find.start, find.most, find.hashes) == (8, 24, request.block_hashes[2:6])
    assert requests.matched(request, 8) == (None, False)
    assert step(requests).finds == [], "it is asked for twice"
    requests.heard({find.number: [24]})
    assert requests.matched(request, 8) == (16, True)
    requests.allocated(request, Blocks(b=([*range(11, 18)], [0, *range(21, 27)], [0, 0, 9])).get_blocks("b"), 16)
    work = step(requests)
    assert work.loads == [Load("b", find.number, 24, ({2: 13, 3: 14, 4: 15, 5: 16}, {4: 24, 5: 25}, {2: 9}))]
    assert work.drops == []
    requests.allocated(request, Blocks(b=([], [], [])).get_blocks("b"), 0)  # vLLM's second call
    assert step(requests) == TierWork(bytes(8), [], [], [], {}, runs=False)


def test_prompt_is_never_hit_with_its_last_token() -> None:
    requests = made()
    stored(requests, asked(tokens=25))
    assert requests.matched(asked("b", 24), 0) == (None, False)
    assert step(requests).finds[0].most == 16
    assert requests.matched(asked("c", 24), 16) == (0, False)


def test_unknown_prefix_is_asked_for_only_where_a_store_remembers() -> None:
    for remembers in (False, True):
        requests = made(remembers=remembers)
        assert requests.matched(asked(), 0) == ((None, False) if remembers else (0, False))
        assert len(step(requests).finds) == remembers
    assert made(remembers=True).matched(asked(tokens=8), 0) == (0, False)
    skips = asked()
    skips.skip_reading_prefix_cache = True
    assert made(remembers=True).matched(skips, 0) == (0, False)


def test_ranks_that_found_different_prefixes_are_asked_for_the_shortest() -> None:
    requests, request = made(ranks=2, remembers=True), asked()
    requests.matched(request, 0)
    (find,) = step(requests).finds
    requests.heard({find.number: [24]})
    assert requests.matched(request, 0) == (None, False)
    requests.heard({find.number: [8]})
    work = step(requests)
    assert work.drops == [find.number]
    (again,) = work.finds
    assert (again.start, again.most, again.hashes) == (0, 8, request.block_hashes[:2])
    requests.heard({find.number: [24], again.number: [8, 8]})
    assert requests.matched(request, 0) == (8, True)


def test_ranks_of_which_one_found_nothing_are_not_asked_again() -> None:
    requests, request = made(ranks=2, remembers=True), asked()
    requests.matched(request, 0)
    (find,) = step(requests).finds
    requests.heard({find.number: [24, 0]})
    assert requests.matched(request, 0) == (0, False)
    work = step(requests)
    assert (work.finds, work.drops) == ([], [find.number])


@pytest.mark.parametrize("answer", [8, 0])
def test_prefix_that_is_no_longer_than_the_devices_is_dropped(answer: int) -> None:
    requests, request = made(remembers=True), asked()
    requests.matched(request, 0)
    (find,) = step(requests).finds
    requests.heard({find.number: [answer]})
    assert requests.matched(request, 8) == (0, False)
    assert step(requests).drops == [find.number]
    assert requests.matched(request, 8) == (0, False)
    assert step(requests).finds == [], "it is asked for again before it is admitted"


def test_prefix_is_asked_for_again_if_the_device_lost_what_it_builds_on() -> None:
    requests, request = made(remembers=True), asked()
    requests.matched(request, 16)
    (find,) = step(requests).finds
    requests.heard({find.number: [24]})
    assert requests.matched(request, 8) == (None, False)
    work = step(requests)
    assert work.drops == [find.number]
    assert [(one.start, one.most) for one in work.finds] == [(8, 24)]


def test_slow_look_up_is_a_miss_after_some_seconds_and_steps() -> None:
    clock = Clock()
    requests, request = made(remembers=True, clock=clock), asked()
    requests.matched(request, 0)
    (find,) = step(requests).finds
    clock.now = 100.0
    for _ in range(tier_requests.PATIENCE_STEPS - 1):
        assert requests.matched(request, 0) == (None, False)
        step(requests)
    clock.now = tier_requests.PATIENCE_S - 0.1
    step(requests)
    assert requests.matched(request, 0) == (None, False)
    clock.now = tier_requests.PATIENCE_S
    assert requests.matched(request, 0) == (0, False)
    assert step(requests).drops == [find.number]
    requests.heard({find.number: [24]})
    assert requests.matched(request, 0) == (0, False)


def test_requests_wait_for_their_turn_and_not_forever() -> None:
    clock, most = Clock(), tier_requests.MOST_LOOKING
    requests = made(remembers=True, clock=clock)
    every = [asked(str(number)) for number in range(most + 2)]
    assert {requests.matched(one, 0) for one in every} == {(None, False)}
    finds = step(requests).finds
    assert len(finds) == most
    requests.finished(every[0])
    assert requests.matched(every[most], 0) == (None, False)
    work = step(requests)
    assert (work.drops, len(work.finds)) == ([finds[0].number], 1)
    clock.now = 100.0
    for _ in range(tier_requests.PATIENCE_STEPS):
        step(requests)
    assert requests.matched(every[-1], 0) == (0, False)


def test_request_that_ends_or_is_admitted_without_a_load_gives_its_prefix_back() -> None:
    for end in ("finished", "allocated"):
        requests, request = made(remembers=True), asked()
        requests.matched(request, 0)
        (find,) = step(requests).finds
        if end == "finished":
            requests.finished(request)
            assert not requests._requests
        else:
            requests.allocated(request, Blocks(a=([], [], [])).get_blocks("a"), 0)
        assert step(requests).drops == [find.number]
        requests.heard({find.number: [24]})  # too late


def test_request_whose_load_failed_is_computed() -> None:
    requests, request = made(remembers=True), asked()
    requests.matched(request, 0)
    (find,) = step(requests).finds
    requests.heard({find.number: [24]})
    assert requests.matched(request, 0) == (24, True)
    table = Blocks(a=([*range(1, 8)], [*range(11, 18)], [0, 0, 9])).get_blocks("a")
    requests.allocated(request, table, 24)
    requests.failed(["a", "unknown"])
    assert requests.matched(request, 0) == (0, False)
    assert step(requests).finds == []
    requests.allocated(request, table, 0)
    assert requests.matched(request, 0) == (None, False), "after a preemption it may be looked up again"


def test_blocks_that_a_look_up_missed_are_stored_again() -> None:
    requests = made()
    stored(requests, asked())
    request = asked("b")
    requests.matched(request, 0)
    (find,) = step(requests).finds
    requests.heard({find.number: [8]})
    assert requests.matched(request, 0) == (8, True)
    table = Blocks(b=([*range(1, 8)], [*range(11, 18)], [0, 0, 9]))
    requests.allocated(request, table.get_blocks("b"), 8)
    request.num_computed_tokens = 8
    work = requests.work(Step({"b": 17}, {"b": [(2, 9, 24)]}), table)
    assert {group: one.blocks for group, one in work.stores.items()} == {0: [3, 4, 5, 6], 1: [13, 14, 15, 16], 2: [9]}


def test_reset_forgets_all_blocks_and_changes_all_keys() -> None:
    requests = made()
    first = stored(requests, asked())
    waits = asked("b")
    requests.matched(waits, 0)
    (find,) = step(requests).finds
    requests.reset()
    work = step(requests)
    assert work.drops == [find.number]
    assert requests.matched(asked("c"), 0) == (0, False)
    again = stored(requests, asked("d"))
    assert again.stores == first.stores
    assert len(again.epoch) == 8
    assert again.epoch == work.epoch != first.epoch
    requests.reset()
    assert step(requests).epoch not in {first.epoch, again.epoch}


def test_keys_differ_by_each_part_and_fit_into_every_store() -> None:
    parts = (bytes(16), bytes(8), 3, sha256(b"").digest())
    keys = {key(*parts), key(bytes([1] * 16), *parts[1:]), key(parts[0], b"", *parts[2:]),
            key(*parts[:2], 300, parts[3]), key(*parts[:3], sha256(b"1").digest())}  # fmt: skip
    assert len(keys) == 5
    assert max(map(len, keys)) + 2 <= 64, "a key of a piece has two bytes more"


# -- the worker


@dataclass(frozen=True)
class Tensor:
    """vLLM's KVCacheTensor."""

    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int


BLOCKS, PAGE = 12, 40


@dataclass
class Layout:
    """vLLM's KVCacheConfig: layers of three groups share two tensors; the last layer of the states has none."""

    kv_cache_layout: str = "LBNHC"
    num_blocks: int = BLOCKS

    def __post_init__(self) -> None:
        spec = SimpleNamespace(page_size_bytes=PAGE)
        self.kv_cache_groups: Any = [
            SimpleNamespace(layer_names=names, kv_cache_spec=spec)
            for names in (["a", "b"], ["c", "d"], ["s", "shared"])
        ]
        region = BLOCKS * PAGE
        self.kv_cache_tensors = [Tensor(["a", "b"], region, PAGE, 0), Tensor(["c", "d"], region, PAGE, 0),
                                 Tensor(["s"], region, PAGE, region)]  # fmt: skip


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.tensor(list(random.Random(1).randbytes(2 * BLOCKS * PAGE)), dtype=torch.uint8)


def views(memory: torch.Tensor) -> Mapping[str, Any]:
    return {name: [memory[4:]] if name == "s" else memory.view(torch.float32) for name in "abcds"}


@pytest.fixture
def worker(memory: torch.Tensor) -> Iterator[TierWorker]:
    made = TierWorker(
        Layout(),
        views(memory),
        RULES,
        identity=b"i" * 16,
        limits=PrefetchLimits(MiB, MiB),
        open_stores=lambda sizes: StoreStack({"host": MemoryStore(MiB if sizes == (80, 80, 40) else 1)}),
    )
    yield made
    made.close()


def page(memory: torch.Tensor, layer: int, block: int) -> bytes:
    first = (layer * BLOCKS + block) * PAGE
    return bytes(memory[first : first + PAGE].tolist())


def work_of(**parts: Any) -> TierWork:  # noqa: ANN401 - vLLM's
    return replace(TierWork(bytes(8), [], [], [], {}, runs=False), **parts)


def waited(answer: Any) -> Any:  # noqa: ANN401 - vLLM's
    for _ in range(2000):
        found = answer()
        if found not in ({}, (set(), set())):
            return found
    raise AssertionError("no answer")


HASHES = [b"%032d" % number for number in range(4)]
STORES = {0: Store([1, 2, 3, 4], HASHES), 1: Store([6, 5], HASHES[2:]), 2: Store([7], HASHES[3:])}


def test_blocks_come_back_into_other_blocks_byte_for_byte(worker: TierWorker, memory: torch.Tensor) -> None:
    was = memory.clone()
    worker.store(work_of(stores=STORES))
    worker._prefetcher._writer.submit(lambda: None).result()
    memory.zero_()
    worker.begin(work_of(finds=[Find(0, 0, 19, HASHES)]))
    assert waited(worker.answers) == {0: 16}
    worker.load(work_of(loads=[Load("r", 0, 16, ({0: 8, 1: 9, 2: 2, 3: 1}, {2: 10, 3: 11}, {1: 3}))]))
    assert waited(worker.loaded) == ({"r"}, set())
    moved = {8: 1, 9: 2, 2: 3, 1: 4, 10: 6, 11: 5}  # blocks of two pages
    for block in range(BLOCKS):
        for layer in (0, 1):
            source = moved.get(block, 7 if (block, layer) == (3, 1) else None)  # the state has a page in layer 1 only
            wanted = bytes(PAGE) if source is None else page(was, layer, source)
            assert page(memory, layer, block) == wanted, (block, layer)


def test_blocks_are_stored_as_they_are_when_the_step_ends(worker: TierWorker, memory: torch.Tensor) -> None:
    was = memory.clone()
    worker.store(work_of(stores=STORES))
    memory.zero_()  # the next step
    worker._prefetcher._writer.submit(lambda: None).result()
    worker.begin(work_of(finds=[Find(0, 0, 16, HASHES)]))
    assert waited(worker.answers) == {0: 16}  # of which the device has 8 when the request is admitted
    worker.load(work_of(loads=[Load("r", 0, 16, ({2: 3, 3: 4}, {2: 6, 3: 5}, {1: 7}))]))
    assert waited(worker.loaded) == ({"r"}, set())
    assert page(memory, 0, 4) == page(was, 0, 4)
    assert page(memory, 1, 5) == page(was, 1, 5)
    assert page(memory, 1, 7) == page(was, 1, 7)


@pytest.mark.parametrize(
    "load",
    [
        Load("r", 5, 16, ({}, {}, {})),
        Load("r", 0, 8, ({0: 8, 1: 9}, {2: 10, 3: 11}, {1: 3})),
        Load("r", 0, 16, ({0: 8, 1: 9, 2: 2, 3: 1}, {1: 5, 2: 10, 3: 11}, {1: 3})),
        Load("r", 0, 16, ({0: 8, 1: 9, 2: 2, 4: 1}, {2: 10, 3: 11}, {1: 3})),
        Load("r", 0, 16, ({0: 8, 1: 9, 2: 2, 3: 1}, {2: 10, 3: 0}, {1: 3})),
        Load("r", 0, 16, ({0: 8, 1: 9, 2: 2, 3: 1}, {2: 10, 3: 11}, {1: 300})),
    ],
    ids=["unknown look-up", "another end", "an earlier column", "a later column", "the null block", "no such block"],
)
def test_load_without_its_bytes_or_blocks_fails(worker: TierWorker, load: Load) -> None:
    worker.store(work_of(stores=STORES))
    worker._prefetcher._writer.submit(lambda: None).result()
    worker.begin(work_of(finds=[Find(0, 0, 19, HASHES)]))
    waited(worker.answers)
    worker.load(work_of(loads=[load]))
    assert waited(worker.loaded) == ({"r"}, {"r"})


def test_dropped_look_ups_and_other_epochs_find_nothing(worker: TierWorker) -> None:
    worker.store(work_of(stores=STORES))
    worker._prefetcher._writer.submit(lambda: None).result()
    worker.begin(work_of(finds=[Find(0, 0, 19, HASHES)], epoch=bytes([1] * 8)))
    assert waited(worker.answers) == {0: 0}
    worker.begin(work_of(finds=[Find(1, 0, 19, HASHES)]))
    waited(worker.answers)
    worker.begin(work_of(drops=[1]))
    worker.load(work_of(loads=[Load("r", 1, 16, ({}, {}, {}))]))
    assert waited(worker.loaded) == ({"r"}, {"r"})


def test_worker_reports_the_blocks_that_its_stores_got_and_lost(memory: torch.Tensor) -> None:
    changes = Changes()
    made = TierWorker(
        Layout(), views(memory), RULES, identity=bytes(16), limits=PrefetchLimits(MiB, MiB),
        open_stores=lambda _: StoreStack({"host": MemoryStore(200, changes.of("host"))}, changes),
    )  # fmt: skip
    assert made.changes() == []
    for number, block in enumerate((3, 5, 7)):  # two of these blocks of 80 bytes fit
        made.store(work_of(stores={0: Store([block], [HASHES[number]])}))
    made._prefetcher._writer.submit(lambda: None).result()
    told = [(one.medium, one.place.block_hash, one.is_there) for one in made.changes()]
    first, second, third, _ = HASHES
    assert told == [("CPU", first, True), ("CPU", second, True), ("CPU", first, False), ("CPU", third, True)]
    assert made.changes() == []
    made.close()


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layouts_that_spread_a_page_are_rejected(memory: torch.Tensor, layout: str) -> None:
    with pytest.raises(ConfigError, match=f"the layout {layout} spreads a page"):
        TierWorker(
            Layout(layout),
            dict.fromkeys("abcds", memory),
            RULES,
            identity=bytes(16),
            limits=PrefetchLimits(1, 1),
            open_stores=lambda _: StoreStack({"host": MemoryStore(1)}),
        )


# -- options


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "missing required field `host_memory`"),
        ({"host_memory": "8 things"}, "not a size: '8 things'"),
        ({"host_memory": "8GiB", "hots": 1}, "unknown field `hots`"),
        ({"host_memory": 1.5}, r"Expected `int \| str`"),
        ({"host_memory": "8GiB", "disk": "here"}, "disk_memory together, or neither"),
        ({"host_memory": "8GiB", "disk_memory": "1GiB"}, "disk_memory together, or neither"),
        ({"host_memory": "8GiB", "store": "here"}, "the URL of a store must be like"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TierOptions.of(given)


def test_options_open_stores_that_hold_each_group(tmp_path: Path) -> None:
    options = TierOptions.of({"host_memory": "1MiB", "disk": str(tmp_path), "disk_memory": "64MiB"})
    assert (options.host_bytes, options.disk_bytes) == (MiB, 64 * MiB)
    for _ in range(2):
        stores = options.open_stores("rank-0", bytes(range(16)), (100, 40 * MiB, 100), tell=False)
        assert stores.names == ("host", "disk")
        assert stores.put([b"a"], [memoryview(b"x" * 100)]) == [True]
        assert stores.put([b"b"], [memoryview(bytes(8 * MiB))]) == [True]
        stores.close()
    assert (tmp_path / "rank-0").is_dir()
    with pytest.raises(ConfigError, match="identity"):
        options.open_stores("rank-0", bytes(16), (100, 40 * MiB, 100), tell=False)


def test_stores_tell_what_they_get_and_lose_if_asked(tmp_path: Path) -> None:
    options = TierOptions.of({"host_memory": 250, "disk": str(tmp_path), "disk_memory": MiB})
    stores = options.open_stores("rank-0", bytes(16), (100,), tell=True)
    stores.put([b"a", b"b"], [memoryview(bytes(100))] * 2)
    stores.put([b"c"], [memoryview(bytes(100))])
    told = [(one.store, one.key, one.is_there) for one in stores.take_changes()]
    assert sorted(told) == [("disk", one, True) for one in (b"a", b"b", b"c")] + [
        ("host", b"a", False), ("host", b"a", True), ("host", b"b", True), ("host", b"c", True)]  # fmt: skip
    assert stores.take_changes() == []
    stores.close()


def test_shared_store_is_the_last_tier_and_outlives_the_process(tmp_path: Path) -> None:
    options = TierOptions.of({"host_memory": "1MiB", "store": f"file://{tmp_path}"})
    assert options.outlives
    assert not TierOptions(1).outlives
    stores = [options.open_stores("rank-0", bytes(16), (100,), tell=False) for _ in range(2)]
    assert stores[0].names == ("host", "store")
    assert stores[0].put([b"a"], [memoryview(b"x" * 100)]) == [True]
    into = bytearray(100)
    assert stores[1].get([b"a"], [memoryview(into)]) == [True]
    assert bytes(into) == b"x" * 100
    assert stores[1].take_counts()["store_found_blocks"] == 1
    for store in stores:
        store.close()


def started(**changed: Any) -> Any:  # noqa: ANN401 - vLLM's
    """vLLM's config, with parts ``changed`` by their path with __ for points."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(model="m", revision=None, quantization=None, dtype="bfloat16"),
        cache_config=SimpleNamespace(
            cache_dtype="auto", enable_prefix_caching=True, prefix_match_unit=None, prefix_caching_hash_algo="sha256"
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2, pipeline_parallel_size=1, rank=0, decode_context_parallel_size=1, worker_cls="auto"
        ),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
    )
    for path, value in changed.items():
        *parts, last = path.split("__")
        owner = made
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return made


GROUPS = Config([Group(FullAttentionSpec()), Group(SlidingWindowSpec()), Group(MambaSpec())])
DISK = TierOptions(1, Path("there"), 1)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"cache_config__enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, '"kv_role": "kv_both"'),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "drafts by eagle"),
        ({"cache_config__prefix_match_unit": 16}, "--prefix-match-unit"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash_cbor"}, "PYTHONHASHSEED"),
    ],
)
def test_unsupported_options_of_vllm_are_rejected(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], told: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    refuse_tiers(started(), GROUPS, DISK)
    refuse_tiers(started(speculative_config=SimpleNamespace(method="ngram")), GROUPS, DISK)
    with pytest.raises(ConfigError, match=told):
        refuse_tiers(started(**changed), GROUPS, DISK)


def test_natural_layout_needs_no_hashes_of_vllm_and_has_a_disk_or_a_store() -> None:
    natural = started(parallel_config__worker_cls=WORKER, cache_config__enable_prefix_caching=False)
    refuse_tiers(natural, GROUPS, TierOptions(1))
    refuse_tiers(natural, GROUPS, DISK)
    with pytest.raises(ConfigError, match="a disk or a store in the natural layout, not both"):
        refuse_tiers(natural, GROUPS, replace(DISK, store=StoreUrl("file:///there")))


def test_replicas_of_a_dense_model_have_a_folder_for_each_rank() -> None:
    replicas = [SimpleNamespace(data_parallel_rank=0, data_parallel_index=index) for index in (0, 1)]
    assert [folder_of(one, 3) for one in replicas] == ["replica-0-rank-3", "replica-1-rank-3"]


def test_random_hashes_are_accepted_without_a_disk_or_with_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    random_hashes = started(cache_config__prefix_caching_hash_algo="xxhash")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    refuse_tiers(random_hashes, GROUPS, TierOptions(1))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    refuse_tiers(random_hashes, GROUPS, DISK)


def test_identity_differs_wherever_bytes_or_hashes_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    here = {"model_config__model": str(tmp_path)}

    def identity(config: Any = GROUPS, versions: tuple[str, ...] = ("1", "2"), **changed: Any) -> bytes:  # noqa: ANN401 - vLLM's
        return identity_of(started(**{**here, **changed}), config, RULES, versions)

    same = identity()
    assert identity() == same
    assert len(same) == 16
    changes = [
        identity(versions=("1", "3")),
        identity(replace(GROUPS, kv_cache_groups=GROUPS.kv_cache_groups[:2])),
        identity(model_config__model="other"),
        identity(model_config__revision="1"),
        identity(model_config__dtype="float32"),
        identity(model_config__quantization="fp8"),
        identity(cache_config__cache_dtype="fp8"),
        identity(cache_config__prefix_caching_hash_algo="sha256_cbor"),
        identity(parallel_config__rank=1),
        identity(parallel_config__tensor_parallel_size=4),
        identity(parallel_config__pipeline_parallel_size=2),
    ]
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    changes.append(identity())
    monkeypatch.delenv("PYTHONHASHSEED")
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    os.utime(tmp_path / "model.safetensors", ns=(0, 0))
    changes.append(identity())
    (tmp_path / "model.safetensors").write_bytes(b"OTHER WEIGHTS")
    os.utime(tmp_path / "model.safetensors", ns=(0, 0))
    changes.append(identity())
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "model.safetensors").write_bytes(b"OTHER WEIGHTS")
    assert identity(model_config__model=str(copied)) == changes[-1], "the same model at another path"
    assert len({same, *changes}) == len(changes) + 1


def test_needs_follow_the_kind_of_each_group() -> None:
    full, window, state = needs_of(GROUPS)
    assert (full.reads_all, window.reads_all, state.is_state) == (True, False, True)
    assert window.window == GROUPS.kv_cache_groups[1].kv_cache_spec.sliding_window - 1
    for spec in (MambaSpec(mamba_cache_mode="none"), CircularBufferSpec(), FullAttentionSpec(prefix_cacheable=False)):
        with pytest.raises(ConfigError, match="which vLLM finds by no hash"):
            needs_of(Config([Group(spec)]))
