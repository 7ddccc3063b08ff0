"""The cache manager in plain Python, one request and one block at a time: look up, allocate, publish, drop, free.

No hashes: a key is the salt and all tokens up to the block's end. No arrays, no batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridkv.specs import KVCacheSpec
from hybridkv.testing.model import Origin, Prefix
from oracles.groups import Extent, OracleGroup, StateGroup, oracle_group
from oracles.pool import OraclePool

Cell = tuple[int, int, int]
"""Group, column, block."""


@dataclass(eq=False, slots=True)
class OracleRow:
    """A request in one group. passed: columns that were published, or passed over for good.

    stored: columns that hold the state after all of their tokens. certain: tokens that were known at the last
    allocation, None before: a state beyond them is stored where the accepted tokens turned out to end.
    done: tokens of which all ends inside a column were published (natural layout).
    accepted: the column of the state behind the last accepted draft, None where that is where states always are.
    rotated: the column that changed places with the first one since the last report to the worker, 0 for none.
    """

    table: list[int] = field(default_factory=list)
    passed: int = 0
    done: int = 0
    stored: set[int] = field(default_factory=set)
    certain: int | None = None
    accepted: int | None = None
    rotated: int = 0

    @property
    def worker_table(self) -> list[int]:
        """The table as the worker knows it."""
        table = list(self.table)
        if self.rotated:
            table[0], table[self.rotated] = table[self.rotated], table[0]
        return table

    def accept(self, column: int, *, in_place: bool) -> None:
        """The state goes on from ``column``. in_place: it is the first one from now on."""
        if not in_place:
            self.accepted = column
        elif column:
            self.table[0], self.table[column] = self.table[column], self.table[0]
            self.rotated = column


@dataclass(eq=False, slots=True)
class OracleRequest:
    """A request and what is known of it. rows: one a group, none while it holds nothing.

    encoder: tokens of the encoder's input; encodes: whether its blocks were new when the request came in.
    arrival: time and number. reads, writes: whether it uses the prefix cache.
    computed: tokens computed or scheduled. branch: a token count at which a state would have helped, 0 for none.
    overtaken, refused_at: how often it was overtaken since it was first refused, and when that was.
    marks: where the caller wants it to be resumable. consumed: a state that it went on from and has not replaced yet.
    lost: some of what it computed never was, though it ended. late: token counts among its last accepted drafts where a
    state is to be kept, and the columns where they are (natural layout).
    """

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    limit: int = 1 << 30
    stops: frozenset[int] = frozenset()
    salt: Origin = None
    encoder: int = 0
    encodes: bool = False
    priority: int = 0
    arrival: tuple[float, int] = (0.0, 0)
    reads: bool = True
    writes: bool = True
    rows: list[OracleRow] = field(default_factory=list)
    computed: int = 0
    preemptions: int = 0
    first_hit: int | None = None
    branch: int = 0
    overtaken: int = 0
    refused_at: float | None = None
    marks: tuple[int, ...] = ()
    consumed: int = 0
    lost: bool = False
    late: list[tuple[int, int]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Of the encoder's input, empty without one."""
        return self.salt[1] if isinstance(self.salt, tuple) else ""

    @property
    def tables(self) -> list[list[int]]:
        """Blocks of each group; empty while it holds nothing."""
        return [row.table for row in self.rows]


@dataclass(frozen=True, slots=True)
class OracleHit:
    """A cached prefix: its tokens and the columns of each group, 0 where none is needed.

    uncached: how many tokens more the first group asked had. sources: of each group, the block that is copied into a
    new one, 0 for none (natural layout).
    """

    tokens: int
    tables: list[list[int]]
    uncached: int = 0
    sources: tuple[int, ...] = ()

    @property
    def blocks(self) -> list[int]:
        """Those that are adopted."""
        return [block for table in self.tables for block in table if block]


