"""Rows of block ids in one flat array."""

from random import Random

import numpy as np
import pytest

from hybridkv.cache.groups import BlockRows


def ids(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(blocks, np.int32)


def rows64(*rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(rows, np.int64)


NOBODYS = 1_000_000


@pytest.mark.parametrize("few", [1, 40])
def test_blocks_are_found_and_renamed_in_all_rows_and_nowhere_else(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at once or one by one; cells of rows that are gone do not count."""
    monkeypatch.setattr("hybridkv.cache.groups._FEW", few)
    rows, plain, random, unused = BlockRows(), dict[int, list[int]](), Random(3), iter(range(1, 9000))
    for turn in range(400):
        row = random.randrange(30)
        if row in plain and random.random() < 0.2:
            rows.clear(row)
            del plain[row]
        elif row in plain and random.random() < 0.3:
            columns = random.randrange(len(plain[row]) + 1)
            rows.drop(row, max(columns, rows.dropped.item(row)))
            plain[row][:columns] = [0] * columns
        else:
            new = [next(unused) for _ in range(random.randrange(1, 9))]
            rows.extend(row, np.array(new, np.int32))
            plain.setdefault(row, []).extend(new)
        held = [(block, of, at) for of, cells in sorted(plain.items()) for at, block in enumerate(cells) if block]
        asked = random.sample([*held, (NOBODYS, 0, 0)], min(len(held), random.randrange(1, 25)))
        where = rows.find(rows64(*(block for block, *_ in asked)))
        found = np.stack(where, axis=1).tolist()
        assert found == sorted([of, at] for block, of, at in asked if block != NOBODYS)
        if turn % 3 == 0 and held:
            sources = np.array([block for block, *_ in random.sample(held, min(len(held), 20))], np.int64)
            targets = np.arange(10_000 + 20 * turn, 10_000 + 20 * turn + len(sources))
            rows.rewrite(sources, targets)
            new_names = dict(zip(sources.tolist(), targets.tolist(), strict=True))
            plain = {row: [new_names.get(block, block) for block in cells] for row, cells in plain.items()}
            assert {row: rows.ids(row).tolist() for row in plain} == plain
