"""Of each request of vLLM one of ours, slots for those that decode, and admissions of those that begin.

Ours borrows tokens and hashes; counts are taken over when it is needed.

vLLM's    [ prompt | outputs ]  block_hashes  num_tokens  num_computed_tokens  num_in_flight_tokens
            ^ read where they lie             ^ taken over, of one or of all at once

What a request says to the cache is in ``SamplingParams.extra_args``, over HTTP ``vllm_xargs``:

    {"hybridkv_marks": [1200], "hybridkv_tenant": "blue", "hybridkv_hints": {"within_s": 30}}

A scheduler may refuse no request: a wish that cannot be is named in the log and left out.

Slots of rows that decode are given before vLLM asks for them, and kept until it has heard of them.

give     in one batch, for what leads the running requests, before vLLM's own loop
decode   for a step in which all of them decode one token: those alone are looked at that need something
take     whether vLLM has to ask at all: no, where it was given so much in this step, or needs nothing
serve    what a call of its own gives

A request begins, or goes on behind what a connector brought: hits, loads, and what must stay free besides.

load in the step      admitted with new tokens; the worker writes the blocks before its forward
load beside the steps admitted without; waits, its blocks are nobody's hit; finish_load: published, and due to be let in
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from hybridkv.arguments import text
from hybridkv.cache import Admission, EngineHashes, KVCacheBlocks, KVCacheManager, Refusal
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import LoraAdapter, MultimodalItem
from hybridkv.request import Hints, Lent, Request
from hybridkv.request.tokens import checked_marks
from hybridkv.specs import Keeps, RequestLimits
from hybridkv.vllm.specs import Settings

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


Ids = tuple[list[int], ...]
"""Of blocks, by group."""
_Asked = tuple[EngineRequest, Request, int]
"""Whose, ours of it, and how many tokens."""
_FEW: Final = 8
"""So many calls take less time than one for all."""


class Decoded(NamedTuple):
    """A step of one token each. num_computed_tokens: before it. new_blocks: None where none came."""

    requests: list[EngineRequest]
    num_computed_tokens: list[int]
    new_blocks: list[Ids | None]


class SlotsAhead:
    """Of the requests of ``mirrors``. longest: tokens that a model takes.

    served: ours of each that was looked at in this step; all others need no block in it, and pass no stop.
    """

    def __init__(self, cache: KVCacheManager, mirrors: Mirrors, longest: int) -> None:
        self._cache, self._mirrors, self._longest = cache, mirrors, longest
        self._num_groups = len(cache.groups)
        states = any(group.spec.keeps is Keeps.STATE for group in cache.config.groups)
        self._all_at_once = cache.placement is None and not states
        # by request: tokens and look-ahead that it has slots for in this step; blocks that vLLM was not told of yet;
        # tokens below which a row needs nothing
        self._ready = dict[str, tuple[int, int]]()
        self._owed = dict[str, Ids]()
        self._enough = dict[str, int]()
        self.served = dict[str, Request]()

    def end_step(self) -> None:
        """What was not asked for waits for the request's next step: no worker has heard of it."""
        self._ready.clear()
        served, self.served = self.served, {}
        if served:
            rows = np.fromiter((mine.row for mine in served.values()), np.int64, len(served))
            needed = np.minimum(self._cache.engine.next_events(rows), self._cache.checkpoints.next_positions(rows))
            enough = zip(served, needed.tolist(), strict=True)
            self._enough.update(one for one in enough if one[0] not in self._owed)

    def forget(self, name: str) -> None:
        """It holds nothing any longer."""
        self.served.pop(name, None)
        for table in (self._ready, self._owed, self._enough):
            table.pop(name, None)

    def serve(self, request: EngineRequest, mine: Request, new_tokens: int, lookahead: int) -> KVCacheBlocks | None:
        """What a call of its own gives one that holds blocks. mine: ours of ``request``."""
        self.served[request.request_id] = mine
        return self._cache.allocate_slots(mine, new_tokens, num_lookahead_tokens=lookahead)

    def take(self, request: EngineRequest, new_tokens: int, lookahead: int) -> bool:
        """Whether it has slots for so many tokens and so much look-ahead behind those computed, or needs none."""
        name = request.request_id
        if request.num_computed_tokens + new_tokens + lookahead < self._enough.get(name, 0):
            return True
        return self._ready.pop(name, None) == (new_tokens, lookahead)

    def owed(self, name: str) -> Ids | None:
        """Blocks that it has and vLLM was not told of, which it now is."""
        return self._owed.pop(name, None)

    def give(self, running: Sequence[EngineRequest], most_tokens: int, lookahead: int) -> None:
        """Slots for what ``running`` decode next, in one batch, of those that need some.

        most_tokens: of a request that decodes, drafts included; those behind the first that runs more are left out, so
        that blocks go round as they would one by one. Nothing with states, whose columns move, and in the natural
        layout, whose blocks are copied, nor for a few, which sooner ask for themselves. O(running).
        """
        if not self._all_at_once:
            return
        some, enough, longest = list[_Asked](), self._enough, self._longest - 1
        for request in running:
            name, computed, ahead = request.request_id, request.num_computed_tokens, request.num_output_placeholders
            if ahead > 0 and _last_on_the_way(request):
                continue
            more = min(request.num_tokens_with_spec + ahead, longest) - computed
            if more > most_tokens:
                break
            if more <= 0 or computed + more + lookahead < enough.get(name, 0):
                continue
            mine = self._mirrors.known(name)
            if mine is None or mine.row < 0:
                break
            some.append((request, mine, more))
        if len(some) > _FEW:
            self._allocate(some, lookahead)

    def _allocate(self, some: Sequence[_Asked], lookahead: int) -> bool:
        """Slots for ``some`` in one batch; whether all of them got theirs."""
        counts = [
            # what was preempted may still have tokens in flight that are computed no longer
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
        return slots.accepted == len(names)

    def _owe(self, name: str) -> Ids:
        return self._owed.setdefault(name, tuple([] for _ in range(self._num_groups)))

    # -- steps of one token each

    def decode(self, running: Iterable[EngineRequest]) -> Decoded | None:
        """Slots for a token of each of ``running`` whose last one is not on the way.

        None where one of them does something else, or has no slot: those before it are ready then. O(running), a call
        for those that need something.
        """
        requests, computed_tokens, due = list[EngineRequest](), list[int](), list[int]()
        enough, longest = self._enough, self._longest - 1
        for request in running:
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead > 0 and _last_on_the_way(request):
                continue
            new = request.num_tokens + ahead - computed
            if new != 1 or computed >= longest or request.is_prefill_chunk or request.mm_features:
                return None
            if computed + 1 >= enough.get(request.request_id, 0):
                due.append(len(requests))
            requests.append(request)
            computed_tokens.append(computed)
        new_blocks: list[Ids | None] = [None] * len(requests)
        if due and not self._decode_due([requests[place] for place in due]):
            return None
        for place in due:
            name = requests[place].request_id
            del self._ready[name]
            new_blocks[place] = self.owed(name)
        return Decoded(requests, computed_tokens, new_blocks)

    def _decode_due(self, due: Sequence[EngineRequest]) -> bool:
        """Whether all of ``due`` got their slots, in their order."""
        some = [(one, mine, 1) for one in due if (mine := self._mirrors.known(one.request_id)) is not None]
        if len(some) < len(due) or any(mine.row < 0 for _, mine, _ in some):
            return False
        if self._all_at_once and len(due) > _FEW:
            return self._allocate(some, 0)
        for request in due:
            new = self.serve(request, self._mirrors.of(request), 1, 0)
            if new is None:
                return False
            self._ready[request.request_id] = (1, 0)
            for group, ids in enumerate(new.ids):
                if len(ids):
                    self._owe(request.request_id)[group].extend(ids.tolist())
        return True


def _last_on_the_way(request: EngineRequest) -> bool:
    """Whether the last token that it may have comes of a step in flight, of which it has some: it runs no more."""
    sure = request.num_computed_tokens + 1 - (request.num_output_placeholders - 1)  # whatever becomes of drafts
    return sure >= request.num_prompt_tokens + request.max_tokens


class _Load(NamedTuple):
    """tokens: that are there once it is over. goes_on: whether a state behind all but the last of them is among it."""

    tokens: int
    goes_on: bool


class Admissions:
    """To the blocks of ``cache``. mirrors: of those who ask.

    loading: whose blocks a transfer writes. loaded: whose transfer is over, and who was not let in yet. let_in: who
    went on behind a load since it was cleared last.
    """

    def __init__(self, cache: KVCacheManager, mirrors: Mirrors, settings: Settings) -> None:
        self._cache, self._mirrors, self._settings = cache, mirrors, settings
        self._watermark = int(settings.watermark * cache.config.num_blocks)
        self._blocks_move = cache.placement is not None
        self._states = tuple(group.states for group in cache.groups if group.states is not None)
        self.loading = dict[str, _Load]()
        self.loaded = set[str]()
        self.let_in = set[str]()
        self._anew = set[str]()  # who came with a state that nothing goes on from

    def forget(self, request_id: str) -> None:
        """It holds nothing any longer."""
        self.loading.pop(request_id, None)
        self.loaded.discard(request_id)
        self._anew.discard(request_id)

    def admit(
        self,
        request: EngineRequest,
        mine: Request,
        hit: KVCacheBlocks | None,
        hit_tokens: int,
        *,
        new_tokens: int,
        external: int,
        lookahead: int,
        encoder_tokens: int,
        delayed: bool,
        whole: bool,
        reserved: int,
        beside_others: bool,
    ) -> KVCacheBlocks | None:
        """Return its new columns; None when they do not fit. Names as allocate_slots of vLLM's manager has them.

        mine: ours of ``request``. hit: None where no token of it was found. external: tokens that a connector brings.
        delayed: nothing is published yet. whole: all its tokens must fit. reserved: blocks that others need yet.
        beside_others: whether any request runs.
        """
        name, loaded, loads = request.request_id, hit_tokens + external, external > 0
        comes_whole = not new_tokens and loaded == request.num_tokens
        if loads and new_tokens and self._blocks_move:
            raise ConfigError(
                f"the connector loads {external} tokens of {name!r} in the step that goes on from them, "
                "where its blocks may still move in the natural layout: let it load beside the steps (asynchronously)"
            )
        if loads and self._states:
            self._check_states(name, loaded, new_tokens, comes_whole=comes_whole)
        if comes_whole:
            # vLLM computes the last token again: its block is taken all the same, since the transfer writes it
            external, lookahead = external - 1, 1
        if external < 0 and hit is not None:
            # a connector that has less than is here says so in the negative, and vLLM computes the difference again
            hit, hit_tokens, external = self._cut(hit, loaded), loaded, 0
        watermark = self._watermark if beside_others else 0
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
                steps=0,  # as vLLM counts: of states that which the chunk leaves, not that which the next one reads
                reserve_blocks=watermark,
                chunk_reserve=reserved + watermark,
            ),
        )
        if isinstance(plan, Refusal):
            return None
        new = self._cache.commit(plan)
        if name in self.loaded:
            self.loaded.remove(name)
            self.let_in.add(name)
        if not new_tokens:
            self.loading[name] = _Load(loaded, goes_on=not (comes_whole and self._states))
        elif loaded:
            self._cache.engine.synchronise_one(mine, loaded)
        return new

    def _check_states(self, name: str, loaded: int, new_tokens: int, *, comes_whole: bool) -> None:
        """ConfigError for a state that would not be there when it is read.

        Of what is loaded in the step itself: vLLM's worker copies the state into the block where the step leaves its
        own before the connector writes it. Of a whole prompt: the state behind its last token is no use to who
        computes that token again; so it is computed, once.
        """
        end = loaded + new_tokens
        if new_tokens and any(one.state_column(loaded) != one.state_column(end) for one in self._states):
            raise ConfigError(
                f"the connector loads a state behind {loaded} tokens of {name!r} in the step that goes on from it, and "
                "vLLM's worker copies it before it is there: let it load beside the steps (asynchronously)"
            )
        if comes_whole and name in self._anew:
            raise ConfigError(
                f"the connector brings the whole prompt of {name!r} once more, and so no state that its last token "
                "could be computed from: let it bring all tokens but the last"
            )

    def _cut(self, hit: KVCacheBlocks, num_tokens: int) -> KVCacheBlocks:
        """The first ``num_tokens`` tokens of a hit. ConfigError where others than its last ones are not kept."""
        sizes = [num_tokens // group.policy.block_size for group in self._cache.groups]
        kept = tuple(ids[:size] for ids, size in zip(hit.ids, sizes, strict=True))
        if not all(ids.all() for ids in kept):
            raise ConfigError(
                f"a hit cannot be cut to {num_tokens} tokens: of windows and states its end is kept alone"
            )
        return KVCacheBlocks(kept, hit.pool, hit.evictions)

    def finish_load(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """The transfer for ``request`` is over, and so many of its tokens are there.

        Where it cannot go on behind those, it begins anew.
        """
        name = request.request_id
        mine, load = self._mirrors.known(name), self.loading.pop(name)
        if mine is None:
            raise ConfigError(f"request {name!r} is loaded, and nobody knows it")
        came = num_computed_tokens if load.goes_on else 0
        if self._cache.engine.finish_load(mine, None if came >= load.tokens else came):
            self.loaded.add(name)
            return
        if not load.goes_on:
            self._anew.add(name)
        self._mirrors.forget(name)
        request.num_computed_tokens = 0

    def blocks_to_come(self, request_id: str, num_tokens: int, encoder_tokens: int) -> int:
        """Blocks that a request, which runs or is loaded, takes yet up to ``num_tokens``."""
        mine = self._mirrors.known(request_id)
        return 0 if mine is None else self._cache.engine.blocks_to_come(mine, self._limits(num_tokens, encoder_tokens))

    def _limits(self, num_tokens: int, encoder_tokens: int) -> RequestLimits:
        return RequestLimits(
            min(num_tokens, self._settings.max_model_len),
            self._settings.max_in_flight_tokens,
            dcp=self._settings.dcp_world_size,
            max_encoder_tokens=encoder_tokens,
        )
