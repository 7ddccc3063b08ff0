"""Which digests a hasher uses: the compiled ones where their package is installed and speaks the same interface."""

import hashlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridkv.cache import BlockHasher
from hybridkv.cache.hashing import INTERFACE, ArrayDigests, CompiledDigests, compiled_module

ROOT = hashlib.sha256(b"root").digest()
ARRAYS = ArrayDigests(4, hashlib.sha256, 32)


class Module(SimpleNamespace):
    """What hybridkv_native offers, by numpy and hashlib; says what it was handed."""

    def __init__(self, interface: int = INTERFACE) -> None:
        super().__init__(INTERFACE=interface)
        self.handed: list[str] = []

    def sha256_chain(
        self, parent: bytes, tokens: NDArray[np.uint32], block_size: int, tails: list[bytes | None] | None
    ) -> list[bytes]:
        self.handed.append(f"chain {tokens.dtype} {block_size} {tails}")
        return [key for part in ARRAYS.chain(parent, tokens, tails) for key in part]

    def sha256_rows(
        self, parents: list[bytes], tokens: NDArray[np.uint32], block_size: int, tails: list[bytes | None] | None
    ) -> list[bytes]:
        self.handed.append(f"rows {tokens.dtype} {block_size} {tails}")
        return ARRAYS.rows(parents, tokens, tails)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Whether the module is there is asked anew, before and after."""
    compiled_module.cache_clear()
    yield monkeypatch
    compiled_module.cache_clear()


def test_hasher_with_native_package_uses_compiled_digests(installed: pytest.MonkeyPatch) -> None:
    module = Module()
    installed.setitem(sys.modules, "hybridkv_native", module)
    hasher = BlockHasher(4, root=ROOT)
    tokens = np.arange(8, dtype=np.int32)
    keys = hasher.hash_chain(None, tokens, [(("cache_salt", "a"),), None])
    expected = [key for part in ARRAYS.chain(ROOT, tokens, [b"\x81\x82jcache_saltaa", None]) for key in part]
    assert keys == expected
    assert hasher.hash_rows([None, keys[0]], tokens.reshape(2, 4), [(("cache_salt", "a"),), None]) == expected
    assert module.handed == [f"{way} uint32 4 [b'\\x81\\x82jcache_saltaa', None]" for way in ("chain", "rows")]


def test_hasher_without_native_package_uses_array_digests(installed: pytest.MonkeyPatch) -> None:
    installed.setitem(sys.modules, "hybridkv_native", None)
    assert isinstance(BlockHasher(4)._digests, ArrayDigests)


def test_hasher_with_other_native_interface_warns_and_ignores_it(installed: pytest.MonkeyPatch) -> None:
    installed.setitem(sys.modules, "hybridkv_native", Module(INTERFACE + 1))
    with pytest.warns(RuntimeWarning, match=f"its interface is {INTERFACE + 1}, hybridkv calls {INTERFACE}"):
        assert isinstance(BlockHasher(4)._digests, ArrayDigests)


def test_hasher_with_xxhash_uses_array_digests(installed: pytest.MonkeyPatch) -> None:
    installed.setitem(sys.modules, "hybridkv_native", Module())
    assert isinstance(BlockHasher(4, "xxhash_cbor", root=bytes(16))._digests, ArrayDigests)
    assert isinstance(BlockHasher(4)._digests, CompiledDigests)
