"""Slots of rows that decode, given before vLLM asks for them, and kept until it has heard of them.

give     in one batch, for what leads the running requests, before vLLM's own loop
decode   for a step in which all of them decode one token: those alone are looked at that need something
take     what a request was given in this step
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager
from hybridkv.specs import Keeps
from hybridkv.vllm.mirrors import EngineRequest, Mirrors

Ids = tuple[list[int], ...]
"""Of blocks, by group."""
_FEW: Final = 8
"""So many calls take less time than one for all."""


class Decoded(NamedTuple):
    """A step of one token each. num_computed_tokens: before it. new_blocks: None where none came."""

    requests: list[EngineRequest]
    num_computed_tokens: list[int]
    new_blocks: list[Ids | None]


class SlotsAhead:
    """Of the requests of ``mirrors``. longest: tokens that a model takes."""

    def __init__(self, cache: KVCacheManager, mirrors: Mirrors, longest: int) -> None:
        self._cache, self._mirrors, self._longest = cache, mirrors, longest
        self._num_groups = len(cache.groups)
        states = any(group.spec.keeps is Keeps.STATE for group in cache.config.groups)
        self._all_at_once = cache.placement is None and not states
        # by request: tokens and look-ahead that it has slots for in this step; blocks that vLLM was not told of yet;
        # tokens below which a row needs nothing
        self._ready = dict[str, tuple[int, int]]()
        self._owed = dict[str, Ids]()
        self._enough = dict[str, int]()

    def end_step(self) -> None:
        """What was not asked for waits for the request's next step: no worker has heard of it."""
        self._ready.clear()

    def forget(self, name: str) -> None:
        """It holds nothing any longer."""
        for table in (self._ready, self._owed, self._enough):
            table.pop(name, None)

    def take(self, name: str, asked: tuple[int, int]) -> bool:
        """Whether it has slots for so many tokens and so much look-ahead in this step. Whoever asks uses them."""
        self._enough.pop(name, None)
        return self._ready.pop(name, None) == asked

    def owed(self, name: str) -> Ids | None:
        """Blocks that it has and vLLM was not told of, which it now is."""
        return self._owed.pop(name, None)

    def give(self, running: Sequence[EngineRequest], most_tokens: int, lookahead: int) -> None:
        """Slots for what ``running`` decode next, in one batch.

        most_tokens: of a request that decodes, drafts included; those behind the first that runs more are left out, so
        that blocks go round as they would one by one. With states, whose columns move, and in the natural layout,
        whose blocks are copied, those alone that need no block.
        """
        known, longest = self._mirrors.known, self._longest - 1
        names, counts = list[str](), list[tuple[int, int, int, int, int]]()
        for request in running:
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead > 0 and _last_on_the_way(request):
                continue
            mine, more = known(request.request_id), min(request.num_tokens_with_spec + ahead, longest) - computed
            if more > most_tokens or mine is None or mine.row < 0:
                break
            if more > 0:
                names.append(request.request_id)
                counts.append((mine.row, request.num_tokens, computed, request.num_in_flight_tokens, more))
        if names:
            self._allocate(names, np.array(counts, np.int64).T, lookahead, idle_alone=not self._all_at_once)

    def _allocate(
        self, names: Sequence[str], counts: NDArray[np.int64], lookahead: int, *, idle_alone: bool = False
    ) -> None:
        """counts: row, tokens known, computed and in flight, and how many run, int64[5, names]."""
        rows, known_tokens, computed, in_flight, tokens = counts
        # what was preempted may still have tokens in flight that are computed no longer
        in_flight = np.minimum(in_flight, computed)
        self._cache.synchronise(rows, num_tokens=known_tokens, num_computed=computed, in_flight=in_flight)
        if idle_alone:
            idle = np.flatnonzero(self._cache.next_events(rows) > computed + tokens + lookahead)
            rows, tokens, names = rows[idle], tokens[idle], [names[place] for place in idle.tolist()]
        slots = self._cache.allocate_batch(rows, tokens, lookahead)
        given = zip(names[: slots.accepted], tokens.tolist(), strict=False)
        self._ready |= {name: (count, lookahead) for name, count in given}
        for owner, group, block in zip(slots.owner.tolist(), slots.group.tolist(), slots.block.tolist(), strict=True):
            self._owe(names[owner])[group].append(block)

    def _owe(self, name: str) -> Ids:
        return self._owed.setdefault(name, tuple([] for _ in range(self._num_groups)))

    # -- steps of one token each

    def decode(self, running: Iterable[EngineRequest]) -> Decoded | None:
        """Slots for a token of each of ``running`` whose last one is not on the way.

        None where one of them does something else, or has no slot: those before it are ready then. Of the reference
        layout: in the natural one each step looks at all rows. O(running), a call for those that need something.
        """
        requests, computed_tokens, due = list[EngineRequest](), list[int](), list[int]()
        enough, longest = self._enough, self._longest - 1
        for request in running:
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead > 0 and _last_on_the_way(request):
                continue
            new = request.num_tokens + ahead - computed
            if new != 1 or computed >= longest or request.is_prefill_chunk or request.mm_features:
                return None
            if computed + 1 >= enough.get(request.request_id, 0):
                due.append(len(requests))
            requests.append(request)
            computed_tokens.append(computed)
        new_blocks: list[Ids | None] = [None] * len(requests)
        if due and not self._decode_due([requests[place] for place in due]):
            return None
        for place in due:
            name = requests[place].request_id
            del self._ready[name]
            new_blocks[place] = self.owed(name)
        return Decoded(requests, computed_tokens, new_blocks)

    def _decode_due(self, due: Sequence[EngineRequest]) -> bool:
        """Whether all of ``due`` got their slots, in their order."""
        held = [(request, mine) for request in due if (mine := self._mirrors.known(request.request_id)) is not None]
        if len(held) < len(due) or any(mine.row < 0 for _, mine in held):
            return False
        names = [request.request_id for request in due]
        if self._all_at_once and len(due) > _FEW:
            counts = [
                (mine.row, request.num_tokens, request.num_computed_tokens, request.num_in_flight_tokens, 1)
                for request, mine in held
            ]
            self._allocate(names, np.array(counts, np.int64).T, 0)
            if not all(name in self._ready for name in names):
                return False
        else:
            for request in due:
                new = self._cache.allocate_slots(self._mirrors.of(request), 1)
                if new is None:
                    return False
                self._ready[request.request_id] = (1, 0)
                for group, ids in enumerate(new.ids):
                    if len(ids):
                        self._owe(request.request_id)[group].extend(ids.tolist())
        rows = np.array([mine.row for _, mine in held], np.int64)
        self._enough.update(zip(names, self._cache.next_events(rows).tolist(), strict=True))
        return True


def _last_on_the_way(request: EngineRequest) -> bool:
    """Whether the last token that it may have comes of a step in flight, of which it has some: it runs no more."""
    sure = request.num_computed_tokens + 1 - (request.num_output_placeholders - 1)  # whatever becomes of drafts
    return sure >= request.num_prompt_tokens + request.max_tokens
