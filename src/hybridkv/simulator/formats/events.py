"""Read KV events as a trace: requests are inferred from the blocks that their prompts and outputs stored.

    {"ts": seconds, "events": [{"type": "BlockStored", "block_hashes": [...], "parent_block_hash": null,
                                "block_size": 16, "group_idx": 0}, ...]}

A line is a batch. An event is an object or vLLM's array, ["BlockStored", hashes, parent, tokens, block size, ...].
A hash is a number or a text. Only events that store blocks of one group of full attention on the GPU are read; token
ids are not read. Blocks that a batch stores one after another, from a parent on, form a chain. A chain

    continues the prompt of a request   if it follows the request's last block within a second, and no output began
    continues the output of a request   if it is one block that follows the request's last block within ten seconds
    starts a request                    otherwise; the prompt is the path from the root

So a request is the path from the root to its last block, and it arrives with its first batch. Events do not show
requests that stored no block, tokens that filled no block, the boundary between prompt and output inside a block, and
the wait before the first block was stored.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from hybridkv.simulator.formats.request import (
    Format,
    MalformedLineError,
    Record,
    Times,
    TraceRequest,
    check_total,
    read,
)
from hybridkv.simulator.tokens import NEW_OUTPUT, PROMPT_SEGMENT, Piece, Pieces
from hybridkv.units import MOST_COUNT, shown

CHUNK_SECONDS: Final = 1.0
"""Limit between two chains of one prompt, which a step stores each. Chosen by hand."""
BLOCK_SECONDS: Final = 10.0
"""Limit between two blocks of one output. Chosen by hand."""
_STORED: Final = "BlockStored"
_FULL: Final = {None, "full_attention", "mla_attention", "sink_full_attention"}

Name = int | str


class _Batch(Struct):
    """A line. ``known`` is true for batches that describe the content of the cache before the recording."""

    ts: Annotated[float, Meta(ge=0, lt=1e12)]
    events: list[Any]
    known: Any = False


class _Stored(Struct):
    """An event that stores blocks, with its fields in the order of vLLM's arrays."""

    block_hashes: Annotated[list[Name], Meta(min_length=1)]
    parent_block_hash: Name | None
    token_ids: Any = None
    block_size: Annotated[int, Meta(ge=1, le=MOST_COUNT)] = 0
    lora_id: Any = None
    medium: Any = None
    lora_name: Any = None
    extra_keys: Any = None
    group_idx: Any = None
    kv_cache_spec_kind: Any = None


class _Segment:
    """Blocks without a fork, the first one after the block ``before``. ``depth``: tokens from the root to its start."""

    __slots__ = ("before", "depth", "number", "tokens")

    def __init__(self, number: int, before: _Block | None) -> None:
        self.number = number
        self.before = before
        self.depth = 0 if before is None else before.depth
        self.tokens = 0

    def more(self, tokens: int) -> _Block:
        """Add a block and return it. Raises MalformedLineError if the path is too long for a request."""
        self.tokens += tokens
        check_total(self.depth + self.tokens)
        return _Block(self, self.tokens)


class _Block:
    """The block of ``segment`` that ends after ``end`` of its tokens."""

    __slots__ = ("end", "segment")

    def __init__(self, segment: _Segment, end: int) -> None:
        self.segment = segment
        self.end = end

    @property
    def depth(self) -> int:
        """Tokens from the root to the end of the block."""
        return self.segment.depth + self.end


@dataclass(slots=True)
class _Chain:
    """A request so far: ``asked`` is the last block of its prompt, ``last`` its last block. Times are in seconds."""

    begun_s: float
    last_s: float
    asked: _Block
    last: _Block
    origin: str


