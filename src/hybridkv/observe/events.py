"""Cache events in the schema that routers and stores of the ecosystem read.

A token span and its hash list always match: ``len(token_ids) == len(block_hashes) * block_size``.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from hybridkv.cache.journal import BlockRemoved, BlockStored, EventsDropped, Fact, KVCacheEvent

MAX_EVENT_BLOCKS: Final = 100_000
"""Unless told: about 100 MB of events with 16 tokens a block."""


class EventQueue:
    """Events until somebody takes them, oldest first, of ``max_blocks`` blocks altogether (a clearing counts as one).

    Where there are more, the oldest go. Putting is O(1) an event, amortised.
    """

    def __init__(self, max_blocks: int = MAX_EVENT_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._events: deque[KVCacheEvent] = deque()
        self._num_blocks = 0
        self._dropped = 0

    def read(self, fact: Fact) -> None:
        """Keep ``fact``, if it is an event, as the youngest."""
        if not isinstance(fact, KVCacheEvent):
            return
        self._events.append(fact)
        self._num_blocks += len(fact.block_hashes) if type(fact) is BlockStored else _num_blocks(fact)
        while self._num_blocks > self._max_blocks:
            self._num_blocks -= _num_blocks(self._events.popleft())
            self._dropped += 1

    def take(self) -> list[KVCacheEvent]:
        """All of them; an EventsDropped in front, if any were dropped since the last call."""
        told: list[KVCacheEvent] = [EventsDropped(self._dropped)] if self._dropped else []
        told += self._events
        self._events.clear()
        self._num_blocks = self._dropped = 0
        return told


def _num_blocks(event: KVCacheEvent) -> int:
    return len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 1
