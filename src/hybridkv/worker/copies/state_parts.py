"""What a copy must know of the states in a block: which are windows over the last inputs, and where their columns are.

page of a block in one layer   [ conv state: shape ][ temporal state: shape ]   (KDA: three conv states, one temporal)
view of a state                [blocks, *shape], see storage.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybridkv.errors import ConfigError
from hybridkv.specs import MambaSpec
from hybridkv.worker.pages.storage import parts_of

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


def state_parts(spec: MambaSpec, columns_axis: int) -> tuple[StatePart, ...]:
    """The states of ``spec`` in the order in which they lie in a page.

    The last state is the temporal one and the others conv states; a short convolution has conv states only, linear
    attention temporal ones only. columns_axis: 0 for conv states as vLLM keeps them, 1 as transformers does.
    """
    states = parts_of(spec)
    temporal = {"short_conv": 0, "linear_attention": len(states)}.get(spec.mamba_type, 1)
    conv = len(states) - temporal
    return (
        *(StatePart(part.shape, part.dtype, "conv", columns_axis) for part in states[:conv]),
        *(StatePart(part.shape, part.dtype, "temporal") for part in states[conv:]),
    )
