"""The engine's end of front processes: it starts them, answers their messages, and ends with them.

    socket of the port --inherited--> front process --socket pair--> Desk -> Service -> AsyncEngine

Each front has a listening socket of its own at the common port, and the system shares connections out by their
addresses. The sockets stay open here: a front that ends loses its own requests, which are aborted; the front that
replaces it accepts what has arrived meanwhile. A front that ends before it is ready ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import replace
from typing import Any, Final

from msgspec import Struct

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.runner.async_engine import Bell
from hybridkv.runner.completion import Increment
from hybridkv.runner.load import LoadedModel, TextModel
from hybridkv.serve.front import ServeOptions
from hybridkv.serve.messages import (
    OF_FRONT,
    Answer,
    Ask,
    Call,
    Ended,
    Failure,
    Leave,
    NewPart,
    OfFront,
    Parts,
    framed,
    received,
)
from hybridkv.serve.remote import FrontSettings, run_front
from hybridkv.serve.server import SIGNALS, UNWIND_S, ConnectionLimits, listen
from hybridkv.serve.service import CountedOutputs, Service

logger = logging.getLogger(__name__)

_MODULES_OF_MODELS: Final = "transformers_modules"
"""The package of tokenizers whose code comes with a model."""


class Desk:
    """Answers the messages of one front, in the event loop; ``ready`` is called once the front answers clients.

    Attributes:
        is_ready: whether it does.
        cut_off: answers that it cut off when it drained.
    """

    def __init__(self, service: Service, writer: asyncio.StreamWriter, ready: Callable[[], None]) -> None:
        self._service, self._writer, self._ready = service, writer, ready
        self.is_ready, self.cut_off = False, 0
        self._bell = Bell()
        self._bodies: dict[int, tuple[ExitStack, CountedOutputs]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer what comes from ``reader`` until the front ends; then abort its requests."""
        sending = asyncio.create_task(self._send_parts())
        sending.add_done_callback(lambda _: self._writer.close())  # an error of it must not leave clients waiting
        try:
            async for message in received(reader, OF_FRONT):
                self._take(message)
        finally:
            sending.cancel()
            for number in [*self._bodies, *self._calls]:
                self._end(number)
            self._writer.close()

    def _take(self, message: OfFront) -> None:
        if isinstance(message, Ask):
            self._begin(message)
        elif isinstance(message, Call):
            self._calls[message.number] = asyncio.create_task(self._answer(message))
        elif isinstance(message, Leave):
            self._end(message.number)
        elif isinstance(message, Ended):
            self.cut_off = message.cut_off
        else:
            self.is_ready = True
            self._ready()

    def _begin(self, message: Ask) -> None:
        with ExitStack() as stack:
            try:
                outputs = stack.enter_context(self._service.read(message.asked, self._bell, text=False))
            except Exception as error:  # noqa: BLE001  # any error must reach the client
                self._send(Failure.of(message.number, error))
                return
            self._bodies[message.number] = stack.pop_all(), outputs

    def _end(self, number: int) -> None:
        """Abort what still runs of a body or a call."""
        if (body := self._bodies.pop(number, None)) is not None:
            body[0].close()
        if (call := self._calls.pop(number, None)) is not None:
            call.cancel()

    async def _send_parts(self) -> None:
        """Send the new parts of all bodies in one message, whenever there are some. O(bodies + parts) each time."""
        while True:
            parts = list[NewPart]()
            for number, (_, outputs) in [*self._bodies.items()]:
                try:
                    parts += [NewPart(number, choice, _bare(new)) for choice, new in outputs.take()]
                except Exception as error:  # noqa: BLE001  # any error must reach the client
                    self._end(number)
                    self._send(Failure.of(number, error))
            if not parts:
                await self._bell.wait()
                continue
            self._send(Parts(parts))
            with suppress(ConnectionError):  # the front has ended: its reader says so
                await self._writer.drain()  # a front that does not read must not fill the memory

    async def _answer(self, call: Call) -> None:
        service = self._service
        try:
            value: object = None
            if call.method == "samples":
                async with aclosing(service.samples(lambda: False)) as samples:
                    async for one in samples:
                        self._send(Answer(call.number, one))
            elif call.method == "compile":
                if call.form is not None:
                    await service.compile(call.client, call.form)
            else:
                value = await getattr(service, call.method)()
            self._send(Answer(call.number, value))
        except Exception as error:  # noqa: BLE001  # any error must reach the client
            self._send(Failure.of(call.number, error))

    def _send(self, message: Struct) -> None:
        if not self._writer.is_closing():
            self._writer.write(framed(message))


def _bare(new: Increment) -> Increment:
    """Return ``new`` as NewPart has it. Only outputs with stop strings have a text."""
    done = new.completion
    if done is not None:
        done = replace(done, prompt_token_ids=(), token_ids=(), text=None, logprobs=None, prompt_logprobs=None)
    return new if done is None and new.text is None else replace(new, text=None, completion=done)


