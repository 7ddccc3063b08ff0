"""Threads that tokenize: short texts never wait for long ones, and clients take turns.

    piece of work -> lane, by its size -> queue of its client -> the next free thread of the lane, clients in turn

A tokenizer releases the interpreter while it works, so a long text costs others a core and no time. A call into a
tokenizer cannot be stopped: work that may take long comes in pieces, and whoever waits for the next one can leave.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

SHORT: Final = 1 << 12
"""Characters or tokens of work that takes a few milliseconds."""
_LANES: Final = (SHORT, 1 << 16, None)
_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """Work that is done at once. size: characters or tokens of it."""

    size: int
    work: Callable[[], T]


class Turns:
    """Lanes of threads, each for work of at most some size.

    Args:
        parallel: whether several threads may use the tokenizer at a time; else all work goes through one.
    """

    def __init__(self, *, parallel: bool) -> None:
        sizes = _LANES if parallel else (None,)
        self._lanes = [(most, Lane(_THREADS if parallel else 1)) for most in sizes]

    async def run(self, client: Hashable, pieces: Iterable[Piece[T]]) -> list[T]:
        """Return what each of ``pieces`` gives, one after the other, each in a turn of ``client``.

        Raises what a piece raises. If the task is cancelled, no further piece is begun.
        """
        return [await self._lane(one.size).run(client, one.work) for one in pieces]

    def close(self) -> None:
        """Begin nothing more. Threads end after the work in hand; a process that ends does not wait for them."""
        for _, lane in self._lanes:
            lane.close()

    def _lane(self, size: int) -> Lane:
        return next(lane for most, lane in self._lanes if most is None or size <= most)


class Lane:
    """Threads that share a queue; they begin with the first work.

    A client has one thread fewer than there are, so that one is left for the others.
    """

    def __init__(self, threads: int) -> None:
        self._most, self._most_of_client = threads, max(threads - 1, 1)
        self._waiting: OrderedDict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._running: Counter[Hashable] = Counter()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = False

    async def run(self, client: Hashable, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, in a turn of ``client``. Cancelled before it begins, it never does."""
        future: Future[T] = Future()
        queued = (future, work)
        with self._changed:
            if len(self._threads) < self._most:
                self._start_thread()
            self._waiting.setdefault(client, deque()).append(queued)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._forget(client, queued)
            raise

    def close(self) -> None:
        """Cancel what waits, and let the threads end."""
        with self._changed:
            self._closed = True
            for future, _ in (one for queue in self._waiting.values() for one in queue):
                future.cancel()
            self._waiting.clear()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        # daemons: the process may end while a tokenizer is busy
        thread = threading.Thread(target=self._work, name="hybridkv-tokens", daemon=True)
        thread.start()  # may raise where the process has no more threads
        self._threads.append(thread)

    def _forget(self, client: Hashable, queued: tuple[Future[Any], Callable[[], Any]]) -> None:
        """Drop what nobody waits for, and the text in it."""
        with self._changed:
            queue = self._waiting.get(client, deque())
            if queued in queue:
                queue.remove(queued)
            if not queue:
                self._waiting.pop(client, None)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            client, future, work = taken
            if future.set_running_or_notify_cancel():
                _settle(future, work)
            del future, work, taken  # a thread that waits holds no text
            with self._changed:
                self._running[client] -= 1
                self._running += Counter()  # without clients that have none
                self._changed.notify()

    def _take(self) -> tuple[Hashable, Future[Any], Callable[[], Any]] | None:
        """Wait for the next work: the oldest of the first client that may have a thread. None once closed."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                client = next((one for one in self._waiting if self._running[one] < self._most_of_client), None)
                if client is None:
                    self._changed.wait()
                    continue
                queue = self._waiting.pop(client)
                future, work = queue.popleft()
                if queue:
                    self._waiting[client] = queue  # behind all others
                self._running[client] += 1
                return client, future, work


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  # whoever waits hears of it
        future.set_exception(error)
