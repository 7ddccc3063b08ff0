"""AsyncEngine: an Engine for the tasks of an asyncio event loop.

    event loop   stream(), read() -> _Reader ----> arrivals       increments -> async for, Reading.next()
                                                      |              ^
    one thread                               turn: open streams, run one step, take new increments

One thread owns the engine. Between its turns, the event loop adds readers to ``arrivals`` and delivers increments to
them. A reader holds at most ``max_unread`` increments. When it is full, nothing more is taken from its stream: the
later output of its request arrives in one larger increment (Stream). A slow reader therefore costs no memory and delays
no other reader. When all readers are full, no step runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol, Self, TypeVar, Unpack

from hybridkv.arguments import instance, integer
from hybridkv.cache import KVCacheEvent
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request import SamplingParams
from hybridkv.runner.completion import Completion, Increment, Stream, engine_closed
from hybridkv.runner.engine import Engine
from hybridkv.runner.images import Images
from hybridkv.runner.inputs import Given, Prompt, checked_sampling, one_each
from hybridkv.runner.options import RequestOptions
from hybridkv.runner.sessions import Session
from hybridkv.schedule import SchedulerStatistics
from hybridkv.units import shown

logger = logging.getLogger(__name__)

_SLICE_S: Final = 0.01
"""Seconds at once for Steps that only fill host memory and the store: new requests wait so long."""

T = TypeVar("T")


class EventSink(Protocol):
    """Receives the events of a cache. KVEventPublisher is one."""

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Publish ``events``, oldest first; the sequence may be empty. This call must not block.

        It runs between steps.
        """
        ...


_News = Callable[[], None]
"""A reader's ``deliver`` with its arguments: the engine's thread makes it, the event loop calls it."""


class Bell:
    """Wakes the one task that waits. Make it in the event loop.

    A ring without a waiting task is lost, so the task must check its state before it waits.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()  # kept: each look-up asks for the process id, a system call
        self._waits: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake the waiting task, if there is one."""
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    async def wait(self) -> None:
        """Wait for the next ring."""
        self._waits = self._loop.create_future()
        await self._waits


class _Reader:
    """Unread increments of one request. The engine's thread calls ``open_stream``, and alone uses ``stream``.

    ``bell`` rings after each delivery; ``wake`` is set when a full reader has room again. After ``ended``, nothing more
    is delivered. ``left``: the reading task has gone, so its request is to be aborted.
    """

    def __init__(self, open_stream: Callable[[], Stream], max_unread: int, bell: Bell, wake: asyncio.Event) -> None:
        self.open_stream, self._max_unread = open_stream, max_unread
        self.stream: Stream | None = None
        self.left = self.ended = False
        self._parts: deque[Increment] = deque()
        self._error: Exception | None = None
        self._bell, self._wake = bell, wake

    @property
    def room(self) -> int:
        """Increments that may still be delivered. The engine's thread may read it.

        It only grows between two deliveries.
        """
        return self._max_unread - len(self._parts)

    @property
    def waits(self) -> bool:
        """Whether this reader has room for output that a step could bring."""
        return not self.ended and self.room > 0

    @property
    def over(self) -> bool:
        """Whether nothing is left to read, neither increments nor an error."""
        return self.ended and not self._parts and self._error is None

    @property
    def failed(self) -> bool:
        """Whether only the error is left to read."""
        return not self._parts and self._error is not None

    def deliver(self, parts: Sequence[Increment] = (), *, ended: bool = False, error: Exception | None = None) -> None:
        """Add increments, and perhaps the end or an error. A delivery after the end is ignored."""
        if self.ended:
            return
        self._parts += parts
        self._error = error
        self.ended = ended or error is not None
        self._bell.ring()

    def take(self, most: int | None) -> list[Increment]:
        """Return the unread increments, ``most`` of them at most.

        Raise the error once no increment is left before it.
        """
        if self._error is not None and self.failed:
            raise self._error
        if not self.room:
            self._wake.set()
        count = len(self._parts) if most is None else min(most, len(self._parts))
        return [self._parts.popleft() for _ in range(count)]


