"""plan: a model and a memory budget into a KVCacheConfig, or an error that says what would work.

compare_layouts: what each layout makes of the same memory.
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
from hybridkv.planner.natural import natural_choices
from hybridkv.planner.reference import reference_choice, with_placement
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
        specs = (group.layer_specs[0] for group in self.config.groups)
        mode = next((spec.cache_mode for spec in specs if isinstance(spec, MambaSpec)), None)
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
            f"of {model.name} takes: lower it"
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
    """The best choice of ``layout`` that holds one request; CapacityError about the one that needs least."""
    if layout == NATURAL:
        choices = natural_choices(layers, memory_bytes, limits, kernel_block_size)
    elif layout != REFERENCE:
        raise ConfigError(f"unknown layout {layout!r}: use one of {', '.join(LAYOUTS)}")
    elif kernel_block_size is not None:
        raise ConfigError(f"kernel_block_size means nothing in the {REFERENCE} layout: leave it out")
    else:
        choices = iter([reference_choice(layers, limits)])
    least: LayoutChoice | None = None
    for choice in choices:
        if memory_bytes // choice.unit_bytes >= choice.needed_units:
            return choice.config(memory_bytes // choice.unit_bytes)
        if least is None or choice.needed_bytes < least.needed_bytes:
            least = choice
    if least is None:
        raise AssertionError("packings are never none")
    raise _too_small(model, least, memory_bytes, limits)


def _longest(model: Model, asked: int | None) -> int:
    """The max_model_len to plan for."""
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
    """How much one request needs, and the longest that would fit where a shorter one would."""
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
"""Tokens of the short request in a comparison."""


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """A plan as a comparison shows it. What does not exist in a model is None.

    attention_block_tokens: sizes of the blocks that attention has. unit_bytes: what the pool gives out, a block or a
    slab, and units how many of them, the null one included. blocks_per_slab: of each group. padding: over content, of
    the group that loses most. short_requests: how many requests of 1,024 tokens fit. short_request_bytes: what one of
    them takes beside the others, whose blocks share slabs with its own; short_requests of them are the memory.
    short_request_alone_bytes: what one takes alone, in whole units. attention_tokens: kept if all memory held full
    attention. states: kept if all held states, each of all recurrent layers.
    """

    layout: str
    attention_block_tokens: tuple[int, ...]
    groups: int
    units: int
    unit_bytes: int
    blocks_per_slab: tuple[int, ...]
    padding: float
    unused_bytes: int
    longest_context: int
    concurrency: float
    short_requests: float
    short_request_bytes: int
    short_request_alone_bytes: int
    attention_tokens: int | None
    states: int | None


def compare_layouts(make: Callable[[str], Plan]) -> tuple[LayoutFacts | None, ...]:
    """Facts of each of LAYOUTS, None where one request does not fit. make: the plan in the layout of that name.

    Raises CapacityError when it fits in no layout.
    """
    if not callable(make):
        raise ConfigError(f"make must be a function of a layout's name, got {shown(make)}")
    facts: list[LayoutFacts | None] = []
    for layout in LAYOUTS:
        try:
            facts.append(facts_of(instance("what make returns", make(layout), Plan)))
        except CapacityError:
            facts.append(None)
            if len(facts) == len(LAYOUTS) and not any(facts):
                raise
    return tuple(facts)


_NOT_ATTENTION: Final = (Keeps.STATE, Keeps.NOTHING)


def facts_of(plan: Plan) -> LayoutFacts:
    """What a comparison shows of ``plan``."""
    config, limits, holds = plan.config, plan.limits, plan.capacity
    short = blocks_needed(config.groups, replace(limits, max_model_len=min(SHORT_TOKENS, limits.max_model_len)))
    kept = [group.spec.keeps for group in config.groups]
    states = [one is Keeps.STATE for one in kept]
    attention = {group.spec.block_size for group in config.groups if group.spec.keeps not in _NOT_ATTENTION}
    blocks_per_slab = tuple(config.null_blocks_of(at) for at in range(len(config.groups)))
    # units that the blocks take where others' blocks fill the rest of their slabs
    among_others = [Fraction(blocks, slab) for blocks, slab in zip(short, blocks_per_slab, strict=True)]
    return LayoutFacts(
        layout=plan.layout,
        attention_block_tokens=tuple(sorted(attention)),
        groups=len(config.groups),
        units=config.num_blocks,
        unit_bytes=config.unit_bytes,
        blocks_per_slab=blocks_per_slab,
        padding=float(padding_of(config)),
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
    """Bytes beyond content over content, of the group that loses most."""
    return max(Fraction(config.block_bytes_of(at), group.content_bytes) - 1 for at, group in enumerate(config.groups))
