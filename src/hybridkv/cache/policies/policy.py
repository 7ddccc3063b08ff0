"""What a group is, and what every policy answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridkv.cache.policies.publish_rule import PublishRule
from hybridkv.cache.policies.state import StateColumns
from hybridkv.cache.policies.values import (
    Bool,
    Demand,
    GroupPlan,
    Hit,
    Index,
    Int32,
    Int64,
    RowFacts,
    Search,
    T,
)
from hybridkv.specs import Keeps, KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs


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

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:
        """The longest cached prefix; keys: one a full column."""
        ...

    def source(self, index: Index, num_tokens: int) -> int:
        """The block to copy the end of a hit of ``num_tokens`` from; 0 where nothing is copied.

        CacheError where there is none to copy.
        """
        ...


class Policy(Protocol):
    """What the columns of a row mean; frozen, without a view of the pool or of other groups.

    Three of the answers are values that answer for themselves: where hits may end (``hits``), which full columns get
    keys (``publishing``; None: none), and where states lie (``states``; None for layers that keep tokens).
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

    @property
    def states(self) -> StateColumns | None:
        """Where the states of a row lie."""
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


@dataclass(frozen=True, slots=True)
class GroupKind:
    """What a group is, apart from the others; the layout says what of it is kept for reuse (hybridkv.cache.layouts).

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
