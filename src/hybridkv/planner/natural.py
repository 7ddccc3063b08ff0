"""The natural layout: pages keep their size, and a group's block is the pages of its layers one after another.

    slab       [ block | block | ... k of them ]
    block      [ layer 0 | layer 1 | ... | padding ]                        a kernel that reads whole blocks
    block      [ layer 0 | layer 1 | ... | padding ][ layer 0 | ... ]       two kernel blocks: the halves of each page

Layer i's view starts ``offset_bytes`` into the arena. Block ``id`` starts ``id * block_stride_bytes`` further, and its
kernel block j another ``j * block_stride_bytes / kernel blocks``.

The search decides which layers form groups, and how many blocks of each group fill a slab.

    layers   10 full (F), 52 sliding (S), equal pages
    groups   F10   S10 S10 S10 S10 S10   S2          sizes: layers side by side in one block
    slab     10 pages: k = 1 for groups of 10, k = 5 for the group of 2, nothing is lost

A slab of S bytes holds ``k = S // b`` blocks of b bytes; the rest of the slab is padding. The search prefers, in this
order:

1. padding of at most 1% in every group, whatever the mix of blocks (then 5%, 25%, any);
2. S of at most the preferred bytes (a 600th of the pool: many slabs, so that they move easily), else the smallest;
3. the lowest cost: one for each group (a block table for each request), and one for each layer in a group with k > 1
   (its blocks share slabs, so live blocks may have to move to free a slab);
4. the least padding; 5. the smallest S.

If the first answer gives fewer than 64 slabs, the search compares the first answers of all four bounds of padding, and
prefers the one that wastes the least: padding, the null slab, and a slab of each kind that is used in part.

Candidates are the S that up to 128 blocks of some group fill. For each, a dynamic program over the layers of a kind
finds the sizes of lowest cost; ties take larger groups. It takes O(candidates * layers^2) in numpy, under a second for
100 layers. The memory orders the answers. It also rules out slabs so large that the null slab and the blocks of one
request do not fit together. So taking the first answer that fits finds one whenever one exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import lcm
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.planner.config import (
    ALIGNMENT_BYTES,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    LayoutChoice,
    NamedSpec,
    SlabClass,
    SlabLayout,
)
from hybridkv.planner.reference import merged_types
from hybridkv.specs import Keeps, KVCacheSpec, RequestLimits
from hybridkv.units import MOST_BYTES, ceil_div, round_up, shown

SLABS_PREFERRED: Final = 600
"""Slabs that a pool should have. With at least this many, moving whole slabs had no measurable cost in simulations."""

SLABS_FEW: Final = 64
"""Below this many slabs, the null slab and the partly used slab of each class waste more than some padding would."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that may share a group, and the spec that any of them merge into."""

    members: tuple[NamedSpec, ...]
    spec: KVCacheSpec
    kernel_blocks: int

    @property
    def size(self) -> LayerKind:
        """How many layers there are, and how large."""
        spec = self.spec
        return LayerKind(len(self.members), spec.page_size_bytes, self.kernel_blocks, spec.stride_multiple)

    def pages(self) -> list[int]:
        """Return the bytes of each layer in a block, with every part aligned."""
        pages = (self.spec.layer_spec(name).page_size_bytes for name, _ in self.members)
        return [LayerKind(1, page, self.kernel_blocks).layer_bytes for page in pages]


