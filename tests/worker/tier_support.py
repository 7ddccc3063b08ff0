"""The two arenas of a host tier as numpy bytes, what Steps make of them, and random Steps with transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from copy_support import ATTENTION, STATE, Bytes, copy_one, ids_of, spans

from hybridkv.planner.config import KVCacheConfig
from hybridkv.specs import FullAttentionSpec, MambaSpec
from hybridkv.step import Copy, Step, TierCopies
from hybridkv.testing.configs import model_config, natural_model_config
from hybridkv.worker import TORCH, BlockCopier, CopyKernels, HostTierCopier, PagedStorage
from small_steps import small_step

TIERS = {
    "one size": model_config(10, (ATTENTION, STATE), layers_per_group=2),
    "gaps": model_config(5, (STATE, ATTENTION, ATTENTION), layers_per_group=2, gap_bytes=4),
    "one class": natural_model_config(6, (ATTENTION, ATTENTION), (2, 2), layers_per_group=2),
    "classes": natural_model_config(5, (ATTENTION, STATE, ATTENTION), (2, 1, 3), layers_per_group=2),
}
"""A tier for each of CONFIGS: the same groups and blocks, another number."""

LARGE = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype="bfloat16")
LARGE_STATE = MambaSpec(block_size=16, shapes=((64, 3), (64, 128)), dtypes=("bfloat16", "float32"), cache_mode="align")
LARGE_CONFIGS = {
    "reference": tuple(model_config(n, (LARGE, LARGE_STATE), layers_per_group=4) for n in (120, 200)),
    "natural": tuple(
        natural_model_config(n, (LARGE, LARGE_STATE, LARGE), (2, 1, 4), layers_per_group=4) for n in (60, 90)
    ),
}
"""(device, tier) for a GPU: blocks of 64 KiB and more."""

Copied = tuple[int, int, int, int]
"""(transfer, group, source, destination) of a copy."""


def copies_of(copied: Sequence[Copied]) -> TierCopies:
    return TierCopies(*(np.array([one[i] for one in copied], np.int32) for i in range(4)))


def listed(copies: TierCopies) -> Iterator[tuple[int, int, int]]:
    """(group, source, destination) of each copy."""
    return zip(copies.group.tolist(), copies.source.tolist(), copies.destination.tolist(), strict=True)


def block_of(arena: Bytes, config: KVCacheConfig, group: int, block: int) -> list[Bytes]:
    return [arena[first : first + size].copy() for first, size in spans(config, group, block)]


def put(arena: Bytes, config: KVCacheConfig, group: int, block: int, held: list[Bytes]) -> None:
    for (first, size), part in zip(spans(config, group, block), held, strict=True):
        arena[first : first + size] = part


class Bytewise:
    """Both arenas, random at first. ``apply`` does to them what docs/contracts.md, 10 says that a Step does."""

    def __init__(self, config: KVCacheConfig, tier: KVCacheConfig, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.config, self.tier = config, tier
        self.device = rng.integers(0, 256, config.arena_bytes, np.uint8)
        self.host = rng.integers(0, 256, tier.arena_bytes, np.uint8)

    def apply(self, step: Step) -> None:
        stores = [block_of(self.device, self.config, group, source) for group, source, _ in listed(step.stores)]
        for copy in step.tier_copies:
            copy_one(self.host, self.tier, copy)
        for (group, _, to), held in zip(listed(step.stores), stores, strict=True):
            put(self.host, self.tier, group, to, held)
        for copy in step.copies:
            if copy.kind == "move":
                copy_one(self.device, self.config, copy)
        for group, block in step.zero.tolist():
            put(self.device, self.config, group, block, [part * 0 for part in self.block(group, block)])
        for copy in step.copies:
            if copy.kind != "move":
                copy_one(self.device, self.config, copy)
        for group, source, to in listed(step.loads):
            put(self.device, self.config, group, to, block_of(self.host, self.tier, group, source))

    def block(self, group: int, block: int) -> list[Bytes]:
        """What a block of the device holds."""
        return block_of(self.device, self.config, group, block)


class Tiers:
    """The library's device and tier with the same bytes as ``bytewise``, and the order in which a runner calls them."""

    def __init__(
        self, bytewise: Bytewise, device: str = "cpu", *, kernels: CopyKernels = TORCH, staging_bytes: int = 1 << 30
    ) -> None:
        self.storage = PagedStorage(bytewise.config, device=device)
        self.storage.arena.copy_(torch.from_numpy(bytewise.device))
        self.copier = BlockCopier(self.storage, kernels=kernels)
        self.tier = HostTierCopier(self.storage, bytewise.tier, staging_bytes=staging_bytes)
        self.tier.arena.copy_(torch.from_numpy(bytewise.host))

    def execute(self, step: Step) -> tuple[list[int], list[int]]:
        """Arrived and lost transfers."""
        self.copier.check(step)
        self.tier.check(step)
        self.tier.begin(step)
        self.copier.execute_before(step)
        self.tier.load(step)
        arrived, lost = self.tier.finish(step)
        assert arrived.dtype == lost.dtype == np.int32
        return arrived.tolist(), lost.tolist()

    @property
    def device(self) -> Bytes:
        held: Bytes = self.storage.arena.cpu().numpy()
        return held

    @property
    def host(self) -> Bytes:
        held: Bytes = self.tier.arena.numpy()
        return held

    def require_equal(self, bytewise: Bytewise) -> None:
        np.testing.assert_array_equal(self.device, bytewise.device)
        np.testing.assert_array_equal(self.host, bytewise.host)


