"""From a config to the groups of a manager."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridkv.cache.group import CacheGroup
from hybridkv.cache.index import PrefixIndex
from hybridkv.cache.policies import GroupKind, alignment_of, check_retention, policy_of
from hybridkv.errors import ConfigError
from hybridkv.plan.config import KVCacheConfig
from hybridkv.specs import Keeps


def kinds_of(config: KVCacheConfig, ranks: int, *, use_eagle: bool) -> tuple[GroupKind, ...]:
    """What each group is. Recurrent groups never drop for EAGLE; where no group is flagged, ``use_eagle`` flags all.

    Raises ConfigError for the natural layout, which the cache does not run yet.
    """
    config.refuse_slabs()
    flagged = any(group.is_eagle_group for group in config.groups)
    return tuple(
        GroupKind(
            group.spec,
            drops=(group.is_eagle_group or (use_eagle and not flagged))
            and group.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW},
            ranks=ranks,
        )
        for group in config.groups
    )


def can_resume(kinds: Sequence[GroupKind]) -> bool:
    """Whether a prefix can be hit at all: every group that keeps anything keeps it for reuse."""
    return any(kind.publishes for kind in kinds) and all(
        kind.publishes or kind.spec.keeps == Keeps.NOTHING for kind in kinds
    )


def hash_block_size(kinds: Sequence[GroupKind]) -> int:
    """The greatest block that divides those of all groups that publish, tokens."""
    return math.gcd(*(kind.block_size for kind in kinds if kind.publishes)) or kinds[0].block_size


def build_groups(
    kinds: Sequence[GroupKind], indexes: Sequence[PrefixIndex], hash_block: int, retention: int | None
) -> tuple[CacheGroup, ...]:
    """One CacheGroup a kind. ConfigError for a hash block that does not divide, or a retention that cannot be kept."""
    alignment = alignment_of(kinds)
    check_retention(retention, alignment)
    for number, kind in enumerate(kinds):
        if kind.publishes and kind.block_size % hash_block:
            raise ConfigError(
                f"group {number} has blocks of {kind.block_size} tokens, no multiple of the hash block "
                f"{hash_block}: choose a hash block that divides every block size"
            )
    return tuple(
        CacheGroup(number, kind, policy_of(kind, alignment, retention), index, hash_block)
        for number, (kind, index) in enumerate(zip(kinds, indexes, strict=True))
    )
