"""A plan in the natural layout for what vLLM has found out about a model: its layers' specs and its memory.

vLLM's KVCacheConfig   groups in pages of one size, as many as its memory budget holds
layers                 the same layers, each in pages of its own size, attention in blocks that the kernel takes
plan                   slabs in one arena of the same bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from hybridkv.arguments import integer
from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import placement_named
from hybridkv.errors import ConfigError
from hybridkv.eviction import eviction_named
from hybridkv.models.model import Layer, Model
from hybridkv.planner import Plan, plan
from hybridkv.planner.plan import NATURAL
from hybridkv.specs import KVCacheSpec
from hybridkv.units import shown
from hybridkv.vllm.specs import Config, Settings, layer_specs, spec_of

OPTIONS: Final = "hybridkv"
"""The key of ours in vLLM's ``--additional-config``."""
LARGEST_BLOCK: Final = 32
"""Tokens that every kernel of attention takes as they are. vLLM's blocks are larger where they fill a state's page."""


@dataclass(frozen=True, slots=True)
class Options:
    """What ``--additional-config '{"hybridkv": {...}}'`` says.

    block_size: tokens of a block of attention, which kernels read as one. placement, eviction: by name, None for the
    default of the natural layout.
    """

    block_size: int
    placement: str | None = None
    eviction: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], block_size: int) -> Self:
        """Those of vLLM's additional config. block_size: where it says none. ConfigError for what is none of them."""
        asked = given.get(OPTIONS, {})
        if not isinstance(asked, Mapping):
            raise ConfigError(f"{OPTIONS} of --additional-config must be an object, got {shown(asked)}")
        unknown = sorted(set(asked) - {"block_size", "placement", "eviction"})
        if unknown:
            raise ConfigError(
                f"{OPTIONS} of --additional-config has no {', '.join(map(str, unknown))}: it has block_size, placement "
                "and eviction"
            )
        for name in ("placement", "eviction"):
            if not isinstance(asked.get(name), str | None):
                raise ConfigError(f"{name} of {OPTIONS} must be a name, got {shown(asked[name])}")
        size = integer(f"block_size of {OPTIONS}", asked.get("block_size", block_size), 1)
        if asked.get("placement") is not None:
            placement_named(asked["placement"], size)
        if asked.get("eviction") is not None:
            eviction_named(asked["eviction"])
        return cls(size, asked.get("placement"), asked.get("eviction"))


def default_block_size(config: Config) -> int:
    """Tokens of a block of attention: as few as vLLM's own blocks have, at most LARGEST_BLOCK."""
    sizes: list[int] = [spec.block_size for _, spec in layer_specs(config) if not hasattr(spec, "shapes")]
    return min([LARGEST_BLOCK, *sizes])


def natural_plan(config: Config, options: Options, *, name: str, max_model_len: int, max_in_flight_tokens: int) -> Plan:
    """The plan of vLLM's layers in vLLM's memory. name: the model's.

    ConfigError for a kind of layer, or a form of its pages, that is not supported, CapacityError where one request does
    not fit.
    """
    layers = tuple(Layer(layer, spec, i) for i, (layer, spec) in enumerate(_layers(config, options.block_size)))
    model = Model(
        name=name,
        model_type="vllm",
        layers=layers,
        max_model_len=max_model_len,
        vocab_size=1,
        dtype="auto",
        parameters=0,
        active_parameters=0,
        block_size=options.block_size,
    )
    return plan(
        model,
        memory_bytes(config),
        max_model_len=max_model_len,
        max_batched_tokens=max_in_flight_tokens,
        placement=options.placement,
        layout=NATURAL,
        kernel_block_size=options.block_size,
    )


def natural_cache(made: Plan, options: Options, settings: Settings) -> KVCacheManager:
    """A cache of ``made``, which hashes what it caches itself."""
    return KVCacheManager(
        made,
        enable_caching=settings.enable_caching,
        enable_kv_cache_events=settings.enable_events,
        options=CacheOptions(eviction=None if options.eviction is None else eviction_named(options.eviction)),
    )


def memory_bytes(config: Any) -> int:  # noqa: ANN401 - vLLM's KVCacheConfig
    """Of the one allocation that all of vLLM's tensors lie in. ConfigError where there are several."""
    sizes: list[int] = sorted({tensor.size for tensor in config.kv_cache_tensors})
    if len(sizes) != 1:
        raise ConfigError(f"vLLM lays this model out in allocations of {sizes} bytes: one is supported")
    return sizes[0]


def natural_spec(spec: Any, block_size: int) -> Any:  # noqa: ANN401 - vLLM is not typed here
    """One of vLLM's specs as the natural layout has it: its page of its own size, attention in its own blocks."""
    if hasattr(spec, "shapes"):
        return replace(spec, page_size_padded=None, num_prefill_checkpoint_blocks=0)
    return replace(spec, page_size_padded=None, block_size=block_size)


def _layers(config: Config, block_size: int) -> Iterator[tuple[str, KVCacheSpec]]:
    """Ours. ConfigError for pages that are not ours to the byte, such as those of quantized keys with their scales."""
    for layer, theirs in layer_specs(config):
        spec = spec_of(natural_spec(theirs, block_size))
        if theirs.real_page_size_bytes * spec.block_size != spec.content_bytes * theirs.block_size:
            raise ConfigError(
                f"a page of {layer} has {theirs.real_page_size_bytes} bytes for {theirs.block_size} tokens, which is "
                "not what its heads and dtype say: the natural layout of hybridkv.vllm does not support it"
            )
        yield layer, spec
