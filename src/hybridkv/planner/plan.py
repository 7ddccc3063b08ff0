"""plan: a model and a memory budget into a KVCacheConfig, or an error that says what would work."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from hybridkv.arguments import check_types, flag, instance, integer, one_of, or_none
from hybridkv.errors import AssumptionWarning, CapacityError, ConfigError
from hybridkv.models import Model
from hybridkv.planner.capacity import Capacity, blocks_needed, capacity_of, reserved_blocks, tokens_that_fit
from hybridkv.planner.config import KVCacheConfig, NamedSpec
from hybridkv.planner.natural import NaturalChoice, natural_choices
from hybridkv.planner.reference import group_layers, reference_layout, with_placement
from hybridkv.planner.reference import windows_as_full as as_full
from hybridkv.specs import BATCHED_TOKENS, KVCacheSpec, MambaSpec, RequestLimits
from hybridkv.units import MOST_COUNT, format_bytes, format_count, parse_bytes, shown

REFERENCE: Final = "reference"
NATURAL: Final = "natural"
LAYOUTS: Final = (REFERENCE, NATURAL)
DEFAULT_LAYOUT: Final = NATURAL
ALIGN: Final = "align"
NO_STATES: Final = "none"
ENDS: Final = "ends"
DEFAULT_PLACEMENTS: Final[Mapping[str, str]] = MappingProxyType({REFERENCE: ALIGN, NATURAL: ENDS})
"""By layout."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A config with all it was made from; what a plan document holds. layout: name of the layout rule.

    states_kept: natural layout: where a cache made from this keeps recurrent states, by the name that
    hybridkv.cache.placement reads; None for the default, and where none are kept.
    """

    model: Model
    config: KVCacheConfig
    memory_bytes: int
    limits: RequestLimits
    layout: str = REFERENCE
    states_kept: str | None = None

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return self.limits.max_model_len

    @property
    def placement(self) -> str | None:
        """Where recurrent states are kept, by name; None without such layers.

        In the reference layout the groups say it. In the natural layout they only say whether states are kept at all.
        """
        modes = (_cache_mode(group.spec.layer_spec(group.layer_names[0])) for group in self.config.groups)
        mode = next((mode for mode in modes if mode is not None), None)
        if self.config.slabs is None or mode is None or mode == NO_STATES:
            return mode
        return DEFAULT_PLACEMENTS[NATURAL] if self.states_kept is None else self.states_kept

    @property
    def kernel_block_size(self) -> int | None:
        """Tokens that attention kernels read as one block; None where they read whole blocks."""
        groups = enumerate(self.config.groups)
        parts = ((group.spec.block_size, self.config.kernel_blocks_of(at)) for at, group in groups)
        return next((size // count for size, count in parts if count > 1), None)

    @property
    def capacity(self) -> Capacity:
        """What the config holds."""
        return capacity_of(self.config, self.memory_bytes, self.limits)


def _cache_mode(spec: KVCacheSpec) -> str | None:
    return spec.cache_mode if isinstance(spec, MambaSpec) else None


def plan(
    model: Model,
    memory: int | str,
    *,
    max_model_len: int | None = None,
    max_batched_tokens: int = BATCHED_TOKENS,
    max_in_flight: int = 1,
    prefill_checkpoints: int = 0,
    placement: str | None = None,
    windows_as_full: bool = False,
    max_encoder_tokens: int | None = None,
    dcp: int = 1,
    pcp: int = 1,
    layout: str = DEFAULT_LAYOUT,
    kernel_block_size: int | None = None,
) -> Plan:
    """Groups, tensors and as many blocks as ``memory`` holds.

    memory: bytes, or a size such as ``"40GiB"``, for the cache of one rank. max_model_len: tokens; None for
    the model's own limit.
    max_batched_tokens: of the largest step, max_in_flight: steps at once, as SchedulerLimits has them. Windows and
    chunks keep the tokens of all steps in flight besides their own, as in vLLM; 0 tokens count none.
    prefill_checkpoints: as RequestLimits has it; reference layout only.
    placement: where recurrent states are kept; None for DEFAULT_PLACEMENTS. reference: ``align`` (where chunks end) or
    ``none``. natural: what hybridkv.cache.placement reads; the plan keeps the name, and is another for ``none`` only.
    windows_as_full: manage windowed and chunked layers as full attention.
    max_encoder_tokens: that a request's cross attention reads; None for the model's own limit.
    dcp, pcp: decode and prefill context parallel ranks; the plan is that of one of them.
    layout: ``reference`` (one page size) or ``natural`` (pages of their own size, in slabs).
    kernel_block_size: natural only: tokens that attention kernels read as one block, a divisor of the block.
    Raises ConfigError for a limit, layout or placement that cannot work (a model whose max_model_len is None takes
    any), CapacityError when one request of max_model_len does not fit. Warns once, with AssumptionWarning, of all
    ``model.assumptions``.
    """
    instance("model", model, Model)
    instance("layout", layout, str)
    or_none(one_of(str))("placement", placement)
    windows_as_full = flag("windows_as_full", windows_as_full)
    for name, value in (
        ("max_model_len", max_model_len),
        ("max_encoder_tokens", max_encoder_tokens),
        ("kernel_block_size", kernel_block_size),
    ):
        or_none(integer)(name, value)
    memory_bytes = parse_bytes(memory if isinstance(memory, str) else integer("memory", memory))
    limits = RequestLimits(
        _longest(model, max_model_len),
        integer("max_batched_tokens", max_batched_tokens, 0, MOST_COUNT) * integer("max_in_flight", max_in_flight, 1),
        dcp=dcp,
        pcp=pcp,
        max_encoder_tokens=_longest_input(model, max_encoder_tokens),
        num_speculative_tokens=model.num_speculative_tokens,
        prefill_checkpoints=prefill_checkpoints,
    )
    if prefill_checkpoints and layout == NATURAL:
        raise ConfigError(f"prefill_checkpoints mean nothing in the {NATURAL} layout: leave them out")
    wanted = DEFAULT_PLACEMENTS.get(layout, ALIGN) if placement is None else placement
    mode = ALIGN if layout == NATURAL and wanted != NO_STATES else wanted
    layers = with_placement([(layer.name, layer.spec) for layer in model.layers], mode)
    layers = as_full(layers) if windows_as_full else layers
    config = _config(model, layers, memory_bytes, limits, layout=layout, kernel_block_size=kernel_block_size)
    made = Plan(model, config, memory_bytes, limits, layout)
    kept = layout == NATURAL and made.placement not in (None, NO_STATES)
    if model.assumptions:
        said = "; ".join(f"{fact.what} {fact.value} ({fact.field})" for fact in model.assumptions)
        warnings.warn(f"the plan of {model.name} assumes: {said}", AssumptionWarning, stacklevel=2)
    return replace(made, states_kept=wanted) if kept else made


def _config(
    model: Model,
    layers: list[NamedSpec],
    memory_bytes: int,
    limits: RequestLimits,
    *,
    layout: str,
    kernel_block_size: int | None,
) -> KVCacheConfig:
    """The config of ``layout``. CapacityError where it does not hold one request."""
    if layout == NATURAL:
        return _natural(model, layers, memory_bytes, limits, kernel_block_size)
    if layout != REFERENCE:
        raise ConfigError(f"unknown layout {layout!r}: use one of {', '.join(LAYOUTS)}")
    if kernel_block_size is not None:
        raise ConfigError(f"kernel_block_size means nothing in the {REFERENCE} layout: leave it out")
    grouping = group_layers(layers)
    num_blocks = memory_bytes // grouping.block_bytes
    needed_blocks = sum(blocks_needed(grouping.groups, limits)) + sum(reserved_blocks(grouping.groups, limits)) + 1
    config = reference_layout(grouping, max(1, num_blocks))
    if num_blocks < needed_blocks:
        raise _too_small(model, config, memory_bytes, needed_blocks, limits)
    return config


def _natural(
    model: Model, layers: list[NamedSpec], memory_bytes: int, limits: RequestLimits, kernel_block_size: int | None
) -> KVCacheConfig:
    """The best choice that holds one request; where none does, the error is about the one that needs least."""
    least: NaturalChoice | None = None
    for choice in natural_choices(layers, memory_bytes, limits, kernel_block_size):
        num_slabs = memory_bytes // choice.packing.slab_bytes
        if num_slabs >= choice.needed_slabs:
            return choice.config(num_slabs)
        if least is None or choice.needed_bytes < least.needed_bytes:
            least = choice
    if least is None:
        raise AssertionError("packings are never none")
    config = least.config(max(1, memory_bytes // least.packing.slab_bytes))
    raise _too_small(model, config, memory_bytes, least.needed_slabs, limits)


def _longest_input(model: Model, asked: int | None) -> int:
    """The max_encoder_tokens to plan for."""
    if asked is None:
        return model.max_encoder_tokens
    if asked > model.max_encoder_tokens:
        raise ConfigError(
            f"max_encoder_tokens {asked} exceeds the {model.max_encoder_tokens} that the encoder of {model.name} "
            "takes: lower it"
        )
    return asked


def _longest(model: Model, asked: int | None) -> int:
    """The max_model_len to plan for."""
    if asked is None:
        if model.max_model_len is None:
            raise ConfigError(f"{model.name} sets no maximum length: give max_model_len (--max-model-len)")
        return model.max_model_len
    if asked < 1:
        raise ConfigError(f"max_model_len must be at least 1 token, got {shown(asked)}")
    if asked > MOST_COUNT:
        raise ConfigError(f"max_model_len must be at most {MOST_COUNT} tokens, got {shown(asked)}")
    if model.max_model_len is not None and asked > model.max_model_len:
        raise ConfigError(
            f"max_model_len {asked} exceeds the {model.max_model_len} tokens that the config of {model.name} allows: "
            f"use at most {model.max_model_len}, or raise max_position_embeddings in its config.json"
        )
    return asked


def _too_small(
    model: Model, config: KVCacheConfig, memory_bytes: int, needed: int, limits: RequestLimits
) -> CapacityError:
    """How much one request needs, and the longest that would fit where a shorter one would.

    config: what the memory holds, or the null block alone. needed: blocks or slabs, that of null included.
    """
    unit, each_bytes = config.unit, config.unit_bytes
    fit = tokens_that_fit(config, limits)
    shorter = f", or lower max_model_len (--max-model-len) to {fit}" if fit else ""
    return CapacityError(
        f"{format_bytes(memory_bytes)} ({memory_bytes} bytes) of memory is too small: one request of "
        f"{format_count(limits.max_model_len)} tokens of {model.name} needs {format_bytes(needed * each_bytes)} "
        f"({needed * each_bytes} bytes: {needed} {unit}s of {format_bytes(each_bytes)}, one of them always empty): "
        f"raise memory (--memory) to that{shorter}"
    )
