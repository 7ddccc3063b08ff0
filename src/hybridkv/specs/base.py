"""What every spec answers: the bytes of a page, the most that one request needs, and who may share a block table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Final, Self

from hybridkv.arguments import at_least, check_fields, integer, or_none
from hybridkv.errors import ConfigError

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
        check_fields(self, at_least(1), "max_model_len", "dcp", "pcp")
        check_fields(self, at_least(0), "max_in_flight_tokens", "max_encoder_tokens")
        check_fields(self, at_least(0), "num_speculative_tokens", "prefill_checkpoints")

    @property
    def cp(self) -> int:
        """Context parallel ranks: a block covers ``block_size * cp`` tokens of a request."""
        return self.dcp * self.pcp


class Keeps(StrEnum):
    """What the bytes of a layer grow with.

    tokens: every token of a request. window: its last tokens. encoder: the encoder's input.
    state: nothing, a state has one size. nothing: no bytes are kept between steps.
    """

    TOKENS = "tokens"
    WINDOW = "window"
    ENCODER = "encoder"
    STATE = "state"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec(ABC):
    """What every layer has: a block size in tokens, and a page that may be padded.

    page_size_padded: bytes of the page where a layout wants more than the content takes; not less.
    """

    keeps: ClassVar[Keeps]

    block_size: int
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, at_least(1), "block_size")
        check_fields(self, or_none(integer), "page_size_padded")

    @property
    @abstractmethod
    def content_bytes(self) -> int:
        """Bytes that one block holds in this layer."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in this layer, padding included."""
        return self.content_bytes if self.page_size_padded is None else self.page_size_padded

    @abstractmethod
    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Most blocks that one request holds at a time."""

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        """Most bytes that one request needs in this layer."""
        return self.max_request_blocks(limits) * self.page_size_bytes

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """Columns of a request's row in the block table: null columns count, they keep their place."""
        return max(-(-limits.max_model_len // (self.block_size * limits.cp)), 1 + limits.num_speculative_tokens)

    def reserved_blocks(self, ranks: int) -> int:  # noqa: ARG002 - the answer of every spec
        """Blocks that belong to the layers, whoever runs, on ``ranks`` context parallel ranks."""
        return 0

    @property
    def mask(self) -> tuple[int | None, int | None]:
        """Beyond which window or chunk, in tokens, a query reads nothing, whatever is kept; at most one of the two."""
        return None, None

    def layer_spec(self, name: str) -> KVCacheSpec:  # noqa: ARG002 - specs that hold several layers tell them apart
        """What layer ``name`` keeps, where this is the spec of its group."""
        return self

    @property
    def uniform_key(self) -> Hashable | None:
        """Equal for layers that always hold the same token slots; None for a kind that nobody described."""
        return None

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for layers that share a block table; equal specs merge into a copy.

        Raises ConfigError when the specs differ in anything that matters.
        """
        if not specs:
            raise ConfigError("merge needs at least one spec")
        first = specs[0]
        if any(spec != first for spec in specs[1:]):
            raise ConfigError(f"layers of {type(first).__name__} differ and cannot share a block table")
        return replace(first)

    def _check_padding(self) -> None:
        """Raise ConfigError for a padded page smaller than what it holds; called once all fields are checked."""
        if self.page_size_padded is not None and self.page_size_padded < self.content_bytes:
            raise ConfigError(
                f"page_size_padded {self.page_size_padded} is smaller than the {self.content_bytes} bytes "
                f"of a page of {type(self).__name__}: raise it"
            )
