"""Explain why tokens of a prompt were not found in the cache (docs/design/0029).

Each missed token has one reason, and the hit plus all misses is the prompt. In order of position:

    0 .. hit            found
      .. no_room        the look-up found more, but the copy had no memory
      .. block_edge     a hit if no block were dropped for EAGLE
      .. no_window      a hit if no layer read a window or chunk
      .. evicted        a hit if evicted states still existed
      .. no_state       a hit if no layer needed a state
      .. unpublished, evicted, other_salt, never_seen       one hash block at a time
      .. block_edge     after the last position where a hit may end
      .. last_token     always runs, for its logits

``Misses`` asks for the longest hit, then lifts one condition after the other; each gap is one reason.

``LostKeys`` remembers evicted keys. It numbers the losses in order of time:

    whole     group, key -> number              inside a block     group, parent key -> bytes of the tokens -> number
    number -> LossRecord

It has two generations: when the young one is full, it replaces the old one. A manager has both classes only if it was
made with ``remembered_losses``.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, groupby, islice
from typing import Final, NamedTuple

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.index import KnownTokens, add_known, leading_known, parent_key
from hybridkv.cache.journal import Begun, Fact, Journal, KeysLost
from hybridkv.cache.lookup import PrefixLookup
from hybridkv.cache.policies import Search
from hybridkv.cache.residents import Residents
from hybridkv.observe.block_times import BlockTimes
from hybridkv.request import Request

_TOKEN_BYTES: Final = 4
_LEAST_INTERVAL: Final = 128
"""Least tokens between states that an explanation suggests, chosen by hand: closer states cost more than they find."""


class MissReason(StrEnum):
    """Why a prompt token must be computed.

    Attributes:
        NEVER_SEEN: no earlier prompt starts this way, as far as the cache remembers.
        OTHER_SALT: an earlier prompt starts this way, but with another salt, adapter or encoder input.
        UNPUBLISHED: a running request computes it, or a request that began with it never published it.
        EVICTED: its block was evicted, or the state that would have made a hit reach it.
        NO_STATE: its keys and values are cached, but no recurrent state was saved at or after it.
        NO_WINDOW: keys, values and states are cached, but not the window or chunk that a later token reads.
        BLOCK_EDGE: a hit cannot end after it: it lies in a partial block, or in a block dropped for EAGLE.
        NO_ROOM: it was found, but there was no memory to copy its partial block or state.
        CACHING_OFF: the request does not read the prefix cache.
        LAST_TOKEN: the last token of a prompt always runs, for its logits.
    """

    NEVER_SEEN = "never_seen"
    OTHER_SALT = "other_salt"
    UNPUBLISHED = "unpublished"
    EVICTED = "evicted"
    NO_STATE = "no_state"
    NO_WINDOW = "no_window"
    BLOCK_EDGE = "block_edge"
    NO_ROOM = "no_room"
    CACHING_OFF = "caching_off"
    LAST_TOKEN = "last_token"  # noqa: S105 - of a prompt


@dataclass(frozen=True, slots=True)
class Miss:
    """Consecutive tokens of a prompt that were missed for one reason.

    Attributes:
        first: position of the first of these tokens.
        tokens: their count.
        reason: why they were missed.
        group: of EVICTED, the group that lost them.
        ago_s: of EVICTED, seconds since the earliest loss among them.
        more_bytes: of EVICTED, bytes of the blocks that lost their keys since that loss, itself included. This much
            more memory would have kept all of the tokens: at most this much where ``evicts_in_order`` holds for the
            manager, an estimate elsewhere. ``None`` if the cache does not remember all of the losses.
        idle_s: of EVICTED, seconds between the last use and the loss; ``None`` without ``block_times``.
        by: of EVICTED, the id of the request that got the memory; ``None`` if it went to running requests or to
            saved states.
        nearest_state: of NO_STATE, the position of the last saved state from which a hit could resume, or 0.
        interval: of NO_STATE, the widest N for which ``interval:N`` would have saved a state in the second half of
            the tokens; ``None`` if N would be below 128.
    """

    first: int
    tokens: int
    reason: MissReason
    group: int | None = None
    ago_s: float | None = None
    more_bytes: int | None = None
    idle_s: float | None = None
    by: str | None = None
    nearest_state: int | None = None
    interval: int | None = None

    @property
    def end(self) -> int:
        """Position after the last of the tokens."""
        return self.first + self.tokens

    @property
    def interval_state(self) -> int | None:
        """Position of the last state that ``interval`` would have saved among the tokens, if any."""
        return None if self.interval is None else self.end // self.interval * self.interval

    def joined_with(self, earlier: Miss) -> Miss | None:
        """Return one miss for both, or ``None`` if their reasons or groups differ or the tokens were evicted.

        Args:
            earlier: the miss that ends where this one begins.
        """
        if (self.reason, self.group) != (earlier.reason, earlier.group) or self.reason is MissReason.EVICTED:
            return None
        return replace(self, first=earlier.first, tokens=earlier.tokens + self.tokens)


class _Cut(NamedTuple):
    """The tokens from the end of the previous cut to before ``end``, and why they were missed, as in Miss.

    ``lost`` is the number of the earliest loss, in ``LostKeys``.
    """

    end: int
    reason: MissReason
    group: int | None = None
    lost: int | None = None
    nearest_state: int | None = None


class Misses:
    """Explains the misses of one cache.

    Args:
        residents: the requests that hold blocks, and the groups.
        lookup: the prefix look-up, asked again with weaker conditions.
        lost: the keys that were evicted, and the prompts that began.
        journal: facts about blocks; it is settled before each answer so that ``lost`` is up to date.
        hash_block: tokens of one hash block.
    """

    def __init__(
        self, residents: Residents, lookup: PrefixLookup, *, lost: LostKeys, journal: Journal, hash_block: int
    ) -> None:
        self._residents = residents
        self._lookup = lookup
        self._journal = journal
        self._lost = lost
        self._alignment = lookup.alignment
        self._hash_block = hash_block
        publishing = [group for group in residents.groups if group.kind.publishes]
        self._full = [group for group in publishing if group.policy.hits.downward_closed]
        self._groups = [*self._full, *(group for group in publishing if group not in self._full)]
        self._states = [group for group in self._groups if group.kind.in_place]
        self._others = len(self._groups) > len(self._full) + len(self._states)

    def forget(self) -> None:
        """Forget all evicted keys and all prompts. O(keys)."""
        self._journal.settle()
        self._lost.clear()

    def explain(self, request: Request, hit_tokens: int | None) -> tuple[Miss, ...]:
        """Return the misses of a prompt in order of position. O(hash blocks of the prompt, and its look-ups).

        Args:
            request: the request that has the prompt.
            hit_tokens: tokens that were found; with ``None``, the tokens that a look-up would find at this time.
        """
        self._journal.settle()
        now = self._journal.clock()
        at = self._lookup.find(request).tokens if hit_tokens is None else hit_tokens
        end = request.num_prompt_tokens
        misses: list[Miss] = []
        for cut in self._cuts(request, at):
            tokens = min(cut.end, end) - at
            if tokens <= 0:
                continue
            miss = self._miss(cut, at, tokens, now)
            joined = miss.joined_with(misses[-1]) if misses else None
            misses[len(misses) - (joined is not None) :] = [joined or miss]
            at += tokens
        return tuple(misses)

    @contextmanager
    def evicting_for(self, request: Request) -> Iterator[None]:
        """Record ``request`` as the cause of all evictions inside the context."""
        self._journal.settle()
        self._lost.by = request.request_id
        try:
            yield
        finally:
            self._journal.settle()
            self._lost.by = None

    def _miss(self, cut: _Cut, first: int, tokens: int, now: float) -> Miss:
        """Return the miss for ``tokens`` tokens from ``first`` on, with the details of ``cut``."""
        miss = Miss(first, tokens, cut.reason, cut.group)
        if cut.lost is not None:
            lost = self._lost.lost(cut.lost)
            more_bytes = self._lost.lost_bytes - lost.before_bytes
            return replace(miss, ago_s=now - lost.at_s, more_bytes=more_bytes, idle_s=lost.idle_s, by=lost.by)
        if cut.nearest_state is not None:
            return replace(miss, nearest_state=cut.nearest_state, interval=_interval(first, first + tokens))
        return miss

    def _cuts(self, request: Request, hit: int) -> Iterator[_Cut]:
        """Yield cuts by growing ``end``, from a hit of ``hit`` tokens to the end of the prompt."""
        last = request.num_tokens - 1
        if request.hasher is None or not request.reads_prefix_cache:
            yield _Cut(last, MissReason.CACHING_OFF)
            yield _Cut(last + 1, MissReason.LAST_TOKEN)
            return
        limit = last // self._alignment * self._alignment
        seen = self._seen(request)
        tokens = self._common(request, self._full, limit, last) if self._full else limit
        states = self._common(request, [*self._full, *self._states], tokens, last) if self._states else tokens
        windows = self._common(request, self._groups, states, last) if self._others else states
        if not self._full:  # without full attention, tokens count as seen up to the last published hash block
            tokens = max(min(seen * self._hash_block, tokens), windows)
            states = min(states, tokens)
        if hit < windows:
            yield _Cut(self._lookup.find(request).tokens, MissReason.NO_ROOM)
        yield _Cut(windows, MissReason.BLOCK_EDGE)
        yield _Cut(states, MissReason.NO_WINDOW)
        yield from self._lost_states(request, states, tokens)
        yield _Cut(tokens, MissReason.NO_STATE, nearest_state=states)
        yield from self._tokens(request, tokens, limit, seen)
        yield _Cut(last, MissReason.BLOCK_EDGE)
        yield _Cut(last + 1, MissReason.LAST_TOKEN)

    def _common(self, request: Request, groups: Sequence[CacheGroup], limit: int, last: int) -> int:
        """Return the longest hit up to ``limit`` that all of ``groups`` have, without dropping blocks for EAGLE."""
        asked = [(group, group.index, group.keys(request)) for group in groups]
        end, before, proven = limit, -1, 0
        while end and end != before:
            before = end
            for group, view, keys in asked:
                end = group.policy.hits.longest(
                    view, request, keys, Search(end, last, self._alignment, 0, proven)
                ).tokens
                proven = proven or end
        return end

    # -- tokens that are not cached

    def _seen(self, request: Request) -> int:
        """Return how many hash blocks end with the last one that any group has or had. O(hash blocks)."""
        hashes, most = request.hashes, 0
        for group in self._groups:
            lost = [table.get for table in self._lost.knows(group.number) if table]
            asked: list[Callable[[bytes], object]] = [group.index.get, *lost]
            for get in asked:
                rest = len(hashes) - most
                later = enumerate(map(get, reversed(hashes[most:])))
                most = len(hashes) - next((place for place, found in later if found is not None), rest)
        return most

    def _tokens(self, request: Request, first: int, end: int, seen: int) -> Iterator[_Cut]:
        """Yield cuts for the hash blocks from ``first`` to ``end``; a partial last block joins the cut before it."""
        size, hashes = self._hash_block, request.hashes
        if first >= end:
            return
        begins, cut = first // size, _Cut(0, MissReason.NEVER_SEEN)
        running = self._running(request, begins)
        if running > begins:
            cut = _Cut(min(running * size, end), MissReason.UNPUBLISHED)
        block = max(begins, running)
        for group, run in groupby(self._lacking(hashes, block, seen)):
            first, block = block, block + sum(1 for _ in run)
            cut_end = min(block * size, end)
            if group is None:
                cut = cut._replace(end=cut_end)
                continue
            lost = self._first_loss(group, hashes, first, block)
            if cut.group == group.number:
                cut = cut._replace(end=cut_end, lost=_earlier(cut.lost, lost))
            else:
                yield cut
                cut = _Cut(cut_end, MissReason.EVICTED, group.number, lost)
        yield cut
        known = max(running, seen, begins)
        for reason, blocks in (
            (MissReason.UNPUBLISHED, leading_known(self._lost.begun, hashes)),
            (MissReason.OTHER_SALT, min(leading_known(self._lost.plain, _plain_hashes(request)), len(hashes))),
            (MissReason.NEVER_SEEN, len(hashes)),
        ):
            if blocks > known:
                cut, known = _Cut(min(blocks * size, end), reason), blocks
                yield cut
        yield cut._replace(end=end)

    def _lacking(self, hashes: Sequence[bytes], first: int, end: int) -> list[CacheGroup | None]:
        """Return for each hash block from ``first`` to before ``end`` the first full attention group that lacks it."""
        lacking: list[CacheGroup | None] = [None] * max(end - first, 0)
        if not lacking:
            return lacking
        for group in reversed(self._full):
            stride = group.hashes_per_block
            begins = first // stride * stride
            found = list(map(group.index.get, hashes[begins + stride - 1 : end + stride - 1 : stride]))
            each = chain.from_iterable(zip(*[found] * stride, strict=True)) if stride > 1 else found
            for place, block in enumerate(islice(each, first - begins, end - begins)):
                if block is None:
                    lacking[place] = group
        return lacking

    def _first_loss(self, group: CacheGroup, hashes: Sequence[bytes], first: int, end: int) -> int | None:
        """Return the number of the first loss of these hash blocks, or ``None`` if a loss is not remembered."""
        stride = group.hashes_per_block
        keys = hashes[first // stride * stride + stride - 1 : end + stride - 1 : stride]
        young, old = self._lost.knows(group.number)
        numbers = [
            old.get(key) if number is None else number for key, number in zip(keys, map(young.get, keys), strict=True)
        ]
        known = [number for number in numbers if number is not None]
        return min(known) if len(known) == len(numbers) else None

    def _running(self, request: Request, first: int) -> int:
        """Return how many leading hash blocks another resident request shares, or 0 if not more than ``first``.

        The other request may not have published them yet. O(residents), and O(log blocks) for each that shares them.
        """
        most, mine = 0, request.hashes
        if len(mine) <= first:
            return most
        for other in self._residents:
            theirs = other.hashes
            if len(theirs) > first and theirs[first] == mine[first] and other is not request:
                most = max(most, _alike(mine, theirs))
        return most

    # -- evicted states

    def _lost_states(self, request: Request, first: int, end: int) -> Iterator[_Cut]:
        """Yield a cut at the last resume point where every group has or had a state. O(hash blocks in between)."""
        ends = {tokens for group in self._states for tokens in self._lost_ends(request, group, first, end)}
        for tokens in sorted(ends, reverse=True):
            lacking = [group for group in self._states if not _has_state(request, group, tokens)]
            lost = [self._lost_state(request, group, tokens) for group in lacking]
            if None not in lost:
                yield _Cut(tokens, MissReason.EVICTED, lacking[0].number, lost[0])
                return

    def _lost_ends(self, request: Request, group: CacheGroup, first: int, end: int) -> Iterator[int]:
        """Yield the positions from ``first`` + 1 to ``end`` at which ``group`` lost a state."""
        size = group.policy.block_size
        for column in range(first // size, end // size + 1):
            begins = column * size
            if (
                begins > first
                and begins % self._alignment == 0
                and self._lost_state(request, group, begins) is not None
            ):
                yield begins
            for tokens, _ in self._lost.inside(group.number, _parent(request, group, column)):
                ends = begins + len(tokens) // _TOKEN_BYTES
                aligned = ends % self._alignment == 0
                if aligned and first < ends <= end and request.token_ids(begins, ends).tobytes() == tokens:
                    yield ends

    def _lost_state(self, request: Request, group: CacheGroup, tokens: int) -> int | None:
        """Return the number of the loss of the state after ``tokens`` tokens, or ``None`` if it was not lost."""
        column, rest = divmod(tokens, group.policy.block_size)
        if not rest:
            return self._lost.whole(group.number, request.hashes[column * group.hashes_per_block - 1])
        own = request.token_ids(tokens - rest, tokens).tobytes()
        inside = self._lost.inside(group.number, _parent(request, group, column))
        return next((lost for known, lost in inside if known == own), None)


def _has_state(request: Request, group: CacheGroup, tokens: int) -> bool:
    """Return whether ``group`` has the state after ``tokens`` tokens."""
    column, rest = divmod(tokens, group.policy.block_size)
    if rest:
        return group.index.state_at(request, tokens) is not None
    return group.index.get(request.hashes[column * group.hashes_per_block - 1]) is not None


def _parent(request: Request, group: CacheGroup, column: int) -> bytes:
    """Return the key of the block before ``column``."""
    return parent_key(request, column * group.hashes_per_block, group.hashes_per_block)


def _interval(first: int, end: int) -> int | None:
    """Return the greatest power of two with a multiple in the second half of the tokens, or ``None`` if small."""
    least = first + (end - first + 1) // 2
    interval = 1 << end.bit_length()
    while end // interval * interval < max(least, 1):
        interval //= 2
    return interval if interval >= _LEAST_INTERVAL else None


def _earlier(one: int | None, other: int | None) -> int | None:
    """Return the earlier of two losses, or ``None`` if one is not remembered."""
    return None if one is None or other is None else min(one, other)


def _alike(mine: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """Return how many leading keys agree. O(log keys), since equal keys have equal keys before them."""
    low, high = 0, min(len(mine), len(theirs))
    while low < high:
        middle = (low + high) // 2
        if mine[middle] == theirs[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _plain_hashes(request: Request) -> Sequence[bytes]:
    """Return the hashes that the whole blocks of the prompt would have without extra keys."""
    if request.hasher is None:
        return ()
    size = request.hasher.block_size
    blocks = request.num_prompt_tokens // size
    if request.extra_keys(0, blocks) is None:
        return request.hashes[:blocks]
    return request.hasher.hash_chain(None, request.token_ids(0, blocks * size), None)


class LossRecord(NamedTuple):
    """One block that lost its key.

    Attributes:
        at_s: time of the loss, seconds on the cache's clock.
        before_bytes: bytes of all blocks that had lost their keys before.
        by: id of the request that got the memory; ``None`` for running requests and saved states.
        idle_s: seconds since the last use of the block; ``None`` without ``block_times``.
    """

    at_s: float
    before_bytes: int
    by: str | None = None
    idle_s: float | None = None


class _Generation:
    """Losses with consecutive numbers from ``first`` on.

    ``lost`` has one record for each batch of losses, and ``noted`` the number of each batch's first loss. ``idle_s``
    has one value for each loss.
    """

    def __init__(self, groups: int, first: int) -> None:
        self.first = first
        self.whole: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.inside: list[dict[bytes, dict[bytes, int]]] = [{} for _ in range(groups)]
        self.noted: list[int] = []
        self.lost: list[LossRecord] = []
        self.idle_s = array("d")


class LostKeys:
    """Remembers the keys that blocks lost and the hashes of prompts that began.

    Args:
        most: keys to remember of each kind; between half of ``most`` and ``most`` are kept.
        block_bytes: bytes of a block of each group.
        times: last uses of blocks, for ``LossRecord.idle_s``.

    Attributes:
        by: id of the request that evictions make room for at this time.
        lost_bytes: bytes of all blocks that lost their keys so far.
        begun: hashes of prompts that began.
        plain: hashes that these prompts would have without extra keys.
    """

    def __init__(self, most: int, block_bytes: Sequence[int], times: BlockTimes | None = None) -> None:
        self._most, self._most_young = most, max(most // 2, 1)
        self._block_bytes = tuple(block_bytes)
        self._times = times
        self.by: str | None = None
        self._next = 0
        self.lost_bytes = 0
        self.clear()

    def clear(self) -> None:
        """Forget all keys. Numbers of losses and ``lost_bytes`` go on."""
        self.begun, self.plain = KnownTokens(self._most), KnownTokens(self._most)
        self._young, self._old = (_Generation(len(self._block_bytes), self._next) for _ in range(2))

    def read(self, fact: Fact) -> None:
        """Record keys and partial keys that blocks lost, or the hashes of a prompt that began. O(keys)."""
        if isinstance(fact, Begun):
            add_known(self.begun, fact.request.hashes[: fact.num_hashes])
            add_known(self.plain, _plain_hashes(fact.request))
        if not isinstance(fact, KeysLost):
            return
        group, keys, partial_keys = fact.group, fact.keys, fact.partial_keys
        young, first, count = self._young, self._next, len(keys) + len(partial_keys)
        young.noted.append(first)
        young.lost.append(LossRecord(fact.now, self.lost_bytes, self.by))
        if self._times is not None:
            young.idle_s.frombytes(self._times.idle_s(fact.blocks, fact.now).tobytes())
        self.lost_bytes += self._block_bytes[group] * fact.num_blocks
        self._next += count
        young.whole[group].update(zip(keys, range(first, first + len(keys)), strict=True))
        for number, (parent, tokens) in enumerate(partial_keys, first + len(keys)):
            young.inside[group].setdefault(parent, {})[tokens] = number
        if self._next - young.first > self._most_young:
            self._old, self._young = young, _Generation(len(self._block_bytes), self._next)

    def whole(self, group: int, key: bytes) -> int | None:
        """Return the number of the loss of a block of ``group`` with ``key``, if it is remembered."""
        found = self._young.whole[group].get(key)
        return self._old.whole[group].get(key) if found is None else found

    def inside(self, group: int, parent: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield lost partial keys of ``group`` after ``parent``: bytes of the tokens and the loss's number."""
        for generation in (self._young, self._old):
            yield from generation.inside[group].get(parent, {}).items()

    def knows(self, group: int) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """Return the lost keys of ``group``, young and old generation, for look-ups of many keys."""
        return self._young.whole[group], self._old.whole[group]

    def lost(self, number: int) -> LossRecord:
        """Return the record of the remembered loss ``number``. O(log batches)."""
        generation = self._young if number >= self._young.first else self._old
        lost = generation.lost[bisect_right(generation.noted, number) - 1]
        return lost._replace(idle_s=generation.idle_s[number - generation.first]) if generation.idle_s else lost
