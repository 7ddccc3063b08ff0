"""Recurrent layers: one state of fixed size instead of a row for every token."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final

from hybridkv.arguments import at_least, check_fields, each, integer, one_of
from hybridkv.errors import ConfigError
from hybridkv.specs.base import Keeps, KVCacheSpec, RequestLimits
from hybridkv.units import ceil_div, dtype_bytes, dtype_name

MAMBA_TYPES: Final = ("mamba1", "mamba2", "short_conv", "linear_attention", "gdn_attention", "kda_attention")
CACHE_MODES: Final = ("none", "align")


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A layer with one or more state tensors: Mamba, gated delta rule, KDA, short convolution.

    shapes, dtypes: of each state tensor, in the order in which they lie in a page.
    block_size: in ``align``, a state may be kept after every so many tokens; in ``none`` it bounds nothing.
    mamba_type: which recurrence, for the worker. num_speculative_blocks: states kept for drafted tokens.
    cache_mode: ``none``: one state, rewritten in place. ``align``: states are kept where chunks end.
    A state is whole on every context parallel rank.
    """

    keeps: ClassVar = Keeps.STATE

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mamba_type: str = "mamba2"
    num_speculative_blocks: int = 0
    cache_mode: str = "none"

    def __post_init__(self) -> None:
        super(MambaSpec, self).__post_init__()
        check_fields(self, each(each(integer)), "shapes")
        check_fields(self, each(lambda _, dtype: dtype_name(dtype)), "dtypes")
        check_fields(self, at_least(0), "num_speculative_blocks")
        check_fields(self, one_of(str), "mamba_type", "cache_mode")
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ConfigError(
                f"{len(self.shapes)} state shapes and {len(self.dtypes)} dtypes: give one dtype for each shape"
            )
        if any(size < 1 for shape in self.shapes for size in (len(shape), *shape)):
            raise ConfigError(f"state shapes must have sizes of at least 1, got {self.shapes}")
        for name, known in (("mamba_type", MAMBA_TYPES), ("cache_mode", CACHE_MODES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name} {getattr(self, name)!r}: use one of {', '.join(known)}")
        self._check_padding()

    @property
    def content_bytes(self) -> int:
        """Sum over the state tensors of ``prod(shape) * bytes of dtype``, whatever the block size."""
        return sum(prod(shape) * dtype_bytes(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def uniform_key(self) -> Hashable:
        """The states that a request holds; their sizes may differ."""
        return "mamba", self.num_speculative_blocks, self.cache_mode

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """``none``: the state and one a draft. ``align``: one more, that which the step reads, and checkpoints."""
        self._check_drafts(limits)
        if self.cache_mode == "none":
            return 1 + self.num_speculative_blocks
        return 2 + self.num_speculative_blocks + (limits.prefill_checkpoints if self.mamba_type == "mamba2" else 0)

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """``none``: as many as are held. ``align``: a column for every block of the request, and the drafts'."""
        self._check_drafts(limits)
        if self.cache_mode == "none":
            return 1 + self.num_speculative_blocks
        return ceil_div(limits.max_model_len, self.block_size) + self.num_speculative_blocks

    def _check_drafts(self, limits: RequestLimits) -> None:
        if limits.num_speculative_tokens > self.num_speculative_blocks:
            raise ConfigError(
                f"{limits.num_speculative_tokens} speculative tokens need as many speculative state blocks, "
                f"but the layer has {self.num_speculative_blocks}: read the model with num_speculative_tokens="
            )
