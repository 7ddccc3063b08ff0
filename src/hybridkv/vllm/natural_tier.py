"""TierConnector in the natural layout: a host tier behind hybridkv's manager, on both sides of vLLM.

    scheduler   HostTier: a request waits until its prefix has come up, and is then an ordinary hit; reads rank 0's disk
    workers     HostTierCopier: the transfers of a step, around its block operations

    stores, copies on the host | moves, zero, copies | loads | vLLM's forward | keep      answers with the step's output

The classes have the methods of TierRequests and TierWorker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hybridkv.cache import CacheOptions, KVCacheManager, Medium
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.planner import KVCacheConfig, Plan, tier_plan
from hybridkv.specs import Keeps
from hybridkv.step import Cells, Csr, Step
from hybridkv.stores import BlockStore
from hybridkv.stores.marks import entry_sizes
from hybridkv.tiers import HostTier, Prefixes, StoreLookups, parts_of
from hybridkv.vllm.manager import CacheManager
from hybridkv.vllm.tier_events import TierChange
from hybridkv.worker.tier import DeviceMemory, HostTierCopier

if TYPE_CHECKING:
    from collections.abc import Iterable

Open = Callable[[bytes, Sequence[int]], BlockStore]
"""Opens a store, given the identity of its blocks and their sizes."""

_NONE: Final = np.empty(0, np.int32)
_COUNTS: Final = (
    "loads", "loaded_tokens", "loaded_bytes", "loads_refused", "loads_lost", "stores", "stored_bytes", "stores_refused",
    "hit_tokens", "lost", "late",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NaturalWork:
    """The workers' part of a step.

    Attributes:
        step: Its transfers; a Step without rows.
        host: Config of the host's blocks in the first step, when workers allocate them; else ``None``.
        hash_block: Tokens of a hash block, for marks in a store.
        identity: Of the blocks in a store.
    """

    step: Step
    host: KVCacheConfig | None
    hash_block: int
    identity: bytes


def _sizes(config: KVCacheConfig, hash_block: int) -> list[int]:
    """Return the sizes of what a store keeps of all groups."""
    return entry_sizes(map(config.block_bytes_of, range(len(config.groups))), hash_block)


def host_tier(
    device: KVCacheManager, made: Plan, host_bytes: int, opened: Open | None = None, identity: bytes = b""
) -> HostTier:
    """Return a host tier behind a cache.

    Args:
        device: The cache, which logs resume points.
        made: Its plan.
        host_bytes: Bytes of host memory of each rank.
        opened: Opens the store behind it to look up the first rank's blocks; ``None`` without one.
        identity: With a store, 16 bytes that differ wherever a block's bytes would mean something else.

    Raises:
        ConfigError: The cache cannot have a tier, or the store cannot be opened.
        CapacityError: The memory is too small.
        UnsupportedModelError: A layer keeps something that a tier cannot hold.
    """
    # vLLM's requests name no encoder input, and no test has rings
    for number, group in enumerate(device.config.groups):
        if group.spec.keeps in {Keeps.RING, Keeps.ENCODER}:
            what = "raw keys of a compressor" if group.spec.keeps is Keeps.RING else "the output of an encoder"
            raise UnsupportedModelError(f"TierConnector cannot hold group {number}, {what}: leave the connector out")
    options = CacheOptions(eviction=device.eviction, medium=Medium.CPU)
    events = device.block_pool.journal.reports_events
    held = tier_plan(made, host_bytes)
    host = KVCacheManager(held, hasher=device.hasher, enable_kv_cache_events=events, options=options)
    if opened is None or device.hasher is None:
        return HostTier(device, host)
    hash_block = device.hasher.block_size
    store, prefixes = opened(identity, _sizes(host.config, hash_block)), Prefixes(parts_of(host), identity, hash_block)
    threads = ThreadPoolExecutor(1, "hybridkv-lookup")
    return HostTier(device, host, lookups=StoreLookups(store, prefixes, threads, clock=time.monotonic))


class NaturalTierRequests:
    """Lets requests wait for their prefixes.

    Args:
        manager: The manager with the tier.
        tier: The tier.
        ranks: Number of workers.
        identity: Of the blocks in a store.
        behind: What lies behind the host: ``store`` or ``disk``.
    """

    def __init__(
        self, manager: CacheManager, tier: HostTier, ranks: int, identity: bytes = b"", behind: str = "store"
    ) -> None:
        self._manager, self._tier, self._ranks = manager, tier, ranks
        self._identity, self._behind = identity, behind
        self._host: KVCacheConfig | None = tier.host.config
        self._number = 0
        self._answers = dict[int, list[int]]()
        self._counted = dict[str, int]()

    @property
    def is_busy(self) -> bool:
        """Whether transfers have to begin or to end."""
        return not self._tier.is_idle

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:  # noqa: ANN401 - vLLM's
        """Return vLLM's answer: ``None`` while the prefix comes up, else no tokens beyond the device's.

        Args:
            request: vLLM's Request, which was looked up just now.
            local: not used.
        """
        del local
        found = self._manager.looked_up.get(request.request_id)
        waits = found is not None and not request.skip_reading_prefix_cache and self._tier.waits(*found)
        return None if waits else 0, False

    def allocated(self, request: Any, blocks: Any, external: int) -> None:  # noqa: ANN401 - vLLM's
        """Note that a request begins.

        Args:
            request: vLLM's Request.
            blocks: not used.
            external: not used.
        """
        del blocks, external
        self.finished(request)

    def finished(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
        """Forget a request.

        Args:
            request: vLLM's Request.
        """
        found = self._manager.looked_up.pop(request.request_id, None)
        if found is not None:
            self._tier.begins(found[0])

    def heard(self, answers: Mapping[int, Sequence[int]]) -> None:
        """Note transfers that ended; one ends when it has ended on all ranks.

        Args:
            answers: By transfer, 1 for each rank where it arrived and 0 for each where it is lost.
        """
        arrived, lost = list[int](), list[int]()
        for number, some in answers.items():
            each = self._answers.setdefault(number, [])
            each += some
            if len(each) == self._ranks:
                del self._answers[number]
                (arrived if all(each) else lost).append(number)
        self._tier.end([(number, None) for number in arrived], lost)

    def changed(self, changes: Mapping[int, Sequence[TierChange]]) -> None:
        """Do nothing: the host's manager has the events of this layout.

        Args:
            changes: not used.
        """

    def failed(self, names: Iterable[str]) -> None:
        """Do nothing: vLLM loads nothing for a request.

        Args:
            names: not used.
        """

    def reset(self) -> bool:
        """Forget everything on the host and the device; return whether it was done."""
        return self._tier.reset()

    def work(self, output: Any, manager: Any) -> NaturalWork:  # noqa: ANN401 - vLLM's
        """Return the workers' part of a step, after all its blocks were allocated.

        Args:
            output: vLLM's SchedulerOutput.
            manager: not used.
        """
        del manager
        tokens = int(output.total_num_scheduled_tokens > 0)
        if not tokens:
            self._tier.rest()
        made = self._tier.take()
        step = Step(
            self._number,
            self._number - 1,
            _NONE,
            _NONE,
            _NONE,
            np.empty(0, np.bool_),
            Csr(np.array([0, tokens]), np.zeros(tokens, np.int32)),
            Csr.empty(0),
            Cells.empty(),
            _NONE,
            stores=made.stores,
            tier_copies=made.copies,
            loads=made.loads,
            spills=made.spills,
            fetches=made.fetches,
        )
        self._number += 1
        host, self._host = self._host, None
        hasher = self._tier.host.hasher
        return NaturalWork(step, host, 1 if hasher is None else hasher.block_size, self._identity)

    def take_counts(self) -> dict[str, float]:
        """Return what changed since the last call, as ``host_loaded_tokens`` or ``disk_loaded_bytes``."""
        found = self._tier.statistics()
        tiers = {"host": found.of_host, self._behind: found.of_store}
        now: dict[str, int] = {f"{of}_{name}": getattr(one, name) for of, one in tiers.items() for name in _COUNTS}
        before, self._counted = self._counted, now
        return {name: more for name, count in now.items() if (more := count - before.get(name, 0))}


class NaturalTierWorker:
    """Carries out NaturalWork. The worker of the natural layout calls ``begin`` and ``load``.

    Args:
        opened: Opens the store behind host memory; ``None`` without one.
        rank: Number of this worker.
    """

    def __init__(self, opened: Open | None = None, rank: int = 0) -> None:
        self._opened, self._rank = opened, rank
        self._store: BlockStore | None = None
        self._copier: HostTierCopier | None = None
        self._step: Step | None = None

    def begin(self, work: NaturalWork, arena: DeviceMemory) -> None:
        """Read the blocks to store, before the step changes any. O(bytes).

        Args:
            work: The step.
            arena: The memory of the device.

        Raises:
            ConfigError: The host lacks memory, the store cannot be opened, or the first step did not arrive.
        """
        if work.host is not None:
            if self._opened is not None:
                self._store = self._opened(work.identity, _sizes(work.host, work.hash_block))
            self._copier = HostTierCopier(arena, work.host, store=self._store, hash_block=work.hash_block)
        if self._copier is None:
            raise ConfigError("the first step, which has the layout of host memory, did not arrive: restart the engine")
        self._step = step = _of_rank(work.step, self._rank)
        self._copier.check(step)
        self._copier.begin(step)

    def load(self) -> None:
        """Write the blocks that come up, after the step's other operations and before its forward. O(bytes)."""
        if self._copier is not None and self._step is not None:
            self._copier.load(self._step)

    def answers(self) -> dict[int, int]:
        """Return the transfers that ended in the step that has run: 1 for those that arrived, 0 for lost ones."""
        if self._copier is None or self._step is None:
            return {}
        arrived, lost, _ = self._copier.finish(self._step)
        self._step = None
        return {**dict.fromkeys(arrived.tolist(), 1), **dict.fromkeys(lost.tolist(), 0)}

    def close(self) -> None:
        """Wait for transfers that have begun, and close the store."""
        if self._copier is not None:
            self._copier.close()
        if self._store is not None:
            self._store.close()


def _of_rank(step: Step, rank: int) -> Step:
    """Return a step with the keys of one rank, whose blocks have other heads. Only the first rank writes marks."""
    if not rank or not (step.spills or step.fetches):
        return step
    spills, fetches = (
        tuple(replace(one, keys=tuple(map(partial(_key_of_rank, rank), one.keys)), mark=b"", tail=b"") for one in some)
        for some in (step.spills, step.fetches)
    )
    return replace(step, spills=spills, fetches=fetches)


def _key_of_rank(rank: int, key: bytes) -> bytes:
    return (int.from_bytes(key[:4], "little") ^ rank).to_bytes(4, "little") + key[4:]
