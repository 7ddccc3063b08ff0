"""The pool as a plain doubly-ended list (the reference's free order, docs/contracts.md, 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridkv.testing.model import Prefix


class OraclePool:
    """Blocks 1 .. num_blocks - 1. free: in the order they would be taken. refs: holders of each block.

    sink_blocks: taken at once and for ever, in no table and in no count. usable: the others.
    prefix: block -> (group, prefix) that it can be hit under. published: the other way round, oldest first.
    step: block -> the step that will write it.
    """

    def __init__(self, num_blocks: int, sink_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.usable = num_blocks - 1 - sink_blocks
        self.free = list(range(1 + sink_blocks, num_blocks))
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.prefix: dict[int, tuple[int, Prefix]] = {}
        self.step: dict[int, int] = {}
        self.published: dict[tuple[int, Prefix], list[int]] = {}

    @property
    def usage(self) -> float:
        """Held / usable blocks."""
        return 1 - len(self.free) / self.usable if self.usable else 0.0

    def find(self, group: int, prefix: Prefix) -> int | None:
        """The block that was first published under ``prefix`` of those that still are."""
        blocks = self.published.get((group, prefix))
        return blocks[0] if blocks else None

    def take(self, n: int) -> list[int]:
        """``n`` blocks from the front; each loses its prefix."""
        if n > len(self.free):
            raise IndexError(f"{n} blocks asked for, {len(self.free)} are free")
        taken = [self.free.pop(0) for _ in range(n)]
        for block in taken:
            self.forget(block)
            self.refs[block] = 1
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """One more holder."""
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def release(self, ordered: Sequence[int]) -> None:
        """One holder less; without prefix to the front in the given order, with one to the back."""
        unheld = []
        for block in ordered:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                unheld.append(block)
        empty = [block for block in unheld if block not in self.prefix]
        self.free = empty + self.free + [block for block in unheld if block in self.prefix]

    def publish(self, group: int, block: int, prefix: Prefix, step: int | None) -> None:
        """``block`` can be hit from now on; ``step`` will write it, None when it is written."""
        self.prefix[block] = (group, prefix)
        self.published.setdefault((group, prefix), []).append(block)
        if step is not None:
            self.step[block] = step

    def forget(self, block: int) -> None:
        """``block`` can be hit no longer."""
        key = self.prefix.pop(block, None)
        self.step.pop(block, None)
        if key is not None:
            self.published[key].remove(block)

    def unpublish(self, first_step: int) -> None:
        """What steps from ``first_step`` on should have written is forgotten; free ones go to the front, by id."""
        unwritten = sorted(block for block, step in self.step.items() if step >= first_step)
        for block in unwritten:
            self.forget(block)
        free = [block for block in unwritten if self.refs[block] == 0]
        self.free = free + [block for block in self.free if block not in free]

    def reset(self) -> bool:
        """Forget everything, if nothing is held."""
        if len(self.free) < self.usable:
            return False
        for block in list(self.prefix):
            self.forget(block)
        return True
