"""The contents of a plan: groups of layers, and the place of every layer's pages in one arena.

    arena   [ tensor 0: block 0 | block 1 | ... | block N-1 ][ tensor 1: ... ] ...
            ^ offset_bytes      ^ offset_bytes + block_stride_bytes

A layer's page of block ``b`` starts at ``offset_bytes + b * block_stride_bytes``. Its length is the
``page_size_bytes`` of the layer's spec. Layers of different groups may share a tensor (``shared_by``).
A block belongs to one group at a time, so their pages never overlap.

In the reference layout, drawn above, all groups have blocks of one size. In the natural layout (natural.py) every
layer has a tensor of its own, and all tensors run through the whole arena. Its unit of memory is the slab. A class of
groups cuts slabs into blocks of its own size:

    arena    [ slab 0: null | slab 1 | slab 2 | ... ]            num_slabs * slab_bytes
    class A  [ 0            | 1      | 2      | ... ]            k = 1: a block is a slab
    class B  [ 0   -   -    | 3 4 5  | 6 7 8  | ... ]            k = 3: block ids, null 0, 1 and 2 unused

Block ``id`` of a class starts at byte ``id * block_bytes``, whatever its slab. So a layer's pages are one strided
view of the arena. That requires k blocks that fill the slab to the byte: ``k * block_bytes == slab_bytes``.

Capacity is counted in the units that the pool allocates: blocks in the reference layout, slabs in the natural one. A
class that needs n blocks takes ``ceil(n / k)`` slabs. The capacity is exact: a reported amount can be allocated, and
one more block cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hybridkv.arguments import Positive, check_types, instance, integer
from hybridkv.errors import ConfigError
from hybridkv.specs import Keeps, KVCacheSpec, RequestLimits
from hybridkv.units import MOST_COUNT, format_count

NamedSpec = tuple[str, KVCacheSpec]
"""A layer's name and its spec."""


ALIGNMENT_BYTES: Final = 256
"""Every page starts on a multiple of this, the alignment that cudaMalloc guarantees for an address."""


