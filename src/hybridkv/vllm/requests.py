"""Mirror vLLM's requests in this library, allocate slots for requests that decode, and admit new requests.

Our request borrows tokens and hashes from vLLM's request. It copies counts when they are needed.

vLLM's    [ prompt | outputs ]  block_hashes  num_tokens  num_computed_tokens  num_in_flight_tokens
            ^ read in place                   ^ copied, for one request or for all at once

Options of a request for the cache are in ``SamplingParams.extra_args``, over HTTP ``vllm_xargs``:

    {"hybridkv_marks": [1200], "hybridkv_tenant": "blue", "hybridkv_hints": {"within_s": 30}}

A scheduler cannot reject a request: invalid options are logged and ignored.

Slots of requests that decode are allocated before vLLM asks for them, and kept until vLLM asks.

give     in one batch, for the first running requests, before vLLM's own loop
decode   for the leading requests that decode one token; looks only at requests that need something
take     whether vLLM's call needs no blocks: the request got its slots in this step, or needs none
serve    the blocks of a call on its own

Admissions admits new requests, and requests whose load has finished. It considers hits, loads, and the blocks that
must stay free.

synchronous load    admitted with new tokens; the worker writes the blocks before its forward pass
asynchronous load   admitted without new tokens; waits, and its blocks cannot be hit until finish_load publishes them
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import ceil
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from hybridkv.arguments import text
from hybridkv.cache import Admission, EngineHashes, Hit, KVCacheBlocks, KVCacheManager, Refusal
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import LoraAdapter, MultimodalItem
from hybridkv.request import Hints, Lent, Request
from hybridkv.request.tokens import checked_marks
from hybridkv.specs import Keeps, RequestLimits
from hybridkv.vllm.specs import Settings

MARKS: Final = "hybridkv_marks"
"""Token counts, as in Request."""
TENANT: Final = "hybridkv_tenant"
"""A name, as in Request."""
HINTS: Final = "hybridkv_hints"
"""An object as in Hints, or its JSON: vLLM accepts only numbers, strings and lists over HTTP."""

logger = logging.getLogger(__name__)


class EngineRequest(Protocol):
    """The fields that are read from vLLM's Request."""

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
        """Prompt and output tokens."""
        ...

    @property
    def num_tokens_with_spec(self) -> int:
        """Prompt, output and draft tokens."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt and output tokens."""
        ...


class Mirrors:
    """Our requests by the id of vLLM's request. They borrow its tokens and hashes.

    ``cache`` is where the requests hold blocks. A cache without EngineHashes hashes the borrowed tokens itself.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache, self._hasher = cache, cache.hasher
        self._keyed = isinstance(cache.hasher, EngineHashes)
        self._requests: dict[str, Request] = {}

    def of(self, request: EngineRequest) -> Request:
        """Return our request, up to date with ``request``. Raises ConfigError for a request with tokens removed."""
        mine = self._requests.get(request.request_id)
        if mine is None:
            mine = self._requests[request.request_id] = self._begin(request)
        computed = request.num_computed_tokens
        if mine.row < 0 and mine.num_computed_tokens == computed:
            return mine  # it waits
        # a preempted request may have more tokens in flight than it has computed tokens
        self._cache.engine.synchronise_one(mine, computed, min(request.num_in_flight_tokens, computed))
        return mine

    def known(self, request_id: str) -> Request | None:
        """Return our request as of its last update."""
        return self._requests.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a request that holds nothing any longer; it starts again if it comes back."""
        self._requests.pop(request_id, None)

    def _begin(self, request: EngineRequest) -> Request:
        """Return our request. It knows the length of the prompt: windows and states treat outputs differently."""
        lora = request.lora_request
        # a prompt of embeddings has placeholder tokens: the engine's hashes cover the embeddings, ours would not
        unseen = not self._keyed and request.prompt_embeds is not None
        # only hashes need the items; an encoder's items are not in the prompt, so without keys they are left out
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
            **_options_of(request),
        )


