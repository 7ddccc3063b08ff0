"""Hashes of blocks, computed as routers and stores of the ecosystem compute them, or remembered from an earlier prompt.

    key(i) = H(canonical CBOR of (parent or root, tokens of block i, extra keys or null))

The root is H of the CBOR text string "vllm-none-hash" unless a seed is configured. A non-cryptographic H needs a random
root, so that collisions cannot be prepared. Canonical CBOR is defined in RFC 8949, 4.2.

Hashes are computed with arrays and hashlib, or with the package hybridkv-native if it is installed (docs/design/0024).
Both give the same bytes.

Hash chains of long prompts are remembered (docs/design/0023), so that a repeated prompt is compared, not hashed:

    root --its first block--> [ b0 b1 b2 ] --b3--> [ b3 b4 ]          a run of blocks with their hashes; runs branch
                                            --c3--> [ c3 c4 c5 ]      where prompts differ

Tokens are compared with tokens and extra keys with extra keys, so a hash never stands for other content.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final, NamedTuple

import cbor2
import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instance, integer, text
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import Extra
from hybridkv.units import MOST_COUNT, shown

Int32 = NDArray[np.int32]
Extras = Sequence[Extra | None]

ROOT_SEED: Final = "vllm-none-hash"
ALGORITHMS: Final = ("sha256_cbor", "xxhash_cbor")
REMEMBERED_BYTES: Final = 64 << 20
"""Room for the tokens and hashes of about 7 million tokens."""

INTERFACE: Final = 1
"""Version of the compiled module's functions and their arguments."""


Digest = Callable[[bytes], Any]
"""A function like those of hashlib: its result has ``digest()``."""
Suffixes = Sequence[bytes | None]
"""For each block the bytes that end it, or ``None`` for null."""


@cache  # of a hasher's few lengths
def _head(major: int, n: int) -> bytes:
    """Return the CBOR head of major type ``major`` with argument ``n``, in its shortest form."""
    if n < 24:
        return bytes([major << 5 | n])
    size = next(s for s in (1, 2, 4, 8) if n < 1 << 8 * s)
    return bytes([major << 5 | 23 + size.bit_length()]) + n.to_bytes(size, "big")


_NULL: Final = 0xF6
_NULL_ITEM: Final = bytes([_NULL])
_FEW: Final = 8  # up to so many blocks, a Python loop is faster than array operations; chosen by hand
_CHUNK: Final = 512  # blocks; the arrays of a chunk stay in the processor's cache; chosen by hand

# The head byte of an unsigned integer of 1, 2, 3 or 5 bytes, before its argument.
_HEAD_OF: Final = (0, 0, 0x18 << 8, 0x19 << 16, 0, 0x1A << 32)
_HEADS: Final = np.array(_HEAD_OF, np.uint64)


def _encode_blocks(tokens: NDArray[np.integer], block_size: int) -> list[bytes]:
    """Return the hashed bytes of each block after the parent: canonical CBOR of its tokens, as an array, and null.

    ``tokens`` holds n * block_size ids in 0 .. 2**32 - 1. O(tokens).
    """
    blocks = len(tokens) // block_size
    if blocks <= _FEW:
        head = _head(4, block_size)
        return [
            b"".join((head, *map(_ENCODED.__getitem__, row), _NULL_ITEM))
            for row in tokens.reshape(blocks, block_size).tolist()
        ]
    size = _CHUNK * block_size
    return [
        part for start in range(0, len(tokens), size) for part in _encode_many(tokens[start : start + size], block_size)
    ]


