"""The cache manager of the natural layout in plain Python: hits end anywhere, states are copied in and out.

What a request holds is in its rows, as in the reference; what only a step holds (sources of copies, states that it
keeps) is in ``held`` until the step is issued. Every move rewrites both at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from hybridkv.cache.placement import Placement
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Request
from hybridkv.testing.model import Origin, Prefix
from oracles.cache import Cell, OracleCache, OracleHit, OracleRequest, OracleRow
from oracles.groups import ChunkGroup, Extent, OracleGroup, ScratchStateGroup, WindowGroup, natural_group
from oracles.natural_pool import NaturalPool


class NaturalCache(OracleCache):
    """placement: where states are kept. Others: see OracleCache.

    live: requests that hold blocks. held: the sources of the step being scheduled in the order in which they were
    touched, then the states that it keeps. owned: for each live request, per group, the place of its source in held.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        max_model_len: int,
        placement: Placement,
        *,
        caching: bool = True,
        eagle: bool = False,
        ranks: int = 1,
    ) -> None:
        specs = [group.spec for group in config.groups]
        super().__init__(specs, 1, max_model_len, caching=caching, eagle=eagle, ranks=ranks)
        if config.slabs is None:
            raise TypeError("the natural layout has slabs")
        keeps = placement.keeps_states
        self.groups = [natural_group(number, spec, ranks, keeps_states=keeps) for number, spec in enumerate(specs)]
        self.caching = caching and all(group.publishes or group.kind in {"nothing", "cross"} for group in self.groups)
        self.cross = [group for group in self.groups if group.kind == "cross"]
        self.publishers = [group for group in self.groups if group.publishes]
        self.states = [group for group in self.publishers if group.kind == "state"]
        self.attention = [group for group in self.publishers if group.kind != "state"]
        self.blocks = NaturalPool(config.slabs, [group.sink_blocks for group in self.groups])
        self.blocks.holders = self._holders
        self.pool = self.blocks
        self.placement = placement
        self.hash_block = hash_block_of(self.groups)
        self.drops = eagle and any(group.peeks for group in self.publishers)
        self.alignment = math.lcm(*(group.size for group in self.attention)) if self.drops else 1
        self.live: list[OracleRequest] = []
        self.held: list[int] = []
        self.owned: dict[OracleRequest, list[int | None]] = {}

    def _holders(self) -> list[list[int]]:
        return [self.held, *(table for request in self.live for table in request.tables)]

    def finder(self, request: OracleRequest) -> Finder:
        """What is known of a request's tokens."""
        return Finder(self.blocks, self.hash_block, request.tokens, request.salt)

    # -- look-up

    def _agree(self, asked: Sequence[OracleGroup], tokens: Sequence[int], salt: Origin) -> OracleHit | None:
        finder = Finder(self.blocks, self.hash_block, tokens, salt)
        if self.drops:
            hit = super()._agree(asked, tokens, salt)
            end, longest = (hit.tokens, hit.tokens + hit.uncached) if hit else (0, 0)
        else:
            limit = len(tokens) - 1
            first, ends = asked[0], range(limit, 0, -1)
            longest = next((t for t in ends if finder.serves(first, t, proven=False)), 0)
            common = (t for t in ends if t <= longest and all(finder.serves(one, t, proven=True) for one in asked))
            end = next(common, 0)
        tables = [finder.columns(group, end) if group.publishes else [] for group in self.groups]
        sources = tuple((finder.source(group, end) if end and group.publishes else 0) or 0 for group in self.groups)
        return OracleHit(end, tables, longest - end, sources)

    def _longest(
        self, group: OracleGroup, tokens: Sequence[int], salt: Origin, most: int, *, peek: bool, prove: bool
    ) -> int:
        if group.kind != "state":
            return super()._longest(group, tokens, salt, most, peek=peek, prove=prove)
        finder = Finder(self.blocks, self.hash_block, tokens, salt)
        edges = range(most // self.alignment * self.alignment, 0, -self.alignment)
        return next((end for end in edges if finder.state(group, end) is not None), 0)

    # -- allocate

    def needs(
        self, request: OracleRequest, new: int, hit: OracleHit | None, lookahead: int, processed: int
    ) -> list[int]:
        """Blocks of every class that an allocation uses up; those that it drops are given back before."""
        counts, first = self.missing(request, new, hit, lookahead), self.first_tables(request, hit)
        for group in self.groups:
            if request.rows:
                dropped = self._dropped(group, request.rows[group.number], processed)
                counts[group.number] -= sum(self.blocks.refs[block] == 1 for block in dropped)
            elif hit is not None:
                sources = hit.sources or (0,) * len(self.groups)
                touched = {*first[group.number], sources[group.number]} - {0}
                counts[group.number] += sum(not self.blocks.held(block) for block in touched)
        return self.blocks.by_class(counts)

    def missing(self, request: OracleRequest, new: int, hit: OracleHit | None, lookahead: int) -> list[int]:
        """New blocks of every group."""
        end = min(request.computed + (hit.tokens if hit else 0) + new, self.max_model_len)
        begun = bool(request.rows)
        extent = Extent(end, min(end + lookahead, self.max_model_len), request.encoder, begun)
        before = request.tables if begun else self.first_tables(request, hit)
        return [group.lay_out(table, extent).count(None) for group, table in zip(self.groups, before, strict=True)]

    @staticmethod
    def _dropped(group: OracleGroup, row: OracleRow, processed: int) -> list[int]:
        first = min(group.first_live(processed) // group.size, len(row.table))
        return [block for block in row.table[:first] if block]

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
        """See OracleCache.allocate; cells are none of its answers, for what a table holds may move until the end."""
        processed = request.computed - in_flight
        fits = self.blocks.slabs.fits(self.needs(request, new, hit, lookahead, processed))
        missing = self.missing(request, new, hit, lookahead)
        self.drop(request, processed)
        if not fits:
            return None
        if not request.rows:
            self.begin(request, hit)
        computed = request.computed + (hit.tokens if hit else 0)
        for group, row, count in zip(self.groups, request.rows, missing, strict=True):
            for _ in range(count):
                row.table += self.blocks.take(1, group.number)
        if not delay:
            self.publish(request, min(computed + new, len(request.tokens), self.max_model_len), step)
            self._publish_encoded(request, missing, step)
        return []

    def begin(self, request: OracleRequest, hit: OracleHit | None) -> None:
        """A new request holds what it hit, and the step what it copies from."""
        request.rows = [OracleRow() for _ in self.groups]
        request.consumed = 0
        request.late = []
        self.live.append(request)
        self.owned[request] = [None for _ in self.groups]
        tables = self.first_tables(request, hit)
        request.encodes = request.encoder > 0 and not any(tables[group.number] for group in self.cross)
        hit = hit or OracleHit(0, tables)
        sources = hit.sources or (0,) * len(self.groups)
        for group, row, table, source in zip(self.groups, request.rows, tables, sources, strict=True):
            row.table, row.passed, row.done = list(table), len(table), hit.tokens
            self.blocks.touch([block for block in table if block])
            self.counts[f"hit {group.kind}"] += any(table) or bool(source)
            if source:
                self.counts[f"copied {group.kind}"] += 1
                self.owned[request][group.number] = len(self.held)
                self.blocks.touch([source])
                self.held.append(source)
        if self.states and 0 < hit.tokens < request.num_prompt_tokens - 1:
            request.consumed = hit.tokens

    def shared(self, parent: OracleRequest) -> OracleHit:
        """What a branch of ``parent`` begins with: whole columns, and copies of its last one and of its states."""
        end, tables, sources = parent.computed, [], []
        for group, table in zip(self.groups, parent.tables, strict=True):
            recurrent = isinstance(group, ScratchStateGroup)
            whole, rest = (0, 1) if recurrent else divmod(end, group.size)
            if group.kind == "cross":
                whole, rest = len(table), 0
            tables.append(table[:whole])
            sources.append(table[whole] if end and rest and whole < len(table) else 0)
        return OracleHit(end, tables, 0, tuple(sources))

    # -- the encoder's output

    def first_tables(self, request: OracleRequest, hit: OracleHit | None) -> list[list[int]]:
        """What a request that holds nothing begins with: its hit, and the encoder's output where all of it is there."""
        tables = [list(table) for table in hit.tables] if hit else [[] for _ in self.groups]
        if not (self.caching and request.encoder and request.reads) or any(tables[one.number] for one in self.cross):
            return tables
        keys = {group: self._encoder_keys(group, request) for group in self.cross}
        found = {group: [self.blocks.find(group.number, key) for key in keys[group]] for group in self.cross}
        if all(None not in blocks for blocks in found.values()):
            for group, blocks in found.items():
                tables[group.number] = [block for block in blocks if block is not None]
        return tables

    @staticmethod
    def _encoder_keys(group: OracleGroup, request: OracleRequest) -> list[Prefix]:
        return [(request.salt, (request.encoder, column)) for column in range(math.ceil(request.encoder / group.size))]

    def _publish_encoded(self, request: OracleRequest, missing: Sequence[int], step: int | None) -> None:
        """New blocks of the encoder's output can be hit from now on. missing: new blocks of every group."""
        for group in self.cross if self._may_write(request) else ():
            if missing[group.number]:
                table, keys = request.rows[group.number].table, self._encoder_keys(group, request)
                for block, key in zip(table, keys, strict=True):
                    self.blocks.publish(group.number, block, key, step)

    # -- publish

    def publish(self, request: OracleRequest, known: int, step: int | None = None) -> None:
        """Full columns and published ends of the first ``known`` tokens can be hit from now on."""
        if not self._may_write(request):
            return
        for group in self.attention:
            row = request.rows[group.number]
            self._publish_columns(group, request, row, known, step)
            for end in sorted({request.num_prompt_tokens - 1, *request.marks}):
                if row.done < end <= known:
                    self._publish_end(group, request, row, end, step)
            row.done = known

    def _may_write(self, request: OracleRequest) -> bool:
        return self.caching and request.writes and bool(request.rows)

    def _publish_columns(
        self, group: OracleGroup, request: OracleRequest, row: OracleRow, known: int, step: int | None
    ) -> None:
        prefix = self.finder(request).prefix
        for column in range(row.passed, known // group.size):
            row.passed = column + 1
            if row.table[column]:
                self.blocks.publish(group.number, row.table[column], prefix((column + 1) * group.size), step)

    def _publish_end(
        self, group: OracleGroup, request: OracleRequest, row: OracleRow, end: int, step: int | None
    ) -> None:
        column, rest = divmod(end, group.size)
        if rest and column < len(row.table) and row.table[column]:
            prefix = self.finder(request).prefix(end)
            self.blocks.publish_partial(group.number, row.table[column], prefix, end - rest, step)
            self.counts[f"ends {group.kind}"] += 1

    def accept(self, request: OracleRequest) -> None:
        """See OracleCache.accept."""
        self.publish(request, request.computed)

    def settle(self, request: OracleRequest) -> None:
        """A request gives its blocks back, all of its tokens computed: where it ends can be hit."""
        if not self._may_write(request) or request.lost:
            return
        end = min(request.computed, len(request.tokens))
        for group in self.attention:
            row = request.rows[group.number]
            self._publish_columns(group, request, row, end, None)
            self._publish_end(group, request, row, end, None)
        if not self.states:
            return
        for stop, column in request.late:
            self._settle_state(request, stop, column, ended=False)
        if self.placement.keeps_final_state and end and end == request.computed:
            self._settle_state(request, end, 0, ended=True)

    def _settle_state(self, request: OracleRequest, end: int, column: int, *, ended: bool) -> None:
        """The state after ``end`` tokens, which is in ``column``, is kept."""
        lacking = self.lacking(request, end)
        for group in lacking:
            block = request.rows[group.number].table[column]
            self.publish_state(group, request, block, end, None)
            if self.is_supersedable(request, end, ended=ended):
                self.blocks.ends.add(block)
            self.counts["states at ends" if ended else "late at ends"] += 1
        if lacking:
            self.supersede(request, end)

    # -- states

    def stops(self, request: OracleRequest, computed: int, end: int) -> tuple[int, ...]:
        """Where the placement wants a state of ``request``, of known tokens only."""
        if not (self._may_write(request) and self.states):
            return ()
        stops = self.placement.checkpoints(as_asked(request), computed, end)
        return tuple(stop for stop in stops if stop <= len(request.tokens))

    def lacking(self, request: OracleRequest, end: int) -> list[OracleGroup]:
        """The groups that keep no state after ``end`` tokens."""
        finder = self.finder(request)
        return [group for group in self.states if finder.state(group, end) is None]

    def publish_state(self, group: OracleGroup, request: OracleRequest, block: int, end: int, step: int | None) -> None:
        """``block`` keeps the state after ``end`` tokens."""
        finder = self.finder(request)
        parent = finder.parent_of(group, end)
        if parent == end:
            self.blocks.publish(group.number, block, finder.prefix(end), step)
        else:
            self.blocks.publish_partial(group.number, block, finder.prefix(end), parent, step)

    def keep(self, request: OracleRequest, end: int, step: int) -> list[tuple[int, int]] | None:
        """Room for the state after ``end`` tokens in every group that lacks it: group, place in ``held``.

        None where there is no room.
        """
        lacking = self.lacking(request, end)
        counts = [int(group in lacking) for group in self.groups]
        if not self.blocks.slabs.fits(self.blocks.by_class(counts)):
            return None
        kept = []
        for group in lacking:
            kept.append((group.number, len(self.held)))
            self.held.append(0)
            self.held[-1] = self.blocks.take(1, group.number)[0]
        for group, (_, place) in zip(lacking, kept, strict=True):
            self.publish_state(group, request, self.held[place], end, step)
            if self.is_supersedable(request, end, ended=False):
                self.blocks.ends.add(self.held[place])
        if kept:
            self.supersede(request, end)
        return kept

    def is_supersedable(self, request: OracleRequest, end: int, *, ended: bool) -> bool:
        """Whether only who goes on from ``end`` tokens wants that state: where a request, or its prompt, ended."""
        if ended:
            return True
        at_prompt = self.placement.name == "ends" and end == request.num_prompt_tokens - 1
        return at_prompt and end != request.branch and end not in request.marks

    def supersede(self, request: OracleRequest, end: int) -> None:
        """The state that ``request`` went on from is the first to go, now that there is one of ``end`` tokens."""
        if not 0 < request.consumed < end:
            return
        finder = self.finder(request)
        found = [finder.state(group, request.consumed) for group in self.states]
        blocks = [block for block in found if block is not None]
        if any(self.blocks.held(block) for block in blocks):
            self.counts["superseded later"] += 1
            return
        passed = [block for block in blocks if block in self.blocks.ends]
        self.blocks.slabs.age_first(passed)
        self.blocks.ends -= set(passed)
        self.counts["superseded"] += len(passed)
        request.consumed = 0

    # -- the end of a step, and of a request

    def let_go(self) -> None:
        """Nothing is held for the step that was scheduled any more."""
        held, self.held = self.held, []
        for block in held:
            self.blocks.release([block])
        self.owned = {}
        self.blocks.moves = []

    def free(self, request: OracleRequest) -> None:
        """See OracleCache.free."""
        super().free(request)
        if request in self.live:
            self.live.remove(request)


class _Asked:
    """What a placement asks of a request."""

    def __init__(self, request: OracleRequest) -> None:
        self.num_prompt_tokens = request.num_prompt_tokens
        self.branch_tokens = request.branch
        self.marks = request.marks


def as_asked(request: OracleRequest) -> Request:
    """``request`` as a placement knows it."""
    return cast("Request", _Asked(request))


USUAL_HASH_BLOCK = 16
"""Tokens, where no attention group publishes."""


def hash_block_of(groups: Sequence[OracleGroup]) -> int:
    """Tokens of a block that is hashed: parents of states' keys lie at multiples of it."""
    return math.gcd(*(group.size for group in groups if group.publishes and group.kind != "state")) or USUAL_HASH_BLOCK


class Finder:
    """One request's tokens against the keys of a pool. hash_block: see ``hash_block_of``."""

    def __init__(self, pool: NaturalPool, hash_block: int, tokens: Sequence[int], salt: Origin) -> None:
        self._pool = pool
        self._hash_block = hash_block
        self._tokens = tuple(tokens)
        self._salt = salt

    def prefix(self, end: int) -> Prefix:
        """What stands for the first ``end`` tokens."""
        return self._salt, self._tokens[:end]

    def parent_of(self, group: OracleGroup, end: int) -> int:
        """Tokens of the parent of the key of the first ``end`` tokens; ``end`` itself for a full key."""
        size = self._hash_block if group.kind == "state" else group.size
        return end // size * size

    def state(self, group: OracleGroup, end: int) -> int | None:
        """The block that keeps the state after ``end`` tokens."""
        parent = self.parent_of(group, end)
        if parent == end:
            return self._pool.find(group.number, self.prefix(end))
        return self._pool.find_tail(group.number, self.prefix(end), parent)

    # -- attention

    def full(self, group: OracleGroup, column: int) -> int | None:
        """The block of a full column of the request."""
        end = (column + 1) * group.size
        return self._pool.find(group.number, self.prefix(end)) if end <= len(self._tokens) else None

    def tails(self, group: OracleGroup, column: int) -> list[tuple[int, int]]:
        """Partial keys that the request's tokens match: their tokens in ``column`` and block, the oldest first."""
        first = column * group.size
        entries = self._pool.tails.get((group.number, self.prefix(first)), [])
        return [(len(tail), block) for tail, block in entries if self._tokens[first : first + len(tail)] == tail]

    def reach(self, group: OracleGroup, column: int) -> int:
        """Tokens of ``column`` that a block holds."""
        if self.full(group, column) is not None:
            return group.size
        return max((length for length, _ in self.tails(group, column)), default=0)

    def covers(self, group: OracleGroup, start: int, end: int) -> bool:
        """Whether blocks hold the tokens start .. end - 1."""
        size = group.size
        return all(
            column * size + self.reach(group, column) >= min(end, (column + 1) * size)
            for column in range(start // size, math.ceil(end / size))
        )

    def source(self, group: OracleGroup, end: int) -> int | None:
        """The block that a hit of ``end`` tokens copies; None where it ends at an edge."""
        if group.kind == "state":
            return self.state(group, end)
        column, rest = divmod(end, group.size)
        if not rest:
            return None
        full = self.full(group, column)
        if full is not None:
            return full
        return next((block for length, block in self.tails(group, column) if length >= rest), None)

    # -- hits

    def serves(self, group: OracleGroup, end: int, *, proven: bool) -> bool:
        """Whether ``group`` can go on behind ``end`` tokens. proven: that they were seen is known."""
        if group.kind == "state":
            return self.state(group, end) is not None
        start = first_read(group, end)
        if start < end:
            return self.covers(group, start, end)
        return (proven and end % group.size == 0) or self.covers(group, end - 1, end)

    def columns(self, group: OracleGroup, end: int) -> list[int]:
        """The whole columns of a hit of ``end`` tokens: blocks, 0 for those that nobody reads."""
        if group.kind == "state":
            return []
        whole, first = end // group.size, first_read(group, end) // group.size
        return [0 if column < first else self.full(group, column) or 0 for column in range(whole)]


def first_read(group: OracleGroup, end: int) -> int:
    """The first token that must be there to go on behind ``end`` tokens."""
    if isinstance(group, WindowGroup):
        return max(0, end - max(group.window - 1, 1))
    return end // group.chunk * group.chunk if isinstance(group, ChunkGroup) else 0
