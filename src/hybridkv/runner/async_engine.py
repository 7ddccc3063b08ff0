"""AsyncEngine: an Engine behind asyncio.

    event loop   stream(), read() -> Reader -----> arrivals        parts -> async for, Reading.next()
                                                      |              ^
    one thread                               turn: open streams, one step, take what is new

The thread owns the engine; the loop hands it readers and takes parts back between its turns. A reader holds at most
``max_unread`` increments. Behind that nothing is taken for it: what its request outputs meanwhile comes later in one
larger increment (see Stream), so a slow reader costs no memory and holds nobody up. When every
reader is that far behind, no step runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Protocol, Self, TypeVar, Unpack

from hybridkv.arguments import instance, integer
from hybridkv.cache import KVCacheEvent
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request import SamplingParams
from hybridkv.runner.completion import Completion, Increment, Stream
from hybridkv.runner.engine import Engine, RequestOptions, engine_closed
from hybridkv.runner.images import Images
from hybridkv.runner.inputs import Given, Prompt, one_each
from hybridkv.schedule import SchedulerStatistics
from hybridkv.units import shown

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EventSink(Protocol):
    """Who is told what a cache stores and forgets, such as a KVEventPublisher."""

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """``events``, oldest first, maybe none. It must not wait."""
        ...


_News = Callable[[], None]
"""What a turn has for a reader: its ``deliver`` with what it delivers."""


class _Bell:
    """Rung for one task that waits, maybe. What it is rung for must be seen elsewhere: nobody remembers a ring."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()  # asked for once: a system call
        self._waits: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Who waits goes on."""
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    async def wait(self) -> None:
        """For the next ring."""
        self._waits = self._loop.create_future()
        await self._waits


class _Reader:
    """Of one request. open_stream: queues it, in the engine's thread. ``stream`` is that thread's alone.

    bell: rung for what is delivered; wake: set when there is room again. ended: nothing more is delivered.
    """

    def __init__(self, open_stream: Callable[[], Stream], max_unread: int, bell: _Bell, wake: asyncio.Event) -> None:
        self.open_stream, self._max_unread = open_stream, max_unread
        self.stream: Stream | None = None
        self.left = self.ended = False
        self._parts: deque[Increment] = deque()
        self._error: Exception | None = None
        self._bell, self._wake = bell, wake

    @property
    def room(self) -> int:
        """Increments that may still be put in. The engine's thread may ask: it only grows between deliveries."""
        return self._max_unread - len(self._parts)

    @property
    def waits(self) -> bool:
        """Whether a step could bring what there is room for."""
        return not self.ended and self.room > 0

    @property
    def over(self) -> bool:
        """Nothing is left to read, not even what went wrong."""
        return self.ended and not self._parts and self._error is None

    @property
    def failed(self) -> bool:
        """What went wrong is all that is left to read."""
        return not self._parts and self._error is not None

    def deliver(self, parts: Sequence[Increment] = (), *, ended: bool = False, error: Exception | None = None) -> None:
        """More to read, maybe the last, maybe with what went wrong; nothing behind an error."""
        if self.ended:
            return
        self._parts += parts
        self._error = error
        self.ended = ended or error is not None
        self._bell.ring()

    def take(self, most: int | None) -> list[Increment]:
        """All that is there, or ``most`` of it. Raises what went wrong where nothing is."""
        if self._error is not None and self.failed:
            raise self._error
        if not self.room:
            self._wake.set()
        count = len(self._parts) if most is None else min(most, len(self._parts))
        return [self._parts.popleft() for _ in range(count)]


class Reading:
    """Requests that one task reads together: see ``AsyncEngine.read``."""

    def __init__(self, readers: Sequence[_Reader], bell: _Bell, leave: Callable[[_Reader], None]) -> None:
        self._readers, self._bell, self._leave = readers, bell, leave
        self._unread = list(enumerate(readers))

    async def next(self, most: int | None = None) -> list[tuple[int, Increment]]:
        """Everything that is new, each with the number of its request; waits for it. Empty behind the last.

        most: increments of a request to take at once; None for all that are there.
        Raises what went wrong with any request, behind what came of it before. O(requests + increments).
        """
        while self._unread:
            found = list[tuple[int, Increment]]()
            for number, one in self._unread:
                if not (found and one.failed):  # which the next call says
                    found += ((number, part) for part in one.take(most))
            self._unread = [one for one in self._unread if not one[1].over]
            if found:
                return found
            if self._unread:
                await self._bell.wait()
        return []

    @property
    def ended(self) -> bool:
        """Nothing is there, and nothing more will come."""
        return not self._unread

    def leave(self) -> None:
        """Read no further, which aborts what still runs: ``next`` finds nothing more, and ends if it waits."""
        self._unread = []
        for one in self._readers:
            self._leave(one)
        self._bell.ring()


