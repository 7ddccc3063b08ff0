"""Block hashes: the vectors of docs/contracts.md, 3, and cbor2 as the judge of our encoder."""

import hashlib

import cbor2
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache import BlockHasher
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import Extra

ONE_TO_16 = np.arange(1, 17)
FIRST = "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682"
SECOND = "2533ea50426b36e9e4d68296cac6bce8cf602e46957d0fe40b368b33d87bf3bf"


def reference_hash(parent: bytes, tokens: list[int], extra: Extra | None) -> bytes:
    return hashlib.sha256(cbor2.dumps((parent, tuple(tokens), extra), canonical=True)).digest()


def test_hash_root_matches_the_contract() -> None:
    assert BlockHasher(16).root.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"


def test_hash_chain_of_two_blocks_matches_the_contract() -> None:
    keys = BlockHasher(16).hash_chain(None, np.arange(1, 33))
    assert [key.hex() for key in keys] == [FIRST, SECOND]


def test_hash_of_every_integer_width_matches_the_contract() -> None:
    tokens = np.array([0, 23, 24, 255, 256, 65535, 65536, 151643, 4294967295, 7, 8, 9, 10, 11, 12, 13])
    (key,) = BlockHasher(16).hash_chain(None, tokens)
    assert key.hex() == "102c4c555e5e27a21728d676a077e7ef720b4b38dc36402eb97c0dd1d9819049"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ((("cache_salt", "tenant-a"),), "d4fdd9f3dab139eafd01550f43781481256e9531b59b55ea4656df8f49124fcf"),
        ((("lora", "sql", "/adapters/sql"),), "af683cf8d41bb9f34989f88b25014e81586ea970a60adbff123aeae94d14982c"),
    ],
)
def test_hash_with_extra_keys_matches_the_contract(extra: Extra, expected: str) -> None:
    hasher = BlockHasher(16)
    assert hasher.hash_chain(None, ONE_TO_16, [extra])[0].hex() == expected
    assert hasher.hash_rows([None], ONE_TO_16.reshape(1, 16), [extra])[0].hex() == expected


def test_hash_chain_with_partial_block_skips_it() -> None:
    hasher = BlockHasher(16)
    assert hasher.hash_chain(None, np.arange(1, 16)) == []
    assert [key.hex() for key in hasher.hash_chain(None, np.arange(1, 32))] == [FIRST]


def test_hash_chain_continues_after_its_parent() -> None:
    hasher = BlockHasher(16)
    assert hasher.hash_chain(bytes.fromhex(FIRST), np.arange(17, 33))[0].hex() == SECOND
    keys = hasher.hash_rows([None, bytes.fromhex(FIRST)], np.arange(1, 33).reshape(2, 16))
    assert [key.hex() for key in keys] == [FIRST, SECOND]


@given(
    st.integers(1, 30),
    st.lists(st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 70_000), st.integers(0, 300)), max_size=100),
    st.booleans(),
)
def test_hash_encoder_writes_the_bytes_of_cbor2(size: int, tokens: list[int], salted: bool) -> None:
    hasher = BlockHasher(size)
    blocks = len(tokens) // size
    extras: list[Extra | None] | None = None
    if salted and blocks:
        extras = [(("cache_salt", "t"),), *[None] * (blocks - 1)]
    expected, parent = [], hasher.root
    for i in range(blocks):
        parent = reference_hash(parent, tokens[i * size : (i + 1) * size], extras[i] if extras else None)
        expected.append(parent)
    assert hasher.hash_chain(None, np.array(tokens, np.int64), extras) == expected
    if blocks:
        table = np.array(tokens[: blocks * size], np.int64).reshape(blocks, size)
        assert hasher.hash_rows([None, *expected[:-1]], table, extras) == expected


def test_hash_with_seed_or_root_gives_other_keys() -> None:
    seeded = BlockHasher(16, seed="mine")
    assert seeded.root == hashlib.sha256(cbor2.dumps("mine")).digest()
    rooted = BlockHasher(16, root=bytes(32))
    keys = {hasher.hash_chain(None, ONE_TO_16)[0] for hasher in (BlockHasher(16), seeded, rooted)}
    assert len(keys) == 3


def test_hash_without_cryptography_needs_a_random_root() -> None:
    with pytest.raises(ConfigError, match="not collision resistant"):
        BlockHasher(16, "xxhash_cbor")
    hasher = BlockHasher(16, "xxhash_cbor", root=b"r" * 16)
    expected = xxhash.xxh3_128_digest(cbor2.dumps((b"r" * 16, tuple(range(1, 17)), None), canonical=True))
    assert hasher.hash_chain(None, ONE_TO_16) == [expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "at least 1 token"),
        ({"block_size": 16, "algorithm": "md5"}, "unknown hash algorithm 'md5'"),
        ({"block_size": 16, "root": b"short"}, "32 bytes long, got 5"),
        ({"block_size": 16, "algorithm": "xxhash_cbor", "root": bytes(32)}, "16 bytes long, got 32"),
    ],
)
def test_hasher_with_invalid_options_is_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockHasher(**options)  # type: ignore[arg-type]  # wrong on purpose
