"""Look-ups of waiting requests in a store, beside the steps.

ask    not asked before --> the store is asked, on a thread if it may take long: pending
       asked            --> pending, or the tokens that were found; 0 if the store took too long
forget when the request begins
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Final, NamedTuple

from hybridkv.request import Request
from hybridkv.stores.store import BlockStore
from hybridkv.tiers.prefixes import Prefixes

logger = logging.getLogger(__name__)

MOST_REMEMBERED: Final = 1 << 14
"""Most waiting requests whose answer is remembered; the oldest is forgotten first."""
_REST_S: Final = 0.01


class _Asked(NamedTuple):
    """A question. ``since``: when it was asked, in seconds of the caller's clock."""

    answer: Future[int]
    since: float


class LookupTime(NamedTuple):
    """The seconds of a look-up, or those after which it was given up: then ``late``."""

    seconds: float
    late: bool


class StoreLookups:
    """Finds prefixes of waiting requests in a store.

    Args:
        store: The store.
        prefixes: Names the blocks in it.
        executor: Runs the look-ups; ``None``: they run at once, which suits a store whose index is in memory.
        patience_s: Seconds after which a look-up counts as one that found nothing.
        clock: Seconds, read on the threads of the executor; ``None``: look-ups are not timed.

    Attributes:
        store: The store.
        prefixes: Names the blocks in it.
    """

    def __init__(
        self,
        store: BlockStore,
        prefixes: Prefixes,
        executor: Executor | None = None,
        patience_s: float = 1.0,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.store = store
        self.prefixes = prefixes
        self._executor = executor
        self._patience_s = patience_s
        self._clock = clock
        self._took = deque[LookupTime]()
        self._began: dict[str, float] = {}  # of look-ups that run
        self._asked: dict[str, _Asked] = {}

    def ask(self, request: Request, least: int, now: float) -> int | None:
        """Return the tokens of a request that the store has; 0 if it has none, ``None`` while that is unknown.

        The first question for a request decides; later ones return its answer.

        Args:
            request: The request, which holds no blocks.
            least: Tokens that are cached elsewhere. A prefix that is no longer counts as none.
            now: Seconds on the caller's clock.
        """
        asked = self._asked.get(request.request_id)
        if asked is None:
            if len(self._asked) >= MOST_REMEMBERED:
                del self._asked[next(iter(self._asked))]
            asked = self._asked[request.request_id] = _Asked(self._submit(request, least), now)
        if asked.answer.done():
            return asked.answer.result()
        if now - asked.since < self._patience_s:
            return None
        asked.answer.cancel()
        began = self._began.get(request.request_id)
        if self._clock is not None and began is not None and self._clock() - began > self._patience_s / 2:
            self._took.append(LookupTime(self._patience_s, late=True))
        late = Future[int]()
        late.set_result(0)
        self._asked[request.request_id] = _Asked(late, now)
        return 0

    def knows(self, request_id: str) -> bool:
        """Return whether the store was asked for a request.

        Args:
            request_id: The id of the request.
        """
        return request_id in self._asked

    def take_times(self) -> list[LookupTime]:
        """Return how long look-ups took that have ended or were late since the last call.

        Time in the queue of the thread is not counted. One that ran for at most half of ``patience_s`` is not late.
        """
        return [self._took.popleft() for _ in range(len(self._took))]

    def forget(self, request_id: str) -> None:
        """Forget the answer for a request, if there is one.

        Args:
            request_id: The id of the request.
        """
        self._asked.pop(request_id, None)

    @property
    def num_pending(self) -> int:
        """Look-ups that have not ended. O(waiting requests)."""
        return sum(not one.answer.done() for one in self._asked.values())

    def rest(self) -> None:
        """Wait until a look-up ends, if there is one: at most 10 ms."""
        pending = [one.answer for one in self._asked.values() if not one.answer.done()]
        if pending and self._executor is not None:
            wait(pending, _REST_S, FIRST_COMPLETED)

    def renew(self) -> None:
        """Give all blocks other keys from now on, which no other process knows: those in the store are not found."""
        self._asked.clear()
        self.prefixes = self.prefixes.renewed()

    def _submit(self, request: Request, least: int) -> Future[int]:
        if self._executor is not None:
            if self._clock is None:
                return self._executor.submit(self._found, request, least)
            return self._executor.submit(self._timed, request, least, self._clock)
        answer = Future[int]()
        answer.set_result(self._found(request, least))
        return answer

    def _timed(self, request: Request, least: int, clock: Callable[[], float]) -> int:
        began = self._began[request.request_id] = clock()
        found = self._found(request, least)
        self._took.append(LookupTime(clock() - began, late=False))
        self._began.pop(request.request_id, None)
        return found

    def _found(self, request: Request, least: int) -> int:
        try:
            return self.prefixes.find(self.store, request, least)
        except Exception as error:  # noqa: BLE001 - a store that fails is a miss
            logger.warning("the store failed to look up %s: %r", request.request_id, error)
            return 0
