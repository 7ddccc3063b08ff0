"""KV events as a trace: requests guessed from the blocks that their prompts and outputs stored.

    {"ts": seconds, "events": [{"type": "BlockStored", "block_hashes": [...], "parent_block_hash": null,
                                "block_size": 16, "group_idx": 0}, ...]}

A line is a batch; an event may be an object or vLLM's array, ["BlockStored", hashes, parent, tokens, block size, ...].
Hashes are names, numbers or text; of an event that stores, blocks of one group of full attention on the GPU are read,
and no token ids. What is stored in a row from a parent on is one chain, and a chain

    goes on with an open request's prompt   behind its last block, within a second, before a single block followed
    goes on with its output                 behind its last block, one block alone, within ten seconds
    begins a request                        else; its prompt is all that leads to it from the root

so that a request is the blocks from the root to its last, and came when its first batch did. Not told, and so not here:
requests that stored nothing; what of a prompt or an output does not fill a block, and which tokens of the block between
both are whose; how long a request waited and was read before its first block was stored.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hybridkv.simulator.formats.fields import MOST_SEGMENT, MalformedLineError, Record, check_total, integer, listed
from hybridkv.simulator.formats.lengths import Times
from hybridkv.simulator.formats.request import TraceRequest
from hybridkv.simulator.tokens import NEW_OUTPUT, PROMPT_SEGMENT, Piece, Pieces
from hybridkv.units import MOST_COUNT, shown

CHUNK_SECONDS: Final = 1.0
"""Between two steps that read one prompt, at most."""
BLOCK_SECONDS: Final = 10.0
"""Between two blocks of one output, at most."""
_STORED: Final = "BlockStored"
_OF_ARRAYS: Final = {"block_hashes": 1, "parent_block_hash": 2, "block_size": 4, "medium": 6, "group_idx": 9}
_KIND: Final = 10
_FULL: Final = {None, "full_attention", "mla_attention", "sink_full_attention"}
_MOST_SECONDS: Final = 1e12

Name = int | str


@dataclass(frozen=True, slots=True)
class KvEventsFormat:
    """Batches of events, as `hybridkv trace record` writes them."""

    name = "kv-events"
    fields = "ts, events"
    timed = True

    @staticmethod
    def owns(record: Record) -> bool:
        """Whether it is a batch."""
        return isinstance(record.get("events"), list)

    def reader(self) -> Recording:
        """Requests are told at the end: nobody knows before when one has ended."""
        return Recording()


class _Segment:
    """Blocks that follow one another without a fork, from the first behind ``before`` on. depth: tokens up to there."""

    __slots__ = ("before", "depth", "number", "tokens")

    def __init__(self, number: int, before: _Block | None) -> None:
        self.number = number
        self.before = before
        self.depth = 0 if before is None else before.depth
        self.tokens = 0

    def more(self, tokens: int) -> _Block:
        """One more block. MalformedLineError where no request is so long."""
        self.tokens += tokens
        check_total(self.depth + self.tokens)
        return _Block(self, self.tokens)


class _Block:
    """The one of ``segment`` that ends behind ``end`` of its tokens."""

    __slots__ = ("end", "segment")

    def __init__(self, segment: _Segment, end: int) -> None:
        self.segment = segment
        self.end = end

    @property
    def depth(self) -> int:
        """Tokens from the root to its end."""
        return self.segment.depth + self.end


@dataclass(slots=True)
class _Chain:
    """A request so far: the last block of its prompt, and of all."""

    begun_s: float
    last_s: float
    asked: _Block
    last: _Block
    origin: str


class Recording:
    """One pass over batches. known: batches that tell what was there before, and make no requests, say so."""

    def __init__(self) -> None:
        self._times = Times()
        self._numbers = itertools.count()
        self._blocks: dict[Name, _Block] = {}
        self._open: defaultdict[_Block, list[_Chain]] = defaultdict(list)
        self._chains: list[_Chain] = []
        self._group: object = None
        self._has_group = False

    def __call__(self, record: Record, origin: str, _number: int) -> tuple[TraceRequest, ...]:
        """Hear of a batch. O(its blocks)."""
        seconds = record.get("ts")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < _MOST_SECONDS:
            raise MalformedLineError(f"ts must be seconds, got {shown(seconds)}")
        stored = [one for one in map(_read, listed(record, "events")) if one is not None and self._is_ours(one)]
        runs = list(_runs(stored))
        at_s = self._times.since_first(seconds)
        for parent, names, size in runs:
            before = self._before(parent)
            last = self._stored(before, names, size)
            if last is not None and record.get("known") is not True:
                self._hear(before, last, len(names), at_s, origin)
        return ()

    def rest(self) -> list[TraceRequest]:
        """All requests, by time. O(their blocks)."""
        self._chains.sort(key=lambda one: one.begun_s)
        return [_request(chain, number) for number, chain in enumerate(self._chains)]

    def _is_ours(self, event: Mapping[str, Any]) -> bool:
        """Whether it is of the one group that is read, the first of full attention that is met."""
        if event["medium"] not in {None, "GPU"} or event["kv_cache_spec_kind"] not in _FULL:
            return False
        group = event["group_idx"] or 0  # older ones name none
        if not self._has_group:
            self._has_group, self._group = True, group
        return bool(group == self._group)

    def _before(self, parent: Name | None) -> _Block | None:
        """The block of that name; of one that nobody told of, one without tokens."""
        if parent is None:
            return None
        if parent not in self._blocks:
            self._blocks[parent] = _Block(_Segment(next(self._numbers), None), 0)
        return self._blocks[parent]

    def _stored(self, before: _Block | None, names: Iterable[Name], size: int) -> _Block | None:
        """The last of ``names``, which stand behind ``before``."""
        at = before
        for name in names:
            found = self._blocks.get(name)
            if found is None:
                follows = at is not None and at.end == at.segment.tokens
                segment = at.segment if at is not None and follows else _Segment(next(self._numbers), at)
                found = self._blocks[name] = segment.more(size)
            at = found
        return at

    def _hear(self, before: _Block | None, last: _Block, blocks: int, at_s: float, origin: str) -> None:
        """So many ``blocks`` up to ``last`` were stored behind ``before``."""
        for chain in [] if before is None else self._open[before]:
            reads = chain.asked is chain.last
            if at_s - chain.last_s <= (BLOCK_SECONDS if blocks == 1 else CHUNK_SECONDS if reads else -1.0):
                self._open[chain.last].remove(chain)
                chain.asked = last if blocks > 1 else chain.asked
                chain.last, chain.last_s = last, at_s
                break
        else:
            chain = _Chain(at_s, at_s, last, last, origin)
            self._chains.append(chain)
        self._open[last].append(chain)


def _read(event: object) -> Mapping[str, Any] | None:
    """The fields of an event that stores; None of any other."""
    if isinstance(event, list) and event and event[0] == _STORED:
        names = {**_OF_ARRAYS, "kv_cache_spec_kind": _KIND}
        return {name: event[at] if at < len(event) else None for name, at in names.items()}
    if isinstance(event, Mapping):
        if event.get("type") != _STORED:
            return None
        return {name: event.get(name) for name in (*_OF_ARRAYS, "kv_cache_spec_kind")}
    if isinstance(event, list) and event and isinstance(event[0], str):
        return None
    raise MalformedLineError(f"an event must be an object or an array that begins with its type, not {shown(event)}")


def _runs(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Name | None, list[Name], int]]:
    """Parent, names and block size of what one batch stores in a row: one chain, in however many events."""
    run: tuple[Name | None, list[Name], int] | None = None
    for event in events:
        hashes = event["block_hashes"]
        if not isinstance(hashes, list) or not hashes:
            raise MalformedLineError(f"block_hashes must be a list of hashes, not {shown(hashes)}")
        names = [_name(one) for one in hashes]
        parent = None if event["parent_block_hash"] is None else _name(event["parent_block_hash"])
        size = integer(event["block_size"], "block_size", MOST_COUNT, least=1)
        if run is not None and run[1][-1] == parent and run[2] == size:
            run[1].extend(names)
            continue
        if run is not None:
            yield run
        run = parent, names, size
    if run is not None:
        yield run


def _name(value: object) -> Name:
    if isinstance(value, str):
        return value
    return integer(value, "a block hash", MOST_SEGMENT, least=-(MOST_SEGMENT + 1) // 2)


def _request(chain: _Chain, number: int) -> TraceRequest:
    """Of an output that filled no block one token is known, which is its own."""
    prompt = Pieces(PROMPT_SEGMENT, _path(chain.asked, None))
    said = _path(chain.last, chain.asked)
    output = Pieces(PROMPT_SEGMENT, said) if said else Pieces(NEW_OUTPUT, ((number, 0, 1),))
    return TraceRequest(chain.begun_s, prompt, output, origin=chain.origin)


def _path(last: _Block, before: _Block | None) -> tuple[Piece, ...]:
    """The tokens up to ``last``, from behind ``before`` on, which leads to it. O(forks)."""
    pieces: list[Piece] = []
    at: _Block | None = last
    while at is not None and (before is None or at.segment is not before.segment):
        pieces.append((at.segment.number, 0, at.end))
        at = at.segment.before
    if at is not None and before is not None:
        pieces.append((at.segment.number, before.end, at.end - before.end))
    return tuple(piece for piece in reversed(pieces) if piece[2])
