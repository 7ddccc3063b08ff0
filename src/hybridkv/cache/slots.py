"""Slots for one request: what is missing is planned without touching anything, then committed as planned.

tokens  [ computed before | hit, adopted | new | lookahead ]
        0                 ^ computed     ^     ^ total
                                         known tokens are published up to min(computed + hit + new, tokens)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from hybridkv.cache.group import CacheGroup
from hybridkv.cache.policies import GroupPlan
from hybridkv.cache.pool import BlockPool
from hybridkv.request import Request


class Reason(StrEnum):
    """Why slots were refused."""

    NO_SPACE = "no_space"
    ADMISSION_LIMIT = "admission_limit"


class Refusal(NamedTuple):
    """Nothing was changed. group: the one that asked for most; blocks: of all groups together."""

    reason: Reason
    group: int
    needed_blocks: int
    free_blocks: int


class SlotPlan(NamedTuple):
    """One GroupPlan a group for ``request`` to hold ``total_tokens``; valid while the epoch is ``epoch``."""

    epoch: int
    request: Request
    total_tokens: int
    groups: tuple[GroupPlan, ...]


class Admission(NamedTuple):
    """What an admission asks beyond its first tokens.

    full_tokens: all tokens of the request must fit. reserve_blocks: blocks that must stay free besides.
    """

    full_tokens: int
    reserve_blocks: int = 0


def needed_blocks(plans: Sequence[GroupPlan], pool: BlockPool) -> int:
    """Free blocks that ``plans`` use up: those taken, and hits that nobody holds now."""
    return sum(plan.take + pool.count_free(plan.reuse) for plan in plans)


def largest_group(plans: Sequence[GroupPlan]) -> int:
    """The group that takes most."""
    return max(range(len(plans)), key=lambda group: plans[group].take)


def admission_shortfall(
    groups: Sequence[CacheGroup], plans: Sequence[GroupPlan], admission: Admission, needed: int, free: int
) -> Refusal | None:
    """The refusal when the whole request and the reserve do not fit into ``free`` blocks."""
    later = sum(
        max(group.policy.columns(admission.full_tokens) - len(plan.reuse) - plan.take, 0)
        for group, plan in zip(groups, plans, strict=True)
    )
    wanted = needed + later + admission.reserve_blocks
    if wanted <= free:
        return None
    return Refusal(Reason.ADMISSION_LIMIT, largest_group(plans), wanted, free)
