"""Filter the events of a cache: publish only the blocks from which a hit can resume.

The events of a cache report the blocks of each group alone. A hit needs all groups at one resume point: every block of
full attention before it, the windows that it reads, and the state of each recurrent layer. The blocks form a tree:

    position          a full block of tokens at its place in a prompt; its hash covers all tokens up to its end
    resume point      after a position, or inside the block that follows it
    backed            a position with a resume point at it or after it; only backed positions are published

    root --- position --- position --- position          the branch is published up to its last resume point
                             `--- position, resume point

A resume point inside a block counts for the full blocks before it. Each medium has a tree of its own, because a hit in
host memory needs all groups there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from operator import itemgetter
from typing import Final

import numpy as np

from hybridkv.cache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventsDropped,
    KVCacheEvent,
    Medium,
    ResumePointRemoved,
    ResumePointStored,
)
from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    Keeps,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from hybridkv.units import ceil_div

_Part = tuple[bytes, bytes]  # parent key, tokens inside the block (bytes of int32)
_TOKEN_BYTES: Final = 4


def single_blocks(event: BlockStored) -> Iterator[BlockStored]:
    """Yield ``event`` as one event for each block."""
    size, parent = event.block_size, event.parent_block_hash
    for at, key in enumerate(event.block_hashes):
        yield replace(
            event,
            block_hashes=(key,),
            parent_block_hash=parent,
            token_ids=event.token_ids[at * size : (at + 1) * size],
            extra_keys=None if event.extra_keys is None else event.extra_keys[at : at + 1],
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
        blocks: group -> event that stored its block.
        copies: group -> number of stored copies.
        parts: group -> stored resume points at or after this position -> extra keys.
        published: group -> hash of its published block.
        depth: full blocks up to this position; valid if ``whole``.
        whole: whether every full attention group has all blocks up to this position.
        has_resume_point: whether a hit can resume at this position or inside the block that follows.
        backed: number of backed children, plus 1 for ``has_resume_point``.
    """

    __slots__ = (
        *("backed", "blocks", "children", "copies", "depth", "has_resume_point"),
        *("key", "parent", "parts", "published", "whole"),
    )

    def __init__(self, key: bytes | None) -> None:
        self.key = key
        self.parent: _Position | None = None
        self.children: dict[bytes, _Position] = {}
        self.blocks: dict[int, BlockStored] = {}
        self.copies: dict[int, int] = {}
        self.parts: dict[int, dict[_Part, object]] = {}
        self.published: dict[int, bytes] = {}
        self.depth = 0
        self.whole = self.has_resume_point = False
        self.backed = 0

    @property
    def is_unused(self) -> bool:
        """Whether nothing refers to the position any more."""
        return self.key is not None and not (self.blocks or self.parts or self.children or self.published)


