"""Plans for an engine: for known requests, or for a given memory and any requests."""

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
from hybridkv.runner.options import EngineOptions
from hybridkv.runner.probe import AS_COMPUTED, Stored, planner_model
from hybridkv.specs import BATCHED_TOKENS, Keeps
from hybridkv.units import ceil_div, parse_bytes

DEFAULT_MEMORY: Final = "1GiB"

_STATES_OF_A_REQUEST: Final = 4
"""Recurrent states to plan for.

The running one, and those after the prompt, after the output, and at a branch point.
"""


def plan_of(
    loaded: LoadedModel,
    options: EngineOptions,
    made: Plan | None,
    memory: int | str | None,
    *,
    max_model_len: int | None,
    num_speculative_tokens: int,
    stored: Stored,
) -> Plan:
    """Return a plan that was made before, or one within ``memory``.

    Args:
        loaded: the model.
        options: how the engine runs.
        made: the plan; None to make one.
        memory: as in plan_within, as the next three.
        max_model_len: as there.
        num_speculative_tokens: as there.
        stored: as there.

    Raises:
        ConfigError: there is a plan, and something that would make another one; or as plan_within.
        CapacityError: as plan_within.
    """
    if made is None:
        return plan_within(
            loaded,
            memory,
            max_model_len=max_model_len,
            max_batched_tokens=options.token_budget,
            max_in_flight=options.in_flight,
            num_speculative_tokens=num_speculative_tokens,
            stored=stored,
        )
    if memory is not None or max_model_len is not None or stored != AS_COMPUTED:
        raise ConfigError("a plan has its own memory, max_model_len and stored: leave these out, or leave the plan out")
    return made


def plan_within(
    loaded: LoadedModel,
    memory: int | str | None = None,
    *,
    max_model_len: int | None = None,
    max_batched_tokens: int = BATCHED_TOKENS,
    max_in_flight: int = 1,
    block_size: int = 16,
    num_speculative_tokens: int = 0,
    stored: Stored = AS_COMPUTED,
) -> Plan:
    """Plan an engine that fills ``memory``.

    Args:
        loaded: the model to plan for.
        memory: bytes, or a size such as "8GiB"; None for DEFAULT_MEMORY.
        max_model_len: tokens of prompt and output together. By default the model's own limit, or the longest request
            that fits if that is shorter.
        max_batched_tokens: tokens of a step, at most.
        max_in_flight: steps that are scheduled before the result of the first one is known.
        block_size: tokens of a block, before layers of other sizes are aligned with each other.
        num_speculative_tokens: drafts of a request in a step; recurrent layers need a state for each.
        stored: the form of keys and values in pages.

    Raises:
        ConfigError: ``max_model_len`` is below 1 or above the model's limit; or the model has no limit, and any length
            fits.
        CapacityError: the requested length, or a single token, does not fit.
    """
    instance("the loaded model", loaded, LoadedModel)
    instance("stored", stored, Stored)
    if max_model_len is not None:
        max_model_len = integer("max_model_len", max_model_len, 1)
    model = planner_model(
        loaded.model,
        block_size=block_size,
        name=loaded.name,
        num_speculative_tokens=num_speculative_tokens,
        stored=stored,
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
    stored: Stored = AS_COMPUTED,
) -> Plan:
    """Plan an engine for requests of known ``lengths``.

    Args:
        loaded: the model to plan for.
        lengths: tokens of each request, prompt and output together.
        block_size: as in ``plan_within``.
        memory: bytes or a size. By default the memory that all requests need at the same time, with all that they
            leave in the cache.
        max_model_len: tokens; by default, those of the longest request.
        layout: the plan's layout, as ``planner.plan`` takes it.
        placement: the policy for saved recurrent states, as ``planner.plan`` takes it.
        num_speculative_tokens: as in ``plan_within``.
        stored: as in ``plan_within``.

    Raises:
        ConfigError: a request is longer than the model allows; or the layout or placement is unknown.
        CapacityError: the longest request does not fit; the message has the memory it needs.
    """
    instance("the loaded model", loaded, LoadedModel)
    instance("stored", stored, Stored)
    instance("layout", layout, str)
    or_none(one_of(str))("placement", placement)
    lengths = integers("lengths", lengths, 1).tolist()
    if not lengths:
        raise ConfigError("no prompts: give at least one")
    if placement is not None and layout == NATURAL:
        placement_named(placement, align_tokens=1)
    model = planner_model(
        loaded.model,
        block_size=block_size,
        name=loaded.name,
        num_speculative_tokens=num_speculative_tokens,
        stored=stored,
    )
    longest = max(lengths)
    if model.max_model_len is not None and longest > model.max_model_len:
        raise ConfigError(
            f"a request of {longest} tokens, prompt and output together, exceeds the limit of {loaded.name}, "
            f"{model.max_model_len}: shorten the prompt or lower --max-tokens"
        )
    limit = longest if max_model_len is None else max_model_len

    def planned(memory_bytes: int) -> Plan:
        # a step may hold one whole prompt: more tokens would only need more memory for the step itself
        return plan(
            model, memory_bytes, max_model_len=limit, max_batched_tokens=limit, layout=layout, placement=placement
        )

    if memory is not None:
        return planned(_bytes_of(memory))
    memory_bytes = sum(layer.spec.page_size_bytes for layer in model.layers) * 2
    while True:  # the plan's blocks depend on the memory: two or three rounds
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
    """Return the bytes of a size. Raises ConfigError for an invalid one."""
    return parse_bytes(memory if isinstance(memory, str) else integer("memory", memory))


def _kept_blocks(plan: Plan, lengths: Sequence[int]) -> list[int]:
    """Return the blocks of each group that requests of ``lengths`` tokens use and leave cached, sharing no prefix."""
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
