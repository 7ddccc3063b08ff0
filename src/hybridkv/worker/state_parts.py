"""What a block of a recurrent layer holds: its states, one after the other.

page of a block in one layer   [ conv state: shape ][ temporal state: shape ]   (KDA: three conv states, one temporal)
view of a state                [blocks, *shape], from block to block block_stride_bytes apart
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybridkv.errors import ConfigError
from hybridkv.specs import MambaSpec
from hybridkv.units import dtype_name

Kind = Literal["conv", "temporal"]


@dataclass(frozen=True, slots=True)
class StatePart:
    """One state of a recurrent layer: ``shape`` in ``dtype``, the same bytes whatever the block's tokens.

    kind: "conv", the last inputs of a causal convolution, one column a token; "temporal", all that came before.
    columns_axis: of a conv state, which of its two dimensions are the columns: 0 for [columns, channels], 1 for
    [channels, columns]; None of a temporal state. Raises ConfigError for anything else.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind
    columns_axis: int | None = None

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"a state needs sizes of at least 1, got shape {self.shape}")
        if self.kind == "temporal":
            if self.columns_axis is not None:
                raise ConfigError("a temporal state has no columns: leave columns_axis out")
        elif self.kind != "conv":
            raise ConfigError(f"unknown kind of state {self.kind!r}: use conv or temporal")
        elif len(self.shape) != 2 or self.columns_axis not in {0, 1}:
            raise ConfigError(
                f"a conv state has columns and channels, and columns_axis 0 or 1 says which dimension the columns "
                f"are: got shape {self.shape}, columns_axis {self.columns_axis}"
            )

    @property
    def columns(self) -> int:
        """Columns of a conv state; 0 of a temporal one."""
        return 0 if self.columns_axis is None else self.shape[self.columns_axis]

    def block_shape(self, block_size: int) -> tuple[int, ...]:  # noqa: ARG002 - the answer of every part of a page
        """What one block holds: a state has one size, whatever ``block_size`` tokens it came from."""
        return self.shape


def state_parts(spec: MambaSpec, columns_axis: int) -> tuple[StatePart, ...]:
    """The states of ``spec`` in the order in which they lie in a page.

    The last state is the temporal one and the others conv states; a short convolution has conv states only, linear
    attention temporal ones only. columns_axis: 0 for conv states as vLLM keeps them, 1 as transformers does.
    """
    num_temporal = {"short_conv": 0, "linear_attention": len(spec.shapes)}.get(spec.mamba_type, 1)
    dtypes: list[torch.dtype] = [getattr(torch, dtype_name(dtype)) for dtype in spec.dtypes]
    states, first_temporal = list(zip(spec.shapes, dtypes, strict=True)), len(dtypes) - num_temporal
    conv = [StatePart(shape, dtype, "conv", columns_axis) for shape, dtype in states[:first_temporal]]
    return (*conv, *(StatePart(shape, dtype, "temporal") for shape, dtype in states[first_temporal:]))
