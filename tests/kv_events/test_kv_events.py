"""Consumers of published events find what the cache finds: from the first message, behind lost ones, and late."""

from contextlib import suppress
from random import Random
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import msgspec
import pytest
import zmq
from events_support import (
    BLOCK,
    SALTS,
    WAIT_MS,
    Consumer,
    asked,
    cache_of,
    looked_up,
    prompt,
    publisher_of,
    received,
    run,
    settled,
    subscribed,
)

from hybridkv.cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.kv_events import SNAPSHOT, EventForm, KVEventPublisher
from hybridkv.kv_events.publisher import PublishedBlocks

FLOODED_MS = 3_000


def same_answers(cache: KVCacheManager, consumer: Consumer, random: Random, count: int) -> None:
    hits = 0
    for number in range(count):
        tokens, salt = prompt(random), random.choice(SALTS)
        found = looked_up(cache, tokens, salt, number)
        assert consumer.looked_up(tokens, salt) == found, (tokens, salt)
        hits += found > 0
    assert hits > count / 20


def publish_runs(cache: KVCacheManager, publisher: KVEventPublisher, random: Random, runs: int) -> None:
    for number in range(runs):
        run(cache, random, number)
        publisher.publish(cache.take_events())


@pytest.mark.parametrize("whole", [False, True])
def test_event_consumers_match_the_cache(context: zmq.Context[Any], whole: bool) -> None:
    random = Random(7)
    config, cache = cache_of()
    with (
        publisher_of(config, EventForm(whole_hashes=whole)) as publisher,
        subscribed(context, publisher.endpoint) as socket,
    ):
        steady, lossy, late = Consumer(), Consumer(), Consumer()
        publish_runs(cache, publisher, random, 150)
        last = settled(publisher, context)
        heard = list(received(socket))
        # who subscribed while the first were sent asks for those
        steady.hear(asked(context, publisher, 0))
        same_answers(cache, steady, random, 200)
        assert [number for number, _ in heard] == [*range(heard[0][0], last + 1)]
        assert steady.last == last

        kept = [one for one in heard if one[0] % 7 == 3][:2]
        lossy.hear(one for one in asked(context, publisher, 0) if one[0] < kept[0][0])
        lossy.hear(asked(context, publisher, lossy.last + 1))
        same_answers(cache, lossy, random, 100)

        late.begin_with(asked(context, publisher, SNAPSHOT))
        same_answers(cache, late, random, 200)
        assert late.last == last
        for number in range(40):
            run(cache, random, 1000 + number)
            publisher.publish(cache.take_events())
        settled(publisher, context)
        for consumer in (steady, late):
            consumer.hear(asked(context, publisher, consumer.last + 1))
            same_answers(cache, consumer, random, 100)


