"""The pool against the vectors of docs/contracts.md, 2; its free order and rows of blocks against plain lists."""

import logging
from random import Random

import numpy as np
import pytest

from hybridkv.cache import AllBlocksCleared, BlockPool, BlockRemoved
from hybridkv.cache.groups import BlockRows
from hybridkv.cache.journal import EventQueue, Journal, Lost
from hybridkv.cache.spaces.one_size import FreeOrder
from hybridkv.errors import BlockError, CacheError, ConfigError

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


def ids(*blocks: int) -> Ids:
    return np.array(blocks, np.int32)


def key(block: int) -> bytes:
    return bytes([block]) * 32


def hashed(pool: BlockPool, *blocks: int) -> None:
    pool.publish(0, blocks, [key(block) for block in blocks])


def test_block_pool_of_eight_matches_measured_order() -> None:
    pool = BlockPool(8, journal=Journal(events=(events := EventQueue())))
    assert pool.free_order() == [1, 2, 3, 4, 5, 6, 7]
    assert pool.get_new_blocks(4).tolist() == [1, 2, 3, 4]
    hashed(pool, 1, 2, 3)
    pool.free_blocks(ids(4, 3, 2, 1))
    assert pool.free_order() == [4, 5, 6, 7, 3, 2, 1]
    pool.touch(ids(2))
    assert pool.free_order() == [4, 5, 6, 7, 3, 1]
    pool.free_blocks(ids(2))
    assert pool.free_order() == [4, 5, 6, 7, 3, 1, 2]
    assert pool.get_new_blocks(5).tolist() == [4, 5, 6, 7, 3]
    assert [pool.get_cached_block(key(block)) for block in (1, 2, 3)] == [1, 2, None]
    assert events.take() == [BlockRemoved((key(3),))]
    assert pool.keys.evictions == 1


def test_block_pool_with_null_block_only_is_legal() -> None:
    pool = BlockPool(1)
    assert pool.get_num_free_blocks() == 0
    assert pool.get_usage() == 0.0
    assert pool.free_order() == []
    assert pool.reset_prefix_cache()
    with pytest.raises(BlockError, match="1 blocks asked for, 0 are free"):
        pool.get_new_blocks(1)


def test_block_pool_without_blocks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="at least 1 block"):
        BlockPool(0)


@pytest.mark.parametrize("block", [0, -1, 4, 100])
def test_block_pool_with_foreign_id_raises(block: int) -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(3)
    with pytest.raises(BlockError, match=f"block {block} is not one of this pool's blocks 1 .. 3"):
        pool.free_blocks(ids(1, block))
    with pytest.raises(BlockError, match=f"block {block} is not"):
        pool.evict_blocks(ids(block))
    assert pool.ref_counts(ids(1, 2, 3)).tolist() == [1, 1, 1]


def test_block_pool_double_free_raises() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(2)
    pool.free_blocks(ids(1))
    with pytest.raises(BlockError, match="double free of block 1"):
        pool.free_blocks(ids(2, 1))
    assert pool.ref_counts(ids(1, 2)).tolist() == [0, 1]
    assert pool.free_order() == [1, 3]


def test_block_pool_reset_with_blocks_in_use_fails(caplog: pytest.LogCaptureFixture) -> None:
    pool = BlockPool(6, journal=Journal(events=(events := EventQueue())))
    pool.get_new_blocks(3)
    hashed(pool, 1, 2)
    pool.free_blocks(ids(3, 2))
    with caplog.at_level(logging.WARNING, "hybridkv"):
        assert not pool.reset_prefix_cache()
    assert "1 blocks are in use" in caplog.text
    assert pool.get_cached_block(key(2)) == 2
    assert events.take() == []
    pool.free_blocks(ids(1))
    assert pool.free_order() == [3, 4, 5, 2, 1]
    assert pool.reset_prefix_cache()
    assert pool.free_order() == [3, 4, 5, 2, 1]
    assert pool.get_cached_block(key(2)) is None
    assert events.take() == [AllBlocksCleared()]
    assert events.take() == []


@pytest.mark.parametrize("count", [1, 3, 12])
def test_taken_blocks_lose_whole_and_partial_keys(count: int) -> None:
    journal = Journal(ranked=True)
    pool = BlockPool(count + 1, journal=journal)
    blocks = pool.get_new_blocks(count).tolist()
    for block in blocks:
        assert pool.publish_partial(0, block, b"parent %d" % block, b"tokens", 5)
        pool.keys.flag_supersedable(block)
        if block % 2:
            pool.keys.publish(0, (block,), (b"key %d" % block,))
    pool.free_blocks(ids(*blocks))
    pool.get_new_blocks(count)
    assert not pool.indexes[0].num_partial
    assert not len(pool.indexes[0])
    assert pool.keys.keyed() == []
    assert pool.keys.all_written(ids(*blocks))
    assert not len(pool.keys.take_supersedable(blocks))
    assert pool.keys.lost == [count]
    assert sorted(block for fact in journal.blocks or () if isinstance(fact, Lost) for block in fact.ids) == blocks


