"""A cache in slabs as vLLM's config, for its workers and for code that inspects its groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, UniformTypeKVCacheSpecs

from hybridkv.vllm.natural import natural_spec
from hybridkv.vllm.specs import layer_specs

if TYPE_CHECKING:
    from hybridkv.planner import KVCacheConfig as OurConfig
    from hybridkv.vllm.specs import Config


@dataclass
class NaturalConfig(KVCacheConfig):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's config for slabs. ``num_blocks``: slabs. ``blocks_of_layer``: number of block ids by layer."""

    blocks_of_layer: dict[str, int] = field(default_factory=dict)

    def num_blocks_of(self, tensor: Any) -> int:  # noqa: ANN401 - vLLM's KVCacheTensor
        """Return the blocks of the only layer in ``tensor``. vLLM's layouts have one number for all layers."""
        return self.blocks_of_layer[tensor.layers[0]]

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """False: each NaturalStep lists the blocks to clear, by class."""
        return False


def natural_config(theirs: Config, ours: OurConfig) -> NaturalConfig:
    """Return ``ours`` for vLLM's workers. ``theirs`` is vLLM's config of the same layers."""
    specs = dict(layer_specs(theirs))
    groups = []
    for group in ours.groups:
        kept = {name: natural_spec(specs[name], group.spec.block_size) for name in group.layer_names}
        first = next(iter(kept.values()))
        alike = all(spec == first for spec in kept.values())
        groups.append(
            KVCacheGroupSpec(list(group.layer_names), first if alike else UniformTypeKVCacheSpecs.from_specs(kept))
        )
    tensors = [
        KVCacheTensor(
            size=ours.arena_bytes,
            layers=list(tensor.shared_by),
            layer_stride=tensor.block_stride_bytes,
            block_stride=tensor.block_stride_bytes,
            offset=tensor.offset_bytes,
        )
        for tensor in ours.tensors
    ]
    blocks = {name: ours.blocks_of(number) for number, group in enumerate(ours.groups) for name in group.layer_names}
    return NaturalConfig(ours.num_blocks, tensors, groups, blocks_of_layer=blocks)
