"""One group at work: its policy, its rows, and what a request finds in its index."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import cbor2
import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.index import PrefixIndex, Tail
from hybridkv.cache.policies import GroupKind, Policy, RowFacts
from hybridkv.cache.rows.block_rows import BlockRows
from hybridkv.columns import grown
from hybridkv.errors import CacheError
from hybridkv.request import Request
from hybridkv.specs import RequestLimits

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_NONE: Int32 = np.empty(0, np.int32)


class CacheGroup:
    """What the manager keeps of one group.

    number: position in the config. kind: its spec and flags. states: where a row's lie; None where blocks hold tokens.
    rows: block tables of the resident requests. each_published, each_label: the same as those without, quick to read
    singly.
    published: int64[rows], how many leading columns of a row are published or passed over. label:
    int64[rows], token count of the state that a row's last step leaves. pending: row -> token counts of its
    states that could not be published yet. accepted: int64[rows], the column of the state of a row's last accepted
    draft, until it is read; -1: where it always is. rotated: int64[rows], the column that changed places with column 0
    since the worker was told; 0: none. key_stride: hash blocks of a block.
    """

    def __init__(self, number: int, kind: GroupKind, policy: Policy, index: PrefixIndex, hash_block_size: int) -> None:
        self.number = number
        self.kind = kind
        self.policy = policy
        self.states = policy.states
        self.index = index
        self.rows = BlockRows()
        self.published = np.zeros(len(self.rows.start), np.int64)
        self.label = np.zeros(len(self.rows.start), np.int64)
        self.accepted = np.full(len(self.rows.start), -1)
        self.rotated = np.zeros(len(self.rows.start), np.int64)
        self.pending: dict[int, tuple[int, ...]] = {}
        self.key_stride = policy.block_size // hash_block_size
        self._look_anew()

    def _look_anew(self) -> None:
        """Columns are new arrays."""
        self.each_published, self.each_label = self.published.data, self.label.data

    # -- keys

    def keys(self, request: Request) -> Sequence[bytes]:
        """One key per full block of ``request`` in this group."""
        stride = self.key_stride
        if stride == 1:
            return request.hashes
        return request.hashes[stride - 1 :: stride] if self.kind.publishes else ()

    def lacks_first(self, request: Request) -> bool:
        """Whether ``request`` has a full block here, and nothing is known of its first tokens. O(1)."""
        index, hashes, stride = self.index, request.hashes, self.key_stride
        return not index.num_tails and len(hashes) >= stride and index.get(hashes[stride - 1]) is None

    def key_run(self, request: Request, first: int, last: int) -> list[bytes]:
        """Keys of columns first .. last-1."""
        stride = self.key_stride
        return request.hashes[(first + 1) * stride - 1 : last * stride : stride]

    def keys_at(self, request: Request, columns: Int64) -> list[bytes]:
        """Keys of ``columns``, ascending: of the tokens up to their ends, or of the encoder's input."""
        if self.kind.by_digest:
            of_encoder = request.encoder_keys(self.policy.block_size)
            return [of_encoder[column] for column in columns.tolist()]
        first, last = columns.item(0), columns.item(-1) + 1
        if last - first == len(columns):
            return self.key_run(request, first, last)
        stride, hashes = self.key_stride, request.hashes
        return [hashes[(column + 1) * stride - 1] for column in columns.tolist()]

    def encoded(self, request: Request) -> Int32:
        """The blocks that hold the encoder's output of ``request`` under its digest: all, or none. O(blocks)."""
        keys = request.encoder_keys(self.policy.block_size) if self.kind.by_digest else []
        # freed last block first, evicted in that order: the last one is the first to be gone
        if not keys or self.index.get(keys[-1]) is None:
            return _NONE
        found = self.index.leading_run(keys)
        return found if len(found) == len(keys) else _NONE

    def view(self, request: Request) -> PrefixView:
        """What ``request`` can find in the index."""
        return PrefixView(self.index, request, self.key_stride, self.policy.block_size)

    def knows_any(self, request: Request, missing: Sequence[int]) -> bool:
        """Whether tokens behind one of the token counts ``missing`` are indexed by now.

        Also when ``request`` was cut and has their key no longer. O(missing) look-ups.
        """
        size, stride, hashes = self.policy.block_size, self.key_stride, request.hashes
        view = self.view(request)
        for tokens in missing:
            column, known = divmod(tokens, size)
            if view.reach(column)[0] > known or (not known and (column + 1) * stride > len(hashes)):
                return True
        return False

    # -- rows

    def facts(self, row: int) -> RowFacts:
        """What ``row`` holds; nothing for -1."""
        if row < 0:
            return RowFacts()
        rows = self.rows
        held, dropped = rows.count.item(row), rows.dropped.item(row)
        return RowFacts(held, dropped, self.published.item(row), self.label.item(row), self.pending.get(row, ()))

    def ensure_rows(self, capacity: int) -> None:
        """Rows 0 .. capacity - 1 exist."""
        self.rows.ensure_rows(capacity)
        self.published = grown(self.published, capacity)
        self.label = grown(self.label, capacity)
        self.accepted, self.rotated = grown(self.accepted, capacity, -1), grown(self.rotated, capacity)
        self._look_anew()

    def clear(self, row: int) -> None:
        """``row`` holds nothing."""
        self.rows.clear(row)
        self.pending.pop(row, None)
        self.published[row] = self.label[row] = 0
        self.forget_accepted(row)

    # -- drafts

    def accept(self, rows: Int64, columns: Int64) -> None:
        """The states of ``rows`` go on from those in ``columns``."""
        if self.states is not None and self.states.rotates:
            self.rows.swap_first(rows, columns)
            self.rotated[rows] = columns
        else:
            self.accepted[rows] = columns

    def forget_accepted(self, rows: Int64 | int) -> None:
        """A step says where the states of ``rows`` are."""
        self.accepted[rows] = -1
        self.rotated[rows] = 0

    def next_event(self, row: int, *, publishes: bool) -> int:
        """The token count at which ``row`` needs, drops or can publish a block."""
        policy, rows = self.policy, self.rows
        soonest = policy.next_need(rows.each_count[row], rows.each_dropped[row])
        if publishes and (rule := policy.publishing) is not None:
            edge = rule.next_tokens(self.each_published[row])
            if edge < soonest:
                return edge
        return soonest

    def next_events(self, rows: Int64, *, publishes: bool) -> Int64:
        """next_event of many rows, int64[len(rows)]."""
        soonest = self.policy.next_need(self.rows.count[rows], self.rows.dropped[rows])
        if publishes and self.policy.publishing is not None:
            soonest = np.minimum(soonest, self.policy.publishing.next_tokens(self.published[rows]))
        return soonest

    def held_blocks(self) -> int:
        """Distinct blocks in its rows. O(rows and their columns)."""
        held = [self.rows.held(row) for row in np.flatnonzero(self.rows.count).tolist()]
        return len(np.unique(np.concatenate(held))) if held else 0

    # -- needs

    def peak_blocks(self, limits: RequestLimits, steps: int = 1) -> int:
        """Most blocks that a request of ``limits.max_model_len`` tokens holds at once, ``steps`` in flight."""
        most = self.policy.most_columns(limits.max_model_len, limits.max_encoder_tokens)
        bound = self.kind.spec.max_request_blocks(limits) + (steps - 1 if self.states is not None else 0)
        return min(most, bound)


