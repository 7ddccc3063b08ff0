"""Prefixes in a store of blocks: the keys of their blocks, and the longest prefix that the store has.

A request that resumes after E tokens needs, by kind of group:

    tokens     [ hash block | hash block | tail: E is inside a hash block ]
    all        b0    b1     b2           b3: partly used      every earlier token is read
    last                    b2           b3                   a window or a chunk
    state                                S                    exactly the state after E tokens
    of encoder e0    e1                                       all of the encoder's output, under its input's digest
    mark                                 m                    lists the tails after its hash block at which states end

Every key contains the hash of the whole hash blocks before it, in which salt, adapter and images are. The key of a
block that is used in part contains the tail too, and the images in it. A mark is written after all blocks of its
prefix. It says where to look, and the blocks that the store has say what is there. A block is there when all its shares
are: ranks write them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import lcm
from secrets import token_bytes
from typing import Final, NamedTuple, Protocol

import cbor2
import numpy as np

from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import Extra
from hybridkv.stores import BlockStore
from hybridkv.stores.marks import mark_bytes, tails_of
from hybridkv.stores.store import share_key

IDENTITY_BYTES: Final = 16
"""Bytes of the identity in each key."""

_MOST_CANDIDATES: Final = 16
_TAIL_BYTES: Final = 12
_MARK: Final = 0xFF
_NO_TAIL: Final = blake2b(b"", digest_size=_TAIL_BYTES).digest()


class Tokens(Protocol):
    """The tokens of a prefix: a Request of this library, or one of an engine.

    Attributes:
        num_tokens: Known tokens.
        hashes: The hash of each whole hash block with all tokens before it.
    """

    hashes: list[bytes]

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        ...

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Return tokens as the bytes of an int32 array.

        Args:
            start: First token.
            stop: Token after the last one.
        """
        ...

    def encoder_keys(self, block_size: int) -> Sequence[bytes]:
        """Return the keys of the encoder's output, which have its input's digest, the adapter and the salt.

        Args:
            block_size: Tokens of a block.
        """
        ...

    def extra_keys(self, first_block: int, count: int) -> Sequence[Extra | None] | None:
        """Return what decides the content of hash blocks besides tokens, as images; ``None`` if that is nothing.

        Args:
            first_block: The first hash block.
            count: How many.
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """The blocks of one group that a request needs to resume.

    Attributes:
        group: Number of the group.
        kind: Groups of one kind need the same columns, and have their keys in common.
        block_size: Tokens of a column.
        first_needed: Returns the first token that must be there to resume after so many tokens; that many for none.
        reads_all: It is always token 0.
        is_state: One block instead: the state after exactly the last token.
        empty: A ring: no block after multiples of so many tokens; 0 for other groups.
        in_column: The state lies in the column that ends there, not in column 0.
        of_encoder: The output of the encoder instead.
        shares: Entries of a block in the store.
    """

    group: int
    kind: int
    block_size: int
    first_needed: Callable[[int], int]
    reads_all: bool = False
    is_state: bool = False
    empty: int = 0
    in_column: bool = False
    of_encoder: bool = False
    shares: int = 1

    def columns(self, tokens: int) -> range:
        """Return the columns that are needed to resume after some tokens: a single one for a state, or a ring.

        Args:
            tokens: How many.
        """
        if self.is_state:
            column = (tokens - 1) // self.block_size if self.in_column else 0
            return range(column, column + (not (self.empty and tokens % self.empty == 0)))
        first = self.first_needed(tokens)
        return range(first // self.block_size, -(-tokens // self.block_size) if first < tokens else 0)


class Mark(NamedTuple):
    """The entry of a resume point in the mark of its hash block. ``tail``: its tokens after that, bytes of int32."""

    key: bytes
    tail: bytes


class Prefixes:
    """Names the blocks of prefixes, and finds the longest prefix in a store.

    Args:
        parts: What each group needs.
        identity: A hash of all that gives a block's bytes their meaning: model, weights, dtype, layout, version.
        hash_block: Tokens of a hash block.

    Attributes:
        mark_bytes: Length of a mark.

    Raises:
        ConfigError: ``identity`` does not have 16 bytes.
    """

    def __init__(self, parts: Sequence[Part], identity: bytes, hash_block: int) -> None:
        if len(identity) != IDENTITY_BYTES:
            raise ConfigError(f"identity must have {IDENTITY_BYTES} bytes, got {len(identity)}: hash it")
        self.parts = tuple(parts)
        self.mark_bytes = mark_bytes(hash_block)
        self._identity = identity
        self._hash_block = hash_block
        kinds = {part.kind: part for part in self.parts}.values()
        self._whole = [part for part in kinds if part.reads_all]
        self._encoded = [part for part in kinds if part.of_encoder]
        self._others = [part for part in kinds if not (part.reads_all or part.of_encoder)]
        self._common = lcm(*(part.block_size for part in self._whole))

    def renewed(self) -> Prefixes:
        """Return the same with a random identity."""
        return Prefixes(self.parts, token_bytes(IDENTITY_BYTES), self._hash_block)

    # -- keys

    def columns(self, request: Tokens, tokens: int, part: Part) -> range:
        """Return the columns of a group that a request needs to resume.

        Args:
            request: The request.
            tokens: After how many tokens.
            part: The group.
        """
        return range(len(request.encoder_keys(part.block_size))) if part.of_encoder else part.columns(tokens)

    def keys(self, request: Tokens, tokens: int, part: Part, columns: Sequence[int]) -> list[bytes]:
        """Return the keys of blocks of a prefix. O(columns).

        Args:
            request: Has the tokens and their hashes.
            tokens: Tokens of the prefix; at least one hash block.
            part: The group.
            columns: Columns that the prefix needs.
        """
        start, hashes, each = self._start(part.kind), request.hashes, part.block_size // self._hash_block
        if part.of_encoder:
            of_encoder = request.encoder_keys(part.block_size)
            return [start + of_encoder[column] + _NO_TAIL for column in columns]
        whole = 0 if part.is_state else tokens // part.block_size
        found = [start + hashes[(column + 1) * each - 1] + _NO_TAIL for column in columns if column < whole]
        if len(found) < len(columns):
            found.append(start + self._end(request, tokens))
        return found

    def mark(self, request: Tokens, tokens: int) -> Mark:
        """Return the mark of a resume point.

        Args:
            request: Has the tokens and their hashes.
            tokens: Tokens of the prefix; at least one hash block.
        """
        depth = tokens // self._hash_block
        return Mark(self._mark_key(request, depth), request.token_bytes(depth * self._hash_block, tokens))

    def _start(self, kind: int) -> bytes:
        return self._identity + kind.to_bytes(1, "little")

    def _end(self, request: Tokens, tokens: int) -> bytes:
        depth, rest = divmod(tokens, self._hash_block)
        data, person = request.token_bytes(depth * self._hash_block, tokens), b""
        extras = _extras_inside(request, depth, rest)
        if extras:
            data, person = cbor2.dumps([data, extras], canonical=True), b"extra keys"
        return request.hashes[depth - 1] + b"\1" + blake2b(data, digest_size=_TAIL_BYTES - 1, person=person).digest()

    def _mark_key(self, request: Tokens, depth: int) -> bytes:
        return self._start(_MARK) + request.hashes[depth - 1]

    # -- look-up

    def find(self, store: BlockStore, request: Tokens, least: int) -> int:
        """Return the tokens of the longest prefix that can be resumed, above ``least``; 0 without one.

        The last token of the request is never part of it. O(hash blocks), and a few calls of the store.

        Args:
            store: The store.
            request: The request.
            least: Tokens of a prefix whose blocks need not be in the store.
        """
        limit = request.num_tokens - 1
        reach = self._reach(store, request, least, limit)
        if reach <= least:
            return 0
        candidates = self._marked(store, request, least, reach)
        if not self._others:
            candidates.append(reach // self._common * self._common)
        for tokens in sorted(set(candidates), reverse=True)[:_MOST_CANDIDATES]:
            if tokens > least and self._has(store, request, tokens, least):
                return tokens
        return 0

    def _reach(self, store: BlockStore, request: Tokens, least: int, limit: int) -> int:
        """Return an upper bound of the prefix: the last token of the column after the first that is missing."""
        if self._others and self._whole:
            return limit  # states and windows are rarer: their marks say more than blocks that all tokens need
        for part in self._whole:
            whole, first = limit // part.block_size, least // part.block_size
            columns = range(first, min(whole, len(request.hashes) * self._hash_block // part.block_size))
            found = store.exists(self._shares(request, columns.stop * part.block_size, part, columns))
            run = first + (found.index(False) if False in found else len(found)) // part.shares
            limit = min(limit, (run + 1) * part.block_size - 1)
        return limit

    def _marked(self, store: BlockStore, request: Tokens, least: int, limit: int) -> list[int]:
        """Return the token counts in ``least`` + 1 .. ``limit`` that marks list, at most 16."""
        last = min(len(request.hashes), limit // self._hash_block)
        depths = range(last, max(least // self._hash_block, 1) - 1, -1)
        if not depths:
            return []
        known = store.exists([self._mark_key(request, depth) for depth in depths])
        there = [depth for depth, is_known in zip(depths, known, strict=True) if is_known][:_MOST_CANDIDATES]
        buffers = [bytearray(self.mark_bytes) for _ in there]
        arrived = store.get([self._mark_key(request, depth) for depth in there], [memoryview(one) for one in buffers])
        found = []
        for depth, buffer, is_whole in zip(there, buffers, arrived, strict=True):
            first = depth * self._hash_block
            for tail in tails_of(buffer, self._hash_block) if is_whole else ():
                tokens = first + len(tail) // np.dtype(np.int32).itemsize
                if least < tokens <= limit and request.token_bytes(first, tokens) == tail:
                    found.append(tokens)
        return found

    def _has(self, store: BlockStore, request: Tokens, tokens: int, least: int) -> bool:
        """Return whether the store has all blocks of a prefix that one of ``least`` tokens does not share."""
        keys = list[bytes]()
        for part in (*self._encoded, *self._others, *self._whole):
            columns = self.columns(request, tokens, part)
            if part.reads_all:
                columns = range(least // part.block_size, columns.stop)
            keys += self._shares(request, tokens, part, columns)
        return all(store.exists(keys))

    def _shares(self, request: Tokens, tokens: int, part: Part, columns: Sequence[int]) -> list[bytes]:
        """Return the keys of all shares of blocks, those of one block next to each other."""
        keys = self.keys(request, tokens, part, columns)
        return [share_key(key, number) for key in keys for number in range(part.shares)]


def _extras_inside(request: Tokens, depth: int, rest: int) -> list[object]:
    """Return the extra keys of the first ``rest`` tokens of hash block ``depth``: no image that begins after them."""
    extras = request.extra_keys(depth, 1) if rest else None
    (found,) = extras or (None,)
    return [one for one in found or () if one[0] != "mm" or one[2] < rest]  # type: ignore[operator]


def parts_of(manager: KVCacheManager, kinds: Sequence[int] = (), shares: Sequence[int] = ()) -> tuple[Part, ...]:
    """Return what each group of a manager needs to resume. Groups without keys need nothing.

    Args:
        manager: The manager.
        kinds: The kind of each group; by default each group is a kind.
        shares: By kind, the entries of a block in the store; by default one.
    """
    of_kind = kinds or range(len(manager.config.groups))
    return tuple(
        Part(**rule._asdict(), kind=of_kind[rule.group], shares=shares[of_kind[rule.group]] if shares else 1)
        for rule in manager.engine.resume_rules
    )