def settings_of(
    service: Service, options: ServeOptions, limits: ConnectionLimits, *, spans: bool = False
) -> FrontSettings:
    """Return how another process serves ``service``."""
    model, most = service.model.without_weights, service.places.most
    return FrontSettings(model, service.adapters, service.max_model_len, most, options, limits, spans)


def pickled(settings: object, model: LoadedModel | TextModel, option: str) -> bytes:
    """Return ``settings`` as bytes for another process of this machine, which ``option`` asks for.

    Raises ConfigError if the tokenizer of ``model`` cannot be sent, or if its code comes with the model.
    """
    reason = "its code comes with the model"
    if not type(model.tokenizer).__module__.startswith(_MODULES_OF_MODELS):
        try:
            return pickle.dumps(settings)
        except Exception as error:  # noqa: BLE001  # of any kind of tokenizer
            reason = str(error)
    raise ConfigError(f"the tokenizer of {model.name} cannot be sent to other processes ({reason}): leave {option} out")


class Fronts:
    """Serves an engine by front processes until a signal arrives.

    Args:
        service: of the engine; it is closed in the end.
        options: of the service.
        limits: of the connections of each front.
        ready: called once all fronts answer.
        spans: whether fronts send spans.

    Attributes:
        cut_off: answers that were cut off when the grace had passed.

    Raises:
        ConfigError: the tokenizer cannot be sent to other processes, or its code comes with the model.
    """

    def __init__(
        self,
        service: Service,
        options: ServeOptions,
        limits: ConnectionLimits,
        ready: Callable[[], None],
        *,
        spans: bool = False,
    ) -> None:
        self._told = pickled(settings_of(service, options, limits, spans=spans), service.model, "--front-workers")
        self._service, self._ready, self._grace = service, ready, limits.grace
        self.cut_off = self._waited_for = 0
        self._draining = False
        self._sockets: Sequence[socket.socket] = ()
        self._processes: dict[int, Process] = {}

    def run(self, sockets: Sequence[socket.socket]) -> None:
        """Serve at ``sockets``, one for each front; they are closed in the end.

        Raises WorkerError if a front ended before it was ready. It has printed why.
        """
        self._sockets, self._waited_for = sockets, len(sockets)
        asyncio.run(self._run())

    async def _run(self) -> None:
        before = {one: signal.getsignal(one) for one in SIGNALS}
        for one in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(one, self._drain, before)
        try:
            async with self._service:
                await asyncio.gather(*map(self._keep, range(len(self._sockets))))
        finally:
            self._signal(signal.SIGKILL)
            for listening in self._sockets:
                listening.close()

    def _drain(self, before: Mapping[signal.Signals, Any]) -> None:
        """Let the fronts finish their answers and end. The next signal goes to the handlers that were there before."""
        for one, handler in before.items():
            asyncio.get_running_loop().remove_signal_handler(one)
            signal.signal(one, handler)
        self._draining = True
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(self._grace + 2 * UNWIND_S, self._signal, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, place: int) -> None:
        """Run a front, and another one in its place whenever it ends, until the server drains."""
        while True:
            desk, status = await self._run_one(place)
            self.cut_off += desk.cut_off
            if self._draining:
                return
            if not desk.is_ready:
                raise WorkerError(
                    f"front process {place} ended before it was ready, with status {status}: it printed why"
                )
            logger.warning("front process %d ended with status %d: another one takes its place", place, status)

    async def _run_one(self, place: int) -> tuple[Desk, int]:
        """Run a front to its end; return its desk and its exit status."""
        ours, theirs = socket.socketpair()
        link, listening = theirs.fileno(), self._sockets[place].fileno()
        code = f"from {run_front.__module__} import run_front; run_front({link}, {listening})"
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdin=PIPE, pass_fds=(link, listening), start_new_session=True
            )
        self._processes[place] = process
        if self._draining:  # since its start
            process.terminate()
        assert process.stdin is not None  # noqa: S101 - asked for above
        process.stdin.write(self._told)
        process.stdin.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        desk = Desk(self._service, writer, self._is_ready)
        await desk.serve(reader)
        return desk, await process.wait()

    def _is_ready(self) -> None:
        self._waited_for -= 1
        if not self._waited_for:
            self._ready()


def listen_for(host: str, port: int, fronts: int) -> list[socket.socket]:
    """Open a listening socket for each of ``fronts``, all at one port. Arguments and errors are those of ``listen``."""
    first = listen(host, port)  # fails if any other socket listens there, also one that would share the port
    if fronts == 1:
        return [first]
    at = first.getsockname()[1]
    first.close()
    return [listen(host, at, shared=True) for _ in range(fronts)]
