"""Events of what can really be hit, worked out of those of what every group has.

    position   a whole block of tokens at its place in a prompt: its hash is that of all tokens up to its end
    end        at a position, or inside the block behind it: a hit can end there, since full attention has every block
               before it, windows have those that they read, and each recurrent layer has its state

        position --- position --- position --- position          backed: an end lies there or behind
                                   `--- position, end            only those are told

A chain of blocks is told as far as its last end; inside a block an end is told as the whole blocks before it.
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

_Part = tuple[bytes, bytes]  # parent, tail
_TOKEN_BYTES: Final = 4


def single_blocks(event: BlockStored) -> Iterator[BlockStored]:
    """``event`` as one event a block."""
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


def without_ends(events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
    """``events`` but those that are not for the wire."""
    return [event for event in events if not isinstance(event, ResumePointStored | ResumePointRemoved)]


class _Position:
    """key: None of the root, before the first block. parent: None where no event has told it.

    blocks: by group, as they are stored; copies: of each. parts: by group, stored resume points, with extra keys.
    whole: every full attention group has all blocks up to here. ends: one lies here. backed: children that are,
    and itself for its ends. told: groups whose block is told.
    """

    __slots__ = ("backed", "blocks", "children", "copies", "depth", "ends", "key", "parent", "parts", "told", "whole")

    def __init__(self, key: bytes | None) -> None:
        self.key = key
        self.parent: _Position | None = None
        self.children: dict[bytes, _Position] = {}
        self.blocks: dict[int, BlockStored] = {}
        self.copies: dict[int, int] = {}
        self.parts: dict[int, dict[_Part, object]] = {}
        self.told: dict[int, bytes] = {}
        self.depth = 0
        self.whole = self.ends = False
        self.backed = 0

    @property
    def is_of_no_use(self) -> bool:
        """Whether nothing is known of it."""
        return self.key is not None and not (self.blocks or self.parts or self.children or self.told)


class Exact:
    """Of the events of a cache of ``config``, those of what can be hit. Not for groups that drop blocks for EAGLE.

    ConfigError for a config of which that is not worked out.
    """

    def __init__(self, config: KVCacheConfig) -> None:
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
        self._clear()

    def _clear(self) -> None:
        self._root = _Position(None)
        self._root.whole = True
        self._at: dict[bytes, _Position] = {}
        self._part_at: dict[tuple[int, _Part], _Position] = {}
        self._touched: dict[_Position, None] = {}
        self._stale: dict[_Position, None] = {}

    def hear(self, events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
        """What to tell of ``events``, a batch: removals, then what is stored, parents first.

        O(their blocks, and those behind a block of full attention that comes or goes).
        """
        if self.changes_nothing:
            return without_ends(events)
        told: list[KVCacheEvent] = []
        for event in events:
            match event:
                case BlockStored():
                    for one in single_blocks(event):
                        self._store(one)
                case BlockRemoved():
                    for key in event.block_hashes:
                        self._remove(event.group_idx, key)
                case ResumePointStored():
                    self._keep(event)
                case ResumePointRemoved():
                    self._lose(event)
                case AllBlocksCleared() | EventsDropped():
                    self._clear()
                    told = [event]
        return told + self._changes()

    # -- what groups have

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

    def _keep(self, end: ResumePointStored) -> None:
        at, part = self._position(end.block_hash), (end.parent, end.partial_tokens)
        at.parts.setdefault(end.group_idx, {})[part] = end.extra_keys
        self._part_at[end.group_idx, part] = at
        self._touched[at] = self._stale[at] = None

    def _lose(self, end: ResumePointRemoved) -> None:
        part = end.parent, end.partial_tokens
        at = self._part_at.pop((end.group_idx, part), None)
        if at is not None:
            del at.parts[end.group_idx][part]
            if not at.parts[end.group_idx]:
                del at.parts[end.group_idx]
            self._touched[at] = self._stale[at] = None

    def _note(self, at: _Position) -> None:
        """A group has a block at ``at`` now, or none any more."""
        self._touched[at] = self._stale[at] = None
        if at.parent is not None:
            self._stale[at.parent] = None  # ends inside that block
        self._follow_whole(at)
        reach = max((_columns(window, self._block_size) for window in self._windows.values()), default=0)
        level = [at]
        for _ in range(reach):
            level = [child for one in level for child in one.children.values()]
            self._stale.update(zip(level, repeat(None)))

    def _follow_whole(self, at: _Position) -> None:
        """Whether ``at`` and those behind it are whole, since that changed at ``at``."""
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

    # -- where hits can end

    def _has_end(self, at: _Position) -> bool:
        """At ``at``, or inside the block behind it."""
        if not at.whole or at is self._root:
            return False
        if all(self._has_state(at, group) for group in self._states) and self._reads(at, 0):
            return True
        return self._is_natural and any(self._ends_inside(at, part) for part in self._candidates(at))

    def _has_state(self, at: _Position, group: int) -> bool:
        """That after ``at``."""
        if not self._is_natural:
            return group in at.blocks
        return at.key is not None and (at.key, b"") in at.parts.get(group, ())

    def _reads(self, at: _Position, inside: int) -> bool:
        """Whether windows have the whole blocks that are read behind ``inside`` tokens more."""
        return all(self._reads_in(group, window, at, inside) for group, window in self._windows.items())

    def _reads_in(self, group: int, window: int, at: _Position, inside: int) -> bool:
        end = at.depth * self._block_size + inside
        first = max(0, end - max(window - 1, 1)) // self._block_size
        one: _Position | None = at
        for _ in range(at.depth - first):
            if one is None or group not in one.blocks:
                return False
            one = one.parent
        return True

    def _candidates(self, at: _Position) -> list[_Part]:
        """What might be such an end: each has its states, or is where attention ends, where there are none."""
        if self._states:
            first, *others = (at.parts.get(group, {}).keys() for group in self._states)
            found = [part for part in first if all(part in other for other in others)]
        else:
            found = [part for group in at.parts.values() for part in group]
        return [part for part in dict.fromkeys(found) if part[1]]

    def _ends_inside(self, at: _Position, part: _Part) -> bool:
        """Whether attention has the tokens of ``part`` for one prompt that goes on behind them."""
        parent, tail = part
        if not self._reads(at, len(tail) // _TOKEN_BYTES):
            return False
        extras = next(parts[part] for parts in at.parts.values() if part in parts)
        covers = [set(self._covers(at, group, parent, tail, extras)) for group in (*self._full, *self._windows)]
        if not all(covers):
            return False
        return any(
            all(any(longest.startswith(one) for one in cover) for cover in covers) for longest in set().union(*covers)
        )

    @staticmethod
    def _covers(at: _Position, group: int, parent: bytes, tail: bytes, extras: object) -> Iterator[bytes]:
        """Tokens that begin with ``tail`` of blocks of ``group`` behind ``at``."""
        for found, tokens in at.parts.get(group, ()):
            if found == parent and tokens.startswith(tail):
                yield tokens
        for child in at.children.values():
            block = child.blocks.get(group)
            if block is not None and _extras_of(block) == extras:
                tokens = np.array(block.token_ids, np.int32).tobytes()
                if tokens.startswith(tail):
                    yield tokens

    # -- what is told

    def _changes(self) -> list[KVCacheEvent]:
        """What is to be told differently from now on."""
        for at in self._stale:
            ends = self._has_end(at)
            if ends != at.ends:
                at.ends = ends
                self._back(at, 1 if ends else -1)
        self._stale.clear()
        removed, stored = list[KVCacheEvent](), list[tuple[int, BlockStored]]()
        for at in self._touched:
            for group in [group for group in at.told if not at.backed or group not in at.blocks]:
                removed.append(BlockRemoved((at.told.pop(group),), group_idx=group))
            for group, block in at.blocks.items() if at.backed else ():
                if group not in at.told:
                    at.told[group] = block.block_hashes[0]
                    stored.append((at.depth, block))
        touched, self._touched = self._touched, {}
        self._drop(touched)
        return removed + [block for _, block in sorted(stored, key=itemgetter(0))]

    def _back(self, at: _Position, more: int) -> None:
        """One thing more, or less, backs ``at``; what is not backed backs nothing."""
        one: _Position | None = at
        while one is not None and one is not self._root:
            was, one.backed = one.backed, one.backed + more
            if bool(was) == bool(one.backed):
                return
            self._touched[one] = None
            one = one.parent

    def _drop(self, positions: Iterable[_Position]) -> None:
        """Those of which nothing is known any more, and parents that stay for them alone."""
        for at in positions:
            one: _Position | None = at
            while one is not None and one.key in self._at and one.is_of_no_use:
                del self._at[one.key]
                parent, one.parent = one.parent, None
                if parent is not None:
                    del parent.children[one.key]
                one = parent


def _columns(window: int, block_size: int) -> int:
    """Whole blocks that are read before one, at most."""
    return -(-max(window - 1, 1) // block_size)


def _extras_of(block: BlockStored) -> object:
    return None if block.extra_keys is None else block.extra_keys[0]


def kind_of(spec: KVCacheSpec) -> KVCacheSpec:
    """Return the spec of one layer of a group of ``spec``."""
    return spec.layers[0][1] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _require_known(config: KVCacheConfig, kinds: Sequence[tuple[int, KVCacheSpec]], *, natural: bool) -> None:
    """ConfigError for groups of which it is not worked out where hits can end."""
    instead = "publish them raw, all that is cached"
    if any(isinstance(spec, ChunkedLocalAttentionSpec) for _, spec in kinds):
        raise ConfigError(f"exact events are not worked out for chunked attention: {instead}")
    if any(group.is_eagle_group for group in config.groups):
        raise ConfigError(f"exact events are not worked out for groups that drop blocks for EAGLE: {instead}")
    if not any(spec.keeps is Keeps.TOKENS for _, spec in kinds):
        raise ConfigError(f"exact events are told by the blocks of full attention, and there is none: {instead}")
    in_blocks = {Keeps.TOKENS, Keeps.WINDOW} if natural else {Keeps.TOKENS, Keeps.WINDOW, Keeps.STATE}
    sizes = {spec.block_size for _, spec in kinds if spec.keeps in in_blocks}
    if len(sizes) > 1:
        raise ConfigError(f"exact events need blocks of one size, got {sorted(sizes)} tokens: {instead}")