class Reading:
    """Requests that one task reads together (``AsyncEngine.read``)."""

    def __init__(self, readers: Sequence[_Reader], bell: Bell, leave: Callable[[_Reader], None]) -> None:
        self._readers, self._bell, self._leave = readers, bell, leave
        self._unread = list(enumerate(readers))

    async def next(self, most: int | None = None) -> list[tuple[int, Increment]]:
        """Wait for new increments of any request. O(requests + increments).

        Args:
            most: increments to take of each request; None for all.

        Returns:
            (number of the request, increment) pairs; an empty list after the last one.

        Raises:
            Exception: an error of a request, after its increments were returned.
        """
        while not (found := self.take(most)) and self._unread:
            await self._bell.wait()
        return found

    def take(self, most: int | None = None) -> list[tuple[int, Increment]]:
        """Return the new increments as ``next`` does, but without waiting: maybe none.

        Args:
            most: increments to take of each request; None for all.

        Raises:
            Exception: an error of a request, after its increments were returned.
        """
        found = list[tuple[int, Increment]]()
        for number, one in self._unread:
            if not (found and one.failed):  # return the found increments now, and raise the error in the next call
                found += ((number, part) for part in one.take(most))
        self._unread = [one for one in self._unread if not one[1].over]
        return found

    @property
    def ended(self) -> bool:
        """Whether everything was read and nothing more will come."""
        return not self._unread

    def leave(self) -> None:
        """Stop reading, and abort the requests that still run. A waiting ``next`` then returns an empty list."""
        self._unread = []
        for one in self._readers:
            self._leave(one)
        self._bell.ring()


