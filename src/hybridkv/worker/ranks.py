"""What tensor parallel ranks hold of a layer's page: shares of the heads and channels, or copies.

    whole part, 4 KV heads                 [ h0 | h1 | h2 | h3 ]
    2 ranks                                [ h0 | h1 ] [ h2 | h3 ]
    8 ranks: each head is copied           [ h0 ] [ h0 ] [ h1 ] [ h1 ] ..
    convolution of Mamba-2, 2 ranks        [ x0 x1 | B0 B1 | C0 C1 ] -> [ x0 | B0 | C0 ] [ x1 | B1 | C1 ]
    latent of MLA                          the same on every rank

The whole part is the canonical form: it does not know how many ranks there were. A *run* is a number of units next to
each other, such as heads, which are never cut. Ranks share a run evenly. If it has fewer units than there are ranks,
ranks next to each other hold copies of one. As in vLLM 0.33: ``get_num_kv_heads``, ``mamba_v2_sharded_weight_loader``.

A store keeps *shares*, which no rank divides: at most eight of the units of a run.

    8 KV heads, 8 shares                   [ h0 ] [ h1 ] [ h2 ] .. [ h7 ]     rank 0 of 2 writes and reads four of them
    4 KV heads, 8 ranks                    [ h0 ] [ h1 ] [ h2 ] [ h3 ]        two ranks read each, the first one writes
    a layer that each rank has whole       [ h0 ] [ h1 ] [ h2 ] [ h3 ]        all ranks read all, rank 0 writes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final, NamedTuple

import torch

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.specs import AttentionSpec, KVCacheSpec, MambaSpec
from hybridkv.worker.pages import as_bytes

MOST_SHARES: Final = 8
"""Shares of a run at most: the ranks of one machine. More would be shorter values, and more keys."""


class Run(NamedTuple):
    """Units next to each other along an axis.

    Attributes:
        units: how many.
        width: elements of each along the axis.
    """

    units: int
    width: int


@dataclass(frozen=True, slots=True)
class Split:
    """How ranks share a tensor.

    Attributes:
        axis: the axis along which they do; negative ones count from the end.
        runs: the runs along this axis, in order.
    """

    axis: int
    runs: tuple[Run, ...]

    @property
    def length(self) -> int:
        """Elements of the whole along the axis."""
        return sum(units * width for units, width in self.runs)

    def cut(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return what one rank holds, a new tensor. O(elements).

        Args:
            whole: the whole tensor.
            rank: number of the rank, from 0.
            ranks: how many there are.

        Raises:
            ConfigError: so many ranks cannot share it, or it has another length.
        """
        if whole.shape[self.axis] != self.length:
            raise ConfigError(f"a tensor of {tuple(whole.shape)} has no {self.length} elements on axis {self.axis}")
        pieces, start = [], 0
        for units, width in self.runs:
            first, count = _share(units, rank, ranks)
            pieces.append(as_bytes(whole).narrow(self.axis, start + first * width, count * width))
            start += units * width
        return torch.cat(pieces, self.axis).view(whole.dtype)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole of what all ranks hold. Of copies, the first one counts. O(elements).

        Args:
            parts: a tensor for each rank, in order: its share, or the whole one of each.

        Raises:
            ConfigError: so many ranks cannot share it, or a part has another length.
        """
        ranks = len(parts)
        if all(part.shape[self.axis] == self.length for part in parts):
            return parts[0]
        mine = sum(_share(units, 0, ranks)[1] * width for units, width in self.runs)
        if any(part.shape[self.axis] != mine for part in parts):
            raise ConfigError(f"parts of {ranks} ranks must have {mine} elements on axis {self.axis}")
        pieces, start = [], 0
        for units, width in self.runs:
            _, count = _share(units, 0, ranks)
            owners = parts[:: max(ranks // units, 1)]
            pieces += [as_bytes(part).narrow(self.axis, start, count * width) for part in owners]
            start += count * width
        return torch.cat(pieces, self.axis).view(parts[0].dtype)


def splits_of(
    spec: KVCacheSpec, shapes: Sequence[tuple[int, ...]], *, channels_first: bool = True
) -> tuple[Split, ...]:
    """Return how ranks share each part of a layer's page.

    Args:
        spec: the layer's spec in the whole model.
        shapes: the shapes of its parts in the whole model: of one token, or of a state.
        channels_first: whether states have transformers' layout (``models.states``), not vLLM's.

    Raises:
        UnsupportedModelError: the layer is of a kind that is not known to be shared, or its parts are unusual.
    """
    if isinstance(spec, AttentionSpec):
        heads = 1 if spec.is_latent else spec.num_kv_heads
        if all(shape[0] % heads == 0 for shape in shapes):
            return tuple(Split(-len(shape), (Run(heads, shape[0] // heads),)) for shape in shapes)
    if isinstance(spec, MambaSpec) and tuple(shapes) == spec.shapes:
        runs = _runs_of_state(spec, channels_first=channels_first)
        if runs is not None:
            axes = (-2 if channels_first else -1, *(-len(shape) for shape in shapes[1:]))
            return tuple(Split(axis, of) for axis, of in zip(axes, runs, strict=True))
    raise UnsupportedModelError(
        f"it is not known how tensor parallel ranks share {type(spec).__name__} with parts {list(shapes)}: use one rank"
    )


class Strip(NamedTuple):
    """Elements of one part of a layer's page that are next to each other along an axis on this rank."""

    layer: str
    part: int
    axis: int
    first: int
    length: int


