"""What the blocks of a FixedPolicy hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hybridkv.cache.policies.values import NONE, Hit, Index, Search


class Contents(Protocol):
    """How many blocks a row has, and what of a prefix can be hit."""

    @property
    def publishes(self) -> bool:
        """Whether anything can be hit."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether blocks are states, overwritten in place."""
        ...

    @property
    def by_digest(self) -> bool:
        """Whether all blocks of a row, or none, are found under the digest of the encoder's input."""
        ...

    @property
    def columns(self) -> int:
        """Blocks that every row has for the decoder's tokens."""
        ...

    def blocks(self, encoder_tokens: int, block_size: int) -> int:
        """Blocks that a row takes when it begins."""
        ...

    def longest_hit(self, index: Index, search: Search) -> Hit:
        """The longest cached prefix."""
        ...

    def source(self, index: Index, num_tokens: int) -> int:
        """The block that a hit of ``num_tokens`` tokens is copied from; 0 where nothing is copied."""
        ...


@dataclass(frozen=True, slots=True)
class RunningState:
    """A recurrent state: in the natural layout, and where the reference layout keeps none.

    row          [ running | drafts ... ]       rewritten in place; a hit is copied into it
    checkpoint   a block of nobody's row, labelled with its token count (docs/contracts.md, 8)

    columns: the state's and one for each drafted token. publishes: whether checkpoints are kept at all.
    """

    columns: int
    publishes: bool = False
    keeps_state: bool = True
    by_digest: bool = False

    def blocks(self, encoder_tokens: int, block_size: int) -> int:  # noqa: ARG002 - the answer of contents
        """Always as many."""
        return self.columns

    def longest_hit(self, index: Index, search: Search) -> Hit:
        """The last label at or before the end. O(blocks behind it)."""
        if not self.publishes:
            return Hit(0, NONE)
        additions = index.additions
        return Hit(index.label(search.end_tokens, search.alignment), NONE, additions=additions)

    def source(self, index: Index, num_tokens: int) -> int:
        """The checkpoint to copy."""
        return (index.labelled(num_tokens) or 0) if self.publishes else 0


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """Cross attention: keys and values of the encoder's output, written once.

    by_digest: natural layout: shared by requests of one encoder input, whatever their prompts. A prefix hit needs
    nothing of it, since the decoder's own keys carry the digest; what is missing is encoded again.
    Else the decoder's prefix is worth nothing without it, and it is not shared: no hit.
    """

    by_digest: bool = False
    publishes: bool = False
    keeps_state: bool = False
    columns: int = 0

    def blocks(self, encoder_tokens: int, block_size: int) -> int:
        """``ceil(encoder tokens / block_size)``."""
        return -(-encoder_tokens // block_size)

    def longest_hit(self, index: Index, search: Search) -> Hit:  # noqa: ARG002 - the answer of contents
        """Whatever the others say where it is shared, else nothing."""
        return Hit(search.end_tokens if self.by_digest else 0, NONE)

    def source(self, index: Index, num_tokens: int) -> int:  # noqa: ARG002 - as above
        """None."""
        return 0


@dataclass(frozen=True, slots=True)
class Nothing:
    """Encoder-only attention: no block, and every hit of the others is agreed to."""

    publishes: bool = False
    keeps_state: bool = False
    by_digest: bool = False
    columns: int = 0

    def blocks(self, encoder_tokens: int, block_size: int) -> int:  # noqa: ARG002 - as above
        """None."""
        return 0

    def longest_hit(self, index: Index, search: Search) -> Hit:  # noqa: ARG002 - as above
        """Whatever the others say."""
        return Hit(search.end_tokens, NONE)

    def source(self, index: Index, num_tokens: int) -> int:  # noqa: ARG002 - as above
        """None."""
        return 0
