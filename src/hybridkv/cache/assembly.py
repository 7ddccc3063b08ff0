"""Builds the parts of a manager, in the order in which they need each other.

A *layout* decides what is kept for reuse, where hits end and where free blocks come from. It is chosen once, from the
config; the other modules of the cache do not know which of the two it is:

    ReferenceLayout   vLLM's: blocks of one size; a state is kept in the block of the tokens that it ends
    NaturalLayout     blocks of several sizes in slabs; hits end at any token; the placement says where states are kept

``managed`` combines a plan, or a config, with the arguments of the manager; ``assemble`` makes the parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import integer
from hybridkv.cache.allocator import Slots
from hybridkv.cache.eviction_policy import EvictionPolicy, LeastRecentlyUsed
from hybridkv.cache.fast_forward import FastForward
from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.hashing import BlockHasher
from hybridkv.cache.holds import Loads, Locks, Pins
from hybridkv.cache.index import MOST_PROMPT_ENDS
from hybridkv.cache.journal import EventQueue, Journal
from hybridkv.cache.lookup import PrefixLookup
from hybridkv.cache.options import DEFAULT_OPTIONS, CacheOptions
from hybridkv.cache.placement import DEFAULT_PLACEMENT, BoundaryPlacement, NoStates, Placement, placement_of
from hybridkv.cache.plan import SlotPlanner
from hybridkv.cache.policies import (
    AlignedStatePolicy,
    AttentionPolicy,
    BlockHits,
    BlocklessHits,
    ChunkSpan,
    EncoderPolicy,
    FixedPolicy,
    FullSpan,
    GroupKind,
    Policy,
    PositionHits,
    PublishRule,
    Span,
    StateHits,
    TokenHits,
    UnitStateHits,
    WindowSpan,
    keeps_tokens,
)
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.publisher import HitEnds, Publisher, Retention
from hybridkv.cache.residents import Residents
from hybridkv.cache.spaces.one_size import FreeOrder
from hybridkv.cache.spaces.ranked_order import RankedOrder
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.cache.transfers import Checkpoints, TransferLog
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.eviction.blocks import PointBlocks
from hybridkv.eviction.choice import EVICTIONS, LRU, Eviction, eviction_named, eviction_of
from hybridkv.eviction.ranked import RankedResumePoints
from hybridkv.eviction.tenants import EVERYBODY, TenantRankings, TenantShares
from hybridkv.observe.block_times import BlockTimes
from hybridkv.observe.misses import LostKeys, Misses
from hybridkv.planner import KVCacheConfig, Plan
from hybridkv.request import Hasher
from hybridkv.spec_fields import Feature, require_supported
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    Keeps,
    KVCacheSpec,
    MambaSpec,
    RequestLimits,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    inner_of,
)
from hybridkv.units import MOST_COUNT, shown

_KEYS_APART: Final = 16  # tokens of a hash block in models without attention, chosen by hand


def layout_of(config: KVCacheConfig, options: CacheOptions = DEFAULT_OPTIONS) -> Layout:
    """Return the layout of ``config``. Raises ConfigError for options without meaning in the reference layout."""
    eviction, placement = options.eviction or LRU, options.placement
    if len(options.shares.of) > 1:
        _refuse_shares(config, eviction, placement)
    if config.slabs is None:
        if placement is not None:
            raise ConfigError(
                f"placement {placement.name} needs the natural layout; in the reference layout the specs say where "
                "states are kept: plan with placement= instead"
            )
        if options.max_moved_bytes is not None or options.space is not None or not options.partial_block_hits:
            raise ConfigError(
                "max_moved_bytes, space and partial_block_hits mean nothing in the reference layout, whose blocks have "
                "one size and are shared whole: leave them out, or plan with the natural layout"
            )
        return ReferenceLayout(options.retention, eviction=eviction, hit_unit=options.hit_unit)
    if options.hit_unit is not None:
        raise ConfigError(
            "hit_unit (--prefix-match-unit) means nothing in the natural layout, whose hits end at any token: leave "
            "it out"
        )
    placed = DEFAULT_PLACEMENT if placement is None else placement
    found = SlabSpace(config.slabs, options.max_moved_bytes) if options.space is None else options.space
    return NaturalLayout(placed, eviction, found, options.retention, options.partial_block_hits, options.shares)


def _refuse_shares(config: KVCacheConfig, eviction: Eviction, placement: Placement | None) -> None:
    """Raise ConfigError unless the eviction knows which tenant each kept block belongs to."""
    if config.slabs is None or eviction.ranking is None:
        where = "the reference layout" if config.slabs is None else f"eviction {eviction.name}"
        ranking = " or ".join(name for name in EVICTIONS if eviction_named(name).ranking is not None)
        raise ConfigError(
            f"shares of tenants need the natural layout and an eviction that compares resume points, {ranking}: "
            f"{where} evicts the blocks of all tenants in the order of their last use"
        )
    if placement is not None and not placement.keeps_states:
        raise ConfigError(
            f"shares of tenants limit kept resume points, but placement {placement.name} keeps no states: use another"
        )


def _refuse_dropped_states(eviction: Eviction, kinds: Sequence[GroupKind]) -> None:
    """Raise ConfigError for states whose hits need the block after them, which a resume point does not count."""
    if any(kind.drops for kind in kinds) and any(kind.publishes and kind.keeps_state for kind in kinds):
        raise ConfigError(
            f"eviction {eviction.name} cannot keep recurrent states for EAGLE in the reference layout, because a hit "
            f"drops the last block and needs the state before it: use eviction {LRU.name}, or leave use_eagle out"
        )


_SUPPORTED: Final = frozenset(
    {
        *(Feature.INDEXER, Feature.PACKED, Feature.QUANTIZED),
        *(Feature.RATE, Feature.REPLAY, Feature.REPLICATED, Feature.RETAINED, Feature.RING),
    }
)
"""Features of specs that look-ups and policies know, or that change only the contents of blocks."""


def kinds_of(config: KVCacheConfig, layout: Layout, ranks: int, *, use_eagle: bool) -> tuple[GroupKind, ...]:
    """Return the kind of each group.

    Encoder outputs have no rate, because look-ups end at tokens of the decoder. Recurrent groups never drop blocks for
    EAGLE. If no group is flagged, ``use_eagle`` flags all others.

    Raises UnsupportedModelError for features of specs that look-ups and policies do not know.
    """
    require_supported((group.spec for group in config.groups), "the cache manager", _SUPPORTED)
    of_encoder = [group.spec for group in config.groups if group.spec.keeps is Keeps.ENCODER]
    require_supported(of_encoder, "the cache manager", _SUPPORTED - {Feature.RATE})
    flagged = any(group.is_eagle_group for group in config.groups)
    kinds = tuple(
        GroupKind(
            group.spec,
            publishes=layout.publishes(group.spec),
            by_digest=layout.is_by_digest(group.spec),
            drops=(group.is_eagle_group or (use_eagle and not flagged)) and keeps_tokens(group.spec),
            ranks=ranks,
        )
        for group in config.groups
    )
    if any(kind.keeps_ring and not kind.pools for kind in kinds) and whole_states(kinds) == 1:
        raise UnsupportedModelError(
            "CircularBufferSpec: no group of the model compresses tokens (tokens_per_state), so the cache manager does "
            "not know where the ring is empty: give the compressed layers their rate, or the ring its group (pools)"
        )
    _refuse_replays(kinds)
    return kinds


def _refuse_replays(kinds: Sequence[GroupKind]) -> None:
    """Raise UnsupportedModelError if the end of a window cannot be computed again (``bounded_replay``)."""
    replayed = [kind for kind in kinds if kind.replays]
    if replayed and any(kind.keeps_state for kind in kinds):
        raise UnsupportedModelError(
            "SlidingWindowMLASpec: a recurrent state follows all tokens of a hit, so the tokens of a window cannot be "
            "computed again beside it: leave bounded_replay out"
        )
    windows = {(kind.inner.mask[0], whole_states((kind,))) for kind in replayed}
    if len(windows) > 1:
        raise UnsupportedModelError(
            f"SlidingWindowMLASpec: windows with bounded_replay differ in tokens and tokens_per_state ({windows}), and "
            "one run computes the ends of all again: give them one window, or leave bounded_replay out"
        )


def can_resume(kinds: Sequence[GroupKind]) -> bool:
    """Return whether any prefix can be hit: every group that keeps anything keeps it for reuse.

    Rings alone do not tell that a prefix was ever computed, because a hit where they are empty needs no block.
    """
    return any(kind.publishes and not kind.keeps_ring for kind in kinds) and all(
        kind.publishes or kind.by_digest or kind.keeps_ring or kind.replays or kind.spec.keeps == Keeps.NOTHING
        for kind in kinds
    )


def whole_states(kinds: Sequence[GroupKind]) -> int:
    """Return the tokens of which a hit is a multiple, because the raw keys of open states are not kept.

        tokens            0 1 2 3 4 5 6 7 8 9 ...
        rate 4            [   a   |   b   | open      a hit of 8 tokens adopts a and b
        rate 2            [ a | b | c | d | open

    1 where each token has its own states, and where windows or published rings (``pools``) keep the keys. If the group
    of a ring is unknown, no rate counts as kept. Other rings are empty there.
    """
    rings = [kind for kind in kinds if kind.keeps_ring]
    holding = [kind.spec for kind in kinds if kind.keeps_tokens]
    rates = {rate.numerator for spec in holding for rate in spec.rates}
    if all(ring.pools for ring in rings):
        rates -= {tokens for kind in kinds if kind.keeps_tokens and kind.publishes for tokens in kind.spec.pooled}
        rates -= {ring.pools for ring in rings if ring.publishes}
    return math.lcm(*rates, *(ring.pools or 1 for ring in rings if not ring.publishes))


@dataclass(frozen=True, slots=True)
class ReferenceLayout:
    """vLLM's layout.

    Attributes:
        retention: Tokens between the windows and states kept; 0 for those at each request's own boundaries, ``None``
            for all.
        placement: Where states are kept; ``None``, because the specs say it.
        eviction: What is evicted next. With a ranking, block ids differ from those of vLLM; hits and steps follow the
            same rules.
        shares: Memory shares of tenants.
        rewrites_states: Running states are rewritten in place, so a failed step leaves them broken.
        shares_in_part: A branch can begin with blocks that its parent has filled in part.
        keeps_resume_points: Everything that a request computed can be reused after its end, to the last token.
        hit_unit: Hits may end inside a block, at multiples of so many tokens; ``None``: at boundaries only.
        follows_vllm: Steps equal those of vLLM for equal hits; with the eviction ``lru``, block ids too. With
            ``hit_unit``, chunks may end earlier.
    """

    retention: int | None = None
    placement: None = None
    eviction: Eviction = LRU
    shares: TenantShares = EVERYBODY
    rewrites_states: bool = False
    shares_in_part: bool = False
    keeps_resume_points: bool = False
    hit_unit: int | None = None
    follows_vllm: ClassVar[bool] = True

    @property
    def partial_block_hits(self) -> bool:
        """Whether hits may end inside a block."""
        return self.hit_unit is not None

    @property
    def ranks(self) -> bool:
        """Whether resume points are kept by value."""
        return self.eviction.ranking is not None

    @property
    def evicts_in_order(self) -> bool:
        """Whether free blocks are evicted in the order of their last use."""
        return not self.ranks

    def resume_points(self, kinds: Sequence[GroupKind]) -> Placement:
        """Return where resume points of ranked eviction are: at block boundaries that hits may end at."""
        if not self.ranks:
            return NoStates()
        states = any(kind.publishes and kind.keeps_state for kind in kinds)
        return BoundaryPlacement(self.boundary(kinds), at_chunk_ends=states)

    def publishes(self, spec: KVCacheSpec) -> bool:
        """Return whether blocks of ``spec`` can be hit: tokens, and states if their spec keeps them."""
        inner = inner_of(spec)
        return inner.cache_mode == "align" if isinstance(inner, MambaSpec) else keeps_tokens(spec) and spec.is_cached

    def is_by_digest(self, spec: KVCacheSpec) -> bool:  # noqa: ARG002 - the answer of a layout
        """Return False: the encoder's output is not shared."""
        return False

    def hash_block(self, kinds: Sequence[GroupKind]) -> int:
        """Return the largest hash block for all groups that publish."""
        if self.hit_unit is not None:
            return self.hit_unit
        return math.gcd(*(kind.block_size for kind in kinds if kind.publishes)) or kinds[0].block_size

    def alignment(self, kinds: Sequence[GroupKind]) -> int:
        """Return the tokens of which every hit is a multiple."""
        return self.boundary(kinds) if self.hit_unit is None else self.hit_unit

    def boundary(self, kinds: Sequence[GroupKind]) -> int:
        """Return the least common multiple of blocks that can be hit, rings and replayed windows, as in vLLM."""
        sizes = (kind.block_size for kind in kinds if kind.publishes or kind.keeps_ring or kind.replays)
        return math.lcm(whole_states(kinds), *sizes)

    def policies(self, kinds: Sequence[GroupKind], hash_block: int) -> tuple[Policy, ...]:
        """Return one policy a kind."""
        alignment = self.boundary(kinds)
        _check_retention(self.retention, alignment)
        if self.hit_unit is not None:
            _check_hit_unit(self.hit_unit, kinds)
        for number, kind in enumerate(kinds):
            if kind.publishes:
                _check_hash_block(number, kind, hash_block)
        return tuple(self._policy(kind, alignment) for kind in kinds)

    def _policy(self, kind: GroupKind, alignment: int) -> Policy:
        spec, size, past = kind.inner, kind.block_size, int(kind.drops)
        match spec:
            case EncoderOnlyAttentionSpec() | CircularBufferSpec() | SlidingWindowMLASpec(bounded_replay=True):
                return _never_hit(kind)
            case SlidingWindowSpec():
                window = WindowSpan(spec.sliding_window, spec.extra_retained_tokens)
                publishing = PublishRule(size, alignment, window.columns_read(size) + past, past, self.retention)
                return AttentionPolicy(size, window, publishing, BlockHits(window, size))
            case MambaSpec(cache_mode="align"):
                need = None if self.retention is None else 1
                publishing = PublishRule(size, alignment, need, 0, self.retention)
                states = StateHits(size) if self.hit_unit is None else UnitStateHits(size)
                return AlignedStatePolicy(size, spec.num_speculative_blocks, publishing, states)
            case MambaSpec():
                return FixedPolicy(size, 1 + spec.num_speculative_blocks, BlocklessHits(accepts=False))
            case CrossAttentionSpec():
                return EncoderPolicy(size, BlocklessHits(accepts=False))
            case _:
                span = _span_of(spec)
                hits = BlockHits(span, size) if self.hit_unit is None else TokenHits(span, size)
                return AttentionPolicy(size, span, PublishRule(size, alignment, past=past), hits)

    def num_blocks(self, config: KVCacheConfig) -> int:
        """Return the number of blocks of the config."""
        return config.num_blocks

    def pool(self, config: KVCacheConfig, journal: Journal, columns: Sequence[tuple[int, int]]) -> BlockPool:
        """Return a pool with blocks of one size: in one order, or with the unneeded ones first."""
        space = RankedOrder(config.num_blocks, len(config.groups)) if self.ranks else None
        return BlockPool(config.num_blocks, len(config.groups), journal=journal, columns=columns, space=space)


@dataclass(frozen=True, slots=True)
class NaturalLayout:
    """The layout with blocks of several sizes; its other attributes are those of ReferenceLayout.

    Attributes:
        space: The slabs of this cache.
        retention: Is checked, but everything is kept.
    """

    placement: Placement
    eviction: Eviction
    space: SlabSpace
    retention: int | None = None
    partial_block_hits: bool = True
    shares: TenantShares = EVERYBODY
    rewrites_states: bool = True
    shares_in_part: bool = True
    keeps_resume_points: bool = True
    evicts_in_order: ClassVar[bool] = False
    follows_vllm: ClassVar[bool] = False

    @property
    def ranks(self) -> bool:
        """Whether resume points are kept by value."""
        return self.eviction.ranking is not None and self.placement.keeps_states

    def publishes(self, spec: KVCacheSpec) -> bool:
        """Return whether blocks of ``spec`` can be hit: tokens, and states and rings if the placement keeps any.

        Rings whose group is unknown are not kept, nor are those that are empty at every block.
        """
        match spec.keeps:
            case Keeps.STATE:
                return self.placement.keeps_states
            case Keeps.RING:
                return 0 not in spec.pooled and self.partial_block_hits and self.placement.keeps_states
            case _:
                return keeps_tokens(spec) and spec.is_cached

    def is_by_digest(self, spec: KVCacheSpec) -> bool:
        """Return whether ``spec`` holds the input of cross attention."""
        return spec.keeps is Keeps.ENCODER

    def resume_points(self, kinds: Sequence[GroupKind]) -> Placement:  # noqa: ARG002 - the answer of a layout
        """Return where resume points are."""
        return self.placement

    def hash_block(self, kinds: Sequence[GroupKind]) -> int:
        """Return the largest hash block for groups that publish tokens. States have no blocks of tokens."""
        return math.gcd(*_token_blocks(kinds)) or _KEYS_APART

    def alignment(self, kinds: Sequence[GroupKind]) -> int:
        """Return the tokens of which every hit is a multiple: whole states, or whole blocks if hits end at blocks."""
        return math.lcm(whole_states(kinds), *(() if self._is_exact(kinds) else _token_blocks(kinds)))

    def _is_exact(self, kinds: Sequence[GroupKind]) -> bool:
        """Return whether hits may end inside a block. Not if a group drops for EAGLE, because it drops whole blocks."""
        return self.partial_block_hits and not any(kind.drops for kind in kinds)

    def policies(self, kinds: Sequence[GroupKind], hash_block: int) -> tuple[Policy, ...]:
        """Return one policy a kind; every full block is published."""
        _check_retention(self.retention, self.alignment(kinds))
        for number, kind in enumerate(kinds):
            if kind.publishes and kind.keeps_tokens:
                _check_hash_block(number, kind, hash_block)
        exact = self._is_exact(kinds)
        return tuple(self._policy(kind, hash_block, exact=exact) for kind in kinds)

    def _policy(self, kind: GroupKind, hash_block: int, *, exact: bool) -> Policy:
        spec, size = kind.inner, kind.block_size
        match spec:
            case MambaSpec():
                return FixedPolicy(
                    hash_block,
                    1 + spec.num_speculative_blocks,
                    PositionHits() if kind.publishes else BlocklessHits(accepts=False),
                )
            case CircularBufferSpec() if kind.publishes:
                return FixedPolicy(hash_block, 1, PositionHits())
            case CrossAttentionSpec():
                return EncoderPolicy(size, BlocklessHits(accepts=True), by_digest=True)
            case EncoderOnlyAttentionSpec() | CircularBufferSpec() | SlidingWindowMLASpec(bounded_replay=True):
                return _never_hit(kind)
            case SlidingWindowSpec():
                span: Span = WindowSpan(spec.sliding_window, spec.extra_retained_tokens)
            case _:
                span = _span_of(spec)
        hits = TokenHits(span, size) if exact else BlockHits(span, size)
        return AttentionPolicy(size, span, PublishRule(size, size), hits)

    def num_blocks(self, config: KVCacheConfig) -> int:  # noqa: ARG002 - the answer of a layout
        """Return the number of blocks of all classes."""
        return self.space.num_blocks

    def pool(self, config: KVCacheConfig, journal: Journal, columns: Sequence[tuple[int, int]]) -> BlockPool:
        """Return a pool of ``space``. Only the decoder's tokens make events."""
        keeps = [group.spec.keeps for group in config.groups]
        return BlockPool(
            self.space.num_blocks,
            len(keeps),
            journal=journal,
            columns=columns,
            space=self.space,
            silent=[number for number, kept in enumerate(keeps) if kept in {Keeps.STATE, Keeps.RING, Keeps.ENCODER}],
        )


Layout = ReferenceLayout | NaturalLayout


def _never_hit(kind: GroupKind) -> Policy:
    """Return the policy of layers that no hit needs: encoder-only attention, empty rings, windows computed again."""
    spec, size = kind.inner, kind.block_size
    if isinstance(spec, SlidingWindowSpec):
        window = WindowSpan(spec.sliding_window, spec.extra_retained_tokens)
        return AttentionPolicy.replayed(size, window, whole_states((kind,)))
    return FixedPolicy(size, int(kind.keeps_ring), BlocklessHits(accepts=True))


def _span_of(spec: KVCacheSpec) -> Span:
    """Return which tokens attention layers of ``spec`` read. Raises UnsupportedModelError for other layers."""
    match spec:
        case FullAttentionSpec():
            return FullSpan()
        case ChunkedLocalAttentionSpec():
            return ChunkSpan(spec.attention_chunk_size)
        case _:
            raise UnsupportedModelError(
                f"{type(spec).__name__} has no cache policy: see hybridkv.specs for those that do"
            )


def _token_blocks(kinds: Sequence[GroupKind]) -> list[int]:
    return [kind.block_size for kind in kinds if kind.publishes and kind.keeps_tokens]


def _check_hash_block(number: int, kind: GroupKind, hash_block: int) -> None:
    if kind.block_size % hash_block:
        raise ConfigError(
            f"group {number} has blocks of {kind.block_size} tokens, no multiple of the hash block "
            f"{hash_block}: choose a hash block that divides every block size"
        )


def _lacks_hits(groups: Sequence[CacheGroup]) -> bool:
    """Return whether some token counts end no hit. With full attention alone, each published block ends one."""
    return any(not group.policy.hits.downward_closed for group in groups if group.kind.publishes)


def _tails_of(groups: Sequence[CacheGroup]) -> list[CacheGroup]:
    """Return the groups whose states are copied at the end of each prompt.

    If there are any, all groups index many partial blocks: each prompt adds one.
    """
    tails = [group for group in groups if isinstance(group.policy.hits, UnitStateHits)]
    for group in groups if tails else ():
        group.index.most_partial = MOST_PROMPT_ENDS
    return tails


def _hit_ends(options: CacheOptions, kinds: Sequence[GroupKind], unit: int) -> HitEnds:
    """Return where hits may end. unit: without ``hit_unit``, they are multiples of so many tokens."""
    if options.hit_unit is None:
        return HitEnds(unit)
    block = next(kind.block_size for kind in kinds if kind.publishes)  # all have one size
    return HitEnds(options.hit_unit, block, block if options.copied_tokens is None else options.copied_tokens)


def _check_hit_unit(unit: int, kinds: Sequence[GroupKind]) -> None:
    """Raise ConfigError unless hits of these groups may end at multiples of ``unit`` inside blocks.

    All blocks have one size, so that one chunk ends every block. Only full attention is shared in part here, and only
    states in columns bound hits to the unit.
    """
    shared = [kind for kind in kinds if kind.publishes]
    states = [kind for kind in shared if kind.keeps_state]
    sizes = {kind.block_size for kind in shared}
    full = all(kind.keeps_state or isinstance(kind.inner, FullAttentionSpec) for kind in shared)
    if not states or len(sizes) != 1 or not full or any(kind.drops for kind in kinds):
        raise ConfigError(
            f"hit_unit (--prefix-match-unit) {unit} needs full attention and recurrent states of mode align, with "
            "blocks of one size and without EAGLE: leave it out"
        )
    if unit % whole_states(kinds):
        raise ConfigError(
            f"hit_unit (--prefix-match-unit) {unit} ends inside a state of {whole_states(kinds)} tokens "
            "(tokens_per_state): choose a multiple"
        )
    if (size := sizes.pop()) % unit or any(kind.num_drafts for kind in states):
        raise ConfigError(
            f"hit_unit (--prefix-match-unit) {unit} must divide the block of {size} tokens, and recurrent states "
            "must have no blocks for drafts: choose a divisor, and leave drafts out"
        )


def _check_retention(retention: int | None, alignment: int) -> None:
    """Raise ConfigError for an interval that is no multiple of the common alignment."""
    if retention is not None and (retention < 0 or retention % alignment):
        raise ConfigError(
            f"retention must be None, 0 or a multiple of the common alignment of {alignment} tokens, got {retention}"
        )


class Managed(NamedTuple):
    """A config, the limits of its requests, and the options with placement and eviction filled in."""

    config: KVCacheConfig
    limits: RequestLimits
    options: CacheOptions


def managed(
    given: Plan | KVCacheConfig,
    options: CacheOptions,
    *,
    max_model_len: int | None,
    dcp_world_size: int | None,
    pcp_world_size: int | None,
) -> Managed:
    """Combine a plan or a config with the arguments of a manager; ``None`` leaves an argument open.

    Raises ConfigError if they contradict each other, or leave a necessary value open.
    """
    counts = {"max_model_len": max_model_len, "dcp_world_size": dcp_world_size, "pcp_world_size": pcp_world_size}
    asked = {name: integer(name, value, 1, MOST_COUNT) for name, value in counts.items() if value is not None}
    if isinstance(given, KVCacheConfig):
        if "max_model_len" not in asked:
            raise ConfigError("max_model_len is missing: a config does not contain it, so pass it, or the whole plan")
        ranks = {"dcp": asked.get("dcp_world_size", 1), "pcp": asked.get("pcp_world_size", 1)}
        return Managed(given, RequestLimits(asked["max_model_len"], **ranks), options)
    if not isinstance(given, Plan):
        raise ConfigError(f"kv_cache_config must be a Plan or a KVCacheConfig, got {shown(given)}")
    limits, kept, placement = given.limits, placement_of(given), options.placement
    planned = {"max_model_len": limits.max_model_len, "dcp_world_size": limits.dcp, "pcp_world_size": limits.pcp}
    for name, value in asked.items():
        if value != planned[name]:
            raise ConfigError(
                f"{name} {value} contradicts the plan, which was made for {planned[name]}: leave it out, or plan again"
            )
    if placement is not None and placement != kept:
        raise ConfigError(
            f"placement {placement.name} contradicts the plan, which was made with "
            f"{given.placement if kept is None else kept.name}: leave it out, or plan again"
        )
    eviction = options.eviction or eviction_of(given)
    return Managed(given.config, limits, replace(options, placement=kept, eviction=eviction))


Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CacheParts:
    """All parts of a manager.

    Attributes:
        hasher: ``None`` without caching.
        misses: ``None`` if misses are not explained.
        sink_blocks: int32 ids of attention sinks, by group.
    """

    layout: Layout
    hasher: Hasher | None
    pool: BlockPool
    groups: tuple[CacheGroup, ...]
    sink_blocks: tuple[Int32, ...]
    pins: Pins
    locks: Locks
    publisher: Publisher
    residents: Residents
    eviction_policy: EvictionPolicy
    transfers: TransferLog
    checkpoints: Checkpoints
    lookup: PrefixLookup
    misses: Misses | None
    times: BlockTimes | None
    loads: Loads
    planner: SlotPlanner
    slots: Slots
    fast_forward: FastForward


def assemble(
    config: KVCacheConfig,
    limits: RequestLimits,
    options: CacheOptions,
    *,
    enable_caching: bool,
    use_eagle: bool,
    enable_events: bool,
    hasher: Hasher | None,
) -> CacheParts:
    """Return the parts for ``config``. Raises ConfigError for options that cannot work, UnsupportedModelError."""
    layout = layout_of(config, options)
    kinds = kinds_of(config, layout, limits.cp, use_eagle=use_eagle)
    hash_block, found = layout.hash_block(kinds), None
    if enable_caching and can_resume(kinds):
        found = hasher or BlockHasher(hash_block)
        hash_block = found.block_size
    hasher = found
    alignment = layout.alignment(kinds)
    if isinstance(layout, ReferenceLayout) and layout.ranks:
        _refuse_dropped_states(layout.eviction, kinds)

    sizes = [config.block_bytes_of(number) for number in range(len(kinds))]
    most = options.remembered_losses
    times = BlockTimes(layout.num_blocks(config), options.clock) if options.block_times else None
    lost = LostKeys(most, sizes, times) if most else None
    queue = EventQueue(options.max_event_blocks, resume_points=config.slabs is not None, medium=options.medium)
    ranking = layout.eviction.ranking if found is not None and layout.ranks else None
    journal = Journal(
        [observer for observer in (lost, times) if observer is not None],
        options.clock,
        events=queue if enable_events else None,
        losses=lost is not None,
        times=times is not None,
        ranked=ranking is not None,
    )
    policies = layout.policies(kinds, hash_block)
    pool = layout.pool(config, journal, [(one.block_size, one.block_size // hash_block) for one in policies])
    groups = tuple(
        CacheGroup(number, kind, policy, index, hash_block)
        for number, (kind, policy, index) in enumerate(zip(kinds, policies, pool.indexes, strict=True))
    )
    sinks = tuple(pool.reserve(kind.sink_blocks, number) for number, kind in enumerate(kinds))
    if options.max_pinned_blocks > pool.num_usable:
        raise ConfigError(
            f"max_pinned_blocks is {options.max_pinned_blocks}, the pool has {pool.num_usable} blocks: lower it"
        )

    caching = hasher is not None
    pins, locks = Pins(pool, options.max_pinned_blocks), Locks(pool)
    holding_tokens = [group for group in groups if group.kind.publishes and group.kind.keeps_tokens]
    shared_in_part = holding_tokens if caching and layout.partial_block_hits else []
    retention = Retention(layout.retention, alignment, any(kind.drops for kind in kinds)) if caching else None
    whole = whole_states(kinds)
    publisher = Publisher(
        groups, pool, shared_in_part=shared_in_part, retention=retention, ends=_hit_ends(options, kinds, whole)
    )
    residents = Residents(groups, publisher, hasher=hasher, hash_block_size=hash_block, journal=journal)
    placement = layout.resume_points(kinds) if caching else NoStates()
    copied = [group for group in groups if isinstance(group.policy, FixedPolicy) and group.kind.publishes]
    stateful = copied if caching else []
    eviction_policy: EvictionPolicy = LeastRecentlyUsed(stateful, pool, placement)
    if ranking is not None and journal.blocks is not None and not isinstance(pool.space, FreeOrder):
        publishing = [group for group in groups if group.kind.publishes or group.kind.by_digest]
        sizes = [config.unit_bytes or 1] if config.slabs is None else [one.block_bytes for one in config.slabs.classes]
        blocks = PointBlocks(publishing, pool, pool.space, sizes, len(layout.shares.of))
        rankings = TenantRankings(ranking, layout.shares, config.arena_bytes, blocks.weights)
        eviction_policy = RankedResumePoints(
            pool,
            blocks=blocks,
            rankings=rankings,
            facts=journal.blocks,
            hash_block=hash_block,
            ends=_hit_ends(options, kinds, alignment),
        )
    transfers = TransferLog(
        groups,
        pool,
        publisher=publisher,
        pins=pins,
        eviction_policy=eviction_policy,
        kept=[] if options.log_resume_points else None,
    )
    checkpoints = Checkpoints(
        (*stateful, *(_tails_of(groups) if caching else ())),
        publisher=publisher,
        transfers=transfers,
        placement=placement,
        prefix_multiple=layout.eviction.prefix_multiple if placement.keeps_states and _lacks_hits(groups) else 0,
        eviction_policy=eviction_policy,
    )
    lookup = PrefixLookup(
        residents, pool, alignment=alignment, whole=whole, hasher=hasher, eviction_policy=eviction_policy
    )
    misses = None if lost is None else Misses(residents, lookup, lost=lost, journal=journal, hash_block=hash_block)
    # a load brings no rings, so it ends where all of them are empty
    loads = Loads(groups, locks, math.lcm(whole, *(kind.pools or 1 for kind in kinds if kind.keeps_ring)))
    planner = SlotPlanner(pool, residents, publisher=publisher, loads=loads, max_model_len=limits.max_model_len)
    slots = Slots(pool, residents, planner=planner, publisher=publisher, transfers=transfers, checkpoints=checkpoints)
    fast_forward = FastForward(
        pool, residents, slots=slots, publisher=publisher, transfers=transfers, checkpoints=checkpoints
    )
    return CacheParts(
        layout,
        hasher,
        pool,
        groups,
        sinks,
        pins,
        locks,
        publisher,
        residents,
        eviction_policy,
        transfers,
        checkpoints,
        lookup,
        misses,
        times,
        loads,
        planner,
        slots,
        fast_forward,
    )
