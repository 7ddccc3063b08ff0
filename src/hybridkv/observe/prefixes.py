"""Filter the events of a cache: publish only the blocks from which a hit can resume.

The events of a cache report the blocks of each group alone. A hit needs all groups at one resume point: every block of
full attention before it, the windows that it reads, and the state of each recurrent layer. The blocks form a tree:

    position          a full block of tokens at its place in a prompt; its hash covers all tokens up to its end
    resume point      after a position, or inside the block that follows it
    backed            a position with a resume point at it or after it; only backed positions are published

    root --- position --- position --- position          the branch is published up to its last resume point
                             `--- position, resume point

A resume point inside a block counts for the full blocks before it. Each medium has a tree of its own, because a hit in
host memory needs all groups there. The smallest blocks of attention are the positions; larger ones end at some of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import lcm
from operator import attrgetter
from typing import Final

import numpy as np

from hybridkv.cache.journal import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventsDropped,
    KVCacheEvent,
    Medium,
    ResumePointRemoved,
    ResumePointStored,
)
from hybridkv.cache.policies.attention import ChunkSpan, WindowSpan
from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.specs import ChunkedLocalAttentionSpec, Keeps, KVCacheSpec, MambaSpec, SlidingWindowSpec, inner_of
from hybridkv.units import ceil_div

_Part = tuple[bytes, bytes]  # parent key, tokens inside the block (bytes of int32)
_TOKEN_BYTES: Final = 4
_INSTEAD: Final = "publish raw events instead (exact=False, --kv-events-form raw)"

PREFIXES: Final[tuple[str, int | None]] = "full_attention", None
"""Kind and window of exact events: a prefix that can be hit serves a request as full attention alone does."""

PREFIX_GROUP: Final = 0
"""The group of exact events. They report prefixes of all groups; routers credit group 0 or none (docs/events.md)."""


def single_blocks(event: BlockStored) -> Iterator[BlockStored]:
    """Yield ``event`` as one event for each block."""
    size, parent, extras = event.block_size, event.parent_block_hash, event.extra_keys
    for at, key in enumerate(event.block_hashes):
        yield BlockStored(
            block_hashes=(key,),
            parent_block_hash=parent,
            token_ids=event.token_ids[at * size : (at + 1) * size],
            block_size=size,
            lora_id=event.lora_id,
            lora_name=event.lora_name,
            medium=event.medium,
            extra_keys=None if extras is None else extras[at : at + 1],
            group_idx=event.group_idx,
            cache_salt=event.cache_salt,
        )
        parent = key


def without_resume_points(events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
    """Return ``events`` without the events of resume points, which never go over the wire."""
    return [event for event in events if not isinstance(event, ResumePointStored | ResumePointRemoved)]


class _Position:
    """A full block of tokens in the tree of prompts.

    Attributes:
        key: hash of the block; ``None`` for the root, which is before the first block.
        parent: position of the block before; ``None`` if no event has reported it.
        children: positions of the blocks that follow, by hash.
        tokens: token ids of the block; empty if no event has reported it.
        extras: extra keys of the block.
        request: adapter id, adapter name and salt of the request that stored the block first.
        copies: group -> number of stored copies of its block that ends here.
        parts: group -> stored resume points at or after this position -> extra keys.
        published: whether consumers know the block.
        depth: full blocks up to this position; valid if ``parent.whole``.
        whole: whether all blocks up to this position are known, and every full attention group has its own.
        runs: for each window group, the blocks up to this position that it has without a gap, at most ``_Tree._reach``.
        has_resume_point: whether a hit can resume at this position or inside the block that follows.
        backed: number of backed children, plus 1 for ``has_resume_point``.
    """

    __slots__ = (
        *("backed", "children", "copies", "depth", "extras", "has_resume_point"),
        *("key", "parent", "parts", "published", "request", "runs", "tokens", "whole"),
    )

    def __init__(self, key: bytes | None, runs: tuple[int, ...] = ()) -> None:
        self.key = key
        self.parent: _Position | None = None
        self.children: dict[bytes, _Position] = {}
        self.tokens: tuple[int, ...] = ()
        self.extras: tuple[object, ...] | None = None
        self.request: tuple[int | None, str | None, str | None] = None, None, None
        self.copies: dict[int, int] = {}
        self.parts: dict[int, dict[_Part, object]] = {}
        self.depth = 0
        self.published = self.whole = self.has_resume_point = False
        self.runs = runs
        self.backed = 0

    @property
    def is_unused(self) -> bool:
        """Whether nothing refers to the position any more."""
        return not (self.copies or self.parts or self.children or self.published or self.key is None)


class ExactEvents:
    """Filters the events of one cache.

    Args:
        config: the config of the cache's plan.
        drops: whether the manager's groups drop a block for EAGLE, though the config does not say so.

    Raises:
        ConfigError: the config has groups that drop blocks for EAGLE, neither full attention nor windows, or, in the
            natural layout, blocks of several sizes.
    """

    def __init__(self, config: KVCacheConfig, *, drops: bool = False) -> None:
        if drops or any(group.is_eagle_group for group in config.groups):
            raise ConfigError(f"exact events do not support groups that drop a block for EAGLE: {_INSTEAD}")
        self._config = config
        self._trees: dict[str | None, _Tree] = {Medium.GPU: _Tree(config, Medium.GPU)}

    def filter(self, events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
        """Return the events to publish for a batch: removals, then stored blocks with parents first.

        O(blocks of the events, and blocks that follow a stored or removed block of full attention).

        Args:
            events: the events of the cache since the last call, oldest first.
        """
        cleared: list[KVCacheEvent] = []
        for event in events:
            if isinstance(event, AllBlocksCleared | EventsDropped):
                self._trees, cleared = {Medium.GPU: _Tree(self._config, Medium.GPU)}, [event]
            else:
                if event.medium not in self._trees:
                    self._trees[event.medium] = _Tree(self._config, event.medium)
                self._trees[event.medium].read(event)
        return cleared + [change for tree in self._trees.values() for change in tree.changes()]


class _Tree:
    """The blocks of one medium, in a cache of the plan's ``config``."""

    def __init__(self, config: KVCacheConfig, medium: str | None) -> None:
        self._medium = medium
        kinds = [(number, inner_of(group.spec)) for number, group in enumerate(config.groups)]
        self._is_natural = config.slabs is not None
        _require_known(kinds, natural=self._is_natural)
        tokens = [(number, spec) for number, spec in kinds if spec.keeps in {Keeps.TOKENS, Keeps.WINDOW}]
        self._windows = [(number, span) for number, spec in tokens if (span := _span_of(spec)) is not None]
        self._states = [number for number, spec in kinds if isinstance(spec, MambaSpec)]
        self._block_size = min(spec.block_size for _, spec in tokens)
        states = () if self._is_natural else self._states
        self._blocks_of = {
            number: spec.block_size // self._block_size for number, spec in kinds if number in (*dict(tokens), *states)
        }
        windows = dict(self._windows)
        self._full = [(number, self._blocks_of[number]) for number, _ in tokens if number not in windows]
        self._step = lcm(*self._blocks_of.values())
        reach = max((one.window if isinstance(one, WindowSpan) else one.chunk for one in windows.values()), default=0)
        self._reach = ceil_div(reach, self._block_size) + self._step
        self._no_runs = (0,) * len(windows)
        self._root = _Position(None, self._no_runs)
        self._root.whole = True
        self._at: dict[bytes, _Position] = {}
        self._part_at: dict[tuple[int, _Part], _Position] = {}
        self._changed: dict[_Position, None] = {}
        self._touched: dict[_Position, None] = {}
        self._stale: dict[_Position, None] = {}

    def read(self, event: BlockStored | BlockRemoved | ResumePointStored | ResumePointRemoved) -> None:
        """Note an event of this medium."""
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                self._remove(event)
            case ResumePointStored():
                self._add_resume_point(event)
            case ResumePointRemoved():
                self._remove_resume_point(event)

    # -- the blocks and resume points of each group

    def _position(self, key: bytes | None) -> _Position:
        if key is None:
            return self._root
        found = self._at.get(key)
        if found is None:
            found = self._at[key] = _Position(key, self._no_runs)
        return found

    def _store(self, event: BlockStored) -> None:
        group, size, extras = event.group_idx, event.block_size, event.extra_keys
        request, before = (event.lora_id, event.lora_name, event.cache_salt), event.parent_block_hash
        for number, key in enumerate(event.block_hashes):
            at = self._position(key)
            if not at.tokens and size == self._block_size:
                at.tokens = event.token_ids[number * size : (number + 1) * size]
                at.extras = None if extras is None else extras[number]
                at.request = request
                at.parent = self._position(before)
                at.parent.children[key] = at
            copies = at.copies[group] = at.copies.get(group, 0) + 1
            if copies == 1:
                self._changed[at] = None
            before = key

    def _remove(self, event: BlockRemoved) -> None:
        group = event.group_idx
        for key in event.block_hashes:
            at = self._at.get(key)
            if at is None or group not in at.copies:
                continue
            at.copies[group] -= 1
            if not at.copies[group]:
                del at.copies[group]
                self._changed[at] = None

    def _add_resume_point(self, event: ResumePointStored) -> None:
        at, part = self._position(event.block_hash), (event.parent, event.partial_tokens)
        at.parts.setdefault(event.group_idx, {})[part] = event.extra_keys
        self._part_at[event.group_idx, part] = at
        self._touched[at] = self._stale[at] = None

    def _remove_resume_point(self, event: ResumePointRemoved) -> None:
        part = event.parent, event.partial_tokens
        at = self._part_at.pop((event.group_idx, part), None)
        if at is not None:
            del at.parts[event.group_idx][part]
            if not at.parts[event.group_idx]:
                del at.parts[event.group_idx]
            self._touched[at] = self._stale[at] = None

    def _follow_changes(self) -> None:
        """Update ``depth``, ``whole`` and ``runs`` of the positions that groups got or lost, and of those that follow.

        A run never grows past ``_reach``, so that a change reaches only the positions whose windows contain it. Mark
        all positions where a hit may now resume, or no longer.
        """
        changed, self._changed = self._changed, {}
        self._touched.update(changed)
        self._stale.update(changed)
        left = sorted(changed, key=attrgetter("depth"))
        # a parent has the resume points inside the block that follows it
        self._stale.update((at.parent, None) for at in left if at.parent is not None)
        left.reverse()
        waiting = set(left)
        while left:
            at = left.pop()
            parent = at.parent
            if parent is None or at not in waiting:
                continue
            waiting.remove(at)
            whole = parent.whole
            if whole:
                at.depth = parent.depth + 1
                for group, blocks in self._full:
                    if group not in at.copies and not at.depth % blocks:
                        whole = False
            runs = self._runs_of(at, parent) if self._windows else ()
            if whole != at.whole or runs != at.runs:
                at.whole, at.runs = whole, runs
                self._stale[at] = None
                left += at.children.values()
                waiting.update(at.children.values())

    def _runs_of(self, at: _Position, parent: _Position) -> tuple[int, ...]:
        runs = zip(self._windows, parent.runs, strict=True)
        return tuple(
            [
                min(run + 1, self._reach) if group in at.copies or at.depth % self._blocks_of[group] else 0
                for (group, _), run in runs
            ]
        )

    # -- where a hit can resume

    def _has_resume_point(self, at: _Position) -> bool:
        """Return whether a hit can resume at ``at`` or inside the block that follows it."""
        if not at.whole or at is self._root or at.depth % self._step:
            return False
        if self._has_states(at) and self._has_windows(at, 0):
            return True
        if not (self._is_natural and at.parts):
            return False
        return any(self._has_partial(at, part) for part in self._candidates(at))

    def _has_states(self, at: _Position) -> bool:
        """Return whether all recurrent groups have the state after ``at``."""
        if not self._is_natural:
            return all(group in at.copies for group in self._states)
        return all((at.key, b"") in at.parts.get(group, ()) for group in self._states)

    def _has_windows(self, at: _Position, partial_tokens: int) -> bool:
        """Return whether the window groups have the full blocks that a token ``partial_tokens`` after ``at`` reads."""
        end = at.depth * self._block_size + partial_tokens
        for (group, span), run in zip(self._windows, at.runs, strict=True):
            first = span.first_needed(end, self._blocks_of[group] * self._block_size) // self._block_size
            if at.depth - first > run:
                return False
        return True

    def _candidates(self, at: _Position) -> list[_Part]:
        """Return the resume points inside the next block that all state groups have; without such groups, all."""
        if self._states:
            first, *others = (at.parts.get(group, {}).keys() for group in self._states)
            found = [part for part in first if all(part in other for other in others)]
        else:
            found = [part for group in at.parts.values() for part in group]
        return [part for part in dict.fromkeys(found) if part[1]]

    def _has_partial(self, at: _Position, part: _Part) -> bool:
        """Return whether one prompt has the tokens of ``part`` in all attention groups.

        Each group may store blocks with more tokens after these; the blocks of all groups must agree.
        """
        parent, partial = part
        if not self._has_windows(at, len(partial) // _TOKEN_BYTES):
            return False
        extras = next(parts[part] for parts in at.parts.values() if part in parts)
        groups = [group for group, _ in (*self._full, *self._windows)]
        covers = [set(self._covers(at, group, parent, partial, extras)) for group in groups]
        if not all(covers):
            return False
        return any(
            all(any(longest.startswith(one) for one in cover) for cover in covers) for longest in set().union(*covers)
        )

    @staticmethod
    def _covers(at: _Position, group: int, parent: bytes, partial: bytes, extras: object) -> Iterator[bytes]:
        """Yield the tokens of the blocks of ``group`` after ``at`` that begin with ``partial``, as bytes."""
        for found, tokens in at.parts.get(group, ()):
            if found == parent and tokens.startswith(partial):
                yield tokens
        for child in at.children.values():
            if group in child.copies and child.extras == extras:
                tokens = np.array(child.tokens, np.int32).tobytes()
                if tokens.startswith(partial):
                    yield tokens

    # -- the events to publish

    def changes(self) -> list[KVCacheEvent]:
        """Return the events for all changes since the last call."""
        self._follow_changes()
        for at in self._stale:
            has_resume_point = self._has_resume_point(at)
            if has_resume_point != at.has_resume_point:
                at.has_resume_point = has_resume_point
                self._change_backing(at, 1 if has_resume_point else -1)
        self._stale.clear()
        removed, stored = list[bytes](), list[_Position]()
        for at in self._touched:
            if at.key is None or at.published == bool(at.backed):
                continue
            at.published = not at.published
            if at.published:
                stored.append(at)
            else:
                removed.append(at.key)
        touched, self._touched = self._touched, {}
        self._drop_unused(touched)
        gone = [BlockRemoved(tuple(removed), self._medium, PREFIX_GROUP)] if removed else []
        chains = _chains(sorted(stored, key=attrgetter("depth")))
        return [*gone, *(self._event_of(positions) for positions in chains)]

    def _event_of(self, positions: Sequence[_Position]) -> BlockStored:
        """Return one event for a chain of blocks."""
        first = positions[0]
        lora_id, lora_name, salt = first.request
        extras = tuple(one.extras for one in positions)
        return BlockStored(
            block_hashes=tuple(one.key for one in positions if one.key is not None),
            parent_block_hash=None if first.parent is None else first.parent.key,
            token_ids=tuple(chain.from_iterable(one.tokens for one in positions)),
            block_size=self._block_size,
            lora_id=lora_id,
            lora_name=lora_name,
            medium=self._medium,
            extra_keys=None if extras.count(None) == len(extras) else extras,
            group_idx=PREFIX_GROUP,
            cache_salt=salt,
        )

    def _change_backing(self, at: _Position, more: int) -> None:
        """Add ``more`` to ``backed`` of ``at``, and update its ancestors if it became backed or unbacked."""
        one: _Position | None = at
        while one is not None and one is not self._root:
            was, one.backed = one.backed, one.backed + more
            if bool(was) == bool(one.backed):
                return
            self._touched[one] = None
            one = one.parent

    def _drop_unused(self, positions: Iterable[_Position]) -> None:
        """Delete unused ``positions``, and parents that become unused by that."""
        for at in positions:
            one: _Position | None = at
            while one is not None and one.key in self._at and one.is_unused:
                del self._at[one.key]
                parent, one.parent = one.parent, None
                if parent is not None:
                    del parent.children[one.key]
                one = parent


def _span_of(spec: KVCacheSpec) -> WindowSpan | ChunkSpan | None:
    """Return the tokens that a layer of ``spec`` reads before its own; ``None`` for all."""
    match spec:
        case SlidingWindowSpec():
            return WindowSpan(spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            return ChunkSpan(spec.attention_chunk_size)
        case _:
            return None


def _chains(positions: Sequence[_Position]) -> list[list[_Position]]:
    """Split ``positions``, parents first, into chains of blocks without a branch."""
    chains, by_last = list[list[_Position]](), dict[_Position | None, list[_Position]]()
    for one in positions:
        found = by_last.pop(one.parent, None)
        if found is None:
            chains.append(found := [])
        found.append(one)
        by_last[one] = found
    return chains


def _require_known(kinds: Sequence[tuple[int, KVCacheSpec]], *, natural: bool) -> None:
    """Raise ConfigError if exact events do not support one of the groups."""
    if not any(spec.keeps is Keeps.TOKENS or isinstance(spec, SlidingWindowSpec) for _, spec in kinds):
        raise ConfigError(f"exact events need full attention or windows, and the plan has neither: {_INSTEAD}")
    in_tokens = {spec.block_size for _, spec in kinds if spec.keeps in {Keeps.TOKENS, Keeps.WINDOW}}
    sizes = in_tokens if natural else in_tokens | {spec.block_size for _, spec in kinds if spec.keeps is Keeps.STATE}
    least = min(in_tokens)
    if (natural and len(sizes) > 1) or any(size % least for size in sizes):
        found = " and ".join(map(str, sorted(sizes)))
        raise ConfigError(f"exact events do not support blocks of {found} tokens side by side: {_INSTEAD}")
