"""Why tokens were not found: each reason by a scenario of its own, what is remembered, and reports that add up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from eviction_table import serve_alone
from numpy.typing import NDArray

from cli_support import run
from hybridkv.cache import CacheOptions, KVCacheManager, Miss, MissReason
from hybridkv.cache.journal import KeysLost
from hybridkv.cache.placement import EndsPlacement
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.observe.block_times import BlockTimes
from hybridkv.observe.misses import LossRecord, LostKeys
from hybridkv.request import Request
from hybridkv.simulator import H100_UNBOUNDED, ReplaySettings, Workload, plan_for_trace, replay
from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import full_spec, model_config, natural_model_config, state_spec, window_spec

FULL, HYBRID, WINDOWS = (full_spec(4),), (full_spec(4), state_spec(4)), (full_spec(4), window_spec(4, 6))
PROMPT = list(range(100, 120))


class Served:
    """Requests one after the other; a second passes before each."""

    def __init__(self, specs: tuple[KVCacheSpec, ...], size: int, *, natural: bool = True) -> None:
        self.now, self._number = 0.0, 0
        per_slab = tuple(1 if "Mamba" in type(spec).__name__ else 4 for spec in specs)
        self.cache = KVCacheManager(
            natural_model_config(size, specs, per_slab) if natural else model_config(size, specs),
            200,
            options=CacheOptions(
                placement=EndsPlacement() if natural else None, remembered_losses=1000, clock=lambda: self.now
            ),
        )

    def request(self, prompt: list[int], salt: str | None = None, *, reads: bool = True) -> Request:
        self._number += 1
        name = str(self._number)
        return Request(name, prompt, hasher=self.cache.hasher, cache_salt=salt, skip_reading_prefix_cache=not reads)

    def run(self, prompt: list[int], salt: str | None = None) -> None:
        self.now += 1.0
        serve_alone(self.cache, self.request(prompt, salt), [9, 9], self._number)

    def evict(self, group: int, block: int | None) -> None:
        assert block is not None
        assert self.cache.block_pool.keys.group_of(block) == group
        self.cache.block_pool.keys.evict(np.array([block], np.int32))

    def why(self, prompt: list[int], salt: str | None = None, hit: int | None = None) -> list[tuple[int, int, str]]:
        misses = self.cache.explain(self.request(prompt, salt), hit)
        return [(miss.first, miss.tokens, str(miss.reason)) for miss in misses]


def test_miss_of_evicted_block_has_age_and_extra_memory() -> None:
    served = Served(FULL, 8, natural=False)  # 7 blocks
    served.run(PROMPT)
    for first in (200, 300):
        served.run(list(range(first, first + 12)))
    served.now += 5.0
    gone, *_ = served.cache.explain(served.request(PROMPT))
    block = served.cache.config.block_bytes_of(0)
    assert (gone.first, gone.tokens, gone.reason, gone.group) == (0, 16, MissReason.EVICTED, 0)
    assert gone.ago_s == 6.0  # the last one to go, and then the others, went when the second of the two came
    assert gone.more_bytes == 5 * block  # those that went with it count as one


def test_miss_of_shortened_hit_or_skipped_look_up_has_its_reason() -> None:
    served = Served(FULL, 30)
    served.run(PROMPT)
    assert served.why(PROMPT, hit=0) == [(0, 19, "no_room"), (19, 1, "last_token")]
    assert served.why(PROMPT, hit=20) == []
    misses = served.cache.explain(served.request(PROMPT, reads=False))
    assert [str(one.reason) for one in misses] == ["caching_off", "last_token"]


def test_miss_without_recording_is_not_explained() -> None:
    cache = KVCacheManager(model_config(8, FULL), 100)
    assert cache.misses is None
    with pytest.raises(ConfigError, match="remembered_losses"):
        cache.explain(Request("r", PROMPT, hasher=cache.hasher))
    served = Served(FULL, 30)
    with pytest.raises(ConfigError, match="another hasher"):
        served.cache.explain(Request("r", PROMPT))
    with pytest.raises(ConfigError, match="hit_tokens"):
        served.cache.explain(served.request(PROMPT), -1)


class Idle(BlockTimes):
    """Blocks that were not used for as many seconds as their numbers say."""

    def __init__(self) -> None:
        super().__init__(10, lambda: 0.0)

    def idle_s(self, ids: Sequence[int], now: float) -> NDArray[np.float64]:  # noqa: ARG002 - as BlockTimes
        return np.array(ids, np.float64)


def test_miss_records_are_forgotten_by_generation() -> None:
    times = Idle()
    lost = LostKeys(4, (10, 5), times)

    def known(number: int | None) -> LossRecord | None:
        return None if number is None else lost.lost(number)

    lost.read(KeysLost(0, [b"a"], (), [], 1, 0.0))
    lost.by = "r"
    lost.read(KeysLost(1, [b"b"], [(b"p", b"tail")], [], 1, 1.0))  # three: the generation is full
    lost.by = None
    assert (known(lost.whole(0, b"a")), known(lost.whole(1, b"b"))) == (LossRecord(0.0, 0), LossRecord(1.0, 10, "r"))
    assert [(tokens, known(number)) for tokens, number in lost.inside(1, b"p")] == [(b"tail", LossRecord(1.0, 10, "r"))]
    lost.read(KeysLost(1, [b"b"], (), [7], 1, 2.0))
    lost.read(KeysLost(0, [b"c", b"d"], (), [8, 9], 2, 2.0))
    assert (lost.whole(0, b"a"), list(lost.inside(1, b"p"))) == (None, [])
    assert (known(lost.whole(1, b"b")), known(lost.whole(0, b"d"))) == (
        LossRecord(2.0, 15, None, 7),
        LossRecord(2.0, 20, None, 9),
    )
    assert lost.lost_bytes == 40
    assert lost.knows(1)[1].keys() == {b"b"}
    lost.clear()
    assert lost.whole(1, b"b") is None


def test_miss_ranges_of_equal_reason_merge() -> None:
    first, lost = Miss(0, 4, MissReason.NO_STATE), Miss(0, 4, MissReason.EVICTED, 1, 2.0, 10)
    assert Miss(4, 3, MissReason.NO_STATE).joined_with(first) == Miss(0, 7, MissReason.NO_STATE)
    assert Miss(4, 3, MissReason.NO_WINDOW).joined_with(first) is None
    assert replace(lost, first=4).joined_with(lost) is None  # they would have said so together


# -- replays


@pytest.mark.parametrize("layout", ["natural", "reference"])
@pytest.mark.parametrize(
    "model", ["llama-3-8b", "qwen3.5-35b-a3b", "gemma-3-27b", "nemotron-3-nano-30b-a3b", "llama-4-scout"]
)
def test_miss_reasons_of_a_replay_add_up(model: str, layout: str) -> None:
    source = Workload("mix", hours=0.1, limit=40)
    plan = plan_for_trace(source.summary(), read_model(model), "12GiB", layout=layout)
    off, explained = (
        replay(source, plan, ReplaySettings(hardware=H100_UNBOUNDED, remembered_losses=most)) for most in (0, 1 << 16)
    )
    assert sum(explained.misses.values()) == explained.prompt_tokens - (explained.hit_tokens or 0)
    assert explained.misses["last_token"] >= explained.requests - 1
    assert (off.misses, replace(explained, misses={})) == ({}, off)


def test_miss_reasons_are_in_the_report() -> None:
    asked = ("replay", "workload:uniform", "--model", "llama-3-8b", "--memory", "8GiB")
    found = json.loads(run(*asked, "--explain", "--json").stdout)
    assert sum(found["misses"].values()) == found["prompt_tokens"] - found["hit_tokens"]
    assert found["settings"]["remembered_losses"] > 0
    shown = run(*asked, "--explain").stdout
    for said in ("prompt tokens missed", "never seen", "last token of the prompt"):
        assert said in shown
    assert "prompt tokens missed" not in run(*asked).stdout
    assert json.loads(run(*asked, "--json").stdout)["misses"] == {}


def test_miss_after_a_failed_admission_names_its_request() -> None:
    served = Served(FULL, 200)
    served.run(PROMPT)
    assert served.cache.misses is not None
    newcomer = served.request(PROMPT)
    block = served.cache.groups[0].index.get(newcomer.hashes[0])
    with pytest.raises(AssertionError), served.cache.misses.evicting_for(newcomer):
        list(map(served.evict, (0, 0), (block, None)))  # there is no block None
    assert served.cache.explain(served.request(PROMPT), None)[0].by == newcomer.request_id


def test_miss_ignores_tokens_added_after_a_failed_start() -> None:
    cache = Served(FULL, 200).cache
    request = Request("r", PROMPT[:9], hasher=cache.hasher, skip_writing_prefix_cache=True)
    cache.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    for token in PROMPT[9:17]:
        request.append(token)
    cache.free(request)
    asked = Request("p", [*PROMPT[:17], 5], hasher=cache.hasher)
    assert [(miss.first, miss.reason.value) for miss in cache.explain(asked)][:2] == [
        (0, "unpublished"),
        (8, "never_seen"),
    ]
