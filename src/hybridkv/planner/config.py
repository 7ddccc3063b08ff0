"""What a plan says: groups of layers, and where every layer's pages lie in one arena.

    arena   [ tensor 0: block 0 | block 1 | ... | block N-1 ][ tensor 1: ... ] ...
            ^ offset_bytes      ^ offset_bytes + block_stride_bytes

A layer's page of block ``b`` starts at ``offset_bytes + b * block_stride_bytes`` of its tensor and is
``page_size_bytes`` of the layer's spec long. A tensor may be shared by layers of different groups
(``shared_by``): a block belongs to one group at a time, so their pages never meet.

That is the reference layout, where all groups have the same blocks. In the natural layout (natural.py) every layer
has a tensor of its own, all tensors run through the whole arena, and blocks are those of the group's class. Its unit
of memory is the slab, which a class of groups cuts into blocks:

    arena    [ slab 0: null | slab 1 | slab 2 | ... ]            num_slabs * slab_bytes
    class A  [ 0            | 1      | 2      | ... ]            k = 1: a block is a slab
    class B  [ 0   -   -    | 3 4 5  | 6 7 8  | ... ]            k = 3: block ids, null 0, 1 and 2 unused

Block ``id`` of a class starts at byte ``id * block_bytes``, whatever its slab, so that a layer's pages are one strided
view of the arena. That takes k blocks which fill the slab to the byte: ``k * block_bytes == slab_bytes``.

What a config holds is counted in units that the pool gives out: blocks in the reference layout, slabs in the natural
one, where a class that needs n blocks takes ``ceil(n / k)`` slabs. It is exact: what is reported can be allocated, one
more block could not.
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
"""A layer's name and what it keeps."""


ALIGNMENT_BYTES: Final = 256
"""Every page starts on a multiple of this: what cudaMalloc guarantees of an address."""


@dataclass(frozen=True, slots=True)
class SlabClass:
    """Groups whose blocks take equal bytes: they share ids and slabs.

    block_bytes: from one block to the next, padding included. blocks_per_slab: k. groups: their numbers.
    """

    block_bytes: Positive
    blocks_per_slab: Positive
    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        check_types(self)
        if not self.groups:
            raise ConfigError("a class of slabs needs a group")


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """How the arena is cut.

    slab_bytes: of one slab. num_slabs: slab 0, the null slab of every class, included.
    kernel_blocks: for each group, the parts that a block is made of, each holding that part of every layer;
    1 where the kernel reads whole blocks.
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
                    f"{one.blocks_per_slab} blocks of {one.block_bytes} bytes must fill a slab of {self.slab_bytes}"
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
        """The class that ``group`` is in. O(classes)."""
        return next(one for one in self.classes if group in one.groups)

    def slabs_for(self, blocks: tuple[int, ...]) -> int:
        """Fewest slabs that hold ``blocks[i]`` blocks of every group i: classes share none. O(groups)."""
        return sum(-(-sum(blocks[group] for group in one.groups) // one.blocks_per_slab) for one in self.classes)


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One strided run of pages in the arena.

    size: bytes of the run. shared_by: names of the layers whose pages lie here.
    offset_bytes: start in the arena. block_stride_bytes: from one block's page to the next.
    """

    size: int
    shared_by: tuple[str, ...]
    offset_bytes: int
    block_stride_bytes: int

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share a block table, and the spec they were merged into.

    is_eagle_group: a draft head reads these layers, so the last block of a hit is computed anew.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    is_eagle_group: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if not self.layer_names:
            raise ConfigError("a group needs at least one layer")

    @property
    def layer_specs(self) -> tuple[KVCacheSpec, ...]:
        """The spec of every layer, in the order of ``layer_names``."""
        return tuple(self.spec.layer_spec(name) for name in self.layer_names)

    @property
    def content_bytes(self) -> int:
        """Bytes that one block holds in all layers, padding left out."""
        return sum(spec.content_bytes for spec in self.layer_specs)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Groups, tensors and the number of blocks, the null block (id 0) included.

    slabs: of the natural layout, None in the reference layout; with slabs, num_blocks counts those, and
    ``blocks_of`` the blocks of a group.
    """

    num_blocks: Positive
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroupSpec, ...]
    slabs: SlabLayout | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if not self.groups:
            raise ConfigError("a KVCacheConfig needs at least one group")
        classes = () if self.slabs is None else self.slabs.classes
        most = self.num_blocks * max((one.blocks_per_slab for one in classes), default=1)
        if most > MOST_COUNT:
            raise ConfigError(
                f"{format_count(most)} blocks are more than there are ids (int32, {format_count(MOST_COUNT)}): "
                "lower memory (--memory), or raise block_size (--block-size)"
            )

    def blocks_of(self, group: int) -> int:
        """Ids that blocks of ``group`` have: 0 .. this - 1, those of the null block or slab included."""
        return self.num_blocks * self.null_blocks_of(group)

    def null_blocks_of(self, group: int) -> int:
        """Blocks of the null block or slab: requests have ids of ``group`` from this one on."""
        return 1 if self.slabs is None else self.slabs.class_of(group).blocks_per_slab

    def owner_of(self, group: int) -> int:
        """The first group whose blocks have the bytes of ``group``'s under the same ids: that of its class."""
        return group if self.slabs is None else self.slabs.class_of(group).groups[0]

    def block_bytes_of(self, group: int) -> int:
        """Bytes that one block of ``group`` takes, padding included."""
        return self.unit_bytes if self.slabs is None else self.slabs.class_of(group).block_bytes

    def kernel_blocks_of(self, group: int) -> int:
        """Equal pieces that a kernel sees of a block of ``group``."""
        return 1 if self.slabs is None else self.slabs.kernel_blocks[group]

    @property
    def unit(self) -> str:
        """What num_blocks counts, in a word."""
        return "block" if self.slabs is None else "slab"

    @property
    def unit_bytes(self) -> int:
        """Bytes of a block, or of a slab."""
        return (
            sum(tensor.block_stride_bytes for tensor in self.tensors) if self.slabs is None else self.slabs.slab_bytes
        )

    def units_for(self, blocks: Sequence[int]) -> int:
        """Blocks, or fewest slabs, that hold ``blocks[i]`` blocks of every group i. O(groups)."""
        return sum(blocks) if self.slabs is None else self.slabs.slabs_for(tuple(blocks))

    @property
    def arena_bytes(self) -> int:
        """Bytes that all tensors need together."""
        if self.slabs is not None:
            return self.slabs.arena_bytes
        return max((t.offset_bytes + t.size for t in self.tensors), default=0)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """One way to lay out a model. config: makes it, of as many blocks or slabs.

    unit_bytes: of a block or slab. needed_units: for one request and the sinks, the null one included.
    """

    unit_bytes: int
    needed_units: int
    config: Callable[[int], KVCacheConfig]

    @property
    def needed_bytes(self) -> int:
        """Bytes of ``needed_units``."""
        return self.needed_units * self.unit_bytes


