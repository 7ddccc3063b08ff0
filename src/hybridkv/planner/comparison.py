"""Two plans of one model side by side: what a layout makes of the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from hybridkv.arguments import instance
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.planner.capacity import blocks_needed, copies_that_fit, longest_that, reserved_blocks
from hybridkv.planner.config import KVCacheConfig
from hybridkv.planner.plan import LAYOUTS, Plan
from hybridkv.specs import Keeps, RequestLimits
from hybridkv.units import shown

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
    last: CapacityError | None = None
    for layout in LAYOUTS:
        try:
            facts.append(facts_of(instance("what make returns", make(layout), Plan)))
        except CapacityError as error:
            facts.append(None)
            last = error
    if last is not None and not any(facts):
        raise last
    return tuple(facts)


def facts_of(plan: Plan) -> LayoutFacts:
    """What a comparison shows of ``plan``."""
    config, limits, holds = plan.config, plan.limits, plan.capacity
    short = blocks_needed(config.groups, replace(limits, max_model_len=min(SHORT_TOKENS, limits.max_model_len)))
    attention = {
        group.spec.block_size for group in config.groups if group.spec.keeps not in {Keeps.STATE, Keeps.NOTHING}
    }
    slabs = config.slabs
    blocks_per_slab = tuple(slabs.class_of(at).blocks_per_slab if slabs else 1 for at in range(len(config.groups)))
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
        short_request_bytes=round(_units_among_others(blocks_per_slab, short) * config.unit_bytes),
        short_request_alone_bytes=config.units_for(short) * config.unit_bytes,
        attention_tokens=_attention_tokens(config, limits),
        states=_states(config, limits),
    )


def _units_among_others(blocks_per_slab: Sequence[int], blocks: Sequence[int]) -> Fraction:
    """Units that so many ``blocks`` of each group take where others' blocks fill the rest of their slabs."""
    return sum((Fraction(n, slab) for n, slab in zip(blocks, blocks_per_slab, strict=True)), Fraction())


def padding_of(config: KVCacheConfig) -> Fraction:
    """Bytes beyond content over content, of the group that loses most."""
    return max(Fraction(config.block_bytes_of(at), group.content_bytes) - 1 for at, group in enumerate(config.groups))


def _attention_tokens(config: KVCacheConfig, limits: RequestLimits) -> int | None:
    """Tokens that full attention layers keep when nothing else is kept."""
    keeping = _only(config, Keeps.TOKENS)
    if not any(keeping):
        return None
    sinks = reserved_blocks(config.groups, limits)

    def fits(tokens: int) -> bool:
        needed = blocks_needed(config.groups, replace(limits, max_model_len=tokens))
        blocks = [own + n * keep for own, n, keep in zip(sinks, needed, keeping, strict=True)]
        return config.units_for(blocks) < config.num_blocks

    return longest_that(fits)


def _states(config: KVCacheConfig, limits: RequestLimits) -> int | None:
    """Sets of states that recurrent layers keep when nothing else is kept."""
    keeping = _only(config, Keeps.STATE)
    return copies_that_fit(config, limits, keeping)[0] if any(keeping) else None


def _only(config: KVCacheConfig, keeps: Keeps) -> Sequence[int]:
    """1 for the groups that keep this, 0 for others."""
    return [int(group.spec.keeps is keeps) for group in config.groups]
