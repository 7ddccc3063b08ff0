"""One key may stand for several blocks; a look-up gives the first."""

import pytest

from hybridkv.cache.keys import BlockKeys
from hybridkv.errors import CacheError

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def test_unknown_keys() -> None:
    index = BlockKeys(64).indexes[0]
    assert index.get(A) is None
    assert index.leading_run([A, B]).tolist() == []
    assert index.leading_run([]).tolist() == []
    assert len(index) == 0


def test_duplicates_show_in_order_of_insertion() -> None:
    index = BlockKeys(64).indexes[0]
    index.add([A, B], [1, 2])
    index.add([A], [3])
    index.add([A], [4])
    assert index.get(A) == 1
    assert list(index.entries()) == [(A, 1), (A, 3), (A, 4), (B, 2)]
    assert len(index) == 2
    index.remove(A, 1)
    assert index.get(A) == 3
    index.remove(A, 4)
    assert index.get(A) == 3
    index.remove(A, 3)
    assert index.get(A) is None
    assert list(index.entries()) == [(B, 2)]


def test_duplicates_within_one_call() -> None:
    index = BlockKeys(64).indexes[0]
    index.add([A, A, B], [1, 2, 3])
    assert list(index.entries()) == [(A, 1), (A, 2), (B, 3)]
    index.remove(A, 1)
    assert index.get(A) == 2


def test_the_same_block_twice_is_one_entry() -> None:
    index = BlockKeys(64).indexes[0]
    index.add([A], [1])
    index.add([A], [1])
    assert list(index.entries()) == [(A, 1)]


def test_removing_what_is_not_there_raises() -> None:
    index = BlockKeys(64).indexes[0]
    index.add([A], [1])
    with pytest.raises(CacheError, match="block 2 is not indexed"):
        index.remove(B, 2)


def test_leading_run_stops_at_the_first_miss() -> None:
    index = BlockKeys(64).indexes[0]
    index.add([A, C], [5, 6])
    assert index.leading_run([A, B, C]).tolist() == [5]
    assert index.leading_run([A, C]).tolist() == [5, 6]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 160, 161, 700])
def test_leading_run_over_several_chunks(length: int) -> None:
    index = BlockKeys(64).indexes[0]
    keys = [i.to_bytes(32, "big") for i in range(1000)]
    index.add(keys[:length], list(range(1, length + 1)))
    index.add(keys[length + 1 :], list(range(2000, 2999 - length)))
    assert index.leading_run(keys).tolist() == list(range(1, length + 1))


def test_clear() -> None:
    index = BlockKeys(64).indexes[0]
    index.add([A, A], [1, 2])
    index.clear()
    assert list(index.entries()) == []
    index.add([A], [3])
    assert list(index.entries()) == [(A, 3)]


def test_many_are_removed_at_once() -> None:
    index = BlockKeys(64).indexes[0]
    index.add([A, B, C], [1, 2, 3])
    index.remove_many([A, C], [1, 3])
    assert list(index.entries()) == [(B, 2)]
    index.add([A, A, B], [4, 5, 6])
    index.remove_many([A, B], [4, 6])
    assert list(index.entries()) == [(B, 2), (A, 5)]
    with pytest.raises(CacheError, match="block 9 is not indexed"):
        index.remove_many([A], [9])


def test_leading_run_stops_where_it_is_told() -> None:
    index = BlockKeys(64).indexes[0]
    index.add([A, B, C], [5, 6, 7])
    assert [index.leading_run([A, B, C], stop).tolist() for stop in (0, 1, 2, 3, 4)] == [
        [],
        [5],
        [5, 6],
        [5, 6, 7],
        [5, 6, 7],
    ]
