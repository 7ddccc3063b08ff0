"""Transfers on a side stream: by a stand-in for streams that copies as late or as early as it may, and on a GPU."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import ClassVar

import numpy as np
import pytest
import torch
from copy_support import CONFIGS
from tier_support import LARGE_CONFIGS, TIERS, Bytewise, Tiers, copies_of, run_random_steps

from hybridkv.specs import FullAttentionSpec
from hybridkv.step import Csr, Step
from hybridkv.testing.configs import natural_model_config
from hybridkv.worker import HostTierCopier, PagedStorage, copy_kernels, tier
from hybridkv.worker.tier import _SideStream
from small_steps import small_step


class Stream:
    """A stream whose copies run when an event or the stream is waited for, or after so many looks at an event."""

    looks = 0
    active: ClassVar[list[Stream]] = []

    def __init__(self, _device: torch.device) -> None:
        self.queue = deque[Callable[[], object]]()
        self.waits = 0

    def wait_stream(self, _compute: object) -> None:
        self.waits += 1

    def record_event(self) -> Event:
        return Event(self, self.queue)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.popleft()()


class Compute:
    """The compute stream, on which nothing is late."""

    def wait_stream(self, side: Stream) -> None:
        side.synchronize()


class Event:
    """Over when all is done that was in the queue."""

    def __init__(self, stream: Stream, queue: deque[Callable[[], object]]) -> None:
        self.left, self.done, self.stream = Stream.looks, False, stream
        queue.append(self.end)

    def end(self) -> None:
        self.done = True

    def query(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.synchronize()
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            self.stream.queue.popleft()()


class Timed:
    """An event that also tells how long the copies between two took."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Stream) -> None:
        event = stream.record_event()
        self.query, self.synchronize = event.query, event.synchronize

    def elapsed_time(self, end: Timed) -> float:
        assert end.query()
        return 1.0


@contextmanager
def active(stream: Stream) -> Iterator[None]:
    Stream.active.append(stream)
    try:
        yield
    finally:
        Stream.active.pop()