def _options_of(request: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's Request
    """Return the valid ``marks``, ``tenant`` and ``hints`` of ``request`` for our Request."""
    given: Mapping[str, Any] = getattr(request.sampling_params, "extra_args", None) or {}
    found: dict[str, Any] = {}
    for name, (field, read) in _READ.items() if given else ():
        asked = given.get(name)
        if asked is None:
            continue
        try:
            found[field] = read(asked)
        except (ValueError, RecursionError) as error:
            logger.warning("request %s has an invalid %s, which is ignored: %s", request.request_id, name, error)
    return found


def _hints(given: object) -> Hints:
    return Hints.parse(json.loads(given) if isinstance(given, str) else given)


_READ: Final[Mapping[str, tuple[str, Callable[[Any], object]]]] = {
    MARKS: ("marks", lambda given: checked_marks(given, MARKS)),
    TENANT: ("tenant", lambda given: text(TENANT, given)),
    HINTS: ("hints", _hints),
}


Ids = tuple[list[int], ...]
"""Block ids by group."""
_Asked = tuple[EngineRequest, Request, int]
"""A request, ours of it, and the number of tokens it needs slots for."""
_FEW: Final = 8
"""Up to this many requests, single calls take less time than one batch."""


class Decoded(NamedTuple):
    """One token each for the leading running requests.

    Attributes:
        covered: the number of leading requests: ``requests``, and those between them whose last token is in flight.
        requests: vLLM's requests that run.
        num_computed_tokens: computed tokens of each before the step.
        new_blocks: new blocks of each; ``None`` without any.
    """

    covered: int
    requests: list[EngineRequest]
    num_computed_tokens: list[int]
    new_blocks: list[Ids | None]


class Ends(NamedTuple):
    """What ends a request of which vLLM reports tokens only.

    Attributes:
        tokens: The token count, prompt included, at which it ends.
        stops: The token ids that end it.
    """

    tokens: int
    stops: frozenset[int]


def ends_of(request: Any, longest: int) -> Ends | None:  # noqa: ANN401 - vLLM's Request
    """Return what ends ``request``; ``None`` if vLLM checks or reports more of it than tokens.

    Args:
        request: vLLM's request.
        longest: The most tokens that the model takes.
    """
    sampling = request.sampling_params
    if (
        sampling is None
        or request.pooling_params is not None
        or request.structured_output_request is not None
        or request.mm_features
        or request.resumable
        or sampling.num_logprobs is not None
        or sampling.repetition_detection is not None
    ):
        return None
    stops = {sampling.eos_token_id, *(sampling.stop_token_ids or ())} - {None}
    return Ends(min(request.num_prompt_tokens + request.max_tokens, longest), frozenset(stops))


class SlotsAhead:
    """Slots allocated ahead for the requests of ``mirrors``.

    ``longest`` is the most tokens that the model takes. ``served`` holds our requests that this step looked at. All
    others need no block in this step and pass no checkpoint position. ``owed`` holds the blocks of requests that vLLM
    does not know yet. ``ends`` holds what ends each request, for those that decoded.
    """

    def __init__(self, cache: KVCacheManager, mirrors: Mirrors, longest: int) -> None:
        self._cache, self._mirrors, self._longest = cache, mirrors, longest
        self._num_groups = len(cache.groups)
        states = any(group.spec.keeps is Keeps.STATE for group in cache.config.groups)
        self._all_at_once = cache.placement is None and not states
        # by request: tokens and lookahead with slots in this step; the token count below which it needs nothing
        self._ready = dict[str, tuple[int, int]]()
        self.owed = dict[str, Ids]()
        self._enough = dict[str, int]()
        self.served = dict[str, Request]()
        self.ends = dict[str, Ends | None]()

    def end_step(self) -> None:
        """End the step. Blocks unknown to vLLM stay with the request, and are reported with its next slots."""
        self._ready.clear()
        served, self.served = self.served, {}
        if served:
            rows = np.fromiter((mine.row for mine in served.values()), np.int64, len(served))
            needed = np.minimum(self._cache.engine.next_events(rows), self._cache.checkpoints.next_positions(rows))
            enough = zip(served, needed.tolist(), strict=True)
            self._enough.update(one for one in enough if one[0] not in self.owed)

    def forget(self, name: str) -> None:
        """Drop a request that holds nothing any longer."""
        self.served.pop(name, None)
        for table in (self._ready, self.owed, self._enough, self.ends):
            table.pop(name, None)

    def serve(self, request: EngineRequest, mine: Request, new_tokens: int, lookahead: int) -> KVCacheBlocks | None:
        """Return the blocks of one call for a request that holds blocks. ``mine`` is ours of ``request``."""
        self.served[request.request_id] = mine
        return self._cache.allocate_slots(mine, new_tokens, num_lookahead_tokens=lookahead)

    def take(self, request: EngineRequest, new_tokens: int, lookahead: int) -> bool:
        """Return whether the request has slots for exactly these tokens and lookahead, or needs none.

        Uses up the slots noted for this step, also if they do not match.
        """
        name = request.request_id
        if request.num_computed_tokens + new_tokens + lookahead < self._enough.get(name, 0):
            return True
        return self._ready.pop(name, None) == (new_tokens, lookahead)

    def give(self, running: Sequence[EngineRequest], most_tokens: int, lookahead: int) -> None:
        """Allocate slots in one batch for the requests among ``running`` that need some. O(running).

        ``most_tokens`` is the most that a decoding request runs, drafts included. The batch ends before the first
        request that runs more or has no row here, so that blocks are allocated in the same order as one by one. Does
        nothing for models with states (their columns move), in the natural layout (its blocks are copied), and for
        few requests (single calls are faster).
        """
        if not self._all_at_once:
            return
        some, enough, longest = list[_Asked](), self._enough, self._longest - 1
        for request in running:
            name, computed, ahead = request.request_id, request.num_computed_tokens, request.num_output_placeholders
            needs_from = enough.get(name, 0)
            if computed + most_tokens + lookahead < needs_from and not request.is_prefill_chunk:
                continue  # most of those that decode; a chunk may run more
            if ahead > 0 and _last_in_flight(request):
                continue
            more = min(request.num_tokens_with_spec + ahead, longest) - computed
            if more > most_tokens:
                break
            if more <= 0 or computed + more + lookahead < needs_from:
                continue
            mine = self._mirrors.known(name)
            if mine is None or mine.row < 0:
                break
            some.append((request, mine, more))
        if len(some) > _FEW:
            self._allocate(some, lookahead)

    def _allocate(self, some: Sequence[_Asked], lookahead: int) -> int:
        """Allocate slots for ``some`` in one batch; return how many of them got theirs, in their order."""
        counts = [
            # a preempted request may have more tokens in flight than it has computed tokens
            (mine.row, one.num_tokens, one.num_computed_tokens, min(one.num_in_flight_tokens, one.num_computed_tokens))
            for one, mine, _ in some
        ]
        rows, known_tokens, computed, in_flight = np.array(counts, np.int64).T
        self._cache.engine.synchronise(rows, num_tokens=known_tokens, num_computed=computed, in_flight=in_flight)
        slots = self._cache.allocate_batch(rows, np.array([tokens for *_, tokens in some], np.int64), lookahead)
        names = [one.request_id for one, *_ in some]
        for name, (_, mine, tokens) in zip(names[: slots.accepted], some, strict=False):
            self._ready[name] = tokens, lookahead
            self.served[name] = mine
        for owner, group, block in zip(slots.owner.tolist(), slots.group.tolist(), slots.block.tolist(), strict=True):
            self._owe(names[owner])[group].append(block)
        return slots.accepted

    def _owe(self, name: str) -> Ids:
        return self.owed.setdefault(name, tuple([] for _ in range(self._num_groups)))

    # -- steps of one token each

    def decode(self, running: Sequence[EngineRequest], at_least: int) -> Decoded | None:
        """Allocate slots for a token of each of the leading ``running``, except those with their last token in flight.

        They end before a request that does something else, is unknown or gets no slot. Returns ``None`` if they are
        fewer than ``at_least``; requests that got slots then keep them. O(running), with one call for each request that
        needs something.
        """
        requests, computed_tokens, due = list[EngineRequest](), list[int](), list[tuple[int, int]]()
        enough, longest, covered = self._enough, self._longest - 1, len(running)
        for at, request in enumerate(running):
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead > 0 and _last_in_flight(request):
                continue
            new = request.num_tokens + ahead - computed
            if new != 1 or computed >= longest or request.is_prefill_chunk or request.mm_features:
                covered = at
                break
            if computed + 1 >= enough.get(request.request_id, 0):
                due.append((at, len(requests)))
            requests.append(request)
            computed_tokens.append(computed)
        if covered < at_least:
            return None
        served = self._decode_due([requests[place] for _, place in due]) if due else 0
        if served < len(due):
            covered, place = due[served]
            if covered < at_least:
                return None
            del requests[place:], computed_tokens[place:]
        new_blocks: list[Ids | None] = [None] * len(requests)
        for _, place in due[:served]:
            name = requests[place].request_id
            del self._ready[name]
            new_blocks[place] = self.owed.pop(name, None)
        return Decoded(covered, requests, computed_tokens, new_blocks)

    def _decode_due(self, due: Sequence[EngineRequest]) -> int:
        """Return how many of ``due`` got their slots, in their order."""
        some = list[_Asked]()
        for request in due:
            mine = self._mirrors.known(request.request_id)
            if mine is None or mine.row < 0:
                break
            some.append((request, mine, 1))
        if self._all_at_once and len(some) > _FEW:
            return self._allocate(some, 0)
        for place, (request, _, _) in enumerate(some):
            new = self.serve(request, self._mirrors.of(request), 1, 0)
            if new is None:
                return place
            self._ready[request.request_id] = (1, 0)
            for group, ids in enumerate(new.ids):
                if len(ids):
                    self._owe(request.request_id)[group].extend(ids.tolist())
        return len(some)


def _last_in_flight(request: EngineRequest) -> bool:
    """Return whether the request's last permitted token comes from a step in flight, so that it does not run again."""
    sure = request.num_computed_tokens + 1 - (request.num_output_placeholders - 1)  # even if all drafts are rejected
    return sure >= request.num_prompt_tokens + request.max_tokens


class _Load(NamedTuple):
    """A running transfer.

    Attributes:
        tokens: tokens that exist after it.
        resumes: whether the request can resume after it; False only for a model with states whose whole prompt is
            loaded.
    """

    tokens: int
    resumes: bool


GROWTH: Final = 0.25
"""Share of the next blocks of all running requests that stays free when a request is admitted.

In the reference layout without saved states, only while others wait, and not with ``lru``: admissions then equal those
of vLLM. Without it, more is admitted than by stock, and then preempted (docs/design/0036, Little memory).
"""


def _saves_states(cache: KVCacheManager) -> bool:
    return any(group.states is not None and not group.states.rotates for group in cache.groups)


def growth_of(cache: KVCacheManager) -> float:
    """Return the blocks, or slabs, that a running request takes together when all its groups need their next block.

    In the reference layout without saved states, windows do not count, and nothing does with ``lru``.
    """
    if cache.bounds.follows_vllm:
        if _saves_states(cache):
            return len(cache.groups)
        full_attention = [group for group in cache.config.groups if group.spec.keeps is Keeps.TOKENS]
        return len(full_attention) if cache.eviction_policy.ranks else 0
    growing = (
        number for number, group in enumerate(cache.config.groups) if group.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW}
    )
    return sum(map(cache.config.block_bytes_of, growing)) / cache.config.unit_bytes


