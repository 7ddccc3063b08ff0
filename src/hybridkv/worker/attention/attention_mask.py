"""Which tokens a query sees, by absolute position: the same whatever lies in which block, chunk or rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from hybridkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """What a query at position p sees, of a request's tokens.

    causal: those up to p; else all, with neither window nor chunk (cross attention). window: of those the last
    ``window``, p included. chunk: of those the ones from ``p // chunk * chunk`` on. first_tokens: so many at the
    beginning besides, whatever window and chunk say (StreamingLLM, arXiv 2309.17453).
    Raises ConfigError for sizes that cannot work.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    first_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name} must be at least 1 token, got {size}; None for none")
        if self.first_tokens < 0:
            raise ConfigError(f"first_tokens must not be negative, got {self.first_tokens}")
        if not self.causal and (self.window is not None or self.chunk is not None):
            raise ConfigError("a window or chunk ends at the query's own token: it needs causal=True")

    def first_seen(self, position: int) -> int:
        """The first token that the query at ``position`` sees, ``first_tokens`` aside; no later query sees more."""
        if not self.causal:
            return 0
        starts = (0 if self.window is None else position - self.window + 1, self._chunk_start(position))
        return max(0, *starts)

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool, whether queries at positions ``queries`` see the tokens at ``keys``, int64; shapes that broadcast."""
        if not self.causal:
            return keys >= 0
        near = keys <= queries
        if self.window is not None:
            near = near & (keys > queries - self.window)
        if self.chunk is not None:
            near = near & (keys >= torch.div(queries, self.chunk, rounding_mode="floor") * self.chunk)
        return near | ((keys < self.first_tokens) & (keys <= queries))

    def _chunk_start(self, position: int) -> int:
        return 0 if self.chunk is None else position // self.chunk * self.chunk


CAUSAL: Final = AttentionMask()
"""Every token up to the query's own."""
