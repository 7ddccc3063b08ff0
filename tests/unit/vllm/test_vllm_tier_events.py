"""KV events of TierConnector's tiers without vLLM: what ranks report becomes blocks that are stored and removed."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

from engine_groups import Asked
from hybridkv.cache import BlockRemoved, BlockStored
from hybridkv.stores import GroupNeeds, PrefixRules
from hybridkv.stores.changes import Change
from hybridkv.vllm.tier_events import EPOCH_BYTES, MEDIA, Place, TierChange, TierEvents, WholeBlocks
from hybridkv.vllm.tier_requests import Find, TierRequests, key

RULES = PrefixRules((GroupNeeds(4), GroupNeeds(8, is_state=True)), unit=8, hash_tokens=4)
IDENTITY = bytes(range(16))
NOW = bytes(EPOCH_BYTES)
CPU, STORAGE = MEDIA["host"], MEDIA["disk"]


def asked(tokens: int = 25) -> Any:  # noqa: ANN401 - vLLM's
    return Asked("a", [1 + number % 90 for number in range(tokens)])


def salted(request: Any, start: int, end: int) -> tuple[object, ...] | None:  # noqa: ANN401 - as above
    assert end - start in {4, 8}
    return (request.cache_salt,) if request.cache_salt and not start else None


def made(ranks: int = 1) -> TierEvents:
    return TierEvents(RULES, ranks, salted)


def got(block_hash: bytes, group: int = 0, medium: str = CPU, epoch: bytes = NOW) -> TierChange:
    return TierChange(medium, Place(epoch, group, block_hash), is_there=True)


def lost(block_hash: bytes, group: int = 0, medium: str = CPU) -> TierChange:
    return TierChange(medium, Place(NOW, group, block_hash), is_there=False)


# -- workers


@pytest.mark.parametrize("epoch", [NOW, b"epoch  1"])
def test_changes_of_keys_become_changes_of_blocks(epoch: bytes) -> None:
    block = sha256(b"block").digest()
    keys = [key(IDENTITY, epoch, group, block) for group in range(300)]
    found = WholeBlocks([1] * 300).of(
        [
            Change("host", keys[1], is_there=True),
            Change("disk", keys[299], is_there=True),
            Change("store", keys[1], is_there=True),
            Change("host", keys[1], is_there=True),
            Change("host", keys[1], is_there=False),
            Change("host", keys[1], is_there=False),
        ]
    )
    assert found == [
        TierChange(CPU, Place(epoch, 1, block), is_there=True),
        TierChange(STORAGE, Place(epoch, 299, block), is_there=True),
        TierChange(CPU, Place(epoch, 1, block), is_there=False),
    ]


def test_block_is_whole_with_all_its_pieces() -> None:
    block = sha256(b"block").digest()
    whole = WholeBlocks([1, 3])
    pieces = [key(IDENTITY, NOW, 1, block) + number.to_bytes(2, "little") for number in range(3)]
    at = Place(NOW, 1, block)
    assert whole.of([Change("host", pieces[0], is_there=True), Change("host", pieces[2], is_there=True)]) == []
    assert whole.of([Change("host", pieces[0], is_there=True), Change("host", pieces[1], is_there=True)]) == [
        TierChange(CPU, at, is_there=True)
    ]
    assert whole.of([Change("host", pieces[1], is_there=False)]) == [TierChange(CPU, at, is_there=False)]
    assert whole.of([Change("host", pieces[0], is_there=False), Change("host", pieces[2], is_there=False)]) == []
    assert whole.of([Change("host", one, is_there=True) for one in pieces]) == [TierChange(CPU, at, is_there=True)]


# -- the scheduler


def test_stored_block_is_told_with_tokens_parent_and_keys() -> None:
    events, request = made(), asked()
    request.cache_salt, request.lora_request = "salt", SimpleNamespace(adapter_id=7, name="adapter")
    hashes, tokens = request.block_hashes, tuple(request.all_token_ids)
    for at in ((0, 0), (0, 2), (1, 1)):
        events.describe(request, *at)
    events.heard(NOW, 0, [got(hashes[0]), got(hashes[2], medium=STORAGE), got(hashes[3], 1)])
    adapter = 7, "adapter"
    assert events.take() == [
        BlockStored((hashes[0],), None, tokens[:4], 4, *adapter, CPU, (("salt",),), 0),
        BlockStored((hashes[2],), hashes[1], tokens[8:12], 4, *adapter, STORAGE, (None,), 0),
        BlockStored((hashes[3],), hashes[1], tokens[8:16], 8, *adapter, CPU, (None,), 1),
    ]
    assert events.take() == []


def test_block_is_stored_when_all_ranks_have_it_and_removed_when_one_lost_it() -> None:
    events, request = made(2), asked()
    one = request.block_hashes[0]
    events.describe(request, 0, 0)
    told = list[list[type]]()
    for rank, change in ((1, got(one)), (1, got(one)), (0, got(one)), (0, lost(one)), (1, lost(one)), (1, got(one)),
                         (0, got(one))):  # fmt: skip
        events.heard(NOW, rank, [change])
        told.append([type(event) for event in events.take()])
    assert told == [[], [], [BlockStored], [BlockRemoved], [], [], [BlockStored]]


def test_media_are_told_apart() -> None:
    events, request = made(), asked()
    one = request.block_hashes[0]
    events.describe(request, 0, 0)
    events.heard(NOW, 0, [got(one), got(one, medium=STORAGE), lost(one)])
    assert [event.medium for event in events.take()] == [CPU, STORAGE, CPU]
    events.heard(NOW, 0, [lost(one, medium=STORAGE)])
    assert events.take() == [BlockRemoved((one,), STORAGE, 0)]


def test_block_of_unknown_tokens_or_of_another_epoch_is_not_told() -> None:
    events, request = made(), asked()
    first, second, *_ = request.block_hashes
    events.describe(request, 0, 0)
    events.heard(NOW, 0, [got(second), lost(second), got(first, epoch=b"another."), got(first, group=1)])
    assert events.take() == []


def test_reset_removes_all_blocks() -> None:
    events, request = made(), asked()
    hashes = request.block_hashes
    events.describe(request, 0, 0)
    events.describe(request, 1, 0)
    events.heard(NOW, 0, [got(hashes[0]), got(hashes[1], 1)])
    events.take()
    events.reset()
    assert set(events.take()) == {BlockRemoved((hashes[0],), CPU, 0), BlockRemoved((hashes[1],), CPU, 1)}
    events.heard(b"epoch  1", 0, [lost(hashes[0]), got(hashes[0], epoch=b"epoch  1")])
    assert [type(event) for event in events.take()] == [BlockStored], "the block of the new epoch"


def test_scheduler_describes_what_it_stores_and_looks_for() -> None:
    events = made()
    requests, request = TierRequests(RULES, 1, remembers=True, events=events), asked()

    def told(places: Sequence[tuple[int, bytes]]) -> set[tuple[int, bytes]]:
        requests.changed({0: [got(one, group) for group, one in places]})
        return {(event.group_idx, event.block_hashes[0]) for event in events.take()}

    assert requests.matched(request, 8) == (None, False)
    step = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0, kv_connector_block_state=None)
    hashes = request.block_hashes
    assert requests.work(step, None).finds == [Find(0, 8, 24, hashes[2:6])]
    every = [*((0, one) for one in hashes), *((1, one) for one in hashes[1::2])]
    looked_for = {*((0, one) for one in hashes[2:6]), (1, hashes[3]), (1, hashes[5])}
    assert told(every) == looked_for
    requests.heard({0: [8]})
    assert requests.matched(request, 8) == (0, False)
    boundary = SimpleNamespace(boundary_state_offloads={"a": [(1, 61, 8)]})
    step = SimpleNamespace(
        num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1, kv_connector_block_state=boundary
    )
    blocks = SimpleNamespace(blocks=[[], []])
    requests.work(step, SimpleNamespace(get_blocks=lambda _: blocks))
    requests.changed({0: [lost(hashes[1], 1)]})
    assert told([(1, hashes[1])]) == {(1, hashes[1])}
    requests.reset()
    assert {type(event) for event in events.take()} == {BlockRemoved}
    assert told(every) == set(), "blocks of before the reset are found no more"