class ExactEvents:
    """Filters the events of one cache.

    Args:
        config: the config of the cache's plan.

    Raises:
        ConfigError: the config has chunked attention, groups that drop blocks for EAGLE, no full attention, or blocks
            of several sizes.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self._config = config
        self._trees: dict[str | None, _Tree] = {Medium.GPU: _Tree(config, Medium.GPU)}

    @property
    def changes_nothing(self) -> bool:
        """Whether the config has full attention alone, so that a hit can resume at every block."""
        return self._trees[Medium.GPU].changes_nothing

    def filter(self, events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
        """Return the events to publish for a batch: removals, then stored blocks with parents first.

        O(blocks of the events, and blocks that follow a stored or removed block of full attention).

        Args:
            events: the events of the cache since the last call, oldest first.
        """
        if self.changes_nothing:
            return without_resume_points(events)
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
    """The blocks of one medium.

    Args:
        config: the config of the cache's plan.
        medium: where the blocks are.

    Attributes:
        changes_nothing: whether the config has full attention alone.
    """

    def __init__(self, config: KVCacheConfig, medium: str | None) -> None:
        self._medium = medium
        kinds = [(number, kind_of(group.spec)) for number, group in enumerate(config.groups)]
        tokens = [(number, spec) for number, spec in kinds if spec.keeps in {Keeps.TOKENS, Keeps.WINDOW}]
        self._windows = {n: s.sliding_window for n, s in tokens if isinstance(s, SlidingWindowSpec)}
        self._full = [number for number, _ in tokens if number not in self._windows]
        self._states = [number for number, spec in kinds if isinstance(spec, MambaSpec)]
        self._is_natural = config.slabs is not None
        chunked = any(isinstance(spec, ChunkedLocalAttentionSpec) for _, spec in kinds)
        self.changes_nothing = not (self._windows or self._states or chunked)
        if not self.changes_nothing:
            _require_known(config, kinds, natural=self._is_natural)
        self._block_size = tokens[0][1].block_size if tokens else 1
        self._root = _Position(None)
        self._root.whole = True
        self._at: dict[bytes, _Position] = {}
        self._part_at: dict[tuple[int, _Part], _Position] = {}
        self._touched: dict[_Position, None] = {}
        self._stale: dict[_Position, None] = {}

    def read(self, event: BlockStored | BlockRemoved | ResumePointStored | ResumePointRemoved) -> None:
        """Note an event of this medium."""
        match event:
            case BlockStored():
                for one in single_blocks(event):
                    self._store(one)
            case BlockRemoved():
                for key in event.block_hashes:
                    self._remove(event.group_idx, key)
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
            found = self._at[key] = _Position(key)
        return found

    def _store(self, block: BlockStored) -> None:
        at, group = self._position(block.block_hashes[0]), block.group_idx
        if at.parent is None:
            at.parent = self._position(block.parent_block_hash)
            at.parent.children[block.block_hashes[0]] = at
        at.copies[group] = at.copies.get(group, 0) + 1
        if at.copies[group] == 1:
            at.blocks[group] = block
            self._note(at)

    def _remove(self, group: int, key: bytes) -> None:
        at = self._at.get(key)
        if at is None or group not in at.copies:
            return
        at.copies[group] -= 1
        if not at.copies[group]:
            del at.copies[group], at.blocks[group]
            self._note(at)

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

    def _note(self, at: _Position) -> None:
        """Record that a group got or lost its block at ``at``, and mark all resume points that depend on it."""
        self._touched[at] = self._stale[at] = None
        if at.parent is not None:
            self._stale[at.parent] = None  # it has the resume points inside this block
        self._follow_whole(at)
        reach = max((_columns(window, self._block_size) for window in self._windows.values()), default=0)
        level = [at]
        for _ in range(reach):
            level = [child for one in level for child in one.children.values()]
            self._stale.update(zip(level, repeat(None)))

    def _follow_whole(self, at: _Position) -> None:
        """Update ``whole`` of ``at`` and of the positions that follow it."""
        changed = [at]
        while changed:
            one = changed.pop()
            parent = one.parent
            whole = parent is not None and parent.whole and all(group in one.blocks for group in self._full)
            if parent is not None and whole:
                one.depth = parent.depth + 1
            if whole != one.whole:
                one.whole = whole
                self._stale[one] = None
                changed += one.children.values()

    # -- where a hit can resume

    def _has_resume_point(self, at: _Position) -> bool:
        """Return whether a hit can resume at ``at`` or inside the block that follows it."""
        if not at.whole or at is self._root:
            return False
        if all(self._has_state(at, group) for group in self._states) and self._has_windows(at, 0):
            return True
        return self._is_natural and any(self._has_partial(at, part) for part in self._candidates(at))

    def _has_state(self, at: _Position, group: int) -> bool:
        """Return whether ``group`` has the state after ``at``."""
        if not self._is_natural:
            return group in at.blocks
        return at.key is not None and (at.key, b"") in at.parts.get(group, ())

    def _has_windows(self, at: _Position, partial_tokens: int) -> bool:
        """Return whether the window groups have the full blocks that a token ``partial_tokens`` after ``at`` reads."""
        return all(self._has_window(group, window, at, partial_tokens) for group, window in self._windows.items())

    def _has_window(self, group: int, window: int, at: _Position, partial_tokens: int) -> bool:
        end = at.depth * self._block_size + partial_tokens
        first = max(0, end - max(window - 1, 1)) // self._block_size
        one: _Position | None = at
        for _ in range(at.depth - first):
            if one is None or group not in one.blocks:
                return False
            one = one.parent
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
        covers = [set(self._covers(at, group, parent, partial, extras)) for group in (*self._full, *self._windows)]
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
            block = child.blocks.get(group)
            if block is not None and _extras_of(block) == extras:
                tokens = np.array(block.token_ids, np.int32).tobytes()
                if tokens.startswith(partial):
                    yield tokens

    # -- the events to publish

    def changes(self) -> list[KVCacheEvent]:
        """Return the events for all changes since the last call."""
        for at in self._stale:
            has_resume_point = self._has_resume_point(at)
            if has_resume_point != at.has_resume_point:
                at.has_resume_point = has_resume_point
                self._change_backing(at, 1 if has_resume_point else -1)
        self._stale.clear()
        removed, stored = list[KVCacheEvent](), list[tuple[int, BlockStored]]()
        for at in self._touched:
            for group in [group for group in at.published if not at.backed or group not in at.blocks]:
                removed.append(BlockRemoved((at.published.pop(group),), self._medium, group))
            for group, block in at.blocks.items() if at.backed else ():
                if group not in at.published:
                    at.published[group] = block.block_hashes[0]
                    stored.append((at.depth, block))
        touched, self._touched = self._touched, {}
        self._drop_unused(touched)
        return removed + [block for _, block in sorted(stored, key=itemgetter(0))]

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


def _columns(window: int, block_size: int) -> int:
    """Return how many full blocks before a token its window includes at most."""
    return ceil_div(max(window - 1, 1), block_size)


def _extras_of(block: BlockStored) -> object:
    return None if block.extra_keys is None else block.extra_keys[0]


def kind_of(spec: KVCacheSpec) -> KVCacheSpec:
    """Return the spec of the layers in a group of ``spec``."""
    return spec.layers[0][1] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _require_known(config: KVCacheConfig, kinds: Sequence[tuple[int, KVCacheSpec]], *, natural: bool) -> None:
    """Raise ConfigError if exact events do not support one of the groups."""
    instead = "publish raw events instead (exact=False, --kv-events-form raw)"
    chunked = [number for number, spec in kinds if isinstance(spec, ChunkedLocalAttentionSpec)]
    if chunked:
        raise ConfigError(f"exact events do not support chunked attention, as in group {chunked[0]}: {instead}")
    eagle = [number for number, group in enumerate(config.groups) if group.is_eagle_group]
    if eagle:
        raise ConfigError(f"exact events do not support group {eagle[0]}, which drops a block for EAGLE: {instead}")
    if not any(spec.keeps is Keeps.TOKENS for _, spec in kinds):
        raise ConfigError(f"exact events need a group of full attention, and the plan has only other groups: {instead}")
    in_blocks = {Keeps.TOKENS, Keeps.WINDOW} if natural else {Keeps.TOKENS, Keeps.WINDOW, Keeps.STATE}
    sizes = {spec.block_size for _, spec in kinds if spec.keeps in in_blocks}
    if len(sizes) > 1:
        found = " and ".join(map(str, sorted(sizes)))
        raise ConfigError(f"exact events need blocks of one size, but the plan has blocks of {found} tokens: {instead}")