class Share(NamedTuple):
    """What a store keeps under one key: strips of the pages of several layers.

    Attributes:
        number: its number among the shares of these layers, which does not depend on the ranks.
        strips: where it lies on this rank.
        is_own: whether this rank writes it. Another one does if that has the first copy.
    """

    number: int
    strips: tuple[Strip, ...]
    is_own: bool


def shares_of(
    splits: Mapping[str, Sequence[Split]], rank: int = 0, ranks: int = 1, whole: Collection[str] = ()
) -> tuple[tuple[Share, ...], int]:
    """Return the shares of the pages of layers that one rank holds, and how many all ranks hold together.

    Runs of equally many units, in all parts and layers, are cut alike, so they have shares in common. O(strips).

    Args:
        splits: how ranks share each part of a page, by layer.
        rank: number of the rank, from 0.
        ranks: how many there are.
        whole: layers that each rank has whole. Rank 0 writes them: other ranks may have rounded otherwise.

    Raises:
        ConfigError: so many ranks cannot share a run, or would have to divide a share; or a share would have layers
            that are whole and others that are cut.
    """
    runs = defaultdict[int, list[tuple[Strip, int]]](list)
    held_of = dict[int, tuple[int, int]]()
    for layer, parts in splits.items():
        for part, split in enumerate(parts):
            first = 0
            for units, width in split.runs:
                held = (0, units) if layer in whole else _share(units, rank, ranks)
                if held_of.setdefault(units, held) != held:
                    raise ConfigError(
                        f"a store cannot keep layer {layer!r} with others of {units} heads or channels, of which this "
                        "rank has another part: cut all layers with states, or none"
                    )
                runs[units].append((Strip(layer, part, split.axis, first, held[1] * width), width))
                first += held[1] * width
    shares, total = [], 0
    for units, strips_of in runs.items():
        count = units if units <= MOST_SHARES else gcd(units, MOST_SHARES)
        each = units // count
        first, mine = held_of[units]
        if first % each or mine % each:
            raise ConfigError(
                f"{ranks} ranks cannot share {units} heads or channels, which stores keep in {count} parts: use a "
                f"divisor of {count}"
            )
        is_own = rank == 0 if mine == units else rank % max(ranks // units, 1) == 0
        for number in range(mine // each):
            strips = [one._replace(first=one.first + number * each * w, length=each * w) for one, w in strips_of]
            shares.append(Share(total + first // each + number, tuple(strips), is_own))
        total += count
    return tuple(shares), total


def _runs_of_state(spec: MambaSpec, *, channels_first: bool) -> tuple[tuple[Run, ...], ...] | None:
    """Return the runs of the convolution's channels and of the other states; ``None`` for an unknown kind."""
    conv, *others = spec.shapes
    channels = conv[0] if channels_first else conv[-1]
    match spec.mamba_type, others:
        case "short_conv", []:
            return ((Run(channels, 1),),)
        case "mamba1", [(inner, _)] if inner == channels:
            return (Run(channels, 1),), (Run(inner, 1),)
        case "mamba2", [(heads, width, state)]:  # x of every head, B and C of every group
            groups, rest = divmod(channels - heads * width, 2 * state)
            of_group = Run(groups, state)
            return None if rest or groups < 1 else ((Run(heads, width), of_group, of_group), (Run(heads, 1),))
        case "gdn_attention" | "kda_attention", [(heads, *matrix)] if len(matrix) == 2:  # queries, keys, values
            key, value = matrix if channels_first else reversed(matrix)
            key_heads, rest = divmod(channels - heads * value, 2 * key)
            of_key = Run(key_heads, key)
            return None if rest or key_heads < 1 else ((of_key, of_key, Run(heads, value)), (Run(heads, 1),))
        case _:
            return None


def _share(units: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first unit of a rank and how many it holds."""
    if units % ranks and ranks % units:
        raise ConfigError(f"{ranks} ranks cannot share {units} heads or channels: use a divisor or a multiple of them")
    return rank * units // ranks, max(units // ranks, 1)
