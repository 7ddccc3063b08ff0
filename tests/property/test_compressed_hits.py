"""Hits over compressed caches: each step reads the states that its tokens before it wrote, to the byte.

The worker here is a small model of its own. It knows specs and tables, and nothing of policies or look-ups:

    tokens       | 0 1 2 3 | 4 5 6 7 | 8 9            rate 4: states a and b; the raw keys of 8 and 9 wait
    blocks       [ a b ]   written with the last token of each state, from the raw keys of all its tokens
    ring         [ 8 9 . . ]                          . : of no token, or of another one

A request that begins has the raw keys that its ring and its windows hold, and no others. So a state that a hit divides
cannot be written where they are missing or wrong, and the test fails.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, lcm
from random import Random

import numpy as np
import pytest

from how_much import how_many
from hybridkv.cache import CacheOptions, KVCacheManager, assembly
from hybridkv.cache.assembly import NaturalLayout
from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.index import PrefixIndex
from hybridkv.cache.lookup import Hit, PrefixLookup
from hybridkv.cache.policies import GroupHit, PositionHits, Search, TokenHits
from hybridkv.cache.transfers import Stored, TransferLog
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.eviction import HAZARD, LRU, Eviction
from hybridkv.request import Request
from hybridkv.specs import (
    AttentionSpec,
    CircularBufferSpec,
    Keeps,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from hybridkv.testing.configs import (
    full_spec,
    model_config,
    natural_model_config,
    rate_spec,
    ring_spec,
    state_spec,
    window_spec,
)
from random_rows import Span, finish, grow

Tokens = tuple[int, ...]
COMPARED = True
"""Whether hits are compared with the longest ones; off to see that the worker's own check finds a fault."""


def sums_spec(block_size: int, window: int, pools: int) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(block_size=block_size, head_size=2, dtype="float32", sliding_window=window, pools=pools)


WHOLE: dict[str, tuple[KVCacheSpec, ...]] = {
    "one rate": (rate_spec(8, 4),),
    "rate and tokens": (rate_spec(8, 4), full_spec(8)),
    "two rates": (rate_spec(32, 4), rate_spec(16, 8), full_spec(4)),
    "rate, window": (rate_spec(8, 2), window_spec(4, 6), full_spec(4)),
    "retained": (rate_spec(12, 6), replace(window_spec(4, 6), extra_retained_tokens=5)),
    "compressed window": (full_spec(4), replace(window_spec(8, 7), head_size=4, tokens_per_state=4)),
    "several states a token": (rate_spec(4, Fraction(1, 2)), rate_spec(8, 2)),
    "three halves": (rate_spec(6, Fraction(3, 2)), full_spec(6)),
    "ring of unknown group": (rate_spec(8, 4), ring_spec(6), full_spec(8)),
    "unknown ring first": (ring_spec(4), rate_spec(8, 4)),
    "unknown ring, rates, window": (rate_spec(8, 4), ring_spec(8), rate_spec(16, 8), window_spec(4, 6)),
    "one of two rates kept": (rate_spec(16, 4), rate_spec(16, 8), ring_spec(8, 8)),
}
"""Models where nothing keeps the raw keys of some rate, so that hits end at its whole states."""
EXACT: dict[str, tuple[KVCacheSpec, ...]] = {
    "ring": (rate_spec(8, 4), ring_spec(6, 4), full_spec(8)),
    "smallest ring": (ring_spec(7, 8), rate_spec(16, 8)),
    "two rings": (rate_spec(16, 4), ring_spec(4, 4), rate_spec(16, 8), ring_spec(10, 8), window_spec(4, 6)),
    "sums": (rate_spec(16, 4), sums_spec(4, 8, 4), rate_spec(16, 16), sums_spec(8, 16, 16), window_spec(8, 12)),
    "sums and ring": (rate_spec(16, 8), sums_spec(4, 8, 8), rate_spec(16, 2), ring_spec(2, 2)),
    "three halves and ring": (rate_spec(6, Fraction(3, 2)), ring_spec(5, 3), full_spec(6)),
}
"""Models where rings and windows keep the raw keys of all rates: in the natural layout a hit ends at any kept point."""
STATES: dict[str, tuple[KVCacheSpec, ...]] = {
    "ring and state": (rate_spec(8, 4), ring_spec(4, 4), state_spec(8)),
    "ring, state, tokens, window": (rate_spec(16, 8), ring_spec(9, 8), state_spec(8), full_spec(4), window_spec(4, 6)),
    "sums and state": (rate_spec(16, 8), sums_spec(4, 8, 8), state_spec(8)),
}
"""Such models with recurrent layers, in the natural layout."""
MODELS = WHOLE | EXACT


