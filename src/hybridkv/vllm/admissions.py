"""Who begins, and who goes on behind what a connector brought: hits, loads, and what must stay free besides.

load in the step      admitted with new tokens; the worker writes the blocks before its forward
load beside the steps admitted without; waits, its blocks are nobody's hit; finish_load: published, and due to be let in
"""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.cache import Admission, KVCacheBlocks, KVCacheManager, Refusal
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.specs import RequestLimits
from hybridkv.vllm.mirrors import EngineRequest, Mirrors
from hybridkv.vllm.specs import Settings


class _Load(NamedTuple):
    """tokens: that are there once it is over. goes_on: whether a state behind all but the last of them is among it."""

    tokens: int
    goes_on: bool


class Admissions:
    """To the blocks of ``cache``. mirrors: of those who ask.

    let_in: who went on behind a load since it was cleared last.
    """

    def __init__(self, cache: KVCacheManager, mirrors: Mirrors, settings: Settings) -> None:
        self._cache, self._mirrors, self._settings = cache, mirrors, settings
        self._watermark = int(settings.watermark * cache.config.num_blocks)
        self._blocks_move = cache.placement is not None
        self._states = tuple(group.states for group in cache.groups if group.states is not None)
        self._loading = dict[str, _Load]()
        self._loaded = set[str]()  # whose transfer is over, and who was not let in yet
        self.let_in = set[str]()
        self._anew = set[str]()  # who came with a state that nothing goes on from

    def is_due(self, request_id: str) -> bool:
        """Whether it holds blocks that were loaded, and is to be let in."""
        return request_id in self._loaded

    def is_loading(self, request_id: str) -> bool:
        """Whether a transfer writes its blocks."""
        return request_id in self._loading

    def forget(self, request_id: str) -> None:
        """It holds nothing any longer."""
        self._loading.pop(request_id, None)
        self._loaded.discard(request_id)
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
        if name in self._loaded:
            self._loaded.remove(name)
            self.let_in.add(name)
        if not new_tokens:
            self._loading[name] = _Load(loaded, goes_on=not (comes_whole and self._states))
        elif loaded:
            self._cache.engine.synchronise_one(mine, loaded)
        return new

    def _check_states(self, name: str, loaded: int, new_tokens: int, *, comes_whole: bool) -> None:
        """ConfigError for a state that would not be there when it is read.

        Of what is loaded in the step itself: vLLM's worker copies the state into the block where the step leaves its
        own before the connector writes it. Of a whole prompt: the state behind its last token is no use to who
        computes that token again; so it is computed, once.
        """
        if new_tokens and any(one.column(loaded) != one.column(loaded + new_tokens) for one in self._states):
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
        mine, load = self._mirrors.known(name), self._loading.pop(name)
        if mine is None:
            raise ConfigError(f"request {name!r} is loaded, and nobody knows it")
        came = num_computed_tokens if load.goes_on else 0
        if self._cache.engine.finish_load(mine, None if came >= load.tokens else came):
            self._loaded.add(name)
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
