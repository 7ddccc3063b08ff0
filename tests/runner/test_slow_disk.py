"""An engine measures its disk: it asks for and fetches what comes sooner than it computes it, and tries again later."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from runner_support import generated, greedy, loaded_model
from test_disk import OPTIONS, OUTPUT, small_plan

from hybridkv.runner import Engine
from hybridkv.stores import BlockStore, DiskFolder
from hybridkv.tiers import Way, price

SLOW_S = 0.25


@dataclass
class SleepingDisk:
    """A disk whose reads of blocks and look-ups take longer. It sleeps on other threads than the engine's alone."""

    disk: DiskFolder
    sleep_s: float = 0.0
    look_up_s: float = 0.0
    looks_up_at_once: bool = True
    asked: int = 0
    store: BlockStore = field(init=False)

    def open(self, identity: bytes, block_bytes: Sequence[int]) -> "SleepingDisk":
        self.store = self.disk.open(identity, block_bytes)
        self.put, self.close = self.store.put, self.store.close
        return self

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        if threading.current_thread().name.startswith("hybridkv-lookup"):
            self.asked += 1
            time.sleep(self.look_up_s)
        return self.store.exists(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        if threading.current_thread().name.startswith("hybridkv-store"):
            time.sleep(self.sleep_s)
        return self.store.get(keys, into)


class Chats:
    """Prompts that no other prompt begins like, each asked once, and what the engine fetched for each."""

    def __init__(self, folder: Path) -> None:
        self.loaded, draw = loaded_model("llama"), Random(1)
        self.prompts = [[draw.randrange(3, 200) for _ in range(60)] for _ in range(40)]
        self.disk = SleepingDisk(DiskFolder(folder, "64MiB"))
        self.plan = small_plan(self.loaded, self.prompts)
        with self.engine() as engine:
            engine.generate(self.prompts, greedy(OUTPUT))
            engine.settle_tiers()
        self.left = iter(self.prompts)

    def engine(self) -> Engine:
        return Engine(self.loaded, self.plan, OPTIONS, host_memory="32MiB", store=self.disk)

    def fetches(self, engine: Engine, count: int) -> Iterator[int]:
        """Ask for the next prompts, one after the other; yield the fetches and the hit tokens of each."""
        assert engine.tier is not None
        for _ in range(count):
            prompt, before = next(self.left), engine.tier.statistics().fetches
            (made,) = engine.generate([prompt], greedy(OUTPUT))
            assert list(made.token_ids) == list(generated(self.loaded, prompt, OUTPUT))
            engine.settle_tiers()
            yield engine.tier.statistics().fetches - before


def test_slow_disk_is_left_alone_and_a_fast_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price, "_AT_ONCE_S", 0.1)  # a fast fetch takes longer than 10 ms on a busy machine
    chats = Chats(tmp_path / "disk")
    with chats.engine() as engine:
        assert list(chats.fetches(engine, 8)) == [1] * 8
        assert engine.tier is not None
        fast = engine.tier.prices.of[Way.FETCH].rate
    chats.disk.sleep_s = SLOW_S
    with chats.engine() as engine:
        assert list(chats.fetches(engine, 12)) == [1] * 4 + [0] * 8
        assert engine.tier is not None
        pace = engine.tier.prices.of[Way.FETCH]
        assert fast is not None
        assert pace.rate is not None
        assert pace.rate < fast / 4
        assert engine.tier.statistics().fetched_bytes / pace.rate == pytest.approx(4 * SLOW_S, rel=0.5)
        found = engine.scheduler.prompt_tokens_found[1]
        monkeypatch.setattr(price, "_RETRY_S", 0.0)
        begun = time.monotonic()
        assert list(chats.fetches(engine, 1)) == [1]
        assert engine.scheduler.prompt_tokens_found[1] == found  # the request did not wait for it
        assert time.monotonic() - begun >= SLOW_S
        chats.disk.sleep_s = 0.0
        assert list(chats.fetches(engine, 10))[-4:] == [1] * 4
        assert engine.scheduler.prompt_tokens_found[1] >= found + 4 * 59


def test_store_whose_look_ups_take_long_is_asked_no_more_until_it_is_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(price, "_AT_ONCE_S", 0.1)  # as above
    monkeypatch.setattr(price, "_ASKED_AT_ONCE_S", 0.1)
    chats, asked = Chats(tmp_path / "disk"), list[bool]()
    chats.disk.looks_up_at_once, chats.disk.look_up_s = False, SLOW_S
    with chats.engine() as engine:
        for _ in range(10):
            before = chats.disk.asked
            list(chats.fetches(engine, 1))
            asked.append(chats.disk.asked > before)
        assert asked == [True] * 4 + [False] * 6
        monkeypatch.setattr(price, "_RETRY_S", 0.0)
        chats.disk.look_up_s = 0.0
        assert list(chats.fetches(engine, 10))[-4:] == [1] * 4


def test_store_that_hangs_holds_up_one_request(tmp_path: Path) -> None:
    chats = Chats(tmp_path / "disk")
    chats.disk.looks_up_at_once, chats.disk.look_up_s = False, 1.5
    with chats.engine() as engine:
        for expected in (True, False, False, False):
            before, begun = chats.disk.asked, time.monotonic()
            assert list(chats.fetches(engine, 1)) == [0]
            assert (chats.disk.asked > before) is expected
            assert expected or time.monotonic() - begun < 1.0
