"""The values that a policy is asked with and answers with, and the kind of a group."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridkv.specs import Keeps, KVCacheSpec, MambaSpec, inner_of

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
    """The prefix that a group is asked for: a hit of at most ``end_tokens`` tokens.

        tokens  [ hit, at most end | past: looked at, then dropped | ... ]
                0                  ^ end_tokens                    ^ limit_tokens: no later token is looked at

    Attributes:
        end_tokens: Most tokens of the hit.
        limit_tokens: Most tokens that are looked at.
        alignment: The hit must be a multiple of so many tokens.
        past: Columns after the hit that must be cached too (1 for EAGLE).
        proven_tokens: Another group has shown that so many tokens were seen before.
    """

    end_tokens: int
    limit_tokens: int
    alignment: int
    past: int = 0
    proven_tokens: int = 0


class GroupHit(NamedTuple):
    """A cached prefix in one group.

    The same search gives the same answer as long as no ``missing`` position becomes known, no ``seen`` block loses its
    key, and the index gets no more ``additions``.

    Attributes:
        tokens: Tokens of the prefix.
        blocks: int32[full columns], block of each column; 0 if later tokens do not need it.
        missing: Token counts at which unknown tokens bounded the hit.
        seen: int32, all blocks on which the answer rests, including those that are not adopted.
        additions: ``additions`` of the index, if any new key may make the hit longer; -1 if only ``missing`` can.
    """

    tokens: int
    blocks: Int32
    missing: tuple[int, ...] = ()
    seen: Int32 = np.empty(0, np.int32)
    additions: int = -1


class RowFacts(NamedTuple):
    """The columns of a row in one group.

    Attributes:
        held: Columns.
        dropped: The first of them, which are null.
        published: Leading columns that were published or skipped.
        state_position: In a group that keeps states, the token count of the state that the last step leaves.
        pending: Token counts, multiples of the block, of states in earlier columns that could not be published yet.
    """

    held: int = 0
    dropped: int = 0
    published: int = 0
    state_position: int = 0
    pending: tuple[int, ...] = ()


class Demand(NamedTuple):
    """The tokens that a request asks for.

        [ processed | in flight | hit | external | new | lookahead ]
                    ^ processed       ^          ^ computed
                                                       ^ end       ^ total

    Attributes:
        processed: Tokens whose steps have run.
        hit: Tokens with the hit; for a running request no hit is added.
        computed: Tokens with those loaded from elsewhere.
        end: Tokens after this step.
        total: ``end`` with room for drafts.
        known: Tokens whose keys may be published; 0 for none.
        certain: ``end`` without drafts.
        encoder: Tokens of the encoder's output.
        by_digest: The encoder's output may be published under its digest.
        boundaries: Token counts at which this request is likely to be resumed; for retention.
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
    """The needs of a request in one group, and the columns of its row after the commit.

        [ null: dropped | held, vacated ones null | reuse: hits, touched | append ]
        0               ^ drop                    ^ held                 ^

    Attributes:
        drop: Leading columns that become null.
        reuse: int32, blocks of the hit, appended to the row.
        take: Blocks to take.
        append: int32, blocks that move here, 0 for null columns, NEW for each block to take; ``None`` stands for
            ``take`` times NEW.
        vacate: Columns whose blocks move into ``append``.
        publish: int64, columns to publish, without null ones.
        decided: Leading columns that are not asked for again.
        pending: As in RowFacts, after the commit.
    """

    drop: int
    reuse: Int32
    take: int
    append: Int32 | None
    vacate: tuple[int, ...]
    publish: Int64
    decided: int
    pending: tuple[int, ...] = ()

    @property
    def skips(self) -> bool:
        """Whether the column after the hit becomes null."""
        return self.append is not None and len(self.append) > 0 and self.append.item(0) == 0


@dataclass(frozen=True, slots=True)
class GroupKind:
    """The kind of a group; the layout says which of its blocks are kept for reuse (``hybridkv.cache.assembly``).

    Attributes:
        spec: The spec of its layers.
        publishes: Some of its blocks can be hit. Among other groups, only rings and replayed windows count for the
            common alignment of the reference layout.
        by_digest: Its blocks are found under the digest of the encoder's input.
        drops: It drops the last block of a hit, for EAGLE.
        ranks: Ranks of context parallelism.
    """

    spec: KVCacheSpec
    publishes: bool
    by_digest: bool = False
    drops: bool = False
    ranks: int = 1

    @property
    def inner(self) -> KVCacheSpec:
        """The spec of one of its layers, also if the pages of the layers differ."""
        return inner_of(self.spec)

    @property
    def block_size(self) -> int:
        """Tokens of a column: the blocks of all ranks, where the ranks share the tokens (``is_sharded``)."""
        return self.spec.block_size * (self.ranks if self.keeps_tokens and self.spec.is_sharded else 1)

    @property
    def keeps_tokens(self) -> bool:
        """Whether its blocks hold the decoder's tokens."""
        return keeps_tokens(self.spec)

    @property
    def keeps_state(self) -> bool:
        """Whether its blocks are states, overwritten in place."""
        return self.spec.keeps is Keeps.STATE

    @property
    def keeps_ring(self) -> bool:
        """Whether its block of a row is a ring, overwritten in place."""
        return self.spec.keeps is Keeps.RING

    @property
    def in_place(self) -> bool:
        """Whether its blocks are overwritten in place: states and rings. A hit copies them."""
        return self.spec.keeps in {Keeps.STATE, Keeps.RING}

    @property
    def pools(self) -> int:
        """Tokens at whose multiples all its rings are empty; 0 where that is unknown, and without rings."""
        return lcm(*self.spec.pooled) if self.keeps_ring else 0

    @property
    def replays(self) -> bool:
        """Whether hits leave its window out, so that the end of the window is computed again (``bounded_replay``)."""
        return self.keeps_tokens and not self.publishes

    @property
    def num_drafts(self) -> int | None:
        """How many drafts of a row have a block for their state; ``None`` if no state is kept at all."""
        return self.inner.num_speculative_blocks if isinstance(self.inner, MambaSpec) else None

    @property
    def sink_blocks(self) -> int:
        """Blocks of learned keys and values that belong to the layers, not to a request."""
        return self.spec.reserved_blocks(self.ranks)


def keeps_tokens(spec: KVCacheSpec) -> bool:
    """Return whether blocks of ``spec`` hold the decoder's tokens."""
    return spec.keeps in {Keeps.TOKENS, Keeps.WINDOW}
