"""Resident requests: those that hold blocks, their rows, and when each row next needs attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instance, integers
from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.journal import Begun, Journal
from hybridkv.cache.policies import UNPUBLISHED
from hybridkv.cache.publisher import Publisher
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request import Hasher, Request
from hybridkv.request_rows import RequestRows, grown

Int64 = NDArray[np.int64]

_NEVER: Final = np.iinfo(np.int64).max

STALLED: Final = 1
"""Next event of a stalled row: below every token count that a caller can ask for."""

MOST_NAMES: Final = 1 << 16
"""Most names that are remembered; the one unseen for longest is forgotten first."""

_Name = tuple[str, str | bytes, str | None]
"""(kind of content, name, cache salt); requests with different salts share nothing."""


class Residents:
    """The requests that hold rows of ``groups``.

    The *next event* of a row is the least token count at which some group needs a block, some group can publish one
    (with prefix caching), or a resume point must be published. Below it nothing must be done for the row.

    Args:
        groups: All groups.
        publisher: Knows the next resume points.
        hasher: Hasher of all requests; ``None`` without prefix caching.
        hash_block_size: Tokens of a hash block.
        journal: Records requests that begin.

    Attributes:
        request_rows: Counts and last tokens of all resident requests.
        names: Names of content that callers use.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        publisher: Publisher,
        *,
        hasher: Hasher | None,
        hash_block_size: int,
        journal: Journal,
    ) -> None:
        self.request_rows = RequestRows(hash_block_size, published_tokens=self._published_tokens)
        self.groups = tuple(groups)
        self.names = ContentNames()
        self._publisher = publisher
        self._hasher = hasher
        self._publishes = hasher is not None
        self._journal = journal
        self._by_id: dict[str, Request] = {}
        self._next_event = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._by_id.values()))

    def get(self, request_id: str) -> Request | None:
        """Return the resident of that id."""
        return self._by_id.get(request_id)

    def row_of(self, request: Request) -> int:
        """Return the row of ``request``. Raises CacheError if it holds none here."""
        if type(request) is not Request:
            instance("request", request, Request)
        if self._by_id.get(request.request_id) is not request:
            raise CacheError(f"request {request.request_id!r} holds no blocks here: allocate slots first")
        return request.row

    def rows_held(self, given: Int64 | Sequence[int]) -> Int64:
        """Return ``given`` as int64[n]. O(n).

        Raises:
            ConfigError: These are no row numbers.
            CacheError: A row belongs to no request.
        """
        if isinstance(given, np.ndarray) and given.dtype == np.int64 and given.ndim == 1:
            rows = given
        else:
            rows = integers("rows", given, 0)
        if not rows.size:
            return rows
        if np.count_nonzero(rows.view(np.uint64) >= len(self._next_event)) or (  # a negative one, too
            np.count_nonzero(self._next_event[rows]) < len(rows)
        ):
            integers("rows", rows, 0)
            held = self.request_rows.requests
            free = next(row for row in rows.tolist() if row >= len(held) or held[row] is None)
            raise CacheError(f"row {free} belongs to no request: allocate slots for its request first")
        return rows

    def refuse_stranger(self, request: Request) -> None:
        """Raise ConfigError or CacheError for a request of another manager, or one that this manager cannot serve.

        Args:
            request: The request.
        """
        if type(request) is not Request:
            instance("request", request, Request)
        if request.row < 0 and (request.multimodal or request.encoder is not None):
            self.names.refuse(request)
        if request.hasher is not self._hasher:
            raise ConfigError(
                f"request {request.request_id!r} was hashed by another hasher: construct it with hasher=cache.hasher"
            )
        if request._lent is not None and request.row < 0:
            request.hash_lent()  # tokens may have arrived since it was last synchronised
        if request.row >= 0 and request._rows is not self.request_rows:
            raise CacheError(f"request {request.request_id!r} holds blocks of another manager: free it there first")

    def bind(self, request: Request) -> int:
        """Give ``request`` a row in every group. Raises CacheError if its id is taken."""
        if request.request_id in self._by_id:
            raise CacheError(f"another request {request.request_id!r} holds blocks: request ids must be unique")
        row = self.request_rows.bind(request)
        if request.multimodal or request.encoder is not None:
            self.names.know(request)
        self._by_id[request.request_id] = request
        if self._journal.observed:
            self._journal.record(Begun(request, len(request.hashes)))
        if self.request_rows.capacity > len(self._next_event):
            self._next_event = grown(self._next_event, self.request_rows.capacity)
            for group in self.groups:
                group.ensure_rows(self.request_rows.capacity)
        return row

    def release(self, request: Request) -> None:
        """Take the row of ``request``, whose blocks were given back."""
        row = self.row_of(request)
        del self._by_id[request.request_id]
        for group in self.groups:
            group.clear(row)
        self._next_event[row] = 0
        self.request_rows.release(request)

    def _published_tokens(self, row: int) -> int:
        """Return the tokens of ``row`` whose blocks may have keys."""
        decided = [
            (group.published.item(row), group.policy.block_size) for group in self.groups if group.kind.publishes
        ]
        return max((columns * size for columns, size in decided if columns < UNPUBLISHED), default=0)

    def next_event(self, row: int) -> int:
        """Return the token count at which ``row`` next needs attention."""
        return self._next_event.item(row)

    def next_events(self, rows: Int64) -> Int64:
        """Return the next events of rows, int64[rows]."""
        ahead: Int64 = self._next_event[rows]
        return ahead

    def due(self, rows: Int64, total_tokens: Int64) -> Int64:
        """Return the indices of the ``rows`` that need attention at ``total_tokens``."""
        return (total_tokens >= self._next_event[rows]).nonzero()[0]

    def resume_points_due(self, rows: Int64, end_tokens: Int64) -> NDArray[np.bool_]:
        """Return which of ``rows`` have a resume point to publish at ``end_tokens``, bool[rows]."""
        due: NDArray[np.bool_] = end_tokens >= self._publisher.next_resume_points(rows)
        return due

    def refresh(self, row: int) -> None:
        """Compute the next event of one row, without arrays of one element."""
        soonest, publishes = self._publisher.next_resume_point(row), self._publishes
        for group in self.groups:
            event = group.next_event(row, publishes=publishes)
            if event < soonest:  # noqa: PLR1730 - a call of min takes longer than all of this
                soonest = event
        self._next_event[row] = soonest

    def stall(self, row: int) -> None:
        """Make every call for ``row`` a due one, until it is refreshed."""
        self._next_event[row] = STALLED

    def refresh_many(self, rows: Int64) -> None:
        """Compute the next events of ``rows``, all at once."""
        soonest = np.full(len(rows), _NEVER)
        for group in self.groups:
            np.minimum(soonest, group.next_events(rows, publishes=self._publishes), out=soonest)
        np.minimum(soonest, self._publisher.next_resume_points(rows), out=soonest)
        self._next_event[rows] = soonest


