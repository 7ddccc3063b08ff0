"""Publish cache events in vLLM's message schema, from a thread of its own.

    PUB      topic, sequence number (8 bytes, big-endian), batch
    ROUTER   request: a sequence number     answer: all batches from this number on
             request: "snapshot"            answer: all published blocks, as batches with the number of the last batch
             each answer: topic, number, batch; the last answer: empty, -1, empty

A late consumer asks for a snapshot, or for batches from 0 on, and continues with the next number. If the publisher no
longer keeps these batches, it answers under their numbers with a clearing and all published blocks.

Numbers begin with the clock, in microseconds, so that a restarted publisher continues above its predecessor: consumers
ignore numbers that they know. After each new subscription, a batch with a clearing and all published blocks goes to all
consumers: without a batch, a consumer does not notice that it lacks some, and vllm-router reads no replay that begins
above the number that it asked for.

Batches are MessagePack. Events are tagged maps or positional arrays:

    batch   [seconds, [event, ...], rank]
    event   {"type": "BlockStored", "block_hashes": [...], ...}        or ["BlockStored", [...], ...]

Consumers look for a salt in two places, so events have it twice: in the extra keys of a prompt's first block, which its
hash includes, and, in maps, as ``cache_salt`` of every event of the prompt.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, Final, Self

import msgspec
import zmq

from hybridkv.arguments import check_fields, flag, instance, integer
from hybridkv.cache import AllBlocksCleared, BlockRemoved, BlockStored, EventsDropped, KVCacheEvent, Medium
from hybridkv.errors import ConfigError
from hybridkv.observe.prefixes import PREFIXES, ExactEvents, single_blocks, without_resume_points
from hybridkv.planner.config import KVCacheConfig
from hybridkv.specs import KVCacheSpec, inner_of
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
"""Blocks of one batch of a snapshot, chosen by hand."""
_PAUSE_SECONDS: Final = 1.0
"""Shortest time between two batches for new subscriptions, chosen by hand: each writes all blocks."""
_POLL_SECONDS: Final = 0.02
"""Longest time that a replay request waits while nothing is published, chosen by hand."""
_MOST_READ: Final = 64
"""Requests that one turn reads from the replay socket, chosen by hand, so that a flood cannot delay batches."""
_MOST_ANSWERS: Final = 4
"""Answers to one client in one turn. A consumer has one request in flight, so it never reaches this."""
_MOST_REQUEST_BYTES: Final = 4096
"""Bytes of one frame of a request. ZeroMQ disconnects a client that sends a longer one."""


class KVEventPublisher:
    """Publishes the events of one cache. Use it as a context manager, or call ``close``.

    Args:
        config: the config of the cache's plan.
        endpoint: address of the PUB socket, as ZeroMQ writes it (``tcp://127.0.0.1:5557``, ``ipc://...``). Port 0 takes
            any free port.
        replay_endpoint: address of the ROUTER socket; without it, there are no replays and no snapshots.
        form: how to write events.
        topic: first frame of every message.
        kept_batches: number of batches to keep for replays.
        max_queued: batches that may wait for the thread. Further batches are dropped, and the next batch begins with
            a clearing.
        media: the media of the blocks to publish, such as ("GPU",) for a router that knows no tiers; None for all.
        exact: whether to publish the prefixes that a request can hit, each block once, as blocks of full attention of
            group 0 (docs/events.md); else every cached block of each group.

    Attributes:
        endpoint: address of the PUB socket, with its real port.
        replay_endpoint: address of the ROUTER socket, with its real port.
        dropped: batches that were dropped.
        unanswered: replay requests that were dropped because one client sent many at once.

    Raises:
        ConfigError: the publisher cannot bind an endpoint, or ``exact`` does not support the config.
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
        media: Collection[Medium] | None = None,
        exact: bool = True,
    ) -> None:
        form = EventForm() if form is None else instance("form", form, EventForm)
        instance("config", config, KVCacheConfig)
        groups = [PREFIXES] if flag("exact", exact) else [attention_of(group.spec) for group in config.groups]
        self._writer = Writer(groups, form)
        self._topic = instance("topic", topic, str).encode()
        self._kept = deque[tuple[int, bytes]](maxlen=integer("kept_batches", kept_batches, 0))
        self._queue = Queue[tuple[int, Sequence[KVCacheEvent]] | None](integer("max_queued", max_queued, 1))
        self._lost = 0  # batches that were dropped since the last one in the queue
        self._media = None if media is None else frozenset(instance("media", one, Medium) for one in media)
        self._filtered = ExactEvents(config).filter if exact else without_resume_points
        self._published = PublishedBlocks()
        self._first_number = time.time_ns() // 1000
        self._last_published = self._first_number - 1
        self._unsent = 0  # batches since the last one that was published
        self.dropped = 0
        self.unanswered = 0
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)  # holds for all sockets of the context
        try:
            self._pub, self.endpoint = self._listen(zmq.XPUB, endpoint)
            self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # tell of every subscription, not of the first alone
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
            raise ConfigError(
                f"cannot publish events at {endpoint}: {error}; give a free address like tcp://127.0.0.1:5557"
            ) from error
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Queue one batch; an empty batch is ignored. It never blocks. O(1).

        Args:
            events: the events since the last call, oldest first. Do not change the list afterwards.
        """
        if not events:
            return
        try:
            self._queue.put_nowait((self._lost, events))
            self._lost = 0
        except Full:
            self._lost += 1
            self.dropped += 1

    def close(self) -> None:
        """Publish the waiting batches, then close the sockets. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
            self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread

    def _work(self) -> None:
        self._tell_all()
        told, has_new = time.monotonic(), False
        while True:
            has_new = self._has_subscribed() or has_new
            if has_new and time.monotonic() >= told + _PAUSE_SECONDS:
                self._tell_all()
                told, has_new = time.monotonic(), False
            self._answer()
            with suppress(Empty):
                for _ in range(max(1, self._queue.qsize())):  # all waiting batches, so that answers never delay them
                    found = self._queue.get(timeout=_POLL_SECONDS)
                    if found is None:
                        return
                    self._send(*found)

    def _has_subscribed(self) -> bool:
        """Return whether a consumer subscribed since the last call."""
        has_new = False
        for _ in range(_MOST_READ):
            if not self._pub.poll(0):
                break
            has_new = self._pub.recv_multipart()[0][:1] == b"\x01" or has_new
        return has_new

    def _tell_all(self) -> None:
        """Publish all blocks, which replace what consumers know. O(blocks)."""
        (batch,) = self._snapshot(most=1)
        self._sent(self._last_published + 1, batch)

    def _send(self, lost: int, events: Sequence[KVCacheEvent]) -> None:
        """Publish a batch. After ``lost`` ones it begins with a clearing, because consumers missed events."""
        self._unsent += lost
        if self._unsent:
            events = [AllBlocksCleared(), *events]
        try:
            events = self._filtered(events if self._media is None else _within(self._media, events))
            batch = self._writer.batch(events, time.time())
        except Exception:  # count it as dropped; the next batch begins with a clearing
            logger.exception("events of batch %d could not be written", self._last_published + self._unsent + 1)
            self.dropped += 1
            self._unsent += 1
            return
        self._published.add(events)
        number, self._unsent = self._last_published + self._unsent + 1, 0  # batches that were not sent leave a gap
        self._sent(number, batch)

    def _sent(self, number: int, batch: bytes) -> None:
        self._last_published = number
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
            return [(self._last_published, batch) for batch in self._snapshot()]
        if len(asked) == NUMBER_BYTES:
            return self._from(int.from_bytes(asked, "big"))
        return ()

    def _from(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches from number ``first`` on, or a snapshot under their numbers."""
        if first > self._last_published:
            return []
        if self._kept and max(first, self._first_number) >= self._kept[0][0]:
            return [(number, batch) for number, batch in self._kept if number >= first]
        batches = self._snapshot(most=self._last_published - first + 1)
        return [*enumerate(batches[:-1], first), (self._last_published, batches[-1])]

    def _snapshot(self, most: int | None = None) -> list[bytes]:
        """Return a clearing and all published blocks, in at most ``most`` batches if given."""
        events: list[KVCacheEvent] = [AllBlocksCleared(), *self._published.snapshot()]
        size, now = max(_SNAPSHOT_BLOCKS, ceil_div(len(events), most or len(events))), time.time()
        return [self._writer.batch(events[at : at + size], now) for at in range(0, len(events), size)]


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def _within(media: Collection[Medium], events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
    """Return the events of blocks in ``media``, and all clearings."""
    return [one for one in events if isinstance(one, AllBlocksCleared | EventsDropped) or one.medium in media]


# -- messages


@dataclass(frozen=True, slots=True)
class EventForm:
    """How to write events.

    Attributes:
        as_arrays: whether events are arrays, without ``cache_salt``, instead of maps.
        whole_hashes: whether hashes are all 32 bytes instead of an integer of the last 64 bits, which most routers
            expect.
    """

    as_arrays: bool = False
    whole_hashes: bool = False

    def __post_init__(self) -> None:
        check_fields(self, flag, "as_arrays", "whole_hashes")

    def hash(self, key: bytes | None) -> int | bytes | None:
        """Return a hash in the form of the messages.

        Args:
            key: the hash; ``None`` stays.
        """
        return key if key is None or self.whole_hashes else int.from_bytes(key[-8:], "big")


def attention_of(spec: KVCacheSpec) -> tuple[str, int | None]:
    """Return the kind and the window of a group of ``spec``, as raw events name them."""
    one = inner_of(spec)
    return _KINDS.get(type(one).__name__, "unknown"), getattr(one, "sliding_window", None)


class Writer:
    """Writes batches of one cache's events.

    Args:
        groups: kind and window of each group.
        form: how to write events.
    """

    def __init__(self, groups: Sequence[tuple[str, int | None]], form: EventForm) -> None:
        self._form, self._groups = form, groups
        self._encoder = msgspec.msgpack.Encoder()

    def batch(self, events: Sequence[KVCacheEvent], seconds: float) -> bytes:
        """Return a batch as bytes. O(blocks).

        Args:
            events: the events, oldest first.
            seconds: time of the batch, Unix time.
        """
        return self._encoder.encode([seconds, [self._written(one) for one in events], 0])

    def _written(self, event: KVCacheEvent) -> object:
        """Return an event as a map in the order of vLLM's array positions, or as an array."""
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
            case _:  # cleared, or events were dropped: a consumer that forgets all blocks expects no missing block
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


# -- snapshots


_Where = tuple[str | None, int, bytes]  # medium, group, key


class PublishedBlocks:
    """The blocks that consumers know: one event for each key, group and medium, and how many copies there are."""

    def __init__(self) -> None:
        self._blocks: dict[_Where, BlockStored] = {}
        self._copies = Counter[_Where]()

    def add(self, events: Iterable[KVCacheEvent]) -> None:
        """Record published events. O(blocks)."""
        for event in events:
            match event:
                case BlockStored():
                    for one in single_blocks(event):
                        key = event.medium, event.group_idx, one.block_hashes[0]
                        self._blocks[key] = one
                        self._copies[key] += 1
                case BlockRemoved():
                    for block in event.block_hashes:
                        key = event.medium, event.group_idx, block
                        self._copies[key] -= 1
                        if self._copies[key] <= 0:
                            del self._copies[key]
                            self._blocks.pop(key, None)
                case _:
                    self._blocks.clear()
                    self._copies.clear()

    def snapshot(self) -> list[BlockStored]:
        """Return one event for each block and copy, parents before children. O(blocks)."""
        found: list[BlockStored] = []
        seen: set[_Where] = set()
        for key in self._blocks:
            chain: list[BlockStored] = []
            at: _Where | None = key
            while at is not None and at in self._blocks and at not in seen:
                seen.add(at)
                block = self._blocks[at]
                chain += [block] * self._copies[at]
                parent = block.parent_block_hash
                at = None if parent is None else (*at[:2], parent)
            found += reversed(chain)
        return found