class Admissions:
    """Admissions to the blocks of ``cache`` of requests in ``mirrors``.

    ``loading``: requests in an asynchronous load. ``loaded``: requests with a finished transfer that were not admitted
    yet. ``resumed``: requests that resumed after a load since it was last cleared.
    """

    def __init__(self, cache: KVCacheManager, mirrors: Mirrors, settings: Settings) -> None:
        self._cache, self._mirrors = cache, mirrors
        self._watermark = int(settings.watermark * cache.config.num_blocks)
        self._blocks_move = cache.placement is not None
        self._states = tuple(group.states for group in cache.groups if group.states is not None)
        self._growth = GROWTH * growth_of(cache)
        self._grows_for_waiting = cache.bounds.follows_vllm and not _saves_states(cache)
        self._limits = lru_cache(1024)(  # a waiting request asks in each step
            lambda tokens, encoder_tokens: RequestLimits(
                min(tokens, settings.max_model_len),
                settings.max_in_flight_tokens,
                dcp=settings.dcp_world_size,
                max_encoder_tokens=encoder_tokens,
            )
        )
        self.loading = dict[str, _Load]()
        self.loaded = set[str]()
        self.resumed = set[str]()
        self._restarted = set[str]()  # requests that came with a state from which nothing can resume

    def forget(self, request_id: str) -> None:
        """Drop a request that holds nothing any longer."""
        self.loading.pop(request_id, None)
        self.loaded.discard(request_id)
        self._restarted.discard(request_id)

    def admit(
        self,
        request: EngineRequest,
        mine: Request,
        hit: KVCacheBlocks | Hit | None,
        hit_tokens: int,
        *,
        new_tokens: int,
        external: int,
        lookahead: int,
        encoder_tokens: int,
        delayed: bool,
        whole: bool,
        reserved: int,
        has_running: bool,
        others_wait: bool,
    ) -> KVCacheBlocks | None:
        """Return the new columns of a request, or ``None`` if they do not fit. Names follow vLLM's allocate_slots.

        Args:
            request: vLLM's request.
            mine: ours of ``request``.
            hit: its hit, or the blocks of it; ``None`` without one.
            hit_tokens: tokens of the hit.
            new_tokens: tokens that the step computes.
            external: tokens that a connector brings. Negative if it has fewer than ``hit_tokens``.
            lookahead: tokens for drafts.
            encoder_tokens: tokens that cross attention reads.
            delayed: whether a connector loads asynchronously: nothing is computed or published yet.
            whole: whether all tokens of the request must fit.
            reserved: blocks that other requests still need.
            has_running: whether any request runs; if so, the watermark and the blocks to grow stay free.
            others_wait: whether other requests wait. In the reference layout without saved states, no block stays free
                to grow unless they do: admissions then equal those of vLLM.
        """
        name, loaded, loads = request.request_id, hit_tokens + external, external > 0
        comes_whole = delayed and loaded == request.num_tokens
        if loads and new_tokens and self._blocks_move:
            raise ConfigError(
                f"the connector loads {external} tokens of {name!r} in the step that resumes there, but "
                "its blocks may still move in the natural layout: let it load asynchronously"
            )
        if loads and self._states:
            self._check_states(name, loaded, new_tokens, comes_whole=comes_whole, last=external == 1)
        if comes_whole:
            # vLLM computes the last token again, but the transfer writes its block too, so it is allocated
            external, lookahead = external - 1, 1
        if external < 0 and hit is not None:
            # negative: the connector has fewer tokens than the hit, and vLLM computes the difference again
            hit, hit_tokens, external = self._cut(hit, loaded), loaded, 0
        grows = others_wait or not self._grows_for_waiting
        spare = self._watermark + (self._blocks_to_grow() if grows else 0) if has_running else 0
        plan = self._cache.plan_slots(
            mine,
            new_tokens,
            hit_tokens,
            hit if hit_tokens else None,
            lookahead,
            delayed,
            encoder_tokens,
            num_external_computed_tokens=external,
            admission=Admission(
                self._limits(request.num_tokens if whole else 1, encoder_tokens),
                steps=0,  # as vLLM counts: the state that the chunk writes, not the one that the next chunk reads
                reserve_blocks=spare,
                chunk_reserve=reserved + spare,
            ),
        )
        if isinstance(plan, Refusal):
            return None
        new = self._cache.commit(plan)
        if name in self.loaded:
            self.loaded.remove(name)
            self.resumed.add(name)
        if delayed:
            self.loading[name] = _Load(loaded, resumes=not (comes_whole and self._states))
        elif loaded:
            self._cache.engine.synchronise_one(mine, loaded)
        return new

    def _blocks_to_grow(self) -> int:
        """Return the blocks, or slabs, that stay free for the requests that hold blocks. O(requests)."""
        return ceil(self._growth * len(self._cache.engine.resident_requests())) if self._growth else 0

    def _check_states(self, name: str, loaded: int, new_tokens: int, *, comes_whole: bool, last: bool) -> None:
        """Raise ConfigError for a state that would not exist when it is read.

        In a synchronous load, vLLM's worker copies the state to the step's last block before the connector writes the
        state. After a load of a whole prompt, the state follows the last token, and the step that computes the last
        token again cannot use it. Such a prompt is computed once; a second attempt is rejected.
        """
        end = loaded + new_tokens
        if new_tokens and any(one.state_column(loaded) != one.state_column(end) for one in self._states):
            raise ConfigError(
                f"the connector loads the state after {loaded} tokens of {name!r} in the step that resumes there, and "
                "vLLM's worker copies it before it arrives: let it load asynchronously"
            )
        if comes_whole and (last or name in self._restarted):
            raise ConfigError(
                f"the connector loads all {loaded} tokens of {name!r}, so that no state is left from which the last "
                "token can be computed: let it load all tokens but the last"
            )

    def _cut(self, found: KVCacheBlocks | Hit, num_tokens: int) -> KVCacheBlocks:
        """Return the first ``num_tokens`` tokens of a hit. ConfigError if a window or state has no block there."""
        hit = self._cache.engine.blocks_of(found) if isinstance(found, Hit) else found
        sizes = [num_tokens // group.policy.block_size for group in self._cache.groups]
        kept = tuple(ids[:size] for ids, size in zip(hit.ids, sizes, strict=True))
        if not all(ids.all() for ids in kept):
            raise ConfigError(
                f"the connector needs a hit cut to {num_tokens} tokens, but the cache keeps windows and states only at "
                "the end of the hit: let the connector report all tokens of the hit, or 0"
            )
        return KVCacheBlocks(kept, hit.pool, hit.evictions)

    def finish_load(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """End the transfer for ``request`` with ``num_computed_tokens`` tokens.

        The request starts again from 0 if it cannot resume after them.
        """
        name = request.request_id
        mine, load = self._mirrors.known(name), self.loading.pop(name)
        if mine is None:
            raise ConfigError(f"request {name!r} is loaded, and nobody knows it")
        came = num_computed_tokens if load.resumes else 0
        if self._cache.engine.finish_load(mine, None if came >= load.tokens else came):
            self.loaded.add(name)
            return
        if not load.resumes:
            self._restarted.add(name)
        self._mirrors.forget(name)
        request.num_computed_tokens = 0

    def evicts(self, num_tokens: int) -> bool:
        """Return whether ``num_tokens`` more tokens of a waiting request fit only if a resume point is evicted."""
        limits = self._limits(num_tokens, 0)
        needs = [group.peak_blocks(limits, 1, num_tokens, 0) for group in self._cache.groups]
        return not self._cache.eviction_policy.spares(needs)

    def blocks_to_come(self, request_id: str, num_tokens: int, encoder_tokens: int) -> int:
        """Return the blocks that a running or loading request still needs for ``num_tokens`` tokens."""
        mine = self._mirrors.known(request_id)
        return 0 if mine is None else self._cache.engine.blocks_to_come(mine, self._limits(num_tokens, encoder_tokens))
