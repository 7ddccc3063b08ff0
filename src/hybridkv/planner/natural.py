"""The natural layout: pages keep their size, a group's block is the pages of its layers side by side.

    slab       [ block | block | ... k of them ]
    block      [ layer 0 | layer 1 | ... | padding ]                        a kernel that reads whole blocks
    block      [ layer 0 | layer 1 | ... | padding ][ layer 0 | ... ]       two kernel blocks: the halves of each page

Layer i's view starts ``offset_bytes`` into the arena; block ``id`` is ``id * block_stride_bytes`` further, its kernel
block j another ``j * block_stride_bytes / kernel blocks``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, NamedSpec
from hybridkv.planner.packing import LayerKind, Packing, packings
from hybridkv.planner.reference import layer_types
from hybridkv.planner.slabs import ALIGNMENT_BYTES, SlabClass, SlabLayout
from hybridkv.specs import Keeps, KVCacheSpec, RequestLimits, UniformTypeKVCacheSpecs
from hybridkv.units import ceil_div, round_up

SLABS_PREFERRED: Final = 600
"""Slabs that a pool should have: from there on, moving whole slabs costs nothing that simulation could see."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that may share a group. spec: what they merge into, whatever the group."""

    members: tuple[NamedSpec, ...]
    spec: KVCacheSpec
    kernel_blocks: int


@dataclass(frozen=True, slots=True)
class NaturalChoice:
    """One way to pack layers. needed_slabs: for one request and the sinks, the null slab included."""

    kinds: tuple[_Kind, ...]
    packing: Packing
    needed_slabs: int

    @property
    def needed_bytes(self) -> int:
        """Of ``needed_slabs``."""
        return self.needed_slabs * self.packing.slab_bytes

    def config(self, num_slabs: int) -> KVCacheConfig:
        """With ``num_slabs`` slabs, the null slab included."""
        dealt = zip(self.kinds, self.packing.sizes, strict=True)
        groups = tuple(group for kind, sizes in dealt for group in _deal(kind, sizes))
        parts = tuple(
            kind.kernel_blocks for kind, sizes in zip(self.kinds, self.packing.sizes, strict=True) for _ in sizes
        )
        ks = tuple(k for of in self.packing.blocks_per_slab for k in of)
        return natural_config(groups, slab_layout(self.packing.slab_bytes, num_slabs, ks, parts))


def natural_choices(
    layers: Sequence[NamedSpec], memory_bytes: int, limits: RequestLimits, kernel_block_size: int | None = None
) -> Iterator[NaturalChoice]:
    """Ways to pack ``layers``, best first (packing.py); the memory orders them, and leaves none out.

    kernel_block_size: tokens that the attention kernel reads as one block; None for the block itself.
    Raises ConfigError for no layers, and for a block that is no multiple of the kernel's.
    """
    kinds = _kinds(layers, kernel_block_size)
    needs = [kind.spec.max_request_blocks(limits) + kind.spec.reserved_blocks(limits.cp) for kind in kinds]
    for packing in _packings(kinds, memory_bytes // SLABS_PREFERRED):
        blocks: dict[int, int] = {}
        for need, ks in zip(needs, packing.blocks_per_slab, strict=True):
            for k in ks:
                blocks[k] = blocks.get(k, 0) + need
        yield NaturalChoice(kinds, packing, 1 + sum(ceil_div(count, k) for k, count in blocks.items()))


def _kinds(layers: Sequence[NamedSpec], kernel_block_size: int | None) -> tuple[_Kind, ...]:
    """Layers by type; one kind where all layers are of one uniform type."""
    if not layers:
        raise ConfigError("a plan needs at least one layer that keeps something in the cache")
    types = layer_types(layers)
    uniform = UniformTypeKVCacheSpecs.from_specs(dict(layers)) if len(types) > 1 else None
    if uniform is not None:
        return (_Kind(tuple(layers), uniform, _kernel_blocks(uniform, kernel_block_size)),)
    if len(types) == 1:
        types = [list(layers)]
    merged = [type(members[0][1]).merge([spec for _, spec in members]) for members in types]
    return tuple(
        _Kind(tuple(members), spec, _kernel_blocks(spec, kernel_block_size))
        for members, spec in zip(types, merged, strict=True)
    )


def _packings(kinds: Sequence[_Kind], preferred_bytes: int) -> Iterator[Packing]:
    """Those of packing.py; layers that all share a group are one block, which is the slab."""
    if len(kinds) == 1:
        (kind,) = kinds
        pages = [ceil_div(kind.spec.layer_spec(name).page_size_bytes, kind.kernel_blocks) for name, _ in kind.members]
        block_bytes = kind.kernel_blocks * sum(round_up(page, ALIGNMENT_BYTES) for page in pages)
        yield Packing(block_bytes, ((len(kind.members),),), ((1,),))
        return
    yield from packings(
        [LayerKind(len(kind.members), kind.spec.page_size_bytes, kind.kernel_blocks) for kind in kinds],
        preferred_bytes,
    )


def _kernel_blocks(spec: KVCacheSpec, kernel_block_size: int | None) -> int:
    """Kernel blocks in a block: of states always one."""
    if kernel_block_size is None or spec.keeps is Keeps.STATE:
        return 1
    if kernel_block_size < 1 or spec.block_size % kernel_block_size:
        raise ConfigError(
            f"blocks of {spec.block_size} tokens are no multiple of the kernel's {kernel_block_size}: "
            "change kernel_block_size, or the model's block_size"
        )
    return spec.block_size // kernel_block_size


def _deal(kind: _Kind, sizes: Sequence[int]) -> Iterator[KVCacheGroupSpec]:
    """Groups of ``sizes`` layers, in order."""
    first = 0
    for size in sizes:
        part = kind.members[first : first + size]
        whole = kind.spec if size == len(kind.members) else type(kind.spec).merge([spec for _, spec in part])
        yield KVCacheGroupSpec(tuple(name for name, _ in part), whole)
        first += size


def slab_layout(
    slab_bytes: int, num_slabs: int, blocks_per_slab: Sequence[int], kernel_blocks: tuple[int, ...]
) -> SlabLayout:
    """Groups with equal k, and so with equal block bytes, as one class; classes in the order of their first group."""
    groups: dict[int, list[int]] = {}
    for group, k in enumerate(blocks_per_slab):
        groups.setdefault(k, []).append(group)
    classes = tuple(SlabClass(slab_bytes // k, k, tuple(members)) for k, members in groups.items())
    return SlabLayout(slab_bytes, num_slabs, classes, kernel_blocks)


def natural_config(groups: tuple[KVCacheGroupSpec, ...], slabs: SlabLayout) -> KVCacheConfig:
    """The config of ``groups`` in ``slabs``: a tensor for each layer. ConfigError where a block does not hold them."""
    if len(groups) != len(slabs.kernel_blocks):
        raise ConfigError(f"{len(groups)} groups, but slabs for {len(slabs.kernel_blocks)}")
    tensors = tuple(tensor for at, group in enumerate(groups) for tensor in _tensors(group, at, slabs))
    return KVCacheConfig(slabs.num_slabs, tensors, groups, slabs)


def _tensors(group: KVCacheGroupSpec, at: int, slabs: SlabLayout) -> Iterator[KVCacheTensor]:
    """Layer after layer, each from an aligned byte on. size: to the end of the last page."""
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
            f"group {at} needs {offset_bytes} bytes in each of {parts} parts of a block of {of.block_bytes} bytes"
        )
