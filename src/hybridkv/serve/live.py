"""What the page shows: samples of the engine, made only while a client listens.

    listener --- latest(), once a second ---> Live ---> between two steps: Look ---> JSON
    listener --- latest() ------------------>  '--- the same one, where it is fresh

Neither prompts nor salts are in a sample, and its length has a bound, however many requests there are.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, NamedTuple

import numpy as np

from hybridkv.cache import MissReason
from hybridkv.errors import CacheError
from hybridkv.observe.block_map import BlockMap, block_map
from hybridkv.runner.async_engine import AsyncEngine
from hybridkv.runner.completion import Completion
from hybridkv.runner.engine import Engine
from hybridkv.serve.metrics import RequestMetrics, Snapshot

EVERY_S: Final = 1.0
"""Seconds between two samples of a listener."""
MOST_CELLS: Final = 2048
"""Cells of the map of memory."""
MOST_REQUESTS: Final = 40
"""Requests that run, and as many that wait, that are told one by one."""
MOST_ENDED: Final = 20
"""Of requests that ended a moment ago: those that took longest."""
_FRESH: Final = 0.8
_ENDED_FOR_S: Final = 5.0  # a listener that skips a sample sees them in the next
_REMEMBERED: Final = 2000
_STATES: Final = " cpr"
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


class Look(NamedTuple):
    """At an engine, in its own thread: values alone, as requests go on while they are told.

    told: what the page reads of them. cell_bytes: of the smallest block.
    """

    told: dict[str, Any]
    blocks: BlockMap
    num_blocks: int
    arena_bytes: int
    cell_bytes: int


class _Ended(NamedTuple):
    """A request that ended at ``at``. told: what the page reads of it, but for its id and how long ago that is."""

    id: str
    at: float
    whole_s: float
    told: list[float]


class Ages:
    """Since when each block has been in its state, as far as anybody looked; 9 bytes a block once somebody did."""

    def __init__(self) -> None:
        self._states = np.zeros(0, np.uint8)
        self._since = np.zeros(0)

    def of(self, blocks: BlockMap, num_blocks: int, now: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Seconds of each of ``blocks``, float64[n]. O(num_blocks)."""
        if len(self._states) != num_blocks:
            self._states, self._since = np.zeros(num_blocks, np.uint8), np.full(num_blocks, now)
        states = np.zeros_like(self._states)
        states[blocks.blocks] = blocks.states
        self._since[states != self._states] = now
        self._states = states
        ages: np.ndarray[Any, np.dtype[np.float64]] = now - self._since[blocks.blocks]
        return ages


