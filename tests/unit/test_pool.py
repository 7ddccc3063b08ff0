"""The pool against the vectors of docs/contracts.md, 2."""

import logging

import numpy as np
import pytest

from hybridkv.cache import AllBlocksCleared, BlockPool, BlockRemoved
from hybridkv.cache.journal import Observers
from hybridkv.errors import BlockError, ConfigError
from hybridkv.observe.events import EventQueue

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


def ids(*blocks: int) -> Ids:
    return np.array(blocks, np.int32)


def key(block: int) -> bytes:
    return bytes([block]) * 32


def hashed(pool: BlockPool, *blocks: int) -> None:
    pool.publish(0, blocks, [key(block) for block in blocks])


def test_pool_of_eight() -> None:
    pool = BlockPool(8, observers=Observers(events=EventQueue()))
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
    assert pool.take_events() == [BlockRemoved((key(3),))]
    assert pool.evictions == 1


def test_the_null_block_alone() -> None:
    pool = BlockPool(1)
    assert pool.get_num_free_blocks() == 0
    assert pool.get_usage() == 0.0
    assert pool.free_order() == []
    assert pool.reset_prefix_cache()
    with pytest.raises(BlockError, match="1 blocks asked for, 0 are free"):
        pool.get_new_blocks(1)


def test_a_pool_needs_the_null_block() -> None:
    with pytest.raises(ConfigError, match="at least 1 block"):
        BlockPool(0)


@pytest.mark.parametrize("block", [0, -1, 4, 100])
def test_foreign_ids(block: int) -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(3)
    with pytest.raises(BlockError, match=f"block {block} is none of this pool's 1 .. 3"):
        pool.free_blocks(ids(1, block))
    with pytest.raises(BlockError, match=f"block {block} is none"):
        pool.evict_blocks(ids(block))
    assert pool.ref_counts(ids(1, 2, 3)).tolist() == [1, 1, 1]


def test_double_free() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(2)
    pool.free_blocks(ids(1))
    with pytest.raises(BlockError, match="double free of block 1"):
        pool.free_blocks(ids(2, 1))
    assert pool.ref_counts(ids(1, 2)).tolist() == [0, 1]
    assert pool.free_order() == [1, 3]


def test_reset_only_when_nothing_is_in_use(caplog: pytest.LogCaptureFixture) -> None:
    pool = BlockPool(6, observers=Observers(events=EventQueue()))
    pool.get_new_blocks(3)
    hashed(pool, 1, 2)
    pool.free_blocks(ids(3, 2))
    with caplog.at_level(logging.WARNING, "hybridkv"):
        assert not pool.reset_prefix_cache()
    assert "1 blocks are in use" in caplog.text
    assert pool.get_cached_block(key(2)) == 2
    assert pool.take_events() == []
    pool.free_blocks(ids(1))
    assert pool.free_order() == [3, 4, 5, 2, 1]
    assert pool.reset_prefix_cache()
    assert pool.free_order() == [3, 4, 5, 2, 1]
    assert pool.get_cached_block(key(2)) is None
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.take_events() == []


def test_a_tail_that_has_to_go_frees_its_block_for_the_next() -> None:
    """A parent has four tails. A block whose last key goes by a fifth is empty again, and counted so."""
    pool = BlockPool(8)
    blocks = pool.get_new_blocks(5).tolist()
    for block in blocks[:4]:
        assert pool.publish_tail(0, block, b"parent", bytes([block]) * 4)
    assert not pool.publish_tail(0, blocks[4], b"parent", bytes([blocks[0]]) * 4)  # known already
    pool.free_blocks(ids(*blocks[:4]))
    assert pool.free_order() == [6, 7, 1, 2, 3, 4]
    assert pool.publish_tail(0, blocks[4], b"parent", b"five")
    assert pool.free_order() == [1, 6, 7, 2, 3, 4]
    assert (pool.keys.given, pool.keys.lost, pool.keys.per_group()) == ([5], [1], [4])
    assert pool.evictions == 1
