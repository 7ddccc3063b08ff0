"""Random tables and tokens, and the slot of a token by the contract's formula, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from hybridkv.worker import BlockTable


@dataclass(frozen=True, slots=True)
class SlotCase:
    """One table on one rank, its rows (ids of memory blocks), and tokens as (row, position).

    block_size is that of memory blocks, which are split into ``kernel_blocks`` each.
    """

    block_size: int
    kernel_blocks: int
    rows: tuple[tuple[int, ...], ...]
    dcp: tuple[int, int]
    pcp: tuple[int, int]
    interleave: int
    tokens: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        return len(self.rows[0])

    @property
    def cp(self) -> int:
        return self.dcp[0] * self.pcp[0]

    @property
    def rank(self) -> int:
        return self.pcp[1] * self.dcp[0] + self.dcp[1]

    @property
    def kernel_size(self) -> int:
        return self.block_size // self.kernel_blocks

    def is_local(self, position: int) -> bool:
        return position // self.interleave % self.cp == self.rank

    def slot(self, row: int, position: int) -> int:
        """docs/contracts.md, 7: slot(p), with memory blocks as they were before they were split."""
        if not self.is_local(position):
            return -1
        v = self.block_size * self.cp
        o = position % v
        offset = o // (self.cp * self.interleave) * self.interleave + o % self.interleave
        return self.rows[row][position // v] * self.block_size + offset

    def slots(self) -> list[int]:
        return [self.slot(row, position) for row, position in self.tokens]

    def table(self, device: str = "cpu", tokens: int = 64) -> BlockTable:
        """The table, rows added and committed."""
        table = BlockTable(
            self.block_size,
            len(self.rows),
            self.width,
            tokens,
            device=device,
            kernel_block_size=self.kernel_size,
            cp_kv_cache_interleave_size=self.interleave,
            dcp_world_size=self.dcp[0],
            dcp_rank=self.dcp[1],
            pcp_world_size=self.pcp[0],
            pcp_rank=self.pcp[1],
        )
        for row, ids in enumerate(self.rows):
            table.add_row(ids, row)
        table.commit_block_table(len(self.rows))
        return table


@st.composite
def slot_cases(draw: st.DrawFn) -> SlotCase:
    """All sizes, ranks and interleaves; ids up to the last that fits int32; windows with null blocks in front."""
    kernel_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 48]))
    kernel_blocks = draw(st.sampled_from([1, 1, 2, 3, 5]))
    block_size = kernel_size * kernel_blocks
    divisors = [i for i in range(1, kernel_size + 1) if kernel_size % i == 0]
    worlds = st.sampled_from([1, 1, 2, 3, 4])
    dcp, pcp = draw(worlds), draw(worlds)
    width, last = draw(st.integers(1, 5)), (1 << 31) // kernel_blocks - 1
    ids = st.one_of(st.integers(1, 40), st.integers(last - 9, last))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        null = draw(st.sampled_from([0, 0, 1, width - 1]))
        rows.append((0,) * null + tuple(draw(st.lists(ids, min_size=width - null, max_size=width - null))))
    position = st.integers(0, width * block_size * dcp * pcp - 1)
    tokens = draw(st.lists(st.tuples(st.integers(0, len(rows) - 1), position), max_size=24))
    return SlotCase(
        block_size,
        kernel_blocks,
        tuple(rows),
        (dcp, draw(st.integers(0, dcp - 1))),
        (pcp, draw(st.integers(0, pcp - 1))),
        draw(st.sampled_from(divisors)),
        tuple(tokens),
    )
