"""Slabs: the natural layout's unit of memory, which a class of groups cuts into blocks.

    arena    [ slab 0: null | slab 1 | slab 2 | ... ]            num_slabs * slab_bytes
    class A  [ 0            | 1      | 2      | ... ]            k = 1: a block is a slab
    class B  [ 0   -   -    | 3 4 5  | 6 7 8  | ... ]            k = 3: block ids, null 0, 1 and 2 unused

Block ``id`` of a class starts at byte ``id * block_bytes``, whatever its slab, so that a layer's pages are one strided
view of the arena. That takes k blocks which fill the slab to the byte: ``k * block_bytes == slab_bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hybridkv.arguments import check_fields, each, integer, one_of
from hybridkv.errors import ConfigError

ALIGNMENT_BYTES: Final = 256
"""Every page starts on a multiple of this: what cudaMalloc guarantees of an address."""


@dataclass(frozen=True, slots=True)
class SlabClass:
    """Groups whose blocks take equal bytes: they share ids and slabs.

    block_bytes: from one block to the next, padding included. blocks_per_slab: k. groups: their numbers.
    """

    block_bytes: int
    blocks_per_slab: int
    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, integer, "block_bytes", "blocks_per_slab")
        check_fields(self, each(integer), "groups")
        if self.block_bytes < 1 or self.blocks_per_slab < 1 or not self.groups:
            raise ConfigError(
                f"a class of slabs needs a group and at least one block of one byte, got {len(self.groups)} groups, "
                f"{self.blocks_per_slab} blocks of {self.block_bytes} bytes"
            )


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """How the arena is cut.

    slab_bytes: of one slab. num_slabs: slab 0, the null slab of every class, included.
    kernel_blocks: for each group, the parts that a block is made of, each holding that part of every layer;
    1 where the kernel reads whole blocks.
    """

    slab_bytes: int
    num_slabs: int
    classes: tuple[SlabClass, ...]
    kernel_blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, integer, "slab_bytes", "num_slabs")
        check_fields(self, each(one_of(SlabClass)), "classes")
        check_fields(self, each(integer), "kernel_blocks")
        if self.num_slabs < 1:
            raise ConfigError(f"num_slabs must be at least 1 (the null slab), got {self.num_slabs}")
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
