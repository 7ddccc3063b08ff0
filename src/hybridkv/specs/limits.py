"""What bounds the memory of one request: explicit numbers, never a server's config object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError
from hybridkv.frozen import check_fields

BATCHED_TOKENS: Final = 8192
"""Of the largest step, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What bounds the memory of one request.

    max_model_len: tokens, prompt and output together.
    max_in_flight_tokens: tokens of all steps in flight: max_batched_tokens of a step x steps.
    dcp, pcp: decode and prefill context parallel sizes; each rank keeps 1 / (dcp * pcp) of the tokens.
    max_encoder_tokens: of an encoder-decoder model, what its cross attention reads.
    num_speculative_tokens: drafted in one step; a recurrent layer needs a block for each.
    prefill_checkpoints: states that a Mamba-2 layer writes inside a step of its prompt, besides that which it reads and
    that which it ends with: 0 where prompts are split at what is kept, as here; vLLM's mixers write 1.
    """

    max_model_len: int
    max_in_flight_tokens: int = 0
    dcp: int = 1
    pcp: int = 1
    max_encoder_tokens: int = 0
    num_speculative_tokens: int = 0
    prefill_checkpoints: int = 0

    def __post_init__(self) -> None:
        check_fields(self, integer, *RequestLimits.__slots__)
        for name in ("max_model_len", "dcp", "pcp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_in_flight_tokens", "max_encoder_tokens", "num_speculative_tokens", "prefill_checkpoints"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def cp(self) -> int:
        """Context parallel ranks: a block covers ``block_size * cp`` tokens of a request."""
        return self.dcp * self.pcp