class ContentNames:
    """Names of content, with its number of tokens, of requests that began. Any thread may call ``refuse``.

    Callers name multimodal items and encoder inputs. A name stands in the keys of blocks in place of the content, so it
    must mean one content. Only the number of tokens can be checked: a name that comes with another number is rejected.
    """

    def __init__(self) -> None:
        self._tokens: dict[_Name, int] = {}

    def refuse(self, request: Request) -> None:
        """Raise ConfigError for a request in which a name comes with another number of tokens. O(its names)."""
        for name, tokens in _names(request):
            known = self._tokens.get(name, tokens)
            if known != tokens:
                raise ConfigError(
                    f"{name[0]} {name[1]!r} of request {request.request_id!r} has {tokens} tokens, it had {known} "
                    "before: a name means one content, so give content that differs another name"
                )

    def know(self, request: Request) -> None:
        """Note that ``request`` begins: blocks may be kept under its names."""
        for name, tokens in _names(request):
            self._tokens.pop(name, None)
            self._tokens[name] = tokens
            if len(self._tokens) > MOST_NAMES:
                del self._tokens[next(iter(self._tokens))]

    def forget(self) -> None:
        """Forget all names, because no block is kept."""
        self._tokens.clear()


def _names(request: Request) -> Iterator[tuple[_Name, int]]:
    for item in request.multimodal:
        yield ("multimodal item", item.id, request.cache_salt), item.length
    if request.encoder is not None:
        yield ("encoder input", request.encoder.digest, request.cache_salt), request.encoder.num_tokens


def id_of(request: Request | str) -> str:
    """Return the id of ``request``, which may be an id already."""
    return request if isinstance(request, str) else instance("request", request, Request).request_id


def one_a_row(name: str, counts: object, rows: Int64, least: int) -> Int64:
    """Return ``counts``, token counts of at least ``least``, as int64[len(rows)].

    Raises ConfigError for other values.
    """
    if (
        isinstance(counts, np.ndarray)
        and counts.dtype == np.int64
        and counts.shape == rows.shape
        and not np.count_nonzero(counts < least)
    ):
        return counts
    found = integers(name, counts, least)
    if len(found) != len(rows):
        raise ConfigError(f"{name} has {len(found)} entries for {len(rows)} rows: give one to each row")
    return found