def test_replay_of_dropped_batches_gets_a_snapshot(context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.kv_events.publisher._SNAPSHOT_BLOCKS", 5)
    random = Random(3)
    config, cache = cache_of()
    with publisher_of(config, kept_batches=3) as publisher:
        publish_runs(cache, publisher, random, 60)
        last = settled(publisher, context)
        for first, most in ((0, 10), (last - 4, 5), (last - 3, 4), (last - 2, 3)):
            batches = asked(context, publisher, first)
            numbers = [number for number, _ in batches]
            assert numbers == sorted(set(numbers))
            assert (numbers[0] >= first, numbers[-1], len(numbers) <= most) == (True, last, True)
            if first < last - 2:  # three are kept
                consumer = Consumer()
                consumer.hear(batches)
                same_answers(cache, consumer, random, 100)
        assert len(asked(context, publisher, 0)) > 2


def test_full_event_queue_drops_and_sends_a_reset(context: zmq.Context[Any]) -> None:
    config, cache = cache_of()
    random = Random(1)
    with publisher_of(config, max_queued=2) as publisher:
        held, go_on, first = Event(), Event(), settled(publisher, context)
        add = publisher._published.add

        def slow(events: Any) -> None:  # noqa: ANN401  # as add
            held.set()
            assert go_on.wait(WAIT_MS / 1000)
            add(events)

        publisher._published.add = slow  # type: ignore[method-assign]  # the thread is held up
        for number in range(6):
            run(cache, random, number, [100 + number] * 9)
            publisher.publish(cache.take_events())
            assert held.wait(WAIT_MS / 1000)
        assert publisher.dropped == 3
        go_on.set()
        run(cache, random, 7, [5] * 9)
        settled(publisher, context)
        publisher.publish(cache.take_events())
        settled(publisher, context)
        batches = asked(context, publisher, 0)
        assert [number - first for number, _ in batches] == [0, 1, 2, 3, 7]
        kinds = [[event["type"] for event in msgspec.msgpack.decode(batch)[1]] for _, batch in batches]
        assert kinds[0] == ["AllBlocksCleared"]
        assert kinds[-1][0] == "AllBlocksCleared"
        assert all("AllBlocksCleared" not in one for one in kinds[1:-1])


def test_new_subscription_is_told_all_blocks_also_by_a_successor(context: zmq.Context[Any]) -> None:
    random, (config, cache) = Random(1), cache_of()
    with publisher_of(config) as first:
        early = subscribed(context, first.endpoint)
        assert len(list(received(early, 1500))) == 1
        publish_runs(cache, first, random, 60)
        last = settled(first, context)
        with subscribed(context, first.endpoint) as socket:
            assert socket.poll(WAIT_MS)
            late = Consumer()
            late.hear(received(socket))
        same_answers(cache, late, random, 200)
        heard = list(received(early))
        assert [number for number, _ in heard[-2:]] == [last, last + 1] == [last, late.last]
        steady = Consumer()
        steady.hear(heard)
        same_answers(cache, steady, random, 200)
        endpoint = first.endpoint
    _, cache = cache_of()
    with KVEventPublisher(config, endpoint, exact=False) as second:  # a restarted process, whose cache is empty
        steady.hear(received(early, 1500))
        assert steady.looked_up([0] * 9, None) == 0
        publish_runs(cache, second, random, 60)
        steady.hear(received(early))
        same_answers(cache, steady, random, 200)
    early.close(linger=0)


def test_event_message_has_the_documented_fields(context: zmq.Context[Any]) -> None:
    config, _ = cache_of()
    key, other = bytes(range(32)), bytes(range(32, 64))
    stored = BlockStored((key,), other, (1, 2, 3, 4), BLOCK, extra_keys=(("one",),), cache_salt="one")
    removed = BlockRemoved((key,))
    integer = int.from_bytes(key[24:], "big")

    def published_events(form: EventForm) -> Any:  # noqa: ANN401  # of any form
        with publisher_of(config, form) as publisher:
            publisher.publish([stored, removed, AllBlocksCleared()])
            settled(publisher, context)
            _, (_, batch) = asked(context, publisher, 0)
            seconds, events, rank = msgspec.msgpack.decode(batch)
            assert seconds > 1e9
            assert rank == 0
            return events

    first, second, third = published_events(EventForm())
    assert first == {
        "type": "BlockStored",
        "block_hashes": [integer],
        "parent_block_hash": int.from_bytes(other[24:], "big"),
        "token_ids": [1, 2, 3, 4],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["one"]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
        "cache_salt": "one",
    }
    assert second == {"type": "BlockRemoved", "block_hashes": [integer], "medium": "GPU", "group_idx": 0}
    assert third == {"type": "AllBlocksCleared"}
    first, second, third = published_events(EventForm(as_arrays=True, whole_hashes=True))
    assert first[:5] == ["BlockStored", [key], other, [1, 2, 3, 4], BLOCK]
    assert first[8:] == [[["one"]], 0, "full_attention", None]
    assert (second, third) == (["BlockRemoved", [key], "GPU", 0], ["AllBlocksCleared"])


def test_snapshot_lists_parents_first_and_every_copy() -> None:
    published = PublishedBlocks()
    a, b, c = (bytes([one]) * 32 for one in range(3))
    published.add([BlockStored((a, b), None, tuple(range(8)), BLOCK), BlockRemoved((a,))])
    published.add([BlockStored((c,), b, (8, 9, 10, 11), BLOCK), BlockStored((a,), None, (0, 1, 2, 3), BLOCK)])
    published.add([BlockStored((c,), b, (8, 9, 10, 11), BLOCK)])
    keys = [one.block_hashes[0] for one in published.snapshot()]
    assert keys == [a, b, c, c]
    published.add([BlockRemoved((c,))])
    assert [one.block_hashes[0] for one in published.snapshot()] == [a, b, c]
    published.add([AllBlocksCleared()])
    assert published.snapshot() == []


def test_invalid_replay_request_gets_an_end_marker(context: zmq.Context[Any]) -> None:
    config, _ = cache_of()
    with publisher_of(config) as publisher:
        for what in (b"", b"nonsense!", (2**63).to_bytes(8, "big")):
            assert asked(context, publisher, what) == []


def test_flood_of_replay_requests_keeps_the_stream_running(context: zmq.Context[Any]) -> None:
    random, ended = Random(5), Event()
    config, cache = cache_of()

    def flood(endpoint: str) -> None:
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDTIMEO, 50)
            socket.connect(endpoint)
            while not ended.is_set():
                with suppress(zmq.Again):
                    socket.send_multipart((b"", SNAPSHOT))

    with publisher_of(config) as publisher, subscribed(context, publisher.endpoint) as socket:
        assert publisher.replay_endpoint is not None
        threads = [Thread(target=flood, args=(publisher.replay_endpoint,)) for _ in range(2)]
        publish_runs(cache, publisher, random, 60)
        settled(publisher, context)
        for _ in received(socket):
            pass
        try:
            for thread in threads:
                thread.start()
            end = monotonic() + WAIT_MS / 1000
            while not publisher.unanswered and monotonic() < end:
                sleep(0.01)
            assert publisher.unanswered  # the flood is there
            for number in range(20):
                run(cache, random, 1000 + number, [100 + number] * 9)
                publisher.publish(cache.take_events())
                assert socket.poll(FLOODED_MS), f"batch {number} was not published"
                last = int.from_bytes(socket.recv_multipart()[1], "big")
            snapshot = asked(context, publisher, SNAPSHOT)
            assert snapshot[-1][0] == last
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def test_replay_request_above_the_limit_is_not_read(context: zmq.Context[Any]) -> None:
    config, _ = cache_of()
    with publisher_of(config) as publisher, context.socket(zmq.DEALER) as socket:
        assert publisher.replay_endpoint is not None
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(publisher.replay_endpoint)
        socket.send_multipart((b"", bytes(1 << 20)))
        assert not socket.poll(200)
        assert len(asked(context, publisher, SNAPSHOT)) == 1


def test_invalid_endpoint_is_rejected() -> None:
    config, _ = cache_of()
    with publisher_of(config) as publisher:
        for endpoint in ("nonsense", "tcp://192.0.2.1:5", publisher.endpoint):
            with pytest.raises(ConfigError, match="cannot publish events at"):
                KVEventPublisher(config, endpoint)
            with pytest.raises(ConfigError, match="cannot publish events at"):
                KVEventPublisher(config, "tcp://127.0.0.1:0", endpoint)
    publisher.close()