@dataclass(frozen=True, slots=True)
class _Demand:
    """The kinds of layers of a model, and the blocks of each that one request and the sinks need."""

    kinds: tuple[_Kind, ...]
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, layers: Sequence[NamedSpec], limits: RequestLimits, kernel_block_size: int | None) -> _Demand:
        """Return the demand of ``layers``; raise ConfigError as ``natural_choices``."""
        kinds = [
            _Kind(tuple(members), spec, _kernel_blocks(spec, kernel_block_size))
            for members, spec in merged_types(layers)
        ]
        needs = [kind.spec.max_request_blocks(limits) + kind.spec.reserved_blocks(limits.cp) for kind in kinds]
        return cls(tuple(kinds), tuple(needs))

    @property
    def content_bytes(self) -> int:
        """Bytes of the blocks, without the padding of slabs."""
        return sum(need * sum(kind.pages()) for kind, need in zip(self.kinds, self.blocks, strict=True))

    def choice(self, packing: Packing) -> LayoutChoice:
        """Return the layout of ``packing``."""
        blocks: Counter[int] = Counter()
        for need, ks in zip(self.blocks, packing.blocks_per_slab, strict=True):
            for k in ks:
                blocks[k] += need
        needed = 1 + sum(ceil_div(count, k) for k, count in blocks.items())
        return LayoutChoice(packing.slab_bytes, needed, partial(_config_of, self.kinds, packing))


def natural_choices(
    layers: Sequence[NamedSpec], memory_bytes: int, limits: RequestLimits, kernel_block_size: int | None = None
) -> Iterator[LayoutChoice]:
    """Yield packings of ``layers`` that may hold one request, best first.

    Args:
        layers: names and specs.
        memory_bytes: bytes for the cache of one rank.
        limits: limits of one request.
        kernel_block_size: tokens that the attention kernel reads as one block; ``None`` for the whole block.

    Raises:
        ConfigError: there are no layers, or a block is not a multiple of the kernel's block.
    """
    demand = _Demand.of(layers, limits, kernel_block_size)
    most_bytes = memory_bytes - demand.content_bytes  # of the null slab; the others hold the content
    if most_bytes > 0:
        yield from map(demand.choice, _packings(demand.kinds, memory_bytes, most_bytes))


def least_choice(
    layers: Sequence[NamedSpec], limits: RequestLimits, kernel_block_size: int | None = None
) -> LayoutChoice:
    """Return the packing of ``layers`` that needs the least memory. Arguments and errors: see ``natural_choices``."""
    demand = _Demand.of(layers, limits, kernel_block_size)
    if len(demand.kinds) == 1:
        return demand.choice(_one_group(*demand.kinds))
    sizes = [kind.size for kind in demand.kinds]
    most_bytes = max(size.layer_bytes for size in sizes)  # the smallest slab
    for _ in range(2):  # a packing that needs less than the first answer has a slab of fewer bytes than this
        least = min(map(demand.choice, packings(sizes, 0, most_bytes=most_bytes)), key=lambda one: one.needed_bytes)
        most_bytes = least.needed_bytes - demand.content_bytes
    return least


def _config_of(kinds: Sequence[_Kind], packing: Packing, num_slabs: int) -> KVCacheConfig:
    """Return the config of ``num_slabs`` slabs, the null slab included."""
    dealt = list(zip(kinds, packing.sizes, strict=True))
    groups = tuple(group for kind, sizes in dealt for group in _deal(kind, sizes))
    parts = tuple(kind.kernel_blocks for kind, sizes in dealt for _ in sizes)
    ks = tuple(k for of in packing.blocks_per_slab for k in of)
    return natural_config(groups, slab_layout(packing.slab_bytes, num_slabs, ks, parts))


def _one_group(kind: _Kind) -> Packing:
    """Return the packing of layers that all share one group: a block is a slab."""
    block_bytes = round_up(sum(kind.pages()), kind.size.block_multiple)
    return Packing(block_bytes, ((len(kind.members),),), ((1,),))


def _packings(kinds: Sequence[_Kind], memory_bytes: int, most_bytes: int) -> Iterator[Packing]:
    """Yield packings of ``kinds``, best first.

    Candidates above ``most_bytes`` are left out, except in the first answer if that has few slabs.
    """
    if len(kinds) == 1:
        yield _one_group(*kinds)
        return
    sizes = [kind.size for kind in kinds]
    preferred = memory_bytes // SLABS_PREFERRED
    if memory_bytes < SLABS_FEW * next(packings(sizes, preferred)).slab_bytes:
        best = [next(packings(sizes, preferred, [target]), None) for target in PADDING_TARGETS]
        # the null slab, and a slab of each kind that is used in part
        yield min(
            filter(None, best),
            key=lambda one: worst_padding(sizes, one) + Fraction((1 + len(kinds)) * one.slab_bytes, memory_bytes),
        )
    yield from packings(sizes, preferred, most_bytes=most_bytes)


