"""How a step's budget is shared, and where chunks must end so that recurrent states are kept.

Reference layout (AlignSplit): states are kept at multiples of their block (docs/contracts.md, 6).

tokens  [ ... | block B | ... | block B | rest ]          a state is kept where a chunk ends at a multiple of B;
                                        ^ last boundary   the last one before the prompt's last token is never jumped

Natural layout (StopSplit): at stops, if the worker cannot write a state inside a chunk.
Either (ItemSplit): not inside an image whose tokens attend to each other in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager
from hybridkv.request import Request
from hybridkv.schedule.limits import SchedulerLimits

Int64 = NDArray[np.int64]


class Split(Protocol):
    """Where chunks end."""

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is cut now."""
        ...

    def share(self, request: Request, computed: int, asked: int) -> int:
        """How many of ``asked`` tokens behind ``computed`` ones run now; 0: wait for a larger budget."""
        ...


@dataclass(frozen=True, slots=True)
class AlignSplit:
    """Chunk ends. block_size: of the states, tokens. largest_chunk: the budget of a step. drops: EAGLE does."""

    block_size: int
    largest_chunk: int
    drops: bool = False
    is_idle: bool = False

    def share(self, request: Request, computed: int, asked: int) -> int:
        """How many of ``asked`` tokens behind ``computed`` ones run now; 0: wait for a larger budget."""
        size, total = self.block_size, request.num_tokens
        prefill_end = max(request.num_prompt_tokens, total - 1)
        if computed >= prefill_end:
            return asked
        end = computed + asked
        if end < prefill_end:
            floor = end // size * size
            if floor > computed:
                end = floor
            elif size <= self.largest_chunk:
                return 0
        last = max(0, total // size * size - size) if self.drops else (total - 1) // size * size
        stops = [last, request.branch_tokens // size * size]
        if computed % size:
            stops.append(computed // size * size + size)
        return min([end, *(stop for stop in stops if computed < stop < end)]) - computed


@dataclass(frozen=True, slots=True)
class StopSplit:
    """Natural layout: chunks end at stops, where the worker cannot write a state inside a chunk.

    stops: of a request, in start + 1 .. end. segments: the worker can. forking: ids of requests that branch before the
    last of their known tokens, so that each branch runs that one itself.
    """

    stops: Callable[[Request, int, int], tuple[int, ...]]
    segments: bool
    forking: Collection[str]

    @property
    def is_idle(self) -> bool:
        """Whether nobody branches and states are written anywhere."""
        return self.segments and not self.forking

    def share(self, request: Request, computed: int, asked: int) -> int:
        """How many of ``asked`` tokens behind ``computed`` ones run now."""
        known, end = request.num_tokens, computed + asked
        if request.request_id in self.forking and computed < known - 1:
            end = min(end, known - 1)
        while not self.segments:
            first = next(iter(self.stops(request, computed, min(end, known))), end)
            if first >= end:
                break
            end = first  # and what a shorter chunk reaches: placements may keep the last edge of one
        return end - computed


@dataclass(frozen=True, slots=True)
class ItemSplit:
    """No chunk ends inside a multimodal item: before it, or behind all of it. other: where else chunks end.

    What was cached of an item was computed with all of it, so that a hit may end inside: the next chunk has the rest.
    """

    other: Split | None
    is_idle: bool = False

    def share(self, request: Request, computed: int, asked: int) -> int:
        """How many of ``asked`` tokens behind ``computed`` ones run now; 0: wait for a larger budget. O(items)."""
        end = computed + (asked if self.other is None else self.other.share(request, computed, asked))
        for item in request.multimodal:
            if item.offset < end < item.offset + item.length:
                return max(item.offset - computed, 0)
        return end - computed


def split_of(cache: KVCacheManager, limits: SchedulerLimits, forking: Collection[str]) -> Split | None:
    """How chunks are cut for states that are kept, and items; None where they end anywhere. forking: see StopSplit."""
    states = _split_of_states(cache, limits, forking)
    return ItemSplit(states) if limits.whole_items else states


def _split_of_states(cache: KVCacheManager, limits: SchedulerLimits, forking: Collection[str]) -> Split | None:
    if cache.bounds.keeps_checkpoints or cache.bounds.shares_in_part:  # branches cut chunks, too
        return StopSplit(cache.stops, limits.segments, forking)
    if not cache.bounds.state_alignment:
        return None
    return AlignSplit(cache.bounds.state_alignment, limits.max_batched_tokens, cache.bounds.drops_for_eagle)


def share_budget(wanted: Int64, budget: int) -> Int64:
    """What each row gets of ``budget`` tokens, first come first served, int64[rows]."""
    ends = np.cumsum(wanted)
    if not ends.size or ends[-1] <= budget:
        return wanted
    shares: Int64 = np.clip(budget - (ends - wanted), 0, wanted)
    return shares
