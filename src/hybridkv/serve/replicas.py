"""Several engines behind one front, each in a process of its own. A prompt goes where least is to be computed first.

    client -> routes -> Front -> Replicas --Ask--> Desk -> Service -> AsyncEngine          in each replica's process
                                    ^-------- exact KV events, over ipc --------'

The tokens to compute before a prompt's first one are its own that the replica has not cached, by its events, and those
of earlier prompts without a first token. The prompts of one body stay together. A replica that ends loses its requests,
and another one takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Final, Self, TypeVar

import zmq.asyncio
from msgspec.msgpack import decode
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hybridkv.cache import BlockHasher
from hybridkv.errors import WorkerError
from hybridkv.extra_keys import LoraAdapter
from hybridkv.kv_events import EventForm
from hybridkv.observe.block_index import BlockIndex
from hybridkv.request import Request, StructuredOutput
from hybridkv.runner.engine import Engine
from hybridkv.runner.pooling import Pooling
from hybridkv.serve.errors import RETRY, ApiError
from hybridkv.serve.front import Places
from hybridkv.serve.fronts import Desk, pickled
from hybridkv.serve.generation import Asked
from hybridkv.serve.remote import FrontSettings, RemoteOutputs, RemoteService
from hybridkv.serve.server import SIGNALS, UNWIND_S
from hybridkv.serve.service import Service

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LENGTH: Final = 8  # bytes
_CHECK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What a replica tells of itself: ``front`` as to a front, the keys of adapters, its ``size`` in words.

    ``hash_block`` is None without prefix caching.
    """

    front: FrontSettings
    adapters: Mapping[str, LoraAdapter | None]
    hash_block: int | None
    size: str


class ReplicaServer:
    """Serves ``engine`` to the process at the other end of the socket ``link``, until that end is closed.

    ``cut_off`` is 0: the other process counts answers that it cuts off.
    """

    cut_off = 0

    def __init__(self, engine: Engine, service: Service, front: FrontSettings, size: str, link: int) -> None:
        keys, hasher = {one: engine.adapters.key(one) for one in front.adapters}, engine.cache.hasher
        settings = ReplicaSettings(front, keys, None if hasher is None else hasher.block_size, size)
        self._told = pickled(settings, front.model, "--replicas")
        self._service, self._link = service, link

    def run(self, sockets: Sequence[socket.socket]) -> None:  # noqa: ARG002  # it has none
        """Serve. Raises WorkerError once the engine has ended."""
        for one in SIGNALS:  # also sent to the other process, which drains first
            signal.signal(one, signal.SIG_IGN)
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with self._service as service:
            reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=self._link))
            writer.write(len(self._told).to_bytes(_LENGTH, "little") + self._told)
            serving = asyncio.create_task(Desk(service, writer, lambda: None).serve(reader))
            while not (await asyncio.wait([serving], timeout=_CHECK_S))[0]:
                if service.engine.ended:
                    serving.cancel()
                    raise WorkerError("the engine has ended: the log says why")
            serving.result()


