"""What must always hold of a scheduler, rebuilt from its queues and the steps in flight."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hybridkv.cache import KVCacheManager
from hybridkv.errors import CacheError
from hybridkv.schedule.queue import Forks, Inbox, WaitingQueue
from hybridkv.schedule.running import InFlight, RunningRows


def check_rows(cache: KVCacheManager, running: RunningRows) -> None:
    """Rows that hold blocks are those that run and those that are dead."""
    resident = {request.row for request in cache.engine.resident_requests()}
    dead, rows = set(np.flatnonzero(running.dead).tolist()), set(running.order.tolist())
    if rows & dead or (rows | dead) != resident:
        raise CacheError(f"rows {sorted(rows)} run and {sorted(dead)} are dead, but {sorted(resident)} hold blocks")
    if len(dead) != running.num_dead or [request.row for request in running.requests] != running.order.tolist():
        raise CacheError("the order of running requests and their rows differ")


def check_in_flight(cache: KVCacheManager, running: RunningRows, in_flight: Iterable[InFlight]) -> None:
    """Rows expect exactly what the steps in flight will bring."""
    steps, pending, num_drafts = (np.zeros_like(running.steps) for _ in range(3))
    for flight in in_flight:
        held = flight.held
        steps[flight.rows[held]] += 1
        pending[flight.rows[held & flight.step.samples]] += 1
        if flight.num_drafts is not None:
            num_drafts[flight.rows[held]] += flight.num_drafts[held]
    live = sorted(request.row for request in cache.engine.resident_requests())
    pairs = (steps, running.steps), (pending, running.pending), (num_drafts, running.num_drafts)
    if not all(np.array_equal(found[live], expected[live]) for found, expected in pairs):
        raise CacheError("the steps in flight differ from what the rows expect of them")


def check_known(inbox: Inbox, waiting: WaitingQueue, running: RunningRows, forks: Forks) -> None:
    """Known are exactly the requests that arrive, wait, run or are to branch off; who waits holds no row."""
    queued = (*waiting.requests(), *forks.requests())
    here = {request.request_id for request in (*inbox.arriving(), *queued, *running.requests)}
    if here != inbox.known_ids():
        raise CacheError("the requests known are not those that arrive, wait or run")
    if any(request.row >= 0 for request in queued):
        raise CacheError("a request waits and holds a row")
    if untried := waiting.untried():
        raise CacheError(f"request {untried[0].request_id!r} waits, and nobody would try it")