class PrefixView:
    """Keys of ``request`` in blocks of ``stride`` hash blocks, ``block_size`` tokens, looked up in ``index``."""

    __slots__ = ("_block_size", "_index", "_request", "_stride", "get", "leading_run")

    def __init__(self, index: PrefixIndex, request: Request, stride: int, block_size: int) -> None:
        self._index = index
        self._request = request
        self._stride = stride
        self._block_size = block_size
        self.get = index.get
        self.leading_run = index.leading_run

    @property
    def additions(self) -> int:
        """Keys that the index was ever given."""
        return self._index.additions

    def reach(self, column: int) -> tuple[int, int]:
        """How many tokens of ``column`` a cached block begins with, and that block; 0 and 0 without one. O(1)."""
        whole = self._whole(column)
        if whole is not None:
            return self._block_size, whole
        return max(((tail.length, tail.block) for tail in self._tails(column)), default=(0, 0), key=itemgetter(0))

    def source(self, column: int, tokens: int) -> int:
        """The block that begins with the first ``tokens`` tokens of ``column``. CacheError where reach is less."""
        found = self.beginning(column, tokens)
        if found is None:
            raise CacheError(f"no block begins with {tokens} tokens of column {column}: look up again")
        return found

    def beginning(self, column: int, tokens: int) -> int | None:
        """The block that begins with the first ``tokens`` tokens of ``column``, None without one."""
        whole = self._whole(column)
        if whole is not None:
            return whole
        return next((tail.block for tail in self._tails(column) if tail.length >= tokens), None)

    def begins(self, block: int, column: int, tokens: int) -> bool:
        """Whether ``block`` begins with the first ``tokens`` tokens of ``column``."""
        return block == self._whole(column) or any(
            tail.block == block and tail.length >= tokens for tail in self._tails(column)
        )

    def is_state(self, block: int, tokens: int) -> bool:
        """Whether ``block`` is a state after ``tokens`` tokens."""
        column, rest = divmod(tokens, self._block_size)
        if not rest:
            return bool(column) and block == self._index.get(self._request.hashes[column - 1])
        return any(tail.block == block and tail.length == rest for tail in self._tails(column))

    def label(self, end_tokens: int, alignment: int) -> int:
        """The greatest token count up to ``end_tokens`` that a state is labelled with, 0 for none."""
        size, index = self._block_size, self._index
        if not len(index) and not index.num_tails:
            return 0
        hashes: Sequence[bytes] = self._request.hashes
        for column in range(end_tokens // size, -1, -1):
            found = [column * size + tail.length for tail in self._tails(column)]
            fitting = [label for label in found if label <= end_tokens and label % alignment == 0]
            if fitting:
                return max(fitting)
            if column and column * size % alignment == 0 and index.get(hashes[column - 1]) is not None:
                return column * size
        return 0

    def labelled(self, tokens: int) -> int | None:
        """The block of the state after ``tokens`` tokens."""
        column, rest = divmod(tokens, self._block_size)
        if not rest:
            return self._index.get(self._request.hashes[column - 1]) if column else None
        return next((tail.block for tail in self._tails(column) if tail.length == rest), None)

    def tail(self, tokens: int) -> tuple[bytes, bytes]:
        """Parent and tail of the partial key of the first ``tokens`` tokens."""
        column = tokens // self._block_size
        parent = parent_key(self._request, column * self._stride, self._stride)
        return parent, self._request.token_bytes(column * self._block_size, tokens)

    def _whole(self, column: int) -> int | None:
        place = (column + 1) * self._stride - 1
        return self._index.get(self._request.hashes[place]) if place < len(self._request.hashes) else None

    def _tails(self, column: int) -> Sequence[Tail]:
        """Those that the request's own tokens begin with, oldest first."""
        if not self._index.num_tails:
            return ()
        tails = self._index.tails_of(parent_key(self._request, column * self._stride, self._stride))
        if not tails:
            return ()
        start = column * self._block_size
        own = self._request.token_bytes(start, start + self._block_size)
        return [tail for tail in tails if own.startswith(tail.tokens)]


def parent_key(request: Request, first: int, count: int) -> bytes:
    """What the tails of hash blocks first .. first + count - 1 are found behind: the key before, and extra keys."""
    if request.hasher is None:
        raise CacheError(f"request {request.request_id!r} has no keys: construct it with hasher=cache.hasher")
    parent = request.hashes[first - 1] if first else request.hasher.root
    extras = request.extra_keys(first, count)
    return parent if extras is None else parent + cbor2.dumps(extras, canonical=True)
