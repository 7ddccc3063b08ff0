"""What a group is, and what every policy answers.

Values that policies are asked with and answer with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridkv.request import Request
from hybridkv.specs import Keeps, KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from hybridkv.cache.policies.attention import PublishRule

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


class Index(Protocol):
    """What a request finds in the index of the policy's own group; see hybridkv.cache.index.PrefixIndex."""

    @property
    def additions(self) -> int:
        """Keys that the index was ever given."""
        ...

    def get(self, key: bytes) -> int | None:
        """The block behind ``key``."""
        ...

    def leading_run(self, keys: Sequence[bytes], stop: int | None = None) -> Int32:
        """Blocks of the leading keys that are all known, at most ``stop``."""
        ...

    def reach(self, request: Request, column: int) -> tuple[int, int]:
        """How many tokens of ``column`` a cached block begins with, and that block; 0 and 0 without one."""
        ...

    def source(self, request: Request, column: int, tokens: int) -> int:
        """The block that begins with the first ``tokens`` tokens of ``column``."""
        ...

    def labelled(self, request: Request, tokens: int) -> int | None:
        """The block of the state after ``tokens`` tokens."""
        ...

    def label(self, request: Request, end_tokens: int, alignment: int) -> int:
        """The greatest token count up to ``end_tokens`` that a state is labelled with, 0 for none."""
        ...


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

    published: leading columns that were published or passed over. For groups that keep a state, label: the
    token count of the state that the last step leaves; pending: token counts, multiples of the block, of
    states in earlier columns that could not be published yet.
    """

    held: int = 0
    dropped: int = 0
    published: int = 0
    label: int = 0
    pending: tuple[int, ...] = ()


class Demand(NamedTuple):
    """What a request asks for, in tokens.

    [ processed | in flight | hit | external | new | lookahead ]
                ^ processed       ^          ^ computed
                                                   ^ end       ^ total

    hit and external are 0 for a row that runs already. known: tokens whose keys may be published
    (0: none). certain: ``end`` without drafts. encoder: tokens of the encoder's input; by_digest: whether what is
    kept of it may be published under its digest.
    edges: token counts at which this very request is likely to be resumed; for retention.
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
    edges: tuple[int, ...] = ()


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


class Hits(Protocol):
    """copies: whether a hit may end inside a block, or at a state, which is copied then.

    downward_closed: whether a prefix of a hit is a hit.
    """

    @property
    def copies(self) -> bool:
        """See the class."""
        ...

    @property
    def downward_closed(self) -> bool:
        """See the class."""
        ...

    def columns(self, num_tokens: int) -> int:
        """Columns of a hit of ``num_tokens`` tokens, null ones included."""
        ...

    def first_needed(self, num_tokens: int) -> int:
        """The first token whose block a hit of ``num_tokens`` reads; ``num_tokens`` where it reads none."""
        ...

    def longest(self, index: Index, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:
        """The longest cached prefix; keys: one a full column."""
        ...

    def source(self, index: Index, request: Request, num_tokens: int) -> int:
        """The block to copy the end of a hit of ``num_tokens`` from; 0 where nothing is copied.

        CacheError where there is none to copy.
        """
        ...


class Policy(Protocol):
    """What the columns of a row mean; frozen, without a view of the pool or of other groups.

    Two of the answers are values that answer for themselves: where hits may end (``hits``), and which full columns get
    keys (``publishing``; None: none). Policies of recurrent layers answer where states lie as well: see StatePolicy.
    """

    @property
    def block_size(self) -> int:
        """Tokens of a column, over all context parallel ranks."""
        ...

    @property
    def hits(self) -> Hits:
        """What of a prefix can be hit."""
        ...

    @property
    def publishing(self) -> PublishRule | None:
        """Which full columns are worth a key."""
        ...

    def columns(self, num_tokens: T) -> T:
        """Columns that a row of ``num_tokens`` tokens has. A number or an int64 array."""
        ...

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens hold at most."""
        ...

    def next_need(self, held: T, dropped: T) -> T:
        """The token count at which a row needs another block, or may drop one."""
        ...

    def droppable(self, processed_tokens: T) -> T:
        """Leading columns that are read no longer. A number or an int64 array."""
        ...

    def is_plain(self, columns: T, published: T, tokens: tuple[T, T, T]) -> Bool | bool:
        """Whether a row needs no more than ``columns`` new blocks at its end and a key for every decided column.

        tokens: computed, end and known, as in Demand. Numbers or int64 arrays.
        """
        ...

    @property
    def only_grows(self) -> bool:
        """Whether a row that runs is always plain, but for the columns that it drops."""
        ...

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:
        """What is missing for ``demand``. hit: blocks to adopt, for a row that holds nothing."""
        ...

    def stored_columns(self, row: RowFacts, computed_tokens: int, edges: tuple[int, ...]) -> tuple[Int64, int]:
        """Columns to publish when ``computed_tokens`` are there at last, and how many are decided then."""
        ...


class StatePolicy(Policy, Protocol):
    """A policy of recurrent layers.

    rotates: an accepted state changes places with column 0; else it is read in place.
    """

    @property
    def rotates(self) -> bool:
        """See the class."""
        ...

    def state_column(self, num_tokens: T) -> T:
        """Return the column that holds the state after ``num_tokens`` tokens. A number or an int64 array."""
        ...

    def draft_columns(self, certain: Int64, drafts: Int64, position: Int64) -> Int64:
        """Return where the state after the ``position``-th draft goes in a step of ``drafts``, int64[n]; 0: after none.

        certain: tokens that are no drafts.
        """
        ...


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
