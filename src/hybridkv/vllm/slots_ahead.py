"""Slots of rows that decode, given before vLLM asks for them, and kept until it has heard of them.

give     in one batch, for what leads the running requests, before vLLM's own loop
decode   for a step in which all of them decode one token: those alone are looked at that need something
take     whether vLLM has to ask at all: no, where it was given so much in this step, or needs nothing
serve    what a call of its own gives
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from hybridkv.cache import KVCacheBlocks, KVCacheManager
from hybridkv.request import Request
from hybridkv.specs import Keeps
from hybridkv.vllm.mirrors import EngineRequest, Mirrors

Ids = tuple[list[int], ...]
"""Of blocks, by group."""
_Asked = tuple[EngineRequest, Request, int]
"""Whose, ours of it, and how many tokens."""
_FEW: Final = 8
"""So many calls take less time than one for all."""


class Decoded(NamedTuple):
    """A step of one token each. num_computed_tokens: before it. new_blocks: None where none came."""

    requests: list[EngineRequest]
    num_computed_tokens: list[int]
    new_blocks: list[Ids | None]


class SlotsAhead:
    """Of the requests of ``mirrors``. longest: tokens that a model takes.

    served: ours of each that was looked at in this step; all others need no block in it, and pass no stop.
    """

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
        self.served = dict[str, Request]()

    def end_step(self) -> None:
        """What was not asked for waits for the request's next step: no worker has heard of it."""
        self._ready.clear()
        served, self.served = self.served, {}
        if served:
            rows = np.fromiter((mine.row for mine in served.values()), np.int64, len(served))
            needed = np.minimum(self._cache.engine.next_events(rows), self._cache.checkpoints.next_stops(rows))
            enough = zip(served, needed.tolist(), strict=True)
            self._enough.update(one for one in enough if one[0] not in self._owed)

    def forget(self, name: str) -> None:
        """It holds nothing any longer."""
        self.served.pop(name, None)
        for table in (self._ready, self._owed, self._enough):
            table.pop(name, None)

    def begin(self, name: str, mine: Request) -> None:
        """It holds blocks from this step on. mine: ours of it."""
        self.served[name] = mine

    def serve(self, request: EngineRequest, mine: Request, new_tokens: int, lookahead: int) -> KVCacheBlocks | None:
        """What a call of its own gives one that holds blocks. mine: ours of ``request``."""
        self.served[request.request_id] = mine
        return self._cache.allocate_slots(mine, new_tokens, num_lookahead_tokens=lookahead)

    def take(self, request: EngineRequest, new_tokens: int, lookahead: int) -> bool:
        """Whether it has slots for so many tokens and so much look-ahead behind those computed, or needs none."""
        name = request.request_id
        if request.num_computed_tokens + new_tokens + lookahead < self._enough.get(name, 0):
            return True
        return self._ready.pop(name, None) == (new_tokens, lookahead)

    def owed(self, name: str) -> Ids | None:
        """Blocks that it has and vLLM was not told of, which it now is."""
        return self._owed.pop(name, None)

    def give(self, running: Sequence[EngineRequest], most_tokens: int, lookahead: int) -> None:
        """Slots for what ``running`` decode next, in one batch, of those that need some.

        most_tokens: of a request that decodes, drafts included; those behind the first that runs more are left out, so
        that blocks go round as they would one by one. Nothing with states, whose columns move, and in the natural
        layout, whose blocks are copied, nor for a few, which sooner ask for themselves. O(running).
        """
        if not self._all_at_once:
            return
        some, enough, longest = list[_Asked](), self._enough, self._longest - 1
        for request in running:
            name, computed, ahead = request.request_id, request.num_computed_tokens, request.num_output_placeholders
            if ahead > 0 and _last_on_the_way(request):
                continue
            more = min(request.num_tokens_with_spec + ahead, longest) - computed
            if more > most_tokens:
                break
            if more <= 0 or computed + more + lookahead < enough.get(name, 0):
                continue
            mine = self._mirrors.known(name)
            if mine is None or mine.row < 0:
                break
            some.append((request, mine, more))
        if len(some) > _FEW:
            self._allocate(some, lookahead)

    def _allocate(self, some: Sequence[_Asked], lookahead: int) -> bool:
        """Slots for ``some`` in one batch; whether all of them got theirs."""
        counts = [
            # what was preempted may still have tokens in flight that are computed no longer
            (mine.row, one.num_tokens, one.num_computed_tokens, min(one.num_in_flight_tokens, one.num_computed_tokens))
            for one, mine, _ in some
        ]
        rows, known_tokens, computed, in_flight = np.array(counts, np.int64).T
        self._cache.engine.synchronise(rows, num_tokens=known_tokens, num_computed=computed, in_flight=in_flight)
        slots = self._cache.allocate_batch(rows, np.array([tokens for *_, tokens in some], np.int64), lookahead)
        names = [one.request_id for one, *_ in some]
        for name, (_, mine, tokens) in zip(names[: slots.accepted], some, strict=False):
            self._ready[name] = tokens, lookahead
            self.served[name] = mine
        for owner, group, block in zip(slots.owner.tolist(), slots.group.tolist(), slots.block.tolist(), strict=True):
            self._owe(names[owner])[group].append(block)
        return slots.accepted == len(names)

    def _owe(self, name: str) -> Ids:
        return self._owed.setdefault(name, tuple([] for _ in range(self._num_groups)))

    # -- steps of one token each

    def decode(self, running: Iterable[EngineRequest]) -> Decoded | None:
        """Slots for a token of each of ``running`` whose last one is not on the way.

        None where one of them does something else, or has no slot: those before it are ready then. O(running), a call
        for those that need something.
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
        some = [(one, mine, 1) for one in due if (mine := self._mirrors.known(one.request_id)) is not None]
        if len(some) < len(due) or any(mine.row < 0 for _, mine, _ in some):
            return False
        if self._all_at_once and len(due) > _FEW:
            return self._allocate(some, 0)
        for request in due:
            new = self.serve(request, self._mirrors.of(request), 1, 0)
            if new is None:
                return False
            self._ready[request.request_id] = (1, 0)
            for group, ids in enumerate(new.ids):
                if len(ids):
                    self._owe(request.request_id)[group].extend(ids.tolist())
        return True


def _last_on_the_way(request: EngineRequest) -> bool:
    """Whether the last token that it may have comes of a step in flight, of which it has some: it runs no more."""
    sure = request.num_computed_tokens + 1 - (request.num_output_placeholders - 1)  # whatever becomes of drafts
    return sure >= request.num_prompt_tokens + request.max_tokens
