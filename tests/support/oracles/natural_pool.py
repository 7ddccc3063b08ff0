"""The pool of the natural layout: slabs instead of one free list, and keys of tokens that end inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hybridkv.planner.config import SlabLayout
from hybridkv.testing.model import Prefix
from oracles.pool import OraclePool
from oracles.slabs import HELD, OracleSlabs

MOST_TAILS = 4
"""Partial keys of one group behind one parent."""

Key = tuple[int, Prefix]
"""A group and the tokens that a key stands for."""


class NaturalPool(OraclePool):
    """Blocks are handles (see OracleSlabs). sinks: of each group, blocks taken at once and for ever.

    published: blocks by full key. tails: by (group, parent), the oldest first: the tokens behind the parent, a block.
    keys: of every block that can be hit, what it can be hit under; tails are there as (parent, tail). ends: blocks
    that keep a state only because a request ended there. moves: (class, source, target), of the step being scheduled.
    holders: all lists of blocks that somebody holds, for moves to be followed.
    """

    def __init__(self, layout: SlabLayout, sinks: Sequence[int]) -> None:
        super().__init__(0)
        self.slabs = OracleSlabs(layout.num_slabs, [one.blocks_per_slab for one in layout.classes])
        self.layout = layout
        self.class_of = [layout.classes.index(layout.class_of(group)) for group in range(len(sinks))]
        self.tails: dict[Key, list[tuple[tuple[int, ...], int]]] = {}
        self.keys: dict[int, list[tuple[Key, tuple[int, ...]]]] = {}
        self.ends: set[int] = set()
        self.moves: list[tuple[int, int, int]] = []
        self.holders: Callable[[], list[list[int]]] = list
        self.sinks = [self.take(count, group) for group, count in enumerate(sinks)]
        self.slabs.lock(block for sinks in self.sinks for block in sinks)
        self.usable = layout.num_slabs - 1 - self.slabs.needed_slabs([0] * len(layout.classes))

    def local(self, group: int, block: int) -> int:
        """What a Step calls ``block``: its number in its class."""
        return block - self.slabs.bases[self.class_of[group]] if block else 0

    @property
    def usage(self) -> float:
        """Slabs that the blocks of requests would fill / slabs that sinks leave."""
        held = [0] * len(self.slabs.ks)
        for block, state in self.slabs.state.items():
            held[self.slabs.class_of(block)] += state == HELD
        for group, sinks in enumerate(self.sinks):
            held[self.class_of[group]] -= len(sinks)
        used = sum(count / k for count, k in zip(held, self.slabs.ks, strict=True))
        return used / self.usable if self.usable else 0.0

    def by_class(self, counts: Sequence[int]) -> list[int]:
        """Blocks of every class, from those of every group."""
        sums = [0] * len(self.slabs.ks)
        for group, count in enumerate(counts):
            sums[self.class_of[group]] += count
        return sums

    # -- holders

    def take(self, n: int, group: int = 0) -> list[int]:
        """``n`` new blocks; only the last is sure to be where it is said to be, for taking moves others."""
        of, taken = self.class_of[group], list[int]()
        for _ in range(n):
            while not (found := self.slabs.take(1, of)):
                evicted, moves = self.slabs.make_room(of)
                for block in evicted:
                    self.forget(block)
                for source, target in moves:
                    taken = [target if block == source else block for block in taken]
                    self._move(source, target)
            taken += found
            self.refs[found[0]] = 1
        return taken

    def _move(self, source: int, target: int) -> None:
        self.moves.append((self.slabs.class_of(source), source, target))
        self.refs[target] = self.refs.pop(source, 0)
        for key, tail in self.keys.get(source, []):
            if tail:
                self.tails[key] = [(t, target if b == source else b) for t, b in self.tails[key]]
            else:
                self.published[key] = [target if b == source else b for b in self.published[key]]
        if source in self.keys:
            self.keys[target] = self.keys.pop(source)
        if source in self.step:
            self.step[target] = self.step.pop(source)
        if source in self.ends:
            self.ends.remove(source)
            self.ends.add(target)
        for table in self.holders():
            table[:] = [target if block == source else block for block in table]

    def held(self, block: int) -> bool:
        """Whether somebody holds ``block``."""
        return self.refs.get(block, 0) > 0

    def touch(self, blocks: Iterable[int]) -> None:
        """One more holder."""
        for block in blocks:
            if not self.held(block):
                self.slabs.remove([block])
            self.refs[block] = self.refs.get(block, 0) + 1

    def release(self, ordered: Sequence[int]) -> None:
        """One holder less; with a key to the back of its class, without one it is a hole."""
        unheld = []
        for block in ordered:
            self.refs[block] -= 1
            if not self.refs[block]:
                unheld.append(block)
        self.slabs.prepend([block for block in unheld if block not in self.keys])
        self.slabs.append([block for block in unheld if block in self.keys])

    # -- keys

    def publish(self, group: int, block: int, prefix: Prefix, step: int | None) -> None:
        """``block`` can be hit under a full key."""
        self._add(block, (group, prefix), (), step)
        self.published.setdefault((group, prefix), []).append(block)

    def publish_partial(self, group: int, block: int, prefix: Prefix, parent: int, step: int | None) -> None:
        """``block`` can be hit under a partial key: the first ``parent`` tokens, and those behind them.

        Not if it is known; the oldest of five is forgotten.
        """
        salt, tokens = prefix
        key, tail = (group, (salt, tokens[:parent])), tokens[parent:]
        tails = self.tails.setdefault(key, [])
        if any(tail == other for other, _ in tails):
            return
        self._add(block, key, tail, step)
        tails.append((tail, block))
        if len(tails) > MOST_TAILS:
            first, oldest = tails.pop(0)
            self.keys[oldest].remove((key, first))
            if not self.keys[oldest]:
                self._close(oldest)
                self._free_again([oldest])

    def _add(self, block: int, key: Key, tail: tuple[int, ...], step: int | None) -> None:
        self.keys.setdefault(block, []).append((key, tail))
        if step is not None:
            self.step[block] = step

    def _close(self, block: int) -> None:
        """``block`` has no key left."""
        self.keys.pop(block, None)
        self.step.pop(block, None)
        self.ends.discard(block)

    def _free_again(self, blocks: Sequence[int]) -> None:
        """Blocks that lost their keys while nobody held them become holes."""
        free = [block for block in blocks if not self.held(block)]
        self.slabs.remove(free)
        self.slabs.prepend(free)

    def forget(self, block: int) -> None:
        """``block`` can be hit no longer."""
        for key, tail in self.keys.get(block, []):
            if tail:
                self.tails[key].remove((tail, block))
            else:
                self.published[key].remove(block)
        self._close(block)

    def find_tail(self, group: int, prefix: Prefix, parent: int) -> int | None:
        """The block of a partial key: the first ``parent`` tokens of ``prefix``, and those behind them."""
        salt, tokens = prefix
        return dict(self.tails.get((group, (salt, tokens[:parent])), [])).get(tokens[parent:])

    def unpublish(self, first_step: int) -> None:
        """See OraclePool."""
        self.distrust({block for block, step in self.step.items() if step >= first_step})

    def distrust(self, blocks: set[int]) -> None:
        """``blocks`` may hold anything: those that can be hit are forgotten, free ones become holes in order of ids."""
        lost = sorted(blocks & set(self.keys))
        for block in lost:
            self.forget(block)
        self._free_again(lost)

    def reset(self) -> bool:
        """Forget everything, if nothing but sinks is held."""
        if sum(state == HELD for state in self.slabs.state.values()) > sum(map(len, self.sinks)):
            return False
        for block in list(self.keys):
            self.forget(block)
        self.slabs.forget_all()
        return True