@dataclass(frozen=True, slots=True)
class SlabClass:
    """Groups with blocks of equal bytes: they share ids and slabs.

    Attributes:
        block_bytes: bytes from one block to the next, padding included.
        blocks_per_slab: k, the blocks that fill a slab.
        groups: the numbers of the groups.
    """

    block_bytes: Positive
    blocks_per_slab: Positive
    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        check_types(self)
        if not self.groups:
            raise ConfigError("a class of slabs has no group: name at least one")


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The division of the arena into slabs.

    Attributes:
        slab_bytes: bytes of one slab.
        num_slabs: number of slabs, with slab 0, the null slab of every class.
        classes: the classes of groups. Each group is in exactly one.
        kernel_blocks: for each group, the equal parts of a block. A part holds its share of every layer's page. 1 where
            the attention kernel reads whole blocks.
    """

    slab_bytes: int
    num_slabs: Positive
    classes: tuple[SlabClass, ...]
    kernel_blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        check_types(self)
        if sorted(group for one in self.classes for group in one.groups) != list(range(len(self.kernel_blocks))):
            raise ConfigError("every group must be in exactly one class of slabs")
        for one in self.classes:
            if one.blocks_per_slab * one.block_bytes != self.slab_bytes:
                raise ConfigError(
                    f"{one.blocks_per_slab} blocks of {one.block_bytes} bytes do not fill a slab of {self.slab_bytes} "
                    "bytes: make blocks_per_slab * block_bytes equal to slab_bytes"
                )
            for parts in {self.kernel_blocks[group] for group in one.groups}:
                if parts < 1 or one.block_bytes % (parts * ALIGNMENT_BYTES):
                    raise ConfigError(
                        f"a block of {one.block_bytes} bytes cannot be cut into {parts} kernel blocks that start on "
                        f"multiples of {ALIGNMENT_BYTES}"
                    )

    @property
    def arena_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.num_slabs * self.slab_bytes

    def class_of(self, group: int) -> SlabClass:
        """Return the class of a group. O(classes).

        Args:
            group: number of the group.
        """
        return next(one for one in self.classes if group in one.groups)

    def slabs_for(self, blocks: tuple[int, ...]) -> int:
        """Return the fewest slabs that hold the blocks; classes share no slab. O(groups).

        Args:
            blocks: number of blocks of each group.
        """
        return sum(-(-sum(blocks[group] for group in one.groups) // one.blocks_per_slab) for one in self.classes)


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One strided run of pages in the arena.

    Attributes:
        size: bytes of the run.
        shared_by: names of the layers with pages in this tensor.
        offset_bytes: start of the run in the arena.
        block_stride_bytes: bytes from one block's page to the next.
    """

    size: int
    shared_by: tuple[str, ...]
    offset_bytes: int
    block_stride_bytes: int

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share a block table.

    Attributes:
        layer_names: names of the layers.
        spec: the spec that the layers' specs merge into.
        is_eagle_group: whether a draft head reads these layers. Then the last block of a cache hit is computed again.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    is_eagle_group: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if not self.layer_names:
            raise ConfigError("a group has no layers: name at least one")

    @property
    def layer_specs(self) -> tuple[KVCacheSpec, ...]:
        """The spec of every layer, in the order of ``layer_names``."""
        return tuple(self.spec.layer_spec(name) for name in self.layer_names)

    @property
    def content_bytes(self) -> int:
        """Bytes that one block holds in all layers, without padding."""
        return sum(spec.content_bytes for spec in self.layer_specs)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Groups, tensors and the number of blocks.

    Attributes:
        num_blocks: number of blocks, or of slabs in the natural layout. Includes the null block or slab (id 0).
        tensors: where the pages of each layer are.
        groups: the layers by block table. Methods take the index of a group in this tuple.
        slabs: the slabs of the natural layout; ``None`` in the reference layout.
        packed_block_bytes: bytes of a block in the reference layout where the pages of a group's layers lie side by
            side in a block (packed.py); ``None`` where each tensor is a run of pages of one layer position.
    """

    num_blocks: Positive
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroupSpec, ...]
    slabs: SlabLayout | None = None
    packed_block_bytes: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if not self.groups:
            raise ConfigError("a KVCacheConfig has no groups: give at least one")
        if self.slabs is not None and self.packed_block_bytes is not None:
            raise ConfigError("only the reference layout packs the pages of a block: drop packed_block_bytes")
        classes = () if self.slabs is None else self.slabs.classes
        most = self.num_blocks * max((one.blocks_per_slab for one in classes), default=1)
        if most > MOST_COUNT:
            raise ConfigError(
                f"{format_count(most)} blocks are more than there are ids (int32, {format_count(MOST_COUNT)}): "
                "lower memory (--memory), or raise block_size (--block-size)"
            )

    def blocks_of(self, group: int) -> int:
        """Return the number of block ids of a group, 0 included. In the natural layout ids of the null slab count too.

        Args:
            group: number of the group.
        """
        return self.num_blocks * self.null_blocks_of(group)

    def null_blocks_of(self, group: int) -> int:
        """Return the number of blocks in the null block or slab. Requests get ids of the group from this one on.

        Args:
            group: number of the group.
        """
        return 1 if self.slabs is None else self.slabs.class_of(group).blocks_per_slab

    def owner_of(self, group: int) -> int:
        """Return the first group of the class: its blocks are at the same bytes under the same ids.

        Args:
            group: number of the group.
        """
        return group if self.slabs is None else self.slabs.class_of(group).groups[0]

    def block_bytes_of(self, group: int) -> int:
        """Return the bytes of one block, padding included.

        Args:
            group: number of the group.
        """
        return self.unit_bytes if self.slabs is None else self.slabs.class_of(group).block_bytes

    def kernel_blocks_of(self, group: int) -> int:
        """Return the number of equal parts in which a kernel reads a block.

        Args:
            group: number of the group.
        """
        return 1 if self.slabs is None else self.slabs.kernel_blocks[group]

    @property
    def unit(self) -> str:
        """The name of the unit that ``num_blocks`` counts."""
        return "block" if self.slabs is None else "slab"

    @property
    def unit_bytes(self) -> int:
        """Bytes of a block, or of a slab in the natural layout."""
        if self.slabs is not None:
            return self.slabs.slab_bytes
        if self.packed_block_bytes is not None:
            return self.packed_block_bytes
        return sum(tensor.block_stride_bytes for tensor in self.tensors)

    def units_for(self, blocks: Sequence[int]) -> int:
        """Return the number of blocks, or the fewest slabs, that hold the blocks. O(groups).

        Args:
            blocks: number of blocks of each group.
        """
        return sum(blocks) if self.slabs is None else self.slabs.slabs_for(tuple(blocks))

    @property
    def arena_bytes(self) -> int:
        """Bytes that all tensors need together."""
        if self.slabs is not None:
            return self.slabs.arena_bytes
        if self.packed_block_bytes is not None:
            return self.num_blocks * self.packed_block_bytes
        return max((t.offset_bytes + t.size for t in self.tensors), default=0)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """One possible layout of a model.

    Attributes:
        unit_bytes: bytes of a block or slab.
        needed_units: units for one request and the sinks, the null unit included.
        config: makes the config for a number of blocks or slabs.
    """

    unit_bytes: int
    needed_units: int
    config: Callable[[int], KVCacheConfig]

    @property
    def needed_bytes(self) -> int:
        """Bytes of ``needed_units``."""
        return self.needed_units * self.unit_bytes


# -- capacity of a config

_ANY_LENGTH: Final = 1 << 62
"""More tokens than any memory holds. A request of this length fits only if no layer keeps every token."""


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """The capacity of one group.

    Attributes:
        kind: name of the class of the group's spec.
        layers: number of entries; a layer with an indexer has two.
        block_size: tokens per block.
        page_bytes: bytes of one block in one layer; in all layers for a uniform type.
        block_bytes: bytes that one block holds in all layers of the group, without padding.
        padding_bytes: further bytes of a block: in its pages, and in tensors where the group has no layer.
        blocks_per_request: blocks of a request of the longest context.
    """

    kind: str
    layers: int
    block_size: int
    page_bytes: int
    block_bytes: int
    padding_bytes: int
    blocks_per_request: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """The numbers of a plan.

    Attributes:
        memory_bytes: bytes that were planned for.
        arena_bytes: bytes of all tensors together.
        unused_bytes: memory that is left over, less than one block or slab.
        num_blocks: number of blocks, or of slabs in the natural layout, the null one included.
        block_bytes: bytes of one block or slab, padding included.
        padding_bytes: bytes lost inside blocks while one request of the longest context runs.
        tokens_that_fit: tokens of the longest request that fits next to the null block and the sinks. ``None`` where a
            request of any length fits, because no layer keeps every token.
        longest_context: the same, limited to ``max_model_len``.
        concurrency: number of requests of the longest context that fit without shared blocks. The fraction is the
            memory left over, divided by the memory that one more request takes.
        groups: the capacity of each group.
    """

    memory_bytes: int
    arena_bytes: int
    unused_bytes: int
    num_blocks: int
    block_bytes: int
    padding_bytes: int
    tokens_that_fit: int | None
    longest_context: int
    concurrency: float
    groups: tuple[GroupCapacity, ...]


def blocks_needed(groups: Sequence[KVCacheGroupSpec], limits: RequestLimits) -> tuple[int, ...]:
    """Return the most blocks that one request within ``limits`` needs in each group."""
    return tuple(group.spec.max_request_blocks(limits) for group in groups)


def longest_that(fits: Callable[[int], bool]) -> int | None:
    """Return the largest n for which 1 to n fit, by doubling and bisection; ``None`` if every n fits."""
    if fits(_ANY_LENGTH):
        return None
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def tokens_that_fit(config: KVCacheConfig, limits: RequestLimits, keeps: Keeps | None = None) -> int | None:
    """Return the tokens of the longest request that ``config`` holds next to its sinks, or ``None`` for any length.

    Ignores ``limits.max_model_len``. The search relies on a rule of all specs: no group needs fewer blocks for a longer
    request.

    Args:
        config: the config with a fixed number of blocks.
        limits: all other limits of the request.
        keeps: count only the blocks of layers that keep this; ``None`` for all layers.
    """
    sinks = reserved_blocks(config.groups, limits)
    counted = [keeps is None or group.spec.keeps is keeps for group in config.groups]

    def fits(tokens: int) -> bool:
        needed = blocks_needed(config.groups, replace(limits, max_model_len=tokens))
        blocks = [sink + own * count for sink, own, count in zip(sinks, needed, counted, strict=True)]
        return config.units_for(blocks) < config.num_blocks

    return longest_that(fits)


def reserved_blocks(groups: Sequence[KVCacheGroupSpec], limits: RequestLimits) -> tuple[int, ...]:
    """Return the number of blocks of each group that belong to the layers, not to requests: those of sinks."""
    return tuple(group.spec.reserved_blocks(limits.cp) for group in groups)


def copies_that_fit(config: KVCacheConfig, limits: RequestLimits, blocks: Sequence[int]) -> tuple[int, float]:
    """Return how many times the blocks fit next to the sinks, as an integer and as a fraction.

    The fraction adds the units left over, divided by the units that one more copy takes. Where no block is needed,
    every unit counts as one copy.

    Args:
        config: the config with a fixed number of blocks.
        limits: gives the context parallel ranks that share a sink.
        blocks: number of blocks of each group in one copy.
    """
    sinks = reserved_blocks(config.groups, limits)

    def units(copies: int) -> int:
        return config.units_for([own + copies * each for own, each in zip(sinks, blocks, strict=True)])

    usable = config.num_blocks - 1
    free = usable - units(0)
    if free <= 0 or not any(blocks):
        return max(free, 0), float(max(free, 0))
    most = longest_that(lambda copies: units(copies) <= usable)
    if most is None:
        raise AssertionError("a pool of finite size cannot hold any number of copies")
    left, more = usable - units(most), units(most + 1) - units(most)
    # one division: exact where units are blocks
    return most, (most * more + left) / more


def capacity_of(config: KVCacheConfig, memory_bytes: int, limits: RequestLimits) -> Capacity:
    """Return the numbers of a config.

    Args:
        config: the config with its number of blocks.
        memory_bytes: bytes that the config was planned for.
        limits: limits of one request.

    Raises:
        ConfigError: an argument has the wrong type.
    """
    instance("config", config, KVCacheConfig)
    memory_bytes = integer("memory_bytes", memory_bytes)
    instance("limits", limits, RequestLimits)
    fit = tokens_that_fit(config, limits)
    longest = limits.max_model_len if fit is None else min(limits.max_model_len, fit)
    # a pool without room for one token still has to be reported
    needed = blocks_needed(config.groups, replace(limits, max_model_len=max(1, longest)))
    groups = tuple(
        GroupCapacity(
            kind=type(group.spec).__name__,
            layers=len(group.layer_names),
            block_size=group.spec.block_size,
            page_bytes=group.spec.page_size_bytes,
            block_bytes=group.content_bytes,
            padding_bytes=config.block_bytes_of(at) - group.content_bytes,
            blocks_per_request=blocks,
        )
        for at, (group, blocks) in enumerate(zip(config.groups, needed, strict=True))
    )
    return Capacity(
        memory_bytes=memory_bytes,
        arena_bytes=config.arena_bytes,
        unused_bytes=memory_bytes - config.arena_bytes,
        num_blocks=config.num_blocks,
        block_bytes=config.unit_bytes,
        padding_bytes=sum(group.padding_bytes * group.blocks_per_request for group in groups),
        tokens_that_fit=fit,
        longest_context=longest,
        concurrency=copies_that_fit(config, limits, needed)[1],
        groups=groups,
    )
