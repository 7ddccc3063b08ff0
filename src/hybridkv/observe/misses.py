"""Why tokens of a prompt are not found: each has one reason, and with the hit they are all of it (docs/design/0029).

    0 ... hit | copies | drops | windows | states lost | states | tokens, hash block by hash block | edge | last

Each reason lifts one more condition: a hit could end at ``drops`` if nothing was dropped for EAGLE, at ``windows`` if
layers also read no window, at ``states`` if they also needed no state, and so on.

Keys that blocks have lost, for as long as that is remembered: what was evicted, when, and how much has been since.

whole     group, key -> number              inside a block     group, parent -> the bytes of its tokens -> number
number -> LossRecord                              losses are counted: what was lost earlier has a smaller number

Two generations: when the young one is full, the old one is forgotten. Nobody keeps it unless misses are explained
(docs/design/0029).
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
"""Tokens between states: closer ones cost more than they find."""


class MissReason(StrEnum):
    """Why a token must run, though a prompt may be there.

    NEVER_SEEN: no hash block with it, and all before it, was ever published, as far as is remembered. OTHER_SALT: but
    a prompt of other extra keys began so. UNPUBLISHED: a running request has it, and it is not there yet, or one that
    began never published it. EVICTED: it was there; for states: the state with which a hit would reach behind it.
    NO_STATE: its keys and values are there, and behind it no state was kept. NO_WINDOW: states, too, but nowhere behind
    it what layers with windows or chunks read. BLOCK_EDGE: a hit cannot end behind it, for it stands in a block's last
    part, or in what EAGLE drops. NO_ROOM: it was found, but what is copied was in the copy's way. CACHING_OFF: nothing
    is looked up for the request. LAST_TOKEN: it runs for its logits.
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
    """Tokens first .. first + tokens - 1 of a prompt, which have one reason.

    Of EVICTED: group, which lost them; of the first of them to go: ago_s, how long ago; idle_s, for how long nobody had
    come for it then, None without block_times; by, the request that room was made for, None where it was for requests
    that went on, or for states to keep; more_bytes, of blocks that lost their keys since, and with it. That much more
    memory would have them all: at most where blocks of one size go in the order of their last use
    (``KVCacheManager.evicts_in_order``), an estimate elsewhere. None where it is not remembered of all of them.

    Of NO_STATE: nearest_state, tokens behind which the last state is that could be begun with, 0 for none; interval,
    the widest that would have kept one behind the first half of them (``interval:N``), None for none.
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
        """Behind the last of them."""
        return self.first + self.tokens

    @property
    def interval_state(self) -> int | None:
        """Behind how many tokens ``interval`` would have kept the last state in them; None without one."""
        return None if self.interval is None else self.end // self.interval * self.interval

    def behind(self, other: Miss) -> Miss | None:
        """Both in one, where ``other``, right before it, has the same reason and neither group lost them."""
        if (self.reason, self.group) != (other.reason, other.group) or self.reason is MissReason.EVICTED:
            return None
        return replace(self, first=other.first, tokens=other.tokens + self.tokens)


class _Cut(NamedTuple):
    """Tokens before ``end`` that none before it has: a reason, and which group lost them.

    lost: the number of the first loss. nearest_state: see Miss.
    """

    end: int
    reason: MissReason
    group: int | None = None
    lost: int | None = None
    nearest_state: int | None = None


class Misses:
    """hash_block: tokens. lost: what was evicted, and began. journal: read before all answers."""

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
        self._states = [group for group in self._groups if group.states is not None]
        self._others = len(self._groups) > len(self._full) + len(self._states)

    def forget(self) -> None:
        """Nothing was seen."""
        self._journal.settle()
        self._lost.clear()

    def explain(self, request: Request, hit_tokens: int | None) -> tuple[Miss, ...]:
        """For what reason each token of its prompt behind ``hit_tokens`` is missed, in order.

        hit_tokens: None for what would be found now. O(hash blocks of the prompt, and its look-ups).
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
            joined = miss.behind(misses[-1]) if misses else None
            misses[len(misses) - (joined is not None) :] = [joined or miss]
            at += tokens
        return tuple(misses)

    @contextmanager
    def evicting_for(self, request: Request) -> Iterator[None]:
        """Note that what is evicted inside makes room for ``request``."""
        self._journal.settle()
        self._lost.by = request.request_id
        try:
            yield
        finally:
            self._journal.settle()
            self._lost.by = None

    def _miss(self, cut: _Cut, first: int, tokens: int, now: float) -> Miss:
        """``cut`` from ``first`` on, told in full."""
        miss = Miss(first, tokens, cut.reason, cut.group)
        if cut.lost is not None:
            lost = self._lost.lost(cut.lost)
            more_bytes = self._lost.lost_bytes - lost.before_bytes
            return replace(miss, ago_s=now - lost.at_s, more_bytes=more_bytes, idle_s=lost.idle_s, by=lost.by)
        if cut.nearest_state is not None:
            return replace(miss, nearest_state=cut.nearest_state, interval=_interval(first, first + tokens))
        return miss

    def _cuts(self, request: Request, hit: int) -> Iterator[_Cut]:
        """Behind ``hit`` tokens, in order; the last one is behind the prompt."""
        last = request.num_tokens - 1
        if request.hasher is None or not request.reads_prefix_cache:
            yield _Cut(last, MissReason.CACHING_OFF)
            yield _Cut(last + 1, MissReason.LAST_TOKEN)
            return
        edge = last // self._alignment * self._alignment
        seen = self._seen(request)
        tokens = self._common(request, self._full, edge, last) if self._full else edge
        states = self._common(request, [*self._full, *self._states], tokens, last) if self._states else tokens
        windows = self._common(request, self._groups, states, last) if self._others else states
        if not self._full:  # what was never seen has no state and no window either
            tokens = max(min(seen * self._hash_block, tokens), windows)
            states = min(states, tokens)
        if hit < windows:
            yield _Cut(self._lookup.find(request).tokens, MissReason.NO_ROOM)
        yield _Cut(windows, MissReason.BLOCK_EDGE)
        yield _Cut(states, MissReason.NO_WINDOW)
        yield from self._lost_states(request, states, tokens)
        yield _Cut(tokens, MissReason.NO_STATE, nearest_state=states)
        yield from self._tokens(request, tokens, edge, seen)
        yield _Cut(last, MissReason.BLOCK_EDGE)
        yield _Cut(last + 1, MissReason.LAST_TOKEN)

    def _common(self, request: Request, groups: Sequence[CacheGroup], limit: int, last: int) -> int:
        """The longest end up to ``limit`` that all of ``groups`` serve, nothing being dropped."""
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

    # -- tokens that are not there

    def _seen(self, request: Request) -> int:
        """Hash blocks up to the last one that is, or was, published in any group. O(hash blocks)."""
        hashes, most = request.hashes, 0
        for group in self._groups:
            lost = [table.get for table in self._lost.knows(group.number) if table]
            asked: list[Callable[[bytes], object]] = [group.index.get, *lost]
            for get in asked:
                behind = len(hashes) - most
                later = enumerate(map(get, reversed(hashes[most:])))
                most = len(hashes) - next((place for place, found in later if found is not None), behind)
        return most

    def _tokens(self, request: Request, first: int, end: int, seen: int) -> Iterator[_Cut]:
        """Of each hash block between; one that is too short for a key, as what lies before."""
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
            stop = min(block * size, end)
            if group is None:
                cut = cut._replace(end=stop)
                continue
            lost = self._first_loss(group, hashes, first, block)
            if cut.group == group.number:
                cut = cut._replace(end=stop, lost=_earlier(cut.lost, lost))
            else:
                yield cut
                cut = _Cut(stop, MissReason.EVICTED, group.number, lost)
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
        """Of hash blocks ``first`` .. ``end`` the first group, of those that read all, that is without it."""
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
        """The number of the first loss of hash blocks ``first`` .. ``end``; None where not all are remembered."""
        stride = group.hashes_per_block
        keys = hashes[first // stride * stride + stride - 1 : end + stride - 1 : stride]
        young, old = self._lost.knows(group.number)
        numbers = [
            old.get(key) if number is None else number for key, number in zip(keys, map(young.get, keys), strict=True)
        ]
        known = [number for number in numbers if number is not None]
        return min(known) if len(known) == len(numbers) else None

    def _running(self, request: Request, first: int) -> int:
        """Leading hash blocks that some running request has, published or not, if more than ``first``.

        O(residents), and O(log blocks) of those that have more.
        """
        most, mine = 0, request.hashes
        if len(mine) <= first:
            return most
        for other in self._residents:
            theirs = other.hashes
            if len(theirs) > first and theirs[first] == mine[first] and other is not request:
                most = max(most, _alike(mine, theirs))
        return most

    # -- states that were there

    def _lost_states(self, request: Request, first: int, end: int) -> Iterator[_Cut]:
        """Up to the last end at which every group has, or had, a state. O(hash blocks between)."""
        ends = {tokens for group in self._states for tokens in self._lost_ends(request, group, first, end)}
        for tokens in sorted(ends, reverse=True):
            lacking = [group for group in self._states if not _has_state(request, group, tokens)]
            lost = [self._lost_state(request, group, tokens) for group in lacking]
            if None not in lost:
                yield _Cut(tokens, MissReason.EVICTED, lacking[0].number, lost[0])
                return

    def _lost_ends(self, request: Request, group: CacheGroup, first: int, end: int) -> Iterator[int]:
        """Token counts in first + 1 .. end after which ``group`` had a state that it lost."""
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
        """The number of the loss of the state after ``tokens`` tokens, if it was lost."""
        column, rest = divmod(tokens, group.policy.block_size)
        if not rest:
            return self._lost.whole(group.number, request.hashes[column * group.hashes_per_block - 1])
        own = request.token_ids(tokens - rest, tokens).tobytes()
        inside = self._lost.inside(group.number, _parent(request, group, column))
        return next((lost for known, lost in inside if known == own), None)


def _has_state(request: Request, group: CacheGroup, tokens: int) -> bool:
    """Whether ``group`` has the state after ``tokens`` tokens."""
    column, rest = divmod(tokens, group.policy.block_size)
    if rest:
        return group.index.state_at(request, tokens) is not None
    return group.index.get(request.hashes[column * group.hashes_per_block - 1]) is not None


def _parent(request: Request, group: CacheGroup, column: int) -> bytes:
    return parent_key(request, column * group.hashes_per_block, group.hashes_per_block)


def _interval(first: int, end: int) -> int | None:
    """The greatest power of two that has a multiple in the second half of first + 1 .. end; None where it is small."""
    least = first + (end - first + 1) // 2
    interval = 1 << end.bit_length()
    while end // interval * interval < max(least, 1):
        interval //= 2
    return interval if interval >= _LEAST_INTERVAL else None


def _earlier(one: int | None, other: int | None) -> int | None:
    """What went first; None where that is not known of both."""
    return None if one is None or other is None else min(one, other)


def _alike(mine: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """How many leading keys are the same: with a key, all before it are."""
    low, high = 0, min(len(mine), len(theirs))
    while low < high:
        middle = (low + high) // 2
        if mine[middle] == theirs[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _plain_hashes(request: Request) -> Sequence[bytes]:
    """Keys of the whole blocks of its prompt, as they were without extra keys."""
    if request.hasher is None:
        return ()
    size = request.hasher.block_size
    blocks = request.num_prompt_tokens // size
    if request.extra_keys(0, blocks) is None:
        return request.hashes[:blocks]
    return request.hasher.hash_chain(None, request.token_ids(0, blocks * size), None)


class LossRecord(NamedTuple):
    """at_s: on the cache's clock. before_bytes: of all blocks that had lost their keys before.

    by: the request that room was made for, None where it was for requests that went on. idle_s: how long nobody had
    come for it, None where that is not counted.
    """

    at_s: float
    before_bytes: int
    by: str | None = None
    idle_s: float | None = None


class _Generation:
    """first: number of its first loss. noted: of each note, the number of its first. idle_s: of each loss."""

    def __init__(self, groups: int, first: int) -> None:
        self.first = first
        self.whole: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.inside: list[dict[bytes, dict[bytes, int]]] = [{} for _ in range(groups)]
        self.noted: list[int] = []
        self.lost: list[LossRecord] = []
        self.idle_s = array("d")


class LostKeys:
    """Remembers what blocks lost, and which prompts began: of each kind ``most`` keys, at least half of them.

    block_bytes: of each group. times: when blocks were used. For reading: lost_bytes, of blocks that lost their keys so
    far; begun, keys of prompts that began; plain, the keys of their tokens alone. by: who room is made for now.
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
        """Forget all of it."""
        self.begun, self.plain = KnownTokens(self._most), KnownTokens(self._most)
        self._young, self._old = (_Generation(len(self._block_bytes), self._next) for _ in range(2))

    def read(self, fact: Fact) -> None:
        """Note the keys and partial keys that blocks lost, or that a prompt began. O(keys)."""
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
        """The number of the loss of a block of ``group`` with that key."""
        found = self._young.whole[group].get(key)
        return self._old.whole[group].get(key) if found is None else found

    def inside(self, group: int, parent: bytes) -> Iterator[tuple[bytes, int]]:
        """The bytes of the tokens behind ``parent`` that a block of ``group`` began with, the last ones first."""
        for generation in (self._young, self._old):
            yield from generation.inside[group].get(parent, {}).items()

    def knows(self, group: int) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """Keys of ``group``, to look up many."""
        return self._young.whole[group], self._old.whole[group]

    def lost(self, number: int) -> LossRecord:
        """What is known of a loss that is remembered. O(log notes)."""
        of = self._young if number >= self._young.first else self._old
        lost = of.lost[bisect_right(of.noted, number) - 1]
        return lost._replace(idle_s=of.idle_s[number - of.first]) if of.idle_s else lost
