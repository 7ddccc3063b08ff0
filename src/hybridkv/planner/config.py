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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hybridkv.arguments import Positive, check_types
from hybridkv.errors import ConfigError
from hybridkv.specs import KVCacheSpec
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