class Recording:
    """Reader of one pass over batches. Requests are complete only after the last batch; ``rest`` returns them."""

    def __init__(self) -> None:
        self._times = Times()
        self._numbers = itertools.count()
        self._blocks: dict[Name, _Block] = {}
        self._open: defaultdict[_Block, list[_Chain]] = defaultdict(list)
        self._chains: list[_Chain] = []
        self._group: object = None
        self._has_group = False

    def __call__(self, record: Record, origin: str, _number: int) -> tuple[TraceRequest, ...]:
        """Read a batch, and return no request. O(blocks of the batch)."""
        batch = read(record, _Batch)
        runs = _runs([one for one in map(_stored, batch.events) if one is not None and self._is_ours(one)])
        at_s = self._times.since_first(batch.ts)
        for parent, names, size in runs:
            before = self._before(parent)
            last = self._stored(before, names, size)
            if last is not None and batch.known is not True:
                self._add_chain(before, last, len(names), at_s, origin)
        return ()

    def rest(self) -> list[TraceRequest]:
        """Return all requests by time. O(requests * log(requests) + forks)."""
        self._chains.sort(key=lambda one: one.begun_s)
        return [_request(chain, number) for number, chain in enumerate(self._chains)]

    def _is_ours(self, event: _Stored) -> bool:
        """Return whether the event belongs to the first group of full attention in the file; others are ignored."""
        if event.medium not in {None, "GPU"} or event.kv_cache_spec_kind not in _FULL:
            return False
        group = event.group_idx or 0  # events of older engines have no group
        if not self._has_group:
            self._has_group, self._group = True, group
        return bool(group == self._group)

    def _before(self, parent: Name | None) -> _Block | None:
        """Return the block of that hash. An unknown block becomes a root without tokens."""
        if parent is None:
            return None
        if parent not in self._blocks:
            self._blocks[parent] = _Block(_Segment(next(self._numbers), None), 0)
        return self._blocks[parent]

    def _stored(self, before: _Block | None, names: Iterable[Name], size: int) -> _Block | None:
        """Add blocks after ``before``, and return the last one."""
        at = before
        for name in names:
            found = self._blocks.get(name)
            if found is None:
                follows = at is not None and at.end == at.segment.tokens
                segment = at.segment if at is not None and follows else _Segment(next(self._numbers), at)
                found = self._blocks[name] = segment.more(size)
            at = found
        return at

    def _add_chain(self, before: _Block | None, last: _Block, blocks: int, at_s: float, origin: str) -> None:
        """Add a chain of ``blocks`` blocks, from after ``before`` to ``last``, to a request or as a new one."""
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


def _stored(event: object) -> _Stored | None:
    """Return the fields of an event that stores blocks; None for other events."""
    if isinstance(event, list) and event and isinstance(event[0], str):
        event = {"type": event[0], **dict(zip(_Stored.__struct_fields__, event[1:], strict=False))}
    if not isinstance(event, Mapping):
        raise MalformedLineError(
            f"an event must be an object or an array that begins with its type, got {shown(event)}"
        )
    return read(event, _Stored) if event.get("type") == _STORED else None


def _runs(events: Iterable[_Stored]) -> list[tuple[Name | None, list[Name], int]]:
    """Return parent, hashes and block size of each chain of a batch. A chain may come from several events."""
    runs: list[tuple[Name | None, list[Name], int]] = []
    for event in events:
        if runs and runs[-1][1][-1] == event.parent_block_hash and runs[-1][2] == event.block_size:
            runs[-1][1].extend(event.block_hashes)
        else:
            runs.append((event.parent_block_hash, event.block_hashes, event.block_size))
    return runs


def _request(chain: _Chain, number: int) -> TraceRequest:
    """Return the request of a chain. An output that filled no block becomes one token that occurs nowhere else."""
    prompt = Pieces(PROMPT_SEGMENT, _path(chain.asked, None))
    said = _path(chain.last, chain.asked)
    output = Pieces(PROMPT_SEGMENT, said) if said else Pieces(NEW_OUTPUT, ((number, 0, 1),))
    return TraceRequest(chain.begun_s, prompt, output, origin=chain.origin)


def _path(last: _Block, before: _Block | None) -> tuple[Piece, ...]:
    """Return the tokens from after ``before`` to the end of ``last`` as pieces. O(forks)."""
    pieces: list[Piece] = []
    at: _Block | None = last
    while at is not None and (before is None or at.segment is not before.segment):
        pieces.append((at.segment.number, 0, at.end))
        at = at.segment.before
    if at is not None and before is not None:
        pieces.append((at.segment.number, before.end, at.end - before.end))
    return tuple(piece for piece in reversed(pieces) if piece[2])


KV_EVENTS: Final = Format("kv-events", "ts, events", lambda record: isinstance(record.get("events"), list), Recording)
"""Batches of events, as `hybridkv trace record` writes them. The reader returns all requests after the last batch."""
