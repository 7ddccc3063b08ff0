"""A cache whose events are published, and a consumer that knows nothing but the messages."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from time import sleep
from typing import Any

import msgspec
import zmq

from hybridkv.cache import KVCacheManager
from hybridkv.kv_events import SNAPSHOT, EventForm, KVEventPublisher
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Request
from hybridkv.testing import attention_config

BLOCK = 4
WAIT_MS = 20_000
Message = tuple[int, bytes]
SALTS = (None, "one", "two")


def cache_of(num_blocks: int = 24) -> tuple[KVCacheConfig, KVCacheManager]:
    config = attention_config(num_blocks, (BLOCK,))
    return config, KVCacheManager(config, 200, enable_kv_cache_events=True)


def publisher_of(config: KVCacheConfig, form: EventForm | None = None, **options: int) -> KVEventPublisher:
    """Of raw events."""
    anywhere = "tcp://127.0.0.1:0"
    return KVEventPublisher(config, anywhere, anywhere, form=form, exact=False, **options)  # type: ignore[arg-type]  # ints by name


def prompt(random: Random) -> list[int]:
    """One of few, which share beginnings."""
    family = random.randrange(4)
    return [family] * random.randrange(1, 30) + [9] * random.randrange(12)


def run(cache: KVCacheManager, random: Random, number: int, tokens: Sequence[int] | None = None) -> None:
    """A request comes, is computed, and goes; now and then everything is forgotten."""
    tokens = prompt(random) if tokens is None else tokens
    request = Request(str(number), tokens, hasher=cache.hasher, cache_salt=random.choice(SALTS))
    blocks, hit = cache.get_computed_blocks(request)
    assert cache.allocate_slots(request, len(tokens) - hit, hit, blocks) is not None
    request.num_computed_tokens = len(tokens)
    cache.free(request)
    if random.random() < 0.01:
        cache.reset_prefix_cache()


def looked_up(cache: KVCacheManager, tokens: Sequence[int], salt: str | None, number: int) -> int:
    """Tokens that the cache itself finds."""
    request = Request(f"asked {number}", tokens, hasher=cache.hasher, cache_salt=salt)
    _, hit = cache.get_computed_blocks(request)
    return hit


class Consumer:
    """Finds prompts by the tokens, parents and salts that messages tell; the hashes are names to it."""

    def __init__(self) -> None:
        self.last = -1
        self._copies: Counter[int | bytes] = Counter()
        self._found: dict[tuple[object, ...], int | bytes] = {}

    def hear(self, messages: Iterable[Message]) -> None:
        """In their order; a number that was heard before is passed over."""
        for number, batch in messages:
            if number > self.last:
                self._take(batch)
                self.last = number

    def begin_with(self, snapshot: Sequence[Message]) -> None:
        """All of them bear one number."""
        for number, batch in snapshot:
            self._take(batch)
            self.last = number

    def _take(self, batch: bytes) -> None:
        for event in msgspec.msgpack.decode(batch)[1]:
            match event["type"]:
                case "BlockStored":
                    self._stored(event)
                case "BlockRemoved":
                    self._copies.subtract(event["block_hashes"])
                case "AllBlocksCleared":
                    self._copies.clear()

    def _stored(self, event: dict[str, Any]) -> None:
        parent = event["parent_block_hash"]
        for at, key in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][at * BLOCK : (at + 1) * BLOCK]
            self._found[(parent, event.get("cache_salt"), *tokens)] = key
            self._copies[key] += 1
            parent = key

    def looked_up(self, tokens: Sequence[int], salt: str | None) -> int:
        """Tokens that a router would expect to be found: all but the last can be."""
        parent, hit = None, 0
        while hit + BLOCK < len(tokens):
            key = self._found.get((parent, salt, *tokens[hit : hit + BLOCK]))
            if key is None or self._copies[key] <= 0:
                break
            parent, hit = key, hit + BLOCK
        return hit


def subscribed(context: zmq.Context[Any], endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.SUB)
    socket.connect(endpoint)
    socket.subscribe(b"")
    return socket


def received(socket: zmq.Socket[bytes], wait_ms: int = 200) -> Iterator[Message]:
    """All that comes, until nothing does for a while."""
    while socket.poll(wait_ms):
        _, number, batch = socket.recv_multipart()
        yield int.from_bytes(number, "big"), batch


def asked(context: zmq.Context[Any], publisher: KVEventPublisher, what: bytes | int) -> list[Message]:
    """What the ROUTER answers. what: a number asks for the batches from there on."""
    assert publisher.replay_endpoint is not None
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(publisher.replay_endpoint)
    socket.send_multipart((b"", what.to_bytes(8, "big") if isinstance(what, int) else what))
    found: list[Message] = []
    while True:
        assert socket.poll(WAIT_MS)
        empty, _, number, batch = socket.recv_multipart()
        assert empty == b""
        if int.from_bytes(number, "big", signed=True) < 0:
            socket.close()
            return found
        found.append((int.from_bytes(number, "big"), batch))


def settled(publisher: KVEventPublisher, context: zmq.Context[Any]) -> int:
    """The number of the last batch, after all that wait were told."""
    while not publisher._queue.empty():
        sleep(0.001)
    return asked(context, publisher, SNAPSHOT)[-1][0]  # its thread answers after it told what it took