class _Replica:
    """A process with an engine: what it has cached, and what it was asked for.

    ``lost`` is called once it has ended; WorkerError if that is before it is ready.
    """

    def __init__(
        self, place: int, process: subprocess.Popen[bytes], link: socket.socket, lost: Callable[[_Replica], None]
    ) -> None:
        with link.makefile("rb") as reader:
            size = int.from_bytes(reader.read(_LENGTH), "little")
            told = reader.read(size)
        if not size or len(told) < size:
            link.close()
            raise WorkerError(
                f"replica {place} ended before it was ready, with status {process.wait()}: it printed why"
            )
        self.settings: ReplicaSettings = pickle.loads(told)  # noqa: S301 - from a process of this command
        self.place, self.process, front = place, process, self.settings.front
        over = f"replica {place} has ended, and this request with it: send it again"
        error = ApiError(503, over, code="replica_ended", headers=RETRY)
        self.service = RemoteService(front, link, lambda: lost(self), error)
        self.places, self.bodies = Places(front.most_outputs), 0
        self._index = BlockIndex()
        self._asked: dict[RemoteOutputs, list[int]] = {}  # with the uncached tokens of each prompt
        self.hearing: asyncio.Task[None] | None = None

    async def hear(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        """Keep up with the events of the replica. After a lost batch nothing is known."""
        last = 0
        with context.socket(zmq.SUB) as events:
            events.setsockopt(zmq.RCVHWM, 0)
            events.setsockopt(zmq.SUBSCRIBE, b"")
            events.connect(endpoint)
            while True:
                _, number, batch = await events.recv_multipart()
                if int.from_bytes(number, "big") > last + 1:
                    self._index.clear()
                last = int.from_bytes(number, "big")
                for event in decode(batch)[1]:
                    match event:
                        case {"type": "BlockStored", "group_idx": group, "block_size": size, "block_hashes": hashes}:
                            self._index.store(group, size, hashes)
                        case {"type": "BlockRemoved", "group_idx": group, "block_hashes": hashes}:
                            self._index.remove(group, hashes)
                        case _:
                            self._index.clear()

    def missing(self, tokens: int, hashes: Sequence[Hashable]) -> int:
        """Return how many of a prompt's ``tokens`` are not cached, at least the last one."""
        size = self.settings.hash_block
        return tokens if size is None else max(tokens - self._index.known_tokens(hashes, size), 1)

    def pending(self) -> int:
        """Return the uncached tokens of all prompts without a first token. O(prompts)."""
        each = ((outputs, *one) for outputs, missing in self._asked.items() for one in enumerate(missing))
        return sum(tokens for outputs, prompt, tokens in each if not outputs.has_begun(prompt))

    @contextmanager
    def read(self, asked: Asked, missing: list[int]) -> Iterator[RemoteOutputs]:
        """Queue the requests of ``asked``, as in Service; ``missing``: the uncached tokens of each."""
        self.bodies += 1
        with self.places.take(asked.outputs), self.service.read(asked) as outputs:
            self._asked[outputs] = missing
            try:
                yield outputs
            finally:
                del self._asked[outputs]


class Replicas:
    """The Service of all replicas together, with its methods. Replicas run until the context ends.

    Args:
        arguments: of the command that runs one replica, which also gets a place, a link and an endpoint of events.
        number: how many replicas.
        folder: for the sockets of events.

    Raises:
        WorkerError: a replica ended before it was ready.
    """

    def __init__(self, arguments: Sequence[str], number: int, folder: str) -> None:
        self._arguments, self._folder, self._starts = arguments, folder, count()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._alive: dict[int, _Replica] = {}
        self._restarts: set[asyncio.Task[None]] = set()
        self._pools = self._ending = self._lost = False
        try:
            self._started = [self._start(0)]  # alone: it prints what is wrong, once
            with ThreadPoolExecutor(number) as pool:
                self._started += pool.map(self._start, range(1, number))
        except WorkerError:
            self._end()
            raise
        told = self._started[0][0].settings
        self.size, self.model, self.adapters = told.size, told.front.model, told.front.adapters
        self.max_model_len = told.front.max_model_len
        self.places = Places(told.front.most_outputs)  # only ``require``: replicas take them
        self._keys = told.adapters
        self._hasher = None if told.hash_block is None else BlockHasher(told.hash_block)

    def _start(self, place: int) -> tuple[_Replica, str]:
        """Start a replica and wait until it is ready. Return it, and where it publishes events."""
        endpoint = f"ipc://{self._folder}/{next(self._starts)}"
        ours, theirs = socket.socketpair()
        with theirs:
            more = ("--replica-link", str(theirs.fileno()), "--replica-place", str(place), "--kv-events", endpoint)
            self._processes[place] = process = subprocess.Popen(  # noqa: S603 - this command
                [sys.executable, "-m", "hybridkv", *self._arguments, *more],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | ({} if not place else {"TTY_COMPATIBLE": "0"}),  # one shows its progress
                pass_fds=(theirs.fileno(),),
            )
        return _Replica(place, process, ours, self._lose), endpoint

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        for one in self._started:
            await self._join(*one)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        for one in [*self._alive.values()]:
            await self._part(one)
        await asyncio.to_thread(self._end)
        await asyncio.gather(*self._restarts, return_exceptions=True)
        self._context.destroy(linger=0)

    def close(self) -> None:
        """End all processes. Raises WorkerError if the last replica has ended, and no other could start."""
        self._end()
        if self._lost:
            raise WorkerError("the last replica has ended, and none took its place: it printed why")

    def _end(self) -> None:
        for one in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                one.wait(UNWIND_S if self._ending else 0)
            one.kill()
            one.wait()

    async def _join(self, one: _Replica, endpoint: str) -> None:
        await one.service.__aenter__()
        one.hearing = asyncio.create_task(one.hear(self._context, endpoint))
        if self._pools:
            await one.service.pooling()
        self._alive[one.place] = one

    async def _part(self, one: _Replica) -> None:
        self._alive.pop(one.place, None)
        if one.hearing is not None:
            one.hearing.cancel()
        await one.service.__aexit__()

    def _lose(self, one: _Replica) -> None:
        """Put another replica in the place of one that has ended."""
        if not self._ending:
            restart = asyncio.create_task(self._restart(one))
            self._restarts.add(restart)
            restart.add_done_callback(self._restarts.discard)

    async def _restart(self, one: _Replica) -> None:
        await self._part(one)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(one.process.wait, UNWIND_S)
        one.process.kill()
        status = await asyncio.to_thread(one.process.wait)
        logger.warning("replica %d ended with status %d: another one takes its place", one.place, status)
        try:
            new, endpoint = await asyncio.to_thread(self._start, one.place)
            if not self._ending:
                await self._join(new, endpoint)
        except Exception as error:  # noqa: BLE001  # whatever it is, the others go on
            if self._ending:
                return
            logger.error("%s; it stays out", error)  # noqa: TRY400  # the error says all
            if not self._alive and len(self._restarts) == 1:
                self._lost = True
                signal.raise_signal(signal.SIGTERM)

    @contextmanager
    def read(self, asked: Asked) -> Iterator[RemoteOutputs]:
        """Queue the requests of ``asked``, as in Service, where least is to be computed. O(tokens x replicas).

        Raises ApiError 429 while no replica has enough free places, 503 while none runs.
        """
        hashes = [self._hashes(prompt, asked) for prompt in asked.prompts]
        room = [one for one in self._living() if one.places.taken + asked.outputs <= one.places.most]
        missing = {
            one: [one.missing(len(prompt), known) for prompt, known in zip(asked.prompts, hashes, strict=True)]
            for one in room or self._living()[:1]  # which says that it is full
        }
        chosen = min(missing, key=lambda one: (sum(missing[one]) + one.pending(), one.places.taken, one.bodies))
        with chosen.read(asked, missing[chosen]) as outputs:
            yield outputs

    def _hashes(self, prompt: Sequence[int], asked: Asked) -> list[Hashable]:
        """Return the hashes of a prompt's blocks, in the form of events."""
        if self._hasher is None:
            return []
        key = None if asked.lora is None else self._keys[asked.lora]
        hashed = Request(asked.id, list(prompt), hasher=self._hasher, cache_salt=asked.salt, lora=key)
        return [*map(EventForm().hash, hashed.hashes)]

    def _living(self) -> list[_Replica]:
        if not self._alive:
            raise ApiError(503, "no replica runs now: try again later", code="no_replica", headers=RETRY)
        return [*self._alive.values()]

    async def compile(self, client: Hashable, form: StructuredOutput) -> None:
        """Compile ``form`` in each replica, as in Service."""
        await self._all(lambda service: service.compile(client, form))

    async def pooling(self) -> Pooling:
        """Return how states become embeddings, as in Service."""
        self._pools = True
        return next(iter((await self._all(RemoteService.pooling)).values()))

    async def metrics_text(self) -> bytes:
        """Return the metrics of all replicas, with the label ``replica``."""
        families = dict[str, Metric]()
        for place, text in (await self._all(RemoteService.metrics_text)).items():
            for one in text_string_to_metric_families(text.decode()):
                family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                family.samples += [said._replace(labels={**said.labels, "replica": str(place)}) for said in one.samples]
        return generate_latest(SimpleNamespace(collect=families.values))

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache of each replica. Return whether all did."""
        return all((await self._all(RemoteService.reset_prefix_cache)).values())

    async def alive(self) -> bool:
        """Return whether a replica runs. One whose engine has ended, ends."""
        return bool(self._alive)

    async def samples(self, over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield samples of the first replica, as in Service."""
        while not over() and self._alive:
            with suppress(ApiError):
                async with aclosing(self._living()[0].service.samples(over)) as samples:
                    async for sample in samples:
                        yield sample

    async def _all(self, call: Callable[[RemoteService], Awaitable[T]]) -> dict[int, T]:
        """Return the answers of all living replicas by place. An error of a client is raised, or if all failed."""
        asked = self._living()
        found = await asyncio.gather(*(call(one.service) for one in asked), return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        for error in errors:
            if len(errors) == len(found) or not isinstance(error, ApiError) or error.status < 500:
                raise error
        answers = zip(asked, found, strict=True)
        return {one.place: answer for one, answer in answers if not isinstance(answer, BaseException)}