class OracleCache:
    """specs: one a group. ranks: context parallel ranks. eagle: drafts by hidden states: hits look one block further.

    counts: how often something rare happened.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        num_blocks: int,
        max_model_len: int,
        *,
        caching: bool = True,
        eagle: bool = False,
        ranks: int = 1,
    ) -> None:
        self.groups = [oracle_group(number, spec, ranks) for number, spec in enumerate(specs)]
        self.pool = OraclePool(num_blocks, sum(group.sink_blocks for group in self.groups))
        self.max_model_len = max_model_len
        self.caching = caching and all(group.publishes or group.kind == "nothing" for group in self.groups)
        self.eagle = eagle
        self.publishers = [group for group in self.groups if group.publishes]
        self.alignment = math.lcm(*(group.size for group in self.publishers))
        self.counts: Counter[str] = Counter()

    # -- look-up

    def hit(self, tokens: Sequence[int], salt: Origin = None, *, reads: bool = True) -> OracleHit:
        """The longest cached prefix, never all tokens."""
        nothing = OracleHit(0, [[] for _ in self.groups])
        asked = [group for group in self.groups if group.kind in {"full", "sink"}]
        asked += [group for group in self.publishers if group not in asked]
        if not (self.caching and reads and asked):
            return nothing
        return self._agree(asked, tokens, salt) or nothing

    def _agree(self, asked: Sequence[OracleGroup], tokens: Sequence[int], salt: Origin) -> OracleHit | None:
        """Every group is asked in turn, bounded by those before it, until none shortens the candidate.

        With EAGLE a group is asked for one column past the candidate, once; if a group that was asked without
        it shortens the candidate after all, everybody is asked for it anew.
        """
        length = longest = (len(tokens) - 1) // self.alignment * self.alignment
        answers: dict[OracleGroup, int] = {}
        peeked: set[OracleGroup] = set()
        before = -1
        while length != before:
            before = length
            for group in asked:
                if group in answers and group.kind in {"full", "sink"}:
                    length = min(length, answers[group])
                    continue
                peek = self.eagle and group.peeks and group not in peeked
                prove = not answers
                answers[group] = self._longest(group, tokens, salt, length, peek=peek, prove=prove)
                if peek:
                    peeked.add(group)
                elif answers[group] < length:
                    peeked.clear()
                length = answers[group]
                longest = length if prove else longest
        if not length:
            return OracleHit(0, [[] for _ in self.groups], longest) if longest else None
        tables = [self._adopted(group, tokens, salt, length) for group in self.groups]
        return OracleHit(length, tables, longest - length)

    def _longest(
        self, group: OracleGroup, tokens: Sequence[int], salt: Origin, most: int, *, peek: bool, prove: bool
    ) -> int:
        """The longest hit of at most ``most`` tokens that ``group`` agrees to.

        peek: one column more must be cached. prove: some column must be, however little the layer reads.
        """
        length = most // self.alignment * self.alignment
        reach = len(tokens) - (len(self.groups) == 1)
        while length:
            columns = group.held(length)
            if peek:
                columns = [*columns, length // group.size]
            if prove and not columns:
                columns = [length // group.size - 1]
            if all(self._cached(group, tokens, salt, column, reach) for column in columns):
                return length
            length -= self.alignment
        return 0

    def _cached(self, group: OracleGroup, tokens: Sequence[int], salt: Origin, column: int, reach: int) -> bool:
        return (column + 1) * group.size <= reach and self._find(group, tokens, salt, column) is not None

    def _find(self, group: OracleGroup, tokens: Sequence[int], salt: Origin, column: int) -> int | None:
        return self.pool.find(group.number, prefix(tokens, salt, (column + 1) * group.size))

    def _adopted(self, group: OracleGroup, tokens: Sequence[int], salt: Origin, length: int) -> list[int]:
        if not group.publishes:
            return []
        table = [0] * (length // group.size)
        for column in group.held(length):
            table[column] = self._find(group, tokens, salt, column) or 0
        return table

    # -- allocate

    def lay_out(
        self, request: OracleRequest, new: int, hit: OracleHit | None = None, lookahead: int = 0
    ) -> tuple[list[list[int | None]], int]:
        """The tables after an allocation, None where a new block goes; and how many free blocks that uses up."""
        begun = bool(request.rows)
        end = min(request.computed + (hit.tokens if hit else 0) + new, self.max_model_len)
        extent = Extent(end, min(end + lookahead, self.max_model_len), request.encoder, begun)
        before = request.tables if begun else hit.tables if hit else [[] for _ in self.groups]
        layout = [group.lay_out(table, extent) for group, table in zip(self.groups, before, strict=True)]
        unheld = sum(self.pool.refs[block] == 0 for block in hit.blocks) if hit else 0
        return layout, unheld + sum(table.count(None) for table in layout)

    def allocate(
        self,
        request: OracleRequest,
        new: int,
        hit: OracleHit | None = None,
        *,
        lookahead: int = 0,
        in_flight: int = 0,
        delay: bool = False,
        step: int | None = None,
    ) -> list[Cell] | None:
        """Blocks for ``new`` tokens behind those computed (and hit); the new cells, None when they do not fit.

        in_flight: computed tokens whose step is not settled. delay: publish nothing. step: who writes the blocks.
        """
        self.drop(request, request.computed - in_flight)
        layout, needed = self.lay_out(request, new, hit, lookahead)
        if needed > len(self.pool.free):
            return None
        computed = request.computed + (hit.tokens if hit else 0)
        begun = bool(request.rows)
        if not begun:
            self._begin(request, hit)
        cells = []
        for group, row, table in zip(self.groups, request.rows, layout, strict=True):
            old = len(row.table) if begun else 0
            row.table = [self.pool.take(1)[0] if block is None else block for block in table]
            cells += [(group.number, column, row.table[column]) for column in range(old, len(row.table))]
            self.counts["relocated"] += sum(bool(block) for block in table[old:]) if begun else 0
            if isinstance(group, StateGroup):
                _label(group, row, computed, min(computed + new, len(request.tokens), self.max_model_len))
        if not delay:
            self.publish(request, min(computed + new, len(request.tokens), self.max_model_len), step)
        return [cell for cell in cells if cell[2]]

    def _begin(self, request: OracleRequest, hit: OracleHit | None) -> None:
        """A new request holds what it hit, in every group, before any group takes a block."""
        request.rows = [OracleRow() for _ in self.groups]
        request.encodes = request.encoder > 0
        if hit is None:
            return
        for group, row, table in zip(self.groups, request.rows, hit.tables, strict=True):
            self.pool.touch([block for block in table if block])
            row.table = list(table)
            row.passed = len(table)
            self.counts[f"hit {group.kind}"] += any(table)

    def drop(self, request: OracleRequest, processed: int) -> None:
        """Columns before the first token that is still read become null, the last one first."""
        for group, row in zip(self.groups, request.rows, strict=False):
            first = min(group.first_live(processed) // group.size, len(row.table))
            dropped = [column for column in reversed(range(first)) if row.table[column]]
            self.pool.release([row.table[column] for column in dropped])
            self.counts[f"dropped {group.kind}"] += len(dropped)
            for column in dropped:
                row.table[column] = 0

    # -- publish and free

    def accept(self, request: OracleRequest) -> None:
        """Some of its drafts were accepted: what they fill can be hit."""
        self.settle(request)

    def settle(self, request: OracleRequest) -> None:
        """All of its computed tokens are known: what they fill can be hit."""
        for group, row in zip(self.groups, request.rows, strict=False):
            if isinstance(group, StateGroup):
                _label(group, row, request.computed, min(request.computed, len(request.tokens)))
        self.publish(request, min(request.computed, len(request.tokens)))

    def publish(self, request: OracleRequest, known: int, step: int | None = None) -> None:
        """Full columns of the first ``known`` tokens can be hit from now on, as far as a hit can ask for them."""
        if not (self.caching and request.writes and request.rows):
            return
        for group in self.publishers:
            row = request.rows[group.number]
            reach = known // self.alignment * self.alignment
            if self.eagle and group.peeks and reach:
                reach = min(known, reach + group.size)
            for column in range(row.passed, reach // group.size):
                row.passed = column + 1
                if row.table[column] and self._may_publish(group, row, column):
                    key = prefix(request.tokens, request.salt, (column + 1) * group.size)
                    self.pool.publish(group.number, row.table[column], key, step)

    def _may_publish(self, group: OracleGroup, row: OracleRow, column: int) -> bool:
        if group.recurrent:
            return column in row.stored
        return group.keeps(column, self.alignment, int(self.eagle))

    def free(self, request: OracleRequest) -> None:
        """All of its blocks, in every group the last one first."""
        for row in request.rows:
            self.pool.release([block for block in reversed(row.table) if block])
        request.rows = []


def prefix(tokens: Sequence[int], salt: Origin, end: int) -> Prefix:
    """What stands for the first ``end`` tokens."""
    return salt, tuple(tokens[:end])


def _label(group: StateGroup, row: OracleRow, computed: int, certain: int) -> None:
    """Which columns hold the state after all of their tokens.

    Those where the known tokens of a chunk end, and those that the accepted tokens behind them reached.
    """
    if row.certain is not None and computed // group.size * group.size >= row.certain:
        row.stored.add(computed // group.size - 1)
    row.certain = certain
    if certain % group.size == 0:
        row.stored.add(certain // group.size - 1)