class _Encoded(dict[int, bytes]):
    """CBOR of token ids. The first ``most`` ids that are asked for are remembered, in about 140 bytes each."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __missing__(self, n: int) -> bytes:
        size = 1 if n < 24 else 2 if n < 1 << 8 else 3 if n < 1 << 16 else 5
        found = (_HEAD_OF[size] | n).to_bytes(size, "big")
        if len(self) < self._most:
            self[n] = found
        return found


_ENCODED: Final = _Encoded(1 << 16)


def _encode_many(tokens: NDArray[np.integer], block_size: int) -> list[bytes]:
    """Encode blocks as ``_encode_blocks`` in array operations.

    Every item (a block's head, its tokens, null) becomes one integer whose ``size`` low bytes are its encoding. First
    the bytes at distance 5 from the ends of all items are written, then those at 4, ... 1. Bytes that an item writes
    before its own belong to earlier items, which later overwrite them at a smaller distance.
    """
    stride, head = block_size + 2, _head(4, block_size)
    words = np.zeros(len(tokens) // block_size * stride, np.uint64)
    words.reshape(-1, stride)[:, 1:-1] = tokens.reshape(-1, block_size)
    sizes = (words >= 24).view(np.uint8) + (words >= 256) + (words >= 65536).view(np.uint8) * 2 + np.uint8(1)
    sizes[::stride] = len(head)
    words |= _HEADS[sizes]
    words[::stride] = int.from_bytes(head, "big")
    words[stride - 1 :: stride] = _NULL
    octets = words.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
    place = np.cumsum(sizes, dtype=np.int64)
    stops = place[stride - 1 :: stride].tolist()
    widest = int(sizes.max())
    out = np.empty(stops[-1] + widest, np.uint8)  # the first items also write before their own bytes
    for distance in range(widest, 0, -1):
        out[place] = octets[:, distance - 1]
        place += 1
    body = out[widest:].tobytes()
    return [body[start:stop] for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


class ArrayDigests:
    """Hashes blocks of ``block_size`` tokens with ``digest``, whose hashes have ``size`` bytes.

    A block's hash is H(canonical CBOR of (parent, tokens of the block, its suffix or null)). Tokens are whole blocks of
    ids in 0 .. 2**32 - 1, of any integer type.
    """

    def __init__(self, block_size: int, digest: Digest, size: int) -> None:
        self._block_size, self._digest = block_size, digest
        self._before = _head(4, 3) + _head(2, size)  # an array of three, and in it the head of the parent

    def chain(self, parent: bytes, tokens: NDArray[np.integer], suffixes: Suffixes | None) -> Iterator[list[bytes]]:
        """Yield the hashes of consecutive blocks, some at a time, and compute no more than are asked for. O(tokens)."""
        before, digest, key = self._before, self._digest, parent
        parts = self._parts(tokens, suffixes)
        for first in range(0, len(parts), _CHUNK):
            yield [key := digest(before + key + part).digest() for part in parts[first : first + _CHUNK]]

    def rows(self, parents: Sequence[bytes], tokens: NDArray[np.integer], suffixes: Suffixes | None) -> list[bytes]:
        """Return the hashes of unrelated blocks, each after its own parent. O(tokens)."""
        before, digest = self._before, self._digest
        parts = self._parts(tokens, suffixes)
        return [digest(before + parent + part).digest() for parent, part in zip(parents, parts, strict=True)]

    def _parts(self, tokens: NDArray[np.integer], suffixes: Suffixes | None) -> list[bytes]:
        """Return the hashed bytes of each block after its parent."""
        parts = _encode_blocks(tokens, self._block_size)
        if suffixes is not None:
            for i, suffix in enumerate(suffixes):
                if suffix is not None:
                    parts[i] = parts[i][:-1] + suffix
        return parts


class CompiledDigests:
    """Hashes as ArrayDigests, by SHA-256 in ``module``, which is hybridkv_native."""

    def __init__(self, block_size: int, module: Any) -> None:  # noqa: ANN401 - a module that may not be installed
        self._block_size, self._chain, self._rows = block_size, module.sha256_chain, module.sha256_rows

    def chain(self, parent: bytes, tokens: NDArray[np.integer], suffixes: Suffixes | None) -> Iterator[list[bytes]]:
        """Yield hashes as ArrayDigests.chain; other threads run meanwhile."""
        yield self._chain(parent, _as_uint32(tokens), self._block_size, suffixes)

    def rows(self, parents: Sequence[bytes], tokens: NDArray[np.integer], suffixes: Suffixes | None) -> list[bytes]:
        """Return hashes as ArrayDigests.rows."""
        hashes: list[bytes] = self._rows(parents, _as_uint32(tokens), self._block_size, suffixes)
        return hashes


def _as_uint32(tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Return ``tokens`` as contiguous uint32; contiguous int32 is not copied."""
    if tokens.dtype == np.int32:
        tokens = tokens.view(np.uint32)
    return np.ascontiguousarray(tokens, np.uint32)


@cache
def compiled_module() -> Any | None:  # noqa: ANN401 - a module that may not be installed
    """Return hybridkv_native; ``None`` if it is not installed, or, with a warning, if it is of another version."""
    try:
        import hybridkv_native  # noqa: PLC0415 - optional
    except ImportError:
        return None
    if hybridkv_native.INTERFACE != INTERFACE:
        warnings.warn(
            f"hybridkv-native is not used: its interface is {hybridkv_native.INTERFACE}, hybridkv calls {INTERFACE}: "
            "install that of the same sources",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return hybridkv_native


_Start = tuple[bytes, Extra | None]
"""Start of a run: tokens of its first block, as bytes, and extra keys."""

LEAST_BLOCKS: Final = 256
"""Blocks of the shortest prompt that is remembered (docs/design/0023): a shorter one is hashed as fast."""

_BLOCK_BYTES: Final = 80
"""Bytes of a hash object with its list entries."""
_RUN_BYTES: Final = 1000
"""Bytes of a run without its tokens and hashes."""


class _Run:
    """Consecutive blocks of a prompt, ``blocks`` of them, with their hashes.

    ``following`` has the runs that follow, by how they start. ``octets`` are the tokens as int32: a bytearray compares
    itself with an array in place, in a third of the time that numpy takes. ``extras`` has one entry a block; ``None``
    if no block has any. ``joined`` are hashes that were not read yet: most prompts never return, and objects for their
    hashes would cost more than everything else here.
    """

    __slots__ = ("_hashes", "_joined", "blocks", "extras", "following", "octets", "parent", "start")

    def __init__(
        self,
        parent: _Run | None,
        start: _Start,
        tokens: Int32,
        blocks: int,
        *,
        joined: bytearray,
        extras: Extras | None,
    ) -> None:
        self.parent, self.start, self.blocks = parent, start, blocks
        self.octets, self.extras = bytearray(tokens.data), extras
        self._hashes, self._joined = list[bytes](), joined
        self.following: dict[_Start, _Run] = {}

    @property
    def tokens(self) -> Int32:
        """Tokens in place; keep no reference while the run grows."""
        return np.frombuffer(self.octets, np.int32)

    @property
    def hashes(self) -> list[bytes]:
        """One hash a block."""
        if self._joined:
            size = len(self._joined) // (self.blocks - len(self._hashes))
            self._hashes += np.frombuffer(self._joined, f"V{size}").tolist()
            self._joined = bytearray()
        return self._hashes

    def size_bytes(self) -> int:
        """Return about how many bytes the run takes."""
        return len(self.octets) + _BLOCK_BYTES * self.blocks + _RUN_BYTES

    def lengthen(self, tokens: Int32, blocks: int, joined: bytearray, extras: Extras | None) -> None:
        """Append ``blocks`` blocks."""
        if self.extras is not None or extras is not None:
            none: list[Extra | None] = [None]
            self.extras = [*(self.extras or none * self.blocks), *(extras or none * blocks)]
        self.octets += tokens.data
        self._joined += joined
        self.blocks += blocks

    def split(self, blocks: int, size: int) -> _Run:
        """Cut the first ``blocks`` blocks, of ``size`` tokens, off into a run of their own, which this one follows."""
        extras = None if self.extras is None else self.extras[:blocks]
        head = _Run(self.parent, self.start, self.tokens[: blocks * size], blocks, joined=bytearray(), extras=extras)
        head._hashes, self._hashes = self.hashes[:blocks], self.hashes[blocks:]
        if self.parent is not None:
            self.parent.following[self.start] = head
        self.octets = bytearray(self.tokens[blocks * size :].data)
        self.extras = None if self.extras is None else self.extras[blocks:]
        self.blocks -= blocks
        self.parent, self.start = head, _start(self.tokens, self.extras, 0, size)
        head.following[self.start] = self
        return head


class Place(NamedTuple):
    """The end of a prompt's known beginning: after the first ``last`` blocks of ``run``, ``blocks`` in all.

    ``changes`` counts the chains that had been remembered when it was found.
    """

    run: _Run
    last: int
    blocks: int
    changes: int


class RememberedChains:
    """Remembers the hashes of prompts in blocks of ``block_size`` tokens, in at most ``max_bytes``.

    The least recently used chains are forgotten first. The caller decides which prompts are worth it; see LEAST_BLOCKS.
    May be called from several threads.
    """

    def __init__(self, block_size: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._size = block_size
        self._root = _Run(None, (b"", None), np.empty(0, np.int32), 0, joined=bytearray(), extras=None)
        self._nowhere = Place(self._root, 0, 0, -1)
        self._used: dict[_Run, None] = {}  # all but the root, least recently used first; after their followers
        self._changes = 0
        self._lock = threading.Lock()
        self.num_bytes = 0

    def find(self, tokens: Int32, extras: Extras | None) -> tuple[list[bytes], Place]:
        """Return the hashes of the leading blocks that are known, a new list. O(those blocks) in array comparisons."""
        with self._lock:
            place = self._place(tokens, extras)
            if place is self._nowhere:  # most prompts
                return [], place
            *before, last = _upwards(place.run)
            hashes = last.hashes[: place.last]
            return list(chain(*(run.hashes for run in before), hashes)) if before else hashes, place

    def remember(self, tokens: Int32, extras: Extras | None, place: Place, joined: bytearray) -> None:
        """Remember the joined hashes of the blocks of ``tokens`` after ``place``. O(new blocks).

        ``place`` is that of ``find``; ``joined`` is kept.
        """
        size, all_blocks = self._size, len(tokens) // self._size
        with self._lock:
            start = _start(tokens, extras, place.blocks, size)
            if place.changes != self._changes and (place is not self._nowhere or start in self._root.following):
                now = self._place(tokens, extras)  # another thread remembered something
                if not place.blocks <= now.blocks < all_blocks:
                    return
                del joined[: len(joined) // (all_blocks - place.blocks) * (now.blocks - place.blocks)]
                place, start = now, _start(tokens, extras, now.blocks, size)
            run, last, first, _ = place
            self._changes += 1
            if last < run.blocks:
                run = run.split(last, size)
                self.num_bytes += _RUN_BYTES
            new, before = tokens[first * size : all_blocks * size], 0
            own = None if extras is None else list(extras[first:all_blocks])
            if run is not self._root and not run.following:
                before = run.size_bytes()
                run.lengthen(new, all_blocks - first, joined, own)
            else:
                run.following[start] = run = _Run(run, start, new, all_blocks - first, joined=joined, extras=own)
            self.num_bytes += run.size_bytes() - before
            self._touch(_upwards(run))
            while self.num_bytes > self.max_bytes and self._used:
                self._forget(next(iter(self._used)))

    def _place(self, tokens: Int32, extras: Extras | None) -> Place:
        """Return where the known beginning of ``tokens`` ends, and mark it as used."""
        size, blocks = self._size, len(tokens) // self._size
        run = self._root.following.get(_start(tokens, extras, 0, size))
        if run is None:
            return self._nowhere
        path, at, count = list[_Run](), 0, 0
        while run is not None:
            path.append(run)
            count = _common(run, tokens[at * size :], None if extras is None else extras[at:blocks], size)
            at += count
            whole = count == run.blocks and at < blocks
            run = run.following.get(_start(tokens, extras, at, size)) if whole else None
        self._touch(path)
        return Place(path[-1], count, at, self._changes)

    def _touch(self, path: Sequence[_Run]) -> None:
        """Mark ``path``, from the root on, as used. A run is forgotten before the run that it follows."""
        for run in reversed(path):
            self._used.pop(run, None)
            self._used[run] = None

    def _forget(self, run: _Run) -> None:
        """Forget ``run``, which no run follows."""
        del self._used[run]
        if run.parent is not None:
            del run.parent.following[run.start]
        self.num_bytes -= run.size_bytes()


def _upwards(run: _Run | None) -> list[_Run]:
    """Return the runs from the first below the root to ``run``."""
    path: list[_Run] = []
    while run is not None and run.parent is not None:
        path.append(run)
        run = run.parent
    return path[::-1]


def _start(tokens: Int32, extras: Extras | None, block: int, size: int) -> _Start:
    return tokens[block * size : (block + 1) * size].tobytes(), None if extras is None else extras[block]


def _common(run: _Run, tokens: Int32, extras: Extras | None, size: int) -> int:
    """Return how many blocks ``run`` has in common with ``tokens`` and ``extras``."""
    blocks = min(run.blocks, len(tokens) // size)
    tokens = tokens[: blocks * size]
    if run.octets != tokens.data and (differ := run.tokens[: len(tokens)] != tokens).any():
        blocks = int(differ.argmax()) // size
    if run.extras is None and extras is None:
        return blocks
    none: list[Extra | None] = [None] * blocks
    mine = none if run.extras is None else list(run.extras[:blocks])
    theirs = none if extras is None else list(extras[:blocks])
    if mine == theirs:
        return blocks
    return next(i for i, (one, other) in enumerate(zip(mine, theirs, strict=True)) if one != other)


def _digest_of(algorithm: str) -> Digest:
    if not isinstance(algorithm, str):
        raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {shown(algorithm)}")
    if algorithm == "sha256_cbor":
        return hashlib.sha256
    if algorithm == "xxhash_cbor":
        try:
            import xxhash  # noqa: PLC0415 - optional dependency
        except ImportError as error:
            raise ConfigError("xxhash_cbor needs the package xxhash: pip install 'hybridkv[hash]'") from error
        digest: Digest = xxhash.xxh3_128
        return digest
    raise ConfigError(f"unknown hash algorithm {shown(algorithm)}: use one of {', '.join(ALGORITHMS)}")


class BlockHasher:
    """Hashes blocks of ``block_size`` tokens.

    Args:
        block_size: Tokens of a hash block.
        algorithm: "sha256_cbor", or "xxhash_cbor" with a random root.
        seed: Replaces the text of which the root is the hash.
        root: The root itself; random bytes are required for a non-cryptographic hash.
        remembered_bytes: Most bytes for chains of long prompts, which are compared when they return (docs/design/0023).

    Raises:
        ConfigError: For any other value.
    """

    def __init__(
        self,
        block_size: int,
        algorithm: str = "sha256_cbor",
        *,
        seed: str | None = None,
        root: bytes | None = None,
        remembered_bytes: int = REMEMBERED_BYTES,
    ) -> None:
        self.block_size = integer("the hash block", block_size, most=MOST_COUNT)
        if self.block_size < 1:
            raise ConfigError(f"the hash block must be at least 1 token, got {block_size}")
        self.algorithm = algorithm
        digest = _digest_of(algorithm)
        size = len(digest(b"").digest())
        if algorithm != "sha256_cbor" and root is None:
            raise ConfigError(
                f"{algorithm} is not collision resistant: hand in a random root, root=os.urandom({size}), "
                "or use sha256_cbor"
            )
        if root is not None and len(instance("root", root, bytes)) != size:
            raise ConfigError(f"the root of {algorithm} is {size} bytes long, got {len(root)}")
        named = ROOT_SEED if seed is None else text("seed", seed)
        self.root = root if root is not None else digest(cbor2.dumps(named, canonical=True)).digest()
        module = compiled_module() if algorithm == "sha256_cbor" else None
        self._digests = (
            ArrayDigests(self.block_size, digest, size) if module is None else CompiledDigests(self.block_size, module)
        )
        self.remembered = RememberedChains(self.block_size, integer("remembered_bytes", remembered_bytes, 0))

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.integer], extras: Extras | None = None
    ) -> list[bytes]:
        """Return the hashes of consecutive full blocks. O(tokens); a known beginning is only compared.

        Args:
            parent: Hash of the block before them; ``None`` for the root.
            tokens: Integer array; an incomplete last block is left out.
            extras: Extra keys of each block; ``None`` if no block has any.
        """
        if parent is not None or len(tokens) < LEAST_BLOCKS * self.block_size or not self.remembered.max_bytes:
            return list(chain.from_iterable(self._chunks(parent, tokens, extras)))
        ids = np.ascontiguousarray(tokens, np.int32)
        hashes, place = self.remembered.find(ids, extras)
        done, joined = place.blocks, bytearray()
        rest = None if extras is None else extras[done:]
        for part in self._chunks(hashes[-1] if done else None, tokens[done * self.block_size :], rest):
            hashes += part
            joined += b"".join(part)
        if joined:
            self.remembered.remember(ids, extras, place, joined)
        return hashes

    def _chunks(
        self, parent: bytes | None, tokens: NDArray[np.integer], extras: Extras | None
    ) -> Iterator[list[bytes]]:
        """Yield the hashes of all full blocks, some at a time."""
        blocks = len(tokens) // self.block_size
        whole = np.asarray(tokens[: blocks * self.block_size])
        return self._digests.chain(self.root if parent is None else parent, whole, _suffixes(extras, blocks))

    def hash_rows(
        self, parents: Sequence[bytes | None], tokens: NDArray[np.integer], extras: Extras | None = None
    ) -> list[bytes]:
        """Return the hashes of unrelated blocks.

        Args:
            parents: Hash of the block before each; ``None`` for the root.
            tokens: [n, block_size], one block a row.
            extras: Extra keys of each block; ``None`` if no block has any.
        """
        root = self.root
        return self._digests.rows(
            [parent or root for parent in parents], tokens.reshape(-1), _suffixes(extras, len(parents))
        )


def _suffixes(extras: Extras | None, blocks: int) -> Suffixes | None:
    """Return the encoded extra keys of the first ``blocks`` blocks.

    ``None`` stands for a block without any, and for all if no block has any.
    """
    if extras is None:
        return None
    return [None if extra is None else cbor2.dumps(extra, canonical=True) for extra in extras[:blocks]]


class EngineHashes:
    """Stands for a hasher if an engine hashes its requests itself and lends them (``hybridkv.request.Lent``).

    Args:
        block_size: Tokens of each key.
    """

    root = b""

    def __init__(self, block_size: int) -> None:
        self.block_size = integer("block_size", block_size, 1, MOST_COUNT)

    def hash_chain(self, parent: bytes | None, tokens: NDArray[np.int32], extras: Extras | None = None) -> list[bytes]:
        """Return no hashes for less than a block of tokens; raise ConfigError otherwise.

        Args:
            parent: Ignored.
            tokens: Token ids.
            extras: Ignored.
        """
        del parent, extras
        if len(tokens) >= self.block_size:
            raise ConfigError("the engine hashes its requests itself: lend theirs with their hashes")
        return []

    def hash_rows(
        self, parents: Sequence[bytes | None], tokens: NDArray[np.int32], extras: Extras | None = None
    ) -> list[bytes]:
        """Raise ConfigError for a full block.

        Args:
            parents: Ignored.
            tokens: Token ids.
            extras: Ignored.
        """
        del parents
        return self.hash_chain(None, tokens.ravel(), extras)