class AsyncEngine:
    """``engine`` for any number of tasks of one event loop. Use it as ``async with``, or call ``close``.

    engine: has not run yet, and is used by nobody else from here on: a thread of its own drives it.
    max_unread: increments that a reader may leave unread, at least 1, before its request's output is gathered
    instead. An error of a forward reaches every open stream and ends it; requests that come later run.
    events: told, from that thread, what the cache stores and forgets; the engine's options have kv_events then.
    Raises ConfigError for a max_unread below 1, and for events of an engine that has none.
    """

    def __init__(self, engine: Engine, *, max_unread: int = 16, events: EventSink | None = None) -> None:
        self._events = events
        self._engine, self._max_unread = instance("engine", engine, Engine), integer("max_unread", max_unread, 1)
        if events is not None and not engine.options.kv_events:
            raise ConfigError("events need an engine whose cache tells them: EngineOptions(kv_events=True)")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridkv")
        self._readers: set[_Reader] = set()
        self._arrivals: deque[_Reader] = deque()
        self._open: list[_Reader] = []  # of the thread alone
        self._wake = asyncio.Event()
        self._turns: asyncio.Task[None] | None = None
        self._closed = False
        self._died_of: BaseException | None = None

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Increment, None]:
        """Increments of a prompt's output, as ``Engine.stream`` has them; the request is queued with the first ask.

        A reader that is cancelled, or leaves early (``contextlib.aclosing``), aborts the request.
        Raises as ``Engine.add``, what a forward raised, and CacheError once the engine is closed.
        """
        with self.read([lambda engine: engine.stream(prompt, sampling, **options)]) as reading:
            while found := await reading.next(most=1):
                yield found[0][1]

    @contextmanager
    def read(self, requests: Sequence[Callable[[Engine], Stream]]) -> Iterator[Reading]:
        """``requests`` queued, for one task that reads them all, and aborted where they go on when it leaves.

        requests: each queues its own by ``Engine.stream``, in the engine's thread. Whoever reads takes all increments
        there are at once. Raises CacheError once the engine is closed, ConfigError for what is no list of functions;
        Reading.next as ``stream``.
        """
        if not isinstance(requests, list | tuple) or not all(map(callable, requests)):
            raise ConfigError(f"requests must be a list of functions of an engine, got {shown(requests)}")
        bell = _Bell()
        readers = [_Reader(partial(one, self._engine), self._max_unread, bell, self._wake) for one in requests]
        reading = Reading(readers, bell, self._leave)
        try:
            for one in readers:
                self._enter(one)
            yield reading
        finally:
            reading.leave()

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        encoders: Sequence[Given] | None = None,
        images: Sequence[Images | None] | None = None,
    ) -> list[Completion]:
        """As ``Engine.generate``. When one request fails, or the caller is cancelled, all are aborted."""

        def queued(
            prompt: Prompt, sampling: SamplingParams | None, encoder: Given | None, images: Images | None
        ) -> Callable[[Engine], Stream]:
            return lambda engine: engine.stream(prompt, sampling, encoder=encoder, images=images)

        done: dict[tuple[int, int], Completion] = {}
        with self.read([queued(*one) for one in one_each(prompts, sampling, encoders, images)]) as reading:
            while found := await reading.next():
                for number, part in found:
                    if part.completion is not None:
                        done[number, part.output] = part.completion
        return [done[at] for at in sorted(done)]

    def abort(self, request_id: str) -> bool:
        """End a request from any thread; its stream ends with reason "abort". False for an id that does not run.

        CacheError once the engine is closed.
        """
        return self._engine.abort(request_id)

    def statistics(self) -> SchedulerStatistics:
        """The scheduler's counts so far; from any thread."""
        return self._engine.statistics()

    @property
    def ended(self) -> bool:
        """Nothing runs here any more: it was closed, or its thread died."""
        return self._closed or (self._turns is not None and self._turns.done())

    async def between_steps(self, ask: Callable[[Engine], T]) -> T:
        """What ``ask`` finds or does with the engine, in its thread while no step runs. It must be quick.

        Raises what ``ask`` does, and CacheError once the engine is closed.
        """
        if self.ended:
            raise self._over()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._asked, ask)

    async def close(self) -> None:
        """End every request (streams raise CacheError), and close the engine. Again: nothing.

        Raises what the engine's thread died of, with everything closed.
        """
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        try:
            if self._turns is not None:
                await self._turns
            if self._died_of is not None:
                raise self._died_of
        finally:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._end)
            finally:
                self._thread.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- on the event loop

    def _enter(self, reader: _Reader) -> None:
        if self.ended:
            raise self._over()
        self._readers.add(reader)
        self._arrivals.append(reader)
        self._wake.set()
        if self._turns is None:
            self._turns = asyncio.create_task(self._take_turns())

    def _leave(self, reader: _Reader) -> None:
        reader.left = True
        self._readers.discard(reader)
        self._wake.set()

    async def _take_turns(self) -> None:
        """Turns of the thread, one behind the other, while there is something to do; until the end."""
        loop = asyncio.get_running_loop()
        try:
            while not self._closed:
                self._wake.clear()
                if not self._wanted():
                    await self._wake.wait()
                    continue
                idle, news = await loop.run_in_executor(self._thread, self._turn)
                for deliver in news:
                    deliver()
                if idle:
                    await self._wake.wait()
        except asyncio.CancelledError as error:
            self._died_of = error
            raise
        except BaseException as error:  # raised by a task, SystemExit and KeyboardInterrupt would stop the event loop
            self._died_of = error
            logger.critical("the engine's thread ended: %s", type(error).__name__, exc_info=error)
        finally:
            for reader in self._readers:
                if not reader.ended:
                    reader.deliver(error=self._over())

    def _over(self) -> CacheError:
        """Why nothing is read any more."""
        if self._died_of is None:
            return engine_closed()
        kind = type(self._died_of).__name__  # what it says is in the log: a server shows this to its clients
        over = CacheError(f"the engine's thread ended by {kind}: close the engine and make another one")
        over.__cause__ = self._died_of
        return over

    def _wanted(self) -> bool:
        """Whether anybody waits; those who left want their blocks freed."""
        reading = [one for one in self._readers if not one.ended]
        return not reading or any(one.waits for one in reading)

    # -- in the thread

    def _asked(self, ask: Callable[[Engine], T]) -> T:
        try:
            return ask(self._engine)
        finally:
            self._tell()

    def _tell(self) -> None:
        """What the cache has stored and forgotten since the last time."""
        if self._events is not None:
            self._events.publish(self._engine.cache.take_events())

    def _turn(self) -> tuple[bool, list[_News]]:
        """Open and close streams, run a step; whether the next turn can wait for something new, and what came."""
        news = self._admit()
        for reader in self._open:
            if reader.left and reader.stream is not None:
                reader.stream.close()
        self._open = [one for one in self._open if not one.left]
        try:
            if not self._engine.idle:
                self._engine.step()
        except Exception as error:  # noqa: BLE001  # whatever it is, the readers must hear of it
            news += [partial(one.deliver, error=error) for one in self._open]
            self._end_streams()
            return True, news
        finally:
            self._tell()
        news += [_taken(one) for one in self._open]
        self._open = [one for one in self._open if one.stream is not None and not one.stream.ended]
        return self._engine.idle, news

    def _admit(self) -> list[_News]:
        """Queue the requests of readers that arrived; those that are refused hear of it."""
        refused: list[_News] = []
        while self._arrivals:
            reader = self._arrivals.popleft()
            if reader.left:
                continue
            try:
                reader.stream = instance("what a request queues", reader.open_stream(), Stream)
                self._open.append(reader)
            except Exception as error:  # noqa: BLE001  # as above
                refused.append(partial(reader.deliver, error=error))
        return refused

    def _end_streams(self) -> None:
        for reader in self._open:
            if reader.stream is not None:
                reader.stream.close()
        self._open = []

    def _end(self) -> None:
        try:
            self._end_streams()
        finally:
            self._engine.close()


def _taken(reader: _Reader) -> _News:
    """What is new for ``reader``, as far as it has room."""
    if reader.stream is None:
        return reader.deliver
    parts: list[Increment] = []
    try:
        while len(parts) < reader.room and (part := reader.stream.take()) is not None:
            parts.append(part)
    except Exception as error:  # noqa: BLE001  # as above
        reader.stream.close()  # of its other outputs nobody would hear the end
        return partial(reader.deliver, parts, error=error)
    return partial(reader.deliver, parts, ended=reader.stream.ended)
