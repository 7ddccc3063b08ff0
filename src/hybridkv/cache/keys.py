"""Keys of blocks: the keys under which a block can be hit, and the step that writes it.

    no key --publish--> waits for a step --mark_written--> written
      ^                        |                              |
      +------------------------+------- evict, clear ---------+

A key covers all tokens of a block, or its first tokens (a *partial key*). A block has keys in one group only. The pool
counts the holders. All columns are flat arrays indexed by block (docs/design/0001).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.index import TOKEN_BYTES, PartialBlock, PrefixIndex
from hybridkv.cache.journal import (
    AllBlocksCleared,
    BlockRemoved,
    Cleared,
    Journal,
    KeysLost,
    Lost,
    Moved,
    Named,
    ResumePointRemoved,
    ResumePointStored,
)
from hybridkv.errors import CacheError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

WRITTEN: Final = -1

_NO_GROUP: Final = -1

_TOKENS: Final = attrgetter("tokens")


def _wrapped(count: int) -> int:
    """Return ``count`` modulo 2**32 as a signed 32-bit number, so that differences of close counts stay right."""
    return (count + (1 << 31)) % (1 << 32) - (1 << 31)


class BlockKeys:
    """Keys of ``num_blocks`` blocks in ``num_groups`` groups.

    Args:
        num_blocks: Number of blocks.
        num_groups: Number of groups.
        journal: Records facts about keys.
        silent: Groups whose keys make no events.
        columns: By group, (tokens of a block, hash blocks of a block).

    Attributes:
        indexes: The prefix indexes, one a group.
        each_group: Group of each block's keys; -1 without a key.
        evictions: Keys lost so far. Also grows when blocks move or all keys are cleared, because remembered blocks must
            then be looked up again.
        given: By group, blocks that got their first key so far.
        lost: By group, blocks that lost their last key so far.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        journal: Journal | None = None,
        silent: Sequence[int] = (),
        columns: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.evictions = 0
        self.indexes = tuple(PrefixIndex(self, *one) for one in columns or ((1, 1),) * num_groups)
        self.given = [0] * num_groups
        self.lost = [0] * num_groups
        self._silent = frozenset(silent)
        self._group = np.full(num_blocks, _NO_GROUP, np.int16)
        self._keys = np.full(num_blocks, None, np.object_)  # bytes, or None for a block without key of all its tokens
        self._step = np.full(num_blocks, WRITTEN, np.int32)  # step that will write a published block
        self._lost_at = np.zeros(num_blocks, np.int32)  # evictions when it last lost its key, modulo 2**32
        self.each_group, self._each_step = self._group.data, self._step.data  # memoryviews access one entry faster
        self._each_lost_at = self._lost_at.data
        self._supersedable: set[int] = set()
        self.journal = Journal() if journal is None else journal

    # -- read

    def key_of(self, block: int) -> bytes | None:
        """Return the key of all tokens of ``block``; ``None`` without one."""
        key: bytes | None = self._keys.item(block)
        return key

    def group_of(self, block: int) -> int:
        """Return the group of the keys of ``block``; -1 without a key."""
        return self.each_group[block]

    def step_of(self, block: int) -> int:
        """Return the step that will write ``block``; WRITTEN for a written block."""
        return self._each_step[block]

    def are_on(self, ids: Int32 | Int64) -> Bool:
        """Return which of ``ids`` have a key, bool[len(ids)]."""
        keyed: Bool = self._group[ids] >= 0
        return keyed

    def per_group(self, among: Bool | None = None) -> list[int]:
        """Count blocks with a key by group. O(num_blocks).

        ``among`` restricts the count to some blocks, bool[num_blocks].
        """
        keyed = self._group >= 0 if among is None else (self._group >= 0) & among
        counts: list[int] = np.bincount(self._group[keyed], minlength=len(self.indexes)).tolist()
        return counts

    def num_partial(self) -> list[int]:
        """Count blocks that have partial keys only, by group. O(partial keys)."""
        return [sum(self.key_of(block) is None for block in index.partial_blocks()) for index in self.indexes]

    def in_group(self, group: int) -> Int64:
        """Return the blocks with a key in ``group``, int64. O(num_blocks)."""
        return np.flatnonzero(self._group == group)

    def kept_since(self, ids: Int32, evictions: int) -> bool:
        """Return whether each of ``ids`` kept its key since ``self.evictions`` was ``evictions``. Reads no index."""
        return self.num_kept(ids, evictions) == len(ids)

    def num_kept(self, ids: Int32, evictions: int) -> int:
        """Return how many leading ``ids`` kept their keys since ``self.evictions`` was ``evictions``.

        Valid for up to 2**31 evictions.
        """
        if self.evictions == evictions:
            return len(ids)
        lost = self._lost_at[ids] - _wrapped(evictions) > 0
        return int(lost.argmax()) if lost.any() else len(ids)

    # -- publish

    def publish(self, group: int, ids: Sequence[int] | Int32, keys: Sequence[bytes], step: int = WRITTEN) -> None:
        """Give ``keys`` to blocks ``ids`` of ``group``. O(ids).

        ``step`` writes them; WRITTEN if they are written. Raises CacheError if the numbers differ.
        """
        if len(ids) != len(keys):
            raise CacheError(f"{len(ids)} blocks but {len(keys)} keys: publish takes one key for each block")
        if len(ids) == 1:
            self.publish_one(group, int(ids[0]), keys[0], step)
            return
        where = np.asarray(ids, np.int64)
        partial_blocks = np.count_nonzero(self._group[where] >= 0) if self.indexes[group].num_partial else 0
        self.given[group] += len(ids) - int(partial_blocks)
        self._keys[where] = np.fromiter(keys, np.object_, len(keys))
        self._group[where] = group
        if step != WRITTEN:
            self._step[where] = step
        self.indexes[group].add(keys, where.tolist())
        if self.journal.times:
            self.journal.record(Named(where, self.journal.clock()))

    def publish_one(self, group: int, block: int, key: bytes, step: int) -> None:
        """Give a key to one block, without arrays of one element."""
        self._begin(group, block, step)
        self._keys[block] = key
        self.indexes[group].add_one(key, block)

    def _begin(self, group: int, block: int, step: int) -> None:
        """Note that ``block`` gets a key in ``group``, its first one or one more."""
        self.given[group] += self.each_group[block] < 0
        self.each_group[block] = group
        if step != WRITTEN:
            self._each_step[block] = step
        if self.journal.times:
            self.journal.record(Named(np.array([block]), self.journal.clock()))

    def knows_partial(self, group: int, parent: bytes, tokens: bytes) -> bool:
        """Return whether some block of ``group`` is found for ``tokens`` (bytes of int32) after ``parent``. O(1)."""
        return tokens in map(_TOKENS, self.indexes[group].partial_blocks_of(parent))

    def publish_partial(self, group: int, block: int, parent: bytes, tokens: bytes, step: int = WRITTEN) -> int | None:
        """Give a partial key to ``block``: it begins with ``tokens``, which no other block has after ``parent``.

        A parent has a bounded number of partial keys, so the oldest one may be removed.

        Returns:
            The block that lost its last key by this, else ``None``.
        """
        self._begin(group, block, step)
        index = self.indexes[group]
        if self.journal.reports_resume_points and len(entries := index.partial_blocks_of(parent)) == index.most_partial:
            self._put_removed(group, parent, entries[0].tokens)
        gone = index.add_partial(parent, PartialBlock(tokens, block, len(tokens) // TOKEN_BYTES))
        if gone is None:
            return None
        if index.is_partial(gone) or self.key_of(gone) is not None:
            self._note_lost(np.array([gone], np.int32))  # it lost one of its keys: remembered hits become stale
            return None
        self.lost[group] += 1
        self._wipe(np.array([gone], np.int32))
        return gone

    # -- evict

    def evict(self, ids: Int32) -> None:
        """Remove the keys of ``ids``, which all have one. Raises CacheError for a block without a key."""
        self._forget(ids)
        self._wipe(ids)

    def evict_few(self, blocks: Sequence[int]) -> None:
        """Remove the keys of ``blocks``, which all have one: one by one, unless events or observers record it."""
        if self.journal.reports_events or self.journal.observed:
            self.evict(np.array(blocks, np.int32))
            return
        self.evictions += len(blocks)
        stamp = _wrapped(self.evictions)
        for block in blocks:
            group, key = self.each_group[block], self._keys.item(block)
            index = self.indexes[group]
            if index.num_partial and index.is_partial(block):
                index.remove_partial(block)
            elif key is None:
                raise CacheError(f"block {block} belongs to the index of group {group} but has no key")
            if key is not None:
                index.remove(key, block)
                self._keys[block] = None
            self.lost[group] += 1
            self.each_group[block], self._each_step[block], self._each_lost_at[block] = _NO_GROUP, WRITTEN, stamp
            self._supersedable.discard(block)
        if self.journal.blocks is not None:
            self.journal.blocks.append(Lost(np.array(blocks), 0.0))

    def _forget(self, ids: Int32) -> None:
        """Remove ``ids`` from the indexes, and emit events."""
        where = ids.astype(np.int64)
        blocks, keys, groups = ids.tolist(), self._keys[where].tolist(), self._group[where].tolist()
        if self.journal.losses:
            self._record_lost(blocks, keys, groups)
        for group, index in enumerate(self.indexes if self.journal.reports_resume_points else ()):
            for _, parent, tokens in index.partial_keys_in(blocks) if index.num_partial else ():
                self._put_removed(group, parent, tokens)
        partial_blocks = self._forget_partial(blocks)
        for group in set(groups):
            self.lost[group] += groups.count(group)
        if None in keys:
            if any(key is None and block not in partial_blocks for key, block in zip(keys, blocks, strict=True)):
                block = next(b for key, b in zip(keys, blocks, strict=True) if key is None and b not in partial_blocks)
                raise CacheError(f"block {block} belongs to the index of group {self.group_of(block)} but has no key")
            whole = [i for i, key in enumerate(keys) if key is not None]
            blocks, keys, groups = ([column[i] for i in whole] for column in (blocks, keys, groups))
            where = where[whole]
        if groups and groups.count(groups[0]) == len(groups):
            self.indexes[groups[0]].remove_many(keys, blocks)
        else:
            for block, key, group in zip(blocks, keys, groups, strict=True):
                self.indexes[group].remove(key, block)
        self._emit_removed(keys, groups, where)

    def _record_lost(self, blocks: Sequence[int], keys: Sequence[bytes | None], groups: Sequence[int]) -> None:
        """Record that ``blocks`` lose ``keys`` and partial keys in ``groups``."""
        for group in sorted(set(groups)):
            mine = [(block, key) for block, key, of in zip(blocks, keys, groups, strict=True) if of == group]
            index = self.indexes[group]
            entries = index.partial_keys_in([block for block, _ in mine]) if index.num_partial else []
            named = [key for _, key in mine if key is not None]
            timed = [block for block, key in mine if key is not None] + [mine[place][0] for place, *_ in entries]
            lost = [(parent, tokens) for _, parent, tokens in entries]
            self.journal.record(KeysLost(group, named, lost, timed, len(mine), self.journal.clock()))

    def _forget_partial(self, blocks: Sequence[int]) -> set[int]:
        """Remove the partial keys of ``blocks``. Returns the blocks that had one."""
        partial_blocks = set[int]()
        for index in self.indexes:
            mine = index.partial_among(blocks) if index.num_partial else ()
            for block in mine:
                index.remove_partial(block)
            partial_blocks.update(mine)
        return partial_blocks

    def _wipe(self, ids: Int32) -> None:
        """Clear the columns of ``ids``, which lost their keys."""
        where = ids.astype(np.int64)
        self._keys[where] = None
        self._group[where] = _NO_GROUP
        self._step[where] = WRITTEN
        self._supersedable.difference_update(ids.tolist() if self._supersedable else ())
        self._record(Lost(where, self.journal.clock() if self.journal.times else 0.0))
        self._note_lost(ids)

    def _record(self, fact: Lost | Moved | Cleared) -> None:
        """Record a fact of blocks for the eviction policy and for measurements of times."""
        if self.journal.blocks is not None:
            self.journal.blocks.append(fact)
        if self.journal.times:
            self.journal.record(fact)

    def _note_lost(self, ids: Int32) -> None:
        """Count one lost key for each of ``ids``."""
        self.evictions += len(ids)
        self._lost_at[ids] = _wrapped(self.evictions)

    def clear(self) -> None:
        """Remove all keys. O(num_blocks)."""
        for group, count in enumerate(self.per_group()):
            self.lost[group] += count
            self.indexes[group].clear()
        self._supersedable.clear()
        self._record(Cleared(self.journal.clock()))
        self._keys.fill(None)
        self._group.fill(_NO_GROUP)
        self._step.fill(WRITTEN)
        if self.journal.reports_events:
            self.journal.events.put(AllBlocksCleared())
        self.evictions += 1
        self._lost_at.fill(_wrapped(self.evictions))

    # -- move

    def follow(self, moves: Int64) -> None:
        """Move the keys of blocks that moved, int64[m, 2] of (source, target)."""
        sources, targets = moves[:, 0], moves[:, 1]
        for source, target in moves.tolist():
            group = self._group.item(source)
            if group < 0:
                continue
            self.indexes[group].rename(self.key_of(source), source, target)
        self._keys[targets] = self._keys[sources]
        self._keys[sources] = None
        for column, empty in ((self._group, _NO_GROUP), (self._step, WRITTEN)):
            column[targets] = column[sources]
            column[sources] = empty
        if self._supersedable:
            new = dict(moves.tolist())
            self._supersedable = {new.get(block, block) for block in self._supersedable}
        self._record(Moved(moves))
        self.evictions += 1
        self._lost_at[sources] = _wrapped(self.evictions)

    # -- checkpoints that a later one supersedes

    def flag_supersedable(self, block: int) -> None:
        """Flag the checkpoint in ``block``: it is useful only until a later one of the same request is kept."""
        self._supersedable.add(block)

    def take_supersedable(self, blocks: Sequence[int]) -> Int32:
        """Return the flagged blocks among ``blocks``, int32, and remove their flags."""
        gone = [block for block in blocks if block in self._supersedable]
        self._supersedable.difference_update(gone)
        return np.array(gone, np.int32)

    # -- steps that write published blocks

    def mark_written(self, ids: Int32, step: int) -> Bool:
        """Note that ``step`` wrote ``ids``.

        Returns:
            Which of them waited for this step, bool[len(ids)]. A block may have been evicted or published again since.
        """
        now: Bool = self._step[ids] == step
        self._step[ids[now]] = WRITTEN
        return now

    def mark_few_written(self, blocks: Iterable[int], step: int) -> None:
        """Note that ``step`` wrote ``blocks``, one by one."""
        each = self._each_step
        for block in blocks:
            if each[block] == step:
                each[block] = WRITTEN

    def unwritten(self, ids: Int32, first_step: int) -> Int32:
        """Return the blocks of ``ids`` that wait for step ``first_step`` or a later one, int32."""
        late: Int32 = ids[self._step[ids] >= first_step]
        return late

    def all_written(self, ids: Int32) -> bool:
        """Return whether each of ``ids`` has been written. The null block counts as written."""
        return bool((self._step[ids] == WRITTEN).all())

    def every_unwritten(self) -> list[int]:
        """Return the published blocks whose step is in flight. O(num_blocks)."""
        found: list[int] = np.flatnonzero(self._step != WRITTEN).tolist()
        return found

    def keyed(self) -> list[int]:
        """Return the blocks that have a key of all tokens, or a group, or both; for checks. O(num_blocks)."""
        found: list[int] = np.flatnonzero((self._group != _NO_GROUP) | (self._keys != None)).tolist()  # noqa: E711 - of each
        return found

    # -- events

    def _emit_removed(self, keys: Sequence[bytes], groups: Sequence[int], ids: Int64) -> None:
        """Emit an event for each of ``keys``, of ``ids`` in ``groups``, whose block was written."""
        if not self.journal.reports_events:
            return
        if self.journal.reports_resume_points:  # a state's removal is reported when no copy with its key is left
            for key, group in zip(keys, groups, strict=True):
                if group in self._silent and self.indexes[group].get(key) is None:
                    self._put_removed(group, key)
        written, events = (self._step[ids] == WRITTEN).tolist(), self.journal.events
        for key, group, done in zip(keys, groups, written, strict=True):
            if done and group not in self._silent:
                events.put(BlockRemoved((key,), events.medium, group))

    def _put_removed(self, group: int, parent: bytes, tokens: bytes = b"") -> None:
        events = self.journal.events
        events.put(ResumePointRemoved(group, parent, tokens, events.medium))

    # -- resume points: states and partial blocks

    def is_kept(self, point: ResumePointStored) -> int | None:
        """Return the step that will write the block of a resume point, or WRITTEN; ``None`` without a block."""
        index = self.indexes[point.group_idx]
        block = index.get(point.parent)
        if point.partial_tokens:
            entries = index.partial_blocks_of(point.parent)
            block = next((one.block for one in entries if one.tokens == point.partial_tokens), None)
        return None if block is None else self.step_of(block)