def random_step(
    number: int,
    config: KVCacheConfig,
    tier: KVCacheConfig,
    rng: np.random.Generator,
    *,
    busy: frozenset[tuple[int, int]] = frozenset(),
    most: int = 8,
) -> Step:
    """Moves, zeroing, copies and transfers. busy: (group, block) of the device that the Step leaves alone.

    Transfers have numbers from 100 * ``number`` on: even ones store, odd ones load.
    """
    groups = range(len(config.groups))

    def some(of: KVCacheConfig, but: frozenset[tuple[int, int]] = frozenset()) -> tuple[int, int]:
        while True:
            group = int(rng.choice(groups))
            block = int(rng.choice(ids_of(of, group)))
            if (group, block) not in but:
                return group, block

    def copy(of: KVCacheConfig, kind: str, but: frozenset[tuple[int, int]] = frozenset()) -> Copy:
        group, to = some(of, but)
        return Copy("before", group, int(rng.choice(ids_of(of, group))), to, kind)

    def transfers(source: KVCacheConfig, to: KVCacheConfig, but: frozenset[tuple[int, int]], odd: int) -> list[Copied]:
        taken, made, transfer = list[tuple[int, int]](), list[Copied](), 100 * number + odd
        for _ in range(rng.integers(0, most)):
            group, block = some(to, but)
            here = spans(to, group, block)
            if any(a < b + size and b < a + other for a, other in here for b, size in taken):
                continue
            taken += here
            made.append((transfer, group, int(rng.choice(ids_of(source, group))), block))
            transfer += 2 * int(rng.random() < 0.4)
        return made

    moves = [copy(config, "move", busy) for _ in range(rng.integers(0, 3))]
    others = [copy(config, str(rng.choice(["block", "state"])), busy) for _ in range(rng.integers(0, 4))]
    zero = [some(config, busy) for _ in range(rng.integers(0, 3))]
    return replace(
        small_step(number),
        zero=np.array(zero, np.int32).reshape(-1, 2),
        copies=(*moves, *others),
        stores=copies_of(transfers(config, tier, frozenset(), 0)),
        tier_copies=tuple(copy(tier, str(rng.choice(["move", "block"]))) for _ in range(rng.integers(0, 4))),
        loads=copies_of(transfers(tier, config, busy, 1)),
    )


def transfers_of(step: Step) -> list[int]:
    return [*dict.fromkeys(step.stores.transfer.tolist()), *dict.fromkeys(step.loads.transfer.tolist())]
