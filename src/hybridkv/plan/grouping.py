"""Which layers share a block table, by the reference's rule.

layers   f0 f1 s0 s1 s2     f: full, s: sliding
types    (f0 f1) (s0 s1 s2)             a type is a set of layers whose specs merge
m = 2    the fewest layers of any type, or the most when that is < 1.5 x the fewest
groups   (f0 f1) (s0 s2) (s1)           a type of n layers: ceil(n / m) groups, dealt round robin
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.plan.config import KVCacheGroupSpec
from hybridkv.specs import KVCacheSpec
from hybridkv.units import ceil_div

NamedSpec = tuple[str, KVCacheSpec]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups in order, and how many tensors they share: the group size m."""

    groups: tuple[KVCacheGroupSpec, ...]
    group_size: int

    @property
    def page_size_bytes(self) -> int:
        """The one page size of all groups."""
        return self.groups[0].spec.page_size_bytes


def layer_types(layers: Sequence[NamedSpec]) -> list[list[NamedSpec]]:
    """Layers by type, types in the order of their first layer. O(layers * types) merges at most.

    A layer joins the first type of its own class that it merges with.
    """
    types: list[tuple[KVCacheSpec, list[NamedSpec]]] = []
    for name, spec in layers:
        for at, (merged, members) in enumerate(types):
            joined = _joined(merged, spec)
            if joined is not None:
                members.append((name, spec))
                types[at] = (joined, members)
                break
        else:
            types.append((spec, [(name, spec)]))
    return [members for _, members in types]


def group_size(counts: Sequence[int]) -> int:
    """The m of the module's picture, from the number of layers of each type."""
    fewest, most = min(counts), max(counts)
    return most if 2 * most < 3 * fewest else fewest


def group_layers(layers: Sequence[NamedSpec]) -> Grouping:
    """Groups of equal page size.

    Raises ConfigError for no layers, UnsupportedModelError for types whose pages differ: making pages
    equal is not supported yet.
    """
    if not layers:
        raise ConfigError("a plan needs at least one layer that keeps something in the cache")
    types = layer_types(layers)
    pages = sorted({spec.page_size_bytes for members in types for _, spec in members})
    if len(pages) > 1:
        raise UnsupportedModelError(
            f"layers with pages of {', '.join(str(one) for one in pages)} bytes in one model are not supported yet: "
            "every layer needs the same page"
        )
    size = group_size([len(members) for members in types])
    return Grouping(tuple(group for members in types for group in _deal(members, size)), size)


def _deal(members: Sequence[NamedSpec], size: int) -> list[KVCacheGroupSpec]:
    """Layer i of a type goes to group i mod the number of groups."""
    groups = ceil_div(len(members), size)
    dealt = [members[first::groups] for first in range(groups)]
    return [KVCacheGroupSpec(tuple(n for n, _ in part), type(part[0][1]).merge([s for _, s in part])) for part in dealt]


def _joined(merged: KVCacheSpec, spec: KVCacheSpec) -> KVCacheSpec | None:
    """The two as one spec, None when they are of different types."""
    if merged == spec:
        return merged
    if type(merged) is not type(spec):
        return None
    try:
        return type(merged).merge([merged, spec])
    except ConfigError:
        return None
