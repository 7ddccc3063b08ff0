"""What vLLM was started with, as far as its cache minds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What vLLM was started with, as far as its cache minds.

    max_in_flight_tokens: of all steps that may be scheduled and not settled. watermark: share of all blocks that stay
    free at an admission beside others. new_stats: an empty PrefixCacheStats of vLLM; None without statistics.
    """

    max_model_len: int
    max_in_flight_tokens: int
    hash_block_size: int
    enable_caching: bool
    use_eagle: bool
    enable_events: bool
    dcp_world_size: int = 1
    retention: int | None = None
    watermark: float = 0.0
    new_stats: Callable[[], Any] | None = None