class Live:
    """Samples of ``engine`` for those who listen. samples: made so far; listeners: now."""

    def __init__(self, engine: AsyncEngine, metrics: RequestMetrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._ages = Ages()
        self._ended: deque[_Ended] = deque(maxlen=_REMEMBERED)
        self._lock = asyncio.Lock()
        self._latest, self._made_at = b"", 0.0
        self.listeners = self.samples = 0
        metrics.heard = self._hear

    def _hear(self, done: Completion, begun: float, first: float, now: float) -> None:
        if self.listeners:
            times = (round(one, 4) for one in (done.queue_seconds, first - begun, now - begun))
            counts = len(done.prompt_token_ids), done.hit_tokens, len(done.token_ids), done.preemptions
            self._ended.append(_Ended(done.request_id, now, now - begun, [*times, *counts]))

    async def events(self, over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """A sample a second, for one listener, until it is ``over`` or the engine ends."""
        self.listeners += 1
        try:
            while not over():
                yield b"data: " + await self.latest() + b"\n\n"
                await asyncio.sleep(EVERY_S)
        except CacheError:  # of an engine that was closed
            return
        finally:
            self.listeners -= 1
            if not self.listeners:
                self._ended.clear()
                self._ages = Ages()

    async def latest(self) -> bytes:
        """The newest sample, made anew unless it is fresh: JSON in at most some ten thousand bytes."""
        async with self._lock:
            if not self._latest or time.monotonic() - self._made_at > _FRESH * EVERY_S:
                look = await self._engine.between_steps(_look)
                self._made_at = time.monotonic()
                self.samples += 1
                self._latest = json.dumps(self._told(look), separators=(",", ":"), allow_nan=False).encode()
            return self._latest

    def _told(self, look: Look) -> dict[str, Any]:
        """``look`` as the page reads it."""
        ended = [one for one in self._ended if self._made_at - one.at < _ENDED_FOR_S]
        slowest = sorted(ended, key=lambda one: -one.whole_s)[:MOST_ENDED]
        return {
            "time": round(time.time(), 3),
            "model": self._metrics.families.model_name,
            "output": self._metrics.output_tokens,
            **look.told,
            "map": self._map(look),
            "slowest": [[one.id, round(self._made_at - one.at, 4), *one.told] for one in slowest],
        }

    def _map(self, look: Look) -> dict[str, str]:
        """A letter a cell of equal bytes, for the block in its middle: state, group, and age, twice as much a digit."""
        blocks, cells = look.blocks, min(MOST_CELLS, max(look.arena_bytes // max(look.cell_bytes, 1), 1))
        middles = ((np.arange(cells) + 0.5) * (look.arena_bytes / cells)).astype(np.int64)
        there = blocks.at(middles)
        ages = self._ages.of(blocks, look.num_blocks, self._made_at)
        if not len(ages):
            return {"states": " " * cells, "groups": "0" * cells, "ages": "0" * cells}
        digits = np.log2(ages + 1).astype(np.int64).clip(0, 9)[there]
        digits[there < 0] = 0
        states = np.where(there < 0, 0, blocks.states[there])
        groups = np.where(there < 0, 0, blocks.groups[there].clip(0, len(_DIGITS) - 1))
        return {
            "states": "".join(_STATES[one] for one in states.tolist()),
            "groups": "".join(_DIGITS[one] for one in groups.tolist()),
            "ages": "".join(map(str, digits.tolist())),
        }


def _look(engine: Engine) -> Look:
    """In the engine's thread. O(num_blocks)."""
    cache, scheduler, snapshot = engine.cache, engine.scheduler, Snapshot.of(engine)
    now, arena_bytes = snapshot.scheduler, cache.config.arena_bytes
    told = {
        "running": now.running,
        "waiting": now.waiting,
        "waits": {str(reason): count for reason, count in snapshot.waits.items()},
        "seats": engine.options.max_running,
        "usage": snapshot.usage,
        "queries": now.prompt_tokens,
        "hits": now.hit_tokens,
        "misses": {str(one): now.misses.get(one, 0) for one in MissReason} if snapshot.explains else None,
        "preemptions": now.preemptions,
        "evictions": snapshot.cache.evictions,
        "ended": now.requests_finished,
        "arena": arena_bytes,
        "groups": [
            [kind, size, one.held_blocks, one.cached_blocks, one.evictable_blocks, one.published, one.evictions]
            for kind, size, one in zip(snapshot.kinds, snapshot.sizes, snapshot.cache.groups, strict=True)
        ],
        "runs": [
            [
                *(one.request_id, one.num_prompt_tokens, one.first_hit_tokens or 0),
                *(one.num_computed_tokens, one.num_output_tokens, one.num_preemptions),
            ]
            for one in scheduler.running_requests()[:MOST_REQUESTS]
        ],
        "queue": [
            [one.request.request_id, one.request.num_tokens, str(one.reason)]
            for one in scheduler.waits()[:MOST_REQUESTS]
        ],
    }
    blocks = block_map(cache.config, cache.block_pool, cache.groups, cache.pins)
    return Look(told, blocks, cache.block_pool.num_blocks, arena_bytes, min(snapshot.sizes))