ONE_TOKEN = Csr.from_lists([[1]])
"""Of a Step that does not wait."""


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies on a side stream wait there. Nothing is locked, and a CPU is the device."""
    copy = torch.Tensor.copy_

    def later(self: torch.Tensor, read: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        assert self.is_contiguous()
        assert read.is_contiguous()
        assert non_blocking is bool(Stream.active)
        if Stream.active:
            Stream.active[-1].queue.append(lambda: copy(self, read))
            return self
        return copy(self, read)

    monkeypatch.setattr(torch.Tensor, "copy_", later)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Timed)
    monkeypatch.setattr(torch.cuda, "stream", active)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Compute())
    monkeypatch.setattr(tier, "_lock", lambda _arena: None)
    monkeypatch.setattr(tier, "_unlock", lambda _stream, _address: None)


def on_streams(name: str, seed: int = 0, staging_bytes: int = 1 << 30) -> tuple[Bytewise, Tiers]:
    bytewise = Bytewise(CONFIGS[name], TIERS[name], seed)
    tiers = Tiers(bytewise)
    one = tiers.tier
    one._lane = _SideStream(one._device, one._host, one.arena, staging_bytes)
    return bytewise, tiers


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("looks", [0, 1, 4, 1000])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_side_stream_at_any_speed_matches_a_loop(name: str, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "looks", looks)
    for seed in range(8):
        bytewise, tiers = on_streams(name, seed)
        late = run_random_steps(tiers, bytewise, seed, 12)
        assert (late > 0) == (looks > 0)


def store(number: int, *copies: tuple[int, int, int, int]) -> Step:
    return small_step(number, stores=copies_of(list(copies)))


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("memory", ["little", "none"])
def test_side_stream_reads_stores_without_room_before_the_step_changes_them(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "looks", 1000)
    size = CONFIGS["classes"].block_bytes_of(0)
    bytewise, tiers = on_streams("classes", staging_bytes=2 * size)
    if memory == "none":
        monkeypatch.setattr(torch.Tensor, "index_select", out_of_memory)
    for number in range(3):
        blocks = [(number, 0, 2 + at, 2 + at + number) for at in range(1 + number)]
        zero = np.array([(0, 2)], np.int32)
        step = replace(store(number, *blocks), zero=zero)
        bytewise.apply(step)
        tiers.execute(step)
    assert tiers.execute(small_step(3)) is not None  # an empty Step waits
    tiers.tier._lane.settle()
    tiers.require_equal(bytewise)


def out_of_memory(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.usefixtures("streams")
def test_side_stream_reports_a_copy_that_raises_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tiers = on_streams("classes")
    copy, at = torch.Tensor.copy_, tiers.tier.arena.data_ptr() + 6 * CONFIGS["classes"].block_bytes_of(0)

    def failing(self: torch.Tensor, read: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        if self.data_ptr() == at:
            raise RuntimeError("the device is gone")
        return copy(self, read, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    assert tiers.execute(store(0, (1, 0, 2, 3), (2, 0, 3, 6), (2, 0, 4, 2), (3, 0, 4, 5))) == ([1, 3], [2])


@pytest.mark.usefixtures("streams")
def test_side_stream_ends_before_a_step_after_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "looks", 1000)
    _, tiers = on_streams("classes")
    step = small_step(0, token_ids=ONE_TOKEN, loads=copies_of([(1, 0, 2, 3)]))
    assert tiers.execute(step) == ([], [])
    lane = tiers.tier._lane
    assert isinstance(lane, _SideStream)
    following = small_step(1, token_ids=ONE_TOKEN)
    tiers.execute(following)
    assert lane._stream.queue  # type: ignore[attr-defined]  # the stand-in
    tiers.tier.begin(small_step(2, after=-1))
    assert not lane._stream.queue  # type: ignore[attr-defined]  # the stand-in


# -- on a GPU


def gpu_tiers(layout: str, seed: int) -> tuple[Bytewise, Tiers]:
    bytewise = Bytewise(*LARGE_CONFIGS[layout], seed)
    return bytewise, Tiers(bytewise, "cuda", kernels=copy_kernels(torch.device("cuda")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("layout", list(LARGE_CONFIGS))
def test_gpu_transfers_beside_a_busy_stream_match_a_loop(layout: str) -> None:
    """Forwards of random length; each Step begins while the transfers of Steps before may still run."""
    busy, rng = torch.randn(4096, 4096, device="cuda"), np.random.default_rng(1)

    def forward() -> None:
        nonlocal busy
        for _ in range(int(rng.integers(0, 20))):
            busy = busy @ busy / 64

    late = 0
    for seed in range(4):
        bytewise, tiers = gpu_tiers(layout, seed)
        assert tiers.tier.arena.is_pinned()
        tiers.forward = forward
        late += run_random_steps(tiers, bytewise, seed, 60)
    assert late > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_tier_is_unlocked_after_its_last_copy() -> None:
    """A tier that goes while it copies waits; then the host's memory is ordinary memory again."""
    for seed in range(3):
        _, tiers = gpu_tiers("natural", seed)
        arena = tiers.tier.arena
        tiers.tier.begin(store(0, *((i, 0, 2 + i, 2 + i) for i in range(40))))
        del tiers
        gc.collect()
        assert not arena.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_transfer_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of 256 KiB, side by side and scattered, beside a plain copy of as many bytes (shown with -s)."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    config = natural_model_config(2200, (spec,), (1,), layers_per_group=4)
    count, size = 900, config.block_bytes_of(0)
    tiers = HostTierCopier(PagedStorage(config, device="cuda"), config)
    pinned, device = torch.empty(count * size, dtype=torch.uint8).pin_memory(), tiers._device.stacks[0][0][0]
    flat = device.view(torch.uint8).flatten()[: count * size]
    rates = dict[str, float]()
    for name, to, read in (("plain up", flat, pinned), ("plain down", pinned, flat)):
        for _ in range(2):
            start = perf_counter()
            to.copy_(read, non_blocking=True)
            torch.cuda.synchronize()
            rates[name] = count * size / (perf_counter() - start)
    scattered = np.random.default_rng(0).permutation(2000)[:count] + 1
    number = 0
    for order, blocks in (("side by side", np.arange(1, count + 1)), ("scattered", scattered)):
        for field in ("stores", "loads"):
            for _ in range(2):
                copies = copies_of([(number, 0, int(block), int(block)) for block in blocks])
                step = (
                    replace(small_step(number), stores=copies)
                    if field == "stores"
                    else small_step(number, loads=copies)
                )
                start = perf_counter()
                tiers.begin(step)
                tiers.load(step)
                rates[f"{field} {order}, issued"] = count * size / (perf_counter() - start)
                assert tiers.finish(step)[0].tolist() == [number]
                rates[f"{field} {order}"] = count * size / (perf_counter() - start)
                number += 1
    with capsys.disabled():
        for name, rate in rates.items():
            print(f"\n{name}: {rate / 1e9:.1f} GB/s", end="")  # noqa: T201
    assert rates["loads scattered"] > 0.3 * rates["plain up"]
    assert rates["stores scattered"] > 0.3 * rates["plain down"]