def _kernel_blocks(spec: KVCacheSpec, kernel_block_size: int | None) -> int:
    """Return the kernel blocks in a block; always 1 for states and rings."""
    if kernel_block_size is None or spec.keeps in {Keeps.STATE, Keeps.RING}:
        return 1
    if kernel_block_size < 1 or spec.block_size % kernel_block_size:
        raise ConfigError(
            f"block_size {spec.block_size} is not a multiple of kernel_block_size {kernel_block_size}: "
            "give a kernel_block_size that divides it, or change the model's block_size"
        )
    for rate in spec.rates:
        if Fraction(kernel_block_size) % rate:
            raise ConfigError(
                f"kernel_block_size {kernel_block_size} is not a multiple of tokens_per_state {rate}, so a kernel "
                "block would not hold whole states: give a multiple, or leave kernel_block_size out"
            )
    return spec.block_size // kernel_block_size


def _deal(kind: _Kind, sizes: Sequence[int]) -> Iterator[KVCacheGroupSpec]:
    """Yield groups of ``sizes`` layers, in order."""
    first = 0
    for size in sizes:
        part = kind.members[first : first + size]
        whole = kind.spec if size == len(kind.members) else type(kind.spec).merge([spec for _, spec in part])
        yield KVCacheGroupSpec(tuple(name for name, _ in part), whole)
        first += size


