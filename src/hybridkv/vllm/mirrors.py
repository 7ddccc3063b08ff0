"""Of each request of vLLM one of ours, with its tokens, its counts and its hashes.

vLLM's    [ prompt | outputs ]  num_computed_tokens  num_in_flight_tokens  block_hashes
                    ^ what is new since the last call is appended, counts are set
ours      [ prompt | outputs ]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.extra_keys import Extra, LoraAdapter, MultimodalItem
from hybridkv.request import Hasher, Request
from hybridkv.request_rows import RequestRows
from hybridkv.vllm.wishes import wishes_of

Int64 = NDArray[np.int64]


class EngineRequest(Protocol):
    """What is read of vLLM's Request."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_output_placeholders: int
    num_preemptions: int
    skip_reading_prefix_cache: bool
    block_hashes: list[bytes]
    cache_salt: str | None
    lora_request: Any
    prompt_embeds: Any
    sampling_params: Any
    mm_features: list[Any]

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs."""
        ...

    @property
    def num_tokens_with_spec(self) -> int:
        """And drafts."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Theirs."""
        ...


class LentHashes:
    """A Hasher that computes nothing: it hands over what the engine has hashed, of the request that was lent last."""

    root = b""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._hashes: Sequence[bytes] = ()
        self._next = 0

    def lend(self, hashes: Sequence[bytes], first: int) -> None:
        """The next blocks asked for are those of ``hashes`` from ``first`` on."""
        self._hashes, self._next = hashes, first

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.int32], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """As Hasher; ConfigError where the engine has not hashed so far."""
        del parent, extras
        return self._take(len(tokens) // self.block_size)

    def hash_rows(
        self,
        parents: Sequence[bytes | None],
        tokens: NDArray[np.int32],
        extras: Sequence[Extra | None] | None = None,
    ) -> list[bytes]:
        """As Hasher, for blocks that are all of the request that was lent."""
        del parents, extras
        return self._take(len(tokens))

    def _take(self, count: int) -> list[bytes]:
        first, self._next = self._next, self._next + count
        if self._next > len(self._hashes):
            raise ConfigError(f"{self._next} blocks are full, of which the engine has hashed {len(self._hashes)}")
        return list(self._hashes[first : self._next])


class Mirrors:
    """Ours, by the id of vLLM's. rows: of the manager that they hold blocks of. hasher: None without prefix caching.

    One that lends is lent what the engine has hashed; any other hashes itself.
    """

    def __init__(self, rows: RequestRows, hasher: Hasher | None) -> None:
        self._rows, self._hasher = rows, hasher
        self._lent = hasher if isinstance(hasher, LentHashes) else None
        self._requests: dict[str, Request] = {}

    def of(self, request: EngineRequest) -> Request:
        """Ours, up to date with ``request``. O(tokens that are new). ConfigError for one whose tokens were cut."""
        mine = self._requests.get(request.request_id)
        if mine is None:
            mine = self._requests[request.request_id] = self._begin(request)
        known = mine.num_tokens
        if known != request.num_tokens:
            self._append(mine, known, request)
        mine.num_computed_tokens = request.num_computed_tokens
        if mine.row >= 0:
            # what was preempted may still have tokens in flight that are computed no longer
            self._rows.in_flight[mine.row] = min(request.num_in_flight_tokens, request.num_computed_tokens)
        return mine

    def of_rows(self, requests: Sequence[EngineRequest]) -> Int64:
        """``of`` for requests that hold blocks, all at once; their rows. O(requests), a few array operations."""
        rows, table = self._rows, self._requests
        mine = [table[request.request_id] for request in requests]
        held = np.fromiter([one.row for one in mine], np.int64, len(mine))
        known = rows.num_tokens[held]
        given = np.fromiter([request.num_tokens for request in requests], np.int64, len(mine))
        one_more = given == known + 1
        if self._lent is not None:  # the engine's hashes are lent for a request at a time
            one_more &= given % self._lent.block_size != 0
        for place in np.flatnonzero((given != known) & ~one_more).tolist():
            self._append(mine[place], known.item(place), requests[place])
        more = np.flatnonzero(one_more)
        if more.size:
            last = [requests[place].all_token_ids[-1] for place in more.tolist()]
            rows.append(held[more], np.fromiter(last, np.int32, len(last)))
        computed = np.fromiter([request.num_computed_tokens for request in requests], np.int64, len(mine))
        in_flight = np.fromiter([request.num_in_flight_tokens for request in requests], np.int64, len(mine))
        rows.num_computed[held] = computed
        rows.in_flight[held] = np.minimum(in_flight, computed)
        return held

    def holds_blocks(self, request_id: str) -> bool:
        """Whether ours of that id holds blocks."""
        mine = self._requests.get(request_id)
        return mine is not None and mine.row >= 0

    def known(self, request_id: str) -> Request | None:
        """Ours as it was brought up to date last."""
        return self._requests.get(request_id)

    def forget(self, request_id: str) -> None:
        """It holds nothing any longer; begun anew when it comes back."""
        self._requests.pop(request_id, None)

    def _begin(self, request: EngineRequest) -> Request:
        """With its prompt alone: outputs are told apart from it where windows and states are kept for reuse."""
        if self._lent is not None:
            self._lent.lend(request.block_hashes, 0)
        lora = request.lora_request
        # its tokens are all the same: the engine's hashes tell its embeddings apart, ours would not
        unseen = self._lent is None and request.prompt_embeds is not None
        # of no use without keys; and those of an encoder lie in no prompt
        features = [] if self._hasher is None else request.mm_features
        return Request(
            request.request_id,
            np.array(request.all_token_ids[: request.num_prompt_tokens], np.int32),
            hasher=self._hasher,
            cache_salt=request.cache_salt,
            lora=None if lora is None else LoraAdapter(lora.lora_name, lora.lora_path, lora.lora_int_id),
            multimodal=[
                MultimodalItem(one.identifier, one.mm_position.offset, one.mm_position.length) for one in features
            ],
            skip_reading_prefix_cache=request.skip_reading_prefix_cache or unseen,
            skip_writing_prefix_cache=unseen,
            **wishes_of(request),
        )

    def _append(self, mine: Request, known: int, request: EngineRequest) -> None:
        if request.num_tokens < known:
            raise ConfigError(
                f"request {request.request_id!r} had {known} tokens and has {request.num_tokens}: sessions whose "
                "outputs are cut are not supported by hybridkv.vllm"
            )
        if self._lent is not None:
            self._lent.lend(request.block_hashes, len(mine.hashes))
        for token in request.all_token_ids[known:]:
            mine.append(token)
