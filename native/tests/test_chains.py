"""hybridkv-native beside hybridkv's own numpy and hashlib, byte by byte: `make test-native`."""

import hashlib
import threading

import hybridkv_native
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache import BlockHasher
from hybridkv.cache.hashing import INTERFACE, ArrayDigests, CompiledDigests

ROOT = hashlib.sha256(b"root").digest()
IDS = st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 70_000), st.integers(0, 300))
TAILS = st.one_of(st.none(), st.binary(max_size=300))


def both(block_size: int) -> tuple[ArrayDigests, CompiledDigests]:
    return ArrayDigests(block_size, hashlib.sha256, 32), CompiledDigests(block_size, hybridkv_native)


def test_it_is_what_hashers_use() -> None:
    assert hybridkv_native.INTERFACE == INTERFACE
    assert isinstance(BlockHasher(16)._digests, CompiledDigests)


@given(st.integers(1, 40), st.lists(IDS, max_size=300), st.data())
def test_chains_and_rows_are_those_of_arrays(block_size: int, ids: list[int], data: st.DataObject) -> None:
    blocks = len(ids) // block_size
    tokens = np.array(ids[: blocks * block_size], np.int64)
    tails = data.draw(st.one_of(st.none(), st.lists(TAILS, min_size=blocks, max_size=blocks)))
    arrays, compiled = both(block_size)
    expected = [key for part in arrays.chain(ROOT, tokens, tails) for key in part]
    assert [key for part in compiled.chain(ROOT, tokens, tails) for key in part] == expected
    parents = [ROOT, *expected[:-1]][:blocks]
    assert compiled.rows(parents, tokens, tails) == arrays.rows(parents, tokens, tails) == expected


@pytest.mark.parametrize("block_size", [23, 24, 255, 256, 65_535, 65_536])
def test_every_length_of_a_block(block_size: int) -> None:
    tokens = np.arange(2 * block_size, dtype=np.int32)
    arrays, compiled = both(block_size)
    assert [*compiled.chain(ROOT, tokens, None)] == [[key for part in arrays.chain(ROOT, tokens, None) for key in part]]


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64, np.uint16])
def test_tokens_of_every_type_and_stride(kind: type[np.integer]) -> None:
    tokens = np.arange(1_000, 1_128).astype(kind)
    arrays, compiled = both(16)
    expected = [*arrays.chain(ROOT, tokens, None)]
    twice = np.repeat(tokens, 2)
    frozen = tokens.copy()
    frozen.flags.writeable = False
    for given_tokens in (tokens, twice[::2], frozen):
        assert [*compiled.chain(ROOT, given_tokens, None)] == expected


def test_threads_hash_at_once() -> None:
    arrays, compiled = both(16)
    prompts = [np.arange(n, n + 16 * 2_000, dtype=np.int32) for n in range(4)]
    expected = [[key for part in arrays.chain(ROOT, prompt, None) for key in part] for prompt in prompts]
    found: list[list[list[bytes]]] = [[] for _ in prompts]

    def hash_often(which: int) -> None:
        for _ in range(20):
            found[which] += compiled.chain(ROOT, prompts[which], None)

    threads = [threading.Thread(target=hash_often, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[one] * 20 for one in expected]


TWO = np.arange(32, dtype=np.uint32)


@pytest.mark.parametrize(
    ("given_arguments", "error"),
    [
        ((b"short", TWO, 16, None), ValueError),
        ((ROOT, TWO, 0, None), ValueError),
        ((ROOT, TWO, 24, None), ValueError),
        ((ROOT, TWO, 16, [None]), ValueError),
        ((ROOT, TWO, 16, [None, "text"]), TypeError),
        ((ROOT, TWO.astype(np.int64), 16, None), TypeError),
        ((ROOT, TWO[::2], 16, None), TypeError),
        ((ROOT, TWO.reshape(2, 16), 16, None), TypeError),
        ((ROOT, TWO, -1, None), TypeError),
        ((ROOT, TWO[:0], 2**64 - 9, None), ValueError),
        ((None, TWO, 16, None), TypeError),
    ],
)
def test_what_cannot_be_hashed_is_refused(given_arguments: tuple[object, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        hybridkv_native.sha256_chain(*given_arguments)


@pytest.mark.parametrize(
    ("parents", "error"),
    [([ROOT], ValueError), ([ROOT, b"x"], ValueError), ([ROOT, None], TypeError), (ROOT, TypeError)],
)
def test_rows_want_a_parent_each(parents: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        hybridkv_native.sha256_rows(parents, TWO, 16, None)
