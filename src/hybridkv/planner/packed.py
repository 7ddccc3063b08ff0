"""Groups of the reference layout for compressed caches: pages of several sizes lie side by side in a block.

Latents, rings and compressed keys have pages of different sizes, and kernels cannot read them padded. So every block
has the bytes of the widest group, and a group's pages fill it from its start:

    group 0    block 0 [ A | B |  -  ]  block 1 [ A | B |  -  ]  ...
    group 1    block 0 [  C  |   D   ]  block 1 [  C  |   D   ]  ...
               |<-- block_bytes -->|

A bucket is a set of layers that always hold the same token slots. Where a bucket has equally many layers of each page
size, one layer of each size is a repeat; a group takes whole repeats. Rule of vLLM 0.33
(``_get_packed_kv_cache_groups``):

repeats of a group   the least padding over all such buckets, at least the repeats of those with several page sizes
states and rings     a group takes as many layers as fit in the block that the other buckets need
other buckets        stay whole
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import lcm

from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, NamedSpec
from hybridkv.spec_fields import Feature
from hybridkv.specs import Keeps, KVCacheSpec, SlidingWindowMLASpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
from hybridkv.units import ceil_div, round_up


def needs_packing(layers: Sequence[NamedSpec]) -> bool:
    """Return whether pages have several sizes, and some cannot be padded: rings, compressed keys, windows of latents.

    vLLM decides by the kernels of such layers: they read blocks that hold the pages of all layers.
    """
    sizes = {spec.page_size_bytes for _, spec in layers}
    return len(sizes) > 1 and any(
        isinstance(spec, SlidingWindowMLASpec) or spec.features & {Feature.RATE, Feature.RING} for _, spec in layers
    )


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers that always hold the same token slots, and the same layers by the bytes of their page."""

    members: tuple[NamedSpec, ...]
    by_page: tuple[tuple[NamedSpec, ...], ...]

    @property
    def is_balanced(self) -> bool:
        """Whether there are equally many layers of each page size."""
        return len({len(column) for column in self.by_page}) == 1

    @property
    def repeats(self) -> int:
        """The most layers of one page size."""
        return max(len(column) for column in self.by_page)

    def widest_bytes(self, groups: int) -> int:
        """Return the bytes of a block of the largest of ``groups`` groups."""
        return sum(ceil_div(len(column), groups) * column[0][1].page_size_bytes for column in self.by_page)

    def dealt(self, groups: int) -> list[Sequence[NamedSpec]]:
        """Return the layers of each of ``groups`` groups. Whole repeats are dealt round robin."""
        if groups == 1:
            return [self.members]
        repeats = list(zip(*self.by_page, strict=True)) if self.is_balanced else [(one,) for one in self.members]
        return [tuple(chain.from_iterable(repeats[first::groups])) for first in range(groups)]


def packed_groups(layers: Sequence[NamedSpec]) -> tuple[KVCacheGroupSpec, ...]:
    """Return the groups by the rule of this module. O(layers^2).

    Raises ConfigError for a spec without a ``uniform_key``.
    """
    buckets = _buckets(layers)
    balanced = [one for one in buckets if one.is_balanced]
    least = max((one.repeats for one in balanced if len(one.by_page) > 1), default=0)
    repeats = _size_of_least_padding([one.repeats for one in balanced], least) if least else 0
    counts = [ceil_div(one.repeats, repeats) if repeats and one.is_balanced else 1 for one in buckets]
    shrinks = [_shrinks(one.members[0][1], repeats) for one in buckets]
    needed = max(
        one.widest_bytes(len(one.members) if shrink else count)
        for one, count, shrink in zip(buckets, counts, shrinks, strict=True)
    )
    groups: list[KVCacheGroupSpec] = []
    for one, count, shrink in zip(buckets, counts, shrinks, strict=True):
        fit = max(needed // one.members[0][1].page_size_bytes, 1)
        parts = max(count, ceil_div(len(one.members), fit)) if shrink else count
        groups += [
            KVCacheGroupSpec(tuple(name for name, _ in part), merged_or_uniform(part)) for part in one.dealt(parts)
        ]
    return tuple(groups)


def packed_block_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the bytes of the widest group, aligned as every layer needs."""
    widest = max(sum(spec.page_size_bytes for spec in group.layer_specs) for group in groups)
    return round_up(widest, lcm(*(spec.stride_multiple for group in groups for spec in group.layer_specs)))


def packed_config(groups: tuple[KVCacheGroupSpec, ...], block_bytes: int, num_blocks: int) -> KVCacheConfig:
    """Return the config of ``num_blocks`` blocks, null block included, with a tensor for each layer.

    Raises ConfigError where the pages of a group do not fit in a block.
    """
    tensors = []
    for group in groups:
        offset_bytes = 0
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
            size = (num_blocks - 1) * block_bytes + spec.page_size_bytes
            tensors.append(KVCacheTensor(size, (name,), offset_bytes, block_bytes))
            offset_bytes += spec.page_size_bytes
        if offset_bytes > block_bytes:
            raise ConfigError(
                f"a block of {block_bytes} bytes is too small for the {offset_bytes} bytes of a group's pages: enlarge "
                "packed_block_bytes to at least that"
            )
    return KVCacheConfig(num_blocks, tuple(tensors), groups, packed_block_bytes=block_bytes)


def merged_or_uniform(members: Sequence[NamedSpec]) -> KVCacheSpec:
    """Return one spec for layers that hold the same token slots: merged where they merge, else a uniform type."""
    try:
        return type(members[0][1]).merge([spec for _, spec in members])
    except ConfigError:
        return UniformTypeKVCacheSpecs(block_size=members[0][1].block_size, layers=tuple(members))


def _buckets(layers: Sequence[NamedSpec]) -> list[_Bucket]:
    """Return the buckets in the order of their first layer. States join only states of equal bytes, as in vLLM."""
    found: dict[Hashable, list[NamedSpec]] = {}
    for name, spec in layers:
        if spec.uniform_key is None:
            raise ConfigError(f"layer {name}: {type(spec).__name__} is not a known kind of spec: give it a uniform_key")
        page = spec.page_size_bytes if spec.keeps is Keeps.STATE else 0
        found.setdefault((spec.uniform_key, spec.block_size, spec.is_sharded, page), []).append((name, spec))
    return [_Bucket(tuple(members), _by_page(members)) for members in found.values()]


def _by_page(members: Sequence[NamedSpec]) -> tuple[tuple[NamedSpec, ...], ...]:
    found: dict[int, list[NamedSpec]] = {}
    for name, spec in members:
        found.setdefault(spec.page_size_bytes, []).append((name, spec))
    return tuple(map(tuple, found.values()))


def _shrinks(spec: KVCacheSpec, repeats: int) -> bool:
    """Return whether a group takes fewer layers rather than widen the block: states, rings, windows without repeats."""
    return spec.keeps in {Keeps.STATE, Keeps.RING} or (not repeats and isinstance(spec, SlidingWindowSpec))


def _size_of_least_padding(counts: Sequence[int], least: int) -> int:
    """Return the size, at least ``least``, to whose multiples ``counts`` round up with the least sum; ties: largest."""
    sizes = range(least, max(counts) + 1)
    return min(sizes, key=lambda size: (sum(round_up(count, size) for count in counts), -size))
