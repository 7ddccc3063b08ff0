"""A thread that publishes events as messages of vLLM's schema: whoever steps only puts events in a queue.

    PUB      topic, sequence number (8 bytes, big-endian), batch
    ROUTER   asked with a sequence number: the batches from there on
             asked with "snapshot": all that can be hit, as batches that bear the number of the last batch in them
             each answer: topic, number, batch; behind the last one: empty, -1, empty

A consumer that comes late asks for a snapshot, or for batches from 0 on, and goes on with the next number. Where those
that it asks for are not kept any more, it gets a clearing and all that can be hit in their place, under their numbers.

Batches are MessagePack, events tagged maps or positional arrays:

    batch   [seconds, [event, ...], rank]
    event   {"type": "BlockStored", "block_hashes": [...], ...}        or ["BlockStored", [...], ...]

A salt stands in both places where consumers look: among the extra keys of a prompt's first block, as its hash has it,
and, in maps, as ``cache_salt`` of every event of such a prompt.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, Final, Self

import msgspec
import zmq

from hybridkv.arguments import check_fields, flag, instance, integer
from hybridkv.cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from hybridkv.errors import ConfigError
from hybridkv.kv_events.exact import Exact, kind_of, single_blocks, without_ends
from hybridkv.planner.config import KVCacheConfig
from hybridkv.units import ceil_div

logger = logging.getLogger(__name__)

SNAPSHOT: Final = b"snapshot"
STORED: Final = "BlockStored"
CLEARED: Final = "AllBlocksCleared"
_KINDS: Final = {
    "FullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla_attention",
    "SinkFullAttentionSpec": "sink_full_attention",
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window_mla",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "MambaSpec": "mamba",
    "CrossAttentionSpec": "cross_attention",
}
NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
_SNAPSHOT_BLOCKS: Final = 1024
"""Of one batch of a snapshot."""
_POLL_SECONDS: Final = 0.02
"""How long a replay may wait while nothing is published."""
_MOST_READ: Final = 64
"""Requests that one turn reads from the replay socket."""
_MOST_ANSWERS: Final = 4
"""Answers to one client in one turn. A consumer has one request in flight, so it never reaches this."""
_MOST_REQUEST_BYTES: Final = 4096
"""Of one frame. ZeroMQ disconnects a client that sends a longer one."""


class KVEventPublisher:
    """Publish the events of one cache at ``endpoint``. Use it as a context manager, or call ``close``.

    config: the config of the cache's plan.
    endpoint, replay_endpoint: addresses to listen at, in ZeroMQ's form (``tcp://127.0.0.1:5557``, ``ipc://...``).
    Port 0 takes any free port, and the attributes of the same names say which. None: no replays and no snapshots.
    form: how events are written. topic: sent in front of every message.
    kept_batches: how many batches are replayed as they were.
    max_queued: batches that may wait for the thread. Further ones are dropped and counted in ``dropped``, and
    consumers are told to forget everything.
    exact: publish what can be hit, not all that is cached (docs/events.md). In the natural layout this needs a
    manager with ``end_events``.

    ``unanswered`` counts replay requests that were dropped because one client sent many at once.
    Raises ConfigError if an endpoint cannot be listened at, or if ``exact`` is not worked out for the config.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        form: EventForm | None = None,
        topic: str = "",
        kept_batches: int = 10_000,
        max_queued: int = 100_000,
        exact: bool = False,
    ) -> None:
        form = EventForm() if form is None else instance("form", form, EventForm)
        self._writer = Writer(instance("config", config, KVCacheConfig), form)
        self._topic = instance("topic", topic, str).encode()
        self._kept = deque[tuple[int, bytes]](maxlen=integer("kept_batches", kept_batches, 0))
        self._queue = Queue[tuple[int, Sequence[KVCacheEvent]] | None](integer("max_queued", max_queued, 1))
        self._filtered = Exact(config).hear if flag("exact", exact) else without_ends
        self._told = Told()
        self._next_number = 0
        self._last_told = -1
        self.dropped = 0
        self.unanswered = 0
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)  # of what comes in, at both sockets
        try:
            self._pub, self.endpoint = self._listen(zmq.PUB, endpoint)
            self._router = None
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._router, self.replay_endpoint = self._listen(zmq.ROUTER, replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread: Thread | None = Thread(target=self._work, name="hybridkv-events", daemon=True)
        self._thread.start()

    def _listen(self, kind: int, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(kind)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"cannot publish events at {endpoint}: {error}") from error
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """``events``, oldest first, are one batch; nothing for none. It never waits. O(1)."""
        if not events:
            return
        number = self._next_number
        self._next_number += 1  # a batch that is dropped leaves a gap
        try:
            self._queue.put_nowait((number, events))
        except Full:
            self.dropped += 1

    def close(self) -> None:
        """Publish what waits, and stop listening. Again: nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
            self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the thread

    def _work(self) -> None:
        while True:
            self._answer()
            with suppress(Empty):
                for _ in range(max(1, self._queue.qsize())):  # all that wait, so that answers never delay batches
                    found = self._queue.get(timeout=_POLL_SECONDS)
                    if found is None:
                        return
                    self._tell(*found)

    def _tell(self, number: int, events: Sequence[KVCacheEvent]) -> None:
        """Send a batch. Behind a gap nothing is known of what was told before."""
        if number != self._last_told + 1:
            events = [AllBlocksCleared(), *events]
        try:
            events = self._filtered(events)
            batch = self._writer.batch(events, time.time())
        except Exception:  # a batch that cannot be told is one that was dropped
            logger.exception("events of batch %d could not be written", number)
            self.dropped += 1
            return
        self._last_told = number
        self._told.hear(events)
        self._kept.append((number, batch))
        self._pub.send_multipart((self._topic, _bytes_of(number), batch))

    def _answer(self) -> None:
        """Answer requests that wait, until a batch waits or the turn has read enough. Drop and count a client's excess.

        ZeroMQ reads clients in turn, so that one client's flood does not keep another from being answered.
        """
        router = self._router
        if router is None:
            return
        answers = Counter[bytes]()
        for _ in range(_MOST_READ):
            if not router.poll(0):
                return
            client, *empty, asked = router.recv_multipart()
            answers[client] += 1
            if answers[client] > _MOST_ANSWERS:
                self.unanswered += 1
                continue
            for number, batch in self._asked_for(asked):
                router.send_multipart((client, *empty, self._topic, _bytes_of(number), batch))
            router.send_multipart((client, *empty, b"", _END, b""))
            if not self._queue.empty():
                return

    def _asked_for(self, asked: bytes) -> Sequence[tuple[int, bytes]]:
        """Return the batches of a replay or a snapshot. Any other request has none."""
        if asked == SNAPSHOT:
            return [(self._last_told, batch) for batch in self._snapshot()]
        if len(asked) == NUMBER_BYTES:
            return self._from(int.from_bytes(asked, "big"))
        return ()

    def _from(self, first: int) -> list[tuple[int, bytes]]:
        """The batches from number ``first`` on, or what stands for them."""
        if first > self._last_told:
            return []
        if self._kept and first >= self._kept[0][0]:
            return [(number, batch) for number, batch in self._kept if number >= first]
        batches = self._snapshot(most=self._last_told - first + 1)
        return [*enumerate(batches[:-1], first), (self._last_told, batches[-1])]

    def _snapshot(self, most: int | None = None) -> list[bytes]:
        """All that can be hit behind the last batch that was told, behind a clearing. most: batches; None for any."""
        if self._last_told < 0:
            return []
        events: list[KVCacheEvent] = [AllBlocksCleared(), *self._told.snapshot()]
        size, now = max(_SNAPSHOT_BLOCKS, ceil_div(len(events), most or len(events))), time.time()
        return [self._writer.batch(events[at : at + size], now) for at in range(0, len(events), size)]


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


# -- messages


@dataclass(frozen=True, slots=True)
class EventForm:
    """How events are written. as_arrays: by position, without ``cache_salt``. whole_hashes: bytes, not 64 bits of them.

    Integers are the last 64 bits of a hash, which is what most routers take.
    """

    as_arrays: bool = False
    whole_hashes: bool = False

    def __post_init__(self) -> None:
        check_fields(self, flag, "as_arrays", "whole_hashes")

    def hash(self, key: bytes | None) -> int | bytes | None:
        """``key`` as it is told."""
        return key if key is None or self.whole_hashes else int.from_bytes(key[-8:], "big")


class Writer:
    """Batches of one cache's events. config: of its plan, whose groups are told by number, kind and window."""

    def __init__(self, config: KVCacheConfig, form: EventForm) -> None:
        self._form = form
        specs = [kind_of(group.spec) for group in config.groups]
        self._groups = [
            (_KINDS.get(type(one).__name__, "unknown"), getattr(one, "sliding_window", None)) for one in specs
        ]
        self._encoder = msgspec.msgpack.Encoder()

    def batch(self, events: Sequence[KVCacheEvent], seconds: float) -> bytes:
        """One message. O(blocks)."""
        return self._encoder.encode([seconds, [self._written(one) for one in events], 0])

    def _written(self, event: KVCacheEvent) -> object:
        """By name, in the order of positions."""
        match event:
            case BlockStored():
                fields = self._stored(event)
            case BlockRemoved():
                fields = {
                    "type": "BlockRemoved",
                    "block_hashes": [self._form.hash(key) for key in event.block_hashes],
                    "medium": event.medium,
                    "group_idx": event.group_idx,
                }
            case _:  # cleared, or unknown what was lost: who forgets all believes in nothing that is not there
                fields = {"type": CLEARED}
        return list(fields.values()) if self._form.as_arrays else fields

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        kind, window = self._groups[event.group_idx]
        fields: dict[str, Any] = {
            "type": STORED,
            "block_hashes": [self._form.hash(key) for key in event.block_hashes],
            "parent_block_hash": self._form.hash(event.parent_block_hash),
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": event.lora_id,
            "medium": event.medium,
            "lora_name": event.lora_name,
            "extra_keys": event.extra_keys,
            "group_idx": event.group_idx,
            "kv_cache_spec_kind": kind,
            "kv_cache_spec_sliding_window": window,
        }
        if not self._form.as_arrays and event.cache_salt is not None:
            fields["cache_salt"] = event.cache_salt
        return fields


# -- for consumers that come late


class Told:
    """Blocks that events told of, each as an event of its own; several blocks of one key count as often."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, bytes], BlockStored] = {}
        self._copies = Counter[tuple[int, bytes]]()

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        """``events`` are told. O(blocks)."""
        for event in events:
            match event:
                case BlockStored():
                    for one in single_blocks(event):
                        key = event.group_idx, one.block_hashes[0]
                        self._blocks[key] = one
                        self._copies[key] += 1
                case BlockRemoved():
                    for block in event.block_hashes:
                        key = event.group_idx, block
                        self._copies[key] -= 1
                        if self._copies[key] <= 0:
                            del self._copies[key]
                            self._blocks.pop(key, None)
                case _:
                    self._blocks.clear()
                    self._copies.clear()

    def snapshot(self) -> list[BlockStored]:
        """All of them, parents in front of their children. O(blocks)."""
        told: list[BlockStored] = []
        seen: set[tuple[int, bytes]] = set()
        for key in self._blocks:
            chain: list[BlockStored] = []
            at: tuple[int, bytes] | None = key
            while at is not None and at in self._blocks and at not in seen:
                seen.add(at)
                block = self._blocks[at]
                chain += [block] * self._copies[at]
                parent = block.parent_block_hash
                at = None if parent is None else (at[0], parent)
            told += reversed(chain)
        return told
