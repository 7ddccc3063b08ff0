"""KV events of TierConnector's tiers in the reference layout. It imports nothing of vLLM.

    scheduler   describes the blocks that it stores or looks for: tokens, parent, extra keys
    workers     report which blocks their stores got and lost, with the answers of a step
    scheduler   a block is stored when all ranks have it, and removed when one has lost it

Shared stores are left out: other engines write and evict there, and each engine finds what is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from hybridkv.cache import BlockRemoved, BlockStored, Medium
from hybridkv.stores.changes import Change
from hybridkv.stores.prefetch import PrefixRules

STORAGE: Final = "STORAGE"
"""vLLM's word for disks and stores."""
MEDIA: Final[Mapping[str, str]] = {"host": Medium.CPU, "disk": STORAGE}
_MOST_DESCRIBED: Final = 1 << 16
"""Blocks whose tokens are remembered: those that may be stored or come up soon."""
EPOCH_BYTES: Final = 8
IDENTITY_BYTES: Final = 16

ExtraKeys: TypeAlias = Callable[[Any, int, int], tuple[object, ...] | None]
"""(vLLM's Request, first token, end) -> what vLLM hashes beside these tokens."""


class Place(NamedTuple):
    """What a key names. epoch: changes when the cache is reset. block_hash: vLLM's, of the tokens up to its end."""

    epoch: bytes
    group: int
    block_hash: bytes


class TierChange(NamedTuple):
    """A block that a rank has from now on, or has lost.

    Attributes:
        medium: Of its store, in vLLM's words.
        place: The block.
        is_there: Whether it is there.
    """

    medium: str
    place: Place
    is_there: bool


def _place_of(block_key: bytes) -> Place:
    """Return what ``tier_requests.key`` made a key of."""
    rest = block_key[IDENTITY_BYTES:]
    group = int.from_bytes(rest[EPOCH_BYTES : EPOCH_BYTES + 2], "little")
    return Place(rest[:EPOCH_BYTES], group, rest[EPOCH_BYTES + 2 :])


class WholeBlocks:
    """Turns changes of pieces into changes of blocks, on a worker.

    Args:
        pieces: Number of pieces of a block of each group.
    """

    def __init__(self, pieces: Sequence[int]) -> None:
        self._pieces = tuple(pieces)
        self._there = dict[tuple[str, Place], set[int]]()

    def of(self, changes: Iterable[Change]) -> list[TierChange]:
        """Return the blocks that became whole, and those that are whole no longer. O(changes).

        Args:
            changes: Of all stores, in order.
        """
        found = list[TierChange]()
        for store, block_key, is_there in changes:
            medium = MEDIA.get(store)
            if medium is None:
                continue
            place, number = _place_of(block_key), 0
            most = self._pieces[place.group]
            if most > 1:
                place = place._replace(block_hash=place.block_hash[:-2])
                number = int.from_bytes(block_key[-2:], "little")
            there = self._there.setdefault((medium, place), set())
            was_whole = len(there) == most
            (there.add if is_there else there.discard)(number)
            if not there:
                del self._there[medium, place]
            if was_whole != (len(there) == most):
                found.append(TierChange(medium, place, is_there))
        return found


class _Described(NamedTuple):
    parent: bytes | None
    token_ids: tuple[int, ...]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[object, ...] | None


class TierEvents:
    """Makes events of the changes of all ranks, in the scheduler.

    Args:
        rules: Which prefixes can be resumed.
        ranks: Number of workers.
        extra_keys: What vLLM hashes beside tokens.
    """

    def __init__(self, rules: PrefixRules, ranks: int, extra_keys: ExtraKeys) -> None:
        self._rules, self._ranks, self._extra_keys = rules, ranks, extra_keys
        self._described = OrderedDict[tuple[int, bytes], _Described]()
        self._holders = dict[tuple[str, Place], set[int]]()
        self._reported = set[tuple[str, Place]]()
        self._events = list[BlockStored | BlockRemoved]()

    def describe(self, request: Any, group: int, column: int) -> None:  # noqa: ANN401 - vLLM's
        """Remember the tokens of a block that is to be stored or looked for. O(tokens of the block).

        Args:
            request: vLLM's Request.
            group: The group of the block.
            column: Its column.
        """
        size = self._rules.groups[group].block_tokens
        start, end = column * size, (column + 1) * size
        block_hash = self._rules.hash_of(request.block_hashes, 0, group, column)
        lora = request.lora_request
        self._described[group, block_hash] = _Described(
            self._rules.hash_of(request.block_hashes, 0, group, column - 1) if column else None,
            tuple(request.all_token_ids[start:end]),
            None if lora is None else lora.adapter_id,
            None if lora is None else lora.name,
            self._extra_keys(request, start, end),
        )
        self._described.move_to_end((group, block_hash))
        if len(self._described) > _MOST_DESCRIBED:
            self._described.popitem(last=False)

    def heard(self, epoch: bytes, rank: int, changes: Iterable[TierChange]) -> None:
        """Note changes of a rank. O(changes).

        Args:
            epoch: That of now; blocks of earlier ones are never found again.
            rank: Number of the rank.
            changes: What its stores got and lost, in order.
        """
        for medium, place, is_there in changes:
            if place.epoch != epoch:
                continue
            at = medium, place
            holders = self._holders.setdefault(at, set())
            (holders.add if is_there else holders.discard)(rank)
            if not holders:
                del self._holders[at]
            if len(holders) == self._ranks:
                self._report(medium, place)
            elif at in self._reported:
                self._reported.remove(at)
                self._events.append(BlockRemoved((place.block_hash,), medium, place.group))

    def _report(self, medium: str, place: Place) -> None:
        """Report a block that all ranks have, if its tokens are known."""
        told = self._described.get((place.group, place.block_hash))
        if told is None:
            return
        self._reported.add((medium, place))
        self._events.append(
            BlockStored(
                (place.block_hash,),
                told.parent,
                told.token_ids,
                self._rules.groups[place.group].block_tokens,
                told.lora_id,
                told.lora_name,
                medium,
                (told.extra_keys,),
                place.group,
            )
        )

    def reset(self) -> None:
        """Report the removal of all blocks: none is found again."""
        for medium, place in self._reported:
            self._events.append(BlockRemoved((place.block_hash,), medium, place.group))
        self._reported.clear()
        self._holders.clear()

    def take(self) -> list[BlockStored | BlockRemoved]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events
