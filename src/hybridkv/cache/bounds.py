"""What can be asked of a cache at all: facts of its groups, its layout and its size, which no step changes."""

from __future__ import annotations

import math

from hybridkv.arguments import instance, integer
from hybridkv.cache.assembly import CacheParts
from hybridkv.errors import ConfigError
from hybridkv.specs import Keeps, RequestLimits
from hybridkv.units import MOST_COUNT


class CacheBounds:
    """reads_encoder: some layer reads an encoder's output. drops_for_eagle: some group drops the last block of a hit.

    rewrites_states: running states are rewritten in place, so that a step that failed leaves them broken.
    shares_in_part: a branch can begin with blocks that its parent has filled in part.
    follows_vllm: block ids and steps are those of vLLM.
    keeps_ends: what a request computed can be hit to its last token, see KVCacheManager.keep_end.
    keeps_checkpoints: states are kept where the placement stops (Checkpoints.stops).
    state_alignment: tokens between the places where all states can be kept, and shared as they are; 0 where none are.
    evicts_in_order: blocks of one size go in the order of their last use, so that ``Miss.more_bytes`` is a bound.
    refuse_stranger: raises ConfigError or CacheError for a request that cannot be served here, see Residents.
    stops: token counts in start + 1 .. end at which states of a request should be kept, see Checkpoints.stops.
    usable_blocks: blocks, or slabs, that anybody can hold: without the null one and sinks. promised_blocks: those that
    requests can count on, what may be pinned left out.
    """

    def __init__(self, parts: CacheParts) -> None:
        groups, pool, layout = parts.groups, parts.pool, parts.layout
        kept = [one for one in groups if one.states is not None and one.kind.publishes and not one.policy.hits.copies]
        self.reads_encoder = any(group.kind.spec.keeps is Keeps.ENCODER for group in groups)
        self.drops_for_eagle = any(group.kind.drops for group in groups)
        self.rewrites_states = layout.rewrites_states
        self.shares_in_part = layout.shares_in_part
        self.follows_vllm = layout.follows_vllm
        self.keeps_ends = layout.keeps_ends
        self.keeps_checkpoints = bool(parts.checkpoints.groups)
        self.state_alignment = math.lcm(*(group.policy.block_size for group in kept)) if kept else 0
        self.usable_blocks = pool.num_usable
        self.promised_blocks = pool.num_usable - parts.pins.max_blocks
        self.evicts_in_order = layout.evicts_in_order
        self.stops = parts.checkpoints.stops
        self.refuse_stranger = parts.residents.refuse_stranger
        self._groups = tuple(groups)
        self._pool = pool

    def refuse_drafts(self, num_drafts: int) -> None:
        """ConfigError unless every recurrent group can keep the states of ``num_drafts`` drafts of a row."""
        drafts = integer("num_drafts", num_drafts, 0, MOST_COUNT)
        for group in self._groups if drafts else ():
            most = group.kind.num_drafts
            if most is None:
                continue
            if most < drafts:
                raise ConfigError(
                    f"num_speculative_tokens is {drafts}, but group {group.number} has {most} speculative state "
                    "blocks: read the model with num_speculative_tokens="
                )
            if group.kind.publishes and not group.policy.hits.copies and group.policy.block_size <= drafts:
                raise ConfigError(
                    f"num_speculative_tokens is {drafts}: states kept every {group.policy.block_size} tokens (group "
                    f"{group.number}) need fewer drafts than that"
                )

    def peak_blocks(
        self, limits: RequestLimits, max_in_flight: int, tokens: int | None = None, encoder_tokens: int | None = None
    ) -> int:
        """Return the most blocks, or slabs, that one request holds at once, steps in flight included.

        limits: bounds of the request. tokens, encoder_tokens: in place of those of ``limits``.
        """
        instance("limits", limits, RequestLimits)
        integer("max_in_flight", max_in_flight, 1, MOST_COUNT)
        tokens = limits.max_model_len if tokens is None else integer("tokens", tokens, 1, MOST_COUNT)
        encoder = limits.max_encoder_tokens if encoder_tokens is None else encoder_tokens
        return self._pool.units([group.peak_blocks(limits, max_in_flight, tokens, encoder) for group in self._groups])
