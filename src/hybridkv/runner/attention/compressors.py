"""Compressors of DeepSeek-V4: what they keep in pages, and how one request's tokens pass through them in a step.

A compressor pools the rows of each ``rate`` tokens into one state, which attention or an indexer reads. A row is what
its two projections return for a token, values and gates. Where groups overlap, a state also pools the group before:

    rows, in a window   | 4 5 6 7 | 8 9            rate 4, window 8, after 10 tokens
    states              |    b    | (open group)   after state a
    a step of 3 tokens    rows 10 11 12 are written, and rows 4 .. 11 go to the compressor
                          it returns b again, now without the group before, and c: c is written, and a b c are returned

So the compressor itself keeps nothing: the rows of the window say at every token how it goes on. A rejected draft
leaves rows and states that later tokens overwrite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hybridkv.models import Layer
from hybridkv.runner.attention.gather import GatherBatch, gather_batch, gathered
from hybridkv.runner.step_context import Place, on_device
from hybridkv.spec_fields import Feature
from hybridkv.step import Step
from hybridkv.units import ceil_div
from hybridkv.worker import AttentionMask, MultiGroupBlockTable


def place_of(layer: Layer) -> Place:
    """Return the compressor whose rows or states ``layer`` keeps."""
    return layer.index, "indexer" if "indexer" in layer.name.split(".") else "compressor"


def keeps_rows(layer: Layer) -> bool:
    """Return whether ``layer`` keeps the rows that a compressor pools."""
    return layer.pools > 0


def keeps_states(layer: Layer) -> bool:
    """Return whether ``layer`` keeps the states of a compressor."""
    return Feature.RATE in layer.spec.features


@dataclass(frozen=True, slots=True, eq=False)
class Compressor:
    """The groups and pages of one compressor.

    Attributes:
        rate: tokens of a state.
        window: tokens whose rows are kept: those of one group, or of two where groups overlap.
        groups: the groups of its rows and of its states.
        rows: [blocks, block_size, 1, 2 * width], values before gates.
        states: [blocks, states of a block, 1, width].
    """

    rate: int
    window: int
    groups: tuple[int, int]
    rows: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CompressorStep:
    """One request's tokens in a step, for one compressor.

    Attributes:
        compressor: what it keeps.
        batch: the reads and writes of its rows.
        blocks: the blocks of the request's states, int64[n].
        computed: tokens of the request before the step.
        end: tokens of the request after the step.
    """

    compressor: Compressor
    batch: GatherBatch
    blocks: torch.Tensor
    computed: int
    end: int

    def take(self, values: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Write the step's rows, and return the rows that the compressor pools. O(window + tokens).

        Args:
            values: [1, tokens, width].
            gates: [1, tokens, width].

        Returns:
            Values and gates of whole groups, none if no group ends in the step, and the position of the first.
        """
        kept, rate = self.compressor, self.compressor.rate
        kept.rows.index_put_(
            (self.batch.write_block, self.batch.write_offset), torch.cat((values, gates), dim=-1)[0].unsqueeze(1)
        )
        first, last = max(0, (self.computed // rate + 1) * rate - kept.window), self.end // rate * rate
        if self.end // rate == self.computed // rate:
            return values[:, :0], gates[:, :0], first
        rows = gathered(kept.rows, self.batch)[:, 0, : self.batch.segments[0].length]
        begin = self.end - rows.shape[1]
        values, gates = rows[:, first - begin : last - begin].chunk(2, dim=-1)
        return values, gates, first

    def keep(self, states: torch.Tensor) -> torch.Tensor:
        """Write the states of the groups that ended in the step, and return all of the request. O(states).

        Args:
            states: what the compressor made of the rows that it took, [1, groups, width].

        Returns:
            [1, states of the request, width].
        """
        pages, rate = self.compressor.states, self.compressor.rate
        before, after = self.computed // rate, self.end // rate
        at = torch.arange(before, after, device=pages.device)
        new = states[0, states.shape[1] - len(at) :].unsqueeze(1)
        pages.index_put_((self.blocks[at // pages.shape[1]], at % pages.shape[1]), new)
        return pages[self.blocks].flatten(0, 1)[:after, 0].unsqueeze(0)


def compressor_steps(
    step: Step, compressors: Mapping[Place, Compressor], tables: MultiGroupBlockTable, dtype: torch.dtype
) -> dict[Place, CompressorStep]:
    """Return the part of each compressor in a step of one row. O(window + tokens + states).

    Args:
        step: the step.
        compressors: the compressors of all layers.
        tables: the block tables, which have committed the step's cells and slots.
        dtype: dtype of the model.
    """
    if not compressors:
        return {}
    row, computed = step.rows.item(0), step.num_computed.item(0)
    end = computed + step.num_scheduled.item(0)
    batches, blocks = dict[int, GatherBatch](), dict[int, torch.Tensor]()
    for one in compressors.values():
        of_rows, of_states = one.groups
        if of_rows not in batches:
            sees = AttentionMask(window=one.window)
            batches[of_rows] = gather_batch(step, tables[of_rows], sees, dtype, whole=True)
        if of_states not in blocks:
            columns = ceil_div(end // one.rate, one.states.shape[1])
            ids = tables[of_states].get_numpy_array()[row, :columns].astype(np.int64)
            blocks[of_states] = on_device(ids, one.states.device)
    return {
        place: CompressorStep(one, batches[one.groups[0]], blocks[one.groups[1]], computed, end)
        for place, one in compressors.items()
    }