# -- what a config holds

_ANY_LENGTH: Final = 1 << 62
"""Tokens of a request that no memory holds, if any layer keeps them all."""


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """One group. kind: class of its spec. page_bytes: one block in one layer (of a uniform type: in all).

    block_bytes: what one block holds in all layers of the group. padding_bytes: what a block takes beyond that,
    in its pages and in tensors where the group has no layer. blocks_per_request: of a request of the longest context.
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
    """A plan in numbers.

    num_blocks: the null block included. block_bytes: what one block takes, padding included. In the natural layout
    both are of slabs. unused_bytes: memory left over, less than one block. padding_bytes: lost inside blocks while one
    request of the longest context runs. tokens_that_fit: the longest request that all blocks but the null block and
    sinks can hold; None where a request of any length fits (no layer keeps every token).
    longest_context: the same, no longer than max_model_len. concurrency: how many requests of the longest
    context fit, sharing nothing; behind the point, what is left over as a part of what one more would take.
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
    """Most blocks that one request within ``limits`` needs in each group."""
    return tuple(group.spec.max_request_blocks(limits) for group in groups)


def longest_that(fits: Callable[[int], bool]) -> int | None:
    """The largest n that fits where no smaller one does not; None where any fits. Doubling, then bisection."""
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
    """The longest request that ``config`` can hold beside its sinks, whatever ``limits.max_model_len`` says.

    keeps: count only the blocks of layers that keep this. None where a request of any length fits. No group's need
    falls as a request grows.
    """
    sinks = reserved_blocks(config.groups, limits)
    counted = [keeps is None or group.spec.keeps is keeps for group in config.groups]

    def fits(tokens: int) -> bool:
        needed = blocks_needed(config.groups, replace(limits, max_model_len=tokens))
        blocks = [sink + own * count for sink, own, count in zip(sinks, needed, counted, strict=True)]
        return config.units_for(blocks) < config.num_blocks

    return longest_that(fits)


def reserved_blocks(groups: Sequence[KVCacheGroupSpec], limits: RequestLimits) -> tuple[int, ...]:
    """Blocks of each group that belong to the layers, whoever runs: those of sinks."""
    return tuple(group.spec.reserved_blocks(limits.cp) for group in groups)


def copies_that_fit(config: KVCacheConfig, limits: RequestLimits, blocks: Sequence[int]) -> tuple[int, float]:
    """How often ``blocks[i]`` blocks of every group i fit beside the sinks.

    The second number adds what is left over, as a part of what one more takes: its floor is the first.
    Where no block is needed, every unit counts as one.
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
        raise AssertionError("a pool of blocks holds no endless number of them")
    left, more = usable - units(most), units(most + 1) - units(most)
    # one division: exact where units are blocks
    return most, (most * more + left) / more


def capacity_of(config: KVCacheConfig, memory_bytes: int, limits: RequestLimits) -> Capacity:
    """The numbers of a config planned for ``memory_bytes`` and requests within ``limits``."""
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