def cache_of(layout: str, specs: Sequence[KVCacheSpec], blocks: int, eviction: Eviction = LRU) -> KVCacheManager:
    options = CacheOptions(eviction=eviction)
    if layout == "reference":
        return KVCacheManager(model_config(blocks, specs), 96)
    return KVCacheManager(natural_model_config(max(blocks // 2, 3), specs, [2] * len(specs)), 96, options=options)


def rate_of(spec: KVCacheSpec) -> Fraction:
    """Tokens of a state; 1 for recurrent states and rings."""
    return Fraction(spec.tokens_per_state) if isinstance(spec, AttentionSpec) else Fraction(1)


def pools_of(spec: KVCacheSpec) -> int:
    return spec.pools if isinstance(spec, SlidingWindowSpec | CircularBufferSpec) else 0


def whole_of(layout: str, specs: Sequence[KVCacheSpec]) -> int:
    """Tokens that end a state of each rate whose raw keys nothing keeps, counted one by one."""
    rings = [spec for spec in specs if isinstance(spec, CircularBufferSpec)]
    unknown = any(not ring.pools for ring in rings)
    kept = set() if unknown else {pools_of(one) for one in specs if layout == "natural" or one not in rings}
    ends = [rate_of(spec) for spec in specs if rate_of(spec).numerator not in kept]
    ends += [Fraction(ring.pools) for ring in rings if ring.pools and ring.pools not in kept]
    return next(n for n in range(1, 1000) if all(n % end == 0 for end in ends))


def first_read(spec: KVCacheSpec, tokens: int) -> int:
    """The first token that token ``tokens`` reads."""
    return max(0, tokens - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0


def ended(spec: KVCacheSpec, tokens: int) -> int:
    """States that end in the first ``tokens`` tokens."""
    return int(tokens / rate_of(spec))


@dataclass
class Worker:
    """blocks: by group and block, the tokens that each state stands for. raw: of a request, raw keys by token.

    raw serves rates whose keys nothing keeps. adopted: columns by group with which a request began. due: the states and
    rings that a step stores, by row.
    """

    cache: KVCacheManager
    specs: Sequence[KVCacheSpec]
    blocks: dict[tuple[int, int], dict[int, Tokens]] = field(default_factory=lambda: defaultdict(dict))
    raw: dict[str, dict[int, Tokens]] = field(default_factory=lambda: defaultdict(dict))
    adopted: dict[str, list[int]] = field(default_factory=dict)
    due: dict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    copies: int = 0
    stored: int = 0

    def copy(self) -> None:
        """Moves and copies of the step being made, in order. A move is of the groups that share its ids."""
        transfers = self.cache.fields.take_transfers()
        self.due.clear()
        for kept in transfers.checkpoints:
            self.due[kept.row].append((kept.group, kept.tokens, kept.block))
        for one in transfers.copies:
            for group in range(len(self.specs)) if one.kind == "move" else (one.group,):
                self.blocks[group, one.destination] = dict(self.blocks[group, one.source])
            self.copies += one.kind == "block"

    def begin(self, request: Request, adopted: Sequence[Sized]) -> None:
        """A request begins with the blocks that it adopts, by group."""
        self.adopted[request.request_id] = list(map(len, adopted))

    def run(self, request: Request, start: int, end: int) -> None:
        """The forward of tokens start .. end - 1."""
        tokens, tables = request.token_tuple(0, end), self.cache.get_block_ids(request.request_id)
        assert tables is not None
        raw = self.raw[request.request_id]
        raw.update((place, tokens[: place + 1]) for place in range(start, end))
        rows = {group: self._raw_keys(group, tables[group], tokens, start) for group in range(len(self.specs))}
        self._store(request.row, rows, tokens, start)
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            if isinstance(spec, CircularBufferSpec):
                block = self.blocks[group, table[0]]
                block.update((place % spec.block_size, tokens[: place + 1]) for place in range(start, end))
            elif isinstance(spec, MambaSpec):
                assert not start or self.blocks[group, table[0]].get(0) == tokens[:start], "another state"
                self.blocks[group, table[0]] = {0: tokens[:end]}
            else:
                self._attend(request, group, tokens, (start, end), rows)

    def _attend(
        self, request: Request, group: int, tokens: Tokens, span: tuple[int, int], rows: dict[int, dict[int, Tokens]]
    ) -> None:
        """Write the states that end in ``span``, from raw keys, and read all that the first token of it reads."""
        spec, table = self.specs[group], self._table(request, group)
        assert isinstance(spec, AttentionSpec)
        rate, (start, end) = rate_of(spec), span
        own = self._keepers(request, rate.numerator, rows)
        for state in range(ended(spec, end)):
            first, last = int(state * rate), ceil((state + 1) * rate)
            column, place = divmod(state, spec.num_states)
            if state >= ended(spec, start):
                for raw, width in own:
                    read = range(max(0, min(first, last - width)), last)
                    assert all(raw.get(one) == tokens[: one + 1] for one in read), "a divided state"
                assert table[column]
                assert column >= self.adopted[request.request_id][group], "an adopted page is written"
                self.blocks[group, table[column]][place] = tokens[:last]
            elif last > first_read(spec, start):
                assert table[column]
                assert self.blocks[group, table[column]].get(place) == tokens[:last], "another state"

    def _keepers(
        self, request: Request, rate: int, rows: dict[int, dict[int, Tokens]]
    ) -> list[tuple[dict[int, Tokens], int]]:
        """Raw keys of what keeps them for ``rate``, and the tokens that a compressor reads: all of its window.

        Without any: those of the largest ring of an unknown group, or those that the request itself has.
        """
        keepers = [one for one, spec in enumerate(self.specs) if pools_of(spec) == rate != 1]
        if not keepers:
            unknown = [one for one, spec in enumerate(self.specs) if spec.keeps is Keeps.RING and not pools_of(spec)]
            rings = [(self.specs[one].block_size, one) for one in unknown]
            return [(rows[max(rings)[1]] if rings else self.raw[request.request_id], 0)]
        widths = [getattr(self.specs[one], "sliding_window", 0) for one in keepers]
        return [(rows[one], width) for one, width in zip(keepers, widths, strict=True)]

    def _table(self, request: Request, group: int) -> list[int]:
        tables = self.cache.get_block_ids(request.request_id)
        assert tables is not None
        return tables[group]

    def _raw_keys(self, group: int, table: list[int], tokens: Tokens, start: int) -> dict[int, Tokens]:
        """Raw keys before ``start`` that a ring or a window of sums holds, and those of the step."""
        spec, found = self.specs[group], dict[int, Tokens]()
        if isinstance(spec, CircularBufferSpec):
            assert len(table) == 1
            block, size = self.blocks[group, table[0]], spec.block_size
            opened = start - start % spec.pools if spec.pools else max(0, start - size)
            found = {place: block[place % size] for place in range(opened, start) if place % size in block}
            if spec.pools:
                assert found == {place: tokens[: place + 1] for place in range(opened, start)}, "another ring"
        elif pools_of(spec):
            for place in range(first_read(spec, start), start):
                column, slot = divmod(place, spec.block_size)
                found[place] = self.blocks[group, table[column]].get(slot, ())
        return found | {place: tokens[: place + 1] for place in range(start, len(tokens))}

    def _store(self, row: int, rows: dict[int, dict[int, Tokens]], tokens: Tokens, start: int) -> None:
        """Write the states and rings that are kept. Of a ring, only the raw keys of the open group."""
        for group, position, block in self.due.pop(row, ()):
            spec = self.specs[group]
            assert start < position <= len(tokens), "another position"
            if isinstance(spec, CircularBufferSpec):
                opened = range(position - position % spec.pools, position)
                assert opened, "another position: the ring is empty"
                self.blocks[group, block] = {place % spec.block_size: rows[group][place] for place in opened}
            else:
                self.blocks[group, block] = {0: tokens[:position]}
            self.stored += 1


@dataclass
class Known:
    """The prefixes that were published, by group, if none is evicted. ends: those that end inside blocks.

    points: those with kept states and rings.
    """

    layout: str
    specs: Sequence[KVCacheSpec]
    blocks: list[set[Tokens]] = field(init=False)
    ends: set[Tokens] = field(default_factory=set)
    points: set[Tokens] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.blocks = [set() for _ in self.specs]

    def add(self, tokens: Tokens, prompt: int, *, over: bool) -> None:
        """``tokens`` of a request are computed. prompt: of its tokens. over: it ends."""
        for spec, blocks in zip(self.specs, self.blocks, strict=True):
            blocks.update(tokens[:end] for end in range(spec.block_size, len(tokens) + 1, spec.block_size))
        if self.layout == "natural":
            whole = whole_of(self.layout, self.specs)
            points = [one // whole * whole for one in (prompt - 1, *[len(tokens)] * over)]
            self.ends.update(tokens[:point] for point in points if point <= len(tokens))
            self.points.update([tokens] * over)

    def keep(self, tokens: Tokens, request: Request, start: int) -> None:
        """The states and rings of a step of these tokens are kept: they can be hit from the next step on."""
        kept = (request.num_prompt_tokens - 1, request.branch_tokens)
        self.points.update(tokens[:one] for one in kept if start < one <= len(tokens))

    def longest(self, tokens: Tokens) -> int:
        """The longest hit of a request: the largest end that every group can resume."""
        step = whole_of(self.layout, self.specs)
        if self.layout == "reference":
            step = lcm(step, *(spec.block_size for spec in self.specs))
        most = (len(tokens) - 1) // step * step
        return next((end for end in range(most, 0, -step) if self._serves(tokens, end)), 0)

    def _serves(self, tokens: Tokens, end: int) -> bool:
        for spec, blocks in zip(self.specs, self.blocks, strict=True):
            if isinstance(spec, CircularBufferSpec):
                if spec.pools and end % spec.pools and tokens[:end] not in self.points:
                    return False
                continue
            if isinstance(spec, MambaSpec):
                if tokens[:end] not in self.points:
                    return False
                continue
            size = spec.block_size
            for column in range(first_read(spec, end) // size, ceil(end / size)):
                begins = [one for one in self.ends if one == tokens[: len(one)] and len(one) <= (column + 1) * size]
                if tokens[: (column + 1) * size] not in blocks and max(map(len, begins), default=0) < min(
                    end, (column + 1) * size
                ):
                    return False
        return True


@dataclass
class Run:
    """Random requests that share prefixes, several at once; some are preempted or end early."""

    random: Random
    layout: str
    specs: Sequence[KVCacheSpec]
    blocks: int
    eviction: Eviction
    counts: Counter[str]
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = cache_of(self.layout, self.specs, self.blocks, self.eviction)
        self.worker, self.known = Worker(self.cache, self.specs), Known(self.layout, self.specs)
        heads = [tuple(self.random.choices(range(3), k=40)) for _ in range(2)]
        for number in range(12):
            head = self.random.choice(heads)[: self.random.randint(0, 40)]
            tail = tuple(self.random.choices(range(3), k=self.random.randint(1, 12)))
            self.waiting.append(Request(str(number), (*head, *tail), hasher=self.cache.hasher))

    def play(self, steps: int) -> None:
        for step in range(steps):
            asked: list[Span] = []
            with self.cache.step(step):
                grow(self, asked)
                self._admit(asked)
                spans = np.array([(request.row, start, end) for request, start, end in asked], np.int64).reshape(-1, 3)
                self.cache.store_checkpoints(*map(np.ascontiguousarray, spans.T))
                self.worker.copy()
            for request, start, end in asked:
                self.worker.run(request, start, end)
                self.known.keep(request.token_tuple(0, end), request, start)
            for request, _, end in asked:
                finish(self, request, end)
            self.cache.mark_written(step)
            self.cache.check()
        self.counts["copies"] += self.worker.copies
        self.counts["stored"] += self.worker.stored
        self.counts["evictions"] += self.cache.block_pool.keys.evictions

    def _admit(self, asked: list[Span]) -> None:
        while self.waiting and len(self.running) < 3:
            request = self.waiting[0]
            hit = self.cache.find_hit(request)
            if COMPARED and not self.cache.block_pool.keys.evictions and not self.cache.checkpoints.declined:
                assert hit.tokens == self.known.longest(request.token_tuple(0, request.num_tokens))
                self.counts["longest"] += hit.tokens > 0
            end = min(hit.tokens + self.random.randint(1, 16), request.num_tokens)
            request.branch_tokens = hit.branch_tokens
            if self.cache.allocate_slots(request, end - hit.tokens, hit.tokens, hit) is None:
                return
            self.worker.begin(request, [part.blocks for part in hit.groups])
            self.known.add(request.token_tuple(0, end), request.num_prompt_tokens, over=False)
            self.counts["inside"] += any(hit.tokens % spec.block_size for spec in self.specs)
            self.counts["hits"] += hit.tokens > 0
            self.counts["tokens"] += hit.tokens
            self.counts["exact"] += hit.tokens % lcm(*(rate_of(spec).numerator for spec in self.specs)) > 0
            self.running.append(self.waiting.pop(0))
            request.num_computed_tokens = hit.tokens
            asked.append((request, hit.tokens, end))

    def end(self, request: Request) -> None:
        if self.layout == "natural":
            self.cache.keep_resume_point(request)
            done = request.token_tuple(0, request.num_computed_tokens)
            self.known.add(done, request.num_prompt_tokens, over=True)
        self.worker.raw.pop(request.request_id, None)
        self.cache.free(request)
        self.running.remove(request)


def play_all(layout: str, specs: Sequence[KVCacheSpec], seeds: int, eviction: Eviction = LRU) -> Counter[str]:
    counts = Counter[str]()
    for seed in range(seeds):
        random = Random(seed)
        Run(random, layout, specs, random.choice((30, 60, 1000)) * len(specs), eviction, counts).play(60)
    return counts


@pytest.mark.parametrize("layout", ["reference", "natural"])
@pytest.mark.parametrize("model", WHOLE)
def test_hits_divide_no_state_and_are_the_longest(model: str, layout: str) -> None:
    counts = play_all(layout, MODELS[model], how_many(8))
    assert min(counts["hits"], counts["longest"], counts["preempted"]) > 0
    assert (min(counts["inside"], counts["copies"]) > 0) == (layout == "natural")
    assert not counts["exact"] or model == "one of two rates kept"


@pytest.mark.parametrize("eviction", [LRU, HAZARD], ids=lambda one: one.name)
@pytest.mark.parametrize("model", EXACT | STATES)
def test_hits_end_at_any_kept_token_and_are_the_longest(model: str, eviction: Eviction) -> None:
    counts = play_all("natural", (EXACT | STATES)[model], how_many(16), eviction)
    assert min(counts[one] for one in ("hits", "longest", "preempted", "exact", "copies", "inside")) > 0
    assert (counts["stored"] > 0) == (model != "sums")


@pytest.mark.parametrize("model", ["ring", "sums and ring", "sums"])
def test_reference_hits_of_kept_rates_end_at_blocks(model: str) -> None:
    counts = play_all("reference", EXACT[model], how_many(8))
    assert min(counts["hits"], counts["longest"]) > 0
    assert not counts["exact"]
    assert not counts["stored"]


@pytest.mark.parametrize("model", ["ring", "two rings", "sums", "ring and state"])
def test_exact_ends_find_more_tokens_than_whole_states(model: str) -> None:
    specs = (EXACT | STATES)[model]
    plain = [replace(one, pools=0) if isinstance(one, SlidingWindowSpec | CircularBufferSpec) else one for one in specs]
    exact, whole = (play_all("natural", one, how_many(16))["tokens"] for one in (specs, plain))
    assert exact > whole, f"{model}: {exact} hit tokens at exact ends, {whole} at whole states"


@pytest.mark.parametrize(
    "model", ["one rate", "two rates", "compressed window", "three halves", "ring of unknown group"]
)
def test_hit_that_divides_a_state_is_detected(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    if "ring" in model:  # a ring without any rate is rejected
        monkeypatch.setattr(NaturalLayout, "alignment", lambda *_: 1)
    else:
        monkeypatch.setattr(assembly, "whole_states", lambda _: 1)
    monkeypatch.setitem(globals(), "COMPARED", 0)
    with pytest.raises(AssertionError, match="a divided state"):
        play_all("natural", MODELS[model], 8)


# -- faults of kept rings


def _ring_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit copies another ring than that of its tokens."""
    right = PositionHits.source

    def source(hits: PositionHits, index: PrefixIndex, request: Request, tokens: int) -> int:
        block = right(hits, index, request, tokens)
        others = [one for one in index.partial_blocks() if one != block]
        return others[0] if block and others else block

    monkeypatch.setattr(PositionHits, "source", source)


def _ring_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row begins with an old ring."""
    owe = TransferLog.owe_copy  # it would release the ring; here the ring stays held

    def skip(log: TransferLog, group: CacheGroup, source: int, row: int, column: int) -> None:
        if not group.kind.keeps_ring:
            owe(log, group, source, row, column)

    monkeypatch.setattr(TransferLog, "owe_copy", skip)


def _hit_past_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring accepts every hit of other groups."""
    longest = PositionHits.longest

    def end(
        hits: PositionHits, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search
    ) -> GroupHit:
        return longest(hits, index, request, keys, search)._replace(tokens=search.end_tokens)

    monkeypatch.setattr(PositionHits, "longest", end)


def _ring_counts_as_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring counts as empty in the middle of each group."""
    right = CacheGroup.__init__

    def halve(group: CacheGroup, *given: object) -> None:
        right(group, *given)  # type: ignore[arg-type]
        group.index.empty //= 2

    monkeypatch.setattr(CacheGroup, "__init__", halve)


def _store_earlier(monkeypatch: pytest.MonkeyPatch, before: Callable[[CacheGroup], int]) -> None:
    store = TransferLog.store

    def early(log: TransferLog, group: CacheGroup, row: int, tokens: int, *block: int) -> Stored:
        return store(log, group, row, tokens - before(group) * group.kind.keeps_ring, *block)

    monkeypatch.setattr(TransferLog, "store", early)


def _ring_of_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step stores the ring one token before its position."""
    _store_earlier(monkeypatch, lambda _: 1)


def _ring_of_the_group_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step stores the ring one group before its position."""
    _store_earlier(monkeypatch, lambda group: group.kind.pools)


def _open_state_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row begins with the page in which its hit ends, instead of a copy."""
    right = PrefixLookup._longest

    def adopt(lookup: PrefixLookup, request: Request, limit: int) -> Hit:
        hit = right(lookup, request, limit)
        groups, sources = list(hit.groups), list(hit.sources)
        for place, group in enumerate(lookup._groups):
            if isinstance(group.policy.hits, TokenHits) and sources[place]:
                pages = np.append(groups[place].blocks, np.int32(sources[place]))
                groups[place], sources[place] = groups[place]._replace(blocks=pages), 0
        return hit._replace(groups=tuple(groups), sources=tuple(sources))

    monkeypatch.setattr(PrefixLookup, "_longest", adopt)
    monkeypatch.setattr(TokenHits, "columns", lambda hits, tokens: -(-tokens // hits.block_size))


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (_ring_of_others, "another ring"),
    (_ring_is_not_restored, "another ring"),
    (_hit_past_the_ring, "another ring"),
    (_ring_counts_as_empty, "another ring"),
    (_ring_of_the_token_before, "another ring|another position"),
    (_ring_of_the_group_before, "another ring|another position"),
    (_open_state_is_shared, "an adopted page is written"),
]


@pytest.mark.parametrize(("fault", "found"), FAULTS, ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("model", ["ring", "two rings"])
def test_fault_of_a_kept_ring_is_detected(
    monkeypatch: pytest.MonkeyPatch, model: str, fault: Callable[[pytest.MonkeyPatch], None], found: str
) -> None:
    fault(monkeypatch)
    monkeypatch.setitem(globals(), "COMPARED", 0)
    with pytest.raises(AssertionError, match=found):
        play_all("natural", EXACT[model], 8)


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_hit_that_is_too_short_is_detected(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(f"hybridkv.cache.assembly.{layout.title()}Layout.alignment", lambda *_: 32)
    with pytest.raises(AssertionError):
        play_all(layout, MODELS["rate and tokens"], 8)


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_hits_and_loads_that_end_inside_a_state_are_rejected(layout: str) -> None:
    cache = cache_of(layout, MODELS["rate and tokens"], 100)
    first = Request("a", range(30), hasher=cache.hasher)
    cache.allocate_slots(first, 30)
    first.num_computed_tokens = 30
    second = Request("b", range(30), hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(second)
    with pytest.raises(ConfigError, match=rf"a hit of {tokens - 1} tokens ends inside a state of 4 tokens.*cut it to"):
        cache.allocate_slots(second, 1, tokens - 1, blocks)
    with pytest.raises(ConfigError, match=r"up to 18 end inside a state of 4 tokens .*load up to 16"):
        cache.allocate_slots(Request("c", range(50, 80), hasher=cache.hasher), 1, num_external_computed_tokens=18)


@pytest.mark.parametrize(("arrived", "tokens"), [(None, 16), (15, 12), (12, 12), (3, 0)])
def test_load_that_came_in_part_resumes_at_a_whole_state(arrived: int | None, tokens: int) -> None:
    cache = cache_of("natural", MODELS["rate and tokens"], 100)
    request = Request("a", range(30), hasher=cache.hasher)
    cache.allocate_slots(request, 0, delay_cache_blocks=True, num_external_computed_tokens=16)
    assert cache.engine.finish_load(request, arrived) == tokens


def test_hit_unit_divides_no_state() -> None:
    specs = (rate_spec(8, 4), state_spec(8))
    message = r"hit_unit \(--prefix-match-unit\) 2 ends inside a state of 4 tokens \(tokens_per_state\)"
    with pytest.raises(ConfigError, match=message):
        KVCacheManager(model_config(12, specs), 64, options=CacheOptions(hit_unit=2))
    KVCacheManager(model_config(12, specs), 64, options=CacheOptions(hit_unit=4))


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("end", [10, 6])  # 6 tokens fill the ring, but not the second state
def test_branch_copies_the_ring_of_its_parent(end: int, *, copied: bool) -> None:
    cache = cache_of("natural", MODELS["ring"], 100)
    worker = Worker(cache, MODELS["ring"])
    parent = Request("parent", range(end), hasher=cache.hasher)
    cache.allocate_slots(parent, end)
    worker.copy()
    worker.begin(parent, [()] * 3)
    worker.run(parent, 0, end)
    parent.num_computed_tokens = end
    child = Request("child", range(13), hasher=cache.hasher)
    blocks, tokens = cache.engine.blocks_to_share(parent)
    assert tokens == end
    cache.allocate_slots(child, 13 - end, end, blocks)
    ring = cache.get_block_ids("child")[1][0]
    worker.begin(child, blocks.ids)
    worker.copy()
    cache.check()
    if copied:
        worker.run(child, end, 13)
        return
    worker.blocks[1, ring].clear()
    with pytest.raises(AssertionError, match="another ring"):
        worker.run(child, end, 13)


@pytest.mark.parametrize(("layout", "hit"), [("reference", 72), ("natural", 88)])
def test_ring_of_unknown_group_is_one_block_of_each_request_and_never_published(layout: str, hit: int) -> None:
    cache = cache_of(layout, MODELS["ring of unknown group"], 100)
    request = Request("a", range(90), hasher=cache.hasher)
    rings = set()
    for end in range(1, 91):
        cache.allocate_slots(request, 1)
        request.num_computed_tokens = end
        rings.add(tuple(cache.get_block_ids("a")[1]))
    assert len(rings) == 1
    assert len(rings.pop()) == 1
    assert not list(cache.groups[1].index.entries())
    assert cache.find_hit(Request("b", range(90), hasher=cache.hasher)).tokens == hit
    cache.free(request)
    cache.check()


# -- kept rings, one at a time


def ended_at(specs: Sequence[KVCacheSpec], computed: int) -> KVCacheManager:
    """A cache in which a request computed tokens 0 .. ``computed`` - 1 in one step, and ended."""
    cache = cache_of("natural", specs, 100)
    request = Request("a", range(computed), hasher=cache.hasher)
    cache.allocate_slots(request, computed)
    cache.fields.take_transfers()
    request.num_computed_tokens = computed
    cache.keep_resume_point(request)
    cache.free(request)
    return cache


def test_ring_of_an_ended_request_is_found_to_the_token_until_it_is_evicted() -> None:
    """22 tokens: 5 states of 4, and 2 open tokens. Without the ring, a hit ends at 20."""
    cache = ended_at(EXACT["ring"], 22)
    hit = cache.find_hit(Request("b", range(40), hasher=cache.hasher))
    assert hit.tokens == 22
    assert cache.find_hit(Request("c", range(21), hasher=cache.hasher)).tokens == 20
    cache.block_pool.evict_blocks(np.array([hit.sources[1]], np.int32))
    assert cache.find_hit(Request("d", range(40), hasher=cache.hasher)).tokens == 20
    cache.check()


def test_empty_ring_is_not_kept() -> None:
    cache = ended_at(EXACT["ring"], 24)
    assert not list(cache.groups[1].index.entries())
    assert not cache.groups[1].index.num_partial
    hit = cache.find_hit(Request("b", range(40), hasher=cache.hasher))
    assert (hit.tokens, hit.sources[1]) == (24, 0)


def test_hit_of_a_kept_ring_that_a_caller_changes_is_rejected() -> None:
    cache = ended_at(EXACT["ring"], 22)
    request = Request("b", range(40), hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(request)
    assert tokens == 22
    for wrong in (21, 23):
        with pytest.raises(ConfigError, match="holds other tokens"):
            cache.allocate_slots(request, 1, wrong, blocks)
    without = replace(blocks, sources=(blocks.sources[0], 0, blocks.sources[2]))
    with pytest.raises(ConfigError, match="holds other tokens"):
        cache.allocate_slots(request, 1, 22, without)
    cache.block_pool.evict_blocks(np.array([blocks.sources[1]], np.int32))
    with pytest.raises(ConfigError, match="holds other tokens"):
        cache.allocate_slots(request, 1, 22, without)


@pytest.mark.parametrize(("arrived", "resumed"), [(23, 0), (25, 24), (None, 28)])
def test_load_after_a_kept_ring_ends_where_the_ring_is_empty(arrived: int | None, resumed: int) -> None:
    """A load brings no ring. Where it stops short, the ring of its hit is gone, so the request begins again."""
    cache = ended_at(EXACT["ring"], 22)
    request = Request("b", range(40), hasher=cache.hasher)
    hit = cache.find_hit(request)
    with pytest.raises(ConfigError, match=r"up to 30 end inside a state of 4 tokens .*load up to 28"):
        cache.allocate_slots(request, 0, 22, hit, delay_cache_blocks=True, num_external_computed_tokens=8)
    cache.allocate_slots(request, 0, 22, hit, delay_cache_blocks=True, num_external_computed_tokens=6)
    assert {one.group for one in cache.fields.take_transfers().copies} == {0, 2}
    assert cache.engine.finish_load(request, arrived) == resumed
    cache.free(request)
    cache.check()


@pytest.mark.parametrize("ends", [False, True])
def test_ring_at_a_position_among_accepted_drafts_is_kept(*, ends: bool) -> None:
    """Tokens 9 .. 12 are drafts, of which 2 are accepted: 11 tokens are computed, and 10 and 11 are marked."""
    specs = (rate_spec(8, 4), ring_spec(8, 4))
    cache = cache_of("natural", specs, 100)
    worker = Worker(cache, specs)
    request = Request("a", range(8), hasher=cache.hasher, marks=(10, 11))

    def step(start: int, certain: int, drafts: int = 0) -> None:
        cache.allocate_slots(request, certain, num_lookahead_tokens=drafts)
        row = np.array([request.row])
        cache.store_checkpoints(row, np.array([start]), np.array([start + certain]))
        worker.copy()
        worker.run(request, start, start + certain + drafts)
        request.num_computed_tokens = start + certain + drafts

    worker.begin(request, [()] * 2)
    step(0, 8)
    for token in range(8, 13):
        request.append(token)
    step(8, 1, 4)
    cache.accept_drafts(np.array([request.row]), np.array([4]), np.array([2]))
    assert request.num_computed_tokens == 11
    if ends:
        cache.keep_resume_point(request)
        cache.free(request)
    else:
        step(11, 1)
    found = []
    for name, tokens in (("b", 20), ("c", 11)):
        other = Request(name, range(tokens), hasher=cache.hasher)
        hit = cache.find_hit(other)
        cache.allocate_slots(other, tokens - hit.tokens, hit.tokens, hit)
        worker.begin(other, [part.blocks for part in hit.groups])
        worker.copy()
        worker.run(other, hit.tokens, tokens)
        found.append(hit.tokens)
    assert found == ([11, 8] if ends else [11, 10])
    cache.check()


def test_drafts_that_would_overwrite_the_open_group_are_rejected() -> None:
    cache = cache_of("natural", (rate_spec(8, 4), ring_spec(6, 4)), 100)
    cache.bounds.refuse_drafts(3)  # 3 open tokens and 3 drafts fill 6
    with pytest.raises(ConfigError, match="is 4, but the ring of group 1 has room for 3 next to the open group"):
        cache.bounds.refuse_drafts(4)


@pytest.mark.parametrize("make", [lambda: ring_spec(6, 8), lambda: sums_spec(4, 7, 8)])
def test_ring_or_window_that_does_not_hold_an_open_group_is_rejected(make: Callable[[], KVCacheSpec]) -> None:
    with pytest.raises(ConfigError, match=r"does not hold the open group of up to 7|lacks rows of a state of 8 tokens"):
        make()


def test_hit_that_an_evicted_block_bounds_ends_at_a_whole_state() -> None:
    """Blocks of 4 tokens end inside states of 8: the hit falls to the state before."""
    specs = rate_spec(16, 8), full_spec(4)
    cache = cache_of("natural", specs, 100)
    request = Request("a", range(40), hasher=cache.hasher)
    cache.allocate_slots(request, 40)
    found = cache.groups[1]
    for column, tokens in ((7, 24), (5, 16), (4, 16), (3, 8), (0, 0)):
        block = found.index.get(found.keys(request)[column])
        assert block is not None
        cache.block_pool.evict_blocks(np.array([block], np.int32))
        assert cache.find_hit(Request("b", range(40), hasher=cache.hasher)).tokens == tokens


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_ring_without_a_rate_is_rejected(layout: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"no group of the model compresses tokens .*where the ring is empty"
    ):
        cache_of(layout, (full_spec(8), ring_spec(8)), 100)


@pytest.mark.parametrize(
    "specs", [(ring_spec(8, 4),), (ring_spec(8, 4), replace(sums_spec(4, 8, 0), bounded_replay=True))]
)
def test_rings_without_another_kept_group_are_never_hit(specs: tuple[KVCacheSpec, ...]) -> None:
    """A ring is empty after 16 tokens of any prompt, so it does not tell whether anybody computed them."""
    cache = cache_of("natural", specs, 100)
    for tokens in (20, 21):
        request = Request(str(tokens), range(tokens), hasher=cache.hasher)
        hit, found = cache.get_computed_blocks(request)
        assert found == 0
        assert cache.allocate_slots(request, tokens, 0, hit) is not None
        request.num_computed_tokens = tokens
        cache.keep_resume_point(request)
        cache.free(request)
    cache.check()
