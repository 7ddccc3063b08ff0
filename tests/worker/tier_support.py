"""The two arenas of a host tier as numpy bytes, what Steps make of them, and random Steps with transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from copy_support import ATTENTION, STATE, Bytes, copy_one, ids_of, spans

from hybridkv.planner.config import KVCacheConfig
from hybridkv.specs import FullAttentionSpec, MambaSpec
from hybridkv.step import Copy, Csr, Step, TierCopies
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
LARGE_CONFIGS: dict[str, tuple[KVCacheConfig, KVCacheConfig]] = {
    "reference": (
        model_config(120, (LARGE, LARGE_STATE), layers_per_group=4),
        model_config(200, (LARGE, LARGE_STATE), layers_per_group=4),
    ),
    "natural": (
        natural_model_config(60, (LARGE, LARGE_STATE, LARGE), (2, 1, 4), layers_per_group=4),
        natural_model_config(90, (LARGE, LARGE_STATE, LARGE), (2, 1, 4), layers_per_group=4),
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


def change(arena: Bytes, config: KVCacheConfig, step: Step) -> None:
    """Moves, zeroing and copies of a Step, on the device."""
    for copy in step.copies:
        if copy.kind == "move":
            copy_one(arena, config, copy)
    for group, block in step.zero.tolist():
        put(arena, config, group, block, [part * 0 for part in block_of(arena, config, group, block)])
    for copy in step.copies:
        if copy.kind != "move":
            copy_one(arena, config, copy)


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
        change(self.device, self.config, step)
        for group, source, to in listed(step.loads):
            put(self.device, self.config, group, to, block_of(self.host, self.tier, group, source))


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
        self.forward: Callable[[], None] = lambda: None

    def execute(self, step: Step) -> tuple[list[int], list[int]]:
        """Arrived and lost transfers."""
        self.copier.check(step)
        self.tier.check(step)
        self.tier.begin(step)
        self.copier.execute_before(step)
        self.tier.load(step)
        self.forward()
        arrived, lost, arrived_s = self.tier.finish(step)
        assert arrived.dtype == lost.dtype == np.int32
        assert arrived_s.shape == arrived.shape
        assert (arrived_s > 0).all()
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
        self.tier._lane.settle()
        np.testing.assert_array_equal(self.device, bytewise.device)
        np.testing.assert_array_equal(self.host, bytewise.host)


Spans = list[tuple[int, int]]


def touch(some: Spans, others: Spans) -> bool:
    return any(a < b + other and b < a + size for a, size in some for b, other in others)


def random_step(
    number: int,
    config: KVCacheConfig,
    tier: KVCacheConfig,
    rng: np.random.Generator,
    *,
    busy: Spans = [],  # noqa: B006  # never changed
    most: int = 8,
) -> Step:
    """Moves, zeroing, copies and transfers. busy: bytes of the device that the Step leaves alone.

    Transfers have numbers from 100 * ``number`` on: even ones store, odd ones load.
    """

    free = {
        (of is tier, group): [one for one in ids_of(of, group) if of is tier or not touch(spans(of, group, one), busy)]
        for of in (config, tier)
        for group in range(len(config.groups))
    }
    usable = [group for group in range(len(config.groups)) if free[False, group]]

    def any_group() -> int:
        return int(rng.choice(usable))

    def some(of: KVCacheConfig, group: int) -> int:
        return int(rng.choice(free[of is tier, group]))

    def copy(of: KVCacheConfig, kind: str) -> Copy:
        group = any_group()
        return Copy("before", group, some(of, group), some(of, group), kind)

    def transfers(source: KVCacheConfig, to: KVCacheConfig, odd: int) -> list[Copied]:
        taken, made, transfer = list[tuple[int, int]](), list[Copied](), 100 * number + odd
        for _ in range(rng.integers(0, most)):
            group = any_group()
            block = some(to, group)
            here = spans(to, group, block)
            if touch(here, taken):
                continue
            taken += here
            made.append((transfer, group, some(source, group), block))
            transfer += 2 * int(rng.random() < 0.4)
        return made

    if not usable:
        return small_step(number)
    moves = [copy(config, "move") for _ in range(rng.integers(0, 3))]
    others = [copy(config, str(rng.choice(["block", "state"]))) for _ in range(rng.integers(0, 4))]
    zero = [(group, some(config, group)) for group in (any_group() for _ in range(rng.integers(0, 3)))]
    return replace(
        small_step(number),
        zero=np.array(zero, np.int32).reshape(-1, 2),
        copies=(*moves, *others),
        stores=copies_of(transfers(config, tier, 0)),
        tier_copies=tuple(copy(tier, str(rng.choice(["move", "block"]))) for _ in range(rng.integers(0, 4))),
        loads=copies_of(transfers(tier, config, 1)),
    )


def run_random_steps(tiers: Tiers, bytewise: Bytewise, seed: int, steps: int) -> int:
    """Run random Steps, then empty ones until all is reported; return the Steps whose transfers all ended late.

    Both arenas must equal the loop's then. No Step touches a block of the device before its load is reported; on the
    host, stores and copies may at once use what earlier transfers read and write, because these are in order.
    """
    rng, loading, outstanding = np.random.default_rng(seed), dict[int, Spans](), set[int]()
    late, number = 0, 0
    while number < steps or outstanding:
        busy = [span for some in loading.values() for span in some]
        if number < steps:
            step = random_step(number, bytewise.config, bytewise.tier, rng, busy=busy)
            step = replace(step, token_ids=Csr.from_lists([[1]]))  # else it would wait
        else:
            step = small_step(number)
        bytewise.apply(step)
        outstanding |= {*transfers_of(step)}
        for transfer, (group, _, to) in zip(step.loads.transfer.tolist(), listed(step.loads), strict=True):
            loading.setdefault(transfer, []).extend(spans(bytewise.config, group, to))
        arrived, lost = tiers.execute(step)
        assert (lost, len({*arrived}), {*arrived} <= outstanding) == ([], len(arrived), True)
        assert number < steps or arrived  # an empty Step waits
        late += bool(transfers_of(step)) and not arrived
        outstanding -= {*arrived}
        loading = {transfer: some for transfer, some in loading.items() if transfer not in arrived}
        number += 1
    tiers.require_equal(bytewise)
    return late


def transfers_of(step: Step) -> list[int]:
    return [*dict.fromkeys(step.stores.transfer.tolist()), *dict.fromkeys(step.loads.transfer.tolist())]
