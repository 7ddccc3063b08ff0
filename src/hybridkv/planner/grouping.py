"""Which layers share a block table, by the reference's rule.

all layers merge, or are of one uniform type        one group
otherwise, with pages made equal (pages.py):
layers   f0 f1 s0 s1 s2     f: full, s: sliding
types    (f0 f1) (s0 s1 s2)             a type is a set of layers whose specs merge
m = 2    the fewest layers of any type, or the most when that is < 1.5 x the fewest
groups   (f0 f1) (s0 s2) (s1)           a type of n layers: ceil(n / m) groups, dealt round robin
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheGroupSpec, NamedSpec
from hybridkv.planner.pages import unify_pages
from hybridkv.specs import KVCacheSpec, UniformTypeKVCacheSpecs
from hybridkv.units import ceil_div


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups in order, and the page bytes of every tensor that they share.

    Tensor j belongs to layer j of every group; there are as many as the largest group has layers (m).
    """

    groups: tuple[KVCacheGroupSpec, ...]
    page_bytes: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """The m of the module's picture."""
        return len(self.page_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes that one more block takes: a page in every tensor."""
        return sum(self.page_bytes)


def layer_types(layers: Sequence[NamedSpec]) -> list[list[NamedSpec]]:
    """Layers by type, types in the order of their first layer. O(layers + distinct specs * types).

    Equal specs stay together, then distinct ones join the first type of their own class that they merge with:
    within a type, layers are in the order of the first layer that has their spec, as in the reference.
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
    """The m of the module's picture, from the number of layers of each type."""
    fewest, most = min(counts), max(counts)
    return most if 2 * most < 3 * fewest else fewest


def group_layers(layers: Sequence[NamedSpec]) -> Grouping:
    """Groups by the rule of the module's picture.

    Raises ConfigError for no layers and for a kind of spec that nobody described.
    """
    if not layers:
        raise ConfigError("a plan needs at least one layer that keeps something in the cache")
    types = layer_types(layers)
    if len(types) == 1:
        types = [list(layers)]
    else:
        uniform = UniformTypeKVCacheSpecs.from_specs(dict(layers))
        if uniform is not None:
            group = KVCacheGroupSpec(tuple(name for name, _ in layers), uniform)
            return Grouping((group,), tuple(spec.page_size_bytes for _, spec in layers))
        types = layer_types(unify_pages(layers))
    size = group_size([len(members) for members in types])
    groups = tuple(group for members in types for group in _deal(members, size))
    return Grouping(groups, (groups[0].spec.page_size_bytes,) * size)


def _deal(members: Sequence[NamedSpec], size: int) -> list[KVCacheGroupSpec]:
    """Layer i of a type goes to group i mod the number of groups."""
    groups = ceil_div(len(members), size)
    dealt = [members[first::groups] for first in range(groups)]
    return [KVCacheGroupSpec(tuple(n for n, _ in part), type(part[0][1]).merge([s for _, s in part])) for part in dealt]


def _joined(merged: KVCacheSpec, spec: KVCacheSpec) -> KVCacheSpec | None:
    """The two as one spec, None when they are of different types."""
    if type(merged) is not type(spec):
        return None
    try:
        return type(merged).merge([merged, spec])
    except ConfigError:
        return None
