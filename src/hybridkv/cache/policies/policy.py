"""What a group is, and the values that policies are asked with and answer with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridkv.specs import Keeps, KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
T = TypeVar("T", int, Int64)
"""A number, or one for each of many rows."""

NEW: Final = -1
"""In GroupPlan.append: a block yet to be taken."""

NEVER: Final = 1 << 60
"""A token count or column that no request reaches."""

UNPUBLISHED: Final = 1 << 40
"""Columns passed over in a row that publishes nothing: more than any row has."""

NONE: Final = np.empty(0, np.int32)

NO_COLUMNS: Final = np.empty(0, np.int64)


class Search(NamedTuple):
    """What a group is asked for: a hit of at most ``end_tokens`` tokens.

        tokens  [ hit, at most end | past: looked at, then dropped | ... ]
                0                  ^ end_tokens                    ^ limit_tokens: nothing behind is looked at

    alignment: tokens of which the hit must be a multiple. past: columns behind the hit that must be cached
    as well (EAGLE: 1). proven_tokens: another group has shown that so many tokens were seen before.
    """

    end_tokens: int
    limit_tokens: int
    alignment: int
    past: int = 0
    proven_tokens: int = 0


class GroupHit(NamedTuple):
    """A cached prefix in one group.

    blocks: int32[full columns], the block of each, 0 where later tokens need none.
    missing: token counts at which tokens are unknown and bounded the hit. seen: int32, all blocks on which the
    answer rests, looked at and not adopted ones too. additions: of the index, where any new key may lengthen
    the hit; -1 where only the missing can. While the missing stay unknown, the seen keep their keys and there
    are no more additions, the same search has the same answer.
    """

    tokens: int
    blocks: Int32
    missing: tuple[int, ...] = ()
    seen: Int32 = np.empty(0, np.int32)
    additions: int = -1


class RowFacts(NamedTuple):
    """What a row holds in one group: ``held`` columns, the first ``dropped`` of them null.

    published: leading columns that were published or passed over. For groups that keep a state, state_position: the
    token count of the state that the last step leaves; pending: token counts, multiples of the block, of
    states in earlier columns that could not be published yet.
    """

    held: int = 0
    dropped: int = 0
    published: int = 0
    state_position: int = 0
    pending: tuple[int, ...] = ()


class Demand(NamedTuple):
    """What a request asks for, in tokens.

    [ processed | in flight | hit | external | new | lookahead ]
                ^ processed       ^          ^ computed
                                                   ^ end       ^ total

    hit and external are 0 for a row that runs already. known: tokens whose keys may be published
    (0: none). certain: ``end`` without drafts. encoder: tokens of the encoder's input; by_digest: whether what is
    kept of it may be published under its digest.
    boundaries: token counts at which this very request is likely to be resumed; for retention.
    """

    processed: int
    hit: int
    computed: int
    end: int
    total: int
    known: int
    certain: int
    encoder: int = 0
    by_digest: bool = False
    boundaries: tuple[int, ...] = ()


class GroupPlan(NamedTuple):
    """What a request needs in one group, and the columns of its row after the commit.

        [ null: dropped | held, vacated ones null | reuse: hits, touched | append ]
        0               ^ drop                    ^ held                 ^

    drop: leading columns that are null from now on. vacate: columns whose blocks move into ``append``.
    append: int32, block ids that move here, 0 for null columns, NEW for each block to take; None stands
    for ``take`` times NEW. take: blocks to take.
    publish: columns to publish, null ones left out. decided: leading columns that are not asked for again.
    pending: as in RowFacts, from then on.
    """

    drop: int
    reuse: Int32
    take: int
    append: Int32 | None
    vacate: tuple[int, ...]
    publish: Int64
    decided: int
    pending: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupKind:
    """What a group is, apart from the others; the layout says what of it is kept for reuse (hybridkv.cache.assembly).

    publishes: whether anything of it can be hit; a group that never publishes has no say in the common alignment.
    by_digest: whether its blocks are found under the digest of the encoder's input. drops: the last block of a hit,
    for EAGLE. ranks: of context parallelism.
    """

    spec: KVCacheSpec
    publishes: bool
    by_digest: bool = False
    drops: bool = False
    ranks: int = 1

    @property
    def inner(self) -> KVCacheSpec:
        """The spec of the layers, also where their pages differ (one type: all keep the same tokens)."""
        return inner_of(self.spec)

    @property
    def block_size(self) -> int:
        """Tokens of a column: attention is spread over the ranks, states and encoder outputs are whole on each."""
        return self.spec.block_size * (self.ranks if self.keeps_tokens else 1)

    @property
    def keeps_tokens(self) -> bool:
        """Whether its blocks hold the decoder's tokens."""
        return keeps_tokens(self.spec)

    @property
    def keeps_state(self) -> bool:
        """Whether its blocks are states, overwritten in place."""
        return self.spec.keeps is Keeps.STATE

    @property
    def num_drafts(self) -> int | None:
        """Of how many drafts of a row its states can be kept; None where no state is kept at all."""
        return self.inner.num_speculative_blocks if isinstance(self.inner, MambaSpec) else None

    @property
    def sink_blocks(self) -> int:
        """Blocks of learned keys and values that belong to the layers, not to a request."""
        return self.spec.reserved_blocks(self.ranks)


def inner_of(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec of the layers that ``spec`` was merged of."""
    return spec.layers[0][1] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def keeps_tokens(spec: KVCacheSpec) -> bool:
    """Whether blocks of ``spec`` hold the decoder's tokens."""
    return spec.keeps in {Keeps.TOKENS, Keeps.WINDOW}
