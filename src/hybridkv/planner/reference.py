"""The reference layout: equal pages, layers in groups, and one tensor for each layer position. vLLM has this layout.

Pages, before layers are grouped:

attention and states   the attention block grows, in multiples of 16 tokens, until its page covers the largest
                       state; states are padded to that page and may be saved at the ends of blocks of this size
smaller pages          the block grows by an integer factor; a page that does not divide the largest is padded

Groups: one, where all layers merge or are of one uniform type. Otherwise, with equal pages:

layers   f0 f1 s0 s1 s2     f: full, s: sliding
types    (f0 f1) (s0 s1 s2)             a type is a set of layers with specs that merge
m = 2    the fewest layers of any type, or the most when that is < 1.5 x the fewest
groups   (f0 f1) (s0 s2) (s1)           a type of n layers: ceil(n / m) groups, dealt round robin

Tensors:

    tensor j   [ block 0 | block 1 | ... | block N-1 ]     shared by layer j of every group

A block belongs to one group at a time, so layers of different groups never overlap in a tensor. All pages are equal,
with two exceptions: a group of a uniform type is the only group, and each of its tensors has the page of its layer;
compressed caches are packed (packed.py), with a tensor for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, zip_longest
from math import ceil
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.planner.config import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    LayoutChoice,
    NamedSpec,
    blocks_needed,
    reserved_blocks,
)
from hybridkv.planner.packed import needs_packing, packed_block_bytes, packed_config, packed_groups
from hybridkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RequestLimits,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from hybridkv.units import ceil_div, round_up

GROWTH_TOKENS: Final = 16
"""An attention block that grows to cover a state is a multiple of this, or of its own size where that is larger."""


def with_placement(layers: Sequence[NamedSpec], placement: str) -> list[NamedSpec]:
    """Return the layers with ``cache_mode`` set to ``placement`` in recurrent layers.

    Raises ConfigError unless ``placement`` is one of hybridkv.specs.CACHE_MODES.
    """
    return [(n, replace(s, cache_mode=placement) if isinstance(s, MambaSpec) else s) for n, s in layers]


def windows_as_full(layers: Sequence[NamedSpec]) -> list[NamedSpec]:
    """Return the layers with windows and chunks managed as full attention: every token is kept, the kernel masks."""
    return [(name, _as_full(spec)) for name, spec in layers]


def unify_pages(layers: Sequence[NamedSpec]) -> list[NamedSpec]:
    """Return the layers with equal page bytes: by larger blocks where that is enough, else by padding. O(layers)."""
    layers = _cover_states(layers)
    largest = max(spec.page_size_bytes for _, spec in layers)
    return [(name, _with_page(spec, largest)) for name, spec in layers]


def state_block_tokens(layers: Sequence[NamedSpec]) -> int:
    """Return the tokens of the block that the reference layout gives to states. States are saved at multiples of it.

    Raises ConfigError without recurrent layers.
    """
    covered = _cover_states(layers)
    found = [spec.block_size for _, spec in covered if isinstance(spec, MambaSpec)]
    if not found:
        raise ConfigError("the model has no recurrent layers, so no block holds states: read a model that has some")
    return found[0]


def _cover_states(layers: Sequence[NamedSpec]) -> list[NamedSpec]:
    """Give every layer an attention block that covers the largest state. Changes nothing unless both kinds exist."""
    attention = [spec for _, spec in layers if isinstance(spec, AttentionSpec)]
    states = [spec.page_size_bytes for _, spec in layers if isinstance(spec, MambaSpec)]
    if not attention or not states:
        return list(layers)
    widest = max(attention, key=_token_bytes)
    unit = max(GROWTH_TOKENS, widest.block_size)
    needed = unit * ceil(Fraction(max(states)) / (unit * _token_bytes(widest)))
    block_size = max(needed, *(spec.block_size for spec in attention), 1)
    return [(name, _with_block_size(spec, block_size)) for name, spec in layers]


def _with_block_size(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    """Return ``spec`` with larger blocks. Padding of attention grows with the block; a state's page does not."""
    if spec.page_size_padded is None or isinstance(spec, MambaSpec):
        return replace(spec, block_size=block_size)
    multiple = (spec.alignment if isinstance(spec, AttentionSpec) else None) or 1
    padded = round_up(ceil(_token_bytes(spec) * block_size), multiple)
    return replace(spec, block_size=block_size, page_size_padded=padded)


def _token_bytes(spec: KVCacheSpec) -> Fraction:
    return Fraction(spec.page_size_bytes, spec.block_size)


def _with_page(spec: KVCacheSpec, page_bytes: int) -> KVCacheSpec:
    if spec.page_size_bytes == page_bytes:
        return spec
    factor, rest = divmod(page_bytes, spec.page_size_bytes)
    if rest or isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=page_bytes)
    return _with_block_size(spec, spec.block_size * factor)


def _as_full(spec: KVCacheSpec) -> KVCacheSpec:
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    made = MLAAttentionSpec if spec.is_latent else FullAttentionSpec
    known = {field.name for field in fields(made)}  # not extra_retained_tokens: all tokens are kept
    return made(**{field.name: getattr(spec, field.name) for field in fields(spec) if field.name in known})


# -- groups


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups in order, and the block stride of every tensor that they share: its page, aligned as its layers need.

    Tensor j belongs to layer j of every group. There are m tensors, as many as the largest group has layers. Where
    ``is_packed``, ``page_bytes`` is one number: the bytes of a block that holds the pages of any one group.
    """

    groups: tuple[KVCacheGroupSpec, ...]
    page_bytes: tuple[int, ...]
    is_packed: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes that one more block takes: a page in every tensor."""
        return sum(self.page_bytes)


