"""Calls of a client that may fail or hang: they run on threads of their own, and their caller stops waiting in time.

    caller    hand over | wait, at most timeout_s                          | go on
    thread              | work .. with call: give a result .. with call:   | work ends at ``with call``, or hangs

Timeouts of clients do not suffice: that of a socket begins again with each byte, and some clients have none.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final

PAUSE_S: Final = 1.0
"""Seconds without calls after one that failed: a server that is down costs one timeout a second, not every call."""

logger = logging.getLogger(__name__)


class CallOverError(Exception):
    """The caller of a call no longer waits. It ends the work, and nobody else sees it."""


class Call:
    """One call. Its work gives results to the caller under ``with call``, which ends the work if nobody waits.

    Args:
        work: What a thread does. Any exception is a failure.

    Attributes:
        done: Set by the thread when the work ended.
        error: What the work raised.
    """

    def __init__(self, work: Callable[[Call], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._is_over = False
        self.done = threading.Event()
        self.error: Exception | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._is_over:
            self._lock.release()
            raise CallOverError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def work(self) -> None:
        """Do the work, unless nobody waits for it."""
        try:
            with self:
                pass
            self._work(self)
        except CallOverError:
            pass
        except Exception as error:  # noqa: BLE001 - clients raise errors of many libraries
            self.error = error.with_traceback(None)  # whose frames hold buffers

    def end(self) -> None:
        """Take no more results."""
        with self._lock:
            self._is_over = True


class BoundedCalls:
    """Runs calls on at most so many threads, and none for a second after one that failed. Thread safe.

    A call that hangs keeps its thread. If all threads hang, calls fail until one of them is back.

    Args:
        name: Name of the server in the log.
        timeout_s: Seconds that a caller waits.
        threads: Most threads.
    """

    def __init__(self, name: str, timeout_s: float, threads: int) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._most_threads = threads
        self._threads = list[threading.Thread]()
        self._idle = threading.Semaphore(0)
        self._calls = queue.SimpleQueue[Call | None]()
        self._lock = threading.Lock()
        self._is_failing = False
        self._resume_at = 0.0

    def run(self, work: Callable[[Call], None]) -> bool | None:
        """Run ``work`` on a thread, and wait for it. Return whether it ended in time and without an error.

        Args:
            work: Gives its results under ``with call``. After ``run`` returned, it gives no more.

        Returns:
            None: ``work`` was not begun, because an earlier call failed.
        """
        with self._lock:
            if self._is_failing:
                if time.monotonic() < self._resume_at:
                    return None
                self._resume_at = time.monotonic() + self._timeout_s + PAUSE_S  # no other call before this one ends
        call = Call(work)
        self._hand_over(call)
        try:
            is_done = call.done.wait(self._timeout_s)
        finally:
            call.end()
        error = call.error if is_done else f"no answer within {self._timeout_s} s"
        self._note(error)
        return error is None

    def _note(self, error: object) -> None:
        """Note the end of a call."""
        with self._lock:
            was_failing, self._is_failing = self._is_failing, error is not None
            self._resume_at = time.monotonic() + PAUSE_S
        if error is not None and not was_failing:
            logger.warning(
                "%s does not answer: its blocks are misses until it does, which is tried each second: %s",
                self._name,
                error if str(error) else repr(error),
            )
        elif error is None and was_failing:
            logger.warning("%s answers again", self._name)

    def _hand_over(self, call: Call) -> None:
        """Give a call to an idle thread, or to a new one, or let it wait."""
        self._calls.put(call)
        if self._idle.acquire(blocking=False):
            return
        with self._lock:
            if len(self._threads) < self._most_threads:
                self._threads.append(threading.Thread(target=self._serve, name=f"hybridkv {self._name}", daemon=True))
                self._threads[-1].start()

    def _serve(self) -> None:
        """Work until ``close``. The threads are daemons: one that hangs must not keep the process from ending."""
        while (call := self._calls.get()) is not None:
            call.work()
            self._idle.release()
            call.done.set()
            del call  # it holds buffers of its caller

    def close(self, close_client: Callable[[], None]) -> None:
        """End the threads, then close the client. Return at most ``timeout_s`` later, and let threads do what is left.

        Clients crash if they are closed during a call, so a call that hangs delays this. No other call follows.

        Args:
            close_client: Closes the client. Its errors are ignored.
        """

        def finish() -> None:
            for thread in self._threads:
                thread.join()
            with suppress(Exception):
                close_client()

        for _ in self._threads:
            self._calls.put(None)
        closer = threading.Thread(target=finish, name=f"hybridkv {self._name}", daemon=True)
        closer.start()
        closer.join(self._timeout_s)
