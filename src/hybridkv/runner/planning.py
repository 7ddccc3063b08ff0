"""Plans for an engine: for requests that are known, or for a memory and whoever comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hybridkv.arguments import instance, integer, integers, one_of, or_none
from hybridkv.cache import placement_named
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.planner import Plan, plan
from hybridkv.planner.config import longest_that
from hybridkv.planner.plan import DEFAULT_LAYOUT, NATURAL
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.probe import planner_model
from hybridkv.specs import BATCHED_TOKENS, Keeps
from hybridkv.units import ceil_div, parse_bytes

DEFAULT_MEMORY: Final = "1GiB"

_STATES_OF_A_REQUEST: Final = 4
"""That run or are kept: the running one, end of prompt, end of output, a branch point."""


def plan_within(
    loaded: LoadedModel,
    memory: int | str | None = None,
    *,
    max_model_len: int | None = None,
    max_batched_tokens: int = BATCHED_TOKENS,
    max_in_flight: int = 1,
    block_size: int = 16,
    num_speculative_tokens: int = 0,
) -> Plan:
    """A plan that fills ``memory``, bytes or a size; None for DEFAULT_MEMORY.

    max_model_len: tokens of prompt and output together; None for the model's own limit, or for the longest request
    that fits where that is shorter. max_batched_tokens, max_in_flight: as plan has them.
    num_speculative_tokens: drafts of a request in a step, for whose states there is to be room.
    Raises ConfigError for a limit that is none or above the model's, and for a model without a limit of which any
    length fits; CapacityError when the length asked for, or a single token, does not fit.
    """
    instance("the loaded model", loaded, LoadedModel)
    if max_model_len is not None:
        max_model_len = integer("max_model_len", max_model_len, 1)
    model = planner_model(
        loaded.model, block_size=block_size, name=loaded.name, num_speculative_tokens=num_speculative_tokens
    )
    memory_bytes = _bytes_of(DEFAULT_MEMORY if memory is None else memory)

    def planned(tokens: int | None) -> Plan:
        return plan(
            model,
            memory_bytes,
            max_model_len=tokens,
            max_batched_tokens=max_batched_tokens,
            max_in_flight=max_in_flight,
        )

    def fits(tokens: int) -> bool:
        try:
            planned(tokens)
        except ConfigError:  # too small, or more than the model's own limit
            return False
        return True

    if max_model_len is not None or (model.max_model_len is not None and fits(model.max_model_len)):
        return planned(max_model_len)
    longest = longest_that(fits)
    return planned(None if longest is None else max(1, longest))


def plan_for(
    loaded: LoadedModel,
    lengths: Sequence[int],
    *,
    block_size: int = 16,
    memory: int | str | None = None,
    max_model_len: int | None = None,
    layout: str = DEFAULT_LAYOUT,
    placement: str | None = None,
    num_speculative_tokens: int = 0,
) -> Plan:
    """A plan for requests of ``lengths`` tokens, prompt and output together.

    memory: bytes or a size; None for what all of them need side by side, and everything that they leave cached.
    max_model_len: tokens; None for the longest request. layout, placement: as plan has them.
    num_speculative_tokens: as plan_within has it.
    Raises ConfigError when a request is longer than the model allows, and for an unknown layout or placement;
    CapacityError, saying how much is needed, when the longest does not fit.
    """
    instance("the loaded model", loaded, LoadedModel)
    instance("layout", layout, str)
    or_none(one_of(str))("placement", placement)
    lengths = integers("lengths", lengths, 1).tolist()
    if not lengths:
        raise ConfigError("no prompts: give at least one")
    if placement is not None and layout == NATURAL:
        placement_named(placement, align_tokens=1)
    model = planner_model(
        loaded.model, block_size=block_size, name=loaded.name, num_speculative_tokens=num_speculative_tokens
    )
    longest = max(lengths)
    if model.max_model_len is not None and longest > model.max_model_len:
        raise ConfigError(
            f"a request of {longest} tokens, prompt and output together, exceeds the {model.max_model_len} of "
            f"{loaded.name}: shorten the prompt or lower --max-new-tokens"
        )
    limit = longest if max_model_len is None else max_model_len

    def planned(memory_bytes: int) -> Plan:
        # a step may hold a whole prompt, and no more than that of one request
        return plan(
            model, memory_bytes, max_model_len=limit, max_batched_tokens=limit, layout=layout, placement=placement
        )

    if memory is not None:
        return planned(_bytes_of(memory))
    memory_bytes = sum(layer.spec.page_size_bytes for layer in model.layers) * 2
    while True:  # the plan's blocks depend on the memory: twice or three times
        try:
            made = planned(memory_bytes)
        except CapacityError:
            memory_bytes *= 2
            continue
        lacking = made.config.units_for(_kept_blocks(made, lengths)) + 1 - made.config.num_blocks
        if lacking <= 0:
            return made
        memory_bytes += lacking * made.config.unit_bytes


def _bytes_of(memory: int | str) -> int:
    """Bytes of a size. ConfigError for what is none."""
    return parse_bytes(memory if isinstance(memory, str) else integer("memory", memory))


def _kept_blocks(plan: Plan, lengths: Sequence[int]) -> list[int]:
    """Blocks of each group that requests of ``lengths`` tokens fill and leave behind, sharing nothing."""
    kept = []
    for group in plan.config.groups:
        size, drafts = group.spec.block_size, 0
        if group.spec.keeps is Keeps.STATE:
            drafts = len(lengths) * plan.model.num_speculative_tokens
        if group.spec.keeps is Keeps.ENCODER:
            kept.append(len(lengths) * ceil_div(plan.limits.max_encoder_tokens, size))
        elif group.spec.keeps is Keeps.STATE and plan.layout == NATURAL:
            kept.append(len(lengths) * _STATES_OF_A_REQUEST + drafts)
        else:
            kept.append(sum(ceil_div(length, size) + 1 for length in lengths) + drafts)
    return kept
