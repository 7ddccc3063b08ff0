"""From a config to the groups of a manager."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from hybridkv.cache.blocks.index import PrefixIndex
from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.blocks.slab_space import SlabSpace
from hybridkv.cache.blocks.space import ClassedSpace
from hybridkv.cache.placement import DEFAULT_PLACEMENT, Placement
from hybridkv.cache.policies import GroupKind, alignment_of, check_retention, natural_policy_of, policy_of
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.specs import Keeps

_KEYS_APART: Final = 16  # tokens, where there is no attention whose blocks would say it


def placement_for(config: KVCacheConfig, placement: Placement | None) -> Placement | None:
    """Where states are kept in the natural layout; None in the reference layout, whose specs say it themselves.

    ConfigError for a placement in the reference layout.
    """
    if config.slabs is not None:
        return placement if placement is not None else DEFAULT_PLACEMENT
    if placement is not None:
        raise ConfigError(
            f"placement {placement.name} needs the natural layout; in the reference layout the specs say where states "
            "are kept: plan with placement= instead"
        )
    return None


def pool_of(
    config: KVCacheConfig,
    space: ClassedSpace | None,
    max_moved_bytes: int | None,
    *,
    enable_events: bool,
    max_event_blocks: int,
) -> BlockPool:
    """The pool of ``config``: blocks of one size in a plain order, of several in slabs, or in ``space``."""
    slabs = config.slabs
    if slabs is None:
        return BlockPool(
            config.num_blocks, len(config.groups), enable_events=enable_events, max_event_blocks=max_event_blocks
        )
    space = SlabSpace(slabs, max_moved_bytes) if space is None else space
    return BlockPool(
        space.num_blocks,
        len(config.groups),
        enable_events=enable_events,
        max_event_blocks=max_event_blocks,
        space=space,
        classes=[slabs.classes.index(slabs.class_of(group)) for group in range(len(config.groups))],
        bases=space.bases,
        silent=[
            number for number, group in enumerate(config.groups) if group.spec.keeps in {Keeps.STATE, Keeps.ENCODER}
        ],
    )


def kinds_of(
    config: KVCacheConfig, ranks: int, *, use_eagle: bool, placement: Placement | None
) -> tuple[GroupKind, ...]:
    """What each group is. Recurrent groups never drop for EAGLE; where no group is flagged, ``use_eagle`` flags all."""
    flagged = any(group.is_eagle_group for group in config.groups)
    return tuple(
        GroupKind(
            group.spec,
            drops=(group.is_eagle_group or (use_eagle and not flagged))
            and group.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW},
            ranks=ranks,
            checkpoints=None if placement is None else placement.keeps_states,
        )
        for group in config.groups
    )


def can_resume(kinds: Sequence[GroupKind]) -> bool:
    """Whether a prefix can be hit at all: every group that keeps anything keeps it for reuse."""
    return any(kind.publishes for kind in kinds) and all(
        kind.publishes or kind.by_digest or kind.spec.keeps == Keeps.NOTHING for kind in kinds
    )


def hash_block_size(kinds: Sequence[GroupKind]) -> int:
    """The greatest block that divides those of all groups that publish, tokens."""
    if any(kind.checkpoints is not None for kind in kinds):
        sizes = [kind.block_size for kind in kinds if kind.publishes and not kind.keeps_state]
        return math.gcd(*sizes) or _KEYS_APART
    return math.gcd(*(kind.block_size for kind in kinds if kind.publishes)) or kinds[0].block_size


def ends_inside(kinds: Sequence[GroupKind], *, published_ends: bool) -> bool:
    """Whether hits may end inside a block: in the natural layout, unless a group drops for EAGLE (it drops blocks)."""
    natural = any(kind.checkpoints is not None for kind in kinds)
    return natural and published_ends and not any(kind.drops for kind in kinds)


def build_groups(
    kinds: Sequence[GroupKind],
    indexes: Sequence[PrefixIndex],
    hash_block: int,
    retention: int | None,
    *,
    exact: bool = False,
) -> tuple[CacheGroup, ...]:
    """One CacheGroup a kind. ConfigError for a hash block that does not divide, or a retention that cannot be kept.

    exact: hits may end inside a block.
    """
    alignment = alignment_of(kinds, exact=exact)
    check_retention(retention, alignment)
    natural = any(kind.checkpoints is not None for kind in kinds)
    for number, kind in enumerate(kinds):
        if kind.publishes and kind.block_size % hash_block and not (natural and kind.keeps_state):
            raise ConfigError(
                f"group {number} has blocks of {kind.block_size} tokens, no multiple of the hash block "
                f"{hash_block}: choose a hash block that divides every block size"
            )
    return tuple(
        CacheGroup(
            number,
            kind,
            natural_policy_of(kind, alignment, hash_block, exact=exact)
            if natural
            else policy_of(kind, alignment, retention),
            index,
            hash_block,
        )
        for number, (kind, index) in enumerate(zip(kinds, indexes, strict=True))
    )
