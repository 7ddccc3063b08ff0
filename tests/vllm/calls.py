"""Calls made on both sides, their answers in plain ints and bytes, and a difference between those.

A run is a list of calls: any sublist can be run as well.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

Ids = tuple[tuple[int, ...], ...]
"""Block ids, one tuple a group; 0 is the null block."""

Keys = tuple[tuple[bytes | None, ...], ...]
"""The key under which a block can be hit, for every id."""


@dataclass(frozen=True)
class Start:
    """A request arrives, or a preempted one comes back: look-up, and slots for its first chunk behind the hit.

    tokens: the prompt of a new request, empty for one that comes back. sampled: known when the chunk ends with
    the last known token. step: a step begins before. external: tokens behind the hit that are loaded from
    elsewhere, as far as one is left to compute.
    """

    name: str
    tokens: tuple[int, ...]
    chunk: int
    lookahead: int = 0
    delay: bool = False
    sampled: tuple[int, ...] = ()
    step: bool = True
    external: int = 0


@dataclass(frozen=True)
class Grow:
    """Slots for ``chunk`` more tokens, of which the last ``rejected`` are taken back; then ``sampled`` are known.

    processed: at most so many of the computed tokens are settled before, the others are in flight; None for all.
    """

    name: str
    chunk: int
    lookahead: int = 0
    delay: bool = False
    rejected: int = 0
    sampled: tuple[int, ...] = ()
    step: bool = True
    processed: int | None = None


class DecodeRow(NamedTuple):
    """One request of a Decode. drafts: behind its one token, the last ``rejected`` of which are taken back.

    sampled: known then, where no known token is left. processed: as in Grow.
    """

    name: str
    sampled: tuple[int, ...]
    drafts: int = 0
    rejected: int = 0
    processed: int | None = None


@dataclass(frozen=True)
class Decode:
    """Slots for the next token of each of ``rows``, in this order: one call of ours, one a row of theirs."""

    rows: tuple[DecodeRow, ...]
    lookahead: int = 0
    step: bool = True


@dataclass(frozen=True)
class Publish:
    """A delayed transfer is done: what is computed can be hit."""

    name: str


@dataclass(frozen=True)
class Preempt:
    """Everything is freed, the request starts over later."""

    name: str


@dataclass(frozen=True)
class Free:
    """The request is done."""

    name: str


@dataclass(frozen=True)
class Probe:
    """A look-up alone."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Reset:
    """The prefix cache is emptied if nothing is in use. empty: every request is freed first."""

    empty: bool = False


Call = Start | Grow | Decode | Publish | Preempt | Free | Probe | Reset


@dataclass
class Known:
    """What a run knows of a request without asking either side.

    processed: computed tokens that are settled.
    stored: token counts after which a recurrent state was really written. sure: tokens known when the last
    chunk was given its slots, drafts left out.
    """

    prompt: int
    tokens: int
    computed: int = 0
    processed: int = 0
    resident: bool = False
    sure: int = 0
    stored: frozenset[int] = frozenset()

    def ran(self, computed: int, chunk: int, state_blocks: tuple[int, ...]) -> None:
        """``chunk`` tokens behind ``computed`` were given slots; drafts accepted before may have crossed a block."""
        crossed = {computed // size * size for size in state_blocks}
        stored = self.stored | {edge for edge in crossed if edge >= self.sure}
        self.sure = min(computed + chunk, self.tokens)
        self.stored = stored | {self.sure}
        self.computed = computed + chunk
        self.resident = True

    def adopted(self, hit: int, external: int) -> None:
        """A hit of ``hit`` tokens and ``external`` behind it that are loaded: the states at both are there."""
        self.computed = self.processed = self.sure = hit + external
        self.stored = frozenset({hit, hit + external})

    def restart(self) -> None:
        self.computed = self.processed = self.sure = 0
        self.resident = False
        self.stored = frozenset()


@dataclass(frozen=True)
class Found:
    tokens: int
    ids: Ids


class Ask(NamedTuple):
    """Slots for ``chunk`` tokens. found: what look_up answered last, to be adopted; external: tokens behind it."""

    chunk: int
    lookahead: int
    delay: bool
    found: Found | None = None
    external: int = 0


class Slots(NamedTuple):
    """What a decode step got. accepted: leading rows; the others are refused. cells: (row, group, column, block)."""

    accepted: int
    cells: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Difference:
    """what: hit, refusal, new, table, keys, free, order, usage, reset or error. request: what it was about."""

    what: str
    call: Call
    theirs: Any
    ours: Any
    request: Known | None = None
    name: str = ""