def layer_types(layers: Sequence[NamedSpec]) -> list[list[NamedSpec]]:
    """Return the layers by type, in the order of each type's first layer. O(layers + distinct specs * types).

    Layers with equal specs stay together. Distinct specs join the first type of their class that they merge with.
    Within a type, layers are in the order of the first layer that has their spec, as in vLLM's reference layout.
    """
    equal: dict[KVCacheSpec, list[NamedSpec]] = {}
    for name, spec in layers:
        equal.setdefault(spec, []).append((name, spec))
    types: list[tuple[KVCacheSpec, list[NamedSpec]]] = []
    for spec, members in equal.items():
        for at, (merged, held) in enumerate(types):
            joined = _joined(merged, spec)
            if joined is not None:
                types[at] = (joined, [*held, *members])
                break
        else:
            types.append((spec, members))
    return [members for _, members in types]


def group_size(counts: Sequence[int]) -> int:
    """Return the m of the module's drawing, given the number of layers of each type."""
    fewest, most = min(counts), max(counts)
    return most if 2 * most < 3 * fewest else fewest


def group_layers(layers: Sequence[NamedSpec]) -> Grouping:
    """Group the layers by the rule in the module's drawing.

    Raises ConfigError for no layers, and for a spec without a ``uniform_key``.
    """
    types = merged_types(layers)
    if isinstance(types[0][1], UniformTypeKVCacheSpecs):
        group = KVCacheGroupSpec(tuple(name for name, _ in layers), types[0][1])
        return Grouping((group,), tuple(spec.block_stride_bytes for _, spec in layers))
    if needs_packing(layers):
        packed = packed_groups(layers)
        return Grouping(packed, (packed_block_bytes(packed),), is_packed=True)
    parts = [list(layers)] if len(types) == 1 else layer_types(unify_pages(layers))
    size = group_size([len(members) for members in parts])
    groups = tuple(group for members in parts for group in _deal(members, size))
    return Grouping(groups, (max(group.spec.block_stride_bytes for group in groups),) * size)


def merged_types(layers: Sequence[NamedSpec]) -> list[tuple[list[NamedSpec], KVCacheSpec]]:
    """Return the layers by type with their merged spec; one type where all merge or are of one uniform type.

    Raises ConfigError for no layers, and for a spec without a ``uniform_key``.
    """
    if not layers:
        raise ConfigError("no layers were given: a plan needs at least one layer that keeps something in the cache")
    types = layer_types(layers)
    uniform = UniformTypeKVCacheSpecs.from_specs(dict(layers)) if len(types) > 1 else None
    if uniform is not None:
        return [(list(layers), uniform)]
    types = [list(layers)] if len(types) == 1 else types
    return [(members, type(members[0][1]).merge([spec for _, spec in members])) for members in types]


def _deal(members: Sequence[NamedSpec], size: int) -> list[KVCacheGroupSpec]:
    """Deal the layers of a type to groups: layer i goes to group i modulo the number of groups."""
    groups = ceil_div(len(members), size)
    dealt = [members[first::groups] for first in range(groups)]
    return [KVCacheGroupSpec(tuple(n for n, _ in part), type(part[0][1]).merge([s for _, s in part])) for part in dealt]


def _joined(merged: KVCacheSpec, spec: KVCacheSpec) -> KVCacheSpec | None:
    """Return the two specs as one, or ``None`` if they are of different types."""
    if type(merged) is not type(spec):
        return None
    try:
        return type(merged).merge([merged, spec])
    except ConfigError:
        return None


def reference_choice(layers: Sequence[NamedSpec], limits: RequestLimits) -> LayoutChoice:
    """Return the only reference layout of ``layers``. Raises ConfigError as ``group_layers``."""
    grouping = group_layers(layers)
    needed = sum(blocks_needed(grouping.groups, limits)) + sum(reserved_blocks(grouping.groups, limits)) + 1
    return LayoutChoice(grouping.block_bytes, needed, partial(reference_layout, grouping))


# -- tensors


def reference_layout(grouping: Grouping, num_blocks: int) -> KVCacheConfig:
    """Return the config of ``num_blocks`` blocks, null block included; tensors follow each other in the arena."""
    if grouping.is_packed:
        return packed_config(grouping.groups, grouping.block_bytes, num_blocks)
    names = zip_longest(*(group.layer_names for group in grouping.groups))
    shared = [tuple(name for name in each if name is not None) for each in names]
    return KVCacheConfig(num_blocks, _tensors(grouping.page_bytes, shared, num_blocks), grouping.groups)


def with_blocks(config: KVCacheConfig, num_blocks: int) -> KVCacheConfig:
    """Return the same layout of ``num_blocks`` blocks, null block included; tensors follow each other in the arena."""
    if config.packed_block_bytes is not None:
        return packed_config(config.groups, config.packed_block_bytes, num_blocks)
    strides = [tensor.block_stride_bytes for tensor in config.tensors]
    shared = [tensor.shared_by for tensor in config.tensors]
    return KVCacheConfig(num_blocks, _tensors(strides, shared, num_blocks), config.groups)


def _tensors(strides: Sequence[int], shared: Sequence[tuple[str, ...]], num_blocks: int) -> tuple[KVCacheTensor, ...]:
    """Return tensors one after another: their bytes of a block, and the layers that share each."""
    before = accumulate(strides, initial=0)
    return tuple(
        KVCacheTensor(stride * num_blocks, names, first * num_blocks, stride)
        for stride, names, first in zip(strides, shared, before, strict=False)
    )
