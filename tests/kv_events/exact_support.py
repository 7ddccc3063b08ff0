"""Caches whose attention says more than can be hit, and the prefixes of which one can be, asked of the cache itself."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from weakref import WeakKeyDictionary

import numpy as np
from events_support import BLOCK, SALTS

from hybridkv.cache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheOptions,
    KVCacheEvent,
    KVCacheManager,
    Medium,
)
from hybridkv.cache.placement import Placement
from hybridkv.eviction import Eviction
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, Step, StepResult
from hybridkv.testing.configs import chunk_spec, full_spec, model_config, natural_model_config, state_spec, window_spec
from hybridkv.tiers import HostTier

Prompt = tuple[str | None, tuple[int, ...]]

CACHES: Mapping[str, Sequence[str]] = {
    "states": ("full", "state"),
    "two states": ("full", "state", "state"),
    "windows": ("full", "window"),
    "all": ("full", "window", "state"),
    "full": ("full",),
    "two of full": ("full", "full"),
    "chunks": ("full", "chunk"),
}
ON_THE_DEVICE: Mapping[str, Sequence[str]] = {
    **CACHES,
    "all with chunks": ("full", "chunk", "window", "state"),
    "windows alone": ("window", "small"),
}
"""In host memory, windows alone lack the blocks before them, so that nobody can tell their prefixes."""
LARGE_BLOCKS: Mapping[str, Sequence[str]] = {
    "large windows": ("full", "large window"),
    "large full": ("window", "large full"),
    "large states": ("full", "large state"),
    "large of all": ("full", "large window", "chunk", "large state"),
}
"""With blocks of two sizes: the reference layout alone has them."""


_ASKED = WeakKeyDictionary[KVCacheManager, dict[Prompt, Request]]()
"""What caches were asked with: made once, for they are asked after every step."""


def cache_of_layers(
    layers: Sequence[str],
    *,
    natural: bool,
    size: int,
    placement: Placement | None = None,
    eviction: Eviction | None = None,
    above: KVCacheManager | None = None,
) -> tuple[KVCacheConfig, KVCacheManager]:
    """``size`` slabs, or blocks. above: the device's, if these are of host memory."""
    specs = {
        "full": full_spec(BLOCK),
        "window": window_spec(BLOCK, 2 * BLOCK + 1),
        "small": window_spec(BLOCK, 2),
        "chunk": chunk_spec(BLOCK, 2 * BLOCK),
        "state": state_spec(BLOCK),
        "large window": window_spec(2 * BLOCK, 2 * BLOCK + 3),
        "large full": full_spec(2 * BLOCK),
        "large state": state_spec(2 * BLOCK),
    }
    found = [specs[layer] for layer in layers]
    config = natural_model_config(size, found, [2] * len(found)) if natural else model_config(size, found)
    return config, KVCacheManager(
        config,
        200,
        enable_kv_cache_events=True,
        hasher=None if above is None else above.hasher,
        options=CacheOptions(
            placement=placement,
            eviction=eviction,
            medium=Medium.GPU if above is None else Medium.CPU,
            log_resume_points=natural and above is None,
        ),
    )


def some_prompt(random: Random) -> list[int]:
    """One of few, which share beginnings and part inside blocks."""
    family = random.randrange(2)
    return [family] * random.randrange(1, 20) + [9] * random.randrange(8)


