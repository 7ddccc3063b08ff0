"""The tiers of an engine: host memory behind its device, and a store behind the host."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hybridkv.cache import CacheOptions, KVCacheManager, Medium
from hybridkv.errors import ConfigError
from hybridkv.planner import Plan, tier_plan
from hybridkv.runner.identity import blocks_identity
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.options import EngineOptions
from hybridkv.runner.probe import Stored, page_layout, probe
from hybridkv.runner.shares import splits_in, whole_identity
from hybridkv.specs import AttentionSpec
from hybridkv.stores import BlockStore, DiskFolder, StoreChoice
from hybridkv.stores.marks import entry_sizes
from hybridkv.tiers import HostTier, Prefixes, StoreLookups, parts_of
from hybridkv.worker.pages import PagePart
from hybridkv.worker.ranks import Run, Split, Strip
from hybridkv.worker.store import StoreForm


@dataclass(frozen=True, slots=True)
class Behind:
    """What lies behind the device.

    Attributes:
        host_memory: bytes of host memory that keep resume points, or a size like ``"8GiB"``; None for none.
        store: a store behind the host, which outlives the engine; None for none.

    Raises:
        ConfigError: there is a store without host memory.
    """

    host_memory: int | str | None = None
    store: StoreChoice | None = None

    def __post_init__(self) -> None:
        if self.store is not None and self.host_memory is None:
            raise ConfigError("a store needs host memory in front of it: give host_memory (--host-memory), too")


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of an engine.

    Attributes:
        host: the host tier.
        store: the store behind it; None without one.
        hash_block: tokens of a hash block.
        form: how blocks lie in the store; None without one.
    """

    host: HostTier
    store: BlockStore | None = None
    hash_block: int = 1
    form: StoreForm | None = None

    @property
    def of_runner(self) -> dict[str, Any]:
        """The arguments of a ModelRunner."""
        return {"tier": self.host.host.config, "store": self.store, "hash_block": self.hash_block, "form": self.form}


def open_tiers(
    behind: Behind, loaded: LoadedModel, plan: Plan, cache: KVCacheManager, *, options: EngineOptions, undo: ExitStack
) -> Tiers | None:
    """Open the tiers behind a cache; return None if there are none.

    Args:
        behind: what lies behind the device.
        loaded: the model.
        plan: the plan of the device's cache.
        cache: the device's cache.
        options: how the engine runs; shares of tenants also hold on the host.
        undo: closes the store.

    Raises:
        ConfigError: the cache cannot have tiers, or the store cannot be opened.
        CapacityError: the host memory is too small.
        UnsupportedModelError: a layer keeps something that tiers cannot hold.
    """
    if behind.host_memory is None:
        return None
    kept = CacheOptions(eviction=cache.eviction, shares=options.shares, medium=Medium.CPU)
    held = tier_plan(plan, behind.host_memory)
    host = KVCacheManager(held, hasher=cache.hasher, enable_kv_cache_events=options.kv_events, options=kept)
    if behind.store is None or cache.hasher is None:
        return Tiers(HostTier(cache, host))
    choice = behind.store
    if loaded.share is not None and isinstance(choice, DiskFolder):
        choice = choice.of_rank(loaded.share.rank, loaded.share.ranks)
    hash_block = cache.hasher.block_size
    form, identity, sizes = _form(loaded, plan, hash_block)
    prefixes = Prefixes(parts_of(host, form.kinds, form.counts), identity, hash_block)
    store = choice.open(identity, entry_sizes(sizes, hash_block))
    undo.callback(store.close)
    threads = None
    if not choice.looks_up_at_once:
        threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridkv-lookup")
        undo.callback(threads.shutdown)
    lookups = StoreLookups(store, prefixes, threads, clock=time.monotonic)
    return Tiers(HostTier(cache, host, lookups=lookups), store, hash_block, form)


def _form(loaded: LoadedModel, plan: Plan, hash_block: int) -> tuple[StoreForm, bytes, set[int]]:
    """Return how blocks lie in a store, the identity of these bytes, and the sizes of shares.

    The identity is that of the whole model. It knows neither groups nor ranks, so engines of other ranks, or with other
    groups in other memory, have it in common.
    """
    layout, groups = page_layout(plan.model, probe(loaded.model)), plan.config.groups
    group_of = {name: number for number, group in enumerate(groups) for name in group.layer_names}
    splits, rows, whole = dict[str, tuple[Split, ...]](), dict[str, int](), set[str]()
    for name in (layer.name for layer in plan.model.layers if layout.get(layer.name)):
        spec, shapes = groups[group_of[name]].spec.layer_spec(name), [part.shape for part in layout[name]]
        known = splits_in(loaded.share, name, spec, shapes)
        splits[name] = tuple(Split(-1, (Run(1, shape[-1]),)) for shape in shapes) if known is None else known
        rows[name] = spec.num_states if isinstance(spec, AttentionSpec) else 1
        if loaded.share is not None and loaded.share.has_whole(name, spec):
            whole.add(name)
    rank = (0, 1) if loaded.share is None else (loaded.share.rank, loaded.share.ranks)
    form = StoreForm.of(plan.config, splits, *rank, whole)
    sizes = {
        sum(rows[one.layer] * _row_bytes(one, layout[one.layer][one.part]) for one in share.strips)
        for shares in form.shares
        for share in shares
    }
    said = [
        (name, form.kinds[group_of[name]], rows[name], [(str(part.dtype), of.axis, of.runs) for part, of in held])
        for name in splits
        for held in [list(zip(layout[name], splits[name], strict=True))]
    ]
    identity = whole_identity(loaded.model, loaded.share, Stored.of_plan(plan))
    # one layout resumes inside blocks, the other one does not: its look-ups would be misled by such marks
    return form, blocks_identity(identity, said, hash_block, plan.layout), sizes


def _row_bytes(strip: Strip, part: PagePart) -> int:
    """Return the bytes of a strip of one token or state."""
    return part.token_bytes // part.shape[strip.axis] * strip.length
