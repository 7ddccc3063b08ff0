"""One group at work: its policy, its rows and its index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.index import PrefixIndex
from hybridkv.cache.policies import GroupKind, Policy, RowFacts
from hybridkv.cache.rows.block_rows import BlockRows
from hybridkv.cache.rows.view import PrefixView
from hybridkv.columns import grown
from hybridkv.request import Request
from hybridkv.specs import RequestLimits

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_NONE: Int32 = np.empty(0, np.int32)


class CacheGroup:
    """What the manager keeps of one group.

    number: position in the config. kind: its spec and flags. rows: block tables of the resident requests.
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
        self.index = index
        self.rows = BlockRows()
        self.published = np.zeros(len(self.rows.start), np.int64)
        self.label = np.zeros(len(self.rows.start), np.int64)
        self.accepted = np.full(len(self.rows.start), -1)
        self.rotated = np.zeros(len(self.rows.start), np.int64)
        self.pending: dict[int, tuple[int, ...]] = {}
        self.key_stride = policy.block_size // hash_block_size

    # -- keys

    def keys(self, request: Request) -> Sequence[bytes]:
        """One key per full block of ``request`` in this group."""
        stride = self.key_stride
        if stride == 1:
            return request.hashes
        return request.hashes[stride - 1 :: stride] if self.policy.publishes else ()

    def key_run(self, request: Request, first: int, last: int) -> list[bytes]:
        """Keys of columns first .. last-1."""
        stride = self.key_stride
        return request.hashes[(first + 1) * stride - 1 : last * stride : stride]

    def keys_at(self, request: Request, columns: Int64) -> list[bytes]:
        """Keys of ``columns``, ascending: of the tokens up to their ends, or of the encoder's input."""
        if self.policy.by_digest:
            of_encoder = request.encoder_keys(self.policy.block_size)
            return [of_encoder[column] for column in columns.tolist()]
        first, last = columns.item(0), columns.item(-1) + 1
        if last - first == len(columns):
            return self.key_run(request, first, last)
        stride, hashes = self.key_stride, request.hashes
        return [hashes[(column + 1) * stride - 1] for column in columns.tolist()]

    def encoded(self, request: Request) -> Int32:
        """The blocks that hold the encoder's output of ``request`` under its digest: all, or none. O(blocks)."""
        keys = request.encoder_keys(self.policy.block_size) if self.policy.by_digest else []
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

    def clear(self, row: int) -> None:
        """``row`` holds nothing."""
        self.rows.clear(row)
        self.pending.pop(row, None)
        self.published[row] = self.label[row] = 0
        self.forget_accepted(row)

    # -- drafts

    def accept(self, rows: Int64, columns: Int64) -> None:
        """The states of ``rows`` go on from those in ``columns``."""
        if self.policy.rotates:
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
        soonest = self.policy.next_need(self.rows.count.item(row), self.rows.dropped.item(row))
        if publishes:
            soonest = min(soonest, self.policy.next_publish(self.published.item(row)))
        return soonest

    def next_events(self, rows: Int64, *, publishes: bool) -> Int64:
        """next_event of many rows, int64[len(rows)]."""
        soonest = self.policy.next_need(self.rows.count[rows], self.rows.dropped[rows])
        if publishes:
            soonest = np.minimum(soonest, self.policy.next_publish(self.published[rows]))
        return soonest

    def held_blocks(self) -> int:
        """Distinct blocks in its rows. O(rows and their columns)."""
        held = [self.rows.held(row) for row in np.flatnonzero(self.rows.count).tolist()]
        return len(np.unique(np.concatenate(held))) if held else 0

    # -- needs

    def peak_blocks(self, limits: RequestLimits, steps: int = 1) -> int:
        """Most blocks that a request of ``limits.max_model_len`` tokens holds at once, ``steps`` in flight."""
        most = self.policy.most_columns(limits.max_model_len, limits.max_encoder_tokens)
        bound = self.kind.spec.max_request_blocks(limits) + (steps - 1 if self.policy.keeps_state else 0)
        return min(most, bound)
