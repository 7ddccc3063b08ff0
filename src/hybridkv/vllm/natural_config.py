"""A cache in slabs as vLLM's config, for its workers and for code that inspects its groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, UniformTypeKVCacheSpecs

from hybridkv.errors import ConfigError
from hybridkv.vllm.natural import natural_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridkv.planner import KVCacheConfig as OurConfig


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


def stage_names(first: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """Return this pipeline stage's layer for each layer of the first stage: the next one with an equal spec.

    The scheduler knows the layers of the first stage only, and its blocks serve all stages.

    Args:
        first: vLLM's specs of the first stage by layer, in natural pages.
        own: the same of this stage.

    Raises:
        ConfigError: if the two stages do not have the same number of layers of each spec.
    """
    waiting: dict[Any, list[str]] = {}
    for name, spec in own.items():
        waiting.setdefault(spec, []).append(name)
    counts = Counter(first.values())
    if counts != {spec: len(names) for spec, names in waiting.items()}:
        raise ConfigError(
            f"the first pipeline stage has {sorted(counts.values())} layers by kind of cache and another stage "
            f"{sorted(map(len, waiting.values()))}: the natural layout needs equal stages, so give each stage the same "
            "layers in VLLM_PP_LAYER_PARTITION, or leave pipeline_parallel_size out"
        )
    nexts = {spec: iter(names) for spec, names in waiting.items()}
    return {name: next(nexts[spec]) for name, spec in first.items()}


def natural_config(specs: Mapping[str, Any], ours: OurConfig, names: Mapping[str, str] | None = None) -> NaturalConfig:
    """Return ``ours`` for vLLM's workers.

    Args:
        specs: vLLM's specs of this stage by layer.
        ours: the cache's config, with the layers of the first pipeline stage.
        names: this stage's layer for each of these layers; ``None`` in the first stage.
    """
    groups = []
    named = (lambda name: name) if names is None else names.__getitem__
    for group in ours.groups:
        kept = {named(name): natural_spec(specs[named(name)], group.spec.block_size) for name in group.layer_names}
        first = next(iter(kept.values()))
        alike = all(spec == first for spec in kept.values())
        groups.append(KVCacheGroupSpec(list(kept), first if alike else UniformTypeKVCacheSpecs.from_specs(kept)))
    tensors = [
        KVCacheTensor(
            size=ours.arena_bytes,
            layers=[named(name) for name in tensor.shared_by],
            layer_stride=tensor.block_stride_bytes,
            block_stride=tensor.block_stride_bytes,
            offset=tensor.offset_bytes,
        )
        for tensor in ours.tensors
    ]
    blocks = {
        named(name): ours.blocks_of(number) for number, group in enumerate(ours.groups) for name in group.layer_names
    }
    return NaturalConfig(ours.num_blocks, tensors, groups, blocks_of_layer=blocks)
