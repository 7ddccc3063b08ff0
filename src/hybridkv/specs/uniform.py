"""Layers of one kind whose pages differ: one block table, one page each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Self

from hybridkv.arguments import check_fields, each, instance
from hybridkv.errors import ConfigError
from hybridkv.specs.base import Keeps, KVCacheSpec, RequestLimits
from hybridkv.units import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers that always hold the same token slots, so that one block table serves them all.

    layers: name and spec of each. A block is a page in every layer: its bytes are their sum.
    """

    layers: tuple[tuple[str, KVCacheSpec], ...]

    def __post_init__(self) -> None:
        super(UniformTypeKVCacheSpecs, self).__post_init__()
        check_fields(self, each(_named_spec), "layers")
        if self.page_size_padded is not None:
            raise ConfigError("the pages of a uniform type are padded layer by layer: drop page_size_padded")
        if not self.is_uniform_type(self.kv_cache_specs) or self.block_size != self.layers[0][1].block_size:
            raise ConfigError("these layers are not of one type with one block size: put them into separate groups")

    @property
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """The layers by name."""
        return dict(self.layers)

    @property
    def keeps(self) -> Keeps:  # type: ignore[override]  # of the layers, so known only here
        """What the layers keep."""
        return self.layers[0][1].keeps

    @property
    def content_bytes(self) -> int:
        """The contents of all layers."""
        return sum(spec.content_bytes for _, spec in self.layers)

    @property
    def page_size_bytes(self) -> int:
        """The pages of all layers."""
        return sum(spec.page_size_bytes for _, spec in self.layers)

    @property
    def uniform_key(self) -> Hashable | None:
        """That of the layers."""
        return self.layers[0][1].uniform_key

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """The most that any layer needs."""
        return max(spec.max_request_blocks(limits) for _, spec in self.layers)

    def reserved_blocks(self, ranks: int) -> int:
        """The most that any layer reserves: they share a block table."""
        return max(spec.reserved_blocks(ranks) for _, spec in self.layers)

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """The widest row of any layer."""
        return max(spec.max_row_blocks(limits) for _, spec in self.layers)

    def layer_spec(self, name: str) -> KVCacheSpec:
        """The layer's own spec. Raises ConfigError for a name that is not here. O(layers)."""
        for one, spec in self.layers:
            if one == name:
                return spec
        raise ConfigError(f"layer {name!r} is not one of {', '.join(one for one, _ in self.layers)}")

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether the layers are of one kind, with one window, chunk or number of drafts, and one block size.

        Full attention, MLA and sink attention count as one kind. Raises ConfigError for no layers and for a
        kind that nobody described (``uniform_key`` is None).
        """
        if not isinstance(kv_cache_specs, Mapping):
            raise ConfigError(f"layers must be specs by name, got {shown(kv_cache_specs)}")
        if not kv_cache_specs:
            raise ConfigError("a uniform type needs at least one layer")
        for name, spec in kv_cache_specs.items():
            if instance(f"layer {name}", spec, KVCacheSpec).uniform_key is None:  # type: ignore[type-abstract]
                raise ConfigError(
                    f"layer {name}: {type(spec).__name__} is not a known kind of spec: give it a uniform_key"
                )
        return len({(spec.uniform_key, spec.block_size) for spec in kv_cache_specs.values()}) == 1

    @classmethod
    def from_specs(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> Self | None:
        """The layers as one spec, None when they are not of one type."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, layers=tuple(kv_cache_specs.items()))


def _named_spec(name: str, given: object) -> tuple[str, KVCacheSpec]:
    """A layer's name and its spec."""
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ConfigError(f"{name} must be pairs of a name and a spec, got {shown(given)}")
    return instance(name, given[0], str), instance(name, given[1], KVCacheSpec)  # type: ignore[type-abstract]
