"""Plan a model's cache in a memory budget, and compare the layouts.

``plan`` returns a KVCacheConfig with its inputs, or raises an error that names a limit that would work.
``compare_layouts`` reports the capacity of each layout in the same memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import Final

from hybridkv.arguments import check_types, flag, instance, integer, one_of, or_none
from hybridkv.errors import AssumptionWarning, CapacityError, ConfigError
from hybridkv.models import Model
from hybridkv.planner.config import (
    Capacity,
    KVCacheConfig,
    LayoutChoice,
    NamedSpec,
    blocks_needed,
    capacity_of,
    copies_that_fit,
    tokens_that_fit,
)
from hybridkv.planner.natural import least_choice, natural_choices, natural_config
from hybridkv.planner.reference import reference_choice, with_blocks, with_placement
from hybridkv.planner.reference import windows_as_full as as_full
from hybridkv.specs import BATCHED_TOKENS, Keeps, MambaSpec, RequestLimits
from hybridkv.units import MOST_COUNT, format_bytes, format_count, parse_bytes, shown

REFERENCE: Final = "reference"
NATURAL: Final = "natural"
LAYOUTS: Final = (REFERENCE, NATURAL)
DEFAULT_LAYOUT: Final = NATURAL
ALIGN: Final = "align"
NO_STATES: Final = "none"
ENDS: Final = "ends"
DEFAULT_PLACEMENTS: Final[Mapping[str, str]] = MappingProxyType({REFERENCE: ALIGN, NATURAL: ENDS})
"""The default of ``placement`` by layout."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A KVCacheConfig with everything that it was made from. A plan document holds these fields.

    Attributes:
        model: the model.
        config: groups, tensors and number of blocks.
        memory_bytes: bytes for the cache of one rank.
        limits: limits of one request.
        layout: ``reference`` or ``natural``.
        states_kept: natural layout: the name of the placement with which a cache saves recurrent states, as
            hybridkv.cache.placement reads it. ``None`` for the default, and where no states are saved.
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
        """The name of the placement of recurrent states, or ``None`` without recurrent layers.

        In the reference layout the specs of the groups name it. In the natural layout the specs only say whether states
        are saved at all, and ``states_kept`` names the placement.
        """
        specs = (group.layer_specs[0] for group in self.config.groups)
        mode = next((spec.cache_mode for spec in specs if isinstance(spec, MambaSpec)), None)
        if self.config.slabs is None or mode is None or mode == NO_STATES:
            return mode
        return DEFAULT_PLACEMENTS[NATURAL] if self.states_kept is None else self.states_kept

    @property
    def kernel_block_size(self) -> int | None:
        """Tokens that attention kernels read as one block, or ``None`` where they read whole blocks."""
        groups = enumerate(self.config.groups)
        parts = ((group.spec.block_size, self.config.kernel_blocks_of(at)) for at, group in groups)
        return next((size // count for size, count in parts if count > 1), None)

    @property
    def capacity(self) -> Capacity:
        """The capacity of the config."""
        return capacity_of(self.config, self.memory_bytes, self.limits)

    @property
    def layers_of_groups(self) -> tuple[int, ...]:
        """The number of decoder layers of each group. A layer may keep several entries: keys, and an indexer's keys."""
        index = {layer.name: layer.index for layer in self.model.layers}
        return tuple(len({index[name] for name in group.layer_names}) for group in self.config.groups)


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
    """Plan the groups, the tensors and as many blocks as ``memory`` holds.

    Warns once, with AssumptionWarning, of all ``model.assumptions``.

    Args:
        model: the model, from ``read_model``.
        memory: bytes for the cache of one rank, or a size like ``"40GiB"``.
        max_model_len: most tokens of a request. ``None`` for the limit of the model's config.
        max_batched_tokens: tokens of the largest step, as in SchedulerLimits. Windows and chunks also keep the tokens
            of all steps in flight, as in vLLM. 0 counts no tokens in flight.
        max_in_flight: steps in flight at once, as in SchedulerLimits.
        prefill_checkpoints: as in RequestLimits. Reference layout only.
        placement: where recurrent states are saved. ``None`` for DEFAULT_PLACEMENTS. Reference layout: ``align`` (where
            chunks end) or ``none``. Natural layout: a name that hybridkv.cache.placement reads. The plan stores the
            name, and its memory layout differs for ``none`` only.
        windows_as_full: keep all tokens in windowed and chunked layers, as in full attention.
        max_encoder_tokens: most encoder tokens that cross attention reads. ``None`` for the model's own limit.
        dcp: decode context parallel ranks. The plan is for one of them.
        pcp: prefill context parallel ranks. The plan is for one of them.
        layout: ``reference`` (one page size for all layers) or ``natural`` (each layer's own page size, in slabs).
        kernel_block_size: tokens that attention kernels read as one block, a divisor of the block size. ``None`` for
            whole blocks. Natural layout only.

    Raises:
        ConfigError: a limit, layout or placement cannot work. If the config sets no length, give ``max_model_len``.
        CapacityError: one request of ``max_model_len`` does not fit.
    """
    instance("model", model, Model)
    instance("layout", layout, str)
    or_none(one_of(str))("placement", placement)
    windows_as_full = flag("windows_as_full", windows_as_full)
    max_model_len = or_none(partial(integer, least=1, most=MOST_COUNT))("max_model_len", max_model_len)
    max_encoder_tokens = or_none(integer)("max_encoder_tokens", max_encoder_tokens)
    kernel_block_size = or_none(integer)("kernel_block_size", kernel_block_size)
    memory_bytes = parse_bytes(memory if isinstance(memory, str) else integer("memory", memory))
    limits = RequestLimits(
        _longest(model, max_model_len),
        integer("max_batched_tokens", max_batched_tokens, 0, MOST_COUNT) * integer("max_in_flight", max_in_flight, 1),
        dcp=dcp,
        pcp=pcp,
        max_encoder_tokens=model.max_encoder_tokens if max_encoder_tokens is None else max_encoder_tokens,
        num_speculative_tokens=model.num_speculative_tokens,
        prefill_checkpoints=prefill_checkpoints,
    )
    if limits.max_encoder_tokens > model.max_encoder_tokens:
        raise ConfigError(
            f"max_encoder_tokens {limits.max_encoder_tokens} exceeds the {model.max_encoder_tokens} that the encoder "
            f"of {model.name} reads: lower it to at most that"
        )
    if prefill_checkpoints and layout == NATURAL:
        raise ConfigError(
            f"prefill_checkpoints {prefill_checkpoints} has no meaning in the {NATURAL} layout: leave it out, or use "
            f"the {REFERENCE} layout (--layout {REFERENCE})"
        )
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


def tier_plan(made: Plan, memory: int | str) -> Plan:
    """Plan a tier behind the device: the groups and blocks of ``made``, as many as ``memory`` holds.

    Args:
        made: the plan of the device.
        memory: bytes of the tier on one rank, or a size like ``"40GiB"``.

    Raises:
        CapacityError: the memory holds no slab, or block, next to the null one; the message has the least that does.
    """
    instance("made", made, Plan)
    memory_bytes = parse_bytes(memory if isinstance(memory, str) else integer("memory", memory))
    config, each = made.config, made.config.unit_bytes
    units = memory_bytes // each
    if units < 2:
        raise CapacityError(
            f"{format_bytes(memory_bytes)} is too small for a tier, which has {config.unit}s of {format_bytes(each)}, "
            f"one of them always empty: give at least {2 * each} bytes"
        )
    if config.slabs is None:
        return replace(made, config=with_blocks(config, units), memory_bytes=memory_bytes)
    more = natural_config(config.groups, replace(config.slabs, num_slabs=units))
    return replace(made, config=more, memory_bytes=memory_bytes)


def _config(
    model: Model,
    layers: list[NamedSpec],
    memory_bytes: int,
    limits: RequestLimits,
    *,
    layout: str,
    kernel_block_size: int | None,
) -> KVCacheConfig:
    """Return the best layout that holds one request; raise CapacityError about the one that needs the least memory."""
    if layout == NATURAL:
        choices = natural_choices(layers, memory_bytes, limits, kernel_block_size)
        least = partial(least_choice, layers, limits, kernel_block_size)
    elif layout != REFERENCE:
        raise ConfigError(f"unknown layout {layout!r}: use one of {', '.join(LAYOUTS)}")
    elif kernel_block_size is not None:
        raise ConfigError(
            f"kernel_block_size {kernel_block_size} has no meaning in the {REFERENCE} layout: leave it out, or use "
            f"the {NATURAL} layout (--layout {NATURAL})"
        )
    else:
        choices, least = iter([reference_choice(layers, limits)]), partial(reference_choice, layers, limits)
    for choice in choices:
        if memory_bytes // choice.unit_bytes >= choice.needed_units:
            return choice.config(memory_bytes // choice.unit_bytes)
    raise _too_small(model, least(), memory_bytes, limits)


def _longest(model: Model, asked: int | None) -> int:
    """Return the ``max_model_len`` to plan for."""
    if asked is None:
        if model.max_model_len is None:
            raise ConfigError(f"{model.name} sets no maximum length: give max_model_len (--max-model-len)")
        return model.max_model_len
    if model.max_model_len is not None and asked > model.max_model_len:
        raise ConfigError(
            f"max_model_len {asked} exceeds the {model.max_model_len} tokens that the config of {model.name} allows: "
            f"use at most {model.max_model_len}, or raise max_position_embeddings in its config.json"
        )
    return asked


def _too_small(model: Model, choice: LayoutChoice, memory_bytes: int, limits: RequestLimits) -> CapacityError:
    """Return an error with the memory that one request needs, and the longest request that fits, if any fits."""
    config = choice.config(max(1, memory_bytes // choice.unit_bytes))
    fit = tokens_that_fit(config, limits)
    shorter = f", or lower max_model_len (--max-model-len) to {fit}" if fit else ""
    return CapacityError(
        f"{format_bytes(memory_bytes)} ({memory_bytes} bytes) of memory is too small: one request of "
        f"{format_count(limits.max_model_len)} tokens of {model.name} needs {format_bytes(choice.needed_bytes)} "
        f"({choice.needed_bytes} bytes: {choice.needed_units} {config.unit}s of {format_bytes(config.unit_bytes)}, "
        f"one of them always empty): raise memory (--memory) to that{shorter}"
    )


# -- two plans of one model side by side

SHORT_TOKENS: Final = 1024
"""Tokens of the short request in a comparison. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """The facts of a plan that a comparison shows.

    Attributes:
        layout: name of the layout.
        attention_block_tokens: the block sizes of the attention groups, in tokens.
        groups: number of groups.
        units: number of blocks, or of slabs in the natural layout, the null one included.
        unit_bytes: bytes of a block or slab.
        blocks_per_slab: for each group; 1 in the reference layout.
        padding: padding divided by content, in the group with the highest share.
        padding_bytes: bytes lost to padding in all blocks of one request of the longest context.
        padding_share: these bytes divided by all bytes of the request's blocks.
        unused_bytes: memory that is left over.
        longest_context: tokens of the longest request, at most ``max_model_len``.
        concurrency: number of requests of the longest context that fit.
        short_requests: number of requests of SHORT_TOKENS tokens that fit.
        short_request_bytes: bytes of one short request among others that fill the rest of its slabs.
        short_request_alone_bytes: bytes of a short request alone, in whole blocks or slabs.
        attention_tokens: tokens that fit if all memory holds full attention; ``None`` without such layers.
        states: sets of states, one for each recurrent layer, that fit if all memory holds states; ``None`` without
            recurrent layers.
    """

    layout: str
    attention_block_tokens: tuple[int, ...]
    groups: int
    units: int
    unit_bytes: int
    blocks_per_slab: tuple[int, ...]
    padding: float
    padding_bytes: int
    padding_share: float
    unused_bytes: int
    longest_context: int
    concurrency: float
    short_requests: float
    short_request_bytes: int
    short_request_alone_bytes: int
    attention_tokens: int | None
    states: int | None


def compare_layouts(make: Callable[[str], Plan]) -> tuple[LayoutFacts | None, ...]:
    """Return the facts of each layout in LAYOUTS, with ``None`` where one request does not fit.

    Args:
        make: returns the plan in the layout with the given name.

    Raises:
        CapacityError: one request fits in no layout.
    """
    if not callable(make):
        raise ConfigError(f"make must be a function of a layout's name, got {shown(make)}")
    facts: list[LayoutFacts | None] = []
    for layout in LAYOUTS:
        try:
            facts.append(facts_of(instance("the result of make", make(layout), Plan)))
        except CapacityError:
            facts.append(None)
            if len(facts) == len(LAYOUTS) and not any(facts):
                raise
    return tuple(facts)


_NOT_ATTENTION: Final = (Keeps.STATE, Keeps.RING, Keeps.NOTHING)


def facts_of(plan: Plan) -> LayoutFacts:
    """Return the facts of ``plan`` that a comparison shows."""
    config, limits, holds = plan.config, plan.limits, plan.capacity
    short = blocks_needed(config.groups, replace(limits, max_model_len=min(SHORT_TOKENS, limits.max_model_len)))
    longest_bytes = sum((one.block_bytes + one.padding_bytes) * one.blocks_per_request for one in holds.groups)
    kept = [group.spec.keeps for group in config.groups]
    states = [one is Keeps.STATE for one in kept]
    attention = {group.spec.block_size for group in config.groups if group.spec.keeps not in _NOT_ATTENTION}
    blocks_per_slab = tuple(config.null_blocks_of(at) for at in range(len(config.groups)))
    # other requests' blocks fill the rest of a slab, so a block takes its share of the slab only
    among_others = [Fraction(blocks, slab) for blocks, slab in zip(short, blocks_per_slab, strict=True)]
    return LayoutFacts(
        layout=plan.layout,
        attention_block_tokens=tuple(sorted(attention)),
        groups=len(config.groups),
        units=config.num_blocks,
        unit_bytes=config.unit_bytes,
        blocks_per_slab=blocks_per_slab,
        padding=float(padding_of(config)),
        padding_bytes=holds.padding_bytes,
        padding_share=holds.padding_bytes / max(1, longest_bytes),
        unused_bytes=holds.unused_bytes,
        longest_context=holds.longest_context,
        concurrency=holds.concurrency,
        short_requests=copies_that_fit(config, limits, short)[1],
        short_request_bytes=round(sum(among_others) * config.unit_bytes),
        short_request_alone_bytes=config.units_for(short) * config.unit_bytes,
        attention_tokens=tokens_that_fit(config, limits, Keeps.TOKENS) if Keeps.TOKENS in kept else None,
        states=copies_that_fit(config, limits, states)[0] if any(states) else None,
    )


def padding_of(config: KVCacheConfig) -> Fraction:
    """Return the padding divided by the content, in the group with the highest share."""
    return max(Fraction(config.block_bytes_of(at), group.content_bytes) - 1 for at, group in enumerate(config.groups))
