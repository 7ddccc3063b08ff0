"""What the oracle says of a step: its rows, and what becomes of recurrent states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridkv.testing.model import DigestModel
from oracles.cache import Cell, OracleRequest
from oracles.groups import OracleGroup, ScratchStateGroup, StateGroup


@dataclass(eq=False, slots=True)
class Entry:
    """A row of a step. tokens: -1 where the token is not known yet. cells: those that are new.

    drafts: the last of its tokens; count has them, too. places: of each group of states, the columns to which the
    states behind the certain tokens, and behind each draft, go. zero: (group, block). copies: (group, source,
    destination, kind). reads: a block a group, -1 where none keeps a state. writes: (group, token count, block).
    """

    request: OracleRequest
    computed: int
    count: int
    samples: bool
    tokens: list[int]
    cells: list[Cell]
    admitted: bool
    attached: bool = True
    zero: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int, str]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    places: dict[int, list[int]] = field(default_factory=dict)

    @property
    def certain(self) -> int:
        """Tokens computed behind it, drafts left out."""
        return self.computed + self.count - len(self.drafts)

    def follow_states(self, groups: Sequence[OracleGroup]) -> None:
        """The state of every recurrent group.

        Zeroed at the start, copied where its column changes, then written. A row with drafts, or that had accepted ones
        in its last step, reads it where it is.
        """
        for group, row in zip(groups, self.request.rows, strict=True):
            if not isinstance(group, StateGroup | ScratchStateGroup):
                self.reads.append(-1)
                continue
            table, places = row.table, group.places(self.certain, len(self.drafts))
            block = table[places[0]]
            if not self.computed:
                self.zero.append((group.number, block))
            elif row.accepted is not None:
                block = table[row.accepted]
            elif self.drafts:
                block = table[group.column(self.computed)]
            elif group.column(self.computed) != places[0]:
                self.copies.append((group.number, table[group.column(self.computed)], block, "state"))
            self.reads.append(block)
            self.places[group.number] = places
            self.writes += [(group.number, self.certain + i, table[place]) for i, place in enumerate(places)]
            row.accepted = None


@dataclass(eq=False, slots=True)
class OracleStep:
    """A step in flight.

    rotated: cells of states that changed places, (group, place in the batch, column, block). moves: (group, source,
    destination). late: states kept behind accepted drafts, as copies. targets: the blocks moved to, as the pool calls
    them. kept: states that are kept on the way, (place in the batch, group, token count, block).
    """

    step_id: int
    entries: list[Entry] = field(default_factory=list)
    rotated: list[tuple[int, int, int, int]] = field(default_factory=list)
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    late: list[tuple[int, int, int, str]] = field(default_factory=list)
    targets: set[int] = field(default_factory=set)
    kept: list[tuple[int, int, int, int]] = field(default_factory=list)

    def holds(self, request: OracleRequest) -> bool:
        """Whether ``request`` runs in it and was not preempted since."""
        return any(entry.request is request and entry.attached for entry in self.entries)

    def tokens_of(self, request: OracleRequest) -> int:
        """Tokens that it computes for ``request``, unless that was preempted since."""
        return sum(entry.count for entry in self.entries if entry.request is request and entry.attached)


def lost_in_flight(event: str, requests: Sequence[OracleRequest], steps: Sequence[OracleStep]) -> Counter[str]:
    """How many of ``requests`` have drafts, or their encoder's output, in flight in ``steps`` at an ``event``."""
    counts: Counter[str] = Counter()
    for request in requests:
        entries = [entry for step in steps for entry in step.entries if entry.request is request and entry.attached]
        counts[f"{event} with drafts"] += any(entry.drafts for entry in entries)
        counts[f"{event} with encoder"] += any(entry.admitted and request.encodes for entry in entries)
    return counts


def split_chunk(
    request: OracleRequest, computed: int, count: int, block: int, largest: int, *, eagle: bool = False
) -> int:
    """How many of ``count`` tokens run now, so that chunks end where a state of ``block`` tokens can be kept.

    largest: most tokens that a chunk may ever have.
    """
    known = len(request.tokens)
    prefill_end = max(request.num_prompt_tokens, known - 1)
    if computed >= prefill_end:
        return count
    end = computed + count
    if end < prefill_end:
        whole = end // block * block
        if whole > computed:
            end = whole
        elif block <= largest:
            return 0
    last = max(0, known // block * block - block) if eagle else (known - 1) // block * block
    stops = [last, request.branch // block * block]
    if computed % block:
        stops.append((computed // block + 1) * block)
    return min([end, *(stop for stop in stops if computed < stop < end)]) - computed


def verdict(model: DigestModel, entry: Entry, counts: Counter[str]) -> list[int]:
    """The accepted drafts of a row and the token that the model draws behind them; nothing for a row without drafts.

    counts: "drafted" and "accepted" by position.
    """
    tokens, sampled = list(entry.request.tokens), list[int]()
    for place in range(len(entry.drafts)):
        counts[f"drafted {place}"] += 1
    for draft in entry.drafts:
        sampled.append(model.next_token(tokens, entry.request.digest))
        if sampled[-1] != draft:
            return sampled
        counts[f"accepted {len(sampled) - 1}"] += 1
        tokens.append(draft)
    return [*sampled, model.next_token(tokens, entry.request.digest)] if entry.drafts else []


def tell(groups: Sequence[OracleGroup], step: OracleStep) -> None:
    """The worker hears of states that changed places, of the rows that run."""
    for group in groups:
        for i, entry in enumerate(step.entries):
            row = entry.request.rows[group.number]
            if row.rotated:
                step.rotated += [(group.number, i, column, row.table[column]) for column in (0, row.rotated)]
                row.rotated = 0


def keep_drafts(groups: Sequence[OracleGroup], entry: Entry, kept: int) -> None:
    """Only the first ``kept`` drafts of a row were ever computed; its states go on from the last of them."""
    entry.request.computed -= len(entry.drafts) - kept
    for group, row in zip(groups, entry.request.rows, strict=True):
        if group.recurrent:
            row.accept(entry.places[group.number][kept], in_place=isinstance(group, ScratchStateGroup))