class AsyncEngine:
    """Serves an Engine to any number of tasks of one event loop. Use it with ``async with``, or call ``close``.

    The engine runs in a thread of its own. An error in a model's forward ends every open stream; later requests run.

    Args:
        engine: an engine that has not run yet; use it only through this object from here on.
        max_unread: increments, at least 1, that a reader may leave unread. The output after them is collected into
            one increment.
        events: receives the events of the cache, in the engine's thread. The engine needs the option ``kv_events``.

    Raises:
        ConfigError: ``max_unread`` is below 1, or ``events`` are given and the engine has no ``kv_events``.
    """

    def __init__(self, engine: Engine, *, max_unread: int = 16, events: EventSink | None = None) -> None:
        self._events = events
        self._engine, self._max_unread = instance("engine", engine, Engine), integer("max_unread", max_unread, 1)
        if events is not None and not engine.options.kv_events:
            raise ConfigError("events need an engine whose cache reports them: set EngineOptions(kv_events=True)")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridkv")
        self._readers: set[_Reader] = set()
        self._arrivals: deque[_Reader] = deque()
        self._open: list[_Reader] = []  # only the engine's thread uses it
        self._wake = asyncio.Event()
        self._turns: asyncio.Task[None] | None = None
        self._closed = False
        self._died_of: BaseException | None = None

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Increment, None]:
        """Yield the increments of one prompt's output (``Engine.stream``).

        The request is queued at the first iteration.

        If the reading task is cancelled or closes the generator (``contextlib.aclosing``), the request is aborted.

        Args:
            prompt: text or token ids.
            sampling: how tokens are drawn; None for SamplingParams().
            options: see RequestOptions.

        Raises:
            ConfigError: the request is invalid (``Engine.add``).
            CapacityError: the request can never fit.
            CacheError: the engine is closed.
            Exception: an error of the model's forward.
        """
        await self.prepare(sampling)
        with self.read([lambda engine: engine.stream(prompt, sampling, **options)]) as reading:
            while found := await reading.next(most=1):
                yield found[0][1]

    async def prepare(self, sampling: SamplingParams | None) -> None:
        """Compile a structured output in a thread of its own, so that no step waits for it. Call it before ``read``.

        Args:
            sampling: how tokens are drawn; without a structured output, nothing is done.

        Raises:
            ConfigError: the structured output cannot be compiled, or the engine has no tokenizer for it.
        """
        params = checked_sampling(sampling)
        if params is not None and params.structured is not None:
            await asyncio.to_thread(self._engine.grammars.of, params.structured)

    @contextmanager
    def read(self, requests: Sequence[Callable[[Engine], Stream]], bell: Bell | None = None) -> Iterator[Reading]:
        """Queue ``requests`` for one task that reads them together. Requests that still run when it leaves are aborted.

        Args:
            requests: functions that queue one request each with ``Engine.stream``; the engine's thread calls them.
            bell: rings when there are new increments, for a task that reads several times at once with
                ``Reading.take``; None for one of its own.

        Raises:
            ConfigError: ``requests`` is not a list of functions.
            CacheError: the engine is closed.
        """
        if not isinstance(requests, list | tuple) or not all(map(callable, requests)):
            raise ConfigError(f"requests must be a list of functions of an engine, got {shown(requests)}")
        bell = bell or Bell()
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
        """Run ``prompts`` to their ends. When one request fails, or the calling task is cancelled, all are aborted.

        Args:
            prompts: text or token ids each.
            sampling: one for all prompts, or one for each.
            encoders: for encoder-decoders, the encoder's input of each prompt.
            images: the images of each prompt; None for a prompt without.

        Returns:
            The completions in the order of the prompts; the ``n`` outputs of one prompt follow each other.

        Raises:
            ConfigError: a request is invalid (``Engine.add``).
            CapacityError: a request can never fit.
            CacheError: the engine is closed.
        """

        def queued(
            prompt: Prompt, sampling: SamplingParams | None, encoder: Given | None, images: Images | None
        ) -> Callable[[Engine], Stream]:
            return lambda engine: engine.stream(prompt, sampling, encoder=encoder, images=images)

        done: dict[tuple[int, int], Completion] = {}
        asked = one_each(prompts, sampling, encoders, images)
        for one in asked:
            await self.prepare(one[1])
        with self.read([queued(*one) for one in asked]) as reading:
            while found := await reading.next():
                for number, part in found:
                    if part.completion is not None:
                        done[number, part.output] = part.completion
        return [done[at] for at in sorted(done)]

    async def export(
        self,
        conversation: Completion | str | Sequence[int],
        path: str | Path,
        *,
        cache_salt: str | None = None,
        note: str = "",
        key: bytes | None = None,
    ) -> Session:
        """Write the cache of a conversation to a file (``Engine.export``). No step runs while it is written.

        Args:
            conversation: a completion, the tokens of a prompt and its output, or the id of a running request.
            path: the file. It is replaced as a whole, or not at all.
            cache_salt: the salt of the conversation; that of a running request is known.
            note: text of the caller's own.
            key: signs the file with HMAC-SHA256; None for no signature.

        Raises:
            HybridKVError: as ``Engine.export``.
            OSError: the file cannot be written.
        """
        return await self.between_steps(
            lambda engine: engine.export(conversation, path, cache_salt=cache_salt, note=note, key=key)
        )

    async def import_(self, path: str | Path, *, key: bytes | None = None) -> Session:
        """Put the cache of a conversation from a file into the engine (``Engine.import_``).

        Args:
            path: a file of ``export``.
            key: the key with which it was signed; None if it is not signed.

        Raises:
            HybridKVError: as ``Engine.import_``.
            OSError: the file cannot be read.
        """
        return await self.between_steps(lambda engine: engine.import_(path, key=key))

    async def resume(
        self, path: str | Path, *, request_id: str | None = None, key: bytes | None = None
    ) -> AsyncGenerator[Increment, None]:
        """Go on with a request that another engine exported while it ran, and yield the increments of its output.

        The first increment has what the other engine drew. The file is read at the first iteration. If the generator
        is closed, the request is aborted.

        Args:
            path: a file of ``export``.
            request_id: the request's id here; None for a number.
            key: the key with which it was signed; None if it is not signed.

        Raises:
            HybridKVError: as ``Engine.resume``.
            OSError: the file cannot be read.
        """
        with self.read([lambda on: on.stream_of(on.resume(path, request_id=request_id, key=key))]) as reading:
            while found := await reading.next(most=1):
                yield found[0][1]

    def abort(self, request_id: str) -> bool:
        """End a request. Any thread may call it.

        Args:
            request_id: of a request that was added; its stream ends with the reason "abort".

        Returns:
            Whether such a request was running or waiting.

        Raises:
            CacheError: the engine is closed.
        """
        return self._engine.abort(request_id)

    def statistics(self) -> SchedulerStatistics:
        """Return the scheduler's counts so far. Any thread may call it."""
        return self._engine.statistics()

    @property
    def ended(self) -> bool:
        """Whether the engine was closed or its thread died."""
        return self._closed or (self._turns is not None and self._turns.done())

    async def between_steps(self, ask: Callable[[Engine], T]) -> T:
        """Run ``ask`` with the engine, in its thread and between two steps.

        Args:
            ask: a quick function: no step runs meanwhile.

        Returns:
            The result of ``ask``.

        Raises:
            CacheError: the engine is closed.
            Exception: an error that ``ask`` raises.
        """
        if self.ended:
            raise self._over()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._asked, ask)

    async def close(self) -> None:
        """End every request and close the engine; open streams raise CacheError. A second call does nothing.

        Raises:
            BaseException: the error that ended the engine's thread; everything is closed by then.
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
        """Run turns of the engine's thread, one after the other, while there is work; until the end."""
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
        except BaseException as error:  # a task that raised SystemExit or KeyboardInterrupt would stop the event loop
            self._died_of = error
            logger.critical("the engine's thread ended: %s", type(error).__name__, exc_info=error)
        finally:
            for reader in self._readers:
                if not reader.ended:
                    reader.deliver(error=self._over())

    def _over(self) -> CacheError:
        """Return the error that readers get once the engine has ended."""
        if self._died_of is None:
            return engine_closed()
        kind = type(self._died_of).__name__  # its message is in the log alone: a server shows this error to its clients
        over = CacheError(f"the engine's thread ended with {kind}: close the engine and make another one")
        over.__cause__ = self._died_of
        return over

    def _wanted(self) -> bool:
        """Return whether a turn is useful: a reader has room, or no reader is left and blocks are to be freed."""
        reading = [one for one in self._readers if not one.ended]
        return not reading or any(one.waits for one in reading)

    # -- in the thread

    def _asked(self, ask: Callable[[Engine], T]) -> T:
        try:
            return ask(self._engine)
        finally:
            self._publish()

    def _publish(self) -> None:
        """Publish the events of the cache and of its tiers since the last call."""
        if self._events is not None:
            self._events.publish((self._engine.tier or self._engine.cache).take_events())

    def _turn(self) -> tuple[bool, list[_News]]:
        """Open and close streams, and run one step.

        Returns:
            Whether the engine is idle, and the deliveries for readers.
        """
        news = self._admit()
        for reader in self._open:
            if reader.left and reader.stream is not None:
                reader.stream.close()
        self._open = [one for one in self._open if not one.left]
        try:
            if not self._engine.idle:
                self._engine.step()
            elif not self._engine.has_settled:
                self._engine.settle_tiers(_SLICE_S)
        except Exception as error:  # noqa: BLE001  # any error must reach the readers, which would wait forever
            news += [partial(one.deliver, error=error) for one in self._open]
            self._end_streams()
            return True, news
        finally:
            self._publish()
        news += [_taken(one) for one in self._open]
        self._open = [one for one in self._open if one.stream is not None and not one.stream.ended]
        return self._engine.idle and self._engine.has_settled, news

    def _admit(self) -> list[_News]:
        """Queue the requests of new readers; return the deliveries of errors for rejected requests."""
        refused: list[_News] = []
        while self._arrivals:
            reader = self._arrivals.popleft()
            if reader.left:
                continue
            try:
                reader.stream = instance("what a request queues", reader.open_stream(), Stream)
                self._open.append(reader)
            except Exception as error:  # noqa: BLE001  # any error must reach the reader
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
    """Return the delivery of the new increments of ``reader``, as many as it has room for."""
    if reader.stream is None:
        return reader.deliver
    parts: list[Increment] = []
    try:
        while len(parts) < reader.room and (part := reader.stream.take()) is not None:
            parts.append(part)
    except Exception as error:  # noqa: BLE001  # any error must reach the reader
        reader.stream.close()  # the reader ends here, so no task would read the request's other outputs
        return partial(reader.deliver, parts, error=error)
    return partial(reader.deliver, parts, ended=reader.stream.ended)
