"""The resident requests as columns, so that a step reads and writes all rows at once.

row   [ hash block | hash block | ... | partial block ]      tokens
        held by the Request             partial_block[row], up to hash_block_size tokens
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instances
from hybridkv.errors import CacheError, ConfigError, HashError
from hybridkv.extra_keys import Extra, ExtraKeys
from hybridkv.request import Request, cut, extended, hash_error, token_array


def append_tokens(requests: Sequence[Request], tokens: Sequence[int] | NDArray[np.integer]) -> None:
    """Append ``tokens[i]`` to ``requests[i]``. Requests are distinct.

    One batch if all of them hold blocks of one manager, else one by one.

    Args:
        requests: n requests.
        tokens: n token ids.

    Raises:
        ConfigError: The numbers differ, or a value is no token id. Nothing was appended.
        HashError: Blocks of some requests could not be hashed. All other requests got their tokens.
    """
    ids = np.frombuffer(token_array(tokens), np.int32)
    try:
        home = requests[0]._rows if len(requests) else None
        rows = [] if home is None else [request.row for request in requests if request._rows is home]
    except (AttributeError, TypeError, LookupError):
        instances("requests", requests, Request)  # raises ConfigError that names the value
        raise
    if home is not None and home.num_lent:
        for request in requests:
            request.refuse_lent()
    if len(requests) != len(ids):
        raise ConfigError(f"{len(requests)} requests but {len(ids)} tokens: give one token to each request")
    if home is not None and len(rows) == len(requests):
        failed = list(home.append(np.fromiter(rows, np.int64, len(rows)), ids).values())
    else:
        failed = []
        for request, token in zip(instances("requests", requests, Request), ids.tolist(), strict=True):
            try:
                request.append(token)
            except HashError as error:
                failed.append(error)
    if failed:
        raise HashError(str(failed[0]), tuple(name for error in failed for name in error.request_ids)) from failed[0]


def grown(column: NDArray[T], rows: int, empty: int = 0) -> NDArray[T]:
    """Return ``column``, [capacity, ...], with at least ``rows`` rows; new rows are ``empty``.

    Returns the column itself if it is long enough, else a copy of at least twice the length: O(1) a row, amortised.
    """
    missing = rows - len(column)
    if missing <= 0:
        return column
    more = np.full((max(missing, len(column)), *column.shape[1:]), empty, column.dtype)
    return np.concatenate((column, more))


T = TypeVar("T", bound=np.generic)


class RequestRows:
    """Columns of the resident requests.

    Free rows are handed out lowest first. Columns grow by doubling, so never keep a reference to them.

    Args:
        hash_block_size: Tokens of a hash block.
        capacity: Rows at first.
        published_tokens: Returns the tokens of a row that others may hit.

    Attributes:
        num_tokens, num_computed: int64[capacity].
        in_flight: int64[capacity], computed tokens of steps in flight; 0 in a new row.
        partial_block: int32[capacity, hash_block_size], tokens after the last whole hash block. Stale tokens stay until
            they are overwritten; the row of a lent request is unused.
        each_num_tokens, each_num_computed, each_in_flight: The same memory, quick to read one by one.
        requests: The request of each row, ``None`` for a free one.
        lent: bool[capacity], an engine keeps the tokens.
        num_lent: Number of these rows.
    """

    def __init__(
        self, hash_block_size: int, capacity: int = 64, *, published_tokens: Callable[[int], int] = lambda row: 0 * row
    ) -> None:
        self.hash_block_size = hash_block_size
        self._published_tokens = published_tokens
        self.num_tokens = np.zeros(capacity, np.int64)
        self.num_computed = np.zeros(capacity, np.int64)
        self.in_flight = np.zeros(capacity, np.int64)
        self.partial_block = np.zeros((capacity, hash_block_size), np.int32)
        self.lent = np.zeros(capacity, np.bool_)
        self.num_lent = 0
        self.requests: list[Request | None] = [None] * capacity
        self._free = list(range(capacity))
        self._look_anew()

    def _look_anew(self) -> None:
        """Renew the memory views after columns became new arrays: numpy takes twice as long for one cell."""
        self.each_num_tokens, self.each_num_computed = self.num_tokens.data, self.num_computed.data
        self.each_in_flight, self._each_partial = self.in_flight.data, self.partial_block.data
        self._all_partial = self.partial_block.reshape(-1).data

    @property
    def capacity(self) -> int:
        """Rows that exist."""
        return len(self.requests)

    def bind(self, request: Request) -> int:
        """Give ``request`` a row, and move its counts and its partial block there. O(hash_block_size)."""
        if request._rows is not None:
            raise CacheError(f"request {request.request_id!r} already holds row {request.row}")
        if not self._free:
            self._grow()
        row = heapq.heappop(self._free)
        tokens = request._tokens
        self.num_computed[row] = request._computed
        self.in_flight[row] = 0
        self.requests[row] = request
        if request._lent is not None:
            self.num_tokens[row] = request.num_tokens
            self.lent[row] = True
            self.num_lent += 1
            request._rows, request.row = self, row
            return row
        whole = len(tokens) // self.hash_block_size * self.hash_block_size
        rest = tokens[whole:]
        self.partial_block[row, : len(rest)] = rest
        self.num_tokens[row] = len(tokens)
        request._tokens = tokens = cut(tokens, whole)
        request._rows, request.row = self, row
        if not rest:  # the last token must be readable here: a decode step sends it
            self.partial_block[row, -1] = tokens[-1]
        return row

    def release(self, request: Request) -> None:
        """Take the row back. Counts and partial block return to the request."""
        row = request.row
        if request._rows is not self or self.requests[row] is not request:
            raise CacheError(f"request {request.request_id!r} holds no row here")
        if request._lent is not None:
            self.lent[row] = False
            self.num_lent -= 1
        else:
            rest = self.num_tokens.item(row) - len(request._tokens)
            request._tokens = extended(request._tokens, self.partial_block[row, :rest].tobytes())
        request._computed = self.num_computed.item(row)
        request._rows, request.row = None, -1
        self.requests[row] = None
        self.num_tokens[row] = self.num_computed[row] = self.in_flight[row] = 0
        heapq.heappush(self._free, row)

    def append_one(self, row: int, token: int) -> None:
        """Append one token to ``row``.

        Raises HashError if it fills a block that cannot be hashed; nothing is appended then.
        """
        n: int = self.each_num_tokens[row]
        place = n % self.hash_block_size
        if place == self.hash_block_size - 1:
            self._fill_one(row, token)
        self._each_partial[row, place] = token
        self.each_num_tokens[row] = n + 1

    def append(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> dict[int, HashError]:
        """Append ``tokens[i]`` to ``rows[i]``, and hash the blocks that they complete. Rows are distinct.

        Returns:
            The rows whose blocks could not be hashed, with the errors. Their tokens are not appended.
        """
        n = self.num_tokens[rows]
        place = n % self.hash_block_size
        n += 1
        whole = (place == self.hash_block_size - 1).nonzero()[0]
        failed = dict[int, HashError]()
        if whole.size:
            failed = self._fill(rows[whole], tokens[whole])
            if failed:
                taken = ~np.isin(rows, list(failed))
                rows, tokens, place, n = rows[taken], tokens[taken], place[taken], n[taken]
        self.partial_block[rows, place] = tokens
        self.num_tokens[rows] = n
        return failed

    def append_many(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> bool:
        """Append ``tokens[i]``, int32[rows, n], to ``rows[i]``. Rows are distinct.

        Returns:
            False, and nothing was appended, if some block cannot be hashed.
        """
        size, count = self.hash_block_size, tokens.shape[1]
        n = self.num_tokens[rows]
        some = (n % size + count >= size).nonzero()[0]
        if some.size and not self._fill_many(rows[some], n[some] % size, tokens[some]):
            return False
        last = np.arange(max(count - size, 0), count)
        self.partial_block[rows[:, None], (n[:, None] + last) % size] = tokens[:, last]
        self.num_tokens[rows] = n + count
        return True

    def _fill_many(self, rows: NDArray[np.int64], begun: NDArray[np.int64], tokens: NDArray[np.int32]) -> bool:
        """Move the whole blocks of ``rows`` to their requests, hashed.

        ``begun[i]`` tokens are in the partial block of each.

        Returns False, and does nothing, if one cannot be hashed.
        """
        size, owners = self.hash_block_size, self.owners(rows)
        filled = (begun + tokens.shape[1]) // size
        line, hashed = np.concatenate((self.partial_block[rows], tokens), axis=1), [len(one.hashes) for one in owners]
        parts: list[tuple[list[Request], NDArray[np.int32]]] = []
        for j in range(int(filled.max())):
            of = (filled > j).nonzero()[0]
            place = np.arange(j * size, (j + 1) * size)
            gap = np.where(place < begun[of, None], 0, size - begun[of, None])  # stale tokens of the partial block
            parts.append(([owners[i] for i in of.tolist()], line[of[:, None], place + gap]))
            if _hash_blocks(*parts[-1]):
                for request, known in zip(owners, hashed, strict=True):
                    del request.hashes[known:]
                return False
        for several, blocks in parts:
            octets, width = blocks.tobytes(), blocks.itemsize * size
            for i, request in enumerate(several):
                request._tokens = extended(request._tokens, octets[i * width : (i + 1) * width])
        return True

    def least_tokens(self, row: int) -> int:
        """Return the tokens of ``row`` that cannot be forgotten: computed ones, and those that others may hit."""
        return max(self.num_computed.item(row), self._published_tokens(row))

    def truncate(self, row: int, num_tokens: int) -> None:
        """Keep only the first ``num_tokens`` tokens of ``row``, at least one. O(tokens forgotten)."""
        request = self.owner(row)
        whole = num_tokens - num_tokens % self.hash_block_size
        tokens = request._tokens
        if whole < len(tokens):
            rest = tokens[whole:num_tokens]
            self.partial_block[row, : len(rest)] = rest
            request._tokens = tokens = cut(tokens, whole)
        if whole == num_tokens:  # the last token must be readable here
            self.partial_block[row, -1] = tokens[-1]
        self.num_tokens[row] = num_tokens

    def rows_of(self, requests: Sequence[Request]) -> NDArray[np.int64]:
        """Return the rows of ``requests``, int64[n]. O(n).

        Args:
            requests: n requests.

        Raises:
            CacheError: One of them holds no row here.
        """
        rows = [request.row for request in requests if request._rows is self]
        if len(rows) < len(requests):
            stray = next(request for request in requests if request._rows is not self)
            raise CacheError(f"request {stray.request_id!r} holds no row here: allocate slots for it first")
        return np.fromiter(rows, np.int64, len(rows))

    def owners(self, rows: NDArray[np.integer]) -> list[Request]:
        """Return the request of each of ``rows``. Raises CacheError for a free row. O(rows)."""
        holders = [self.requests[row] for row in rows.tolist()]
        owners = [request for request in holders if request is not None]
        if len(owners) < len(holders):
            raise CacheError(f"row {int(rows[holders.index(None)])} belongs to no request")
        return owners

    def owner(self, row: int) -> Request:
        """Return the request of ``row``. Raises CacheError for a free row."""
        request = self.requests[row]
        if request is None:
            raise CacheError(f"row {row} belongs to no request")
        return request

    def partial_bytes(self, row: int, first: int, last: int) -> bytes:
        """Return tokens ``first`` .. ``last`` - 1 of the partial block of ``row``, as bytes of int32."""
        start = row * self.hash_block_size
        return self._all_partial[start + first : start + last].tobytes()

    def last_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the last known token of each row, int32[len(rows)]."""
        last: NDArray[np.int32] = self.partial_block[rows, (self.num_tokens[rows] - 1) % self.hash_block_size]
        return last

    def synchronise(
        self,
        rows: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        num_computed: NDArray[np.int64],
        in_flight: NDArray[np.int64],
    ) -> None:
        """Set the counts of ``rows``.

        Raises:
            ConfigError: A count is impossible. No count was changed.
            HashError: Blocks of lent tokens cannot be hashed. No count was changed.
        """
        known = self.num_tokens[rows]
        changed = num_tokens != known
        if changed.any():
            wrong = changed & (~self.lent[rows] | (num_tokens < known))
            if wrong.any():
                place = int(wrong.argmax())
                raise ConfigError(
                    f"{self.owner(rows.item(place)).request_id!r} has {known[place]} tokens, and cannot have "
                    f"{num_tokens[place]}: lent ones become more, others are appended"
                )
        if (in_flight > num_computed).any():
            raise ConfigError("a row has at most its computed tokens in flight")
        self.num_tokens[rows] = num_tokens
        for place in (num_tokens // self.hash_block_size != known // self.hash_block_size).nonzero()[0].tolist():
            try:
                self.owner(rows.item(place)).hash_lent()
            except (HashError, ConfigError):
                self.num_tokens[rows] = known
                raise
        self.num_computed[rows], self.in_flight[rows] = num_computed, in_flight

    def synchronise_one(self, row: int, num_tokens: int, num_computed: int, in_flight: int) -> None:
        """Set the counts of one row, without arrays of one element."""
        known: int = self.each_num_tokens[row]
        if num_tokens < known or (num_tokens > known and not self.lent[row]):
            one, counts = np.array([row]), (num_tokens, num_computed, in_flight)
            self.synchronise(one, *(np.array([count], np.int64) for count in counts))  # raises ConfigError
            return
        self.each_num_tokens[row] = num_tokens
        if num_tokens // self.hash_block_size != known // self.hash_block_size:
            try:
                self.owner(row).hash_lent()
            except (HashError, ConfigError):
                self.each_num_tokens[row] = known
                raise
        self.each_num_computed[row], self.each_in_flight[row] = num_computed, in_flight

    def _fill_one(self, row: int, token: int) -> None:
        """Hash the block of ``row`` that ``token`` completes. Raises HashError, and does nothing, if that fails."""
        request = self.owner(row)
        block = self.partial_block[row].copy()
        block[-1] = token
        request.hash_block(block)
        request._tokens = extended(request._tokens, block.tobytes())

    def _fill(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> dict[int, HashError]:
        """Move the blocks that ``tokens`` complete to their requests, hashed in one call.

        Returns the rows that could not be hashed, with the errors.
        """
        blocks = self.partial_block[rows]
        blocks[:, -1] = tokens
        owners = self.owners(rows)
        failed = _hash_blocks(owners, blocks)
        octets, size = blocks.tobytes(), blocks.itemsize * self.hash_block_size
        for i, request in enumerate(owners):
            if not failed or request.row not in failed:
                request._tokens = extended(request._tokens, octets[i * size : (i + 1) * size])
        return failed

    def _grow(self) -> None:
        old, new = self.capacity, 2 * self.capacity
        self.num_tokens, self.num_computed = grown(self.num_tokens, new), grown(self.num_computed, new)
        self.in_flight, self.partial_block = grown(self.in_flight, new), grown(self.partial_block, new)
        self.lent = grown(self.lent, new)
        self._look_anew()
        self.requests += [None] * old
        self._free = list(range(old, new))


def _hash_blocks(owners: Sequence[Request], blocks: NDArray[np.int32]) -> dict[int, HashError]:
    """Append the hash of one more block to each of ``owners`` with a hasher.

    All are hashed in one call, or one by one if that call fails. Returns the rows without a new hash, with the errors.
    """
    hashed = [request for request in owners if request.hasher is not None]
    if len(hashed) < len(owners):
        blocks = blocks[[request.hasher is not None for request in owners]]
    hasher = hashed[0].hasher if hashed else None  # all requests of a manager have one hasher
    if hasher is None:
        return {}
    parents = [request.hashes[-1] if request.hashes else None for request in hashed]
    extras = [None if request._extras is None else _next_extra(request, request._extras) for request in hashed]
    try:
        keyed = list(zip(hashed, hasher.hash_rows(parents, blocks, extras), strict=True))
    except Exception as error:  # noqa: BLE001 - any error of one block must not stop the others
        if len(hashed) == 1:
            return {hashed[0].row: hash_error(hashed[0].request_id, error)}
        failed = dict[int, HashError]()
        for i, request in enumerate(hashed):
            failed |= _hash_blocks([request], blocks[i : i + 1])
        return failed
    for request, key in keyed:
        request.hashes.append(key)
    return {}


def _next_extra(request: Request, extras: ExtraKeys) -> Extra | None:
    """Return the extra keys of the first block of ``request`` that has no hash yet."""
    keys = extras.of_blocks(len(request.hashes), 1)
    return None if keys is None else keys[0]