class Known:
    """What of prompts that were ever seen a consumer of ``ExactEvents`` events believes, and what the cache finds."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, bytes], tuple[bytes | None, Prompt]] = {}

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        """As a router."""
        for event in events:
            match event:
                case BlockStored():
                    parent = event.parent_block_hash
                    for at, key in enumerate(event.block_hashes):
                        tokens = event.token_ids[at * BLOCK : (at + 1) * BLOCK]
                        assert (event.group_idx, key) not in self._blocks
                        self._blocks[event.group_idx, key] = parent, (event.cache_salt, tokens)
                        parent = key
                case BlockRemoved():
                    for key in event.block_hashes:
                        del self._blocks[event.group_idx, key]
                case AllBlocksCleared():
                    self._blocks.clear()
                case _:
                    raise AssertionError(event)

    def prefixes(self, group: int = 0) -> set[Prompt]:
        """Of whole blocks, told from the first one on; every block is of one."""
        found: dict[bytes, Prompt] = {}
        left = {key: of for (number, key), of in self._blocks.items() if number == group}
        while left:
            ready = [key for key, (parent, _) in left.items() if parent is None or parent in found]
            assert ready, "blocks are told of which no hit can be"
            for key in ready:
                parent, (salt, tokens) = left.pop(key)
                found[key] = salt, (() if parent is None else found[parent][1]) + tokens
        return set(found.values())


def can_be_hit(cache: KVCacheManager, prompts: Iterable[Prompt]) -> set[Prompt]:
    """Prefixes of whole blocks that are hit by what begins as ``prompts`` and goes on otherwise anywhere."""
    begun = {(salt, tokens[:length]) for salt, tokens in prompts for length in range(1, len(tokens) + 1)}
    found, known = set[Prompt](), _ASKED.setdefault(cache, {})
    for salt, tokens in begun:
        request = known.get((salt, tokens))
        if request is None:
            request = Request("asked", (*tokens, 77), hasher=cache.hasher, cache_salt=salt)
            known[salt, tokens] = request
        hit = cache.find_hit(request).tokens // BLOCK * BLOCK
        found.update((salt, tokens[:end]) for end in range(BLOCK, hit + 1, BLOCK))
    return found


class Run:
    """Requests that come, run side by side, and go; some steps fail, some blocks are lost."""

    def __init__(self, cache: KVCacheManager, random: Random, tier: HostTier | None = None) -> None:
        self.cache, self.random, self.tier = cache, random, tier
        limits = SchedulerLimits(max_running=3, max_batched_tokens=11, max_in_flight=random.choice([1, 2]))
        self._most = limits.max_in_flight
        self._scheduler = Scheduler(cache, limits, tier=tier)
        self._flying = deque[Step]()
        self._requests: list[Request] = []

    @property
    def settled(self) -> bool:
        """Whether all that is promised is written."""
        return not self._flying

    def prompts(self) -> set[Prompt]:
        """All tokens so far."""
        return {(one.cache_salt, one.token_tuple(0, one.num_tokens)) for one in self._requests}

    def complete(self, tokens: list[int]) -> None:
        """One request alone, to its end, and until host memory has it."""
        self._add(tokens, SALTS[0], marks=())
        while not (self._scheduler.drained and (self.tier is None or self.tier.is_idle)):
            self._flying.append(self._scheduler.schedule())
            self._settle(fails=False)

    def turn(self) -> None:
        """A step, and what happens around it."""
        random, scheduler = self.random, self._scheduler
        if random.random() < 0.5 and scheduler.num_waiting < 4:
            self._add_any()
        if random.random() < 0.05 and self._requests:
            scheduler.abort(self._requests[-1].request_id)
        self._flying.append(scheduler.schedule())
        while self._flying and (len(self._flying) >= self._most or random.random() < 0.7):
            self._settle(fails=random.random() < 0.07)
        if self.settled and random.random() < 0.05:
            group = random.randrange(len(self.cache.groups))
            cached = self.cache.block_pool.keys.in_group(group).tolist()
            if cached:
                self.cache.block_pool.evict_blocks(np.array([random.choice(cached)], np.int32))
        if scheduler.drained and random.random() < 0.2:
            (self.cache.reset_prefix_cache if self.tier is None else self.tier.reset)()

    def _add_any(self) -> None:
        random, tokens = self.random, some_prompt(self.random)
        marks = sorted({random.randrange(1, len(tokens) + 1) for _ in range(random.randrange(3))})
        self._add(tokens, random.choice(SALTS), marks)

    def _add(self, tokens: Sequence[int], salt: str | None, marks: Sequence[int]) -> None:
        request = Request(
            str(len(self._requests)),
            tokens,
            SamplingParams(max_tokens=self.random.randrange(1, 5)),
            hasher=self.cache.hasher,
            cache_salt=salt,
            marks=marks,
        )
        self._requests.append(request)
        self._scheduler.add(request)

    def _settle(self, *, fails: bool) -> None:
        """The oldest step has run, or failed with those behind it."""
        step = self._flying.popleft()
        if fails:
            self._scheduler.fail(step.id, "it went wrong")
            self._flying.clear()
            return
        samples = Csr.from_lists([[9] if one else [] for one in step.samples.tolist()])
        begun = np.unique(np.concatenate((step.stores.transfer, step.loads.transfer)))
        lost = np.array([self.random.random() < 0.1 for _ in begun], np.bool_)
        self._scheduler.update(StepResult(step.id, samples, arrived=begun[~lost], lost=begun[lost]))