@pytest.mark.parametrize("count", [1, 12])
def test_taken_block_without_its_key_is_an_error(count: int) -> None:
    pool = BlockPool(count + 1)
    blocks = pool.get_new_blocks(count)
    pool.free_blocks(blocks)
    pool.keys.each_group[count] = 0  # as if it had a key
    with pytest.raises(CacheError, match=f"block {count} belongs to the index of group 0 but has no key"):
        pool.get_new_blocks(count)


def test_block_pool_with_fifth_partial_block_key_frees_a_block() -> None:
    """A parent has four tails. A block whose last key goes by a fifth is empty again, and counted so."""
    pool = BlockPool(8)
    blocks = pool.get_new_blocks(5).tolist()
    for block in blocks[:4]:
        assert pool.publish_partial(0, block, b"parent", bytes([block]) * 4)
    assert not pool.publish_partial(0, blocks[4], b"parent", bytes([blocks[0]]) * 4)  # known already
    pool.free_blocks(ids(*blocks[:4]))
    assert pool.free_order() == [6, 7, 1, 2, 3, 4]
    assert pool.publish_partial(0, blocks[4], b"parent", b"five")
    assert pool.free_order() == [1, 6, 7, 2, 3, 4]
    assert (pool.keys.given, pool.keys.lost, pool.keys.per_group()) == ([5], [1], [4])
    assert pool.keys.evictions == 1


# -- the order of free blocks, and rows of blocks


def test_free_order_positions_restart_before_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are 32 bits wide: with a small bound the ring is written anew often, and nothing is lost."""
    monkeypatch.setattr("hybridkv.cache.spaces.one_size._FARTHEST", 30)
    random, order, naive = Random(0), FreeOrder(12), list(range(1, 12))
    for _ in range(2000):
        gone = random.sample(naive, random.randint(0, len(naive)))
        order.remove(ids(*gone))
        naive = [block for block in naive if block not in gone]
        if random.random() < 0.5:
            order.append(ids(*gone))
            naive = naive + gone
        else:
            order.prepend(ids(*gone))
            naive = gone + naive
        assert order.order().tolist() == naive
        assert np.abs(order._place[naive]).max() <= 30


def test_free_order_of_renamed_block_keeps_its_place() -> None:
    random, order, naive = Random(1), FreeOrder(12), list(range(1, 12))
    for _ in range(500):
        out = [block for block in range(1, 12) if block not in naive]
        source = random.sample(naive, random.randint(0, min(len(naive), len(out))))
        target = random.sample(out, len(source))
        order.rename(ids(*source), ids(*target))
        names = dict(zip(source, target, strict=True))
        naive = [names.get(block, block) for block in naive]
        gone = random.sample(naive, random.randint(0, len(naive)))
        order.remove(ids(*gone))
        naive = [block for block in naive if block not in gone]
        back = random.sample(
            [block for block in range(1, 12) if block not in naive], random.randint(0, 11 - len(naive))
        )
        if random.random() < 0.5:
            order.append(ids(*back))
            naive = naive + back
        else:
            order.prepend(ids(*back))
            naive = back + naive
        assert order.order().tolist() == naive
        assert len(order) == len(naive)
        if naive:
            assert order.first() == naive[0]


NOBODYS = 1_000_000


@pytest.mark.parametrize("few", [1, 40])
def test_block_rows_rename_all_live_cells_only(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
            if row not in plain and random.random() < 0.3:  # a window or a chunk begins later, or with the next token
                new = [0] * random.randrange(1, 5) + random.choice((new, []))
            rows.extend(row, np.array(new, np.int32))
            plain.setdefault(row, []).extend(new)
        held = [(block, of, at) for of, cells in sorted(plain.items()) for at, block in enumerate(cells) if block]
        asked = random.sample([*held, (NOBODYS, 0, 0)], min(len(held), random.randrange(1, 25)))
        where = rows.find(np.array([block for block, *_ in asked], np.int64))
        found = np.stack(where, axis=1).tolist()
        assert found == sorted([of, at] for block, of, at in asked if block != NOBODYS)
        if turn % 3 == 0 and held:
            sources = np.array([block for block, *_ in random.sample(held, min(len(held), 20))], np.int64)
            targets = np.arange(10_000 + 20 * turn, 10_000 + 20 * turn + len(sources))
            rows.rewrite(sources, targets)
            new_names = dict(zip(sources.tolist(), targets.tolist(), strict=True))
            plain = {row: [new_names.get(block, block) for block in cells] for row, cells in plain.items()}
            assert {row: rows.ids(row).tolist() for row in plain} == plain
