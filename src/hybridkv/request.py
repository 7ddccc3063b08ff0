"""A request: its identity, tokens, block hashes and counts.

    prompt                 outputs
    [0 ............ P-1] [P ........ num_tokens-1]      tokens known
    [0 ... num_computed_tokens-1]                       tokens whose KV is in the cache

A request that holds blocks is *resident*: its counts and the tokens of its unfinished hash block live in
columns of a RequestRows, so that a step reads and writes all rows with a few array operations. One that
waits keeps them itself. Either way the Request answers for both.

    tokens  [ array of whole hash blocks | tail: row of RequestRows.tail (resident) or the array's end ]
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import CacheError, ConfigError

Extra = tuple[tuple[object, ...], ...]
"""Extra keys of one block: ``(("cache_salt", "tenant-a"),)``."""

_MAX_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when to stop. Names and meaning as in vLLM and transformers.

    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: probabilities; 1 and 0 are off.
    repetition_penalty: 1 is off; counts prompt and output (CTRL, arXiv 1909.05858).
    seed: with the position of a token it alone decides the draw, whatever runs beside it.
    max_tokens: most output tokens. stop_token_ids: each ends the output and is part of it.
    stop: strings that end the output; found by whoever turns tokens into text.
    ignore_eos: go on behind the model's end token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.temperature >= 0, "temperature must be 0 (greedy) or more", self.temperature),
            (self.top_k >= 0, "top_k must be 0 (off) or more", self.top_k),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1 (off)", self.top_p),
            (0 <= self.min_p <= 1, "min_p must be between 0 (off) and 1", self.min_p),
            (self.repetition_penalty > 0, "repetition_penalty must be above 0 (1 is off)", self.repetition_penalty),
            (self.max_tokens >= 1, "max_tokens must be at least 1", self.max_tokens),
        )
        for good, message, value in checks:
            if not good:
                raise ConfigError(f"{message}, got {value}")


class Hasher(Protocol):
    """Hashes blocks of tokens; see hybridkv.cache.hashing.BlockHasher."""

    @property
    def block_size(self) -> int:
        """Tokens of a hash block."""
        ...

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.int32], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """Hashes of consecutive full blocks; a tail shorter than a block is left out."""
        ...

    def hash_rows(
        self,
        parents: Sequence[bytes | None],
        tokens: NDArray[np.int32],
        extras: Sequence[Extra | None] | None = None,
    ) -> list[bytes]:
        """Hashes of unrelated blocks, one a row of ``tokens`` [n, block_size], each with its own parent."""
        ...


def _token_array(tokens: Sequence[int] | NDArray[np.integer]) -> array[int]:
    """A copy of ``tokens`` as 32-bit integers; ConfigError for ids that do not fit."""
    if isinstance(tokens, np.ndarray):
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > _MAX_TOKEN_ID):
            raise ConfigError("token ids must lie in 0 .. 2**31 - 1")
        return array("i", tokens.astype(np.int32, copy=False).tobytes())
    try:
        out = array("i", tokens)
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"token ids must be integers in 0 .. 2**31 - 1: {error}") from None
    smallest = int(np.frombuffer(out, np.int32).min()) if out else 0
    if smallest < 0:
        raise ConfigError(f"token ids must not be negative, got {smallest}")
    return out


class Request:
    """One request. Not shared between managers; see the module's text for where its tokens live.

    prompt: token ids, at least one. hasher: what hashes its blocks; None without prefix caching.
    cache_salt: only requests with an equal salt share blocks.
    arrival_time: seconds on the caller's clock. eos_token_ids: the model's end tokens.
    first_hit_tokens: what its first admission found in the cache; None before.
    branch_tokens: where requests before it went on with the same tokens and no state is kept; 0: nowhere.
    """

    __slots__ = (
        "_computed",
        "_rows",
        "_tokens",
        "arrival_time",
        "branch_tokens",
        "cache_salt",
        "eos_token_ids",
        "first_hit_tokens",
        "hasher",
        "hashes",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "row",
        "sampling",
        "skip_reading_prefix_cache",
        "skip_writing_prefix_cache",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int] | NDArray[np.integer],
        sampling: SamplingParams | None = None,
        *,
        hasher: Hasher | None = None,
        cache_salt: str | None = None,
        arrival_time: float = 0.0,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        skip_reading_prefix_cache: bool = False,
        skip_writing_prefix_cache: bool = False,
    ) -> None:
        self._tokens = _token_array(prompt)
        if not self._tokens:
            raise ConfigError(f"request {request_id!r} has an empty prompt: give it at least one token")
        self.request_id = request_id
        self.sampling = sampling if sampling is not None else SamplingParams()
        self.hasher = hasher
        self.cache_salt = cache_salt
        self.arrival_time = arrival_time
        self.eos_token_ids = eos_token_ids
        self.num_prompt_tokens = len(self._tokens)
        self.num_preemptions = 0
        self.first_hit_tokens: int | None = None
        self.branch_tokens = 0
        self.priority = priority
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.skip_writing_prefix_cache = skip_writing_prefix_cache
        self._computed = 0
        self._rows: RequestRows | None = None
        self.row = -1
        self.hashes: list[bytes] = []
        self._hash_new_blocks()

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether its prefix is looked up."""
        return not self.skip_reading_prefix_cache

    @property
    def writes_prefix_cache(self) -> bool:
        """Whether its blocks are published."""
        return not self.skip_writing_prefix_cache

    @property
    def num_encoder_tokens(self) -> int:
        """Tokens of the encoder's input, 0 without."""
        return 0

    # -- counts

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and outputs."""
        rows = self._rows
        return len(self._tokens) if rows is None else rows.num_tokens.item(self.row)

    @property
    def num_output_tokens(self) -> int:
        """Tokens known behind the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache or scheduled to be; set by whoever schedules."""
        rows = self._rows
        return self._computed if rows is None else rows.num_computed.item(self.row)

    @num_computed_tokens.setter
    def num_computed_tokens(self, tokens: int) -> None:
        if self._rows is None:
            self._computed = tokens
        else:
            self._rows.num_computed[self.row] = tokens

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end the output: those asked for, and the model's own unless they are ignored."""
        asked = self.sampling.stop_token_ids
        return asked if self.sampling.ignore_eos else (*self.eos_token_ids, *asked)

    # -- tokens

    def token_ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """Tokens start .. stop-1 as a new int32 array. O(stop - start)."""
        end = self.num_tokens if stop is None else min(stop, self.num_tokens)
        whole = len(self._tokens)
        head = np.frombuffer(self._tokens, np.int32)[start:end].copy()
        if self._rows is None or end <= whole:
            return head
        tail = self._rows.tail[self.row, max(start - whole, 0) : end - whole]
        return np.concatenate((head, tail))

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens behind the prompt."""
        tokens: list[int] = self.token_ids(self.num_prompt_tokens).tolist()
        return tokens

    def append(self, token: int) -> None:
        """One more token; hashes the block that it completes."""
        if self._rows is None:
            self._tokens.append(token)
            self._hash_new_blocks()
        else:
            self._rows.append_one(self.row, token)

    # -- hashes

    def extra_keys(self, first_block: int, count: int) -> list[Extra | None] | None:
        """Extra keys of blocks first_block .. first_block + count - 1; None when all are empty.

        The salt stands in the block at token 0 only: later blocks inherit it through their parent.
        """
        if self.cache_salt is None or first_block > 0 or count == 0:
            return None
        return [(("cache_salt", self.cache_salt),), *[None] * (count - 1)]

    def _hash_new_blocks(self) -> None:
        """Hash the full blocks of ``_tokens`` that have no hash yet."""
        if self.hasher is None:
            return
        size, done = self.hasher.block_size, len(self.hashes)
        full = len(self._tokens) // size
        if full == done:
            return
        tokens = np.frombuffer(self._tokens, np.int32)[done * size : full * size]
        parent = self.hashes[-1] if done else None
        self.hashes += self.hasher.hash_chain(parent, tokens, self.extra_keys(done, full - done))

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, prompt={self.num_prompt_tokens}, "
            f"tokens={self.num_tokens}, computed={self.num_computed_tokens})"
        )


def append_tokens(requests: Sequence[Request], tokens: Sequence[int] | NDArray[np.integer]) -> None:
    """``tokens[i]`` behind the known ones of ``requests[i]``; requests distinct.

    One batch when all of them hold blocks of one manager, else one by one. ConfigError when the numbers differ.
    """
    if len(requests) != len(tokens):
        raise ConfigError(f"{len(requests)} requests but {len(tokens)} tokens: give one token to each request")
    home = requests[0]._rows if requests else None
    rows = [] if home is None else [request.row for request in requests if request._rows is home]
    if home is not None and len(rows) == len(requests):
        home.append(np.fromiter(rows, np.int64, len(rows)), np.fromiter(tokens, np.int32, len(rows)))
        return
    for request, token in zip(requests, tokens, strict=True):
        request.append(int(token))


class RequestRows:
    """Columns of the resident requests: what a step reads and writes of all rows at once.

    num_tokens, num_computed: int64[capacity]. in_flight: int64[capacity], how many of those computed are of
    steps not yet settled. tail: int32[capacity, tail_tokens], the tokens behind a
    row's last whole hash block (kept until overwritten). requests: who has the row, None when free.
    Rows are handed out lowest first; the columns grow by doubling, so never keep a reference to them.
    """

    def __init__(self, tail_tokens: int, capacity: int = 64) -> None:
        self.tail_tokens = tail_tokens
        self.num_tokens = np.zeros(capacity, np.int64)
        self.num_computed = np.zeros(capacity, np.int64)
        self.in_flight = np.zeros(capacity, np.int64)
        self.tail = np.zeros((capacity, tail_tokens), np.int32)
        self.requests: list[Request | None] = [None] * capacity
        self._free = list(range(capacity))

    @property
    def capacity(self) -> int:
        """Rows that exist."""
        return len(self.requests)

    def bind(self, request: Request) -> int:
        """Give ``request`` a row and move its counts and its tail there. O(tail_tokens)."""
        if request._rows is not None:
            raise CacheError(f"request {request.request_id!r} already holds row {request.row}")
        if not self._free:
            self._grow()
        row = heapq.heappop(self._free)
        tokens = request._tokens
        whole = len(tokens) // self.tail_tokens * self.tail_tokens
        rest = tokens[whole:]
        self.tail[row, : len(rest)] = rest
        self.num_tokens[row] = len(tokens)
        self.num_computed[row] = request._computed
        del tokens[whole:]
        self.requests[row] = request
        request._rows, request.row = self, row
        if not rest:  # the last token must be readable in the tail: a decode step sends it
            self.tail[row, -1] = tokens[-1]
        return row

    def release(self, request: Request) -> None:
        """Take the row back; counts and tail return to the request."""
        row = request.row
        if request._rows is not self or self.requests[row] is not request:
            raise CacheError(f"request {request.request_id!r} holds no row here")
        rest = self.num_tokens.item(row) - len(request._tokens)
        request._tokens.extend(self.tail[row, :rest].tolist())
        request._computed = self.num_computed.item(row)
        request._rows, request.row = None, -1
        self.requests[row] = None
        self.num_tokens[row] = self.num_computed[row] = self.in_flight[row] = 0
        heapq.heappush(self._free, row)

    def append_one(self, row: int, token: int) -> None:
        """One token behind the known ones of ``row``."""
        n = self.num_tokens.item(row)
        self.tail[row, n % self.tail_tokens] = token
        self.num_tokens[row] = n + 1
        if (n + 1) % self.tail_tokens == 0:
            self._flush(np.array([row]))

    def append(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """``tokens[i]`` behind the known ones of ``rows[i]``; rows distinct. Rows that complete a block are hashed."""
        n = self.num_tokens[rows]
        self.tail[rows, n % self.tail_tokens] = tokens
        n += 1
        self.num_tokens[rows] = n
        whole = rows[n % self.tail_tokens == 0]
        if whole.size:
            self._flush(whole)

    def rows_of(self, requests: Sequence[Request]) -> NDArray[np.int64]:
        """The rows of ``requests``, int64[len(requests)]. CacheError if one of them holds none here. O(requests)."""
        rows = [request.row for request in requests if request._rows is self]
        if len(rows) < len(requests):
            stray = next(request for request in requests if request._rows is not self)
            raise CacheError(f"request {stray.request_id!r} holds no row here: allocate slots for it first")
        return np.fromiter(rows, np.int64, len(rows))

    def owners(self, rows: NDArray[np.integer]) -> list[Request]:
        """Who holds each of ``rows``. CacheError if nobody does. O(rows)."""
        holders = [self.requests[row] for row in rows.tolist()]
        owners = [request for request in holders if request is not None]
        if len(owners) < len(holders):
            raise CacheError(f"row {int(rows[holders.index(None)])} is held by nobody")
        return owners

    def last_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """The last known token of each row, int32[len(rows)]."""
        last: NDArray[np.int32] = self.tail[rows, (self.num_tokens[rows] - 1) % self.tail_tokens]
        return last

    def advance(self, rows: NDArray[np.int64], tokens: NDArray[np.int64] | int) -> None:
        """``tokens`` more are computed in each of ``rows``."""
        self.num_computed[rows] += tokens

    def schedule(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """``tokens`` more count as computed in each of ``rows``; the step that computes them is in flight."""
        self.num_computed[rows] += tokens
        self.in_flight[rows] += tokens

    def settle(self, rows: NDArray[np.int64], tokens: NDArray[np.integer]) -> None:
        """A step that computed ``tokens`` in each of ``rows`` has run."""
        self.in_flight[rows] -= tokens

    def retract(self, rows: NDArray[np.int64], tokens: NDArray[np.integer]) -> None:
        """A step that should have computed ``tokens`` in each of ``rows`` failed."""
        self.num_computed[rows] -= tokens
        self.in_flight[rows] -= tokens

    def _flush(self, rows: NDArray[np.int64]) -> None:
        """Move full tails to their requests and hash them, all in one call."""
        blocks = self.tail[rows]
        octets, size = blocks.tobytes(), blocks.itemsize * self.tail_tokens
        owners = self.owners(rows)
        for i, request in enumerate(owners):
            request._tokens.frombytes(octets[i * size : (i + 1) * size])
        hashed = [request for request in owners if request.hasher is not None]
        hasher = hashed[0].hasher if hashed else None  # one for all requests of a manager
        if hasher is None:
            return
        parents = [request.hashes[-1] if request.hashes else None for request in hashed]
        extras = [self._extra(request) for request in hashed]
        if len(hashed) < len(owners):
            blocks = blocks[[request.hasher is not None for request in owners]]
        for request, key in zip(hashed, hasher.hash_rows(parents, blocks, extras), strict=True):
            request.hashes.append(key)

    @staticmethod
    def _extra(request: Request) -> Extra | None:
        extras = request.extra_keys(len(request.hashes), 1)
        return None if extras is None else extras[0]

    def _grow(self) -> None:
        old = self.capacity
        for name in ("num_tokens", "num_computed", "in_flight", "tail"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        self.requests += [None] * old
        self._free = list(range(old, 2 * old))