def slab_layout(
    slab_bytes: int, num_slabs: int, blocks_per_slab: Sequence[int], kernel_blocks: tuple[int, ...]
) -> SlabLayout:
    """Return the slabs. Groups of equal k, and so of equal block bytes, form a class; in order of first group."""
    groups: dict[int, list[int]] = {}
    for group, k in enumerate(blocks_per_slab):
        groups.setdefault(k, []).append(group)
    classes = tuple(SlabClass(slab_bytes // k, k, tuple(members)) for k, members in groups.items())
    return SlabLayout(slab_bytes, num_slabs, classes, kernel_blocks)


def natural_config(groups: tuple[KVCacheGroupSpec, ...], slabs: SlabLayout) -> KVCacheConfig:
    """Return the config of ``groups`` in ``slabs``, with a tensor for each layer.

    Raises ConfigError where the pages of a group do not fit in its block.
    """
    if len(groups) != len(slabs.kernel_blocks):
        raise ConfigError(
            f"there are {len(groups)} groups, but slabs for {len(slabs.kernel_blocks)}: give one for each"
        )
    tensors = tuple(tensor for at, group in enumerate(groups) for tensor in _tensors(group, at, slabs))
    return KVCacheConfig(slabs.num_slabs, tensors, groups, slabs)


def _tensors(group: KVCacheGroupSpec, at: int, slabs: SlabLayout) -> Iterator[KVCacheTensor]:
    """Yield the tensors of a group's layers in order, each aligned. The size reaches to the end of the last page."""
    of, parts = slabs.class_of(at), slabs.kernel_blocks[at]
    strides = slabs.num_slabs * of.blocks_per_slab * parts - 1
    offset_bytes = 0
    for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
        page_bytes = ceil_div(spec.page_size_bytes, parts)
        size = strides * (of.block_bytes // parts) + page_bytes
        yield KVCacheTensor(size, (name,), offset_bytes, of.block_bytes)
        offset_bytes += round_up(page_bytes, ALIGNMENT_BYTES)
    if offset_bytes > of.block_bytes // parts:
        raise ConfigError(
            f"group {at} needs {offset_bytes} bytes in each of the {parts} parts of a block, but a part has only "
            f"{of.block_bytes // parts} bytes: enlarge block_bytes to {offset_bytes * parts}"
        )


# -- the search

PADDING_TARGETS: Final = (Fraction(1, 100), Fraction(5, 100), Fraction(25, 100), None)
"""Accepted padding divided by content, strictest first; ``None`` accepts any."""

MOST_LAYERS: Final = 256
"""Most layers that are packed.

Time grows at most with their third power, memory with their second: about 3 s and 100 MiB for this many.
"""

_MOST_BLOCKS: Final = 128
_NEVER: Final = 1 << 40
"""The cost of a split that does not fit."""

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that may share a group: equal pages, equal needs.

    Attributes:
        layers: number of layers.
        page_bytes: bytes of one block in one layer.
        kernel_blocks: parts of a block.
        stride_multiple: bytes of which a block is a multiple.
    """

    layers: int
    page_bytes: int
    kernel_blocks: int = 1
    stride_multiple: int = 1

    @property
    def block_multiple(self) -> int:
        """Bytes of which a block is a multiple: aligned kernel blocks, and the stride that kernels need."""
        return lcm(self.kernel_blocks * ALIGNMENT_BYTES, self.stride_multiple)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer in a block: its page, with every part aligned."""
        return self.kernel_blocks * round_up(ceil_div(self.page_bytes, self.kernel_blocks), ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class Packing:
    """An answer of the search.

    Attributes:
        slab_bytes: bytes of a slab.
        sizes: for each kind, the number of layers in each group.
        blocks_per_slab: for each kind, the k of each of these groups.
    """

    slab_bytes: int
    sizes: tuple[tuple[int, ...], ...]
    blocks_per_slab: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Split:
    """The best split of a kind for each candidate S. ``choice[n]``: size of the last group among the first n layers."""

    cost: Int64
    padding: NDArray[np.float64]
    choice: NDArray[np.int16]


def packings(
    kinds: Sequence[LayerKind],
    preferred_bytes: int,
    targets: Sequence[Fraction | None] = PADDING_TARGETS,
    *,
    most_bytes: int | None = None,
) -> Iterator[Packing]:
    """Yield the packings of ``kinds``, best first. ``preferred_bytes`` changes the order only.

    ``targets`` is the accepted padding, strictest first. Candidates above ``most_bytes`` are left out. Without it, the
    target ``None`` always has a packing.

    Raises ConfigError for more than MOST_LAYERS layers, and for pages that are too large for int64 arithmetic.
    """
    if sum(kind.layers for kind in kinds) > MOST_LAYERS:
        raise ConfigError(
            f"the model has {sum(kind.layers for kind in kinds)} layers of {len(kinds)} kinds, but the natural layout "
            f"packs at most {MOST_LAYERS}: use the reference layout (--layout reference)"
        )
    largest = max(kind.layers * kind.layer_bytes for kind in kinds)
    if largest > MOST_BYTES // _MOST_BLOCKS:
        raise ConfigError(
            f"a block takes {shown(largest)} bytes in the layers of one kind, but at most {MOST_BYTES // _MOST_BLOCKS} "
            "can be planned: lower block_size (--block-size), or correct the sizes in the model's config"
        )
    slabs = _candidates(kinds)
    if most_bytes is not None:
        slabs = slabs[slabs <= most_bytes]
    for target in targets:
        splits = [_split(kind, slabs, target) for kind in kinds]
        cost = np.sum([one.cost for one in splits], axis=0)
        padding = np.max([one.padding for one in splits], axis=0)
        order = np.lexsort((slabs, padding, cost, np.maximum(slabs, preferred_bytes)))
        for at in order[cost[order] < _NEVER]:
            found = _pack(kinds, int(slabs[at]), [_sizes(one.choice[:, at]) for one in splits])
            if target is None or worst_padding(kinds, found) <= target:
                yield found


def worst_padding(kinds: Sequence[LayerKind], packing: Packing) -> Fraction:
    """Return the padding divided by the content, in the group with the highest share."""
    return max(
        Fraction(packing.slab_bytes, k * size * kind.page_bytes) - 1
        for kind, sizes, ks in zip(kinds, packing.sizes, packing.blocks_per_slab, strict=True)
        for size, k in zip(sizes, ks, strict=True)
    )


def _candidates(kinds: Sequence[LayerKind]) -> Int64:
    """Return every S that up to 128 blocks of some group fill and that holds a page of every kind, ascending."""
    blocks = [kind.layer_bytes * np.arange(1, kind.layers + 1) for kind in kinds]
    slabs = np.unique(np.multiply.outer(np.concatenate(blocks), np.arange(1, _MOST_BLOCKS + 1)))
    return slabs[slabs >= max(kind.layer_bytes for kind in kinds)].astype(np.int64)


def _split(kind: LayerKind, slabs: Int64, target: Fraction | None) -> _Split:
    """Return the sizes of lowest cost for every S: ``best(n) = min over g of best(n - g) + cost of a group of g``."""
    sizes = range(1, kind.layers + 1)
    prices, paddings = zip(*(_price(kind, size, slabs, target) for size in sizes), strict=True)
    cost = np.zeros((kind.layers + 1, slabs.size), np.int64)
    padding = np.zeros((kind.layers + 1, slabs.size))
    choice = np.zeros((kind.layers + 1, slabs.size), np.int16)
    for held in sizes:
        cost[held] = _NEVER
        # sizes go from the largest down and only a lower cost replaces a size, so ties keep the largest groups
        for size in range(held, 0, -1):
            asked = cost[held - size] + prices[size - 1]
            better = asked < cost[held]
            cost[held][better] = asked[better]
            padding[held][better] = np.maximum(padding[held - size], paddings[size - 1])[better]
            choice[held][better] = size
    return _Split(cost[-1], padding[-1], choice)


def _price(kind: LayerKind, size: int, slabs: Int64, target: Fraction | None) -> tuple[Int64, NDArray[np.float64]]:
    """Return the cost and the padding of a group of ``size`` layers for every S."""
    k = slabs // (size * kind.layer_bytes)
    padding = slabs / (np.maximum(k, 1) * (size * kind.page_bytes)) - 1
    fits = (k > 0) if target is None else (k > 0) & (padding <= float(target))
    return np.where(fits, np.where(k > 1, 1 + size, 1), _NEVER).astype(np.int64), padding


def _sizes(choice: NDArray[np.int16]) -> tuple[int, ...]:
    """Return the groups of one S, largest first."""
    found, left = [], len(choice) - 1
    while left:
        found.append(int(choice[left]))
        left -= found[-1]
    return tuple(sorted(found, reverse=True))


def _pack(kinds: Sequence[LayerKind], slab_bytes: int, sizes: Sequence[tuple[int, ...]]) -> Packing:
    """Return the packing with S rounded up until every group's aligned blocks and kernel blocks fill it."""
    ks = tuple(
        tuple(slab_bytes // (size * kind.layer_bytes) for size in of) for kind, of in zip(kinds, sizes, strict=True)
    )
    unit = lcm(*(k * kind.block_multiple for kind, of in zip(kinds, ks, strict=True) for k in of))
    found = Packing(round_up(slab_bytes, unit), tuple(sizes), ks)
    if all(kind.stride_multiple == 1 for kind in kinds):
        return found
    # a wide stride times every k has a large common multiple: fewer blocks in a slab may waste less
    return min(found, _pack_fewer(kinds, slab_bytes, sizes), key=partial(worst_padding, kinds))


def _pack_fewer(kinds: Sequence[LayerKind], slab_bytes: int, sizes: Sequence[tuple[int, ...]]) -> Packing:
    """Return the packing with S rounded up for k = 1 only, and the most blocks of each group that fill it aligned."""
    slab_bytes = round_up(slab_bytes, lcm(*(kind.block_multiple for kind in kinds)))
    ks = tuple(
        tuple(
            next(
                k
                for k in range(slab_bytes // (size * kind.layer_bytes), 0, -1)
                if slab_bytes % (k * kind.block_multiple) == 0
            )
            for size in of
        )
        for kind, of in zip(kinds, sizes, strict=True)
    )
    return Packing(slab_bytes, tuple(sizes), ks)
