"""Of each request of vLLM one of ours, which borrows its tokens and hashes; counts are taken over when it is needed.

vLLM's    [ prompt | outputs ]  block_hashes  num_tokens  num_computed_tokens  num_in_flight_tokens
            ^ read where they lie             ^ taken over, of one or of all at once

What a request says to the cache is in ``SamplingParams.extra_args``, over HTTP ``vllm_xargs``:

    {"hybridkv_marks": [1200], "hybridkv_tenant": "blue", "hybridkv_hints": {"within_s": 30}}

A scheduler may refuse no request: a wish that cannot be is named in the log and left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from hybridkv.arguments import text
from hybridkv.cache import EngineHashes, KVCacheManager
from hybridkv.extra_keys import LoraAdapter, MultimodalItem
from hybridkv.request import Hints, Lent, Request
from hybridkv.request.token_ids import checked_marks

MARKS: Final = "hybridkv_marks"
"""Token counts, as Request has them."""
TENANT: Final = "hybridkv_tenant"
"""As Request has it."""
HINTS: Final = "hybridkv_hints"
"""An object as Hints has it, or its JSON: over HTTP there are numbers, strings and lists alone."""

logger = logging.getLogger(__name__)


class EngineRequest(Protocol):
    """What is read of vLLM's Request."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_output_placeholders: int
    max_tokens: int
    is_prefill_chunk: bool
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


class Mirrors:
    """Ours, by the id of vLLM's, whose tokens and hashes are borrowed. cache: where they hold blocks.

    A cache without EngineHashes hashes what it borrows itself.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache, self._hasher = cache, cache.hasher
        self._keyed = isinstance(cache.hasher, EngineHashes)
        self._requests: dict[str, Request] = {}

    def of(self, request: EngineRequest) -> Request:
        """Ours, up to date with ``request``. ConfigError for one whose tokens were cut."""
        mine = self._requests.get(request.request_id)
        if mine is None:
            mine = self._requests[request.request_id] = self._begin(request)
        computed = request.num_computed_tokens
        # what was preempted may still have tokens in flight that are computed no longer
        self._cache.engine.synchronise_one(mine, computed, min(request.num_in_flight_tokens, computed))
        return mine

    def known(self, request_id: str) -> Request | None:
        """Ours as it was brought up to date last."""
        return self._requests.get(request_id)

    def forget(self, request_id: str) -> None:
        """It holds nothing any longer; begun anew when it comes back."""
        self._requests.pop(request_id, None)

    def _begin(self, request: EngineRequest) -> Request:
        """Outputs are told apart from its prompt where windows and states are kept for reuse."""
        lora = request.lora_request
        # its tokens are all the same: the engine's hashes tell its embeddings apart, ours would not
        unseen = not self._keyed and request.prompt_embeds is not None
        # of no use without keys; and those of an encoder lie in no prompt
        features = [] if self._hasher is None else request.mm_features
        return Request(
            request.request_id,
            Lent(request, request.num_prompt_tokens, request.block_hashes if self._keyed else None),
            hasher=self._hasher,
            cache_salt=request.cache_salt,
            lora=None if lora is None else LoraAdapter(lora.lora_name, lora.lora_path, lora.lora_int_id),
            multimodal=[
                MultimodalItem(one.identifier, one.mm_position.offset, one.mm_position.length) for one in features
            ],
            skip_reading_prefix_cache=request.skip_reading_prefix_cache or unseen,
            skip_writing_prefix_cache=unseen,
            **_wishes_of(request),
        )


def _wishes_of(request: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's Request
    """``marks``, ``tenant`` and ``hints`` for our Request, as far as ``request`` gives them, and they can be."""
    given: Mapping[str, Any] = getattr(request.sampling_params, "extra_args", None) or {}
    found: dict[str, Any] = {}
    for name, (field, read) in _READ.items() if given else ():
        asked = given.get(name)
        if asked is None:
            continue
        try:
            found[field] = read(asked)
        except (ValueError, RecursionError) as error:
            logger.warning("request %s has %s that cannot be, and goes without: %s", request.request_id, name, error)
    return found


def _hints(given: object) -> Hints:
    return Hints.parse(json.loads(given) if isinstance(given, str) else given)


_READ: Final[Mapping[str, tuple[str, Callable[[Any], object]]]] = {
    MARKS: ("marks", lambda given: checked_marks(given, MARKS)),
    TENANT: ("tenant", lambda given: text(TENANT, given)),
    HINTS: ("hints", _hints),
}
